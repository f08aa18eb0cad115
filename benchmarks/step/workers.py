"""The processes of a candidate: started, asked, ended."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.step.candidates import Candidate
from benchmarks.step.place import Place
from benchmarks.step.serve import Task
from benchmarks.step.sizes import Sizes

_ROOT = Path(__file__).parents[2]
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
# XLA:CPU aborts the process when another one comes late to a collective, as on a loaded machine.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=1200 --xla_cpu_collective_timeout_seconds=1200"
_START_S, _ROUND_S = 1500, 1200
_LAST_LINES = 4


class CandidateError(Exception):
    """A candidate cannot take part; the message says why."""


class Workers:
    """The processes of one candidate on this machine. They are there until `close`.

    Args:
        candidate: which one.
        sizes: of the model.
        place: of the processes.
        device: "cpu" or "gpu".
        python: the interpreter.
        number: of this start, counted over the session.
    """

    def __init__(
        self, candidate: Candidate, sizes: Sizes, place: Place, *, device: str, python: str, number: int
    ) -> None:
        self._logs = [tempfile.TemporaryFile("w+") for _ in place.mine]  # noqa: SIM115
        self._processes: list[subprocess.Popen[str]] = []
        address = place.address(number) if candidate.sharded else ""
        for position, (process, log) in enumerate(zip(place.mine, self._logs, strict=True), place.first_position):
            task = Task(
                sizes=sizes,
                options=dict(candidate.options),
                device=device,
                process=process,
                processes=place.processes,
                address=address,
            )
            command = [python, "-m", f"benchmarks.step.{candidate.worker}_worker", task.text()]
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=_ROOT,
                    env=_environment(device, position, os.environ),
                )
            )
        self._answers: list[queue.Queue[str]] = [queue.Queue() for _ in place.mine]
        for process, answers in zip(self._processes, self._answers, strict=True):
            threading.Thread(target=_read, args=(process, answers), daemon=True).start()

    def ready(self) -> list[dict[str, Any]]:
        """The facts of each process, once all of them have run a step.

        Raises:
            CandidateError: one has ended, or is not ready in time.
        """
        return self._collect(_START_S)

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """The answer of each process; they work at the same time.

        Raises:
            CandidateError: one has ended, or has not answered in time.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        return self._collect(_ROUND_S)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        for log in self._logs:
            log.close()

    def _collect(self, timeout_s: float) -> list[dict[str, Any]]:
        found = []
        for number, answers in enumerate(self._answers):
            try:
                line = answers.get(timeout=timeout_s)
            except queue.Empty:
                raise CandidateError(f"no answer within {timeout_s} s; {self._said(number)}") from None
            if not line:
                raise CandidateError(self._said(number))
            found.append(json.loads(line))
        return found

    def _said(self, number: int) -> str:
        """The last lines of a process, the last of which says most."""
        log = self._logs[number]
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines() if line.strip() and "[Gloo]" not in line]
        return " | ".join(lines[-_LAST_LINES:]).replace(str(_ROOT), ".") or "it ended silently"


def _read(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put("")


def _environment(device: str, position: int, environ: Mapping[str, str]) -> dict[str, str]:
    found = dict(environ) | {"PYTHONPATH": os.pathsep.join([str(_ROOT), environ.get("PYTHONPATH", "")])}
    if device == "cpu":
        flags = f"{environ.get('XLA_FLAGS', '')} {_ONE_THREAD} {_PATIENCE}"
        return found | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip(), "OMP_NUM_THREADS": "1"}
    found.pop("JAX_PLATFORMS", None)
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if "," in visible:
        found["CUDA_VISIBLE_DEVICES"] = visible.split(",")[position]
    elif not visible:
        found["CUDA_VISIBLE_DEVICES"] = str(position)
    return found | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}


def interpreter(candidate: Candidate, torch_python: str | None) -> str:
    """The Python that runs a candidate.

    Raises:
        CandidateError: it has no PyTorch.
    """
    if candidate.worker != "torch":
        return sys.executable
    python = torch_python or sys.executable
    asked = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    if asked.returncode:
        raise CandidateError("PyTorch is not installed: pip install 'jshard[peers]', or --torch-python PYTHON")
    return python
