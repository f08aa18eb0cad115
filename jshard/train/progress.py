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
from typing import Any, TextIO

import jax

from jshard._files import write_text
from jshard._live import LiveLine
from jshard._paths import expanded
from jshard._processes import is_primary
from jshard._text import clock_text, duration, human_bytes, loss_text
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
        per_step = {"tokens": tokens_per_step, "samples": samples_per_step}
        self._per_step = {name: number for name, number in per_step.items() if number is not None}
        self._mfu, self._peak_bytes, self._used_bytes, self._clock = mfu, peak_bytes, used_bytes, clock
        self._begin_s, self._start_step, self._seen = clock(), start_step, seen
        self._spans: collections.deque[tuple[float, int]] = collections.deque(maxlen=window)
        self._since: tuple[float, int] | None = None

    def done(self, step: int) -> Mapping[str, float]:
        """Records that all steps up to this one are done; returns the known figures: times from the second one on."""
        now_s, since = self._clock(), self._since
        self._since = now_s, step
        if since is not None and step > since[1]:
            self._spans.append((now_s - since[0], step - since[1]))
        scalars = {"elapsed_s": now_s - self._begin_s}
        steps = step - self._start_step
        scalars |= {f"{name}_seen": self._seen + number * steps for name, number in self._per_step.items()}
        used = None if self._used_bytes is None else self._used_bytes()
        scalars |= {} if used is None else {"used_bytes": used}
        scalars |= {"host_bytes": resident} if (resident := _resident_bytes()) is not None else {}
        if not self._spans:
            return scalars
        step_s = sum(took_s for took_s, _ in self._spans) / sum(steps for _, steps in self._spans)
        scalars["step_s"] = step_s
        if self._spans[-1][1] == 1:
            scalars["last_step_s"] = self._spans[-1][0]
        scalars |= {f"{name}_per_s": number / step_s for name, number in self._per_step.items()}
        if self._mfu is not None:
            scalars["mfu"] = self._mfu.of(step_s)
        if self._peak_bytes is not None:
            scalars["peak_bytes"] = self._peak_bytes()
        return scalars

    def pause(self) -> None:
        """Excludes the time since the last `done`. Call it after an evaluation, a checkpoint or other non-steps."""
        if self._since is not None:
            self._since = self._clock(), self._since[1]


def _resident_bytes() -> int | None:
    """Host memory that this process has in use, with arrays of CPU devices; None where Linux does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


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

    Example:
        >>> progress = Progress(500)
        >>> progress.log(120, {"loss": 2.3456, "tokens_per_s": 31234.0, "step_s": 0.131, "mfu": 0.231})
        step 120/500  loss 2.3456  31,234 tokens/s  131 ms/step  ETA 0:50  MFU 23.1%
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
        self._peak = f"/device ({peak_label})" if peak_label else "/device"
        self._line = LiveLine(sys.stdout if stream is None else stream)
        self._clock = clock
        self._next_s = -float("inf")
        self._fields: list[str] = []  # of the last step
        self._pending = False  # whether the last step is not shown yet

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows a step (scalars with a "loss") if a line is due, and an evaluation (a "val_loss")."""
        if "loss" in scalars:
            self._fields, self._pending = self._describe(step, scalars), True
            if step == self._num_steps or self._clock() >= self._next_s:
                self._show()
        if "val_loss" in scalars:
            others = {name[4:]: value for name, value in scalars.items() if name not in ("val_loss", "time")}
            shown = [f"{name} {loss_text(value)}" for name, value in others.items()]
            self.note(", ".join([f"step {step}: validation loss {loss_text(scalars['val_loss'])}", *shown]))

    def note(self, text: str) -> None:
        """Prints a permanent line."""
        self._line.leave(text)
        if self._line.is_live and self._fields:
            self._show()

    def close(self) -> None:
        """Shows the last step, if it is not shown yet, and keeps its line."""
        if self._pending:
            self._show()
        self._line.end()
        self._fields = []

    def _describe(self, step: int, scalars: Mapping[str, float]) -> list[str]:
        fields = [f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}", f"loss {loss_text(scalars['loss'])}"]
        for unit in ("tokens", "samples"):
            if f"{unit}_per_s" in scalars:
                fields.append(f"{_rate(scalars[f'{unit}_per_s'])} {unit}/s")
        if "step_s" in scalars:
            fields.append(f"{duration(scalars['step_s'])}/step")
            fields.append(f"ETA {clock_text((self._num_steps - step) * scalars['step_s'])}")
        if "mfu" in scalars:
            fields.append(f"MFU {scalars['mfu']:.1%}")
        if "peak_bytes" in scalars:
            fields.append(f"peak {human_bytes(scalars['peak_bytes'])}{self._peak}")
        if "slow_process" in scalars:
            part = max(("data", "save", "step"), key=lambda part: scalars[f"slow_{part}_s"])
            slow = f"process {scalars['slow_process']:.0f}, +{duration(scalars['slow_s'])}/step"
            fields.append(f"slowest: {slow}, {part}")
        return fields

    def _show(self) -> None:
        self._next_s = self._clock() + (_LIVE_EVERY_S if self._line.is_live else _PLAIN_EVERY_S)
        self._pending = False
        if self._line.is_live:
            self._line.rewrite(_fitted(self._fields, self._line.columns))
        else:
            self._line.leave("  ".join(self._fields))


def _fitted(fields: list[str], columns: int) -> str:
    """As many whole fields as fit: a truncated number would be wrong."""
    line = fields[0]
    for field in fields[1:]:
        if len(line) + 2 + len(field) > columns:
            break
        line += "  " + field
    return line[:columns]


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


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

    Example:
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
        self.steps, self.is_recording = steps, False
        self._out, self._program, self._say = expanded(out), program, say
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

    def mark(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Records the step's number; use it around the call of the step."""
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end(self) -> None:
        """Writes the recording; the devices must be idle."""
        if not self.is_recording:
            return
        self.is_recording, self.steps = False, range(0)
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
    """The steps to profile that a resumed run has yet to do, and a remark about the others."""
    left = range(max(steps.start, start_step + 1), steps.stop)
    if not left:
        return left, f"not profiled: steps {steps[0]}..{steps[-1]} were done before this start."
    if left[0] == start_step + 1:
        first = f"step {left[0]} is the first after the start, and slower than others"
        return left, f"profiled: steps {left[0]}..{left[-1]}; {first}."
    return left, None
