# SPDX-License-Identifier: Apache-2.0
"""The user's say in what happens after a failure: ``--failure-policy MODULE:FUNCTION``.

The function is called with the `Evidence` and the `Diagnosis`, and returns an `Advice`, or None for ours.  It
runs in a process of its own with a deadline, so that one that raises, hangs or crashes changes nothing: our
own advice holds then, and a line says why.

    python -m resiliency.launch.failures.policy MODULE:FUNCTION   # evidence and diagnosis on standard input
"""

from __future__ import annotations

import importlib
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from resiliency.errors import ConfigError
from resiliency.launch.health.diagnosis import Advice, Diagnosis, Evidence

logger = logging.getLogger(__name__)

FLAG = "--failure-policy"
#: For the answer, the import of the user's module included.
DEADLINE_S = 10.0
#: For the import at the door, where a slow one is no reason to go on without it.
CHECK_S = 60.0
#: Before the answer, because a policy may print.
_MARK = "resiliency-advice:"


def check_policy(name: str) -> None:
    """Import the policy in another process.

    Raises:
        ConfigError: it cannot be imported, or is no function.
    """
    hint = "Give MODULE:FUNCTION, importable from the working directory or PYTHONPATH."
    if name.count(":") != 1 or not all(part.replace(".", "_").isidentifier() for part in name.split(":")):
        raise ConfigError(f"{FLAG} must be MODULE:FUNCTION, found {name!r}.", hint=hint, flag=FLAG)
    try:
        done = _start(name, None, CHECK_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{FLAG}: the import of {name} took over {CHECK_S:g} s.", flag=FLAG) from None
    if done.returncode:
        why = (done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"{FLAG}: {name} cannot be used: {why}.", hint=hint, flag=FLAG)


def ask_policy(
    name: str, evidence: Evidence, diagnosis: Diagnosis, *, deadline_s: float = DEADLINE_S
) -> Advice | None:
    """What the user's policy says; None: nothing, or nothing that can be used."""
    try:
        done = _start(name, (evidence, diagnosis), deadline_s)
    except subprocess.TimeoutExpired:
        logger.warning("%s %s ended: no answer after %g s; our own advice holds", FLAG, name, deadline_s)
        return None
    except OSError as error:
        logger.warning("%s %s not started: %s; our own advice holds", FLAG, name, error)
        return None
    errors = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode:
        why = errors[-1] if errors else f"exit code {done.returncode}"
        logger.warning("%s %s failed: %s; our own advice holds", FLAG, name, why)
        return None
    answers = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith(_MARK)]
    answer = answers[-1].removeprefix(_MARK) if answers else "no answer"
    if answer == "none":
        return None
    if answer not in {advice.value for advice in Advice}:
        logger.warning("%s %s returned %s, which is no Advice; our own advice holds", FLAG, name, answer)
        return None
    return Advice(answer)


def _start(name: str, given: object, deadline_s: float) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "resiliency.launch.failures.policy", name]
    return subprocess.run(
        command, input=pickle.dumps(given), capture_output=True, timeout=deadline_s, check=False
    )


def _find(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)
    if not callable(found):
        raise TypeError(f"{name} is no function")
    return found  # type: ignore[no-any-return]


def main(argv: list[str]) -> int:
    policy = _find(argv[0])
    given = pickle.load(sys.stdin.buffer)  # noqa: S301  (from the launcher, which has started this)
    if given is None:
        return 0
    answer = policy(*given)
    text = "none" if answer is None else answer.value if isinstance(answer, Advice) else repr(answer)
    print(f"\n{_MARK}{text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
