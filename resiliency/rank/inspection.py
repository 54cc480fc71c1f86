# SPDX-License-Identifier: Apache-2.0
"""What a rank shows when its launcher asks: the stacks of its threads, and the collectives it has begun.

A rank offers both before its first step and pays nothing more.  Stacks are written on a signal, by a handler
in C that needs no free interpreter.  Everything else is answered by a thread that sleeps until it is asked.
It answers while the main thread waits in a collective, too: waiting releases the interpreter.

    launcher                                   rank
    STACK_SIGNAL                          ->   stacks-<pid> grows
    ASK into the pipe questions-<pid>     ->   answer-<pid> appears: groups, and moments since the last one
    COUNT                                 ->   the same, with collectives counted where that takes longer
    the main thread's state, one letter   ->   one more moment: with this state it was in these functions

`torch` is asked only where the program has imported it: this module is a leaf.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
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
ASK, COUNT = b"?", b"#"

_MOST_FRAMES = 64
#: Stacks in an answer; moments in others are not told.
_MOST_STACKS = 64
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


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
class RankThread:
    """`id`: in the kernel.  `is_own`: it runs code that is of no library."""

    id: int
    is_daemon: bool
    is_own: bool


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """What a rank says of itself.

    `threads`: that run Python, but the main one and those of this package.
    `ends`: the interpreter ends, or the process groups are destroyed.
    `raised`: type of the exception that the main thread handles or that ends it; empty: none.
    """

    groups: tuple[GroupState, ...]
    moments: tuple[Moments, ...]
    threads: tuple[RankThread, ...] = ()
    ends: bool = False
    raised: str = ""


def stacks_file(directory: str, pid: int) -> Path:
    """Where process `pid` writes its stacks; it is there when the process can."""
    return Path(directory, f"stacks-{pid}")


def questions_file(directory: str, pid: int) -> Path:
    """The pipe into which a launcher writes a byte; it is there when process `pid` answers."""
    return Path(directory, f"questions-{pid}")


def offering_processes(directory: str) -> list[int]:
    """Processes for which a `questions_file` is there."""
    prefix = questions_file(directory, 0).name.removesuffix("0")
    with suppress(OSError):
        names = (name.removeprefix(prefix) for name in os.listdir(directory) if name.startswith(prefix))
        return [int(name) for name in names if name.isdecimal()]
    return []


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
        threads = tuple(RankThread(**thread) for thread in said["threads"])
        return RankAnswer(
            groups=groups, moments=moments, threads=threads, ends=said["ends"], raised=said["raised"]
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no answer of a rank: {text[:80]!r}") from error


def _answer(asked: int, directory: str, pid: int) -> None:
    file = answer_file(directory, pid)
    main = threading.main_thread()
    seen: Counter[tuple[str, tuple[CodeType, ...]]] = Counter()
    had_groups = False
    while question := os.read(asked, 4096):
        state = question.rstrip(ASK + COUNT)[-1:].decode(errors="replace")
        if state:  # of several, which came while the interpreter was not free, the last one is of now
            calls = _calls(sys._current_frames().get(main.ident or 0))
            if (state, calls) in seen or len(seen) < _MOST_STACKS:
                seen[state, calls] += 1
        if ASK not in question and COUNT not in question:
            continue
        moments = [
            (state, [(code.co_filename, code.co_name) for code in calls], count)
            for (state, calls), count in seen.items()
        ]
        seen.clear()
        had_groups = _has_groups() or had_groups
        said = {
            "groups": [asdict(group) for group in _groups(counted=COUNT in question)],
            "moments": moments,
            "threads": [asdict(thread) for thread in _threads(main)],
            "ends": not main.is_alive() or (had_groups and not _has_groups()),
            "raised": _raised(main),
        }
        with suppress(OSError):  # the launcher's directory is gone: so is the launcher
            part = file.with_suffix(".part")
            part.write_text(json.dumps(said))
            part.replace(file)


def _calls(frame: FrameType | None) -> tuple[CodeType, ...]:
    calls: list[CodeType] = []
    while frame is not None and len(calls) < _MOST_FRAMES:
        calls.append(frame.f_code)
        frame = frame.f_back
    return tuple(calls)


def _threads(main: threading.Thread) -> list[RankThread]:
    """As in `RankAnswer`; without the lock of `threading`, which a rank that hangs may hold."""
    frames = sys._current_frames()
    found = []
    with suppress(Exception):  # a private name, and a dictionary that may change meanwhile
        for ident, thread in list(threading._active.items()):  # type: ignore[attr-defined]
            files = [code.co_filename for code in _calls(frames.get(ident))]
            # Without calls it is native, and idle: autograd's, say.
            if thread is main or not files or any(file.startswith(_PACKAGE) for file in files):
                continue
            is_own = not all("/site-packages/" in file or "/lib/python3" in file for file in files)
            found.append(RankThread(id=thread.native_id, is_daemon=thread.daemon, is_own=is_own))
    return found


def _raised(main: threading.Thread) -> str:
    found: Any = sys._current_exceptions().get(main.ident or 0)
    found = found[1] if isinstance(found, tuple) else found  # before Python 3.12
    if found is None and not main.is_alive():
        found = getattr(sys, "last_value", None)  # it has left the main thread, and been printed
    return type(found).__name__ if found is not None else ""


def _has_groups() -> bool:
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return bool(distributed is not None and distributed.is_initialized())


def _groups(*, counted: bool) -> list[GroupState]:
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    found = []
    # A group may be destroyed meanwhile, and another torch may have other names: then less is known, and
    # verdicts are weaker.
    with suppress(Exception):
        recorded = _recorded_collectives() if counted else None
        for group, name in list(distributed._world.pg_names.items()):
            with suppress(Exception):
                ranks = distributed.get_process_group_ranks(group)
                members = f"{len(ranks)}-{zlib.crc32(repr(ranks).encode()):08x}"
                begun = int(group._get_sequence_number_for_group())
                # Gloo's number counts messages, too, and two ranks of a group may send others in between.
                if begun and recorded is not None and group.name() == "gloo":
                    begun = recorded[name]  # where that is not known, the group is left out
                found.append(GroupState(name=name, members=members, begun=begun))
    return found


def _recorded_collectives() -> dict[str, int] | None:
    """Collectives begun by name of the group, of gloo's groups; None: this torch does not record them.

    Torch keeps the last two thousand, of all groups together, and which groups have begun any.  As long as
    all of those are known, any other group has 0.  Reading them takes some 20 ms.
    """
    native: Any = sys.modules.get("torch._C._distributed_c10d")
    if not hasattr(native, "_dump_fr_trace"):
        return None
    dump = pickle.loads(native._dump_fr_trace(True, False, False))  # noqa: S301 (torch's own)
    entries = dump["entries"]
    begun = {entry["process_group"][0]: int(entry["collective_seq_id"]) for entry in entries}
    forgotten = dump["pg_status"].keys() - {str(entry["pg_id"]) for entry in entries}
    return begun if forgotten else Counter(begun)
