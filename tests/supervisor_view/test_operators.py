# SPDX-License-Identifier: Apache-2.0
"""The command line of operators, against a controller in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from resiliency.errors import ControlPlaneError
from supervisor.values import Request
from supervisor.view.operators import COMMANDS, OperatorClient, build_parser, run
from supervisor.view.status import ActReply, ActRequest, History, HistoryRequest, Status

from .documents import full, history, large

PAGE = (Path(__file__).parents[2] / "docs" / "supervisor-operators.md").read_text()


@dataclass
class Controller:
    """Remembers what it was asked; `error`: refuses all; `hangs`: never answers."""

    document: Status = field(default_factory=full)
    error: ControlPlaneError | None = None
    hangs: bool = False
    asked: list[object] = field(default_factory=list)

    async def status(self, *, timeout_s: float) -> Status:
        await self._take("status")
        return self.document

    async def act(self, request: ActRequest, *, timeout_s: float) -> ActReply:
        await self._take(request)
        return ActReply(event="event-9", text=f"{request.request.value}: it is in the log")

    async def history(self, request: HistoryRequest, *, timeout_s: float) -> History:
        await self._take(request)
        return history()

    async def _take(self, what: object) -> None:
        self.asked.append(what)
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error

    @asynccontextmanager
    async def connect(self, address: str, plaintext: bool) -> AsyncIterator[OperatorClient]:
        self.asked.append((address, plaintext))
        yield self


def call(controller: Controller, *argv: str, env: dict[str, str] | None = None) -> int:
    return run(argv, env or {}, controller.connect)


def test_status_is_text_or_the_whole_document(capsys: pytest.CaptureFixture[str]) -> None:
    controller = Controller()
    assert call(controller, "status") == 0
    assert "Incident incident-7 of llama" in capsys.readouterr().out
    assert call(controller, "status", "--json") == 0
    assert Status.from_dict(json.loads(capsys.readouterr().out)) == full()
    assert controller.asked[0] == ("localhost:60062", False)


def test_the_controller_is_named_by_flag_or_environment() -> None:
    controller = Controller()
    env = {"CONTROLLER_ADDRESS": "control.fleet:1"}
    assert call(controller, "status", "--plaintext", env=env) == 0
    assert call(controller, "status", "--controller", "other:2", env=env) == 0
    assert controller.asked[::2] == [("control.fleet:1", True), ("other:2", False)]


def test_hosts_that_are_well_are_listed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(Controller(large(20)), "status", "--hosts") == 0
    assert "host-19" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "request_"),
    [
        (
            ("cordon", "host-7", "--why", "fan"),
            ActRequest(request=Request.CORDON, by="ann", host="host-7", why="fan"),
        ),
        (("uncordon", "host-7"), ActRequest(request=Request.UNCORDON, by="ann", host="host-7")),
        (("drain", "host-7"), ActRequest(request=Request.DRAIN, by="ann", host="host-7")),
        (("freeze",), ActRequest(request=Request.FREEZE, by="ann")),
        (("thaw",), ActRequest(request=Request.THAW, by="ann")),
        (("thaw", "--workload", "llama"), ActRequest(request=Request.THAW, by="ann", workload="llama")),
    ],
)
def test_a_request_goes_to_the_controller_and_its_answer_is_printed(
    argv: Sequence[str], request_: ActRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    controller = Controller()
    assert call(controller, *argv, "--by", "ann") == 0
    assert controller.asked[1] == request_
    assert capsys.readouterr().out == f"{argv[0]}: it is in the log\n"


def test_history_asks_for_the_records_that_were_named(capsys: pytest.CaptureFixture[str]) -> None:
    controller = Controller()
    assert call(controller, "history", "--limit", "5", "--since", "9") == 0
    assert controller.asked[1] == HistoryRequest(limit=5, since=9)
    assert "llama: hot swap" in capsys.readouterr().out


def test_a_refusal_is_one_sentence_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    refused = ControlPlaneError("there is no host 'x'.", hint="See status --hosts.")
    assert call(Controller(error=refused), "cordon", "x") == 1
    assert (
        capsys.readouterr().err
        == "python3 -m supervisor cordon: there is no host 'x'.  See status --hosts.\n"
    )


def test_a_controller_that_never_answers_is_given_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.view.operators.GRACE_S", 0.0)
    assert call(Controller(hangs=True), "status", "--timeout", "0.05") == 1
    assert "the controller at localhost:60062 did not answer within 0.05 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("explode",), "invalid choice: 'explode'"),
        (("cordon",), "the following arguments are required: HOST"),
        (("status", "--timeout", "0"), "--timeout must be seconds above 0 and at most 3600, found 0"),
        (("history", "--limit", "0"), "--limit must be 1 to 1000, found 0"),
        (("history", "--since", "-1"), "--since must be 0 or more, found -1"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_asked(
    argv: Sequence[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    controller = Controller()
    assert call(controller, *argv) == 2
    assert sentence in capsys.readouterr().err
    assert controller.asked == []


def test_help_teaches_and_the_page_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser({}).parse_args(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"python3 -m supervisor {command}" in PAGE
        assert f"    {command} " in text
    assert "exit codes: 0 done" in text
    assert "examples:" in text
