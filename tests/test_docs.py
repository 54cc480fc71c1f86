# SPDX-License-Identifier: Apache-2.0
"""Pages that point at something point at something that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
AS_PAGE = {"ids": lambda page: str(page.relative_to(ROOT))}


@pytest.mark.parametrize("page", PAGES, **AS_PAGE)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, **AS_PAGE)
def test_every_python_example_is_valid_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        ast.parse(block)


def test_every_guarantee_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`(tests/[^`]+)`", text)
    assert len(named) > 50
    assert [name for name in named if not re.fullmatch(r"tests/[\w/]+\.py::test_\w+", name)] == []
    assert re.findall(r"`test_[^`]+`", text) == []  # a name without its place would go unchecked
    tests: dict[str, set[str]] = {}
    for path, _, test in (name.partition("::") for name in named):
        if path not in tests:
            nodes = ast.parse((ROOT / path).read_text()).body if (ROOT / path).is_file() else []
            tests[path] = {
                node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        assert test in tests[path], f"{path} has no {test}"


def test_every_row_of_the_guarantees_names_its_tests() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / "guarantees.md").read_text(), re.MULTILINE)
    rows = [
        row for table in tables if table.splitlines()[0].endswith("| Test |") for row in table.splitlines()
    ]
    assert len(rows) > 40
    heads = ("| Failure |", "| Situation |", "| Section |", "|---")
    assert [row for row in rows if not row.startswith(heads) and "::test_" not in row.split(" | ")[-1]] == []


def test_every_row_of_the_guarantees_says_which_of_the_listed_assumptions_it_makes() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / "guarantees.md").read_text(), re.MULTILINE)
    [listed] = [table.splitlines() for table in tables if table.startswith("| Letter |")]
    letters = {row.split("|")[1].strip() for row in listed[2:]}
    rows = [
        row
        for table in tables
        if table.splitlines()[0].endswith("| Test |")
        for row in table.splitlines()[2:]
    ]
    assumed = [row.split(" | ")[-2].split(", ") for row in rows]
    assert [row for row, found in zip(rows, assumed, strict=True) if not {*found} <= {*letters, "-"}] == []
    assert {letter for found in assumed for letter in found} == {*letters, "-"}


def test_every_section_of_the_readme_has_its_promise_among_the_guarantees() -> None:
    sections = re.findall(r"^##+ (.+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    promised = re.findall(
        r"^\| \[(.+?)\]\(\.\./README", (ROOT / "docs" / "guarantees.md").read_text(), re.MULTILINE
    )
    without = {"Use it", "How it compares", "Learn more"}  # a heading, figures of dated notes, links
    assert [one for one in sections if one not in without] == promised


@pytest.mark.parametrize("page", PAGES, **AS_PAGE)
def test_every_import_of_ours_in_an_example_names_a_module_of_ours(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for module in re.findall(r"^\s*(?:from|import) (resiliency[\w.]*)", "\n".join(blocks), re.MULTILINE):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module


def test_every_install_line_names_extras_that_exist() -> None:
    text = "".join(page.read_text() for page in PAGES)
    extras = re.findall(r"pip install '(?:\.|resiliency)\[(\w+)\]'", text)
    assert {"checkpoint", "launch", "nemo"} <= set(extras)
    project = (ROOT / "pyproject.toml").read_text()
    assert [name for name in extras if f"\n{name} = [" not in project] == []


def _is_there(name: str) -> bool:
    """Whether a dotted name leads to a module of ours, or to something that one of them mentions."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        module = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if module.is_file():
            return all(re.search(rf"\b{part}\b", module.read_text()) for part in parts[length:])
    return False


def test_every_module_that_a_page_or_a_docstring_names_is_there() -> None:
    sources = [
        path for part in ("resiliency", "simulator", "supervisor") for path in (ROOT / part).rglob("*.py")
    ]
    pages = [page for page in PAGES if "benchmarks" not in page.parts]  # those keep the names of their day
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*pages, *sources]
        for name in re.findall(r"`((?:resiliency|simulator|supervisor)(?:\.\w+)+)`", path.read_text())
        if not _is_there(name)
    ]
    assert missing == []
