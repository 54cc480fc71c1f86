# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the replicator of GKE's multi-tier checkpointing: a real process, for one host.

    python3 -m resiliency.testing.replicator DIRECTORY [--store DIR] [--fault FAULT]

It plays the file protocol that `resiliency.checkpoint.gke.replicator` describes, as the real one does: it
waits for ``replicator.yaml``, cleans the directory, agrees with the other hosts' stand-ins on a step,
brings it back, and takes over each directory that is named by a number.  What the real one sends to
peers and to a bucket goes into `--store`, which all hosts of the test share; a single host needs none.
Like the real ones they wait for each other at each step, without a deadline, until the job starts again.
Nothing of the code under test is imported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path

from resiliency.testing.processes import Command

_KEEP = ("*.meta", "*.data", "replicator.yaml")
_SAVE = re.compile(r"\d+")
_LOOK_S = 0.02


class ReplicatorFault(str, Enum):
    """What goes wrong, once, when a job is served."""

    NONE = "none"
    IGNORES_CONFIG = "ignores-config"  # never takes replicator.yaml
    FAILS = "fails"  # takes it, writes replicator.failed and ends
    COMPLAINS = "complains"  # writes replicator.errors and goes on
    DIES = "dies"  # takes it and ends without a word
    STOPS_AT_PRERESTORE = "stops-at-prerestore"  # announces a step, and never brings it
    DANGLING_LINK = "dangling-link"  # the link leads nowhere
    WRONG_STEP = "wrong-step"  # the link's name is of another step than its content
    LOSES_MANIFEST = "loses-manifest"  # what it brings back lacks a file


def start_replicator(
    directory: Path,
    *,
    store: Path | None = None,
    fault: ReplicatorFault = ReplicatorFault.NONE,
    log: Path | None = None,
) -> Command:
    """Start one for the host whose volume `directory` is; leave the context to end it.

    It prints ``took NODE/NODES JOB``, ``restored STEP`` (0: nothing) and ``kept STEP`` as it does so, and
    ``complete STEP`` when all hosts have kept it; until then it takes no other.
    """
    argv = [sys.executable, "-m", "resiliency.testing.replicator", str(directory), "--fault", fault.value]
    return Command(argv + (["--store", str(store)] if store is not None else []), log=log)


class _Replicator:
    def __init__(self, directory: Path, store: Path | None, fault: ReplicatorFault) -> None:
        self._directory = directory
        self._config_file = directory / "replicator.yaml"
        self._store = store
        self._fault = fault
        self._config: dict[str, str | int] = {}

    def run(self) -> None:
        """Serve one start of the job after the other, as a container that is restarted for each."""
        while True:
            self._until(self._config_file.exists)
            if self._fault is ReplicatorFault.IGNORES_CONFIG:
                threading.Event().wait()
            if self._config_file.stat().st_size == 0:
                self._config_file.unlink()
                raise SystemExit("replicator.yaml is empty")
            self._config = _flat_yaml(self._config_file.read_text())
            self._clean()
            self._config_file.unlink()
            _say(f"took {self._node}/{self._config['nodes']} {self._config['job-name']}")
            self._misbehave()
            self._restore()
            self._fault = ReplicatorFault.NONE
            self._serve()

    @property
    def _node(self) -> int:
        return int(self._config["node-rank"])

    def _clean(self) -> None:
        for path in self._directory.iterdir():
            if not any(path.match(pattern) for pattern in _KEEP):
                _remove(path)

    def _misbehave(self) -> None:
        if self._fault is ReplicatorFault.COMPLAINS:
            (self._directory / "replicator.errors").write_text("peer 1 is slow\n")
        if self._fault is ReplicatorFault.FAILS:
            (self._directory / "replicator.failed").write_text("the bucket is gone\n")
        if self._fault in (ReplicatorFault.FAILS, ReplicatorFault.DIES):
            raise SystemExit(1)

    # --- restore ---------------------------------------------------------------------------------

    def _restore(self) -> None:
        step = self._agree()
        announced = f"restore-step: {step}\n" if step else "{}\n"
        _write(self._directory / "replicator.prerestore", announced)
        if self._fault is ReplicatorFault.STOPS_AT_PRERESTORE:
            threading.Event().wait()
        if not step:
            (self._directory / f"{self._name(0)}.restore").touch()
        else:
            self._fetch(f"{self._name(step)}.meta")
            digest = (self._directory / f"{self._name(step)}.meta").read_text()
            self._fetch(f"{digest}.data")
            self._link(step, digest)
        self._keep_only(step)
        _say(f"restored {step}")

    def _link(self, step: int, digest: str) -> None:
        data = self._directory / f"{digest}.data"
        if self._fault is ReplicatorFault.DANGLING_LINK:
            _remove(data)
        if self._fault is ReplicatorFault.LOSES_MANIFEST:
            (data / "manifest.json").unlink()
        if self._fault is ReplicatorFault.WRONG_STEP:
            step += 1
        os.symlink(data.name, self._directory / f"{self._name(step)}.restore")

    def _agree(self) -> int:
        """The newest step of which every node's part is somewhere; 0 if there is none."""
        mine = sorted(path.name for path in self._directory.iterdir() if path.suffix in (".meta", ".data"))
        nodes = int(self._config["nodes"])
        if self._store is None:
            return self._newest(mine, nodes)
        here = f"{self._config['job-name']}.node-{{}}"
        ticket = uuid.uuid4().hex
        _write(self._store / here.format(self._node), json.dumps({"id": ticket, "files": mine}))
        plan = self._store / f"{self._config['job-name']}.plan"
        if self._node == 0:
            places = [self._store / here.format(node) for node in range(nodes)]
            self._until(lambda: all(place.exists() for place in places))
            tickets = [json.loads(place.read_text()) for place in places]
            files = {name for found in tickets for name in found["files"]} | set(os.listdir(self._store))
            for place in places:
                place.unlink()
            decided = {"ids": [found["id"] for found in tickets], "step": self._newest(sorted(files), nodes)}
            _write(plan, json.dumps(decided))
        decision: dict[str, object] = {}

        def is_decided() -> bool:
            with suppress(FileNotFoundError):
                decision.update(json.loads(plan.read_text()))
            return ticket in str(decision.get("ids"))

        self._until(is_decided)
        return int(str(decision["step"]))

    def _newest(self, files: Sequence[str], nodes: int) -> int:
        steps: dict[int, set[int]] = {}
        for name in files:
            if found := re.fullmatch(
                re.escape(str(self._config["job-name"])) + r"-s(\d+)-n(\d+)-w0\.meta", name
            ):
                digest = self._read(name)
                if f"{digest}.data" in files:
                    steps.setdefault(int(found[1]), set()).add(int(found[2]))
        return max((step for step, found in steps.items() if found >= set(range(nodes))), default=0)

    def _read(self, name: str) -> str:
        for place in [self._directory] + ([self._store] if self._store is not None else []):
            with suppress(FileNotFoundError):
                return (place / name).read_text()
        return "on another host alone"

    def _fetch(self, name: str) -> None:
        if not (self._directory / name).exists():
            assert self._store is not None
            _copy(self._store / name, self._directory)

    # --- saves -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._config_file.exists():
            saved = (path for path in self._directory.iterdir() if _SAVE.fullmatch(path.name))
            for path in sorted((path for path in saved if path.is_dir()), key=lambda path: int(path.name)):
                if not self._config_file.exists():
                    self._take_over(path)
            threading.Event().wait(_LOOK_S)

    def _take_over(self, saved: Path) -> None:
        step = int(saved.name)
        mine = self._directory / f"{self._name(step)}.save"
        os.rename(saved, mine)
        digest = _digest(mine)
        data = self._directory / f"{digest}.data"
        if data.exists():
            _remove(mine)
        else:
            os.rename(mine, data)
        meta = self._directory / f"{self._name(step)}.meta"
        _write(meta, digest)
        if self._store is not None:
            _copy(meta, self._store)
            _copy(data, self._store)
        self._keep_only(step)
        _say(f"kept {step}")
        self._meet_others(step)

    def _meet_others(self, step: int) -> None:
        store = self._store
        if store is not None:
            nodes = range(int(self._config["nodes"]))
            files = [store / f"{self._config['job-name']}-s{step}-n{node}-w0.meta" for node in nodes]
            self._until(lambda: self._config_file.exists() or all(file.exists() for file in files))
            if not all(file.exists() for file in files):
                return
        _say(f"complete {step}")

    def _keep_only(self, step: int) -> None:
        kept = set()
        for meta in self._directory.glob("*.meta"):
            if re.search(rf"-s{step}-n\d+-w0\.meta$", meta.name):
                kept.add(meta.read_text())
            else:
                meta.unlink()
        for data in self._directory.glob("*.data"):
            if data.stem not in kept:
                _remove(data)

    def _name(self, step: int) -> str:
        return f"{self._config['job-name']}-s{step}-n{self._node}-w0"

    def _until(self, ready: Callable[[], bool]) -> None:
        """Wait for ever: whoever started this process ends it."""
        while not ready():
            threading.Event().wait(_LOOK_S)


def _flat_yaml(text: str) -> dict[str, str | int]:
    fields: dict[str, str | int] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        value = os.path.expandvars(value.strip().strip("\"'"))
        fields[key.strip()] = int(value) if value.isdigit() else value
    return fields


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        digest.update(str(path.relative_to(directory)).encode() + b"\0")
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _copy(source: Path, target: Path) -> None:
    temporary = target / f"{source.name}.tmp"
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, temporary)
    if (target / source.name).exists():
        _remove(temporary)
    else:
        os.rename(temporary, target / source.name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Play GKE's checkpoint replicator for one host of a test.")
    parser.add_argument("directory", type=Path, help="the volume that it shares with the job")
    parser.add_argument("--store", type=Path, help="stands for peers and bucket; all hosts share it")
    parser.add_argument(
        "--fault",
        type=ReplicatorFault,
        choices=list(ReplicatorFault),
        default=ReplicatorFault.NONE,
        metavar="FAULT",
        help=f"what goes wrong, once: {', '.join(fault.value for fault in ReplicatorFault)}",
    )
    options = parser.parse_args(argv)
    _Replicator(options.directory, options.store, options.fault).run()


if __name__ == "__main__":
    main()
