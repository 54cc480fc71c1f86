# SPDX-License-Identifier: Apache-2.0
"""The sensor's logic: a failure detector without I/O.

`detector` takes messages and time; `conditions` are what was told and still holds, `silence` is too many
hosts at once, `jobs` looks at steps, `sightings` are the records of hosts and jobs.
"""

from supervisor.detection.detector import Detector
from supervisor.detection.sightings import HostSight, Output, Poll, Probe

__all__ = ["Detector", "HostSight", "Output", "Poll", "Probe"]
