# SPDX-License-Identifier: Apache-2.0
"""What a watchdog is, and what one look of it gives."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from supervisor.policy.xid import Remedy, remedy
from supervisor.values import EventType, Finding, cut_text

#: Findings of one look; more are a storm, of which the gravest are enough.
MOST_FINDINGS = 32
#: Characters of a finding's text: a report of many findings must fit in one message.
TEXT_CHARS = 300

#: Names that `--watchdogs` takes.
NAMES = ("ecc", "nic", "nvlink", "xid")


class UnknownHealth(Exception):
    """The look gave no answer; the text says why.  It says nothing about the hardware."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What one look has seen.

    Attributes:
        findings: that speak against hardware; their ids are the same when the same fact is found again.
        notes: for the daemon's log, and for nobody's decision.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


class Watchdog(Protocol):
    """One source of facts.  A look may block for ever: its process is ended then."""

    def look(self) -> Look:
        """What is new since the last look.

        Raises:
            UnknownHealth: nothing can be seen.
        """

    def memory(self) -> Mapping[str, Any]:
        """What the next process needs to go on from here, as plain values."""

    def descriptor(self) -> int | None:
        """A file descriptor that becomes readable when there is something new; None where there is none."""


def boot_id() -> str:
    """Differs between starts of the machine: what was seen before the last one says nothing about now."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:12]
    except OSError:
        return "unknown"


def short_text(text: str) -> str:
    return cut_text(text if len(text) <= TEXT_CHARS else f"{text[: TEXT_CHARS - 4]} ...")


def gravity(finding: Finding) -> int:
    """Larger is graver."""
    if finding.type is not EventType.XID or finding.evidence.code is None:
        return len(Remedy)
    return list(Remedy).index(remedy(finding.evidence.code, finding.evidence.advice))


@dataclass
class Cooldown:
    """Repetitions of one fact about one device within `seconds` are counted, and not told.

    The gravest findings survive a storm, and a code is never hidden by another code of the same device.
    """

    seconds: float
    _reported: dict[tuple[str, str, int | None, str], float] = field(default_factory=dict)
    _held: dict[tuple[str, str, int | None, str], int] = field(default_factory=dict)

    def pass_on(self, look: Look, now: float) -> Look:
        """What of `look` is to be told at monotonic time `now`."""
        reported: list[Finding] = []
        for finding in look.findings:
            evidence = finding.evidence
            key = (finding.type.value, evidence.device, evidence.code, evidence.advice)
            last = self._reported.get(key)
            if last is not None and now - last < self.seconds:
                self._held[key] = self._held.get(key, 0) + 1
                continue
            self._reported[key] = now
            held = self._held.pop(key, 0)
            text = f"{evidence.text} ({held} more before it)" if held else evidence.text
            reported.append(replace(finding, evidence=replace(evidence, text=short_text(text))))
        for key in [key for key, at in self._reported.items() if now - at >= self.seconds]:
            # What was held without a repetition after its time is forgotten: nothing is told late.
            del self._reported[key]
            self._held.pop(key, None)
        if len(reported) <= MOST_FINDINGS:
            return replace(look, findings=tuple(reported))
        kept = gravest(reported, MOST_FINDINGS)
        note = f"{len(reported)} findings at once; the {MOST_FINDINGS} gravest are reported"
        return Look(findings=kept, notes=(*look.notes, note))


def gravest(findings: Sequence[Finding], most: int) -> tuple[Finding, ...]:
    """At most `most` of them, the gravest, in their order."""
    ranked = sorted(range(len(findings)), key=lambda n: (-gravity(findings[n]), n))[:most]
    return tuple(findings[n] for n in sorted(ranked))


def elapsed_since_boot_s() -> float:
    """The kernel stamps its log with this clock, or one that differs from it by less than a second."""
    return time.monotonic()
