# SPDX-License-Identifier: Apache-2.0
"""Look at checkpoints from a shell: ``resiliency-ckpt ls|verify|show DIR``, or
``python3 -m resiliency.checkpoint``; ``free`` gives the shared memory of dead jobs back.

Exit codes, the same for all commands, whether or not anybody read the output to its end:

    0    what was asked for is there and good
    1    something is damaged
    2    the command line is wrong, or there is no such directory, or it cannot be read
    3    nothing usable is there
    130  interrupted with Ctrl-C
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from resiliency.checkpoint.capture.job_memory import DEFAULT_ROOT
from resiliency.checkpoint.capture.leftovers import LeftoverOutcome, free_leftovers
from resiliency.checkpoint.format.catalog import (
    Condition,
    Found,
    find_newest,
    glance,
    inspect,
    left_among,
    steps_in,
)
from resiliency.checkpoint.format.marker import parse_step
from resiliency.checkpoint.format.reader import CheckpointReader
from resiliency.checkpoint.progress import ReadProgress
from resiliency.checkpoint.storage.interface import Storage
from resiliency.checkpoint.storage.posix import LocalStorage
from resiliency.errors import CheckpointError, CheckpointIncomplete, CheckpointMissing, ConfigError
from resiliency.files import path_flag

OK, DAMAGED, USAGE, NOTHING, INTERRUPTED = 0, 1, 2, 3, 130
MODULE = "python3 -m resiliency.checkpoint"

_EPILOG = """\
examples:
  {prog} ls /ckpt                 every step, committed or not
  {prog} verify /ckpt             compare all bytes of the newest step with their checksums
  {prog} verify /ckpt --all       of every step
  {prog} show /ckpt/step=600      names, dtypes and shapes of what one step holds
  {prog} free --all-users         after a job, as root: shared memory that dead jobs left

exit codes: 0 good, 1 damaged, 2 wrong usage or unreadable, 3 nothing usable, 130 Ctrl-C
"""


@dataclass(frozen=True)
class _Answer:
    """What a command has to say.  The code is known before a line is printed, so that a reader who
    goes away early (``| head -1``) does not change it."""

    code: int
    text: str = ""


def main(argv: Sequence[str] | None = None, *, prog: str = MODULE) -> int:
    """Run one command; returns the exit code."""
    parser = _parser(prog)
    options = parser.parse_args(argv)
    directory: Path = options.directory
    named = parse_step(Path(os.path.abspath(directory)).name)
    if named is not None:
        if options.step not in (None, named):
            parser.error(f"{directory} is step {named}, found --step {options.step}")
        options.step, directory = named, Path(os.path.abspath(directory)).parent
    command: Callable[[Storage, argparse.Namespace], _Answer] = options.run
    try:
        if not directory.is_dir():
            print(f"there is no directory {directory}", file=sys.stderr)
            return USAGE
        os.listdir(directory)  # unreadable is another answer than damaged
        answer = command(LocalStorage(directory), options)
    except (CheckpointMissing, CheckpointIncomplete) as error:
        print(error, file=sys.stderr)
        return NOTHING
    except (CheckpointError, ConfigError) as error:
        print(error, file=sys.stderr)
        return DAMAGED
    except OSError as error:
        print(f"cannot read {error.filename or directory}: {error.strerror}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    _print(answer.text)
    return answer.code


def _print(text: str) -> None:
    if not text:
        return
    try:
        print(text)
        sys.stdout.flush()  # a closed pipe shows here, not at the interpreter's end
    except BrokenPipeError:
        # The reader has seen enough.  The interpreter would flush once more and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Look at the checkpoints of a directory, and free the memory of dead jobs.",
        epilog=_EPILOG.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _command(commands, "ls", _list, "list all checkpoints with their condition; no bytes are compared")
    verify = _command(
        commands, "verify", _verify, "read a checkpoint, the newest by default, and compare all checksums"
    )
    verify.add_argument("--all", action="store_true", help="every committed checkpoint, not the newest alone")
    _command(commands, "show", _show, "say what one checkpoint holds")
    _add_free(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[Storage, argparse.Namespace], _Answer],
    help: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    parser.add_argument(
        "directory", type=path_flag, metavar="DIR", help="directory that holds step=N, or one step=N"
    )
    parser.set_defaults(step=None)
    if name != "ls":
        parser.add_argument("--step", type=int, help="default: the newest that is usable")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run)
    return parser


def _add_free(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    purpose = "free the shared memory that dead jobs left on this host"
    parser: argparse.ArgumentParser = commands.add_parser(
        "free",
        help=purpose,
        description=f"{purpose}.  A job with a living process is never touched.",
        epilog="exit codes: 0 nothing is left that should go, 1 something could not be freed, 2 wrong usage",
    )
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=DEFAULT_ROOT,
        metavar="DIR",
        help="where the jobs keep their captures (default: %(default)s)",
    )
    parser.add_argument(
        "--older-than",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="leave what changed since then: between the death of a rank and its restart no process may live,"
        " if no launcher of this library runs the job (default: %(default)g)",
    )
    parser.add_argument("--all-users", action="store_true", help="of all users; run it as root")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be freed")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=_free)


def _free(_: Storage, options: argparse.Namespace) -> _Answer:
    found = free_leftovers(
        options.directory,
        older_than=timedelta(seconds=options.older_than),
        all_users=options.all_users,
        dry_run=options.dry_run,
    )
    code = DAMAGED if any(item.outcome is LeftoverOutcome.REFUSED for item in found) else OK
    if options.json:
        rows = [
            {
                "directory": str(item.directory),
                "user": item.user,
                "size_bytes": item.size_bytes,
                "idle_s": round(item.idle_s, 1),
                "outcome": item.outcome.value,
            }
            for item in found
        ]
        return _Answer(code, _json(rows))
    lines = [
        f"{item.directory}: {item.outcome.value} ({_size(item.size_bytes)}, user {item.user},"
        f" last change {item.idle_s:.0f} s ago)"
        for item in found
    ]
    return _Answer(code, "\n".join(lines))


def _list(storage: Storage, options: argparse.Namespace) -> _Answer:
    steps = steps_in(storage) if options.step is None else [_existing(storage, options.step)]
    left = left_among(storage, steps)
    found = [
        replace(item, why=f"left: job went back to step {left[item.step]:g}") if item.step in left else item
        for item in (inspect(storage, step) for step in steps)
    ]
    text = ""
    if options.json:
        text = _json([_as_json(item) for item in found])
    elif found:
        text = _table(
            ("STEP", "CONDITION", "SIZE", "RANKS", "FORMAT", "CREATED", "NOTE"),
            [_row(item) for item in found],
        )
        print("conditions are those of manifests and sizes; verify compares the bytes", file=sys.stderr)
    else:
        print(f"no checkpoints in {storage.describe()}", file=sys.stderr)
    if any(item.condition is Condition.BAD for item in found):
        return _Answer(DAMAGED, text)
    return _Answer(OK if any(item.is_usable for item in found) else NOTHING, text)


def _verify(storage: Storage, options: argparse.Namespace) -> _Answer:
    if options.step is not None:
        steps = [_existing(storage, options.step)]
    elif options.all:
        steps = [
            step for step in steps_in(storage) if glance(storage, step).condition is not Condition.UNFINISHED
        ]
    else:
        steps = [_newest_ours(storage)]
    results = [_verify_one(storage, step) for step in steps]
    if not results:
        print(f"no checkpoints in {storage.describe()}", file=sys.stderr)
        return _Answer(NOTHING, _json(results) if options.json else "")
    lines = [
        f"step {result['step']}: {result['error'] or 'good, ' + _size(result['size_bytes'])}"
        for result in results
    ]
    left = [step for step in steps_in(storage) if step not in steps]
    if left and not options.all:
        lines.append(
            f"not verified: {len(left)} other steps, from {left[0]} to {left[-1]}; --all takes every one"
        )
    text = _json(results) if options.json else "\n".join(lines)
    return _Answer(DAMAGED if any(result["error"] for result in results) else OK, text)


def _existing(storage: Storage, step: int) -> int:
    if step not in steps_in(storage):
        raise CheckpointMissing(f"{storage.describe()} has no step {step}.", step=step)
    return step


def _newest_ours(storage: Storage) -> int:
    """The newest of the live branch that is committed, damaged or not: looking for damage is the point."""
    committed = (Condition.COMPLETE, Condition.BAD)
    steps = steps_in(storage)
    left = left_among(storage, steps)
    for step in reversed(steps):
        if step not in left and glance(storage, step).condition in committed:
            return step
    raise CheckpointMissing(
        f"{storage.describe()} holds no committed checkpoint with checksums: torch's own have none.",
        hint="ls says what is there.",
    )


def _verify_one(storage: Storage, step: int) -> dict[str, object]:
    result: dict[str, object] = {"step": step, "error": "", "size_bytes": 0}
    with ReadProgress(f"step {step}") as progress:
        try:
            reader = CheckpointReader(storage, step, pace=progress)
            progress.expect(sum(record.size_bytes for record in reader.files()))
            result["size_bytes"] = reader.verify()
        except (CheckpointError, ConfigError) as error:
            result["error"] = str(error)
    return result


def _show(storage: Storage, options: argparse.Namespace) -> _Answer:
    step = find_newest(storage).step if options.step is None else _existing(storage, options.step)
    found = inspect(storage, step)
    if found.condition is Condition.STOCK:
        return _Answer(OK, _json(_as_json(found)) if options.json else f"{found.path}: torch's own format")
    reader = CheckpointReader(storage, step)
    tensors = [
        {"key": key, "dtype": dtype, "global_shape": list(shape)}
        for key, (dtype, shape) in sorted(reader.keys().items())
    ]
    if options.json:
        ranks = {index.rank: index.size_bytes for index in reader.indexes()}
        return _Answer(OK, _json({**_as_json(found), "rank_size_bytes": ranks, "tensors": tensors}))
    of_run = f", run {reader.manifest.run_id!r}" if reader.manifest.run_id else ""
    table = _table(
        ("TENSOR", "DTYPE", "GLOBAL SHAPE"),
        [(str(item["key"]), str(item["dtype"]), str(item["global_shape"])) for item in tensors],
    )
    return _Answer(OK, f"{found.path}: {found.condition.value}{of_run}, {_size(found.size_bytes)}\n{table}")


def _as_json(found: Found) -> dict[str, object]:
    manifest = found.manifest
    return {
        "step": found.step,
        "path": found.path,
        "condition": found.condition.value,
        "why": found.why,
        "size_bytes": found.size_bytes,
        "run_id": manifest.run_id if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "format": manifest.format if manifest else None,
        "created": manifest.created if manifest else None,
    }


def _row(found: Found) -> tuple[str, ...]:
    manifest = found.manifest
    ranks = f"{len(manifest.ranks)}/{manifest.world_size}" if manifest else ""
    layout, created = (manifest.format, manifest.created) if manifest else ("", "")
    size = _size(found.size_bytes) if manifest else ""
    return str(found.step), found.condition.value, size, ranks, layout, created, found.why


def _size(count: object) -> str:
    value = float(str(count))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )


def _json(document: object) -> str:
    return json.dumps(document, indent=2)
