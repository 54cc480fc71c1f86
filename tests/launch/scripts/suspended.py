# SPDX-License-Identifier: Apache-2.0
"""A worker that sums over all ranks, and waits for its agent, its monitor and the others for 10 s at most.

    suspended.py DIRECTORY

It ends well once any rank has got SIGUSR2.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

from resiliency.checkpoint import Checkpointer, CheckpointerOptions
from resiliency.checkpoint.agent.client import LinkOptions
from resiliency.progress import report_step


def main() -> None:
    told = torch.zeros(1)
    signal.signal(signal.SIGUSR2, lambda *_: told.fill_(1.0))
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    client = RankMonitorClient()
    client.init_workload_monitoring()
    dist.init_process_group("gloo")
    options = CheckpointerOptions(link=LinkOptions(silence=timedelta(seconds=10)))
    with Checkpointer(sys.argv[1], replicated=True, options=options) as checkpoints:
        step, all_told = 0, torch.zeros(1)
        while not all_told.item():
            step += 1
            all_told = told.clone()
            dist.all_reduce(all_told)
            report_step(step)
            client.send_heartbeat()
            if step % 20 == 0:
                checkpoints.save(step, {"step": torch.full((1000,), step)})
                where = f"rank {rank} attempt {attempt} pid {os.getpid()} agent {checkpoints.agent_pid}"
                os.write(1, f"{where} step {step}\n".encode())
            time.sleep(0.02)
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
