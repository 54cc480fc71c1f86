# SPDX-License-Identifier: Apache-2.0
"""Losses of whole hosts: which, when and for how long, and one with all real processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from resiliency.testing.processes import Command
from tests.waiting import wait_until

BENCHMARK = Path(__file__).parents[2] / "benchmark"
SCRIPTS = Path(__file__).parent / "scripts"
sys.path.append(str(BENCHMARK))

import failures_hosts  # noqa: E402
import failures_report  # noqa: E402
import goodput_under_failures  # noqa: E402
from failures_hosts import Launchers, Losing, Loss, Site  # noqa: E402
from failures_jobs import HOST_LOSSES, OURS, Contestant, Note, Training  # noqa: E402
from failures_report import Report  # noqa: E402
from failures_runs import Plan, Run, kept  # noqa: E402

NAMES = ("host0", "host1", "host2", "spare")


def plan_of(seed: int = 42, training: Training = HOST_LOSSES, faults: int = 4, every_s: float = 180) -> Plan:
    return Plan(
        training=training, faults=faults, fault_interval_s=every_s, kinds="kill", seed=seed, save_every=10
    )


def test_all_contestants_lose_the_hosts_of_the_same_ranks_at_the_same_times() -> None:
    planned = failures_hosts.losses(plan_of())
    assert planned == failures_hosts.losses(plan_of()) != failures_hosts.losses(plan_of(43))
    assert [loss.at_s for loss in planned] == sorted(loss.at_s for loss in planned)
    assert {loss.rank for seed in range(9) for loss in failures_hosts.losses(plan_of(seed))} == {0, 1, 2}


class Machines:
    """Hosts of which some have a rank: one process each."""

    names = NAMES

    def __init__(self, ranks: dict[str, int]) -> None:
        self.ranks = ranks
        self.said: list[tuple[str, str]] = []

    def processes(self, host: str) -> list[int]:
        return [self.ranks[host]] if host in self.ranks else []

    def lose(self, host: str) -> None:
        del self.ranks[host]
        self.said.append(("lost", host))

    def come_back(self, host: str) -> None:
        self.said.append(("back", host))

    def output(self) -> str:
        return ""

    def has_ended(self) -> bool:
        return False

    def incidents_s(self) -> list[dict[str, float]]:
        return []


def test_the_host_of_a_rank_is_lost_and_comes_back_and_a_rank_that_runs_nowhere_is_missed() -> None:
    with ExitStack() as stack:
        started = {
            host: stack.enter_context(Command(["sleep", "600"], env={"RANK": rank}))
            for host, rank in (("host0", "2"), ("spare", "1"))
        }
        machines = Machines({host: command.pid for host, command in started.items()})
        told: list[tuple[Loss, str]] = []
        planned = [Loss(at_s=1, rank=1), Loss(at_s=2, rank=1), Loss(at_s=3, rank=2)]
        losing = Losing(
            machines, planned, begin=100, away_s=5, tell=lambda loss, host: told.append((loss, host))
        )
        for now in (100.5, 101.5, 102.5, 103.5, 106.4):
            losing.look(now)
        assert machines.said == [("lost", "spare"), ("lost", "host0")]
        losing.look(106.6)
        assert machines.said[2:] == [("back", "spare")]
        losing.look(110)
        assert machines.said[3:] == [("back", "host0")]
        assert told == [(planned[0], "spare"), (planned[2], "host0")]


class Sleepers(Site):
    """Launchers that do nothing, or fail at once where `directory` says so."""

    def launcher(self, *, nnodes: str, job: str = "") -> list[str]:
        return ["sh", "-c", f"test -e {self.directory}/fail || exec sleep 600"]

    def script(self, host: str) -> list[str]:
        return []


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Sleepers(
        training=HOST_LOSSES,
        contestant=HOST_LOSSES.contestants["torchrun + DCP async"],
        directory=tmp_path,
        memory=tmp_path / "memory",
        save_every=1,
        store_port=1,
        ends_at=0.0,
    )


@pytest.fixture
def launchers(site: Site) -> Iterator[Launchers]:
    with ExitStack() as stack:
        yield Launchers(site, NAMES, stack)


def test_a_lost_host_leaves_no_process_disk_or_memory_and_comes_back_empty(
    launchers: Launchers, site: Site
) -> None:
    for place in (site.disk("host1"), site.memory / "host1", site.disk("host0")):
        place.mkdir(parents=True)
    lost = launchers.processes("host1")
    launchers.lose("host1")
    assert launchers.processes("host1") == []
    assert not site.disk("host1").exists()
    assert not (site.memory / "host1").exists()
    assert site.disk("host0").exists()
    launchers.come_back("host1")
    assert launchers.processes("host1") not in ([], lost)


def test_a_job_has_ended_when_too_few_launchers_are_left_and_not_by_losses(
    launchers: Launchers, tmp_path: Path
) -> None:
    launchers.lose("host0")
    launchers.lose("host1")
    assert not launchers.has_ended()
    (tmp_path / "fail").touch()
    launchers.come_back("host0")
    launchers.come_back("host1")
    wait_until(launchers.has_ended, "two of four launchers failed, and the job goes on", timeout=60)


def test_a_supervised_host_that_is_away_starts_no_launcher(tmp_path: Path) -> None:
    away = tmp_path / "host0.away"
    away.touch()
    with Command([*failures_hosts.HELD, str(away), "echo", "started", "{generation}"]) as command:
        with pytest.raises(TimeoutError):
            command.wait_for_line("started", timeout=0.5)
        away.unlink()
        command.wait_for_line(r"started \{generation\}", timeout=60)


def test_no_step_counts_twice_when_rank_0_dies_with_its_host() -> None:
    # Lost after step 4 with its notes elsewhere; the next rank 0 begins at 2, and a third one at 3.
    steps = (0, 1, 2, 3, 4, 2, 3, 4, 5, 3, 4, 5, 6)
    notes = [Note(float(at), step) for at, step in enumerate(steps)]
    assert kept(notes, -1.0, 99.0)[0] == 6


def test_a_report_says_what_a_loss_is_and_whether_each_run_went_on() -> None:
    machine: dict[str, Any] = {"cores": 2, "cpu": "c", "memory_gib": 1, "load_1min": 0, "kernel": "k"}
    ours = Run(contestant=OURS, round=1, wall_s=720, steps=900, trains_on=True, planned=4)
    spans = {"gathered": 3.0, "hot_swap": 1.5}
    runs = [
        replace(ours, incidents_s=[spans]),
        replace(ours, contestant="torchrun + DCP async", ended_s=61.2, trains_on=False),
        replace(ours, contestant="ft_launcher + DCP async", trains_on=False),
    ]
    report = Report(
        training=HOST_LOSSES,
        command="c",
        machine=machine,
        runs=[(run, 10.0) for run in runs],
        left_out=HOST_LOSSES.left_out,
    )
    note = failures_report.as_markdown(report)
    assert "3 hosts of one rank each and a spare, all processes of this machine." in note
    assert "A loss: daemon, launcher and rank of a host are killed at once" in note
    assert "- ours trains on after its losses in 1 of 1 runs: met" in note
    assert "- round 1, ours, incident 1 of the supervisor, s: gathered 3.0, hot_swap 1.5" in note
    assert "- round 1, torchrun + DCP async: the job ended by itself after 61 s" in note
    assert "- round 1, ft_launcher + DCP async: the job did not train any more after the window" in note
    assert (
        "- NVRx local with cliques is left out: a lost host fetches replicas through tensors of a GPU" in note
    )


@pytest.mark.parametrize("flags", [["--training", "nemo"], ["--kinds", "stop"]])
def test_hosts_are_lost_by_the_light_training_alone(
    flags: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["goodput_under_failures.py", "--hosts", *flags])
    with pytest.raises(SystemExit):
        goodput_under_failures.main()
    assert "--hosts is of the light training" in capsys.readouterr().err


class Rested(Training):
    """Steps that need no processor, under a launcher that prepares no restart."""

    def argv(self, *args: Any, **options: Any) -> list[str]:
        return [str(SCRIPTS / "rested_training.py"), *super().argv(*args, **options)[1:], "--events"]


@pytest.mark.thorough("a benchmark; its parts have tests of their own")
@pytest.mark.slow
@pytest.mark.leaks("descriptors", reason="gRPC's own pollers")
def test_ours_loses_a_host_with_its_disk_and_trains_on(tmp_path: Path) -> None:
    # One host and the spare: the storage alone has what the lost host had, and few processes import torch.
    cheap = Contestant(launcher="standby off", save="ours-local")
    small = replace(HOST_LOSSES, hosts=1, contestants={OURS: cheap})
    training = Rested(**{one.name: getattr(small, one.name) for one in fields(small)})
    run = failures_hosts.run_once(OURS, 1, plan_of(training=training, faults=1, every_s=15), tmp_path / "run")
    assert run.error == ""
    assert len(run.faults) == 1
    assert run.trains_on
    assert run.steps > 0
    assert sum(run.causes_s.values()) == pytest.approx(15, rel=1e-6)
    assert "hot_swap" in run.incidents_s[0]
