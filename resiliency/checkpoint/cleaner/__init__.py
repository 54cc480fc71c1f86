# SPDX-License-Identifier: Apache-2.0
"""Keeps the directories of checkpoints clean, as a process beside the job on each host."""
