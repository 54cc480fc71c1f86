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
    tests = set(re.findall(r"`(tests/[^`]+)`", text))
    assert tests
    assert [name for name in sorted(tests) if not (ROOT / name).exists()] == []
    assert re.findall(r"`test_[^`]+`", text) == []  # a name without its place would go unchecked


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
