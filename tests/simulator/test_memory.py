# SPDX-License-Identifier: Apache-2.0
"""Memory pressure: within the limit of the container, and given back to those who need it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from resiliency.cgroups import available_bytes
from simulator.faults import FaultMissed, Kind, PlannedFault
from simulator.injectors import host, memory_holder
from simulator.injectors.host import MemoryPressure
from simulator.injectors.memory_holder import PIECE_BYTES, hold_memory
from tests.control_groups import inside, memory_group
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
#: In the real group: nine tenths of what a small program leaves are beyond what is spared.
LIMIT_MIB, STEP_MIB, STEPS = 700, 100, 6
#: A rank beside its simulator: the pressure begins, and the rank takes memory step by step.
RANK = f"""
from resiliency.cgroups import available_bytes, oom_kills
from simulator.injectors.host import MemoryPressure
from simulator.injectors.memory_holder import SPARED_BYTES
from tests.simulator.test_memory import MIB, fault, resident_bytes
from tests.waiting import wait_until

injector, before = MemoryPressure(), oom_kills()
record = injector.aim_fault(fault(90))
injector.inject(record)
holder = injector._holders[record["holder"]].pid
wait_until(lambda: resident_bytes(holder) >= record["bytes"], "the memory is not held")
taken = []
for _ in range({STEPS}):
    taken.append(b"x" * ({STEP_MIB} * MIB))
    wait_until(
        lambda: available_bytes() >= SPARED_BYTES or resident_bytes(holder) < 32 * MIB,
        "the memory is not given back",
        timeout=30,
    )
print(record["bytes"], resident_bytes(holder), oom_kills() - before)
injector.end_effect(record)
"""


def fault(percent: int) -> PlannedFault:
    return PlannedFault(at_us=0, kind=Kind.MEMORY, node=0, duration_us=1, value=percent)


def resident_bytes(pid: int) -> int:
    """0 for a process that has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), 0)
    return 0


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory group with a limit of `LIMIT_MIB`."""
    with memory_group(LIMIT_MIB * MIB) as group:
        yield group


def test_a_rank_in_a_container_that_takes_what_it_needs_is_not_killed(limited: Path) -> None:
    done = subprocess.run(
        inside(limited, [sys.executable, "-c", RANK]),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    wanted, held, kills = map(int, done.stdout.split())
    assert STEP_MIB * MIB < wanted < (LIMIT_MIB - 512) * MIB
    assert held < 32 * MIB
    assert kills == 0


def test_memory_is_held_by_a_process_that_dies_first_and_ends() -> None:
    injector = MemoryPressure()
    record = injector.aim_fault(fault(1))
    assert isinstance(record["bytes"], int)
    size = min(record["bytes"], 32 * MIB)
    injector.inject(record | {"bytes": size})
    (holder,) = injector._holders.values()
    wait_until(lambda: resident_bytes(holder.pid) >= size, "the memory is not held")
    assert Path(f"/proc/{holder.pid}/oom_score_adj").read_text().strip() == "1000"
    injector.end_effect(record)
    assert holder.returncode is not None
    injector.end_effect(record)


def test_memory_never_takes_the_last_half_gigabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 600 * MIB)
    injector = MemoryPressure()
    assert injector.aim_fault(fault(90))["bytes"] == 88 * MIB
    monkeypatch.setattr(host, "available_bytes", lambda: 500 * MIB)
    with pytest.raises(FaultMissed, match="too few to take any"):
        injector.aim_fault(fault(90))


class Container:
    """The kernel's files of a container with 600 MiB, in which others have 40 MiB at first.

    Args:
        version: of its control groups.
    """

    def __init__(self, directory: Path, version: int) -> None:
        self.cgroups, self.proc = directory / "cgroup", directory / "proc"
        group = (self.cgroups if version == 2 else self.cgroups / "memory") / "pod/container"
        limit = "memory.max" if version == 2 else "memory.limit_in_bytes"
        self._used = group / ("memory.current" if version == 2 else "memory.usage_in_bytes")
        group.mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/cgroup").write_text(
            "0::/pod/container\n" if version == 2 else "4:memory:/pod/container\n"
        )
        (group / limit).write_text(f"{600 * MIB}\n")
        self.use(40 * MIB)

    def use(self, used_bytes: int) -> None:
        self._used.write_text(f"{used_bytes}\n")


@pytest.fixture(params=[1, 2])
def container(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    made = Container(tmp_path, request.param)
    for module in (memory_holder, host):
        monkeypatch.setattr(module, "available_bytes", partial(available_bytes, made.cgroups, made.proc))
    return made


def test_memory_is_taken_of_what_the_container_leaves(container: Container) -> None:
    assert MemoryPressure().aim_fault(fault(90))["bytes"] == 48 * MIB


def test_what_others_in_the_container_take_is_given_back_for_good(container: Container) -> None:
    pressure = hold_memory(48 * MIB)

    def look(others_mib: int, held_mib: int) -> int:
        container.use((others_mib + held_mib) * MIB)
        return next(pressure) // MIB

    assert PIECE_BYTES == 16 * MIB
    assert [look(40, held) for held in (0, 16, 32, 48)] == [16, 32, 48, 48]
    assert look(41, 48) == 32  # one MiB is missing, so one piece goes
    assert look(41, 32) == 32
    assert look(300, 32) == 0
    assert look(40, 0) == 0  # that others end is no reason to begin again


def test_pressure_stops_where_others_were_faster(container: Container) -> None:
    pressure = hold_memory(48 * MIB)
    assert next(pressure) == 16 * MIB
    container.use((60 + 16) * MIB)  # 12 MiB are left to take
    assert [next(pressure) // MIB for _ in range(3)] == [16, 16, 16]
