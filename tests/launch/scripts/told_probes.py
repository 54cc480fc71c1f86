# SPDX-License-Identifier: Apache-2.0
"""The launcher, with probes that find what HOST_IS says.

ok, slow (half the rate), flipped (a bit on one core), other (a result of its own each time) or busy (no end).
An ok host is flipped as soon as the file BREAKS_WITH exists.  Real probes on slow and broken hosts are tested
in `tests.launch.health.test_check`.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path


def main() -> int:
    from resiliency.launch.host_check import job_check, probes
    from resiliency.launch.main import main as launcher

    command = (sys.executable, "-S", "-E", __file__, "--probe")
    job_check.HostProbes = partial(probes.HostProbes, command=command)  # type: ignore[assignment, misc]
    return launcher()


def probe(name: str, directory: str) -> int:
    host_is = os.environ["HOST_IS"]
    if host_is == "busy":
        Path(directory, "probed").touch()
        signal.pause()
    found: dict[str, object] = {"value": 50.0 if host_is == "slow" else 100.0}
    if name == "compute":
        found |= {"platform": "p", "digest": "0b0" if host_is == "other" else "0b1"}
        if host_is == "flipped" or Path(os.environ.get("BREAKS_WITH", "/none")).exists():
            found = {"error": "results of cores 3 differ from that of 7 others"}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(probe(*sys.argv[2:]) if sys.argv[1] == "--probe" else main())
