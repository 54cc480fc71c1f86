# SPDX-License-Identifier: Apache-2.0
"""Ranks that are told to end agree on one step at which all stop."""
