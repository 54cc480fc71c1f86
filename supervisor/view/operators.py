# SPDX-License-Identifier: Apache-2.0
"""The command line for operators: ``python3 -m supervisor status``, ``cordon``, ``drain``, ``freeze``, ...

It knows no wire: `run` is given what connects to a controller.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from resiliency.errors import ConfigError, ResiliencyError
from resiliency.tasks import wait_for
from supervisor.flags import Parser
from supervisor.values import Request
from supervisor.view.status import (
    MOST_RECORDS,
    ActReply,
    ActRequest,
    Document,
    History,
    HistoryRequest,
    Status,
)
from supervisor.view.tables import history_text, status_text

PROGRAM = "python3 -m supervisor"
DEFAULT_CONTROLLER = "localhost:60062"
DEFAULT_TIMEOUT_S = 10.0
#: Beyond its deadline, for a client that does not keep it.
GRACE_S = 1.0
DONE, FAILED, REFUSED = 0, 1, 2
EPILOG = """\
examples:
  what holds now, and what the supervisor does about it:
    python3 -m supervisor status
  no job on host-7 any more, and its job goes on without it:
    python3 -m supervisor cordon host-7 --why "fan is loud"
    python3 -m supervisor drain host-7 --why "fan is replaced at noon"
  no action for any job during maintenance of the network:
    python3 -m supervisor freeze --why "switch 12 is replaced"
    python3 -m supervisor thaw

exit codes: 0 done; 1 the controller refused, or did not answer; 2 the command line is wrong."""

#: Command -> (what its help says, and whether it names a host).
_REQUESTS: dict[Request, tuple[str, bool]] = {
    Request.CORDON: ("Keep all jobs off a host.  A job that runs on it goes on.", True),
    Request.UNCORDON: ("Let jobs use a host again.", True),
    Request.DRAIN: (
        "Take a host out of its job, for a spare where there is one, and keep all jobs off it.",
        True,
    ),
    Request.FREEZE: ("Take no action for any job until a thaw.", False),
    Request.THAW: (
        "End a freeze; hosts that are silent count as lost from then on.  With --workload: forget the "
        "verdict that nothing more is done for this job.",
        False,
    ),
}
#: The first words that belong to this command line.
COMMANDS = ("status", "history", *(request.value for request in _REQUESTS))


class OperatorClient(Protocol):
    """A controller, as operators reach it.  Each call raises a ResiliencyError where it fails."""

    async def status(self, *, timeout_s: float) -> Status: ...

    async def act(self, request: ActRequest, *, timeout_s: float) -> ActReply: ...

    async def history(self, request: HistoryRequest, *, timeout_s: float) -> History: ...


#: Connects to the controller at HOST:PORT; the second argument says that TLS is not used.
Connect = Callable[[str, bool], AbstractAsyncContextManager[OperatorClient]]


def build_parser(env: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser of all commands; `env` has the controller's address."""
    controller = env.get("CONTROLLER_ADDRESS") or DEFAULT_CONTROLLER
    common = Parser(add_help=False, allow_abbrev=False)
    common.add_argument(
        "--controller",
        default=controller,
        metavar="HOST:PORT",
        help=f"Where the controller listens (CONTROLLER_ADDRESS, else {DEFAULT_CONTROLLER}).",
    )
    common.add_argument("--plaintext", action="store_true", help="No TLS.  For one machine and for tests.")
    common.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"Longest wait for an answer ({DEFAULT_TIMEOUT_S:g}).",
    )
    common.add_argument("--json", action="store_true", help="Print the whole document as JSON.")
    parser = Parser(
        prog=PROGRAM,
        description="Look at the fleet, and say what the supervisor is to do.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[common], allow_abbrev=False)

    status = add("status", "Print what holds now: jobs, incidents, commands, hosts that need a look.")
    status.add_argument("--hosts", action="store_true", help="List every host, also those that are well.")
    history = add("history", "Print records of the event log: what was seen, and what was decided and why.")
    history.add_argument(
        "--limit",
        type=int,
        default=100,
        metavar="N",
        help=f"The newest N records (100, at most {MOST_RECORDS}).",
    )
    history.add_argument(
        "--since", type=int, default=0, metavar="NUMBER", help="Only records behind this number."
    )
    for request, (text, of_host) in _REQUESTS.items():
        one = add(request.value, text)
        if of_host:
            one.add_argument("host", metavar="HOST", help="Name or id of the host.")
        if request is Request.THAW:
            one.add_argument("--workload", default="", metavar="JOB", help="Name of a job that was given up.")
        one.add_argument("--why", default="", metavar="TEXT", help="For the log and for the others on call.")
        one.add_argument("--by", default="", metavar="NAME", help="Who asks; default: the user's name.")
    return parser


def run(argv: Sequence[str], env: Mapping[str, str], connect: Connect) -> int:
    """Do what `argv` says and return the exit code; answers go to standard output, errors to the other."""
    try:
        args = build_parser(env).parse_args(argv)
        _check(args)
        text = asyncio.run(_ask(args, connect))
    except ConfigError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return REFUSED
    except ResiliencyError as error:
        print(f"{PROGRAM} {args.command}: {error}", file=sys.stderr)
        return FAILED
    except asyncio.TimeoutError:
        where = f"the controller at {args.controller}"
        print(f"{PROGRAM} {args.command}: {where} did not answer within {args.timeout:g} s.", file=sys.stderr)
        return FAILED
    print(text, end="" if text.endswith("\n") else "\n")
    return DONE


def _check(args: argparse.Namespace) -> None:
    if not 0 < args.timeout <= 3600:  # also refuses nan
        raise ConfigError(
            f"--timeout must be seconds above 0 and at most 3600, found {args.timeout:g}.", flag="--timeout"
        )
    if args.command == "history" and not 1 <= args.limit <= MOST_RECORDS:
        raise ConfigError(f"--limit must be 1 to {MOST_RECORDS}, found {args.limit}.", flag="--limit")
    if args.command == "history" and args.since < 0:
        raise ConfigError(f"--since must be 0 or more, found {args.since}.", flag="--since")


async def _ask(args: argparse.Namespace, connect: Connect) -> str:
    async with connect(args.controller, args.plaintext) as client:
        # The client has its own deadline; this one also holds where the connection is stuck.
        return await wait_for(_answer(args, client), args.timeout + GRACE_S)


async def _answer(args: argparse.Namespace, client: OperatorClient) -> str:
    document: Document
    if args.command == "status":
        document = status = await client.status(timeout_s=args.timeout)
        text = status_text(status, every_host=args.hosts)
    elif args.command == "history":
        document = history = await client.history(
            HistoryRequest(limit=args.limit, since=args.since), timeout_s=args.timeout
        )
        text = history_text(history)
    else:
        request = ActRequest(
            request=Request(args.command),
            by=args.by or _user(),
            host=getattr(args, "host", ""),
            workload=getattr(args, "workload", ""),
            why=args.why,
        )
        document = reply = await client.act(request, timeout_s=args.timeout)
        text = reply.text
    return json.dumps(document.to_dict(), indent=2) if args.json else text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "operator"
