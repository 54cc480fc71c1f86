# SPDX-License-Identifier: Apache-2.0
"""Ranks that start without importing: the launcher's import template, and what it knows of the script.

While the first attempt trains, a template repeats the imports of its local rank 0, at low priority.  The
ranks of every later attempt are forked from it.  What was imported is kept for the next job with the same
script and arguments, whose first ranks are forked then, too.

Nothing depends on a template: where it cannot fork, for whatever reason, a rank starts the ordinary way,
and one line says why.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO

from resiliency.launch.options import LaunchOptions
from resiliency.launch.protection import Protection
from resiliency.progress import STEP_PAGE_ENV
from resiliency.runtime import (
    AGENT_HOST_ENV,
    FAILURE_DOMAINS_ENV,
    JOB_ENV,
    RUN_DIR_ENV,
    STOP_NOTES_ENV,
)
from resiliency.template import entry
from resiliency.template.client import ForkedProcess, ForkRefused, StillImporting, Template, TemplateLost
from resiliency.template.program import PythonCommand
from resiliency.template.server import Work

logger = logging.getLogger(__name__)

#: Where imports of scripts are kept; default: resiliency in the user's cache directory.
CACHE_DIR_ENV = "RESILIENCY_CACHE_DIR"
#: What the agent sets for its workers, with another value in each rank, attempt or job.
VOLATILE = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "FT_RANK_MONITOR_IPC_SOCKET", "FT_LAUNCHER_IPC_SOCKET"),
    *(STEP_PAGE_ENV, AGENT_HOST_ENV, STOP_NOTES_ENV, FAILURE_DOMAINS_ENV),
)
#: After so many templates that were killed or failed there is no other one.
MOST_LOST = 3
#: Longest wait of one attempt for a template that still imports, where waiting is better than importing; and
#: how long a template may import without any progress.
WAIT_TIMEOUT = timedelta(seconds=120)
#: Of one script, the imports of so many different arguments are kept.
MOST_KEPT = 8

#: A template that has imported nothing more for this long has caught up with the ranks.
_SETTLED_S = 2.0

_Worker = subprocess.Popen[bytes] | ForkedProcess


class Standby:
    """Starts workers, from a template where that is possible; a context manager.

    Args:
        held: a template that holds what this process holds, which was forked itself.
    """

    def __init__(self, options: LaunchOptions, protection: Protection, held: Template | None = None) -> None:
        command = PythonCommand.parse(options.command) if not options.args.run_path else None
        restarts = options.max_restarts > 0 or options.rendezvous.max_nodes > 1
        wanted = options.args.standby == "auto" and (restarts or held is not None)
        self._command = command if wanted else None
        self._options = options
        self._protection = protection
        self._record = protection.private_dir / "imports"
        self._known = _cache_file(command) if command is not None else None
        if self._known is not None and not self._known_imports:
            _delete_oldest(self._known.parent)
        self._template = held if self._command is not None else None
        self._reported_ready = held is not None
        self._reported: set[str] = set()
        #: How many templates were lost.
        self._lost = 0
        #: How many modules the template holds, and when that may be called all of them.
        self._modules, self._settled_at = 0, 0.0
        #: When a template that imports counts as stuck, and when this attempt has waited for long enough.
        self._stuck_at, self._wait_until = time.monotonic() + WAIT_TIMEOUT.total_seconds(), 0.0
        self._first_start = True
        #: Readable when the launcher is asked to end: no more waiting then.
        self.wake_fd: int | None = None
        #: How many workers of the current attempt were forked.
        self.forked = 0
        if held is not None and self._template is None:
            held.close()
        if self._template is not None:
            protection.exempt.add(self._template.pid)
            self._is_ready(self._template, wait=True)  # at once: it has nothing to import
        elif self._command is not None and (self._known_imports or self._preload):
            self._start(background=False)

    @property
    def _preload(self) -> tuple[str, ...]:
        return tuple(self._options.args.standby_preload or ())

    @property
    def _known_imports(self) -> bool:
        return self._known is not None and self._known.is_file()

    def begin_attempt(self) -> None:
        self.forked = 0
        self._wait_until = 0.0

    def start_worker(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[str] | None,
        stderr: IO[str] | None,
        local_rank: int,
    ) -> _Worker:
        """A worker process, the leader of a session of its own; `env` is its whole environment."""
        record = str(self._record) if local_rank == 0 and self._command is not None else None
        try:
            if self._template is not None and self._is_ready(self._template, wait=True):
                fork = partial(
                    self._template.popen,
                    argv,
                    env=env,
                    stdout=stdout.fileno() if stdout else None,
                    stderr=stderr.fileno() if stderr else None,
                    record=record,
                    check_files=self.forked == 0,  # once for all ranks of an attempt
                )
                try:
                    worker = fork()
                except StillImporting:  # since a moment ago: what the rank that was forked before has added
                    if not self._is_ready(self._template, wait=True):
                        raise
                    worker = fork()
                self.forked += 1
                return worker
        except ForkRefused as error:
            self._tell("ranks start the ordinary way: %s", error)
        except TemplateLost as error:
            self._forget(error)
        if record is not None:
            argv = [argv[0], "-u", str(entry.__file__), record, *argv[2:]]
        return subprocess.Popen(argv, env=env, stdout=stdout, stderr=stderr, start_new_session=True)

    def start_helper(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | None = None,
        stdout: int | None = None,
        pass_fds: Collection[int] = (),
    ) -> _Worker:
        """A process beside the workers, in a session of its own; forked only from what is ready by now."""
        try:
            if self._template is not None and self._is_ready(self._template, wait=False):
                return self._template.popen(argv, env=env, stdin=stdin, stdout=stdout, pass_fds=pass_fds)
        except ForkRefused as error:
            logger.debug("%s starts the ordinary way: %s", argv[:3], error)
        except TemplateLost as error:
            self._forget(error)
        return subprocess.Popen(
            argv, env=env, stdin=stdin, stdout=stdout, pass_fds=pass_fds, start_new_session=True
        )

    def workers_started(self) -> None:
        """Prepare for the next attempt, behind the one that has just begun."""
        self._first_start = False
        if self._template is None and self._command is not None:
            self._start(background=True)

    def look(self) -> None:
        """Take in what the template said, and say what a person should know; does not block."""
        if self._template is None:
            return
        was_ready = self._template.ready
        try:
            self._template.look()
            if was_ready or self._template.ready or self._template.modules != self._modules:
                self._stuck_at = time.monotonic() + WAIT_TIMEOUT.total_seconds()
            elif time.monotonic() > self._stuck_at:
                raise self._template.lose(f"has imported nothing for {WAIT_TIMEOUT.total_seconds():g} s")
        except TemplateLost as error:
            self._forget(error)
            return
        for module, why in self._template.left_out.items():
            self._tell(
                "standby: %s is imported by each rank for itself, with all that imports it: it %s",
                module,
                why,
            )
        if self._template.ends_at:
            self._tell(
                "standby: what the script imports after it has set %s is imported by each rank for itself:"
                " set it before the launcher starts",
                self._template.ends_at,
            )
        if self._template.modules != self._modules:
            self._modules, self._settled_at = self._template.modules, time.monotonic() + _SETTLED_S
        if self._template.ready and not self._reported_ready and time.monotonic() > self._settled_at:
            self._reported_ready = True
            logger.info(
                "standby ready: %d modules, imported in %.1f s; the next ranks are forked from process %d",
                *(self._template.modules, self._template.seconds, self._template.pid),
            )

    def close(self) -> None:
        """End the template; idempotent."""
        if self._template is not None:
            self._template.close()
            self._template = None

    def __enter__(self) -> Standby:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, *, background: bool) -> None:
        assert self._command is not None
        work = Work(
            argv=self._options.command,
            preload=self._preload,
            follow=None if self._preload else str(self._record),
            known=str(self._known) if self._known_imports and not self._preload else None,
            save=str(self._known) if self._known is not None and not self._preload else None,
            volatile=VOLATILE,
            background=background,
        )
        env = {**os.environ, **_constants(self._options)}
        try:
            self._template = Template(work, interpreter=(self._command.interpreter, "-u"), env=env)
        except OSError as error:
            self._tell("ranks start the ordinary way: no template can be started: %s", error)
            return
        self._reported_ready = False
        self._stuck_at = time.monotonic() + WAIT_TIMEOUT.total_seconds()
        self._protection.exempt.add(self._template.pid)

    def _is_ready(self, template: Template, *, wait: bool) -> bool:
        self.look()
        if self._template is not template:
            return False
        if not template.ready and wait and (self._first_start or self.forked or self._is_ahead(template)):
            # As many imports as there are ranks, at the same time, would take longer than this one.
            self._wait_for(template)
            self.look()
        return template.ready and self._template is template

    def _wait_for(self, template: Template) -> None:
        now = time.monotonic()
        self._wait_until = self._wait_until or now + WAIT_TIMEOUT.total_seconds()
        try:
            ready = template.wait_until_ready(timedelta(seconds=self._wait_until - now), self.wake_fd)
            if not ready and time.monotonic() >= self._wait_until:
                raise template.lose(f"still imports after {WAIT_TIMEOUT.total_seconds():g} s")
        except TemplateLost as error:
            self._forget(error)

    def _is_ahead(self, template: Template) -> bool:
        """Whether it has done the larger part of what a rank imports: a fresh start would end later."""
        try:
            with self._record.open("rb") as record:
                return 2 * template.modules > sum(line.startswith(b"m ") for line in record)
        except OSError:
            return False

    def _forget(self, error: TemplateLost) -> None:
        self._lost += 1
        if self._lost >= MOST_LOST:
            self._command = None
        then = "until there is another one" if self._command is not None else "from now on"
        logger.warning("standby: %s  Ranks start the ordinary way %s.", error, then)
        if self._template is not None:
            self._protection.exempt.discard(self._template.pid)
        self._template = None

    def _tell(self, text: str, *values: object) -> None:
        """Once."""
        line = text % values
        if line not in self._reported:
            self._reported.add(line)
            logger.info("%s", line)


def _constants(options: LaunchOptions) -> dict[str, str]:
    """Variables that only workers have, with one value in all of them: imports may read these."""
    return {
        JOB_ENV: options.info.job_name,
        RUN_DIR_ENV: options.info.run_dir,
        "ROLE_NAME": options.args.role,
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(False),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _cache_file(command: PythonCommand) -> Path | None:
    """Where the imports of this script with these arguments are kept; None where there is no place for them.

    With other arguments it may import other modules, and one that it would not have imported may change what
    others do.
    """
    base = os.environ.get(CACHE_DIR_ENV)
    if base is None:
        try:
            base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        except RuntimeError:  # a user without a home
            return None
        base = os.path.join(base, "resiliency")
    what = os.path.realpath(command.target) if command.kind == "script" else f"{os.getcwd()} {command.target}"
    script = _digest(command.interpreter, sys.version, what)
    return Path(base) / "imports" / f"{Path(command.target).name}-{script}" / _digest(*command.args)


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:16]


def _delete_oldest(directory: Path) -> None:
    """Arguments may be new at each start, such as a date: what was kept for them is of no use later."""
    with suppress(OSError):  # another launcher does the same, or there is nothing yet
        files = sorted(directory.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[: -MOST_KEPT + 1]:
            file.unlink()
