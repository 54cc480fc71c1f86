# SPDX-License-Identifier: Apache-2.0
"""Synthetic hosts that train, on real streams to a sensor: how many of them one sensor holds.

    supervisor_hosts.py SENSOR --first 0 --hosts 600 --period 1 --per-connection 1

Each host says hello, registers 8 workers, and reports a finished step each period.  Prints ``ready``; a
line ``silence N`` on standard input makes host N say nothing more, ``end`` ends the program, which then
prints what it did as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from supervisor.protocol import PROTOCOL_VERSION, fleet_pb2
from supervisor.protocol.convert import to_message
from supervisor.transport.limits import CHANNEL_OPTIONS
from supervisor.transport.services import SENSOR_CONNECT
from supervisor.values import (
    DaemonReport,
    DeviceState,
    HostInfo,
    LauncherState,
    WorkerInfo,
    WorkerReport,
    WorkloadInfo,
)

WORKERS = 8
#: Hosts of one job.
JOB_HOSTS = 64
#: Streams that are opened side by side.
OPENING = 50


@dataclass
class Load:
    """What the hosts did.  `late_s`: the most that a report was sent behind its time."""

    hosts: int = 0
    reports: int = 0
    ended: int = 0
    late_s: float = 0.0
    cpu_s: float = 0.0


class Hosts:
    """Hosts `first` to `first + count`, in one loop."""

    def __init__(self, address: str, first: int, count: int, period_s: float, per_connection: int) -> None:
        self._address, self._first, self._count, self._period_s = address, first, count, period_s
        self._per_connection = per_connection
        self._opening = asyncio.Semaphore(OPENING)
        self._began = time.monotonic()
        self.load = Load(hosts=count)
        self.connected = 0
        self.all_connected = asyncio.Event()
        self.silent: set[int] = set()

    async def run(self) -> None:
        channels = [
            grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
            for _ in range(-(-self._count // self._per_connection))
        ]
        names = range(self._first, self._first + self._count)
        tasks = [
            asyncio.ensure_future(self._host(number, channels[index // self._per_connection]))
            for index, number in enumerate(names)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(channel.close() for channel in channels))

    async def _host(self, number: int, channel: Any) -> None:
        stub = channel.stream_stream(
            f"/{SENSOR_CONNECT.containing_service.full_name}/{SENSOR_CONNECT.name}",
            request_serializer=GetMessageClass(SENSOR_CONNECT.input_type).SerializeToString,
            response_deserializer=GetMessageClass(SENSOR_CONNECT.output_type).FromString,
        )
        host, job, report = self._values(number)
        async with self._opening:
            call = stub()  # it opens here: all at once, and none is answered in time
            hello = fleet_pb2.Hello(
                protocol=PROTOCOL_VERSION,
                release="benchmark",
                incarnation=f"i{number}",
                host=to_message(host),
            )
            await call.write(fleet_pb2.HostMessage(hello=hello))
            if await call.read() is grpc.aio.EOF:
                raise OSError(f"the sensor refused host {number}: {await call.details()}")
            await call.write(fleet_pb2.HostMessage(workload=to_message(job)))
            await call.write(fleet_pb2.HostMessage(host=to_message(host)))
        message = fleet_pb2.HostMessage(report=to_message(report))
        self.connected += 1
        if self.connected == self._count:
            self.all_connected.set()
        try:
            await self._send_heartbeat(number, call, message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self.load.ended += 1

    async def _send_heartbeat(self, number: int, call: Any, message: Any) -> None:
        due = time.monotonic()
        phase = random.random() * self._period_s  # noqa: S311 - daemons do not start in step
        while True:
            if number not in self.silent:
                message.report.sequence += 1
                step = int((time.monotonic() - self._began) / max(self._period_s, 1.0)) + 1
                for worker in message.report.workers:
                    worker.step = step
                await call.write(message)
                self.load.reports += 1
            due, phase = due + self._period_s + phase, 0.0
            pause_s = due - time.monotonic()
            self.load.late_s = max(self.load.late_s, -pause_s)
            await asyncio.sleep(max(0.0, pause_s))

    @staticmethod
    def _values(number: int) -> tuple[HostInfo, WorkloadInfo, DaemonReport]:
        name, job = f"host-{number:05}", f"job-{number // JOB_HOSTS}"
        first = number % JOB_HOSTS * WORKERS
        workers = tuple(
            WorkerInfo(
                id=f"{job}/{first + rank}",
                local_rank=rank,
                global_rank=first + rank,
                state=DeviceState.RUNNING,
            )
            for rank in range(WORKERS)
        )
        host = HostInfo(
            id=f"{name}.boot", name=name, state=DeviceState.RUNNING, workers=workers, workload=job,
            workers_per_host=WORKERS, subblock=f"rack-{number // 16}",
        )  # fmt: skip
        reports = tuple(
            WorkerReport(
                local_rank=rank, global_rank=first + rank, heartbeat_age_s=0.1, step=1, step_age_s=0.1
            )
            for rank in range(WORKERS)
        )
        report = DaemonReport(
            host=host.id,
            incarnation=f"i{number}",
            sequence=0,
            launcher=LauncherState.RUNNING,
            workers=reports,
        )
        workload = WorkloadInfo(workload=job, replicas=JOB_HOSTS, max_replicas=JOB_HOSTS)
        return host, workload, report


async def _obey(hosts: Hosts) -> None:
    """Do what standard input says, until it says ``end`` or is closed."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word, _, rest = line.strip().partition(" ")
        if word == "end":
            return
        if word == "silence":
            hosts.silent.add(int(rest))


async def _main(args: argparse.Namespace) -> Load:
    hosts = Hosts(args.sensor, args.first, args.hosts, args.period, args.per_connection)
    running = asyncio.ensure_future(hosts.run())
    connected = asyncio.ensure_future(hosts.all_connected.wait())
    await asyncio.wait({running, connected}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        connected.cancel()
        running.result()
        raise OSError("all streams ended before they were open")
    print("ready", flush=True)
    await _obey(hosts)
    hosts.load.cpu_s = time.process_time()
    load = hosts.load
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sensor")
    for flag in ("--first", "--hosts", "--per-connection"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--period", type=float, required=True)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(asdict(asyncio.run(_main(args)))), flush=True)


if __name__ == "__main__":
    main()
