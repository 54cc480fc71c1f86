# SPDX-License-Identifier: Apache-2.0
"""The schemas that API servers publish, and what is wrong with an object by them."""

from __future__ import annotations

import functools
import json
import zipfile
from typing import Any

from jsonschema import Draft202012Validator

from tests.tools import kept

KUBERNETES = "v1.33.0"
META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


@functools.cache
def definitions() -> dict[str, Any]:
    """The API's types by their names, strict: a field that they do not know is an error."""
    with zipfile.ZipFile(kept("schemas")) as wheel:
        path = f"kubernetes_validate/kubernetes-json-schema/{KUBERNETES}-local-strict/_definitions.json"
        found: dict[str, Any] = json.loads(wheel.read(path))["$defs"]
        return found


def problems(value: Any, schema: dict[str, Any]) -> list[str]:
    """What is wrong with `value` by a schema, which may refer to the API's types."""
    validator = Draft202012Validator({**schema, "$defs": definitions()})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


def type_of(thing: dict[str, Any]) -> dict[str, Any] | None:
    """Schema of an object; None where it belongs to no API of Kubernetes itself."""
    group, slash, version = thing["apiVersion"].rpartition("/")
    wanted = {"group": group if slash else "", "version": version, "kind": thing["kind"]}
    kinds = (
        schema
        for schema in definitions().values()
        if wanted in schema.get("x-kubernetes-group-version-kind", ())
    )
    return next(kinds, None)
