# SPDX-License-Identifier: Apache-2.0
"""One host: an actor that starts, lists and signals the processes of its node.  Answers are plain values."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

from supervisor.orchestrators.processes import (
    Mark,
    Marked,
    has_ended,
    kill_all,
    marked_processes,
    signal_roots,
    start_process,
)
from supervisor.orchestrators.ray.keeper import KEEPER_S
from supervisor.watchdogs.watchdog import boot_id

#: The package on this node.
_SUPERVISOR = Path(__file__).parents[2]


class HostActor:
    """Args:
    fleet: marks the processes of this fleet.
    node: as Ray knows the node that this is on.
    address: at which other nodes reach it.
    """

    def __init__(self, fleet: str, host: str, node: str = "", address: str = "") -> None:
        if not node:
            import ray

            node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._fleet, self._host, self._node, self._address = fleet, host, node, address
        self._children: list[int] = []
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "supervisor.orchestrators.ray.keeper", fleet, host],
            stdin=subprocess.PIPE,
            cwd=_SUPERVISOR.parent,
            start_new_session=True,
        )
        # What stays is no child of this process.  It may have to wait for its predecessor.
        if code := self._keeper.wait(KEEPER_S):
            raise OSError(f"the keeper of {host} cannot be started (exit code {code})")

    def scan(self) -> dict[str, Any]:
        """Where this host is, and its living processes: number, number of the parent, mark."""
        self._children = [child for child in self._children if not has_ended(child)]
        return {
            "node": self._node,
            "address": self._address,
            "boot": boot_id(),
            "processes": [(one.pid, one.parent, one.mark.to_text()) for one in self._own()],
        }

    def start(self, argv: Sequence[str], mark: str, environment: Mapping[str, str], log: str) -> None:
        """Start a process; ``{python}`` and ``{supervisor}`` are the interpreter and the package here, in
        `argv` and `environment`.

        Raises:
            OSError: it cannot be started.
        """
        known = Mark.from_text(mark)
        assert known is not None

        def here(text: str) -> str:
            return text.replace("{python}", sys.executable).replace("{supervisor}", str(_SUPERVISOR))

        words, own = [here(word) for word in argv], {name: here(text) for name, text in environment.items()}
        child = start_process(words, mark=known, environment={**os.environ, **own}, log=Path(log))
        self._children.append(child)

    def signal_roots(self, pids: Sequence[int], number: int) -> None:
        signal_roots(self._own(pids), Signals(number))

    def kill(self, pids: Sequence[int]) -> None:
        kill_all(self._own(pids))

    def _own(self, pids: Sequence[int] | None = None) -> list[Marked]:
        """Processes of this host; also of several hosts on one machine each has its own."""
        mine = [one for one in marked_processes(self._fleet) if one.mark.host == self._host]
        return [one for one in mine if pids is None or one.pid in pids]
