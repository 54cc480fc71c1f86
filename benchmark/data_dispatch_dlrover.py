# SPDX-License-Identifier: Apache-2.0
"""What `data_dispatch.py` measures, with the local master of DLRover and its clients.

    python3 -m venv /tmp/dlrover
    /tmp/dlrover/bin/pip install dlrover==0.6.1 grpcio kubernetes psutil
    /tmp/dlrover/bin/python benchmark/data_dispatch_dlrover.py --clients 64 --seconds 20

It needs that environment and nothing of this project: its clients ask for a shard and say at once that it is
done, in as many threads and processes as there.  The master keeps its account in memory and writes nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

import psutil

START_S = 120.0


def drive(number: int, clients: int, port: int, seconds: float, pipe: Connection) -> None:
    """Latencies of shards and of their results, in seconds, of this process's clients."""
    from dlrover.python.elastic_agent.master_client import build_master_client

    grants: list[float] = []
    dones: list[float] = []
    masters = [build_master_client(f"127.0.0.1:{port}", timeout=60) for _ in range(clients)]
    for index, master in enumerate(masters):
        master._node_id, master._node_type = number * clients + index, "worker"
    masters[0].report_dataset_shard_params(
        batch_size=1000,
        num_epochs=1,
        dataset_size=10**9,
        shuffle=False,
        num_minibatches_per_shard=1,
        dataset_name="benchmark",
        task_type=0,
        storage_type="table",
    )

    def work(master: object, until: float) -> None:
        while (asked := time.monotonic()) < until:
            is_there, task = master.get_task("benchmark")  # type: ignore[attr-defined]
            granted = time.monotonic()
            if not is_there or task.shard.end <= task.shard.start:
                continue
            master.report_task_result("benchmark", task.task_id, "")  # type: ignore[attr-defined]
            grants.append(granted - asked)
            dones.append(time.monotonic() - granted)

    pipe.send("ready")
    pipe.recv()
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=work, args=(master, until)) for master in masters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + START_S)
    pipe.send((grants, dones))


def started(port: int, clients: int) -> subprocess.Popen[bytes]:
    """A master that listens."""
    words = [
        "--platform",
        "local",
        "--job_name",
        "benchmark",
        "--port",
        str(port),
        "--node_num",
        str(clients),
    ]
    argv = [sys.executable, "-m", "dlrover.python.master.main", *words]
    master = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and master.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return master
    raise SystemExit("DLRover's master does not listen")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64, help="over all processes")
    parser.add_argument("--processes", type=int, default=4, help="that the clients run in")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long they ask")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    grants: list[float] = []
    dones: list[float] = []
    with started(port, options.clients) as master:
        drivers = []
        for number in range(options.processes):
            pipe, far = context.Pipe()
            words = (number, options.clients // options.processes, port, options.seconds, far)
            drivers.append((pipe, context.Process(target=drive, args=words, daemon=True)))
            drivers[-1][1].start()
        for step in ("ready", "measured"):
            for pipe, _ in drivers:
                if not pipe.poll(options.seconds + START_S):
                    raise SystemExit(f"a process of the benchmark is not {step}")
                found = pipe.recv()
                if step == "measured":
                    grants += found[0]
                    dones += found[1]
            for pipe, _ in drivers if step == "ready" else []:
                pipe.send("go")
        memory = psutil.Process(master.pid).memory_info().rss
        master.kill()
    print(f"{options.clients} clients in {options.processes} processes, {options.seconds:g} s")
    print(f"load {os.getloadavg()[0]:.1f}; master {memory / 2**20:.0f} MiB of memory")
    print(f"shards/s     {len(dones) / options.seconds:10.0f}   (one given out and done each)")
    for name, latencies in (("grant", grants), ("done", dones)):
        cuts = statistics.quantiles(latencies, n=100)
        print(f"{name:<12} {1000 * cuts[49]:10.2f} ms median   {1000 * cuts[98]:.2f} ms of 99 in 100")


if __name__ == "__main__":
    main()
