# SPDX-License-Identifier: Apache-2.0
"""The client of programs that bring their own launcher: each rank reports for itself.

A job under `launcher.py --use-supervisor` needs none of this: its launcher reports.  The client imports
neither gRPC nor torch, returns at once from every call, and survives a daemon that is missing, dead or
stopped.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Mapping

from resiliency.daemon_link import DEFAULT_PORT, PORT_ENV, TOKEN_ENV, DaemonLink
from resiliency.errors import ConfigError
from resiliency.runtime import awake_s
from supervisor.values import DeviceState, WorkloadInfo

__all__ = ["DeviceState", "GoogleCloudResiliencyClient"]


class GoogleCloudResiliencyClient:
    """Reports one rank to the host daemon; a context manager.

    A program that ends without `close` counts as silent, and so as lost after HEARTBEAT_TIMEOUT_S.

    Args:
        port: kept for programs that were written for the predecessor, where the daemon called back; nothing
        listens
            there now.
        host_port: of the daemon; default: GCP_HOST_DAEMON_PORT, else 61000.
        local_rank, global_rank: of this process; default: LOCAL_RANK and RANK.
        workload_name: at the orchestrator; the same in all ranks.
        job_name, container_name, namespace: where the orchestrator finds the workload.
    Raises:
        ConfigError: an argument cannot work.
    """

    def __init__(
        self,
        port: int = 0,
        host_port: int | None = None,
        local_rank: int | None = None,
        global_rank: int | None = None,
        workload_name: str = "",
        *,
        job_name: str = "",
        container_name: str = "",
        namespace: str = "",
    ) -> None:
        _check_port("port", port, least=0)
        self.host_port = _default_port() if host_port is None else host_port
        _check_port("host_port", self.host_port, least=1)
        self._local_rank = _rank("local_rank", local_rank, "LOCAL_RANK")
        self._global_rank = _rank("global_rank", global_rank, "RANK")
        workload = WorkloadInfo(
            workload=workload_name, job=job_name, container=container_name, namespace=namespace
        )
        self._attempt = _rank("TORCHELASTIC_RESTART_COUNT", None, "TORCHELASTIC_RESTART_COUNT", default=0)
        self._lock = threading.Lock()
        self._state = DeviceState.RUNNING
        self._heartbeat: float | None = None
        self._step: tuple[int, float] | None = None
        self._link = DaemonLink(
            port=self.host_port,
            hello={"kind": "worker", "key": uuid.uuid4().hex, "workload": workload.to_dict()},
            make_report=self._make_report,
            token_file=os.environ.get(TOKEN_ENV, ""),
        )

    @property
    def connected(self) -> bool:
        """Whether a daemon listens now; nothing depends on it."""
        return self._link.connected

    def update_state(self, state: DeviceState) -> None:
        """Say what this rank is: RUNNING until then.  Counts as a heartbeat."""
        with self._lock:
            self._state = DeviceState(state)
            self._heartbeat = awake_s()
        self._link.report_soon()

    def send_heartbeat(self, step: int | None = None) -> None:
        """Say that this rank lives, and which step it has finished last."""
        if step is not None and step < 0:
            raise ConfigError(f"step must be 0 or more, found {step}.", step=step)
        with self._lock:
            self._heartbeat = awake_s()
            if step is not None:
                self._step = (step, self._heartbeat)
        # The link's next periodic report carries it: a heartbeat costs no wake-up.

    def close(self) -> None:
        """Send the last state, if the daemon takes it within a second; idempotent."""
        self._link.close()

    def __enter__(self) -> GoogleCloudResiliencyClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _make_report(self) -> Mapping[str, object]:
        with self._lock:
            state, heartbeat, step = self._state, self._heartbeat, self._step
        now = awake_s()
        worker: dict[str, object] = {
            "local_rank": self._local_rank,
            "global_rank": self._global_rank,
            "state": state.value,
        }
        if heartbeat is not None:
            worker["heartbeat_age_s"] = max(now - heartbeat, 0.0)
        if step is not None:
            worker["step"], worker["step_age_s"] = step[0], max(now - step[1], 0.0)
        return {"attempt": self._attempt, "workers": [worker]}


def _default_port() -> int:
    text = os.environ.get(PORT_ENV) or str(DEFAULT_PORT)
    if not text.isdecimal():
        raise ConfigError(f"{PORT_ENV} must be 1 to 65535, found {text!r}.", variable=PORT_ENV)
    return int(text)


def _check_port(name: str, port: int, *, least: int) -> None:
    if not least <= port <= 65535:
        raise ConfigError(f"{name} must be {least} to 65535, found {port}.", argument=name)


def _rank(name: str, given: int | None, variable: str, *, default: int | None = None) -> int:
    text = os.environ.get(variable, "") if given is None else str(given)
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise ConfigError(
            f"{name} must be 0 or more, found {text!r}.",
            hint=f"Give it, or let the launcher set {variable}.",
            argument=name,
        )
    return int(text)
