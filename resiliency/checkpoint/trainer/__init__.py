# SPDX-License-Identifier: Apache-2.0
"""The training process: when to save, the save itself, and its outcome."""
