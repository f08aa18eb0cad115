"""A run of `jshard train` that is killed after a save, and resumed: its losses, and the seconds of save and restore."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.first_gpu.processes import kill_tree
from benchmarks.first_gpu.worker import Figures, Work
from benchmarks.planned import MODEL
from benchmarks.tables import markdown_table
from jshard._types import Json

_POLL_S = 0.05
_NO_EVALUATION = 100_000  # steps: only the save between them is of interest


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """The run, and when it is killed."""

    recipe: str
    batch: int  # sequences of a step
    settings: Sequence[str]  # others
    save_every: int  # steps

    @property
    def steps_after_save(self) -> int:
        """Returns the steps that are trained twice: far from the next save, so that this one stays the newest."""
        return self.save_every // 2


def _plan(work: Work) -> _Plan:
    if not work.setup.quick:
        settings = ("accumulate=1", "model.scan=true")
        return _Plan(recipe="gpt2_small", batch=work.setup.batch, settings=settings, save_every=50)
    small = ("sequence_length=16", "model.n_layer=1", "model.n_head=2", "model.d_model=16", "model.d_ff=32")
    return _Plan(recipe="tiny", batch=2, settings=small, save_every=400)


class _Run:
    """`jshard train`, as it is started and watched from outside."""

    def __init__(self, plan: _Plan, out: Path) -> None:
        self._plan = plan
        self._out = out

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Starts it; what it prints is part of what this process prints."""
        plan = self._plan
        settings = {
            "batch_size": plan.batch,
            "checkpoint_every": plan.save_every,
            "eval_every": _NO_EVALUATION,
            "eval_sequences": plan.batch,
        }
        words = [sys.executable, "-m", "jshard", "train", MODEL, "--recipe", plan.recipe, "--mesh", "fsdp=1"]
        words += ["--steps", str(_NO_EVALUATION), "--sample-tokens", "0", "--track", "--out", str(self._out)]
        words += ["--compile-cache", str(self._out.parent / "programs")]
        for setting in (*plan.settings, *(f"{name}={value}" for name, value in settings.items())):
            words += ["--set", setting]
        return subprocess.Popen([*words, *options], stdin=subprocess.DEVNULL)

    def steps(self, after: float = 0.0) -> list[Json]:
        """Returns the records of steps that were written after a time."""
        return [record for record in _records(self._out / "metrics.jsonl") if record.get("time", 0.0) > after]

    def operations(self, kind: str) -> list[Json]:
        """Returns the records of complete saves, or restores."""
        history = _records(self._out / "checkpoints" / "history.jsonl")
        return [record for record in history if record["kind"] == kind and record["error"] is None]


def _records(path: Path) -> list[Json]:
    """Returns the records of a file of JSON lines that another process may be writing."""
    records = []
    with contextlib.suppress(OSError, ValueError):  # the last line may not be whole
        for line in path.read_text().splitlines():
            records.append(json.loads(line))
    return records


def measure(work: Work) -> None:
    """Trains until some steps after a save, kills the run, resumes it, and compares the steps that both have done."""
    plan = _plan(work)
    run = _Run(plan, work.folder / "run")
    work.keep(recipe=plan.recipe, settings=[f"batch_size={plan.batch}", *plan.settings])
    process = run.start()
    try:
        saved_step = _wait_for_save(run, plan, process)
    finally:
        kill_tree(process)
    killed_at = time.time()
    first_losses = _losses(run.steps())
    save = run.operations("save")[-1]
    work.keep(saved_step=saved_step, save_s=_seconds(save), save_blocked_s=save["blocked_s"], save_bytes=_bytes(save))

    process = run.start("--resume")
    try:
        again = _wait_for_steps(run, process, killed_at, max(first_losses))
    finally:
        kill_tree(process)
    restore = run.operations("restore")[-1]
    work.keep(
        restored_step=restore["step"],
        restore_s=_seconds(restore),
        restore_bytes=_bytes(restore),
        first_step_s=again[0]["time"] - killed_at,
        **_compared(first_losses, _losses(again)),
    )


def _wait_for_save(run: _Run, plan: _Plan, process: subprocess.Popen[bytes]) -> int:
    """Waits until a save is complete and some steps are done after it; returns its step."""
    while True:
        saves = run.operations("save")
        steps = run.steps()
        if saves and steps and steps[-1]["step"] - saves[-1]["step"] >= plan.steps_after_save:
            return saves[-1]["step"]
        _check(process)


def _wait_for_steps(run: _Run, process: subprocess.Popen[bytes], since: float, last_step: int) -> list[Json]:
    """Waits until the resumed run has done a step; returns what it has written since a time."""
    while True:
        steps = run.steps(since)
        # The history has the restore only with the save that follows it.
        if steps and steps[-1]["step"] >= last_step and run.operations("restore"):
            return steps
        _check(process)


def _check(process: subprocess.Popen[bytes]) -> None:
    """Waits for a moment; there is no other limit than that of the part."""
    time.sleep(_POLL_S)
    if process.poll() is not None:
        raise RuntimeError(f"jshard train has ended with exit code {process.returncode}")


def _losses(steps: Sequence[Json]) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in steps if "loss" in record}


def _compared(first: dict[int, float], again: dict[int, float]) -> dict[str, Json]:
    """Returns how many steps were done by both runs, and how far apart their losses are."""
    both = sorted(first.keys() & again.keys())
    differences = [abs(first[step] - again[step]) for step in both]
    return {
        "compared_steps": len(both),
        "equal_steps": sum(difference == 0 for difference in differences),
        "largest_difference": max(differences, default=None),
    }


def _seconds(operation: Json) -> float:
    """Returns the seconds until the last phase of a save or a restore has ended."""
    return max(end_s for process in operation["processes"] for _, _, end_s in process["phases"])


def _bytes(operation: Json) -> int:
    return sum(process["bytes"] for process in operation["processes"])


# ---- the report


def table(figures: Figures) -> list[str]:
    """Returns the lines of the report."""
    settings = " ".join(f"--set {setting}" for setting in figures.get("settings", []))
    lines = [f"jshard train models/gpt.py --recipe {figures.get('recipe')} {settings}; all figures are measured.", ""]
    rows = []
    if "save_s" in figures:
        rows.append(["save, until it is complete", _amount(figures["save_s"], figures["save_bytes"])])
        rows.append(["of it the step is blocked", f"{figures['save_blocked_s']:.2f} s"])
    if "restore_s" in figures:
        rows.append(["restore", _amount(figures["restore_s"], figures["restore_bytes"])])
        rows.append(["from the kill to the end of the first step", f"{figures['first_step_s']:.1f} s"])
        rows.append(["losses of steps done twice", _verdict(figures)])
    return [*lines, *markdown_table(["", ""], rows)]


def _amount(seconds: float, num_bytes: int) -> str:
    return f"{seconds:.2f} s, {num_bytes / 1e6:,.1f} MB"


def _verdict(figures: Figures) -> str:
    compared = figures["compared_steps"]
    if not compared:
        return "**none to compare**"
    if figures["equal_steps"] == compared:
        return f"equal to the last bit, {compared} of {compared}"
    return (
        f"**{figures['equal_steps']} of {compared} equal to the last bit**,"
        f" the others at most {figures['largest_difference']:.1e} apart"
    )
