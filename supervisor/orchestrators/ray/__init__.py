# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster as the owner of hosts: each host is an actor that holds the resources of a node.

`machines.RayMachines` is what `wanted` asks; it speaks to `bridge`, a process of its own and the only client
of Ray, because Ray ends its clients where its head node stays away.  `actor` runs on the nodes; what it has
started ends with it (`keeper`).

Only `bridge` imports ray, and the workers of Ray that it makes.
"""
