"""The supervisor of a run in several processes: starts the workers, watches them, and reports which one was lost."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from jshard.errors import FourPartError, RunError, ShardingError
from jshard.launch import stall, worker_process
from jshard.launch.cluster import REQUEST, RESUME, TICK_S, Cluster, Deadlines, stopped_code
from jshard.launch.keeper import Keeper
from jshard.launch.peers import Ending, Peers, cause
from jshard.launch.rendezvous import Group, RollCall
from jshard.launch.restarts import History, Restarts
from jshard.launch.signals import Signals
from jshard.launch.worker_process import WorkerProcess

VERDICT_S = 3.0
"""A supervisor gives process 0's this long to name the lost process, before it names the one that it knows of."""


def supervise(
    command: Sequence[str],
    *,
    processes: int | None = None,
    cluster: Cluster | None = None,
    deadlines: Deadlines | None = None,
    again: str = "the same command with --resume",
    restarts: Restarts | None = None,
) -> int:
    """Runs the workers of this machine to their end, and prints a report if a process of the run is lost.

    With `processes` all workers are started here, on one machine. With `cluster` one worker is, after a roll call
    with the supervisors of the other processes. To be called in the main thread, before JAX is asked for devices.

    SIGINT and SIGTERM are forwarded to the workers, once; a second one, a second later or more, kills them.
    The first worker has this process's stdin and stdout. What process 0 writes to stderr is passed on, and of the
    others what explains a failure; with JSHARD_DEBUG=1 all of it.

    Args:
        command: program and arguments of a worker, which calls `start_worker`.
        processes: number of local workers.
        cluster: this process's place in a cluster, from `detect`.
        deadlines: how long the processes wait for each other.
        again: the command line that goes on after a loss; a worker's `note(again=...)` takes its place.
        restarts: whether the run is started again after a loss; by default it is not.

    Returns:
        0 if all have done their work; 130 if they stopped after Ctrl-C; 75 if they stopped after SIGTERM or SIGHUP, or
        a process was lost: the run can be resumed; 2 if a worker refused the request; 1 if one failed, or did not come.
    """
    deadlines = deadlines or Deadlines()
    with Signals() as signals:
        run = _Supervised(command, processes or 1, cluster, deadlines, again, restarts, signals)
        try:
            return run.to_its_end()
        except FourPartError as error:
            _print(error)
            return REQUEST if isinstance(error, ShardingError) else RESUME if isinstance(error, NotRestarted) else 1


class NotRestarted(RunError):
    """The run has lost a process, and too few came for it to go on now."""


@dataclasses.dataclass
class _Supervised:
    """A run, in as many attempts as it needs and may have."""

    command: Sequence[str]
    processes: int
    cluster: Cluster | None
    deadlines: Deadlines
    again: str
    restarts: Restarts | None
    signals: Signals
    keeper: Keeper | None = None
    history: History = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.history = History(left=0 if self.restarts is None else self.restarts.most)

    def to_its_end(self) -> int:
        """The exit code."""
        call = None if self.cluster is None else RollCall(self.cluster, self.deadlines, self.restarts)
        try:
            return self._attempts(call)
        finally:
            if call is not None:
                call.close()
            if self.keeper is not None:
                self.keeper.close()

    def _attempts(self, call: RollCall | None) -> int:
        while True:
            attempt = self._begin(call)
            if attempt is None:
                return stopped_code(self.signals.received or 0)
            try:
                code = attempt.watch()
            finally:
                if attempt.peers is not None:
                    attempt.peers.close()
            if attempt.lost is None or not self.history.allows(attempt.lost):
                return code
            self._note(attempt, attempt.lost)
            if not self._pause():
                return stopped_code(self.signals.received or 0)

    def _begin(self, call: RollCall | None) -> _Run | None:
        """Starts the workers of this machine; None if the run was stopped before."""
        peers, number = None, self.processes
        if call is None:
            self.history.merge([])
            self._say_restart(number)
            workers = worker_process.start_local(self._worker(), number, self.deadlines, extra=self._environ())
        else:
            group = self._meet(call)
            if group is None:
                return None
            peers, number = group.peers, group.place.num_processes
            extra = {**self._environ(group.place), **group.bind}
            workers = [WorkerProcess(self._worker(group.mesh), group.place, self.deadlines, extra=extra)]
        return _Run(
            workers=workers,
            num_processes=number,
            peers=peers,
            call=call,
            deadlines=self.deadlines,
            signals=self.signals,
            again=self.again,
            history=self.history,
        )

    def _meet(self, call: RollCall) -> Group | None:
        try:
            group = call.meet(self.history, stopped=lambda: self.signals.received is not None)
        except RunError as error:
            if self.history.lost is None:
                raise
            raise NotRestarted(error.what, where=error.where, why=error.why, do=error.do) from error
        if group is not None:
            self.history.check_worth()
            if group.place.process_id == 0:
                self._say_restart(group.place.num_processes)
        return group

    def _environ(self, place: Cluster | None = None) -> dict[str, str]:
        """What a worker is to know of the attempts, and of what is kept for it here: from the first one to the last."""
        if self.keeper is None and self.restarts is not None and self.restarts.keeps_copies:
            self.keeper = Keeper(place)
        return {**self.history.environ(), **({} if self.keeper is None else self.keeper.environ)}

    def _worker(self, mesh: str | None = None) -> Sequence[str]:
        """The command of a worker: as it was given, and from the second attempt on one that goes on."""
        if self.restarts is None or self.history.lost is None:
            return self.command
        return self.restarts.command(self.history.folder, mesh)

    def _note(self, attempt: _Run, lost: Ending) -> None:
        reported = {key: attempt.last(key) for key in ("step", "checkpoint", "folder", "copy")}
        self.history.note(lost, reported)
        self.history.left -= 1
        if self.cluster is None:  # else all find it together
            self.history.check_worth()

    def _say_restart(self, number: int) -> None:
        if self.history.lost is not None:
            sys.stderr.write(f"{self.history.line(num_processes=number)}\n")
            sys.stderr.flush()

    def _pause(self) -> bool:
        """Waits before the next attempt; whether nobody has asked to stop meanwhile."""
        ends_at = time.monotonic() + self.history.pause_s
        while self.signals.received is None and time.monotonic() < ends_at:
            time.sleep(TICK_S)
        return self.signals.received is None


@dataclasses.dataclass(kw_only=True)
class _Run:
    """One attempt at a run: the workers of this machine, and the links to the supervisors of others if any."""

    workers: Sequence[WorkerProcess]
    num_processes: int
    peers: Peers | None
    call: RollCall | None
    deadlines: Deadlines
    signals: Signals
    again: str
    history: History
    lost: Ending | None = None
    forwarded: int | None = None
    seen: set[int] = dataclasses.field(default_factory=set)
    bad: list[Ending] = dataclasses.field(default_factory=list)
    first_bad_at: float = 0.0
    warned_s: float = 0.0

    def watch(self) -> int:
        """Until all is over: the exit code."""
        try:
            while not self.signals.repeated:
                self._look()
                self._warn()
                code = self._good_end()
                if code is not None:
                    return code
                cause = self._cause()
                if cause is not None:
                    return self._end_badly(cause)
                time.sleep(TICK_S)
            return stopped_code(self.forwarded or 0)
        finally:
            for worker in self.workers:
                worker.close()

    def _look(self) -> None:
        if self.signals.received is not None and self.forwarded is None:
            self.forwarded = self.signals.received
            for worker in self.workers:
                worker.forward(self.forwarded)
        if any(ending.stalled for ending in self.bad) or (self.peers is not None and self.peers.stalled):
            self._ask_all()
        for worker in self.workers:
            worker.output.pass_on()
            ending = worker.look()
            if ending is not None and worker.process_id not in self.seen:
                self.seen.add(worker.process_id)
                self._note_ending(ending)
                if self.peers is not None:
                    self.peers.report(ending)
        if self.call is not None:
            self.call.attend()
        if self.peers is not None:
            for ending in self.peers.poll(self.workers[0].state):
                self._note_ending(ending)

    def _ask_all(self) -> None:
        """The run is stalled: every process says where it stands, for the one that is behind to be found."""
        for worker in self.workers:
            worker.end_stalled()
        if self.peers is not None and not self.peers.stalled:
            self.peers.ask_all()

    def _warn(self) -> None:
        """Says that there was no step for some time, and whom the others wait for."""
        if self.bad or (self.peers is not None and not self.peers.decides):
            return
        noted = {worker.process_id: worker.state for worker in self.workers}
        noted |= {} if self.peers is None else self.peers.noted
        first_s = min((one["warn_s"] for one in noted.values() if one.get("warn_s")), default=None)
        if first_s is None:
            return
        idle_s = max(one.get("idle_s", 0.0) for one in noted.values() if one.get("warn_s"))
        stopped = {worker.process_id: worker.stopped for worker in self.workers} if idle_s >= first_s else {}
        behind = min(noted, key=lambda process: (not stopped.get(process), noted[process].get("marks", 0)))
        where = f"process {behind} of {self.num_processes} is {stopped.get(behind) or noted[behind].get('phase')}"
        self.warned_s = stall.warn(idle_s, self.warned_s, first_s, where, _say)

    def _note_ending(self, ending: Ending) -> None:
        if ending.good:
            return
        if not self.bad:
            self.first_bad_at = time.monotonic()
            for worker in self.workers:
                worker.output.pause()
        self.bad.append(ending)

    def _good_end(self) -> int | None:
        endings = [worker.ending for worker in self.workers]
        if not all(ending is not None and ending.good for ending in endings):
            return None
        for worker in self.workers:
            if worker.process_id == 0 or worker_process.debug():
                worker.output.show()
        return max(ending.code or 0 for ending in endings if ending is not None)

    def _cause(self) -> Ending | None:
        """The process that was lost, once that is sure."""
        if self.peers is not None and self.peers.verdict is not None:
            return self.peers.verdict
        if not self.bad:
            return None
        wait_s = self.deadlines.settle_s
        if self.peers is not None and self.peers.stalled and len(self.bad) < self.num_processes:
            wait_s += VERDICT_S
        if self.peers is not None and not self.peers.decides:
            wait_s += VERDICT_S
        if self.peers is None and not any(worker.running for worker in self.workers):
            wait_s = 0.0  # there is no one left to hear of
        if time.monotonic() - self.first_bad_at < wait_s:
            return None
        is_stalled = self.peers is not None and self.peers.stalled
        lost = cause([*self.bad, *(self.peers.silent() if self.peers is not None and is_stalled else ())])
        # One that is stopped does not know what it had, nor since when.
        stands = [ending.stand for ending in self.bad if ending.stand is not None and ending.stand.deadline]
        if lost.stand is not None and not lost.stand.deadline and stands:
            known = max(stands, key=lambda one: one.idle_s)
            again = dataclasses.replace(lost.stand, idle_s=known.idle_s, deadline=known.deadline, asked=known.asked)
            return dataclasses.replace(lost, stand=again)
        return lost

    def _end_badly(self, lost: Ending) -> int:
        if self.peers is not None and self.peers.decides:
            self.peers.announce(lost)
        was_asked = self._was_asked(lost)
        self.lost = None if was_asked or self.signals.received is not None else lost
        if self.lost is not None and self.history.allows(lost):
            self._show(lost)
            return lost.run_code
        if not was_asked:
            self._report(lost)
        self._give_grace()
        if was_asked:
            return stopped_code(self.forwarded or 0)
        return lost.run_code

    def _was_asked(self, lost: Ending) -> bool:
        """Whether it ended by the signal that was forwarded, before it had begun to listen, or because a peer did."""
        if self.forwarded is None:
            return False
        codes = (-self.forwarded, stopped_code(self.forwarded))
        others = [worker.ending.code for worker in self.workers if worker.ending is not None]
        return lost.code == -self.forwarded or (lost.echo and any(code in codes for code in others))

    def _show(self, lost: Ending) -> bool:
        """Shows what the lost process wrote; whether it was one of this machine."""
        is_own = False
        for worker in self.workers:
            is_cause = worker.process_id == lost.process
            is_own |= is_cause
            if is_cause or worker_process.debug():
                # What process 0 has shown already is not shown again: a warning that all of them give.
                known = () if worker is self.workers[0] else self.workers[0].output.shown
                worker.output.show(prefix=f"[process {worker.process_id}] " if worker.process_id else "", known=known)
        return is_own

    def _report(self, lost: Ending) -> None:
        if self._show(lost) and (lost.explained or lost.code == REQUEST):
            return
        if self.peers is not None and self.peers.verdict is not None:  # process 0 has said it
            _say(f"the run ends: {lost.who}: {lost.how}. Process 0 has the report.")
            return
        steps = [step for step in (lost.step, self.last("step")) if step is not None]
        report = _lost_error(
            lost,
            num_processes=self.num_processes,
            step=max(steps, default=None),
            checkpoint=self.last("checkpoint") or lost.checkpoint,
            again=self.last("again") or self.again,
        )
        _print(report)

    def _give_grace(self) -> None:
        ends_at = time.monotonic() + self.deadlines.grace_s
        while time.monotonic() < ends_at and not self.signals.repeated:
            self._look()
            if all(worker.ending is not None or stall.is_stuck(worker.state) for worker in self.workers):
                return
            time.sleep(TICK_S)

    def last(self, key: str) -> Any:
        """What the workers reported under a name; the largest, where they differ."""
        return max((worker.state[key] for worker in self.workers if worker.state.get(key) is not None), default=None)


def _lost_error(
    ending: Ending, *, num_processes: int, step: int | None, checkpoint: str | None, again: str
) -> FourPartError:
    """One process ended, and the others cannot go on.

    Args:
        ending: which, and how.
        num_processes: of the run.
        step: the last step that any process reported.
        checkpoint: the last checkpoint that any process reported.
        again: the command line that goes on from there, or starts anew.
    """
    if ending.stalled and ending.stand is not None:
        return stall.stalled_error(
            ending.stand,
            who=ending.who,
            what=f"Process {ending.process} of {num_processes}",
            lines=_so_far(step, checkpoint),
            others="\nThe others wait for it and are stopped." if num_processes > 1 else "",
            again=again,
        )
    if ending.code == REQUEST:
        return ShardingError(
            f"Process {ending.process} of {num_processes} refused the request.",
            where=ending.who,
            why="it ended with exit code 2, and its own output says why.",
            do=f"read what process {ending.process} wrote on {ending.host}.",
        )
    explained = f"; its own output on {ending.host} says why" if ending.explained else ""
    return RunError(
        f"Process {ending.process} of {num_processes} was lost.",
        where=[ending.who, *_so_far(step, checkpoint)],
        why=f"{ending.how}{explained}.\nThe others cannot go on without it and are stopped.",
        do=again,
    )


def _so_far(step: int | None, checkpoint: str | None) -> list[str]:
    """How far the run is, and what of it is kept."""
    return [
        "no step was reported yet" if step is None else f"last step reported: {step}",
        "no checkpoint was written yet" if checkpoint is None else f"last good checkpoint: {checkpoint}",
    ]


def _print(error: FourPartError) -> None:
    _say(f"{type(error).__name__}: {error}")


def _say(text: str) -> None:
    # In one piece: several supervisors may share a terminal.
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
