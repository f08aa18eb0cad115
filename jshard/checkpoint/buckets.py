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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import numpy as np

from jshard._files import read_bytes
from jshard.checkpoint.packed.file_io import Parts
from jshard.errors import MissingExtraError, RunError

PART_BYTES = 8 << 20  # of an upload; S3 accepts at most 10,000
RETRIES = 10  # by the driver, of one request
_RETRIED_S = 180.0  # after this time the driver starts no further retry
_MOST_DELETED = 1000  # objects in one request
_ATTEMPTS = 4  # of requests that the driver does not retry itself
_REQUEST_S = 120.0  # for one attempt
_IN_FLIGHT = 8  # parts of an upload, or reads, at the same time
_ADDRESS = re.compile(r"(gs|s3):/+([^/]+)/*(.*?)/*", re.DOTALL)  # as text, or as a `Path` writes it
_ENDPOINTS = "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "GOOGLE_BASE_URL"
_CAUSE = re.compile(r"status code: ([^:]*)|(HTTP error: .*)")
_REFUSED = re.compile("status code: 4(?!08|09|29)")  # not those of a time limit, a conflict, or too many requests

_Result = TypeVar("_Result")

_Client: TypeAlias = Any
"""A store of the driver, which need not be installed."""

_Upload: TypeAlias = Any
"""A file of the driver that is open for writing."""

Tag = dict[str, str]
"""The version of an object, as `replace` needs it."""


class BucketError(RunError, OSError):
    """A request to a bucket failed; its contents may be intact, and must not be treated as damaged."""


def bucket_error(path: BucketPath, why: str) -> BucketError:
    """Returns the error for a failed request for an object."""
    list_command = "gcloud storage ls gs://" if path.scheme == "gs" else "aws s3 ls s3://"
    return BucketError(
        "The request to the bucket failed.",
        where=str(path),
        why=why,
        do=f"check the network, your credentials and the name of the bucket: {list_command}{path.bucket}",
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
        match = _ADDRESS.fullmatch(os.fspath(path))
        if match is None:
            return None
        scheme, bucket, key = match.groups()
        return cls(scheme, bucket, re.sub("/+", "/", key))

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
        if not self.key:
            return ()
        return (self.parent, *self.parent.parents)

    def with_name(self, name: str) -> BucketPath:
        """Returns a sibling with another name."""
        return self.parent / name

    def is_file(self) -> bool:
        """Returns whether an object of this name exists."""
        try:
            return self.size() >= 0
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Returns whether objects exist below it."""
        return bool(self.objects())

    def exists(self) -> bool:
        """Returns whether an object exists here or below."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> list[BucketPath]:
        """Returns its children: the distinct first parts of the names below it."""
        names = dict.fromkeys(name.split("/")[0] for name in self.objects())
        return [self / name for name in names]

    def read_bytes(self) -> bytes:
        """Returns the content of an object."""
        return self.read()[0]

    def read(self) -> tuple[bytes, Tag]:
        """Returns the content and version of an object; raises `FileNotFoundError` if it does not exist."""

        def request() -> tuple[bytes, Tag]:
            answer = _driver().get(self._store, self.key)
            return bytes(answer.bytes()), _tag(answer.meta)

        return self._with_retries(request)

    def size(self) -> int:
        """Returns the size of an object in bytes; raises `FileNotFoundError` if it does not exist."""
        return self._with_retries(lambda: _driver().head(self._store, self.key)["size"])

    def read_range(self, start: int, num_bytes: int) -> memoryview:
        """Returns a range of an object's bytes; shorter if the object ends there."""

        def request() -> memoryview:
            return memoryview(_driver().get_range(self._store, self.key, start=start, length=num_bytes))

        return self._with_retries(request)

    def write(self, data: bytes) -> None:
        """Writes an object, replacing any existing one."""
        self._with_retries(lambda: _driver().put(self._store, self.key, data))

    def create(self, data: bytes) -> bool:
        """Writes an object if the name is unused; returns whether the object now holds this data."""

        def request() -> bool:
            try:
                _driver().put(self._store, self.key, data, mode="create")
            except (_errors().AlreadyExistsError, _errors().PreconditionError):
                return self.read()[0] == data  # this process may have written it and lost the answer
            return True

        return self._with_retries(request)

    def replace(self, data: bytes, tag: Tag) -> Tag | None:
        """Writes an object if it still has the given version; returns the new version, or None if it had changed."""

        def request() -> Tag | None:
            try:
                return _tag(_driver().put(self._store, self.key, data, mode=tag))
            except (_errors().PreconditionError, _errors().AlreadyExistsError, FileNotFoundError):
                return self._version_with(data)

        return self._with_retries(request)

    def _version_with(self, data: bytes) -> Tag | None:
        """Returns the version of the object if it has this data: this process may have lost the answer to a write."""
        try:
            content, tag = self.read()
        except FileNotFoundError:
            return None
        # No two writes have the same data: those that use `replace` put a count into it, see `SeriesLease`.
        return tag if content == data else None

    def objects(self) -> dict[str, int]:
        """Returns all objects below it: names relative to it, and sizes in bytes."""
        prefix = f"{self.key}/" if self.key else ""

        def request() -> dict[str, int]:
            sizes: dict[str, int] = {}
            for page in _driver().list(self._store, self.key or None):
                for meta in page:
                    sizes[meta["path"].removeprefix(prefix)] = meta["size"]
            return sizes

        return self._with_retries(request)

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects below it, in any order; missing ones are ignored."""
        keys = [(self / name).key for name in names]
        for start in range(0, len(keys), _MOST_DELETED):
            request = functools.partial(self._delete, keys[start : start + _MOST_DELETED])
            self._with_retries(request)

    def _delete(self, keys: Sequence[str]) -> None:
        try:
            _driver().delete(self._store, list(keys))
        except FileNotFoundError:  # S3 does not report missing objects; GCS does, and may stop there
            # One by one, as each of the others may still exist. A single missing one needs no deletion.
            if len(keys) > 1:
                for key in keys:
                    self._delete([key])

    @property
    def _store(self) -> _Client:
        return _store(self.scheme, self.bucket)

    def _with_retries(self, request: Callable[[], _Result]) -> _Result:
        """Runs a request, with retries where needed; raises `BucketError` if it fails."""
        start_s = time.monotonic()
        num_driver_retries = 0
        for number in itertools.count(1):
            try:
                return request()
            except BucketError:
                raise
            except (OSError, ValueError, _errors().BaseError) as error:  # the driver's files raise `OSError`
                failure = _RequestFailure.of(error)
                if failure.is_missing_object:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from None
                num_driver_retries += failure.num_driver_retries
                if failure.is_final or number == _ATTEMPTS:
                    duration_s = time.monotonic() - start_s
                    why = f"{failure.cause} ({number + num_driver_retries} attempts in {duration_s:.0f} s)."
                    raise bucket_error(self, why) from None
            # 0.4, 1.6 and 6.4 s.
            time.sleep(0.1 * 4**number)
        raise AssertionError


@dataclasses.dataclass(frozen=True)
class _RequestFailure:
    """What the driver says of a failed request."""

    cause: str  # without the steps that led to it
    num_driver_retries: int
    is_missing_object: bool
    is_final: bool  # whether another attempt cannot succeed

    @classmethod
    def of(cls, error: Exception) -> _RequestFailure:
        """Reads it from the text of the driver's error, which has no fields."""
        text = str(error)
        is_missing_bucket = "NoSuchBucket" in text
        retries = re.search(r"after (\d+) retries", text)
        num_retries = int(retries[1]) if retries is not None else 0
        is_refused = _REFUSED.search(text) is not None
        return cls(
            cause=_cause(text),
            num_driver_retries=num_retries,
            is_missing_object=isinstance(error, FileNotFoundError) and not is_missing_bucket,
            is_final=num_retries >= RETRIES or is_missing_bucket or is_refused or isinstance(error, ValueError),
        )


Place = Path | BucketPath
"""Where checkpoints are stored: a folder, or an address in a bucket."""


def contents(path: Place, most_bytes: int) -> bytes:
    """Returns the content of a small file or object; raises as `_files.read_bytes`."""
    if isinstance(path, Path):
        return read_bytes(path, most_bytes)
    return path.read_bytes()


class BucketFolder:
    """The objects below a bucket address as files: a `Sink` and a `FileSource` of packed files."""

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
        path = self.path / name
        writer: _Upload = None  # without `close`, the object never appears
        for part in parts:
            views = part()
            if writer is None:  # the first part starts the upload and may be retried here; the driver retries others
                writer = path._with_retries(functools.partial(_begin_upload, path, views))
                continue
            try:
                _upload(writer, views)
            except (OSError, _errors().BaseError) as error:
                raise bucket_error(path, f"{_cause(str(error))} (a part of an upload, {RETRIES} retries).") from None
        assert writer is not None
        try:
            writer.close()
        except (OSError, _errors().BaseError) as error:
            if not _has_size(path, num_bytes):  # else the answer was lost
                why = f"{_cause(str(error))} (the end of an upload of {num_bytes} bytes)."
                raise bucket_error(path, why) from None

    def read(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """See `FileSource.read`."""
        num_bytes = sum(view.nbytes for view in views)
        content = (self.path / name).read_range(offset, num_bytes)
        if content.nbytes < num_bytes:
            num_missing = num_bytes - content.nbytes
            raise OSError(errno.EIO, f"the file is {num_missing} bytes too short", str(self.path / name))
        start = 0
        for view in views:
            view[:] = content[start : start + view.nbytes]
            start += view.nbytes

    def mapped(self, name: str) -> np.ndarray | None:
        """See `FileSource.mapped`."""
        return None


def _begin_upload(path: BucketPath, views: Sequence[memoryview]) -> _Upload:
    writer = _driver().open_writer(path._store, path.key, buffer_size=PART_BYTES, max_concurrency=_IN_FLIGHT)
    _upload(writer, views)
    return writer


def _upload(writer: _Upload, views: Sequence[memoryview]) -> None:
    for view in views:
        writer.write(view)


def _has_size(path: BucketPath, num_bytes: int) -> bool:
    try:
        return path.size() == num_bytes
    except OSError:
        return False


# ---- the driver


@functools.cache
def _store(scheme: str, bucket: str) -> _Client:
    """Returns the driver's client; it finds credentials and the endpoint as the cloud vendors' tools do."""
    stores = _driver().store
    store_class = stores.S3Store if scheme == "s3" else stores.GCSStore
    # The driver refuses an endpoint without TLS, such as a store in a private network, unless this allows it.
    allow_http = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
    return store_class(
        bucket,
        client_options={"allow_http": allow_http, "timeout": datetime.timedelta(seconds=_REQUEST_S)},
        retry_config={"max_retries": RETRIES, "retry_timeout": datetime.timedelta(seconds=_RETRIED_S)},
    )


@functools.cache
def _driver() -> ModuleType:
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


def _errors() -> ModuleType:
    return _driver().exceptions


def _tag(meta: Mapping[str, Any]) -> Tag:
    # Stores return one of them or both: GCS compares versions, S3 entity tags.
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


def _cause(text: str) -> str:
    """Returns the driver's reason for a failure, without the steps that led to it."""
    cause = text.splitlines()[0] if text else "no reason given"
    match = _CAUSE.search(cause)
    if match is not None:
        cause = match[1] or match[2]
    cause = cause[:300]
    code = re.search("<Code>(.*?)</Code>", text)  # in S3's answer
    if code is not None:
        cause += f", {code[1]}"
    return cause
