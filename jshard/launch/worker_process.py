"""The workers of this machine, for their supervisor: started with a place and GPUs, and read through pipes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import cast

from jshard import _stacks
from jshard.errors import RunError
from jshard.launch.cluster import Cluster, Deadlines
from jshard.launch.gpu_share import device_ids_of
from jshard.launch.messages import decoded
from jshard.launch.peers import Ending, hostname
from jshard.launch.process_status import WorkerState, process_status
from jshard.launch.worker_output import WorkerOutput


class WorkerProcess:
    """A started worker, with its place in the cluster in its environment variables.

    It has its own session, so that Ctrl-C at a terminal reaches only the supervisor, which forwards it.

    Args:
        command: program and arguments.
        place: that of the worker.
        deadlines: how long it may be silent.
        extra: more environment variables.
        has_stdout: whether it has the stdin and stdout of this process.

    Attributes:
        ending: how it ended, once it has.
        state: what it has reported of itself.
        output: its stderr.

    Raises:
        RunError: the system cannot start more processes.
    """

    def __init__(
        self,
        command: Sequence[str],
        place: Cluster,
        deadlines: Deadlines,
        *,
        extra: Mapping[str, str] | None = None,
        has_stdout: bool = True,
    ) -> None:
        self.process_id = place.process_id
        self.ending: Ending | None = None
        self.state: WorkerState = {}
        self._deadlines = deadlines
        self._reports, write_fd = os.pipe()
        # The supervisor has one loop for everything, and must not wait here.
        os.set_blocking(self._reports, False)
        environ = _environ(place, deadlines, write_fd) | dict(extra or {})
        stream = None if has_stdout else subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(
                command,
                env=environ,
                pass_fds=(write_fd,),
                start_new_session=True,
                stdin=stream,
                stdout=stream,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            os.close(self._reports)
            raise RunError(
                f"Worker {place.process_id} could not be started.",
                where=f"{command[0]} on {socket.gethostname()}",
                why=str(error),
                do="check `ulimit -u` and the free memory of the machine, or start fewer: --processes 2",
            ) from error
        finally:
            # The worker has the only other end: when it ends, the pipe ends.
            os.close(write_fd)
        assert self._process.stderr is not None
        is_live = place.process_id == 0 or (debug() and place.kind != "local")
        self.output = WorkerOutput(self._process.stderr, live=is_live)
        self._partial = b""
        self._heard_at_s = time.monotonic()
        self._is_up = False

    def look(self) -> Ending | None:
        """Reads its reports; returns its ending, once the worker has ended or was silent for too long."""
        if self.ending is not None:
            return self.ending
        # In this order: once the worker has ended, all its reports are in the pipe.
        code = self._process.poll()
        self._read_reports()
        # Before the first beat it imports, which takes long on a cold file system.
        limit_s = self._deadlines.peer_s if self._is_up else self._deadlines.init_s
        silent_s = time.monotonic() - self._heard_at_s
        if code is not None:
            self.ending = self._ended(code)
        elif silent_s > limit_s:
            self.ending = self._lost(silent_s)
        elif self.state.get("stalled"):
            self.end_stalled()
        return self.ending

    def end_stalled(self) -> None:
        """Marks it as ended because the run is stalled, whether it is the one that is behind or not."""
        if self.ending is None:
            self.ending = self._lost(None)

    @property
    def stopped(self) -> str:
        """Returns the state reported by the system if a signal has stopped it: "T (stopped)"; else ""."""
        state = _stacks.state(self._process.pid)
        return state if state[:1] == "T" else ""

    @property
    def running(self) -> bool:
        """Returns whether the process still exists; also true if it is frozen."""
        return self._process.poll() is None

    def forward(self, signum: int) -> None:
        """Sends a signal to the worker only."""
        self._process.send_signal(signum)

    def close(self) -> None:
        """Releases a worker that ended successfully; any other is killed, with all its children."""
        if self.ending is None or not self.ending.good:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # As the leader of a session it has a process group of its own, in which its data workers are.
                os.killpg(self._process.pid, signal.SIGKILL)
            # One that hangs in the kernel, on a dead file system, ends some time later by itself.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        self.output.stop()
        os.close(self._reports)

    def _read_reports(self) -> None:
        """Reads all that the worker has written; anything but a report is ignored, but is a sign of life."""
        try:
            while data := os.read(self._reports, 65536):
                self._heard_at_s = time.monotonic()
                self._is_up = True
                # What follows the last newline is the beginning of a message.
                *lines, self._partial = (self._partial + data).split(b"\n")
                for line in lines:
                    self.state.update(cast(WorkerState, decoded(line) or {}))
        except BlockingIOError:
            pass

    def _ended(self, code: int) -> Ending:
        """Returns the ending of a worker that has an exit code."""
        return Ending(
            process=self.process_id,
            host=hostname(),
            pid=self._process.pid,
            code=code,
            explained=bool(self.state.get("explained")),
            blames_peer=bool(self.state.get("blames_peer")),
            step=self.state.get("step"),
            checkpoint=self.state.get("checkpoint"),
        )

    def _lost(self, silent_s: float | None) -> Ending:
        """Returns the ending of a worker that is silent for so long, or None for one in a run that is stalled."""
        step = self.state.get("step")
        return Ending(
            process=self.process_id,
            host=hostname(),
            pid=self._process.pid,
            silent_s=silent_s,
            explained=bool(self.state.get("explained")),
            blames_peer=bool(self.state.get("blames_peer")),
            step=step,
            checkpoint=self.state.get("checkpoint"),
            status=process_status(self._process.pid, self.state, process=self.process_id, step=step),
        )


def _environ(place: Cluster, deadlines: Deadlines, write_fd: int) -> dict[str, str]:
    """Returns the environment variables of a worker, which `start_worker` reads."""
    # The later ones count: this process may have been started with variables of the same names.
    return {
        **os.environ,
        "JSHARD_WORKER": "1",
        "JSHARD_REPORT_FD": str(write_fd),
        "JSHARD_CLUSTER": place.kind,
        "JSHARD_INIT_TIMEOUT": str(deadlines.init_s),
        "JSHARD_PEER_TIMEOUT": str(deadlines.peer_s),
        "JAX_COORDINATOR_ADDRESS": place.coordinator,
        "JAX_NUM_PROCESSES": str(place.num_processes),
        "JAX_PROCESS_ID": str(place.process_id),
        **device_ids_of(place),
    }


def start_local(
    command: Sequence[str], number: int, deadlines: Deadlines, *, extra: Mapping[str, str] | None = None
) -> list[WorkerProcess]:
    """Starts all workers of a run on this machine; they meet at a free port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # A run on one machine needs no port that is open to the network.
    extra = {**(extra or {}), "JAX_COORDINATOR_BIND_ADDRESS": address}
    local = Cluster(kind="local", coordinator=address, num_processes=number, process_id=0, variables={})
    workers: list[WorkerProcess] = []
    with contextlib.ExitStack() as on_failure:
        for process in range(number):
            place = dataclasses.replace(local, process_id=process, local_id=process, local_size=number)
            worker = WorkerProcess(command, place, deadlines, extra=extra, has_stdout=process == 0)
            # If a later one cannot be started, these would wait for it.
            on_failure.callback(worker.close)
            workers.append(worker)
        on_failure.pop_all()
    return workers


def debug() -> bool:
    """Returns whether JSHARD_DEBUG requests all output of the workers."""
    return os.environ.get("JSHARD_DEBUG", "") not in ("", "0")
