# SPDX-License-Identifier: Apache-2.0
"""What agents hear of one rank when they come and go: sockets as in a job, and agents that die on request."""

from __future__ import annotations

import itertools
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
import torch

from resiliency.checkpoint.agent.client import AgentLink, LinkOptions, reap_agents
from resiliency.checkpoint.agent.protocol import (
    Attach,
    Attached,
    Channel,
    Copies,
    Detach,
    Done,
    Heartbeat,
    LiftBandwidthCap,
    Message,
    Peers,
    Repair,
    RepairDone,
    SaveRequest,
    Settings,
    Skip,
    connect,
    listen,
)
from resiliency.checkpoint.capture.arena import RankArena
from resiliency.checkpoint.capture.capturer import Capturer
from resiliency.checkpoint.trainer.delivery import Delivery
from resiliency.checkpoint.trainer.handles import SaveHandle, SaveState
from tests.checkpoint.containers import NEW_MOUNTS, run_in_container
from tests.checkpoint.storage_builders import no_descriptor_left
from tests.waiting import wait_until

SOON = timedelta(seconds=60)
BOTH = ("local", "persistent")
#: The agents of these tests say nothing on their own.
PATIENT = LinkOptions(silence=timedelta(minutes=10))


class StandIn:
    """The agent of an arena, of which a rank sees no more than its socket."""

    def __init__(self, arena: Path) -> None:
        self._listener = listen(arena)
        self._listener.settimeout(SOON.total_seconds())
        self.channel: Channel | None = None

    def attach(self) -> Attach:
        """Take the rank that comes next."""
        attach = self.take()
        assert self.channel is not None
        self.channel.send(Attached())
        return attach

    def take(self) -> Attach:
        """The same, without an answer."""
        self.channel = Channel(self._listener.accept()[0])
        (attach,) = self.hear(1)
        assert isinstance(attach, Attach)
        return attach

    def hear(self, count: int) -> list[Message]:
        """The next requests."""
        assert self.channel is not None
        heard: list[Message] = []
        deadline = time.monotonic() + SOON.total_seconds()
        while len(heard) < count:
            message = self.channel.receive(SOON)
            assert time.monotonic() < deadline, heard
            if message is not None and not isinstance(message, Heartbeat):
                heard.append(message)
        return heard

    def die(self) -> None:
        self._listener.close()
        if self.channel is not None:
            self.channel.close()


@pytest.fixture
def agent_of() -> Iterator[Callable[[Path], StandIn]]:
    """Agents that are gone at the end of the test."""
    with ExitStack() as stack:

        def agent(arena: Path) -> StandIn:
            made = StandIn(arena)
            stack.callback(made.die)
            return made

        yield agent


def second_rank(root: Path) -> Attach:
    """Of two on one host: it starts no agent."""
    settings = Settings(
        directory=str(root / "persistent"),
        keep=3,
        replicated=False,
        bytes_per_s=0,
        save_timeout_s=60.0,
        local_directory=str(root / "local"),
    )
    return Attach(
        rank=1, world_size=2, local_ranks=(0, 1), run_id="run", attempt_id="s", host="h", settings=settings
    )


def link_at(
    root: Path, on_copies: Callable[[Copies], None] = lambda copies: None, *, starts: bool = False
) -> AgentLink:
    """Of a rank that has nothing to save."""
    return AgentLink(
        root,
        second_rank(root),
        starts=starts,
        on_done=lambda done: None,
        on_lost=lambda why, tries: [],
        on_copies=on_copies,
        options=PATIENT,
    )


def test_a_save_made_while_the_loss_of_an_agent_is_seen_to_comes_after_those_that_it_held(
    tmp_path: Path, agent_of: Callable[[Path], StandIn]
) -> None:
    arena = RankArena(tmp_path / "arena", rank=1, world_size=2, slots=3, run_id="s")
    capturer = Capturer(arena)
    loses, goes_on = Event(), Event()

    def emit(*_: object, **__: object) -> None:
        """In the link's thread: a part of a save is given up."""
        loses.set()
        assert goes_on.wait(SOON.total_seconds())

    first = agent_of(tmp_path / "arena")
    delivery = Delivery(tmp_path / "arena", second_rank(tmp_path), capturer, emit=emit, options=PATIENT)

    def save(step: int) -> None:
        capture = capturer.begin({"weights": torch.full((1000,), float(step))}, step, wait=SOON)
        assert capture is not None
        capturer.fence()
        delivery.send(SaveHandle(step, BOTH), capture, patient=False)

    try:
        first.attach()
        for step in (1, 2):
            save(step)
        assert [request.step for request in first.hear(2) if isinstance(request, SaveRequest)] == [1, 2]
        first.die()
        assert loses.wait(SOON.total_seconds())
        second = agent_of(tmp_path / "arena")
        save(3)
        capturer.close(SOON)  # now the link has them all
        goes_on.set()
        second.attach()
        heard = [request for request in second.hear(5) if isinstance(request, SaveRequest | Skip)]
    finally:
        goes_on.set()
        capturer.close()
        delivery.link.close(detach=False)
        arena.close(remove=True)
    by_tier = {tier: [(type(r), r.step) for r in heard if tier in r.tiers] for tier in BOTH}
    assert by_tier["local"] == [(SaveRequest, 1), (SaveRequest, 2), (SaveRequest, 3)]
    assert by_tier["persistent"] == [(Skip, 1), (Skip, 2), (SaveRequest, 3)]
    assert [r.again for r in heard if isinstance(r, SaveRequest)] == [True, True, False]


def test_what_an_agent_says_or_takes_with_it_of_a_first_try_does_not_end_the_second(
    tmp_path: Path, agent_of: Callable[[Path], StandIn]
) -> None:
    arena = RankArena(tmp_path / "arena", rank=1, world_size=2, slots=3, run_id="s")
    capturer = Capturer(arena)
    agent = agent_of(tmp_path / "arena")
    delivery = Delivery(
        tmp_path / "arena", second_rank(tmp_path), capturer, emit=lambda *_, **__: None, options=PATIENT
    )

    def done(number: int, error: str) -> Done:
        return Done(
            step=1,
            attempt_id="s",
            tier="local",
            error=error,
            try_number=number,
            size_bytes=0,
            queued_s=0.0,
            commit_s=0.0,
        )

    try:
        agent.attach()
        first, second = SaveHandle(1, ("local",)), SaveHandle(1, ("local",), try_number=2)
        delivery.not_captured(first, SaveState.SKIPPED, "no slot", 0.0)
        capture = capturer.begin({"weights": torch.ones(1000)}, 1, wait=SOON)
        assert capture is not None
        capturer.fence()
        delivery.send(second, capture, patient=False)
        told = [request for request in agent.hear(2) if isinstance(request, SaveRequest | Skip)]
        assert [(type(request), request.try_number) for request in told] == [(Skip, 1), (SaveRequest, 2)]
        agent.die()
        agent = agent_of(tmp_path / "arena")
        agent.attach()
        told = [request for request in agent.hear(2) if isinstance(request, SaveRequest | Skip)]
        assert [(type(request), request.try_number) for request in told] == [(Skip, 1), (SaveRequest, 2)]
        assert agent.channel is not None
        agent.channel.send(done(1, "rank 1: no slot"))
        agent.channel.send(done(2, ""))
        assert second.wait(SOON)
        assert (first.state, second.state) == (SaveState.SKIPPED, SaveState.COMMITTED)
        agent.channel.send(Copies(step=1, attempt_id="s", hosts=("h2",), complete=True))
        assert second.wait_complete(SOON)
        third = SaveHandle(1, ("local",), try_number=3)
        capture = capturer.begin({"weights": torch.ones(1000)}, 1, wait=SOON)
        assert capture is not None
        capturer.fence()
        delivery.send(third, capture, patient=False)
        assert (third.record.copies_on, third.record.complete) == (("h2",), True)  # said once
    finally:
        capturer.close()
        delivery.link.close(detach=False)
        arena.close(remove=True)


class CannotBeCaptured(SaveHandle):
    """A save whose capture is not passed on."""

    def update(self, **changes: object) -> None:
        if changes.get("state") is SaveState.CAPTURED:
            raise MemoryError("none is left")
        super().update(**changes)


def test_a_capture_that_cannot_be_passed_on_fails_its_save_by_name_and_the_next_one_is_saved(
    tmp_path: Path, agent_of: Callable[[Path], StandIn]
) -> None:
    arena = RankArena(tmp_path / "arena", rank=1, world_size=2, slots=2, run_id="s")
    capturer = Capturer(arena)
    agent = agent_of(tmp_path / "arena")
    delivery = Delivery(
        tmp_path / "arena", second_rank(tmp_path), capturer, emit=lambda *_, **__: None, options=PATIENT
    )
    handles = [CannotBeCaptured(1, BOTH), CannotBeCaptured(2, BOTH), SaveHandle(3, BOTH)]
    try:
        agent.attach()
        for handle in handles:  # more than there are slots: a save that failed has given its own back
            capture = capturer.begin({"weights": torch.ones(1000)}, handle.step, wait=SOON)
            assert capture is not None
            capturer.fence()
            delivery.send(handle, capture, patient=False)
        told = [request for request in agent.hear(3) if isinstance(request, SaveRequest | Skip)]
    finally:
        capturer.close()
        delivery.link.close(detach=False)
        arena.close(remove=True)
    assert [(type(request), request.step) for request in told] == [(Skip, 1), (Skip, 2), (SaveRequest, 3)]
    assert [handle.state for handle in handles[:2]] == [SaveState.FAILED] * 2
    assert "rank 1: its capture was not passed on: MemoryError('none is left')" in handles[0].record.why


def test_a_repair_that_an_agent_took_with_it_is_carried_out_by_the_next(
    tmp_path: Path, agent_of: Callable[[Path], StandIn]
) -> None:
    repair = Repair(step=9, save_id="before-9", source_host="h0", root="/local/h0", target="h1")
    first, caught_up = agent_of(tmp_path), Event()
    link = link_at(tmp_path, lambda copies: caught_up.set())
    try:
        first.attach()
        link.request(repair)
        assert first.hear(1) == [repair]
        first.die()
        second = agent_of(tmp_path)
        second.attach()
        assert second.hear(1) == [repair]
        assert second.channel is not None
        second.channel.send(RepairDone(attempt_id="s", repair=repair))
        second.channel.send(Copies(step=10, attempt_id="s"))
        assert caught_up.wait(SOON.total_seconds())
        second.die()
        third = agent_of(tmp_path)
        third.attach()
        link.request(Peers(path="/table"))
        assert third.hear(1) == [Peers(path="/table")]
    finally:
        link.close(detach=False)


def test_a_save_waits_while_no_descriptor_is_left_to_reach_or_start_an_agent(
    tmp_path: Path, agent_of: Callable[[Path], StandIn], caplog: pytest.LogCaptureFixture
) -> None:
    agent = agent_of(tmp_path)
    save = SaveRequest(step=7, slot="slot-0", tiers=("local",))
    link = link_at(tmp_path, starts=True)
    try:
        agent.attach()
        with no_descriptor_left():
            assert agent.channel is not None
            agent.channel.close()
            link.request(save)
            wait_until(lambda: "cannot be started" in caplog.text, "it was not noticed")
        agent.attach()
        assert agent.hear(1) == [save]
    finally:
        link.close(detach=False)


def test_a_rank_that_ends_does_not_wait_for_an_agent_that_does_not_answer(
    tmp_path: Path, agent_of: Callable[[Path], StandIn]
) -> None:
    agent = agent_of(tmp_path)
    link = link_at(tmp_path)
    assert agent.take() == second_rank(tmp_path)
    link.close(detach=False, timeout=timedelta(seconds=20))
    assert "resiliency-agent-link" not in [thread.name for thread in threading.enumerate()]


def test_a_request_that_comes_after_the_end_reaches_nobody_and_writes_to_no_other_file(
    tmp_path: Path, agent_of: Callable[[Path], StandIn]
) -> None:
    agent = agent_of(tmp_path)
    link = link_at(tmp_path)
    agent.attach()
    link.close(detach=True)
    pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(4)]  # one of them has the link's numbers
    link.request(LiftBandwidthCap())
    assert agent.hear(1) == [Detach()]
    for read, write in pipes:
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
        os.close(read)
        os.close(write)


def test_an_agent_that_ends_at_once_is_started_again_after_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, starts = tmp_path / "ends_at_once", tmp_path / "starts"
    program.write_text(f'#!/bin/sh\ndate +%s.%N >>"{starts}"\nexit 1\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    link = link_at(tmp_path, starts=True)
    try:
        wait_until(lambda: starts.exists() and starts.read_text().count("\n") >= 4, "it is not started again")
    finally:
        link.close(detach=False)
        wait_until(reap_agents, "one more was started, and does not end")
    at = [float(line) for line in starts.read_text().splitlines()]
    pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
    for pause, least in zip(pauses[:3], (0.4, 0.9, 1.9), strict=True):
        assert pause >= least, pauses


def test_an_agent_that_outlives_its_link_leaves_no_zombie_behind_once_there_is_another_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, started, may_end = (tmp_path / name for name in ("program", "started", "may-end"))
    program.write_text(
        f'#!/bin/sh\necho $$ >"{started}.new"\nmv "{started}.new" "{started}"\n'
        f'while [ ! -e "{may_end}" ]; do sleep 0.02; done\n'
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    link = link_at(tmp_path / "one", starts=True)
    try:
        wait_until(started.exists, "no agent was started")
    finally:
        link.close(detach=False)
        may_end.touch()
    pid = int(started.read_text())
    wait_until(
        lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", "it does not end"
    )
    link_at(tmp_path / "two").close(detach=False)
    assert not Path(f"/proc/{pid}").exists()


def test_a_rank_that_each_agent_drops_at_once_comes_back_after_growing_pauses(
    tmp_path: Path, agent_of: Callable[[Path], StandIn]
) -> None:
    agent = agent_of(tmp_path)
    link = link_at(tmp_path)
    at = []
    try:
        for _ in range(4):
            agent.attach()
            at.append(time.monotonic())
            assert agent.channel is not None
            agent.channel.close()
    finally:
        link.close(detach=False)
    assert at[2] - at[1] >= 0.2
    assert at[3] - at[2] >= 1.0


def test_a_wait_for_an_agent_is_told_with_the_host_and_the_rank_that_starts_it(
    tmp_path: Path, agent_of: Callable[[Path], StandIn], caplog: pytest.LogCaptureFixture
) -> None:
    link = link_at(tmp_path)
    try:
        assert not link.wait_for_agent(at_most=timedelta(seconds=0.2), tell_every=timedelta(seconds=0.1))
        assert "rank 1 waits for the checkpoint agent of host 'h'" in caplog.text
        assert "rank 0 starts it" in caplog.text
        agent_of(tmp_path).attach()
        assert link.wait_for_agent()
    finally:
        link.close(detach=False)


def test_an_arena_at_the_same_path_of_another_container_has_an_agent_of_its_own(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    arena = root / "job"
    arena.mkdir(parents=True)

    def connect_there() -> Channel | None:
        """It shares the network, and keeps its captures in a file system of its own."""
        arena.mkdir()
        found = connect(arena)
        listen(arena).close()
        return found

    with listen(arena):
        mounts = ("mount --make-rprivate /", f"mount -t tmpfs tmpfs {root}")
        assert run_in_container(NEW_MOUNTS, mounts, connect_there) is None
        channel = connect(arena)
        assert channel is not None
        channel.close()


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """As in a trainer with data loaders and connections to a thousand others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
    files = list(os.pipe())
    files += [os.dup(files[0]) for _ in range(1024)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_files")
def test_a_rank_with_more_than_a_thousand_open_files_keeps_in_touch(
    tmp_path: Path, agent_of: Callable[[Path], StandIn]
) -> None:
    agent, told = agent_of(tmp_path), Event()
    link = link_at(tmp_path, lambda copies: told.set())
    try:
        agent.attach()
        assert agent.channel is not None
        agent.channel.send(Copies(step=1, attempt_id="s"))
        assert told.wait(SOON.total_seconds())
        link.request(Peers(path="/table"))
        assert agent.hear(1) == [Peers(path="/table")]
    finally:
        link.close(detach=False)
