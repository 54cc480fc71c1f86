#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rules about names and folders that no linter knows.

    python scripts/structure.py --classes --folders --tests [--root DIRECTORY]

``--classes``: no class name twice in `resiliency`, private ones included.  ``--folders``: no folder of the
products holds more modules than a reader sees at a glance.  ``--tests``: no module of tests imports another
one; what several need is in a module beside them.  Exit status: 0 all kept, 1 a list of what is not.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from pathlib import Path

PRODUCTS = ("resiliency", "supervisor", "simulator")
MODULES = 16


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Rules about names and folders that no linter knows.")
    parser.add_argument("--classes", action="store_true", help="no class name twice in resiliency")
    parser.add_argument("--folders", action="store_true", help=f"no folder with more than {MODULES} modules")
    parser.add_argument("--tests", action="store_true", help="no module of tests imports another")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parent.parent, help="of the project"
    )
    args = parser.parse_args(argv)
    found = classes_twice(args.root) if args.classes else []
    found += full_folders(args.root) if args.folders else []
    found += tests_that_import_tests(args.root) if args.tests else []
    print("\n".join([*found, f"{len(found)} rules of structure broken"]))
    return 1 if found else 0


def classes_twice(root: Path) -> list[str]:
    """Names of classes that more than one place in `resiliency` defines, each with the places."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((root / "resiliency").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(root)}:{node.lineno}")
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def tests_that_import_tests(root: Path) -> list[str]:
    """Imports of a module ``test_*`` by another file of the tests."""
    found = []
    for path in sorted((root / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.ImportFrom):
                modules = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            found += [
                f"{path.relative_to(root)}:{node.lineno} imports {module}"
                for module in modules
                if module.startswith(("tests.", ".")) and ".test_" in module
            ]
    return found


def full_folders(root: Path) -> list[str]:
    """Packages with too many modules; their ``__init__`` does not count."""
    found = []
    for folder in sorted(path.parent for top in PRODUCTS for path in (root / top).rglob("__init__.py")):
        count = sum(path.stem != "__init__" for path in folder.glob("*.py"))
        if count > MODULES:
            found.append(f"{folder.relative_to(root)}: {count} modules, {MODULES} at most")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
