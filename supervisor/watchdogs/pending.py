# SPDX-License-Identifier: Apache-2.0
"""Findings on their way to the sensor: each is repeated until it has surely arrived, across restarts.

A report is not acknowledged, and a stream that ends may have lost the last ones.  So a finding stays in the
reports for `REPEAT_S` of one stream; its id tells the sensor that it knows it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from resiliency.files import write_durably
from supervisor.plain import InvalidValue
from supervisor.values import Finding
from supervisor.watchdogs.watchdog import boot_id, elapsed_since_boot_s, gravest

logger = logging.getLogger(__name__)

#: Longer than a sensor may be stopped before its hosts connect again.
REPEAT_S = 30.0
#: A report of that many findings is far below the limit of a message.
MOST = 64


@dataclass
class _Entry:
    finding: Finding
    found_at: float  # so long after the start of the machine
    first_sent: float | None = None


@dataclass
class PendingFindings:
    """Args:
    path: keeps them across restarts of the daemon.
    """

    path: Path
    clock: Callable[[], float] = elapsed_since_boot_s
    boot: str = field(default_factory=boot_id)
    _entries: dict[str, _Entry] = field(default_factory=dict)

    def load(self) -> None:
        """Take over what the daemon before this one could not tell."""
        try:
            kept = json.loads(self.path.read_text())
            if kept["boot"] == self.boot:
                for at, plain in kept["findings"]:
                    finding = Finding.from_dict(plain)
                    self._entries[finding.evidence.id] = _Entry(finding, float(at))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, InvalidValue) as error:
            logger.warning("findings of the last daemon cannot be read: %s; they are lost", error)

    def add(self, findings: Iterable[Finding]) -> bool:
        """Keep new ones; False where all were known."""
        now = self.clock()
        fresh = [found for found in findings if found.evidence.id not in self._entries]
        for found in fresh:
            self._entries[found.evidence.id] = _Entry(found, now - found.evidence.age_s)
        if len(self._entries) > MOST:
            kept = gravest([entry.finding for entry in self._entries.values()], MOST)
            logger.warning("%d findings wait: the %d gravest are kept", len(self._entries), MOST)
            self._entries = {found.evidence.id: self._entries[found.evidence.id] for found in kept}
        if fresh:
            self._save()
        return bool(fresh)

    def begin_stream(self) -> None:
        """Another stream: nothing was sent on it."""
        for entry in self._entries.values():
            entry.first_sent = None

    def current(self) -> tuple[Finding, ...]:
        """Those of the next report, with their age as of now."""
        now = self.clock()
        return tuple(
            replace(
                entry.finding,
                evidence=replace(entry.finding.evidence, age_s=max(0.0, now - entry.found_at)),
            )
            for entry in self._entries.values()
        )

    def note_sent(self, findings: Iterable[Finding]) -> None:
        """`findings` were sent; those that were for long enough are done."""
        now, done = self.clock(), []
        for found in findings:
            entry = self._entries.get(found.evidence.id)
            if entry is None:
                continue
            if entry.first_sent is None:
                entry.first_sent = now
            elif now - entry.first_sent >= REPEAT_S:
                done.append(found.evidence.id)
        for known in done:
            del self._entries[known]
        if done:
            self._save()

    def _save(self) -> None:
        kept = [[entry.found_at, entry.finding.to_dict()] for entry in self._entries.values()]
        try:
            write_durably(self.path, json.dumps({"boot": self.boot, "findings": kept}).encode())
        except OSError as error:
            logger.error("findings not kept: %s; a restart of this daemon forgets them", error)
