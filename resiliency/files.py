# SPDX-License-Identifier: Apache-2.0
"""Files that are old or new after a kill or a power cut, never half and never gone.

Invariant: a name that was replaced leads to the old bytes or to the new ones, at every moment and after every
crash.
POSIX promises that of nothing less than: write under another name, sync the file, rename, sync the directory.

    with replacing("metrics.json") as temporary:
        temporary.write_text(text)

`Files` is what a store of directories needs of a file system, so that a test may put in a model of one that
crashes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import os
import re
import secrets
import shutil
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from resiliency.errors import ConfigError

#: A scheme, also as `Path` spells it: with one slash.  A single letter may be a directory of its own.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


#: Names a file that a program touches while it runs, for whoever asks whether it does.
ALIVE_FILE_ENV = "RESILIENCY_ALIVE_FILE"
#: How often; a probe asks for one touch of the last minute.
ALIVE_PERIOD_S = 5.0


def touch_alive_file() -> None:
    """Say that this program runs, where the environment names a file for that.

    For probes: a program that is stopped, or waits for ever, accepts connections as before.

    Raises:
        ConfigError: the file cannot be made.
    """
    path = os.environ.get(ALIVE_FILE_ENV, "")
    if not path:
        return
    try:
        Path(path).touch()  # once it is there, that takes no room of a disk
    except OSError as error:
        raise ConfigError(
            f"{ALIVE_FILE_ENV}: {path} cannot be touched: {error.strerror}.",
            hint="Name a file in a directory that this program may write, or none.",
            path=path,
        ) from error


def matching(directory: Path, pattern: str) -> list[Path]:
    """Entries of a directory, unsorted; none if it does not exist.

    Not `Path.glob`: from Python 3.12 on that takes a directory which cannot be read for an empty one.

    Raises:
        OSError: it cannot be read, as when this process has no descriptor left.
    """
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [directory / name for name in fnmatch.filter(names, pattern)]


def posix_path(path: str | os.PathLike[str], *, of: str = "checkpoints") -> Path:
    """A path of a file system, which alone has the locks, links, renames and `fsync` that files here need.

    A URL would become a directory called ``s3:`` below the working directory, on a disk that is lost with its
    host.

    Args:
        of: what is kept there, for the message.
    Raises:
        ConfigError: `path` is the URL of an object store, begins with an unexpanded ``~``, is empty, or is no
            text.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{of} need the path of a directory, found {text!r}.", path=repr(text))
    if "://" in text or _URL.match(text):
        raise ConfigError(
            f"{of} go to a directory of a file system, found the URL {text!r}.",
            hint="There is no tier for object stores: mount the bucket, or copy committed steps there.",
            path=text,
        )
    if text.split("/")[0].startswith("~"):
        raise ConfigError(
            f"{of} would go to a directory called {text.split('/')[0]!r}, found {text!r}.",
            hint="Let the shell or os.path.expanduser replace it.",
            path=text,
        )
    return Path(path)


def path_flag(text: str) -> Path:
    """`posix_path` as the `type` of a flag of argparse.

    Raises:
        ArgumentTypeError: see there.
    """
    from argparse import ArgumentTypeError

    try:
        return posix_path(text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from None


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, whose file takes the place of `path` when the block ends without an exception.

    The temporary file is in the same directory, has a name that no other writer has, and is removed if the
    block fails. What a kill left of such files is removed by the next writer of the same path on the same
    host: a lock tells whether a writer lives, and storage of several hosts may keep locks on each host alone.

    Raises:
        OSError: the directory does not exist or takes no files; the old file is as it was.
    """
    target = Path(path)
    _remove_leftovers(target)
    temporary, descriptor = _create(target)
    try:
        yield temporary
        os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)
    sync_dir(target.parent)


def write_durably(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the content of a file; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def sync_dir(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable. A file system that cannot is taken at its word."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems cannot sync a directory and need not.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _create(target: Path) -> tuple[Path, int]:
    """A new temporary file, open and locked for as long as its writer lives."""
    while True:
        temporary = target.with_name(f".{target.name}.{_host()}-{secrets.token_hex(6)}.temp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # Storage without locks answers with an error: leftovers stay there, as nobody can tell that they are.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return temporary, descriptor
        os.close(descriptor)  # another writer took it for a leftover before it was locked


def _remove_leftovers(target: Path) -> None:
    own = re.compile(rf"\.{re.escape(target.name)}\.{_host()}-[0-9a-f]{{12}}\.temp")
    for name in os.listdir(target.parent):
        if not own.fullmatch(name):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(target.parent / name, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its writer lives
                os.unlink(target.parent / name)
            finally:
                os.close(descriptor)


def _host() -> str:
    """This host, in eight characters: its name may be as long as a file name may be."""
    name = os.environ.get("NODE_NAME") or socket.gethostname()
    return f"{zlib.crc32(name.encode()):08x}"


class Files(Protocol):
    """The operations of a file system that change names, and those that make them durable.

    Each may raise OSError. After a kill any prefix of the calls has happened; after a power cut what was not
    synced may or may not have.
    """

    def list(self, directory: str) -> list[str]:
        """Names in a directory."""
        ...

    def is_dir(self, path: str) -> bool: ...

    def read_link(self, path: str) -> str | None:
        """Target of a symbolic link as it was written; None if there is none of that name."""
        ...

    def make_dir(self, path: str) -> None: ...

    def create(self, path: str) -> None:
        """A new empty file."""
        ...

    def symlink(self, target: str, path: str) -> None: ...

    def rename(self, source: str, target: str) -> None:
        """Give a file, link or directory another name; a file or link of that name is replaced."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file or link; fine if there is none."""
        ...

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all below, one by one."""
        ...

    def sync_tree(self, path: str) -> None:
        """Make all files and names below a directory durable, but not its own name."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
        ...


class LocalFiles:
    """`Files` of the operating system."""

    def list(self, directory: str) -> list[str]:
        return os.listdir(directory)

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(path)

    def read_link(self, path: str) -> str | None:
        return os.readlink(path) if os.path.islink(path) else None

    def make_dir(self, path: str) -> None:
        os.mkdir(path)

    def create(self, path: str) -> None:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, path)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path)

    def sync_tree(self, path: str) -> None:
        for directory, _, names in os.walk(path):
            for name in names:
                descriptor = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            sync_dir(directory)

    def sync_dir(self, path: str) -> None:
        sync_dir(path)
