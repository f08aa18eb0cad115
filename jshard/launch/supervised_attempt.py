"""One attempt at a run, as seen by the supervisor of this machine: it watches the workers until all have ended."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from jshard._types import Json
from jshard.errors import FourPartError, RunError, ShardingError, printable
from jshard.launch import stall, worker_process
from jshard.launch.cluster import REQUEST, TICK_S, Deadlines, stopped_code
from jshard.launch.peers import Beat, Ending, Peers, beat_of, cause
from jshard.launch.process_status import is_stuck, stalled_error
from jshard.launch.rendezvous import Rendezvous
from jshard.launch.restarts import History
from jshard.launch.stop_signal import Signals
from jshard.launch.worker_process import WorkerProcess

VERDICT_S = 3.0
"""How long a supervisor waits for process 0's to name the lost process, before it names the one that it knows."""


@dataclasses.dataclass
class SupervisedAttempt:
    """One attempt at a run: the workers of this machine, and the links to the supervisors of others if any.

    Attributes:
        lost: the process whose loss ended the attempt; None if a signal did.
        forwarded: the signal that the workers have received.
        seen: the workers whose endings were reported to the others.
        bad: the bad endings so far, of this machine and others.
        first_bad_at: time of the first of them, from which the others have a moment to end.
        warned_s: how long there had been no step, at the last warning.
    """

    workers: Sequence[WorkerProcess]
    num_processes: int
    peers: Peers
    rendezvous: Rendezvous | None
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
        """Runs to the end; returns the exit code."""
        try:
            while not self.signals.repeated:
                self._look()
                self._warn()
                code = self._good_end()
                if code is not None:
                    return code
                lost = self._cause()
                if lost is not None:
                    return self._end_badly(lost)
                time.sleep(TICK_S)
            say(f"{signal_name(self.forwarded)} again: the run ends now, unsaved. Continue it with: {self._again}")
            return stopped_code(self.forwarded or 0)
        finally:
            # Also after an exception: no worker is left behind.
            for worker in self.workers:
                worker.close()
            self.peers.close()

    def _look(self) -> None:
        """Passes on what came since the last look: signals, output, endings, and the messages of others."""
        self._forward_signal()
        self._request_statuses()
        self._look_at_workers()
        if self.rendezvous is not None:
            self.rendezvous.attend()
        # With peers there is only one worker on this machine.
        for ending in self.peers.poll(self.workers[0].state):
            self._note_ending(ending)

    def _forward_signal(self) -> None:
        # Once: a second signal is not forwarded, but ends `watch`.
        if self.signals.received is None or self.forwarded is not None:
            return
        self.forwarded = self.signals.received
        for worker in self.workers:
            worker.forward(self.forwarded)

    def _request_statuses(self) -> None:
        """If the run is stalled, lets every process report its status, to find the one that is behind."""
        is_known = self.peers.stalled
        if not is_known and not any(ending.stalled for ending in self.bad):
            return
        for worker in self.workers:
            worker.end_stalled()
        if not is_known:
            self.peers.ask_all()

    def _look_at_workers(self) -> None:
        for worker in self.workers:
            worker.output.pass_on()
            ending = worker.look()
            if ending is not None and worker.process_id not in self.seen:
                self.seen.add(worker.process_id)
                self._note_ending(ending)
                self.peers.report(ending)

    def _warn(self) -> None:
        """Reports that there was no step for some time, and the process that the others wait for."""
        if self.bad or not self.peers.decides:
            return
        states = self._states()
        # One that compiles, or otherwise has no limit, does not count.
        warning = [state for state in states.values() if state.warn_s]
        if not warning:
            return
        first_s = min(state.warn_s for state in warning if state.warn_s)
        idle_s = max(state.idle_s or 0.0 for state in warning)
        stopped = {}
        if idle_s >= first_s:  # not at every tick: each answer is read from the system
            stopped = {worker.process_id: worker.stopped for worker in self.workers}
        where = self._behind(states, stopped)
        self.warned_s = stall.warn(idle_s, self.warned_s, first_s, where, say)

    def _states(self) -> dict[int, Beat]:
        """Returns the last state of each process that is heard of, by its id."""
        states = dict(self.peers.beats)
        for worker in self.workers:
            states[worker.process_id] = beat_of(worker.state)
        return states

    def _behind(self, states: Mapping[int, Beat], stopped: Mapping[int, str]) -> str:
        """Describes the process that the others wait for."""

        def progress(process: int) -> tuple[bool, int]:
            # The others wait for a stopped process, however far it has come.
            is_active = not stopped.get(process)
            return is_active, states[process].marks or 0

        behind = min(states, key=progress)
        state = stopped.get(behind) or states[behind].phase
        return f"process {behind} of {self.num_processes} is {state}"

    def _note_ending(self, ending: Ending) -> None:
        if ending.good:
            return
        if not self.bad:
            self.first_bad_at = time.monotonic()
            # Until the cause is certain: what the others write may be its consequence.
            for worker in self.workers:
                worker.output.pause()
        self.bad.append(ending)

    def _good_end(self) -> int | None:
        """Returns the exit code if all workers of this machine ended well; else None."""
        codes = []
        for worker in self.workers:
            if worker.ending is None or not worker.ending.good:
                return None
            codes.append(worker.ending.code or 0)
        for worker in self.workers:
            if worker.process_id == 0 or worker_process.debug():
                worker.output.show()
        # A stop outweighs an end: the run is to be resumed if any of them stopped.
        return max(codes)

    def _cause(self) -> Ending | None:
        """Returns the process that was lost, once that is certain."""
        # Process 0 has heard all endings, and its word ends the wait.
        if self.peers.verdict is not None:
            return self.peers.verdict
        if not self.bad:
            return None
        if time.monotonic() - self.first_bad_at < self._settle_s():
            return None
        endings = list(self.bad)
        if self.peers.stalled:
            endings += self.peers.silent()
        return self._with_limit(cause(endings))

    def _settle_s(self) -> float:
        """Returns how long to wait, after the first bad ending, for one that may have caused it."""
        if self.peers.alone and not any(worker.running for worker in self.workers):
            return 0.0  # no other process can report
        wait_s = self.deadlines.settle_s
        # Until all have reported their status.
        if self.peers.stalled and len(self.bad) < self.num_processes:
            wait_s += VERDICT_S
        # Process 0 names the cause once it is certain there.
        if not self.peers.decides:
            wait_s += VERDICT_S
        return wait_s

    def _with_limit(self, lost: Ending) -> Ending:
        """Returns the ending, with the limit of the process that waited longest if its own is not known.

        A stopped process knows neither its limit nor when it began.
        """
        if lost.status is None or lost.status.deadline:
            return lost
        statuses = [ending.status for ending in self.bad if ending.status is not None and ending.status.deadline]
        if not statuses:
            return lost
        longest = max(statuses, key=lambda status: status.idle_s)
        status = dataclasses.replace(lost.status, idle_s=longest.idle_s, deadline=longest.deadline, asked=longest.asked)
        return dataclasses.replace(lost, status=status)

    def _end_badly(self, lost: Ending) -> int:
        if self.peers.decides:
            self.peers.announce(lost)
        was_asked = self._was_asked(lost)
        # A user who has stopped the run does not want it restarted, whatever was lost meanwhile.
        if not was_asked and self.signals.received is None:
            self.lost = lost
            if self.history.allows(lost):
                # Without grace: the others would be stopped and started again in any case.
                self._show(lost)
                return lost.run_code
        if not was_asked:
            self._report(lost)
        elif self.last("step") is None:
            say(f"{signal_name(self.forwarded)}: the run is stopped before its first step.")
        self._give_grace()
        if was_asked:
            return stopped_code(self.forwarded or 0)
        return lost.run_code

    def _was_asked(self, lost: Ending) -> bool:
        """Returns whether it ended by the forwarded signal, before it handled signals, or because a peer did."""
        if self.forwarded is None:
            return False
        if lost.code == -self.forwarded:
            return True
        if not lost.echo:
            return False
        codes = (-self.forwarded, stopped_code(self.forwarded))
        # It ended like one that lost a peer: that peer may have been stopped by the same signal.
        return any(worker.ending is not None and worker.ending.code in codes for worker in self.workers)

    def _show(self, lost: Ending) -> bool:
        """Shows the output of the lost process; returns whether it was on this machine."""
        is_own = False
        for worker in self.workers:
            is_cause = worker.process_id == lost.process
            is_own |= is_cause
            if is_cause or worker_process.debug():
                self._show_output(worker)
        return is_own

    def _show_output(self, worker: WorkerProcess) -> None:
        prefix = f"[process {worker.process_id}] " if worker.process_id else ""
        first = self.workers[0]
        # Lines that process 0 has shown are not repeated, such as a warning of all processes.
        known = () if worker is first else first.output.shown
        worker.output.show(prefix=prefix, known=known)

    def _report(self, lost: Ending) -> None:
        if self._show(lost) and (lost.explained or lost.code == REQUEST):
            return
        if self.peers.verdict is not None:  # process 0 has reported it
            say(f"the run ends: {lost.who}: {lost.how}. Process 0 has the report.")
            return
        steps = [step for step in (lost.step, self.last("step")) if step is not None]
        report = _lost_error(
            lost,
            num_processes=self.num_processes,
            step=max(steps, default=None),
            checkpoint=self.last("checkpoint") or lost.checkpoint,
            again=self._again,
        )
        say(f"{type(report).__name__}: {report}")

    def _give_grace(self) -> None:
        ends_at = time.monotonic() + self.deadlines.grace_s
        while time.monotonic() < ends_at and not self.signals.repeated:
            self._look()
            # One that is stuck waits for the lost process: more time would not help it.
            if all(worker.ending is not None or is_stuck(worker.state) for worker in self.workers):
                return
            time.sleep(TICK_S)

    @property
    def _again(self) -> str:
        """Returns the command that continues the run."""
        return self.last("again") or self.again

    def last(self, key: str) -> Json:
        """Returns the value that the workers reported under a name; the largest if they differ."""
        reports = [worker.state.get(key) for worker in self.workers]
        return max((report for report in reports if report is not None), default=None)


def _lost_error(
    ending: Ending, *, num_processes: int, step: int | None, checkpoint: str | None, again: str
) -> FourPartError:
    """Creates the error when one process ended and the others cannot continue."""
    if ending.stalled and ending.status is not None:
        return stalled_error(
            ending.status,
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
            why="it ended with exit code 2, and its own output has the reason.",
            do=f"read the output of process {ending.process} on {ending.host}.",
        )
    explained = f"; its own output on {ending.host} has the reason" if ending.explained else ""
    return RunError(
        f"Process {ending.process} of {num_processes} was lost.",
        where=[ending.who, *_so_far(step, checkpoint)],
        why=f"{ending.how}{explained}.\nThe others cannot continue without it and are stopped.",
        do=again,
    )


def _so_far(step: int | None, checkpoint: str | None) -> list[str]:
    """Describes the last step and checkpoint of the run."""
    step_line = "no step was reported yet"
    if step is not None:
        step_line = f"last step reported: {step}"
    checkpoint_line = "no checkpoint was written yet"
    if checkpoint is not None:
        checkpoint_line = f"last good checkpoint: {checkpoint}"
    return [step_line, checkpoint_line]


def signal_name(signum: int | None) -> str:
    """Returns the name of a signal; "" for none."""
    if signum is None:
        return ""
    return signal.Signals(signum).name


def say(text: str) -> None:
    """Prints a text to stderr."""
    # In one piece: several supervisors may share a terminal.
    sys.stderr.write(printable(text, keep="\n\t") + "\n")
    sys.stderr.flush()
