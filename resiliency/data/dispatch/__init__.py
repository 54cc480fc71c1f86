# SPDX-License-Identifier: Apache-2.0
"""Ranges of data given to workers that need not march in step, each counted once."""
