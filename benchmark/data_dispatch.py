# SPDX-License-Identifier: Apache-2.0
"""What a data server does in a second, and how long a client waits for it.

    python3 benchmark/data_dispatch.py --clients 64 --seconds 20
    python3 benchmark/data_dispatch.py --clients 64 --connections 5000 --seconds 20

The server is a process of its own; the clients are threads of a few others, each with a connection, which ask
for a range and say at once that it is done.  Each of these requests is durable in the journal before it is
answered, so the disk under --book is measured too, by such lines that are appended and synced one by
one.  Requests that arrive during one durable write share the next.

With --connections there are more clients than ask: each of the others holds a range meanwhile, and says that
it lives.  At the end all of them say that their range is used in one step, and commit it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import statistics
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from measuring import machine

from resiliency.data import DataClient, DataServer, SampleRanges

TOKEN = "of this benchmark alone"  # noqa: S105
#: Longest time for processes to start and to end, beside the measurement.
START_S = 120.0


def serve(book: str, pipe: Connection) -> None:
    # As most machines have it; the server raises it.
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with DataServer(
        SampleRanges(size=10**12, range_size=1000, order="sequential"), book, token=TOKEN
    ) as server:
        pipe.send(server.address)
        while pipe.recv() == "memory":
            pipe.send(psutil.Process().memory_info().rss)


def drive(
    number: int, clients: int, idle: int, address: tuple[str, int], seconds: float, pipe: Connection
) -> None:
    """Latencies of grants and of dones, in seconds, of this process's clients."""
    grants: list[float] = []
    dones: list[float] = []

    def work(client: DataClient, until: float) -> None:
        while (asked := time.monotonic()) < until:
            part = client.next_range()
            granted = time.monotonic()
            assert part is not None
            client.done(part)
            grants.append(granted - asked)
            dones.append(time.monotonic() - granted)

    threading.stack_size(256 * 1024)
    wait = timedelta(seconds=START_S)
    joined = [
        DataClient(address, f"{number}-{index}", token=TOKEN, timeout=wait) for index in range(clients + idle)
    ]
    held = [(client, client.next_range()) for client in joined[clients:]]
    pipe.send("ready")
    pipe.recv()
    until = time.monotonic() + seconds
    _run_all([threading.Thread(target=work, args=(client, until)) for client in joined[:clients]], seconds)
    pipe.send((grants, dones))
    for end_step in (
        lambda client, part: client.done(part, step=1),
        lambda client, _: client.commit(1),
    ):
        pipe.recv()
        _run_all([threading.Thread(target=end_step, args=entry) for entry in held], START_S)
        pipe.send("next")
    pipe.recv()
    for client in joined:
        with contextlib.suppress(OSError):
            client.close()


def _run_all(threads: list[threading.Thread], seconds: float) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + START_S)


def syncs_per_s(book: str, seconds: float) -> float:
    """How often a line can be appended durably in the directory of the journal."""
    path = Path(book) / "raw.journal"
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("ab", buffering=0) as file:
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            file.write(b"x" * 120 + b"\n")
            os.fdatasync(file.fileno())
            count += 1
        rate = count / (time.monotonic() - start)
    path.unlink()
    return rate


def _share(count: int, number: int, processes: int) -> int:
    return count // processes + (number < count % processes)


def received(pipe: Connection, wait_s: float) -> object:
    if not pipe.poll(wait_s):
        raise SystemExit(f"a process of the benchmark said nothing within {wait_s:g} s")
    return pipe.recv()


def memory_of(server: Connection) -> int:
    server.send("memory")
    found = received(server, START_S)
    assert isinstance(found, int)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64, help="over all processes")
    parser.add_argument(
        "--connections", type=int, help="of these clients and idle ones; default: no idle ones"
    )
    parser.add_argument("--processes", type=int, default=4, help="that the clients run in")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long they ask")
    parser.add_argument("--book", help="directory of the journal; default: a temporary one")
    options = parser.parse_args()
    idle = max(0, (options.connections or 0) - options.clients)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary:
        book = options.book or str(Path(temporary) / "book")
        raw = syncs_per_s(book, min(options.seconds, 3.0))
        server_pipe, far = context.Pipe()
        server = context.Process(target=serve, args=(book, far), daemon=True)
        server.start()
        address = received(server_pipe, START_S)
        memory_at_start = memory_of(server_pipe)
        begun = time.monotonic()
        drivers = []
        for number in range(options.processes):
            share = [_share(all_of, number, options.processes) for all_of in (options.clients, idle)]
            pipe, far = context.Pipe()
            words = (number, *share, address, options.seconds, far)
            drivers.append((pipe, context.Process(target=drive, args=words, daemon=True)))
            drivers[-1][1].start()
        for pipe, _ in drivers:
            received(pipe, 5 * START_S)
        joined_s = time.monotonic() - begun
        for pipe, _ in drivers:
            pipe.send("go")
        grants: list[float] = []
        dones: list[float] = []
        for pipe, _ in drivers:
            found = received(pipe, options.seconds + START_S)
            assert isinstance(found, tuple)
            grants += found[0]
            dones += found[1]
        memory = memory_of(server_pipe)
        ends_s = []
        for _ in range(2):
            begun = time.monotonic()
            for pipe, _ in drivers:
                pipe.send("next")
            for pipe, _ in drivers:
                received(pipe, 2 * START_S)
            ends_s.append(time.monotonic() - begun)
        for pipe, process in drivers:
            pipe.send("end")
            process.join(START_S)
        server_pipe.send("end")
        server.join(START_S)
    print(f"machine {machine()}; load {os.getloadavg()[0]:.1f}")
    print(
        f"{options.clients} clients in {options.processes} processes, {options.seconds:g} s; {idle} idle ones"
    )
    growth = (memory - memory_at_start) / 2**20
    print(f"server       {memory / 2**20:10.0f} MiB of memory, {growth:.0f} MiB of it since its start")
    if idle:
        print(f"joined       {joined_s:10.1f} s for all, with the start of processes and ranges of idle ones")
        print(f"done         {ends_s[0]:10.1f} s for {idle} workers that say done")
        print(f"committed    {ends_s[1]:10.1f} s for {idle} workers that commit the step")
    print(f"raw syncs/s  {raw:10.0f}   (a line appended and synced, one at a time)")
    print(f"ranges/s     {len(dones) / options.seconds:10.0f}   (a grant and a done each)")
    for name, latencies in (("grant", grants), ("done", dones)):
        cuts = statistics.quantiles(latencies, n=100)
        print(f"{name:<12} {1000 * cuts[49]:10.2f} ms median   {1000 * cuts[98]:.2f} ms of 99 in 100")


if __name__ == "__main__":
    main()
