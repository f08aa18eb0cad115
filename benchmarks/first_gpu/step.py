"""A training step of jshard beside raw Flax's and the unsharded one: the benchmark `step`, with one process."""

from __future__ import annotations

import dataclasses
import time

from benchmarks.first_gpu.worker import Figures, Work
from benchmarks.step import candidates, report
from benchmarks.step.case import result_of
from benchmarks.step.place import place_of
from benchmarks.step.session import Session
from benchmarks.step.sizes import SIZES

_SCAN = ("jshard scan", "raw Flax scan", "JAX scan")  # layers in a loop: soon compiled
_ROUNDS = 5
_STEPS = 10
_QUICK_ROUNDS = 1
_QUICK_STEPS = 2
_LONGER = 1.3  # than the longest round so far: what the next one may take


def measure(work: Work) -> None:
    """Measures rounds as long as the next one has time."""
    quick = work.setup.quick
    sizes = SIZES["quick" if quick else "gpt2_small"]
    session = Session(
        sizes=sizes if quick else dataclasses.replace(sizes, batch=work.setup.batch),
        place=place_of(1),
        device=work.setup.device,
        rounds=_QUICK_ROUNDS if quick else _ROUNDS,
        steps=_QUICK_STEPS if quick else _STEPS,
        alive=False,  # one state after another has the memory
    )
    names = list(_SCAN)
    longest_s = 0.0
    begin_s = time.monotonic()
    for measured in session.growing(candidates.chosen(",".join(names), deep=False)):
        # A candidate that could not run is not among them, and is tried once: its reason is in the figures.
        work.keep(result=result_of(session, measured), left_out=measured["left_out"])
        num_rounds = _num_rounds(measured["candidates"])
        if len(measured["candidates"]) + len(measured["left_out"]) < len(names):
            continue
        longest_s = max(longest_s, time.monotonic() - begin_s)
        begin_s = time.monotonic()
        if num_rounds < session.rounds and work.left_s < _LONGER * longest_s:
            print(f"{num_rounds} of {session.rounds} rounds: the next one has no time", flush=True)
            return


def _num_rounds(rows: dict[str, dict]) -> int:
    """Returns how often each candidate had its turn."""
    return min((len(row["processes"]["0"]["rounds"]) for row in rows.values()), default=0)


def table(figures: Figures) -> list[str]:
    """Returns the lines of the report."""
    if "result" not in figures:
        return []
    result = figures["result"]
    rounds = _num_rounds(result["candidates"])
    # What could not run is listed by the report of all parts.
    return [
        f"Measured, but for what is called compiled. {rounds} of {result['rounds']} rounds had time.",
        "",
        *report.table({**result, "left_out": {}}),
    ]
