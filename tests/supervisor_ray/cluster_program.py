# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of several nodes on this machine, which ends with its standard input.

Each line adds a node or removes one: ``add`` or ``remove NODE``, with Ray's id.  Removed nodes end at once,
as lost machines.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from ray.cluster_utils import Cluster

#: What a node has to hold one host.
HOST = {"host": 1.0}


def main() -> None:
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as directory:
        os.environ["RAY_TMPDIR"] = directory
        (Path(directory) / "ray").mkdir()
        common = {"object_store_memory": 80 << 20, "include_log_monitor": False}
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **common}
        )
        try:
            say({"address": cluster.address})
            nodes = {}
            for line in sys.stdin:
                command, _, name = line.strip().partition(" ")
                if command == "add":
                    node = cluster.add_node(num_cpus=1, resources=HOST, **common)
                    nodes[node.node_id] = node
                else:
                    cluster.remove_node(nodes.pop(name), allow_graceful=False)
                say({"nodes": len(nodes)})
        finally:
            cluster.shutdown()
            for path in Path(directory).glob("**/*.err"):
                print(path, path.read_text()[-500:], file=sys.stderr)


def say(answer: dict[str, object]) -> None:
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
