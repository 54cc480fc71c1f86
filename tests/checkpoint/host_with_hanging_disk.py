# SPDX-License-Identifier: Apache-2.0
"""A host whose disk hangs, as a program that wants to end: ``... DIRECTORY`` says how far it came.

The disk hangs where a file is a pipe that nobody writes to: who opens it waits for ever.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

from tests.checkpoint.peer_builders import Host, table_of
from tests.waiting import wait_until


def hanging() -> set[str]:
    """Threads that open a file just now."""
    frames = sys._current_frames()
    return {
        thread.name.partition("_")[0]
        for thread in threading.enumerate()
        if (frame := frames.get(thread.ident or 0)) and frame.f_code.co_filename.endswith("posix.py")
    }


def main(directory: Path) -> None:
    a, b = (Host(name, directory / name) for name in "ab")
    # The first is met when b looks for what it has to copy, the other when a copy of a's step comes.
    for pipe in (b.root / "step=5/manifest.json", b.replicas_of("a") / "step=10-unfinished"):
        pipe.parent.mkdir(parents=True)
        os.mkfifo(pipe)
    for host in (a, b):
        host.service.update(table_of([a.peer, b.peer]))
    a.save(10)
    wait_until(lambda: hanging() >= {"resiliency-peer-copy", "resiliency-replica"}, "the disk answers")
    print("hangs", flush=True)
    b.service.close(timedelta(seconds=1))
    a.service.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
