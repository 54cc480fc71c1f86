# SPDX-License-Identifier: Apache-2.0
"""The supervisor's figures: detection to action for each fault, hosts held, what it costs while it is idle.

    python3 benchmark/supervisor_numbers.py --markdown docs/benchmarks/DATE-supervisor.md

Sensor, controller, actuator and host daemons are processes of this machine, with default thresholds; twins of
launchers report steps and need no torch.  Each fault has a supervisor of its own.  The peer is the closed
library that users run today, as it was measured on two cores over loopback; "-" where it was not.

  host-killed, host-vanishes, worker-silent, ...   a fault, until the first call of the orchestrator or hosts
  hosts           synthetic hosts of 8 workers on one sensor: how many, and what it calls lost wrongly
  sensor-stopped  the sensor is stopped for a while under such hosts, and goes on
  idle            three hosts that train: processor, memory and threads of each process
  simulation      1,000 histories, and one of 10,000 hosts

Run it on a machine that does nothing else: about half an hour for everything on two cores.

Exit codes: 0 measured, 1 some run could not be.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from measuring import count, machine
from supervisor_faults import FAULTS, SUSPECTED_S, FaultCell, Moments, measure
from supervisor_load import Held, Usage, hold_hosts, idle, simulate, stop_sensor
from supervisor_plane import Heartbeat
from tqdm import tqdm

from resiliency.errors import ResiliencyError

HEARTBEATS = (
    Heartbeat(period_s=1, timeout_s=2),
    Heartbeat(period_s=5, timeout_s=10),
    Heartbeat(period_s=15, timeout_s=30),
)
OTHERS = ("hosts", "sensor-stopped", "idle", "simulation")
#: What a run may fail with without a bug of ours: it is reported, and the next one starts.
_RUN_ERRORS = (ResiliencyError, TimeoutError, EOFError, OSError)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How long and how large: all of it, or a look at whether it runs."""

    held: tuple[tuple[int, Heartbeat], ...]
    window_s: float
    stopped_hosts: int
    stopped_s: float
    idle_s: float
    seeds: int
    simulated_hosts: int


FULL = Scale(
    held=((2_400, HEARTBEATS[0]), (10_000, HEARTBEATS[1]), (20_000, HEARTBEATS[2])), window_s=120.0,
    stopped_hosts=300, stopped_s=60.0, idle_s=60.0, seeds=1000, simulated_hosts=10_000,
)  # fmt: skip
QUICK = Scale(
    held=((40, HEARTBEATS[0]),), window_s=1.0, stopped_hosts=20, stopped_s=3.0, idle_s=1.0, seeds=20,
    simulated_hosts=50,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the note.

    Attributes:
        values: one for each round; empty where no run could be measured.
        unit: behind each figure.
        most: what is promised; None where nothing is.
        note: what was harmed, or why nothing was measured.
    """

    what: str
    setting: str
    values: tuple[float, ...]
    unit: str = "s"
    most: float | None = None
    peer: str = "-"
    note: str = ""

    @property
    def met(self) -> str:
        if self.most is None or not self.values:
            return "-"
        return "yes" if max(self.values) <= self.most and not self.note else "no"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="supervisor_numbers.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*(cell.name for cell in FAULTS), *OTHERS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="of each fault (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="does it run at all: 1/2 s, small, one round")
    parser.add_argument("--directory", type=Path, help="where logs are; default: a temporary directory")
    parser.add_argument("--keep", action="store_true", help="keep the logs of all processes")
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write every figure there")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write a dated note there")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    names = args.only or [*(cell.name for cell in FAULTS), *OTHERS]
    facts = machine()
    root = Path(tempfile.mkdtemp(prefix="supervisor-", dir=args.directory))
    try:
        rows = run_all(names, args.quick, 1 if args.quick else args.rounds, root)
    finally:
        if not args.keep:
            shutil.rmtree(root)
    flags = ["--quick"] * args.quick + [f"--rounds {args.rounds}"] * (not args.quick)
    flags += [f"--only {' '.join(names)}"] if args.only else []
    command = " ".join(["python3 benchmark/supervisor_numbers.py", *flags])
    date = datetime.now(timezone.utc)
    print("\n".join(table(rows)))
    if args.export:
        plain = {"date": date.isoformat(timespec="seconds"), "command": command, "machine": facts}
        args.export.write_text(json.dumps({**plain, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    if args.markdown:
        args.markdown.write_text(as_markdown(rows, command, facts))
    if args.keep:
        print(f"logs: {root}")
    return 1 if any(not row.values for row in rows) else 0


def run_all(names: Sequence[str], quick: bool, rounds: int, root: Path) -> list[Row]:
    """Measure one after the other; a run that fails becomes a row without figures."""
    scale = QUICK if quick else FULL
    work: list[tuple[str, Callable[[Path], Iterator[Row]]]] = []
    for cell in FAULTS:
        if cell.name in names:
            heartbeats = HEARTBEATS[:1] if quick or not cell.every_heartbeat else HEARTBEATS
            work += [
                (f"{cell.name} {heartbeat}", _fault(cell, heartbeat, rounds)) for heartbeat in heartbeats
            ]
    if "hosts" in names:
        work += [
            (f"{hosts} hosts {heartbeat}", _held(hosts, heartbeat, scale.window_s))
            for hosts, heartbeat in scale.held
        ]
    others = {"sensor-stopped": _stopped(scale), "idle": _idle(scale), "simulation": _simulation(scale)}
    work += [(name, others[name]) for name in OTHERS if name in others and name in names]
    rows: list[Row] = []
    with tqdm(total=len(work), unit="cell", file=sys.stderr) as bar:
        for number, (text, run) in enumerate(work):
            bar.set_description(text)
            try:
                rows += run(root / str(number))
            except _RUN_ERRORS as error:
                print(f"{text}: {error}", file=sys.stderr)
                rows.append(Row(what=text, setting="", values=(), note=str(error).partition("\n")[0][:200]))
            bar.update()
    return rows


def _fault(cell: FaultCell, heartbeat: Heartbeat, rounds: int) -> Callable[[Path], Iterator[Row]]:
    def run(directory: Path) -> Iterator[Row]:
        runs = [measure(cell, heartbeat, directory / str(number)) for number in range(rounds)]
        yield Row(
            what=cell.what,
            setting=str(heartbeat),
            values=_values(runs, cell.judged),
            most=cell.bar(heartbeat),
            peer=cell.peer(heartbeat),
            note="; ".join(one.harmed for one in runs if one.harmed),
        )
        fault = cell.what.partition(",")[0]
        for moment, most in (("suspected", SUSPECTED_S), ("detected", cell.detected(heartbeat))):
            if values := _values(runs, f"{moment}_s"):
                yield Row(
                    what=f"{fault}: until it is {moment}", setting=str(heartbeat), values=values, most=most
                )

    return run


def _values(runs: Sequence[Moments], name: str) -> tuple[float, ...]:
    return tuple(value for one in runs if (value := getattr(one, name)) is not None)


def _held(hosts: int, heartbeat: Heartbeat, window_s: float) -> Callable[[Path], Iterator[Row]]:
    peers = {2_400: "false deaths from 2,400 hosts on", 20_000: "aborts above 14,800 hosts"}

    def run(directory: Path) -> Iterator[Row]:
        held = hold_hosts(hosts, heartbeat, window_s, directory)
        yield from _of_held(held, peers.get(hosts, "-"))

    return run


def _of_held(held: Held, peer: str) -> Iterator[Row]:
    base = Row(what="", setting=f"{held.hosts:,} hosts, {held.heartbeat}, {held.window_s:g} s", values=())
    load = f"hosts' own programs: {held.load_cores:.2f} cores, {held.load_late_s:.1f} s late at most"
    yield replace(
        base, what="called lost wrongly", values=(float(held.false),), unit="", most=0.0, peer=peer,
        note="" if held.false == 0 else load,
    )  # fmt: skip
    found = () if held.found_s is None else (held.found_s,)
    yield replace(
        base, what="a host that falls silent, found", values=found, most=held.heartbeat.timeout_s + 1.0
    )
    yield replace(base, what="sensor: processor", values=(held.sensor.cores,), unit="cores", most=1.0)
    yield replace(base, what="sensor: memory", values=(held.sensor.memory_mib,), unit="MiB")
    yield replace(base, what="controller: processor", values=(held.controller.cores,), unit="cores")
    yield replace(base, what="controller: memory", values=(held.controller.memory_mib,), unit="MiB")
    yield replace(base, what="streams that ended", values=(float(held.ended),), unit="", most=0.0)
    yield replace(base, what="until all are connected", values=(held.opened_s,))
    yield replace(base, what="hosts' own programs: processor", values=(held.load_cores,), unit="cores")
    yield replace(base, what="hosts' own programs: late by", values=(held.load_late_s,))


def _stopped(scale: Scale) -> Callable[[Path], Iterator[Row]]:
    def run(directory: Path) -> Iterator[Row]:
        false = stop_sensor(scale.stopped_hosts, HEARTBEATS[0], scale.stopped_s, directory)
        yield Row(
            what=f"sensor stopped for {scale.stopped_s:g} s: called lost wrongly",
            setting=f"{scale.stopped_hosts} hosts, {HEARTBEATS[0]}", values=(float(false),), unit="",
            most=0.0, peer="all hosts at once",
        )  # fmt: skip

    return run


def _idle(scale: Scale) -> Callable[[Path], Iterator[Row]]:
    def run(directory: Path) -> Iterator[Row]:
        setting = f"3 hosts, {HEARTBEATS[-1]}, {scale.idle_s:g} s"
        for part, usage in idle(HEARTBEATS[-1], scale.idle_s, directory).items():
            yield from _of_idle(part, usage, setting)

    return run


def _of_idle(part: str, usage: Usage, setting: str) -> Iterator[Row]:
    percent = (round(100 * usage.cores, 2),)
    yield Row(
        what=f"idle {part}: processor", setting=setting, values=percent, unit="%", most=1.0, peer="0.1-0.3 %"
    )
    memory = (usage.memory_mib,)
    yield Row(
        what=f"idle {part}: memory",
        setting=setting,
        values=memory,
        unit="MiB",
        most=100.0,
        peer="147-157 MiB",
    )
    threads = (float(usage.threads),)
    yield Row(what=f"idle {part}: threads", setting=setting, values=threads, unit="", most=19.0, peer="1,030")


def _simulation(scale: Scale) -> Callable[[Path], Iterator[Row]]:
    def run(directory: Path) -> Iterator[Row]:
        del directory
        for seeds, hosts, most in ((scale.seeds, 12, 60.0), (1, scale.simulated_hosts, None)):
            seconds = simulate(seeds, hosts)
            setting = f"{seeds:,} histories of up to {hosts:,} hosts"
            yield Row(what="simulation, all invariants held", setting=setting, values=(seconds,), most=most)

    return run


# ------------------------------------------------------------------------------------------- for people


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| What | Setting | Peer | Promised | Ours | Met |"
    yield "|---|---|---|---:|---:|---|"
    for row in rows:
        most = "-" if row.most is None else f"{row.most:,g} {row.unit}".strip()
        ours = " ".join(part for part in (_spread(row), row.note and f"({row.note})") if part)
        yield f"| {row.what} | {row.setting} | {row.peer} | {most} | {ours} | {row.met} |"


def _spread(row: Row) -> str:
    if not row.values:
        return "not measured"

    def text(value: float) -> str:
        return f"{value:,.2f}" if value < 10 and value != int(value) else f"{value:,.0f}"

    middle = f"{text(statistics.median(row.values))} {row.unit}".strip()
    if len(row.values) == 1:
        return middle
    return f"{middle} ({text(min(row.values))}..{text(max(row.values))})"


def as_markdown(rows: Sequence[Row], command: str, facts: dict[str, Any]) -> str:
    """The note: configuration first, then all figures."""
    machine_text = (
        f"{facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, "
        f"load {facts['load_1min']} before; Python {facts['python']}"
    )
    missed = [f"{row.what} ({row.setting})" for row in rows if row.met == "no"]
    lines = [
        "# How soon the supervisor acts, how many hosts it holds, and what it costs",
        "",
        f"`{command}`",
        "",
        f"Machine: {machine_text}.",
        "",
        "All processes ran on this machine, over loopback, with default thresholds. A time to an action",
        "holds `--coalesce-s` (2 s, in which the echoes of a fault gather) and, where nobody confirms that",
        "a host is lost, the rest of `--advancing-s` (4 s after the last step). Median (min..max) of rounds.",
        "*Peer*: the closed library that users run today, measured at 15/30 s on two cores over loopback;",
        "`-`: not measured. *Promised*: by the design; a detection is part of the time to its action.",
        "",
        f"Missed: {', '.join(missed)}." if missed else "Nothing that is promised was missed.",
        "",
        *table(rows),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
