"""`read_profile`: reads a JAX profile: the time that each step computes and communicates, and how the two overlap.

Modules, from the bottom up:

    files        the files of a profile
    events       the work of each device, as the profile has it
    operations   which operation of the program an event is
    runs         which part of a device's time is one run of the program
    measured     the time of one step on one device
    result       what `read_profile` returns: tables, JSON and timelines
    steps        the runs that together are one step
"""

import contextlib
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from jax.profiler import ProfileData

from jshard.errors import RunError, ShardingError
from jshard.inspect.hlo.walk import CompiledProgram
from jshard.inspect.profile.events import DeviceEvents, ProcessEvents, process_events
from jshard.inspect.profile.files import ProfileFiles, find_profile
from jshard.inspect.profile.operations import Ops
from jshard.inspect.profile.result import Trace
from jshard.inspect.profile.runs import busiest_program
from jshard.inspect.profile.steps import (
    DeviceRuns,
    StepNumbers,
    complete_steps,
    events_of,
    measured_step,
    number_steps,
    timelines_of,
)

_AGAIN = "record it again, with complete steps: jshard train gpt --profile 10:15"


def read_profile(
    path: str | os.PathLike[str],
    *,
    steps: Collection[int] | None = None,
    program: CompiledProgram = None,
) -> Trace:
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

    Examples:
        >>> import tempfile
        >>> step = jax.jit(lambda x: x @ x.T).lower(x).compile()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jax.profiler.trace(folder):
        ...         jax.block_until_ready(step(x))
        ...     print(js.read_profile(folder, program=step))
    """
    files = find_profile(path)
    processes = _read(files)
    devices: list[DeviceEvents] = []
    for process in processes:
        devices += process.devices
    if not devices:
        raise _no_device(files, processes)

    ops = Ops(_text(files, program))
    name = ops.program or busiest_program(devices)
    timelines = timelines_of(files, processes, name, ops)
    if not timelines:
        raise _no_run(files, name, devices)

    numbered = number_steps(timelines, processes)
    lacking = ops.not_in_text(events_of(timelines))
    # The text of another compilation cannot show what is missing.
    complete = complete_steps(timelines, numbered, None if lacking else ops)
    if not complete:
        raise _no_step(files, len(numbered.runs))
    chosen = complete
    if steps is not None:
        chosen = _choose(files, complete, steps)
    measured = tuple(measured_step(number, timelines, numbered, ops) for number in chosen)
    notes = [
        *_notes_on_steps(numbered, len(complete)),
        *_notes_on_text(timelines, ops),
        *_notes_on_others(files, lacking),
    ]
    platform = timelines[0].device.platform
    return Trace(tuple(files.paths), name, platform, measured, ops.has_text, tuple(notes))


def _choose(files: ProfileFiles, complete: Sequence[int], requested: Collection[int]) -> list[int]:
    """Returns the requested steps in order; raises unless the profile has all of them."""
    if requested and set(requested) <= set(complete):
        return [number for number in complete if number in requested]
    raise ShardingError(
        "The profile does not have these steps.",
        where=files.paths,
        why=f"asked for {_numbers_text(requested)}; complete in it: {_numbers_text(complete)}.",
        do=f"steps=range({complete[0]}, {complete[-1] + 1}), or --steps {complete[0] - 1}:{complete[-1]}",
    )


def _numbers_text(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"


# ---- notes


def _notes_on_steps(steps: StepNumbers, num_complete: int) -> Iterator[str]:
    if not steps.are_marked:
        yield "Steps are counted from 1, because the profile does not mark each of them."
    num_incomplete = len(steps.runs) - num_complete
    if num_incomplete > 0:
        yield f"Left out, because the profile does not have all of them: {num_incomplete} steps."


def _notes_on_text(timelines: Sequence[DeviceRuns], ops: Ops) -> Iterator[str]:
    if ops.has_text:
        return
    if any(None in timeline.run_ids for timeline in timelines):
        yield "Steps are found by repeating operations, which is less reliable than the program's text."
    yield "Units are unknown: pass program=, the compiled step; `jshard train --profile` stores it."


def _notes_on_others(files: ProfileFiles, lacking: Collection[str]) -> Iterator[str]:
    """Notes other profiles in the folder, and a text that is not that of the profiled program."""
    if files.others:
        yield f"The newest of {files.others + 1} profiles; for another one name its folder."
    if lacking:
        collectives = f"{len(lacking)} collectives, such as {min(lacking)}"
        yield f"The text is of another compilation: it lacks {collectives}."


# ---- files


def _read(files: ProfileFiles) -> list[ProcessEvents]:
    with _quiet_reader():
        return [_read_file(file.path) for file in files.files]


def _read_file(file: Path) -> ProcessEvents:
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


def _text(files: ProfileFiles, program: CompiledProgram) -> str | None:
    """Returns the text of the step's program; None if there is none."""
    if isinstance(program, str):
        return program
    if program is not None:
        return program.as_text()
    if files.program is None:
        return None
    return files.program.read_text() or None  # a run that could not write it leaves an empty file


# ---- errors


def _no_device(files: ProfileFiles, processes: Sequence[ProcessEvents]) -> RunError:
    num_marks = sum(len(process.marks) for process in processes)
    return RunError(
        "The profile has no events of devices.",
        where=files.paths,
        why=f"it has {num_marks} step marks of the host, and no work of a CPU, GPU or TPU: it is empty, or the"
        " device tracer was off.",
        do="block_until_ready() before jax.profiler.stop_trace(); on a GPU check that CUPTI is installed.\n" + _AGAIN,
    )


def _no_run(files: ProfileFiles, name: str, devices: Sequence[DeviceEvents]) -> ShardingError:
    modules: set[str] = set()
    for device in devices:
        modules.update(event.module for event in device.events)
    modules.discard("")  # of events that name no program
    in_profile = ", ".join(sorted(modules)) or "none"
    in_text = name or "a program without a name"
    return ShardingError(
        "The profile has no run of this program.",
        where=files.paths,
        why=f"the text is of {in_text}; the profile has {in_profile}.",
        do="js.read_profile(path, program=compiled)  # the program that was profiled, or its text",
    )


def _no_step(files: ProfileFiles, num_steps: int) -> RunError:
    return RunError(
        "The profile has no complete step.",
        where=files.paths,
        why=f"{num_steps} began or ended in it, but none did both on every device.",
        do="block_until_ready() before jax.profiler.stop_trace(), and profile two steps or more.\n" + _AGAIN,
    )
