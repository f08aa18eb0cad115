"""The workers of this machine, for their supervisor: started with a place and GPUs, and read through pipes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from jshard import _stacks
from jshard.errors import RunError, ShardingError
from jshard.launch import stall
from jshard.launch.cluster import Cluster, Deadlines
from jshard.launch.messages import decoded
from jshard.launch.peers import Ending, hostname

HOLD_S = 1.0
"""The delay before stderr of process 0 is passed on, as it may turn out to be the consequence of a lost peer."""

_LINES = 400
_LINE_BYTES = 4096
# "[Gloo] Rank 0 is connected to 1 peer ranks. Expected ...": several threads print it in pieces, and lines get mixed.
_NOISE = b"[Gloo]", b"peer ranks"


class Output:
    """The stderr of one worker, read by its own thread.

    Args:
        stream: the output of the worker.
        live: pass each line on, `HOLD_S` late; otherwise keep the last ones.
    """

    def __init__(self, stream: IO[bytes], *, live: bool) -> None:
        self._stream, self._passing = stream, live
        self._held: collections.deque[tuple[float, bytes]] = collections.deque(maxlen=None if live else _LINES)
        self._lock = threading.Lock()
        self._ended, self._stopped = threading.Event(), threading.Event()
        self.shown: collections.deque[bytes] = collections.deque(maxlen=_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True, name="jshard-output")
        self._reader.start()

    def pause(self) -> None:
        """Passes nothing on until it is known whether the output is a consequence of a lost peer."""
        self._passing = False

    def pass_on(self) -> None:
        """Writes the lines that have waited long enough; the supervisor calls it repeatedly."""
        while self._passing and self._held and self._held[0][0] <= time.monotonic() - HOLD_S:
            self._show([self._held.popleft()[1]])

    def show(self, *, prefix: str = "", known: Collection[bytes] = ()) -> None:
        """Writes the lines held back, except those that are `known` to the reader."""
        self._ended.wait(1.0)  # the worker has ended; its last lines may still arrive
        with self._lock:
            lines = [line for _, line in self._held if line not in known]
            self._held.clear()
        self._show(lines, prefix=prefix.encode())

    def stop(self) -> None:
        """Releases the stream: nothing is written after that."""
        self._stopped.set()
        self._reader.join(1.0)
        if self._ended.is_set():
            self._stream.close()

    def _read(self) -> None:
        # A child of the worker may keep the stream open longer: this thread is not joined.
        with contextlib.suppress(OSError, ValueError):
            while not self._stopped.is_set() and (line := self._stream.readline(_LINE_BYTES)):
                if not any(words in line for words in _NOISE):
                    with self._lock:
                        self._held.append((time.monotonic(), line))
        self._ended.set()

    def _show(self, lines: list[bytes], *, prefix: bytes = b"") -> None:
        self.shown.extend(lines)
        # A closed reader (`2>&1 | head`) must not end the run.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(b"".join(prefix + line for line in lines).decode(errors="replace"))
            sys.stderr.flush()


# The GPUs of each of several local processes.

_GPUS = Path("/proc/driver/nvidia/gpus")


def device_ids_of(place: Cluster, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """JAX_LOCAL_DEVICE_IDS of a process: its share of the machine's GPUs.

    Empty if it is set, if the process is alone on its machine, or if its launcher shows it a single GPU. If a launcher
    does not give the number of processes that share the GPUs, JAX's own rule: the GPU with the process's number. Two
    processes on one GPU cannot use NCCL. JAX is not used here: a supervisor that did would hold the devices itself.

    Raises:
        ShardingError: the GPUs cannot be divided among processes that are all started here.
    """
    number, mine, size = _num_gpus(environ), place.local_id, place.local_size
    is_local = place.kind == "local"
    if is_local and size and number % size:
        raise ShardingError(
            "The GPUs cannot be divided among the processes.",
            where=f"--processes {size}",
            why=f"{number} GPUs are visible; every process takes the same number, and no GPU is shared.",
            do=f"a number of processes that divides {number}, or on the CPU: "
            f"JAX_PLATFORMS=cpu jshard train ... --processes {size}",
        )
    is_known = number == 0 if is_local else number == 1 or bool(environ.get("JAX_LOCAL_DEVICE_IDS"))
    if mine is None or size == 1 or is_known:
        return {}
    share, rest = divmod(number, size or number or 1)
    ids = [mine] if rest or not share else range(share * mine, share * (mine + 1))
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, ids))}


def _num_gpus(environ: Mapping[str, str]) -> int:
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and "cuda" not in platforms and "gpu" not in platforms:
        return 0
    if not _has_cuda_plugin():
        return 0
    if "CUDA_VISIBLE_DEVICES" in environ:
        return len([name for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")])
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0


def _has_cuda_plugin() -> bool:
    try:
        plugins = import_module("jax_plugins")
    except ImportError:
        return False
    return any(name.startswith("xla_cuda") for _, name, _ in pkgutil.iter_modules(plugins.__path__))


# One worker, for its supervisor: a child process that reports through a pipe.


class WorkerProcess:
    """A started worker, with its place in the cluster in its environment variables.

    It has its own session, so that Ctrl-C at a terminal reaches only the supervisor, which forwards it.

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
        self.state: dict[str, Any] = {}
        self._deadlines = deadlines
        self._reports, write_fd = os.pipe()
        os.set_blocking(self._reports, False)
        environ = {
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
            **(extra or {}),
        }
        inherited = None if has_stdout else subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(
                command,
                env=environ,
                pass_fds=(write_fd,),
                start_new_session=True,
                stdin=inherited,
                stdout=inherited,
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
            os.close(write_fd)
        assert self._process.stderr is not None
        self.output = Output(self._process.stderr, live=place.process_id == 0 or (debug() and place.kind != "local"))
        self._partial = b""
        self._heard_at = time.monotonic()
        self._is_up = False

    def look(self) -> Ending | None:
        """Reads its reports; returns its ending, once the worker has ended or was silent for too long."""
        if self.ending is None:
            code = self._process.poll()
            self._read_reports()
            # Before the first beat it imports, which takes long on a cold file system.
            limit_s = self._deadlines.peer_s if self._is_up else self._deadlines.init_s
            silent_s = time.monotonic() - self._heard_at
            if code is not None or silent_s > limit_s:
                self.ending = self._ended(code, silent_s)
            elif self.state.get("stalled"):
                self.end_stalled()
        return self.ending

    def end_stalled(self) -> None:
        """Marks it as ended because the run is stalled, whether it is the one that is behind or not."""
        self.ending = self.ending or self._ended(None, None)

    @property
    def stopped(self) -> str:
        """The state reported by the system if a signal has stopped it: "T (stopped)"; else empty."""
        return state if (state := _stacks.state(self._process.pid))[:1] == "T" else ""

    @property
    def running(self) -> bool:
        """Whether the process still exists; also true if it is frozen."""
        return self._process.poll() is None

    def forward(self, signum: int) -> None:
        """Sends a signal to the worker only."""
        self._process.send_signal(signum)

    def close(self) -> None:
        """Releases a worker that ended successfully; any other is killed, with all its children."""
        if self.ending is None or not self.ending.good:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # One that hangs in the kernel, on a dead file system, ends some time later by itself.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        self.output.stop()
        os.close(self._reports)

    def _read_reports(self) -> None:
        try:
            while data := os.read(self._reports, 65536):
                self._heard_at, self._is_up = time.monotonic(), True
                *lines, self._partial = (self._partial + data).split(b"\n")
                for line in lines:
                    self.state.update(decoded(line) or {})
        except BlockingIOError:
            pass

    def _ended(self, code: int | None, silent_s: float | None) -> Ending:
        step = self.state.get("step")
        return Ending(
            process=self.process_id,
            host=hostname(),
            pid=self._process.pid,
            code=code,
            silent_s=silent_s if code is None else None,
            explained=bool(self.state.get("explained")),
            blames_peer=bool(self.state.get("blames_peer")),
            step=step,
            checkpoint=self.state.get("checkpoint"),
            stand=stall.stand(self._process.pid, self.state, process=self.process_id, step=step)
            if code is None
            else None,
        )


def start_local(
    command: Sequence[str], number: int, deadlines: Deadlines, *, extra: Mapping[str, str] | None = None
) -> list[WorkerProcess]:
    """Starts all workers of a run on this machine; they meet at a free port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # A run on one machine needs no port that is open to the network.
    extra = {**(extra or {}), "JAX_COORDINATOR_BIND_ADDRESS": address}
    local = Cluster(kind="local", coordinator=address, num_processes=number, process_id=0, variables={})
    with contextlib.ExitStack() as undo:
        workers: list[WorkerProcess] = []
        for process in range(number):
            place = dataclasses.replace(local, process_id=process, local_id=process, local_size=number)
            workers.append(WorkerProcess(command, place, deadlines, extra=extra, has_stdout=process == 0))
            undo.callback(workers[-1].close)
        undo.pop_all()
    return workers


def debug() -> bool:
    """Whether JSHARD_DEBUG requests all output of the workers."""
    return os.environ.get("JSHARD_DEBUG", "") not in ("", "0")
