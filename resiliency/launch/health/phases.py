# SPDX-License-Identifier: Apache-2.0
"""What a rank does, read from the stack of its main thread: no mark in the user's loop, and no cost before.

The innermost frame that is known decides.  Saves and compilations are known by any frame of the library that
does them: what they call takes as long as it takes.  The name of a function tells nothing above that frame:
all of training may be in one that is called "train and evaluate".
"""

from __future__ import annotations

import re
from enum import Enum
from itertools import takewhile

from resiliency.launch.health.evidence import Frame

_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')


class RankPhase(Enum):
    """The value is the word for people."""

    STARTING = "before its first step"
    DATA = "the data loader"
    FORWARD = "the forward pass"
    BACKWARD = "the backward pass"
    OPTIMIZER = "the optimizer"
    COLLECTIVE = "a collective"
    CHECKPOINT = "a checkpoint"
    EVALUATION = "an evaluation"
    COMPILATION = "a compilation"
    PERSON = "a debugger or at a prompt"
    OTHER = "code of the script"
    UNKNOWN = "a place that it does not show"

    @property
    def has_no_usual_time(self) -> bool:
        """Whether a rank may be in it for minutes while others wait, and all is well."""
        return self.name in ("STARTING", "CHECKPOINT", "EVALUATION", "COMPILATION", "PERSON", "UNKNOWN")

    @property
    def is_collective(self) -> bool:
        return self is RankPhase.COLLECTIVE


_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
#: Parts of paths.  Other frames of torch._dynamo are in each call of compiled code; these in compilations.
_COMPILERS = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/async_compile.py",
    "triton/compiler/",
)
_CHECKPOINTS = ("resiliency/checkpoint/", "torch/distributed/checkpoint/", "torch/serialization.py")
_EVALUATION = re.compile(r"(?:^|_)(?:eval(?:uate|uation)?|val(?:id|idate|idation)?|predict|generate)(?:_|$)")
#: A function with such a name does all of the training, its evaluations among the rest.
_TRAINING = re.compile(r"(?:^|_)(?:pre)?(?:train|training|fit)(?:_|$)")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/ipdb/", "/pudb/", "/IPython/", "/debugpy/", "/pydevd", "/code.py")
#: Calls in which a thread waits for what other threads of its process do.
_JOINS = ("/concurrent/futures/", "/queue.py", "/asyncio/", "/multiprocessing/", "/joblib/")
_BY_FILE = (
    ("torch/utils/data/", RankPhase.DATA),
    ("torch/optim/", RankPhase.OPTIMIZER),
    ("torch/autograd/", RankPhase.BACKWARD),
    ("torch/nn/", RankPhase.FORWARD),
)


def main_thread(stacks: str) -> tuple[Frame, ...]:
    """The main thread's calls, innermost first, from what `faulthandler` writes; empty without any.

    It writes threads from the youngest to the oldest, so the main one is last.
    """
    _, _, last = stacks.rpartition("(most recent call first)")
    return tuple(
        Frame(file=match["file"], line=int(match["line"].replace("???", "0")), function=match["function"])
        for match in map(_FRAME.match, last.splitlines())
        if match
    )


def phase_of(frames: tuple[Frame, ...]) -> RankPhase:
    """What a main thread with these calls, innermost first, is in."""
    if not frames:
        return RankPhase.UNKNOWN
    # A rank that waits in a collective is at most a few calls deep in it.
    if any(_is_of(frame, _COLLECTIVES) for frame in frames[:3]):
        return RankPhase.COLLECTIVE
    if any(_is_of(frame, _DEBUGGERS) for frame in _library_calls(frames)):
        return RankPhase.PERSON
    for frame in frames:
        if _is_of(frame, _COMPILERS):
            return RankPhase.COMPILATION
        if _is_of(frame, _CHECKPOINTS):
            return RankPhase.CHECKPOINT
    for frame in frames:
        for part, phase in _BY_FILE:
            if part in frame.file:
                return phase
        if _EVALUATION.search(frame.function) and not _TRAINING.search(frame.function):
            return RankPhase.EVALUATION
    return RankPhase.OTHER


def joins_threads(frames: tuple[Frame, ...]) -> bool:
    """Whether a main thread with these calls waits for another one: its result, or a library's event."""
    calls = _library_calls(frames)
    waits = [frame.function for frame in calls if frame.file.endswith("/threading.py")]
    return (
        any(_is_of(frame, _JOINS) for frame in calls)
        or "join" in waits
        or ("wait" in waits and len(waits) < len(calls))
    )


def telling_frame(frames: tuple[Frame, ...]) -> str:
    """The innermost call of the user's own code, else the innermost one: where a person would look."""
    own = frames[len(_library_calls(frames)) :] or frames
    if not own:
        return ""
    return f"{own[0].file.rpartition('/')[2]}:{own[0].line} in {own[0].function}"


def _library_calls(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The innermost calls, down from the user's own code."""
    return tuple(takewhile(lambda frame: _is_of(frame, ("/site-packages/", "/lib/python3")), frames))


def _is_of(frame: Frame, parts: tuple[str, ...]) -> bool:
    return any(part in frame.file for part in parts)
