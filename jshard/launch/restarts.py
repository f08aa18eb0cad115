"""Whether a run that lost a process is restarted, and the results of its attempts."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict

from jshard._text import counted
from jshard.errors import RunError
from jshard.launch.cluster import RESUME
from jshard.launch.peers import Ending

_PAUSE_S = 1.0  # before another attempt; twice as long after each one without progress
_LONGEST_PAUSE_S = 30.0
_MOST_FRUITLESS = 3  # attempts in a row without progress
_ATTEMPT = "JSHARD_ATTEMPT"


class NotRestarted(RunError):
    """The run has lost a process, and too few came to continue now."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarts:
    """How a run continues after it has lost a process.

    Args:
        most: the number of losses allowed; one more ends the run.
        command: creates the command of a worker that continues, from the run's folder and the mesh, if known.
        meshes: numbers of processes that can take part, and the mesh of each, if it is not that of all.
            None: all have to take part.
        wait_s: how long the processes that can continue wait for the others.
        keeps_copies: whether the supervisors keep copies of the state in their memory.
    """

    most: int
    command: Callable[[str | None, str | None], Sequence[str]]
    meshes: Mapping[int, str] | None = None
    wait_s: float = 60.0
    keeps_copies: bool = False

    def usable(self, came: int, launched: int) -> int:
        """Returns how many of the processes that came can take part; 0 if they are too few."""
        usable = [count for count in (launched, *(self.meshes or ())) if count <= came]
        return max(usable, default=0)


@dataclasses.dataclass(kw_only=True)
class History:
    """The results of a run's attempts, as known to one supervisor. It is sent to the others field by field.

    Attributes:
        left: the number of losses still allowed.
        attempt: number of the attempt, from 1; 0 for a supervisor that does not know of any yet.
        fruitless: attempts in a row that ended without a new step or a new checkpoint.
        step: the highest reported step.
        checkpoint: the last reported checkpoint.
        copy: step of the last copy in memory.
        folder: the folder of the run.
        lost: the cause that ended the previous attempt.
        lost_at: its time, in seconds since 1970.
    """

    left: int
    attempt: int = 0
    fruitless: int = 0
    step: int | None = None
    checkpoint: str | None = None
    copy: int | None = None
    folder: str | None = None
    lost: str | None = None
    lost_at: float = 0.0

    def record(
        self, lost: Ending, *, step: int | None, checkpoint: str | None, copy: int | None, folder: str | None
    ) -> None:
        """Records how an attempt ended, and the last reports of its workers."""
        # The lost process may have been a step ahead of the workers of this machine.
        step = _highest(lost.step, step)
        checkpoint = checkpoint or lost.checkpoint
        is_later_step = step is not None and (self.step is None or step > self.step)
        is_new_checkpoint = checkpoint is not None and checkpoint != self.checkpoint
        if is_later_step or is_new_checkpoint:
            self.fruitless = 0
        else:
            self.fruitless += 1
        self.step = _highest(self.step, step)
        self.checkpoint = checkpoint or self.checkpoint
        self.folder = folder or self.folder
        self.copy = copy or self.copy
        # As text: the next worker receives it in an environment variable.
        self.lost = f"{lost.who}: {lost.how}"
        # By the wall clock, as it is compared with the times in run.json.
        self.lost_at = time.time()
        self.left -= 1

    def begin(self, others: Iterable[History] = ()) -> None:
        """Starts another attempt: the leader takes over the history of the process with the newest attempt."""
        # A leader that its launcher restarted knows of no attempt: the number must not start again from 1.
        newest = max((self, *others), key=lambda history: history.attempt)
        vars(self).update(vars(newest))
        self.attempt += 1

    def allows(self, lost: Ending) -> bool:
        """Returns whether the run is restarted after a loss. A failure with a reason would recur."""
        return self.left > 0 and lost.run_code == RESUME

    def check_worth(self) -> None:
        """Checks that another attempt may get further than those before.

        Raises:
            RunError: too many of them made no progress.
        """
        if self.fruitless >= _MOST_FRUITLESS:
            raise RunError(
                f"The last {counted(self.fruitless, 'attempt')} made no progress: the run is not restarted.",
                where=[self.lost or "no process", f"attempt {self.attempt}, {self.left} were left"],
                why=f"none of them completed a step after {self.step or 0}, or saved a new checkpoint.",
                do="find out what ended them; then the same command with --resume continues the run.",
            )

    @property
    def not_met(self) -> type[RunError]:
        """Returns the class of the error of a meeting to which too few came."""
        return RunError if self.lost is None else NotRestarted

    @property
    def pause_s(self) -> float:
        """Returns how long to wait before the next attempt: longer after each one without progress."""
        if self.fruitless >= _MOST_FRUITLESS:
            return 0.0  # there is no next one
        return min(_PAUSE_S * 2**self.fruitless, _LONGEST_PAUSE_S)

    def line(self, *, num_processes: int) -> str:
        """Returns the line printed when the run is restarted."""
        origins = []
        if self.copy is not None:
            origins.append(f"the copy in memory of step {self.copy}")
        if self.checkpoint is not None:
            origins.append(self.checkpoint)
        origin = "(no checkpoint was reported yet)"
        if origins:
            origin = f"from {', or '.join(origins)}"
        number = f"{num_processes} process{'es' if num_processes > 1 else ''}"
        return f"lost {self.lost}. It continues {origin} with {number}; restarts left: {self.left}."

    def environ(self) -> dict[str, str]:
        """Returns what a worker receives of it, as environment variables."""
        if self.lost is None:
            return {}
        return {_ATTEMPT: json.dumps({"attempt": self.attempt, "cause": self.lost, "ended_at": self.lost_at})}


def _highest(*steps: int | None) -> int | None:
    return max((step for step in steps if step is not None), default=None)


class AttemptBefore(TypedDict, total=False):
    """What a worker knows of the attempt before."""

    attempt: int
    cause: str
    ended_at: float


def previous_attempt(environ: Mapping[str, str] = os.environ) -> AttemptBefore:
    """Returns what a worker knows of the attempt before; {} in the first one."""
    return json.loads(environ.get(_ATTEMPT, "{}"))
