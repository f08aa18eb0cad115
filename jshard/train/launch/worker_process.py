"""One worker, as its supervisor sees it: a child process that tells of itself through a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jshard.train.launch.deadlines import Deadlines
from jshard.train.launch.endings import Ending
from jshard.train.launch.output import Output
from jshard.train.launch.peers import hostname


class WorkerProcess:
    """A started worker.

    It has a session of its own, so that Ctrl-C at a terminal reaches only the supervisor, which forwards it.

    Args:
        command: program and arguments.
        process_id: its id in the run.
        environ: its environment variables; JSHARD_REPORT_FD is added.
        has_stdout: inherit stdin and stdout; otherwise there are none.
        live: pass its stderr on.
        deadlines: of the run.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        process_id: int,
        environ: Mapping[str, str],
        has_stdout: bool,
        live: bool,
        deadlines: Deadlines,
    ) -> None:
        self.process_id = process_id
        self.ending: Ending | None = None
        self.state: dict[str, Any] = {}
        self._deadlines = deadlines
        self._reports, write_fd = os.pipe()
        os.set_blocking(self._reports, False)
        try:
            self._process = subprocess.Popen(
                command,
                env={**environ, "JSHARD_REPORT_FD": str(write_fd)},
                pass_fds=(write_fd,),
                start_new_session=True,
                stdin=None if has_stdout else subprocess.DEVNULL,
                stdout=None if has_stdout else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        finally:
            os.close(write_fd)
        assert self._process.stderr is not None
        self.output = Output(self._process.stderr, live=live)
        self._partial = b""
        self._heard_at = time.monotonic()
        self._is_up = False

    def look(self) -> Ending | None:
        """Reads its reports; the ending, once there is one: the worker is over, or silent for too long."""
        if self.ending is None:
            code = self._process.poll()
            self._read_reports()
            # Until the first beat it imports, and on a cold file system that takes long.
            limit_s = self._deadlines.peer_s if self._is_up else self._deadlines.init_s
            silent_s = time.monotonic() - self._heard_at
            if code is not None or silent_s > limit_s:
                self.ending = self._ended(code, silent_s)
        return self.ending

    @property
    def running(self) -> bool:
        """Whether the process is still there; true as well for one that is frozen."""
        return self._process.poll() is None

    def forward(self, signum: int) -> None:
        """Sends a signal to the worker alone."""
        self._process.send_signal(signum)

    def close(self) -> None:
        """Lets go of a worker that has ended well; any other is killed, with all that it started."""
        if self.ending is None or not self.ending.good:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # One that hangs in the kernel, on a dead file system, ends some time later, without us.
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
                    with contextlib.suppress(ValueError):
                        self.state.update(json.loads(line))
        except BlockingIOError:
            pass

    def _ended(self, code: int | None, silent_s: float) -> Ending:
        return Ending(
            process=self.process_id,
            host=hostname(),
            pid=self._process.pid,
            code=code,
            silent_s=silent_s if code is None else None,
            told=bool(self.state.get("told")),
            blames_peer=bool(self.state.get("blames_peer")),
            step=self.state.get("step"),
            checkpoint=self.state.get("checkpoint"),
        )
