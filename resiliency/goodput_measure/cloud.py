# SPDX-License-Identifier: Apache-2.0
"""The border to Google Cloud Logging: the only file that touches its client, or knows its entries.

The client is optional and imported on first use.  Whatever it raises leaves this file as
`ControlPlaneError`, so that a caller has one thing to catch.

An export has each event in a LogEntry: ``gcloud logging read --format=json`` and the sinks to storage write
them.  `event_in_entry` takes the event out.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from resiliency.errors import ControlPlaneError
from resiliency.events import JsonValue

_CLIENT = "google.cloud.logging"
#: Key of the entry about itself that the client puts before the first entry of each process, in the same log.
_DIAGNOSTIC = "logging.googleapis.com/diagnostic"
#: What an entry has one of, beside `logName` and `insertId`.
_PAYLOADS = ("jsonPayload", "textPayload", "protoPayload")
#: Agents that read a log file and do not parse its lines put them under these keys.
_LINE_KEYS = ("message", "log")
_FRACTION = re.compile(r"\.(\d+)")


def is_log_entry(record: object) -> bool:
    """Whether `record` is a LogEntry of an export, and no event."""
    return (
        isinstance(record, Mapping)
        and "event_type" not in record
        and ("logName" in record or any(name in record for name in _PAYLOADS))
    )


def event_in_entry(entry: Mapping[str, Any]) -> Mapping[str, JsonValue] | str | None:
    """The event of a LogEntry: an object, or a line to parse; None where the entry has another subject.

    An agent takes the key `timestamp` out of what it reads; then the entry has it.
    """
    payload = entry.get("jsonPayload", entry.get("textPayload"))
    if isinstance(payload, Mapping) and "event_type" not in payload:
        payload = next((payload[name] for name in _LINE_KEYS if name in payload), None)
    if isinstance(payload, str):
        return payload if payload.lstrip().startswith("{") and '"event_type"' in payload else None
    if not isinstance(payload, Mapping):
        return None
    if "timestamp" in payload or not isinstance(stamp := entry.get("timestamp"), str):
        return payload
    return {**payload, "timestamp": _FRACTION.sub(lambda found: f".{found[1]:0<6.6}", stamp)}


def is_installed() -> bool:
    """True when the Google Cloud Logging client can be imported; imports only its namespaces."""
    try:
        return importlib.util.find_spec(_CLIENT) is not None
    except ModuleNotFoundError:  # find_spec imports the parents, and `google` itself may be missing
        return False


def _client_errors() -> tuple[type[Exception], ...]:
    """What the client raises for missing credentials, refused calls and a network that is down."""
    auth = importlib.import_module("google.auth.exceptions")
    api = importlib.import_module("google.api_core.exceptions")
    return (auth.GoogleAuthError, api.GoogleAPIError, OSError)


class CloudLog:
    """The log ``<job_name>-goodput`` of the project that the ambient credentials name.

    Raises:
        ControlPlaneError: the client is not installed, finds no credentials or no project.
    """

    def __init__(self, job_name: str) -> None:
        self.name = f"{job_name}-goodput"
        try:
            client_module = importlib.import_module(_CLIENT)
            self._errors = _client_errors()
        except ImportError as error:
            raise ControlPlaneError(
                f"the Google Cloud Logging client cannot be imported: {error}.",
                hint="Install it with: pip install 'resiliency[cloud]', or keep events in a file: "
                "GOODPUT_USE_FILE_TRACKING=1 when training, --log-file when calculating.",
            ) from error
        try:
            # Any: the client ships no types that hold for all of its releases.
            self._client: Any = client_module.Client()
            self._log: Any = self._client.logger(self.name)
        except self._errors as error:
            raise self._mapped("open", error) from error

    def write(self, record: Mapping[str, JsonValue]) -> None:
        """Send one entry; blocks for a round trip."""
        try:
            self._log.log_struct(dict(record), severity="INFO")
        except self._errors as error:
            raise self._mapped("write to", error) from error

    def read(self, *, since: datetime) -> Iterator[Mapping[str, JsonValue]]:
        """Payloads of the entries since `since`, oldest first, fetched page by page.

        Every number is a float and keys are in no order: a payload is a protobuf Struct.  Entries of
        the client about itself are left out.
        """
        where = (
            f'logName="projects/{self._client.project}/logs/{self.name}" AND timestamp>="{since.isoformat()}"'
        )
        try:
            for entry in self._client.list_entries(filter_=where, order_by="timestamp asc", page_size=1000):
                if isinstance(entry.payload, Mapping) and _DIAGNOSTIC not in entry.payload:
                    yield entry.payload
        except self._errors as error:
            raise self._mapped("read", error) from error

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()

    def _mapped(self, verb: str, error: Exception) -> ControlPlaneError:
        return ControlPlaneError(
            f"cannot {verb} the cloud log {self.name!r}: {type(error).__name__}: {error}.",
            hint="Check credentials (gcloud auth application-default login) and the project.",
            log=self.name,
        )
