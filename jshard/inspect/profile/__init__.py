"""`trace`: reads a JAX profile: the time that each step computes and communicates, and how the two overlap."""

import collections
import contextlib
import dataclasses
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from jshard._paths import expanded
from jshard.errors import RunError, ShardingError
from jshard.inspect.profile.events import (
    DeviceEvents,
    Ops,
    ProcessEvents,
    Run,
    busiest_program,
    expected_ops,
    process_events,
    runs_of,
)
from jshard.inspect.profile.result import DeviceStep, Trace, TraceStep, measure

PROFILE, PROGRAM = "profile", "program.txt"
_SUFFIX = ".xplane.pb"
_DEPTH = 6  # folders between a file and the program's text
_RECORD = "jshard train gpt --profile 10:15, or jax.profiler.trace(FOLDER) around some steps"


@dataclasses.dataclass(frozen=True)
class ProfileFiles:
    """The files of one profile."""

    files: tuple[tuple[Path, str], ...]  # one per process, with its display name; empty if there is one process
    program: Path | None  # the text of the compiled step; None if it is missing
    others: int = 0  # the number of other profiles in the folder


def process_folder(span: str, process: int) -> Path:
    """Where a process of a run writes its profile, in the folder of the run."""
    return Path(PROFILE, span, f"process-{process}")


def find_profile(path: str | os.PathLike[str]) -> ProfileFiles:
    """The newest profile in a folder, or the given file."""
    path = expanded(path)
    if path.is_file():
        if not path.name.endswith(_SUFFIX):
            raise _no_profile(path, f"its name does not end in {_SUFFIX}.")
        return ProfileFiles(((path, ""),), _program(path))
    if not path.is_dir():
        raise _no_profile(path, "the file or folder does not exist.")
    is_run = (path / "run.json").is_file() or (path / PROFILE).is_dir()
    files = sorted((path / PROFILE if is_run else path).rglob("*" + _SUFFIX), key=lambda f: (f.stat().st_mtime_ns, f))
    if not files:
        raise _no_profile(path, "the run was not profiled." if is_run else f"no file in it ends in {_SUFFIX}.")
    chosen = _of_one_profile(files)
    others = len({_root(f) for f in files} - {_root(f) for f in chosen})
    return ProfileFiles(tuple(zip(chosen, _names(chosen), strict=True)), _program(chosen[0]), others)


def _of_one_profile(files: Sequence[Path]) -> list[Path]:
    """The files that belong to the newest profile: the last one of each process."""
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
    """The process that wrote a file of `jshard train`; None if its name has another form."""
    found = re.fullmatch(r"process-(\d+)", file.parents[3].name) if len(file.parents) > 4 else None
    return int(found[1]) if found else None


def _root(file: Path) -> Path:
    """The common root of the files of one profile."""
    return file.parent if _process(file) is None else file.parents[4]


def _program(file: Path) -> Path | None:
    folders = list(file.absolute().parents)[:_DEPTH]
    return next((folder / PROGRAM for folder in folders if (folder / PROGRAM).is_file()), None)


def _no_profile(path: Path, why: str) -> ShardingError:
    return ShardingError("There is no profile.", where=str(path), why=why, do=f"record one: {_RECORD}.")


# `trace`: reads a profile, and reports the computation, communication and overlap of each step.

_AGAIN = "record it again, with complete steps: jshard train gpt --profile 10:15"
_PS_PER_S = 10**12


def trace(path: str | os.PathLike[str], *, steps: Collection[int] | None = None, program: Any = None) -> Trace:
    """Reads a profile: the time of each step in which devices compute, communicate, do both, or do neither.

    Times are unions of intervals on a device's timeline, never sums over kernels. A step begins and ends with its
    program's work on the device.

    Args:
        path: the folder of a run trained with `--profile`, a folder written by `jax.profiler`, or one
            `*.xplane.pb`. The newest profile in a folder is read, with the files of all its processes.
        steps: numbers of the steps to keep; all by default.
        program: the step's compiled program, or its text, which names the unit of each collective; by default
            program.txt beside the profile.

    Returns:
        A `Trace`: print it, show it in a notebook, take its JSON, or look at `shares`.

    Raises:
        ShardingError: there is no profile, or it lacks these steps or this program.
        RunError: the profile is truncated or empty, or has no complete step.

    Example:
        >>> import tempfile
        >>> step = jax.jit(lambda x: x @ x.T).lower(x).compile()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jax.profiler.trace(folder):
        ...         jax.block_until_ready(step(x))
        ...     print(js.trace(folder, program=step))
    """
    found = find_profile(path)
    with _quiet_reader():
        processes = [_read(file) for file, _ in found.files]
    if not any(p.devices for p in processes):
        raise _no_device(found, processes)
    ops = Ops(_text(found, program))
    named = [d for p in processes for d in p.devices]
    name = ops.program or busiest_program(named)
    timelines = [
        _Timeline(
            f"{label} {device.name}".strip(), device, runs_of(device, name, ops, marked=len(process.marks)), place
        )
        for place, (process, (_, label)) in enumerate(zip(processes, found.files, strict=True))
        for device in process.devices
    ]
    timelines = [t for t in timelines if t.runs]
    if not timelines:
        raise _no_run(found, name, named)
    places, is_marked = _numbered(timelines, [p.marks for p in processes])
    lacking = ops.not_in_text(e for t in timelines for e in t.device.events)
    # The text of another compilation cannot show what is missing.
    complete = _complete(timelines, places, None if lacking else ops)
    if not complete:
        raise _no_step(found, places)
    kept = complete if steps is None else _kept(found, complete, steps)
    measured = tuple(TraceStep(n, tuple(_device_step(t, places[n][t.name], ops) for t in timelines)) for n in kept)
    notes = []
    if not is_marked:
        notes.append("Steps are counted from 1, because the profile does not mark each of them.")
    if len(complete) < len(places):
        notes.append(f"Left out, because the profile does not have all of them: {len(places) - len(complete)} steps.")
    if not ops.has_text:
        if any(run.id is None for t in timelines for run in t.runs):
            notes.append("Steps are found by repeating operations, which is less reliable than the program's text.")
        notes.append("Units are unknown: pass program=, the compiled step; `jshard train --profile` stores it.")
    if found.others:
        notes.append(f"The newest of {found.others + 1} profiles; for another one name its folder.")
    if lacking:
        which = f"{len(lacking)} collectives, such as {min(lacking)}"
        notes.append(f"The text is of another compilation: it lacks {which}.")
    return Trace(tuple(_places(found)), name, timelines[0].device.platform, measured, ops.has_text, tuple(notes))


@dataclasses.dataclass(frozen=True)
class _Timeline:
    """A device with the runs of the step's program; `process` is the index of its file."""

    name: str
    device: DeviceEvents
    runs: list[Run]
    process: int


def _numbered(
    timelines: Sequence[_Timeline], marks: Sequence[tuple[int, ...]]
) -> tuple[dict[int, dict[str, int]], bool]:
    """The positions of each step's runs on the devices, by step number; and whether the profile marks all steps.

    The number is that of the mark, if every run has one; otherwise steps are counted from 1.
    """
    places: dict[int, dict[str, int]] = collections.defaultdict(dict)
    all_marked = True
    for process in sorted({t.process for t in timelines}):
        own = [t for t in timelines if t.process == process]
        order = _order(own)
        count = max(map(max, order)) + 1
        # Processes run the same steps: the marks of one are valid for another.
        marked = next((m for m in (marks[process], *marks) if len(m) == count), None)
        all_marked &= marked is not None
        for t, steps in zip(own, order, strict=True):
            for place, step in enumerate(steps):
                places[step + 1 if marked is None else marked[step]][t.name] = place
    return places, all_marked


def _order(timelines: Sequence[_Timeline]) -> list[list[int]]:
    """Which step of its process each run is: by the profile's names, or in order."""
    ids = [{run.id for run in t.runs} for t in timelines]
    if None in set.union(*ids) or not set.intersection(*ids):
        return [list(range(len(t.runs))) for t in timelines]
    begins: dict[int | None, int] = {}
    for run in (run for t in timelines for run in t.runs):
        begins[run.id] = min(run.begin_ps, begins.get(run.id, run.begin_ps))
    order = sorted(begins, key=lambda id: begins[id])
    return [[order.index(run.id) for run in t.runs] for t in timelines]


def _complete(timelines: Sequence[_Timeline], places: Mapping[int, Mapping[str, int]], ops: Ops | None) -> list[int]:
    """Numbers of the steps that every device has from start to end."""
    expected = expected_ops((run for t in timelines for run in t.runs), ops)
    # A single run can only be compared with the program's text.
    lacks_an_end = lambda t: ops is not None and len(t.runs) == 1 and ops.lacks_an_end(t.runs[0].ops)
    is_whole = lambda t, place: place is not None and expected <= t.runs[place].ops and not lacks_an_end(t)
    return [n for n in sorted(places) if all(is_whole(t, places[n].get(t.name)) for t in timelines)]


def _device_step(timeline: _Timeline, place: int, ops: Ops) -> DeviceStep:
    run = timeline.runs[place]
    since = max(0, run.begin_ps - timeline.runs[place - 1].end_ps) / _PS_PER_S if place else None
    return measure(timeline.name, timeline.device.events, ops, run.begin_ps, run.end_ps, since_last_s=since)


def _kept(found: ProfileFiles, complete: Sequence[int], chosen: Collection[int]) -> list[int]:
    if not chosen or set(chosen) - set(complete):
        asked, whole = (", ".join(map(str, sorted(numbers))) or "none" for numbers in (chosen, complete))
        raise ShardingError(
            "The profile does not have these steps.",
            where=_places(found),
            why=f"asked for {asked}; complete in it: {whole}.",
            do=f"steps=range({complete[0]}, {complete[-1] + 1}), or --steps {complete[0] - 1}:{complete[-1]}",
        )
    return [n for n in complete if n in chosen]


def _read(file: Path) -> ProcessEvents:
    try:
        return process_events(ProfileData.from_file(str(file)))
    except (RuntimeError, OSError) as error:  # jax's errors are RuntimeErrors
        raise RunError(
            "The profile cannot be read.",
            where=str(file),
            why=f"its {file.stat().st_size:,} bytes are not a profile, or only a part of one ({error}).",
            do=_AGAIN,
        ) from error


@contextlib.contextmanager
def _quiet_reader() -> Iterator[None]:
    """Silences a deprecation warning of Python 3.12 about how the reader's types are made."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        yield


def _text(found: ProfileFiles, program: Any) -> str | None:
    if program is None:
        return (found.program.read_text() or None) if found.program is not None else None
    return program if isinstance(program, str) else program.as_text()


def _no_device(found: ProfileFiles, processes: Sequence[ProcessEvents]) -> RunError:
    marked = sum(len(p.marks) for p in processes)
    return RunError(
        "The profile has no events of devices.",
        where=_places(found),
        why=f"it has {marked} step marks of the host, and no work of a CPU, GPU or TPU: it is empty, or the"
        " device tracer was off.",
        do="block_until_ready() before jax.profiler.stop_trace(); on a GPU check that CUPTI is installed.\n" + _AGAIN,
    )


def _no_run(found: ProfileFiles, name: str, devices: Sequence[DeviceEvents]) -> ShardingError:
    there = sorted({e.module for d in devices for e in d.events if e.module})
    return ShardingError(
        "The profile has no run of this program.",
        where=_places(found),
        why=f"the text is of {name or 'a program without a name'}; the profile has {', '.join(there) or 'none'}.",
        do="js.trace(path, program=compiled)  # the program that was profiled, or its text",
    )


def _no_step(found: ProfileFiles, runs: Collection[int]) -> RunError:
    return RunError(
        "The profile has no complete step.",
        where=_places(found),
        why=f"{len(runs)} began or ended in it, but none did both on every device.",
        do="block_until_ready() before jax.profiler.stop_trace(), and profile two steps or more.\n" + _AGAIN,
    )


def _places(found: ProfileFiles) -> list[str]:
    return [str(file) for file, _ in found.files]
