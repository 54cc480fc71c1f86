# SPDX-License-Identifier: Apache-2.0
"""Receiving one copy: one thread reads the connection, another verifies and writes what came.

The chunks pass between them in a few page-aligned buffers that are used again and again, so that
the network, the digest and the disk work at once and nothing is copied.  While the disk is slow the
sender hears beats; if the disk refuses, it hears why, and the space is free again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from resiliency.checkpoint.replication.copy_plan import CopyPlan
from resiliency.checkpoint.replication.existing import ReplicaKept
from resiliency.checkpoint.replication.replica_store import ReplicaStore, ReplicaWriter
from resiliency.checkpoint.replication.transport.connection import Link
from resiliency.checkpoint.replication.transport.messages import (
    RANGES,
    Chunk,
    End,
    Held,
    Offer,
    PeerHeartbeat,
    Refusal,
    Verified,
    Wanted,
    refused,
)
from resiliency.checkpoint.storage.memory import PAGE_BYTES, page_memory
from resiliency.checkpoint.threads import TaskThread
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointWriteFailed,
    ConfigError,
    PeerError,
    ResourceShortage,
)
from resiliency.runtime import awake_s

logger = logging.getLogger(__name__)

#: Manifest and indexes of one host: 100,000 tensors and a terabyte of chunks take a tenth of it.
OFFER_BYTES = 512 << 20
_BUFFERS = 4
_T = TypeVar("_T")


class _StorageHangs(CheckpointWriteFailed):
    """Neither done nor failed in time: nothing more can be asked of it."""


def _suspend(beginning: Future[ReplicaWriter]) -> None:
    if beginning.exception() is None:
        beginning.result().suspend()


class CopyReceiver:
    """Answers one offer; `run` returns when the connection can be closed.

    Args:
        release: called when nothing of this is left, which on a hanging disk is after `run`.
    Raises:
        ResourceShortage: this process may have no more threads; then there is nothing to release.
    """

    def __init__(
        self,
        link: Link,
        store: ReplicaStore,
        *,
        attempt_id: str,
        release: Callable[[], None],
    ) -> None:
        self._link = link
        self._store = store
        self._received_bytes = 0
        self._attempt_id = attempt_id
        self._release = release
        self._disk = TaskThread("resiliency-replica")

    def run(self, offer: Offer, size_bytes: int) -> None:
        """Receive what `offer` offers.

        Raises:
            PeerError: the connection broke, or the other side broke the protocol.
        """
        replica_writer: ReplicaWriter | None = None
        beginning: Future[ReplicaWriter] | None = None
        try:
            copy_plan = self._read_offer(offer, size_bytes)
            beginning = self._disk.submit(
                partial(self._store.begin, offer.source_host, copy_plan, attempt_id=self._attempt_id)
            )
            replica_writer = self._result(beginning)
            if replica_writer.is_held:
                self._link.send(Held())
                return
            self._receive(replica_writer, copy_plan)
            self._apart(replica_writer.finish)
            logger.info(
                "replica of %s, step %d: %d bytes, %d of them over this connection",
                offer.source_host,
                offer.step,
                copy_plan.size_bytes,
                self._received_bytes,
            )
            self._link.send(Verified())
        except _StorageHangs as error:
            self._refuse(Refusal.STORAGE, error)
        except CheckpointWriteFailed as error:
            if replica_writer is not None:
                self._apart(replica_writer.abort)
            self._refuse(Refusal.STORAGE, error)
        except CheckpointIncomplete as error:
            self._refuse(Refusal.INCOMPLETE, error)
        except CheckpointCorrupt as error:
            self._refuse(Refusal.CORRUPT if "chunk" in error.fields else Refusal.INVALID, error)
        except ReplicaKept as error:
            self._refuse(Refusal.KEPT, error)
        except ResourceShortage as error:
            self._refuse(Refusal.BUSY, error)
        except (CheckpointError, ConfigError) as error:
            self._refuse(Refusal.INVALID, error)
        finally:
            # In order behind what the disk still does, which may have outlasted the connection.
            if beginning is not None:
                self._disk.submit(partial(_suspend, beginning))
            self._disk.submit(self._release)
            self._disk.close()

    def _read_offer(self, offer: Offer, size_bytes: int) -> CopyPlan:
        sane = len(offer.sizes) == len(offer.ranks) + 1 == len(set(offer.ranks)) + 1
        if not sane or min(offer.sizes) < 0 or not sum(offer.sizes) == size_bytes <= OFFER_BYTES:
            raise PeerError(f"{self._link.host} offers {offer.sizes[:8]} of {size_bytes} bytes.")
        contents = []
        for size in offer.sizes:
            content = bytearray(size)
            self._link.receive_bytes(memoryview(content))
            contents.append(bytes(content))
        indexes = dict(zip(offer.ranks, contents[1:], strict=True))
        copy_plan = CopyPlan.of(contents[0], indexes, step=offer.step)
        if copy_plan.save_id != offer.save_id:
            raise CheckpointCorrupt(
                f"the offer is of save {offer.save_id!r}, its manifest of {copy_plan.save_id!r}."
            )
        return copy_plan

    def _receive(self, replica_writer: ReplicaWriter, copy_plan: CopyPlan) -> None:
        size = -(-copy_plan.chunk_bytes // PAGE_BYTES) * PAGE_BYTES
        free = [page_memory(size) for _ in range(_BUFFERS)]
        writing: deque[tuple[Future[None], memoryview]] = deque()
        self._link.send(Wanted(ranges=replica_writer.missing(RANGES)))
        while True:
            message, length = self._link.receive()
            if isinstance(message, Chunk):
                if not free:
                    future, buffer = writing.popleft()
                    self._result(future)
                    free.append(buffer)
                buffer = free.pop()
                self._receive_chunk(copy_plan, message, length, buffer)
                data = buffer[:length]
                written = self._disk.submit(
                    partial(replica_writer.write_chunk, message.file, message.number, data)
                )
                writing.append((written, buffer))
            elif length or not isinstance(message, (End, PeerHeartbeat)):
                raise PeerError(f"{self._link.host} said {message.kind} within a copy.", host=self._link.host)
            # An error is told as soon as it is known, not at the end.
            while writing and (writing[0][0].done() or isinstance(message, End)):
                future, buffer = writing.popleft()
                self._result(future)
                free.append(buffer)
            if isinstance(message, End):
                return

    def _receive_chunk(self, copy_plan: CopyPlan, chunk: Chunk, length: int, buffer: memoryview) -> None:
        if (
            not copy_plan.has(chunk.file, chunk.number)
            or length != copy_plan.extent(chunk.file, chunk.number)[1]
        ):
            raise PeerError(
                f"{self._link.host} sent {length} bytes as chunk {chunk.number} of file {chunk.file}.",
                host=self._link.host,
            )
        self._link.receive_bytes(buffer[:length])
        self._received_bytes += length

    def _apart(self, work: Callable[[], _T]) -> _T:
        return self._result(self._disk.submit(work))

    def _result(self, future: Future[_T]) -> _T:
        """What the disk's thread did; meanwhile the sender hears that we live."""
        heartbeat_s = self._link.timeouts.heartbeat_s
        deadline = awake_s() + self._link.timeouts.storage.total_seconds()
        while not future.done() and not wait([future], heartbeat_s).done:
            self._link.send(PeerHeartbeat())
            if awake_s() > deadline:
                raise _StorageHangs("the storage of this host does not answer.")
        return future.result()

    def _refuse(self, why: Refusal, error: Exception) -> None:
        logger.warning("a copy from %s was refused: %s", self._link.host, error)
        where = {name: error.fields[name] for name in ("file", "chunk")} if why is Refusal.CORRUPT else {}  # type: ignore[attr-defined]
        self._link.send(refused(why, error, **where))
        self._link.finish()
