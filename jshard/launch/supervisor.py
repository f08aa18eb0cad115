"""The supervisor of a run in several processes: it starts the workers, and again after a loss if that is allowed."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence

from jshard._streams import open_standard_streams
from jshard.errors import FourPartError, is_request
from jshard.launch import worker_process
from jshard.launch.cluster import REQUEST, RESUME, TICK_S, Cluster, Deadlines, stopped_code
from jshard.launch.keeper import Keeper
from jshard.launch.peers import Ending, Peers
from jshard.launch.rendezvous import Group, Rendezvous
from jshard.launch.restarts import History, NotRestarted, Restarts
from jshard.launch.stop_signal import Signals
from jshard.launch.supervised_attempt import SupervisedAttempt, say, signal_name
from jshard.launch.worker_process import WorkerProcess


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
    # Signals first: from here on one is not lost, whatever is starting.
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
            say(f"{type(error).__name__}: {error}")
            return _exit_code(error)


def _exit_code(error: FourPartError) -> int:
    """Returns the exit code of a run that an error has ended."""
    if is_request(error):
        return REQUEST
    # Enough may come the next time.
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
            # Without a loss it is done, or was stopped.
            if attempt.lost is None or not self._history.allows(attempt.lost):
                return code
            self._record(attempt, attempt.lost)
            self._pause()
        say(f"{signal_name(self._signals.received)}: the run is stopped; no worker was at work.")
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
            # Without a roll call no leader does it.
            self._history.begin()
            alone = Peers(process_id=0, links={}, hosts={}, deadlines=self._deadlines)
            return _Members(self._processes, alone)
        group = self._rendezvous.meet(self._history, stopped=self._is_stopped)
        if group is None:
            return None
        return _Members(group.place.num_processes, group.peers, group)

    def _start(self, members: _Members) -> SupervisedAttempt:
        """Starts the workers of this machine, if another attempt is worth it."""
        # After the meeting, in which this supervisor may have learned of attempts that it was not part of.
        self._history.check_worth()
        # Only one supervisor says it for all.
        if self._history.lost is not None and members.peers.process_id == 0:
            say(self._history.line(num_processes=members.number))
        command = self._command_of(members)
        self._open_keeper(members)
        workers = self._start_workers(command, members)
        return SupervisedAttempt(
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
        # The folder, too: a run without --out has chosen a name for it.
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

    def _record(self, attempt: SupervisedAttempt, lost: Ending) -> None:
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
