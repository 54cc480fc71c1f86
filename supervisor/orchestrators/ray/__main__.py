# SPDX-License-Identifier: Apache-2.0
"""``python3 -m supervisor.orchestrators.ray --stop DIR``: end a fleet on a Ray cluster."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from resiliency.errors import ConfigError
from supervisor.orchestrators.ray.machines import RayMachines
from supervisor.orchestrators.ray.order import namespace_of
from supervisor.orchestrators.wanted import restart_at_next_run


def main(argv: Sequence[str] | None = None) -> int:
    """Kill the actors of a fleet; what they have started ends with them."""
    parser = argparse.ArgumentParser(
        prog="python3 -m supervisor.orchestrators.ray",
        description="End all daemons, launchers and ranks of a fleet on a Ray cluster, and free its nodes.  "
        "End the supervisor first, which would else start hosts that it misses anew.",
    )
    parser.add_argument("--stop", metavar="DIR", type=Path, required=True, help="The fleet's --state-dir.")
    parser.add_argument(
        "--ray-address", metavar="HOST:PORT", default="auto", help="Of the cluster (%(default)s)."
    )
    args = parser.parse_args(argv)
    try:
        import ray
    except ModuleNotFoundError:
        text = "ray is not installed.  Install it with: pip install 'resiliency[supervisor,ray]'"
        print(text, file=sys.stderr)
        return 1
    if not args.stop.is_dir():
        print(f"--stop: no directory {args.stop}: give the fleet's --state-dir", file=sys.stderr)
        return 1
    try:
        ray.init(
            args.ray_address,
            namespace=namespace_of(str(args.stop.resolve())),
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except ConnectionError as error:
        print(f"the Ray cluster at {args.ray_address} cannot be reached: {error}", file=sys.stderr)
        return 1
    hosts = ray.util.list_named_actors()
    for host in hosts:
        ray.kill(ray.get_actor(host), no_restart=True)
    ray.shutdown()
    print(f"{len(hosts)} hosts ended")
    try:
        restart_at_next_run(args.stop / f"{RayMachines.name}.json")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
