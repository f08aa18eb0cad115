"""What goes wrong with checkpoints, as a user meets it."""

import contextlib
import errno
import gc
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from jshard.errors import ShardingError, causes


class CheckpointError(ShardingError):
    """A checkpoint cannot be written there, or does not fit what it is to be restored into."""


class CheckpointWarning(UserWarning):
    """Something about a checkpoint that was done as asked, and that whoever asked may not expect."""


# What to make of an error inside Orbax: one line of text, in place of hundreds of log lines.

_LOGGERS = ("absl", "asyncio")
_EXPECTED = (
    *("Skipping merge of OCDBT", "TensorStore data files not found"),  # said of every one without OCDBT
    *("Metadata file does not exist", "Failed to resolve handler for checkpointable"),  # of one in another
)
_THEIRS = re.compile(r"[/\\](orbax|asyncio|tensorstore)[/\\]")
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def reason(error: BaseException) -> str:
    """The cause in one line; of a refusal by the operating system, its own words."""
    chain = list(causes(error, context=True))
    for found in chain:
        match = _OS_ERROR.search(str(found))  # the storage library knows errors by their text alone
        number = int(match[1]) if match else getattr(found, "errno", None)
        if number:
            return f"{os.strerror(number)} ({errno.errorcode.get(number, number)})."
    text = next((str(found) for found in reversed(chain) if str(found)), "no reason given")
    return f"{type(chain[-1]).__name__}: {text.splitlines()[0][:300]}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Holds back what Orbax logs: shown if the work succeeds, dropped if it fails, as the error then says it.

    A write that fails would otherwise print the same traceback once per thread.
    """
    if not isinstance(sys.unraisablehook, _NotLate):  # before the work: some of its threads end before it fails
        sys.unraisablehook = _NotLate(sys.unraisablehook)
    held = _Held()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(held)
    try:
        yield
    except Exception as error:
        _clear_remains(error)
        held.records.clear()
        raise
    finally:
        for logger in loggers:
            logger.removeFilter(held)
        for record in held.records:
            logging.getLogger(record.name).handle(record)


class _Held(logging.Filter):
    """Keeps what Orbax and what it stands on say, and lets all else through: the user may log with absl too."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Keeps a record."""
        if not _THEIRS.search(record.pathname):
            return True
        if not any(text in str(record.msg) for text in _EXPECTED):
            self.records.append(record)
        return False


def _clear_remains(error: BaseException) -> None:
    """Ends what a failed read leaves suspended; each would print a traceback."""
    for cause in causes(error, context=True):
        traceback.clear_frames(cause.__traceback__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()


class _NotLate:
    """A hook for errors that nobody can catch, without those of work that ends after its like has failed."""

    def __init__(self, before: Callable[[Any], None]) -> None:
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
        abandoned = code is not None and any(name in code.co_filename for name in ("orbax", "asyncio"))
        if not abandoned and "Event loop is closed" not in str(unraisable.exc_value):
            self._before(unraisable)
