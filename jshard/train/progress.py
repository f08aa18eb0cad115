"""What a step cost, and the line that says where a run is."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from jshard._live import LiveLine
from jshard._text import duration, human_bytes
from jshard.recipes.mfu import Mfu


class Meter:
    """Measures steps from one completion to the next: time, rate, MFU and memory, as scalars for the trackers.

    The first completion starts the clock: the step before it compiled.

    Args:
        tokens_per_step: tokens that a step trains on; or
        samples_per_step: samples, where the data are no tokens.
        mfu: how the share of the devices' peak is computed; None leaves it out.
        peak_bytes: bytes per device that were needed at most; None leaves them out.
        window: steps that the shown time is averaged over.
        clock: gives seconds.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int | None = None,
        samples_per_step: int | None = None,
        mfu: Mfu | None = None,
        peak_bytes: Callable[[], int] | None = None,
        window: int = 50,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._per_step = {"tokens_per_s": tokens_per_step, "samples_per_s": samples_per_step}
        self._mfu, self._peak_bytes, self._clock = mfu, peak_bytes, clock
        self._spans: collections.deque[tuple[float, int]] = collections.deque(maxlen=window)
        self._since: tuple[float, int] | None = None

    def done(self, step: int) -> Mapping[str, float]:
        """Notes that a step, and all before it, are done; returns what is known: nothing before the second one."""
        now_s, since = self._clock(), self._since
        self._since = now_s, step
        if since is not None and step > since[1]:
            self._spans.append((now_s - since[0], step - since[1]))
        if not self._spans:
            return {}
        step_s = sum(took_s for took_s, _ in self._spans) / sum(steps for _, steps in self._spans)
        scalars = {"step_s": step_s}
        if self._spans[-1][1] == 1:
            scalars["last_step_s"] = self._spans[-1][0]
        scalars |= {name: number / step_s for name, number in self._per_step.items() if number is not None}
        if self._mfu is not None:
            scalars["mfu"] = self._mfu.of(step_s)
        if self._peak_bytes is not None:
            scalars["peak_bytes"] = self._peak_bytes()
        return scalars

    def pause(self) -> None:
        """Leaves out the time since the last `done`. Call it after what is no step: an evaluation, a checkpoint."""
        if self._since is not None:
            self._since = self._clock(), self._since[1]


# The line that says where a run is.

_LIVE_EVERY_S = 0.1
_PLAIN_EVERY_S = 10.0


class Progress:
    """A tracker that shows the last step in one line, and each evaluation in a line that stays.

    On a terminal the line is rewritten in place and fitted to its width. Elsewhere (a log file, CI) a plain line is
    printed every ten seconds. The last step is always shown. When nobody reads any more (a closed pipe, a terminal
    that is gone), the run goes on in silence.

    Args:
        num_steps: steps of the whole run, those before a resumed one included.
        peak_label: what the bytes are, as `peak_bytes` names it: "measured" or "compiled".
        stream: where to write; standard output by default.
        clock: gives seconds.

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
        """Shows a step (scalars with a "loss"), if it is time to, and an evaluation (a "val_loss")."""
        if "loss" in scalars:
            self._fields, self._pending = self._describe(step, scalars), True
            if step == self._num_steps or self._clock() >= self._next_s:
                self._show()
        if "val_loss" in scalars:
            self.note(f"step {step}: validation loss {scalars['val_loss']:.4f}")

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        self._line.leave(text)
        if self._line.is_live and self._fields:
            self._show()

    def close(self) -> None:
        """Shows the last step, if it is not shown yet, and leaves its line behind."""
        if self._pending:
            self._show()
        self._line.end()
        self._fields = []

    def _describe(self, step: int, scalars: Mapping[str, float]) -> list[str]:
        fields = [f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}", f"loss {scalars['loss']:.4f}"]
        for unit in ("tokens", "samples"):
            if f"{unit}_per_s" in scalars:
                fields.append(f"{_rate(scalars[f'{unit}_per_s'])} {unit}/s")
        if "step_s" in scalars:
            fields.append(f"{duration(scalars['step_s'])}/step")
            fields.append(f"ETA {_clock((self._num_steps - step) * scalars['step_s'])}")
        if "mfu" in scalars:
            fields.append(f"MFU {scalars['mfu']:.1%}")
        if "peak_bytes" in scalars:
            fields.append(f"peak {human_bytes(scalars['peak_bytes'])}{self._peak}")
        return fields

    def _show(self) -> None:
        self._next_s = self._clock() + (_LIVE_EVERY_S if self._line.is_live else _PLAIN_EVERY_S)
        self._pending = False
        if self._line.is_live:
            self._line.rewrite(_fitted(self._fields, self._line.columns))
        else:
            self._line.leave("  ".join(self._fields))


def _fitted(fields: list[str], columns: int) -> str:
    """As many whole fields as there is room for: half a number would be a wrong one."""
    line = fields[0]
    for field in fields[1:]:
        if len(line) + 2 + len(field) > columns:
            break
        line += "  " + field
    return line[:columns]


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{seconds:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
