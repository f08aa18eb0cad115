"""The record of a run: the tracker interface, several trackers as one, metrics.jsonl and its plot."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import numbers
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, SupportsFloat

from jshard._files import open_in_place, open_new, open_regular, replacing
from jshard._parsing import is_int, is_number, parse_json
from jshard._paths import expanded
from jshard._types import Json
from jshard.errors import RunError, ShardingError, UnsafeFileError


class Tracker(Protocol):
    """Receives the scalars of a run. One process of the run has trackers, the others have none.

    Examples:
        >>> class Prints:
        ...     def log(self, step, scalars):
        ...         print(step, dict(scalars))
        ...
        ...     def close(self):
        ...         pass
    """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Receives the scalars of a completed step, or of the evaluation after it.

        Args:
            step: number of completed steps.
            scalars: by name; for a step at least "loss" and "grad_norm", for an evaluation "val_loss".
        """
        ...

    def close(self) -> None:
        """Ends the record; called once, even if the run fails."""
        ...


class Trackers:
    """Several trackers as one.

    Args:
        *needed: trackers whose failure ends the run, such as its own record.
        optional: trackers that are dropped when they fail, such as a network service: the run continues.
        warn: called once for each dropped tracker.
    """

    def __init__(
        self,
        *needed: Tracker,
        optional: Iterable[Tracker] = (),
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self._needed = list(needed)
        self._optional = list(optional)
        self._warn = warn

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Passes the scalars to every tracker."""
        # First, so that the record has the step, whatever an optional one does.
        for tracker in self._needed:
            tracker.log(step, scalars)
        for tracker in tuple(self._optional):  # a copy: one that fails is removed
            try:
                tracker.log(step, scalars)
            except Exception as error:
                self._optional.remove(tracker)
                self._warn(f"{_failure(tracker, error)} It is left out from step {step} on; the run continues.")

    def close(self) -> None:
        """Closes every tracker, even if one of them fails."""
        with contextlib.ExitStack() as stack:
            # Runs last, and in any case: also if a `warn` raises.
            stack.callback(self.close_needed)
            while self._optional:
                tracker = self._optional.pop(0)
                try:
                    tracker.close()
                except Exception as error:
                    self._warn(f"{_failure(tracker, error)} Its last steps may be missing there.")

    def close_needed(self) -> None:
        """Closes only the needed trackers: the optional ones may wait for files written after the last step."""
        with contextlib.ExitStack() as stack:
            # Callbacks run in reverse order: this closes the trackers in theirs, each even if another fails.
            for tracker in reversed(self._needed):
                stack.callback(tracker.close)
            self._needed.clear()


def _failure(tracker: Tracker, error: Exception) -> str:
    return f"{type(tracker).__name__} failed ({type(error).__name__}: {error})."


# metrics.jsonl: a line of JSON per step and evaluation.

_LINE_BYTES = 1 << 20  # a longer line is damaged; without a bound, a file without newlines would be one line

MetricsLine = dict[str, Json]
"""A line of metrics.jsonl: "step" and the scalars by name, None for NaN."""


class Jsonl:
    """Writes one whole line of JSON per call, immediately, so that a killed run keeps its lines.

    NaN is written as null, because JSON has no NaN.

    Args:
        path: the file, which must not exist.
        resume_after: the step that a resumed run continues from. The file may then exist, and is first cut back to the
            lines up to that step: later steps are done again.

    Raises:
        ShardingError: the file exists and nothing is resumed.
        RunError: the file cannot be read or written, or is damaged before its last line.

    Examples:
        >>> metrics = Jsonl("metrics.jsonl")
        >>> metrics.log(1, {"loss": 5.54})
        >>> metrics.close()
        >>> read_metrics("metrics.jsonl")
        [{'step': 1, 'loss': 5.54}]
    """

    def __init__(self, path: str | Path, *, resume_after: int | None = None) -> None:
        self._path = expanded(path)
        with _explained_errors(self._path):
            if resume_after is None:
                _create(self._path)
            elif self._path.exists():
                # The steps after it are done again, and would be in the record twice.
                _cut_back(self._path, resume_after)
            number = open_in_place(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        # Without a buffer: a killed process would lose what is in it.
        self._file = os.fdopen(number, "ab", buffering=0)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one line.

        Raises:
            RunError: it cannot be written, as on a full disk.
        """
        line = {"step": step} | {name: _number(value) for name, value in scalars.items()}
        unwritten = json.dumps(line).encode() + b"\n"
        with _explained_errors(self._path):
            while unwritten:  # the file has no buffer, and may take only a part at once
                written_bytes = self._file.write(unwritten) or 0
                unwritten = unwritten[written_bytes:]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def keep_on_disk(path: Path) -> None:
    """Waits until the lines of a metrics.jsonl so far would survive a power cut; a RunError if the disk fails."""
    with _explained_errors(path), open_regular(path) as file:
        os.fsync(file.fileno())


def read_metrics(path: str | Path) -> list[MetricsLine]:
    """Returns the lines of a metrics.jsonl; skips a last line left unfinished by a killed run.

    Args:
        path: the file.

    Returns:
        A dict per line: "step" and the scalars, None for NaN.

    Raises:
        RunError: a line before the last one is damaged.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: str | Path) -> Iterator[MetricsLine]:
    """Yields the lines of `read_metrics`, one by one."""
    for _, line in _lines(expanded(path)):
        yield line


def _number(value: SupportsFloat) -> int | float | None:
    """Returns a number that JSON has; None for NaN and the infinities."""
    # Stays an integer in JSON; also one of NumPy, which `json` does not take.
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    if not math.isfinite(number):
        return None
    return number


def _create(path: Path) -> None:
    try:
        open_new(path).close()
    except FileExistsError:
        raise ShardingError(
            "The record would overwrite another one.",
            where=str(path),
            why=f"there is a file of {path.lstat().st_size:,} bytes at that path already.",
            do="name another folder with --out, or continue that run with --resume.",
        ) from None


def _cut_back(path: Path, step: int) -> None:
    """Removes the lines after a step; if this is interrupted, the file is the old or the new one."""
    with replacing(path) as file:
        for raw, line in _lines(path):
            if line["step"] <= step:
                file.write(raw)


def _lines(path: Path) -> Iterator[tuple[bytes, MetricsLine]]:
    """Yields the lines of a file, raw and parsed."""
    damaged = 0  # the number of a damaged line: the last one may be, as a killed run leaves it unfinished
    with io.BufferedReader(open_regular(path)) as file:
        raw_lines = iter(functools.partial(file.readline, _LINE_BYTES), b"")
        for number, raw in enumerate(raw_lines, start=1):
            if damaged:
                raise RunError(
                    "The record of the run is damaged.",
                    where=f"{path}:{damaged}",
                    why='that line is not of the form {"step": 1, ...}, and more lines follow it.',
                    do=f"mv {path} {path}.damaged; a resumed run then begins a new record.",
                )
            line = _parsed(raw)
            if line is None:
                damaged = number
            else:
                # The last line may be whole but for its end; what is written after it must not join it.
                yield raw.rstrip(b"\n") + b"\n", line


def _parsed(raw: bytes) -> MetricsLine | None:
    """Parses a line; None if it is damaged."""
    try:
        line = parse_json(raw)
    except ValueError:
        return None
    if not isinstance(line, dict) or not is_int(line.get("step")):
        return None
    if not all(_is_metric(value) for value in line.values()):
        return None
    return line


def _is_metric(value: object) -> bool:
    # null stands for NaN.
    return value is None or is_number(value)


@contextlib.contextmanager
def _explained_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UnsafeFileError:
        raise
    except OSError as error:
        raise RunError(
            "The record of the run cannot be written.",
            where=str(path),
            why=f"{error.strerror} (errno {error.errno}).",
            do=f"df -h {path.parent}; make room or give write access there, then continue with --resume.",
        ) from error


# loss.png: the losses of a metrics.jsonl over the steps.


class _LossCurve(NamedTuple):
    """A curve of the plot: the scalar, its name in the legend, and how it is drawn."""

    scalar: str
    label: str
    style: str


_CURVES = (
    _LossCurve("loss", "training", "-"),
    _LossCurve("val_loss", "validation", "o-"),
    _LossCurve("val_ema_loss", "validation of the average", "s-"),
)


def plot_loss(metrics_path: str | Path, png_path: str | Path) -> None:
    """Draws training and validation loss over the steps of a metrics.jsonl. Needs no display.

    The curve has a gap where the loss was not a number.

    Args:
        metrics_path: the metrics.jsonl.
        png_path: the image to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(metrics_path)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for curve in _CURVES:
        steps = []
        values = []
        for line in lines:
            if curve.scalar in line:
                value = line[curve.scalar]
                steps.append(line["step"])
                values.append(math.nan if value is None else value)  # a gap in the curve
        if steps:
            axes.plot(steps, values, curve.style, label=curve.label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    with replacing(expanded(png_path)) as file:
        FigureCanvasAgg(figure).print_png(file)
