# SPDX-License-Identifier: Apache-2.0
"""JobSets that are being made again, kept whole in ConfigMaps from before they are deleted.

A record is written first and deleted last.  While it is there, its JobSet is to be as the record says, and
every holder of the lease goes on with it from whatever it finds: the old object, none, or the new one.  Only
an old object that was changed since ends a record without its deletion: it would be made again without the
change.  The name of a record is that of its JobSet, so that there is one at a time.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from dataclasses import dataclass

from supervisor.orchestrators.gke.client import CONFIG_MAPS, Api, ApiError, Object
from supervisor.orchestrators.gke.names import annotations_of

LABEL = "supervisor/record"
#: On a record: namespace and name of its JobSet.
_JOBSET = "supervisor/jobset"
_DATA = "record.json.gz"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One JobSet that is made again.

    Attributes:
        command: that it is for.
        uid: of the object that is to go.
        original: all of it, for people.
        wanted: the object that is to be.
        stored: the ConfigMap itself.
    """

    command: str
    uid: str
    original: Object
    wanted: Object
    stored: Object

    @property
    def name(self) -> str:
        name: str = self.wanted["metadata"]["name"]
        return name


class Records:
    """Records of one namespace's JobSets, in the supervisor's own namespace."""

    def __init__(self, api: Api, own_namespace: str, namespace: str) -> None:
        self._api, self._own, self._namespace = api, own_namespace, namespace

    async def find(self, jobset: str) -> Record | None:
        stored = await self._api.try_get(CONFIG_MAPS, self._name(jobset), self._own)
        return _read(stored) if stored is not None else None

    async def names(self) -> list[str]:
        """JobSets that have a record, whether it can be read or not."""
        stored, _ = await self._api.list(CONFIG_MAPS, self._own, labels=f"{LABEL}={self._namespace}")
        return [annotations_of(one).get(_JOBSET, "").partition("/")[2] for one in stored]

    async def write(self, command: str, original: Object, wanted: Object) -> Record:
        """Keep it.

        Raises:
            ApiError: it is not kept, or 409: another one is under way.
        """
        plain = {
            "command": command,
            "uid": original["metadata"]["uid"],
            "original": original,
            "wanted": wanted,
        }
        text = base64.b64encode(gzip.compress(json.dumps(plain).encode(), mtime=0)).decode()
        name = wanted["metadata"]["name"]
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": self._name(name),
                "labels": {LABEL: self._namespace},
                "annotations": {
                    _JOBSET: f"{self._namespace}/{name}",
                    "supervisor/command": command,
                },
            },
            "binaryData": {_DATA: text},
        }
        return _read(await self._api.create(CONFIG_MAPS, body, self._own))

    async def remove(self, record: Record) -> None:
        await self._api.delete(CONFIG_MAPS, record.stored)

    def _name(self, jobset: str) -> str:
        return "jobset-" + hashlib.sha256(f"{self._namespace}/{jobset}".encode()).hexdigest()[:16]


def _read(stored: Object) -> Record:
    name = stored["metadata"]["name"]
    try:
        plain = json.loads(gzip.decompress(base64.b64decode(stored["binaryData"][_DATA])))
        return Record(stored=stored, **plain)
    except (KeyError, TypeError, ValueError, OSError, EOFError) as error:
        raise ApiError(
            f"record {name} cannot be read: {error!r}; look at it, and delete it", code=422
        ) from error
