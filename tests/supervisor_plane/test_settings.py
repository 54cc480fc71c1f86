# SPDX-License-Identifier: Apache-2.0
"""Command lines of the parts: each refusal says which flag or variable and why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from resiliency.errors import ConfigError
from supervisor.daemon.settings import DaemonSettings
from supervisor.decision.controller import BaseController
from supervisor.parts.sensor import with_defaults
from supervisor.parts.settings import ALL, PartSettings
from supervisor.policy.thresholds import Thresholds, flag
from supervisor.values import WorkloadInfo
from tests.supervisor_plane.plane import ROOT

#: Files that can be read; what is in them is looked at when a server starts.
TLS = {f"SUPERVISOR_TLS_{name}": __file__ for name in ("CA", "CERT", "KEY")}
DOCS = (ROOT / "docs" / "supervisor.md").read_text()


class OtherPolicy(BaseController):
    pass


def parse(*argv: str, parts: tuple[str, ...] = ALL, **env: str) -> PartSettings:
    return PartSettings.parse(parts, argv, {"SUPERVISOR_PLAINTEXT": "1", **env})


@pytest.mark.parametrize("name", [field.name for field in fields(Thresholds)])
def test_each_threshold_is_a_flag_with_either_spelling_and_has_a_row_in_the_docs(
    name: str, tmp_path: Path
) -> None:
    default = getattr(Thresholds(), name)
    other = 0.5 if name == "silence_share" else default + 60
    dashes = flag(name)
    for spelled in (dashes, "--" + name):
        settings = parse(f"--state-dir={tmp_path}", f"{spelled}={other}")
        assert getattr(settings.thresholds, name) == other
    assert getattr(parse(f"--state-dir={tmp_path}").thresholds, name) == default
    row = next((line for line in DOCS.splitlines() if line.startswith(f"| `{dashes}` |")), "")
    assert row.split("|")[2].strip() == f"{default:,g}".replace(",", "")


@pytest.mark.parametrize(
    ("argv", "env", "sentence"),
    [
        (["--tick-s=0"], {}, "--tick-s must be more than 0, found 0.0."),
        (["--silence-share=1"], {}, "--silence-share must be below 1, found 1.0: a share of all hosts."),
        (["--max-cordons=x"], {}, "argument --max-cordons: invalid int value: 'x'.  See --help."),
        (
            ["--heartbeat-timeout-s=10"],
            {},
            "--heartbeat-timeout-s (10) must be larger than HEARTBEAT_POLLING_PERIOD_S (15)",
        ),
        (["--watchdogs=xid"], {}, "--watchdogs is refused: watchdogs run in the host daemon.  Leave it out."),
        (
            ["--watchdog_interval_s=1"],
            {},
            "--watchdog-interval-s is refused: watchdogs run in the host daemon.",
        ),
        (
            ["--watchdog_notification_cooldown_s=1"],
            {},
            "--watchdog-notification-cooldown-s is refused: watchdogs run in the host daemon.",
        ),
        (
            ["--enable_standalone_mode"],
            {},
            "--enable-standalone-mode is refused: host daemons learn the jobs of their hosts.",
        ),
        (
            ["--enable-topology-aware-scheduling"],
            {},
            "--enable-topology-aware-scheduling is refused: host daemons learn the places of their hosts.",
        ),
        (["--project=p"], {}, "--project is refused: a host's place comes from"),
        (["--orchestrator=local"], {}, "--job-file and --orchestrator local or ray go together"),
        (["--orchestrator=ray"], {}, "--job-file and --orchestrator local or ray go together"),
        (["--job-file=x"], {}, "--job-file and --orchestrator local or ray go together"),
        (["--orchestrator=slurm"], {}, "invalid choice: 'slurm'"),
        (
            ["--orchestrator=gke", "--job-file=x"],
            {},
            "--job-file and --orchestrator local or ray go together",
        ),
        (
            ["--policy=json"],
            {},
            "--policy must be MODULE:CLASS of a subclass of BaseController, found 'json'.",
        ),
        (["--policy=json:dumps"], {}, "--policy must be MODULE:CLASS of a subclass of BaseController"),
        (["--policy=no_such:Thing"], {}, "--policy: no_such cannot be imported: No module named 'no_such'."),
        (["--state-dir=/proc/nothing"], {}, "--state-dir: cannot write to /proc/nothing"),
        (["--port=1"], {}, "unrecognized arguments: --port=1.  See --help."),
        ([], {"SUPERVISOR_PLAINTEXT": "0"}, "SUPERVISOR_TLS_CA is not set: the supervisor speaks TLS."),
        (
            [],
            {"SUPERVISOR_TOKEN_FILE": "token"},
            "SUPERVISOR_TOKEN_FILE needs SUPERVISOR_CONTROL_TOKEN_FILE: hosts have the first",
        ),
    ],
)
def test_a_flag_that_cannot_work_is_refused(
    argv: list[str],
    env: dict[str, str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("a-token-of-all-the-hosts")
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse(f"--state-dir={tmp_path}", *argv, **env)


@pytest.mark.parametrize(
    ("env", "argv", "listen", "warns"),
    [
        ({}, [], "127.0.0.1", False),
        ({}, ["--listen=localhost"], "localhost", False),
        ({}, ["--listen=::1"], "::1", False),
        ({}, ["--listen=0.0.0.0"], "0.0.0.0", True),  # noqa: S104
        ({"SUPERVISOR_PLAINTEXT": "0", **TLS}, [], "0.0.0.0", False),  # noqa: S104
        ({"SUPERVISOR_PLAINTEXT": "0", **TLS}, ["--listen=10.0.0.7"], "10.0.0.7", False),
    ],
)
def test_plaintext_is_for_this_machine_unless_an_address_is_given_and_then_warns(
    env: dict[str, str],
    argv: list[str],
    listen: str,
    warns: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    of_parts = parse(f"--state-dir={tmp_path}", *argv, **env)
    of_daemon = DaemonSettings.parse(
        [f"--state_dir={tmp_path}", *argv], {"SUPERVISOR_PLAINTEXT": "1", "NODE_NAME": "host-1", **env}
    )
    for settings in (of_parts, of_daemon):
        caplog.clear()
        assert settings.listen == listen
        settings.security.warn_of_plaintext(settings.listen)
        sentence = f"plaintext at {listen}: every program that reaches this address can read and forge"
        assert [sentence in one.getMessage() for one in caplog.records] == [True] * warns
    # A daemon that only its own machine reaches says so to the supervisor.
    assert of_daemon.address == (
        f"[{listen}]"
        if listen == "::1"
        else "host-1"
        if listen[0] in "01" and listen[:3] != "127"
        else listen
    )


def test_each_threshold_that_is_out_of_range_is_refused_by_its_name(tmp_path: Path) -> None:
    for name in (field.name for field in fields(Thresholds)):
        for text in ("-1", "nan", "inf", "many", ""):
            with pytest.raises(ConfigError, match=rf"^(argument )?{flag(name)}[ :].*(must be|invalid)"):
                parse(f"--state-dir={tmp_path}", f"{flag(name)}={text}")


@pytest.mark.parametrize(
    ("part", "argv", "sentence"),
    [
        ("sensor", ["--port=70000"], "--port of the sensor must be 0 (any) to 65535, found 70000."),
        ("actuator", ["--port=-1"], "--port of the actuator must be 0 (any) to 65535, found -1."),
        ("sensor", ["--port=http"], "argument --port: invalid int value: 'http'.  See --help."),
        ("controller", ["--status-port=70000"], "--status-port must be 0 to 65535 or off, found '70000'."),
        ("controller", ["--status-port=on"], "--status-port must be 0 to 65535 or off, found 'on'."),
    ],
)
def test_a_port_of_a_part_that_is_none_is_refused(
    part: str, argv: list[str], sentence: str, tmp_path: Path
) -> None:
    env = {f"{other.upper()}_ADDRESS": "127.0.0.1:1" for other in ALL}
    state = [] if part == "sensor" else [f"--state-dir={tmp_path}"]
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse(*state, *argv, parts=(part,), **env)


@pytest.mark.parametrize("flags", [["--listen=nowhere.invalid"], ["--status-listen=nowhere.invalid"]])
def test_an_interface_that_is_not_there_is_refused_with_a_sentence(flags: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "supervisor" / "controller.py"), "--plaintext", "--port=0"),
            *(f"--state-dir={tmp_path}", "--status-port=0", *flags),
        ],
        env={**os.environ, "ACTUATOR_ADDRESS": "127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert re.search(
        r"controller.py: error: cannot (listen|serve the status page) at nowhere.invalid", done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("part", "env", "sentence"),
    [
        ("sensor", {}, "CONTROLLER_ADDRESS must be set: the sensor speaks to the controller."),
        ("controller", {}, "ACTUATOR_ADDRESS must be set: the controller speaks to the actuator."),
        ("actuator", {}, "CONTROLLER_ADDRESS must be set: the actuator speaks to the controller."),
        (
            "actuator",
            {"CONTROLLER_ADDRESS": "c:1"},
            "SENSOR_ADDRESS must be set: the actuator speaks to the sensor.",
        ),
    ],
)
def test_a_part_alone_needs_the_addresses_of_those_that_it_calls(
    part: str, env: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse(parts=(part,), **env)


def test_flags_go_before_variables_and_variables_before_defaults(tmp_path: Path) -> None:
    state = f"--state-dir={tmp_path}"
    assert parse(state).ports == {"sensor": 60061, "controller": 60062, "actuator": 60063}
    assert parse(state, SENSOR_ADDRESS="s:7001").ports["sensor"] == 7001
    alone = {"parts": ("controller",), "ACTUATOR_ADDRESS": "a:1"}
    assert parse(state, PORT="7000", **alone).ports == {"controller": 7000}  # type: ignore[arg-type]
    assert parse(state, "--port=7001", PORT="7000", **alone).ports == {"controller": 7001}  # type: ignore[arg-type]
    assert parse(state, HEARTBEAT_TIMEOUT_S="40").thresholds.heartbeat_timeout_s == 40
    assert (
        parse(state, "--heartbeat_timeout_s=50", HEARTBEAT_TIMEOUT_S="40").thresholds.heartbeat_timeout_s
        == 50
    )
    assert parse(state, f"--policy={__name__}:OtherPolicy").policy.__name__ == "OtherPolicy"


def test_budgets_of_the_environment_hold_where_the_job_has_none(tmp_path: Path) -> None:
    settings = parse(f"--state-dir={tmp_path}", MAX_IN_JOB_RESTARTS="3", MAX_WORKLOAD_RESTARTS="2")
    job = with_defaults(WorkloadInfo(workload="job", max_workload_restarts=1), settings)
    assert (job.max_in_job_restarts, job.max_workload_restarts) == (3, 1)


@pytest.mark.parametrize("program", ["sensor", "controller", "actuator"])
def test_a_part_runs_from_a_clone_and_from_anywhere(program: str, tmp_path: Path) -> None:
    env = {name: text for name, text in os.environ.items() if not name.startswith("SUPERVISOR_")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "supervisor" / f"{program}.py")],
        env={**env, "XDG_STATE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert re.search(rf"{program}.py: error: \w+_ADDRESS must be set", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_part_may_hold_as_many_connections_as_the_system_allows() -> None:
    program = (
        "from resource import RLIMIT_NOFILE as files, getrlimit, setrlimit; hard = getrlimit(files)[1];"
        "from supervisor.parts.run import allow_connections; setrlimit(files, (99, hard));"
        "allow_connections(); assert getrlimit(files) == (hard, hard)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_the_programs_of_the_package_are_named_where_none_is_asked_for(tmp_path: Path) -> None:
    for words, code in (([], 2), (["--help"], 0), (["sensors"], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "supervisor", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code
        assert "python3 -m supervisor --all-in-one --help" in done.stdout + done.stderr
        assert ("it has no 'sensors'" in done.stderr) == (words == ["sensors"])
