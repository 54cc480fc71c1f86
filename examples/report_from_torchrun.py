# SPDX-License-Identifier: Apache-2.0
"""Train under plain torchrun, and report to the supervisor's host daemon.

    python3 supervisor/host_daemon.py --plaintext --workers_per_host 2 &
    torchrun --standalone --nproc-per-node 2 examples/report_from_torchrun.py --workload-name demo

Under `launcher.py --use-supervisor` none of this is needed: the launcher reports.  Without a daemon the
training runs as well; the client warns once and keeps trying.
"""

from __future__ import annotations

import argparse
import logging

import torch
import torch.distributed as dist

from supervisor.client import DeviceState, GoogleCloudResiliencyClient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload-name", required=True)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    weight = torch.zeros(64)

    # Ranks come from RANK and LOCAL_RANK, the port from GCP_HOST_DAEMON_PORT (else 61000).
    with GoogleCloudResiliencyClient(workload_name=options.workload_name) as client:
        try:
            for step in range(1, options.steps + 1):
                gradient = torch.randn(64)
                dist.all_reduce(gradient)
                weight -= 0.01 * gradient
                client.send_heartbeat(step)
        except Exception:
            client.update_state(DeviceState.FAILED)
            raise
        client.update_state(DeviceState.COMPLETE)
    print(f"rank {dist.get_rank()} finished step {options.steps}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
