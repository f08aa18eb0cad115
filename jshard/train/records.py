"""What records a run: the interface, several trackers as one, metrics.jsonl, TensorBoard, and Weights & Biases."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import json
import math
import numbers
import os
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jshard.errors import RunError, ShardingError


class Tracker(Protocol):
    """Takes the scalars of a run. One process of the run has trackers, the others have none.

    Example:
        >>> class Prints:
        ...     def log(self, step, scalars):
        ...         print(step, dict(scalars))
        ...
        ...     def close(self):
        ...         pass
    """

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes the scalars of a step that is done, or of the evaluation after it.

        Args:
            step: steps that are done.
            scalars: by name; of a step at least "loss" and "grad_norm", of an evaluation "val_loss".
        """
        ...

    def close(self) -> None:
        """Ends the record; called once, also when the run fails."""
        ...


class Trackers:
    """Several trackers as one.

    Args:
        *needed: trackers without which the run must not go on, as its own record.
        optional: trackers that are left out once they fail, as a service on the network: the run goes on.
        warn: called once for each that is left out.
    """

    def __init__(
        self,
        *needed: Tracker,
        optional: Iterable[Tracker] = (),
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self._needed, self._optional, self._warn = needed, list(optional), warn

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Gives every tracker the scalars."""
        for tracker in self._needed:
            tracker.log(step, scalars)
        for tracker in tuple(self._optional):
            try:
                tracker.log(step, scalars)
            except Exception as error:
                self._optional.remove(tracker)
                self._warn(f"{_failure(tracker, error)} It is left out from step {step} on; the run goes on.")

    def close(self) -> None:
        """Closes every tracker, also when one of them fails."""
        with contextlib.ExitStack() as stack:
            for tracker in reversed(self._needed):
                stack.callback(tracker.close)
            while self._optional:
                tracker = self._optional.pop(0)
                try:
                    tracker.close()
                except Exception as error:
                    self._warn(f"{_failure(tracker, error)} Its last steps may be missing there.")


def _failure(tracker: Tracker, error: Exception) -> str:
    return f"{type(tracker).__name__} failed ({type(error).__name__}: {error})."


# metrics.jsonl: a line of JSON per step and evaluation.


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
        left = line.encode() + b"\n"
        with _explained_errors(self._path):
            while left:
                left = left[self._file.write(left) or 0 :]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def keep_on_disk(path: Path) -> None:
    """Waits until the lines of a metrics.jsonl so far would survive a power cut; a RunError if the disk fails."""
    with _explained_errors(path), path.open("rb") as file:
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
    """The lines of `read_metrics`, one by one."""
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
    for _, line in _records(Path(metrics_path)):
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


# Trackers that need an extra package: TensorBoard, and Weights & Biases.

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
_FLUSH_EVERY_S = 10.0
# A run that is asked to stop has 30 seconds, and the upload is not the most important thing to do in them.
_WANDB_FINISH_S = 15.0


class TensorBoard:
    """Writes the scalars of a run where `tensorboard --logdir` finds them.

    Writes at once and in this thread: a full disk is an error of the caller, where the queue of tensorboardX's own
    writer would hold the run up forever.

    Args:
        folder: the folder of the event files. Each start of a run adds a file of its own.
        resume_after: the step that a resumed run goes on from; TensorBoard then hides the later ones of earlier files.

    Raises:
        ShardingError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | Path, *, resume_after: int | None = None) -> None:
        package = _import("tensorboard")
        self._event = importlib.import_module("tensorboardX.proto.event_pb2")
        self._flushed_s = time.monotonic()
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._writer = package.RecordWriter(str(Path(folder, _event_file(Path(folder)))))
        self._write(file_version="brain.Event:2")
        if resume_after is not None:
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(step=resume_after + 1, session_log=start)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one event with all scalars."""
        values = [{"tag": name, "simple_value": float(value)} for name, value in scalars.items()]
        try:
            self._write(step=step, summary={"value": values})
            if time.monotonic() - self._flushed_s >= _FLUSH_EVERY_S:
                self._flushed_s = time.monotonic()
                self._writer.flush()
        except OSError:
            with contextlib.suppress(OSError):  # the rest of its buffer has no place either
                self._writer.close()
            raise

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event.Event(wall_time=time.time(), **fields).SerializeToString())


class WeightsAndBiases:
    """Sends the scalars of a run to Weights & Biases; with WANDB_MODE=offline, keeps them in the folder of the run.

    Steps that a resumed run does again and that W&B has already are not sent twice.

    Args:
        project: the project there.
        name: the name of the run there.
        config: what the run was asked to do.
        folder: the folder of the run. The run's id at W&B is kept there, in wandb/run_id.
        resume_after: the step that a resumed run goes on from; the run at W&B then goes on too.

    Raises:
        ShardingError: wandb is not installed.
        RunError: W&B does not take the run, as where nobody is logged in.
    """

    def __init__(
        self,
        *,
        project: str,
        name: str,
        config: Mapping[str, Any],
        folder: str | Path,
        resume_after: int | None = None,
    ) -> None:
        wandb = _import("wandb")
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                config=dict(config),
                dir=str(folder),
                id=_run_id(Path(folder, "wandb", "run_id"), resume_after is not None),
                resume="allow",
                settings=wandb.Settings(console="off", finish_timeout=_WANDB_FINISH_S),
            )
        except Exception as error:
            raise RunError(
                "Weights & Biases does not take the run.",
                where=f"project {project}, run {name}",
                why=f"{type(error).__name__}: {error}",
                do="wandb login, or set WANDB_MODE=offline to keep the record here, or leave out this tracker.",
            ) from error

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Sends the scalars."""
        if step >= self._run.starting_step:
            self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Waits up to 15 seconds for what is still to be sent; `wandb sync` sends what then is left."""
        self._run.finish()


def available() -> tuple[str, ...]:
    """The trackers whose package is installed: of "tensorboard" and "wandb"."""
    return tuple(name for name, package in _PACKAGES.items() if _is_installed(package))


def check_names(names: Iterable[str]) -> None:
    """Refuses what `open_trackers` cannot open, before anything is written."""
    for name in names:
        if name not in _PACKAGES:
            near = difflib.get_close_matches(name, _PACKAGES, n=1)
            raise ShardingError(
                f"There is no tracker {name!r}.",
                where=f"--track {name}",
                why=f"the trackers are {', '.join(_PACKAGES)}; metrics.jsonl is written in any case.",
                do=f"--track {(near or [*_PACKAGES])[0]}",
            )
        _import(name)


def open_trackers(
    names: Iterable[str],
    *,
    out: str | Path,
    config: Mapping[str, Any],
    resume_after: int | None = None,
) -> list[Tracker]:
    """Opens trackers by name.

    Args:
        names: of "tensorboard" and "wandb".
        out: the folder of the run; its name is the run's name at W&B, in the project WANDB_PROJECT, or "jshard".
        config: what the run was asked to do.
        resume_after: the step that a resumed run goes on from.

    Raises:
        ShardingError: a name is unknown, or its package is not installed; nothing was opened then.
        RunError: W&B does not take the run.
    """
    names, out = tuple(names), Path(out)
    check_names(names)
    trackers: list[Tracker] = []
    if "wandb" in names:
        project = os.environ.get("WANDB_PROJECT") or "jshard"
        run = out.resolve().name
        trackers.append(
            WeightsAndBiases(project=project, name=run, config=config, folder=out, resume_after=resume_after)
        )
    if "tensorboard" in names:
        trackers.append(TensorBoard(out / "tensorboard", resume_after=resume_after))
    return trackers


def _event_file(folder: Path) -> str:
    """A new name: the last in their order, in which TensorBoard reads them, whatever the clock says."""
    stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(stamp) for stamp in stamps if stamp.isdecimal()), default=0)
    return f"events.out.tfevents.{max(int(time.time()), newest + 1):010d}.{socket.gethostname()}"


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a folder of that name, as wandb leaves behind, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _import(name: str) -> Any:
    package = _PACKAGES[name]
    if not _is_installed(package):
        raise ShardingError(
            f"The package {package} is not installed.",
            where=f"--track {name}",
            why=f"the tracker {name} needs it; it is an extra of jshard.",
            do=f"pip install 'jshard[{name}]'",
        )
    return importlib.import_module(package)


def _run_id(path: Path, resumed: bool) -> str:
    if resumed and path.exists():
        return path.read_text().strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    run_id = uuid.uuid4().hex[:8]
    path.write_text(run_id + "\n")
    return run_id
