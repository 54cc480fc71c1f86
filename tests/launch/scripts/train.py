# SPDX-License-Identifier: Apache-2.0
"""A real gloo job in plain torch that sums ranks for ever; one rank may misbehave in attempt 0.

train.py [--fail RANK:hang] [--steps N] [--heartbeats]
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", default="-1:")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--heartbeats", action="store_true")
    args = parser.parse_args()
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    who, _, how = args.fail.partition(":")
    client = None
    if args.heartbeats:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        client = RankMonitorClient()
        client.init_workload_monitoring()
    dist.init_process_group("gloo")
    for step in range(args.steps):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        if client is not None:
            client.send_heartbeat()
        if step == 1 and attempt == 0 and rank == int(who):
            misbehave(how)
    os.write(1, f"rank {rank} attempt {attempt} sum {total.item():g}\n".encode())
    dist.destroy_process_group()
    if client is not None:
        client.shutdown_workload_monitoring()


def misbehave(how: str) -> None:
    if how == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main()
