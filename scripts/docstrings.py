#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Docstrings and messages name nothing that is gone.

    python scripts/docstrings.py [ROOT]

In docstrings of `resiliency`, `supervisor` and `simulator`, and in their other texts such as hints of errors,
a plain name in single backticks must be a name of the project's Python code, of Python, or of a library where
it is dotted with the library's module.  A class names in ``Args:`` and ``Attributes:`` what its own body, or
that of a base, has; for functions ruff's DOC102 does that.  Comments are not looked at.

Exit status: 0 nothing found, 1 names found.
"""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import re
import sys
import tokenize
from collections.abc import Iterator, Set
from pathlib import Path

PRODUCTS = ("resiliency", "supervisor", "simulator")
#: Whose names count as well.
BESIDE = ("benchmark", "examples", "scripts", "tests")
#: Made by a compiler, and made up for tests of these scripts.
LEFT_OUT = ("fleet_pb2.py", "test_code_checks.py")

_NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`(?!`)")
_QUOTED = re.compile(r"`+[^`]*`+")
_SECTION = re.compile(r"^( *)(?:Args|Attributes):\n((?:\1 +\S.*\n|\s*\n)+)", re.MULTILINE)
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
    sources = {
        path: path.read_text()
        for top in (*PRODUCTS, *BESIDE)
        for path in sorted((root / top).rglob("*.py"))
        if path.name not in LEFT_OUT
    }
    sources |= {path: path.read_text() for path in root.glob("*.py")}
    known = {*keyword.kwlist, *dir(builtins), *PRODUCTS, *BESIDE}
    libraries = set(sys.stdlib_module_names)
    for path, source in sources.items():
        known.update(path.relative_to(root).with_suffix("").parts)
        known.update(_names(source))
        libraries.update(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE))
    libraries -= set(PRODUCTS)
    found = []
    for path, source in sources.items():
        where = path.relative_to(root)
        if where.parts[0] in PRODUCTS:
            tree = ast.parse(source)
            found += [
                f"{where}:{line}: `{name}` is no name of the project"
                for line, name in _named(tree)
                if not _is_known(name, known, libraries)
            ]
            found += [
                f"{where}:{line}: {name} is not in the class {cls.name}"
                for cls, line, name in _entries(tree)
                if not (cls.bases and name in known)
            ]
    print("\n".join([*found, f"{len(found)} names in texts that are gone"]))
    return 1 if found else 0


def _names(source: str) -> Iterator[str]:
    """Names of the code, and words of its texts that are no docstrings: keys, flags, `getattr`."""
    docstrings = {node.lineno for tree in [ast.parse(source)] for _, node in _docstrings(tree)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.string
        elif token.type == tokenize.STRING and token.start[0] not in docstrings:
            yield from re.findall(r"\w+", _QUOTED.sub("", token.string))


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


def _is_known(name: str, known: Set[str], libraries: Set[str]) -> bool:
    first, *rest = parts = name.split(".")
    return (bool(rest) and first in libraries) or known.issuperset(parts)


def _entries(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, int, str]]:
    """Class, line and name of each entry of its sections, ``a, b: what they are``, that its body has not."""
    for cls, text in _docstrings(tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        own = {name for node in ast.walk(cls) for name in _defined(node)}
        for section in _SECTION.finditer(text.value + "\n"):
            indent = len(section[2]) - len(section[2].lstrip())
            for entry in re.finditer(rf"^ {{{indent}}}(\w+(?:, \w+)*):", section[2], re.MULTILINE):
                line = text.lineno + text.value.count("\n", 0, section.start(2) + entry.start())
                yield from ((cls, line, name) for name in entry[1].split(", ") if name not in own)


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.FunctionDef):
        yield node.name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
