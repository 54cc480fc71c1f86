# SPDX-License-Identifier: Apache-2.0
"""What a launcher's diagnosis asks for: the supervisor replaces a host that the launcher can only restart.

The words are the launcher's own, of `resiliency.launch.health`, which holds values and rules alone.
"""

from __future__ import annotations

from resiliency.launch.health.causes import Advice, Cause, Confidence

#: The fault is elsewhere, so that nothing is said against the host that reports it.
ECHOES = frozenset({Cause.PEER_LOST, Cause.HOST_LOST, Cause.PREEMPTED})
#: Only a check that has tried the GPUs can disprove these.
OF_GPU = frozenset({Cause.GPU_FAULT, Cause.GPU_MISSING, Cause.ILLEGAL_ACCESS, Cause.CUDA_ERROR})


def is_against_host(cause: Cause, advice: Advice, confidence: Confidence) -> bool:
    """Whether the host is to be replaced.  A guess replaces none, and an echo is no word on its own host."""
    return advice is Advice.REPLACE_HOST and confidence is not Confidence.LOW and cause not in ECHOES
