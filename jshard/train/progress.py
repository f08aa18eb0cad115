"""The cost of a step, the progress line of a run, and the profile of some steps."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

import jax

from jshard._files import write_text
from jshard._live import LiveLine
from jshard._paths import expanded
from jshard._processes import is_primary
from jshard._text import clock_text, duration, human_bytes, loss_text, three_digits
from jshard.errors import ShardingError
from jshard.inspect.profile.files import PROFILE, PROGRAM, process_folder
from jshard.recipes.step import Mfu


class Meter:
    """Measures steps from one completion to the next: time, rate, MFU and memory, as scalars for the trackers.

    The first completion starts the clock: the step before it compiled.

    Args:
        tokens_per_step: tokens that a step trains on; or
        samples_per_step: samples, if the data are not tokens.
        start_step: steps done before.
        seen: tokens, or samples, that those steps have trained on.
        mfu: how the MFU is computed; None omits it.
        peak_bytes: peak bytes per device; None omits them.
        used_bytes: returns the bytes in use per device; omitted if it is None or returns None.
        window: number of steps over which the shown time is averaged.
        clock: returns seconds.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int | None = None,
        samples_per_step: int | None = None,
        start_step: int = 0,
        seen: int = 0,
        mfu: Mfu | None = None,
        peak_bytes: Callable[[], int] | None = None,
        used_bytes: Callable[[], int | None] | None = None,
        window: int = 50,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._per_step: dict[str, int] = {}
        if tokens_per_step is not None:
            self._per_step["tokens"] = tokens_per_step
        if samples_per_step is not None:
            self._per_step["samples"] = samples_per_step
        self._start_step = start_step
        self._seen = seen
        self._mfu = mfu
        self._peak_bytes = peak_bytes
        self._used_bytes = used_bytes
        self._clock = clock
        self._begin_s = clock()
        self._spans: collections.deque[_TimedSteps] = collections.deque(maxlen=window)
        # Of the last completed step, or of the end of a pause after it.
        self._last_step: int | None = None
        self._last_s = 0.0

    def done(self, step: int) -> Mapping[str, float]:
        """Records that all steps up to this one are done; returns the known figures: times from the second one on."""
        now_s = self._clock()
        if self._last_step is not None and step > self._last_step:
            self._spans.append(_TimedSteps(now_s - self._last_s, step - self._last_step))
        self._last_step = step
        self._last_s = now_s
        scalars = {"elapsed_s": now_s - self._begin_s}
        for name, number in self._per_step.items():
            scalars[f"{name}_seen"] = self._seen + number * (step - self._start_step)
        scalars |= self._memory()
        if self._spans:
            scalars |= self._rates()
        return scalars

    def pause(self) -> None:
        """Excludes the time since the last `done`. Call it after an evaluation, a checkpoint or other non-steps."""
        # Without a completed step the clock is not running yet.
        if self._last_step is not None:
            self._last_s = self._clock()

    def _memory(self) -> dict[str, float]:
        """Returns the bytes in use, as far as they are known."""
        scalars: dict[str, float] = {}
        used_bytes = None
        if self._used_bytes is not None:
            used_bytes = self._used_bytes()
        if used_bytes is not None:
            scalars["used_bytes"] = used_bytes
        host_bytes = _resident_bytes()
        if host_bytes is not None:
            scalars["host_bytes"] = host_bytes
        return scalars

    def _rates(self) -> dict[str, float]:
        """Returns the time of a step, and what follows from it."""
        total_s = sum(span.time_s for span in self._spans)
        # Over all steps of the window, as a span may have several.
        step_s = total_s / sum(span.steps for span in self._spans)
        scalars = {"step_s": step_s}
        # A caller may report several steps at once: then none has a time of its own.
        last = self._spans[-1]
        if last.steps == 1:
            scalars["last_step_s"] = last.time_s
        for name, number in self._per_step.items():
            scalars[f"{name}_per_s"] = number / step_s
        if self._mfu is not None:
            scalars["mfu"] = self._mfu.of(step_s)
        if self._peak_bytes is not None:
            scalars["peak_bytes"] = self._peak_bytes()
        return scalars


class _TimedSteps(NamedTuple):
    """The time from one completion to the next, and the steps in it."""

    time_s: float
    steps: int


def _resident_bytes() -> int | None:
    """Returns the host memory that this process uses, with arrays of CPU devices; None if Linux does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


# The progress line of a run.

_LIVE_EVERY_S = 0.1
_PLAIN_EVERY_S = 10.0


class Progress:
    """A tracker that shows the last step in one line, and each evaluation in a permanent line.

    On a terminal the line is rewritten in place and fitted to its width. Elsewhere (a log file, CI) a plain line is
    printed every ten seconds. The last step is always shown. If the output can no longer be written (a closed pipe or
    terminal), the run continues silently.

    Args:
        num_steps: steps of the whole run, including those before a resumed one.
        peak_label: the kind of the bytes, as from `peak_bytes`: "measured" or "compiled".
        stream: where to write; standard output by default.
        clock: returns seconds.

    Examples:
        >>> progress = Progress(500)
        >>> progress.log(120, {"loss": 2.3456, "grad_norm": 0.51, "tokens_per_s": 31234.0, "step_s": 0.131})
        step 120/500  loss 2.3456  31,234 tokens/s  131 ms/step  ETA 0:50  grad 0.510
    """

    def __init__(
        self,
        num_steps: int,
        *,
        peak_label: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_steps = num_steps
        self._peak_suffix = "/device"
        if peak_label:
            self._peak_suffix = f"/device ({peak_label})"
        self._line = LiveLine(sys.stdout if stream is None else stream)
        self._clock = clock
        self._next_s = -float("inf")
        self._fields: list[str] = []  # of the last step
        self._pending = False  # whether the last step is not shown yet

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows a step (scalars with a "loss") if a line is due, and an evaluation (a "val_loss")."""
        if "loss" in scalars:
            self._fields = self._describe(step, scalars)
            self._pending = True
            if step == self._num_steps or self._clock() >= self._next_s:
                self._show()
        # On a terminal an evaluation stays; steps replace each other.
        if "val_loss" in scalars:
            self.note(_evaluation_text(step, scalars))

    def note(self, text: str) -> None:
        """Prints a permanent line."""
        self._line.leave(text)
        if self._line.is_live and self._fields:
            self._show()  # below it, as the permanent line took its place

    def close(self) -> None:
        """Shows the last step, if it is not shown yet, and keeps its line."""
        if self._pending:
            self._show()
        self._line.end()
        self._fields = []

    def _describe(self, step: int, scalars: Mapping[str, float]) -> list[str]:
        """Returns the fields of the line, the most important first."""
        # As wide as the last number, so that the fields behind it do not move.
        width = len(str(self._num_steps))
        fields = [f"step {step:>{width}}/{self._num_steps}", f"loss {loss_text(scalars['loss'])}"]
        for unit in ("tokens", "samples"):
            if f"{unit}_per_s" in scalars:
                fields.append(f"{_rate(scalars[f'{unit}_per_s'])} {unit}/s")
        if "step_s" in scalars:
            fields.append(f"{duration(scalars['step_s'])}/step")
            fields.append(f"ETA {clock_text((self._num_steps - step) * scalars['step_s'])}")
        if "mfu" in scalars:
            fields.append(f"MFU {scalars['mfu']:.1%}")
        if "grad_norm" in scalars:
            fields.append(f"grad {_norm_text(scalars['grad_norm'])}")
        if "learning_rate" in scalars:
            fields.append(f"lr {_rate_text(scalars['learning_rate'])}")
        if "peak_bytes" in scalars:
            fields.append(f"peak {human_bytes(scalars['peak_bytes'])}{self._peak_suffix}")
        if "slow_process" in scalars:
            fields.append(_slowest_text(scalars))
        return fields

    def _show(self) -> None:
        """Shows the last step."""
        interval_s = _LIVE_EVERY_S if self._line.is_live else _PLAIN_EVERY_S
        self._next_s = self._clock() + interval_s
        self._pending = False
        if self._line.is_live:
            self._line.rewrite(_fitted(self._fields, self._line.columns))
        else:
            self._line.leave("  ".join(self._fields))


def _evaluation_text(step: int, scalars: Mapping[str, float]) -> str:
    """Returns the line of an evaluation: the loss, and then the metrics."""
    texts = [f"step {step}: validation loss {loss_text(scalars['val_loss'])}"]
    for name, value in scalars.items():
        if name not in ("val_loss", "time"):
            texts.append(f"{name.removeprefix('val_')} {loss_text(value)}")
    return ", ".join(texts)


def _slowest_text(scalars: Mapping[str, float]) -> str:
    """Returns which process is the slowest, and where it loses most of the time."""

    def lost_s(part: str) -> float:
        return scalars[f"slow_{part}_s"]

    part = max(("data", "save", "step"), key=lost_s)
    return f"slowest: process {scalars['slow_process']:.0f}, +{duration(scalars['slow_s'])}/step, {part}"


def _fitted(fields: list[str], columns: int) -> str:
    """Returns as many whole fields as fit: a truncated number would be wrong."""
    line = fields[0]
    # In their order, the most important first: none is shown in place of one before it.
    for field in fields[1:]:
        if len(line) + 2 + len(field) > columns:
            break
        line += "  " + field
    return line[:columns]


def _norm_text(norm: float) -> str:
    """Returns the norm of a gradient with three digits, so that the fields behind it hardly move."""
    if norm == 0 or 1e-2 <= norm < 1e5:
        return three_digits(norm)
    return f"{norm:.1e}"


def _rate_text(learning_rate: float) -> str:
    return f"{learning_rate:.1e}" if learning_rate else "0"


def _rate(per_s: float) -> str:
    if per_s >= 100:
        return f"{per_s:,.0f}"
    return f"{per_s:.3g}"


# Some steps in a profile: whole ones, marked one by one, with the program's text beside them.

_FAILURES = (RuntimeError, OSError, ValueError)  # jax's errors are RuntimeErrors


class StepProfile:
    """Records a profile of some steps into the folder of a run; each process writes a file of its own.

    A profile that cannot be recorded is a warning, and the run continues.

    Args:
        out: folder of the run; the profile goes into `profile/steps-FIRST-LAST/` there.
        steps: numbers of consecutive steps.
        program: returns the text of the compiled step, if it has one.
        say: prints a line.

    Examples:
        >>> profile = StepProfile("runs/own", range(11, 16), program=step.compiled.as_text)
        >>> js.train.fit(step, batches, num_steps=100, profile=profile)
        >>> print(js.read_profile("runs/own"))
    """

    def __init__(
        self,
        out: str | Path,
        steps: range,
        *,
        program: Callable[[], str | None],
        say: Callable[[str], object] = print,
    ) -> None:
        self.steps = steps
        self.is_recording = False
        self._out = expanded(out)
        self._program = program
        self._say = say
        self._span = f"steps-{steps[0]}-{steps[-1]}"

    def begin(self) -> None:
        """Starts recording; the devices must be idle."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # else every Python call would be in the file
        folder = self._out / process_folder(self._span, jax.process_index())
        try:
            folder.mkdir(parents=True, exist_ok=True)  # now: a profiler that cannot write cannot stop, either
            jax.profiler.start_trace(folder, profiler_options=options)
            self.is_recording = True
        except _FAILURES as error:
            self._give_up(error)

    def mark(self, step: int) -> contextlib.AbstractContextManager[object]:
        """Records the step's number; use it around the call of the step."""
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end(self) -> None:
        """Writes the recording; the devices must be idle."""
        if not self.is_recording:
            return
        # First: if stopping fails, it is not tried again.
        self.is_recording = False
        self.steps = range(0)
        try:
            jax.profiler.stop_trace()
            if is_primary():
                folder = self._out / PROFILE / self._span
                write_text(folder / PROGRAM, self._program() or "")
                self._say(f"profile: {folder}; shown by: jshard trace {self._out}")
        except _FAILURES as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.steps = range(0)
        warnings.warn(f"The steps are not profiled, and the run continues: {error}", stacklevel=3)


def check_profile(steps: range, *, num_steps: int) -> None:
    """Refuses to profile steps outside a run of so many steps."""
    if not steps or steps.step != 1 or not 1 <= steps[0] <= steps[-1] <= num_steps:
        raise ShardingError(
            "The steps to profile are not steps of the run.",
            where=f"--profile {steps.start - 1}:{steps.stop - 1}",
            why=f"A:B profiles the steps after step A, up to step B, and the run ends after step {num_steps}.",
            do=f"--profile {max(0, min(10, num_steps - 5))}:{min(15, num_steps)}  # or more --steps",
        )


def left_to_profile(steps: range, *, start_step: int) -> tuple[range, str | None]:
    """Returns the steps to profile that a resumed run has yet to do, and a remark about the others."""
    # Steps count from 1: `start_step` of them are done.
    remaining = range(max(steps.start, start_step + 1), steps.stop)
    if not remaining:
        return remaining, f"not profiled: steps {steps[0]}..{steps[-1]} were done before this start."
    if remaining[0] == start_step + 1:
        remark = f"step {remaining[0]} is the first after the start, and slower than others"
        return remaining, f"profiled: steps {remaining[0]}..{remaining[-1]}; {remark}."
    return remaining, None
