#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No module or identifier has a word that the project has retired.

    python scripts/words.py [ROOT]

The words, their replacements and the folders in which each holds are the table "Retired words" of
`docs/glossary.md`.  A lowercase entry retires each name with that word in it: ``hurry`` is found in
``hurry_s``, ``HURRY_S`` and ``HurryUp``, also with s, ed or ing at its end.  An entry with a capital letter
retires that name alone, for words that are ordinary elsewhere: ``Need`` is the class, the constant ``NEED``,
and the module or package ``need``.  Texts are not looked at.

Exit status: 0 nothing found, 1 names found.
"""

from __future__ import annotations

import re
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

GLOSSARY = "docs/glossary.md"
HEADING = "## Retired words"
#: Made by a compiler.
GENERATED = "fleet_pb2"
#: Names that stay: (file, name), each with its reason.
ALLOWED = {
    ("benchmark/flags.py", "high_scale"): "the promised flag",
    ("benchmark/flags.py", "enable_high_scale_ckpt"): "the promised flag",
    ("benchmark/pretrain.py", "high_scale"): "the promised flag",
    ("resiliency/checkpoint/agent/client.py", "start_new_session"): "a parameter of subprocess",
    ("resiliency/checkpoint/replication/server.py", "backlog"): "a parameter of the socket module",
    ("supervisor/transport/services.py", "Holding"): "the name of a message on the wire",
}


class Retired(NamedTuple):
    word: str
    use: str
    where: tuple[str, ...]

    def matches(self, name: str) -> bool:
        if self.word.islower():
            return bool(re.search(f"_{self.word}(?:s|e?d|ing)?_", f"_{words_of(name)}_"))
        return name.strip("_") in (self.word, words_of(self.word).upper())

    def matches_module(self, name: str) -> bool:
        return self.matches(name) or (not self.word.islower() and name == words_of(self.word))


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
    retired = read_table((root / GLOSSARY).read_text())
    found, excused = [], set()
    for path in sorted(file for top in folders(retired) for file in (root / top).rglob("*.py")):
        where = str(path.relative_to(root))
        if GENERATED in where:
            continue
        here = [entry for entry in retired if f"{where}/".startswith(tuple(f"{top}/" for top in entry.where))]
        for line, name, entry in retired_in(path, here):
            if (where, name) in ALLOWED:
                excused.add((where, name))
            else:
                found.append(f"{where}:{line}: {name} has the retired word {entry.word!r}; use {entry.use}")
    if not argv:
        stale = ALLOWED.keys() - excused
        found += [
            f"scripts/words.py: {name} is allowed in {where} and not there" for where, name in sorted(stale)
        ]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


def read_table(text: str) -> list[Retired]:
    """The rows of the glossary's table; one row may name several words, each in backticks."""
    _, _, section = text.partition(HEADING)
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [
        Retired(word, row[1].strip(), tuple(row[2].replace("`", "").split()))
        for row in rows
        for word in re.findall(r"`(\w+)`", row[0])
    ]


def folders(retired: list[Retired]) -> list[str]:
    return sorted({where.partition("/")[0] for entry in retired for where in entry.where})


def retired_in(path: Path, entries: list[Retired]) -> list[tuple[int, str, Retired]]:
    """Line, name and entry of each retired name, once per file."""
    module = path.parent.name if path.stem == "__init__" else path.stem
    found = [(1, module, entry) for entry in entries if entry.matches_module(module)][:1]
    seen = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type != tokenize.NAME or token.string in seen:
                continue
            seen.add(token.string)
            hit = next((entry for entry in entries if entry.matches(token.string)), None)
            if hit is not None:
                found.append((token.start[0], token.string, hit))
    return found


def words_of(name: str) -> str:
    """``CopyQueue``, ``_copy_queue`` and ``COPY_QUEUE`` as ``copy_queue``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
