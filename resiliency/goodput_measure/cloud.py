# SPDX-License-Identifier: Apache-2.0
"""The border to Google Cloud Logging: the only file that touches its client.

The client is optional and imported on first use.  Whatever it raises leaves this file as
`ControlPlaneError`, so that a caller has one thing to catch.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from resiliency.errors import ControlPlaneError
from resiliency.events import JsonValue

_CLIENT = "google.cloud.logging"
#: Key of the entry about itself that the client puts before the first entry of each process, in the same log.
_DIAGNOSTIC = "logging.googleapis.com/diagnostic"


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
