# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes API server in memory, over real HTTP, with the few controllers that a JobSet needs.

`Cluster` is all of it.  Objects are plain JSON; a call gets faults that are values (`Fault`), and each call
is recorded with its verb and resource, so that a test can compare it with granted rights.
"""

from supervisor.testing.kubernetes.cluster import Cluster
from supervisor.testing.kubernetes.faults import Call, Fault, FaultKind

__all__ = ["Call", "Cluster", "Fault", "FaultKind"]
