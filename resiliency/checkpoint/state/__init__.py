# SPDX-License-Identifier: Apache-2.0
"""A nested state as values: its tree, its tensors, their layout, and the way back."""
