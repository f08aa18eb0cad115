"""Where a checkpoint may be stored, and where to find one when a path has none."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from jshard._paths import expanded
from jshard._text import counted
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.buckets import BucketPath, Place
from jshard.checkpoint.errors import CheckpointError, DamagedError, reason, unreadable
from jshard.checkpoint.manifest import NAME as MANIFEST
from jshard.checkpoint.series.history import NAME as HISTORY
from jshard.checkpoint.storage import CHECKPOINT_METADATA, COMMIT_MARK, is_committed, is_item
from jshard.errors import FourPartError, RunError

_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


def place_of(path: str | os.PathLike[str]) -> Place:
    """Returns the absolute path of a checkpoint, or its address in a bucket."""
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            "This is not a path.",
            where=f"a {type(path).__name__}",
            why="the path is the first argument; the state to save or restore follows it.",
            do='save("run/100", state), and restore("run/100", like=state)',
        )
    return BucketPath.parse(path) or local_path(path)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of something that must be on this machine."""
    if _URL.match(os.fspath(path)):
        raise CheckpointError(
            "Checkpoints cannot be stored there.",
            where=os.fspath(path),
            why="checkpoints are stored in local folders and, where documented, in GCS and S3 buckets.",
            do="name a folder, or a bucket: gs://bucket/run/checkpoints, s3://bucket/run/checkpoints",
        )
    return expanded(path).absolute()


# Where the checkpoints are, when a path has none.

OF_A_RUN = "checkpoints"  # the folder of a run that holds them
INCOMPLETE = f"a folder without {COMMIT_MARK}: an incomplete copy, an unfinished save, or not a checkpoint"


def no_checkpoint(path: Place) -> CheckpointError:
    """Makes the error for a path without a checkpoint; it names one nearby, if there is one."""
    nearby = _nearby(path)
    if nearby.checkpoint is not None:
        do = f'restore("{nearby.checkpoint}", like=...)'
    elif _FILE.fullmatch(path.name):
        do = "give the path of the file, or of its folder."
    elif nearby.files:
        choices = [f'restore("{path / name}", like=...)' for name in nearby.files]
        do = "\n".join(["give the path of one of them:", *choices])
    else:
        do = "give the path that save() was given; a training run writes to runs/NAME/checkpoints/STEP."
    return CheckpointError("There is no checkpoint to restore.", where=str(path), why=nearby.why, do=do)


def no_such_step(folder: Place, step: int | None) -> CheckpointError:
    """Makes the error for a series without the requested checkpoint; `step` None stands for any step."""
    checkpoint = "checkpoint" if step is None else f"checkpoint of step {step}"
    message = f"There is no {checkpoint} to restore."
    steps = steps_in(folder)
    if steps:
        why = f"complete checkpoints there: {', '.join(map(str, steps))}."
        return CheckpointError(message, where=str(folder), why=why, do=f"restore step {steps[-1]}.")
    why, do = _no_series(folder)
    return CheckpointError(message, where=str(folder), why=why, do=do)


def not_written(path: Place, steps: Sequence[int], error: FourPartError) -> RunError:
    """Makes the error for a checkpoint of a series that could not be written; `steps` are the existing ones."""
    mend = "fix that"
    if isinstance(error, RunError):
        # Of "free some space, or choose a folder on another disk." only the first: the run continues in its folder.
        mend = error.do.partition(",")[0].rstrip(".")
    if steps:
        last = f"the last good checkpoint is {path.with_name(str(steps[-1]))}."
        do = f"{mend}, then continue the run with --resume."
    else:
        last = "there is no earlier checkpoint."
        do = f"{mend}, then start the run again."
    return RunError(
        f"The checkpoint of step {path.name} could not be written.",
        where=list(dict.fromkeys([str(path), *error.where])),  # the path first, and once
        why=f"{error.why}\n{last}",
        do=do,
    )


def not_read(path: Place, steps: Sequence[int], error: RunError) -> RunError:
    """Makes the error for a checkpoint of a series that cannot be read; `steps` are the existing ones."""
    other_steps = [step for step in reversed(steps) if str(step) != path.name]
    if other_steps:
        # That name is no number, so the series passes it over.
        do = f"mv {path} {path}.damaged\nand try again: step {other_steps[0]} is then the newest."
    else:
        do = "start the run again, in another folder."
    kind = DamagedError if isinstance(error, DamagedError) else RunError
    return kind(
        f"The checkpoint of step {path.name} cannot be read.",
        where=error.where,
        why=f"{error.why}\nother complete checkpoints: {', '.join(map(str, other_steps)) or 'none'}.",
        do=do,
    )


def _no_series(folder: Place) -> tuple[str, str]:
    """Returns why a folder holds no series, and what to do about it."""
    if is_committed(folder):
        why = "it is a checkpoint, not a folder of checkpoints."
        return why, f'Checkpointer("{folder.parent}"); or restore("{folder}", like=...).'
    if steps_in(folder / OF_A_RUN):
        return "it is the folder of a run, not of its checkpoints.", f'Checkpointer("{folder / OF_A_RUN}")'
    return "complete checkpoints there: none.", "start the run again, in another folder."


def steps_in(folder: Place) -> list[int]:
    """Returns the steps that have a complete checkpoint, oldest first."""
    if not isinstance(folder, BucketPath):
        return [step for step in _numbers_in(folder) if is_committed(folder / str(step))]
    # In a bucket the manifest, which is written last, makes a checkpoint complete.
    steps = []
    for name in folder.objects():
        step, _, file = name.partition("/")
        if file == MANIFEST and _is_number(step):
            steps.append(int(step))
    return sorted(steps)


def incomplete_in(folder: Place) -> list[int]:
    """Returns the steps whose folder is not a complete checkpoint, oldest first."""
    steps = []
    for step in _numbers_in(folder):
        place = folder / str(step)
        if place.is_dir() and not is_committed(place):
            steps.append(step)
    return steps


def _numbers_in(folder: Place) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if _is_number(path.name))


def _is_number(name: str) -> bool:
    is_decimal = name.isascii() and name.isdecimal()
    return is_decimal and str(int(name)) == name  # no other name of a step, such as 007


@dataclasses.dataclass(frozen=True)
class _Nearby:
    """What a path without a checkpoint is instead."""

    why: str
    checkpoint: Place | None = None  # that was probably meant
    files: Sequence[str] = ()  # in the folder, that can be read by themselves


_FILE = re.compile(r".+\.(safetensors|bin|pt|pth|ckpt)(\.index\.json)?")  # that can be read by itself
_PART = re.compile(r"\.metadata|.+\.distcp|.+_states\.pt")  # of DCP and DeepSpeed


def _is_readable_file(name: str) -> bool:
    """Returns whether a file of this name may be read by itself; the parts of other libraries may not."""
    return bool(_FILE.fullmatch(name)) and not _PART.fullmatch(name)


def _nearby(path: Place) -> _Nearby:
    # First, as such a path may exist or not.
    for parent in path.parents:
        if is_committed(parent):
            return _Nearby("it is part of a checkpoint, not a whole one.", parent)
    if not path.exists():
        return _near_missing(path)
    if not path.is_dir():
        if _PART.fullmatch(path.name):
            return _Nearby("it is one file of a checkpoint; the checkpoint is its folder.", path.parent)
        return _Nearby(
            "it is a file; single files that can be read are those of safetensors, torch.save and registered formats."
        )
    if not isinstance(path, Path):
        return _Nearby("save() did not complete this folder.")
    return _in_folder(path)


def _near_missing(path: Place) -> _Nearby:
    """Returns what is beside a path where there is nothing."""
    missing = "no such file" if _FILE.fullmatch(path.name) else "no such folder"
    steps = steps_in(path.parent)
    if steps:
        return _Nearby(f"{missing}; beside it are steps {_list(steps)}.", path.parent / str(steps[-1]))
    return _Nearby(f"{missing}.")


def _in_folder(folder: Path) -> _Nearby:
    """Returns what is in a folder that is no checkpoint."""
    runs = [run for run in folder.iterdir() if steps_in(run / OF_A_RUN)]
    if runs:
        return _among_runs(runs)
    names = sorted(path.name for path in folder.iterdir())
    files = [name for name in names if _is_readable_file(name)]
    if files:
        readable = counted(len(files), "file")
        why = f"it holds {readable} that may be read, and nothing says which of them is the model."
        return _Nearby(why, files=files[:3])
    if not names or _manifest.FOLDER in names:
        return _Nearby("save() did not complete this folder.")
    ellipsis = ", ..." if len(names) > 3 else ""
    return _Nearby(f"it holds no checkpoint of a known or registered format: {', '.join(names[:3])}{ellipsis}.")


def _among_runs(runs: Sequence[Path]) -> _Nearby:
    def changed_at(run: Path) -> float:
        return run.stat().st_mtime

    newest = max(runs, key=changed_at) / OF_A_RUN
    with_checkpoints = counted(len(runs), "of them with checkpoints", "of them with checkpoints")
    return _Nearby(f"it is a folder of runs, {with_checkpoints}.", newest / str(steps_in(newest)[-1]))


def _list(steps: Sequence[int], shown: int = 5) -> str:
    texts = [str(step) for step in steps[-shown:]]
    if len(steps) > shown:
        texts.insert(0, "...")
    return ", ".join(texts)


LEDGER = "series.json"  # the steps whose checkpoints a series has written or started to write; nothing else is deleted


# The contents of a folder of checkpoints, and the checkpoint that a path refers to.


def series_at(path: Place) -> Place | None:
    """Returns the folder of the series at a path, which is a run or the series itself; None if there is no series.

    Only this process looks; nothing is written, and no other process takes part.
    """
    path = place_of(path)
    for folder in (path / OF_A_RUN, path):
        # A checkpoint is no series, whatever the names of its folders.
        if is_checkpoint(folder):
            continue
        if steps_in(folder) or _holds(folder, (HISTORY, LEDGER)):
            return folder
    return None


def checkpoint_at(path: str | os.PathLike[str], step: int | None = None) -> Place:
    """Returns the checkpoint that a path refers to, whether or not it is damaged."""
    place = place_of(path)
    try:
        series = None if is_checkpoint(place) else series_at(place)
    except FourPartError:  # may be an `OSError`, too
        raise
    except OSError as error:  # a name that is too long, a parent that may not be entered
        raise unreadable(place, reason(error)) from error
    if series is not None:
        return _of_series(series, step)
    if step is not None:
        raise CheckpointError(
            "This is not a series of checkpoints.",
            where=str(place),
            why=f"a step, {step}, was requested, but the path is not a series or a run.",
            do="leave out the step, or give the folder that holds the checkpoints.",
        )
    return place


def _of_series(series: Place, step: int | None) -> Place:
    """Returns the checkpoint of a step, or the newest; raises `CheckpointError` if there is none."""
    steps = steps_in(series)
    if not steps:
        raise no_such_step(series, step)
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise no_such_step(series, step)
    return series / str(step)


def is_checkpoint(path: Place) -> bool:
    """Returns whether a folder looks like a checkpoint, or like one tree of a checkpoint, from any writer."""
    return is_committed(path) or is_item(path) or _holds(path, (_manifest.NAME, CHECKPOINT_METADATA))


def _holds(folder: Place, names: Collection[str]) -> bool:
    return any((folder / name).is_file() for name in names)
