# SPDX-License-Identifier: Apache-2.0
"""Hosts that meet although nobody knows their names, and words for those that cannot meet."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency.launch import rendezvous_wait
from resiliency.launch._compat import HostRendezvous, must_serve_store
from resiliency.testing.processes import Command
from tests.waiting import wait_until

from .conftest import ROOT, SCRIPTS, WAIT

_NAMESPACES = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
needs_namespaces = pytest.mark.skipif(
    not all(map(shutil.which, ("unshare", "nsenter", "ip")))
    or subprocess.run([*_NAMESPACES, "true"], capture_output=True).returncode != 0,
    reason="needs the right to make namespaces, and the program ip",
)

SUM = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
sum = torch.tensor(1 + dist.get_rank())
dist.all_reduce(sum)
line = f"{socket.gethostname()} sum {int(sum)} at {os.environ['MASTER_ADDR']}\\n"
os.write(1, line.encode())  # at once: both hosts write into one pipe
dist.destroy_process_group()
"""


@needs_namespaces
def test_hosts_whose_names_nobody_knows_meet_and_their_ranks_find_each_other(tmp_path: Path) -> None:
    """With an address as endpoint; a network is between them, so loopback addresses lead nowhere."""
    (tmp_path / "sum.py").write_text(SUM)
    flags = ["--nnodes=2", "--rdzv-endpoint=10.77.0.1:29400", "--rdzv-id=pair", f"--run-dir={tmp_path}"]
    launcher = [sys.executable, str(ROOT / "launcher.py"), *flags, "--standby=off", str(tmp_path / "sum.py")]
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with Command(
        [*_NAMESPACES, "bash", str(SCRIPTS / "two_hosts.sh"), str(tmp_path), *launcher], env=env
    ) as hosts:
        assert hosts.wait(timeout=WAIT) == 0, hosts.output
        said = re.findall(r"(\w+)\.nowhere\.invalid sum (\d) at (\S+)", hosts.output)
    assert sorted(said) == [("first", "3", "10.77.0.1"), ("second", "3", "10.77.0.1")]


@pytest.fixture
def silent_program() -> Iterator[int]:
    """The port of a program that accepts connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_host_that_has_to_serve_the_store_is_told_that_its_port_is_taken(
    silent_program: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in (("_FIRST_LOOK_S", 0.2), ("_NEXT_LOOK_S", 0.1), ("_TAKEN_S", 0.4)):
        monkeypatch.setattr(rendezvous_wait, name, seconds)
    endpoint = f"127.0.0.1:{silent_program}"

    def connect() -> object:
        return HostRendezvous.connect(
            endpoint=endpoint,
            run_id="pair",
            min_nodes=1,
            max_nodes=2,
            local_addr=None,
            node_rank=None,
            upscaling=False,
            conf={"read_timeout": "1"},
        )

    taken = f"port {silent_program} of this host is taken: what listens at 127.0.0.1 does not answer"
    with pytest.raises(OSError, match=taken):
        rendezvous_wait.meet(connect, "127.0.0.1", silent_program, lambda: must_serve_store(endpoint, {}))
    assert [taken in message for message in caplog.messages] == [True], "once"


def test_a_host_that_waits_is_told_for_what(
    silent_program: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous_wait, "_FIRST_LOOK_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    for port, why in (
        (silent_program, "what listens at 127.0.0.1 does not answer as a rendezvous store does"),
        (nobody, "nothing listens there that this host reaches (127.0.0.1: Connection refused)"),
    ):
        caplog.clear()

        def is_told(why: str = why) -> bool:
            return any(why in message for message in caplog.messages)

        # The store comes in the end.
        rendezvous_wait.meet(
            lambda is_told=is_told: wait_until(is_told, "nobody is told", timeout=WAIT),
            "127.0.0.1",
            port,
            lambda: False,
        )


def test_a_host_is_told_that_it_does_not_know_the_name_of_the_host_of_rank_0(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rendezvous_wait.check_first_host("first.nowhere.invalid")
    wait_until(lambda: "does not know the name first.nowhere.invalid" in caplog.text, "silence", timeout=WAIT)


def test_gloo_is_given_the_interface_of_a_host_whose_name_leads_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(rendezvous_wait.GLOO_INTERFACE_ENV, "")  # is put back at the end
    found = next(
        one.address for one in rendezvous_wait.psutil.net_if_addrs()["lo"] if one.family == socket.AF_INET
    )
    for names_address, known, expected in (
        ("127.0.1.1", "", "lo"),
        ("10.0.0.7", "", None),
        ("127.0.1.1", "eth7", "eth7"),
    ):
        monkeypatch.setattr(rendezvous_wait, "is_loopback", lambda one: one == "127.0.1.1")
        monkeypatch.setattr(rendezvous_wait, "addresses_of", lambda _, one=names_address: [one])
        os.environ.pop(rendezvous_wait.GLOO_INTERFACE_ENV, None)
        if known:
            os.environ[rendezvous_wait.GLOO_INTERFACE_ENV] = known
        rendezvous_wait.set_gloo_interface(found)
        assert os.environ.get(rendezvous_wait.GLOO_INTERFACE_ENV) == expected
