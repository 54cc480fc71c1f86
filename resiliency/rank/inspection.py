# SPDX-License-Identifier: Apache-2.0
"""What a rank shows when its launcher asks: the stacks of its threads, and the collectives it has begun.

A rank offers both before its first step and pays nothing more.  Stacks are written on a signal, by a handler
in C that needs no free interpreter.  Everything else is answered by a thread that sleeps until it is asked.
It answers while the main thread waits in a collective, too: waiting releases the interpreter.

    launcher                                     rank
    STACK_SIGNAL                            ->   stacks-<pid> grows
    one byte into the pipe questions-<pid>  ->   answer-<pid> appears

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
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: On this one a rank writes its stacks into its file.
STACK_SIGNAL = signal.SIGRTMIN + 7


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """A process group of a rank.

    `begun`: collectives that this rank has begun in it, those of DDP's and FSDP's own among them.
    `members`: equal in two ranks that are in the same group.
    """

    name: str
    members: str
    begun: int


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
        os.mkfifo(questions)
        asked = os.open(questions, os.O_RDWR | os.O_CLOEXEC)
        threading.Thread(
            target=_answer, args=(asked, directory, pid), name="resiliency-inspection", daemon=True
        ).start()


def read_groups(text: str) -> tuple[GroupState, ...]:
    """Of an answer.

    Raises:
        ValueError: it is none.
    """
    try:
        return tuple(GroupState(**group) for group in json.loads(text)["groups"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no answer of a rank: {text[:80]!r}") from error


def _answer(asked: int, directory: str, pid: int) -> None:
    file = answer_file(directory, pid)
    while os.read(asked, 4096):
        groups = [asdict(group) for group in _groups()]
        with suppress(OSError):  # the launcher's directory is gone: so is the launcher
            part = file.with_suffix(".part")
            part.write_text(json.dumps({"groups": groups}))
            part.replace(file)


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
