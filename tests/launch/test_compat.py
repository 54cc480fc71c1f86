# SPDX-License-Identifier: Apache-2.0
"""These fail when NVRx moves, so that the launcher does not do so first."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import inspect
import logging
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from resiliency.errors import UntestedVersion
from resiliency.launch import _compat, cli

#: What the hooks were written against.  When this differs, read upstream's change, then renew it.
AGENT_SOURCE = "31c9dd8e6998808774a5e804cf2911206cb5bd9dbf0914bfcd26b6373514ba75"


def test_everything_private_that_we_rely_on_is_there() -> None:
    for owner, names in _compat.HOOKS.items():
        for name in names:
            assert hasattr(owner, name), f"{owner} has no {name} any more"


def test_the_methods_around_our_hooks_are_those_that_were_read() -> None:
    agent = _compat._launcher.LocalElasticAgent
    simple = agent.__mro__[1]
    methods = [agent.run, agent._invoke_run_with_any_failed_policy, agent._start_workers, agent._stop_workers]
    methods += [agent._shutdown, agent._monitor_workers, simple._rendezvous, simple._initialize_workers]
    methods += [
        _compat._processes.PContext.start,
        _compat._ft_rendezvous.FtRendezvousHandler.num_nodes_waiting,
    ]
    source = "".join(inspect.getsource(inspect.unwrap(method)) for method in methods)
    assert hashlib.sha256(source.encode()).hexdigest() == AGENT_SOURCE


def test_what_the_rendezvous_records_looks_at_no_module_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendezvous, recorded = _compat._ft_rendezvous, []
    monkeypatch.setattr(inspect, "stack", lambda *_: pytest.fail("it looks at all of them, for each frame"))
    monkeypatch.setattr(
        rendezvous, "construct_and_record_rdzv_event", lambda **fields: recorded.append(fields["name"])
    )

    class Holder(rendezvous._BackendRendezvousStateHolder):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self._settings = argparse.Namespace(run_id="job")

        def meets(self) -> None:
            self._record("a message")

    Holder().meets()
    assert recorded == ["Holder.meets"]


def test_a_host_that_the_others_have_met_without_can_still_say_that_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(self: object, state: object) -> None:
        raise KeyError("a node that is not of this round")

    monkeypatch.setattr(_compat._ft_rendezvous.FtRendezvousHandler, "try_set_worker_state", unknown)
    host = _compat.HostRendezvous.__new__(_compat.HostRendezvous)
    assert host.try_report_success(0)


@pytest.mark.parametrize(
    ("silent_s", "slept_s", "is_new", "ended", "is_there"),
    [
        (1, 0, False, False, True),
        (16, 0, False, False, False),
        (46, 45, False, False, True),  # this launcher was stopped, and the host with it
        (46, 45, True, False, True),  # its last sign of life came just before that
        (62, 45, False, False, False),
        (46, 45, False, True, False),  # its launcher is known to have ended
        (3600, 3599, False, False, True),  # a clock that was set, or a machine that slept
        (16, -60, False, False, False),
    ],
)
def test_a_host_is_silent_only_for_the_time_in_which_this_launcher_ran(
    monkeypatch: pytest.MonkeyPatch,
    silent_s: float,
    slept_s: float,
    is_new: bool,
    ended: bool,
    is_there: bool,
) -> None:
    rendezvous = _compat._ft_rendezvous
    settings = rendezvous.RendezvousSettings(
        *("job", 2, 2, rendezvous.RendezvousTimeout()),
        keep_alive_interval=timedelta(seconds=5),
        keep_alive_max_attempt=3,
    )
    clock = _compat.awake_s
    holder = _compat._StateHolder(None, settings)
    node = rendezvous._NodeDesc("host", 1, 1)
    said = _compat._utc_now() - timedelta(seconds=silent_s)
    if not is_new:
        holder._count_signs({node: said})
    if ended:
        holder.drop(node)
    monkeypatch.setattr(_compat, "awake_s", lambda: clock() - slept_s)
    holder.state.last_heartbeats[node] = said
    holder.state.participants[node] = 0
    holder._sanitize()
    assert (node in holder.state.participants) == is_there
    assert holder.state.last_heartbeats == ({node: said} if is_there else {})


def test_a_clock_that_is_set_is_no_stop_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    holder = _compat._StateHolder(None, None)
    monkeypatch.setattr(_compat, "time", SimpleNamespace(time=lambda: time.time() + 3600.0))
    holder._count_signs({})
    assert not caplog.records
    clock = _compat.awake_s
    monkeypatch.setattr(_compat, "awake_s", lambda: clock() - 60.0)
    holder._count_signs({})
    assert "launcher stopped for 60 s" in caplog.text


def test_the_end_of_a_launcher_is_told_to_those_that_watch_nobody_yet() -> None:
    """A newcomer would complete a meeting with one that has ended: hosts would not agree on their number."""
    rendezvous = _compat._ft_rendezvous
    settings = rendezvous.RendezvousSettings(
        *("job", 2, 2, rendezvous.RendezvousTimeout()),
        keep_alive_interval=timedelta(seconds=5),
        keep_alive_max_attempt=3,
    )
    backend = _compat._c10d.C10dRendezvousBackend(HashStore(), "job")
    one, newcomer = (_compat._StateHolder(backend, settings) for _ in range(2))
    node = rendezvous._NodeDesc("host", 1, 1)
    one.state.participants[node] = 0
    one.state.last_heartbeats[node] = _compat._utc_now()
    one.mark_dirty()
    one.sync()
    one.drop(node)
    one.sync()
    one.sync()
    newcomer.sync()
    assert not newcomer.state.participants


def test_only_tested_versions_are_accepted_and_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert importlib.metadata.version("nvidia-resiliency-ext") in _compat.TESTED_VERSIONS
    monkeypatch.setattr(_compat, "TESTED_VERSIONS", ("0.9.9",))
    with pytest.raises(
        UntestedVersion, match=r"tested with .* 0\.9\.9, found 0\.4\.1.*pip install .*==0\.9\.9"
    ):
        _compat.check_version()


def test_a_missing_library_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    code = (
        "import importlib.metadata as m, sys\n"
        "def missing(name): raise m.PackageNotFoundError(name)\n"
        "m.version = missing\n"
        "from resiliency.launch.main import main\n"
        f"sys.exit(main(['--run-dir', {str(tmp_path)!r}, {__file__!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the launcher needs nvidia-resiliency-ext 0.4.1, and it is not installed" in done.stderr
    assert "Traceback" not in done.stderr


def test_importing_nvrx_leaves_the_root_logger_alone() -> None:
    code = "import logging, resiliency.launch._compat; print(logging.getLogger().handlers)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("flags", "nic", "heartbeat"),
    [
        ([], False, 2700),
        (["--ft-enable-nic-monitor=true"], True, 2700),
        (["--ft-param-rank_heartbeat_timeout=3"], False, 3),
        (["--ft-cfg-path={file}"], False, 7),
        (["--ft-cfg-path={file}", "--ft-rank-heartbeat-timeout=8"], False, 8),
    ],
)
def test_defaults_need_no_flag_and_files_and_flags_override_them(
    flags: list[str], nic: bool, heartbeat: float, tmp_path: Path
) -> None:
    file = tmp_path / "ft.yaml"
    file.write_text("fault_tolerance:\n  rank_heartbeat_timeout: 7\n")
    parsed: argparse.Namespace = cli.parse([*(flag.format(file=file) for flag in flags), "s.py"], {})
    config = _compat.fault_tolerance_config(parsed)
    assert (config.enable_nic_monitor, config.rank_heartbeat_timeout) == (nic, heartbeat)
    assert config.log_level == logging.ERROR
