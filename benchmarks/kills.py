"""Runs under faults: each continues by itself, with the same numbers as an undisturbed run.

    python -m benchmarks.kills kills --times 30       # kill -9 of a worker, of process 0's, of a supervisor, on fewer
    python -m benchmarks.kills kills --no-cache      # the same, and every restart compiles
    python -m benchmarks.kills kills --keep-in-memory 2   # the same, with copies in memory every other step
    python -m benchmarks.kills ettr --minutes 20     # a fault a minute: measured ETTR against the formula

Everything runs on this machine: processes with a supervisor each represent nodes, and a loop that restarts a killed
supervisor represents a kubelet.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown_table
from jshard.checkpoint.series.ettr import ettr as expected_ettr

_LIMIT_S = 900.0
_CHECKPOINT_EVERY = 8
_SETTINGS = (
    f"checkpoint_every={_CHECKPOINT_EVERY}",
    "eval_every=16",
    "eval_sequences=12",
    "batch_size=12",
    "model.dropout=0.1",
)
_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of kill: the run, and the process that is killed."""

    processes: int  # of the run
    is_cluster: bool = False  # a supervisor for each
    process: int  # the one that is hit
    hits: str = "worker"  # "worker" or "supervisor"
    comes_back: bool = True  # whether its supervisor is started again
    is_equal: bool = True  # whether the mesh stays, and so every bit


KINDS = {
    "one process": Kind(processes=1, process=0),
    "worker 1 of 2": Kind(processes=2, process=1),
    "worker 0 of 2": Kind(processes=2, process=0),
    "cluster: worker 1": Kind(processes=2, is_cluster=True, process=1),
    "cluster: supervisor 1": Kind(processes=2, is_cluster=True, process=1, hits="supervisor"),
    "cluster: supervisor 0": Kind(processes=2, is_cluster=True, process=0, hits="supervisor"),
    "fewer: without 2": Kind(
        processes=3, is_cluster=True, process=2, hits="supervisor", comes_back=False, is_equal=False
    ),
    "fewer: without 0": Kind(
        processes=3, is_cluster=True, process=0, hits="supervisor", comes_back=False, is_equal=False
    ),
}


class Job:
    """`jshard train` with its supervisors, on this machine.

    Args:
        out: the folder of the run.
        kind: the number of processes, and whether each has a supervisor.
        steps: steps of the run.
        options: further options.
    """

    def __init__(self, out: Path, kind: Kind, *, steps: int, options: Sequence[str] = ()) -> None:
        self.out, self.kind = out, kind
        settings = [f"--set={setting}" for setting in _SETTINGS]
        mesh = f"fsdp={2 * kind.processes}"
        self._command = [sys.executable, "-m", "jshard", "train", "gpt", "--recipe", "tiny", "--out", str(out)]
        self._command += ["--steps", str(steps), "--mesh", mesh, "--track", "--sample-tokens", "0", *settings, *options]
        if not kind.is_cluster and kind.processes > 1:
            self._command += ["--processes", str(kind.processes)]
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            self._ports = one.getsockname()[1], other.getsockname()[1]
        self._log = out.with_suffix(".log").open("a")
        self._supervisors: dict[int, subprocess.Popen[bytes]] = {}
        for process in range(kind.processes if kind.is_cluster else 1):
            self.start(process)

    def start(self, process: int) -> None:
        """Starts a supervisor, like a launcher."""
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
        if self.kind.is_cluster:
            environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{self._ports[0]}"
            environ["JSHARD_ROLL_CALL_PORT"] = str(self._ports[1])
            environ |= {"JAX_NUM_PROCESSES": str(self.kind.processes), "JAX_PROCESS_ID": str(process)}
        self._supervisors[process] = subprocess.Popen(
            self._command, env=environ, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def kill(self, process: int, hits: str, *, comes_back: bool) -> float:
        """Kills a worker or a supervisor; returns the time."""
        supervisor = self._supervisors[process if self.kind.is_cluster else 0]
        if hits == "worker":
            os.kill(_workers(supervisor.pid)[process if not self.kind.is_cluster else 0], signal.SIGKILL)
            return time.time()
        supervisor.kill()
        at = time.time()
        supervisor.wait()
        del self._supervisors[process]
        if comes_back:
            self.start(process)
        return at

    def waits_for(self, step: int) -> None:
        """Returns once a step is in the record."""
        _until(lambda: (_lines(self.out) or [{"step": 0}])[-1]["step"] >= step or not self.is_alive)

    def stop(self) -> None:
        """Asks all supervisors to stop."""
        for supervisor in self._supervisors.values():
            supervisor.send_signal(signal.SIGTERM)

    @property
    def is_alive(self) -> bool:
        """Whether a supervisor is running."""
        return any(supervisor.poll() is None for supervisor in self._supervisors.values())

    def ends(self) -> list[int]:
        """The exit codes."""
        try:
            _until(lambda: not self.is_alive)
        finally:
            for supervisor in self._supervisors.values():
                supervisor.kill()
            self._log.close()
        return [supervisor.wait() for supervisor in self._supervisors.values()]


def _workers(supervisor: int) -> list[int]:
    """The pids of a supervisor's workers, by process id."""
    found = {}
    for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        if (match := re.search(rb"JAX_PROCESS_ID=(\d+)", environ)) and b"JSHARD_WORKER=1" in environ:
            found[int(match[1])] = int(pid)
    return [found[process] for process in sorted(found)]


def _lines(out: Path) -> list[dict[str, Any]]:
    try:
        text = (out / "metrics.jsonl").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _losses(out: Path) -> list[tuple[int, float | None, float | None]]:
    return [(line["step"], line.get("loss"), line.get("val_loss")) for line in _lines(out)]


def _until(condition: Any) -> None:
    end = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the run does not go on")
        time.sleep(0.05)


# Kills.


def kills(
    *, times: int, steps: int, kinds: Iterable[str], options: Sequence[str], folder: Path
) -> list[dict[str, Any]]:
    """Kills a process in several runs, each at a different step; returns the result of each."""
    rows, plain = [], {}
    names = list(kinds)
    for number in range(times):
        name = names[number % len(names)]
        kind = KINDS[name]
        key = kind.processes, kind.is_cluster
        if key not in plain:
            out = folder / f"plain-{kind.processes}-{'cluster' if kind.is_cluster else 'local'}"
            job = Job(out, kind, steps=steps)
            plain[key] = out if job.ends() == [0] * len(job._supervisors) else None
        row = _kill(name, kind, plain[key], folder / f"{number}", steps=steps, options=options)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _kill(
    name: str, kind: Kind, plain: Path | None, out: Path, *, steps: int, options: Sequence[str]
) -> dict[str, Any]:
    options = ["--max-restarts", "3", *options]
    if not kind.comes_back:
        options += ["--min-processes", str(kind.processes - 1)]
    job = Job(out, kind, steps=steps, options=options)
    at_step = random.Random(str(out)).randint(4, steps - 8)
    job.waits_for(at_step)
    at = job.kill(kind.process, kind.hits, comes_back=kind.comes_back)
    codes = job.ends()
    now = [line["time"] for line in _lines(out) if line["time"] > at + 1.0]
    expected, found = _losses(plain) if plain is not None else [], _losses(out)
    far = max((_far(a, b) for a, b in zip(expected, found, strict=False)), default=float("inf"))
    attempts = json.loads((out / "run.json").read_text())["attempts"]
    return {
        "kind": name,
        "at_step": at_step,
        "codes": codes,
        "to_next_step_s": round(min(now) - at, 1) if now else None,
        "steps_lost": sum(one.get("steps_lost", 0) for one in attempts),
        "from_memory": "resumed from the copy in memory" in out.with_suffix(".log").read_text(),
        "attempts": len(attempts),
        "each_step_once": [line[0] for line in expected] == [line[0] for line in found],
        "far": far,
        "good": set(codes) == {0} and len(expected) == len(found) and far <= (0.0 if kind.is_equal else _TOLERANCE),
    }


def _far(expected: tuple[Any, ...], found: tuple[Any, ...]) -> float:
    pairs = [(a, b) for a, b in zip(expected[1:], found[1:], strict=True) if a is not None and b is not None]
    same = expected[0] == found[0]
    return max((abs(a - b) / max(abs(a), 1e-9) for a, b in pairs), default=0.0) if same else float("inf")


# The effective training time ratio.


def ettr(*, minutes: float, every_s: float, folder: Path) -> dict[str, Any]:
    """A fault per interval, for some minutes; returns the measured ratio and the expected one.

    Each occurs at a random moment of its interval. At regular times the faults would always hit the same place between
    two checkpoints, because the restarts and the intervals are regular, too.
    """
    out, kind = folder / "ettr", Kind(processes=2, process=0)
    job, pick = Job(out, kind, steps=10**6, options=["--max-restarts", "1000"]), random.Random(0)
    job.waits_for(1)
    begin, kills_at = time.monotonic(), []
    for span in range(int(60 * minutes / every_s)):
        time.sleep(max(0.0, begin + every_s * (span + pick.random()) - time.monotonic()))
        try:
            kills_at.append(job.kill(pick.randrange(2), "worker", comes_back=True))
        except (IndexError, ProcessLookupError):  # the workers are between two attempts: that fault hits nothing
            continue
    time.sleep(max(0.0, begin + 60 * minutes - time.monotonic()))
    job.stop()
    codes = job.ends()
    record = json.loads((out / "run.json").read_text())
    attempts = record["attempts"]
    time_of = lambda text: datetime.datetime.fromisoformat(text).timestamp()
    readies = [time_of(one["ready"]) for one in attempts if one["ready"]]
    wall_s = time_of(attempts[-1]["end"]) - readies[0]  # the formula knows of no first start
    start_s = readies[0] - time_of(attempts[0]["begin"])
    # From the first fault in an attempt to the next one that was ready; further faults before that are a part of it.
    firsts = [
        (min((at for at in kills_at if at > before), default=ready), ready) for before, ready in pairwise(readies)
    ]
    lost = [ready - at for at, ready in firsts if at < ready]
    intervals_s = _intervals(_lines(out), [one for one in attempts if one["ready"]], time_of)
    saved = [json.loads(line) for line in (out / "checkpoints" / "history.jsonl").read_text().splitlines()]
    saves_s = [max(one["phases"][-1][2] for one in save["processes"]) for save in saved if save["kind"] == "save"]
    known = {
        # What a fault meets: more often a long one than a short one, as on a machine whose load changes.
        "interval_s": sum(each**2 for each in intervals_s) / sum(intervals_s),
        "stall_s": 0.0,  # what a save holds up is a part of the interval, here and in run.json
        "save_s": statistics.mean(saves_s),
        "load_s": statistics.mean(lost),
        "mtbf_s": wall_s / len(lost),
    }
    return {
        "codes": codes,
        "faults": len(lost),
        "attempts": len(attempts),
        "wall_s": round(wall_s, 1),
        "steps_lost": sum(one.get("steps_lost", 0) for one in attempts),
        "start_s": round(start_s, 1),
        **{name: round(value, 2) for name, value in known.items()},
        "seconds_lost": round(sum(one.get("seconds_lost", 0.0) for one in attempts), 1),
        "in_run_json": round(record["ettr"], 4),
        "measured": round(record["ettr"] * (wall_s + start_s) / wall_s, 4),
        "expected": round(expected_ettr(**known), 4),
    }


def _intervals(
    lines: Sequence[dict[str, Any]], attempts: Sequence[dict[str, Any]], time_of: Callable[[str], float]
) -> list[float]:
    """Seconds between counted checkpoints, or from the moment that an attempt was ready."""
    at = {line["step"]: line["time"] for line in lines}
    found = []
    for one in attempts:
        saved = range(one["first_step"] + _CHECKPOINT_EVERY, one["last_step"] + 1, _CHECKPOINT_EVERY)
        found += [after - before for before, after in pairwise([time_of(one["ready"]), *(at[step] for step in saved)])]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 if a run did not continue as expected."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=["kills", "ettr"])
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument("--keep-in-memory", metavar="STEPS")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="jshard-faults-"))
    try:
        if args.case == "ettr":
            print(json.dumps(ettr(minutes=args.minutes, every_s=args.every, folder=folder), indent=2))
            return 0
        options = ["--compile-cache", "none"] if args.no_cache else []
        options += ["--keep-in-memory", args.keep_in_memory] if args.keep_in_memory else []
        rows = kills(times=args.times, steps=args.steps, kinds=args.kinds, options=options, folder=folder)
        shown = ("kind", "at_step", "to_next_step_s", "steps_lost", "from_memory", "each_step_once", "far", "good")
        print(*markdown_table(shown, [[str(row[name]) for name in shown] for row in rows]), sep="\n")
        return 0 if all(row["good"] for row in rows) else 1
    finally:
        if os.environ.get("JSHARD_DEBUG", "") in ("", "0"):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
