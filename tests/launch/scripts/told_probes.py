# SPDX-License-Identifier: Apache-2.0
"""The launcher, with probes that find what HOST_IS says: ok, slow (half the rate) or flipped (one bit).

What a real probe finds on a slow or broken host is tested in `tests.launch.health.test_check`.
"""

import json
import os
import sys
from functools import partial


def main() -> int:
    from resiliency.launch.host_check import job_check, probes
    from resiliency.launch.main import main as launcher

    command = (sys.executable, "-S", "-E", __file__, "--probe")
    job_check.HostProbes = partial(probes.HostProbes, command=command)  # type: ignore[assignment, misc]
    return launcher()


def probe(name: str) -> int:
    host_is = os.environ["HOST_IS"]
    found = {"value": 50.0 if host_is == "slow" else 100.0}
    if name == "compute":
        found |= {"platform": "p", "digest": "0b0" if host_is == "flipped" else "0b1"}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(probe(sys.argv[2]) if sys.argv[1] == "--probe" else main())
