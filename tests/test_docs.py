# SPDX-License-Identifier: Apache-2.0
"""Pages that point at something point at something that exists."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.orchestrators.job_file import read_job_file
from supervisor.view.operators import COMMANDS, build_parser

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


def _typed(page: Path) -> Iterator[list[str]]:
    """Words of each Python program that the page has a reader start, from its name on."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="&|<>;()")
            lexer.whitespace_split = True
            words = list(lexer)
            while "python3" in words:
                words = words[words.index("python3") + 1 :]
                end = next((n for n, word in enumerate(words) if set(word) <= set("&|<>;()")), len(words))
                yield words[:end]


def _unknown(words: list[str]) -> list[str]:
    """Flags that the program of `words` does not have; the program itself where it is none of ours."""
    if words[:2] == ["-m", "supervisor"] and words[2] in COMMANDS:
        build_parser({}).parse_args(words[2:])  # raises
        return []
    length = 2 if words[0] == "-m" else 1
    name, words = " ".join(words[:length]), words[length:]
    source = ROOT / (name.removeprefix("-m ").replace(".", "/") + ".py" if length == 2 else name)
    if (source.with_suffix("") / "__main__.py").is_file():
        source = source.with_suffix("") / "__main__.py"
    if name == "-m supervisor":
        name += " --all-in-one"
    if words and f"python3 {name} {words[0]}" in _help():  # a command of its own, with its own flags
        name, words = f"{name} {words[0]}", words[1:]
    text = _help().get(f"python3 {name}") or (source.read_text() if source.is_file() else "")
    wrapped: list[str] = []
    if name in (
        "launcher.py",
        "examples/ray/train_on_ray.py",
    ):  # what stands behind the script is the script's
        first = next(n for n, word in enumerate(words) if word.endswith(".py"))
        script = re.sub(r"^(\$PWD|/opt/resiliency)/", "", words[first])
        words, wrapped = words[:first], [script, *words[first + 1 :]]
    known = {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[\w-]+", text)}
    flags = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    unknown = [f"{name} {flag}" for flag in flags if flag.replace("_", "-") not in known]
    if wrapped and wrapped[0] != "train.py":
        unknown += _unknown(wrapped)
    return unknown if text else [name]


def _help() -> dict[str, str]:
    """By what a user types, the help of each program; scripts/cli_docs.py --check keeps it true."""
    pages = [page.read_text() for page in (ROOT / "docs" / "cli").glob("*.md")]
    return {page.partition("`")[2].partition("`")[0]: page for page in pages}


@pytest.mark.parametrize("page", PAGES, **AS_PAGE)
def test_every_program_that_a_page_starts_is_there_and_has_its_flags(page: Path) -> None:
    assert [one for words in _typed(page) for one in _unknown(words)] == []


def test_every_launcher_that_a_page_starts_has_restarts() -> None:
    """Without any, the first loss ends the job, and the supervisor can only start all of it again."""
    started = [words for page in PAGES for words in _typed(page) if words[0] == "launcher.py"]
    assert len(started) > 5
    budgets = [re.search(r"--max-restarts[ =][1-9]", " ".join(words)) for words in started]
    assert [" ".join(words) for words, budget in zip(started, budgets, strict=True) if not budget] == []


def test_every_job_file_that_is_shown_can_be_used_and_has_restarts_of_both_kinds(tmp_path: Path) -> None:
    texts = [(ROOT / "examples" / "local" / "job.json").read_text()]
    for page in PAGES:
        blocks = re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)
        texts += [block for block in blocks if '"jobs"' in block]
    assert len(texts) > 1
    for text in texts:
        (tmp_path / "job.json").write_text(text)
        for job in read_job_file(tmp_path / "job.json").jobs:
            budgets = {"--max-restarts", "--max-workload-restarts"}
            assert budgets <= {word.partition("=")[0] for word in job.command}
