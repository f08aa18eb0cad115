"""The supervisor of a run in several processes: starts the workers, watches them, and reports which one was lost."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jshard._streams import open_standard_streams
from jshard.errors import FourPartError, RunError, ShardingError, is_request, printable
from jshard.launch import stall, worker_process
from jshard.launch.cluster import REQUEST, RESUME, TICK_S, Cluster, Deadlines, stopped_code
from jshard.launch.keeper import Keeper
from jshard.launch.peers import Beat, Ending, Peers, beat_of, cause
from jshard.launch.process_status import is_stuck, stalled_error
from jshard.launch.rendezvous import Group, Rendezvous
from jshard.launch.restarts import History, NotRestarted, Restarts
from jshard.launch.stop_signal import Signals
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
    with Signals() as signals, contextlib.ExitStack() as resources:
        supervisor = _Supervisor(
            command,
            processes=processes,
            cluster=cluster,
            deadlines=deadlines or Deadlines(),
            again=again,
            restarts=restarts,
            signals=signals,
            resources=resources,
        )
        try:
            return supervisor.run()
        except FourPartError as error:
            _say(f"{type(error).__name__}: {error}")
            return _exit_code(error)


def _exit_code(error: FourPartError) -> int:
    """Returns the exit code of a run that an error has ended."""
    if is_request(error):
        return REQUEST
    if isinstance(error, NotRestarted):
        return RESUME
    return 1


@dataclasses.dataclass(frozen=True)
class _Members:
    """The processes of one attempt.

    Attributes:
        number: how many they are.
        peers: the links to the supervisors of the others; none on one machine.
        group: what the roll call agreed on; None if all processes are on this machine.
    """

    number: int
    peers: Peers
    group: Group | None = None

    @property
    def place(self) -> Cluster | None:
        """Returns the place of this process; None if all are on this machine."""
        return None if self.group is None else self.group.place

    @property
    def mesh(self) -> str | None:
        """Returns their mesh, if it is not that of all processes."""
        return None if self.group is None else self.group.mesh


class _Supervisor:
    """The attempts at one run, until it is complete, stopped, or not worth another one.

    The roll call, the keeper and the history last from the first attempt to the last. `resources` closes the first two.
    The other arguments are those of `supervise`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        processes: int | None,
        cluster: Cluster | None,
        deadlines: Deadlines,
        again: str,
        restarts: Restarts | None,
        signals: Signals,
        resources: contextlib.ExitStack,
    ) -> None:
        self._command = command
        self._processes = processes or 1
        self._cluster = cluster
        self._deadlines = deadlines
        self._again = again
        self._restarts = restarts
        self._signals = signals
        self._resources = resources
        self._history = History(left=0 if restarts is None else restarts.most)
        self._rendezvous: Rendezvous | None = None
        self._keeper: Keeper | None = None

    def run(self) -> int:
        """Makes attempts; returns the exit code of the run."""
        self._open_roll_call()
        while not self._is_stopped():
            members = self._meet()
            if members is None:
                break
            attempt = self._start(members)
            code = attempt.watch()
            if attempt.lost is None or not self._history.allows(attempt.lost):
                return code
            self._record(attempt, attempt.lost)
            self._pause()
        _say(f"{_name(self._signals.received)}: the run is stopped; no worker was at work.")
        return stopped_code(self._signals.received or 0)

    def _is_stopped(self) -> bool:
        return self._signals.received is not None

    def _open_roll_call(self) -> None:
        if self._cluster is not None:
            rendezvous = Rendezvous(self._cluster, self._deadlines, self._restarts)
            self._rendezvous = self._resources.enter_context(contextlib.closing(rendezvous))

    def _meet(self) -> _Members | None:
        """Waits for the processes of the next attempt; None if a signal came first."""
        if self._rendezvous is None:
            self._history.begin()
            alone = Peers(process_id=0, links={}, hosts={}, deadlines=self._deadlines)
            return _Members(self._processes, alone)
        group = self._rendezvous.meet(self._history, stopped=self._is_stopped)
        if group is None:
            return None
        return _Members(group.place.num_processes, group.peers, group)

    def _start(self, members: _Members) -> _Attempt:
        """Starts the workers of this machine, if another attempt is worth it."""
        # After the meeting, in which this supervisor may have learned of attempts that it was not part of.
        self._history.check_worth()
        if self._history.lost is not None and members.peers.process_id == 0:
            _say(self._history.line(num_processes=members.number))
        command = self._command_of(members)
        self._open_keeper(members)
        workers = self._start_workers(command, members)
        return _Attempt(
            workers,
            members.number,
            members.peers,
            self._rendezvous,
            self._deadlines,
            self._signals,
            self._again,
            self._history,
        )

    def _command_of(self, members: _Members) -> Sequence[str]:
        """Returns the command of a worker, which after a loss continues the run."""
        if self._history.lost is None or self._restarts is None:
            return self._command
        return self._restarts.command(self._history.folder, members.mesh)

    def _open_keeper(self, members: _Members) -> None:
        """Opens the store of copies in memory. It outlives the workers: the next ones read from it."""
        if self._keeper is None and self._restarts is not None and self._restarts.keeps_copies:
            self._keeper = self._resources.enter_context(Keeper(members.place))

    def _start_workers(self, command: Sequence[str], members: _Members) -> list[WorkerProcess]:
        environ = self._history.environ()
        if self._keeper is not None:
            environ |= self._keeper.environ
        group = members.group
        if group is None:
            return worker_process.start_local(command, members.number, self._deadlines, extra=environ)
        return [WorkerProcess(command, group.place, self._deadlines, extra=environ | dict(group.bind))]

    def _record(self, attempt: _Attempt, lost: Ending) -> None:
        """Records in the history how an attempt ended."""
        self._history.record(
            lost,
            step=attempt.last("step"),
            checkpoint=attempt.last("checkpoint"),
            copy=attempt.last("copy"),
            folder=attempt.last("folder"),
        )

    def _pause(self) -> None:
        """Waits before the next attempt; a signal ends the wait."""
        ends_at = time.monotonic() + self._history.pause_s
        while not self._is_stopped() and time.monotonic() < ends_at:
            time.sleep(TICK_S)


@dataclasses.dataclass
class _Attempt:
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
            _say(f"{_name(self.forwarded)} again: the run ends now, unsaved. Continue it with: {self._again}")
            return stopped_code(self.forwarded or 0)
        finally:
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
        warning = [state for state in states.values() if state.warn_s]
        if not warning:
            return
        first_s = min(state.warn_s for state in warning if state.warn_s)
        idle_s = max(state.idle_s or 0.0 for state in warning)
        stopped = {}
        if idle_s >= first_s:  # not at every tick: each answer is read from the system
            stopped = {worker.process_id: worker.stopped for worker in self.workers}
        where = self._behind(states, stopped)
        self.warned_s = stall.warn(idle_s, self.warned_s, first_s, where, _say)

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
        return max(codes)

    def _cause(self) -> Ending | None:
        """Returns the process that was lost, once that is certain."""
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
        if self.peers.stalled and len(self.bad) < self.num_processes:
            wait_s += VERDICT_S
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
                self._show(lost)
                return lost.run_code
        if not was_asked:
            self._report(lost)
        elif self.last("step") is None:
            _say(f"{_name(self.forwarded)}: the run is stopped before its first step.")
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
            if all(worker.ending is not None or is_stuck(worker.state) for worker in self.workers):
                return
            time.sleep(TICK_S)

    @property
    def _again(self) -> str:
        """Returns the command that continues the run."""
        return self.last("again") or self.again

    def last(self, key: str) -> Any:
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


def _name(signum: int | None) -> str:
    return "" if signum is None else signal.Signals(signum).name


def _say(text: str) -> None:
    # In one piece: several supervisors may share a terminal.
    sys.stderr.write(printable(text, keep="\n\t") + "\n")
    sys.stderr.flush()
