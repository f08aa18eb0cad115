"""Trackers by name: those of this package, TensorBoard and Weights & Biases, and those that a user registers."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import html
import importlib
import importlib.util
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jshard._files import read_bytes, write_text
from jshard._paths import expanded
from jshard.errors import RunError, ShardingError
from jshard.train.records import Tracker

_FLUSH_EVERY_S = 10.0
# A run that is asked to stop has 30 seconds, and the upload is not the most important task in them.
_WANDB_FINISH_S = 15.0
_RUN_ID_BYTES = 1024
_LOCAL_WANDB_MODES = ("offline", "disabled", "dryrun")
_EXTRAS = ("tensorboard", "wandb")  # of this package


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker knows of the run that it records.

    Attributes:
        folder: the folder of the run.
        config: the configuration of the run, as JSON values.
        resume_after: the step that a resumed run continues from; None for a new run.
    """

    folder: Path
    config: Mapping[str, object]
    resume_after: int | None = None


OpenTracker = Callable[[TrackedRun], Tracker]
Opener = TypeVar("Opener", bound=OpenTracker)


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True)
class _Registered:
    """A tracker that can be opened by its name.

    Attributes:
        open: opens it for a run.
        package: the package that it needs; None if it needs none.
        check: raises a `ShardingError` if it could not be opened.
    """

    open: OpenTracker
    package: str | None = None
    check: Callable[[], object] = _nothing

    @property
    def is_service(self) -> bool:
        """Returns whether it can refuse a run."""
        return self.check is not _nothing


_trackers: dict[str, _Registered] = {}


def register_tracker(
    name: str, *, package: str | None = None, check: Callable[[], object] = _nothing
) -> Callable[[Opener], Opener]:
    """Registers a tracker under a name, which `run_recipe(track=[name])` and `jshard train --track NAME` then open.

    For the command, call it in the model file, which is loaded before the trackers are opened. A name that is
    registered again gets the new tracker.

    Args:
        name: the name.
        package: the package that the tracker imports. The run is refused if it is not installed.
        check: raises a `ShardingError` if the tracker cannot be opened, for example without a login. It is called in
            the process that opens the trackers, before anything is read, written or compiled.

    Returns:
        A decorator for a class, or another function, that takes a `TrackedRun` and returns a `Tracker`.

    Examples:
        >>> @register_tracker("csv")
        ... class Csv:
        ...     def __init__(self, run):
        ...         self._file = open(run.folder / "losses.csv", "a")
        ...
        ...     def log(self, step, scalars):
        ...         if "loss" in scalars:
        ...             print(step, scalars["loss"], sep=",", file=self._file)
        ...
        ...     def close(self):
        ...         self._file.close()
    """

    def register(open_tracker: Opener) -> Opener:
        _trackers[name] = _Registered(open_tracker, package, check)
        return open_tracker

    return register


def available() -> tuple[str, ...]:
    """Returns the names of the trackers whose package is installed."""
    names = []
    for name, tracker in _trackers.items():
        if tracker.package is None or _is_installed(tracker.package):
            names.append(name)
    return tuple(names)


def names_in(track: Iterable[str | Tracker]) -> list[str]:
    """Returns the names among requested trackers; the others are trackers themselves."""
    return [tracker for tracker in track if isinstance(tracker, str)]


def check_trackers(track: Sequence[str | Tracker]) -> None:
    """Refuses trackers that `open_trackers` cannot open, before anything is written.

    Raises:
        ShardingError: a name is unknown, its package is not installed, or an object is not a tracker.
    """
    for tracker in track:
        if isinstance(tracker, str):
            _check_name(tracker)
        else:
            _check_methods(tracker)


def _check_name(name: str) -> None:
    if name not in _trackers:
        near = difflib.get_close_matches(name, _trackers, n=1)
        suggested = near[0] if near else next(iter(_trackers))
        raise ShardingError(
            f"There is no tracker {name!r}.",
            where=f"--track {name}",
            why=f"the trackers are {', '.join(_trackers)}; metrics.jsonl is written in any case.",
            do=f"--track {suggested}",
        )
    package = _trackers[name].package
    if package is not None:
        _import(package, name)


def _check_methods(tracker: object) -> None:
    # Now: a run that has trained for hours must not find out when it closes its trackers.
    missing = [method for method in ("log", "close") if not callable(getattr(tracker, method, None))]
    if missing:
        raise ShardingError(
            "The object is not a tracker.",
            where=f"track=[{type(tracker).__name__}(...)]",
            why=f"it has no method {' and no method '.join(missing)}; see js.train.Tracker.",
            do=f"give it `log(step, scalars)` and `close()`, or name a tracker: {', '.join(_trackers)}",
        )


def check_login(names: Iterable[str]) -> None:
    """Refuses a tracker whose service does not know the user, before anything is written or compiled.

    On a terminal W&B asks for the key, now and not once the step is compiled. Call it in the process that opens the
    trackers: the others need no login.

    Raises:
        ShardingError: the service refuses the login.
    """
    for name in names:
        _trackers[name].check()


def open_trackers(
    track: Iterable[str | Tracker],
    *,
    out: str | Path,
    config: Mapping[str, object],
    resume_after: int | None = None,
) -> list[Tracker]:
    """Opens trackers by name; those that are objects already are returned as they are.

    Args:
        track: names, "tensorboard", "wandb" and those of `register_tracker`, and objects.
        out: the folder of the run. At W&B the run is WANDB_NAME, or the folder's name, in the project WANDB_PROJECT, or
            "jshard".
        config: the configuration of the run.
        resume_after: the step that a resumed run continues from.

    Raises:
        ShardingError: a name is unknown, or its package is not installed; nothing was opened then.
        RunError: W&B refuses the run.
    """
    requested = tuple(track)
    check_trackers(requested)
    run = TrackedRun(folder=expanded(out), config=config, resume_after=resume_after)
    # Each once: two writers would write into one folder.
    names = dict.fromkeys(names_in(requested))
    # Services first: if one refuses the run, no file of another tracker was created.
    ordered = sorted(names, key=lambda name: not _trackers[name].is_service)
    opened = [_trackers[name].open(run) for name in ordered]
    return [*opened, *(tracker for tracker in requested if not isinstance(tracker, str))]


class TensorBoard:
    """Writes the scalars of a run where `tensorboard --logdir` finds them.

    Writes at once and in this thread: a full disk raises an error in the caller, while the queue of tensorboardX's own
    writer would block the run forever.

    Args:
        folder: the folder of the event files. Each start of a run adds a file of its own.
        resume_after: the step that a resumed run continues from; TensorBoard then hides later ones of earlier files.

    Raises:
        ShardingError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | Path, *, resume_after: int | None = None) -> None:
        package = _import("tensorboardX", "tensorboard")
        self._event = importlib.import_module("tensorboardX.proto.event_pb2")
        self._flushed_s = time.monotonic()
        folder = expanded(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = package.RecordWriter(str(folder / _event_file(folder)))
        # Each event file begins with its version.
        self._write(file_version="brain.Event:2")
        if resume_after is not None:
            # TensorBoard hides all events of earlier files from this step on: the run repeats them.
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
            with contextlib.suppress(OSError):  # the rest of its buffer does not fit either
                self._writer.close()
            raise

    def close(self) -> None:
        """Writes the remaining events and closes the file."""
        self._writer.close()

    def _write(self, **fields: object) -> None:
        self._writer.write(self._event.Event(wall_time=time.time(), **fields).SerializeToString())


@register_tracker("tensorboard", package="tensorboardX")
def _open_tensorboard(run: TrackedRun) -> TensorBoard:
    return TensorBoard(run.folder / "tensorboard", resume_after=run.resume_after)


class WeightsAndBiases:
    """Sends the scalars of a run to Weights & Biases; with WANDB_MODE=offline, keeps them in the folder of the run.

    Steps that a resumed run repeats and that W&B already has are not sent twice. `close` also sends the plot of the
    losses and the sample, if the run has written them.

    Args:
        project: the project there.
        name: the name of the run there.
        config: the configuration of the run.
        folder: the folder of the run. The run's id at W&B is stored there, in wandb/run_id.
        resume_after: the step that a resumed run continues from; the run at W&B then continues, too.

    Raises:
        ShardingError: wandb is not installed.
        RunError: W&B refuses the run, for example without a login.
    """

    def __init__(
        self,
        *,
        project: str,
        name: str,
        config: Mapping[str, object],
        folder: str | Path,
        resume_after: int | None = None,
    ) -> None:
        self._wandb = _import("wandb", "wandb")
        self._folder = expanded(folder)
        try:
            self._run = self._wandb.init(
                project=project,
                name=name,
                config=dict(config),
                dir=str(self._folder),
                # The id of before: W&B then adds to the run that it has, instead of beginning another one.
                id=_run_id(self._folder / "wandb" / "run_id", resume_after is not None),
                resume="allow",
                # It would otherwise capture the output of the run.
                settings=self._wandb.Settings(console="off", finish_timeout=_WANDB_FINISH_S),
            )
        except Exception as error:
            raise RunError(
                "Weights & Biases refuses the run.",
                where=f"project {project}, run {name}",
                why=f"{type(error).__name__}: {error}",
                do="wandb login, or set WANDB_MODE=offline to keep the record here, or leave out this tracker.",
            ) from error

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Sends the scalars."""
        if step >= self._run.starting_step:
            self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Sends loss.png and sample.txt, and waits up to 15 seconds; `wandb sync` sends the rest."""
        plot = self._folder / "loss.png"
        sample = self._folder / "sample.txt"
        files = {}
        # These leave the machine: a link in a folder from elsewhere could name any file of the user.
        if plot.is_file() and not plot.is_symlink():
            files["loss_plot"] = self._wandb.Image(str(plot))
        if sample.is_file() and not sample.is_symlink():
            text = read_bytes(sample, follow=False).decode(errors="replace")
            files["sample"] = self._wandb.Html(f"<pre>{html.escape(text)}</pre>")
        try:
            if files:
                self._run.log(files)
        finally:
            self._run.finish()


def _check_wandb_login() -> None:
    if os.environ.get("WANDB_MODE", "online") not in _LOCAL_WANDB_MODES:
        _log_in(_import("wandb", "wandb"))


@register_tracker("wandb", package="wandb", check=_check_wandb_login)
def _open_wandb(run: TrackedRun) -> WeightsAndBiases:
    return WeightsAndBiases(
        project=os.environ.get("WANDB_PROJECT") or "jshard",
        name=os.environ.get("WANDB_NAME") or run.folder.resolve().name,
        config=run.config,
        folder=run.folder,
        resume_after=run.resume_after,
    )


@functools.cache  # the command checks before it reads the data, and `run_recipe` for those who call it
def _log_in(wandb: Any) -> None:
    try:
        wandb.login(verify=True)
    except Exception as error:
        raise ShardingError(
            "Weights & Biases does not know who you are.",
            where="--track wandb",
            why=f"{type(error).__name__}: {error}",
            do="wandb login  # or export WANDB_API_KEY=...; WANDB_MODE=offline keeps the record here",
        ) from error


def _run_id(path: Path, resumed: bool) -> str:
    # A new run never continues the record of another one.
    if resumed and path.exists():
        return read_bytes(path, _RUN_ID_BYTES, follow=False).decode(errors="replace").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    run_id = uuid.uuid4().hex[:8]
    write_text(path, run_id + "\n")
    return run_id


def _event_file(folder: Path) -> str:
    """Returns a new name that is the last in the order in which TensorBoard reads them, independent of the clock."""
    newest = 0
    for path in folder.glob("events.out.tfevents.*"):
        stamp = path.name.split(".")[3]
        if stamp.isdecimal():
            newest = max(newest, int(stamp))
    # Two starts within a second, or a clock that was set back, get different names in the right order.
    stamp_s = max(int(time.time()), newest + 1)
    return f"events.out.tfevents.{stamp_s:010d}.{socket.gethostname()}"


def _is_installed(package: str) -> bool:
    """Returns whether it can be imported; a folder of that name, as created by wandb, is not a package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _import(package: str, name: str) -> Any:
    """Imports the package of a tracker."""
    if _is_installed(package):
        return importlib.import_module(package)
    why = f"the tracker {name} needs it."
    do = f"pip install {package}"
    if name in _EXTRAS:
        why = f"the tracker {name} needs it, and it is an extra of jshard."
        do = f"pip install 'jshard[{name}]'"
    raise ShardingError(f"The package {package} is not installed.", where=f"--track {name}", why=why, do=do)
