# SPDX-License-Identifier: Apache-2.0
"""What a rank does, read from the stack of its main thread: no mark in the user's loop, no cost until it is asked.

The innermost frame that is known decides.  Saves, evaluations and compilations are known by any frame: what
they call may load data or compute a loss, and takes as long as it takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')


class Phase(Enum):
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
    OTHER = "code of the script"
    UNKNOWN = "a place that it does not show"

    @property
    def has_no_usual_time(self) -> bool:
        """Whether a rank may be in it for minutes while others wait, and all is well."""
        return self in _LONG


_LONG = frozenset({Phase.STARTING, Phase.CHECKPOINT, Phase.EVALUATION, Phase.COMPILATION, Phase.UNKNOWN})
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
#: Parts of paths.  torch._dynamo's own frames are in each call of compiled code; these are in compilations alone.
_COMPILERS = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/async_compile.py",
    "triton/compiler/",
)
_CHECKPOINTS = ("resiliency/checkpoint/", "torch/distributed/checkpoint/", "torch/serialization.py")
_EVALUATION = re.compile(r"(?:^|_)(?:eval(?:uate|uation)?|val(?:id|idate|idation)?|predict|generate)(?:_|$)")
_BY_FILE = (
    ("torch/utils/data/", Phase.DATA),
    ("torch/optim/", Phase.OPTIMIZER),
    ("torch/autograd/", Phase.BACKWARD),
    ("torch/nn/", Phase.FORWARD),
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One line of a stack."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


def main_thread(stacks: str) -> tuple[Call, ...]:
    """The main thread's calls, innermost first, from what `faulthandler` writes; empty without any.

    It writes threads from the youngest to the oldest, so the main one is last.
    """
    _, _, last = stacks.rpartition("(most recent call first)")
    return tuple(Call(**match.groupdict()) for match in map(_FRAME.match, last.splitlines()) if match)


def phase_of(frames: tuple[Call, ...]) -> Phase:
    """What a main thread with these calls, innermost first, is in."""
    if not frames:
        return Phase.UNKNOWN
    # A collective calls into few frames of its own, so a later one is of a rank that waits in a collective.
    if any(_is_of(frame, _COLLECTIVES) for frame in frames[:3]):
        return Phase.COLLECTIVE
    for frame in frames:
        if _is_of(frame, _COMPILERS):
            return Phase.COMPILATION
        if _is_of(frame, _CHECKPOINTS):
            return Phase.CHECKPOINT
        if _EVALUATION.search(frame.function):
            return Phase.EVALUATION
    for frame in frames:
        for part, phase in _BY_FILE:
            if part in frame.file:
                return phase
    return Phase.OTHER


def telling_frame(frames: tuple[Call, ...]) -> str:
    """The innermost call of the user's own code, else the innermost one: where a person would look."""
    own = (
        frame for frame in frames if "/site-packages/" not in frame.file and "/lib/python3" not in frame.file
    )
    frame = next(own, frames[0] if frames else None)
    return str(frame) if frame is not None else ""


def _is_of(frame: Call, parts: tuple[str, ...]) -> bool:
    return any(part in frame.file for part in parts)
