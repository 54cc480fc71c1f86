# SPDX-License-Identifier: Apache-2.0
"""A substitute for Google's client, and the forms in which its log is exported."""

from __future__ import annotations

import json
import os
from pathlib import Path

# A real package on disk, found by the real import system.  Its log is a file of the entries that a sink to
# storage would write: the payload is a protobuf Struct, so every number is a double, and keys have no order.
# Like the real one, it puts an entry about itself before the first one of a process.
_FILES = {
    "google/cloud/logging/__init__.py": """
import json, os
from datetime import datetime, timezone
import google.auth.exceptions
import google.api_core.exceptions
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Struct
class _Entry:
    def __init__(self, payload): self.payload = payload
class _Log:
    def __init__(self, name):
        self.name, self.path, self.introduced = name, name + ".cloud", False
    def log_struct(self, record, severity):
        written = len(open(self.path).readlines()) - 1 if os.path.exists(self.path) else 0
        if written >= int(os.environ.get("REFUSE_AFTER", 99)):
            raise google.api_core.exceptions.GoogleAPIError("quota")
        if not self.introduced:
            self.introduced = True
            self._append({"logging.googleapis.com/diagnostic": {"instrumentation_source": []}}, "INFO")
        self._append(record, severity)
    def _append(self, record, severity):
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f") + "789Z"
        entry = {
            "insertId": os.urandom(8).hex(),
            "jsonPayload": MessageToDict(ParseDict(record, Struct())),
            "labels": {"python_logger": "x"},
            "logName": "projects/p/logs/" + self.name,
            "receiveTimestamp": now,
            "resource": {"labels": {"project_id": "p"}, "type": "global"},
            "severity": severity,
            "timestamp": now,
        }
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\\n")
class Client:
    project = "p"
    def __init__(self):
        if os.environ.get("NO_CREDENTIALS"):
            raise google.auth.exceptions.GoogleAuthError("no credentials")
    def logger(self, name): return _Log(name)
    def list_entries(self, filter_, order_by, page_size):
        name = filter_.split("/logs/")[1].split('"')[0]
        with open(name + ".cloud") as file:
            for line in file:
                yield _Entry(json.loads(line)["jsonPayload"])
    def close(self): pass
""",
    "google/auth/__init__.py": "",
    "google/auth/exceptions.py": "class GoogleAuthError(Exception): pass\n",
    "google/api_core/__init__.py": "",
    "google/api_core/exceptions.py": "class GoogleAPIError(Exception): pass\n",
}


def environment(site: Path, **more: str) -> dict[str, str]:
    """That of this process, with the substitute, and with its goodput log in the cloud."""
    for name, text in _FILES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if name != "GOODPUT_USE_FILE_TRACKING"}
    return {**kept, "PYTHONPATH": path, **more}


def payloads(path: Path) -> list[dict[str, object]]:
    """What was written to the log of the substitute, without what it wrote itself."""
    entries = [json.loads(line)["jsonPayload"] for line in path.read_text().splitlines()]
    return [payload for payload in entries if "event_type" in payload]


def gcloud_text(entries: list[dict[str, object]]) -> str:
    """As ``gcloud logging read --format=json`` prints them: an array, the newest entry first."""
    return json.dumps(entries[::-1], indent=2, sort_keys=True) + "\n"
