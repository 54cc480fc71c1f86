# SPDX-License-Identifier: Apache-2.0
"""A place for one checkpointer of one rank, and a small state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.checkpoint.checkpointer import Checkpointer, CheckpointerOptions
from resiliency.events import EventStream
from resiliency.runtime import RunInfo

SOON = timedelta(seconds=60)


def make_state(value: float, size: int = 1000) -> dict[str, object]:
    return {"weights": torch.full((size,), float(value)), "lr": value}


@dataclass
class Place:
    """Where one job of a test lives."""

    root: Path
    job: str

    @property
    def directory(self) -> Path:
        return self.root / "ckpt"

    def open(
        self,
        *,
        events: EventStream | None = None,
        keep: int = 3,
        every_steps: int = 1,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        **options: object,
    ) -> Checkpointer:
        # A busy machine leaves an agent, which yields to all others, without time for some seconds.
        options.setdefault("link", LinkOptions(silence=timedelta(seconds=30), grace=timedelta(seconds=5)))
        return Checkpointer(
            self.directory,
            every_steps=every_steps,
            keep=keep,
            optimizers=optimizers,
            info=RunInfo(job_name=self.job, host="here"),
            events=events,
            options=CheckpointerOptions(**options),  # type: ignore[arg-type]
        )
