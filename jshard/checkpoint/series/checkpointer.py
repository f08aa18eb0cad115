"""A series of checkpoints by step, with rules for which to keep."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import os
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, SupportsIndex

from jshard._processes import all_processes, exchange, is_primary
from jshard._types import Json, PyTree
from jshard.checkpoint.buckets import BucketError, Place
from jshard.checkpoint.errors import CheckpointError, reason
from jshard.checkpoint.lookup import incomplete_in, no_such_step, not_read, not_written, place_of, steps_in
from jshard.checkpoint.pending import LOOK_S, Pending
from jshard.checkpoint.readers import own_checkpoint
from jshard.checkpoint.restore_operation import Extra, Missing, RestoreOperation
from jshard.checkpoint.saving import TIMEOUT_S, Format, SaveOperation, checked_format
from jshard.checkpoint.series.shared_folder import check_shared, is_shown
from jshard.checkpoint.series.store import store_of, warn
from jshard.errors import RunError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints of a series are kept: those selected by any rule, and always the newest.

    Args:
        last: number of newest checkpoints to keep.
        every: keep steps divisible by this number; None for no such rule.
        best: number of best checkpoints to keep.
        metric: the name in `save(metrics=...)` that ranks them; steps without it are excluded.
        higher_is_better: whether larger values are better.

    Raises:
        CheckpointError: a count is invalid.

    Examples:
        >>> js.checkpoint.Checkpointer("run", keep=js.checkpoint.Keep(last=2, every=10_000, best=1))
    """

    last: int = 3
    every: int | None = None
    best: int = 0
    metric: str = "val_loss"
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        is_interval = self.every is None or self.every >= 1
        if self.last < 1 or self.best < 0 or not is_interval:
            raise CheckpointError(
                "The rule for old checkpoints is invalid.",
                where=f"Keep(last={self.last}, every={self.every}, best={self.best})",
                why="last is at least 1, because the last good checkpoint always stays; every is at least 1 step; "
                "best is at least 0.",
                do="keep=3, or Keep(last=3, every=1000, best=1)",
            )

    def stay(self, steps: Collection[int], metrics: Mapping[int, Mapping[str, float]], *, written: int) -> set[int]:
        """Returns the steps to keep.

        Args:
            steps: all of the series, with the newest.
            metrics: of the steps, by step.
            written: the one just written, which stays even if there are later steps, as after going back.
        """
        # `written` takes one of the `last` places, even if later steps exist.
        older = sorted(step for step in steps if step != written)
        kept_steps = {written, *older[max(0, len(steps) - self.last) :]}
        if self.every is not None:
            kept_steps |= {step for step in steps if step % self.every == 0}
        ranks = {}
        for step in steps:
            rank = self._rank(metrics.get(step, {}))
            if math.isfinite(rank):  # a diverged run is never the best
                ranks[step] = rank
        # Of equal ranks the later step is kept.
        best_first = sorted(ranks, key=lambda step: (ranks[step], step), reverse=True)
        return kept_steps | set(best_first[: self.best])

    def _rank(self, metrics: Mapping[str, float]) -> float:
        """Returns a number that is higher for a better checkpoint; NaN if its metric is unknown."""
        value = metrics.get(self.metric, math.nan)
        return value if self.higher_is_better else -value


_EXCHANGE_S = 2.0  # the longest exchange about a failure


class Checkpointer:
    """Checkpoints by step in one folder: `folder/100`, `folder/200` and so on.

    A checkpoint is valid once it is complete and on the disk, and only then are older ones deleted, so a crash at
    any time leaves the last good one. Only checkpoints that this series wrote, as recorded in `series.json`, are ever
    deleted: other folders are kept, and so are checkpoints copied in by hand, which are otherwise
    treated like the others. With several processes all of them create it and call its methods, in the same order.

    Args:
        folder: created by the first save; until then nothing is written, and restoring needs only read access.
        keep: the number of newest checkpoints to keep, or a `Keep`.
        every: the interval of `should_save`, in steps; None if the caller decides alone.
        format: see `jshard.checkpoint.save`.
        on_failure: how to treat a failed `save_async`: "raise", at the next call if it failed in the background, or
            "warn", and training continues.
        timeout_s: how long any wait for other processes, or for a pending save, may take.

    Attributes:
        folder: the absolute path, unaffected by changes of the working directory.
        completed: the last step saved by this object, complete and on the disk.

    Raises:
        CheckpointError: `keep` is less than one, or another argument is invalid.

    Examples:
        >>> with js.checkpoint.Checkpointer("run/checkpoints", keep=3, every=100) as checkpoints:
        ...     if checkpoints.should_save(step):
        ...         checkpoints.save_async(step, {"model": model, "optimizer": optimizer, "step": step})
        ...     checkpoints.check()  # raises what went wrong in the background
        >>> state = checkpoints.restore(like={"model": model, "optimizer": optimizer, "step": 0})
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | Keep = 3,
        every: int | None = None,
        format: Format = "packed",
        on_failure: Literal["raise", "warn"] = "raise",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.folder = place_of(folder)
        self._store = store_of(self.folder)
        self.keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self.every = every
        self.timeout_s = timeout_s
        is_interval = every is None or every >= 1
        if not is_interval or on_failure not in ("raise", "warn"):
            raise CheckpointError(
                "The series has an invalid argument.",
                where=f"every={every}, on_failure={on_failure!r}",
                why='every is at least 1 step; on_failure is "raise" or "warn".',
                do='every=1000, on_failure="raise"',
            )
        self._on_failure = on_failure
        self._format: Format = checked_format(format, self.folder)
        self.completed: int | None = None
        self._pending: Pending | None = None
        self._saving: SaveOperation | None = None  # the work of the pending save
        self._next_look_s = 0.0  # when to look again for a failure of another process
        self._given_up: Pending | None = None  # still running after a wait timed out
        self._restores: list[dict[str, Json]] = []  # recorded with the next save: a reader does not change the folder
        self._damaged_steps: set[int] = set()  # found by a restore that fell back to an older one
        self._was_checked = False  # whether all processes see the folder

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # After an error it still waits for a pending save, but not a second time for one that did not end.
            if kind is None or self._pending not in (None, self._given_up):
                self.wait()
        except RunError as error:
            if kind is None:
                raise
            warn(str(error))  # another error is being raised
        finally:
            self._store.release()

    def path(self, step: int) -> Place:
        """Returns the path of the checkpoint of a step, existing or not."""
        return self.folder / str(step)

    def steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, oldest first."""
        return steps_in(self.folder)

    def latest(self) -> int | None:
        """Returns the newest step whose checkpoint is complete with all its files; one warning names others."""
        damaged = []
        latest = None
        for step in reversed(self.steps()):
            damage = self._store.damage(step)
            if damage is None:
                latest = step
                break
            damaged.append(f"{self.path(step)}: {damage}")
        if damaged:
            warn("these checkpoints are damaged and ignored:\n  " + "\n  ".join(damaged))
        return latest

    def agreed_latest(self) -> int | None:
        """Returns the newest step that the first process sees; every process calls it, and all get the same result.

        A network file system may show the others an older state of the folder; they wait up to a minute to see
        that step.
        """
        # Only the first process deletes and renames, so only its view cannot be out of date.
        latest_here = self.latest() if is_primary() else None
        latest = exchange(f"latest {self.folder.name}", latest_here, timeout_s=self.timeout_s)[0]
        is_shown(lambda: latest in (None, *self.steps()))
        return latest

    def should_save(self, step: int) -> bool:
        """Returns whether a save is due by the interval, and the step has no good checkpoint yet."""
        if self.every is None or step % self.every != 0:
            return False
        # A run that went back comes to the steps of its old checkpoints again, which stay unless they are damaged.
        return step not in self.steps() or step in self._damaged_steps or self._store.damage(step) is not None

    def save(self, step: int, state: PyTree, *, metrics: Mapping[str, float] | None = None) -> Place:
        """Writes the checkpoint of a step and returns when it is on the disk; every process calls it.

        Args:
            step: number of completed steps.
            state: as for `jshard.checkpoint.save`.
            metrics: its metrics, for `Keep(best=...)` and for information.

        Returns:
            Its path.

        Raises:
            CheckpointError: that path already exists, or the processes do not see the same folder.
            RunError: writing failed; the step has no checkpoint, and older ones are unchanged. Or an earlier save
                failed in the background.
        """
        step = _checked(step)
        self.wait()
        self._start(step, state, metrics)
        self._end(2 * self.timeout_s)
        return self.path(step)

    def save_async(self, step: int, state: PyTree, *, metrics: Mapping[str, float] | None = None) -> None:
        """`save` that returns when the devices' values are copied; one save is pending at a time.

        Later failures are raised by the next call of `check`, `save`, `save_async` or `wait`. It first waits for a
        save that is still pending, so memory holds only one copy of the state. A damaged checkpoint of the step
        is renamed to `STEP.damaged`.

        Arguments are those of `save`; the state may be overwritten as soon as this returns.

        Raises:
            CheckpointError: that path already exists, or the processes do not see the same folder.
            RunError: the values could not be copied, or an earlier save failed.
        """
        step = _checked(step)
        self.wait()
        with self._failure_policy():
            self._start(step, state, metrics)

    @contextlib.contextmanager
    def _failure_policy(self) -> Iterator[None]:
        """Turns a failed save into a warning if `on_failure` is "warn", unless the save is stuck."""
        try:
            yield
        except RunError as error:
            if self._on_failure == "raise" or self._pending is not None:
                raise
            warn(f"training continues without a checkpoint.\n{error}")

    def check(self) -> None:
        """Raises the failure of a save in the background, if any; otherwise it is free.

        Raises:
            RunError: the save failed; older checkpoints are unchanged.
        """
        if self._pending is not None and self._pending.is_done():
            self.wait()
        elif self._pending is not None:
            self._raise_failure_of_others(self._pending)

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until no save is pending.

        Args:
            timeout_s: how long; by default twice as long as a wait for other processes may take.

        Raises:
            RunError: it failed, or did not end in time; older checkpoints are unchanged.
        """
        if timeout_s is None:
            timeout_s = 2 * self.timeout_s
        with self._failure_policy():
            self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        pending = self._pending
        if pending is None:
            return
        try:
            pending.wait(timeout_s, look=lambda: self._raise_failure_of_others(pending))
        finally:
            if pending.is_done():
                self._pending = self._saving = None
            else:  # one that did not end in time is still running
                self._given_up = pending

    def restore(
        self,
        like: PyTree,
        step: int | None = None,
        *,
        fall_back: bool = False,
        only: str | None = None,
        rename: Mapping[str, str] | None = None,
        missing: Missing = "error",
        extra: Extra = "error",
        verify: bool = True,
    ) -> PyTree:
        """Reads a checkpoint into the shardings of `like`; every process calls it.

        Args:
            like: as for `jshard.checkpoint.restore`; may be abstract.
            step: which one; the newest by default.
            fall_back: whether to try the next older checkpoint if one is damaged, with a warning. A later save of the
                skipped step renames it to `STEP.damaged`; `set_aside_newer` does so immediately.
            only: see `jshard.checkpoint.restore`, as for those below.
            rename: see there.
            missing: see there.
            extra: see there.
            verify: see there.

        Raises:
            CheckpointError: there is no such checkpoint, or it does not match `like`.
            RunError: it is damaged. The message lists the others.
        """
        self.wait()
        # Ascending: `pop` takes the newest.
        candidates = [old for old in self.steps() if step is None or old <= step]
        # A requested step that exists is the newest of those that are not newer.
        if not candidates or step not in (None, candidates[-1]):
            raise no_such_step(self.folder, step)
        while True:
            step = candidates.pop()
            try:
                opened = own_checkpoint(self.path(step), verify=verify)
                restoring = RestoreOperation(opened, like, only=only, rename=rename, missing=missing, extra=extra)
                restored = restoring.run(verify=verify, timeout_s=self.timeout_s)
            except RunError as error:
                can_fall_back = fall_back and candidates
                if not can_fall_back or isinstance(error, BucketError):  # which says nothing about the checkpoint
                    raise not_read(self.path(step), self.steps(), error) from error
                older = candidates[-1]
                self._damaged_steps.add(step)
                warn(
                    f"checkpoint {self.path(step)} is damaged; going back to step {older}.\n{error}\n"
                    f"It is renamed when its step is saved again, or at once by set_aside_newer({older})."
                )
            else:
                self._restores.append({"kind": "restore", "step": step, **restoring.record})
                return restored

    def set_aside_newer(self, step: int) -> None:
        """Renames the checkpoints of later steps to `STEP.damaged`: a run that went back saves these steps again.

        This includes incompletely copied folders, which would block a save.

        Args:
            step: the restored step; every process calls it.
        """
        if not is_primary():
            return
        for newer in [*self.steps(), *incomplete_in(self.folder)]:
            if newer > step:
                self._store.set_aside(newer)

    def _start(self, step: int, state: PyTree, metrics: Mapping[str, float] | None) -> None:
        """Does the part of a save that training waits for."""
        path = self.path(step)
        try:
            if not self._was_checked:
                self._was_checked = True  # whatever the result: one process alone must not repeat it
                check_shared(self.folder, timeout_s=self.timeout_s)
            saving = SaveOperation(
                path,
                state,
                step=step,
                metrics=metrics,
                timeout_s=self.timeout_s,
                format=self._format,
                processes=all_processes().members,
                prepare=lambda: self._store.begin(step, is_damaged=step in self._damaged_steps),
                check=self._store.check,
            )
        except RunError as error:
            self._failed(step, error)
            raise not_written(path, self.steps(), error) from error
        # `begin` has set the damaged checkpoint aside.
        self._damaged_steps.discard(step)
        self._saving = saving
        self._pending = Pending(str(path), lambda: self._finish(saving, step), timeout_s=2 * self.timeout_s)

    def _raise_failure_of_others(self, pending: Pending) -> None:
        """Raises a write failure of another process, for which this one's part of the save would wait."""
        if self._on_failure != "raise" or self._saving is None or time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + LOOK_S
        # Most failures reach all processes in an exchange, but Orbax's wait for another process cannot be ended.
        error = self._saving.failure()
        # A failure that all processes learn of in an exchange ends the save within this time, and says more.
        if error is None or pending.ends_within(_EXCHANGE_S):
            return
        pending.give_up()
        self._given_up = pending
        raise not_written(self._saving.path, self.steps(), error)

    def _finish(self, saving: SaveOperation, step: int) -> None:
        """Does the part of a save that runs while training continues."""
        try:
            saving.finish()
        except RunError as error:
            self._failed(step, error)
            raise not_written(self.path(step), self.steps(), error) from error
        self.completed = step
        self._add_to_history({"kind": "save", "step": step, **saving.record})
        if is_primary():
            self._delete_old(written=step)

    def _delete_old(self, *, written: int) -> None:
        """Deletes the checkpoints written by the series that no rule keeps."""
        begun = self._store.begun()
        # Checkpoints that were copied in by hand are not in the ledger, and never candidates.
        steps = {written, *(step for step in self.steps() if step in begun)}
        metrics: dict[int, Mapping[str, float]] = {}
        if self.keep.best:  # which means to read all manifests
            metrics = {step: self._store.metrics(step) for step in steps}
        for old in steps - self.keep.stay(steps, metrics, written=written):
            try:
                self._store.delete(old)
            except OSError as error:
                warn(f"the old checkpoint {self.path(old)} could not be deleted: {reason(error)}")

    def _failed(self, step: int, error: RunError) -> None:
        if is_primary():
            self._store.abandon(step)  # immediately: the disk may be full
        self._add_to_history({"kind": "save", "step": step, "began_at": time.time(), "error": error.why})

    def _add_to_history(self, record: Mapping[str, Json]) -> None:
        records = [*self._restores, record]
        self._restores = []
        if is_primary():
            for record in records:
                self._store.add_to_history(record)


def _checked(step: SupportsIndex) -> int:
    """Returns a step as an int for its folder's name, checked before other processes are involved."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    # `operator.index(True)` is 1.
    if number < 0 or isinstance(step, bool):
        raise CheckpointError(
            "A checkpoint cannot have this step.",
            where=f"step={step!r}, a {type(step).__name__}",
            why="steps are integers from 0, because they name the folders.",
            do="save(int(step), ...)",
        )
    return number
