#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, in ten minutes: its tests, its benchmark, and a dated note of both.

    python scripts/gpu_note.py [--note FILE.md] [--minutes 10] [PYTEST FLAGS]

The note goes to docs/benchmarks/DATE-gpu.md: hardware, versions, each test with its result, and what
`benchmark/ckpt_cuda.py` printed. What could not run within the time is in the note as not run.

Exit status: 0 all passed and was measured, 1 something failed (the note says what), 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

from run_tests import PROJECT, Results, read

TESTS = Path("build", "check", "tests.xml")
#: What the benchmark may take at the least; it is left out where less is left.
BENCHMARK_S = 120.0


def main(argv: list[str]) -> int:
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    parser = argparse.ArgumentParser(description="Everything that needs a GPU, and a dated note of it.")
    parser.add_argument("--note", type=Path, default=PROJECT / "docs" / "benchmarks" / f"{today}-gpu.md")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it (default: 10)")
    args, flags = parser.parse_known_args(argv)
    import torch

    if not torch.cuda.is_available():
        parser.error("this needs a CUDA GPU, and torch finds none; scripts/check runs on CPUs.")
    end = time.monotonic() + 60 * args.minutes
    runner = [sys.executable, str(PROJECT / "scripts" / "run_tests.py"), "gpu", *flags]
    status, _ = run(runner, end - time.monotonic() - BENCHMARK_S)
    results = read(PROJECT / TESTS)
    left = end - time.monotonic()
    measured = [sys.executable, str(PROJECT / "benchmark" / "ckpt_cuda.py"), "--rounds", "3"]
    benchmark, figures = run(measured, left) if left >= BENCHMARK_S else (1, "not run: no time was left")
    text = note(today, hardware(), results, figures)
    args.note.write_text(text)
    print(f"{text}\nwritten to {args.note}: commit it, and name it in docs/benchmarks/README.md")
    return 1 if status or benchmark else 0


def run(argv: list[str], limit_s: float) -> tuple[int, str]:
    """Exit status and output of a program; all of its processes end at its limit."""
    print("$", *argv, flush=True)
    process = subprocess.Popen(argv, cwd=PROJECT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said, _ = process.communicate(timeout=max(limit_s, 1.0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        said += f"\nended after {limit_s:.0f} s, its limit"
    print(said, flush=True)
    return process.returncode, said


def hardware() -> list[str]:
    """GPUs with their driver, host, versions."""
    import torch

    asked = "name,memory.total,driver_version,pcie.link.gen.max"
    try:
        smi = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        said = subprocess.run(smi, capture_output=True, text=True, timeout=60, check=False).stdout
        gpus = said.splitlines()
    except FileNotFoundError:
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [
        *gpus,
        f"{platform.machine()}, {platform.platform()}",
        f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}",
    ]


def note(date: str, machine: list[str], results: Results, figures: str) -> str:
    """The Markdown of a note."""
    rows = []
    for name, result in sorted(results.items()):
        said = "passed" if result.passed else f"skipped: {result.skip}" if result.skip else "FAILED"
        rows.append(f"| `{name}` | {said} |")
    passed = sum(result.passed for result in results.values())
    failures = [
        f"`{name}`:\n\n```text\n{result.failures[0][-3000:]}\n```\n"
        for name, result in sorted(results.items())
        if result.failures
    ]
    return "\n".join(
        [
            f"# On a GPU, {date}",
            "",
            "Made by `scripts/check --gpu`.",
            "",
            *(f"- {line}" for line in machine),
            "",
            f"## Tests: {passed} of {len(results)} passed",
            "",
            "| Test | Result |",
            "|---|---|",
            *rows,
            "",
            *failures,
            "## What a save costs: `benchmark/ckpt_cuda.py --rounds 3`",
            "",
            "```text",
            figures.strip(),
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
