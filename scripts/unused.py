#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Names that the product defines and only tests use.

    python scripts/unused.py [ROOT]

A top-level function or class, or a public method, of `resiliency`, `supervisor` and `simulator` must be named
somewhere outside its own definition: in the products, the programs beside them, a benchmark, an example or
a script, in `__all__`, or in the documentation.  Tests count as users of test tools alone.  Methods of a
class that extends one of a library may be called by the library, and fixtures by pytest.  Names are compared,
not objects: what shares its name with something used is not found.

Exit status: 0 nothing found, 1 names found.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

PRODUCTS = ("resiliency", "supervisor", "simulator")
#: What may use them beside the products themselves.
USERS = ("benchmark", "examples", "scripts")
#: Made by a compiler.
GENERATED = ("supervisor/protocol/fleet_pb2.py",)

#: Made for tests, which are their users.
FOR_TESTS = (
    "resiliency/testing/",
    "supervisor/testing/",
    "supervisor/simulation/",
    "supervisor/watchdogs/testing.py",
)
#: Bases whose methods are ours alone: nobody calls them by itself.
PLAIN_BASES = frozenset(
    {"Protocol", "Generic", "ABC", "NamedTuple", "TypedDict", "Enum", "IntEnum", "Exception"}
)

#: What is there for a reason that this script does not see.
ALLOWED = {
    "MemoryLoggingCallback": "users of NeMo's recipes import it under this name",
    "TPSLoggingCallback": "users of NeMo's recipes import it under this name",
    "awaited": "shows the state of a pure value to the tests that compare it",
    "elapsed_time": "Megatron calls it on what takes the place of a CUDA event",
    "get_train_dataloader": "of a mixin: the trainer of transformers calls it",
    "pytest_configure": "pytest calls it",
    "set_timeout": "torch calls it on any of its stores",
    "reset_local": "for training loops of users; the module shows it",
}

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
    trees = {path: ast.parse(path.read_text(), str(path)) for path in _sources(root)}
    uses: Counter[str] = Counter()
    for tree in trees.values():
        uses.update(_names(tree))
    in_tests = Counter(
        name for path in root.glob("tests/**/*.py") for name in _names(ast.parse(path.read_text()))
    )
    called_back = _called_back(trees.values())
    text = "\n".join(path.read_text() for path in (*root.glob("docs/**/*.md"), root / "README.md"))
    code = re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)  # an English word in a text excuses nothing
    documented = set(re.findall(r"\w+", "\n".join(code)))
    found = [
        f"{path.relative_to(root)}:{definition.lineno}: {name}"
        for path, tree in trees.items()
        if path.relative_to(root).parts[0] in PRODUCTS
        for name, definition in _definitions(tree, called_back)
        if not _is_used(definition, uses) and definition.name not in documented | ALLOWED.keys()
        if not (str(path.relative_to(root)).startswith(FOR_TESTS) and definition.name in in_tests)
    ]
    # A reason for nothing is out of date.
    unknown = ALLOWED.keys() - {
        definition.name for tree in trees.values() for _, definition in _definitions(tree)
    }
    found += [f"scripts/unused.py: {name} is allowed and not there" for name in sorted(unknown)]
    print("\n".join([*found, f"{len(found)} names that nothing but tests uses"]))
    return 1 if found else 0


def _sources(root: Path) -> list[Path]:
    paths = [path for top in (*PRODUCTS, *USERS) for path in sorted((root / top).rglob("*.py"))]
    paths += sorted(root.glob("*.py"))
    return [path for path in paths if str(path.relative_to(root)) not in GENERATED]


def _called_back(trees: Iterable[ast.Module]) -> set[str]:
    """Classes that extend one of a library, at any remove."""
    bases: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found = {re.sub(r"\[.*", "", ast.unparse(base)).rpartition(".")[2] for base in node.bases}
                bases.setdefault(node.name, set()).update(found)
    foreign: set[str] = set()
    while True:
        more = {
            name
            for name, of in bases.items()
            if any(base in foreign or base not in bases.keys() | PLAIN_BASES for base in of)
        }
        if more <= foreign:
            return foreign
        foreign |= more


def _definitions(tree: ast.Module, called_back: Collection[str] = ()) -> Iterator[tuple[str, _Definition]]:
    """Those that somebody here must use."""
    for node in tree.body:
        if not isinstance(node, _Definition) or "pytest.fixture" in map(_called, node.decorator_list):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef) and node.name not in called_back:
            for member in node.body:
                is_method = isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
                if is_method and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


def _called(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _is_used(definition: _Definition, uses: Counter[str]) -> bool:
    """More often than the definition names itself, as a recursion or a constructor of its class does."""
    return uses[definition.name] > Counter(_names(definition))[definition.name]


def _names(tree: ast.AST) -> Iterator[str]:
    """What a program names to use it; words of strings too, for `__all__`, annotations and `getattr`."""
    docstrings = {id(text) for node in ast.walk(tree) if (text := _docstring(node)) is not None}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from re.findall(r"\w+", node.value)


def _docstring(node: ast.AST) -> ast.Constant | None:
    if not isinstance(node, ast.Module | _Definition) or not node.body:
        return None
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return first.value
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
