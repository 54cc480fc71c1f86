# SPDX-License-Identifier: Apache-2.0
"""GKE's multi-tier checkpointing: its replicator and its job description."""
