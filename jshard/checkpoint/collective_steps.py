"""The steps of a save that succeed on all processes, or fail on all of them."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, cast

from jshard._processes import (
    ProcessGroup,
    all_or_none,
    all_processes,
    at_once,
    check_awaited,
    failures,
    publish_failure,
)
from jshard._types import Json
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.errors import CheckpointError, in_four_parts, reasons_of, write_failed
from jshard.errors import FourPartError, causes

Result = TypeVar("Result")
Report = TypeVar("Report")

# Equal on all processes of a group, which make their saves in the same order.
_save_numbers: collections.defaultdict[ProcessGroup, Iterator[int]] = collections.defaultdict(itertools.count)


class CollectiveSteps:
    """The steps of a save that succeed on all processes, or fail on all of them.

    After a failure no process continues: each raises its own error, or one that names the errors of the others.

    Args:
        path: the checkpoint; a name for its steps, and for errors.
        timeout_s: how long to wait for the other processes in one step.
        group: the processes that save, all by default.

    Attributes:
        session: what all agreed on in the first step, see `exchange`; empty before.
    """

    def __init__(self, path: Place, timeout_s: float, group: ProcessGroup | None = None) -> None:
        self._group = group or all_processes()
        self.session = ""
        self._path = path
        self._timeout_s = timeout_s
        # Where processes publish theirs, also between steps.
        self._failures = f"save {next(_save_numbers[self._group])}{self._group.suffix}"
        self._agreed: Exception | None = None  # why the save has failed, once all processes know it
        self._deferred: list[Callable[[], None]] = []  # what is left to do of a step, see `leave_later`

    def run(
        self, topic: str, work: Callable[[], tuple[Result, Report]], *, leave_later: bool = False
    ) -> tuple[Result, list[Report]]:
        """Runs one step; every process calls it.

        Args:
            topic: its name.
            work: returns a result for this process, and a report for all of them, which is sent as JSON.
            leave_later: whether the next step, or `leave`, removes the reports, rather than this one. For a step that
                training waits for: it is another request to the service.

        Returns:
            The result of this process's work, and the reports of all processes.
        """
        self.leave()
        result: Result | None = None
        report: Report | None = None
        error: Exception | None = None
        try:
            result, report = work()
        except Exception as caught:
            if self._agreed is not None:  # all processes know, and none waits
                # Orbax raises the error of a step inside of it as one of its own, which has the first in its chain.
                is_same = self._agreed in causes(caught)
                raise self._agreed from (None if is_same else caught)
            error = caught
        # Published before the exchange: a process that still waits in Orbax does not come to it, and looks for
        # failures.
        explained = None if error is None else self._publish(error)
        reports = all_or_none(
            f"{topic} {self._path}",
            report,
            explained,
            failed=self._error_of_others,
            timeout_s=self._timeout_after(error),
            session=self.session,
            group=self._group,
            defer=self._deferred.append if leave_later else at_once,
        )
        return cast(Result, result), reports  # an error of any process has been raised

    def leave(self) -> None:
        """Removes the reports of a step that was to be left later.

        Each process counts itself as a reader, and the last one removes them: a missing count would remove those of a
        later save to this path too early.
        """
        while self._deferred:
            self._deferred.pop()()

    def run_alike(self, topic: str, work: Callable[[], None]) -> None:
        """Runs a step that has no results."""
        self.run(topic, lambda: (work(), None))

    def check_awaited(self, topic: str) -> None:
        """Raises a `RunError` if other processes no longer wait for this one in a step to come; it does not wait."""
        name = f"{topic} {self._path}"
        check_awaited(name, timeout_s=self._timeout_s, session=self.session, group=self._group)

    def agree_on(self, error: Exception) -> None:
        """Records that all processes know this error: the steps around the current one raise it at once."""
        self._agreed = error

    def publish_failure(self, error: Exception) -> None:
        """Tells other processes of an error outside of a step, which they may look for with `failure`."""
        publish_failure(self._failures, error)

    def failure(self) -> FourPartError | None:
        """Returns an error if any process has published one, while others may still wait for it in Orbax."""
        published = failures(self._failures)
        return self._error_of_others(published) if published else None

    def _publish(self, error: Exception) -> FourPartError:
        """Returns this process's error in four parts, after publishing it."""
        explained = in_four_parts(self._path, error)
        if explained is not error:
            explained.__cause__ = error
        publish_failure(self._failures, explained)
        return explained

    def _timeout_after(self, error: Exception | None) -> float:
        """Returns how long to wait for the others in this step."""
        if isinstance(error, TimeoutError):
            # A process whose wait for the others failed has used up the timeout, and so have they.
            return self._timeout_s / 4
        return self._timeout_s

    def _error_of_others(self, failures: Mapping[int, Mapping[str, Json]]) -> FourPartError:
        """Returns an error that names those of other processes: a mistake in the request, or all reasons."""
        for process, parts in failures.items():
            if parts["is_request"]:
                where = [*parts["where"], f"process {process}"]
                return CheckpointError(parts["what"], where=where, why=parts["why"], do=parts["do"])
        return write_failed(self._path, reasons_of(failures))
