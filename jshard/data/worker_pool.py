"""Processes that read samples, for data that is expensive to make.

Each worker depends only on its own pipe: no lock and no queue is shared, so a worker that is killed, at any
time, does not affect other processes. (Grain's workers share locks, wait forever for one that ends with
exit code 0, and outlive a run that is killed.) Step `s` belongs to worker `s % num_workers`, and the batches are
fetched in the order of the steps: they do not depend on the number of workers.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from jshard import _stacks
from jshard._children import forget_safe_path, libraries_first, neighbours_first, safe_path
from jshard.errors import RunError, ShardingError

if TYPE_CHECKING:
    from jshard.data.loader import Reader, Sample

MODEL_FILE = "jshard_model_file_"  # prefix of loaded model files in sys.modules
_AHEAD = 2  # batches requested from a worker before the first is fetched; the requests must fit into a pipe
_LEFT_TO_THE_RUN = (signal.SIGINT, signal.SIGTERM)
_DYING_S = 1.0  # from the end of its pipe to the exit of a worker


class WorkerPool:
    """Worker processes with a copy of a reader each; they end with `close`, or with the process.

    Workers leave SIGINT and SIGTERM to the run, which may still need batches to finish. The reader is sent by pickle,
    including objects of a model file; `ids` gives the samples of a step, for the steps that will be requested.
    """

    def __init__(
        self, reader: Reader, *, num_workers: int, ids: Callable[[int], Sequence[int]], num_steps: int
    ) -> None:
        self._reader = reader
        self._ids = ids
        self._num_steps = num_steps
        self._num_requested = 0  # batches
        self._pickled: bytes | None = pickled(reader)  # None once the workers have it
        self._workers = [_Worker(number, num_workers) for number in range(num_workers)]
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the workers, even in the middle of a sample."""
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.joined()

    def batch(self, step: int) -> Sample:
        """Returns the batch of a step; raises if its worker died or cannot read a sample.

        Called once per step, in order.
        """
        if self._pickled is not None:
            for worker in self._workers:
                worker.send(self._pickled)
            self._pickled = None
        self._request_up_to(step + _AHEAD * len(self._workers))
        reply = self._worker_of(step).receive(f"requested samples: {list(self._ids(step))}")
        if reply.kind == "batch":
            return reply.value
        error = reply.value
        if reply.kind == "unpickled":
            error = _not_portable(self._reader, reply.cause)
        raise error from reply.cause

    def _request_up_to(self, end: int) -> None:
        """Sends the samples of the steps before `end` to their workers, if they were not sent."""
        while self._num_requested < min(end, self._num_steps):
            step = self._num_requested
            self._worker_of(step).send(pickle.dumps(list(self._ids(step))))
            self._num_requested += 1

    def _worker_of(self, step: int) -> _Worker:
        return self._workers[step % len(self._workers)]


class _WorkerReply(NamedTuple):
    """What a worker sends for a request.

    Attributes:
        kind: "batch"; "error" of a sample; "unpickled" if the worker could not load the reader.
        value: the batch, or a jshard error; None of "unpickled".
        cause: of the error.
    """

    kind: str
    value: Any
    cause: Any


class _Worker:
    """A process, and this end of its pipe."""

    def __init__(self, number: int, of: int):
        # Not fork: jax and grain already have threads.
        context = multiprocessing.get_context("spawn")
        self._name = f"data worker {number + 1} of {of}"
        folders = _model_folders()
        self._pipe, theirs = context.Pipe()
        self._joining = threading.Lock()
        self.process = context.Process(target=_work, args=(theirs, self._name, folders), name=self._name, daemon=True)
        with safe_path():
            resource_tracker.ensure_running()  # it would unblock the signals when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_RUN)  # inherited by the worker
        try:
            with safe_path(), libraries_first(folders):
                self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # the pipe now ends with the process

    def send(self, message: bytes) -> None:
        """Sends a message; raises if the worker died."""
        try:
            self._pipe.send_bytes(message)
        except OSError as error:
            raise self._died("") from error

    def receive(self, task: str) -> _WorkerReply:
        """Returns the next reply; raises if the worker died. `task` is what it was doing, in words."""
        try:
            # Closing the pipe would suffice, but a child of the worker may hold its other end open.
            if self._pipe not in wait([self._pipe, self.process.sentinel]):
                raise EOFError
            return _WorkerReply(*pickle.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError) as error:
            raise self._died(task) from error

    def joined(self, timeout_s: float | None = None) -> int | None:
        """Waits for the process to end, and returns its exit code; None if it has not ended in time."""
        # Locked, because the reading and the closing thread may wait at once, and one would return too early.
        with self._joining:
            self.process.join(timeout_s)
            return self.process.exitcode

    def _died(self, task: str) -> RunError:
        code = self.joined(_DYING_S)
        why = f"it ended with exit code {code}; its own messages are above."
        if code is not None and code < 0:
            why = f"it was killed by {signal.Signals(-code).name}."
            if code == -signal.SIGKILL:
                why += " The system kills processes when memory runs out."
        where = [f"{self._name} (pid {self.process.pid})"]
        if task:
            where.append(task)
        return RunError(
            "A data worker died.",
            where=where,
            why=why,
            do="--resume --workers 0  # continues at the last checkpoint; fewer workers use less memory",
        )


def pickled(reader: Reader) -> bytes:
    """Returns the reader, pickled for a worker, with a model file's definitions; raises `ShardingError` if not."""
    import cloudpickle  # only needed with workers

    # A worker cannot import a model file by name, so its classes and functions are sent by value.
    model_files = _model_files()
    for module in model_files:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(reader)
    except Exception as error:
        raise _not_portable(reader, error) from error
    finally:
        for module in model_files:
            cloudpickle.unregister_pickle_by_value(module)


def _not_portable(reader: Reader, error: BaseException) -> ShardingError:
    return ShardingError(
        "The data cannot be sent to worker processes.",
        where=f"data.{reader.part}, a {type(reader.source).__name__}",
        why=f"{type(error).__name__}: {error}",
        do="open files, locks and connections in __getitem__, not before; or read in this process: --workers 0.",
    )


def _model_files() -> list[ModuleType]:
    """Returns the modules of the model files that this process has loaded."""
    return [module for name, module in sys.modules.items() if name.startswith(MODEL_FILE)]


def _model_folders() -> list[str]:
    """Returns the folders that model files have put into `sys.path`."""
    folders = {}  # a set that keeps its order
    for module in _model_files():
        if module.__file__:
            folders[os.path.dirname(module.__file__)] = None
    return [folder for folder in folders if folder in sys.path]


def _work(pipe: Connection, name: str, folders: Sequence[str] = ()) -> None:
    """Runs a worker: receives a reader, then sample ids, and sends batches until the pipe ends."""
    forget_safe_path()
    for number in _LEFT_TO_THE_RUN:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_RUN)
    # The accelerators belong to the run. Its main module has already imported jax here, or its samples will.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    for library in ("cloudpickle", "jshard.data.loader"):  # what a reader needs, before files beside the model count
        importlib.import_module(library)
    neighbours_first(folders)
    _stacks.ready(name)
    try:
        message = pipe.recv_bytes()
        try:
            reader = pickle.loads(message)
        except Exception as error:
            pipe.send_bytes(_failure("unpickled", None, error, name))
            return
        while True:
            sample_ids = pickle.loads(pipe.recv_bytes())
            try:
                reply = pickle.dumps(("batch", reader.batch(sample_ids), None), protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                reply = _failure("error", error, error.__cause__, name)
            pipe.send_bytes(reply)
    except (EOFError, OSError):
        return  # the run has ended


def _failure(kind: str, error: Exception | None, cause: BaseException | None, name: str) -> bytes:
    """Returns a reply with an error; its cause goes as text, because others and tracebacks may not be picklable."""
    plain = None
    if cause is not None:
        plain = RuntimeError(f"{type(cause).__name__}: {cause}")
        plain.add_note(f"In {name}:\n" + "".join(traceback.format_tb(cause.__traceback__)))
    return pickle.dumps((kind, error, plain))
