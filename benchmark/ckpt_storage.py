# SPDX-License-Identifier: Apache-2.0
"""Time to durable and restore from disk, beside what the disk itself can do.

    python3 benchmark/ckpt_storage.py --directory /mnt/disk --gib 0.25 1

Each round runs every contender once, in a rotating order, on files of their own names, and all
times of a round are divided by its raw times: what is compared saw the same machine.  Writes end
with fsync.  Before each read the file's pages are dropped from the page cache (`posix_fadvise`);
with unbuffered I/O there are none.  The slot is touched before the first round, as an arena is.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from resiliency.checkpoint.commit import CheckpointFormat, SaveTicket, commit
from resiliency.checkpoint.dcp_format import DcpFormat
from resiliency.checkpoint.local_format import LocalFormat
from resiliency.checkpoint.reader import CheckpointReader
from resiliency.checkpoint.storage import LocalStorage
from resiliency.checkpoint.table import Shard, StateLayout, TensorEntry, align

_PIECE_BYTES = 8 << 20


def make_shard(size_bytes: int) -> Shard:
    """A state like a transformer's with Adam: matrices of 16 MiB, and small vectors between."""
    entries: list[TensorEntry] = []
    end = 0
    while end < size_bytes:
        for shape in ((2048, 2048), (2048,), (2048,)):
            key = f"layer/{len(entries)}"
            entry = TensorEntry(
                key=key,
                name=key,
                path=("layer", len(entries)),
                dtype="float32",
                shape=shape,
                global_shape=shape,
                global_offset=(0,) * len(shape),
                stride=(2048, 1)[-len(shape) :],
                offset_bytes=end,
                size_bytes=torch.Size(shape).numel() * 4,
            )
            entries.append(entry)
            end = align(entry.end_bytes)
    layout = StateLayout(entries=tuple(entries), skeleton=b"{}")
    buffer = memoryview(mmap.mmap(-1, layout.size_bytes))
    noise = os.urandom(_PIECE_BYTES)
    for start in range(0, layout.size_bytes, _PIECE_BYTES):
        buffer[start : start + _PIECE_BYTES] = noise[: min(_PIECE_BYTES, layout.size_bytes - start)]
    return Shard(layout=layout, values=b"[]", step=1, rank=0, world_size=1, buffer=buffer)


def raw_write(path: Path, data: memoryview, *, direct: bool) -> None:
    """One thread, in order, fsync at the end; whole pages only, so that both kinds do the same."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o644)
    try:
        for start, piece in _pieces(data):
            os.pwrite(fd, piece, start)
        os.fsync(fd)
    finally:
        os.close(fd)


def raw_read(path: Path, target: memoryview, *, direct: bool) -> None:
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        for start, piece in _pieces(target):
            os.preadv(fd, [piece], start)
    finally:
        os.close(fd)


def _pieces(data: memoryview) -> list[tuple[int, memoryview]]:
    whole = data.nbytes - data.nbytes % mmap.PAGESIZE
    return [
        (start, data[start : min(start + _PIECE_BYTES, whole)]) for start in range(0, whole, _PIECE_BYTES)
    ]


def save(directory: Path, format: CheckpointFormat[Shard], shard: Shard) -> None:
    ticket = SaveTicket(step=1, run_id="bench", save_id="bench", world_size=1, ranks=[0])
    commit(LocalStorage(directory), format, ticket, {0: shard}, leads=True)


def drop_from_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(work: Callable[[Path], object], directory: Path) -> float:
    start = time.perf_counter()
    work(directory)
    return time.perf_counter() - start


def run_size(root: Path, size_bytes: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds per contender and round; the first round warms up and is left out."""
    shard = make_shard(size_bytes)
    data = shard.buffer[: shard.layout.size_bytes]
    target = memoryview(mmap.mmap(-1, shard.layout.size_bytes))
    target[:] = data
    writes: dict[str, Callable[[Path], object]] = {
        "raw write, page cache": lambda path: raw_write(path / "raw", data, direct=False),
        "raw write, direct": lambda path: raw_write(path / "raw", data, direct=True),
        "save, local": lambda path: save(path, LocalFormat(threads=threads), shard),
        "save, dcp": lambda path: save(path, DcpFormat(threads=threads), shard),
    }
    reads: dict[str, tuple[str, Callable[[Path], object]]] = {
        "raw read, page cache": (
            "raw write, page cache",
            lambda path: raw_read(path / "raw", target, direct=False),
        ),
        "raw read, direct": ("raw write, direct", lambda path: raw_read(path / "raw", target, direct=True)),
        "restore, local": ("save, local", lambda path: restore(path, target, threads)),
        "restore, dcp": ("save, dcp", lambda path: restore(path, target, threads)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*writes, *reads)}
    for number in range(rounds + 1):
        folders = {name: root / f"{number}-{place}" for place, name in enumerate(writes)}
        for name in _rotated(list(writes), number):
            folders[name].mkdir()
            os.sync()  # nobody pays for the writes of another
            seconds[name].append(measure(writes[name], folders[name]))
        for name in _rotated(list(reads), number):
            source, work = reads[name]
            drop_from_cache(folders[source])
            seconds[name].append(measure(work, folders[source]))
            if name.startswith("restore") and target != data:
                raise SystemExit(f"{name}: the bytes differ")
        for folder in folders.values():
            shutil.rmtree(folder)
    return {name: values[1:] for name, values in seconds.items()}


def restore(directory: Path, target: memoryview, threads: int) -> None:
    CheckpointReader(LocalStorage(directory), 1, threads=threads).read_shard(0, target)


def _rotated(names: list[str], by: int) -> list[str]:
    at = by % len(names)
    return names[at:] + names[:at]


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Median over rounds of time / raw time of the same round, against each raw contender."""
    found = {}
    for kind, raws in (("save", "raw write"), ("restore", "raw read")):
        for name in (name for name in seconds if name.startswith(kind)):
            for raw in (name for name in seconds if name.startswith(raws)):
                pairs = zip(seconds[name], seconds[raw], strict=True)
                found[f"{name} / {raw}"] = statistics.median(a / b for a, b in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--gib", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all figures there as well")
    options = parser.parse_args()
    report = {}
    for gib in options.gib:
        root = options.directory / f"ckpt-storage-{os.getpid()}"
        root.mkdir(parents=True)
        try:
            seconds = run_size(root, int(gib * 2**30), options.rounds, options.threads)
        finally:
            shutil.rmtree(root)
        found = ratios(seconds)
        report[str(gib)] = {"seconds": seconds, "ratios": found}
        print(f"--- {gib} GiB, median of {options.rounds}, {options.threads} threads")
        for name, values in seconds.items():
            middle = statistics.median(values)
            print(f"{name:24} {middle:8.3f} s  (min {min(values):.3f}, max {max(values):.3f})")
        for name, value in found.items():
            print(f"{name:60} {value:6.2f} x")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
