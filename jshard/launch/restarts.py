"""Whether a run that has lost a process is started again, and what its attempts have come to."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jshard.errors import RunError
from jshard.launch.cluster import RESUME
from jshard.launch.peers import Ending

_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_MOST_FRUITLESS = 3
_ATTEMPT = "JSHARD_ATTEMPT"

Resumed = Callable[[str | None, str | None], Sequence[str]]
"""Makes the command of a worker that goes on: of the run's folder and the mesh, where they are known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarts:
    """How a run goes on after it has lost a process.

    Args:
        most: losses that it may have; one more ends it.
        command: of the workers that go on.
        meshes: numbers of processes that can take part, and the mesh of each, where it is another than that of all.
            None: all have to.
        wait_s: how long those that can go on wait for the others.
        keeps_copies: whether the supervisors have room for copies of the state in their memory.
    """

    most: int
    command: Resumed
    meshes: Mapping[int, str] | None = None
    wait_s: float = 60.0
    keeps_copies: bool = False

    def usable(self, came: int, of: int) -> int:
        """How many of those that came can take part; 0 if they are too few."""
        counts = [of, *(self.meshes or {})]
        return max((count for count in counts if count <= came), default=0)


@dataclasses.dataclass(kw_only=True)
class History:
    """What the attempts at a run have come to, as one supervisor knows it.

    Attributes:
        left: losses that the run may still have.
        attempt: number of the attempt, from 1; 0 for a supervisor that knows of none yet.
        fruitless: attempts in a row that ended with no step and no checkpoint that was not there before.
        step: the highest step that was reported.
        checkpoints: those that were reported, in order.
        folder: of the run.
        copy: step of the last copy in memory.
        lost: what ended the attempt before, and when.
    """

    left: int
    attempt: int = 0
    fruitless: int = 0
    step: int | None = None
    checkpoints: list[str] = dataclasses.field(default_factory=list)
    folder: str | None = None
    copy: int | None = None
    lost: tuple[str, float] | None = None

    def note(self, lost: Ending, reported: Mapping[str, Any]) -> None:
        """Notes how an attempt has ended.

        Args:
            lost: the process that was lost.
            reported: what the workers reported last: "step", "checkpoint", "folder", "copy".
        """
        steps = [step for step in (lost.step, reported.get("step")) if step is not None]
        saved = [path for path in (lost.checkpoint, reported.get("checkpoint")) if path is not None]
        is_new = any(self.step is None or step > self.step for step in steps)
        is_new |= any(path not in self.checkpoints for path in saved)
        self.fruitless = 0 if is_new else self.fruitless + 1
        self.step = max([*steps, *([] if self.step is None else [self.step])], default=None)
        self.checkpoints += [path for path in dict.fromkeys(saved) if path not in self.checkpoints]
        self.folder = reported.get("folder") or self.folder
        self.copy = reported.get("copy") or self.copy
        self.lost = f"{lost.who}: {lost.how}", time.time()

    def as_message(self) -> dict[str, Any]:
        """For the other supervisors."""
        return {**dataclasses.asdict(self), "checkpoints": self.checkpoints[-1:]}

    @classmethod
    def from_message(cls, message: Any) -> History | None:
        """From the network: None for what is no history."""
        try:
            at = message["lost"]
            return cls(
                **{name: int(message[name]) for name in ("left", "attempt", "fruitless")},
                step=None if message["step"] is None else int(message["step"]),
                copy=None if message["copy"] is None else int(message["copy"]),
                checkpoints=[str(path) for path in message["checkpoints"]],
                folder=None if message["folder"] is None else str(message["folder"]),
                lost=None if at is None else (str(at[0]), float(at[1])),
            )
        except (KeyError, TypeError, ValueError, IndexError):
            return None

    def merge(self, others: Sequence[History | None]) -> None:
        """Takes what the others know, as the one that leads: those that know of no attempt have nothing to say."""
        known = [one for one in (self, *others) if one is not None and one.attempt]
        if known:
            newest = max(known, key=lambda one: one.attempt)
            self.left, self.fruitless = min(one.left for one in known), min(one.fruitless for one in known)
            self.step = max((one.step for one in known if one.step is not None), default=None)
            self.folder = next((one.folder for one in known if one.folder), None)
            self.copy = max((one.copy for one in known if one.copy is not None), default=None)
            self.lost, self.attempt = newest.lost, newest.attempt
            self.checkpoints += [path for one in known for path in one.checkpoints if path not in self.checkpoints]
        self.attempt += 1

    def adopt(self, leaders: History | None) -> None:
        """Takes what the one that leads knows."""
        if leaders is not None:
            before = [path for path in self.checkpoints if path not in leaders.checkpoints]
            vars(self).update(vars(leaders) | {"checkpoints": before + leaders.checkpoints})

    def allows(self, lost: Ending) -> bool:
        """Whether the run is to be started again after a loss. A failure that has a reason would have it again."""
        return self.left > 0 and lost.run_code == RESUME

    def check_worth(self) -> None:
        """Checks that another attempt may come further than those before.

        Raises:
            RunError: too many of them came nowhere.
        """
        if self.fruitless >= _MOST_FRUITLESS:
            raise RunError(
                f"The last {self.fruitless} attempts came nowhere: the run is not started again.",
                where=[self.lost[0] if self.lost else "no process", f"attempt {self.attempt}, {self.left} were left"],
                why=f"none of them did a step after {self.step or 0}, or saved a checkpoint that was not there before.",
                do="see what ended them; then the same command with --resume goes on.",
            )

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt: longer after each that came nowhere."""
        return min(_PAUSE_S * 2**self.fruitless, _LONGEST_PAUSE_S)

    def line(self, *, num_processes: int) -> str:
        """What is printed when the run is started again."""
        what, _ = self.lost or ("a process was lost", 0.0)
        origins = [] if self.copy is None else [f"the copy in memory of step {self.copy}"]
        origins += self.checkpoints[-1:]
        origin = f"from {', or '.join(origins)}" if origins else "(no checkpoint was reported yet)"
        number = f"{num_processes} process{'es' if num_processes > 1 else ''}"
        return f"lost {what}. It goes on {origin} with {number}; restarts left: {self.left}."

    def environ(self) -> dict[str, str]:
        """What a worker is to know of it."""
        if self.lost is None:
            return {}
        cause, at_s = self.lost
        return {_ATTEMPT: json.dumps({"attempt": self.attempt, "cause": cause, "ended_at": at_s})}


def of_this_attempt(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What a worker knows of the attempt before: "attempt", "cause" and "ended_at"; empty in the first one."""
    return json.loads(environ.get(_ATTEMPT, "{}"))
