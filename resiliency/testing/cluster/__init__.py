# SPDX-License-Identifier: Apache-2.0
"""Hosts of one machine as groups of real processes, each with an agent, disks and a network."""
