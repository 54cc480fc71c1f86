# SPDX-License-Identifier: Apache-2.0
"""Code that runs as in a container: in a thread with a mount or network namespace of its own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

SOON_S = 180.0
NEW_MOUNTS = 0x00020000
NEW_NETWORK = 0x40000000
T = TypeVar("T")


def run_in_container(namespaces: int, commands: Sequence[str], run: Callable[[], T]) -> T:
    """What `run` returns or raises; skips the test where no namespaces can be made.

    Args:
        commands: that set the namespaces up.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(namespaces):
                number = ctypes.get_errno()
                raise PermissionError(number, os.strerror(number))
            for command in commands:
                subprocess.run(command.split(), check=True, capture_output=True)
            returned.append(run())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()
    for error in raised:
        if isinstance(error, PermissionError | FileNotFoundError | subprocess.CalledProcessError):
            pytest.skip(f"namespaces cannot be made here: {error}")
        raise error
    return returned[0]
