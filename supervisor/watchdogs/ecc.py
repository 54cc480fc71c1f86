# SPDX-License-Identifier: Apache-2.0
"""Health of a host's GPUs: memory errors, row remapping, and what their driver wants done.

A memory error alone is no reason to lose a host: where the driver says what it asks for, its word decides
(as with Xid 154), and an error that it has contained is a note.  Only where it cannot say, an uncorrectable
error speaks against the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from supervisor.values import EventType, Evidence, Finding
from supervisor.watchdogs.watchdog import Look, boot_id
from supervisor.watchdogs.xid import RECOVERY_ACTION_CHANGED

#: The Xid of a GPU that does not answer any more.
FELL_OFF_THE_BUS = 79


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """One GPU at one moment; None is what it or its driver cannot tell.

    Attributes:
        device: its place on the bus, as `xid.short_bus_id` writes it.
        lost: the driver cannot reach it.
        uncorrected: uncorrectable memory errors since the driver was loaded.
        sram_threshold: more uncorrectable errors of its SRAM than it is to be used with.
        remap_pending: a row is replaced when the GPU is reset next.
        remap_failed: no spare row is left.
        action: a word of `policy.xid.ADVICE`.
    """

    device: str
    lost: bool = False
    uncorrected: int | None = None
    sram_threshold: bool | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    action: str | None = None


class Gpus(Protocol):
    def read(self) -> Sequence[GpuHealth]:
        """All GPUs of this host.  May block for ever; raises UnknownHealth where there is no answer."""


class EccWatchdog:
    """Compares the GPUs with what they were at the last look, also of the process before this one."""

    def __init__(self, host: str, gpus: Gpus, memory: Mapping[str, Any], *, boot: str = "") -> None:
        self._host, self._gpus, self._boot = host, gpus, boot or boot_id()
        self._known: dict[str, GpuHealth] = {}
        #: How often each fact was told: one that is over and comes again is another finding.
        self._reported: Counter[str] = Counter()
        if memory.get("boot") == self._boot:
            self._reported.update(memory.get("told", {}))
            for gpu in memory.get("gpus", []):
                health = GpuHealth(**gpu)
                self._known[health.device] = health

    def look(self) -> Look:
        seen = {gpu.device: gpu for gpu in self._gpus.read()}
        findings: list[Finding] = []
        notes: list[str] = []
        for device, now in seen.items():
            before = self._known.get(device, GpuHealth(device=device))
            findings += (self._finding(device, *fact) for fact in judge(before, now))
            notes += _notes(before, now)
        notes += [
            f"GPU {device} is not listed any more" for device in sorted(self._known) if device not in seen
        ]
        self._known = seen
        return Look(findings=tuple(findings), notes=tuple(notes))

    def _finding(self, device: str, name: str, code: int | None, advice: str, text: str) -> Finding:
        fact = f"{device}-{name}"
        self._reported[fact] += 1
        evidence = Evidence(
            id=f"{self._host[:180]}/nvml/{self._boot}-{fact}-{self._reported[fact]}",
            witness="nvml",
            text=f"GPU {device}: {text}",
            code=code,
            device=device,
            advice=advice,
        )
        return Finding(type=EventType.ECC if code is None else EventType.XID, evidence=evidence)

    def memory(self) -> Mapping[str, Any]:
        gpus = [asdict(gpu) for gpu in self._known.values()]
        return {"boot": self._boot, "gpus": gpus, "told": dict(self._reported)} if gpus else {}

    def descriptor(self) -> int | None:
        return None


def judge(before: GpuHealth, now: GpuHealth) -> Iterator[tuple[str, int | None, str, str]]:
    """What speaks against the GPU now and did not before: (name of the fact, Xid, advice, text)."""
    if now.lost:
        if not before.lost:
            yield "lost", FELL_OFF_THE_BUS, "", "the driver cannot reach it"
        return
    if now.action not in (None, "none", before.action):
        text = f"the driver asks for {now.action}"
        yield f"action-{now.action}", RECOVERY_ACTION_CHANGED, now.action or "", text
    if now.remap_failed and not before.remap_failed:
        yield "remap-failed", None, "", "a memory row could not be replaced"
    if now.sram_threshold and not before.sram_threshold:
        yield "sram", None, "", "too many uncorrectable errors of its SRAM"
    errors = _new_errors(before, now)
    if errors and now.action is None:
        text = f"{errors} uncorrectable memory errors"
        yield f"uncorrected-{now.uncorrected}", None, "", text


def _new_errors(before: GpuHealth, now: GpuHealth) -> int:
    """A count that is lower than before began again at 0, with the driver."""
    if now.uncorrected is None:
        return 0
    known = before.uncorrected or 0
    return now.uncorrected - known if now.uncorrected >= known else now.uncorrected


def _notes(before: GpuHealth, now: GpuHealth) -> Iterator[str]:
    errors = _new_errors(before, now)
    if errors and now.action is not None:
        yield f"GPU {now.device}: {errors} uncorrectable memory errors; the driver asks for {now.action}"
    if now.remap_pending and not before.remap_pending:
        yield f"GPU {now.device}: a memory row is replaced at its next reset"
    if before.lost and not now.lost:
        yield f"GPU {now.device} answers again"
