# SPDX-License-Identifier: Apache-2.0
"""Look at checkpoints from a shell: ``python3 -m resiliency.checkpoint ls|verify|show DIR``.

Exit codes, the same for all commands:

    0  what was asked for is there and good
    1  something is damaged
    2  the command line is wrong, or there is no such directory
    3  nothing usable is there
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from resiliency.checkpoint.catalog import Condition, Found, find_newest, inspect, list_checkpoints, steps_in
from resiliency.checkpoint.reader import CheckpointReader
from resiliency.checkpoint.storage import LocalStorage, Storage
from resiliency.errors import CheckpointError, CheckpointIncomplete, CheckpointMissing, ConfigError

OK, DAMAGED, USAGE, NOTHING = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
    directory: Path = options.directory
    if not directory.is_dir():
        print(f"there is no directory {directory}", file=sys.stderr)
        return USAGE
    command: Callable[[Storage, argparse.Namespace], int] = options.run
    try:
        return command(LocalStorage(directory), options)
    except (CheckpointMissing, CheckpointIncomplete) as error:
        print(error, file=sys.stderr)
        return NOTHING
    except (CheckpointError, ConfigError) as error:
        print(error, file=sys.stderr)
        return DAMAGED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m resiliency.checkpoint",
        description="Look at the checkpoints of a directory.",
        epilog="exit codes: 0 good, 1 damaged, 2 wrong usage, 3 nothing usable",
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
    run: Callable[[Storage, argparse.Namespace], int],
    help: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory that holds step=N")
    if name != "ls":
        parser.add_argument("--step", type=int, help="default: the newest that is usable")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(run=run)
    return parser


def _list(storage: Storage, options: argparse.Namespace) -> int:
    found = list_checkpoints(storage)
    if options.json:
        _print_json([_as_json(item) for item in found])
    elif found:
        _print_table(
            ("STEP", "CONDITION", "SIZE", "RANKS", "FORMAT", "CREATED", "NOTE"),
            [_row(item) for item in found],
        )
    else:
        print(f"no checkpoints in {storage.describe()}", file=sys.stderr)
    if any(item.condition is Condition.BAD for item in found):
        return DAMAGED
    return OK if any(item.is_usable for item in found) else NOTHING


def _verify(storage: Storage, options: argparse.Namespace) -> int:
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
    if options.json:
        _print_json(results)
    else:
        for result in results:
            print(f"step {result['step']}: {result['error'] or 'good, ' + _size(result['size_bytes'])}")
    if not results:
        print(f"no checkpoints in {storage.describe()}", file=sys.stderr)
        return NOTHING
    return DAMAGED if any(result["error"] for result in results) else OK


def _newest_ours(storage: Storage) -> int:
    """The newest that is committed, damaged or not: looking for damage is the point."""
    committed = (Condition.COMPLETE, Condition.BAD)
    for step in reversed(steps_in(storage)):
        if inspect(storage, step).condition in committed:
            return step
    raise CheckpointMissing(f"{storage.describe()} holds no checkpoint with checksums.")


def _verify_one(storage: Storage, step: int) -> dict[str, object]:
    result: dict[str, object] = {"step": step, "error": "", "size_bytes": 0}
    with tqdm(
        desc=f"step {step}", unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, disable=None
    ) as bar:
        try:
            reader = CheckpointReader(storage, step, pace=_advance(bar))
            bar.total = sum(record.size_bytes for record in reader.files())
            result["size_bytes"] = reader.verify()
        except (CheckpointError, ConfigError) as error:
            result["error"] = str(error)
    return result


def _advance(bar: tqdm[NoReturn]) -> Callable[[int], None]:
    def advance(count: int) -> None:
        bar.update(count)

    return advance


def _show(storage: Storage, options: argparse.Namespace) -> int:
    step = find_newest(storage).step if options.step is None else options.step
    found = inspect(storage, step)
    if found.condition is Condition.STOCK:
        print(json.dumps(_as_json(found), indent=2) if options.json else f"{found.path}: torch's own format")
        return OK
    reader = CheckpointReader(storage, step)
    tensors = [
        {"key": key, "dtype": dtype, "global_shape": list(shape)}
        for key, (dtype, shape) in sorted(reader.keys().items())
    ]
    if options.json:
        ranks = {index.rank: index.size_bytes for index in reader.indexes()}
        _print_json({**_as_json(found), "rank_size_bytes": ranks, "tensors": tensors})
        return OK
    print(f"{found.path}: {found.condition.value}, run {reader.manifest.run_id!r}, {_size(found.size_bytes)}")
    _print_table(
        ("TENSOR", "DTYPE", "GLOBAL SHAPE"),
        [(str(item["key"]), str(item["dtype"]), str(item["global_shape"])) for item in tensors],
    )
    return OK


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


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_json(document: object) -> None:
    print(json.dumps(document, indent=2))
