"""Files of a checkpoint, and the host memory that they are read into.

A `Sink` writes whole files in parts; a `FileSource` reads ranges of bytes. A local folder is both, and so is a bucket
(`buckets`). Only the wanted ranges of a file are read, and every block is checked. Ranges that are close together are
merged into one read, which fills all their buffers at once.

Memory is pooled, because touching fresh memory takes several times as long as the read itself. On a CPU, jax uses a
64-byte-aligned array without a copy; such memory belongs to the arrays until the last of them is freed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import dataclasses
import errno
import functools
import itertools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jshard._files import open_number
from jshard.checkpoint.layout import BLOCK_BYTES, block_sum, cut_views, spaced, up

_ALIGNED, _PAGE = 64, 4096
_LEAST_BYTES = 64 << 10  # smaller ones are not worth keeping
_KEPT_BYTES = 256 << 20


class HostMemory:
    """Buffers that are returned when the last view of them is freed, as Python's reference counts show."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._most_bytes, self.kept_bytes = kept_bytes, 0
        self._kept: dict[int, list[memoryview]] = {}  # by size
        self._lock = threading.RLock()  # a buffer may be returned while this thread holds the lock

    def take(self, num_bytes: int) -> np.ndarray:
        """An uninitialized buffer of this many bytes."""
        if num_bytes < _LEAST_BYTES:
            return np.empty(num_bytes, np.uint8)
        size = -(-num_bytes // _PAGE) * _PAGE
        with self._lock:
            memory = self._pop(size)
        if memory is None:
            fresh = np.empty(size + _ALIGNED, np.uint8)
            memory = fresh.data[-fresh.ctypes.data % _ALIGNED :][:size]
        # Every view of this array refers to it, and not to its base, because the base is not an array.
        given = np.frombuffer(memory, np.uint8, num_bytes)
        weakref.finalize(given, self._back, memory).atexit = False
        return given

    def _pop(self, size: int) -> memoryview | None:
        """A pooled buffer of this size; if there is none, others are freed to make room for a new one."""
        if found := self._kept.get(size):
            self.kept_bytes -= size
            return found.pop()
        gone = 0
        while gone < size and (other := next((other for other, kept in self._kept.items() if kept), None)):
            self._kept[other].pop()
            gone, self.kept_bytes = gone + other, self.kept_bytes - other
        return None

    def _back(self, memory: memoryview) -> None:
        with self._lock:
            if self.kept_bytes + memory.nbytes <= self._most_bytes:
                self.kept_bytes += memory.nbytes
                self._kept.setdefault(memory.nbytes, []).append(memory)


HOST_MEMORY = HostMemory()
"""The pool of the process."""


@dataclasses.dataclass(frozen=True)
class MappedBoxes:
    """Boxes of a leaf that are parts of a memory-mapped file; nothing is copied."""

    boxes: list[np.ndarray]


class Slab:
    """Boxes of a leaf, all of one shape, in one buffer, with the same spacing as in a file."""

    def __init__(self, count: int, shape: Sequence[int], dtype: np.dtype, memory: HostMemory | None = None) -> None:
        size = math.prod(shape) * dtype.itemsize
        self.stride = spaced(size)
        num_bytes = (count - 1) * self.stride + size
        self.bytes = np.empty(num_bytes, np.uint8) if memory is None else memory.take(num_bytes)
        strides = [dtype.itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        boxes = np.ndarray((count, *shape), dtype, self.bytes.data, strides=(self.stride, *strides))
        self.boxes = [boxes[number, ...] for number in range(count)]


LOCAL = {
    0xEF53: "ext",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
}
"""File-system types that are on a local disk or in local memory."""

_MOST_BUFFERS = 1024  # in one system call


Parts = Iterable[Callable[[], list[memoryview]]]
"""The content of a file in order: each part is called once, by the thread that writes it, and returns buffers."""


class Sink(Protocol):
    """A place for the files of a checkpoint."""

    part_bytes: int  # size of the parts in which files are written; a multiple of 256 KiB

    def write(self, name: str, num_bytes: int, parts: Parts) -> None:
        """Writes a whole file, which is on disk on return; each part has `part_bytes`, and the last one the rest."""
        ...


class FileSource(Protocol):
    """The files of a complete checkpoint."""

    gap_bytes: int  # ranges with a smaller gap between them are merged into one read
    read_bytes: int  # the largest single read; a multiple of 256 KiB
    threads: int  # number of concurrent reads that is useful

    def read(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fills buffers in order with the bytes from an offset on; called by several threads at once."""

    def mapped(self, name: str) -> np.ndarray | None:
        """A memory-mapped file; None if it cannot be mapped."""
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
        self._open: dict[str, int] = {}

    def write(self, name: str, num_bytes: int, parts: Parts) -> None:
        """See `Sink.write`; the space is allocated first, so that a full disk shows before anything is written."""
        number = os.open(self.path / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            _allocate(number, num_bytes)
            write = lambda place, part: _move(os.pwritev, number, place * self.part_bytes, part())
            do_all((functools.partial(write, *each) for each in enumerate(parts)), threads=self.threads)
            os.fsync(number)
        finally:
            os.close(number)

    def read(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """See `FileSource.read`."""
        _move(os.preadv, self._number(name), offset, views)

    def mapped(self, name: str) -> np.ndarray | None:
        """See `FileSource.mapped`; only files on a local disk are mapped."""
        number = self._number(name)
        size = os.fstat(number).st_size if is_local(self.path) else 0
        return np.frombuffer(mmap.mmap(number, size, prot=mmap.PROT_READ), np.uint8) if size else None

    def __del__(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _number(self, name: str) -> int:
        with self._lock:
            if name not in self._open:
                self._open[name] = open_number(self.path / name)
            return self._open[name]


def is_local(path: Path) -> bool:
    """Whether a folder appears to be on a local file system, not on NFS and the like."""
    found = ctypes.create_string_buffer(1024)  # larger than a `struct statfs`, which begins with the type
    if ctypes.CDLL(None).statfs(os.fsencode(path), found):
        return False
    return ctypes.c_long.from_buffer(found).value in LOCAL


def do_all(work: Iterable[Callable[[], None]], *, threads: int) -> None:
    """Runs work in threads, a few at a time, and takes the next item when one is free; the first error ends it."""
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


def _allocate(number: int, num_bytes: int) -> None:
    """Allocates disk space where the file system supports it; the C library would instead write every block."""
    if num_bytes and ctypes.CDLL(None, use_errno=True).fallocate(number, 0, ctypes.c_long(0), ctypes.c_long(num_bytes)):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))
        os.truncate(number, num_bytes)


def _move(call: Callable[..., int], number: int, offset: int, views: Sequence[memoryview]) -> None:
    """Moves all bytes of some buffers from or to a file; one system call may move fewer."""
    views, first = [view for view in views if view.nbytes], 0
    while first < len(views):
        count = call(number, views[first : first + _MOST_BUFFERS], offset)
        if not count:
            raise OSError(errno.EIO, "the file ends too early")
        offset += count
        while first < len(views) and count >= views[first].nbytes:
            count, first = count - views[first].nbytes, first + 1
        if count:
            views[first] = views[first][count:]


READ_BYTES = 4 << 20
_counting = threading.Lock()


class Range:
    """A range of a file to be read into one buffer."""

    __slots__ = ("_left", "_then", "_view", "end", "offset")

    def __init__(
        self,
        offset: int,
        num_bytes: int,
        view: memoryview | None = None,
        then: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.offset, self.end, self._view, self._then, self._left = offset, offset + num_bytes, view, then, 0

    def part(self, start: int, stop: int) -> memoryview:
        """The buffer for some bytes of the file."""
        with _counting:
            if self._view is None:
                self._view = HOST_MEMORY.take(self.end - self.offset).data
        return self._view[start - self.offset : stop - self.offset]

    def expect(self) -> None:
        """Counts one more read that covers part of the range."""
        self._left += 1

    def came(self) -> None:
        """Counts one such read as done."""
        with _counting:
            self._left -= 1
            if self._left:
                return
        if self._then is not None and self._view is not None:
            self._then(self._view)
        self._view = None


class ChangedError(ValueError):
    """Bytes of a file have changed since they were written."""

    def __init__(self, name: str, start: int, stop: int) -> None:
        self.name, self.start, self.stop = name, start, stop
        super().__init__(f"{name}: bytes {start} to {stop} have changed since they were written")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """One read of a file, and the ranges that it covers in part; any thread may run it."""

    source: FileSource  # the folder or bucket of the file
    name: str  # the file's name
    start: int  # the first byte
    stop: int  # one past the last byte
    ranges: Sequence[Range]  # the wanted ranges, in file order
    sums: np.ndarray | None  # checksums of the file's blocks; None to check nothing
    mapped: np.ndarray | None = None  # the mapped file, if it is only checked

    @property
    def num_bytes(self) -> int:
        """How many."""
        return self.stop - self.start

    def __call__(self, given: Iterable[memoryview] | None = None) -> None:
        """Reads, or takes bytes already read, and checks them; raises `ChangedError` if they have changed."""
        taken = None if given is None else collections.deque(given)
        start = self.start
        views = self._views() if self.mapped is None else [self.mapped[start : self.stop].data]
        for some in cut_views(views, self.source.read_bytes):
            if self.mapped is not None:
                pass
            elif taken is None:
                self.source.read(self.name, start, some)
            else:
                for left in some:
                    for part in take_bytes(taken, left.nbytes):
                        left[: part.nbytes] = part
                        left = left[part.nbytes :]
            if self.sums is not None:
                for begin, end in changed(start, some, self.sums):
                    raise ChangedError(self.name, begin, end)
            start += self.source.read_bytes
        for each in self.ranges if self.mapped is None else ():
            each.came()

    def _views(self) -> Iterator[memoryview]:
        """The buffers for the whole read; unwanted bytes go into scratch buffers."""
        place = self.start
        for each in self.ranges:
            if each.offset > place:
                yield HOST_MEMORY.take(each.offset - place).data
                place = each.offset
            until = min(self.stop, each.end)
            yield each.part(place, until)
            place = until
        if self.stop > place:
            yield HOST_MEMORY.take(self.stop - place).data


def take_bytes(given: collections.deque[memoryview], num_bytes: int) -> list[memoryview]:
    """Takes this many bytes off the start of some buffers."""
    found: list[memoryview] = []
    while num_bytes:
        view = given.popleft()
        if view.nbytes > num_bytes:
            given.appendleft(view[num_bytes:])
        found.append(view[:num_bytes])
        num_bytes -= found[-1].nbytes
    return found


def reads(
    source: FileSource,
    name: str,
    ranges: Iterable[Range],
    *,
    sums: np.ndarray | None,
    end: int,
    mapped: np.ndarray | None = None,
) -> Iterator[Read]:
    """The reads that cover some ranges of a file."""
    unit = 1 if sums is None else BLOCK_BYTES
    run: list[Range] = []
    for each in sorted(ranges, key=lambda each: each.offset):
        if run and each.offset // unit * unit - up(run[-1].end, unit) > source.gap_bytes:
            yield from _run(source, name, run, sums, end, mapped)
            run = []
        run.append(each)
    if run:
        yield from _run(source, name, run, sums, end, mapped)


def _run(
    source: FileSource, name: str, run: Sequence[Range], sums: np.ndarray | None, end: int, mapped: np.ndarray | None
) -> Iterator[Read]:
    """Cuts nearby ranges into reads of some MiB, at block boundaries if they are checked."""
    unit = 1 if sums is None else BLOCK_BYTES
    cuts = [*range(run[0].offset // unit * unit, run[-1].end, READ_BYTES), min(up(run[-1].end, unit), end)]
    found, first = [], 0
    for start, stop in itertools.pairwise(cuts):
        while run[first].end <= start:
            first += 1
        here = list(itertools.takewhile(lambda each: each.offset < stop, itertools.islice(run, first, None)))  # noqa: B023
        for each in here:
            each.expect()
        found.append(Read(source=source, name=name, start=start, stop=stop, ranges=here, sums=sums, mapped=mapped))
    yield from found  # all reads are counted before the first one runs


def changed(start: int, views: Sequence[memoryview], sums: np.ndarray) -> Iterator[tuple[int, int]]:
    """The ranges of blocks of a file that have changed."""
    for number, block in enumerate(cut_views(views, BLOCK_BYTES), start // BLOCK_BYTES):
        if block_sum(block) != int(sums[number]):
            yield number * BLOCK_BYTES, number * BLOCK_BYTES + sum(view.nbytes for view in block)


def flush(path: str | Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have nothing to flush for a folder
            raise
    finally:
        os.close(number)
