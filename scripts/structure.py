#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rules about names, folders, counts and commit subjects that no linter knows.

    python scripts/structure.py --classes --folders --tests --counts --subjects [--root DIRECTORY]
    python scripts/structure.py --counts --lower

``--classes``: no class name twice in `resiliency`, private ones included.  ``--folders``: no folder of the
products holds more modules than a reader sees at a glance.  ``--tests``: no module of tests imports another
one; what several need is in a module beside them.  ``--counts``: no count exceeds its limit in
`scripts/counts.txt`, and no limit exceeds the lowest one ever committed unless the file says why; ``--lower``
writes the counts that fell.  ``--subjects``: each commit since the first one of that file has a subject of at
most 72 characters and one change.  ``--seconds``: the twenty slowest files of a run of tests are in their
limit.  Exit status: 0 all kept, 1 a list of what is not.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PRODUCTS = ("resiliency", "supervisor", "simulator")
MODULES = 16
LIMITS = "scripts/counts.txt"
SUBJECT = 72
TESTS_PER_SOURCE = "lines of tests per 100 lines of source"
SLOWEST = "seconds of the twenty slowest files of tests"

#: Calls, bare or dotted, by which a module is known to do something.  `.name` is any method of that name.
DOES = {
    "modules that open sockets": (
        "socket.socket", "socket.create_connection", "socket.create_server", "socket.socketpair",
        "asyncio.start_server", "asyncio.start_unix_server", "asyncio.open_connection",
        "asyncio.open_unix_connection", ".create_server", ".create_connection", "urlopen", ".urlopen",
        "HTTPConnection", "HTTPServer", "ThreadingHTTPServer", "TCPStore", "dist.TCPStore",
        ".insecure_channel", ".secure_channel", "connection.Client", "connection.Listener",
    ),
    "modules that end processes": (
        "os.kill", "os.killpg", "os.abort", "os._exit", "signal.pidfd_send_signal", "signal.raise_signal",
        ".kill", ".terminate", ".send_signal",
    ),
    "modules that delete files": (
        "os.unlink", "os.remove", "os.rmdir", "os.removedirs", "shutil.rmtree", ".unlink", ".rmdir",
        ".rmtree", ".remove_tree", ".remove_file",
    ),
    "modules that parse foreign JSON": (
        "json.loads", "json.load", "pickle.loads", "pickle.load", "pickle.Unpickler", "torch.load",
        "yaml.safe_load",
    ),
}  # fmt: skip
#: Subjects of a log line.
OBJECTS = {
    "rank", "host", "agent", "trainer", "launcher", "step", "shard", "replica", "capture", "save", "commit",
    "marker", "manifest", "job", "sample", "checkpoint", "node", "daemon", "sensor", "controller", "actuator",
    "template",
}  # fmt: skip
_QUESTION = re.compile(r"(What|Who|Which|How|Where|Whether|Whose|Whoever|Whatever|When|Why)\b")
_LOUD = ("warning", "error", "critical", "exception")
Counts = dict[str, list[str]]


class Module(NamedTuple):
    path: str
    name: str
    lines: int
    nodes: list[ast.AST]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Rules about names and folders that no linter knows.")
    parser.add_argument("--classes", action="store_true", help="no class name twice in resiliency")
    parser.add_argument("--folders", action="store_true", help=f"no folder with more than {MODULES} modules")
    parser.add_argument("--tests", action="store_true", help="no module of tests imports another")
    parser.add_argument("--counts", action="store_true", help=f"no count above its limit in {LIMITS}")
    parser.add_argument("--lower", action="store_true", help="write the counts that fell as the new limits")
    parser.add_argument("--subjects", action="store_true", help=f"subjects of at most {SUBJECT} characters")
    parser.add_argument("--seconds", type=Path, metavar="JUNIT", help="the slowest files of this run")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parent.parent, help="of the project"
    )
    args = parser.parse_args(argv)
    found = classes_twice(args.root) if args.classes else []
    found += full_folders(args.root) if args.folders else []
    found += tests_that_import_tests(args.root) if args.tests else []
    found += above_limits(args.root, lower=args.lower) if args.counts else []
    found += long_subjects(args.root) if args.subjects else []
    found += slow_files(args.root, args.seconds) if args.seconds else []
    print("\n".join([*found, f"{len(found)} rules of structure broken"]))
    return 1 if found else 0


def classes_twice(root: Path) -> list[str]:
    """Names of classes that more than one place in `resiliency` defines, each with the places."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in _modules(root):
        for node in module.nodes if module.path.startswith("resiliency/") else ():
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{module.path}:{node.lineno}")
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


def above_limits(root: Path, *, lower: bool) -> list[str]:
    """Counts above their limits, each with its cases, and limits that were raised without a reason."""
    limits = _limits((root / LIMITS).read_text())
    cases_by_count = count(root)
    counted = {name: len(cases) for name, cases in cases_by_count.items()}
    counted[TESTS_PER_SOURCE] = lines_of_tests(root)
    found = [f"{name}: no limit in {LIMITS}" for name in sorted(counted.keys() - limits.keys())]
    for name, number in counted.items():
        limit = limits.get(name)
        if limit is None or number == limit.most:
            continue
        if number > limit.most:
            found.append(
                f"{name}: {number}, at most {limit.most}{_shown(root, cases_by_count.get(name, []))}"
            )
        elif lower:
            _write_limit(root / LIMITS, name, number)
            print(f"{name}: {number}, was {limit.most}; written to {LIMITS}")
        else:
            print(f"{name}: {number}, limit {limit.most}; lower it with --counts --lower")
    for name, least in _lowest(root).items():
        if name in limits and limits[name].most > least and not limits[name].why:
            found.append(f"{name}: the limit {limits[name].most} was {least} before; write why above it")
    return found


def _shown(root: Path, cases: list[str]) -> str:
    """Up to twenty cases, those in files first that differ from the main branch."""
    changed = tuple(
        _git(root, "diff", "--name-only", "main") or _git(root, "diff", "--name-only", "origin/main")
    )
    ordered = sorted(cases, key=lambda case: (not case.startswith(changed), case))
    return "".join(f"\n    {case}" for case in ordered[:20])


def count(root: Path) -> Counts:
    """The cases of each count, as text for a reader."""
    modules = _modules(root)
    named = {module.name for module in modules}
    cases: Counts = {
        "rooms in circles": list(rooms_in_circles(modules, named)),
        "modules above 500 lines": [f"{m.path}: {m.lines} lines" for m in modules if m.lines > 500],
        "functions above 60 lines": list(_each(modules, _long_functions)),
        "LocalStorage( written out": list(_each(modules, _local_storages)),
        "docstrings that begin with a question word": list(_each(modules, _questions)),
        "logs without an object first": list(_each(modules, _logs_without_object)),
    }
    beside = {"testing", "simulation", "benchmark"}
    shipped = [m for m in modules if not beside & set(m.name.split("."))]
    for name, calls in DOES.items():
        cases[name] = [m.path for m in shipped if any(_is_call(node, calls) for node in m.nodes)]
    return cases


def lines_of_tests(root: Path) -> int:
    """Lines of tests per 100 lines of the products, rounded up."""
    tests, source = (
        sum(path.read_text().count("\n") for top in tops for path in (root / top).rglob("*.py"))
        for tops in (("tests",), PRODUCTS)
    )
    return -(-100 * tests // max(1, source))


@functools.cache
def _modules(root: Path) -> tuple[Module, ...]:
    """The source of the three products and the benchmark, without what a compiler made."""
    return tuple(_read(root))


def _read(root: Path) -> Iterator[Module]:
    for top in (*PRODUCTS, "benchmark", "launcher.py"):
        for path in [root / top] if top.endswith(".py") else sorted((root / top).rglob("*.py")):
            if path.exists() and "fleet_pb2" not in path.name:
                text, where = path.read_text(), path.relative_to(root)
                parts = where.with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                yield Module(str(where), name, text.count("\n"), list(ast.walk(ast.parse(text, str(path)))))


def _each(modules: Iterable[Module], cases: Callable[[ast.AST], Iterator[tuple[int, str]]]) -> Iterator[str]:
    for module in modules:
        for node in module.nodes:
            yield from (f"{module.path}:{line} {text}" for line, text in cases(node))


def _long_functions(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > 60:
            yield node.lineno, f"{node.name}: {lines} lines"


def _local_storages(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Call) and _is_call(node, ("LocalStorage", ".LocalStorage")):
        yield node.lineno, ast.unparse(node)


def _questions(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node) or ""
        if _QUESTION.match(text):
            yield getattr(node, "lineno", 1), text.splitlines()[0]


def _logs_without_object(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOUD:
        text = node.args[0] if node.args else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            first = re.match(r"[a-z]+", text.value.lower())
            if first is None or not OBJECTS & {first[0], first[0].removesuffix("s")}:
                yield node.lineno, repr(text.value)


def _is_call(node: ast.AST, calls: tuple[str, ...]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in calls
    if not isinstance(node.func, ast.Attribute):
        return False
    owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
    return f".{node.func.attr}" in calls or f"{owner}.{node.func.attr}" in calls


def rooms_in_circles(modules: Iterable[Module], named: set[str]) -> Iterator[str]:
    """Children of one package that import each other in a circle, each with the circle."""
    uses: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module in modules:
        for target in _imports(module, named):
            here, there = module.name.split("."), target.split(".")
            shared = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), 0)
            if shared:
                uses[".".join(here[:shared])][here[shared]].add(there[shared])
    for package, rooms in sorted(uses.items()):
        reached = {room: _reached(room, rooms) for room in rooms}
        for room in sorted(rooms):
            circle = sorted(other for other in reached[room] if room in reached.get(other, ()))
            if len(circle) > 1:
                yield f"{package}.{room}: in a circle of {', '.join(circle)}"


def _imports(module: Module, named: set[str]) -> Iterator[str]:
    """Modules of the project that this one imports, those for types alone left out."""
    beside = {name.partition(".")[2] for name in named if name.startswith("benchmark.")}
    typing = {
        id(inner)
        for node in module.nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in module.nodes:
        if id(node) in typing:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            continue
        for target in targets:
            if module.name.startswith("benchmark.") and target.partition(".")[0] in beside:
                target = f"benchmark.{target}"
            while target and target not in named:
                target = target.rpartition(".")[0]
            if target and target != module.name:
                yield target


def _reached(room: str, rooms: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [room]
    while ahead:
        for target in rooms.get(ahead.pop(), ()):
            if target not in found:
                found.add(target)
                ahead.append(target)
    return found


class Limit(NamedTuple):
    most: int
    #: Why the limit is higher than it once was: the comment right above it, empty where there is none.
    why: str


def _limits(text: str) -> dict[str, Limit]:
    limits: dict[str, Limit] = {}
    why = ""
    for line in text.splitlines():
        name, equals, number = line.partition("=")
        if line.startswith("#"):
            why = line.strip("# ")
        elif equals and number.strip().isdigit():
            limits[name.strip()] = Limit(int(number), why)
            why = ""
        else:
            why = ""
    return limits


def _write_limit(path: Path, name: str, number: int) -> None:
    pattern = rf"^(?:#.*\n)?{re.escape(name)} = \d+$"  # a reason for raising it ends here
    path.write_text(re.sub(pattern, f"{name} = {number}", path.read_text(), flags=re.MULTILINE))


def _lowest(root: Path) -> dict[str, int]:
    """The lowest limit of each name in any commit that this clone has; empty without git."""
    lowest: dict[str, int] = {}
    for commit in _git(root, "log", "--format=%H", "--", LIMITS):
        for name, limit in _limits("\n".join(_git(root, "show", f"{commit}:{LIMITS}"))).items():
            lowest[name] = min(limit.most, lowest.get(name, limit.most))
    return lowest


def long_subjects(root: Path) -> list[str]:
    """Subjects, since the limits are there, that are too long or join changes with a semicolon."""
    first = _git(root, "log", "--diff-filter=A", "--format=%H", "--", LIMITS)
    found = []
    for line in _git(root, "log", "--no-merges", "--format=%h %s", f"{first[-1]}..HEAD") if first else ():
        subject = line.partition(" ")[2]
        if len(subject) > SUBJECT:
            found.append(f"{line}: {len(subject)} characters, {SUBJECT} at most")
        if ";" in subject or re.match(r"(wip|fixup!|squash!)", subject, re.IGNORECASE):
            found.append(f"{line}: one finished change a commit")
    return found


def _git(root: Path, *argv: str) -> list[str]:
    done = subprocess.run(["git", "-C", root, *argv], capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def slow_files(root: Path, junit: Path) -> list[str]:
    """Whether the twenty slowest files of tests together took longer than their limit."""
    limit = _limits((root / LIMITS).read_text())[SLOWEST]
    seconds: dict[str, float] = defaultdict(float)
    for case in ET.parse(junit).iter("testcase"):  # noqa: S314 - our own file
        seconds[case.get("classname") or ""] += float(case.get("time") or 0)
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:20]
    total = round(sum(took for _, took in slowest))
    print(f"the twenty slowest files of tests took {total} s, at most {limit.most} s")
    if total <= limit.most:
        return []
    files = "".join(f"\n    {took:5.0f} s {name}" for name, took in slowest)
    return [f"{SLOWEST}: {total}, at most {limit.most}{files}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
