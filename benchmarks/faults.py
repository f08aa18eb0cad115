"""Runs with faults: a run of several local processes, a fault, and its report, as one JSON row each.

    python -m benchmarks.faults stalls --rounds 5 --out stalls.jsonl   # 30 stalls: 3 kinds, 2 and 4 processes
    python -m benchmarks.faults none --rounds 5 --load 4               # 10 runs without a fault, beside busy loops

A row says whether the process and the place were named, after how long, and with which exit code the run ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_MODEL = Path(__file__).with_name("faults_model.py")
_READY_S = 600.0  # for a run to compile on a busy machine
_STEPS = 25  # before the fault: a checkpoint is there
_PROCESSES = (2, 4)


class Run:
    """`jshard train` in several processes on this machine.

    Args:
        folder: for the run and its programs.
        processes: their number.
        options: further command-line options.
    """

    def __init__(self, folder: Path, processes: int, *options: str) -> None:
        self.out, self.sleep = folder / f"run-{time.time_ns()}", folder / f"sleep-{time.time_ns()}"
        kept = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        environ = os.environ | kept | {"JAX_PLATFORMS": "cpu", "SLEEP": str(self.sleep), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "jshard", "train", str(_MODEL), "--out", str(self.out), "--mesh", "fsdp=4"]
        self.process = subprocess.Popen(
            [*command, "--processes", str(processes), *options],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.said: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """Its stderr."""
        return "".join(line for _, line in self.said)

    def step(self) -> int:
        """The last step in its record."""
        with contextlib.suppress(OSError, IndexError, ValueError, KeyError):
            return json.loads((self.out / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return 0

    def reaches(self, step: int) -> None:
        """Waits for a step."""
        until_s = time.monotonic() + _READY_S
        while self.step() < step:
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the run did not reach step {step}:\n{self.text}")
            time.sleep(0.05)

    def worker(self, process: int) -> int:
        """The pid of the process that trains."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        place = f"JAX_PROCESS_ID={process}\0".encode()
        return next(int(pid) for pid in children if place in Path(f"/proc/{pid}/environ").read_bytes())

    def ends(self, within_s: float) -> int | None:
        """Its exit code; None if it is still running."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5)
        return code

    def close(self) -> None:
        """Kills its remaining processes."""
        with contextlib.suppress(ProcessLookupError):
            for pid in (*self._workers(), self.process.pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _workers(self) -> list[int]:
        with contextlib.suppress(OSError):
            return list(
                map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split())
            )
        return []

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append((time.monotonic(), line))


# Faults: what is done to a run, and the words of the report that name it rightly.


def stop(run: Run, process: int) -> str:
    """SIGSTOP."""
    os.kill(run.worker(process), signal.SIGSTOP)
    return r"T \(stopped\)"


def data_worker(run: Run, process: int) -> str:
    """A process that reads samples sleeps."""
    run.sleep.write_text(f"{process} data")
    return r"waiting for data\.[\s\S]*data worker 1 of 1[\s\S]*in fall_asleep"


def main_thread(run: Run, process: int) -> str:
    """The main thread sleeps."""
    run.sleep.write_text(f"{process} main")
    return r"[\s\S]*in fall_asleep[\s\S]*in _sleepy_step_done"


STALLS: dict[str, tuple[Callable[[Run, int], str], tuple[str, ...]]] = {
    "SIGSTOP": (stop, ()),
    "data worker": (data_worker, ("--workers", "1")),
    "main thread": (main_thread, ()),
}


def stalls(folder: Path, rounds: int, deadline_s: float, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each kind of stall, with 2 and 4 processes, in each process in turn."""
    for number in range(rounds):
        for kind, (inject, options) in ((kind, STALLS[kind]) for kind in kinds):
            for processes in _PROCESSES:
                process = number % processes
                run = Run(folder, processes, "--stall-timeout", str(deadline_s), *options)
                try:
                    run.reaches(_STEPS)
                    words, since_s = inject(run, process), time.monotonic()
                    code = run.ends(10 * deadline_s + 60)
                    heads = [at_s for at_s, line in run.said if "is stalled" in line]
                    named = re.search(rf"Process {process} of {processes} is stalled: [\s\S]*{words}", run.text)
                    named_s = heads[0] - since_s if heads else None
                    in_time = named_s is not None and named_s <= 2 * deadline_s
                    yield {
                        "fault": kind,
                        "processes": processes,
                        "process": process,
                        "deadline_s": deadline_s,
                        "named_s": None if named_s is None else round(named_s, 2),
                        "code": code,
                        "right": bool(named) and in_time and code == 75,
                        "report": run.text[-3000:],
                    }
                finally:
                    run.close()


def none(folder: Path, rounds: int, deadline_s: float, *, load: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Runs without a fault, beside busy loops; they are stopped after some time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    try:
        for number in range(rounds * len(_PROCESSES)):
            processes = _PROCESSES[number % len(_PROCESSES)]
            run = Run(folder, processes, "--stall-timeout", str(deadline_s))
            try:
                run.reaches(_STEPS)
                time.sleep(seconds)
                run.process.send_signal(signal.SIGTERM)
                code = run.ends(_READY_S)
                right = code == 75 and "Error" not in run.text
                common = {"fault": "none", "processes": processes, "deadline_s": deadline_s, "steps": run.step()}
                yield {**common, "code": code, "right": right, "report": run.text[-3000:]}
            finally:
                run.close()
    finally:
        for each in busy:
            each.kill()


def main() -> None:
    """Runs the request of the command line, prints a line per run, and appends the rows to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("what", choices=["stalls", "none"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deadline", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--kinds", nargs="+", choices=STALLS, default=list(STALLS), help="of stalls")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="busy loops beside the runs of none")
    parser.add_argument("--seconds", type=float, default=60.0, help="that a run of none trains")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON rows are appended to it")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="jshard-faults-") as folder:
        where = Path(folder)
        found = (
            stalls(where, args.rounds, args.deadline, args.kinds)
            if args.what == "stalls"
            else none(where, args.rounds, args.deadline, load=args.load, seconds=args.seconds)
        )
        for row in found:
            rows.append(row)
            print({name: value for name, value in row.items() if name != "report"}, flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(f"{sum(row['right'] for row in rows)} of {len(rows)} as they should be")


if __name__ == "__main__":
    main()
