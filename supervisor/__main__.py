# SPDX-License-Identifier: Apache-2.0
"""``python3 -m supervisor``: the command line of operators, and all parts in one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from supervisor.entry import REFUSED
from supervisor.program import operate_or_explain, run_or_explain
from supervisor.view.operators import COMMANDS, EPILOG

_ALL = ("sensor", "controller", "actuator")
_HELP = f"""\
usage: python3 -m supervisor COMMAND [FLAGS]
       python3 -m supervisor --all-in-one [FLAGS]

  python3 -m supervisor status --help          what holds now
  python3 -m supervisor history --help         what was seen, and what was decided and why
  python3 -m supervisor cordon --help          one request; also uncordon, drain, freeze and thaw

  python3 -m supervisor --all-in-one --help    sensor, controller and actuator in one process
  python3 -m supervisor.sensor --help          the sensor alone
  python3 -m supervisor.controller --help      the controller alone
  python3 -m supervisor.actuator --help        the actuator alone
  python3 -m supervisor.host_daemon --help     on each training host

docs/supervisor.md says how they are put together.

{EPILOG}"""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return operate_or_explain(words)
    # One machine is the default: flags alone mean all in one.
    asked = [word for word in words if word.replace("_", "-") == "--all-in-one"]
    if not asked and (not words or words in (["--help"], ["-h"]) or not words[0].startswith("-")):
        wrong = bool(words) and words[0] not in ("--help", "-h")
        if wrong:
            print(f"python3 -m supervisor: error: it has no {words[0]!r}.", file=sys.stderr)
        print(_HELP, file=sys.stderr if wrong else sys.stdout)
        return REFUSED if wrong or not words else 0
    return run_or_explain(_ALL, [word for word in words if word not in asked])


if __name__ == "__main__":
    sys.exit(main())
