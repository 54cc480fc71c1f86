# SPDX-License-Identifier: Apache-2.0
"""Words for what a descriptor of another process is: an address, a pipe, a terminal, a file."""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

#: Beginning of the words for a terminal.
TERMINAL = "terminal "
_LISTENS = "0A"
_MOST_POLLED = 256


def describe(pid: int, descriptor: int) -> str:
    """``10.0.0.7:443``, ``a pipe``, ``terminal /dev/pts/0``; of one that cannot be seen ``a descriptor``."""
    link = f"/proc/{pid}/fd/{descriptor}"
    with suppress(OSError):
        target = os.readlink(link)
        if target.startswith("socket:"):
            return _socket(pid, target.removeprefix("socket:[").removesuffix("]"))
        if target.startswith("pipe:"):
            return "a pipe"
        if target.startswith("anon_inode:"):
            return f"an event ({target.removeprefix('anon_inode:').strip('[]')})"
        if target.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
            return TERMINAL + target
        return f"{'pipe' if stat.S_ISFIFO(os.stat(link).st_mode) else 'file'} {target}"
    return "a descriptor"


def polled(pid: int, memory: int, call: str, arguments: Sequence[int]) -> list[int]:
    """The descriptors that a thread waits for in poll, select, epoll_wait or a variant of these.

    Args:
        memory: descriptor of the memory of `pid`.
    """
    with suppress(OSError, ValueError):
        if call.startswith("epoll"):
            text = Path(f"/proc/{pid}/fdinfo/{arguments[0]}").read_text()
            return [int(found) for found in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)]
        if call.endswith("poll"):
            data = os.pread(memory, 8 * min(arguments[1], _MOST_POLLED), arguments[0])
            return [number for number, _, _ in struct.iter_unpack("=ihh", data[: len(data) // 8 * 8])]
        found = set[int]()
        for address in filter(None, arguments[1:3]):  # to read, to write
            bits = int.from_bytes(os.pread(memory, 128, address), "little")
            found.update(number for number in range(min(arguments[0], 1024)) if bits >> number & 1)
        return sorted(found)
    return []


def _socket(pid: int, inode: str) -> str:
    for family, file in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for fields in _table(pid, file):
            if len(fields) > 9 and fields[9] == inode:
                if fields[3] == _LISTENS:
                    return f"a connection to port {int(fields[1].rpartition(':')[2], 16)}"
                return _address(family, fields[2])
    for fields in _table(pid, "unix"):
        if len(fields) > 6 and fields[6] == inode:
            return " ".join(["a unix socket", *fields[7:8]])
    return "a socket"


def _table(pid: int, file: str) -> Iterator[list[str]]:
    """Of the network of the process, which may be another one than ours."""
    with suppress(OSError), open(f"/proc/{pid}/net/{file}", encoding="utf-8", errors="replace") as table:
        yield from map(str.split, table)


def _address(family: int, text: str) -> str:
    """Of ``0100007F:1F90``: each four bytes are a number in the order of this machine."""
    address, _, port = text.partition(":")
    words = struct.iter_unpack(">I", bytes.fromhex(address))
    host = socket.inet_ntop(family, b"".join(struct.pack("=I", word) for (word,) in words))
    return f"[{host}]:{int(port, 16)}" if ":" in host else f"{host}:{int(port, 16)}"
