# SPDX-License-Identifier: Apache-2.0
"""One check of a host: what its probes say alone, then compared with other hosts, and the links to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from resiliency.errors import PeerError
from resiliency.launch.health.scores import HostHealth, Measurement, Score, judge_all
from resiliency.launch.host_check.exchange import Exchange
from resiliency.launch.host_check.links import LinkFindings, check_links

#: Of a measurement; a launcher of another release may tell more.
_FIELDS = frozenset(field.name for field in fields(Measurement))
#: Exit code of a program for each conclusion; 1 and 2 are taken by errors and refusals.
EXIT_CODES = {HostHealth.OK: 0, HostHealth.FAULTY: 3, HostHealth.SLOW: 4, HostHealth.UNDECIDED: 5}


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """What a check says of one host, with all evidence.  `links` are lines about links of any host."""

    host: str
    scores: tuple[Score, ...]
    link_health: HostHealth = HostHealth.OK
    link_why: str = ""
    links: tuple[str, ...] = ()

    @property
    def health(self) -> HostHealth:
        """As bad as the worst score."""
        return max([self.link_health, *(score.health for score in self.scores)], key=lambda one: one.severity)

    @property
    def why(self) -> str:
        """The evidence that makes the host what it is, and each probe that measured nothing."""
        found = [
            str(score) for score in self.scores if score.health is self.health or score.measurement.missing
        ]
        if self.link_health is self.health and self.link_why:
            found.append(f"links: {self.health.value}, {self.link_why}")
        return "; ".join(found)

    @property
    def notes(self) -> str:
        """Limits that the host is under, by probe."""
        measured = (score.measurement for score in self.scores)
        return "; ".join(f"{one.probe}: {one.note}" for one in measured if one.note)

    def fields(self) -> dict[str, Any]:
        """The report for machines."""
        return {
            "host": self.host,
            "health": self.health.value,
            "why": self.why if self.health is not HostHealth.OK else "",
            "probes": [
                {
                    **{name: value for name, value in asdict(score.measurement).items() if name != "host"},
                    "health": score.health.value,
                    "why": score.why,
                    "reference": score.reference,
                }
                for score in self.scores
            ],
            "link_health": self.link_health.value,
            "links": list(self.links),
        }

    def text(self) -> str:
        """The report for people: a line for each probe, and the conclusion."""
        rows = [
            (
                score.measurement.probe,
                f"{score.measurement.value:.4g} {score.measurement.unit}"
                if score.measurement.has_rate
                else "-",
                score.health.value,
                score.why,
            )
            for score in self.scores
        ]
        if self.link_why:
            rows.append(("links", "-", self.link_health.value, self.link_why))
        rows = [("probe", "rate", "health", "why"), *rows]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in rows]
        missing = ", ".join(score.measurement.probe for score in self.scores if score.measurement.missing)
        last = f"host {self.host}: {self.health.value}{missing and f'; not measured: {missing}'}"
        return "\n".join([*lines, *self.links, last])


def report_alone(
    host: str,
    measurements: Sequence[Measurement],
    history: Mapping[tuple[str, str], Sequence[float]] | None = None,
) -> HostReport:
    """By what this host measured, and measured before."""
    return HostReport(host=host, scores=tuple(judge_all(measurements, history)))


def report_with_others(
    exchange: Exchange,
    alone: HostReport,
    *,
    address: str,
    links: bool,
    timeout_s: float,
    history: Mapping[tuple[str, str], Sequence[float]] | None = None,
) -> HostReport:
    """The same by what all hosts measured; all hosts of the check call it together.

    Host 0 that does not answer leaves this host undecided: it says nothing of it.

    Args:
        links: whether this host asks for a check of the links; it is made when a host does.
    """
    mine = {
        "host": alone.host,
        "links": links,
        "measurements": [asdict(score.measurement) for score in alone.scores],
    }
    try:
        said = exchange.gather("measurements", mine, timeout_s)
        # Two launchers on one machine have one host name.
        names = [f"{answer.get('host', '?')} ({rank})" for rank, answer in enumerate(said)]
        me = names[exchange.rank]
        measurements = [
            Measurement(**{name: one[name] for name in _FIELDS & one.keys()} | {"host": names[rank]})
            for rank, answer in enumerate(said)
            for one in answer.get("measurements", ())
        ]
        past = {(me, probe): values for (_, probe), values in (history or {}).items()}
        scores = tuple(score for score in judge_all(measurements, past) if score.measurement.host == me)
        findings = None
        if any(answer.get("links") for answer in said):
            findings = check_links(exchange, names, address=address, timeout_s=timeout_s)
    except PeerError as error:
        return HostReport(
            host=alone.host, scores=alone.scores, link_health=HostHealth.UNDECIDED, link_why=str(error)
        )
    return _report(me, scores, findings)


def _report(host: str, scores: tuple[Score, ...], findings: LinkFindings | None) -> HostReport:
    if findings is None:
        return HostReport(host=host, scores=scores)
    return HostReport(
        host=host,
        scores=scores,
        link_health=findings.health_of(host),
        link_why=findings.pairing.why(host),
        links=tuple(findings.sentences()),
    )


def as_json(report: HostReport) -> str:
    """One line."""
    return json.dumps(report.fields(), separators=(",", ":"))
