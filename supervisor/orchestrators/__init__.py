# SPDX-License-Identifier: Apache-2.0
"""What owns the hosts, behind the seam of `supervisor.orchestrator`: none, or processes of one machine."""
