# SPDX-License-Identifier: Apache-2.0
"""The commit: its protocol, its steps on a storage, and which checkpoints may go afterwards."""
