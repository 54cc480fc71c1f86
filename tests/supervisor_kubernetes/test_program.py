# SPDX-License-Identifier: Apache-2.0
"""The flag as an operator gives it: a process finds its cluster by KUBECONFIG, or says that there is none."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.supervisor_kubernetes.fleet import JOBS, OWN, cluster_of, kubeconfig
from tests.supervisor_plane.plane import ROOT

PROGRAM = [sys.executable, "-m", "supervisor", "--all-in-one", "--plaintext", "--status-port=off"]


def environment(config: Path) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("SUPERVISOR_", "KUBE"))}
    ports = dict(zip(("SENSOR", "CONTROLLER", "ACTUATOR"), free_ports(3), strict=True))
    return {
        **kept,
        **{f"{part}_ADDRESS": f"127.0.0.1:{port}" for part, port in ports.items()},
        "KUBECONFIG": str(config),
        "WORKLOAD_NAMESPACE": JOBS,
        "JOB_NAMESPACE": OWN,
        "POD_NAME": "actuator-0",
    }


@pytest.mark.slow
async def test_the_supervisor_holds_the_lease_while_it_runs_and_gives_it_back(tmp_path: Path) -> None:
    async with cluster_of("n1") as cluster:
        config = kubeconfig(tmp_path / "config", cluster.api.url)
        program = await asyncio.create_subprocess_exec(
            *PROGRAM,
            "--orchestrator=gke",
            f"--state-dir={tmp_path}",
            cwd=ROOT,
            env=environment(config),
            stderr=subprocess.PIPE,
        )

        def holder() -> str:
            lease = cluster.store.find("leases", "resiliency-supervisor", OWN)
            return lease["spec"]["holderIdentity"] if lease else ""

        try:
            await cluster.until(lambda: holder().startswith("actuator-0_"), "it does not take the lease")
            assert {call.user for call in cluster.api.calls} == {"actuator"}
        finally:
            program.terminate()
            _, said = await asyncio.wait_for(program.communicate(), 60)
        assert program.returncode == 0, said.decode()
        assert holder() == ""


@pytest.mark.slow
def test_without_a_cluster_it_ends_with_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "--orchestrator=gke", f"--state-dir={tmp_path}"],
        cwd=ROOT,
        env=environment(tmp_path / "nothing"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"--orchestrator gke: no cluster is found: {tmp_path}/nothing is not there" in done.stderr
    assert "Traceback" not in done.stderr
