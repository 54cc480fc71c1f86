# SPDX-License-Identifier: Apache-2.0
"""The process that starts checkpoint agents for the ranks of a host, and the launcher's hold on it.

Nothing depends on it: without it, or after its death, ranks start their agents themselves.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from resiliency.launch import guardian
from resiliency.launch.protection import Protection
from resiliency.runtime import JOB_ENV, RUN_DIR_ENV, RunInfo
from resiliency.template.client import ForkedProcess

logger = logging.getLogger(__name__)

#: Beyond the time that the agents have: for the host itself.
_SLACK_S = 5.0
#: Libraries that follow OMP_NUM_THREADS unless these are set.
_MORE_THREADS = {"OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}


#: Starts a program in a session of its own: as `subprocess.Popen`, with env, stdin, stdout and pass_fds.
Start = Callable[..., "subprocess.Popen[bytes] | ForkedProcess"]


def start_host(
    address: str,
    lifeline_fd: int,
    *,
    stop_timeout: timedelta,
    environment: Mapping[str, str],
    start: Start | None = None,
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a process that starts checkpoint agents; it can be asked from now on.

    Args:
        address: for `AGENT_HOST_ENV` of who asks it.
        lifeline_fd: of a pipe.  At its end, or at SIGTERM, the agents and then the process end.
        stop_timeout: what agents get then to commit what is captured.
        environment: of the process and its agents.
        start: how; None: in an interpreter of its own.
    Raises:
        OSError: the address is taken, or no process can be started.
    """
    # Listening before the host runs: who asks early waits, instead of finding nobody.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + address)
        listener.listen(128)
        options = {
            "--listener-fd": listener.fileno(),
            "--lifeline-fd": lifeline_fd,
            "--stop-s": stop_timeout.total_seconds(),
        }
        # In a session of its own: a Ctrl-C is for the launcher, not for it.
        return (start or _start_cold)(
            [
                *(os.environ.get("PYTHON_EXEC", sys.executable), "-m", "resiliency.launch.agents.main"),
                *(str(word) for option in options.items() for word in option),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(listener.fileno(), lifeline_fd),
            env={
                **environment,
                # Agents own no GPU and compute nothing; a library's threads would be in the way of a fork.
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                **dict.fromkeys(_MORE_THREADS & environment.keys(), "1"),
            },
        )


def _start_cold(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, start_new_session=True, **options)


class AgentHost:
    """A child of the launcher, in a session of its own, that no restart of workers touches.

    Args:
        stop_timeout: what agents get at the end to commit what is captured.
    """

    def __init__(
        self, info: RunInfo, protection: Protection, *, stop_timeout: timedelta, start: Start
    ) -> None:
        #: For `AGENT_HOST_ENV` of the workers.
        self.address = f"resiliency-agent-host-{protection.id}"
        self._stop_s = stop_timeout.total_seconds()
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        identity = {JOB_ENV: info.job_name, RUN_DIR_ENV: info.run_dir}
        environment = {**protection.outer_environment(), **identity}
        try:
            self._process = start_host(
                self.address,
                protection.lifeline_fd,
                stop_timeout=stop_timeout,
                environment=environment,
                start=start,
            )
        except OSError as error:
            logger.warning("no checkpoint agents from the launcher, ranks start their own: %s", error)

    def end(self, at_once_fd: int | None = None) -> None:
        """Let the agents commit what is captured, and end; idempotent.

        Args:
            at_once_fd: readable when there is no more time.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        process.terminate()
        # Its agents are in its group, and may still commit when it was killed itself.
        if not guardian.wait_until_gone(guardian.group(process.pid), self._stop_s + _SLACK_S, at_once_fd):
            logger.warning("checkpoint agents are killed before they have committed all that is captured")
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def __enter__(self) -> AgentHost:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
