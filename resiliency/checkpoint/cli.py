# SPDX-License-Identifier: Apache-2.0
"""Look at checkpoints from a shell: ``resiliency-ckpt ls|verify|show DIR``, or
``python3 -m resiliency.checkpoint``.

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
from dataclasses import dataclass
from pathlib import Path

from resiliency.checkpoint.catalog import Condition, Found, find_newest, inspect, list_checkpoints, steps_in
from resiliency.checkpoint.progress import Progress
from resiliency.checkpoint.reader import CheckpointReader
from resiliency.checkpoint.storage import LocalStorage, Storage
from resiliency.errors import CheckpointError, CheckpointIncomplete, CheckpointMissing, ConfigError

OK, DAMAGED, USAGE, NOTHING, INTERRUPTED = 0, 1, 2, 3, 130
MODULE = "python3 -m resiliency.checkpoint"


@dataclass(frozen=True)
class _Answer:
    """What a command has to say.  The code is known before a line is printed, so that a reader who
    goes away early (``| head -1``) does not change it."""

    code: int
    text: str = ""


def main(argv: Sequence[str] | None = None, *, prog: str = MODULE) -> int:
    """Run one command; returns the exit code."""
    options = _parser(prog).parse_args(argv)
    directory: Path = options.directory
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
        description="Look at the checkpoints of a directory.",
        epilog="exit codes: 0 good, 1 damaged, 2 wrong usage or unreadable, 3 nothing usable, 130 Ctrl-C",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _command(commands, "ls", _list, "list all checkpoints with their condition")
    verify = _command(commands, "verify", _verify, "read checkpoints and compare all checksums")
    verify.add_argument("--all", action="store_true", help="every complete checkpoint, not the newest")
    _command(commands, "show", _show, "say what one checkpoint holds")
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[Storage, argparse.Namespace], _Answer],
    help: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory that holds step=N")
    if name != "ls":
        parser.add_argument("--step", type=int, help="default: the newest that is usable")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run)
    return parser


def _list(storage: Storage, options: argparse.Namespace) -> _Answer:
    found = list_checkpoints(storage)
    text = ""
    if options.json:
        text = _json([_as_json(item) for item in found])
    elif found:
        text = _table(
            ("STEP", "CONDITION", "SIZE", "RANKS", "FORMAT", "CREATED", "NOTE"),
            [_row(item) for item in found],
        )
    else:
        print(f"no checkpoints in {storage.describe()}", file=sys.stderr)
    if any(item.condition is Condition.BAD for item in found):
        return _Answer(DAMAGED, text)
    return _Answer(OK if any(item.is_usable for item in found) else NOTHING, text)


def _verify(storage: Storage, options: argparse.Namespace) -> _Answer:
    if options.step is not None:
        if options.step not in steps_in(storage):
            raise CheckpointMissing(f"{storage.describe()} has no step {options.step}.", step=options.step)
        steps = [options.step]
    elif options.all:
        steps = [
            step for step in steps_in(storage) if inspect(storage, step).condition is not Condition.UNFINISHED
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
    text = _json(results) if options.json else "\n".join(lines)
    return _Answer(DAMAGED if any(result["error"] for result in results) else OK, text)


def _newest_ours(storage: Storage) -> int:
    """The newest that is committed, damaged or not: looking for damage is the point."""
    committed = (Condition.COMPLETE, Condition.BAD)
    for step in reversed(steps_in(storage)):
        if inspect(storage, step).condition in committed:
            return step
    raise CheckpointMissing(f"{storage.describe()} holds no checkpoint with checksums.")


def _verify_one(storage: Storage, step: int) -> dict[str, object]:
    result: dict[str, object] = {"step": step, "error": "", "size_bytes": 0}
    with Progress(f"step {step}") as progress:
        try:
            reader = CheckpointReader(storage, step, pace=progress)
            progress.expect(sum(record.size_bytes for record in reader.files()))
            result["size_bytes"] = reader.verify()
        except (CheckpointError, ConfigError) as error:
            result["error"] = str(error)
    return result


def _show(storage: Storage, options: argparse.Namespace) -> _Answer:
    step = find_newest(storage).step if options.step is None else options.step
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
