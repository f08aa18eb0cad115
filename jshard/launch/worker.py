"""The worker's part: it joins the others, sends signs of life, and exits without waiting for them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import NoReturn, cast

from jshard import _stacks
from jshard.errors import FourPartError, RunError, ShardingError, causes
from jshard.launch.cluster import GOOD, Deadlines, is_worker
from jshard.launch.process_status import WorkerState
from jshard.launch.stall import state_of_watch

END_S = 30.0
"""The time from the end of a run's work, when all have confirmed it, to the end of each process."""

_PR_SET_PDEATHSIG = 1
# Never: the supervisors hear of a lost process, and report it. JAX measures the age of a heartbeat by the clock of the
# wall, and aborts all processes of a healthy run when that is set forward by more than the time-out, or back to before
# the last heartbeat. With this there is one heartbeat, at the start: only a clock set back to before it still aborts.
_HEARTBEAT_S = 10**9
# The variables of JAX that ask for secure connections.
_SECURED = ("JAX_MTLS_", "JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS")
_MESSAGE_BYTES = 4096  # what a pipe accepts atomically
# Words from the errors that the libraries of collectives raise when another process is gone.
_PEER_WORDS = (
    "gloo",
    "nccl",
    "coordination service",
    "connection reset by peer",
    "connection closed by peer",
    "heartbeat",
    "barrier",
)


def start_worker(environ: Mapping[str, str] = os.environ) -> None:
    """Joins the run: signs of life to the supervisor, then `jax.distributed.initialize`.

    Call it before JAX initialises its devices, and after the number of CPU devices is set. From then on only Python
    writes to stdout: the output of native libraries goes to stderr.

    Raises:
        RunError: JAX could not connect the processes.
    """
    _end_with_supervisor()
    _stacks.ready(f"process {environ['JAX_PROCESS_ID']}")
    _keep_stdout_for_python()
    _start_reports(environ)
    if environ["JAX_NUM_PROCESSES"] != "1":
        _connect(environ, _deadlines(environ))


def note(
    *,
    step: int | None = None,
    checkpoint: str | None = None,
    copy: int | None = None,
    again: str | None = None,
    folder: str | None = None,
) -> None:
    """Reports the progress of the run to the supervisor, for its report if a process is lost. No effect without one.

    Takes some microseconds, and never waits.

    Args:
        step: the last completed step.
        checkpoint: the last completed checkpoint.
        copy: the step of the last copy in memory.
        again: the command line that continues from there.
        folder: the folder of the run.
    """
    if _reporter is None:
        return
    progress = {"step": step, "checkpoint": checkpoint, "copy": copy, "again": again, "folder": folder}
    news = {key: value for key, value in progress.items() if value is not None}
    _reporter.note(cast(WorkerState, news))


def leave(code: int, *, error: BaseException | None = None) -> NoReturn:
    """Ends the worker with an exit code.

    After success, or a stop that all agreed on (0, 130, 75), it waits for the others as JAX requires. After a failure
    it ends at once, because the others cannot come to that meeting.

    Args:
        code: the exit code.
        error: the reason of a failure, or the KeyboardInterrupt of a stop that was not agreed on. A four-part error
            has been printed already.
    """
    if code in GOOD and error is None:
        import jax

        jax.distributed.shutdown()
        if is_worker():
            end_within(END_S, code)
        sys.exit(code)
    if is_worker():
        blames_peer = _blames_peer(error)
        is_explained = isinstance(error, FourPartError) and not blames_peer
        # It may fail before `start_worker` has started them.
        _start_reports(os.environ).note({"explained": is_explained, "blames_peer": blames_peer})
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader may be gone
            stream.flush()
    os._exit(code)


def end_within(seconds: float, code: int) -> None:
    """Limits the exit time of a process whose work is done: a thread that Python joins may wait for data forever."""

    def end() -> None:
        time.sleep(seconds)
        text = f"the run is over, and a thread of it did not end within {seconds:.0f} s: abandoned.\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        os._exit(code)

    threading.Thread(target=end, daemon=True, name="jshard-end").start()


class _Reporter:
    """Writes all notes into the pipe to the supervisor, repeatedly."""

    def __init__(self, fd: int, every_s: float) -> None:
        # A child program must not keep the pipe open, and a supervisor that does not read must not block this process.
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        self._fd = fd
        self._every_s = every_s
        self._state: WorkerState = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, daemon=True, name="jshard-beat").start()

    def note(self, state: WorkerState) -> None:
        """Sends the whole state, with these changes; without any it is a sign of life."""
        with self._lock:
            self._state.update(state)
            line = json.dumps(self._state | state_of_watch()).encode() + b"\n"
            if len(line) > _MESSAGE_BYTES:
                line = b"{}\n"  # a sign of life: a longer line could arrive in part
            try:
                os.write(self._fd, line)
            except BlockingIOError:
                pass  # each message is complete, so the next one suffices
            except OSError:
                _end_without_supervisor()

    def _beat(self) -> None:
        while True:
            self.note({})
            time.sleep(self._every_s)


_reporter: _Reporter | None = None


def _start_reports(environ: Mapping[str, str]) -> _Reporter:
    global _reporter
    if _reporter is None:
        _reporter = _Reporter(int(environ["JSHARD_REPORT_FD"]), _deadlines(environ).beat_s)
    return _reporter


def _deadlines(environ: Mapping[str, str]) -> Deadlines:
    return Deadlines(init_s=float(environ["JSHARD_INIT_TIMEOUT"]), peer_s=float(environ["JSHARD_PEER_TIMEOUT"]))


def _end_without_supervisor() -> NoReturn:
    """Ends this process and its children, as nothing else would report a lost peer or stop it."""
    # Only if the group is its own: another one may have the shell of the user in it.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _end_with_supervisor() -> None:
    """Asks the system to end this process when its parent dies, even if none of its threads runs any more."""
    with contextlib.suppress(OSError, AttributeError):  # only on Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _keep_stdout_for_python() -> None:
    """Sends what native libraries write to stdout to stderr; Python writes to a copy of the old stdout."""
    # Before descriptor 1 is replaced: what is in the buffer would go to stderr.
    sys.stdout.flush()
    copy_fd = os.dup(1)
    os.dup2(2, 1)
    old = sys.stdout
    buffering = 1 if os.isatty(copy_fd) else -1  # line by line on a terminal
    sys.stdout = os.fdopen(copy_fd, "w", buffering=buffering, encoding=old.encoding, errors=old.errors)
    # The width of the terminal is looked up there.
    sys.__stdout__ = sys.stdout  # type: ignore[misc]


def _connect(environ: Mapping[str, str], deadlines: Deadlines) -> None:
    """Connects JAX with the other processes."""
    import jax

    address = environ["JAX_COORDINATOR_ADDRESS"]
    _check_can_secure(environ)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if "jax_enable_preemption_service" in jax.config.values:
        # It handles SIGTERM in native code, so that our own handler, which saves, would never be called.
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address,
            num_processes=int(environ["JAX_NUM_PROCESSES"]),
            process_id=int(environ["JAX_PROCESS_ID"]),
            cluster_detection_method="deactivate",  # the place is known, and JAX_LOCAL_DEVICE_IDS has its GPUs
            initialization_timeout=math.ceil(deadlines.init_s),
            heartbeat_timeout_seconds=_HEARTBEAT_S,
        )
    except (RuntimeError, ValueError) as error:
        raise RunError(
            "JAX could not connect the processes.",
            where=f"process {environ['JAX_PROCESS_ID']} of {environ['JAX_NUM_PROCESSES']} at {address}",
            why=str(error).strip().partition("\n")[0],
            do="check that the port is free and open between the machines, or name another: JAX_COORDINATOR_ADDRESS",
        ) from error


def _check_can_secure(environ: Mapping[str, str]) -> None:
    """Refuses variables that ask for secure connections if this JAX would ignore them silently."""
    import jax

    requested = [f"{name}={value}" for name, value in environ.items() if name.startswith(_SECURED)]
    if requested and "jax_mtls_cert_file" not in jax.config.values:
        raise ShardingError(
            "This JAX cannot secure its connections.",
            where=requested,
            why="its coordination service has no mutual TLS, and the run would be open.",
            do="pip install -U jax  # from 0.12 on; or unset the variables.",
        )


def _blames_peer(error: BaseException | None) -> bool:
    """Returns whether an error, or one of its causes, says that another process is gone."""
    for each in causes(error):
        if isinstance(each, FourPartError):  # ours names the cause, and may use the same words
            continue
        text = f"{each}".lower()
        if any(word in text for word in _PEER_WORDS):
            return True
    return False
