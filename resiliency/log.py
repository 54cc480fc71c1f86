# SPDX-License-Identifier: Apache-2.0
"""Structured logging, configured once by an entry point and never by the library.

Each line carries job, host, rank, attempt and step, either as readable text or as one JSON object
a line (`RESILIENCY_LOG_FORMAT=json`), so that the lines of thousands of ranks can be merged.
Library modules only call ``logging.getLogger(__name__)``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TextIO

from resiliency.errors import ConfigError
from resiliency.runtime import RunInfo

LEVEL_ENV = "RESILIENCY_LOG_LEVEL"
FORMAT_ENV = "RESILIENCY_LOG_FORMAT"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_step: int | None = None


def set_step(step: int | None) -> None:
    """Set the step that following lines of this process carry."""
    global _step
    _step = step


class _Context(logging.Filter):
    def __init__(self, info: RunInfo) -> None:
        super().__init__()
        self._info = info

    def filter(self, record: logging.LogRecord) -> bool:
        record.job = self._info.job_name
        record.host = self._info.host
        record.rank = self._info.rank
        record.attempt = self._info.attempt
        record.step = _step
        return True


class TextFormatter(logging.Formatter):
    """``11:03:52.120 INFO  host rank 3 attempt 1 step 40 resiliency.launch: text``"""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc)
        where = [str(getattr(record, "host", ""))]
        for name in ("rank", "attempt", "step"):
            value = getattr(record, name, None)
            if value is not None:
                where.append(f"{name} {value}")
        stamp = f"{when:%H:%M:%S}.{when.microsecond // 1000:03d}"
        text = f"{stamp} {record.levelname:<7} {' '.join(where)} {record.name}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if record.stack_info:
            text += "\n" + self.formatStack(record.stack_info)
        return text


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the names that log collectors expect."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "severity": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("job", "host", "rank", "attempt", "step"):
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, ensure_ascii=False)


def configure(
    info: RunInfo,
    *,
    level: str | None = None,
    env: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
) -> logging.Handler:
    """Attach one handler to the root logger; call it from an entry point, once per process.

    A second call replaces the handler of the first.  Handlers of others stay.

    Args:
        level: one of `LEVELS`; default: RESILIENCY_LOG_LEVEL, else INFO.
        stream: default stderr, as torchrun does, so that stdout stays the program's own.
    Raises:
        ConfigError: unknown level or format.
    """
    env = os.environ if env is None else env
    level = (level or env.get(LEVEL_ENV) or "INFO").upper()
    if level not in LEVELS:
        raise ConfigError(
            f"unknown log level {level!r}; choose from {', '.join(LEVELS)}.", flag="--log-level"
        )
    form = (env.get(FORMAT_ENV) or "text").lower()
    formatters: dict[str, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}
    if form not in formatters:
        raise ConfigError(f"{FORMAT_ENV} must be text or json, found {form!r}.", variable=FORMAT_ENV)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.set_name("resiliency")
    handler.setFormatter(formatters[form]())
    handler.addFilter(_Context(info))
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == "resiliency"]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.getLogger("resiliency").setLevel(level)
    # Other libraries' INFO is noise at a thousand ranks; it is there when somebody debugs.
    root.setLevel(logging.INFO if level == "DEBUG" else max(logging.WARNING, logging.getLevelName(level)))
    return handler
