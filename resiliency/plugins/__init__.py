# SPDX-License-Identifier: Apache-2.0
"""CheckpointIO classes for Lightning and NeMo trainers; import the module you need."""
