"""Where the files of a checkpoint are: a `Sink` writes whole files in parts, a `FileSource` gives ranges of bytes.

A folder of the machine is one of each, `LocalFolder`; a bucket would be another.
"""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import errno
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
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


Parts = Iterable[Callable[[], list[memoryview]]]
"""What is in a file, from its beginning to its end: each is called once, by whoever writes it, and gives buffers."""


class Sink(Protocol):
    """A place for the files of a checkpoint.

    Attributes:
        part_bytes: of the parts in which files are written; a multiple of 256 KiB.
    """

    part_bytes: int

    def write(self, name: str, num_bytes: int, parts: Parts) -> None:
        """Writes a file of so many bytes, once and whole; it would survive a power cut when this returns.

        Each part has `part_bytes`, the last one the rest; it is asked for when there is room for it. An `OSError` if
        the file cannot be written.
        """
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

    def write(self, name: str, num_bytes: int, parts: Parts) -> None:
        """See `Sink.write`; the room is taken at once, so that a full disk shows before anything is written."""
        number = os.open(self.path / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            _allocate(number, num_bytes)
            writes = (
                functools.partial(_write, number, place * self.part_bytes, part) for place, part in enumerate(parts)
            )
            do_all(writes, threads=self.threads)
            os.fsync(number)
        finally:
            os.close(number)

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


def do_all(work: Iterable[Callable[[], None]], *, threads: int) -> None:
    """Does things in threads, a few at a time, and asks for the next when there is room; the first error ends it."""
    with concurrent.futures.ThreadPoolExecutor(threads, "jshard-files") as pool:
        begun: collections.deque[concurrent.futures.Future[None]] = collections.deque()
        try:
            for each in work:
                if len(begun) == 2 * threads:
                    begun.popleft().result()
                begun.append(pool.submit(each))
            for future in begun:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _write(number: int, offset: int, part: Callable[[], list[memoryview]]) -> None:
    for some in _few(part()):
        left = sum(view.nbytes for view in some)
        while left:
            count = os.pwritev(number, some, offset)
            left, offset = left - count, offset + count
            if left:
                some = _behind(some, count)


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
