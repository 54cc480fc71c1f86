# SPDX-License-Identifier: Apache-2.0
"""Kubernetes as the owner of hosts: JobSets of `jobset.x-k8s.io`, on GKE and elsewhere.

`orchestrator.GkeOrchestrator` is the seam; `rights.RIGHTS` is all that it may do at the API server.  Objects
are found by owner references and labels, never by parts of names.  Three things make an action one that can
be cut short anywhere and repeated: ids of commands on the object that they changed, marks of what was begun,
and whole JobSets in records before they are deleted (`records`).  `lease` is the single-writer lock.

Only `client` and what builds on it imports kubernetes_asyncio.
"""

from supervisor.orchestrators.gke.rights import RIGHTS, Right, Scope

__all__ = ["RIGHTS", "Right", "Scope"]
