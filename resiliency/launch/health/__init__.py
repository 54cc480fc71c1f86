# SPDX-License-Identifier: Apache-2.0
"""Verdicts on ranks and hosts: pure rules, which the supervisor uses too."""
