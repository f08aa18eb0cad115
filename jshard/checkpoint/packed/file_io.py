"""Files of a checkpoint: where they are written and read, and a local folder of them.

A `Sink` writes files in parts; a `FileSource` reads ranges of bytes. A local folder is both, and so is a bucket
(`buckets`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import errno
import functools
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jshard._files import open_number

LOCAL = {  # `f_type` of statfs(2)
    0xEF53: "ext",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
}
"""File-system types that are on a local disk or in local memory."""

_MOST_BUFFERS = 1024  # in one system call: IOV_MAX of Linux


Parts = Iterable[Callable[[], list[memoryview]]]
"""The content of a file in order: each part is called once, by the thread that writes it, and returns buffers."""


class Sink(Protocol):
    """A place for the files of a checkpoint."""

    part_bytes: int  # size of the parts in which files are written; a multiple of 256 KiB, the block of a checksum

    def write(self, name: str, num_bytes: int, parts: Parts) -> None:
        """Writes a file, which is on disk on return; each part has `part_bytes`, and the last one the rest."""
        ...


class FileSource(Protocol):
    """The files of a complete checkpoint."""

    gap_bytes: int  # ranges with a smaller gap between them are merged into one read
    read_bytes: int  # the largest single read; a multiple of 256 KiB, the block of a checksum
    threads: int  # number of concurrent reads that is useful

    def read(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fills buffers in order with the bytes from an offset on; called by several threads at once."""

    def mapped(self, name: str) -> np.ndarray | None:
        """Returns a memory-mapped file; None if it cannot be mapped."""
        ...


class LocalFolder:
    """A folder on a local file system, as a `Sink` and a `FileSource`."""

    part_bytes = 4 << 20
    threads = 2  # each is a memory copy; more would compete for cores
    gap_bytes = 64 << 10
    read_bytes = 512 << 10  # still in the processor's cache when its checksums are computed

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._open_files: dict[str, int] = {}  # descriptors, until this object is freed

    def write(self, name: str, num_bytes: int, parts: Parts) -> None:
        """See `Sink.write`; the space is allocated first, so that a full disk shows before anything is written."""
        # O_EXCL: no file is ever replaced, and no link is followed.
        file = os.open(self.path / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            _allocate(file, num_bytes)
            writes = (functools.partial(self._write_part, file, number, part) for number, part in enumerate(parts))
            do_all(writes, threads=self.threads)
            # Before the manifest is written: it says that this file is whole, also after a power cut.
            os.fsync(file)
        finally:
            os.close(file)

    def _write_part(self, file: int, number: int, part: Callable[[], list[memoryview]]) -> None:
        views = part()
        offset = number * self.part_bytes
        _move_all(os.pwritev, file, offset, views)
        _start_writing(file, offset, sum(view.nbytes for view in views))

    def read(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """See `FileSource.read`."""
        _move_all(os.preadv, self._file(name), offset, views)

    def mapped(self, name: str) -> np.ndarray | None:
        """See `FileSource.mapped`; only files on a local disk are mapped."""
        file = self._file(name)
        if not is_local(self.path):
            return None
        size = os.fstat(file).st_size
        if not size:  # an empty file cannot be mapped
            return None
        # The array keeps the mapping, and this a descriptor of its own: both may outlive the folder object.
        return np.frombuffer(mmap.mmap(file, size, prot=mmap.PROT_READ), np.uint8)

    def __del__(self) -> None:
        while self._open_files:
            os.close(self._open_files.popitem()[1])

    def _file(self, name: str) -> int:
        with self._lock:
            # Under the lock: of two threads that open a file, one would lose its descriptor.
            if name not in self._open_files:
                self._open_files[name] = open_number(self.path / name)
            return self._open_files[name]


def is_local(path: Path) -> bool:
    """Returns whether a folder appears to be on a local file system, not on NFS and the like."""
    status = ctypes.create_string_buffer(1024)  # larger than a `struct statfs`, which begins with the type
    if ctypes.CDLL(None).statfs(os.fsencode(path), status):
        return False
    return ctypes.c_long.from_buffer(status).value in LOCAL


def do_all(work: Iterable[Callable[[], None]], *, threads: int) -> None:
    """Runs work in threads, a few at a time, and takes the next item when one is free; the first error ends it."""
    with concurrent.futures.ThreadPoolExecutor(threads, "jshard-files") as pool:
        futures: collections.deque[concurrent.futures.Future[None]] = collections.deque()
        try:
            for item in work:
                if len(futures) == 2 * threads:  # few parts of a file are in memory at once
                    futures.popleft().result()
                futures.append(pool.submit(item))
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _allocate(file: int, num_bytes: int) -> None:
    """Allocates disk space where the file system supports it; the C library would instead write every block."""
    if not num_bytes:
        return
    # `off_t` is a long. ctypes passes an int of Python as an int of C, which would cut it off.
    failed = ctypes.CDLL(None, use_errno=True).fallocate(file, 0, ctypes.c_long(0), ctypes.c_long(num_bytes))
    if failed:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))
        # Not supported there: the file has its size, and no space.
        os.truncate(file, num_bytes)


_SYNC_FILE_RANGE_WRITE = 2  # of sync_file_range(2)


def _start_writing(file: int, offset: int, num_bytes: int) -> None:
    """Asks the system to begin to write a part of a file to the disk, where it can: it would begin at the end.

    It only begins: what is on the disk says `os.fsync`.
    """
    with contextlib.suppress(AttributeError):  # other C libraries and systems do not have it
        # `off_t` is a long, as in `_allocate`. What it returns does not matter: an error shows in `os.fsync`.
        start = ctypes.CDLL(None).sync_file_range
        start(file, ctypes.c_long(offset), ctypes.c_long(num_bytes), _SYNC_FILE_RANGE_WRITE)


def _move_all(call: Callable[..., int], file: int, offset: int, views: Sequence[memoryview]) -> None:
    """Moves all bytes of some buffers from or to a file; one system call may move fewer.

    Args:
        call: `os.preadv` or `os.pwritev`.
        file: an open file.
        offset: the position in the file.
        views: the buffers.
    """
    remaining = collections.deque(view for view in views if view.nbytes)
    while remaining:
        num_bytes = call(file, list(itertools.islice(remaining, _MOST_BUFFERS)), offset)
        if not num_bytes:
            raise OSError(errno.EIO, "the file ends too early")
        offset += num_bytes
        while remaining and num_bytes >= remaining[0].nbytes:
            num_bytes -= remaining.popleft().nbytes
        if num_bytes:
            remaining[0] = remaining[0][num_bytes:]


def flush(path: str | Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have nothing to flush for a folder
            raise
    finally:
        os.close(file)
