"""The side of a worker: one process of one framework, that trains when it is described to.

A worker is started with a `Task` as JSON and writes lines of JSON: it says what it is once its step is compiled and has
run, and answers {"first": n, "warm": m, "steps": k} with the times of k steps, after m that are not timed. The end of
its input ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.step.sizes import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a worker has to do."""

    sizes: Sizes  # of the model
    options: dict[str, Any]  # of the candidate, e.g. {"engine": "jshard", "scan": True}.
    device: str  # "cpu" or "gpu"
    process: int  # of `processes`
    processes: int  # that train together
    address: str  # "host:port" where they meet; "" for one that trains alone, on the batch of its process

    @classmethod
    def of(cls, text: str) -> Task:
        """From the JSON of `text`."""
        given = json.loads(text)
        return cls(**given | {"sizes": Sizes(**given["sizes"])})

    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))


class Trainer(Protocol):
    """A model, its optimizer and its step, in one framework."""

    def load(self, steps: range) -> None:
        """Puts the batches of these steps on the device."""

    def start(self, step: int) -> None:
        """Starts a step, and may return before it is done."""

    def wait(self) -> None:
        """Until all that was started is done."""

    def scalars(self) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of the steps since the last call."""

    def facts(self) -> dict[str, Any]:
        """Device, versions, seconds of compilation, bytes."""

    def peak_bytes(self) -> int | None:
        """The most device memory since the process began; None where it cannot be described."""


def main(build: Callable[[Task], Trainer]) -> None:
    """Runs a worker until its input ends."""
    task = Task.of(sys.argv[1])
    say = _speaker()
    if task.device == "cpu" and hasattr(os, "SCHED_BATCH"):
        # A thread of gloo would else take the core from the one that holds its lock, and spin until the next tick of
        # the kernel: measured on two cores, up to 4 ms for a small all-reduce, which otherwise takes 0.2.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    trainer = build(task)
    first = _round(trainer, range(1))  # compiles what is compiled at the first call
    _forget_peak()
    say(trainer.facts() | first)
    for line in sys.stdin:
        asked = json.loads(line)
        first = asked["first"] + asked["warm"]
        warm = _round(trainer, range(asked["first"], first))
        timed = _round(trainer, range(first, first + asked["steps"]))
        say(timed | {name: warm[name] + timed[name] for name in ("losses", "grad_norms")})
    sys.stderr.flush()
    os._exit(0)  # the others may be gone: no library is asked to say goodbye


def _round(trainer: Trainer, steps: range) -> dict[str, Any]:
    trainer.load(steps)
    host_s, begin, cpu_begin = [], time.perf_counter(), time.process_time()
    for step in steps:
        before = time.thread_time()
        trainer.start(step)
        host_s.append(time.thread_time() - before)
    trainer.wait()
    step_s = (time.perf_counter() - begin) / len(steps)
    cpu_s = (time.process_time() - cpu_begin) / len(steps)
    losses, norms = trainer.scalars()
    return {
        "step_s": step_s,
        "cpu_s": cpu_s,
        "host_s": min(host_s),
        "losses": losses,
        "grad_norms": norms,
        "rss_bytes": _peak_rss_bytes(),
        "peak_bytes": trainer.peak_bytes(),
    }


def _speaker() -> Callable[[dict[str, Any]], None]:
    """Answers go to what was stdout; what libraries print there goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    return say


def _forget_peak() -> None:
    """From here on the peak is that of training: not of imports, initial weights and compilers."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak_rss_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
