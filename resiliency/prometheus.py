# SPDX-License-Identifier: Apache-2.0
"""Prometheus' text format, for whoever has numbers to expose."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: A metric's name without the prefix, labels, and the value; None is "not known".
Sample = tuple[str, Mapping[str, str], "float | None"]


@dataclass(frozen=True)
class Metric:
    """One family of samples.

    Attributes:
        name: without the prefix that a page's metrics share.
        kind: gauge or counter.
        help: one sentence.
    """

    name: str
    kind: str
    help: str


def to_text(prefix: str, metrics: Collection[Metric], samples: Iterable[Sample]) -> str:
    """One page: families in the order of `metrics`, samples in their own.

    A sample whose value is not known is left out, and so is a family without samples.

    Raises:
        KeyError: a sample of no metric that is given.
    """
    families: dict[str, list[str]] = {metric.name: [] for metric in metrics}
    for name, labels, value in samples:
        if value is not None:
            families[name].append(f"{prefix}{name}{_labels(labels)} {_number(value)}\n")
    return "".join(
        f"# HELP {prefix}{metric.name} {_escape_help(metric.help)}\n"
        f"# TYPE {prefix}{metric.name} {metric.kind}\n" + "".join(lines)
        for metric in metrics
        if (lines := families[metric.name])
    )


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape(text: str) -> str:
    return _escape_help(text).replace('"', r"\"")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))  # "inf" and "nan" are read
