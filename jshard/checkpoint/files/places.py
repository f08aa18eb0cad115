"""Where the files of a checkpoint are: a `Sink` takes whole files in parts, a `FileSource` gives ranges of bytes.

A folder of the machine is one of each, `LocalFolder`; a bucket would be another.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

LOCAL = {
    0xEF53: "ext",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
}
"""Kinds of file systems that are on a disk, or in the memory, of the machine."""

_MOST_BUFFERS = 1024  # in one call of the system


class SinkFile(Protocol):
    """A file that is being written, once and whole."""

    def write(self, number: int, views: Sequence[memoryview]) -> None:
        """Writes a part: part 0, 1, ... are `part_bytes` long each, the last one is the rest.

        Threads call it at the same time, in any order; each part comes once. An `OSError` if it cannot be written.
        """

    def finish(self) -> None:
        """All parts are written: returns when the file would survive a power cut, under its name."""

    def abort(self) -> None:
        """Something failed: lets go of the file, whatever is there of it. It raises nothing."""


class Sink(Protocol):
    """A place for the files of a checkpoint.

    Attributes:
        part_bytes: of the parts in which files are written; a multiple of 256 KiB.
        threads: how many parts are worth writing at the same time.
    """

    part_bytes: int
    threads: int

    def create(self, name: str, num_bytes: int) -> SinkFile:
        """Begins a file of so many bytes, under a name without folders."""
        ...


class FileSource(Protocol):
    """The files of a checkpoint that is complete.

    Attributes:
        gap_bytes: two ranges with fewer bytes between them are worth one read.
        read_bytes: the most that is read at a time; a multiple of 256 KiB.
        threads: how many reads are worth doing at the same time.
    """

    gap_bytes: int
    read_bytes: int
    threads: int

    def size(self, name: str) -> int:
        """Bytes of a file; an `OSError` if it is not there."""
        ...

    def read(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fills buffers with the bytes from an offset on, one after the other.

        Threads call it at the same time. An `OSError` if some of the bytes are not there.
        """

    def mapped(self, name: str) -> np.ndarray | None:
        """A file as bytes that are read when they are looked at; None where that cannot be."""
        ...


class LocalFolder:
    """A folder on a file system of the machine, as a `Sink` and a `FileSource`."""

    part_bytes = 4 << 20
    threads = 2  # a copy of memory each: more take the cores from each other
    gap_bytes = 64 << 10
    read_bytes = 512 << 10  # it is still in the processor's cache when its sums are computed

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}

    def create(self, name: str, num_bytes: int) -> SinkFile:
        """See `Sink.create`; the room is taken at once, so that a full disk shows before anything is written."""
        return _LocalFile(self.path / name, num_bytes, self.part_bytes)

    def size(self, name: str) -> int:
        """See `FileSource.size`."""
        return (self.path / name).stat().st_size

    def read(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """See `FileSource.read`."""
        number = self._number(name)
        for some in _few(views):
            left = sum(view.nbytes for view in some)
            while left:
                count = os.preadv(number, some, offset)
                if not count:
                    raise OSError(errno.EIO, f"the file ends {left} bytes too early", str(self.path / name))
                left, offset = left - count, offset + count
                if left:
                    some = _behind(some, count)

    def mapped(self, name: str) -> np.ndarray | None:
        """See `FileSource.mapped`: of a disk of this machine."""
        number = self._number(name)
        size = os.fstat(number).st_size if is_local(self.path) else 0
        return np.frombuffer(mmap.mmap(number, size, prot=mmap.PROT_READ), np.uint8) if size else None

    def close(self) -> None:
        """Lets go of the files."""
        with self._lock:
            self.__del__()

    def __del__(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _number(self, name: str) -> int:
        with self._lock:
            if name not in self._open:
                self._open[name] = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
            return self._open[name]


def is_local(path: Path) -> bool:
    """Whether a folder is on a file system of this machine, as far as one can see: not on NFS and the like."""
    found = ctypes.create_string_buffer(1024)  # more than a `struct statfs`, which begins with the kind
    if ctypes.CDLL(None).statfs(os.fsencode(path), found):
        return False
    return ctypes.c_long.from_buffer(found).value in LOCAL


class _LocalFile:
    """See `SinkFile`."""

    def __init__(self, path: Path, num_bytes: int, part_bytes: int) -> None:
        self._path, self._part_bytes = path, part_bytes
        self._number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            _allocate(self._number, num_bytes)
        except BaseException:
            self.abort()
            raise

    def write(self, number: int, views: Sequence[memoryview]) -> None:
        offset = number * self._part_bytes
        for some in _few(views):
            left = sum(view.nbytes for view in some)
            while left:
                count = os.pwritev(self._number, some, offset)
                left, offset = left - count, offset + count
                if left:
                    some = _behind(some, count)

    def finish(self) -> None:
        os.fsync(self._number)
        self.abort()

    def abort(self) -> None:
        if self._number >= 0:
            os.close(self._number)
            self._number = -1


def _allocate(number: int, num_bytes: int) -> None:
    """Takes room on the disk, where the file system can: the C library would write every block instead."""
    if num_bytes and ctypes.CDLL(None, use_errno=True).fallocate(number, 0, ctypes.c_long(0), ctypes.c_long(num_bytes)):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))
        os.truncate(number, num_bytes)


def _few(views: Sequence[memoryview]) -> list[list[memoryview]]:
    return [list(views[start : start + _MOST_BUFFERS]) for start in range(0, len(views), _MOST_BUFFERS)]


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of some buffers after the first bytes."""
    while count >= views[0].nbytes:
        count -= views[0].nbytes
        views = views[1:]
    return [views[0][count:], *views[1:]]
