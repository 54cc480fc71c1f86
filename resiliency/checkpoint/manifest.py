# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says about itself: one index per rank, and the manifest that commits it.

The checksums form a chain.  The manifest holds the digest of every rank's index, each index holds
the digests of all chunks of that rank's files, and the manifest seals itself: one bad byte
anywhere is found, and by whom it was written is known.  All of it is JSON, readable by people.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from resiliency.checkpoint.checksums import DEFAULT_ALGORITHM, digest_function
from resiliency.checkpoint.shard_file import FileRecord
from resiliency.checkpoint.storage import Storage, read_file, write_file
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointMissing, ConfigError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """Where the bytes of one rank's part of a tensor are.

    `dtype` is torch's name without its prefix ("bfloat16"); `offsets` and `shape` place the part
    within `global_shape`; the bytes are contiguous in row-major order.  `key` is the name that
    all ranks share and, with `offsets`, identifies the part.

    Args:
        path: where the tensor stands in the state, for formats that rebuild the tree.
        record: start and length of the self-contained record around the bytes, if there is one.
        hidden: memory behind views, no tensor of the state itself.
        attributes: what a registered sharded type adds (`TensorEntry.attributes`), for formats that say
            it in their metadata.
    """

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    position: int
    size_bytes: int
    path: tuple[str | int, ...] = ()
    record: tuple[int, int] | None = None
    hidden: bool = False
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class BlobRecord:
    """Bytes that are no tensor: layout, values, or (with a `path`) one leaf of the state."""

    key: str
    file: str
    position: int
    size_bytes: int
    path: tuple[str | int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankIndex:
    """All that one rank wrote.  The file with this is the rank's vote that it is complete.

    Names of files are relative to the directory of the checkpoint, which may be moved.  Ranks of one
    `group` have interchangeable shards (see `Shard.group`).

    `try_number`: which try of the save it votes in.  Of no concern once the checkpoint is committed.
    """

    rank: int
    step: int
    run_id: str
    save_id: str
    fingerprint: str
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    blobs: tuple[BlobRecord, ...] = ()
    group: str = ""
    try_number: int = 1

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def blob(self, key: str) -> BlobRecord | None:
        return next((blob for blob in self.blobs if blob.key == key), None)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The commit: a checkpoint exists when this is durable and no marker stands beside it.

    Args:
        ranks: rank to digest of its index file.
        files: files of the checkpoint as a whole (such as `.metadata`), written before this.
    """

    step: int
    run_id: str
    save_id: str
    world_size: int
    format: str
    ranks: Mapping[int, str]
    files: tuple[FileRecord, ...] = ()
    created: str = ""
    format_version: int = field(default=FORMAT_VERSION)


def index_name(directory: str, rank: int) -> str:
    """Completion file of a rank."""
    return f"{directory}/rank={rank}.json"


def write_index(storage: Storage, directory: str, index: RankIndex) -> str:
    """Vote: everything of this rank is durable.  Returns the digest."""
    content, digest = _sealed(_index_body(index))
    write_file(storage, index_name(directory, index.rank), content)
    return digest


def try_read_index(storage: Storage, directory: str, rank: int) -> tuple[RankIndex, str] | None:
    """The index of a rank and its digest; None when it is absent or still being written."""
    try:
        return read_index(storage, directory, rank)
    except (CheckpointIncomplete, CheckpointCorrupt):
        return None


def read_index(
    storage: Storage, directory: str, rank: int, digest: str | None = None
) -> tuple[RankIndex, str]:
    """The index of a rank and its digest.

    Raises:
        CheckpointIncomplete: the rank has none.
        CheckpointCorrupt: it does not match its own digest, or not `digest`.
    """
    name = index_name(directory, rank)
    path = storage.describe(name)
    try:
        content = read_file(storage, name)
    except CheckpointMissing as error:
        raise CheckpointIncomplete(
            f"rank {rank} has no index {path}.", rank=rank, path=path, missing_ranks=[rank]
        ) from error
    return parse_index(content, path, digest)


def parse_index(content: bytes, path: str, digest: str | None = None) -> tuple[RankIndex, str]:
    """An index from the bytes of its file, and its digest; `path` is for messages.

    Raises:
        CheckpointCorrupt: it does not match its own digest, or not `digest`.
    """
    record, found = _unsealed(content, path)
    if digest is not None and digest != found:
        raise CheckpointCorrupt(
            f"{path} is not the index that was committed: digest {found}, expected {digest}.",
            hint="It belongs to another save; restore another checkpoint.",
            path=path,
            expected=digest,
            found=found,
        )
    return _index(record, path), found


def write_manifest(storage: Storage, directory: str, manifest: Manifest) -> None:
    write_file(storage, f"{directory}/{MANIFEST}", _sealed(_json(asdict(manifest)))[0])


def read_manifest(storage: Storage, directory: str) -> Manifest:
    """The manifest of a checkpoint, verified against its own digest.

    Raises:
        CheckpointIncomplete: there is none: the checkpoint was never committed.
        CheckpointCorrupt: it is not what was written.
    """
    return parse_manifest(read_manifest_bytes(storage, directory), manifest_path(storage, directory))


def read_manifest_bytes(storage: Storage, directory: str) -> bytes:
    """The file that is the manifest of a checkpoint, as it is.

    Raises:
        CheckpointIncomplete: there is none: the checkpoint was never committed.
    """
    try:
        return read_file(storage, f"{directory}/{MANIFEST}")
    except CheckpointMissing as error:
        path = manifest_path(storage, directory)
        raise CheckpointIncomplete(
            f"there is no {path}: the checkpoint was never committed.", path=path
        ) from error


def manifest_path(storage: Storage, directory: str) -> str:
    """Where it is, for messages."""
    return storage.describe(f"{directory}/{MANIFEST}")


def parse_manifest(content: bytes, path: str) -> Manifest:
    """A manifest from the bytes of its file; `path` is for messages.

    Raises:
        CheckpointCorrupt: it does not match its own digest.
    """
    record, _ = _unsealed(content, path)
    with _parsing(path):
        return Manifest(
            **{
                **record,
                "ranks": {int(rank): str(digest) for rank, digest in record["ranks"].items()},
                "files": tuple(_file(item) for item in record["files"]),
            }
        )


def _index_body(index: RankIndex) -> str:
    before = {name: getattr(index, name) for name in ("rank", "step", "run_id", "save_id", "fingerprint")}
    before["files"] = [vars(file) for file in index.files]
    after: dict[str, object] = {"blobs": [vars(blob) for blob in index.blobs], "group": index.group}
    if index.try_number > 1:  # older versions know no such field, and first tries they still read
        after["try_number"] = index.try_number
    return f'{_json(before)[:-1]},"tensors":{_tensors_json(index.tensors)},{_json(after)[1:]}'


# By content, not by layout.  The tensors of a rank are the same at every save, and to render thousands
# takes longer than to write them.  As many as two tiers of a large host need.
@functools.lru_cache(maxsize=32)
def _tensors_json(tensors: tuple[TensorRecord, ...]) -> str:
    return _json([vars(tensor) for tensor in tensors])


def _json(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))


def _sealed(body: str) -> tuple[bytes, str]:
    digest = digest_function(DEFAULT_ALGORITHM)(body.encode())
    return f"{_header(DEFAULT_ALGORITHM, digest)}\n{body}\n}}\n".encode(), digest


def _header(algorithm: str, digest: str) -> str:
    return f'{{"algorithm":"{algorithm}","digest":"{digest}","body":'


def _unsealed(content: bytes, path: str) -> tuple[dict[str, Any], str]:
    """Body and digest.  The digest is over the very bytes of the body, which is why the file has
    lines: no canonical form of JSON is needed."""
    head, _, rest = content.partition(b"\n")
    body, _, tail = rest.partition(b"\n")
    with _parsing(path):
        header = json.loads(head + b'""}')
        found = digest_function(header["algorithm"])(body)
        intact = head == _header(header["algorithm"], found).encode() and tail == b"}\n"
        if not intact:
            raise CheckpointCorrupt(
                f"{path} was changed or cut: digest {found}, expected {header['digest']}.",
                hint="Restore another checkpoint.",
                path=path,
                expected=header["digest"],
                found=found,
            )
        record = json.loads(body)
        if record.get("format_version", FORMAT_VERSION) > FORMAT_VERSION:
            raise ConfigError(
                f"{path} has format version {record['format_version']}, this release reads "
                f"up to {FORMAT_VERSION}.",
                hint="Upgrade this library on the machine that reads.",
                path=path,
            )
        return record, found


@contextlib.contextmanager
def _parsing(path: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"{path} is not a file of this format: {type(error).__name__}: {error}.",
            hint="It was cut, changed, or written by another program; restore another checkpoint.",
            path=path,
        ) from error


def _index(record: dict[str, Any], path: str) -> RankIndex:
    with _parsing(path):
        return RankIndex(
            **{
                **record,
                "files": tuple(_file(item) for item in record["files"]),
                "tensors": tuple(_tensor(item) for item in record["tensors"]),
                "blobs": tuple(
                    BlobRecord(**{**item, "path": tuple(item["path"])}) for item in record["blobs"]
                ),
            }
        )


def _file(item: dict[str, Any]) -> FileRecord:
    return FileRecord(**{**item, "digests": tuple(item["digests"])})


def _tensor(item: dict[str, Any]) -> TensorRecord:
    tuples = {name: tuple(item[name]) for name in ("global_shape", "offsets", "shape", "path")}
    record = item["record"] and tuple(item["record"])
    attributes = tuple((name, text) for name, text in item.get("attributes", ()))
    return TensorRecord(**{**item, **tuples, "record": record, "attributes": attributes})
