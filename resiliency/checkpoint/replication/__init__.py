# SPDX-License-Identifier: Apache-2.0
"""Agent to agent: copies of this host's checkpoints on other hosts, and when the old ones may go.

Nothing here runs in a training process or needs torch.  `placement` decides which host keeps whose
copies, and is a pure function, so that all agents decide alike without asking each other.
"""
