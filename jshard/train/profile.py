"""Profiles some steps of a run: whole steps, marked one by one, with the program's text beside them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jshard._processes import is_primary
from jshard.errors import ShardingError
from jshard.inspect.profile import PROFILE, PROGRAM, process_folder

_FAILURES = (RuntimeError, OSError, ValueError)  # jax's errors are RuntimeErrors


class StepProfile:
    """Records a profile of some steps into the folder of a run; each process writes a file of its own.

    A profile that cannot be recorded is a warning, and the run goes on.

    Args:
        out: folder of the run; the profile goes into `profile/steps-FIRST-LAST/` there.
        steps: numbers of the steps, one after another.
        program: gives the text of the compiled step, if it has one.
        say: prints a line.

    Example:
        >>> profile = StepProfile("runs/own", range(11, 16), program=step.compiled.as_text)
        >>> js.train.fit(step, batches, num_steps=100, profile=profile)
        >>> print(js.trace("runs/own"))
    """

    def __init__(
        self,
        out: str | Path,
        steps: range,
        *,
        program: Callable[[], str | None],
        say: Callable[[str], object] = print,
    ) -> None:
        self.steps, self.is_recording = steps, False
        self._out, self._program, self._say = Path(out), program, say
        self._span = f"steps-{steps[0]}-{steps[-1]}"

    def begin(self) -> None:
        """Starts to record; the devices are to be idle."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python would be in the file
        folder = self._out / process_folder(self._span, jax.process_index())
        try:
            folder.mkdir(parents=True, exist_ok=True)  # now: a profiler that cannot write does not stop, either
            jax.profiler.start_trace(folder, profiler_options=options)
            self.is_recording = True
        except _FAILURES as error:
            self._give_up(error)

    def mark(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Around the call of a step: notes its number."""
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end(self) -> None:
        """Writes what was recorded; the devices are to be idle."""
        if not self.is_recording:
            return
        self.is_recording, self.steps = False, range(0)
        try:
            jax.profiler.stop_trace()
            if is_primary():
                folder = self._out / PROFILE / self._span
                (folder / PROGRAM).write_text(self._program() or "")
                self._say(f"profile: {folder}; shown by: jshard trace {self._out}")
        except _FAILURES as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.steps = range(0)
        warnings.warn(f"The steps are not profiled, and the run goes on: {error}", stacklevel=3)


def check_profile(steps: range, *, num_steps: int) -> None:
    """Checks that a run of so many steps has these.

    Args:
        steps: to profile.
        num_steps: of the whole run.

    Raises:
        ShardingError: there is none of them, or the run ends before.
    """
    asked = f"--profile {steps.start - 1}:{steps.stop - 1}"
    if not steps or steps.step != 1 or steps[0] < 1:
        raise ShardingError(
            "There are no such steps to profile.",
            where=asked,
            why="A:B profiles the steps after step A, up to step B; the first step is 1.",
            do="--profile 10:15  # steps 11 to 15",
        )
    if steps[-1] > num_steps:
        last = max(1, num_steps - len(steps))
        raise ShardingError(
            "The run has fewer steps than are to be profiled.",
            where=asked,
            why=f"it ends after step {num_steps}.",
            do=f"--profile {min(last, num_steps - 1)}:{num_steps}  # or --steps {steps[-1]}",
        )


def left_to_profile(steps: range, *, start_step: int) -> tuple[range, str | None]:
    """The part of some steps that a run which goes on still has before it, and what to say about it."""
    left = range(max(steps.start, start_step + 1), steps.stop)
    if not left:
        return left, f"not profiled: steps {steps[0]}..{steps[-1]} were done before this start."
    if left[0] == start_step + 1:
        first = f"step {left[0]} is the first after the start, and slower than others"
        return left, f"profiled: steps {left[0]}..{left[-1]}; {first}."
    return left, None
