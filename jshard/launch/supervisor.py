"""The supervisor of a run in several processes: starts the workers, watches them, and reports which one was lost."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from jshard._streams import open_standard_streams
from jshard.errors import FourPartError, RunError, ShardingError, is_request, printable
from jshard.launch import stall, worker_process
from jshard.launch.cluster import REQUEST, RESUME, TICK_S, Cluster, Deadlines, Signals, stopped_code
from jshard.launch.keeper import Keeper
from jshard.launch.peers import Ending, Peers, cause
from jshard.launch.rendezvous import RollCall
from jshard.launch.restarts import History, NotRestarted, Restarts
from jshard.launch.worker_process import WorkerProcess

VERDICT_S = 3.0
"""How long a supervisor waits for process 0's to name the lost process, before it names the one that it knows."""


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

    With `processes` all workers are started here, on one machine. With `cluster` one worker is started, after a roll
    call with the supervisors of the other processes. Call it in the main thread, before JAX initialises its devices.

    SIGINT and SIGTERM are forwarded to the workers, once; a second one, a second later or more, kills them.
    The first worker has this process's stdin and stdout. The stderr of process 0 is passed on, and that of the others
    if it explains a failure; with JSHARD_DEBUG=1 all of it.

    Args:
        command: program and arguments of a worker, which calls `start_worker`.
        processes: number of local workers.
        cluster: this process's place in a cluster, from `detect`.
        deadlines: how long the processes wait for each other.
        again: the command line that continues after a loss; a worker's `note(again=...)` replaces it.
        restarts: whether and how the run is restarted after a loss; not by default.

    Returns:
        0 if all completed their work; 130 if they stopped after Ctrl-C; 75 if they stopped after SIGTERM or SIGHUP, or
        a process was lost: the run can be resumed; 2 if a worker refused the request; 1 if one failed, or never came.
    """
    open_standard_streams()  # the workers inherit them
    deadlines, history = deadlines or Deadlines(), History(left=0 if restarts is None else restarts.most)
    with Signals() as signals, contextlib.ExitStack() as stack:
        is_stopped = lambda: signals.received is not None
        try:
            call = None
            if cluster is not None:
                call = stack.enter_context(contextlib.closing(RollCall(cluster, deadlines, restarts)))
            keeper: Keeper | None = None
            while not is_stopped():
                group, number = None, processes or 1
                peers = Peers(process_id=0, links={}, hosts={}, deadlines=deadlines)
                if call is None:
                    history.begin()
                else:
                    group = call.meet(history, stopped=is_stopped)
                    if group is None:
                        break
                    peers, number = group.peers, group.place.num_processes
                history.check_worth()
                if history.lost is not None and peers.process_id == 0:
                    _say(history.line(num_processes=number))
                words = command
                if history.lost is not None and restarts is not None:
                    words = restarts.command(history.folder, None if group is None else group.mesh)
                if keeper is None and restarts is not None and restarts.keeps_copies:
                    # From the first attempt to the last: its contents outlive the workers.
                    keeper = stack.enter_context(Keeper(None if group is None else group.place))
                extra = history.environ() | ({} if keeper is None else keeper.environ)
                if group is None:
                    workers = worker_process.start_local(words, number, deadlines, extra=extra)
                else:
                    workers = [WorkerProcess(words, group.place, deadlines, extra=extra | dict(group.bind))]
                attempt = _Attempt(workers, number, peers, call, deadlines, signals, again, history)
                code = attempt.watch()
                if attempt.lost is None or not history.allows(attempt.lost):
                    return code
                reported = {key: attempt.last(key) for key in ("step", "checkpoint", "copy", "folder")}
                history.note(attempt.lost, **reported)
                ends_at = time.monotonic() + history.pause_s
                while not is_stopped() and time.monotonic() < ends_at:
                    time.sleep(TICK_S)
            _say(f"{_name(signals.received)}: the run is stopped; no worker was at work.")
            return stopped_code(signals.received or 0)
        except FourPartError as error:
            _say(f"{type(error).__name__}: {error}")
            return REQUEST if is_request(error) else RESUME if isinstance(error, NotRestarted) else 1


@dataclasses.dataclass
class _Attempt:
    """One attempt at a run: the workers of this machine, and the links to the supervisors of others if any."""

    workers: Sequence[WorkerProcess]
    num_processes: int
    peers: Peers
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
        """Runs to the end; returns the exit code."""
        try:
            while not self.signals.repeated:
                self._look()
                self._warn()
                if (code := self._good_end()) is not None:
                    return code
                if (cause := self._cause()) is not None:
                    return self._end_badly(cause)
                time.sleep(TICK_S)
            _say(f"{_name(self.forwarded)} again: the run ends now, unsaved. Continue it with: {self._again}")
            return stopped_code(self.forwarded or 0)
        finally:
            for worker in self.workers:
                worker.close()
            self.peers.close()

    def _look(self) -> None:
        if self.signals.received is not None and self.forwarded is None:
            self.forwarded = self.signals.received
            for worker in self.workers:
                worker.forward(self.forwarded)
        if self.peers.stalled or any(ending.stalled for ending in self.bad):
            # Every process reports its position, to find the one that is behind.
            for worker in self.workers:
                worker.end_stalled()
            if not self.peers.stalled:
                self.peers.ask_all()
        for worker in self.workers:
            worker.output.pass_on()
            ending = worker.look()
            if ending is not None and worker.process_id not in self.seen:
                self.seen.add(worker.process_id)
                self._note_ending(ending)
                self.peers.report(ending)
        if self.call is not None:
            self.call.attend()
        for ending in self.peers.poll(self.workers[0].state):
            self._note_ending(ending)

    def _warn(self) -> None:
        """Reports that there was no step for some time, and the process that the others wait for."""
        if self.bad or not self.peers.decides:
            return
        noted = {process: vars(beat) for process, beat in self.peers.beats.items()}
        noted |= {worker.process_id: worker.state for worker in self.workers}
        first_s = min((one["warn_s"] for one in noted.values() if one.get("warn_s")), default=None)
        if first_s is None:
            return
        idle_s = max(one.get("idle_s") or 0.0 for one in noted.values() if one.get("warn_s"))
        stopped = {worker.process_id: worker.stopped for worker in self.workers} if idle_s >= first_s else {}
        behind = min(noted, key=lambda process: (not stopped.get(process), noted[process].get("marks") or 0))
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
        """The process that was lost, once that is certain."""
        if self.peers.verdict is not None or not self.bad:
            return self.peers.verdict
        wait_s = self.deadlines.settle_s
        if self.peers.stalled and len(self.bad) < self.num_processes:
            wait_s += VERDICT_S
        if not self.peers.decides:
            wait_s += VERDICT_S
        if self.peers.alone and not any(worker.running for worker in self.workers):
            wait_s = 0.0  # no other process can report
        if time.monotonic() - self.first_bad_at < wait_s:
            return None
        lost = cause([*self.bad, *(self.peers.silent() if self.peers.stalled else ())])
        # A stopped process knows neither its limit nor when it began.
        stands = [ending.stand for ending in self.bad if ending.stand is not None and ending.stand.deadline]
        if lost.stand is not None and not lost.stand.deadline and stands:
            known = max(stands, key=lambda one: one.idle_s)
            again = dataclasses.replace(lost.stand, idle_s=known.idle_s, deadline=known.deadline, asked=known.asked)
            return dataclasses.replace(lost, stand=again)
        return lost

    def _end_badly(self, lost: Ending) -> int:
        if self.peers.decides:
            self.peers.announce(lost)
        was_asked = self._was_asked(lost)
        self.lost = None if was_asked or self.signals.received is not None else lost
        if self.lost is not None and self.history.allows(lost):
            self._show(lost)
            return lost.run_code
        if not was_asked:
            self._report(lost)
        elif self.last("step") is None:
            _say(f"{_name(self.forwarded)}: the run is stopped before its first step.")
        self._give_grace()
        return stopped_code(self.forwarded or 0) if was_asked else lost.run_code

    def _was_asked(self, lost: Ending) -> bool:
        """Whether it ended by the forwarded signal, before it handled signals, or because a peer did."""
        if self.forwarded is None:
            return False
        codes = (-self.forwarded, stopped_code(self.forwarded))
        others = [worker.ending.code for worker in self.workers if worker.ending is not None]
        return lost.code == -self.forwarded or (lost.echo and any(code in codes for code in others))

    def _show(self, lost: Ending) -> bool:
        """Shows the output of the lost process; returns whether it was on this machine."""
        is_own = False
        for worker in self.workers:
            is_cause = worker.process_id == lost.process
            is_own |= is_cause
            if is_cause or worker_process.debug():
                # Lines that process 0 has shown are not repeated, such as a warning of all processes.
                known = () if worker is self.workers[0] else self.workers[0].output.shown
                worker.output.show(prefix=f"[process {worker.process_id}] " if worker.process_id else "", known=known)
        return is_own

    def _report(self, lost: Ending) -> None:
        if self._show(lost) and (lost.explained or lost.code == REQUEST):
            return
        if self.peers.verdict is not None:  # process 0 has reported it
            _say(f"the run ends: {lost.who}: {lost.how}. Process 0 has the report.")
            return
        steps = [step for step in (lost.step, self.last("step")) if step is not None]
        report = _lost_error(
            lost,
            num_processes=self.num_processes,
            step=max(steps, default=None),
            checkpoint=self.last("checkpoint") or lost.checkpoint,
            again=self._again,
        )
        _say(f"{type(report).__name__}: {report}")

    def _give_grace(self) -> None:
        ends_at = time.monotonic() + self.deadlines.grace_s
        while time.monotonic() < ends_at and not self.signals.repeated:
            self._look()
            if all(worker.ending is not None or stall.is_stuck(worker.state) for worker in self.workers):
                return
            time.sleep(TICK_S)

    @property
    def _again(self) -> str:
        """The command that continues the run."""
        return self.last("again") or self.again

    def last(self, key: str) -> Any:
        """The value that the workers reported under a name; the largest if they differ."""
        return max((worker.state[key] for worker in self.workers if worker.state.get(key) is not None), default=None)


def _lost_error(
    ending: Ending, *, num_processes: int, step: int | None, checkpoint: str | None, again: str
) -> FourPartError:
    """The error when one process ended and the others cannot continue."""
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
    """The last step and checkpoint of the run."""
    return [
        "no step was reported yet" if step is None else f"last step reported: {step}",
        "no checkpoint was written yet" if checkpoint is None else f"last good checkpoint: {checkpoint}",
    ]


def _name(signum: int | None) -> str:
    return "" if signum is None else signal.Signals(signum).name


def _say(text: str) -> None:
    # In one piece: several supervisors may share a terminal.
    sys.stderr.write(printable(text, keep="\n\t") + "\n")
    sys.stderr.flush()
