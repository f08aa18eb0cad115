"""Buckets, `gs://...` and `s3://...`: write-once objects, conditional writes, and large objects uploaded in parts.

Buckets have no rename, and no lock that ends with its process. Instead, a write can be conditional: on the name being
unused (`create`), or on the object still being the version that was read (`replace`). If several writers try at the
same time, one succeeds.

The driver is the package `obstore`. It retries failed requests with increasing waits, where a retry is safe by itself.
This module handles the other case: a conditional write that succeeded, but whose answer was lost, fails when retried.
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

from jshard._files import read_bytes
from jshard.checkpoint.file_io import Parts
from jshard.errors import MissingExtraError, RunError

PART_BYTES = 8 << 20  # of an upload; S3 accepts at most 10,000
RETRIES = 10  # by the driver, of one request
_RETRIED_S = 180.0  # after this time the driver starts no further retry
_ATTEMPTS = 4  # of requests that the driver does not retry itself
_REQUEST_S = 120.0
_IN_FLIGHT = 8
_ADDRESS = re.compile(r"(gs|s3):/+([^/]+)/*(.*?)/*", re.DOTALL)  # as text, or as a `Path` writes it
_ENDPOINTS = "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "GOOGLE_BASE_URL"
_WHY = re.compile(r"status code: ([^:]*)|(HTTP error: .*)")

_Found = TypeVar("_Found")
Tag = dict[str, str]
"""The version of an object, as `replace` needs it."""


class BucketError(RunError, OSError):
    """A request to a bucket failed; its contents may be intact, and must not be treated as damaged."""


def bucket_error(path: BucketPath, why: str) -> BucketError:
    """The error for a failed request for an object."""
    return BucketError(
        "The request to the bucket failed.",
        where=str(path),
        why=why,
        do="check the network, your credentials and the name of the bucket: "
        + ("gcloud storage ls gs://" if path.scheme == "gs" else "aws s3 ls s3://")
        + path.bucket,
    )


@dataclasses.dataclass(frozen=True)
class BucketPath:
    """An object in a bucket, or a prefix of object names."""

    scheme: str  # "gs" or "s3"
    bucket: str  # its name
    key: str  # the name of the object, without a slash at the ends

    @classmethod
    def parse(cls, path: str | os.PathLike[str]) -> BucketPath | None:
        """Parses a bucket address; None if the path is not one."""
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
        """The part after the last slash."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        """The part before the last slash."""
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    @property
    def parents(self) -> tuple[BucketPath, ...]:
        """All parents, the nearest first."""
        return (self.parent, *self.parent.parents) if self.key else ()

    def with_name(self, name: str) -> BucketPath:
        """A sibling with another name."""
        return self.parent / name

    def is_file(self) -> bool:
        """Whether an object of this name exists."""
        try:
            return self.size() >= 0
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Whether objects exist below it."""
        return bool(self.objects())

    def exists(self) -> bool:
        """Whether an object exists here or below."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> list[BucketPath]:
        """Its children: the distinct first parts of the names below it."""
        return [self / name for name in dict.fromkeys(name.split("/")[0] for name in self.objects())]

    def read_bytes(self) -> bytes:
        """The content of an object."""
        return self.read()[0]

    def read(self) -> tuple[bytes, Tag]:
        """The content and version of an object; raises `FileNotFoundError` if it does not exist."""

        def work() -> tuple[bytes, Tag]:
            found = _driver().get(self._store, self.key)
            return bytes(found.bytes()), _tag(found.meta)

        return self._tried(work)

    def size(self) -> int:
        """Size of an object in bytes; raises `FileNotFoundError` if it does not exist."""
        return self._tried(lambda: _driver().head(self._store, self.key)["size"])

    def read_range(self, start: int, num_bytes: int) -> memoryview:
        """A range of an object's bytes; shorter if the object ends there."""
        return self._tried(
            lambda: memoryview(_driver().get_range(self._store, self.key, start=start, length=num_bytes))
        )

    def write(self, data: bytes) -> None:
        """Writes an object, replacing any existing one."""
        self._tried(lambda: _driver().put(self._store, self.key, data))

    def create(self, data: bytes) -> bool:
        """Writes an object if the name is unused; returns whether the object now holds this data."""

        def work() -> bool:
            try:
                _driver().put(self._store, self.key, data, mode="create")
            except (_errors().AlreadyExistsError, _errors().PreconditionError):
                return self.read()[0] == data  # this process may have written it and lost the answer
            return True

        return self._tried(work)

    def replace(self, data: bytes, tag: Tag) -> Tag | None:
        """Writes an object if it still has the given version; returns the new version, or None if it had changed."""

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
        """All objects below it: names relative to it, and sizes in bytes."""
        begin = f"{self.key}/" if self.key else ""

        def work() -> dict[str, int]:
            pages = _driver().list(self._store, self.key or None)
            return {meta["path"].removeprefix(begin): meta["size"] for page in pages for meta in page}

        return self._tried(work)

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects below it, in any order; missing ones are ignored."""
        keys = [(self / name).key for name in names]
        for start in range(0, len(keys), 1000):
            self._tried(lambda start=start: self._delete(keys[start : start + 1000]))

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            _driver().delete(self._store, list(keys))
        except FileNotFoundError:  # S3 does not report missing objects; GCS does, and may stop there
            for key in keys if len(keys) > 1 else ():
                self._delete([key])

    @property
    def _store(self) -> Any:
        return _store(self.scheme, self.bucket)

    def _tried(self, work: Callable[[], _Found]) -> _Found:
        """Runs `work`, with retries where needed; raises `BucketError` if it fails."""
        began_s, repeated = time.monotonic(), 0
        for number in itertools.count(1):
            try:
                return work()
            except BucketError:
                raise
            except (OSError, ValueError, _errors().BaseError) as error:  # the driver's files raise `OSError`
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
"""Where checkpoints are stored: a folder, or an address in a bucket."""


def contents(path: Place, most_bytes: int) -> bytes:
    """The content of a small file or object; raises as `_files.read_bytes`."""
    if isinstance(path, Path):
        return read_bytes(path, most_bytes)
    return path.read_bytes()


class BucketFolder:
    """The objects below a bucket address as files: a `Sink` and a `Source` of packed files."""

    part_bytes = PART_BYTES
    threads = _IN_FLIGHT
    gap_bytes = 1 << 20  # the time of a request, in bytes
    read_bytes = 4 << 20

    def __init__(self, path: BucketPath) -> None:
        self.path = path

    def write(self, name: str, num_bytes: int, parts: Parts) -> None:
        """See `Sink.write`; the object appears only when it is complete. The driver uploads several parts at a time.

        The parts of a failed upload are removed by the bucket's rule for abandoned uploads.
        """
        path, writer = self.path / name, None  # without `close`, the object never appears
        for views in (part() for part in parts):
            if writer is None:  # the first part starts the upload and may be retried here; the driver retries others
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
            raise OSError(errno.EIO, f"the file is {wanted - found.nbytes} bytes too short", str(self.path / name))
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
    """The driver's client; it finds credentials and the endpoint as the cloud vendors' tools do."""
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
    """The driver's reason for a failure, without the steps that led to it."""
    line = text.splitlines()[0] if text else "no reason given"
    found = _WHY.search(line)
    code = re.search("<Code>(.*?)</Code>", text)
    return (found[1] or found[2] if found else line)[:300] + (f", {code[1]}" if code else "")
