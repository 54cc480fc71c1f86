# SPDX-License-Identifier: Apache-2.0
"""Train on the nodes of a Ray cluster; the job survives the loss of a node.

    python3 examples/ray/train_on_ray.py --hosts 4 --spares 1 --resources '{"GPU": 8}' --nproc-per-node 8 \\
        --state-dir /shared/fleet /opt/resiliency/examples/ddp_train.py --ckpt-dir /shared/ckpt

Run it on a machine of the cluster that does not train, as its head node.  It starts the store in which the
launchers meet, and the supervisor; Ctrl-C or SIGTERM ends both.  The job trains on without them, and the next
start of this program finds it.  To end the job: python3 -m supervisor.orchestrators.ray --stop /shared/fleet

On all nodes the package and the script are at the same path, as in an image.  docs/ray.md says more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ray.util import get_node_ip_address

ROOT = Path(__file__).resolve().parents[2]
PORTS = {"SENSOR": 60061, "CONTROLLER": 60062, "ACTUATOR": 60063}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ray-address", default="auto", help="Of the cluster (%(default)s).")
    parser.add_argument("--hosts", type=int, required=True, help="That train, a node of the cluster each.")
    parser.add_argument(
        "--spares", type=int, default=0, help="That wait for the loss of a host (%(default)s)."
    )
    parser.add_argument(
        "--resources",
        type=json.loads,
        required=True,
        help="That a host takes of its node, in Ray's words (JSON): what only one host of a node can have.",
    )
    parser.add_argument("--nproc-per-node", type=int, default=1, help="Ranks on each host (%(default)s).")
    parser.add_argument(
        "--state-dir", type=Path, required=True, help="What the supervisor knows of this fleet."
    )
    parser.add_argument(
        "--store-port", type=int, default=29400, help="Of the launchers' store (%(default)s)."
    )
    parser.add_argument("--first-port", type=int, default=61000, help="Hosts take two each (%(default)s).")
    parser.add_argument(
        "--supervisor-flags", default="", help="Further flags of python3 -m supervisor, as one text."
    )
    parser.add_argument("script", help="What trains, as a path on the nodes.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Of the script.")
    return parser.parse_args()


def job_file(args: argparse.Namespace, store: str) -> dict[str, object]:
    """What the supervisor runs: launchers that meet in `store`."""
    command = [
        *("{python}", str(ROOT / "launcher.py"), "--use-supervisor", "--host-daemon-port={daemon_port}"),
        *("--nnodes={nnodes}", f"--nproc-per-node={args.nproc_per_node}"),
        *("--max-restarts=3", "--max-workload-restarts=3"),
        *(f"--rdzv-endpoint={store}", "--rdzv-id=train-{generation}", "--rdzv-conf=is_host=0"),
        *("--local-addr={address}", "--workload-name=train", "--job-name=train", "--container-name=host"),
        *("--num-nodes-per-dp=1", "--num-dp-replicas={replicas}", "--enable-workload-scaling"),
        *("--min-num-dp-replicas=1", f"--max-num-dp-replicas={args.hosts}", args.script, *args.arguments),
    ]
    job = {"workload": "train", "replicas": args.hosts, "command": command}
    # Also where several nodes are one machine, as in a test, each host has its own name and run directory.
    own = {"NODE_NAME": "{host}", "RESILIENCY_RUN_DIR": "{state_dir}/run/{host}"}
    job["environment"] = {"JOB_IDENTIFIER": "train", **own}
    return {
        "hosts": [f"host-{number}" for number in range(args.hosts + args.spares)],
        "workers_per_host": args.nproc_per_node,
        "first_port": args.first_port,
        "resources": args.resources,
        "jobs": [job],
    }


def main() -> int:
    args = parse()
    own = get_node_ip_address()
    args.state_dir = args.state_dir.resolve()  # programs are started in another directory
    args.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = args.state_dir / "job.json"
    path.write_text(json.dumps(job_file(args, f"{own}:{args.store_port}"), indent=2))
    store = ["resiliency.launch.rendezvous_store", f"--port={args.store_port}"]
    # As other nodes reach this one, which plaintext must be told.  TLS instead of it: docs/supervisor.md.
    environment = {f"{part}_ADDRESS": f"{own}:{port}" for part, port in PORTS.items()} | os.environ
    supervisor = [
        *("supervisor", "--all-in-one", "--plaintext", "--listen=0.0.0.0", "--orchestrator=ray"),
        *(
            f"--state-dir={args.state_dir}",
            f"--job-file={path}",
            f"--ray-address={args.ray_address}",
            *args.supervisor_flags.split(),
        ),
    ]
    started = [
        subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, env=environment)
        for arguments in (store, supervisor)
    ]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: [one.terminate() for one in started])
    while all(one.poll() is None for one in started):
        time.sleep(0.5)
    for one in started:
        one.terminate()
    return max(abs(one.wait()) for one in started)


if __name__ == "__main__":
    sys.exit(main())
