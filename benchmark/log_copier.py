# SPDX-License-Identifier: Apache-2.0
"""Logs on this host's disk, copied to remote storage behind training's back."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path

logger = logging.getLogger(__name__)


class LogCopier:
    """Copies new and changed files from `source` to `target` every `interval_s` seconds and at close.

    A remote directory that fails costs a warning and a later try, never a training step.
    """

    def __init__(self, source: Path, target: Path, *, interval_s: float = 60.0) -> None:
        self._source, self._target, self._interval_s = source, target, interval_s
        self._copied: dict[Path, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-copier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, after one last copy; gives up after 60 s."""
        self._stop.set()
        self._thread.join(timeout=60)
        if self._thread.is_alive():
            logger.warning("the last copy of logs to %s did not end in time", self._target)

    def __enter__(self) -> LogCopier:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        for path in sorted(self._source.rglob("*")):
            try:
                stat = path.stat()
                version = (stat.st_mtime_ns, stat.st_size)
                if path.is_file() and self._copied.get(path) != version:
                    target = self._target / path.relative_to(self._source)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, target)
                    self._copied[path] = version
            except OSError as error:
                logger.warning("could not copy %s to %s: %s", path, self._target, error)
