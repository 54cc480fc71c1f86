#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run one level of the tests, and say what it showed: what failed, is flaky, was skipped, and has no test.

    python scripts/run_tests.py {fast,usual,all,gpu} [--workers N] [PYTEST FLAGS]

Where at most four tests failed, they run once more, alone, after the others: one that passes then is flaky,
is named with both outputs, and does not make the run red. In the levels `usual` and `all`, each row of
docs/guarantees.md needs a test that passed. Where CI is set, a skip makes the run red, unless its reason
begins as `MAY_SKIP` has it. The JUnit files of a run stay in build/check.

Exit status: 0 good, 1 bad.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
LEVELS = {
    "fast": "not slow and not nemo and not thorough and not network",
    "usual": "not thorough and not network",
    "all": "not network",
    "gpu": "gpu",
}
#: Beside the others and outside of their networks: these install from a package index.
BESIDE = {"all": "network"}
#: Tests often wait: so many at a time are right for two cores.
WORKERS = 5
#: Why a test may be skipped where CI is set: beginnings of reasons.
MAY_SKIP = ("gpu: ", "KUBECONFIG: ", "rivals: ")
FLAKY_AT_MOST = 4
#: All that is printed of failures, at the end.
LINES = 100
RUN_S = 75 * 60.0


@dataclass
class Result:
    """What one test showed, over all its phases."""

    failures: list[str] = field(default_factory=list)
    skip: str | None = None
    output: str = ""

    @property
    def passed(self) -> bool:
        return not self.failures and self.skip is None


Results = dict[str, Result]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Run one level of the tests, and say what it showed.")
    parser.add_argument("level", choices=LEVELS)
    parser.add_argument("--root", type=Path, default=PROJECT, help="of the project (default: this one)")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"tests at a time (default: {WORKERS})")
    args, flags = parser.parse_known_args(argv)
    os.chdir(args.root)
    folder = Path("build", "check")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    beside = None
    if args.level in BESIDE:
        beside = _start(folder / "beside.xml", BESIDE[args.level], ["-p", "no:cacheprovider"])
    status = _wait(
        _start(folder / "tests.xml", LEVELS[args.level], [*_several(args.workers, args.level), *flags])
    )
    results = read(folder / "tests.xml")
    again: Results = {}
    failed = [name for name, result in results.items() if result.failures]
    if status == 1 and len(failed) <= FLAKY_AT_MOST:
        print(f"\n== {len(failed)} failed: once more, alone", flush=True)
        alone = ["--last-failed", "--last-failed-no-failures=none"]
        _wait(_start(folder / "again.xml", LEVELS[args.level], alone, _worker()))
        again = read(folder / "again.xml")
    if beside is not None:
        status = max(status, _wait(beside))
        results |= read(folder / "beside.xml")
    guarantees = Path("docs", "guarantees.md")
    text = guarantees.read_text() if args.level in ("usual", "all") and guarantees.exists() else ""
    lines, good = report(results, again, text, strict=os.environ.get("CI") == "true")
    if status > 1 or (status == 1 and not failed):
        lines, good = [*lines, f"pytest ended with {status}"], False
    print("\n".join(lines))
    return 0 if good else 1


def _worker() -> list[str]:
    """A Python with memory and a network of its own, where this user may make namespaces."""
    worker = PROJECT / "scripts" / "test_worker"
    may = subprocess.run([worker, "-c", "pass"], capture_output=True).returncode == 0
    return [str(worker)] if may else [sys.executable]


def _several(workers: int, level: str) -> list[str]:
    """Flags for so many tests at a time: none without namespaces, nor on a GPU that all would share."""
    worker = _worker()[0]
    if workers < 2 or level == "gpu" or worker == sys.executable:
        return []
    return ["--tx", f"{workers}*popen//python={worker}", "--dist", "loadfile", "--no-loadscope-reorder"]


def _start(
    junit: Path, marks: str, flags: list[str], python: list[str] | None = None
) -> subprocess.Popen[bytes]:
    argv = [*(python or [sys.executable]), "-m", "pytest", "-q", "-m", marks, f"--junitxml={junit}", *flags]
    argv += ["-o", "junit_logging=all", "-o", f"junit_log_passing_tests={junit.stem == 'again'}"]
    return subprocess.Popen(argv, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _wait(run: subprocess.Popen[bytes]) -> int:
    try:
        return run.wait(RUN_S)
    except BaseException:
        run.terminate()
        raise


def read(path: Path) -> Results:
    """Results of a JUnit file, by the names that pytest takes; none where there is no file."""
    results: Results = {}
    for case in ET.parse(path).iter("testcase") if path.exists() else ():  # noqa: S314 - our own file
        result = results.setdefault(_node_id(case), Result())
        for child in case:
            if child.tag in ("failure", "error"):
                result.failures.append(child.text or child.get("message") or "no text")
            elif child.tag == "skipped":
                result.skip = child.get("message") or ""
            elif child.tag in ("system-out", "system-err"):
                result.output += child.text or ""
    return results


def _node_id(case: ET.Element) -> str:
    """``tests.launch.test_cli`` and ``test_help[x]`` as ``tests/launch/test_cli.py::test_help[x]``."""
    parts = [part for part in (case.get("classname") or "").split(".") if part]
    name = case.get("name") or ""
    if not parts:  # a module that could not be collected, or that skipped itself as a whole
        return f"{name.replace('.', '/')}.py"
    at = next((i for i, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "::".join(["/".join(parts[: at + 1]) + ".py", *parts[at + 1 :], name])


def promises(text: str) -> list[tuple[str, list[str]]]:
    """First cell and tests of each row of the tables of a page whose last column is `Test`."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = table.splitlines()
        if head.endswith("| Test |"):
            found += [(row.split("|")[1].strip(), re.findall(r"`(tests/[^`]+)`", row)) for row in rows]
    return found


def report(results: Results, again: Results, guarantees: str, *, strict: bool) -> tuple[list[str], bool]:
    """Lines for a person, and whether all is well."""
    failed = {name: result for name, result in results.items() if result.failures}
    flaky = [name for name in failed if name in again and again[name].passed]
    lost = [name for name in failed if name not in flaky]
    skipped = {name: result.skip for name, result in results.items() if result.skip is not None}
    unknown = {name: why for name, why in skipped.items() if not why.startswith(MAY_SKIP)}
    passed = {name for name, result in results.items() if result.passed} | set(flaky)
    shown = {name.partition("[")[0] for name in passed}
    untested = [promise for promise, tests in promises(guarantees) if not shown.intersection(tests)]

    lines = [""]
    each = max(4, (LINES - 20) // max(1, len(failed)) - 1)
    for name in flaky:
        lines += [f"FLAKY {name}", *_tail(failed[name].failures[0], each // 2)]
        lines += ["  alone, the second time:", *_tail(again[name].output or "passed, no output", each // 2)]
    for name in lost[: LINES // 6]:
        lines += [f"FAILED {name}", *_tail(failed[name].failures[0], each)]
    lines += [f"and {len(lost) - LINES // 6} more failed"] if len(lost) > LINES // 6 else []
    lines += [f"{'UNKNOWN SKIP' if strict else 'skipped'} {name}: {why}" for name, why in unknown.items()]
    lines += [f"NO TEST PASSED for this row of docs/guarantees.md: {promise[:120]}" for promise in untested]
    lines += [f"{len(flaky)} flaky: mend them before other work, see docs/testing.md"] if flaky else []
    lines += [f"{len(passed)} passed, {len(lost)} failed, {len(skipped)} skipped"]
    good = bool(passed) and not lost and not untested and not (strict and unknown)
    return lines, good


def _tail(text: str, lines: int) -> list[str]:
    return [f"    {line[:160]}" for line in text.splitlines() if line.strip()][-lines:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
