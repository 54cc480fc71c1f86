# SPDX-License-Identifier: Apache-2.0
"""The command line: torchrun's and ft_launcher's flags in any spelling, and what is refused."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from resiliency.errors import ConfigError
from resiliency.launch import _compat, cli  # first, as NVRx opens a file when it is imported, for good
from resiliency.launch.main import main
from resiliency.launch.options import LaunchOptions, resolve
from resiliency.template.client import ForkedProcess

from .conftest import ROOT, WAIT, WORKER, Launch

#: Flags whose default differs from upstream's on purpose: "not given" has a meaning here.
OWN_DEFAULTS = {
    *("node_rank", "master_addr", "master_port", "rdzv_backend"),
    *("ft_enable_nic_monitor", "duplicate_stdout_filters", "duplicate_stderr_filters"),
}
SUPERVISED = [
    *("--use-supervisor", "--nnodes=4", "--rdzv-endpoint=h:1"),
    *("--workload-name=w", "--job-name=j", "--container-name=c"),
]
SCALED = [
    *(*SUPERVISED, "--enable-workload-scaling", "--num-nodes-per-dp=2"),
    *("--num-dp-replicas=2", "--min-num-dp-replicas=1", "--max-num-dp-replicas=3"),
]


def resolved(*flags: str, tmp_path: Path, env: dict[str, str] | None = None) -> LaunchOptions:
    env = env or {}
    return resolve(cli.parse([f"--run-dir={tmp_path}", *flags, str(WORKER)], env), env)


def test_launchers_of_tests_are_forked_also_where_they_have_a_temporary_directory_of_their_own(
    launch: Launch,
) -> None:
    """Else each imports for two seconds, and the check takes minutes longer: nothing but this would tell."""
    command = launch("--help")
    assert isinstance(command._process, ForkedProcess)
    assert command.wait(timeout=WAIT) == 0


def test_the_jobs_of_the_page_on_starting_are_accepted(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "starting.md").read_text()
    scripts = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    commands = [
        re.sub(r"\$\{?\w+", "4", line.partition("launcher.py ")[2]).split()
        for line in "".join(scripts).replace("\\\n", " ").splitlines()
        if "launcher.py --" in line
    ]
    (manifest,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    _, job = yaml.safe_load_all(manifest)
    pod = job["spec"]["template"]["spec"]
    commands.append(pod["containers"][0]["command"][2:])
    assert len(commands) == 3
    for words in commands:
        assert words[-1] == "train.py"
        options = resolved(*(word.strip('"') for word in words[:-1]), tmp_path=tmp_path)
        assert (options.workers, options.max_restarts) == (8, 3)
    memory = [
        volume["name"] for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"
    ]
    assert {"name": memory[0], "mountPath": "/dev/" + "shm"} in pod["containers"][0]["volumeMounts"]


def upstream_parsers() -> list[argparse.ArgumentParser]:
    import torch.distributed.run

    return [torch.distributed.run.get_args_parser(), _compat._launcher.get_args_parser()]


def test_every_flag_of_torchrun_and_ft_launcher_is_known_in_all_its_spellings() -> None:
    for parser in upstream_parsers():
        for action in parser._actions:
            if not action.option_strings or action.dest == "help":
                continue
            value = (action.choices or ["1"])[0] if action.nargs != 0 else None
            for spelling in action.option_strings:
                words = [spelling] if value is None else [spelling, value]
                parsed = cli.parse([*words, "script.py"], {})
                assert parsed.training_script == "script.py"
                expected = True if value is None else parser.parse_args([*words, "s"]).__dict__[action.dest]
                assert getattr(parsed, action.dest) == expected, spelling


def test_defaults_are_those_of_torchrun_and_ft_launcher() -> None:
    ours = vars(cli.parse(["script.py"], {}))
    for parser in upstream_parsers():
        theirs = vars(parser.parse_args(["script.py"]))
        differ = {name for name in theirs if ours[name] != theirs[name]}
        assert differ <= OWN_DEFAULTS


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node=3"],
        ["--nproc_per_node", "3"],
        ["--nproc-per_node=3"],
        ["--nproc", "3"],
        ["--nproc-per-node", "1", "--nproc-per-node", "3"],
    ],
)
def test_dashes_underscores_and_beginnings_mean_the_same(words: list[str]) -> None:
    parsed = cli.parse(
        [*words, "-m", "-t3", "--max_restarts=2", "pkg.train", "--nproc-per-node", "9", "-m"], {}
    )
    assert (parsed.nproc_per_node, parsed.module, parsed.tee, parsed.max_restarts) == ("3", True, "3", 2)
    assert (parsed.training_script, parsed.training_script_args) == (
        "pkg.train",
        ["--nproc-per-node", "9", "-m"],
    )


def test_flags_read_their_environment_variables_and_the_command_line_wins() -> None:
    env = {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "3", "PET_MODULE": "1", "PET_STANDALONE": "0"}
    parsed = cli.parse(["--max-restarts=1", "pkg.train"], env)
    assert (parsed.nproc_per_node, parsed.max_restarts, parsed.module, parsed.standalone) == (
        "4",
        1,
        True,
        False,
    )


def test_help_comes_at_once_and_teaches_every_flag() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "launcher.py"), "--help"], capture_output=True, text=True, check=True
    )
    for title, flags in cli.GROUPS:
        assert f"\n{title}:\n" in done.stdout
        for flag in flags:
            assert flag.name in done.stdout
            assert len(flag.help) > 10
    assert "examples:" in done.stdout
    imported = subprocess.run(
        [sys.executable, "-c", "import sys, resiliency.launch.main; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert imported.stdout == "False\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--nnode-rank=1"], "unrecognized arguments: --nnode-rank=1"),
        (["--rdzv=x"], "--rdzv is ambiguous: it could be --rdzv-endpoint"),
        (["--nproc-per-node=0"], "--nproc-per-node must be 1 or more, found 0"),
        (["--nproc-per-node=gpus"], "must be a number, gpu, cpu or auto, found 'gpus'"),
        (["--max-restarts=-1"], "--max-restarts must be 0 or more, found -1"),
        (["--max-restarts=many"], "argument --max-restarts: invalid int value: 'many'"),
        (["--nnodes=2:1"], "--nnodes must be N or MIN:MAX with 1 <= MIN <= MAX, found '2:1'"),
        (["--nnodes=0"], "--nnodes must be N or MIN:MAX"),
        (["--nnodes=2"], "--nnodes 2 needs a place where the hosts meet"),
        (["--nnodes=2", "--standalone"], "--standalone is for one host"),
        (["--nnodes=2", "--node-rank=2"], "--node-rank must be below --nnodes (2), found 2"),
        (["--rdzv-backend=etcd"], "--rdzv-backend must be c10d or static, found 'etcd'"),
        (["--rdzv-endpoint=host:port"], "--rdzv-endpoint must be HOST or HOST:PORT"),
        (["--rdzv-conf=join_timeout=soon"], "join_timeout must be a whole number above 0, found 'soon'"),
        (
            ["--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3"],
            "keep_alive_max_attempt must be at least 4 with keep_alive_interval 1, found 3",
        ),
        (["--monitor-interval=0"], "--monitor-interval must be a number above 0, found 0"),
        (["--ft-rank-heartbeat-timeout=-3"], "--ft-rank-heartbeat-timeout must be a number above 0"),
        (["--redirects=4"], "--redirects must be 0 to 3 or RANK:0-3,..., found '4'"),
        (["--local-ranks-filter=a"], "--local-ranks-filter must be local ranks like 0,1"),
        (["--signals-to-handle=SIGKILL"], "'SIGKILL' is no signal that can be handled"),
        (["--numa-binding=node"], "--numa-binding has no counterpart in NVRx's agent"),
        (["-m", "--no-python"], "--module and --no-python exclude each other"),
        (["-m", "no_such_module", "x"], "no module named 'no_such_module' can be found"),
        (["--no-python", "no-such-program"], "no program 'no-such-program' can be found and executed"),
        (["missing.py"], "the script 'missing.py' does not exist"),
        (["--job-name=a/b"], "--job-name must not hold '/'"),
        (["--host-daemon-port=0"], "--host-daemon-port must be 1 to 65535, found 0"),
        (["--num-dp-replicas=-1"], "--num-dp-replicas must be 0 or more, found -1"),
        ([*SUPERVISED, "--nnodes=2:4"], "--nnodes must be one number with --use-supervisor, found 2:4"),
        ([*SUPERVISED, "--num-nodes-per-dp=3"], "--nnodes (4) must be divisible by --num-nodes-per-dp (3)"),
        ([*SUPERVISED, "--workload-name="], "--workload-name must be set with --use-supervisor"),
        (
            [*SUPERVISED, "--enable-workload-scaling"],
            "--num-nodes-per-dp must be set with --enable-workload-",
        ),
        ([*SCALED, "--min-num-dp-replicas=3"], "--num-dp-replicas (2) must lie between"),
        ([*SCALED, "--num-dp-replicas=3"], "must be --nnodes (4), found 6"),
        ([*SUPERVISED, "--workload-name=a b"], "--workload-name must be at most 253 printable characters"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused_with_a_sentence(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--run-dir={tmp_path}", *flags, str(WORKER)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: launcher.py")
    assert sentence in said


def test_no_script_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nproc-per-node", "2"]) == 2
    assert "no script to run" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--log-dir", "--run-dir"])
def test_a_directory_that_cannot_be_written_is_refused(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"{flag}: cannot write to .*file/logs: Not a directory"):
        resolved(f"{flag}={tmp_path / 'file' / 'logs'}", tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--ft-log-level=loud"], "Invalid log level string: loud"),
        (["--ft-cfg-path=missing.yaml"], "--ft-cfg-path: cannot read missing.yaml: No such file"),
        (["--ft-rank-section-timeouts=a"], "--ft flags: "),
        (["--logs-specs=none-such"], "--logs-specs: "),
    ],
)
def test_what_only_nvrx_can_check_is_refused_before_the_job_starts(
    flags: list[str], sentence: str, launch: Launch, tmp_path: Path
) -> None:
    job = launch(*flags, WORKER, "finish")
    assert job.wait(timeout=60) == 2
    assert sentence in job.output
    assert "Traceback" not in job.output
    assert list((tmp_path / "run").glob("*")) == []


def test_gpu_workers_without_cuda_are_refused(launch: Launch) -> None:
    job = launch("--nproc-per-node=gpu", WORKER, "finish", CUDA_VISIBLE_DEVICES="")
    assert job.wait(timeout=60) == 2
    assert "torch finds no CUDA device on this host" in job.output


def test_one_host_meets_at_a_free_local_port(tmp_path: Path) -> None:
    place = resolved(tmp_path=tmp_path).rendezvous
    assert (place.endpoint, place.local_addr, place.max_nodes) == ("localhost:0", "127.0.0.1", 1)
    assert re.fullmatch(r"[0-9a-f-]{36}", place.run_id)


@pytest.mark.parametrize("style", [[], ["--rdzv-backend=static"]])
def test_the_static_style_meets_at_host_0_which_serves(style: list[str], tmp_path: Path) -> None:
    flags = ["--nnodes=2", "--master-addr=host0", *style]
    host0, host1 = (
        resolved(*flags, f"--node-rank={rank}", tmp_path=tmp_path).rendezvous for rank in range(2)
    )
    assert host0.endpoint == host1.endpoint == "host0:29500"
    assert (host0.conf["is_host"], host1.conf["is_host"]) == ("True", "False")
    assert (host0.node_rank, host1.node_rank) == (0, 1)


@pytest.mark.parametrize(
    ("flags", "env", "name"),
    [
        (["--job-name=a"], {"JOB_IDENTIFIER": "b"}, "a"),
        (["--rdzv-id=c"], {"JOB_IDENTIFIER": "b"}, "b"),
        (["--rdzv-id=c"], {}, "c"),
        ([], {}, "local"),
    ],
)
def test_the_job_is_named_by_flag_then_environment_then_rendezvous(
    flags: list[str], env: dict[str, str], name: str, tmp_path: Path
) -> None:
    assert resolved(*flags, env=env, tmp_path=tmp_path).info.job_name == name
