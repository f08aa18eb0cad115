"""Runs under faults: each goes on by itself, with the numbers of a run that was left alone.

    python -m benchmarks.kills --times 30       # kill -9 of a worker, of process 0's, of a supervisor
    python -m benchmarks.kills --no-cache      # the same, and every restart compiles

Everything runs on this machine: processes with a supervisor each stand for nodes, and a loop that starts a killed
supervisor again for a kubelet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown_table

_LIMIT_S = 900.0
_CHECKPOINT_EVERY = 8
_SETTINGS = (
    f"checkpoint_every={_CHECKPOINT_EVERY}",
    "eval_every=16",
    "eval_sequences=12",
    "batch_size=12",
    "model.dropout=0.1",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of kill: which run, and what is killed of it."""

    processes: int  # of the run
    is_cluster: bool = False  # a supervisor for each
    process: int  # the one that is hit
    hits: str = "worker"  # "worker" or "supervisor"


KINDS = {
    "one process": Kind(processes=1, process=0),
    "worker 1 of 2": Kind(processes=2, process=1),
    "worker 0 of 2": Kind(processes=2, process=0),
    "cluster: worker 1": Kind(processes=2, is_cluster=True, process=1),
    "cluster: supervisor 1": Kind(processes=2, is_cluster=True, process=1, hits="supervisor"),
    "cluster: supervisor 0": Kind(processes=2, is_cluster=True, process=0, hits="supervisor"),
}


class Job:
    """`jshard train` with its supervisors, on this machine.

    Args:
        out: the folder of the run.
        kind: how many processes, and whether each has a supervisor.
        steps: of the run.
        options: further ones.
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
        """Starts a supervisor, as a launcher does."""
        environ = {**os.environ, "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
        if self.kind.is_cluster:
            environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{self._ports[0]}"
            environ["JSHARD_ROLL_CALL_PORT"] = str(self._ports[1])
            environ |= {"JAX_NUM_PROCESSES": str(self.kind.processes), "JAX_PROCESS_ID": str(process)}
        self._supervisors[process] = subprocess.Popen(
            self._command, env=environ, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def kill(self, process: int, hits: str) -> float:
        """Kills a worker, or a supervisor, which a launcher then starts again; when."""
        supervisor = self._supervisors[process if self.kind.is_cluster else 0]
        if hits == "worker":
            os.kill(_workers(supervisor.pid)[process if not self.kind.is_cluster else 0], signal.SIGKILL)
            return time.time()
        supervisor.kill()
        at = time.time()
        supervisor.wait()
        self.start(process)
        return at

    def waits_for(self, step: int) -> None:
        """Returns once a step is in the record."""
        _until(lambda: (_lines(self.out) or [{"step": 0}])[-1]["step"] >= step or not self.is_alive)

    @property
    def is_alive(self) -> bool:
        """Whether a supervisor is at work."""
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
    """The pids of the workers that a supervisor has started, by process id."""
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
    """Kills something in so many runs, each at a step of its own; what came of each."""
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
    job = Job(out, kind, steps=steps, options=options)
    at_step = random.Random(str(out)).randint(4, steps - 8)
    job.waits_for(at_step)
    at = job.kill(kind.process, kind.hits)
    codes = job.ends()
    now = [line["time"] for line in _lines(out) if line["time"] > at + 1.0]
    expected, found = _losses(plain) if plain is not None else [], _losses(out)
    far = max((_far(a, b) for a, b in zip(expected, found, strict=False)), default=float("inf"))
    starts = json.loads((out / "run.json").read_text())["starts"]
    return {
        "kind": name,
        "at_step": at_step,
        "codes": codes,
        "to_next_step_s": round(min(now) - at, 1) if now else None,
        "steps_lost": at_step - starts[-1]["step"],
        "attempts": len(starts),
        "each_step_once": [line[0] for line in expected] == [line[0] for line in found],
        "far": far,
        "good": set(codes) == {0} and len(expected) == len(found) and far == 0.0,
    }


def _far(expected: tuple[Any, ...], found: tuple[Any, ...]) -> float:
    pairs = [(a, b) for a, b in zip(expected[1:], found[1:], strict=True) if a is not None and b is not None]
    same = expected[0] == found[0]
    return max((abs(a - b) / max(abs(a), 1e-9) for a, b in pairs), default=0.0) if same else float("inf")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 if a run did not go on as it should."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--no-cache", action="store_true")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="jshard-faults-"))
    try:
        options = ["--compile-cache", "none"] if args.no_cache else []
        rows = kills(times=args.times, steps=args.steps, kinds=args.kinds, options=options, folder=folder)
        shown = ("kind", "at_step", "to_next_step_s", "steps_lost", "each_step_once", "far", "good")
        print(*markdown_table(shown, [[str(row[name]) for name in shown] for row in rows]), sep="\n")
        return 0 if all(row["good"] for row in rows) else 1
    finally:
        if os.environ.get("JSHARD_DEBUG", "") in ("", "0"):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
