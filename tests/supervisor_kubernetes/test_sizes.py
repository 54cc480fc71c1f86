# SPDX-License-Identifier: Apache-2.0
"""Values: sizes of JobSets, generations, hosts that fit, and rights."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import ConfigError
from supervisor.orchestrators.gke import RIGHTS, sizes
from supervisor.orchestrators.gke.jobsets import generation, generation_problem, made_again
from supervisor.orchestrators.gke.nodes import can_take
from supervisor.orchestrators.gke.sizes import CannotResize, resized, size_of
from supervisor.parts.run import make_orchestrator
from supervisor.parts.settings import ALL, PartSettings
from supervisor.settings import Settings
from supervisor.testing.kubernetes.hosts import node
from tests.supervisor_kubernetes.fleet import jobset

GUIDE = (Path(__file__).parents[2] / "docs" / "gke.md").read_text()
STATUS = {"uid": "u", "resourceVersion": "7", "generation": 3, "managedFields": [], "finalizers": ["x"]}


def container_of(thing: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = thing["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["--nnodes=4"], ["--nnodes=2"]),
        (["--nnodes", "4"], ["--nnodes", "2"]),
        (["--num_nodes=4", "--num-dp-replicas", "4"], ["--num_nodes=2", "--num-dp-replicas", "2"]),
        (["exec python3 launcher.py --nnodes 4 train.py"], ["exec python3 launcher.py --nnodes 2 train.py"]),
        (["--world-size=32"], ["--world-size=16"]),
        # A range, a number of something else, and a variable stay.
        (["--nnodes=4:8"], ["--nnodes=4:8"]),
        (["--my-nnodes=4", "--nnodes-per-x=4"], ["--my-nnodes=4", "--nnodes-per-x=4"]),
        (["--nnodes=$NNODES"], ["--nnodes=$NNODES"]),
    ],
)
def test_words_that_name_the_size_are_changed(before: list[str], after: list[str]) -> None:
    thing = jobset(hosts=4, jobs=4)
    container_of(thing).update(command=["python3", "launcher.py", "--use-supervisor"], args=before)
    made, left = resized(thing, size_of(thing), 2)
    assert container_of(made)["args"] == after
    assert left == ()
    assert made["spec"]["replicatedJobs"][0]["replicas"] == 2


#: Each with its number at 4 hosts of 8 ranks, and at 2.
VARIABLES = [
    *((name, "4", "2") for name in (*sizes._HOSTS, *sizes._REPLICAS)),
    *((name, "32", "16") for name in sizes._RANKS),
]
FLAGS = [
    *((name, "4", "2") for name in (*sizes._HOST_FLAGS, *sizes._REPLICA_FLAGS)),
    *((name, "32", "16") for name in sizes._RANK_FLAGS),
]


@pytest.mark.parametrize(("name", "before", "after"), VARIABLES)
def test_each_variable_that_names_the_size_is_changed_and_documented(
    name: str, before: str, after: str
) -> None:
    thing = jobset(hosts=4, env={name: before, f"MY_{name}": before})
    made, left = resized(thing, size_of(thing), 2)
    values = {one["name"]: one.get("value") for one in container_of(made)["env"]}
    assert (values[name], values[f"MY_{name}"], left) == (after, before, ())
    assert f"`{name}`" in GUIDE


@pytest.mark.parametrize(("name", "before", "after"), FLAGS)
@pytest.mark.parametrize("form", ["--{}={}", "--{}\0{}", "exec train --{} {} --more"])
def test_each_flag_that_names_the_size_is_changed_and_documented(
    form: str, name: str, before: str, after: str
) -> None:
    for spelled in (name, name.replace("-", "_")):
        thing = jobset(hosts=4)
        container_of(thing).update(
            command=["launcher.py", "--use-supervisor"], args=form.format(spelled, before).split("\0")
        )
        made, left = resized(thing, size_of(thing), 2)
        assert (container_of(made)["args"], left) == (form.format(spelled, after).split("\0"), ())
    assert f"`--{name}`" in GUIDE


def test_a_replica_of_several_hosts_and_numbers_that_are_not_the_size() -> None:
    thing = jobset(hosts=4, args=["--num-nodes-per-dp=2"], env={"NNODES": "5", "WORLD_SIZE": "32"})
    size = size_of(thing)
    assert (size.replicas, size.hosts, size.hosts_per_replica) == (2, 4, 2)
    made, left = resized(thing, size, 3)
    assert made["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] == 6
    values = {one["name"]: one.get("value") for one in container_of(made)["env"]}
    assert (values["NNODES"], values["WORLD_SIZE"]) == ("5", "48")
    assert left == ("NNODES is 5, not 4",)
    odd = jobset(hosts=4, jobs=2, env={"NUM_DP_REPLICAS": "4"})
    with pytest.raises(CannotResize, match="3 hosts are no whole number of Jobs of 2"):
        resized(odd, size_of(odd), 3)
    with pytest.raises(CannotResize, match="workers has 4 hosts for 3 replicas"):
        size_of(jobset(hosts=4, env={"NUM_DP_REPLICAS": "3"}))


@pytest.mark.parametrize(
    ("variables", "replicas"),
    [({}, 1), ({"NUM_DP_REPLICAS": "3"}, 3), ({"NUM_NODES_PER_DP": "2", "NUM_DP_REPLICAS": "2"}, 3)],
)
def test_a_job_that_names_no_size_has_the_one_of_the_environment_and_keeps_the_hosts_of_a_replica(
    variables: dict[str, str], replicas: int
) -> None:
    default = Settings.from_env(variables).hosts_per_replica
    thing = jobset(hosts=6)
    size = size_of(thing, default)
    assert size.replicas == replicas
    for wanted in (2, 4):  # no number of hosts that the default was for
        thing, _ = resized(thing, size_of(thing, default), wanted)
        hosts = wanted * size.hosts_per_replica
        assert size_of(thing, default) == replace(size, replicas=wanted, hosts=hosts)
    named = jobset(hosts=6, env={"NUM_DP_REPLICAS": "6"})
    assert size_of(named, default).replicas == 6
    annotated = jobset(hosts=6)
    annotated["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"] = {
        "annotations": {"supervisor/num-nodes-per-dp": "1"}
    }
    assert size_of(annotated, default).replicas == 6


def test_a_default_that_does_not_fit_a_job_is_refused_with_a_sentence() -> None:
    for variables in ({"NUM_DP_REPLICAS": "4"}, {"NUM_NODES_PER_DP": "4"}):
        with pytest.raises(CannotResize, match="names no size, and its 6 hosts are no whole number of"):
            size_of(jobset(hosts=6), Settings.from_env(variables).hosts_per_replica)


def test_generations_only_grow_over_restarts_and_new_objects() -> None:
    thing, seen = jobset(), [-1]
    for restarts in (0, 9, 10, 112, 3, 0, 0):
        thing = {**thing, "status": {"restarts": restarts}}
        thing["metadata"] = {**thing["metadata"], **STATUS}
        for attempt in (0, restarts):
            now = generation({**thing, "status": {"restarts": attempt}})
            assert now >= seen[-1]
            seen.append(now)
        thing = made_again(thing, None, "c1")
        assert set(thing["metadata"]) == {"name", "labels", "annotations"}
        assert "status" not in thing
        assert generation(thing) > seen[-1]
    assert seen[-1] < 10**7


def test_a_launcher_without_generations_is_told_of() -> None:
    assert generation_problem(jobset()) == ""
    thing = jobset()
    container_of(thing)["env"] = []
    assert "ReplicatedJob workers does not set RESILIENCY_JOB_GENERATION" in generation_problem(thing)
    container_of(thing)["command"] = ["torchrun"]
    assert generation_problem(thing) == ""


def test_a_node_takes_pods_that_it_has_room_labels_and_tolerated_taints_for() -> None:
    spec = jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    here = node("n1", labels={"pool": "a"})
    assert can_take(here, spec)
    assert not can_take(node("n1", gpus=4), spec)
    assert not can_take(here, {**spec, "nodeSelector": {"pool": "b"}})
    tainted = {**here, "spec": {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}}
    assert not can_take(tainted, spec)
    assert can_take(tainted, {**spec, "tolerations": [{"key": "gpu", "operator": "Exists"}]})
    assert not can_take({**here, "spec": {"unschedulable": True}}, spec)


def test_no_right_holds_more_than_is_needed() -> None:
    assert not [right for right in RIGHTS if "*" in (*right.verbs, right.resource, right.group)]
    assert not [right for right in RIGHTS if right.resource == "nodes" and "delete" in right.verbs]


def test_without_the_client_the_flag_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PartSettings.parse(
        ALL, ["--orchestrator=gke", f"--state-dir={tmp_path}"], {"SUPERVISOR_PLAINTEXT": "1"}
    )
    for name in [name for name in sys.modules if name.startswith("supervisor.orchestrators.gke.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio.client", None)
    with pytest.raises(ConfigError, match=r"--orchestrator gke needs kubernetes_asyncio") as error:
        make_orchestrator(settings)
    assert "pip install 'resiliency[supervisor,kubernetes]'" in str(error.value)
