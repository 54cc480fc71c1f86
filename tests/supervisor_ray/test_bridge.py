# SPDX-License-Identifier: Apache-2.0
"""What a bridge concludes from actors that are late or dead."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from supervisor.orchestrators.ray import bridge
from supervisor.orchestrators.ray.bridge import Bridge
from supervisor.orchestrators.ray.order import Order, namespace_of
from tests.asynchronous import run, until


class Actor:
    """One whose looks are answered when a test says so."""

    def __init__(self) -> None:
        self.looks: list[Future[Mapping[str, Any]]] = []
        self.answer: Mapping[str, Any] | Exception | None = None
        self.scan = self

    def remote(self) -> Actor:
        return self

    def future(self) -> Future[Mapping[str, Any]]:
        look: Future[Mapping[str, Any]] = Future()
        self.looks.append(look)
        if isinstance(self.answer, Exception):
            look.set_exception(self.answer)
        elif self.answer is not None:
            look.set_result(self.answer)
        return look


class Actors(Bridge):
    """A bridge that has not joined a cluster; `made` are the actors of its host."""

    def __init__(self) -> None:
        super().__init__(
            Order(address="", namespace="", fleet="", hosts=["a"], resources={"GPU": 8}, nodes={"a": "n1"})
        )
        self.made: list[Actor] = []
        self._make("a")

    def _make(self, host: str) -> None:
        self.made.append(Actor())
        self._actors[host] = self.made[-1]

    async def look(self) -> Any:
        return (await self.answer({"call": "scan", "host": ""}))["hosts"]["a"]


def seen(processes: int) -> dict[str, Any]:
    return {"node": "n1", "address": "10.0.0.1", "boot": "b", "processes": [[1, 0, "x"]] * processes}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "_SCAN_S", 0.05)
    monkeypatch.setattr(bridge, "_living_nodes", lambda: {"n1"})


async def test_what_a_late_look_saw_is_past_and_is_not_used() -> None:
    actors = Actors()
    (actor,) = actors.made
    assert await actors.look() == {"away": "unseen"}
    assert await actors.look() == {"away": "unseen"}
    (late,) = actor.looks  # no second one waits behind it
    late.set_result(seen(processes=0))
    await until(lambda: actors._late["a"].done(), "the answer does not come")
    actor.answer = seen(processes=1)
    assert await actors.look() == seen(processes=1)
    assert len(actor.looks) == 2


def test_an_actor_that_cannot_be_made_is_tried_again_seldom_and_its_reason_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cause = RayTaskError(
        "HostActor.__init__", "Traceback ...\nModuleNotFoundError: No module named 'grpc'", None
    )

    async def work() -> None:
        actors = Actors()
        for _ in range(5):
            actors.made[-1].answer = ActorDiedError(cause)
            assert await actors.look() == {"away": "absent"}
        assert len(actors.made) == 2
        assert caplog.text.count("No module named 'grpc'") == 1
        monkeypatch.setattr(bridge, "_MAKE_S", 0.0)
        actors._not_before.clear()
        await actors.look()
        await actors.look()
        assert len(actors.made) >= 3

    run(work())


def test_an_actor_that_was_killed_for_good_stays_ended(caplog: pytest.LogCaptureFixture) -> None:
    error = ActorDiedError()
    error.error_msg = "The actor is dead because it was killed by `ray.kill`."

    async def work() -> None:
        actors = Actors()
        actors.made[-1].answer = error
        assert [await actors.look() for _ in range(3)] == [{"away": "absent"}] * 3
        assert len(actors.made) == 1
        assert caplog.text.count("its actor was ended") == 1

    run(work())


def test_state_directories_that_look_alike_are_different_fleets() -> None:
    assert namespace_of("/a/b-c") != namespace_of("/a-b/c") != namespace_of("/a/b/c")
