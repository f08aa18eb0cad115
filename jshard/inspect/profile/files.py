"""Finds the files of a profile: one per process, and the text of the program that was profiled."""

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from jshard._paths import expanded
from jshard.errors import ShardingError

PROFILE = "profile"
"""The folder of profiles in the folder of a run."""

PROGRAM = "program.txt"
"""The text of the compiled step, in the folder of a run or of a profile."""

_SUFFIX = ".xplane.pb"
_MAX_PROGRAM_DEPTH = 6  # folders between a file and the program's text
_RECORD = "jshard train gpt --profile 10:15, or jax.profiler.trace(FOLDER) around some steps"


@dataclasses.dataclass(frozen=True)
class ProfileFile:
    """The file of one process in a profile."""

    path: Path
    label: str  # of its process in reports; empty if there is one process


@dataclasses.dataclass(frozen=True)
class ProfileFiles:
    """The files of one profile."""

    files: tuple[ProfileFile, ...]
    program: Path | None  # the text of the compiled step; None if it is missing
    others: int = 0  # the number of other profiles in the folder

    @property
    def paths(self) -> list[str]:
        """The paths of the files, as text."""
        return [str(file.path) for file in self.files]


def process_folder(span: str, process: int) -> Path:
    """Returns where a process of a run writes its profile, in the folder of the run."""
    return Path(PROFILE, span, f"process-{process}")


def find_profile(path: str | os.PathLike[str]) -> ProfileFiles:
    """Returns the files of the newest profile in a folder, or of a profile given by its file."""
    path = expanded(path)
    if path.is_file():
        if not path.name.endswith(_SUFFIX):
            raise _no_profile(path, f"its name does not end in {_SUFFIX}.")
        return ProfileFiles((ProfileFile(path, ""),), _find_program(path))
    if not path.is_dir():
        raise _no_profile(path, "the file or folder does not exist.")

    folder = path
    why_none = f"no file in it ends in {_SUFFIX}."
    if (path / "run.json").is_file() or (path / PROFILE).is_dir():  # the folder of a run
        folder = path / PROFILE
        why_none = "the run was not profiled."
    oldest_first = sorted(folder.rglob("*" + _SUFFIX), key=lambda file: (file.stat().st_mtime_ns, file))
    if not oldest_first:
        raise _no_profile(path, why_none)
    newest = _newest_profile(oldest_first)
    profiles = {_profile_folder(file) for file in oldest_first}  # the newest is one of them
    return ProfileFiles(_labelled(newest), _find_program(newest[0]), others=len(profiles) - 1)


def _newest_profile(oldest_first: Sequence[Path]) -> list[Path]:
    """Returns the files that belong to the newest profile: the last one of each process."""
    newest = oldest_first[-1]
    if _process_number(newest) is None:
        return [file for file in oldest_first if file.parent == newest.parent]
    latest_of_process: dict[int | None, Path] = {}  # a later file of a process replaces an earlier one
    for file in oldest_first:
        if _profile_folder(file) == _profile_folder(newest):
            latest_of_process[_process_number(file)] = file
    return sorted(latest_of_process.values(), key=lambda file: _process_number(file) or 0)


def _labelled(files: Sequence[Path]) -> tuple[ProfileFile, ...]:
    """Returns the files of a profile, with what distinguishes their processes in reports."""
    if len(files) == 1:
        return (ProfileFile(files[0], label=""),)
    return tuple(ProfileFile(file, _process_label(file)) for file in files)


def _process_label(file: Path) -> str:
    number = _process_number(file)
    if number is None:
        return file.name.removesuffix(_SUFFIX)  # the profiler names files after their hosts
    return f"process {number}"


def _process_number(file: Path) -> int | None:
    """Returns the process that wrote a file of `jshard train`; None if its path has another form.

    The profiler adds `plugins/profile/TIME/HOST.xplane.pb` to the folder that the process names.
    """
    if len(file.parents) <= 4:
        return None
    match = re.fullmatch(r"process-(\d+)", file.parents[3].name)
    if match is None:
        return None
    return int(match[1])


def _profile_folder(file: Path) -> Path:
    """Returns the folder that all files of a profile are in."""
    if _process_number(file) is None:
        return file.parent
    return file.parents[4]


def _find_program(file: Path) -> Path | None:
    """Returns the text of the program, in the closest folder around a file that has one."""
    for folder in list(file.absolute().parents)[:_MAX_PROGRAM_DEPTH]:
        if (folder / PROGRAM).is_file():
            return folder / PROGRAM
    return None


def _no_profile(path: Path, why: str) -> ShardingError:
    return ShardingError("There is no profile.", where=str(path), why=why, do=f"record one: {_RECORD}.")
