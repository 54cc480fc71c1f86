# SPDX-License-Identifier: Apache-2.0
"""What a save costs a transformer that trains on one GPU, beside the PCIe copy and DCP's pinned staging.

    python3 benchmark/ckpt_cuda.py --directory /mnt/disk --size-gib 4

Each contestant trains in a fresh process.  A round measures in turn the copy of the whole state into
pinned memory (the limit), ten undisturbed steps, ten steps that begin with a save, and a save with
nothing beside it.  The device runs behind the host, so what a save costs is the difference between
those ten steps, with the device synchronized at both ends: it holds what the host was held, what the
device waited before the optimizer, and what training was slowed down by.  About five minutes; host
memory needs three times the state, pinned.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckpt_contestants import ARENA_ENV, OURS, Contestant, DcpTuned, Ours, TorchSave
from ckpt_groups import arena
from torch import nn
from tqdm import tqdm

from resiliency.runtime import JOB_ENV

STEPS = 10
#: Forward and backward take that many times as long as the copy.
ROOM = 1.5
_PINNED_BYTES = 512 << 20
#: For one contestant; all of them and their start stay below ten minutes.
_TIMEOUT_S = 180.0

CONTESTANTS: dict[str, Callable[[Path], Contestant]] = {
    OURS: Ours,
    "DCP async, thread, pinned": functools.partial(DcpTuned, process=False, pinned=True),
    "DCP async, process, pinned": functools.partial(DcpTuned, process=True, pinned=True),
    "torch.save": TorchSave,
}

Series = dict[str, list[float]]


class Transformer:
    """Encoder layers under AdamW; about `size_bytes` of parameters and moments on the GPU."""

    rank = 0

    def __init__(self, size_bytes: int, width: int = 1024) -> None:
        per_layer = 12 * (12 * width * width + 13 * width)  # bytes with both moments
        layer = nn.TransformerEncoderLayer(
            width, 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True, device="cuda"
        )
        layers = max(1, round(size_bytes / per_layer))
        self.model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._data = torch.randn(1, 512, width, device="cuda")
        self.steps(2)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        return {"rank0": {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}}

    def tensors(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor for tensor in (*self.model.parameters(), *moments) if tensor.is_cuda]

    def forward_backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(self._data).float().square().mean()
        loss.backward()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.forward_backward()
            self.optimizer.step()

    def make_room(self, seconds: float) -> int:
        """Choose the batch so that forward and backward take that long."""
        taken = synchronized(self.forward_backward)
        while taken < seconds and len(self._data) < 4096:
            grow = min(4, max(2, math.ceil(seconds / taken)))
            self._data = self._data.repeat(grow, 1, 1)
            self.forward_backward()
            taken = synchronized(self.forward_backward)
        return len(self._data)


def synchronized(action: Callable[[], object]) -> float:
    """Seconds of `action` on the device, from an idle device to an idle device."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def copy_to_pinned(tensors: list[torch.Tensor], pinned: torch.Tensor) -> None:
    """The limit: every byte once over the bus, through a pinned buffer that is used over and over."""
    at = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for piece in torch.split(flat, len(pinned)):
            at = 0 if at + len(piece) > len(pinned) else at
            pinned[at : at + len(piece)].copy_(piece, non_blocking=True)
            at += len(piece)


def measure(name: str, size_bytes: int, rounds: int, directory: Path, memory: Path) -> Series:
    """In a process of its own: all figures of one contestant."""
    os.environ.update({ARENA_ENV: str(memory), JOB_ENV: directory.name, "MASTER_ADDR": "127.0.0.1"})
    store = dist.FileStore(str(directory / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    training = Transformer(size_bytes)
    tensors = training.tensors()
    pinned = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    copy = functools.partial(copy_to_pinned, tensors, pinned)
    copy()
    batch = training.make_room(ROOM * synchronized(copy))
    contestant = CONTESTANTS[name](directory / "saved")
    found: dict[str, list[float]] = defaultdict(list)
    found["setup_s"].append(synchronized(lambda: contestant.prepare(training)))
    saver = _Saver(contestant, training, found)
    saver.save_alone()
    first = found["held_alone_s"][0]
    saver.save_with_steps()
    for series in ("held_alone_s", "durable_s", "window_s", "call_s", "fence_s"):
        found[series].clear()
    for number in range(rounds):
        found["copy_s"].append(synchronized(copy))
        if number % 2:
            saver.save_with_steps()
        found["ten_steps_s"].append(synchronized(lambda: training.steps(STEPS)))
        if not number % 2:
            saver.save_with_steps()
        saver.save_alone()
    contestant.close()
    dist.destroy_process_group()
    pairs = zip(found["window_s"], found["ten_steps_s"], strict=True)
    found["cost_s"] = [window - undisturbed for window, undisturbed in pairs]
    size = float(sum(tensor.nbytes for tensor in tensors))
    return {**found, "first_held_s": [first], "size_bytes": [size], "batch": [float(batch)]}


class _Saver:
    def __init__(self, contestant: Contestant, training: Transformer, found: Series) -> None:
        self._contestant = contestant
        self._training = training
        self._found = found
        self._step = 0

    def save_with_steps(self) -> None:
        torch.cuda.synchronize()
        self._step += 1
        began = time.perf_counter()
        save = self._contestant.save(self._step)
        returned = time.perf_counter()
        self._training.forward_backward()
        at_fence = time.perf_counter()
        self._contestant.fence()
        fenced = time.perf_counter()
        self._training.optimizer.step()
        self._training.steps(STEPS - 1)
        torch.cuda.synchronize()
        self._found["window_s"].append(time.perf_counter() - began)
        self._found["call_s"].append(returned - began)
        self._found["fence_s"].append(fenced - at_fence)
        self._contestant.drain(save)
        shutil.rmtree(save.directory)

    def save_alone(self) -> None:
        """Held as if the next kernel were the optimizer's: until the device may write the state."""
        torch.cuda.synchronize()
        self._step += 1
        began = time.perf_counter()
        save = self._contestant.save(self._step)
        self._contestant.fence()
        torch.cuda.current_stream().synchronize()  # our fence makes the device wait, not the host
        self._found["held_alone_s"].append(time.perf_counter() - began)
        self._found["durable_s"].append(self._contestant.drain(save) - began)
        shutil.rmtree(save.directory)


def as_text(results: dict[str, Series | str], rounds: int) -> str:
    """A table, and what could not be measured."""
    figures = {name: series for name, series in results.items() if not isinstance(series, str)}
    lines = []
    for series in list(figures.values())[:1]:
        rate = series["size_bytes"][0] / statistics.median(series["copy_s"]) / 1e9
        lines.append(
            f"{torch.cuda.get_device_name()}, {series['size_bytes'][0] / 2**30:.2f} GiB of state, batch "
            f"{series['batch'][0]:.0f}, pinned copy {rate:.1f} GB/s; milliseconds, medians of {rounds}"
        )
    lines.append(f"{'contestant':28}" + "".join(f"{c.strip().removesuffix('_s'):>12}" for c in _COLUMNS))
    for name, series in figures.items():
        lines.append(f"{name:28}" + "".join(f"{_cell(series, column):>12}" for column in _COLUMNS))
    lines += [f"FAILED {name}: {error}" for name, error in results.items() if isinstance(error, str)]
    return "\n".join(lines)


_COLUMNS = (
    "held_alone_s", "x copy", "call_s", "fence_s", "cost_s", "x copy ", "cost %", "durable_s", "first_held_s",
    "setup_s",
)  # fmt: skip


def _cell(series: Series, column: str) -> str:
    if column == "cost %":
        return f"{100 * _ratio(series, 'cost_s', 'ten_steps_s'):.2f}"
    if column.startswith("x copy"):
        return f"{_ratio(series, 'cost_s' if column.endswith(' ') else 'held_alone_s', 'copy_s'):.2f}"
    return f"{statistics.median(series[column]) * 1e3:.1f}"


def _ratio(series: Series, name: str, limit: str) -> float:
    return statistics.median(a / b for a, b in zip(series[name], series[limit], strict=True))


def run_all(names: list[str], size_bytes: int, rounds: int, root: Path) -> dict[str, Series | str]:
    """Each contestant in turn; one that fails is reported with its error."""
    results: dict[str, Series | str] = {}
    for name in tqdm(names, unit="contestant"):
        directory = Path(tempfile.mkdtemp(prefix="ckpt-cuda-", dir=root))
        pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            with arena() as memory:
                work = pool.submit(measure, name, size_bytes, rounds, directory, memory)
                results[name] = work.result(_TIMEOUT_S)
        except Exception as error:  # whatever ended that process: the report says so
            results[name] = f"{type(error).__name__}: {error}"
            for process in list(pool._processes.values()):
                process.kill()
        finally:
            pool.shutdown()
            shutil.rmtree(directory, ignore_errors=True)
    return results


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckpt_cuda.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-gib", type=float, default=4.0, help="state on the GPU (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, help="medians of that many (default: 5)")
    parser.add_argument(
        "--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS), metavar="NAME",
        help=f"which of: {', '.join(CONTESTANTS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--directory", type=Path, help="on the disk to save to (default: a temporary one)")
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every figure there")
    return parser


def main() -> int:
    """Exit codes: 0 everything was measured, 1 some of it was not, 2 there is no GPU."""
    parser = build_parser()
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU, and torch finds none; ckpt_compare.py runs on CPUs.")
    root = args.directory or Path(tempfile.gettempdir())
    root.mkdir(parents=True, exist_ok=True)
    results = run_all(args.contestants, int(args.size_gib * 2**30), args.rounds, root)
    if args.export:
        args.export.write_text(json.dumps(results, indent=2) + "\n")
    print(as_text(results, args.rounds))
    return 1 if any(isinstance(series, str) for series in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
