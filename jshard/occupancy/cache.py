"""What the tuner measured, in a file that outlives the process: one entry for each kernel, shape and device."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jshard._processes import all_or_none, is_primary
from jshard.errors import RunError, ShardingError
from jshard.kernels.knobs import KernelError, Occupancy
from jshard.occupancy import CommFootprint
from jshard.occupancy.candidates import Choice, Timing

FORMAT = "jshard tuning 1"


class CacheError(ShardingError):
    """A file of measurements that cannot be read, or is another's."""


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class Key:
    """What a measurement holds for."""

    kernel: str  # e.g. "matmul".
    shape: str  # sizes of forward, "m x n x k" as "8192x4096x4096"
    dtype: str  # of what is multiplied
    device: str  # as the driver names it
    jax: str  # version of jax, and so of the compiler
    footprint: str  # what ran beside it, as `footprint_text` writes it


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningEntry:
    """What was measured for a key."""

    choice: Choice  # what was chosen, and why
    timings: tuple[Timing, ...]  # of everything that was tried
    load_bytes: int  # that the load beside it moved
    when: str = ""  # date and time, in words


Entries = Mapping[Key, TuningEntry]


def footprint_text(comm: CommFootprint) -> str:
    """A footprint by its numbers: two kinds of collectives with equal ones disturb a kernel alike."""
    if not comm.ctas:
        return f"{comm.name}: no blocks"
    return f"{comm.name}: {comm.ctas} x {comm.threads} threads x {comm.registers} registers, {comm.smem_bytes} bytes"


def default_path() -> Path:
    """The file in the user's folder for such things, wherever the system has it."""
    home = Path.home()
    if sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        folder = home / "Library" / "Caches"
    else:
        given = os.environ.get("XDG_CACHE_HOME", "")
        folder = Path(given) if os.path.isabs(given) else home / ".cache"  # a relative one does not count
    return folder / "jshard" / "tuning.json"


def load(path: Path) -> dict[Key, TuningEntry]:
    """The entries of a file; none where there is no file.

    Raises:
        CacheError: it cannot be read, or something else wrote it. It stays as it is.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error
    return parsed(text, path)


def parsed(text: str, path: Path) -> dict[Key, TuningEntry]:
    """The entries in the text of a file."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise _unreadable(path, f"it is no JSON: {error}.") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise _unreadable(path, f"its format is {found!r}, and this version of jshard reads {FORMAT!r}.")
    try:
        return {Key(**one["key"]): _entry(one) for one in data["entries"]}
    except (KeyError, TypeError, ValueError, KernelError) as error:
        raise _unreadable(path, f"an entry is damaged: {type(error).__name__}: {error}") from error


def store(path: Path, entries: Entries) -> None:
    """Adds entries to a file, in the place of those with the same key. A reader sees the old file or the new one."""
    text = text_of({**load(path), **entries})
    try:
        write_whole(path, text)
    except OSError as error:
        raise CacheError(
            "The measurements cannot be written.",
            where=str(path),
            why=f"{error}.",
            do="name a file in a folder that can be written: --cache FILE",
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Writes a file and the folders around it. A reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def text_of(entries: Entries) -> str:
    """Entries as the text of a file."""
    whole = [{"key": dataclasses.asdict(key), **dataclasses.asdict(entry)} for key, entry in sorted(entries.items())]
    return json.dumps({"format": FORMAT, "entries": whole}, indent=1) + "\n"


def _entry(data: Mapping[str, Any]) -> TuningEntry:
    known = lambda one: {**one, "setting": None if one["setting"] is None else Occupancy(**one["setting"])}
    return TuningEntry(
        choice=Choice(**known(data["choice"])),
        timings=tuple(Timing(**known(one)) for one in data["timings"]),
        load_bytes=int(data["load_bytes"]),
        when=str(data["when"]),
    )


def _unreadable(path: Path, why: str) -> CacheError:
    return CacheError(
        "The file is no record of measurements that can be read.",
        where=str(path),
        why=why,
        do=f"another file: --cache tuning.json; or, if nothing in it is wanted, mv {path} {path}.old",
    )


# Of several processes the first one decides: all must trace the same program.


def of_first(work: Callable[[], str], *, where: str) -> str:
    """What the first process makes; the others do nothing and receive it. All of them must call this."""
    made, error = "", None
    if is_primary():
        try:
            made = work()
        except Exception as caught:  # the others wait to hear of it
            error = caught

    def failed(failures: Mapping[int, Mapping[str, Any]]) -> RunError:
        what = next(iter(failures[0]["what"].splitlines()), "")
        why = f"{failures[0]['kind']}: {what}"
        return RunError("The first process could not do it.", where=where, why=why, do="see what process 0 says.")

    return str(all_or_none(f"first of {where}", made, error, failed=failed)[0])
