"""Saves and restores side by side: jshard, Orbax with its defaults, PyTorch's distributed checkpoints, and plain files.

Every library has one process, or two, for a whole row; in each round they take turns in shuffled order, one at a time.
All of them fsync. The first turn is not counted. Cold: the pages of the checkpoint's files were released before
(`posix_fadvise`: other programs keep theirs), and the bytes then read from the disk are shown. Fast libraries use the
time that their rounds need, and slow ones share the rest of the row's time: one that has used up its share drops out of
further rounds, and its number of rounds is shown. PyTorch takes part if it is installed (extra `peers`), or with
`--torch-python`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.step.summary import Spread
from benchmarks.tables import markdown_table

TITLE = "Saving and restoring a checkpoint"
MEASURES_TIME = True

_WORKER = Path(__file__).with_name("checkpoint_worker.py")
_LIBRARIES = ("plain", "Orbax", "PyTorch DCP", "jshard")
_STATES = {  # two arrays a layer, but for the last
    "2MB": {"layers": 24, "kernel": (128, 160), "bias": True},
    "202MB": {"layers": 24, "kernel": (1024, 2048), "bias": True},
    "806MB": {"layers": 24, "kernel": (4096, 2048), "bias": True},
    "10k": {"layers": 10_000, "kernel": (8, 16), "bias": False},
}
_ROWS = (*_STATES, "once", "memory", "index")
_SHARES = {"2MB": 1, "202MB": 4, "806MB": 12, "10k": 12, "once": 1, "memory": 1, "index": 1}  # of the time
_INDEX = {"leaves": 10_000, "writers": 512}
_OPERATIONS = ("save", "load", "cold load", "resharded", "unverified", "mapped", "cold mapped", "asynchronous")
_SHARDS_KIB = (64, 256, 1024, 4096, 16384, 65536)
_LONGEST_S = 300.0  # of one operation

Answer = dict[str, Any]


def arguments(parser: Any) -> None:
    """The options of a run."""
    words = lambda text: text.split(",")
    parser.add_argument("--rows", type=words, default=list(_ROWS), metavar="ROW,...", help=f"of {','.join(_ROWS)}")
    parser.add_argument("--libraries", type=words, default=list(_LIBRARIES), metavar="NAME,...")
    parser.add_argument("--processes", type=lambda text: [int(n) for n in words(text)], default=[1, 2], metavar="N,...")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=14.0, help="for all rows together")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PYTHON", help="the one that has PyTorch")
    parser.add_argument(
        "--disk", type=Path, default=Path.home(), metavar="DIR", help="where the checkpoints are written"
    )


def run(
    *,
    quick: bool,
    rows: Sequence[str] = _ROWS,
    libraries: Sequence[str] = _LIBRARIES,
    processes: Sequence[int] = (1, 2),
    rounds: int = 7,
    minutes: float = 14.0,
    torch_python: str = sys.executable,
    disk: Path | None = None,
) -> dict[str, Any]:
    """The cost of every operation in every round, by row, number of processes and library."""
    has_torch = torch_python != sys.executable or importlib.util.find_spec("torch") is not None
    chosen = [name for name in libraries if name != "PyTorch DCP" or has_torch]
    found: dict[str, Any] = {"states": {}, "read_once": [], "memory": [], "index": {}, "worker_versions": {}}
    share_s = 60 * minutes / sum(_SHARES[row] for row in rows)
    with tempfile.TemporaryDirectory(dir=disk or Path.home(), prefix=".jshard-benchmark-") as place:
        turns = _Turns(Path(place), torch_python)
        for row in rows:
            limit_s = share_s * _SHARES[row]
            if row == "once":
                found["read_once"] = turns.read_once(_SHARDS_KIB[:2] if quick else _SHARDS_KIB)
            elif row == "memory":
                found["memory"] = turns.memory(_STATES["2MB" if quick else "202MB"], 3 if quick else 20)
            elif row == "index":
                found["index"] = turns.index(_INDEX | ({"writers": 8} if quick else {}), rounds)
            else:
                for count in processes:
                    asked = (_STATES[row], count, chosen, 1 if quick else rounds, limit_s / len(processes))
                    found["states"][f"{row}, {count}"] = turns.side_by_side(*asked)
            print("\n".join([f"after {row}:", *table(found)]), file=sys.stderr, flush=True)  # if the rest never ends
        found["worker_versions"] |= turns.versions
    return found


class _Turns:
    """Libraries that take turns on one disk."""

    def __init__(self, place: Path, torch_python: str) -> None:
        self._folder, self._torch_python = place / "c", torch_python
        self.versions: dict[str, str] = {}

    def side_by_side(
        self, state: Mapping[str, Any], processes: int, libraries: Sequence[str], rounds: int, limit_s: float
    ) -> dict[str, Any]:
        found: dict[str, Any] = {name: {"first": {}, "rounds": [], "stopped": None} for name in libraries}
        spent_s, share_s = dict.fromkeys(libraries, 0.0), dict.fromkeys(libraries, limit_s / len(libraries))
        with contextlib.ExitStack() as alive:
            workers = {n: alive.enter_context(self._workers(n, state, processes)) for n in libraries}
            for number in range(rounds + 1):
                for name in random.Random(number).sample(list(libraries), len(libraries)):
                    of, begin_s = found[name], time.monotonic()
                    if of["stopped"] or (number and spent_s[name] * (number + 1) / number > share_s[name]):
                        of["stopped"] = of["stopped"] or f"{len(of['rounds'])} rounds in {spent_s[name]:.0f} s"
                        continue
                    turn = self._turn(workers[name], share_s[name] - spent_s[name], number)
                    spent_s[name] += time.monotonic() - begin_s
                    if number:
                        of["rounds"].append(turn)
                    else:
                        of["first"] = turn
                    of["stopped"] = next((answer["error"] for answer in turn.values() if "error" in answer), None)
                if not number:
                    share_s = _shares(spent_s, limit_s, rounds + 1)
        return found

    def _turn(self, workers: _Workers, left_s: float, number: int) -> dict[str, Answer]:
        """All operations of a library once, reads in the order of the turn, or as many as the time allows."""
        found: dict[str, Answer] = {}
        end_s = time.monotonic() + max(left_s, 0.0)
        self._clear()
        first, *reads, last = _OPERATIONS
        for name in (first, *(random.Random(number).sample(reads, len(reads)) if number else reads), last):
            plain_name = name.removeprefix("cold ")
            if plain_name not in workers.operations or (len(found) > 1 and time.monotonic() > end_s):
                continue
            if name == "asynchronous":
                self._clear()
            elif name != plain_name:
                _give_back(self._folder)
            found[name] = workers.ask(plain_name)
            if "error" in found[name]:
                break
        self._clear()
        return found

    def read_once(self, shards_kib: Sequence[int]) -> list[dict[str, Any]]:
        """Bytes that each of two processes reads of arrays that both hold whole, and once."""
        found = []
        for kib in shards_kib:
            state = {
                "layers": max(1, (32 << 10) // (4 * kib)),
                "kernel": (4 * kib, 256),
                "bias": False,
                "mesh": "copies",
            }
            row: dict[str, Any] = {"shard_kib": kib, "state_bytes": state["layers"] * 4 * kib * 1024}
            with self._workers("jshard", state, 2) as workers:
                self._clear()
                workers.ask("save")
                for _ in range(2):  # the first one is not counted
                    for name in ("copies", "copies, read once"):
                        row[name] = workers.ask(name)
            self._clear()
            found.append(row)
        return found

    def memory(self, state: Mapping[str, Any], rounds: int) -> list[int]:
        """Bytes of memory of a process after each save and load."""
        found = []
        with self._workers("jshard", state, 1) as workers:
            for _ in range(rounds):
                self._clear()
                workers.ask("save")
                found.append(workers.ask("load").get("rss_bytes", 0))
        self._clear()
        return found

    def index(self, asked: Mapping[str, Any], rounds: int) -> dict[str, Any]:
        """The cost of opening a checkpoint written by many processes."""
        with self._workers("index", asked, 1) as workers:
            answers = [workers.ask("open") for _ in range(rounds)]
        self._clear()
        return {**asked, "rounds": answers}

    @contextlib.contextmanager
    def _workers(self, library: str, state: Mapping[str, Any], processes: int) -> Iterator[_Workers]:
        python = self._torch_python if library == "PyTorch DCP" else sys.executable
        asked = {"library": library, "folder": str(self._folder), "processes": processes, "mesh": "all", **state}
        workers = _Workers(python, asked | {"coordinator": f"localhost:{_free_port()}"})
        try:
            self.versions |= workers.start()
            yield workers
        finally:
            workers.close()

    def _clear(self) -> None:
        """Removes the old files, and waits until the disk has written everything."""
        for path in self._folder.parent.glob("c*"):
            shutil.rmtree(path)
        os.sync()


def _shares(first_s: Mapping[str, float], limit_s: float, turns: int) -> dict[str, float]:
    """The time limit of each library, by its first turn: slow ones receive the time that fast ones do not need."""
    found, left_s = {}, limit_s
    for done, name in enumerate(sorted(first_s, key=lambda name: first_s[name])):
        found[name] = left_s / (len(first_s) - done)
        left_s -= min(found[name], first_s[name] * turns)
    return found


class _Workers:
    """The processes of a library, which do the same at the same time."""

    def __init__(self, python: str, asked: Mapping[str, Any]) -> None:
        commands = [[python, str(_WORKER), json.dumps({**asked, "process": n})] for n in range(asked["processes"])]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._processes = [subprocess.Popen(command, **pipes) for command in commands]
        self._answers: list[queue.Queue[str]] = [queue.Queue() for _ in commands]
        for process, answers in zip(self._processes, self._answers, strict=True):
            threading.Thread(target=_listen, args=(process, answers), daemon=True).start()
        self.library, self.operations = asked["library"], []

    def start(self) -> dict[str, str]:
        """Waits until they have their state; returns the versions of their packages."""
        answer = self._hear()
        if "error" in answer:
            raise RuntimeError(f"{self.library} did not start: {answer['error']}; its messages are above")
        self.operations = answer["operations"]
        return answer["versions"]

    def ask(self, operation: str) -> Answer:
        """The cost of an operation: the wall-clock seconds of the slowest process, and the sums of all else."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                print(operation, file=process.stdin)
        return self._hear()

    def _hear(self) -> Answer:
        end_s, answers = time.monotonic() + _LONGEST_S, []
        for each in self._answers:
            try:
                answers.append(json.loads(each.get(timeout=max(0.0, end_s - time.monotonic()))))
            except queue.Empty:
                return {"error": f"more than {_LONGEST_S:.0f} s"}
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            return {"error": errors[0]}
        if "operations" in answers[0]:
            return answers[0]
        most = {name: max(a[name] for a in answers) for name in ("wall_s", "blocked_s") if name in answers[0]}
        total = {name: sum(a[name] for a in answers) for name in ("cpu_s", "disk_bytes", "rss_bytes")}
        return most | total | {"read_bytes": [a["read_bytes"] for a in answers]}

    def close(self) -> None:
        """Ends them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def _listen(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put(json.dumps({"error": "it ended"}))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _give_back(folder: Path) -> None:
    """Drops the cached pages of all files of a folder, so that the next read is from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # pages that are not written stay
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# The tables.


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report from several runs, each of some rows or libraries; the later run replaces equal entries."""
    reports = sorted(reports, key=lambda report: report["date"])
    whole = dict(reports[-1]) | {"states": {}}
    for report in reports:
        for row, libraries in report["states"].items():
            whole["states"][row] = whole["states"].get(row, {}) | libraries
    for name in ("read_once", "memory", "index"):
        whole[name] = next((report[name] for report in reversed(reports) if report.get(name)), whole.get(name))
    whole["versions"] = {name: version for report in reports for name, version in report["versions"].items()}
    whole["load_per_core_before"] = max(report["load_per_core_before"] for report in reports)
    return whole


def table(result: dict[str, Any]) -> list[str]:
    """Medians with the range, and the results for the goals."""
    lines = [
        "2MB, 202MB and 806MB have 48 arrays, 10k 10,000 of 512 bytes; float32. Seconds: median (least to most), and",
        "CPU seconds of all processes. `resharded`: saved by 8 devices along dim 0, loaded by 4 (2 processes: 8) along",
        "both; PyTorch: along dim 1. `first load`: the one that is not counted. plain: one file a process, one fsync.",
        "",
    ]
    for row, libraries in result["states"].items():
        lines += [f"## {row} {'process' if row.endswith(' 1') else 'processes'}", "", *_row_table(libraries), ""]
        lines += [*_bytes_table(libraries), ""]
    goals = [line for row, libraries in result["states"].items() for line in _goals(row, libraries)]
    if goals:
        lines += [
            "## Goals",
            "",
            *markdown_table(["row", "ratio of medians", "goal", "wall", "CPU"], goals, num_words=3),
        ]
    lines += ["", *_once_table(result["read_once"]), *_memory_lines(result["memory"])]
    return [*lines, *_index_lines(result.get("index", {}))]


def _row_table(libraries: Mapping[str, Any]) -> list[str]:
    asked = [name for name in _OPERATIONS if any(_times(of, name) for of in libraries.values())]
    rows = []
    for library, of in libraries.items():
        first = of["first"].get("load", {}).get("wall_s")
        cells = [_cell(of, name) for name in asked]
        rows.append([library, str(len(of["rounds"])), "" if first is None else f"{first:.2f}", *cells])
    lines = markdown_table(["", "rounds", "first load", *asked], rows)
    stopped = [f"{library}: {of['stopped']}." for library, of in libraries.items() if of["stopped"]]
    return [*lines, *([""] if stopped else []), *stopped]


def _bytes_table(libraries: Mapping[str, Any]) -> list[str]:
    """The bytes that each process reads, and the part of a cold load that came from the disk."""
    mega = lambda values: " / ".join(f"{value / 1e6:.1f}" for value in values)
    rows = []
    for library, of in libraries.items():
        answers = [turn for turn in of["rounds"][-1:] or [of["first"]] if "error" not in turn.get("load", {})]
        cells = [mega(turn.get(name, {}).get("read_bytes", ())) for turn in answers for name in ("load", "resharded")]
        disk = [mega([turn["cold load"].get("disk_bytes", 0)]) for turn in answers if "cold load" in turn]
        rows.append([library, *(cells or ["", ""]), *(disk or [""])])
    return markdown_table(["MB read by each process", "load", "resharded", "from the disk, cold"], rows)


def _times(of: Mapping[str, Any], operation: str, field: str = "wall_s") -> list[float]:
    """The values of all rounds; of the first turn if there was no time for another."""
    answers = [turn.get(operation, {}) for turn in of["rounds"] or [of["first"]]]
    return [answer[field] for answer in answers if field in answer]


def _cell(of: Mapping[str, Any], operation: str) -> str:
    wall, cpu = _times(of, operation), _times(of, operation, "cpu_s")
    form = ".2f" if wall and statistics.median(wall) >= 0.2 else ".3f"
    return f"{Spread.of(wall).text(form)}, {statistics.median(cpu):{form}}" if wall else ""


def _goals(row: str, libraries: Mapping[str, Any]) -> Iterator[list[str]]:
    """Ratios beside their goals; above one is better if the goal is a minimum."""
    large = row.startswith(("202", "806"))
    wanted = [
        ("save, Orbax / jshard", "Orbax", "save", "jshard", "save", ">= 3"),
        ("save, DCP / jshard", "PyTorch DCP", "save", "jshard", "save", "> 1"),
        ("save, jshard / plain", "jshard", "save", "plain", "save", "<= 1.15" if large else ""),
        ("load, Orbax / jshard", "Orbax", "load", "jshard", "load", ">= 2"),
        ("load, DCP / jshard", "PyTorch DCP", "load", "jshard", "load", ">= 1"),
        ("cold load, Orbax / jshard", "Orbax", "cold load", "jshard", "cold load", ">= 2"),
        ("cold load, DCP / jshard", "PyTorch DCP", "cold load", "jshard", "cold load", ">= 1"),
        ("resharded / same mesh", "jshard", "resharded", "jshard", "load", "<= 1.5"),
        ("verified / unverified", "jshard", "load", "jshard", "unverified", "<= 1.10"),
        ("mapped load, Orbax / jshard", "Orbax", "load", "jshard", "mapped", ""),
    ]
    for what, above, operation, below, other, goal in wanted:
        found = [
            (_times(libraries.get(above, _NONE), operation, field), _times(libraries.get(below, _NONE), other, field))
            for field in ("wall_s", "cpu_s")
        ]
        if all(all(pair) for pair in found):
            yield [row, what, goal, *(f"{statistics.median(a) / statistics.median(b):.2f}" for a, b in found)]
    of = libraries.get("jshard", _NONE)
    if blocked := _times(of, "asynchronous", "blocked_s"):
        share = statistics.median(blocked) / statistics.median(_times(of, "asynchronous"))
        yield [row, "blocked / asynchronous save", "<= 0.05" if large else "", f"{share:.3f}", ""]


_NONE: dict[str, Any] = {"first": {}, "rounds": []}


def _once_table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    if not found:
        return []
    mega = lambda answer: " / ".join(f"{count / 1e6:.1f}" for count in answer.get("read_bytes", ()))
    seconds = lambda answer: f"{answer['wall_s']:.2f}" if "wall_s" in answer else answer.get("error", "")
    rows = []
    for row in found:
        whole, once = row["copies"], row["copies, read once"]
        share = max(once["read_bytes"]) / max(whole["read_bytes"]) if "read_bytes" in once else float("nan")
        cells = [f"{row['shard_kib']} KiB", f"{row['state_bytes'] / 1e6:.0f}", mega(whole), mega(once), f"{share:.2f}"]
        rows.append([*cells, seconds(whole), seconds(once)])
    head = ["shards of", "state, MB", "MB read by each", "read once", "share (goal 0.5)", "s", "s, read once"]
    title = "HSDP: two processes that hold all of it each; bytes as the kernel counts them (`rchar`)."
    return ["## Read once", "", title, "", *markdown_table(head, rows), ""]


def _memory_lines(found: Sequence[int]) -> list[str]:
    if not found:
        return []
    shown = ", ".join(f"{number / 1e6:.0f}" for number in found)
    return ["## Memory", "", f"MB of the process after each of {len(found)} saves and loads of 202 MB: {shown}.", ""]


def _index_lines(found: Mapping[str, Any]) -> list[str]:
    answers = [answer for answer in found.get("rounds", ()) if "error" not in answer]
    if not answers:
        return []
    wall, cpu = ([answer[name] for answer in answers] for name in ("wall_s", "cpu_s"))
    what = f"A checkpoint of {found['leaves']} leaves that {found['writers']} processes wrote opens in"
    read = f"{answers[0]['read_bytes'][0] / 1e6:.0f} MB of manifest and indexes are read"
    return [
        "## Index",
        "",
        f"{what} {Spread.of(wall).text('.2f')} s, {statistics.median(cpu):.2f} s of CPU (goal 1);",
        f"{read}, and memory is {answers[-1]['rss_bytes'] / 1e6:.0f} MB afterwards.",
        "",
    ]
