"""A series of checkpoints by step, of which the newest are kept."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jshard._errors import RunError
from jshard._processes import gather_texts, is_primary
from jshard.checkpoint.checkpointer import UNCOMMITTED_SUFFIX, CheckpointError, is_committed, restore, save
from jshard.checkpoint.failures import reason

_LEDGER = "series.json"
_SHOWN_S = 60.0  # within it a network file system shows all processes what one of them wrote


class Checkpointer:
    """Checkpoints by step in one folder: `folder/100`, `folder/200` and so on.

    A checkpoint counts from the moment it is complete and on the disk, and only then are older ones deleted. So a
    crash at any time leaves the last good one. Only what this series wrote is ever deleted, as noted in
    `series.json`: a folder of somebody else's stays, and so does a checkpoint that was copied in by hand, which
    counts like the others.

    `orbax.checkpoint.v1.training.Checkpointer` was tried and is not used (0.12.8): it counts any folder named by a
    number, refuses to save lower steps with no word, deletes such folders and every one whose name ends like its own
    temporary ones, and counts a checkpoint without its commit mark.

    Args:
        folder: made with the first save.
        keep: how many stay.

    Raises:
        CheckpointError: `keep` is less than one.

    Example:
        >>> checkpoints = js.checkpoint.Checkpointer("run/checkpoints", keep=3)
        >>> checkpoints.save(100, {"model": model, "optimizer": optimizer, "step": 100})
        >>> state = checkpoints.restore(like={"model": model, "optimizer": optimizer, "step": 0})
    """

    def __init__(self, folder: str | Path, *, keep: int = 3) -> None:
        if keep < 1:
            raise CheckpointError(
                f"{keep} checkpoints cannot be kept.",
                where=str(folder),
                why="the last good checkpoint always stays.",
                do="keep=1, or more.",
            )
        self.folder, self.keep = Path(folder), keep

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies, or would lie."""
        return self.folder / str(step)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        steps = [int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name]
        return sorted(step for step in steps if is_committed(self.path(step)))

    def latest(self) -> int | None:
        """The newest step with a complete checkpoint."""
        return max(self.steps(), default=None)

    def agreed_latest(self) -> int | None:
        """The newest step that the first process sees; every process calls it, and all get the same answer.

        A network file system may show the others an older state of the folder: they wait until they see that step,
        up to a minute.
        """
        latest = json.loads(gather_texts(json.dumps(self.latest()))[0])
        until = time.monotonic() + _SHOWN_S
        while latest is not None and latest not in self.steps() and time.monotonic() < until:
            time.sleep(0.1)
        return latest

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Writes the checkpoint of a step and returns when it is on the disk; every process calls it.

        Args:
            step: number of steps that are done.
            state: what `jshard.checkpoint.save` takes.

        Returns:
            Where it lies.

        Raises:
            CheckpointError: there is something at that path already.
            RunError: writing failed; the step does not count, and older checkpoints are as they were.
        """
        path = self.path(step)
        try:
            self._by_primary(lambda: self._begin(step))
            save(path, state)
            self._by_primary(lambda: self._keep_on_disk(path))
        except (OSError, RunError) as error:
            if is_primary() and step in self._begun():
                self._discard(step)  # at once: the disk may be full
            raise self._not_written(path, error) from error
        self._by_primary(lambda: self._delete_old(step))
        return path

    def restore(self, like: Mapping[str, Any], step: int | None = None) -> dict[str, Any]:
        """Reads a checkpoint into the shardings of `like`; every process calls it.

        Args:
            like: what `jshard.checkpoint.restore` takes; abstract objects will do.
            step: which one; the newest by default.

        Returns:
            A dict with the names of `like`, holding new objects.

        Raises:
            CheckpointError: there is no such checkpoint, or it does not fit `like`.
            RunError: it is damaged. The others are named.
        """
        steps = self.steps()
        if not steps or step not in (None, *steps):
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise CheckpointError(
                f"There is no {wanted} to restore.",
                where=str(self.folder),
                why=f"complete checkpoints there: {', '.join(map(str, steps)) or 'none'}.",
                do="start the run anew, in another folder." if not steps else f"restore step {steps[-1]}.",
            )
        step = steps[-1] if step is None else step
        try:
            return restore(self.path(step), like)
        except RunError as error:
            raise self._not_read(step, error) from error

    def _begin(self, step: int) -> None:
        """Removes what interrupted saves left, and notes that this step is ours before it is there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        begun = self._begun()
        for old in begun:
            self._discard(old)
        if self.path(step).exists():
            return  # save() refuses, and this one is not ours
        ours = [old for old in begun if old != step and self.path(old).exists()]
        draft = self.folder / f"{_LEDGER}.tmp"
        with draft.open("w") as file:
            json.dump({"begun": [*ours, step]}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.folder / _LEDGER)

    def _begun(self) -> list[int]:
        """Steps whose checkpoints this series wrote, or began to; what cannot be read claims nothing."""
        try:
            return [int(step) for step in json.loads((self.folder / _LEDGER).read_text())["begun"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def _keep_on_disk(self, path: Path) -> None:
        """Waits until a complete checkpoint would survive a power cut; if it would not, it does not count."""
        try:
            for folder, _, names in os.walk(path, topdown=False):
                for name in names:
                    _flush(os.path.join(folder, name))
                _flush(folder)
            _flush(str(self.folder))
        except OSError:
            path.rename(self._uncommitted(path))
            raise

    def _delete_old(self, step: int) -> None:
        begun = self._begun()
        others = [old for old in self.steps() if old in begun and old != step]
        for old in others[: max(0, len(others) - self.keep + 1)]:
            try:
                # The new name makes it one step: a checkpoint is never there by half.
                self.path(old).rename(self._uncommitted(self.path(old)))
            except OSError as error:
                message = f"the old checkpoint {self.path(old)} could not be deleted: {reason(error)}"
                warnings.warn(message, RuntimeWarning, stacklevel=4)
            self._discard(old)

    def _discard(self, step: int) -> None:
        shutil.rmtree(self._uncommitted(self.path(step)), ignore_errors=True)

    def _uncommitted(self, path: Path) -> Path:
        return path.with_name(path.name + UNCOMMITTED_SUFFIX)

    def _by_primary(self, work: Callable[[], None]) -> None:
        """Work on the folder by the first process; the others wait for its end, and fail if it fails."""
        error = None
        if is_primary():
            try:
                work()
            except OSError as caught:
                error = caught
        told = gather_texts("" if error is None else reason(error))[0]
        if error is not None:
            raise error
        if told:
            raise RunError(
                "The first process could not write the checkpoint.",
                where=str(self.folder),
                why=told,
                do="see its report.",
            )

    def _not_written(self, path: Path, error: OSError | RunError) -> RunError:
        last = self.latest()
        good = "there is no earlier checkpoint." if last is None else f"the last good checkpoint is {self.path(last)}."
        return RunError(
            f"The checkpoint of step {path.name} could not be written.",
            where=str(path),
            why=f"{error.why if isinstance(error, RunError) else reason(error)}\n{good}",
            do="make room or mend the disk, then continue the run with --resume."
            if last is not None
            else "make room or mend the disk, then start the run anew.",
        )

    def _not_read(self, step: int, error: RunError) -> RunError:
        path = self.path(step)
        others = [other for other in reversed(self.steps()) if other != step]
        return RunError(
            f"The checkpoint of step {step} cannot be read.",
            where=str(path),
            why=f"{error.why}\nother complete checkpoints: {', '.join(map(str, others)) or 'none'}.",
            do=f"mv {path} {path}.damaged\nand try again: step {others[0]} is then the newest."
            if others
            else "start the run anew, in another folder.",
        )


def _flush(path: str) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have nothing to flush for a folder
            raise
    finally:
        os.close(number)
