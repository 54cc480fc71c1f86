# SPDX-License-Identifier: Apache-2.0
"""What a template imports, what it leaves out because it cannot be forked, and code that changes."""

from __future__ import annotations

import getpass
import os
import re
import sys
from pathlib import Path

import pytest

from resiliency.template import entry, server
from resiliency.template.client import ForkRefused
from resiliency.template.record import Entry
from resiliency.template.server import Work
from tests.template.programs import DEADLINE, environment, ready_template, run, write_modules
from tests.waiting import wait_until

HELD = "import sys; print(*(name for name in sys.argv[1:] if name in sys.modules))"
UNSAFE = {
    "starts a thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        r"starts a thread \(python",
    ),
    "opens a socket": ("import socket\nkept = socket.socket()", r"opens socket:\["),
    "keeps a file open": ("kept = open(__file__)", r"opens .*unsafe\.py"),
    "keeps a pipe open": ("import os\nkept = os.pipe()", r"opens pipe:\["),
    "starts a process": (
        "import os, subprocess\nkept = subprocess.Popen(['sleep', '1000'])\n"
        "open(os.environ['SLEEPERS'], 'a').write(f'{kept.pid}\\n')",
        "starts a process",
    ),
    "makes a lock of multiprocessing": (
        "import multiprocessing\nkept = multiprocessing.Lock()",
        r"shares memory \(/dev/shm/sem\.",
    ),
    "maps memory": ("import mmap\nkept = mmap.mmap(-1, 1 << 20)", r"shares memory \(/dev/zero"),
    "leaves multiprocessing something to do": (
        "from multiprocessing.util import Finalize\nkept = Finalize(None, print, exitpriority=1)",
        "leaves multiprocessing something to clear up",
    ),
    "starts CUDA": ("import torch.cuda\nkept = torch.cuda.init()", "starts CUDA"),
    "indexes RANK": ("import os\nkept = os.environ['RANK']", "reads RANK"),
    "gets LOCAL_RANK": ("import os\nkept = os.environ.get('LOCAL_RANK')", "reads LOCAL_RANK"),
    "calls getenv": ("import os\nkept = os.getenv('LOCAL_RANK', '0')", "reads LOCAL_RANK"),
    "asks whether there is a RANK": ("import os\nkept = 'RANK' in os.environ", "reads RANK"),
    "reads RANK in a function": (
        "import os\ndef f(): return os.environ.get('RANK')\nkept = f()",
        "reads RANK",
    ),
    "sets a default for RANK": ("import os\nos.environ.setdefault('RANK', '0')", "reads RANK"),
    "copies all variables": ("import os\nkept = dict(os.environ)", "reads all variables"),
    "seeds random numbers": ("import random\nrandom.seed(1)", "seeds or draws random numbers of random"),
    "seeds numpy": ("import numpy\nnumpy.random.seed(1)", "seeds or draws random numbers of numpy"),
}

#: torch, as far as it matters here, where there is no GPU.
CUDA = {
    "torch/__init__": "",
    "torch/cuda": "started = []\ndef init():\n    started.append(1)\n"
    "def is_initialized():\n    return bool(started)\n",
}


@pytest.mark.parametrize("harm", UNSAFE)
def test_an_unsafe_module_is_left_out_with_its_importers_and_nothing_else(harm: str, tmp_path: Path) -> None:
    source, reason = UNSAFE[harm]
    sleepers = tmp_path / "sleepers"
    write_modules(
        tmp_path,
        unsafe=source,
        importer="from unsafe import kept" if "kept" in source else "import unsafe",
        importer_of_importer="def load():\n    import importer\nload()\n",
        catches="try:\n    import unsafe\nexcept BaseException:\n    pass\n",
        sibling="import decimal\n",
        **(CUDA if "torch" in source else {}),
    )
    env = environment(PYTHONPATH=str(tmp_path), RANK="0", LOCAL_RANK="0", SLEEPERS=str(sleepers))
    names = ["sibling", "importer_of_importer", "catches", "unsafe", "importer", "decimal"]
    work = Work(preload=("sibling", "importer_of_importer", "catches"), volatile=("RANK", "LOCAL_RANK"))
    with ready_template(work=work, env=env) as template:
        assert list(template.left_out) == ["unsafe"]

        assert re.match(reason, template.left_out["unsafe"]), template.left_out
        assert template.left_out_importers == 3
        assert template.unsafe == ""
        ended = run(template, "-c", HELD, *names, env={**env, "RANK": "1", "LOCAL_RANK": "1"})
        assert ended.out == "sibling decimal\n", ended.err
    if sleepers.exists():
        assert not [pid for pid in sleepers.read_text().split() if Path("/proc", pid).exists()]


@pytest.mark.parametrize(
    "harmless",
    [
        "import os\nwith open(__file__) as file:\n    file.read()",
        "import subprocess\nsubprocess.run(['true'], check=True)",
        "import threading\nthread = threading.Thread(target=print)\nthread.start()\nthread.join()",
        "import os\nnull = open(os.devnull)",
        "import os\ndef later():\n    return os.environ['RANK']",
        "import os\nkept = os.environ.get('HOME')",
        # As the caches of locale and gconv: to be read only, and shared.
        "import ctypes, mmap\nwith open(__file__) as file: assert ctypes.CDLL(None, use_errno=True).mmap("
        "None, 1, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0) != -1",
        "import multiprocessing\nmultiprocessing.Lock()",
        "import socket\nsocket.socket().close()",
    ],
)
def test_what_an_import_leaves_in_order_is_harmless(harmless: str, tmp_path: Path) -> None:
    write_modules(tmp_path, harmless=harmless)
    env = environment(PYTHONPATH=str(tmp_path))
    with ready_template(work=Work(preload=("harmless",), volatile=("RANK",)), env=env) as template:
        assert template.left_out == {}
        assert run(template, "-c", HELD, "harmless", env=env).out == "harmless\n"


def test_a_program_with_another_value_of_a_variable_that_was_read_is_refused(tmp_path: Path) -> None:
    write_modules(tmp_path, reads="import os\nhome = os.environ.get('HOME')\n")
    env = environment(PYTHONPATH=str(tmp_path))
    with ready_template("reads", env=env) as template:
        with pytest.raises(ForkRefused, match="reads read HOME while it was imported"):
            run(template, "-c", "", env={**env, "HOME": "/elsewhere"})
        assert run(template, "-c", "import reads; print(reads.home)", env=env).out == env["HOME"] + "\n"


def test_every_module_that_asks_for_the_directory_of_temporary_files_is_seen(tmp_path: Path) -> None:
    """Also where another one asked before, which can be set right."""
    asks = "import tempfile\nkept = tempfile.gettempdir()\n"
    write_modules(tmp_path, asks=asks)
    (tmp_path / "other").mkdir()
    env = environment(PYTHONPATH=str(tmp_path), TMPDIR=str(tmp_path))
    other = {**env, "TMPDIR": str(tmp_path / "other")}
    code = "import dill.session, tempfile; print(dill.session.TEMPDIR, tempfile.gettempdir())"
    with ready_template("dill.session", env=env) as template:
        for program in (env, other):
            assert run(template, "-c", code, env=program).out == "{0} {0}\n".format(program["TMPDIR"])
    with (
        ready_template("dill.session", "asks", env=env) as template,
        pytest.raises(ForkRefused, match="asks read TMPDIR while it was imported"),
    ):
        run(template, "-c", code, env=other)


def test_the_linear_solver_of_nemos_stack_keeps_its_files_where_the_program_wants_them(
    tmp_path: Path,
) -> None:
    env = environment(TMPDIR=str(tmp_path))
    other = {**env, "TMPDIR": str(tmp_path / "other")}
    (tmp_path / "other").mkdir()
    code = "import pulp; print(pulp.LpSolverDefault.tmpDir)"
    with ready_template("pulp", env=env) as template:
        for program in (env, other):
            assert run(template, "-c", code, env=program).out == "{}\n".format(program["TMPDIR"])


@pytest.mark.thorough("tests/nemo/test_template.py forks NeMo")
def test_a_template_of_nemos_stack_forks_where_no_directory_of_compiled_code_is_named(
    tmp_path: Path,
) -> None:
    """The first import names it, for itself, and others read it then, as Megatron's fused kernels do."""
    write_modules(tmp_path, kernels="import os\nkept = os.environ.get('TORCHINDUCTOR_CACHE_DIR')\n")
    env = environment(PYTHONPATH=str(tmp_path), TMPDIR=str(tmp_path))
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    code = (
        "import os, kernels; from torch._inductor.compiler_bisector import CompilerBisector as c\n"
        "print(c.bisection_enabled, kernels.kept == os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    )
    names = ("torch._inductor.codecache", "torch._inductor.compiler_bisector", "kernels")
    with ready_template(*names, env=env) as template:
        for program in (
            env,
            {**env, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"torchinductor_{getpass.getuser()}")},
        ):
            assert run(template, "-c", code, env=program).out == "False True\n"
        for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
            with pytest.raises(ForkRefused, match=f"kernels read {name} while it was imported"):
                run(template, "-c", code, env={**env, name: "/elsewhere"})


@pytest.mark.slow
def test_compiled_code_goes_where_a_fresh_program_would_keep_it(tmp_path: Path) -> None:
    """The import of torch's compiler names the directory in the environment, for good."""
    env = environment(TMPDIR=str(tmp_path))
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    (tmp_path / "other").mkdir()
    other = {**env, "TMPDIR": str(tmp_path / "other")}
    own = {**env, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "own")}
    code = (
        "import os, torch._dynamo.package as p, torch._inductor.codecache as c, tempfile as t;"
        "cache = os.getenv('TORCHINDUCTOR_CACHE_DIR');"
        "print(p.DynamoCache.path_prefix(), cache, c._HEADER_LOCK_DIR, t.tempdir)"
    )
    with ready_template("torch._inductor.codecache", env=env) as template:
        found = [run(template, "-c", code, env=program).out.split() for program in (env, other, own)]
    name = f"torchinductor_{getpass.getuser()}"
    caches = [str(tmp_path / name), str(tmp_path / "other" / name), str(tmp_path / "own")]
    headers = [caches[0], caches[1], caches[0]]  # those of all programs of a user are together
    assert found == [
        [f"{cache}/dynamo", cache, f"{header}/precompiled_headers/locks", "None"]
        for cache, header in zip(caches, headers, strict=True)
    ]


def test_the_directories_of_wandb_are_the_programs_own_and_none_is_left(tmp_path: Path) -> None:
    env = environment(TMPDIR=str(tmp_path))
    code = (
        "import os, wandb.sdk.artifacts.artifact as artifact, wandb.sdk.data_types._private as data\n"
        "print(os.listdir(os.environ['TMPDIR']))\n"
        "print(*sorted([data.MEDIA_TMP.name, artifact.Artifact._TMP_DIR.name]))\n"
        "print(*sorted(entry.path for entry in os.scandir(os.environ['TMPDIR'])))\n"
    )
    with ready_template("wandb.sdk.artifacts.artifact", env=env) as template:
        assert os.listdir(tmp_path) == []
        seen = set()
        for _ in range(2):
            before, named, found = run(template, "-c", code, env=env).out.splitlines()
            # Else those of a program that is killed would stay, also where it has no use for them.
            assert before == "[]"
            assert named == found
            seen |= set(found.split())
        assert os.listdir(tmp_path) == []
    assert len(seen) == 4


def test_signal_handlers_and_variables_that_an_import_sets_are_there_as_in_a_fresh_process(
    tmp_path: Path,
) -> None:
    write_modules(
        tmp_path,
        sets="import os, signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGUSR2, lambda *_: print('handled'))\n"
        "os.environ['SET'] = 'by import'\nos.environ.pop('REMOVED', None)\n",
    )
    env = environment(PYTHONPATH=str(tmp_path), REMOVED="1", SET="by the caller")
    code = (
        "import ctypes, os, signal, sets\nos.kill(os.getpid(), signal.SIGUSR2)\n"
        "print(signal.getsignal(signal.SIGUSR1), os.environ['SET'], 'REMOVED' in os.environ)\n"
        "os.system('echo $SET $REMOVED')\n"
    )
    with ready_template("sets", env=env) as template:
        assert run(template, "-c", code, env=env) == run(None, "-c", code, env=env)


def test_what_an_unsafe_import_changed_is_put_back_when_it_is_left_out(tmp_path: Path) -> None:
    write_modules(
        tmp_path,
        unsafe="import os, signal, socket\nkept = socket.socket()\nos.chdir('/')\nos.umask(0o123)\n"
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nos.set_inheritable(kept.fileno(), True)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\nos.environ['LEFT'] = 'over'\n",
    )
    env = environment(PYTHONPATH=str(tmp_path))
    code = (
        "import os, signal\nprint(os.getcwd(), oct(os.umask(0)), signal.getsignal(signal.SIGUSR1))\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, []), os.environ.get('LEFT'))\n"
        "print(len(os.listdir('/proc/self/fd')))\n"
    )
    with ready_template("unsafe", env=env) as template:
        assert list(template.left_out) == ["unsafe"]
        assert run(template, "-c", code, env=env) == run(None, "-c", code, env=env)


@pytest.mark.parametrize(
    "source",
    ["raise ImportError('no')", "1 / 0", "import sys; sys.exit(3)", "raise KeyboardInterrupt", "x = ("],
)
def test_an_import_that_fails_fails_in_the_program_too_and_harms_no_other(
    source: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, fails=source, fine="")
    env = environment(PYTHONPATH=str(tmp_path))
    with ready_template("fails", "not_there", "fine", env=env) as template:
        assert run(template, "-c", HELD, "fails", "fine", env=env).out == "fine\n"
        assert run(template, "-c", "import fails", env=env) == run(None, "-c", "import fails", env=env)


def test_what_the_start_of_the_interpreter_sets_is_set_for_programs_too(tmp_path: Path) -> None:
    write_modules(
        tmp_path, sitecustomize="import os\nos.environ.setdefault('BY_SITE', 'x')\nos.environ['SITE'] = 'y'\n"
    )
    env = environment(PYTHONPATH=str(tmp_path))
    words = ["-c", "import os; print(os.environ['BY_SITE'], os.environ['SITE'])"]
    with ready_template(env=env) as template:
        assert run(template, *words, env=env) == run(None, *words, env=env)
        with pytest.raises(ForkRefused, match="sitecustomize read BY_SITE"):
            run(template, *words, env={**env, "BY_SITE": "z"})


def test_memory_that_is_shared_where_other_memory_was_is_noticed_before_a_fork(tmp_path: Path) -> None:
    """How much is mapped does not change then, which is all that can be looked at after each module."""
    write_modules(
        tmp_path,
        first="import ctypes, mmap\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
        "with open(__file__, 'rb') as file:\n"
        "    where = libc.mmap(None, 1, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)\n",
        second="import ctypes, first, mmap\n"
        "first.libc.munmap(ctypes.c_void_p(first.where), 1)\nkept = mmap.mmap(-1, 1)\n",
    )
    env = environment(PYTHONPATH=str(tmp_path))
    with ready_template("ctypes", "mmap", "first", "second", env=env) as template:
        assert template.left_out == {}
        assert template.unsafe.startswith("it shares memory (/dev/zero")


def test_a_thread_that_the_start_of_the_interpreter_leaves_makes_all_forks_refused(tmp_path: Path) -> None:
    write_modules(
        tmp_path,
        sitecustomize="import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    )
    env = environment(PYTHONPATH=str(tmp_path))
    with ready_template(env=env) as template:
        assert "a thread runs" in template.unsafe
        with pytest.raises(ForkRefused, match="a thread runs"):
            run(template, "-c", "", env=env)


# --- records -----------------------------------------------------------------------------------------


def recorded(directory: Path, program: str, *words: str, **variables: str) -> tuple[Path, dict[str, str]]:
    """The record of a run of `program`, which is to be forked as ``python program.py WORDS``."""
    record = directory / "record"
    script = directory / "program.py"
    script.write_text(program)
    env = environment(**variables)
    ended = run(None, str(entry.__file__), str(record), str(script), *words, env=env, cwd=directory)
    assert ended.code == 0, ended.err
    return record, env


def known(directory: Path, record: Path, *words: str, volatile: tuple[str, ...] = ("RANK",)) -> Work:
    argv = (sys.executable, str(directory / "program.py"), *words)
    return Work(argv=argv, known=str(record), volatile=volatile)


def test_a_template_holds_what_a_program_was_seen_to_import(tmp_path: Path) -> None:
    write_modules(
        tmp_path, **{"pkg/__init__": "", "pkg/part": "import colorsys", "last": "import this_is_not"}
    )
    record, env = recorded(
        tmp_path,
        "import os, sys\nprint(*(name for name in ('pkg.part', 'colorsys', 'last') if name in sys.modules))\n"
        "import pkg.part\ntry:\n    import last\nexcept ImportError:\n    pass\n",
    )
    with ready_template(work=known(tmp_path, record), env=env) as template:
        # Started in the directory of the template, which is that of this test run.
        assert run(template, str(tmp_path / "program.py"), env=env).out == "pkg.part colorsys\n"


def test_a_record_is_followed_while_it_grows(tmp_path: Path) -> None:
    write_modules(tmp_path, early="", late="")
    record = tmp_path / "record"
    env = environment(PYTHONPATH=str(tmp_path))
    with ready_template(work=Work(follow=str(record), save=str(tmp_path / "kept")), env=env) as template:
        record.write_text(f"m early\t{tmp_path}/early.py\nm late\t")

        def held() -> str:
            try:
                return run(template, "-c", HELD, "early", "late", env=env).out.strip()
            except ForkRefused:  # it imports
                return ""

        wait_until(lambda: held() == "early", "the template does not follow the record")
        with record.open("a") as file:
            file.write(f"{tmp_path}/late.py\n")
        wait_until(lambda: held() == "early late", "the template does not follow the record")
        assert template.left_out == {}


def test_a_module_that_reads_what_the_program_set_before_is_left_out(tmp_path: Path) -> None:
    write_modules(tmp_path, reads="import os\nmode = os.environ.get('MODE')\n", before="import colorsys\n")
    program = "import before, os\nos.environ['MODE'] = 'mine'\nimport reads\nprint(reads.mode)\nimport wave\n"
    record, env = recorded(tmp_path, program)
    assert "e MODE\n" in record.read_text()
    with ready_template(work=known(tmp_path, record), env=env) as template:
        assert template.left_out == {"reads": "reads MODE while it is imported"}
        assert run(template, str(tmp_path / "program.py"), env=env).out == "mine\n"


def test_nothing_is_held_that_a_program_imports_after_it_set_what_libraries_read(tmp_path: Path) -> None:
    write_modules(tmp_path, before="", after="")
    program = (
        "import sys\nprint(*(name for name in ('before', 'after') if name in sys.modules))\n"
        "import before, os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport after\nimport colorsys\n"
    )
    record, env = recorded(tmp_path, program)
    with ready_template(work=known(tmp_path, record), env=env) as template:
        assert template.ends_at == "OMP_NUM_THREADS"
        assert run(template, str(tmp_path / "program.py"), env=env).out == "before\n"


def test_a_module_of_a_version_that_cannot_be_repaired_is_left_out(tmp_path: Path) -> None:
    write_modules(
        tmp_path,
        **{
            "torchmetrics/__init__": "",
            "torchmetrics/utilities/__init__": "",
            "torchmetrics/utilities/prints": "def rank_zero_warn(): pass\n",
        },
    )
    env = environment(PYTHONPATH=str(tmp_path))
    with ready_template("torchmetrics.utilities.prints", env=env) as template:
        (why,) = template.left_out.values()
        assert why.startswith("cannot be set right for each rank (AttributeError: "), template.left_out
        code = "from torchmetrics.utilities import prints; print(prints.__file__)"
        assert run(template, "-c", code, env=env).out == f"{tmp_path}/torchmetrics/utilities/prints.py\n"


def test_a_name_that_is_another_file_for_the_program_is_left_out(tmp_path: Path) -> None:
    write_modules(tmp_path, same="import two\n", two="which = 'the template sees this'\n")
    write_modules(tmp_path / "other", two="which = 'the program sees this'\n")
    record = tmp_path / "record"
    record.write_text(f"m same\t{tmp_path}/same.py\nm two\t{tmp_path}/other/two.py\n")
    env = environment(PYTHONPATH=str(tmp_path))
    with ready_template(work=Work(known=str(record)), env=env) as template:
        assert template.left_out == {
            "two": f"is {tmp_path}/other/two.py for the program, and {tmp_path}/two.py here"
        }
        assert run(template, "-c", HELD, "same", "two", env=env).out == "\n"


def test_a_module_of_the_template_itself_that_is_another_for_the_program_makes_all_forks_refused(
    tmp_path: Path,
) -> None:
    """A user's own ``json.py`` beside the script."""
    write_modules(tmp_path, json="mine = True\n")
    record, env = recorded(tmp_path, "import json, colorsys\nprint(json.mine)\n")
    with (
        ready_template(work=known(tmp_path, record), env=env) as template,
        pytest.raises(ForkRefused, match=r"json is .*json\.py for the program"),
    ):
        run(template, str(tmp_path / "program.py"), env=env)


@pytest.mark.parametrize("changed", ["before.py", "program.py"])
def test_what_an_earlier_job_imported_is_not_imported_if_code_has_changed_since(
    changed: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, before="")
    record, env = recorded(
        tmp_path, "import sys\nprint('before' in sys.modules)\nimport before, colorsys, fractions\n"
    )
    future = record.stat().st_mtime_ns + 10**9
    os.utime(tmp_path / changed, ns=(future, future))
    with ready_template(work=known(tmp_path, record), env=env) as template:
        assert run(template, str(tmp_path / "program.py"), env=env).out == "False\n"


def test_what_a_template_learned_is_kept_for_the_next_one(tmp_path: Path) -> None:
    write_modules(tmp_path, before="", reads="import os\nmode = os.environ.get('MODE')\n")
    record, env = recorded(tmp_path, "import before, os\nos.environ['MODE'] = 'x'\nimport reads, colorsys\n")
    kept = tmp_path / "cache" / "imports"
    work = Work(known=str(record), save=str(kept))
    with ready_template(work=work, env={**env, "PYTHONPATH": str(tmp_path)}):
        pass
    with ready_template(work=Work(known=str(kept)), env={**env, "PYTHONPATH": str(tmp_path)}) as template:
        assert template.left_out == {"reads": "reads MODE while it is imported"}


def test_a_record_is_kept_beside_one_that_another_pod_writes_at_this_moment(tmp_path: Path) -> None:
    """Pods with one home have equal process ids."""
    theirs = tmp_path / f"kept.{os.getpid()}"
    theirs.write_text("half of")
    server._save(tmp_path / "kept", [Entry("colorsys", "")])
    assert (tmp_path / "kept").read_text() == "m colorsys\t\n"
    assert theirs.read_text() == "half of"
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("words", [("--rank", "1"), ("--rank",), ()])
def test_a_program_with_other_arguments_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    """A module may have read them, and ``${local_rank}`` makes them different in each rank."""
    record, env = recorded(tmp_path, "import colorsys\n", "--rank", "0")
    with ready_template(work=known(tmp_path, record, "--rank", "0"), env=env) as template:
        assert run(template, str(tmp_path / "program.py"), "--rank", "0", env=env).code == 0
        with pytest.raises(ForkRefused, match="arguments are not those"):
            run(template, str(tmp_path / "program.py"), *words, env=env)


# --- changed code ------------------------------------------------------------------------------------


def test_changed_code_is_refused_by_name_and_used_by_the_next_fork(tmp_path: Path) -> None:
    write_modules(tmp_path, code="version = 1\n", other="")
    env = environment(PYTHONPATH=str(tmp_path))
    words = ["-c", "import code; print(code.version)"]
    with ready_template("code", "other", env=env) as template:
        pid = template.pid
        for version in (2, 3):
            (tmp_path / "code.py").write_text(f"version = {10**version}\n")
            with pytest.raises(ForkRefused, match=rf"{tmp_path}/code\.py has changed since it was imported"):
                run(template, *words, env=env)
            with pytest.raises(ForkRefused, match="still imports"):
                run(template, *words, env=env)
            assert template.wait_until_ready(DEADLINE)
            assert run(template, *words, env=env).out == f"{10**version}\n"
        (tmp_path / "code.py").unlink()
        with pytest.raises(ForkRefused, match="has changed"):
            run(template, *words, env=env)
        assert template.pid == pid


def test_what_a_changed_program_does_not_import_any_more_is_not_imported_for_it(tmp_path: Path) -> None:
    """A module that patches others would do so for ever."""
    write_modules(tmp_path, patches="", helps="")
    held = "import sys\nprint(*(name for name in ('patches', 'helps') if name in sys.modules), flush=True)\n"
    record, env = recorded(tmp_path, f"{held}import patches\nimport helps\nimport fractions\n")
    words = [str(tmp_path / "program.py")]
    with ready_template(work=Work(argv=(sys.executable, *words), follow=str(record)), env=env) as template:

        def output() -> str:
            try:
                return run(template, *words, env=env).out
            except ForkRefused:  # it imports, or begins again
                return ""

        wait_until(lambda: output() == "patches helps\n", "the template does not follow the record")
        Path(words[0]).write_text(f"{held}import helps\nimport fractions, colorsys\n")

        def refusal() -> str:
            try:
                return run(template, *words, env=env).out
            except ForkRefused as error:  # before, it may still import what the last run has recorded
                return str(error)

        wait_until(lambda: "program.py has changed" in refusal(), "the change is not seen")
        assert run(None, str(entry.__file__), str(record), *words, env=env).out == "\n"
        wait_until(lambda: output() == "helps\n", "the template does not follow the new record")


def test_code_that_changes_while_it_is_imported_counts_as_changed(tmp_path: Path) -> None:
    write_modules(
        tmp_path, changes="from pathlib import Path\nPath(__file__).write_text(Path(__file__).read_text())\n"
    )
    env = environment(PYTHONPATH=str(tmp_path))
    with (
        ready_template("changes", env=env) as template,
        pytest.raises(ForkRefused, match=r"changes\.py has changed"),
    ):
        run(template, "-c", "", env=env)
