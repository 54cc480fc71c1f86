# SPDX-License-Identifier: Apache-2.0
"""The programs of the probes, each run in a process of its own.

A program measures a rate over several equal windows and reports the best one, so load that comes and goes is
no slowness of the host, and a host that is always slower is found.

    python3 -m resiliency.launch.host_check.programs {memory,shm,disk,compute} [DIRECTORY]

prints one JSON object per line: ``{"begins": NAME}`` before it measures something, and from then on silence
and crashes are the host's; then what `Measurement` has, but the host.  After ``{"end": true}`` nothing is:
a process may take long to end.

Each takes a share of the memory that its control groups and the machine leave, and none where that is little.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from resiliency.cgroups import available_bytes, throttled_s
from resiliency.launch.host_check.platforms import gpu_platform, processor_platform, read_cpuinfo
from resiliency.proc_stat import waited_for_core_s

#: Shape of the products: 0.9 GFLOP each, and matrices that no cache of a core holds.
_SIDE = 768
_GPU_SIDE = 4096
_WINDOWS, _WINDOW_S = 4, 0.2
_MEMORY_BYTES, _SHM_BYTES, _DISK_BYTES = 64 << 20, 32 << 20, 32 << 20
#: Of the memory or the file system that is left, at most such a part is taken, in blocks.
_PART, _BLOCK_BYTES = 8, 1 << 20
#: Torch takes so much when it is imported, each core's products, and a CUDA context on the host.
_TORCH_BYTES, _CORE_BYTES, _CONTEXT_BYTES = 256 << 20, 8 << 20, 512 << 20
#: Cores compute in at most so many rounds, or they would take longer than a probe may be silent.
_ROUNDS = 16
#: Bits that stick, or that follow their neighbours, differ from one of these.
_PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
_SHM = Path("/dev/shm")  # noqa: S108 - captures are there
#: Container runtimes grant 64 MiB where nothing else is asked for.
_SMALL_SHM_BYTES = 128 << 20
#: A share of time that is worth a word.
_NOTED_SHARE = 0.05
#: File systems of the host itself.  Silence or an error of another one may be its server's.
_LOCAL_FILE_SYSTEMS = frozenset(
    (
        "bcachefs",
        "btrfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "jfs",
        "overlay",
        "ramfs",
        "tmpfs",
        "vfat",
        "xfs",
        "zfs",
    )
)
#: Of a device that does not work, or a file system whose structure is damaged (EUCLEAN, EBADMSG).
_BROKEN_DISK = frozenset((errno.EIO, errno.ENXIO, errno.ENODEV, errno.EUCLEAN, errno.EBADMSG))
#: In the messages of CUDA for an error of a device that computes one product.
_BROKEN_GPU = (
    "uncorrectable", "hardware", "illegal", "misaligned", "launch failure", "launch timed out",
)  # fmt: skip


class NotMeasured(Exception):
    """A probe lacks what it needs; the text says what."""


# ---------------------------------------------------------------- rates


def _clock() -> float:
    """Seconds in which this thread ran or its host held it up, without those in which others used its core.

    Load of other programs says nothing of the host.  A core that is slow or stopped does.  What a CPU limit
    withholds counts as used by others here, see `with_limit`.
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


def _share(wanted: int, what: str, left: int) -> int:
    """Whole blocks of `wanted` bytes, or of the part of what is left that may be taken."""
    size = min(wanted, left // _PART) // _BLOCK_BYTES * _BLOCK_BYTES
    if not size:
        raise NotMeasured(f"{what} is full: {_mib(left)} left")
    return size


def _share_of_memory(wanted: int) -> int:
    return _share(wanted, "memory", available_bytes())


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"


# ---------------------------------------------------------------- memory and files


def measure_memory(_: Path) -> Iterator[dict[str, Any]]:
    """Copies, and patterns that are read back."""
    size = _share_of_memory(_MEMORY_BYTES)
    source, target = bytearray(os.urandom(4096) * (size // 4096)), bytearray(size)
    view = memoryview(target)
    yield {"begins": "memory"}

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


def measure_shm(_: Path) -> Iterator[dict[str, Any]]:
    """A file in shared memory, where captures and the batches of loader workers are."""
    try:
        status = os.statvfs(_SHM)
        # One without a limit says that it has no blocks.
        total = status.f_blocks * status.f_frsize
        free = status.f_bavail * status.f_frsize if total else available_bytes()
        size = _share(_share_of_memory(_SHM_BYTES), str(_SHM), free)
        source = os.urandom(4096) * (size // 4096)
        with tempfile.TemporaryFile(dir=_SHM, buffering=0) as file:
            yield {"begins": "shm"}

            def write() -> float:
                return os.pwrite(file.fileno(), source, 0) / 1e9

            rate = best_rate(write)
            if os.pread(file.fileno(), size, 0) != source:
                yield {"error": f"a file in {_SHM} is read back changed"}
                return
    except OSError as error:
        raise NotMeasured(f"cannot write to {_SHM}: {error.strerror}") from error
    is_small = free < _SMALL_SHM_BYTES
    yield {"value": rate, "note": f"{_SHM} has {_mib(free)} free of {_mib(total)}" if is_small else ""}


def measure_disk(directory: Path) -> Iterator[dict[str, Any]]:
    """A file that is written through to storage, and read back from there."""
    mount: tuple[str, bool] | None = None
    try:
        mount = find_mount(directory)
        if mount[0] in _LOCAL_FILE_SYSTEMS:
            yield {"begins": "disk"}
        status = os.statvfs(directory)
        size = _share(_share_of_memory(_DISK_BYTES), str(directory), status.f_bavail * status.f_frsize)
        yield _write_and_read(directory, size)
    except OSError as error:
        yield disk_fault(directory, error, mount)


def _write_and_read(directory: Path, size: int) -> dict[str, Any]:
    block = os.urandom(_BLOCK_BYTES)
    written, found = hashlib.sha256(), hashlib.sha256()
    with tempfile.TemporaryFile(
        dir=directory, buffering=0
    ) as file:  # gone with this process, if it is killed
        began = time.perf_counter()
        for _ in range(size // len(block)):
            if file.write(block) != len(block):
                return {"missing": f"{directory} takes no more"}
            written.update(block)
        os.fsync(file.fileno())
        rate = size / 1e6 / (time.perf_counter() - began)
        if hasattr(os, "posix_fadvise"):  # else the page cache answers instead of the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while data := file.read(_BLOCK_BYTES):
            found.update(data)
    same = found.digest() == written.digest()
    return {"value": rate} if same else {"error": "what was read differs from what was written"}


def find_mount(directory: Path) -> tuple[str, bool]:
    """The type of the file system that holds a directory, and whether somebody mounted it read-only.

    The kernel makes a file system read-only when its structure is damaged: then its mount is not.
    """
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        known = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    finally:
        os.close(fd)
    number = next((line.split()[1] for line in known if line.startswith("mnt_id:")), "")
    for line in mounts:
        mount, _, system = line.partition(" - ")
        if mount.split()[0] == number:
            return system.split()[0], "ro" in mount.split()[5].split(",")
    return "", False


def disk_fault(directory: Path, error: OSError, mount: tuple[str, bool] | None) -> dict[str, str]:
    """An error is the host's if the disk is, and its device or file system is broken."""
    text = f"cannot write to {directory}: {error.strerror}"
    if mount is None or mount[0] not in _LOCAL_FILE_SYSTEMS:
        return {"missing": text}
    if error.errno == errno.EROFS and not mount[1]:
        return {"error": f"{text}, though it is mounted for writing"}
    return {"error" if error.errno in _BROKEN_DISK else "missing": text}


# ---------------------------------------------------------------- products


def measure_compute(_: Path) -> Iterator[dict[str, Any]]:
    """Products of float32 matrices: on all cores, each alone with its thread, then on each GPU."""
    if (left := available_bytes()) < _TORCH_BYTES:
        raise NotMeasured(f"memory leaves {_mib(left)}, and torch takes {_mib(_TORCH_BYTES)}")
    import torch

    torch.set_num_threads(1)
    capability = torch.backends.cpu.get_cpu_capability()
    build = f"torch {torch.__version__}, {capability}\n{torch.__config__.show()}"
    on = f"{processor_platform(read_cpuinfo(), build, os.environ)}, {build.partition(chr(10))[0]}"
    yield {"begins": "cpu"}
    yield {"probe": "cpu", **multiply_on_cores(on)}
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        yield from _measure_gpus(build)


def multiply_on_cores(on: str, spoil: Callable[[Any], None] = lambda product: None) -> dict[str, Any]:
    """The slowest core's rate; an error where a core has another result, or another one each time.

    As many cores at once as memory allows, all if it does.
    """
    cores = sorted(os.sched_getaffinity(0))
    operands = make_operands("cpu", _SIDE)
    left = available_bytes()
    at_once = min(left // 2 // _CORE_BYTES, len(cores))
    if at_once * _ROUNDS < len(cores):
        raise NotMeasured(f"memory leaves {_mib(left)}, too little for {len(cores)} cores")
    held_s: list[float] = []

    def use(core: int) -> dict[str, Any]:
        with suppress(OSError):  # a sandbox: then the kernel places the threads
            os.sched_setaffinity(0, {core})  # of this thread
        waited_s = waited_for_core_s("thread-self")
        found = multiply(operands, on, spoil)
        held_s.append(waited_for_core_s("thread-self") - waited_s)
        return found

    throttled_before_s, began = throttled_s(), time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        found = dict(zip(cores, threads.map(use, cores), strict=True))
    all_s = (time.perf_counter() - began) * at_once
    failed = [f"core {core}: {one['error']}" for core, one in found.items() if "error" in one]
    if failed:
        return {"error": "; ".join(failed), "platform": on}
    odd, count = odd_ones({str(core): one["digest"] for core, one in found.items()})
    if odd:
        text = f"results of cores {', '.join(odd)} differ from that of {count} others"
        return {"error": text, "platform": on}
    slowest = min(found.values(), key=lambda one: float(one["value"]))
    return with_limit(slowest, (throttled_s() - throttled_before_s) / all_s, sum(held_s) / all_s)


def with_limit(rate: Mapping[str, Any], throttled: float, waited: float) -> dict[str, Any]:
    """A rate of which a CPU limit leaves less.

    Args:
        throttled: share of the time in which the limit withheld the cores, from the counters of the group.
        waited: share of the time in which the threads waited for their cores, which the rate leaves out.
            Other threads of the group may have been throttled meanwhile, too.
    """
    if throttled < _NOTED_SHARE:
        return dict(rate)
    withheld = min(throttled, waited, 1.0)
    note = f"throttled {min(throttled, 1.0):.0%} of the time by the CPU limit of its control group"
    return {**rate, "value": float(rate["value"]) * (1 - withheld), "note": note}


def odd_ones(digests: Mapping[str, str]) -> tuple[list[str], int]:
    """Devices of one kind whose result is not the most common one, and how many have that one."""
    ((common, count), *_) = Counter(digests.values()).most_common()
    return [name for name, digest in digests.items() if digest != common], count


def make_operands(device: str, side: int) -> tuple[Any, Any]:
    """Two matrices, with the same bits on every platform: uniform numbers need no mathematical function."""
    import torch

    random = torch.Generator().manual_seed(20)
    left, right = (torch.rand(side, side, generator=random).sub_(0.5).to(device) for _ in range(2))
    return left, right


def multiply(
    operands: tuple[Any, Any], on: str, spoil: Callable[[Any], None] = lambda product: None
) -> dict[str, Any]:
    """Rate of a product on the operands' device, whose result must be the same, bit by bit, each time.

    Args:
        on: names all that the bits of the result depend on.
        spoil: changes a product in place, for the twin that returns a wrong one.
    """
    import torch

    left, right = operands
    first = left @ right
    spoil(first)
    again, wrong = torch.empty_like(first), 0

    def product() -> float:
        nonlocal wrong
        torch.matmul(left, right, out=again)
        spoil(again)
        wrong += not torch.equal(again, first)  # waits for a GPU
        return float(2 * left.shape[0] ** 3 / 1e9)

    rate = best_rate(product)
    if wrong:
        return {"error": f"{wrong} products differ from the first one", "platform": on}
    digest = hashlib.sha256(first.cpu().numpy().tobytes()).hexdigest()
    return {"value": rate, "digest": digest, "platform": on}


def _measure_gpus(build: str) -> Iterator[dict[str, Any]]:
    import torch

    yield {"begins": "gpu"}
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nodes = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if not count and nodes and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"):
        yield {"probe": "gpu", "missing": f"torch finds no GPU, and /dev has {nodes}"}
    alike: dict[str, dict[str, str]] = defaultdict(dict)
    broken = ""
    for index in range(count):
        name = f"gpu{index}"
        yield {"begins": name}
        found = {"missing": f"not tried after the fault of {broken}"} if broken else _try_gpu(index, build)
        yield {"probe": name, **found}
        if "error" in found:
            broken = name  # an error of CUDA may stay with its process
        if "digest" in found:
            alike[found["platform"]][name] = found["digest"]
    for digests in alike.values():
        odd, others = odd_ones(digests)
        yield from (
            {"probe": name, "error": f"its result differs from that of {others} other GPUs"} for name in odd
        )


def _try_gpu(index: int, build: str) -> dict[str, Any]:
    import torch

    if (left := available_bytes()) < _CONTEXT_BYTES:
        return {"missing": f"memory leaves {_mib(left)}, and CUDA takes {_mib(_CONTEXT_BYTES)}"}
    try:
        shape = torch.cuda.get_device_properties(index)
        device = f"{shape.name}, {shape.multi_processor_count} SMs, CUDA {torch.version.cuda}"
        on = f"{gpu_platform(device, build, os.environ)}, torch {torch.__version__}"
        return multiply(make_operands(f"cuda:{index}", _GPU_SIDE), on)
    except RuntimeError as error:
        return gpu_fault(str(error))


def gpu_fault(message: str) -> dict[str, str]:
    """An error is the GPU's if it says so: others may hold its memory, and a driver may not fit."""
    text = message.partition("\n")[0]
    is_broken = any(word in text.lower() for word in _BROKEN_GPU)
    return {"error" if is_broken else "missing": text}


#: Name -> program.
PROGRAMS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    "memory": measure_memory,
    "shm": measure_shm,
    "disk": measure_disk,
    "compute": measure_compute,
}


def main(argv: Sequence[str]) -> int:
    """Run the probe of this name and print its results."""
    name, directory = argv
    try:
        for line in PROGRAMS[name](Path(directory)):
            print(json.dumps(line), flush=True)
    except NotMeasured as reason:
        print(json.dumps({"missing": str(reason)}), flush=True)
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        # RuntimeError: of torch, or there may be no more threads.
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(json.dumps({"missing": f"could not measure: {text}"}), flush=True)
    print(json.dumps({"end": True}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
