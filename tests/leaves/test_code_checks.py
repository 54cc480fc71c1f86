# SPDX-License-Identifier: Apache-2.0
"""The scripts that look at the code itself find what they are for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tools

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(script: str, *argv: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, SCRIPTS / script, *argv], capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_what_only_tests_use_is_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        "resiliency/a.py",
        "import library\n"
        "def used(): pass\n"
        "def told_of(): pass\n"
        "def alone(): alone()\n"
        "class Ours:\n    def meant(self): return used()\n    def spare(self): pass\n"
        "class Theirs(library.Base):\n    def on_call(self): Ours().meant()\n"
        "class More(Theirs):\n    def on_another(self): pass\n"
        "__all__ = ['More']\n",
    )
    write(tmp_path, "tests/test_a.py", "from resiliency.a import alone, Ours\nalone()\nOurs().spare()\n")
    write(tmp_path, "README.md", "Call `told_of()`.")
    status, lines = run("unused.py", str(tmp_path))
    assert status == 1
    named = [line.partition(": ")[2] for line in lines if line.startswith("resiliency")]
    assert named == ["alone", "Ours.spare"]


def test_class_names_that_are_there_twice_and_full_folders_are_found(tmp_path: Path) -> None:
    write(tmp_path, "resiliency/a.py", "class _One: pass\nclass Two: pass\n")
    write(tmp_path, "resiliency/b/c.py", "def f():\n    class _One: pass\n")
    for number in range(17):
        write(tmp_path, f"supervisor/m{number}.py", "")
    write(tmp_path, "supervisor/__init__.py", "")
    status, lines = run("structure.py", "--classes", "--folders", "--root", str(tmp_path))
    assert status == 1
    assert lines[:2] == ["_One: resiliency/a.py:1, resiliency/b/c.py:2", "supervisor: 17 modules, 16 at most"]


def test_each_count_that_rises_turns_the_script_red_and_names_its_cases(tmp_path: Path) -> None:
    write(tmp_path, "launcher.py", "")
    write(tmp_path, "tests/test_a.py", "#\n" * 50)
    write(tmp_path, "resiliency/a/b.py", "from resiliency import c\n" + "#\n" * 500)
    write(tmp_path, "resiliency/c.py", "def late():\n    from resiliency.a.b import x\n" + "    x()\n" * 60)
    write(
        tmp_path,
        "supervisor/s.py",
        "socket.create_server(('', 0))\nos.kill(1, 9)\npath.unlink()\njson.loads('')\n",
    )
    write(tmp_path, "supervisor/d.py", '"""Where it is."""\nLocalStorage(p)\nlog.warning("nobody knows")\n')
    limits = {
        "rooms in circles": 2,
        "modules above 500 lines": 1,
        "functions above 60 lines": 1,
        "LocalStorage( written out": 1,
        "docstrings that begin with a question word": 1,
        "logs without an object first": 1,
        "modules that open sockets": 1,
        "modules that end processes": 1,
        "modules that delete files": 1,
        "modules that parse foreign JSON": 1,
        "lines of tests per 100 lines of source": 9,
    }
    write(tmp_path, "scripts/counts.txt", "".join(f"{name} = {most}\n" for name, most in limits.items()))
    counts = ("structure.py", "--counts", "--root", str(tmp_path))
    assert run(*counts) == (0, ["0 rules of structure broken"])
    for name, most in limits.items():
        lower = "".join(f"{n} = {m - (n == name)}\n" for n, m in limits.items())
        write(tmp_path, "scripts/counts.txt", lower)
        status, lines = run(*counts)
        assert status == 1
        assert lines[0] == f"{name}: {most}, at most {most - 1}"
        assert len(lines) == 2 + (most if most < 5 else 0), "each case is named"


def test_counts_that_fell_are_written_and_a_limit_that_rises_again_needs_a_reason(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path)]
    write(tmp_path, "tests/test_a.py", "#\n")
    write(tmp_path, "supervisor/s.py", "os.kill(1, 9)\n" + "#\n" * 49)
    shutil.copy(SCRIPTS / "counts.txt", tmp_path / "a")
    write(tmp_path, "scripts/counts.txt", (tmp_path / "a").read_text())
    counts = ("structure.py", "--counts", "--subjects", "--root", str(tmp_path))
    status, lines = run(*counts, "--lower")
    assert status == 0
    assert any(line.startswith("modules that end processes: 1, was ") for line in lines)
    limits = (tmp_path / "scripts/counts.txt").read_text()
    assert "\nmodules that end processes = 1\n" in limits
    for command in (["init", "-q"], ["add", "scripts"], ["commit", "-qm", "Limits"]):
        subprocess.run([*git, *command], check=True)
    raised = limits.replace("modules that end processes = 1", "modules that end processes = 2")
    write(tmp_path, "scripts/counts.txt", raised)
    assert run(*counts)[0] == 1
    write(
        tmp_path,
        "scripts/counts.txt",
        raised.replace("modules that end", "# A second way.\nmodules that end"),
    )
    assert run(*counts)[0] == 0
    for subject in ("A subject that " + "is long " * 9, "One; two", "wip"):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", subject], check=True)
    status, lines = run(*counts)
    assert [line.partition(": ")[2] for line in lines[:-1] if ": " in line][-3:] == [
        "one finished change a commit", "one finished change a commit", "86 characters, 72 at most"
    ]  # fmt: skip


def test_slow_files_of_tests_are_found(tmp_path: Path) -> None:
    case = '<testcase classname="tests.test_{0}" time="{1}"/>'
    junit = f"<testsuite>{''.join(case.format(n, n) for n in range(1, 31))}</testsuite>"
    write(tmp_path, "junit.xml", junit)
    write(tmp_path, "scripts/counts.txt", "seconds of the twenty slowest files of tests = 410\n")
    seconds = ("structure.py", "--root", str(tmp_path), "--seconds", str(tmp_path / "junit.xml"))
    assert run(*seconds)[0] == 0
    write(tmp_path, "scripts/counts.txt", "seconds of the twenty slowest files of tests = 409\n")
    status, lines = run(*seconds)
    assert status == 1
    assert "410, at most 409" in lines[1]
    assert lines[2].split() == ["30", "s", "tests.test_30"]


#: A project of five tests; one of them fails the first time only.
TESTS = """
import pathlib, pytest

def test_good(): pass

@pytest.mark.skip(reason="gpu: needs 1 CUDA devices, 0 are there")
def test_on_a_gpu(): pass

@pytest.mark.thorough("test_good is near")
def test_long(): raise AssertionError("belongs to another level")

def test_once():
    seen = pathlib.Path("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")
    print("the second time")
"""
MARKS = "[pytest]\nmarkers =\n    slow\n    nemo\n    network\n    thorough\n    gpu\n"
HEAD = "| Failure | Test |\n|---|---|\n"


def run_tests(root: Path, tests: str, rows: list[str]) -> tuple[int, str]:
    write(root, "tests/test_a.py", tests)
    write(root, "pytest.ini", MARKS)
    write(
        root, "docs/guarantees.md", HEAD + "".join(f"| {row} | `tests/test_a.py::{row}` |\n" for row in rows)
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "run_tests.py", "usual", "--root", root, "--workers=1"],
        capture_output=True, text=True, env=env | {"CI": "true", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_test_that_passes_when_it_runs_again_alone_is_flaky_and_the_run_green(tmp_path: Path) -> None:
    status, said = run_tests(tmp_path, TESTS, ["test_good"])
    assert status == 0, said
    summary = said[said.rindex("FLAKY tests/test_a.py::test_once") :]
    assert "the first time" in summary
    assert "the second time" in summary
    assert "2 passed, 0 failed, 1 skipped" in summary.splitlines()
    assert (tmp_path / "build" / "check" / "tests.xml").exists()


def test_a_run_is_red_for_what_failed_was_skipped_or_has_no_test(tmp_path: Path) -> None:
    added = (
        "@pytest.mark.skip(reason='no helm')\ndef test_chart(): pass\n"
        "@pytest.mark.parametrize('x', range(1, 5))\ndef test_bad(x): assert not x, 'wrong sum'\n"
    )
    rows = ["test_good", "test_on_a_gpu", "test_long"]
    status, said = run_tests(tmp_path, TESTS + added, rows)
    assert status == 1
    assert "FLAKY" not in said, "five failed: none of them is taken for flaky"
    for name in ("test_bad[1]", "test_bad[4]", "test_once"):
        assert f"FAILED tests/test_a.py::{name}" in said
    assert said.count("wrong sum") >= 2
    assert "UNKNOWN SKIP tests/test_a.py::test_chart: no helm" in said
    untested = [line for line in said.splitlines() if line.startswith("NO TEST PASSED")]
    assert [line.split()[-1] for line in untested] == rows[1:]
    assert "1 passed, 5 failed, 2 skipped" in said.splitlines()


def test_a_browser_or_helm_that_is_missing_is_a_skip_that_makes_ci_red(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for ask in (tools.browser, lambda: tools.kept("helm"), lambda: tools.kept("schemas")):
        with pytest.raises(pytest.skip.Exception) as skipped:
            ask()
        assert "apt-get install" in skipped.value.msg or "scripts/setup --tests" in skipped.value.msg


GLOSSARY = """
## Retired words

| Retired | Use | Where |
|---|---|---|
| `hurry` | `lift_bandwidth_cap` | `resiliency supervisor` |
| `beat` | heartbeat | `resiliency supervisor` |
| `Need` | `ShardRequest` | `resiliency` |
| `generation` | local checkpoint | `resiliency/checkpoint` |
"""


def test_retired_words_are_found_in_each_form_of_a_name_where_their_row_holds(tmp_path: Path) -> None:
    write(tmp_path, "docs/glossary.md", GLOSSARY)
    write(tmp_path, "resiliency/a.py", "HURRY_S = 1\nclass HurryUp: pass\nhurries = hurrying = 'hurry'\n")
    write(tmp_path, "resiliency/hurry/__init__.py", "")
    write(tmp_path, "resiliency/need.py", "need = 1\nclass _Need: pass\nNeedy = need  # Need\nNEED = 1\n")
    write(tmp_path, "resiliency/checkpoint/b.py", "generations = []\n")
    write(tmp_path, "supervisor/last_beat.py", "generation = 1\n_BEATS = 2\n")
    write(tmp_path, "supervisor/protocol/fleet_pb2.py", "hurry = 1\n")
    status, lines = run("words.py", str(tmp_path))
    assert status == 1
    assert lines == [
        "resiliency/a.py:1: HURRY_S has the retired word 'hurry'; use `lift_bandwidth_cap`",
        "resiliency/a.py:2: HurryUp has the retired word 'hurry'; use `lift_bandwidth_cap`",
        "resiliency/a.py:3: hurrying has the retired word 'hurry'; use `lift_bandwidth_cap`",
        "resiliency/checkpoint/b.py:1: generations has the retired word 'generation'; use local checkpoint",
        "resiliency/hurry/__init__.py:1: hurry has the retired word 'hurry'; use `lift_bandwidth_cap`",
        "resiliency/need.py:1: need has the retired word 'Need'; use `ShardRequest`",
        "resiliency/need.py:2: _Need has the retired word 'Need'; use `ShardRequest`",
        "resiliency/need.py:4: NEED has the retired word 'Need'; use `ShardRequest`",
        "supervisor/last_beat.py:1: last_beat has the retired word 'beat'; use heartbeat",
        "supervisor/last_beat.py:2: _BEATS has the retired word 'beat'; use heartbeat",
    ]


def test_texts_that_name_what_is_gone_are_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        "resiliency/a.py",
        '"""`json.loads`, `a`, `Kept.limit`, `key` and `None` are there.\n\n'
        '`Gone` and `json` are not: `gone()`."""\n'
        "class Kept:\n"
        '    """Keeps.\n\n    Args:\n        limit: is there.\n'
        '        used, patience: not of this class.\n    """\n'
        "    def __init__(self, limit: int, used: int) -> None:\n"
        "        raise ValueError('raise `limit`, or `patience`', {'key': 1})\n"
        "def other(patience: int) -> None: ...\n"
        "class More(Kept):\n"
        '    """More.\n\n    Args:\n        limit: of its base.\n        lost: of nothing.\n    """\n',
    )
    status, lines = run("docstrings.py", str(tmp_path))
    assert status == 1
    assert lines == [
        "resiliency/a.py:3: `Gone` is no name of the project",
        "resiliency/a.py:3: `json` is no name of the project",
        "resiliency/a.py:3: `gone` is no name of the project",
        "resiliency/a.py:9: patience is not in the class Kept",
        "resiliency/a.py:19: lost is not in the class More",
        "5 names in texts that are gone",
    ]


def test_a_docstring_may_not_name_what_only_folders_beside_the_products_have(tmp_path: Path) -> None:
    write(tmp_path, "benchmark/flags.py", "high_scale = 'a_key'\ndef add_flags(): pass\n")
    write(tmp_path, "tests/test_a.py", "def only_here(): pass\n")
    write(
        tmp_path,
        "resiliency/a.py",
        '"""`high_scale`, `add_flags`, `a_key` and `only_here` are of no product.\n\n'
        "`benchmark.flags.add_flags`, `benchmark.flags` and ``high_scale`` are meant so.\n"
        '`benchmark.flags.only_here` and `tests.gone` are nowhere."""\n',
    )
    status, lines = run("docstrings.py", str(tmp_path))
    assert status == 1
    assert [line.partition(": ")[2].split("`")[1] for line in lines[:-1]] == [
        "high_scale", "add_flags", "a_key", "only_here", "benchmark.flags.only_here", "tests.gone"
    ]  # fmt: skip


def test_a_word_of_a_sentence_another_module_or_another_class_makes_no_name_known(tmp_path: Path) -> None:
    write(tmp_path, "resiliency/b.py", "class Kept:\n    async def stay(self): return 'no way', 'a_key'\n")
    write(tmp_path, "resiliency/c.py", "class Other(Kept): pass\ndef gone(): pass\n")
    write(
        tmp_path,
        "resiliency/a.py",
        '"""`a_key`, `Kept.stay`, `Other.gone`, `resiliency.b.Kept.stay` and `resiliency.c` are there.\n\n'
        '`way`, `Kept.gone` and `resiliency.b.gone` are not."""\n',
    )
    status, lines = run("docstrings.py", str(tmp_path))
    assert status == 1
    assert [line.partition(": ")[2].split("`")[1] for line in lines[:-1]] == [
        "way", "Kept.gone", "resiliency.b.gone"
    ]  # fmt: skip
