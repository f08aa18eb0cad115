"""Finds the steps in a profile: which runs of the step's program, on all devices, are one step.

A process runs the same steps on its devices, and all processes run the same steps. But a profile may begin or end
within a step, on some devices earlier than on others: those are left out.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jshard.inspect.profile.events import DeviceEvents, Event, ProcessEvents
from jshard.inspect.profile.files import ProfileFiles
from jshard.inspect.profile.measured import DeviceStep, measure
from jshard.inspect.profile.operations import Ops
from jshard.inspect.profile.result import TraceStep
from jshard.inspect.profile.runs import Run, expected_ops, runs_of

_PS_PER_S = 10**12


@dataclasses.dataclass(frozen=True)
class DeviceRuns:
    """A device with the runs of the step's program."""

    name: str
    device: DeviceEvents
    runs: list[Run]
    process: int  # the index of its file

    @property
    def run_ids(self) -> set[int | None]:
        """How the profile calls the runs; None is among them if it does not."""
        return {run.id for run in self.runs}


@dataclasses.dataclass(frozen=True)
class StepNumbers:
    """The runs of each step."""

    runs: dict[int, dict[str, int]]  # by number of the step and name of the timeline: the index of the run there
    are_marked: bool  # whether the numbers are those with which the program marked its steps


def timelines_of(files: ProfileFiles, processes: Sequence[ProcessEvents], program: str, ops: Ops) -> list[DeviceRuns]:
    """Returns the devices on which a program ran."""
    timelines = []
    for index, (file, process) in enumerate(zip(files.files, processes, strict=True)):
        for device in process.devices:
            runs = runs_of(device, program, ops, marked=len(process.marks))
            if runs:
                timelines.append(DeviceRuns(f"{file.label} {device.name}".strip(), device, runs, index))
    return timelines


def events_of(timelines: Iterable[DeviceRuns]) -> Iterator[Event]:
    """Yields the events of all devices."""
    for timeline in timelines:
        yield from timeline.device.events


def number_steps(timelines: Sequence[DeviceRuns], processes: Sequence[ProcessEvents]) -> StepNumbers:
    """Numbers the steps of the runs on all devices.

    The number is that of the mark, if every run has one; otherwise steps are counted from 1.
    """
    marks = [process.marks for process in processes]
    timelines_of_process: dict[int, list[DeviceRuns]] = collections.defaultdict(list)
    for timeline in timelines:
        timelines_of_process[timeline.process].append(timeline)
    runs: dict[int, dict[str, int]] = collections.defaultdict(dict)
    are_marked = True
    for process, of_process in sorted(timelines_of_process.items()):
        # A process counts by itself, as it may have begun its profile a step later than another.
        steps_by_timeline = _steps_of_runs(of_process)
        num_steps = 1 + max(max(steps) for steps in steps_by_timeline.values())
        # Processes run the same steps: the marks of one are valid for another.
        numbers = _of_length(num_steps, [marks[process], *marks])  # its own first
        if numbers is None:
            are_marked = False
            numbers = range(1, num_steps + 1)
        for name, steps in steps_by_timeline.items():
            for run, step in enumerate(steps):
                runs[numbers[step]][name] = run
    return StepNumbers(runs, are_marked)


def _of_length(length: int, candidates: Iterable[Sequence[int]]) -> Sequence[int] | None:
    """Returns the first of some sequences with this length; None if there is none."""
    for candidate in candidates:
        if len(candidate) == length:
            return candidate
    return None


def _steps_of_runs(timelines: Sequence[DeviceRuns]) -> dict[str, list[int]]:
    """Returns which step each run is, counted from 0, by the names of the devices of a process.

    If the profile names the runs, devices of one process have the same names for the same step; else the first runs
    of all devices are one step, and so on.
    """
    ids = [timeline.run_ids for timeline in timelines]
    are_named = None not in set.union(*ids)
    if not are_named or not set.intersection(*ids):
        return {timeline.name: list(range(len(timeline.runs))) for timeline in timelines}
    first_begin: dict[int | None, int] = {}
    for timeline in timelines:
        for run in timeline.runs:
            first_begin[run.id] = min(run.begin_ps, first_begin.get(run.id, run.begin_ps))
    in_order = sorted(first_begin, key=lambda id: first_begin[id])
    steps: dict[str, list[int]] = {}
    for timeline in timelines:
        steps[timeline.name] = [in_order.index(run.id) for run in timeline.runs]
    return steps


def complete_steps(timelines: Sequence[DeviceRuns], steps: StepNumbers, ops: Ops | None) -> list[int]:
    """Returns the numbers of the steps that every device has from start to end.

    Args:
        timelines: the devices.
        steps: the runs of each step.
        ops: the operations of the program's text; None if there is no text that belongs to the profile.
    """
    runs_of_devices: list[Run] = []
    for timeline in timelines:
        runs_of_devices += timeline.runs
    expected = expected_ops(runs_of_devices, ops)
    complete = []
    for number in sorted(steps.runs):
        runs = steps.runs[number]
        if all(_is_complete(timeline, runs, expected, ops) for timeline in timelines):
            complete.append(number)
    return complete


def _is_complete(timeline: DeviceRuns, runs: Mapping[str, int], expected: frozenset[str], ops: Ops | None) -> bool:
    """Returns whether a device has its run of a step from start to end."""
    index = runs.get(timeline.name)
    if index is None:
        return False
    run = timeline.runs[index]
    if not expected <= run.ops:
        return False
    # A single run can only be compared with the program's text: no other run shows what it lacks.
    is_single = len(timeline.runs) == 1
    return not (is_single and ops is not None and ops.lacks_an_end(run.ops))


def measured_step(number: int, timelines: Sequence[DeviceRuns], steps: StepNumbers, ops: Ops) -> TraceStep:
    """Measures one complete step on all devices."""
    runs = steps.runs[number]
    devices = tuple(_device_step(timeline, runs[timeline.name], ops) for timeline in timelines)
    return TraceStep(number, devices)


def _device_step(timeline: DeviceRuns, index: int, ops: Ops) -> DeviceStep:
    run = timeline.runs[index]
    since_last_s = None
    if index > 0:
        # Devices start a program before the last one has ended, as far as its inputs are there.
        since_last_s = max(0, run.begin_ps - timeline.runs[index - 1].end_ps) / _PS_PER_S
    return measure(timeline.name, timeline.device.events, ops, run.begin_ps, run.end_ps, since_last_s=since_last_s)
