# SPDX-License-Identifier: Apache-2.0
"""The host check as a command: ``python3 -m resiliency.launch.health check``."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from resiliency.errors import ConfigError
from resiliency.launch.cli import RefusingParser
from resiliency.launch.host_check.check import (
    EXIT_CODES,
    HostReport,
    as_json,
    report_alone,
    report_with_others,
)
from resiliency.launch.host_check.exchange import Exchange
from resiliency.launch.host_check.probes import HostProbes
from resiliency.runtime import RunInfo, interface_towards

REFUSED = 2
PROGRAM = "python3 -m resiliency.launch.health"
DESCRIPTION = """\
Check this host in seconds: its cores, GPUs, memory, shared memory and disk; with --precheck 2
also the links to other hosts, which run the same command."""
EPILOG = """\
examples:
  this host alone:
    python3 -m resiliency.launch.health check --disk /scratch

  four hosts and their links; run on each, with its own --node-rank from 0 to 3:
    python3 -m resiliency.launch.health check --precheck 2 --nnodes 4 --node-rank 0 \\
        --rdzv-endpoint host1:29410

exit codes: 0 this host is ok; 2 bad flags, nothing was checked; 3 faulty; 4 slow; 5 undecided: a probe
measured nothing, one of several hosts is broken, or there are too few to compare with."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of this program's flags."""
    parser = RefusingParser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=["check"], help="Check this host now.")
    parser.add_argument(
        "--precheck", type=int, choices=[0, 1, 2], default=1,
        help="0 nothing, 1 this host alone (default), 2 also against other hosts, and the links to them.",
    )  # fmt: skip
    parser.add_argument(
        "--check-timeout-s", type=float, default=60.0, metavar="SECONDS",
        help="Longest time for the probes, and again for the comparison with other hosts (60).",
    )  # fmt: skip
    parser.add_argument(
        "--disk", type=Path, default=Path(), metavar="DIR",
        help="Where the disk probe makes its file, which has no name; default: the working directory.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="Hosts, for --precheck 2.")
    parser.add_argument("--node-rank", type=int, default=0, metavar="RANK", help="Number of this host.")
    parser.add_argument(
        "--rdzv-endpoint", default="", metavar="HOST:PORT",
        help="Address of host 0, at which it serves the store of this check.",
    )  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Check this host, print the report and return the exit code."""
    try:
        args = build_parser().parse_args(argv)
        _check_flags(args)
        report = _check(args)
    except ConfigError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return REFUSED
    print(as_json(report) if args.json else report.text())
    return EXIT_CODES[report.health]


def _check_flags(args: argparse.Namespace) -> None:
    if args.check_timeout_s <= 0:
        raise ConfigError(
            f"--check-timeout-s must be above 0, found {args.check_timeout_s:g}.", flag="--check-timeout-s"
        )
    if not args.disk.is_dir():
        raise ConfigError(f"--disk must be a directory, found {str(args.disk)!r}.", flag="--disk")
    if args.precheck < 2:
        return
    if args.nnodes < 2 or not 0 <= args.node_rank < args.nnodes:
        raise ConfigError(
            f"--precheck 2 needs --nnodes of 2 or more and --node-rank below it, found {args.nnodes} and "
            f"{args.node_rank}.",
            flag="--nnodes",
        )
    if not re.fullmatch(r"[^\s:]+:\d+", args.rdzv_endpoint):
        raise ConfigError(
            f"--precheck 2 needs --rdzv-endpoint HOST:PORT, found {args.rdzv_endpoint!r}.",
            flag="--rdzv-endpoint",
        )


def _check(args: argparse.Namespace) -> HostReport:
    host = RunInfo.from_env({}).host
    probes = HostProbes(host=host, disk=args.disk)
    report = report_alone(host, probes.run(args.check_timeout_s) if args.precheck else [])
    if args.precheck < 2:
        return report
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    name, _, port = args.rdzv_endpoint.partition(":")
    serves = args.node_rank == 0
    try:
        store = TCPStore(
            name,
            int(port),
            is_master=serves,
            wait_for_workers=False,
            timeout=timedelta(seconds=args.check_timeout_s),
        )
    except RuntimeError as error:
        raise ConfigError(
            f"the hosts cannot meet at {args.rdzv_endpoint}: {str(error).partition(chr(10))[0]}",
            flag="--rdzv-endpoint",
        ) from error
    # Host 0 has just begun to serve the store: nothing of another check is in it.
    exchange = Exchange(store, check="command", rank=args.node_rank, hosts=args.nnodes)
    report = report_with_others(
        exchange, report, address=interface_towards(name), links=True, timeout_s=args.check_timeout_s
    )
    exchange.tell(f"done/{args.node_rank}", True)
    deadline = time.monotonic() + args.check_timeout_s
    for rank in range(args.nnodes if serves else 0):  # the store ends with host 0
        exchange.try_ask(f"done/{rank}", deadline - time.monotonic())
    return report


if __name__ == "__main__":
    sys.exit(main())
