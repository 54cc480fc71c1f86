# SPDX-License-Identifier: Apache-2.0
"""How the hosts of a job look at their ranks together when it stands still.

The launcher of the first host asks, over the rendezvous store; each host whose ranks stand still, too, looks
at them afresh and answers; the first host decides from all answers, and says what was found.  So ranks are
compared as they are at about one moment, without a common clock:

    first host                    others, twice a second while their ranks stand still
    {"question": 1}           ->
                              <-  {"node": 3, "views": [...], "stacks": [...]}
    {"found": ..., "end": []} ->  a line in each launcher's log; the ranks in `end` are ended by their hosts

A host believes what is found of an answer of its own, and no other: it may read it late.  A host that cannot
tell that it began to look before the others had ended answers `late`, and is asked again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from resiliency.launch.hangs.looking import WINDOW_S, Look, stack_clusters
from resiliency.launch.health.hangs import RankView
from resiliency.launch.health.phases import RankPhase
from resiliency.launch.rendezvous.shared_lines import SharedLines
from resiliency.rank.inspection import GroupState
from resiliency.runtime import awake_s

logger = logging.getLogger(__name__)

#: Beyond the time of a look, for hosts to answer.
ANSWERS_S = 4.0
#: What one host says of stacks; one that has more says none.
_MOST_STACK_CHARS = 16_384
_POLL_S = 0.1
#: A host that has looked for a question less than this ago begins before another one's window is over.
LATE_S = 0.8 * WINDOW_S


@dataclass(frozen=True, kw_only=True)
class JobView:
    """An attempt as one of its hosts sees it.  `node`: number of the host."""

    run: str
    attempt: int
    node: int
    hosts: int


@dataclass(frozen=True, kw_only=True)
class HostAnswer:
    """What one host saw.  `late`: perhaps after the others; `moved`: a rank went on meanwhile."""

    node: int
    late: bool
    moved: bool
    look: Look


@dataclass(frozen=True, kw_only=True)
class SaidFinding:
    """What the first host says to the others.

    `accused`: ranks that are to blame beyond doubt.  `end`: those that are to be ended, for `sentence`.
    """

    sentence: str
    accused: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


class HostBoard:
    """What the hosts of one attempt say to each other about its standing still; used by one thread."""

    def __init__(self, lines: SharedLines, job: JobView) -> None:
        self._lines = lines
        self._job = job
        self._key = f"resiliency/hangs/{job.run}/{job.attempt}"
        self._read = 0
        self._question = 0
        #: The last question that this host has answered.
        self._answered = 0
        #: When this host last saw that nothing new was asked.
        self._read_at = -float("inf")

    # ----------------------------------------------------------------------------------------- the first host

    def ask(self) -> None:
        if self._question:
            self._lines.drop(f"{self._key}/{self._question}")  # answers that came after its deadline
        self._question += 1
        self._lines.add(self._key, json.dumps({"question": self._question}))

    def gather(self, wait: Callable[[float], bool]) -> list[HostAnswer] | None:
        """Answers of the other hosts to the last question, of those that give one in time.

        Args:
            wait: waits so many seconds; true when the attempt has ended, and then there are no answers.
        """
        key = f"{self._key}/{self._question}"
        deadline = awake_s() + ANSWERS_S
        answers: dict[int, HostAnswer] = {}
        read = 0
        while len(answers) < self._job.hosts - 1 and awake_s() < deadline:
            if wait(_POLL_S):
                return None
            lines = self._lines.read(key) or []
            for line in lines[read:]:
                try:
                    answer = decode_answer(line)
                except (ValueError, TypeError, KeyError):
                    logger.debug("an answer of another release: %s", line[:80])
                else:
                    answers[answer.node] = answer
            read = max(read, len(lines))
        self._lines.drop(key)
        return list(answers.values())

    def tell(self, finding: SaidFinding) -> None:
        said = {"found": finding.sentence, "accused": finding.accused, "end": finding.end}
        self._lines.add(self._key, json.dumps({**said, "of": self._question}))

    # --------------------------------------------------------------------------------------------- the others

    def read(self) -> tuple[bool | None, list[SaidFinding]]:
        """What is new: whether the last question is answered late, None without one; and what was found."""
        now = time.monotonic()
        late: bool | None = None
        found = []
        lines = self._lines.read(self._key)
        if lines is None:
            return None, []
        if len(lines) < self._read:
            self._read = 0  # the store has lost what was in it: all of this is new
        for line in lines[self._read :]:
            said = json.loads(line)
            if "question" in said:
                self._question = int(said["question"])
                late = now - self._read_at > LATE_S
            elif said.get("of") == self._answered:
                accused, end = tuple(said["accused"]), tuple(said["end"])
                found.append(SaidFinding(sentence=str(said["found"]), accused=accused, end=end))
        self._read, self._read_at = len(lines), now
        return late, found

    def answer(self, look: Look, *, late: bool, moved: bool) -> None:
        answer = HostAnswer(node=self._job.node, late=late, moved=moved, look=look)
        self._lines.add(f"{self._key}/{self._question}", encode_answer(answer))
        self._answered = self._question


def encode_answer(answer: HostAnswer) -> str:
    clusters = stack_clusters(answer.look.stacks)
    if sum(len(text) for _, text in clusters) > _MOST_STACK_CHARS:
        clusters = []
    views = [asdict(view) | {"phase": view.phase.name} for view in answer.look.views]
    head = {"node": answer.node, "late": answer.late, "moved": answer.moved}
    return json.dumps({**head, "views": views, "stacks": clusters}, separators=(",", ":"))


def decode_answer(line: str) -> HostAnswer:
    """
    Raises:
        ValueError, TypeError, KeyError: the line is no answer of this release.
    """
    said = json.loads(line)
    stacks = {int(rank): str(text) for ranks, text in said["stacks"] for rank in ranks}
    look = Look(views=tuple(map(_view, said["views"])), stacks=stacks)
    return HostAnswer(node=int(said["node"]), late=bool(said["late"]), moved=bool(said["moved"]), look=look)


def _view(said: dict[str, Any]) -> RankView:
    phase, groups = RankPhase[said.pop("phase")], said.pop("groups")
    return RankView(**said, phase=phase, groups=tuple(GroupState(**group) for group in groups))


def merged(looks: Sequence[Look]) -> Look:
    """One look at the ranks of all of them."""
    views = sorted((view for look in looks for view in look.views), key=lambda view: view.rank)
    stacks = {rank: text for look in looks for rank, text in look.stacks.items()}
    return Look(views=tuple(views), stacks=stacks)
