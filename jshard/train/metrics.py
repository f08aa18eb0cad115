"""What a run leaves behind: a line per step in metrics.jsonl, a progress line, loss.png."""

from __future__ import annotations

import collections
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import jax

_RATE_WINDOW = 50  # steps that the shown speed is averaged over
_PLAIN_LINE_EVERY_S = 10.0


class MetricsWriter:
    """Writes dicts as lines of JSON; a run that is cut short keeps its lines.

    Of several processes only the first one writes.

    Example:
        with MetricsWriter(out / "metrics.jsonl") as metrics:
            metrics.write(step=1, loss=5.54)
    """

    def __init__(self, path: str | Path):
        path = Path(path if jax.process_index() == 0 else os.devnull)
        self._file = path.open("a", buffering=1)

    def write(self, **values: Any) -> None:
        """Writes one line; arrays of one element become numbers."""
        self._file.write(json.dumps(values, default=float) + "\n")

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class Progress:
    """One line that says where the run is: step, loss, tokens/s, time left.

    On a terminal the line is rewritten in place. Elsewhere (a log file, CI) a plain line is printed
    every ten seconds. Of several processes only the first one shows it.

    Args:
        num_steps: steps of the whole run.
        tokens_per_step: tokens of a global batch.
        stream: where to write.
    """

    def __init__(self, num_steps: int, tokens_per_step: int, stream: TextIO | None = None):
        self._num_steps = num_steps
        self._tokens_per_step = tokens_per_step
        self._stream = sys.stdout if stream is None else stream
        self._silent = jax.process_index() != 0
        self._times: collections.deque[float] = collections.deque(maxlen=_RATE_WINDOW + 1)
        self._last_plain_s = -_PLAIN_LINE_EVERY_S
        self._width = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Speed over the last steps; None before the second (the first one compiles)."""
        if len(self._times) < 2:
            return None
        steps = len(self._times) - 1
        return steps * self._tokens_per_step / (self._times[-1] - self._times[0])

    def update(self, step: int, loss: float) -> None:
        """Notes that `step` is done and shows the line."""
        self._times.append(time.perf_counter())
        line = self._line(step, loss)
        if self._silent:
            return
        if self._stream.isatty():
            self._rewrite(line)
        elif self._is_due() or step == self._num_steps:
            print(line, file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Prints a line that stays, and leaves time spent since the last step out of the speed."""
        self._times.clear()
        if self._silent:
            return
        if self._stream.isatty():
            self._rewrite("")
        print(text, file=self._stream, flush=True)

    def _line(self, step: int, loss: float) -> str:
        done = f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}   loss {loss:.4f}"
        rate = self.tokens_per_s
        if rate is None:
            return done
        left_s = (self._num_steps - step) * self._tokens_per_step / rate
        return f"{done}   {rate:,.0f} tokens/s   ETA {_duration(left_s)}"

    def _rewrite(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._width) + ("" if line else "\r"))
        self._stream.flush()
        self._width = len(line)

    def _is_due(self) -> bool:
        now_s = time.perf_counter()
        if now_s - self._last_plain_s < _PLAIN_LINE_EVERY_S:
            return False
        self._last_plain_s = now_s
        return True


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def plot_loss(metrics_path: str | Path, png_path: str | Path) -> None:
    """Draws training and validation loss over the steps of a metrics.jsonl."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(metrics_path)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for key, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o-")):
        points = [(line["step"], line[key]) for line in lines if key in line]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(png_path))
