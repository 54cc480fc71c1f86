# SPDX-License-Identifier: Apache-2.0
"""A forked program sees of itself what a freshly started one sees."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from resiliency.template.client import ForkRefused, Template
from resiliency.template.server import Work
from tests.template.programs import (
    DEADLINE_S,
    environment,
    other_affinity,
    other_numa_policy,
    other_oom_score,
    ready_template,
    run,
    write_modules,
)

FACTS = Path(__file__).with_name("facts.py")


def facts(
    template: Template | None,
    words: Sequence[str],
    directory: Path,
    *,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    pass_fds: Sequence[int] = (),
) -> dict[str, Any]:
    """What ``python WORDS FILE`` writes down, forked from the template or fresh."""
    report, output = directory / "facts.json", directory / "output"
    start = subprocess.Popen if template is None else template.popen
    with output.open("wb") as file:
        process = start(
            [sys.executable, *words, str(report)],
            env=environment() if env is None else env,
            cwd=directory,
            stdin=stdin,
            stdout=file.fileno() if stdout is None else stdout,
            stderr=file.fileno(),
            pass_fds=pass_fds,
            start_new_session=True,
        )
        assert process.wait(DEADLINE_S) == 0, output.read_text()
    found: dict[str, Any] = json.loads(report.read_text(errors="surrogateescape"))
    report.unlink()
    return found


def compare(forked: dict[str, Any], fresh: dict[str, Any]) -> None:
    different = {name: (forked[name], fresh[name]) for name in fresh if forked[name] != fresh[name]}
    assert not different, "\n".join(f"{name}:\n  {a}\n  {b}" for name, (a, b) in different.items())


def words_for(kind: str, directory: Path) -> list[str]:
    if kind == "script":
        return [str(FACTS)]
    if kind == "module":
        (directory / "facts_module.py").write_bytes(FACTS.read_bytes())
        return ["-m", "facts_module"]
    if kind == "package":
        write_modules(
            directory, **{"facts_package/__init__": "", "facts_package/__main__": FACTS.read_text()}
        )
        return ["-m", "facts_package"]
    return ["-c", FACTS.read_text()]


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("kind", ["script", "module", "package", "code"])
def test_a_forked_program_cannot_tell_that_it_was_forked(
    kind: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    words = [*flags, "-W", "error::ResourceWarning", *words_for(kind, tmp_path), "--local", "ünï", "\udcff"]
    env = environment(RANK="3", EMPTY="", ODD="\udcfe", LONG="x" * 100_000)
    reading, writing = os.pipe()
    try:
        with ready_template("json", "signal", flags=flags, env=environment(OF_TEMPLATE="1")) as template:
            forked = facts(template, words, tmp_path, env=env, pass_fds=(writing,))
        fresh = facts(None, words, tmp_path, env=env, pass_fds=(writing,))
    finally:
        os.close(reading)
        os.close(writing)
    assert fresh["parent"] == os.getpid()
    compare(forked, fresh)


def test_a_template_in_the_background_passes_its_low_priority_to_no_program(tmp_path: Path) -> None:
    with ready_template(work=Work(background=True)) as template:
        forked = facts(template, [str(FACTS)], tmp_path)
        priority = os.getpriority(os.PRIO_PROCESS, template.pid)
    compare(forked, facts(None, [str(FACTS)], tmp_path))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert priority in (own, min(own + 10, 19)), "the same where it could not be taken back"


@pytest.mark.parametrize(
    ("change", "fact"),
    [(other_affinity, "affinity"), (other_oom_score, "oom_score_adj"), (other_numa_policy, "numa")],
)
def test_what_is_not_the_default_of_the_system_is_that_of_a_fresh_process(
    change: Callable[[], Callable[[], object]], fact: str, tmp_path: Path
) -> None:
    default = facts(None, [str(FACTS)], tmp_path)
    put_back = change()
    try:
        with ready_template(work=Work(background=True)) as template:
            forked = facts(template, [str(FACTS)], tmp_path)
        fresh = facts(None, [str(FACTS)], tmp_path)
    finally:
        put_back()
    assert fresh[fact] != default[fact]
    compare(forked, fresh)


@pytest.mark.parametrize("name", ["facts.py", "./facts.py", "../here/facts.py", "linked.py", "absolute"])
def test_a_script_is_found_and_named_as_its_caller_named_it(name: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "facts.py").write_bytes(FACTS.read_bytes())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "target.py").write_bytes(FACTS.read_bytes())
    (here / "linked.py").symlink_to(tmp_path / "elsewhere" / "target.py")
    words = [str(here / "facts.py") if name == "absolute" else name]
    with ready_template() as template:
        forked = facts(template, words, here)
    compare(forked, facts(None, words, here))


@pytest.mark.parametrize("program", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("template_flags", [(), ("-u",)], ids=["from-buffered", "from-unbuffered"])
def test_streams_are_those_of_a_fresh_process_on_a_terminal_too(
    program: tuple[str, ...], template_flags: tuple[str, ...], tmp_path: Path
) -> None:
    words = [*program, str(FACTS)]
    ours, terminal = pty.openpty()
    try:
        with ready_template(flags=template_flags) as template:
            forked = facts(template, words, tmp_path, stdin=terminal, stdout=terminal)
        fresh = facts(None, words, tmp_path, stdin=terminal, stdout=terminal)
    finally:
        os.close(ours)
        os.close(terminal)
    assert fresh["streams"][1]["text"][3], "standard output is no terminal"
    for name in ("streams", "original streams", "descriptors"):
        assert forked[name] == fresh[name]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 is the first with PYTHONSAFEPATH")
@pytest.mark.parametrize("kind", ["script", "module", "code"])
def test_a_safe_path_stays_safe(kind: str, tmp_path: Path) -> None:
    words = words_for(kind, tmp_path)
    root = str(Path(__file__).parents[2])
    env = environment(PYTHONSAFEPATH="1", PYTHONPATH=os.pathsep.join([root, str(tmp_path)]))
    with ready_template("json", env=env) as template:
        forked = facts(template, words, tmp_path, env=env)
    compare(forked, facts(None, words, tmp_path, env=env))


def test_what_the_locale_makes_of_an_environment_is_seen_by_forked_programs(tmp_path: Path) -> None:
    env = {name: value for name, value in environment().items() if not name.startswith(("LC_", "LANG"))}
    with ready_template(env=env) as template:
        forked = facts(template, [str(FACTS)], tmp_path, env=env)
    fresh = facts(None, [str(FACTS)], tmp_path, env=env)
    assert "LC_CTYPE" in fresh["environ"], "the interpreter sets it where nothing else is set"
    compare(forked, fresh)


def test_warning_filters_of_imports_stay_before_those_of_the_command_line(tmp_path: Path) -> None:
    write_modules(tmp_path, noisy="import warnings\nwarnings.simplefilter('ignore', ImportWarning)\n")
    code = "import noisy, warnings, sys; print([entry[:3] for entry in warnings.filters], sys.warnoptions)"
    words = ["-W", "error", "-W", "ignore::DeprecationWarning", "-c", code]
    env = environment(PYTHONPATH=str(tmp_path))
    with ready_template("noisy", env=env) as template:
        assert run(template, *words, env=env) == run(None, *words, env=env)


def test_sys_path_is_in_the_order_that_imports_gave_it(tmp_path: Path) -> None:
    write_modules(tmp_path, puts_first="import sys\nsys.path.insert(0, '/first')\nsys.path.append('/last')\n")
    env = environment(PYTHONPATH=str(tmp_path))
    words = ["-c", "import puts_first, sys; print(sys.path)"]
    with ready_template("puts_first", env=env) as template:
        assert run(template, *words, env=env) == run(None, *words, env=env)


def test_a_script_is_compiled_without_the_future_statements_of_its_starter(tmp_path: Path) -> None:
    script = tmp_path / "typed.py"
    script.write_text("def function(x: int): ...\nprint(function.__annotations__)\n")
    with ready_template() as template:
        assert run(template, str(script)).out == "{'x': <class 'int'>}\n"


def test_modules_that_keep_main_keep_that_of_the_program(tmp_path: Path) -> None:
    """As dill does."""
    write_modules(tmp_path, keeps="import __main__ as kept\n")
    env = environment(PYTHONPATH=str(tmp_path))
    code = "import keeps, sys; mine = 1; print(keeps.kept.mine, keeps.kept is sys.modules['__main__'])"
    with ready_template("keeps", env=env) as template:
        for _ in range(2):
            assert run(template, "-c", code, env=env).out == "1 True\n"


def test_a_module_that_was_imported_already_can_be_the_program(tmp_path: Path) -> None:
    tool = "import sys\nif __name__ == '__main__':\n    import pkg.user\n    print(__file__, pkg.user.tool)\n"
    write_modules(tmp_path, **{"pkg/__init__": "", "pkg/tool": tool, "pkg/user": "from pkg import tool\n"})
    env = environment(PYTHONPATH=str(tmp_path))
    words = ["-W", "error", "-m", "pkg.tool"]
    with ready_template("pkg.tool", "pkg.user", env=env) as template:
        assert run(template, *words, env=env) == run(None, *words, env=env)


def test_what_imports_print_is_not_printed_by_each_child(tmp_path: Path) -> None:
    write_modules(
        tmp_path,
        prints="import ctypes\nprint('from Python')\nctypes.CDLL(None).printf(b'from C\\n')\n",
    )
    env = environment(PYTHONPATH=str(tmp_path))
    with ready_template("prints", env=env) as template:
        assert run(template, "-c", "import prints; print('mine')", env=env).out == "mine\n"


def test_a_module_that_appears_after_the_imports_is_found(tmp_path: Path) -> None:
    write_modules(tmp_path, early="")
    env = environment(PYTHONPATH=str(tmp_path))
    with ready_template("early", env=env) as template:
        seen = tmp_path.stat()
        write_modules(tmp_path, late="here = True\n")
        os.utime(tmp_path, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # as of a file system with coarse times
        assert run(template, "-c", "import late; print(late.here)", env=env).out == "True\n"


def test_a_module_that_stops_collections_has_stopped_them(tmp_path: Path) -> None:
    write_modules(tmp_path, stops="import gc\ngc.disable()\ngc.set_threshold(5, 6, 7)\n")
    env = environment(PYTHONPATH=str(tmp_path))
    words = ["-c", "import stops, gc; print(gc.isenabled(), gc.get_threshold())"]
    with ready_template("stops", env=env) as template:
        assert run(template, *words, env=env) == run(None, *words, env=env)


@pytest.mark.slow
def test_libraries_have_as_many_threads_as_in_a_fresh_process_where_nothing_says_how_many() -> None:
    """As for the only rank of a host.  numexpr starts its threads while it is imported."""
    env = environment(NUMEXPR_NUM_THREADS="3")
    del env["OMP_NUM_THREADS"]
    code = (
        "import os, numexpr, numpy, torch, threadpoolctl\n"
        "print(numexpr.nthreads, numexpr.get_num_threads(), torch.get_num_threads())\n"
        "many = numpy.ones((500, 500))\n"
        "print((many @ many).sum(), numexpr.evaluate('many + 1').sum())\n"
        "print(torch.from_numpy(many).mm(torch.from_numpy(many)).sum())\n"
        "print([(one['internal_api'], one['num_threads']) for one in threadpoolctl.threadpool_info()])\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    with ready_template("numexpr", "torch", env=env) as template:
        assert template.left_out == {}
        forked = run(template, "-c", code, env=env)
        with pytest.raises(ForkRefused, match="numexpr read NUMEXPR_NUM_THREADS while it was imported"):
            run(template, "-c", code, env={**env, "NUMEXPR_NUM_THREADS": "2"})
    assert forked.out.startswith("3 3 "), forked.err
    assert forked.out == run(None, "-c", code, env=env).out


def test_ranks_do_not_share_random_numbers(tmp_path: Path) -> None:
    write_modules(
        tmp_path,
        draws="import torch\nkept = torch.rand(1)\n",
        keeps="import torch\nkept = torch.Generator()\nkept.seed()\n",
        seeded="import torch\nkept = torch.Generator().manual_seed(5)\nother = torch.Generator()\n",
        starts="import torch.cuda\ntorch.cuda._initialized = True\n",
    )
    env = environment(PYTHONPATH=str(tmp_path))
    code = (
        "import random, numpy, torch, multiprocessing\n"
        "key = multiprocessing.current_process().authkey.hex()\n"
        "print(random.random(), numpy.random.random(), key, torch.initial_seed(), torch.rand(1).item())\n"
        "import sys; print(*({'torch', 'draws', 'keeps', 'seeded', 'starts'} & {*sys.modules}))\n"
    )
    with ready_template("torch", "draws", "keeps", "seeded", "starts", env=env) as template:
        assert template.left_out == {
            "draws": "seeds or draws random numbers of torch",
            "keeps": "keeps a generator with a random seed in kept",
            "starts": "starts CUDA",
        }
        one, other = (run(template, "-c", code, env=env).out.splitlines() for _ in range(2))
    assert not {*one[0].split()} & {*other[0].split()}
    assert {*one[1].split()} == {"torch", "seeded"}


def test_proc_shows_the_program_where_the_kernel_knows_no_other_way_than_its_own_memory() -> None:
    """Some sandboxes: the words are right, and empty ones follow."""
    code = (
        "from resiliency.template import program\n"
        "program._PR_SET_MM_MAP = 99\n"
        "program.show_in_proc(['python', 'x.py'], {'NAME': 'value', 'LONG': 'y' * 40000})\n"
        "print(open('/proc/self/cmdline').read().rstrip(chr(0)).split(chr(0)))\n"
        "text = open('/proc/self/environ').read().rstrip(chr(0)).split(chr(0))\n"
        "print(text[0], len(text[1]) > 30000)\n"
    )
    env = environment(ROOM="-" * 32_000)
    assert run(None, "-c", code, "a long command line, to make room", env=env).out == (
        "['python', 'x.py']\nNAME=value True\n"
    )
