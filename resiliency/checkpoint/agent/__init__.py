# SPDX-License-Identifier: Apache-2.0
"""The process that outlives the trainer: it collects the ranks' captures and writes each tier."""
