# SPDX-License-Identifier: Apache-2.0
"""What a rank shows when its launcher asks: the stacks of its threads, and the collectives it has begun.

A rank offers both before its first step and pays nothing more.  Stacks are written on a signal, by a handler
in C that needs no free interpreter.  Everything else is answered by a thread that sleeps until it is asked.
It answers while the main thread waits in a collective, too: waiting releases the interpreter.

    launcher                                   rank
    STACK_SIGNAL                          ->   stacks-<pid> grows
    ASK into the pipe questions-<pid>     ->   answer-<pid> appears: groups, and moments since the last one
    the main thread's state, one letter   ->   one more moment: with this state it was in these functions

`torch` is asked only where the program has imported it: this module is a leaf.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

#: On this one a rank writes its stacks into its file.
STACK_SIGNAL = signal.SIGRTMIN + 7
#: Any other byte is a state.
ASK = b"?"

_MOST_FRAMES = 64
#: Stacks in an answer; moments in others are not told.
_MOST_STACKS = 64


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """A process group of a rank.

    `begun`: collectives that this rank has begun in it, those of DDP's and FSDP's own among them.
    `members`: equal in two ranks that are in the same group.
    """

    name: str
    members: str
    begun: int


@dataclass(frozen=True, kw_only=True)
class Moments:
    """How often the main thread was seen in `state`, with these calls, innermost first: (file, function)."""

    state: str
    calls: tuple[tuple[str, str], ...]
    count: int


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    groups: tuple[GroupState, ...]
    moments: tuple[Moments, ...]


def stacks_file(directory: str, pid: int) -> Path:
    """Where process `pid` writes its stacks; it is there when the process can."""
    return Path(directory, f"stacks-{pid}")


def questions_file(directory: str, pid: int) -> Path:
    """The pipe into which a launcher writes a byte; it is there when process `pid` answers."""
    return Path(directory, f"questions-{pid}")


def answer_file(directory: str, pid: int) -> Path:
    return Path(directory, f"answer-{pid}")


def offer(directory: str) -> None:
    """Let the launcher whose private directory this is inspect this process; called once.

    Never raises: a rank trains without being inspected, and the launcher says so when it asks.
    """
    if not directory or signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
        return
    pid = os.getpid()
    with suppress(OSError, RuntimeError):  # RuntimeError: no more threads
        # Both open for the life of the process: faulthandler wants it, and so does a pipe that never ends.
        faulthandler.register(STACK_SIGNAL, file=stacks_file(directory, pid).open("w"), all_threads=True)
        questions = questions_file(directory, pid)
        with suppress(FileExistsError):  # of the program that this process was before an exec
            os.mkfifo(questions)
        asked = os.open(questions, os.O_RDWR | os.O_CLOEXEC)
        threading.Thread(
            target=_answer, args=(asked, directory, pid), name="resiliency-inspection", daemon=True
        ).start()


def read_answer(text: str) -> RankAnswer:
    """
    Raises:
        ValueError: it is no answer of a rank.
    """
    try:
        said = json.loads(text)
        groups = tuple(GroupState(**group) for group in said["groups"])
        moments = tuple(
            Moments(state=state, calls=tuple((file, function) for file, function in calls), count=count)
            for state, calls, count in said["moments"]
        )
        return RankAnswer(groups=groups, moments=moments)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no answer of a rank: {text[:80]!r}") from error


def _answer(asked: int, directory: str, pid: int) -> None:
    file = answer_file(directory, pid)
    main = threading.main_thread().ident
    seen: Counter[tuple[str, tuple[CodeType, ...]]] = Counter()
    while question := os.read(asked, 4096):
        state = question.rstrip(ASK)[-1:].decode(errors="replace")
        if state:  # of several, which came while the interpreter was not free, the last one is of now
            calls = _calls(sys._current_frames().get(main or 0))
            if (state, calls) in seen or len(seen) < _MOST_STACKS:
                seen[state, calls] += 1
        if ASK not in question:
            continue
        moments = [
            (state, [(code.co_filename, code.co_name) for code in calls], count)
            for (state, calls), count in seen.items()
        ]
        seen.clear()
        groups = [asdict(group) for group in _groups()]
        with suppress(OSError):  # the launcher's directory is gone: so is the launcher
            part = file.with_suffix(".part")
            part.write_text(json.dumps({"groups": groups, "moments": moments}))
            part.replace(file)


def _calls(frame: FrameType | None) -> tuple[CodeType, ...]:
    calls: list[CodeType] = []
    while frame is not None and len(calls) < _MOST_FRAMES:
        calls.append(frame.f_code)
        frame = frame.f_back
    return tuple(calls)


def _groups() -> list[GroupState]:
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    found = []
    # A group may be destroyed meanwhile, and another torch may have other names: then less is known, and
    # verdicts are weaker.
    with suppress(Exception):
        for group, name in list(distributed._world.pg_names.items()):
            with suppress(Exception):
                ranks = distributed.get_process_group_ranks(group)
                members = f"{len(ranks)}-{zlib.crc32(repr(ranks).encode()):08x}"
                begun = int(group._get_sequence_number_for_group())
                found.append(GroupState(name=name, members=members, begun=begun))
    return found
