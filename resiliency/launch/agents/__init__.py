# SPDX-License-Identifier: Apache-2.0
"""The process that hosts checkpoint agents, so that they outlive the ranks."""
