# SPDX-License-Identifier: Apache-2.0
"""The host check: probes in processes of their own, links to other hosts, and when a launcher makes one.

What was measured means something only to the rules in `resiliency.launch.health`.
"""
