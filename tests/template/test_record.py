# SPDX-License-Identifier: Apache-2.0
"""The record of what a program imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from resiliency.template import entry
from resiliency.template.record import Entry, RecordReader
from tests.template.programs import Ended, environment, run, write_modules


def recorded(directory: Path, code: str, *words: str, record: Path | None = None) -> Ended:
    program = directory / "program.py"
    program.write_text(code)
    path = record or directory / "record"
    ended = run(None, str(entry.__file__), str(path), str(program), *words, env=environment(), cwd=directory)
    assert ended.code == 0, ended.err
    return ended


def lines(directory: Path) -> list[str]:
    """Of modules and variables."""
    text = (directory / "record").read_text(errors="surrogateescape")
    return [line for line in text.splitlines() if not line.startswith("a ")]


def test_modules_are_written_in_the_order_in_which_they_begin(tmp_path: Path) -> None:
    write_modules(
        tmp_path,
        **{"pkg/__init__": "from . import one", "pkg/one": "import pkg.two", "pkg/two": "", "late": ""},
    )
    recorded(
        tmp_path,
        "import pkg\nimport pkg.two\nimport late\nimport late\nimport faulthandler\nimport fractions\n",
    )
    pkg = tmp_path / "pkg"
    assert lines(tmp_path)[:5] == [
        f"m pkg\t{pkg}/__init__.py",
        f"m pkg.one\t{pkg}/one.py",
        f"m pkg.two\t{pkg}/two.py",
        f"m late\t{tmp_path}/late.py",
        "m faulthandler\t",
    ]


def test_what_is_only_looked_for_is_not_written_until_it_is_imported(tmp_path: Path) -> None:
    write_modules(tmp_path, present="", other="")
    recorded(
        tmp_path,
        "import importlib.util as util\nutil.find_spec('present')\nutil.find_spec('missing')\nimport other\n"
        "try:\n    import missing\nexcept ImportError:\n    pass\nimport present\nimport fractions\n",
    )
    names = [line.split("\t")[0] for line in lines(tmp_path)]
    assert names[: names.index("m fractions")] == ["m other", "m present"]
    assert "a missing" in (tmp_path / "record").read_text()


def test_variables_that_the_program_sets_are_written_once_and_those_of_imports_never(tmp_path: Path) -> None:
    write_modules(tmp_path, sets="import os\nos.environ['BY_IMPORT'] = '1'\n")
    recorded(
        tmp_path,
        "import os\nos.environ['SAME'] = os.environ['SAME'] if 'SAME' in os.environ else '1'\n"
        "import sets\nfor number in range(3):\n    os.environ['MINE'] = str(number)\n"
        "os.environ.pop('MINE')\nos.environ.setdefault('HOME', '/')\n"
        "os.environ['HOME'] = os.environ['HOME']\n",
    )
    assert [line for line in lines(tmp_path) if line.startswith("e ")] == ["e SAME", "e MINE"]


def test_a_recorded_program_sees_what_an_ordinary_one_sees(tmp_path: Path) -> None:
    code = (
        "import os, sys\nprint(sys.argv, sys.path, __file__, sys.orig_argv, sorted(globals()))\n"
        "print(open('/proc/self/cmdline').read().rstrip(chr(0)), len(os.listdir('/proc/self/fd')))\n"
        "os.environ['X'] = '1'\ndel os.environ['X']\nprint(os.system('exit 2'))\n"
        "def f(x: int): ...\nprint(f.__annotations__)\n"
    )
    forked = recorded(tmp_path, code, "one", "two")
    fresh = run(None, str(tmp_path / "program.py"), "one", "two", env=environment(), cwd=tmp_path)
    assert forked.out.replace(" 5\n", " 4\n") == fresh.out, "but for one descriptor, which is the record's"


def test_a_recorded_program_ends_as_an_ordinary_one(tmp_path: Path) -> None:
    write_modules(tmp_path, program="import fractions\ndef fail():\n    raise KeyError(3)\nfail()\n")
    words = [str(entry.__file__), str(tmp_path / "record"), str(tmp_path / "program.py")]
    assert run(None, *words) == run(None, words[2])


def test_the_record_of_a_module_begins_with_what_it_imports(tmp_path: Path) -> None:
    write_modules(tmp_path, **{"pkg/__init__": "", "pkg/tool": "import sys, fractions\nprint(sys.argv)\n"})
    words = [str(entry.__file__), str(tmp_path / "record"), "-m", "pkg.tool", "x"]
    assert run(None, *words, cwd=tmp_path).out == f"['{tmp_path}/pkg/tool.py', 'x']\n"
    names = [line.split("\t")[0] for line in lines(tmp_path)]
    assert names[:2] == ["m pkg", "m fractions"]


def test_a_child_that_is_forked_by_the_program_writes_nothing(tmp_path: Path) -> None:
    write_modules(tmp_path, by_parent="", by_child="", parent_again="")
    recorded(
        tmp_path,
        "import os, sys\nimport by_parent\npid = os.fork()\nif pid == 0:\n    import by_child\n"
        "    os.environ['OF_CHILD'] = '1'\n    assert type(os.environ).__name__ == '_Environ'\n"
        "    sys.exit()\nos.waitpid(pid, 0)\nimport parent_again\nimport fractions\n",
    )
    text = (tmp_path / "record").read_text()
    assert "by_child" not in text
    assert "OF_CHILD" not in text
    assert text.count(f"m by_parent\t{tmp_path}/by_parent.py\n") == 1
    assert text.count(f"m parent_again\t{tmp_path}/parent_again.py\n") == 1


def test_a_record_that_cannot_be_written_stops_no_program(tmp_path: Path) -> None:
    for record in (tmp_path / "missing" / "record", tmp_path, Path("/dev/full")):
        ended = recorded(
            tmp_path,
            "import os, fractions\nos.environ['X'] = '1'\nprint(type(os.environ).__name__)\n",
            record=record,
        )
        assert ended.out == "_Environ\n"
        assert ended.err == ""


def test_a_module_without_an_ordinary_specification_stops_no_program(tmp_path: Path) -> None:
    write_modules(
        tmp_path,
        strange="import sys\nclass Strange:\n"
        "    def __getattr__(self, name):\n        raise RuntimeError(name)\n"
        "sys.modules[__name__] = Strange()\n",
    )
    recorded(tmp_path, "import strange\nimport fractions\n")
    assert "m strange\t" in lines(tmp_path)


def test_a_reader_takes_whole_lines_only_and_continues_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "record"
    reader = RecordReader(path)
    assert reader.read() == []
    path.write_bytes(b"m one\t/one.py\na two\nm two\t/tw")
    assert reader.read() == [Entry("one", "/one.py")]
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(b"o.py\ne NAME\nm built_in\t\nnonsense\n\nm torn\n" + os.fsencode("m odd\t/\x85\udcff\n"))
    assert reader.read() == [
        Entry("two", "/two.py"),
        Entry("NAME", None),
        Entry("built_in", ""),
        Entry("odd", "/\x85\udcff"),
    ]


def test_the_last_module_that_was_asked_for_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "record"
    reader = RecordReader(path)
    path.write_text("m one\t/one.py\na two\n")
    reader.read()
    assert reader.take_asked() == [Entry("two", "")]
    assert reader.take_asked() == []


def test_an_entry_is_written_as_it_is_read() -> None:
    for entry_of_record in (Entry("a.b", "/x y/ä.py"), Entry("sys", ""), Entry("NAME", None)):
        assert Entry.parse(str(entry_of_record).removesuffix("\n")) == entry_of_record
    assert sys.getfilesystemencodeerrors() == "surrogateescape"
