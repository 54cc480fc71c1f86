# SPDX-License-Identifier: Apache-2.0
"""Storage on a POSIX file system: unbuffered writes where alignment allows, and errors by name."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from resiliency.checkpoint.storage.interface import Buffer, ReadableFile, WritableFile
from resiliency.checkpoint.storage.memory import is_page_aligned
from resiliency.checkpoint.storage.memory_files import room_in_memory
from resiliency.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    CheckpointWriteFailed,
    InternalError,
    ResiliencyError,
    ResourceShortage,
)
from resiliency.files import posix_path, sync_dir

#: Most buffers that one call takes (IOV_MAX on Linux).
_VECTOR_LIMIT = 1024
#: Smaller files are not worth a reservation.
_PREALLOCATE_FROM_BYTES = 1 << 20
#: What is read at once from there on is content, which nobody reads again soon; indexes are smaller.
_LARGE_READ_BYTES = 256 << 10
#: A read leaves the page cache as it was (Linux 6.14).
_RWF_DONTCACHE = 0x80
#: A read of what the page cache has, and of nothing else (Linux 4.14); not every Python names it.
_RWF_NOWAIT = 0x08
#: What kernels and file systems answer that do not know it.
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})

_HINTS = {
    errno.ENOSPC: "The file system is full: free space, or keep fewer checkpoints.",
    errno.EDQUOT: "The quota is used up: free space, keep fewer checkpoints, or raise the quota.",
    errno.EROFS: "The file system is read-only, often after a device error: check the mount and dmesg.",
    errno.EIO: "The device failed: check dmesg and the health of the disk or of the file server.",
    errno.EFBIG: "The file would exceed a size limit: raise `ulimit -f`, or use a file system without it.",
    errno.EACCES: "This user may not write there: check owner and mode of the directory.",
    errno.EPERM: "This user may not write there: check owner and mode of the directory.",
    errno.ENOENT: "The directory is gone: was it removed, or is the mount missing?",
    errno.ESTALE: "The file server lost the file: check the mount.",
    errno.ENOTDIR: "A part of the path is a file: choose another directory.",
    errno.EMFILE: "Too many open files: raise `ulimit -n`.",
    errno.ENFILE: "Too many open files on this host: raise fs.file-max.",
    errno.ENOMEM: "No memory is left: see the memory limit of the container.",
}

#: What this process lacks, whatever it asks for: of the files it says nothing.
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
#: Nothing can be written before something is removed.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def write_failed(error: OSError, what: str, path: str) -> CheckpointWriteFailed:
    """The one place where the errors of an operating system become ours."""
    number = error.errno or 0
    reason = errno.errorcode.get(number, "unknown error")
    hint = _HINTS.get(number, "Older checkpoints were left as they are.")
    return CheckpointWriteFailed(
        f"cannot {what} {path}: {reason} ({os.strerror(number)}).", hint=hint, path=path, errno=number
    )


def read_failed(error: OSError, path: str) -> CheckpointCorrupt:
    """Bytes that cannot be read are as good as changed: the caller looks for another source."""
    number = error.errno or 0
    reason = errno.errorcode.get(number, "unknown error")
    hint = _HINTS.get(number, "Restore another checkpoint.")
    return CheckpointCorrupt(
        f"cannot read {path}: {reason} ({os.strerror(number)}).", hint=hint, path=path, errno=number
    )


def any_failed(error: Exception, what: str, path: str) -> ResiliencyError:
    """Any exception as one of ours, for borders behind which others wait for an answer."""
    if isinstance(error, ResiliencyError):
        return error
    if isinstance(error, OSError):
        ours: ResiliencyError = write_failed(error, what, path)
    elif isinstance(error, MemoryError):
        ours = ResourceShortage(f"cannot {what} {path}: no memory is left.", path=path, errno=errno.ENOMEM)
    else:
        ours = InternalError(f"cannot {what} {path}: {error!r}.", path=path)
    ours.__cause__ = error  # with its traceback
    return ours


@contextlib.contextmanager
def _writing(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise write_failed(error, what, str(path)) from error


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise read_failed(error, str(path)) from error


def _close_all(fds: Sequence[int | None]) -> None:
    """Close every one, also where the system reports an error for one of them.

    Raises:
        OSError: the first of these errors.
    """
    failed: OSError | None = None
    for fd in fds:
        try:
            if fd is not None and fd >= 0:
                os.close(fd)  # Linux has freed the descriptor whatever this raises
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _preallocate(fd: int, size_bytes: int) -> None:
    """Reserve space: a full disk shows before the first byte, and parallel writes do not queue
    for the end of the file.  Not `os.posix_fallocate`, which writes zeros where the file system
    cannot reserve."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return
    if libc.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size_bytes)):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EINTR):
            raise OSError(number, os.strerror(number))


def _open_direct(path: Path) -> int:
    """A second descriptor, to write past the page cache, or -1 where the file system has none."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return -1
    try:
        return os.open(path, os.O_WRONLY | flag | os.O_CLOEXEC)
    except OSError:
        return -1


class _LocalWriter:
    """Aligned pieces bypass the page cache and the rest goes through it.

    Both kinds may touch one file because they never touch one page: a piece is direct only when
    it covers whole pages.
    """

    def __init__(self, path: Path, size_bytes: int, *, direct: bool) -> None:
        self._path = path
        self._direct = -1
        with _writing("create", path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            if size_bytes >= _PREALLOCATE_FROM_BYTES:
                try:
                    with room_in_memory(self._fd, size_bytes, path):
                        _preallocate(self._fd, size_bytes)
                except (OSError, CheckpointWriteFailed):
                    self.close()
                    raise
        if direct:
            self._direct = _open_direct(path)

    def write_at(self, offset: int, *data: Buffer) -> None:
        views = [view for part in data if (view := memoryview(part).cast("B")).nbytes]
        # Their lengths are whole pages then, so the first one's offset decides for all.
        direct = self._direct >= 0 and all(is_page_aligned(view, offset) for view in views)
        with _writing("write", self._path):
            try:
                _write_all(self._direct if direct else self._fd, offset, views)
            except OSError as error:
                # A file system may open with O_DIRECT and then refuse it (some FUSE, old NFS).
                if not direct or error.errno != errno.EINVAL:
                    raise
                _write_all(self._fd, offset, views)

    def sync(self) -> None:
        with _writing("sync", self._path):
            os.fsync(self._fd)

    def close(self) -> None:
        fds, self._fd, self._direct = (self._fd, self._direct), -1, -1
        with _writing("close", self._path):
            _close_all(fds)


def _write_all(fd: int, offset: int, views: Sequence[memoryview]) -> None:
    left = list(views)
    while left:
        # One call for all of them: each costs a device its latency.
        written = os.pwritev(fd, left[:_VECTOR_LIMIT], offset)
        offset += written
        _drop(left, written)


def _drop(views: list[memoryview], count: int) -> None:
    """Leave out the first `count` bytes."""
    while views and count >= views[0].nbytes:
        count -= views.pop(0).nbytes
    if count:
        views[0] = views[0][count:]


class _LocalReader:
    """Through the page cache, straight to memory of any alignment: what the cache has is not read again.

    Args:
        direct: a large read leaves nothing there that was not there before.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        self._path = path
        self._flags = _RWF_DONTCACHE if direct else 0
        #: Where the kernel does not do that: whether to drop what was read, since it was not there before.
        self._drops = False
        with _reading(path):
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                raise CheckpointMissing(f"there is no file {path}.", path=str(path)) from None
            try:
                self._size = os.fstat(self._fd).st_size
            except OSError:
                self.close()
                raise

    @property
    def size_bytes(self) -> int:
        return self._size

    def read_into(self, offset: int, *targets: memoryview) -> int:
        left = [view for target in targets if (view := target.cast("B")).nbytes]
        end = min(offset + sum(view.nbytes for view in left), self._size)
        at = offset
        while at < end:
            with _reading(self._path):
                count = self._read(left[:_VECTOR_LIMIT], at)
            if count == 0:
                break
            at += count
            _drop(left, count)
        return at - offset

    def _read(self, views: Sequence[memoryview], offset: int) -> int:
        is_large = sum(view.nbytes for view in views) >= _LARGE_READ_BYTES
        if is_large and self._flags:
            try:
                return os.preadv(self._fd, views, offset, self._flags)
            except NotImplementedError:  # of a Python for systems with an old C library, such as conda's
                self._flags = 0
            except OSError as error:  # of a kernel before 6.14, or of a file system that cannot do it
                if error.errno not in _UNSUPPORTED:
                    raise
                self._drops, self._flags = not self._is_cached(offset), 0
        count = os.preadv(self._fd, views, offset)
        if is_large and self._drops:
            with contextlib.suppress(OSError):  # it says nothing of the bytes that were read
                os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)
        return count

    def _is_cached(self, offset: int) -> bool:
        try:
            return os.preadv(self._fd, [bytearray(1)], offset, _RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
        except OSError:  # it does not say
            return True

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):  # it says nothing of the bytes that were read
            _close_all([fd])


def _make_durable_dir(path: Path) -> None:
    """Create the root and its parents so that their names survive: nobody else syncs those."""
    missing = [path, *(parent for parent in path.parents if not parent.exists())]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_dir(directory.parent)


class LocalStorage:
    """A directory of this machine, or one that is mounted on it.

    Args:
        root: directory that all names are relative to; created on the first `make_dir`.
        direct: training keeps its page cache: writes bypass it where alignment allows (measured on a virtual
            NVMe disk: 3.5 GB/s against 2.4 GB/s through it with `fsync`), and large reads leave it as it was.
    Raises:
        ConfigError: `root` is no path of a file system.
    """

    def __init__(self, root: str | os.PathLike[str], *, direct: bool = True) -> None:
        self.root = posix_path(root)
        self._use_direct = direct

    def describe(self, name: str = "") -> str:
        return str(self._path(name))

    def create(self, name: str, size_bytes: int = 0) -> WritableFile:
        return _LocalWriter(self._path(name), size_bytes, direct=self._use_direct)

    def open(self, name: str) -> ReadableFile:
        return _LocalReader(self._path(name), direct=self._use_direct)

    def make_dir(self, name: str) -> None:
        path = self._path(name)
        with _writing("create directory", path):
            if not self.root.is_dir():
                _make_durable_dir(self.root)
            path.mkdir(parents=True, exist_ok=True)

    def list(self, name: str) -> list[str]:
        path = self._path(name)
        with _reading(path):
            try:
                return sorted(os.listdir(path))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def exists(self, name: str) -> bool:
        path = self._path(name)
        with _reading(path):
            try:
                os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def replace(self, source: str, target: str) -> None:
        with _writing("rename to", self._path(target)):
            os.replace(self._path(source), self._path(target))

    def link(self, source: str, target: str) -> None:
        with _writing("link", self._path(target)):
            try:
                os.link(self._path(source), self._path(target))
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
                    raise
                shutil.copyfile(self._path(source), self._path(target))

    def remove(self, name: str) -> None:
        with _writing("remove", self._path(name)), contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def remove_tree(self, name: str) -> None:
        path = self._path(name)
        with _writing("remove", path), contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def remove_empty_dir(self, name: str) -> None:
        path = self._path(name)
        with _writing("remove", path), contextlib.suppress(FileNotFoundError):
            try:
                os.rmdir(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def sync_dir(self, name: str) -> None:
        path = self._path(name)
        with _writing("sync directory", path):
            sync_dir(path)

    def _path(self, name: str) -> Path:
        if name.startswith("/") or ".." in name.split("/"):
            raise ResiliencyError(f"storage names are relative to {self.root}, found {name!r}.", path=name)
        return self.root / name if name else self.root
