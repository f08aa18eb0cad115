"""The line that says where a run is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from jshard._live import LiveLine
from jshard.inspect.tables import human_bytes

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
            fields.append(f"{_step_time(scalars['step_s'])}/step")
            fields.append(f"ETA {_duration((self._num_steps - step) * scalars['step_s'])}")
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


def _step_time(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{seconds:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
