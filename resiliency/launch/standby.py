# SPDX-License-Identifier: Apache-2.0
"""Ranks that start without importing: the launcher's import template, and what it knows of the script.

While the first attempt trains, a template repeats the imports of its local rank 0, at low priority.  The
ranks of every later attempt are forked from it.  What was imported is kept for the next job with the same
script and arguments, whose first ranks are forked then, too.

Nothing depends on a template: where it cannot fork, for whatever reason, a rank starts the ordinary way,
and one line says why.  One that hangs in an import is given up once for the whole host: the next one does
without that module.
"""

from __future__ import annotations

import hashlib
import logging
import os
import select
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
from resiliency.proc_stat import stat_fields
from resiliency.progress import STEP_PAGE_ENV
from resiliency.runtime import (
    AGENT_HOST_ENV,
    FAILURE_DOMAINS_ENV,
    JOB_ENV,
    RUN_DIR_ENV,
    STOP_NOTES_ENV,
    awake_s,
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
#: longest processor time for one module, or time for what it runs, such as a compiler.
WAIT_TIMEOUT = timedelta(seconds=60)
#: A template that does nothing at all for this long hangs.
HANG_TIMEOUT = timedelta(seconds=10)
#: After this long without progress, a line says what ranks wait for.
TELL_TIMEOUT = timedelta(seconds=3)
#: Of one script, the imports of so many different arguments are kept.
MOST_KEPT = 8

#: A template that has repeated what ranks imported, and nothing more for this long, has caught up with them.
_SETTLED_S = 2.0
#: It is named again when it holds so many times as many modules.
_GROWN = 1.5
_LOOK = timedelta(seconds=0.2)

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
        self._importing = protection.private_dir / "importing"
        self._known = _cache_file(command) if command is not None else None
        if self._known is not None and not self._known_imports:
            _delete_oldest(self._known.parent)
        self._template = held if self._command is not None else None
        self._reported: set[str] = set()
        #: How many templates were lost.
        self._lost = 0
        #: Modules in which a template hung: no other one imports them.
        self._hung: dict[str, str] = {}
        self._progress = _ImportProgress(self._importing)
        #: What there is to hold, when that may be called all, and how many modules were reported.
        self._seen, self._settled_at, self._reported_modules = (0, 0), 0.0, 0
        #: When this attempt has waited for long enough; 0: it has not waited yet.
        self._wait_until = 0.0
        self._first_start = True
        #: What was kept of the imports when `prepare` started a template.
        self._prepared: tuple[int, int] | None = None
        #: Readable when the launcher is asked to end: no more waiting then.
        self.wake_fd: int | None = None
        #: How many workers of the current attempt were forked.
        self.forked = 0
        if held is not None and self._template is None:
            held.close()
        if self._preload and self._command is None:
            why = "ranks are no Python programs that can be forked"
            if options.args.standby != "auto":
                why = "--standby is off"
            elif not restarts:
                why = "nothing restarts ranks, see --max-restarts"
            self._tell("--standby-preload has no effect: %s", why, level=logging.WARNING)
        if self._template is not None:
            protection.exempt.add(self._template.pid)
            self._is_ready(self._template, wait=True)  # at once: it has nothing to import
            self._reported_modules = held.modules if held is not None else 0
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

    def prepare(self) -> None:
        """While this launcher waits for a place: repeat the imports that those which run have kept.

        They keep them in a cache directory of one host, or of hosts that share it.
        """
        if self._command is None or self._known is None or self._preload or not self._first_start:
            return
        with suppress(OSError):  # nobody has run the script yet
            kept = self._known.stat()
            stamp = kept.st_mtime_ns, kept.st_size
            is_old = time.time() - kept.st_mtime > _SETTLED_S
            if is_old and stamp != self._prepared and (self._template is None or self._prepared is not None):
                self._drop_template()
                self._prepared = stamp
                self._start(background=True)
        self.look()

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
        try:
            self._template.look()
            self._check_progress(self._template)
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
        for module, why in self._template.failed.items():
            self._tell(
                "standby: %s of --standby-preload cannot be imported: %s",
                module,
                why,
                level=logging.WARNING,
            )
        if self._has_caught_up(self._template):
            self._reported_modules = self._template.modules
            logger.info(
                "standby ready: %d modules, imported in %.1f s; the next ranks are forked from process %d",
                *(self._template.modules, self._template.seconds, self._template.pid),
            )

    def close(self) -> None:
        """End the template; idempotent."""
        self._drop_template()

    def _drop_template(self) -> None:
        if self._template is not None:
            self._protection.exempt.discard(self._template.pid)
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
            importing=str(self._importing),
            left_out=self._hung,
            follow=None if self._preload else str(self._record),
            known=str(self._known) if self._known_imports and not self._preload else None,
            save=str(self._known) if self._known is not None and not self._preload else None,
            volatile=VOLATILE,
            background=background,
        )
        env = {**os.environ, **_constants(self._options)}
        self._progress, self._reported_modules = _ImportProgress(self._importing), 0
        try:
            self._template = Template(work, interpreter=(self._command.interpreter, "-u"), env=env)
        except OSError as error:
            self._tell("ranks start the ordinary way: no template can be started: %s", error)
            return
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
        now = awake_s()
        self._wait_until = self._wait_until or now + WAIT_TIMEOUT.total_seconds()
        try:
            while not template.wait_until_ready(_LOOK, self.wake_fd):
                if self._must_end():
                    return
                self._check_progress(template)
                if awake_s() >= self._wait_until:
                    self._tell("ranks start the ordinary way: the template still imports")
                    return
                if self._progress.module and self._progress.module_s() > TELL_TIMEOUT.total_seconds():
                    self._tell(
                        "standby: ranks wait for the import of %s, for more than %g s so far",
                        *(self._progress.module, TELL_TIMEOUT.total_seconds()),
                    )
        except TemplateLost as error:
            self._forget(error)

    def _check_progress(self, template: Template) -> None:
        """Give up a template that hangs, and remember where."""
        self._progress.look(template)
        if for_s := self._progress.hung_s():
            module = self._progress.module
            if module:
                self._hung[module] = f"did not come to its end within {for_s:.0f} s"
            raise template.lose(f"has hung in the import of {module or 'a module'} for {for_s:.0f} s")

    def _must_end(self) -> bool:
        return self.wake_fd is not None and bool(select.select([self.wake_fd], [], [], 0)[0])

    def _has_caught_up(self, template: Template) -> bool:
        """Whether it holds all that local rank 0 has imported so far, and much more than was reported."""
        try:
            size = self._record.stat().st_size
        except OSError:  # no rank has begun
            size = 0
        if self._seen != (template.modules, size):
            self._seen = template.modules, size
            self._settled_at = awake_s() + _SETTLED_S
        holds_all = bool(self._preload) or (template.repeated > 0 and template.followed >= size)
        has_grown = template.modules > _GROWN * self._reported_modules
        return template.ready and holds_all and has_grown and awake_s() > self._settled_at

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
        without = f", which leaves out {', '.join(self._hung)}" if self._hung and self._command else ""
        logger.warning("standby: %s  Ranks start the ordinary way %s%s.", error, then, without)
        if self._template is not None:
            self._protection.exempt.discard(self._template.pid)
        self._template = None

    def _tell(self, text: str, *values: object, level: int = logging.INFO) -> None:
        """Once."""
        line = text % values
        if line not in self._reported:
            self._reported.add(line)
            logger.log(level, "%s", line)


class _ImportProgress:
    """Which module a template imports, for how long, and since when it does nothing.

    Args:
        importing: file in which it names the module.
    """

    def __init__(self, importing: Path) -> None:
        self._importing = importing
        importing.unlink(missing_ok=True)  # of the template before
        self.module = ""
        #: When the file was written: what it names may be imported again.
        self._written_ns = 0
        self._module_at = self._active_at = awake_s()
        self._used: list[str] = []
        #: Processor time, and what it was when the import of the module began.
        self._cpu_s = self._module_cpu_s = 0.0

    def look(self, template: Template) -> None:
        now, stat = awake_s(), stat_fields(template.pid)
        if not stat:  # it is gone, as the next message tells
            return
        self._cpu_s = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        written_ns = self._read()
        if template.ready or written_ns != self._written_ns:
            self._module_at, self._module_cpu_s = now, self._cpu_s
        self._written_ns = written_ns
        # Page faults and processor time, of ended children, too.  On a busy host, where it comes last, it may
        # get none for seconds.
        works = stat[0] == "R" or stat[7:15] != self._used
        runs_something = _has_child(template.pid) and self.module_s() < WAIT_TIMEOUT.total_seconds()
        if works or runs_something:
            self._active_at = now
        self._used = stat[7:15]
        self._active_at = max(self._active_at, self._module_at)

    def module_s(self) -> float:
        """For how long it has imported the same module."""
        return awake_s() - self._module_at

    def hung_s(self) -> float:
        """For how long it has hung, after which it is of no use; else 0."""
        idle_s = awake_s() - self._active_at
        if idle_s > HANG_TIMEOUT.total_seconds():
            return idle_s
        return self.module_s() if self._cpu_s - self._module_cpu_s > WAIT_TIMEOUT.total_seconds() else 0.0

    def _read(self) -> int:
        try:
            with self._importing.open(errors="surrogateescape") as file:
                self.module = file.readline().strip()
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:  # it has imported nothing yet
            return 0


def _has_child(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    except OSError:
        return False


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
