# SPDX-License-Identifier: Apache-2.0
"""A storage whose calls hang when they are told to."""

from __future__ import annotations

import os
from pathlib import Path


class Hang:
    """From now on, who asks whether `step` is marked does not get an answer."""

    def __init__(self, directory: Path, step: int) -> None:
        self._pipe = directory / f"step={step}-unfinished"
        os.mkfifo(self._pipe)

    def end(self) -> None:
        """Who waits gets an answer."""
        aside = self._pipe.with_name("aside")
        self._pipe.rename(aside)
        os.close(os.open(aside, os.O_RDWR | os.O_NONBLOCK))
        aside.unlink()

    def take_away(self) -> None:
        """Only who asks from now on gets one."""
        self._pipe.unlink()
