# SPDX-License-Identifier: Apache-2.0
"""Storage: the few operations that a checkpoint needs, and large files in checksummed chunks."""
