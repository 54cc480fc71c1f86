# SPDX-License-Identifier: Apache-2.0
"""The manifests of examples/gke: objects fit their APIs, programs take their flags, sizes agree."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from resiliency.launch import cli
from resiliency.launch.job import NO_REQUEUE
from resiliency.launch.options import resolve
from simulator.command_line import parse as parse_simulator
from supervisor.orchestrators.gke import jobsets, sizes
from supervisor.values import WorkloadInfo
from tests.deploy.chart import ROOT, Objects, render
from tests.deploy.schemas import META, definitions, problems, type_of
from tests.tools import kept

EXAMPLES = ROOT / "examples" / "gke"
MANIFESTS = sorted(path.stem for path in EXAMPLES.glob("*.yaml") if not path.stem.startswith("values"))
JOBSETS = [name for name in MANIFESTS if "kind: JobSet" in (EXAMPLES / f"{name}.yaml").read_text()]
#: What the downward API fills in, for a job that was restarted twice.
DOWNWARD = {
    "metadata.labels['jobset.sigs.k8s.io/jobset-name']": "nemo",
    "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "2",
    "metadata.annotations['supervisor/generation-base']": "",
    "spec.nodeName": "node-1",
    "status.hostIP": "10.0.0.7",
}
FOREIGN = {"jobset.x-k8s.io/v1alpha2", "kueue.x-k8s.io/v1beta1", "checkpointing.gke.io/v1"}
# The part of JobSet's own type that these manifests use.
JOBSET_TYPE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["replicatedJobs"],
    "properties": {
        "failurePolicy": {
            "additionalProperties": False,
            "properties": {
                "maxRestarts": {"type": "integer"},
                "rules": {
                    "type": "array",
                    "items": {
                        "additionalProperties": False,
                        "required": ["action"],
                        "properties": {
                            "name": {"pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                            "action": {
                                "enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
                            },
                            "onJobFailureReasons": {
                                "type": "array",
                                "items": {
                                    "enum": [
                                        *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
                                        *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
                                    ]
                                },
                            },
                        },
                    },
                },
            },
        },
        "replicatedJobs": {
            "type": "array",
            "items": {
                "additionalProperties": False,
                "required": ["name", "template"],
                "properties": {
                    "name": {"type": "string"},
                    "replicas": {"type": "integer"},
                    "template": {"$ref": "#/$defs/io.k8s.api.batch.v1.JobTemplateSpec"},
                },
            },
        },
    },
}


def objects(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()) if one]


def job_spec(jobset: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    found: dict[str, Any] = replicated["template"]["spec"]
    return found


def environment(container: dict[str, Any]) -> dict[str, str]:
    """The container's variables as the kubelet makes them, in their order."""
    found: dict[str, str] = {"JOB_COMPLETION_INDEX": "0"}
    for one in container.get("env", []):
        if "valueFrom" in one:
            found[one["name"]] = DOWNWARD[one["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            found[one["name"]] = expand(one["value"], found)
    return found


def expand(text: str, env: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        assert match[1] in env, f"{match[0]} is not set before it is used"
        return env[match[1]]

    return re.sub(r"\$\((\w+)\)", value, text)


def program(container: dict[str, Any], tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """Words and variables of the container's program, with paths of this machine."""
    env = environment(container)
    words = [expand(word, env) for word in (*container["command"], *container["args"])]
    places = {"/opt/resiliency": str(ROOT), "/persistent": str(tmp_path), "/local": str(tmp_path / "local")}

    def here(text: str) -> str:
        for there, place in places.items():
            text = re.sub(rf"(^|=){there}(?=/|$)", rf"\g<1>{place}", text)
        return text

    return [here(word) for word in words], {name: here(text) for name, text in env.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MANIFESTS)
def test_every_object_fits_the_schema_of_its_api(name: str) -> None:
    for thing in objects(name):
        schema = type_of(thing)
        if schema is not None:
            assert problems(thing, schema) == []
            continue
        assert thing["apiVersion"] in FOREIGN
        if thing["kind"] == "JobSet":
            assert problems(thing["spec"], JOBSET_TYPE) == []
            assert problems(thing["metadata"], definitions()[META]) == []


@pytest.mark.parametrize("name", JOBSETS)
def test_launcher_and_script_take_the_flags_of_each_jobset(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (jobset,) = objects(name)
    spec = job_spec(jobset)
    (container,) = spec["template"]["spec"]["containers"]
    words, env = program(container, tmp_path)
    assert words[:2] == ["python3", str(ROOT / "launcher.py")]
    options = resolve(cli.parse(words[2:], env), env)
    supervisor = options.supervisor
    assert options.args.use_supervisor
    assert (supervisor.workload_name, supervisor.container_name) == ("nemo", container["name"])
    assert supervisor.host_daemon_port == 61000
    # All that names the size names the same.
    hosts = spec["completions"]
    assert spec["parallelism"] == hosts == int(options.args.nnodes)
    assert supervisor.dp_replicas * supervisor.nodes_per_dp == hosts
    info = WorkloadInfo(
        workload=supervisor.workload_name,
        replicas=supervisor.dp_replicas,
        min_replicas=supervisor.min_dp_replicas,
        max_replicas=supervisor.max_dp_replicas,
        scaling=supervisor.scaling,
    )
    assert info.hosts == hosts
    assert options.args.rdzv_id == "nemo-2"
    assert env["RESILIENCY_JOB_GENERATION"] == "2"

    script, *rest = [options.script, *words[words.index(options.script) + 1 :]]
    if script.endswith("benchmark.py"):
        monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
        monkeypatch.setenv("WORLD_SIZE", str(hosts * 8))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        argv = [sys.executable, "-c", PARSE_BENCHMARK, *rest]
        done = subprocess.run(
            argv, cwd=ROOT / "benchmark", capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr[-1500:]
        deadline_s = float(done.stdout)
    else:
        known = set(re.findall(r'add_argument\("(--[\w-]+)"', Path(script).read_text()))
        assert {word.partition("=")[0] for word in rest} <= known
        deadline_s = 25.0  # of TerminationOptions
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= deadline_s + 5


#: NVRx's heartbeats need a launcher, which is not there.
PARSE_BENCHMARK = """
import sys
from flags import parse
words = [word for word in sys.argv[1:] if word != "--enable-fault-tolerance"]
print(parse([*words, "--device=cuda"], cuda_devices=8).termination_deadline_s)
"""


@pytest.mark.parametrize("name", JOBSETS)
def test_a_jobset_can_lose_a_pod_and_reach_the_daemon_and_the_store(name: str) -> None:
    (jobset,) = objects(name)
    spec = job_spec(jobset)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (spec["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    assert spec["backoffLimitPerIndex"] > 0
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] >= 10
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [NO_REQUEUE],
    }
    assert pod["hostNetwork"] is True
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"  # noqa: S108
    assert set(mounts.values()) == set(volumes)
    generation = {one["name"]: one for one in container["env"]}["RESILIENCY_JOB_GENERATION"]["value"]
    assert generation == "$(GENERATION_BASE)$(RESTART_ATTEMPT)"


@pytest.mark.parametrize("name", JOBSETS)
def test_the_orchestrator_finds_nothing_missing_and_can_change_the_size(name: str, tmp_path: Path) -> None:
    (jobset,) = objects(name)
    assert jobsets.generation_problem(jobset) == ""
    size = sizes.size_of(jobset)
    assert (size.hosts, size.replicas) == (job_spec(jobset)["completions"],) * 2
    smaller, left = sizes.resized(jobset, size, size.replicas - 1)
    assert left == ()
    spec = job_spec(smaller)
    words, env = program(spec["template"]["spec"]["containers"][0], tmp_path)
    options = resolve(cli.parse(words[2:], env), env)
    assert int(options.args.nnodes) == options.supervisor.dp_replicas == size.hosts - 1 == spec["completions"]


def test_the_namespace_of_the_jobs_lets_their_pods_in_whatever_level_a_cluster_enforces() -> None:
    pods = [jobsets.pod_template(one)["spec"] for name in JOBSETS for thing in objects(name)
            if thing["kind"] == "JobSet" for one in jobsets.replicated_jobs(thing)]  # fmt: skip
    assert any(pod.get("hostNetwork") for pod in pods)
    (namespace,) = [one for one in objects("storage") if one["kind"] == "Namespace"]
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "privileged"}


def test_the_simulator_takes_the_flags_of_the_bad_day(tmp_path: Path) -> None:
    (job,) = objects("inject-faults")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words, env = program(container, tmp_path)
    assert words[:3] == ["python3", "-m", "simulator"]
    options = parse_simulator(words[3:], env)
    (jobset,) = objects("nemo-jobset")
    assert options.job == jobset["metadata"]["name"]
    assert options.shape.nnodes == job["spec"]["completions"] == job_spec(jobset)["completions"]
    labels = job_spec(jobset)["template"]["metadata"]["labels"]
    affinity = job["spec"]["template"]["spec"]["affinity"]["podAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()


def test_spares_quota_and_jobs_want_the_same_nodes() -> None:
    (jobset,) = objects("nemo-jobset")
    pod = job_spec(jobset)["template"]["spec"]
    priority, spares = objects("hot-spares")
    held = spares["spec"]["template"]["spec"]
    assert held["nodeSelector"] == pod["nodeSelector"]
    assert held["containers"][0]["image"] == pod["containers"][0]["image"]
    gpus = [one["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for one in (held, pod)]
    assert gpus == ["8", "8"]
    assert priority["value"] < 0
    flavor, queue, _ = objects("kueue")
    assert flavor["spec"]["nodeLabels"] == pod["nodeSelector"]
    (group,) = queue["spec"]["resourceGroups"]
    quota = {one["name"]: one["nominalQuota"] for one in group["flavors"][0]["resources"]}
    hosts = job_spec(jobset)["completions"] + spares["spec"]["replicas"]
    assert int(quota["nvidia.com/gpu"]) == 8 * hosts
    assert set(pod["containers"][0]["resources"]["limits"]) == set(quota)


@pytest.mark.slow
def test_the_chart_takes_the_values_for_a_cluster_without_gpus_and_serves_what_jobs_ask_for() -> None:
    path = EXAMPLES / "values-cpu.yaml"
    values = yaml.safe_load(path.read_text())
    chart = Objects(render(file=path))
    daemon = chart.pods()["daemon"]["spec"]
    assert "affinity" not in daemon
    assert "privileged" not in daemon["containers"][0]["securityContext"]
    (ddp,) = objects("ddp-jobset")
    (container,) = job_spec(ddp)["template"]["spec"]["containers"]
    assert f"--nproc-per-node={values['daemon']['workersPerHost']}" in container["args"]
    (endpoint,) = [word.partition("=")[2] for word in container["args"] if word.startswith("--rdzv-endpoint")]
    host, _, port = endpoint.partition(":")
    service, namespace, _ = host.split(".")
    found = chart.of("Service")[service]
    assert (found["metadata"]["namespace"], found["spec"]["ports"][0]["port"]) == (namespace, int(port))
    assert ddp["metadata"]["namespace"] == values["workloadNamespace"]


def _kubectl_commands() -> list[str]:
    """Each command of kubectl that a page tells a reader to type; words in capitals are the reader's."""
    found = set()
    for page in (*ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md")):
        text = page.read_text().replace("\\\n", " ")
        for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
            found |= set(re.findall(r"\bkubectl [^#&|)\n]+", block))
        found |= set(re.findall(r"`(kubectl [^`\n]+ [^`\n]+)`", text))
    return sorted(command.strip() for command in found)


def test_kubectl_takes_the_commands_of_the_pages() -> None:
    """It parses each before it looks for a server, and there is none."""
    commands = [command for command in _kubectl_commands() if "https://" not in command]
    assert len(commands) > 10
    for command in commands:
        words = shlex.split(command)
        done = subprocess.run(
            [str(kept("kubectl")), "--server=http://127.0.0.1:9", *words[1:]],
            capture_output=True, text=True, cwd=ROOT, timeout=60, check=False,
        )  # fmt: skip
        assert "127.0.0.1:9" in done.stderr, f"{command}: {done.stderr}"
