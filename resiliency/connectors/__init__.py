# SPDX-License-Identifier: Apache-2.0
"""Replacements for Lightning's trainer connectors; import the module you need."""
