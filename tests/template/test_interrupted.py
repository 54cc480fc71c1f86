# SPDX-License-Identifier: Apache-2.0
"""A signal handler may raise at any moment of a fork, as those of the launcher do."""

from __future__ import annotations

import linecache
import sys
from contextlib import ExitStack, suppress
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from resiliency.template import client
from resiliency.template.client import ForkedProcess, Template, TemplateLost
from tests.template.programs import DEADLINE_S, environment, ready_template

if TYPE_CHECKING:
    from _typeshed import TraceFunction

#: The interpreter looks for no signals where a context or a `try` begins or ends, until the first call there.
NO_SIGNALS = ("with ", "try:", "finally:", "libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value")


class Stop(Exception):
    """Raised by the handler."""


def fork(template: Template, stop_at: int) -> tuple[ForkedProcess | None, int]:
    """Fork, and raise at one of the lines of the client; the process, and how many lines there were."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        nonlocal lines
        code = frame.f_code
        if code.co_filename != client.__file__ or code.co_name == "_check":  # which does nothing yet
            return None
        text = linecache.getline(client.__file__, frame.f_lineno).strip()
        if event == "line" and not text.startswith(NO_SIGNALS):
            lines += 1
            if lines == stop_at:
                raise Stop
        return trace

    argv, env, before = [sys.executable, "-c", "import signal; signal.pause()"], environment(), sys.gettrace()
    sys.settrace(trace)
    try:
        return template.fork(argv, env=env, descriptors={0: 0, 1: 1, 2: 2}), lines
    except Stop:
        return None, lines
    finally:
        sys.settrace(before)


def own_children() -> set[int]:
    """Zombies among them."""
    return {child.pid for child in psutil.Process().children()}


def test_an_exception_at_any_line_of_a_fork_leaves_no_process_and_a_template_that_works_or_is_lost() -> None:
    before = own_children()
    with ExitStack() as stack:
        template, stop_at, lost = stack.enter_context(ready_template()), 0, 0
        while True:
            stop_at += 1
            process, lines = fork(template, stop_at)
            if process is not None:
                break
            with suppress(TemplateLost):
                template.look()
                assert own_children() - before == {template.pid}, f"after line {stop_at}"
                continue
            assert own_children() <= before, f"after line {stop_at}"
            template, lost = stack.enter_context(ready_template()), lost + 1
        process.kill()
        process.wait(DEADLINE_S)
        assert stop_at > lines > 30
        assert lost < stop_at / 2, "most of the time nothing is under way"
