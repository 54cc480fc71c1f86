# SPDX-License-Identifier: Apache-2.0
"""Probes of one host: short programs, each in a process of its own with a deadline.

A probe that hangs is killed at its deadline, and one that dies has died: both are results, and neither takes
its caller along.  A probe measures a rate over several equal windows and reports the best one, so load that
comes and goes is no slowness of the host, and a host that is always slower is found.

    python3 -m resiliency.launch.host_check.probes {memory,disk,compute} [DIRECTORY]

prints one JSON object per line: what `Measurement` has, but the host.  The last one is `_END`: what comes
after it, as a process that takes long to end, is no fault of the host.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resiliency.cgroups import memory_left
from resiliency.launch.health.evidence import signal_name
from resiliency.launch.health.scores import Measurement
from resiliency.proc_stat import waited_for_core_s

#: Shape of the products: 0.9 GFLOP each, and matrices that no cache of a core holds.
_SIDE = 768
_GPU_SIDE = 4096
_WINDOWS, _WINDOW_S = 4, 0.2
_MEMORY_BYTES = 64 << 20
_DISK_BYTES = 32 << 20
#: Bits that stick, or that follow their neighbours, differ from one of these.
_PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
_END = {"end": True}
_NO_CORE = "had no core"
#: A shorter wait is that of any start.
_NO_CORE_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One program.  `limit_s` is far above what a healthy host needs, imports included."""

    name: str
    unit: str
    limit_s: float
    tolerance: float = 0.25


#: In the order in which they run; one at a time, as they would slow each other.
PROBES = (
    Probe(name="memory", unit="GB/s", limit_s=10),
    # Storage of many hosts is shared, and its speed is that of the others' writes.
    Probe(name="disk", unit="MB/s", limit_s=15, tolerance=0.7),
    # The last one takes what time is left: on storage that is slow, torch's import alone may need it.
    Probe(name="compute", unit="GFLOP/s", limit_s=math.inf),
)


@dataclass(frozen=True, kw_only=True)
class HostProbes:
    """Runs the probes of this host.

    Attributes:
        disk: directory in which the disk probe makes a file, and removes it.
        command: program of the probes; tests have one that is broken.
        probes: which ones.
    """

    host: str
    disk: Path
    command: tuple[str, ...] = (sys.executable, "-m", "resiliency.launch.host_check.probes")
    probes: tuple[Probe, ...] = PROBES

    def run(self, timeout_s: float) -> list[Measurement]:
        """All measurements within `timeout_s`; a probe without time left is not run, and accuses no host."""
        deadline = time.monotonic() + timeout_s
        found: list[Measurement] = []
        for probe in self.probes:
            if time.monotonic() < deadline:
                found += self._run_one(probe, deadline)
        return found

    def _run_one(self, probe: Probe, deadline: float) -> list[Measurement]:
        try:
            # Made here, so that it is removed also where the probe was killed.
            with tempfile.TemporaryDirectory(prefix=".host-check-", dir=self.disk) as directory:
                lines, error = _run_process([*self.command, probe.name, directory], probe.limit_s, deadline)
        except OSError as failure:
            lines, error = [], f"cannot write to {self.disk}: {failure.strerror}"
        if error:
            lines.append({"error": error})
        found = [self._measurement(probe, line) for line in lines]
        return list({one.probe: one for one in found}.values())  # an error takes the place of a result

    def _measurement(self, probe: Probe, said: Mapping[str, Any]) -> Measurement:
        return Measurement(
            host=self.host,
            probe=str(said.get("probe", probe.name)),
            value=float(said.get("value", 0.0)),
            unit=probe.unit,
            error=str(said.get("error", "")),
            digest=str(said.get("digest", "")),
            platform=str(said.get("platform", "")),
            tolerance=probe.tolerance,
        )


def _run_process(argv: list[str], limit_s: float, deadline: float) -> tuple[list[dict[str, Any]], str]:
    """What a probe has printed, and why it did not come to its end; neither, where it had no core to run on.

    Args:
        limit_s: without the time in which other programs had its core.
        deadline: monotonic time at which it is killed whatever it waited for.
    """
    # A launcher limits the threads of its ranks; a probe has the host for itself.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    began = time.monotonic()
    process = subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    error, waited_s = "", 0.0
    try:
        while True:
            # At least a second, as what it waits is counted when it gets the core.
            until = min(max(began + limit_s + waited_s, time.monotonic() + 1.0), deadline)
            try:
                output, errors = process.communicate(timeout=max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                waited_before_s, waited_s = waited_s, waited_for_core_s(process.pid)
                if time.monotonic() < deadline and waited_s > waited_before_s:
                    continue
                process.kill()
                output, _ = process.communicate()
                now = time.monotonic()
                had_no_core = now >= deadline and waited_s > max((now - began) / 2, _NO_CORE_S)
                error = _NO_CORE if had_no_core else f"hung: no result after {now - began:.1f} s"
            break
    finally:
        process.kill()
        process.wait()
    if process.returncode and not error:
        code = process.returncode
        died = signal_name(-code) if code < 0 else f"exit code {code}"
        error = ", ".join([f"died: {died}", *errors.strip().splitlines()[-1:]])
    lines = []
    for line in output.splitlines():
        try:
            lines.append(dict(json.loads(line)))
        except (ValueError, TypeError):  # the last one may be torn; libraries print as they like
            continue
    if _END in lines:
        lines.remove(_END)
        return lines, ""
    if error == _NO_CORE:
        return [], ""
    return lines, error or ("" if lines else "died: no result")


def _clock() -> float:
    """Seconds in which this thread ran or its host held it up, without those in which others used its core.

    Load of other programs says nothing of the host.  A core that is slow, throttled or stopped does.
    """
    while True:
        waited_s, now_s = waited_for_core_s("thread-self"), time.perf_counter()
        if waited_for_core_s("thread-self") == waited_s:  # else it lost its core between the two
            return now_s - waited_s


def best_rate(work: Callable[[], float]) -> float:
    """The best rate of `work` over some windows; `work` returns how much it has done."""
    best = 0.0
    for _ in range(_WINDOWS):
        began, done = _clock(), 0.0
        while (elapsed := _clock() - began) < _WINDOW_S or not done:
            done += work()
        best = max(best, done / elapsed)
    return best


def measure_memory(_: Path) -> Iterator[dict[str, Any]]:
    """Copies, and patterns that are read back."""
    size = min([_MEMORY_BYTES, *(left // 8 for _, left in memory_left())])
    size = max(size, 1 << 20) // 4096 * 4096
    source, target = bytearray(os.urandom(4096) * (size // 4096)), bytearray(size)
    view = memoryview(target)

    def copy() -> float:
        view[:] = source
        return size / 1e9

    rate = best_rate(copy)
    if target != source:
        yield {"error": "a copy differs from its source"}
        return
    for pattern in _PATTERNS:
        view[:] = bytes([pattern]) * size
        if target.count(pattern) != size:
            yield {"error": f"pattern {pattern:#04x} differs where it is read back"}
            return
    yield {"value": rate}


def measure_disk(directory: Path) -> Iterator[dict[str, Any]]:
    """A file that is written through to storage, and read back from there."""
    block = os.urandom(1 << 20)
    written = hashlib.sha256()
    with open(directory / "probe", "w+b", buffering=0) as file:
        began = time.perf_counter()
        for _ in range(_DISK_BYTES // len(block)):
            if file.write(block) != len(block):
                yield {"error": "a write came to its end early"}
                return
            written.update(block)
        os.fsync(file.fileno())
        rate = _DISK_BYTES / 1e6 / (time.perf_counter() - began)
        if hasattr(os, "posix_fadvise"):  # else the page cache answers instead of the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        found = hashlib.sha256()
        while data := file.read(1 << 20):
            found.update(data)
    same = found.digest() == written.digest()
    yield {"value": rate} if same else {"error": "what was read differs from what was written"}


def measure_compute(_: Path) -> Iterator[dict[str, Any]]:
    """Products of float32 matrices: on all cores at once, each alone with its thread, then on each GPU."""
    import torch

    torch.set_num_threads(1)
    yield {"probe": "cpu", **multiply_on_cores(f"{_processor()}, torch {torch.__version__}")}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = f"{torch.cuda.get_device_name(index)}, CUDA {torch.version.cuda}, torch {torch.__version__}"
        yield {"probe": f"gpu{index}", **multiply(f"cuda:{index}", _GPU_SIDE, device)}


def multiply_on_cores(on: str, spoil: Callable[[Any], None] = lambda product: None) -> dict[str, Any]:
    """The slowest core's rate; an error where a core has another result, or another one each time."""

    def use(core: int) -> dict[str, Any]:
        with suppress(OSError):  # a sandbox: then the kernel places the threads
            os.sched_setaffinity(0, {core})  # of this thread
        return multiply("cpu", _SIDE, on, spoil)

    cores = sorted(os.sched_getaffinity(0))
    with ThreadPoolExecutor(len(cores)) as threads:
        found = dict(zip(cores, threads.map(use, cores), strict=True))
    failed = [f"core {core}: {one['error']}" for core, one in found.items() if "error" in one]
    if failed:
        return {"error": "; ".join(failed), "platform": on}
    (common, count), *others = Counter(one["digest"] for one in found.values()).most_common()
    if others:
        odd = [str(core) for core, one in found.items() if one["digest"] != common]
        return {
            "error": f"results of cores {', '.join(odd)} differ from that of {count} others",
            "platform": on,
        }
    return min(found.values(), key=lambda one: float(one["value"]))


def multiply(
    device: str, side: int, on: str, spoil: Callable[[Any], None] = lambda product: None
) -> dict[str, Any]:
    """Rate of a product on `device`, whose result must be the same, bit by bit, each time.

    Args:
        on: names all that the bits of the result depend on.
        spoil: changes a product in place, for the twin that returns a wrong one.
    """
    import torch

    random = torch.Generator().manual_seed(20)
    left, right = (torch.randn(side, side, generator=random).to(device) for _ in range(2))
    first = left @ right
    spoil(first)
    wrong = 0

    def product() -> float:
        nonlocal wrong
        again = left @ right
        spoil(again)
        wrong += not torch.equal(again, first)  # waits for a GPU
        return 2 * side**3 / 1e9

    rate = best_rate(product)
    if wrong:
        return {"error": f"{wrong} products differ from the first one", "platform": on}
    digest = hashlib.sha256(first.cpu().numpy().tobytes()).hexdigest()
    return {"value": rate, "digest": digest, "platform": on}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "") or (
        platform.machine()
    )


#: Name -> program.
PROGRAMS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    "memory": measure_memory,
    "disk": measure_disk,
    "compute": measure_compute,
}


def main(argv: list[str]) -> int:
    """Run the probe of this name and print what it finds."""
    name, directory = argv
    try:
        for line in PROGRAMS[name](Path(directory)):
            print(json.dumps(line), flush=True)
        print(json.dumps(_END), flush=True)
    except (
        OSError,
        MemoryError,
        RuntimeError,
    ) as error:  # torch raises RuntimeError for what a device reports
        text = str(error).partition("\n")[0]
        print(json.dumps({"error": f"{type(error).__name__}: {text}"}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
