"""Messages between the processes of a run, through the `jax.distributed` service rather than the devices.

So any thread may call these while the devices are busy, waits have timeouts, and missing processes are named.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jshard._compat import coordinator
from jshard.errors import FourPartError, RunError, is_request

Defer = Callable[[Callable[[], None]], None]
"""Gets work that may be done later."""

_LONG_S = 86400.0  # for waits on the work of one process, however long it takes


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes that do something together: all of a run, or some of them.

    Attributes:
        members: their indices, ascending; this process is one of them.
    """

    members: tuple[int, ...]

    @property
    def is_all(self) -> bool:
        """Whether it is all processes of the run."""
        return len(self.members) == jax.process_count()

    @property
    def is_primary(self) -> bool:
        """Whether this is the process that writes what only one process may write."""
        return jax.process_index() == self.members[0]

    @property
    def suffix(self) -> str:
        """What is added to names that only these processes use; nothing if it is all."""
        # Without it, the names of a group would count with those that all processes use.
        return "" if self.is_all else f" of processes {','.join(map(str, self.members))}"


def all_processes() -> ProcessGroup:
    """Returns all processes of the run."""
    return ProcessGroup(tuple(range(jax.process_count())))


def is_primary() -> bool:
    """Returns whether this is the process that writes what only one process may write."""
    return jax.process_index() == 0


def gather_texts(text: str) -> list[str]:
    """Exchanges a string of every process; returns those of all, by process. For the main thread."""
    return exchange("texts", text)


def at_once(work: Callable[[], None]) -> None:
    """Does what is left to do of an exchange."""
    work()


def exchange(
    topic: str,
    value: object,
    *,
    timeout_s: float = _LONG_S,
    session: str = "",
    group: ProcessGroup | None = None,
    defer: Defer = at_once,
) -> list[Any]:
    """Exchanges a value of every process: returns those of all, once all have called. It is one meeting.

    Args:
        topic: a name; calls with the same topic must be in the same order in every process.
        value: this process's value, representable as JSON.
        timeout_s: how long to wait for the others.
        session: a text that all have agreed on, and that no other call with this topic has. A process that comes when
            the others no longer wait then fails at once. Without it, it cannot distinguish that from a new attempt.
        group: the processes that call it, all by default.
        defer: gets what is left to do when all have the values. It must run before the next call with this topic;
            at once, by default.

    Returns:
        The values of all, in the order of the processes.

    Raises:
        RunError: some processes did not answer in time; they are named, and this one's threads are printed to stderr.
            Or the service is gone.
    """
    group = group or all_processes()
    if len(group.members) == 1:
        return [value]
    exchange_round = _Round(topic, timeout_s, session, group)
    with _errors_named(topic):
        texts, place = exchange_round.exchange(json.dumps(value))

    def leave() -> None:
        with _errors_named(topic):
            exchange_round.leave(place)

    defer(leave)
    return [json.loads(text) for text in texts]


@contextlib.contextmanager
def _errors_named(topic: str) -> Iterator[None]:
    """Raises errors of the service as a `RunError`."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        reason = (str(error) or "no reason given").splitlines()[0]
        raise RunError(
            "The processes of the run cannot communicate.",
            where=f"process {jax.process_index()} on {socket.gethostname()}: {topic}",
            why=f"{type(error).__name__}: {reason[:300]}",
            do="check the last output of process 0: the service they communicate through runs in it.",
        ) from error


def all_or_none(
    topic: str,
    value: object,
    error: Exception | None,
    *,
    failed: Callable[[Mapping[int, Mapping[str, Any]]], FourPartError],
    timeout_s: float = _LONG_S,
    session: str = "",
    group: ProcessGroup | None = None,
    defer: Defer = at_once,
) -> list[Any]:
    """Lets all processes continue, or none: if one reports an error, all raise. Every process calls it.

    Args:
        topic: a name for this point; the same in all processes.
        value: for the others, representable as JSON.
        error: the reason this process cannot continue; it is raised here.
        failed: makes this process's error if only others cannot continue, from their numbers and the parts of their
            errors, "what", "where", "why" and "do", with "kind", the class, and "is_request", whether the request is
            at fault.
        timeout_s: how long to wait for the others.
        session: see `exchange`.
        group: the processes that call it, all by default.
        defer: see `exchange`.

    Returns:
        The values of all, in the order of the processes.

    Raises:
        FourPartError: another process cannot continue, or did not call.
    """
    group = group or all_processes()
    # A process with an error comes, too: the others wait for its report.
    reports = _exchange_reports(topic, value, error, timeout_s=timeout_s, session=session, group=group, defer=defer)
    values = []
    parts_of_errors = {}
    for process, (parts, value_of_process) in zip(group.members, reports, strict=True):
        values.append(value_of_process)
        if parts is not None:
            parts_of_errors[process] = parts
    if error is not None:
        raise error
    if parts_of_errors:
        raise failed(parts_of_errors)
    return values


def check_awaited(topic: str, *, timeout_s: float, session: str, group: ProcessGroup) -> None:
    """Raises a `RunError` if others no longer wait for this process at an `exchange` to come; it does not wait.

    For what must not happen once they have reported a failure. The arguments are those of the exchange.
    """
    if len(group.members) > 1:
        _Round(topic, timeout_s, session, group).check_awaited()


def _exchange_reports(
    topic: str,
    value: object,
    error: Exception | None,
    *,
    timeout_s: float,
    session: str,
    group: ProcessGroup,
    defer: Defer,
) -> list[Any]:
    """Returns the parts of the error, or None, and the value of each process; raises if some did not answer."""
    parts = None
    if error is not None:
        parts = _parts(error)
    try:
        return exchange(topic, [parts, value], timeout_s=timeout_s, session=session, group=group, defer=defer)
    except RunError as missing:
        # The error of this process comes first: it may be why the others did not answer.
        if isinstance(error, FourPartError):
            raise _with_missing(error, missing) from missing
        if error is not None:
            raise error from missing.__cause__
        raise


def _with_missing(error: FourPartError, missing: RunError) -> FourPartError:
    """Returns the error of this process, completed by the processes that did not answer."""
    where = [*error.where, *missing.where]
    return type(error)(error.what, where=where, why=f"{error.why}\n{missing.why}", do=error.do)


def publish_failure(topic: str, error: Exception) -> None:
    """Notifies the others at once that this process cannot continue, wherever they wait; see `failures`."""
    if jax.process_count() == 1:
        return
    key = f"jshard/failures/{topic}/{jax.process_index()}"
    with contextlib.suppress(Exception):  # the service is gone, which is reported elsewhere
        coordinator().key_value_set(key, json.dumps(_parts(error)), allow_overwrite=True)


def failures(topic: str) -> dict[int, dict[str, Any]]:
    """Returns the parts of the errors published by `publish_failure` for a topic, by process, without waiting."""
    if jax.process_count() == 1:
        return {}
    try:
        published = coordinator().key_value_dir_get(f"jshard/failures/{topic}/")
    except Exception:  # the service is gone; a wait for it reports that
        return {}
    return {_process_of(key): json.loads(text) for key, text in published}


def show_threads() -> None:
    """Prints the stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        print(f"thread {names.get(ident, ident)}:\n{stack}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Meeting:
    """A point at which processes wait for each other: each comes, and none leaves before the last has come.

    Attributes:
        topic: what they exchange there.
        is_in_main_thread: whether the main thread waited there, which is that of a training step.
        begin_s: when this process came, by `time.perf_counter`.
        end_s: when it left.
    """

    topic: str
    is_in_main_thread: bool
    begin_s: float
    end_s: float


# Of all `record_meetings` blocks that are running, by their identity: equal lists are not the same.
_records: dict[int, list[Meeting]] = {}


@contextlib.contextmanager
def record_meetings() -> Iterator[list[Meeting]]:
    """Records the meetings of this process, in all its threads, until the block ends.

    A meeting costs every process the time until the slowest one has come, so their number is worth a test.

    Examples:
        >>> with record_meetings() as meetings:
        ...     js.checkpoint.save("run/100", state)
        >>> [meeting.topic for meeting in meetings]
    """
    meetings: list[Meeting] = []
    _records[id(meetings)] = meetings
    try:
        yield meetings
    finally:
        del _records[id(meetings)]


# By topic, the exchanges that this process has passed. A barrier is passed by all processes or by none, so the numbers
# are equal on all.
_num_passed: collections.Counter[str] = collections.Counter()


class _Round:
    """One call of `exchange`: all processes publish their values and read those of the others, or all fail.

    A barrier of the service is passed by all processes or by none. The number of failed rounds is recorded by the
    service, as some processes may never have reached their barriers; the next round uses another one.

    The values are deleted by the last process that has read them. So no process waits until all have read, and the
    place of the next round is another one: a quick process may publish there while a slow one still reads here.
    """

    def __init__(self, topic: str, timeout_s: float, session: str, group: ProcessGroup) -> None:
        self._topic = f"{topic}{group.suffix}"
        self._group = group
        self._timeout_s = timeout_s
        self._session = session
        self._root = f"jshard/{self._topic}"
        if session:
            self._root = f"{self._root}/{session}"
        self._client = coordinator()
        self._process = jax.process_index()

    def exchange(self, text: str) -> tuple[list[str], str]:
        """Publishes a string; returns those of all, and the place where they are until all `leave` it."""
        num_failed = self._num_failed()
        if self._session and num_failed:
            raise self._late_error()
        # Two places are enough: who is at the second has read what was at the first.
        place = f"{self._root}/{num_failed}/{_num_passed[self._topic] % 2}"
        try:
            self._meet(place, text)
            if not self._session:  # which has no second round
                # At once: all have passed, so all must count it, whatever fails below.
                _num_passed[self._topic] += 1
            texts = self._texts(place)
        except Exception:
            # The key of each failed round stays: their count is the number of the next round.
            self._client.key_value_set(f"{self._root}/failed/{num_failed}", "=", allow_overwrite=True)
            self._client.key_value_delete(self._key(place))
            raise
        return [texts[process] for process in self._group.members], place

    def check_awaited(self) -> None:
        """Raises a `RunError` if others no longer wait for this process."""
        if self._num_failed():
            raise self._late_error()

    def _num_failed(self) -> int:
        """Returns how many rounds have failed in some process."""
        return len(self._client.key_value_dir_get(f"{self._root}/failed/"))

    @property
    def _participants(self) -> list[int] | None:
        """The processes that a barrier waits for; None for all."""
        return None if self._group.is_all else list(self._group.members)

    def _key(self, place: str) -> str:
        return f"{place}/given/{self._process}"

    def _meet(self, place: str, text: str) -> None:
        """Publishes a string at a place, and returns once all have arrived there. All meetings are here."""
        # Before the barrier: who has passed it finds the strings of all.
        self._client.key_value_set(self._key(place), "=" + text, allow_overwrite=True)  # empty ones fail
        begin_s = time.perf_counter()
        try:
            self._client.wait_at_barrier(place, max(1, int(1000 * self._timeout_s)), self._participants)
        except Exception as error:
            arrived = self._texts(place)
            missing = [process for process in self._group.members if process not in arrived]
            if missing:
                raise self._timeout_error(missing) from error
            raise
        is_in_main_thread = threading.current_thread() is threading.main_thread()
        meeting = Meeting(self._topic, is_in_main_thread, begin_s, time.perf_counter())
        for meetings in list(_records.values()):
            meetings.append(meeting)

    def _texts(self, place: str) -> dict[int, str]:
        """Returns the strings published at a place so far, by process."""
        published = self._client.key_value_dir_get(f"{place}/given/")
        return {_process_of(key): text.removeprefix("=") for key, text in published}

    def leave(self, place: str) -> None:
        """Notes that this process has read the strings; the last one deletes them, and the notes."""
        num_readers = self._client.key_value_increment(f"{place}/readers", 1)
        if num_readers == len(self._group.members):
            # All keys that begin with it. Before this process comes to the next round, and thus before anyone comes
            # to the one after it, which is at this place again.
            self._client.key_value_delete(f"{place}/")

    def _late_error(self) -> RunError:
        host = socket.gethostname()
        return RunError(
            "The other processes did not wait for this one at a synchronization point.",
            where=f"process {self._process} on {host}: {self._topic}",
            why=f"it came when they no longer waited; each waits for {self._timeout_s:.0f} s.",
            do="check what delayed this process.",
        )

    def _timeout_error(self, missing: list[int]) -> RunError:
        show_threads()
        host = socket.gethostname()
        return RunError(
            f"{len(missing)} of {len(self._group.members)} processes did not reach a synchronization point.",
            where=[f"process {process}" for process in missing],
            why=f"process {self._process} on {host} waited {self._timeout_s:.0f} s for them: {self._topic}.",
            do="check the last output of those processes; the threads of this one are above.",
        )


def _process_of(key: str) -> int:
    """Returns the process that has published a key."""
    _, _, process = key.rpartition("/")
    return int(process)


def _parts(error: Exception) -> dict[str, Any]:
    """Returns an error in the form sent to the other processes; see `all_or_none`."""
    parts: dict[str, Any] = {"kind": type(error).__name__, "is_request": is_request(error)}
    if isinstance(error, FourPartError):
        parts |= {"what": error.what, "where": list(error.where), "why": error.why, "do": error.do}
    else:
        parts |= {"what": str(error), "where": [], "why": str(error), "do": ""}
    return parts
