"""The status of a process in a stalled run: how far it is, what it waits for, and where its threads are.

All processes of a run pass the same marks in the same order. So the one that has passed the fewest is behind; among
equals one that is stopped, and then one whose main thread does not wait for others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from jshard import _stacks
from jshard._files import write_text
from jshard.errors import RunError
from jshard.launch import phases

STUCK_S = 1.0  # in one phase, after which a process is thought to wait for a lost peer
_FRAMES = 4  # of a thread are reported
_FRAME_CHARACTERS = 300
# Functions in which a main thread waits for the devices, for Orbax, or for a meeting of the processes.
_WAITING_FRAMES = ("/jax/_src/", "/jaxlib/", "/orbax/", "/tensorstore/", "jshard/_processes.py:")


class WorkerState(TypedDict, total=False):
    """What a worker reports to its supervisor: a JSON object with all that it has to say so far.

    Attributes:
        step: the last completed step.
        checkpoint: the last completed checkpoint.
        copy: the step of the last copy in memory.
        again: the command line that continues from there.
        folder: the folder of the run.
        explained: whether it has written the reason of its failure to its stderr.
        blames_peer: whether it failed because another process did not answer.
        phase: what it does.
        marks: how many phases it has entered.
        idle_s: seconds since it entered the last one.
        warn_s: the time without progress after which the supervisor prints a line; None for any time.
        stalls: the folder of the stacks.
        stalled: "stalled", or "asked" if it does not stop in time; missing while neither is so.
        deadline: the limit that it has passed.
    """

    step: int
    checkpoint: str
    copy: int
    again: str
    folder: str
    explained: bool
    blames_peer: bool
    phase: str
    marks: int
    idle_s: float
    warn_s: float | None
    stalls: str
    stalled: str
    deadline: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """The status of a process in a stalled run. It is sent to other processes under the names of its fields.

    Args:
        phase: a description of its phase.
        marks: the number of marks passed.
        idle_s: seconds since the last one.
        deadline: a description of its limit, and the reason for it.
        state: the state of the process, if it does not run: "T (stopped)".
        waits: whether its main thread waits for other processes.
        place: the innermost frames, a line each; those of the data reader, if it waits for data.
        asked: whether it was asked to stop, and did not in time.
        folder: the folder of the stacks.
    """

    phase: str = phases.STARTING
    marks: int = 0
    idle_s: float = 0.0
    deadline: str = ""
    state: str = ""
    waits: bool = False
    place: str = ""
    asked: bool = False
    folder: str = ""

    @property
    def order(self) -> tuple[bool, int, bool]:
        """Sorts the one that is behind to the front."""
        # A stopped process is behind however many marks it has passed: it passes no more of them.
        # "t" is one that a debugger has stopped.
        is_active = self.state[:1].upper() != "T"
        return is_active, self.marks, self.waits


@dataclasses.dataclass(frozen=True)
class _ChildStacks:
    """The stacks of a child process, such as a data worker."""

    pid: int
    stacks: _stacks.Stacks


def process_status(pid: int, state: WorkerState, *, process: int, step: int | None) -> ProcessStatus:
    """Returns the status of a process of this machine; its stacks go into a file.

    Args:
        pid: its number.
        state: the state that its watch reports, see `StallWatch.state`.
        process: its id in the run.
        step: its last completed step.
    """
    phase = str(state.get("phase", phases.STARTING))
    stacks = _stacks.stacks(pid)
    # Data workers have processes of their own.
    children = _stacks_of_children(pid)
    place: tuple[str, ...] = ()
    if stacks is not None:
        place = stacks.main[:_FRAMES]
    if phase == phases.DATA:
        place = _place_of_data(stacks, children) or place
    folder = str(state.get("stalls") or "")
    if folder:
        file = Path(folder, f"step-{step or 0}-process-{process}.txt")
        _write_stacks(file, phase, stacks, children)
    return ProcessStatus(
        phase=phase,
        marks=int(state.get("marks", 0)),
        idle_s=float(state.get("idle_s", 0.0)),
        deadline=str(state.get("deadline", "")),
        state=_stacks.state(pid),
        waits=bool(place) and any(words in place[0] for words in _WAITING_FRAMES),
        # Short, as it is sent in a message; the end of a frame's line has the function.
        place="\n".join(line[-_FRAME_CHARACTERS:] for line in place),
        asked=state.get("stalled") == "asked",
        folder=folder,
    )


def is_stuck(state: WorkerState) -> bool:
    """Returns whether a process whose peer is gone makes no progress between the marks, so waits for that peer."""
    return bool(state.get("warn_s")) and state.get("idle_s", 0.0) >= STUCK_S


def _stacks_of_children(pid: int) -> list[_ChildStacks]:
    children = []
    for child in _stacks.children(pid):
        stacks = _stacks.stacks(child)
        if stacks is not None:
            children.append(_ChildStacks(child, stacks))
    return children


def _write_stacks(file: Path, phase: str, stacks: _stacks.Stacks | None, children: Sequence[_ChildStacks]) -> None:
    texts = []
    for each in (stacks, *(child.stacks for child in children)):
        if each is not None:
            texts.append(f"{each.name}, {phase}\n{each.text}")
    with contextlib.suppress(OSError):  # a full disk: the report has the important place
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, "\n".join(texts))


def _place_of_data(main: _stacks.Stacks | None, children: Sequence[_ChildStacks]) -> tuple[str, ...]:
    """Returns the place that delays the data: a worker process that is stopped or reads a sample, or a thread."""
    for child in children:
        stopped = _stacks.state(child.pid)
        frames = child.stacks.main
        is_reading = bool(frames) and "multiprocessing/connection.py" not in frames[0]  # else it waits for work
        if stopped[:1] == "T" or is_reading:
            state = f", {stopped}" if stopped else ""
            return f"{child.stacks.name} (pid {child.pid}){state}", *frames[:_FRAMES]
    threads = () if main is None else main.others
    for frames in threads:
        if any("jshard/data/" in line for line in frames):
            return frames[:_FRAMES]
    return ()


def stalled_error(
    status: ProcessStatus, *, who: str, what: str, lines: Sequence[str], others: str, again: str
) -> RunError:
    """Creates the error of a run that is stalled, or did not stop in time.

    Args:
        status: that of the process that is behind.
        who: names that process.
        what: names the run or the process, to begin a sentence.
        lines: the last step and checkpoint.
        others: what happens to the other processes.
        again: the command that continues the run.
    """
    phase = status.phase
    if status.state:
        phase += f", {status.state}"
    if status.asked:
        title = f"{what} did not stop in time: {phase}."
        reason = f"It was asked to stop, and did not within {status.deadline}"
    else:
        title = f"{what} is stalled: {phase}."
        reason = f"no progress for {status.idle_s:.0f} s; allowed: {status.deadline}"
    stacks = f"\nthe stacks of all processes: {status.folder}" if status.folder else ""
    return RunError(
        title,
        where=[who, *status.place.splitlines(), *lines],
        why=f"{reason}.{others}{stacks}",
        do=again,
    )
