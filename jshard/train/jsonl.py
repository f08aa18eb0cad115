"""metrics.jsonl: a line of JSON per step and evaluation."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jshard.errors import RunError, ShardingError


class Jsonl:
    """Writes a line of JSON per call, whole and at once: a run that is killed keeps its lines.

    A value that is no number is written as null, as JSON has no NaN.

    Args:
        path: the file, which must not exist.
        resume_after: the step that a resumed run goes on from. The file may then exist, and is first cut back to the
            lines up to that step: what comes after is done again.

    Raises:
        ShardingError: the file exists and nothing is resumed.
        RunError: the file cannot be read or written, or is damaged before its last line.

    Example:
        >>> metrics = Jsonl("metrics.jsonl")
        >>> metrics.log(1, {"loss": 5.54})
        >>> metrics.close()
        >>> read_metrics("metrics.jsonl")
        [{'step': 1, 'loss': 5.54}]
    """

    def __init__(self, path: str | Path, *, resume_after: int | None = None) -> None:
        self._path = Path(path)
        with _explained_errors(self._path):
            if resume_after is None:
                _create(self._path)
            elif self._path.exists():
                _cut_back(self._path, resume_after)
            self._file = self._path.open("ab", buffering=0)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one line.

        Raises:
            RunError: it cannot be written, as on a full disk.
        """
        line = json.dumps({"step": step} | {name: _number(value) for name, value in scalars.items()})
        with _explained_errors(self._path):
            self._append(line.encode() + b"\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _append(self, line: bytes) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)  # half a line would spoil one that is written after it
            raise


def keep_on_disk(path: str | Path) -> None:
    """Waits until the lines so far would survive a power cut.

    Args:
        path: the metrics.jsonl.

    Raises:
        RunError: the disk fails.
    """
    with _explained_errors(Path(path)), Path(path).open("rb") as file:
        os.fsync(file.fileno())


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last one that a killed run left unfinished is passed over.

    Args:
        path: the file.

    Returns:
        A dict per line: "step" and the scalars, None for what was not a number.

    Raises:
        RunError: a line before the last one is damaged.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The same, one by one: the record of a long run is larger than its file."""
    return (record for _, record in _records(Path(path)))


def _number(value: Any) -> int | float | None:
    if isinstance(value, numbers.Integral):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else None


def _create(path: Path) -> None:
    try:
        path.open("x").close()
    except FileExistsError:
        raise ShardingError(
            "The record would be written over another one.",
            where=str(path),
            why=f"there is a file of {path.stat().st_size:,} bytes at that path already.",
            do="name another folder with --out, or continue that run with --resume.",
        ) from None


def _cut_back(path: Path, step: int) -> None:
    """Takes away the lines after a step; whenever this is cut short, the file is the old or the new one."""
    aside = path.with_name(path.name + ".cut")
    with aside.open("wb") as file:
        file.writelines(line for line, record in _records(path) if record["step"] <= step)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a file, as they are and as what they mean."""
    torn = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if torn:
                raise RunError(
                    "The record of the run is damaged.",
                    where=f"{path}:{torn}",
                    why='that line is not of the form {"step": 1, ...}, and more lines follow it.',
                    do=f"mv {path} {path}.damaged; a resumed run then begins a new record.",
                )
            record = _parsed(line)
            if record is None:
                torn = number
            else:
                yield line.rstrip(b"\n") + b"\n", record


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


@contextlib.contextmanager
def _explained_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            "The record of the run cannot be written.",
            where=str(path),
            why=f"{error.strerror} (errno {error.errno}).",
            do=f"df -h {path.parent}; make room or give write access there, then continue with --resume.",
        ) from error


# loss.png: the losses of a metrics.jsonl over the steps.

_CURVES = (("loss", "training", "-"), ("val_loss", "validation", "o-"))


def plot_loss(metrics_path: str | Path, png_path: str | Path) -> None:
    """Draws training and validation loss over the steps of a metrics.jsonl. Needs no display.

    Where the loss was no number, the curve has a gap.

    Args:
        metrics_path: the metrics.jsonl.
        png_path: the picture to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[int, float]]] = {key: [] for key, *_ in _CURVES}
    for line in iterate_metrics(metrics_path):
        for key in points.keys() & line.keys():
            points[key].append((line["step"], math.nan if line[key] is None else line[key]))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for key, label, style in _CURVES:
        if points[key]:
            axes.plot(*np.array(points[key]).T, style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    FigureCanvasAgg(figure).print_png(str(png_path))
