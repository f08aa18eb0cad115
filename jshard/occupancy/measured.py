"""The tuner's measurements, in a persistent file; and the best setting of a kernel according to them."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from jshard import _compat
from jshard._files import read_bytes
from jshard._parsing import checked, parse_json
from jshard._processes import all_or_none, is_primary
from jshard.errors import RunError, ShardingError, UnsafeFileError
from jshard.kernels.backend import KernelError, Occupancy
from jshard.occupancy import CommFootprint

MOST_SLOWER = 1.15
"""A kernel whose time alone exceeds XLA's by this factor is dropped: no overlap can make up for it."""
_ALIKE = 1.25  # ratio of call times for which one latency may be stated to the scheduler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One setting, measured."""

    setting: Occupancy | None  # of the kernel; None for XLA's own product
    alone_ns: int  # of one call with nothing beside it
    both_ns: int  # until the call and the load beside it have ended


Calls = Sequence[tuple[Sequence[Timing], int]]
"""The measurements of some shapes, and how often each is called."""


def quickest(calls: Calls) -> Timing:
    """The setting with the least time beside the load; settings above 1.15 times XLA's time alone are excluded.

    For several shapes, the total time of all their calls is compared, for settings measured with all shapes.
    """
    kept = []
    for timings, _ in calls:
        plain = next(timing for timing in timings if timing.setting is None)
        kept.append([one.setting for one in timings if one.alone_ns <= round(MOST_SLOWER * plain.alone_ns)])
    sums = [total(setting, calls) for setting in kept[0] if all(setting in other for other in kept[1:])]
    return min(sums, key=lambda one: (one.both_ns, one.alone_ns, one.setting is not None))


def total(setting: Occupancy | None, calls: Calls) -> Timing:
    """The times of all calls with one setting, added up."""
    found = [(_of(setting, timings), count) for timings, count in calls]
    return Timing(
        setting=setting,
        alone_ns=sum(one.alone_ns * count for one, count in found),
        both_ns=sum(one.both_ns * count for one, count in found),
    )


def latency_of(setting: Occupancy, calls: Calls) -> int | None:
    """The time of one call alone; None if it differs much by shape."""
    each = [_of(setting, timings).alone_ns for timings, _ in calls]
    return None if max(each) > _ALIKE * min(each) else total(setting, calls).alone_ns // sum(n for _, n in calls)


def _of(setting: Occupancy | None, timings: Sequence[Timing]) -> Timing:
    return next(timing for timing in timings if timing.setting == setting)


def setting_text(knobs: Occupancy | None) -> str:
    """A short description of a setting."""
    if knobs is None:
        return "XLA's own"
    tiles = f"{knobs.tile_m}x{knobs.tile_n}x{knobs.tile_k}/{knobs.stages}"
    if knobs.persistent:
        return f"{tiles} persistent" + (f", reserved_sms={knobs.reserved_sms}" if knobs.reserved_sms else "")
    return tiles + (f", smem_pad_bytes={knobs.smem_pad_bytes}" if knobs.smem_pad_bytes else "")


# The file.

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
        """Whether it was measured on this kind of device, beside this collective, with this version of jax."""
        return (self.jax, self.footprint) == (_compat.jax_version(), footprint) and is_of(self.device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningEntry:
    """The measurements for a key."""

    timings: tuple[Timing, ...]  # of all settings that were tried, and XLA's own
    load_bytes: int  # bytes moved by the load beside it
    when: str = ""  # date and time as text


Measured = Mapping[Key, TuningEntry]


def footprint_text(comm: CommFootprint) -> str:
    """A footprint by its numbers: kinds of collectives with equal numbers have the same effect on a kernel."""
    if not comm.ctas:
        return f"{comm.name}: no blocks"
    return f"{comm.name}: {comm.ctas} x {comm.threads} threads x {comm.registers} registers, {comm.smem_bytes} bytes"


def default_path() -> Path:
    """The file in the user's cache folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if os.path.isabs(given) else Path.home() / ".cache"  # a relative path is ignored
    return folder / "jshard" / "tuning.json"


def load(path: Path) -> dict[Key, TuningEntry]:
    """The entries of a file; empty if there is no file.

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
    """The entries in the text of a file."""
    try:
        data = parse_json(text)
        form = checked(data, _Formatted)["format"]
        if form != FORMAT:
            raise _unreadable(path, f"its format is {form!r}, and this version of jshard reads {FORMAT!r}.")
        entries = checked(data, _StoredEntries)["entries"]
        return {_key(one): _entry(one) for one in entries}
    except CacheError:
        raise
    except KernelError as error:
        raise _unreadable(path, f"it is damaged: {error.what} {error.why}") from error
    except ValueError as error:
        raise _unreadable(path, f"it is damaged: {error}.") from error


class _Formatted(TypedDict):
    format: str


class _StoredEntry(TypedDict):
    key: Key
    timings: list[Timing]
    load_bytes: int
    when: str


class _StoredEntries(TypedDict):
    entries: list[_StoredEntry]


def store(path: Path, entries: Measured) -> None:
    """Adds entries to a file, replacing those with the same key. A reader sees the old file or the new one."""
    text = text_of({**load(path), **entries})
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
    """Entries as the text of a file."""
    whole = [{"key": dataclasses.asdict(key), **dataclasses.asdict(entry)} for key, entry in sorted(entries.items())]
    return json.dumps({"format": FORMAT, "entries": whole}, indent=1) + "\n"


def _key(data: Mapping[str, Any]) -> Key:
    return Key(**data["key"])


def _entry(data: Mapping[str, Any]) -> TuningEntry:
    settings = [None if one["setting"] is None else Occupancy(**one["setting"]) for one in data["timings"]]
    timings = [Timing(**one | {"setting": s}) for one, s in zip(data["timings"], settings, strict=True)]
    if None not in settings:
        raise ValueError("XLA's own time is missing, the baseline of all comparisons.")
    return TuningEntry(timings=tuple(timings), load_bytes=data["load_bytes"], when=data["when"])


def _unreadable(path: Path, why: str) -> CacheError:
    return CacheError(
        "The file is not a readable record of measurements.",
        where=str(path),
        why=why,
        do=f"--cache tuning.json  # another file; or, if it is not needed: mv {path} {path}.old",
    )


# With several processes the first one decides: all must trace the same program.


def of_first(work: Callable[[], str], *, where: str) -> str:
    """The result of the first process; the others only receive it. All processes must call this."""
    made, error = "", None
    if is_primary():
        try:
            made = work()
        except Exception as caught:  # the others wait for the outcome
            error = caught

    def failed(failures: Mapping[int, Mapping[str, Any]]) -> RunError:
        what = next(iter(failures[0]["what"].splitlines()), "")
        why = f"{failures[0]['kind']}: {what}"
        return RunError("The first process failed.", where=where, why=why, do="see the output of process 0.")

    return str(all_or_none(f"first of {where}", made, error, failed=failed)[0])
