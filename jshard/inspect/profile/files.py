"""Where the files of a profile are: in the folder of a run, as JAX leaves them, or one file by itself.

RUN/profile/steps-11-15/          what `jshard train --profile 10:15` writes
    program.txt                   the compiled step, which tells the unit of every collective
    process-0/plugins/profile/TIME/HOST.xplane.pb
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from jshard._errors import ShardingError

PROFILE, PROGRAM = "profile", "program.txt"
_SUFFIX = ".xplane.pb"
_DEPTH = 6  # folders between a file and the program's text
_RECORD = "jshard train gpt --profile 10:15, or jax.profiler.trace(FOLDER) around some steps"


@dataclasses.dataclass(frozen=True)
class ProfileFiles:
    """The files of one profile.

    Args:
        files: one of each process, with what to call it; empty if there is one process.
        program: the text of the compiled step; None if it is not there.
        others: how many further profiles are in the folder.
    """

    files: tuple[tuple[Path, str], ...]
    program: Path | None
    others: int = 0


def process_folder(span: str, process: int) -> Path:
    """Where a process of a run writes its profile, in the folder of the run."""
    return Path(PROFILE, span, f"process-{process}")


def find_profile(path: str | os.PathLike[str]) -> ProfileFiles:
    """The newest profile in a folder, or the file that is named.

    Raises:
        ShardingError: there is none.
    """
    path = Path(path)
    if path.is_file():
        if not path.name.endswith(_SUFFIX):
            raise _no_profile(path, f"it is a file, and its name does not end in {_SUFFIX}.")
        return ProfileFiles(((path, ""),), _program(path))
    if not path.is_dir():
        raise _no_profile(path, "there is no such file or folder.")
    is_run = (path / "run.json").is_file() or (path / PROFILE).is_dir()
    files = sorted((path / PROFILE if is_run else path).rglob("*" + _SUFFIX), key=lambda f: (f.stat().st_mtime_ns, f))
    if not files:
        raise _no_profile(path, "the run was not profiled." if is_run else f"no file in it ends in {_SUFFIX}.")
    chosen = _of_one_profile(files)
    others = len({_root(f) for f in files} - {_root(f) for f in chosen})
    return ProfileFiles(tuple(zip(chosen, _names(chosen), strict=True)), _program(chosen[0]), others)


def _of_one_profile(files: Sequence[Path]) -> list[Path]:
    """The files that belong to the newest one: of each process the last one."""
    newest = files[-1]
    if _process(newest) is None:
        return [f for f in files if f.parent == newest.parent]
    last = {_process(f): f for f in files if _root(f) == _root(newest)}
    return [last[number] for number in sorted(last, key=lambda number: number or 0)]


def _names(files: Sequence[Path]) -> list[str]:
    if len(files) == 1:
        return [""]
    return [f.name.removesuffix(_SUFFIX) if _process(f) is None else f"process {_process(f)}" for f in files]


def _process(file: Path) -> int | None:
    """The process that wrote a file of `jshard train`; None if it is not of that form."""
    found = re.fullmatch(r"process-(\d+)", file.parents[3].name) if len(file.parents) > 4 else None
    return int(found[1]) if found else None


def _root(file: Path) -> Path:
    """What the files of one profile have in common."""
    return file.parent if _process(file) is None else file.parents[4]


def _program(file: Path) -> Path | None:
    folders = list(file.absolute().parents)[:_DEPTH]
    return next((folder / PROGRAM for folder in folders if (folder / PROGRAM).is_file()), None)


def _no_profile(path: Path, why: str) -> ShardingError:
    return ShardingError("There is no profile.", where=str(path), why=why, do=f"record one: {_RECORD}.")
