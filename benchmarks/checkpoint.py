"""Saves and restores side by side: jshard, Orbax as it is, PyTorch's distributed checkpoints, and plain files.

The same 0.8 GB of random float32, in fresh processes each round, in turn and in shuffled order. Every process saves and
loads once without being counted. All of them fsync. PyTorch takes part where it is installed (extra `peers`).
"""

from __future__ import annotations

import importlib.util
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.step.summary import Spread
from benchmarks.tables import markdown_table

TITLE = "Saving and restoring a checkpoint"
MEASURES_TIME = True

_WORKER = Path(__file__).with_name("checkpoint_worker.py")
_OPERATIONS = ("save", "load", "resharded", "copies", "copies, read once", "blocked", "asynchronous")
_ONCE = "copies, read once"
_ROUNDS = 5


def run(*, quick: bool) -> dict[str, Any]:
    """Seconds of every operation in every round, by library and number of processes."""
    size = {"layers": 2, "rows": 256} if quick else {"layers": 24, "rows": 4096}
    variants = [("raw", 1), ("jshard", 1), ("jshard, no sums", 1), ("Orbax", 1), ("jshard", 2), ("Orbax", 2)]
    if importlib.util.find_spec("torch") is not None:
        variants.append(("dcp", 2))
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix=".jshard-benchmark-") as folder:
        for number in range(1 if quick else _ROUNDS):
            for library, processes in random.Random(number).sample(variants, len(variants)):
                times = _round(library, processes, Path(folder) / "c", size)
                rows = found.setdefault(f"{library}, {processes}", {name: [] for name in _OPERATIONS})
                for name, seconds in times.items():
                    rows[name].append(seconds)
    return {"size": size, "seconds": found}


def table(result: dict[str, Any]) -> list[str]:
    """Medians with the range, and what the goals come to."""
    size, found = result["size"], result["seconds"]
    num_bytes = size["layers"] * (size["rows"] + 1) * 2048 * 4
    text = [
        f"{num_bytes / 1e6:.0f} MB in {2 * size['layers']} arrays; seconds, median of "
        f"{len(next(iter(found.values()))['save'])} (least to most).",
        "`resharded`: saved by 8 devices along dim 0, loaded by 4 (2 processes: 8) along both; PyTorch: along dim 1.",
        "`copies`: two processes hold all of it each (HSDP); `read once`: each reads half, and they exchange.",
        "",
    ]
    head = ["library, processes", *_OPERATIONS]
    rows = [
        [
            name.replace("dcp", "PyTorch DCP").replace("raw", "plain files"),
            *map(_cell, map(found[name].get, _OPERATIONS)),
        ]
        for name in sorted(found)
    ]
    return [*text, *markdown_table(head, rows, num_words=len(head)), "", *_goals(found)]


def _goals(found: dict[str, Any]) -> list[str]:
    """The figures that were aimed at, and those that were reached."""

    def median(name: str, operation: str) -> float | None:
        times = found.get(name, {}).get(operation)
        return statistics.median(times) if times else None

    wanted = [
        ("save, beside Orbax as it is", "Orbax, 1", "save", "jshard, 1", "save", ">= 3"),
        ("save, 2 processes, beside Orbax as it is", "Orbax, 2", "save", "jshard, 2", "save", ">= 3"),
        ("load, beside Orbax as it is", "Orbax, 1", "load", "jshard, 1", "load", ">= 2"),
        ("load, 2 processes, beside Orbax as it is", "Orbax, 2", "load", "jshard, 2", "load", ">= 2"),
        ("save, 2 processes, beside PyTorch DCP", "dcp, 2", "save", "jshard, 2", "save", "> 1"),
        ("load, 2 processes, beside PyTorch DCP", "dcp, 2", "load", "jshard, 2", "load", ">= 1"),
        ("save over plain files with fsync", "jshard, 1", "save", "raw, 1", "save", "<= 1.1"),
        ("resharded load over the same mesh", "jshard, 1", "resharded", "jshard, 1", "load", "<= 1.2"),
        ("resharded load over the same mesh, 2 processes", "jshard, 2", "resharded", "jshard, 2", "load", "<= 1.2"),
        ("blocked over the whole asynchronous save", "jshard, 1", "blocked", "jshard, 1", "asynchronous", "<= 0.05"),
        ("blocked, 2 processes", "jshard, 2", "blocked", "jshard, 2", "asynchronous", "<= 0.05"),
        ("save with sums over without", "jshard, 1", "save", "jshard, no sums, 1", "save", "<= 1.1"),
        ("two copies, each read whole, over read once and exchanged", "jshard, 2", "copies", "jshard, 2", _ONCE, ""),
        ("load with sums over without", "jshard, 1", "load", "jshard, no sums, 1", "load", "<= 1.1"),
    ]
    rows = []
    for what, above, operation, below, other, goal in wanted:
        first, second = median(above, operation), median(below, other)
        if first is not None and second is not None:
            rows.append([what, goal, f"{first / second:.2f}"])
    return markdown_table(["ratio of medians", "goal", "reached"], rows, num_words=3)


def _cell(seconds: list[float]) -> str:
    return Spread.of(seconds).text(".2f") if seconds else ""


def _round(library: str, processes: int, folder: Path, size: dict[str, int]) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    asked = {"library": library, "folder": str(folder), "processes": processes, "coordinator": coordinator, **size}
    commands = [[sys.executable, str(_WORKER), json.dumps(asked | {"process": n})] for n in range(processes)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    output = [process.communicate(timeout=600)[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError(f"{library} with {processes} processes failed; its messages are above")
    return json.loads(output[0].splitlines()[-1])
