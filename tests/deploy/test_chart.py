# SPDX-License-Identifier: Apache-2.0
"""What the chart installs: golden renders, the API's schemas, flags that the programs take, least rights."""

from __future__ import annotations

import base64
import difflib
import json
import os
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from supervisor.daemon.settings import DaemonSettings
from supervisor.orchestrators.gke import RIGHTS
from supervisor.parts.settings import ALL, PartSettings
from supervisor.policy.thresholds import flags
from supervisor.transport.roles import CONTROL, Role
from tests.deploy.chart import CHART, NODES, ROOT, Objects, render, run_helm
from tests.deploy.schemas import problems, type_of

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent / "golden"
VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "one-process": ("allInOne=true",),
    "no-cert-manager": ('tls.mode="secrets"', 'tls.secrets={"control":"control-tls","host":"host-tls"}'),
    "cert-manager": ('tls.mode="certManager"', "podMonitor.enabled=true"),
    "no-store": ("store.enabled=false",),
    "standalone": ("daemon.standaloneMode=true",),
    "topology-aware": ("daemon.topologyAware=true",),
    "cilium": ("networkPolicy.cilium=true", "networkPolicy.nodeCidrs=[]"),
    "launcher-token": ('daemon.launcherTokenSecret="launcher-token"',),
    "other-namespace": ('workloadNamespace="training"',),
    "least": (
        'orchestrator="none"',
        'tls.mode="plaintext"',
        'daemon.watchdogs=["xid","nic"]',
        'daemon.kernelLog="/var/log/kern.log"',
        "shadow=true",
        'thresholds={"hang-threshold-s":600,"max-cordons":2}',
        "networkPolicy.enabled=false",
        'eventLog.existingClaim="mine"',
    ),
}
_RENDERED: dict[str, str] = {}


def rendered(variant: str) -> str:
    if variant not in _RENDERED:
        _RENDERED[variant] = render(*VARIANTS[variant])
    return _RENDERED[variant]


def test_the_chart_has_nothing_that_helm_warns_of() -> None:
    done = run_helm("lint", "--strict", str(CHART), *NODES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cluster_that_cannot_make_one_pod_again_is_refused() -> None:
    for version, taken in (("1.28.9", False), ("1.29.0", True), ("1.36.2-gke.100", True)):
        done = run_helm("template", "rs", str(CHART), *NODES, "--kube-version", version)
        assert (done.returncode == 0) == taken, done.stderr
    assert "| Kubernetes 1.29 or newer |" in (ROOT / "docs" / "gke.md").read_text()


def _flags_of_the_walkthrough() -> list[list[str]]:
    """Values that each `helm` command of the page sets, and each flag that a table of it names."""
    text = (ROOT / "docs" / "gke-walkthrough.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line) for line in re.findall(r"^helm (?:install|upgrade) .*", text, re.M)]
    commands += [shlex.split(found) for found in re.findall(r"`(--set(?:-json)? [^`]+)`", text)]
    found = []
    for words in commands:
        pairs = pairwise(words)
        found.append(
            [word for flag, value in pairs if flag in ("--set", "--set-json", "-f") for word in (flag, value)]
        )
    return [flags for flags in found if flags]


@pytest.mark.parametrize("flags", _flags_of_the_walkthrough(), ids=" ".join)
def test_the_helm_flags_of_the_walkthrough_are_values_of_the_chart(flags: list[str]) -> None:
    flags = [
        str(ROOT / word) if before == "-f" else word
        for before, word in zip(["", *flags], flags, strict=False)
    ]
    done = run_helm("template", "rs", str(CHART), "--namespace", "fleet", *NODES, *flags)
    assert done.returncode == 0, done.stderr
    for before, word in pairwise(flags):
        if before == "--set":
            name, _, value = word.partition("=")
            known: Any = yaml.safe_load((CHART / "values.yaml").read_text())
            for part in name.split("."):
                assert part in known, f"the chart has no value {name}"
                known = known[part]
            if name.endswith(("repository", "Cidrs", "workloadNamespace")):
                assert value.strip("{}") in done.stdout


def test_the_walkthrough_sets_values() -> None:
    assert sum(flags.count("--set") for flags in _flags_of_the_walkthrough()) >= 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_rendered_is_what_was_read(variant: str) -> None:
    """The default in full, the others as their difference to it.  RESILIENCY_WRITE_GOLDEN=1 writes them."""
    found = rendered(variant)
    if variant == "default":
        path = GOLDEN / "default.yaml"
    else:
        path = GOLDEN / f"{variant}.diff"
        lines = (rendered("default").splitlines(), found.splitlines())
        found = "\n".join(difflib.unified_diff(*lines, "default", variant, lineterm="", n=1)) + "\n"
    if os.environ.get("RESILIENCY_WRITE_GOLDEN") == "1":
        path.write_text(found)
    assert found == path.read_text(), "the chart renders something else; read the difference, then write it"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_fits_the_schema_of_its_api(variant: str) -> None:
    foreign = set()
    for thing in Objects(rendered(variant)).all:
        schema = type_of(thing)
        if schema is None:
            foreign.add(thing["apiVersion"])
            continue
        assert problems(thing, schema) == [], f"{thing['kind']} {thing['metadata']['name']}"
    assert foreign <= {"cert-manager.io/v1", "monitoring.coreos.com/v1", "cilium.io/v2"}


def test_a_field_that_the_api_does_not_know_is_found() -> None:
    (thing,) = Objects(rendered("default")).of("DaemonSet").values()
    spec = thing["spec"]["template"]["spec"]
    spec["hostNetwrok"] = True
    spec["containers"][0]["ports"][0]["containerPort"] = "60060"
    port, unknown = sorted(problems(thing, type_of(thing) or {}))
    assert unknown.startswith("$.spec.template.spec: Additional properties are not allowed ('hostNetwrok'")
    assert port.startswith("$.spec.template.spec.containers[0].ports[0].containerPort: '60060' is not of")


# ---------------------------------------------------------------- programs


def environment(objects: Objects, container: dict[str, Any]) -> dict[str, str]:
    """What the container's program sees, without TLS files, which this machine does not have."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= objects.of("ConfigMap")[source["configMapRef"]["name"]]["data"]
    for one in container.get("env", []):
        found[one["name"]] = one.get("value", "10.0.0.7")
    return {name: text for name, text in found.items() if not name.startswith("SUPERVISOR_")}


def store_flags() -> set[str]:
    page = (ROOT / "docs" / "cli" / "rendezvous_store.md").read_text()
    return set(re.findall(r"--[a-z-]+", page))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_program_takes_the_flags_and_the_environment_that_it_is_given(
    variant: str, tmp_path: Path
) -> None:
    objects = Objects(rendered(variant))
    (tmp_path / "token").write_text("a-token-of-all-the-launchers\n")
    programs = []
    for template in objects.pods().values():
        (container,) = template["spec"]["containers"]
        command = " ".join(container["command"])
        there = r"=/(var/lib/resiliency$|etc/resiliency/launcher/)"
        args = [
            re.sub(there, lambda found: f"={tmp_path}{'/' * found[0].endswith('/')}", arg)
            for arg in container["args"]
        ]
        env = {**environment(objects, container), "SUPERVISOR_PLAINTEXT": "1"}
        programs.append(command)
        if command.endswith("supervisor.host_daemon"):
            daemon = DaemonSettings.parse(args, env)
            assert daemon.watchdogs.names
            assert daemon.environment.sensor_address.endswith("-sensor.fleet.svc:60061")
            assert daemon.standalone == (variant == "standalone")
            assert (daemon.launcher_token is not None) == (variant == "launcher-token")
            assert (daemon.metadata is not None) == (variant == "topology-aware")
        elif command.endswith("rendezvous_store"):
            assert args == ["--port=29400"]
            assert store_flags() >= {"--port"}
        else:
            parts = ALL if command.endswith("--all-in-one") else (command.rpartition(".")[2],)
            settings = PartSettings.parse(parts, args, env)
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert {part: ports[part] for part in parts} == settings.ports
            assert settings.shadow == (variant == "least" and "controller" in parts)
    assert len(programs) == len(objects.pods())


def test_services_lead_to_the_ports_of_their_pods_in_both_layouts() -> None:
    for variant in ("default", "one-process"):
        objects = Objects(rendered(variant))
        pods = objects.pods().values()
        for service in objects.of("Service").values():
            wanted = service["spec"]["selector"].items()
            (pod,) = [one for one in pods if wanted <= one["metadata"]["labels"].items()]
            names = {port["name"] for one in pod["spec"]["containers"] for port in one["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


# ---------------------------------------------------------------- rights


def granted(objects: Objects, account: str) -> set[tuple[str, str, str, str]]:
    """Rights of a service account: scope (a namespace, or empty), group, resource, verb."""
    found = set()
    for kind in ("Role", "ClusterRole"):
        for binding in objects.of(f"{kind}Binding").values():
            assert binding["roleRef"]["kind"] == kind
            if [one["name"] for one in binding["subjects"]] != [account]:
                continue
            namespace = binding["metadata"].get("namespace", "")
            (role,) = [
                one
                for one in objects.of(kind).values()
                if one["metadata"]["name"] == binding["roleRef"]["name"]
                and one["metadata"].get("namespace", "") == namespace
            ]
            for rule in role["rules"]:
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        found |= {(namespace, group, resource, verb) for verb in rule["verbs"]}
    return found


def test_only_the_actuator_has_rights_and_only_it_gets_a_token() -> None:
    for variant, owner in (("default", "actuator"), ("one-process", "supervisor")):
        objects = Objects(rendered(variant))
        for component, template in objects.pods().items():
            spec = template["spec"]
            account = spec["serviceAccountName"]
            assert account in objects.of("ServiceAccount")
            assert bool(granted(objects, account)) == (component == owner)
            assert spec["automountServiceAccountToken"] == (component == owner)
    objects = Objects(rendered("least"))
    assert objects.of("ClusterRole") == {}
    assert objects.of("Role") == {}


def test_what_is_granted_is_what_the_orchestrator_calls_and_no_more() -> None:
    places = {"cluster": "", "workloads": "training", "own": "fleet", "node_leases": "kube-node-lease"}
    wanted = {
        (places[right.scope.value], right.group, right.resource, verb)
        for right in RIGHTS
        for verb in right.verbs
    }
    assert granted(Objects(rendered("other-namespace")), "rs-resiliency-supervisor-actuator") == wanted


def test_no_right_is_a_wildcard_and_none_reaches_secrets() -> None:
    rights = granted(Objects(rendered("default")), "rs-resiliency-supervisor-actuator")
    assert rights
    for _, group, resource, verb in rights:
        assert "*" not in (group, resource, verb)
        assert resource not in ("secrets", "clusterroles", "roles", "serviceaccounts", "pods/exec")


def test_no_container_has_more_than_it_needs() -> None:
    for variant in VARIANTS:
        for component, template in Objects(rendered(variant)).pods().items():
            (container,) = template["spec"]["containers"]
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            if component == "daemon" and variant != "least":
                assert security["privileged"] is True  # the kernel log and the GPUs are devices of the node
                continue
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in security
            if component != "daemon":
                assert template["spec"]["securityContext"]["runAsNonRoot"] is True
                assert not template["spec"].get("hostNetwork")


def test_two_releases_of_one_name_share_no_object_where_they_watch_one_namespace() -> None:
    def names(namespace: str) -> set[tuple[str, str, str]]:
        done = run_helm(
            "template",
            "rs",
            str(CHART),
            "--namespace",
            namespace,
            "--set-json",
            'workloadNamespace="training"',
            *NODES,
        )
        assert done.returncode == 0, done.stderr
        return {
            (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"])
            for one in Objects(done.stdout).all
        }

    assert names("fleet") & names("other") == set()


# ---------------------------------------------------------------- networks


def test_nothing_reaches_a_pod_that_no_rule_names() -> None:
    for variant in VARIANTS:
        objects = Objects(rendered(variant))
        policies = [one["spec"] for one in objects.of("NetworkPolicy").values()]
        for policy in policies:
            assert policy["policyTypes"] == ["Ingress"]
            assert all(rule["from"] and rule["ports"] for rule in policy["ingress"])
        for component, template in objects.pods().items():
            labels = template["metadata"]["labels"].items()
            selects = [one for one in policies if one["podSelector"]["matchLabels"].items() <= labels]
            # A policy of pods holds for none in its node's network.
            wanted = variant != "least" and not template["spec"].get("hostNetwork")
            assert len(selects) == wanted, f"{component} of {variant}"


@pytest.mark.parametrize("variant", ["default", "cilium"])
def test_nodes_and_the_jobs_namespace_reach_the_store_and_no_other_pod(variant: str) -> None:
    objects = Objects(rendered(variant))
    (rule,) = objects.of("NetworkPolicy")["rs-resiliency-supervisor-store"]["spec"]["ingress"]
    *nodes, jobs = rule["from"]
    assert jobs == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "fleet"}}}
    assert nodes == ([{"ipBlock": {"cidr": "10.128.0.0/20"}}] if variant == "default" else [])


def test_where_no_address_matches_a_node_they_reach_what_they_need_by_what_they_are() -> None:
    for values, wanted in (
        (VARIANTS["cilium"], {"sensor": ["60061"], "actuator": ["60063"], "store": ["29400"]}),
        (
            (*VARIANTS["cilium"], "allInOne=true"),
            {"supervisor": ["60061", "60063"], "store": ["29400"]},
        ),
    ):
        objects = Objects(render(*values))
        pods, found = objects.pods(), {}
        for name, policy in objects.of("CiliumClusterwideNetworkPolicy").items():
            selector = policy["spec"]["endpointSelector"]["matchLabels"]
            assert selector.pop("k8s:io.kubernetes.pod.namespace") == "fleet"
            (component,) = [
                key for key, pod in pods.items() if selector.items() <= pod["metadata"]["labels"].items()
            ]
            assert name == f"fleet-rs-resiliency-supervisor-{component}"
            (rule,) = policy["spec"]["ingress"]
            assert rule["fromEntities"] == ["host", "remote-node"]
            ((ports,),) = [[one["ports"] for one in rule["toPorts"]]]
            assert {one["protocol"] for one in ports} == {"TCP"}
            found[component] = sorted(one["port"] for one in ports)
        assert found == wanted


# ---------------------------------------------------------------- upgrades


def test_an_upgrade_changes_no_selector_and_owns_no_job() -> None:
    before = Objects(rendered("default"))
    after = Objects(
        render('image={"tag":"9.9.9"}', 'thresholds={"max-cordons":9}', "heartbeat.timeoutSeconds=60")
    )
    for kind in ("Deployment", "DaemonSet"):
        assert {name: one["spec"]["selector"] for name, one in before.of(kind).items()} == {
            name: one["spec"]["selector"] for name, one in after.of(kind).items()
        }
    kinds = {one["kind"] for one in after.all}
    assert kinds & {"JobSet", "Job", "Namespace", "Lease", "CustomResourceDefinition"} == set()
    assert kinds >= {"NetworkPolicy", "PersistentVolumeClaim", "Secret"}


def test_an_uninstall_keeps_the_event_log() -> None:
    (claim,) = Objects(rendered("default")).of("PersistentVolumeClaim").values()
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


# ---------------------------------------------------------------- values


def described(schema: dict[str, Any], where: str = "") -> list[str]:
    """Paths of values without a description."""
    missing = []
    for name, inner in schema.get("properties", {}).items():
        path = f"{where}.{name}" if where else name
        missing += [] if inner.get("description") else [path]
        missing += described(inner, path)
    return missing


def test_every_value_has_a_description_and_a_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert described(schema) == []

    def keys(thing: Any, known: dict[str, Any]) -> set[str]:
        if not isinstance(thing, dict) or "properties" not in known:
            return set()
        assert set(known["properties"]) - {"global"} == set(thing), f"values and schema differ: {set(thing)}"
        for name in thing:
            keys(thing[name], known["properties"][name])
        return set(thing)

    assert keys(values, schema)


def test_the_thresholds_are_the_programs_flags() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["thresholds"]["propertyNames"]["enum"]
    assert [f"--{name}" for name in known] == list(flags())


@pytest.mark.parametrize("variant", ["default", "cert-manager"])
def test_the_certificate_of_the_hosts_says_that_they_are_hosts_and_nothing_more(variant: str) -> None:
    done = run_helm(
        "template", "rs", str(CHART), *NODES, *(f"--set-json={value}" for value in VARIANTS[variant])
    )
    objects = Objects(done.stdout)
    names = {}
    for name, secret in objects.of("Secret").items():
        certificate = x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["tls.crt"]))
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names[name] = {one.value for one in found}
    for one in objects.of("Certificate").values():
        if "dnsNames" in one["spec"]:
            names[one["spec"]["secretName"]] = set(one["spec"]["dnsNames"])
    of_hosts, of_parts = (names[f"rs-resiliency-supervisor-{kind}-tls"] for kind in ("host", "control"))
    assert of_hosts == {Role.HOST.value}
    assert of_parts == {role.value for role in CONTROL}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ('colour="red"', "additional properties 'colour' not allowed"),
        ('daemon.watchdogs=["gpu"]', "value must be one of 'ecc', 'nic', 'nvlink', 'xid'"),
        ('orchestrator="slurm"', "value must be one of 'gke', 'none'"),
        ("daemon.port=0", "minimum: got 0, want 1"),
        ('thresholds={"max-cordon":1}', "invalid propertyName 'max-cordon'"),
        (
            "networkPolicy.nodeCidrs=[]",
            "set nodeCidrs to the addresses of the nodes (of no pods), or cilium=true",
        ),
        ('tls.mode="secrets"', "tls.secrets.control must name a Secret when tls.mode is secrets"),
    ],
)
def test_a_value_that_cannot_work_is_refused(value: str, sentence: str) -> None:
    done = run_helm("template", "rs", str(CHART), *NODES, "--set-json", value)
    assert done.returncode != 0
    assert sentence in done.stderr
