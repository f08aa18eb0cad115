"""The tuner's measurements, in a persistent file, and how several processes come to use the same ones."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from jshard import _compat
from jshard._files import read_bytes
from jshard._parsing import checked, parse_json
from jshard._processes import all_or_none, is_primary
from jshard.errors import RunError, ShardingError, UnsafeFileError
from jshard.kernels.backend import KernelError, Occupancy
from jshard.occupancy import CommFootprint
from jshard.occupancy.timings import Timing

FORMAT = "jshard tuning 2"


class CacheError(ShardingError):
    """A file of measurements cannot be read, or has another format."""


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class Key:
    """The conditions for which a measurement is valid."""

    kernel: str  # e.g. "matmul".
    shape: str  # sizes of forward, "m x n x k" as "8192x4096x4096"
    dtype: str  # of the operands
    device: str  # the driver's name for it
    footprint: str  # the load beside it, as written by `footprint_text`
    jax: str = dataclasses.field(default_factory=_compat.jax_version)  # which also stands for the compiler

    def holds_for(self, is_of: Callable[[str], bool], footprint: str) -> bool:
        """Returns whether it was measured on a kind of device, beside a collective, with this version of jax.

        Args:
            is_of: whether measurements on a kind of device are valid, see `Device.is_of`.
            footprint: the collective, by `footprint_text`.
        """
        return self.jax == _compat.jax_version() and self.footprint == footprint and is_of(self.device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningEntry:
    """The measurements for a key."""

    timings: tuple[Timing, ...]  # of all settings that were tried, and XLA's own
    load_bytes: int  # bytes moved by the load beside it
    when: str = ""  # date and time as text


Measured = Mapping[Key, TuningEntry]


def footprint_text(comm: CommFootprint) -> str:
    """Describes a footprint by its numbers, for a key.

    The version of NCCL and the source of the numbers are left out: footprints with equal numbers have the same effect
    on a kernel.
    """
    if not comm.ctas:
        return f"{comm.name}: no blocks"
    return f"{comm.name}: {comm.ctas} x {comm.threads} threads x {comm.registers} registers, {comm.smem_bytes} bytes"


def default_path() -> Path:
    """Returns the file in the user's cache folder."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # the XDG specification: a relative path is ignored
        return Path.home() / ".cache" / "jshard" / "tuning.json"
    return Path(folder) / "jshard" / "tuning.json"


# ---- reading


class _Formatted(TypedDict):
    format: str


class _StoredEntry(TypedDict):
    key: Key
    timings: list[Timing]
    load_bytes: int
    when: str


class _StoredEntries(TypedDict):
    entries: list[_StoredEntry]


def load(path: Path) -> dict[Key, TuningEntry]:
    """Returns the entries of a file; none if there is no file.

    Raises:
        CacheError: it cannot be read, or has another format. The file is not changed.
    """
    try:
        return parsed(read_bytes(path), path)
    except FileNotFoundError:
        return {}
    except (CacheError, UnsafeFileError):
        raise
    except OSError as error:
        raise _unreadable(path, str(error)) from error


def parsed(text: str | bytes, path: Path) -> dict[Key, TuningEntry]:
    """Returns the entries in the text of a file.

    Raises:
        CacheError: it is damaged, or has another format.
    """
    try:
        data = parse_json(text)
        # The format comes first: entries of another one have another form, and are not damaged for that.
        file_format = checked(data, _Formatted)["format"]
        if file_format != FORMAT:
            raise _unreadable(path, f"its format is {file_format!r}, and this version of jshard reads {FORMAT!r}.")
        entries = {}
        for entry in checked(data, _StoredEntries)["entries"]:
            key, value = _parsed_entry(entry)
            entries[key] = value
        return entries
    except CacheError:
        raise
    except KernelError as error:  # knobs that no kernel has
        raise _unreadable(path, f"it is damaged: {error.what} {error.why}") from error
    except ValueError as error:
        raise _unreadable(path, f"it is damaged: {error}.") from error


def _parsed_entry(data: Mapping[str, Any]) -> tuple[Key, TuningEntry]:
    """Returns an entry as objects: `checked` leaves dataclasses as dicts."""
    key = Key(**data["key"])
    timings = []
    for timing in data["timings"]:
        setting = None if timing["setting"] is None else Occupancy(**timing["setting"])
        timings.append(Timing(setting=setting, alone_ns=timing["alone_ns"], both_ns=timing["both_ns"]))
    if all(timing.setting is not None for timing in timings):
        raise ValueError("XLA's own time is missing, the baseline of all comparisons.")
    return key, TuningEntry(timings=tuple(timings), load_bytes=data["load_bytes"], when=data["when"])


def _unreadable(path: Path, why: str) -> CacheError:
    return CacheError(
        "The file is not a readable record of measurements.",
        where=str(path),
        why=why,
        do=f"--cache tuning.json  # another file; or, if it is not needed: mv {path} {path}.old",
    )


# ---- writing


def store(path: Path, entries: Measured) -> None:
    """Adds entries to a file, replacing those with the same key. A reader sees the old file or the new one."""
    text = text_of({**load(path), **entries})
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder: `os.replace` is atomic within a file system only.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
            temporary = file.name
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            os.unlink(temporary)
        raise CacheError(
            "The measurements cannot be written.",
            where=str(path),
            why=f"{error}.",
            do="--cache FILE  # in a folder with write access",
        ) from error


def text_of(entries: Measured) -> str:
    """Returns entries as the text of a file."""
    records = []
    for key, entry in sorted(entries.items()):
        records.append({"key": dataclasses.asdict(key), **dataclasses.asdict(entry)})
    return json.dumps({"format": FORMAT, "entries": records}, indent=1) + "\n"


# ---- several processes


def of_first(work: Callable[[], str], *, where: str) -> str:
    """Returns the result of the first process; the others only receive it. All processes must call this.

    The first one decides, because all must trace the same program: files on two hosts, and times measured on two GPUs,
    differ.

    Args:
        work: what the first process does.
        where: the place for an error.

    Raises:
        RunError: the work of the first process failed; every process raises it.
    """
    result = ""
    error = None
    if is_primary():
        try:
            result = work()
        except Exception as caught:  # the others wait for the outcome
            error = caught

    def failed(failures: Mapping[int, Mapping[str, str]]) -> RunError:
        failure = failures[0]
        first_line = next(iter(failure["what"].splitlines()), "")
        why = f"{failure['kind']}: {first_line}"
        return RunError("The first process failed.", where=where, why=why, do="see the output of process 0.")

    results = all_or_none(f"first of {where}", result, error, failed=failed)
    return str(results[0])
