# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says about itself: one index per rank, and the manifest that commits it.

The checksums form a chain.  The manifest holds the digest of every rank's index, each index holds
the digests of all chunks of that rank's files, and the manifest seals itself: one bad byte
anywhere is found, and by whom it was written is known.  All of it is JSON, readable by people.

An index begins with its head: sizes, checksums, places of layout and values.  The long tables of tensors
follow, and are read when a reader needs them (`resiliency.checkpoint.format.index_tables`).  The manifest
says which ranks wrote what several hold (`resiliency.checkpoint.format.writers`), so no reader searches the
indexes of all.

Each save has a folder of its own in the directory of the step (`save_folder`).  Ranks write there alone; the
files that readers start from, the manifest among them, are moved up from it by the leader.  So no two saves
write under one name, and a rename that comes late fails, as the folder went with its save.

Format version 2 had no folders, and version 1 neither tables nor a word on the writers.  Both are still read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from resiliency.checkpoint.format.index_tables import (
    IndexTable,
    TableLine,
    TableRows,
    check_table,
    render_table,
)
from resiliency.checkpoint.storage.checksums import DEFAULT_ALGORITHM, digest_function
from resiliency.checkpoint.storage.chunked_file import FileRecord
from resiliency.checkpoint.storage.interface import Storage, read_file, write_file
from resiliency.errors import CheckpointCorrupt, CheckpointIncomplete, CheckpointMissing, ConfigError

MANIFEST = "manifest.json"
FORMAT_VERSION = 3
#: Begins the name of a save's folder.
SAVE_PREFIX = "save="
#: How manifests of NeMo's saves began that had a form of their own.
_OLD_NEMO = b'{\n "files": {'
#: What a reader of an index asks for first: the head, and of most indexes all.
HEAD_BYTES = 64 << 10


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
class SharedEntry:
    """An entry of a rank's state that other ranks hold as well, so that one of them writes it for all.

    Two ranks mean the same entry if all fields are equal.

    Args:
        mesh: the ranks that share it (`resiliency.checkpoint.state.rank_sets`); empty: any rank may.
    """

    key: str
    dtype: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    mesh: str = ""


@dataclass(frozen=True, kw_only=True)
class RankIndex:
    """All that one rank wrote.  The file with this is the rank's vote that it is complete.

    Names in `files` are relative to the directory of the checkpoint, which may be moved; those in `tensors`
    and `blobs` to the folder of the save, so that the tables of two saves are equal (`path_of`).  Ranks of
    one `group` have interchangeable shards (see `Shard.group`).

    Args:
        folder: of the save, in the directory of the checkpoint; empty: the directory itself.
        shown: of the files in the folder those that stock readers look for in the directory itself: the
            leader moves them there when it seals.
        tensors: what this rank wrote; read from storage at the first look (`IndexTable`).
        shared: what this rank holds and may have left to others; likewise.
        try_number: which try of the save it votes in.  Of no concern once the checkpoint is committed.
    """

    rank: int
    step: int
    run_id: str
    save_id: str
    fingerprint: str
    files: tuple[FileRecord, ...]
    tensors: Sequence[TensorRecord]
    blobs: tuple[BlobRecord, ...] = ()
    group: str = ""
    try_number: int = 1
    shared: Sequence[SharedEntry] = ()
    folder: str = ""
    shown: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def path_of(self, file: str) -> str:
        """The name in `files` of what a tensor or a blob calls `file`."""
        return file if file in self.shown else data_directory(self.folder, file)

    def placed_in(self, folder: str) -> RankIndex:
        """Of files that a format has written into `folder`, and named as if it were the checkpoint."""
        placed = replace(self, folder=folder)
        files = tuple(replace(file, name=placed.path_of(file.name)) for file in self.files)
        return replace(placed, files=files)

    def load(self) -> None:
        """Read the tables and keep them, as a look at a row does.  Raises as `check`."""
        for table in (self.tensors, self.shared):
            if isinstance(table, IndexTable):
                table.rows()

    def check(self) -> None:
        """Read and compare the tables, which a reader of the head alone has not seen.

        Raises:
            CheckpointIncomplete, CheckpointCorrupt: one is gone, or not what was written.
        """
        for table in (self.tensors, self.shared):
            if isinstance(table, IndexTable):
                table.check()

    def blob(self, key: str) -> BlobRecord | None:
        return next((blob for blob in self.blobs if blob.key == key), None)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The commit: a checkpoint exists when this is durable and no marker stands beside it.

    Args:
        ranks: rank to digest of its index file.
        files: files of the checkpoint as a whole (such as `.metadata`), written before this.
        size_bytes: of all files but manifest and indexes; None: not said, by older releases and by saves
            through torch.
        written_by: digest of a table of shared entries to the ranks that wrote them (`ranks_of` reads it);
            None: not said, likewise.
        folder: of the save, in the directory of the checkpoint, with the indexes; empty: they are in the
            directory itself.
    """

    step: int
    run_id: str
    save_id: str
    world_size: int
    format: str
    ranks: Mapping[int, str]
    files: tuple[FileRecord, ...] = ()
    created: str = ""
    size_bytes: int | None = None
    written_by: Mapping[str, str] | None = None
    format_version: int = field(default=FORMAT_VERSION)
    folder: str = ""

    def index_name(self, directory: str, rank: int) -> str:
        """Index of a rank of this checkpoint, which is in `directory`."""
        return index_name(data_directory(directory, self.folder), rank)


def save_folder(save_id: str, try_number: int) -> str:
    """Name of the folder in which one try of a save writes.  All are equally long."""
    identity = f"{try_number}:{save_id}".encode()
    return SAVE_PREFIX + hashlib.blake2b(identity, digest_size=8).hexdigest()


@functools.lru_cache(maxsize=1024)  # one object for all records of a file: `.metadata` names it that often
def data_directory(directory: str, folder: str) -> str:
    """`folder` in `directory`; one that is empty is no part of the path."""
    return f"{directory}/{folder}" if directory and folder else directory or folder


def index_name(directory: str, rank: int) -> str:
    """Completion file of a rank, in the folder of its save."""
    return f"{directory}/rank={rank}.json"


def write_index(storage: Storage, directory: str, index: RankIndex, *, suffix: str = "") -> str:
    """Vote: everything of this rank is durable.  Returns the digest.

    With `suffix`, a vote that does not count yet: a leader could read it before it is durable.
    """
    lines = {name: line for name in _ROWS if (line := _line_of(getattr(index, name))) is not None}
    tables = {name: [len(getattr(index, name)), len(line.text), line.digest] for name, line in lines.items()}
    content, digest = _sealed(_json({**_head_of(index), "tables": tables}))
    tail = b"".join(line.text for line in lines.values())
    write_file(storage, index_name(directory, index.rank) + suffix, content + tail)
    return digest


def try_read_index(storage: Storage, directory: str, rank: int) -> tuple[RankIndex, str] | None:
    """`read_index` of a vote; None when it is absent or shorter than it says."""
    try:
        return read_index(storage, directory, rank)
    except (CheckpointIncomplete, CheckpointCorrupt):
        return None


def read_index(
    storage: Storage, directory: str, rank: int, digest: str | None = None
) -> tuple[RankIndex, str]:
    """The index of a rank and its digest; of a long one its head, and the tables when they are looked at.

    Raises:
        CheckpointIncomplete: the rank has none.
        CheckpointCorrupt: it does not match its own digest, or not `digest`.
    """
    name = index_name(directory, rank)
    content, size_bytes = _read_head(storage, name, rank)
    is_whole = len(content) >= size_bytes
    load = None if is_whole else functools.partial(_read_range, storage, name)
    return _parse_index(content, storage.describe(name), digest, size_bytes, load)


def read_head(storage: Storage, directory: str, rank: int) -> tuple[RankIndex, bytes]:
    """The index of a rank, and its bytes without the tables; verified, and raises, as `read_index`."""
    name = index_name(directory, rank)
    content, size_bytes = _read_head(storage, name, rank)
    load = functools.partial(_read_range, storage, name)
    index, _ = _parse_index(content, storage.describe(name), None, size_bytes, load)
    header, body, _ = content.split(b"\n", 2)
    return index, b"\n".join((header, body, _END))


def index_of_head(storage: Storage, directory: str, rank: int, head: bytes) -> tuple[RankIndex, str]:
    """The inverse of `read_head`: an index that reads its tables when they are looked at, and its digest.

    Raises:
        CheckpointCorrupt: it does not match its own digest, or is of another rank.
    """
    name = index_name(directory, rank)
    path = storage.describe(name)
    index, digest = _parse_index(head, path, None, None, functools.partial(_read_range, storage, name))
    if index.rank != rank:
        raise CheckpointCorrupt(f"{path} is the index of rank {index.rank}.", path=path, rank=rank)
    return index, digest


def _read_head(storage: Storage, name: str, rank: int) -> tuple[bytes, int]:
    """The start of an index with its head in full, and the size of the file."""
    try:
        content, size_bytes = _read_start(storage, name)
        if len(content) < size_bytes and not _has_head(content):
            content = read_file(storage, name)
    except CheckpointMissing as error:
        path = storage.describe(name)
        raise CheckpointIncomplete(
            f"rank {rank} has no index {path}.", rank=rank, path=path, missing_ranks=[rank]
        ) from error
    return content, size_bytes


def parse_index(content: bytes, path: str, digest: str | None = None) -> tuple[RankIndex, str]:
    """An index from the bytes of its file, all of them verified, and its digest; `path` is for messages.

    Raises:
        CheckpointCorrupt: it does not match its own digest, or not `digest`.
    """
    return _parse_index(content, path, digest, len(content), None)


def table_digest(index: RankIndex, name: str) -> str:
    """Checksum of the table `name` of an index; empty where it has no rows.  Equal where the rows are."""
    table = getattr(index, name)
    if isinstance(table, IndexTable):
        return table.digest
    line = _line_of(table)
    return "" if line is None else line.digest


def write_manifest(storage: Storage, directory: str, manifest: Manifest) -> None:
    """Write it into `directory`; where saves may meet that is the folder of the save, see `show_files`."""
    write_file(storage, f"{directory}/{MANIFEST}", _sealed(_json(asdict(manifest)))[0])


def show_files(storage: Storage, directory: str, folder: str, names: Iterable[str]) -> None:
    """Move files from the folder of a save to where readers look for them.

    Raises:
        CheckpointWriteFailed: the folder is gone, as another save has begun at this step; or the storage
            refused.
    """
    for name in names:
        storage.replace(f"{directory}/{folder}/{name}", f"{directory}/{name}")


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
        ConfigError: another version of this library wrote it.
    """
    if content.startswith(_OLD_NEMO):
        raise ConfigError(
            f"{path} is of a form in which this library proved NeMo's saves before its first release.",
            hint=f"Take {MANIFEST} and checksums/ away: then NeMo's files are loaded, without a proof.",
            path=path,
        )
    record, _, rest = _unsealed(content, path)
    with _parsing(path):
        if rest:
            raise ValueError("something follows its end")
        version = record.get("format_version", FORMAT_VERSION)
        if version > FORMAT_VERSION:
            raise ConfigError(
                f"{path} has format version {version}, this release reads up to {FORMAT_VERSION}.",
                hint="Upgrade this library on the machine that reads.",
                path=path,
            )
        return Manifest(
            **{
                **record,
                "ranks": {int(rank): str(digest) for rank, digest in record["ranks"].items()},
                "files": tuple(_file(item) for item in record["files"]),
            }
        )


def _head_of(index: RankIndex) -> dict[str, object]:
    names = ("rank", "step", "run_id", "save_id", "fingerprint", "group", "try_number", "folder", "shown")
    head: dict[str, object] = {name: getattr(index, name) for name in names}
    head["files"] = [vars(file) for file in index.files]
    head["blobs"] = [vars(blob) for blob in index.blobs]
    return head


def _line_of(rows: Sequence[TensorRecord | SharedEntry]) -> TableLine | None:
    """How a table is written; None: it has no rows."""
    if not rows:
        return None
    return rows.line if isinstance(rows, TableRows) else _rendered(tuple(rows))


# By content, not by layout.  The tables of a rank are the same at every save, and to render thousands
# of rows takes longer than to write them.  As many as two tiers of a large host need.
@functools.lru_cache(maxsize=64)
def _rendered(rows: tuple[TensorRecord | SharedEntry, ...]) -> TableLine:
    return render_table(rows)


def _json(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))


def _sealed(body: str) -> tuple[bytes, str]:
    digest = digest_function(DEFAULT_ALGORITHM)(body.encode())
    return f"{_header(DEFAULT_ALGORITHM, digest)}\n{body}\n".encode() + _END, digest


#: Ends what `_sealed` makes.
_END = b"}\n"


def _header(algorithm: str, digest: str) -> str:
    return f'{{"algorithm":"{algorithm}","digest":"{digest}","body":'


def _unsealed(content: bytes, path: str) -> tuple[dict[str, Any], str, bytes]:
    """Body, digest, and what follows.  The digest is over the very bytes of the body, which is why the file
    has lines: no canonical form of JSON is needed."""
    head, _, rest = content.partition(b"\n")
    body, _, tail = rest.partition(b"\n")
    is_short = not _has_head(content)
    with _parsing(path, is_short=is_short):
        header = json.loads(head + b'""}')
        found = digest_function(header["algorithm"])(body)
        intact = head == _header(header["algorithm"], found).encode() and tail.startswith(_END)
        if not intact:
            raise CheckpointCorrupt(
                f"{path} was changed or cut: digest {found}, expected {header['digest']}.",
                hint="Restore another checkpoint.",
                path=path,
                expected=header["digest"],
                found=found,
                is_short=is_short,
            )
        return json.loads(body), found, tail[len(_END) :]


@contextlib.contextmanager
def _parsing(path: str, *, is_short: bool = False) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"{path} is not a file of this format: {type(error).__name__}: {error}.",
            hint="It was cut, changed, or written by another program; restore another checkpoint.",
            path=path,
            is_short=is_short,
        ) from error


def _read_start(storage: Storage, name: str) -> tuple[bytes, int]:
    """The first bytes of a file, and its size."""
    file = storage.open(name)
    try:
        start = bytearray(min(file.size_bytes, HEAD_BYTES))
        count = file.read_into(0, memoryview(start))
        return bytes(start[:count]), file.size_bytes
    finally:
        file.close()


def _has_head(start: bytes) -> bool:
    """Whether the start of an index is enough to read its head; of a manifest, whether it is all there."""
    return start.count(b"\n", 0, len(start) - len(_END)) >= 2


def _read_range(storage: Storage, name: str, position: int, length: int) -> bytes:
    file = storage.open(name)
    try:
        content = bytearray(length)
        count = file.read_into(position, memoryview(content))
        return bytes(content[:count])
    finally:
        file.close()


def _read_table(
    load: Callable[[int, int], bytes], position: int, length: int, digest: str, path: str
) -> bytes:
    try:
        return check_table(load(position, length), digest, path)
    except CheckpointMissing as error:
        raise CheckpointIncomplete(f"the index {path} is gone.", path=path) from error


def _parse_index(
    content: bytes,
    path: str,
    digest: str | None,
    size_bytes: int | None,
    load: Callable[[int, int], bytes] | None,
) -> tuple[RankIndex, str]:
    """An index of a file of `size_bytes` whose start, or all of it, is `content`.

    Args:
        size_bytes: None: it has been compared before.
        load: gives bytes at a position of the file; None: all of it is here.
    """
    record, found, rest = _unsealed(content, path)
    if digest is not None and digest != found:
        raise CheckpointCorrupt(
            f"{path} is not the index that was committed: digest {found}, expected {digest}.",
            hint="It belongs to another save; restore another checkpoint.",
            path=path,
            expected=digest,
            found=found,
        )
    with _parsing(path):
        fields = {
            **record,
            "files": tuple(_file(item) for item in record["files"]),
            "blobs": tuple(BlobRecord(**{**item, "path": tuple(item["path"])}) for item in record["blobs"]),
            "shown": tuple(record.get("shown", ())),
        }
        if "tables" not in record:  # version 1
            fields["tensors"] = tuple(_tensor(item) for item in record["tensors"])
            return RankIndex(**fields), found
        fields["tensors"] = ()  # where the table has no rows
        position = len(content) - len(rest)
        tables = fields.pop("tables")
        end = position + sum(length for _, length, _ in tables.values())
        if size_bytes is not None and end != size_bytes:
            raise CheckpointCorrupt(
                f"{path} holds {size_bytes} bytes, expected {end}.",
                hint="The file was cut or replaced; restore another checkpoint.",
                path=path,
                expected=end,
                found=size_bytes,
                is_short=size_bytes < end,
            )
        for name, (count, length, expected) in tables.items():
            if load is None:
                line = check_table(content[position : position + length], expected, path)
                lines = functools.partial(bytes, line)
            else:
                lines = functools.partial(_read_table, load, position, length, expected, path)
            fields[name] = IndexTable(count, expected, lines, _ROWS[name], path)
            position += length
        return RankIndex(**fields), found


def _file(item: dict[str, Any]) -> FileRecord:
    return FileRecord(**{**item, "digests": tuple(item["digests"])})


def _tensor(item: dict[str, Any]) -> TensorRecord:
    tuples = {name: tuple(item[name]) for name in ("global_shape", "offsets", "shape", "path")}
    record = item["record"] and tuple(item["record"])
    attributes = tuple((name, text) for name, text in item.get("attributes", ()))
    return TensorRecord(**{**item, **tuples, "record": record, "attributes": attributes})


def _shared(item: dict[str, Any]) -> SharedEntry:
    return SharedEntry(**{**item, "offsets": tuple(item["offsets"]), "shape": tuple(item["shape"])})


_ROWS: Mapping[str, Callable[[dict[str, Any]], TensorRecord | SharedEntry]] = {
    "tensors": _tensor,
    "shared": _shared,
}
