"""Inputs that no one writes on purpose: changes of a good one, each place in turn, or several by a seed.

The property of every reader: it returns, or it raises an error in four parts, within bounded time and memory.
"""

import contextlib
import copy
import dataclasses
import itertools
import json
import random
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jshard.errors import FourPartError

MOST_SECONDS = 5.0  # of one processor, so that a busy machine is no failure
HANGS_S = 60.0
MOST_BYTES = 256 << 20


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


# One of each type, the borders of numbers, and texts that no file name or terminal can take.
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    2**63,
    -(2**70),
    10**400,
    "",
    "text",
    "a/../../b",
    "\0",
    "\ud800",
    "\x1b[31m",
    "\u0663",  # three, in Arabic
    "1e999",
    "2024-13-01",
    [],
    [None],
    [1, "2"],
    [[1, 2, 3]],
    ["text"],
    {},
    {"": None},
    {"text": {"text": []}},
    nested(200),
)


@dataclasses.dataclass(frozen=True)
class Input:
    """An input, and how it came about."""

    name: str
    value: Any


def each_change(value: Any) -> Iterator[Input]:
    """The value with each of its places removed, doubled, or replaced by each odd value."""
    for path in _paths(value):
        for odd in ODD_VALUES:
            yield Input(f"{_text(path)} = {_shortened(odd)}", _replaced(value, path, odd))
        if path:
            yield Input(f"{_text(path)} removed", _removed(value, path))


def every_fifth(inputs: Iterable[Input]) -> Iterator[Input]:
    """A fifth of them, for a test that always runs."""
    return itertools.islice(inputs, 0, None, 5)


def some_changes(value: Any, *, seed: int, count: int) -> Iterator[Input]:
    """So many values, each with one to four random changes."""
    rng = random.Random(seed)
    for number in range(count):
        changed, names = value, []
        for _ in range(rng.randint(1, 4)):
            path = rng.choice(list(_paths(changed)))
            odd = rng.choice(ODD_VALUES)
            changed = _replaced(changed, path, odd)
            names.append(f"{_text(path)} = {_shortened(odd)}")
        yield Input(f"seed {seed}, {number}: {'; '.join(names)}", changed)


def damaged(raw: bytes, *, seed: int, count: int) -> Iterator[Input]:
    """So many copies of the bytes: cut off, with changed bytes, with a part removed, repeated or inserted."""
    rng = random.Random(seed)
    inserted = [b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"1e999"]
    inserted += [b"[" * 5000, b'{"a":' * 5000, b"9" * 6000]
    for number in range(count):
        changed = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            begin = rng.randrange(len(changed) + 1)
            end = min(len(changed), begin + rng.choice((1, 2, 8, 64)))
            kind = rng.choice(("cut", "bytes", "remove", "repeat", "insert"))
            if kind == "cut":
                del changed[begin:]
            elif kind == "bytes":
                changed[begin:end] = rng.randbytes(end - begin)
            elif kind == "remove":
                del changed[begin:end]
            elif kind == "repeat":
                changed[begin:begin] = changed[begin:end] * rng.choice((1, 3, 100))
            else:
                changed[begin:begin] = rng.choice(inserted)
        yield Input(f"seed {seed}, {number}", bytes(changed))


def json_texts(inputs: Iterable[Input]) -> Iterator[Input]:
    """The values as JSON, as Python writes it: with NaN and Infinity, and halves of surrogates as escapes."""
    for each in inputs:
        yield Input(each.name, json.dumps(each.value).encode())


# Texts that are no JSON, or that a reader of JSON cannot take.
NO_JSON = tuple(
    Input(name, raw)
    for name, raw in {
        "empty": b"",
        "white": b" \n",
        "a word": b"nonsense",
        "cut off": b'{"a": [1, 2',
        "deep lists": b"[" * 200_000,
        "deep lists, closed": b"[" * 100_000 + b"]" * 100_000,
        "deep tables": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "no UTF-8": b'{"a": "\xff"}',
        "a surrogate in UTF-8": b'{"a": "\xed\xa0\x80"}',
        "half a surrogate": b'{"a": "\\ud800"}',
        "UTF-16": '{"a": 1}'.encode("utf-16"),
        "a mark of byte order": b"\xef\xbb\xbf{}",
        "many digits": b'{"a": ' + b"9" * 10_000 + b"}",
        "infinity": b'{"a": 1e999}',
        "zero bytes": b"\0" * 1000,
        "null": b"null",
        "a number": b"3",
        "a text": b'"text"',
        "a list": b"[1]",
        "two tables": b"{}{}",
        "a key twice": b'{"a": 1, "a": 2}',
    }.items()
)


@dataclasses.dataclass
class Survey:
    """What became of the inputs."""

    returned: int = 0
    refused: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[int, str] = (0, "")

    def __str__(self) -> str:
        return (
            f"{self.returned} returned, {self.refused} refused, {len(self.failures)} failed; "
            f"slowest {self.slowest[0]:.2f} s ({self.slowest[1][:80]}), "
            f"largest {self.largest[0] / 2**20:.1f} MiB ({self.largest[1][:80]})"
        )


def survey(inputs: Iterable[Input], read: Callable[[Any], object]) -> Survey:
    """Reads every input; any exception but an error in four parts is a failure."""
    result = Survey()
    tracemalloc.start()
    try:
        for each in inputs:
            with _alarm(each.name):
                _try(each, read, result)
    finally:
        tracemalloc.stop()
    return result


class HangError(BaseException):
    """A reader that does not end."""


@contextlib.contextmanager
def _alarm(name: str) -> Iterator[None]:
    def ring(*signal_and_frame: object) -> None:
        raise HangError(name)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HANGS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(inputs: Iterable[Input], read: Callable[[Any], object]) -> Survey:
    """The survey, which must be without failures and within bounds."""
    result = survey(inputs, read)
    assert not result.failures, "\n".join([f"{len(result.failures)} failures", *result.failures[:20]])
    assert result.slowest[0] < MOST_SECONDS, result.slowest
    assert result.largest[0] < MOST_BYTES, result.largest
    assert result.returned + result.refused > 0
    return result


def _try(each: Input, read: Callable[[Any], object], result: Survey) -> None:
    tracemalloc.reset_peak()
    before_bytes, begin_s = tracemalloc.get_traced_memory()[0], time.process_time()
    try:
        read(each.value)
        result.returned += 1
    except FourPartError as error:
        parts = (error.what, *error.where, error.why, error.do)
        if not all(isinstance(part, str) and part.strip() for part in parts):
            result.failures.append(f"{each.name}: a part is empty: {error}")
        elif not _can_be_printed(str(error)):
            result.failures.append(f"{each.name}: it cannot be printed: {str(error)!r}")
        result.refused += 1
    except BaseException as error:  # a fault: the command line would end in a traceback
        if isinstance(error, KeyboardInterrupt | HangError):
            raise
        result.failures.append(f"{each.name[:200]}: {type(error).__name__}: {str(error)[:200]}")
    took_s = time.process_time() - begin_s
    used_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
    result.slowest = max(result.slowest, (took_s, each.name))
    result.largest = max(result.largest, (used_bytes, each.name))


def _can_be_printed(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\x1b" not in text and "\0" not in text


def _paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    if len(path) > 8:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value[:3]):
            yield from _paths(item, (*path, number))


def _replaced(value: Any, path: tuple, odd: Any) -> Any:
    if not path:
        return copy.deepcopy(odd)
    result = copy.copy(value)
    result[path[0]] = _replaced(value[path[0]], path[1:], odd)
    return result


def _removed(value: Any, path: tuple) -> Any:
    result = copy.copy(value)
    if len(path) == 1:
        del result[path[0]]
    else:
        result[path[0]] = _removed(value[path[0]], path[1:])
    return result


def _text(path: tuple) -> str:
    return ".".join(map(str, path)) or "all"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:30]}...({len(text)})"
