#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Docstrings and messages name nothing that is gone.

    python scripts/docstrings.py [ROOT]

In docstrings of `resiliency`, `supervisor` and `simulator`, and in their other texts such as hints of errors,
a plain name in single backticks must be a name of their Python code, of Python, or of a library where it is
dotted with the library's module.  A text without blanks counts as names: a key, a flag, an argument of
`getattr`; a sentence does not.  A name that is dotted with a folder of the project must be in that module, as
`scripts.words.main`: the only way to name what the benchmarks, examples, scripts or tests alone have.
`Class.member` must be in the class.  A class names in ``Args:`` and ``Attributes:`` what its own body, or
that of a base, has; for functions ruff's DOC102 does that.  Comments are not looked at.

Exit status: 0 nothing found, 1 names found.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PRODUCTS = ("resiliency", "supervisor", "simulator")
#: Their names count only where they are dotted with the folder.
BESIDE = ("benchmark", "examples", "scripts", "tests")
#: Made by a compiler.
GENERATED = "fleet_pb2.py"

_NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`(?!`)")
_QUOTED = re.compile(r"`+[^`]*`+")
_SECTION = re.compile(r"^( *)(?:Args|Attributes):\n((?:\1 +\S.*\n|\s*\n)+)", re.MULTILINE)
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
    trees = {
        path: ast.parse(path.read_text())
        for top in PRODUCTS
        for path in sorted((root / top).rglob("*.py"))
        if path.name != GENERATED
    }
    project = _Project(root, trees)
    found = []
    for path, tree in trees.items():
        where = path.relative_to(root)
        found += [
            f"{where}:{line}: `{name}` is no name of the project"
            for line, name in _named(tree)
            if not project.has(name)
        ]
        found += [
            f"{where}:{line}: {name} is not in the class {cls.name}"
            for cls, line, name in _entries(tree)
            if not (cls.bases and name in project.names)
        ]
    print("\n".join([*found, f"{len(found)} names in texts that are gone"]))
    return 1 if found else 0


class _Project:
    """What a text may name.

    Attributes:
        names: of the products and of Python.
        libraries: modules that the products import.
        members: of each class without bases; of all classes of that name.
    """

    def __init__(self, root: Path, trees: dict[Path, ast.Module]) -> None:
        self.root = root
        self.names = {*keyword.kwlist, *dir(builtins), *PRODUCTS, *BESIDE}
        self.libraries = set(sys.stdlib_module_names)
        self.members: dict[str, set[str]] = {}
        with_bases = set()
        for path, tree in trees.items():
            self.names.update(path.relative_to(root).with_suffix("").parts, _names(tree))
            for node in ast.walk(tree):
                if isinstance(node, ast.Import):
                    self.libraries.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    self.libraries.add(node.module.partition(".")[0])
                elif isinstance(node, ast.ClassDef):
                    self.members.setdefault(node.name, set()).update(_members(node))
                    if node.bases:
                        with_bases.add(node.name)
        self.libraries -= {*PRODUCTS, *BESIDE}
        for name in with_bases:
            del self.members[name]

    def has(self, name: str) -> bool:
        first, *rest = parts = name.split(".")
        if rest and first in self.libraries:
            return True
        if rest and first in (*PRODUCTS, *BESIDE):
            return self._module_has(parts)
        members = zip(parts, rest, strict=False)
        return self.names.issuperset(parts) and all(
            member in self.members.get(cls, [member]) for cls, member in members
        )

    def _module_has(self, parts: list[str]) -> bool:
        path, rest = self.root, list(parts)
        while rest and (path / rest[0]).is_dir():
            path /= rest.pop(0)
        if rest and (path / f"{rest[0]}.py").exists():
            path /= f"{rest.pop(0)}.py"
        else:
            path /= "__init__.py"
        return not rest or (path.exists() and _names_in(path).issuperset(rest))


@cache
def _names_in(path: Path) -> set[str]:
    return set(_names(ast.parse(path.read_text())))


def _names(tree: ast.Module) -> Iterator[str]:
    """Names of the code, and words of its texts that are neither docstrings nor sentences."""
    docstrings = {text for _, text in _docstrings(tree)}
    for node in ast.walk(tree):
        for text in vars(node).values() if node not in docstrings else ():
            if isinstance(text, str) and not re.search(r"\s", text):
                yield from re.findall(r"\w+", _QUOTED.sub("", text))


def _docstrings(tree: ast.AST) -> Iterator[tuple[_Documented, ast.Constant]]:
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and node.body and isinstance(node.body[0], ast.Expr):
            text = node.body[0].value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield node, text


def _named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of what texts have in backticks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for match in _NAME.finditer(node.value):
                yield node.lineno + node.value.count("\n", 0, match.start()), match[1]


def _entries(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, int, str]]:
    """Class, line and name of each entry of its sections, ``a, b: what they are``, that its body has not."""
    for cls, text in _docstrings(tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        own = _members(cls)
        for section in _SECTION.finditer(text.value + "\n"):
            indent = len(section[2]) - len(section[2].lstrip())
            for entry in re.finditer(rf"^ {{{indent}}}(\w+(?:, \w+)*):", section[2], re.MULTILINE):
                line = text.lineno + text.value.count("\n", 0, section.start(2) + entry.start())
                yield from ((cls, line, name) for name in entry[1].split(", ") if name not in own)


def _members(cls: ast.ClassDef) -> set[str]:
    return {name for node in ast.walk(cls) for name in _defined(node)}


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
