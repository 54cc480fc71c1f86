# SPDX-License-Identifier: Apache-2.0
"""What samplers cost beside torch's own: time for each step of a loop, time for each sample, and memory.

    python3 benchmark/data_samplers.py --rounds 5

Each figure is taken in a process of its own, in rounds whose order changes; ratios are between the runs of
one round.  A *step* is a batch of 32 from a DataLoader without workers, whose samples are tensors of 256
floats, and a
forward, backward and SGD step of a small model: a light training, in which the sampler weighs more than in
any real one.  Times are processor time of one thread, which a busy machine changes less than the time on the
wall.  *Memory* is what the peak of resident memory grows by while the first 100,000 samples of rank 0 of 8
are taken.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from measuring import machine
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler
from tqdm import tqdm

from resiliency.data import InterruptableDistributedSampler, advancing

WORLD, BATCH, FEATURES = 8, 32, 256
#: name -> (how the sampler is made, whether the loop is `advancing`)
KINDS = ("torch", "ours", "ours, advancing", "ours, computed, advancing")


class Rows(Dataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size
        self._row = torch.ones(FEATURES)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._row


def sampler_of(kind: str, size: int) -> Sampler[int]:
    if kind == "torch":
        return DistributedSampler(Rows(size), WORLD, 0)
    order = "computed" if "computed" in kind else "torch"
    return InterruptableDistributedSampler(Rows(size), WORLD, 0, kind=order)


def step_s(kind: str, size: int) -> float:
    """Median processor seconds of a step, after the first hundred."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Rows(size), batch_size=BATCH, sampler=sampler_of(kind, size))
    batches: Iterator[torch.Tensor] = advancing(loader, optimizer) if "advancing" in kind else iter(loader)
    times = []
    before = time.process_time()
    for batch in batches:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        now = time.process_time()
        times.append(now - before)
        before = now
    return statistics.median(times[100:])


def sample_s(kind: str, size: int) -> float:
    """Processor seconds for each sample of an epoch, the making of the order included."""
    torch.set_num_threads(1)
    sampler = sampler_of(kind, size)
    before = time.process_time()
    count = sum(1 for _ in sampler)
    return (time.process_time() - before) / count


def memory_bytes(kind: str, size: int) -> float:
    """Growth of the peak of resident memory by taking samples; Linux counts it in KiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _, _ in zip(range(100_000), sampler_of(kind, size), strict=False):
        pass
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024.0


MEASURES = {"step": step_s, "sample": sample_s, "memory": memory_bytes}


def measured(measure: str, kind: str, size: int) -> float:
    """One figure from a process of its own."""
    argv = [sys.executable, __file__, "--figure", measure, "--kind", kind, "--size", str(size)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000, help="of the loop that times a step")
    parser.add_argument(
        "--size", type=int, default=10_000_000, help="samples of the epoch that times a sample"
    )
    parser.add_argument("--figure", choices=MEASURES, help="take one figure in this process, and print it")
    parser.add_argument("--kind", choices=KINDS, default="torch", help="of the sampler of --figure")
    options = parser.parse_args()
    if options.figure:
        print(MEASURES[options.figure](options.kind, options.size))
        return 0
    found: dict[tuple[str, str], list[float]] = {}
    plan = [("step", kind, options.steps * BATCH * WORLD) for kind in KINDS]
    plan += [("sample", kind, options.size) for kind in KINDS if "," not in kind or "computed" in kind]
    for number in tqdm(range(options.rounds), desc="rounds"):
        for measure, kind, size in plan[number % len(plan) :] + plan[: number % len(plan)]:
            found.setdefault((measure, kind), []).append(measured(measure, kind, size))
    facts = {
        name: value for name, value in machine().items() if name in ("cores", "cpu", "load_1min", "torch")
    }
    print(f"{facts}; {options.rounds} rounds, medians (min..max)\n")
    for (measure, kind), values in sorted(found.items(), key=lambda item: item[0][0], reverse=True):
        ratios = [value / torchs for value, torchs in zip(values, found[measure, "torch"], strict=True)]
        figure = f"{statistics.median(values) * 1e6:10.3f} us"
        ratio = f"{statistics.median(ratios):.3f} x torch ({min(ratios):.3f}..{max(ratios):.3f})"
        print(f"{measure:>6}  {kind:<26}{figure}  {ratio}")
    print()
    for kind, size in (("torch", 10**7), ("ours", 10**7), (KINDS[3], 10**7), (KINDS[3], 10**9)):
        print(f"memory  {kind:<26}{measured('memory', kind, size) / 2**20:10.1f} MiB  of {size:,} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
