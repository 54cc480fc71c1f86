# SPDX-License-Identifier: Apache-2.0
"""The chart, rendered by a real helm."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.tools import kept

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "resiliency-supervisor"
RUN_S = 60.0
#: The chart renders nothing before it knows where nodes are.
NODES = ("--set-json", 'networkPolicy.nodeCidrs=["10.128.0.0/20"]')


def run_helm(*args: str) -> subprocess.CompletedProcess[str]:
    argv = [str(kept("helm")), *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=RUN_S, check=False)


def render(*values: str, file: Path | None = None, namespace: str = "fleet") -> str:
    """What would be installed; generated keys and certificates are left out.

    Args:
        values: as ``--set-json`` takes them.
        file: of values.
    """
    flags = [word for value in values for word in ("--set-json", value)]
    flags += ["--values", str(file)] if file else []
    done = run_helm("template", "rs", str(CHART), "--namespace", namespace, *NODES, *flags)
    assert done.returncode == 0, done.stderr
    text = re.sub(
        r"^  (ca\.crt|tls\.crt|tls\.key): \S+$", r"  \1: bWFkZSBieSBoZWxt", done.stdout, flags=re.MULTILINE
    )
    # What changes with any value of the ConfigMap.
    return re.sub(r"(checksum/config): \w{64}", r"\1: sum", text)


@dataclass
class Objects:
    """Rendered objects by kind and name."""

    text: str
    all: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.all = [one for one in yaml.safe_load_all(self.text) if one]

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        return {one["metadata"]["name"]: one for one in self.all if one["kind"] == kind}

    def pods(self) -> dict[str, dict[str, Any]]:
        """Pod templates by their component."""
        found = {}
        for kind in ("Deployment", "DaemonSet"):
            for thing in self.of(kind).values():
                template = thing["spec"]["template"]
                found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
        return found
