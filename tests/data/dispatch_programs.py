# SPDX-License-Identifier: Apache-2.0
"""A data server, and workers of it, as processes that tests stop and kill.

python -m tests.data.dispatch_programs serve DIRECTORY PORT SIZE LEASE_S
python -m tests.data.dispatch_programs work ADDRESS NAME DELAY_S [FILE]
python -m tests.data.dispatch_programs load ADDRESS NAME SIZE WORKERS
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from resiliency.data import DataClient, DataServer, DispatchedSampler, SampleRanges, StaleRange
from resiliency.errors import ConfigError

TOKEN = "a secret of this test"  # noqa: S105
RANGE = 5
SOON_S = 60.0


def serve(directory: str, port: str, size: str, lease_s: str) -> None:
    source = SampleRanges(size=int(size), range_size=RANGE)
    deadline = time.monotonic() + SOON_S
    while True:
        try:
            lease = timedelta(seconds=float(lease_s))
            address = ("127.0.0.1", int(port))
            server = DataServer(source, directory, token=TOKEN, address=address, lease=lease)
            break
        except ConfigError as error:  # the port of the server before may be taken for a moment
            if "cannot listen" not in str(error) or time.monotonic() > deadline:
                raise
            threading.Event().wait(0.1)
    print(f"serving {server.address[1]}", flush=True)
    server.wait()


def work(address: str, name: str, delay_s: str, *gate: str) -> None:
    """Take ranges until the end; the first one only once the file exists."""
    with DataClient(("127.0.0.1", int(address)), name, token=TOKEN) as client:
        for part in client.ranges():
            print(f"{name} holds {part.start}", flush=True)
            deadline = time.monotonic() + SOON_S
            while gate and not Path(gate[0]).exists():
                if time.monotonic() > deadline:
                    raise SystemExit(f"{gate[0]} does not come")
                threading.Event().wait(0.02)
            threading.Event().wait(float(delay_s))
            try:
                client.done(part)
            except StaleRange:
                print(f"{name} stale {part.start}", flush=True)
            else:
                print(f"{name} counted {part.start}", flush=True)
    print(f"{name} ended", flush=True)


def load(address: str, name: str, size: str, workers: str) -> None:
    """Use the samples that a DataLoader with worker processes of its own gives, until the end."""
    with DataClient(("127.0.0.1", int(address)), name, token=TOKEN) as client:
        sampler = DispatchedSampler(client)
        data = TensorDataset(torch.arange(int(size)))
        loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=int(workers))
        for (indexes,) in sampler.batches(loader):
            print(f"{name} used {indexes.tolist()}", flush=True)
            sampler.advance(len(indexes))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    {"serve": serve, "work": work, "load": load}[sys.argv[1]](*sys.argv[2:])
