# SPDX-License-Identifier: Apache-2.0
"""How long a capture holds training, beside the time that copying the same bytes takes at best.

    python3 benchmark/ckpt_capture.py --size-gib 0.25 1 --threads 1 2 --export capture.json

For every size and number of threads, in one process and taking turns (so that a slow moment of the
machine hits all alike), the median of `--repeats`:

- memcpy     the same bytes from memory to memory, prefaulted, with as many threads: the limit
- held       `begin` and `fence` with nothing between them
- overlapped `begin` and `fence` around a step that takes longer than the copy
- excess     how much longer that step takes than without a capture beside it
- restore    a capture back into the tensors; `restore_unmapped`: by a process that has not mapped it
- first      the first capture of a run, of an arena that was prewarmed, and of one that was not
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch

from resiliency.checkpoint import (
    CaptureOptions,
    Capturer,
    RankArena,
    job_directory,
    open_captured,
    restore_into,
)
from resiliency.checkpoint.copying import Copier, pieces

LONG = timedelta(minutes=5)
State = dict[str, dict[str, torch.Tensor]]


def make_state(size_bytes: int, tensors: int) -> State:
    """Weights and two moments, like a model under Adam, plus a small tensor for each."""
    count = max(1, size_bytes // 4 // 3 // tensors)
    return {
        kind: {f"layer{i}": torch.full((count,), float(i)) for i in range(tensors)}
        for kind in ("model", "exp_avg", "exp_avg_sq")
    } | {"step": {f"layer{i}": torch.tensor(1.0) for i in range(tensors)}}


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class Bench:
    """One size and number of threads."""

    def __init__(
        self, size_bytes: int, threads: int, tensors: int, directory: Path, stack: ExitStack
    ) -> None:
        self.state = make_state(size_bytes, tensors)
        self._options = CaptureOptions(threads=threads)
        self._threads = threads
        self._directory = directory
        self._stack = stack
        self._copier = stack.enter_context(Copier(threads))
        flat = [tensor for part in self.state.values() for tensor in part.values()]
        self._copies = [torch.zeros_like(tensor) for tensor in flat]
        self._work = [p for to, frm in zip(self._copies, flat, strict=True) for p in pieces(to, frm)]
        self.bytes = sum(tensor.nbytes for tensor in flat)
        self._step = 0
        self._matrix = torch.randn(256, 256)

    def open(self, name: str) -> None:
        self.arena = RankArena(job_directory(name, self._directory), rank=0)
        self._stack.callback(self.arena.close, remove=True)
        self.capturer = self._stack.enter_context(Capturer(self.arena, self._options))

    def memcpy(self) -> float:
        return timed(lambda: self._copier.start(self._work, keep=None).wait())

    def capture(self, between: Callable[[], object] = lambda: None) -> float:
        """Seconds in which training was held."""
        self._step += 1
        capture = None

        def begin() -> None:
            nonlocal capture
            capture = self.capturer.begin(self.state, self._step)

        held = timed(begin)
        between()
        held += timed(self.capturer.fence)
        if capture is None or not capture.wait(LONG) or capture.error:
            raise SystemExit(f"capture of step {self._step} failed")
        return held

    def train(self, rounds: int) -> float:
        def step() -> None:
            for _ in range(rounds):
                self._matrix @ self._matrix

        return timed(step)

    def restore(self) -> float:
        with self.arena.captured() as shard:
            return timed(lambda: restore_into(self.state, shard, threads=self._threads))

    def restore_unmapped(self) -> float:
        with open_captured(self.arena.directory, 0) as slot:
            return timed(lambda: restore_into(self.state, slot.shard, threads=self._threads))

    def run(self, repeats: int) -> dict[str, float]:
        self.open("cold")
        first_cold = self.capture()
        self.open("warm")
        self.capturer.prewarm(self.state)
        first = self.capture()
        copy = max(self.memcpy(), self.memcpy(), self.capture())
        rounds = max(1, round(3 * copy / (self.train(20) / 20)))
        series: dict[str, list[float]] = {}
        for _ in range(repeats):
            alone, beside = self.train(rounds), []
            results = {
                "memcpy": self.memcpy(),
                "held": self.capture(),
                "overlapped": self.capture(lambda: beside.append(self.train(rounds))),  # noqa: B023
                "restore": self.restore(),
                "restore_unmapped": self.restore_unmapped(),
            }
            results["excess"] = beside[0] - alone
            for name, seconds in results.items():
                series.setdefault(name, []).append(seconds)
        medians = {name: statistics.median(values) for name, values in series.items()}
        return {**medians, "first": first, "first_cold": first_cold}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-gib", type=float, nargs="+", default=[0.25, 1.0], help="bytes of state")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="copy threads")
    parser.add_argument("--tensors", type=int, default=100, help="layers; each has three large tensors")
    parser.add_argument("--repeats", type=int, default=5, help="median of that many")
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"), help="where the slots are")  # noqa: S108
    parser.add_argument("--export", type=Path, help="write the seconds and ratios as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in args.size_gib:
        for threads in args.threads:
            directory = Path(tempfile.mkdtemp(prefix="resiliency-bench-", dir=args.root))
            try:
                with ExitStack() as stack:
                    bench = Bench(int(size * 2**30), threads, args.tensors, directory, stack)
                    seconds = bench.run(args.repeats)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            limit = seconds["memcpy"]
            ratios = {name: value / limit for name, value in seconds.items() if name != "memcpy"}
            rows.append(
                {"size_gib": size, "threads": threads, "seconds": seconds, "ratios_to_memcpy": ratios}
            )
            told = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            print(
                f"{size:g} GiB, {threads} threads: memcpy {limit * 1e3:.1f} ms; x memcpy: {told}", flush=True
            )
    if args.export:
        args.export.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
