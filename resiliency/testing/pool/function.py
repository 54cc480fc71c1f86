# SPDX-License-Identifier: Apache-2.0
"""``python -m resiliency.testing.pool.function FD NAME``: calls a function, see `warm.start_function`."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from multiprocessing import spawn
from multiprocessing.connection import Connection


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    spawn.prepare(connection.recv())
    fn, args = pickle.loads(connection.recv_bytes())  # noqa: S301  # sent by our own parent
    fn(connection, *args)
    # As a process of multiprocessing ends.  The end of the interpreter would take apart all modules, and copy
    # for that what they share with the process that this one was forked from: a third of a second.
    threading._shutdown()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
