"""Trackers that need an extra package: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import contextlib
import difflib
import functools
import html
import importlib
import importlib.util
import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jshard._files import read_bytes, write_text
from jshard._paths import expanded
from jshard.errors import RunError, ShardingError
from jshard.train.records import Tracker

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
_FLUSH_EVERY_S = 10.0
# A run that is asked to stop has 30 seconds, and the upload is not the most important task in them.
_WANDB_FINISH_S = 15.0
_RUN_ID_BYTES = 1024
_WANDB_STAYS_HERE = ("offline", "disabled", "dryrun")


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
        package = _import("tensorboard")
        self._event = importlib.import_module("tensorboardX.proto.event_pb2")
        self._flushed_s = time.monotonic()
        folder = expanded(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = package.RecordWriter(str(folder / _event_file(folder)))
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
            with contextlib.suppress(OSError):  # the rest of its buffer does not fit either
                self._writer.close()
            raise

    def close(self) -> None:
        """Writes the remaining events and closes the file."""
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event.Event(wall_time=time.time(), **fields).SerializeToString())


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
        config: Mapping[str, Any],
        folder: str | Path,
        resume_after: int | None = None,
    ) -> None:
        self._wandb = wandb = _import("wandb")
        self._folder = expanded(folder)
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                config=dict(config),
                dir=str(self._folder),
                id=_run_id(self._folder / "wandb" / "run_id", resume_after is not None),
                resume="allow",
                settings=wandb.Settings(console="off", finish_timeout=_WANDB_FINISH_S),
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
        plot, sample = self._folder / "loss.png", self._folder / "sample.txt"
        found = {}
        # These leave the machine: a link in a folder from elsewhere could name any file of the user.
        if plot.is_file() and not plot.is_symlink():
            found["loss_plot"] = self._wandb.Image(str(plot))
        if sample.is_file() and not sample.is_symlink():
            text = read_bytes(sample, follow=False).decode(errors="replace")
            found["sample"] = self._wandb.Html(f"<pre>{html.escape(text)}</pre>")
        try:
            if found:
                self._run.log(found)
        finally:
            self._run.finish()


def available() -> tuple[str, ...]:
    """The trackers whose package is installed, among "tensorboard" and "wandb"."""
    return tuple(name for name, package in _PACKAGES.items() if _is_installed(package))


def check_names(names: Iterable[str]) -> None:
    """Refuses trackers that `open_trackers` cannot open, before anything is written."""
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


def check_login(names: Iterable[str]) -> None:
    """Refuses a tracker whose service does not know the user, before anything is written or compiled.

    On a terminal W&B asks for the key, now and not once the step is compiled. Call it in the process that opens the
    trackers: the others need no login.

    Raises:
        ShardingError: the service refuses the login.
    """
    is_sent = os.environ.get("WANDB_MODE", "online") not in _WANDB_STAYS_HERE
    if "wandb" in names and is_sent:
        _log_in(_import("wandb"))


def open_trackers(
    names: Iterable[str],
    *,
    out: str | Path,
    config: Mapping[str, Any],
    resume_after: int | None = None,
) -> list[Tracker]:
    """Opens trackers by name.

    Args:
        names: "tensorboard", "wandb".
        out: the folder of the run. At W&B the run is WANDB_NAME, or the folder's name, in the project WANDB_PROJECT, or
            "jshard".
        config: the configuration of the run.
        resume_after: the step that a resumed run continues from.

    Raises:
        ShardingError: a name is unknown, or its package is not installed; nothing was opened then.
        RunError: W&B refuses the run.
    """
    names, out = tuple(names), expanded(out)
    check_names(names)
    trackers: list[Tracker] = []
    if "wandb" in names:
        project = os.environ.get("WANDB_PROJECT") or "jshard"
        run = os.environ.get("WANDB_NAME") or out.resolve().name
        trackers.append(
            WeightsAndBiases(project=project, name=run, config=config, folder=out, resume_after=resume_after)
        )
    if "tensorboard" in names:
        trackers.append(TensorBoard(out / "tensorboard", resume_after=resume_after))
    return trackers


def _event_file(folder: Path) -> str:
    """A new name that is the last in the order in which TensorBoard reads them, independent of the clock."""
    stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(stamp) for stamp in stamps if stamp.isdecimal()), default=0)
    return f"events.out.tfevents.{max(int(time.time()), newest + 1):010d}.{socket.gethostname()}"


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a folder of that name, as created by wandb, is not a package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _import(name: str) -> Any:
    package = _PACKAGES[name]
    if not _is_installed(package):
        raise ShardingError(
            f"The package {package} is not installed.",
            where=f"--track {name}",
            why=f"the tracker {name} needs it, and it is an extra of jshard.",
            do=f"pip install 'jshard[{name}]'",
        )
    return importlib.import_module(package)


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
    if resumed and path.exists():
        return read_bytes(path, _RUN_ID_BYTES, follow=False).decode(errors="replace").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    run_id = uuid.uuid4().hex[:8]
    write_text(path, run_id + "\n")
    return run_id
