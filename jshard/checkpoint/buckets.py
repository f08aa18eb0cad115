"""Buckets, `gs://...` and `s3://...`: objects that are written once, conditions on them, and large ones in parts.

Nothing is renamed there, and no lock ends with its process. Instead an object can be written on a condition: that there
is none of its name yet (`create`), or that it is still the one that was read (`replace`). Of all who try at the same
time, one succeeds.

The driver is the package `obstore`. It repeats requests that failed, with longer and longer waits, where that is safe
by itself; here follows what takes a second look: a condition that was met, and whose answer was lost, is not met again.
"""

from __future__ import annotations

import dataclasses
import datetime
import errno
import functools
import importlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jshard.checkpoint.file_io import Parts
from jshard.errors import MissingExtraError, RunError

PART_BYTES = 8 << 20  # of an upload; 10,000 of them are the most that S3 takes
RETRIES = 10  # by the driver, of one request
_RETRIED_S = 180.0  # after so long the driver begins no further one
_ATTEMPTS = 4  # of what the driver does not repeat by itself
_REQUEST_S = 120.0
_IN_FLIGHT = 8
_ADDRESS = re.compile(r"(gs|s3):/+([^/]+)/*(.*?)/*", re.DOTALL)  # as text, or as a `Path` has it
_ENDPOINTS = "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "GOOGLE_BASE_URL"
_WHY = re.compile(r"status code: ([^:]*)|(HTTP error: .*)")

_Found = TypeVar("_Found")
Tag = dict[str, str]
"""Which version of an object one is, as `replace` asks for."""


class BucketError(RunError, OSError):
    """A bucket does not do what is asked of it: what is in it may be good, and is not to be taken for damaged."""


def bucket_error(path: BucketPath, why: str) -> BucketError:
    """The error for an object, with what became of it."""
    return BucketError(
        "The bucket does not do what is asked of it.",
        where=str(path),
        why=why,
        do="look at the network, at who you are there, and at the name of the bucket: "
        + ("gcloud storage ls gs://" if path.scheme == "gs" else "aws s3 ls s3://")
        + path.bucket,
    )


@dataclasses.dataclass(frozen=True)
class BucketPath:
    """An object in a bucket, or what the names of several begin with."""

    scheme: str  # "gs" or "s3"
    bucket: str  # its name
    key: str  # the name of the object, without a slash at the ends

    @classmethod
    def parse(cls, path: str | os.PathLike[str]) -> BucketPath | None:
        """The address of a bucket; None if it is that of something else."""
        found = _ADDRESS.fullmatch(os.fspath(path))
        return None if found is None else cls(found[1], found[2], re.sub("/+", "/", found[3]))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    def __fspath__(self) -> str:
        return str(self)

    def __truediv__(self, name: str) -> BucketPath:
        return dataclasses.replace(self, key=f"{self.key}/{name}".lstrip("/"))

    @property
    def name(self) -> str:
        """What is behind the last slash."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        """What is before it."""
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    @property
    def parents(self) -> tuple[BucketPath, ...]:
        """All that it is below, the nearest first."""
        return (self.parent, *self.parent.parents) if self.key else ()

    def with_name(self, name: str) -> BucketPath:
        """Another one beside it."""
        return self.parent / name

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        try:
            return self.size() >= 0
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Whether there are objects below it."""
        return bool(self.objects())

    def exists(self) -> bool:
        """Whether there is something."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> list[BucketPath]:
        """What is below it, by the first parts of the names."""
        return [self / name for name in dict.fromkeys(name.split("/")[0] for name in self.objects())]

    def read_bytes(self) -> bytes:
        """What an object holds."""
        return self.read()[0]

    def read(self) -> tuple[bytes, Tag]:
        """What an object holds, and its version; a `FileNotFoundError` if there is none."""

        def work() -> tuple[bytes, Tag]:
            found = _driver().get(self._store, self.key)
            return bytes(found.bytes()), _tag(found.meta)

        return self._tried(work)

    def size(self) -> int:
        """Bytes of an object; a `FileNotFoundError` if there is none."""
        return self._tried(lambda: _driver().head(self._store, self.key)["size"])

    def read_range(self, start: int, num_bytes: int) -> memoryview:
        """Bytes of an object; fewer if it ends there."""
        return self._tried(
            lambda: memoryview(_driver().get_range(self._store, self.key, start=start, length=num_bytes))
        )

    def write(self, data: bytes) -> None:
        """Writes an object, whatever there is of that name."""
        self._tried(lambda: _driver().put(self._store, self.key, data))

    def create(self, data: bytes) -> bool:
        """Writes an object if there is none of that name; whether it holds this now."""

        def work() -> bool:
            try:
                _driver().put(self._store, self.key, data, mode="create")
            except (_errors().AlreadyExistsError, _errors().PreconditionError):
                return self.read()[0] == data  # it may be that this one wrote it, and the answer was lost
            return True

        return self._tried(work)

    def replace(self, data: bytes, tag: Tag) -> Tag | None:
        """Writes an object if it is still of a version; the new one, and None if it was not."""

        def work() -> Tag | None:
            try:
                return _tag(_driver().put(self._store, self.key, data, mode=tag))
            except (_errors().PreconditionError, _errors().AlreadyExistsError, FileNotFoundError):
                try:
                    found, now = self.read()
                except FileNotFoundError:
                    return None
                return now if found == data else None

        return self._tried(work)

    def objects(self) -> dict[str, int]:
        """All objects below it: their names, without its own, and their bytes."""
        begin = f"{self.key}/" if self.key else ""

        def work() -> dict[str, int]:
            pages = _driver().list(self._store, self.key or None)
            return {meta["path"].removeprefix(begin): meta["size"] for page in pages for meta in page}

        return self._tried(work)

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects below it, in any order; what is not there is as good as deleted."""
        keys = [(self / name).key for name in names]
        for start in range(0, len(keys), 1000):
            self._tried(lambda start=start: self._delete(keys[start : start + 1000]))

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            _driver().delete(self._store, list(keys))
        except FileNotFoundError:  # S3 does not say so; GCS does, and may stop there
            for key in keys if len(keys) > 1 else ():
                self._delete([key])

    @property
    def _store(self) -> Any:
        return _store(self.scheme, self.bucket)

    def _tried(self, work: Callable[[], _Found]) -> _Found:
        """Does it, more than once if need be; a `BucketError` says what became of it."""
        began_s, repeated = time.monotonic(), 0
        for number in itertools.count(1):
            try:
                return work()
            except BucketError:
                raise
            except (OSError, ValueError, _errors().BaseError) as error:  # files of the driver raise an `OSError`
                text = str(error)
                is_bucket = "NoSuchBucket" in text
                if isinstance(error, FileNotFoundError) and not is_bucket:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from None
                by_driver = int(found[1]) if (found := re.search(r"after (\d+) retries", text)) else 0
                repeated += by_driver
                is_final = by_driver >= RETRIES or is_bucket or re.search("status code: 4(?!08|09|29)", text)
                if is_final or number == _ATTEMPTS or isinstance(error, ValueError):
                    tried = f"{number + repeated} attempts in {time.monotonic() - began_s:.0f} s"
                    raise bucket_error(self, f"{_cause(text)} ({tried}).") from None
            time.sleep(0.1 * 4**number)
        raise AssertionError


Place = Path | BucketPath
"""Where checkpoints are: a folder, or an address in a bucket."""


class BucketFolder:
    """What is below an address of a bucket as a place of files: a `Sink` and a `Source` of packed files."""

    part_bytes = PART_BYTES
    threads = _IN_FLIGHT
    gap_bytes = 1 << 20  # what a request costs in time
    read_bytes = 4 << 20

    def __init__(self, path: BucketPath) -> None:
        self.path = path

    def write(self, name: str, num_bytes: int, parts: Parts) -> None:
        """See `Sink.write`; it is there when all of it is, and the driver uploads several parts at a time.

        What was uploaded of one that fails goes when the bucket's rule for abandoned uploads says so.
        """
        path, writer = self.path / name, None  # one that is let go of without `close` is never seen
        for views in (part() for part in parts):
            if writer is None:  # the first part begins the upload, which may be begun again; the driver repeats others
                writer = path._tried(lambda views=views: self._begin(path, views))
                continue
            try:
                for view in views:
                    writer.write(view)
            except (OSError, _errors().BaseError) as error:
                raise bucket_error(path, f"{_cause(str(error))} (a part of an upload, {RETRIES} retries).") from None
        assert writer is not None
        try:
            writer.close()
        except (OSError, _errors().BaseError) as error:
            if not _has_size(path, num_bytes):  # else the answer was lost
                why = f"{_cause(str(error))} (the end of an upload of {num_bytes} bytes)."
                raise bucket_error(path, why) from None

    def _begin(self, path: BucketPath, views: Sequence[memoryview]) -> Any:
        writer = _driver().open_writer(path._store, path.key, buffer_size=PART_BYTES, max_concurrency=_IN_FLIGHT)
        for view in views:
            writer.write(view)
        return writer

    def read(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """See `Source.read`."""
        wanted = sum(view.nbytes for view in views)
        found = (self.path / name).read_range(offset, wanted)
        if found.nbytes < wanted:
            raise OSError(errno.EIO, f"it ends {wanted - found.nbytes} bytes too early", str(self.path / name))
        place = 0
        for view in views:
            view[:] = found[place : place + view.nbytes]
            place += view.nbytes

    def mapped(self, name: str) -> np.ndarray | None:
        """See `Source.mapped`."""
        return None


def _has_size(path: BucketPath, num_bytes: int) -> bool:
    try:
        return path.size() == num_bytes
    except OSError:
        return False


@functools.cache
def _store(scheme: str, bucket: str) -> Any:
    """The driver's client; who one is, and where the service is, it finds as the tools of the clouds do."""
    stores = _driver().store
    in_the_clear = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    return (stores.S3Store if scheme == "s3" else stores.GCSStore)(
        bucket,
        client_options={"allow_http": in_the_clear, "timeout": datetime.timedelta(seconds=_REQUEST_S)},
        retry_config={"max_retries": RETRIES, "retry_timeout": datetime.timedelta(seconds=_RETRIED_S)},
    )


@functools.cache
def _driver() -> Any:
    try:
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")
    except ImportError as error:
        raise MissingExtraError(
            "Buckets need a package that is not installed.",
            where="gs:// or s3://",
            why=f"{error}.",
            do="pip install 'jshard[buckets]'",
        ) from error


def _errors() -> Any:
    return _driver().exceptions


def _tag(meta: Any) -> Tag:
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


def _cause(text: str) -> str:
    """What the driver says of a failure, without what it did to come to it."""
    line = text.splitlines()[0] if text else "no reason given"
    found = _WHY.search(line)
    code = re.search("<Code>(.*?)</Code>", text)
    return (found[1] or found[2] if found else line)[:300] + (f", {code[1]}" if code else "")
