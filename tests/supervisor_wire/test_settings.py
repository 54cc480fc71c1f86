# SPDX-License-Identifier: Apache-2.0
"""Each variable and flag that cannot work is refused with a sentence, before anything listens."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import supervisor
from resiliency import daemon_link
from resiliency.errors import ConfigError
from resiliency.launch import cli
from supervisor import settings
from supervisor.daemon.settings import DaemonSettings
from supervisor.entry import other_distribution
from supervisor.settings import Settings

ROOT = Path(supervisor.__file__).parent.parent


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("PORT", "0", "PORT must be a whole number from 1 to 65535, found '0'."),
        ("PORT", "http", "PORT must be a whole number from 1 to 65535, found 'http'."),
        (
            "HOST_DAEMON_PORT",
            "70000",
            "HOST_DAEMON_PORT must be a whole number from 1 to 65535, found '70000'.",
        ),
        ("SENSOR_ADDRESS", "sensor", "SENSOR_ADDRESS must be HOST:PORT, found 'sensor'."),
        ("CONTROLLER_ADDRESS", "a b:1", "CONTROLLER_ADDRESS must be HOST:PORT, found 'a b:1'."),
        ("ACTUATOR_ADDRESS", "a:99999", "ACTUATOR_ADDRESS must be HOST:PORT, found 'a:99999'."),
        (
            "HEARTBEAT_POLLING_PERIOD_S",
            "nan",
            "HEARTBEAT_POLLING_PERIOD_S must be seconds above 0 and at most a day, found 'nan'.",
        ),
        (
            "HEARTBEAT_TIMEOUT_S",
            "-3",
            "HEARTBEAT_TIMEOUT_S must be seconds above 0 and at most a day, found '-3'.",
        ),
        (
            "HEARTBEAT_TIMEOUT_S",
            "15",
            "HEARTBEAT_TIMEOUT_S (15) must be larger than HEARTBEAT_POLLING_PERIOD_S (15): else a host that "
            "reports on time is lost.",
        ),
        ("WORKERS_PER_HOST", "0", "WORKERS_PER_HOST must be a whole number from 1 to 1024, found '0'."),
        (
            "JOB_NAMESPACE",
            "My_Jobs",
            "JOB_NAMESPACE must be a Kubernetes name (lower case letters, digits and dashes), "
            "found 'My_Jobs'.",
        ),
        (
            "WORKLOAD_NAMESPACE",
            "-a",
            "WORKLOAD_NAMESPACE must be a Kubernetes name (lower case letters, digits and dashes), "
            "found '-a'.",
        ),
        (
            "MAX_IN_JOB_RESTARTS",
            "-1",
            "MAX_IN_JOB_RESTARTS must be a whole number from 0 to 1000000, found '-1'.",
        ),
        (
            "MAX_WORKLOAD_RESTARTS",
            "1.5",
            "MAX_WORKLOAD_RESTARTS must be a whole number from 0 to 1000000, found '1.5'.",
        ),
        (
            "ENABLE_WORKLOAD_SCALING",
            "maybe",
            "ENABLE_WORKLOAD_SCALING must be 0, 1, true or false, found 'maybe'.",
        ),
        ("NUM_NODES_PER_DP", "0", "NUM_NODES_PER_DP must be a whole number from 1 to 1000000, found '0'."),
        ("NUM_DP_REPLICAS", "x", "NUM_DP_REPLICAS must be a whole number from 1 to 1000000, found 'x'."),
    ],
)
def test_a_variable_that_cannot_work_is_refused(variable: str, value: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)) as refused:
        Settings.from_env({variable: value})
    assert refused.value.fields["variable"] == variable


def test_each_variable_is_among_those_that_are_refused_when_they_cannot_work() -> None:
    (cases,) = [
        mark.args[1]
        for mark in test_a_variable_that_cannot_work_is_refused.pytestmark  # type: ignore[attr-defined]
        if mark.name == "parametrize"
    ]
    read = re.findall(r'env, "([A-Z_]+)"', Path(settings.__file__).read_text())
    assert {variable for variable, _, _ in cases} == set(read)


def test_a_port_for_launchers_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="GCP_HOST_DAEMON_PORT must be a whole number from 1 to 65535, found 'x'"
    ):
        parse(f"--state_dir={tmp_path}", GCP_HOST_DAEMON_PORT="x")


def test_variables_are_read() -> None:
    env = {
        "PORT": "7000",
        "SENSOR_ADDRESS": "sensor.fleet.svc:60061",
        "ACTUATOR_ADDRESS": "[::1]:60063",
        "HEARTBEAT_POLLING_PERIOD_S": "1",
        "HEARTBEAT_TIMEOUT_S": "2.5",
        "ENABLE_WORKLOAD_SCALING": "true",
    }
    settings = Settings.from_env(env)
    assert (settings.port, settings.sensor_address) == (7000, "sensor.fleet.svc:60061")
    assert (settings.heartbeat_polling_period_s, settings.heartbeat_timeout_s) == (1.0, 2.5)
    assert settings.scaling
    assert Settings.from_env({}) == Settings()


def parse(*argv: str, **env: str) -> DaemonSettings:
    return DaemonSettings.parse(argv, {"SUPERVISOR_PLAINTEXT": "1", "NODE_NAME": "host-1", **env})


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--port", "70000"], "--port must be 0 (any) to 65535, found 70000."),
        (["--launcher-port=-1"], "--launcher_port must be 0 (any) to 65535, found -1."),
        (["--port=61000"], "--port and --launcher_port must differ, both are 61000"),
        (["--workers-per-host", "0"], "--workers_per_host must be 1 to 1024, found 0."),
        (
            ["--workers_per_host", "many"],
            "argument --workers_per_host: invalid int value: 'many'.  See --help.",
        ),
        (["--address", "two words"], "--address must be 1 to 200 printable characters, found 'two words'."),
        (["--watchdogs", "xid", "gpu"], "--watchdogs must be of ecc, nic, nvlink, xid, found 'gpu'."),
        (
            ["--watchdog_interval_s=0"],
            "--watchdog_interval_s must be seconds above 0 and at most a day, found 0.",
        ),
        (
            ["--watchdog-notification-cooldown-s", "nan"],
            "--watchdog_notification_cooldown_s must be seconds above 0 and at most a day, found nan.",
        ),
        (
            ["--project=p"],
            "--project is refused: a host's place comes from its metadata server and node labels",
        ),
        (["--launcher_token_file=/nothing"], "--launcher_token_file: cannot read /nothing"),
        (["--state_dir=/proc/nothing"], "--state_dir: cannot write to /proc/nothing"),
        (["--colour"], "unrecognized arguments: --colour.  See --help."),
    ],
)
def test_a_flag_that_cannot_work_is_refused(argv: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse(f"--state_dir={tmp_path}", *argv)


def test_the_defaults_of_daemon_launcher_and_client_meet(tmp_path: Path) -> None:
    settings = parse(f"--state_dir={tmp_path}")
    assert (settings.port, settings.launcher_port) == (60060, 61000)
    assert cli.parse(["train.py"], {}).host_daemon_port == settings.launcher_port == daemon_link.DEFAULT_PORT
    assert settings.workers_per_host == 8


def test_watchdogs_are_named_with_spaces_or_commas_and_there_are_none_by_default(tmp_path: Path) -> None:
    assert parse(f"--state_dir={tmp_path}").watchdogs.names == ()
    for words in (["--watchdogs", "xid", "ecc"], ["--watchdogs=xid,ecc,xid"]):
        assert parse(f"--state_dir={tmp_path}", *words).watchdogs.names == ("xid", "ecc")
    timed = parse(
        f"--state_dir={tmp_path}", "--watchdog-interval-s=5", "--watchdog_notification_cooldown_s=7"
    )
    assert (timed.watchdogs.interval_s, timed.watchdogs.cooldown_s) == (5.0, 7.0)


def test_a_flag_wins_over_its_variable(tmp_path: Path) -> None:
    env = {"HOST_DAEMON_PORT": "7001", "GCP_HOST_DAEMON_PORT": "7002", "WORKERS_PER_HOST": "4"}
    settings = parse(f"--state-dir={tmp_path}", **env)
    assert (settings.port, settings.launcher_port, settings.workers_per_host) == (7001, 7002, 4)
    settings = parse(
        f"--state-dir={tmp_path}", "--port=1", "--launcher-port=2", "--workers-per-host=3", **env
    )
    assert (settings.port, settings.launcher_port, settings.workers_per_host) == (1, 2, 3)


class _Other(importlib.metadata.Distribution):
    def __init__(self, where: Path) -> None:
        self._where = where

    def read_text(self, filename: str) -> str | None:
        return "Metadata-Version: 2.1\nName: supervisor\nVersion: 4.2.5\n" if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return self._where / str(path)


def test_another_distribution_called_supervisor_is_named(tmp_path: Path) -> None:
    here = tmp_path / "clone" / "supervisor"
    told = other_distribution([_Other(tmp_path / "site")], here)
    assert told.startswith("supervisor 4.2.5, another distribution with the import name of this package,")
    assert str(tmp_path / "site" / "supervisor") in told
    assert str(here) in told
    with pytest.raises(ConfigError, match=r"supervisor 4\.2\.5, .* is installed over it in"):
        other_distribution([_Other(tmp_path / "clone")], here)


def test_the_program_runs_from_a_clone_and_from_anywhere(tmp_path: Path) -> None:
    """Also where another `supervisor` comes first on the path."""
    (tmp_path / "supervisor").mkdir()
    (tmp_path / "supervisor" / "__init__.py").write_text("raise RuntimeError('the other supervisor')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    env.pop("SUPERVISOR_PLAINTEXT", None)
    done = subprocess.run(
        [sys.executable, str(ROOT / "supervisor" / "host_daemon.py"), "--state-dir", str(tmp_path)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "host_daemon.py: error: SUPERVISOR_TLS_CA is not set: the supervisor speaks TLS." in done.stderr
    assert "Traceback" not in done.stderr
