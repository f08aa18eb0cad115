"""Digests of samples, by which a source of data is recognized on another machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np

_NUM_FILTERED = 16  # samples that are given to a filter without a name
_LONGEST_PATH = 1024  # a longer text is none

PipelineNode: TypeAlias = Any
"""A step of a Grain pipeline: a source, a dataset or an iterator, for which Grain has no common public class."""


def source_digests(source: PipelineNode, length: int) -> list[str] | None:
    """Returns digests of the first, middle and last sample of a source.

    None if they cannot be read, or differ when they are read again: then they say nothing about the source.
    """
    # A set: of a short source some are the same sample.
    numbers = sorted({0, length // 2, length - 1})
    try:
        digests = [_sample_digest(source[number]) for number in numbers]
        digests_of_second_read = [_sample_digest(source[number]) for number in numbers]
    except Exception:  # the run reports a sample that cannot be read; here it only means that it is not compared
        return None
    if digests != digests_of_second_read:
        return None
    return digests


def samples_passing(filtered: PipelineNode) -> str | None:
    """Returns which of the first samples pass a filter that has no name to know it by, one character each.

    None if they cannot be read.
    """
    try:
        numbers = range(min(len(filtered), _NUM_FILTERED))
        return "".join("-" if filtered[number] is None else "+" for number in numbers)
    except Exception:  # see `source_digests`
        return None


def text_digest(text: str) -> str:
    """Returns a digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _sample_digest(sample: object) -> str:
    digest = hashlib.sha256()
    _add(sample, digest.update)
    return digest.hexdigest()[:12]


def _add(value: object, update: Callable[[bytes], None]) -> None:
    """Adds a value to a digest; of an object of another class, only its class.

    The digests are stored with positions. So what is added for a value must not change from version to version.
    """
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        value = value.item()  # a list in place of an array has the same numbers
    if isinstance(value, str | PurePath):
        value = last_part(str(value))

    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        update(f"{type(value).__name__} {value!r};".encode())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        update(f"array {value.dtype.str} {value.shape};".encode())
        update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        update(f"dict {len(value)};".encode())
        _add_items(value, update)
    elif isinstance(value, list | tuple):
        update(f"list {len(value)};".encode())
        _add_elements(value, update)
    else:
        update(f"{type(value).__qualname__};".encode())


def _add_items(items: Mapping[Any, object], update: Callable[[bytes], None]) -> None:
    for key in sorted(items, key=str):
        update(f"{key};".encode())
        _add(items[key], update)


def _add_elements(elements: Iterable[object], update: Callable[[bytes], None]) -> None:
    for element in elements:
        _add(element, update)


def last_part(text: str) -> str:
    """Returns a path without its folders; other texts are unchanged.

    The same files may be elsewhere on another machine.
    """
    if len(text) > _LONGEST_PATH or "\n" in text:
        return text
    return text.replace("\\", "/").rstrip("/").rpartition("/")[2]
