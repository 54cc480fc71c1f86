# SPDX-License-Identifier: Apache-2.0
"""``python [-u] entry.py RECORD SCRIPT|-m MODULE ...``: an ordinary start that records its imports.

Runs as a file: what this directory holds must not be importable by its short names.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    safe_path = getattr(sys.flags, "safe_path", False)  # this directory is not in the path then
    sys.path[0 : 0 if safe_path else 1] = [str(Path(__file__).resolve().parents[2])]
    from resiliency.template.program import PythonCommand, run_main, show_in_proc
    from resiliency.template.record import Recorder

    if safe_path:
        del sys.path[0]
    flags = sys.orig_argv[1 : sys.orig_argv.index(sys.argv[0])]
    argv = [sys.orig_argv[0], *flags, *sys.argv[2:]]
    command = PythonCommand.parse(argv)
    assert command is not None, argv
    recorder = Recorder(Path(sys.argv[1]))
    sys.orig_argv[:] = argv
    show_in_proc(argv)
    recorder.install()
    run_main(command)


if __name__ == "__main__":
    main()
