"""Measures a group of settings side by side: every round times each of them once, so that clocks change for all."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import jax

from benchmarks.overlap.grid import COLLECTIVE_BYTES, DOT, Group, Setting
from benchmarks.overlap.programs import MOST_ERROR, wrong_result
from benchmarks.overlap.records import Row
from jshard.errors import FourPartError

ROUNDS = 9
_SIZING = 3  # times from which the size of the half load is taken


@dataclasses.dataclass(frozen=True)
class Load:
    """What is moved beside a product."""

    kind: str  # the collective: "all-reduce", "all-gather"; "copies" where a kernel stands for one
    name: str  # "half", as long as half of XLA's dot takes, or "full", 896 MB
    num_bytes: int  # that it moves

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclasses.dataclass(frozen=True)
class Beside:
    """One time of both; the other fields as in `records.Row`, None where the blocks are not recorded."""

    both_ms: float
    waited_ms: float | None = None
    span_ms: float | None = None
    comm_sms: int | None = None


def measure(bench: Any, group: Group, *, rounds: int = ROUNDS) -> tuple[tuple[Row, ...], dict[str, str]]:
    """Medians of a group, and why settings could not run."""
    errors: dict[Setting, float] = {}
    failed: dict[str, str] = {}
    for setting in group.settings:
        try:
            errors[setting] = bench.prepare(group.size, setting)
            if not errors[setting] <= MOST_ERROR:
                raise wrong_result(setting.described, errors.pop(setting))
        except (FourPartError, jax.errors.JaxRuntimeError) as error:
            if setting.form == DOT:
                raise
            failed[f"{group.size.name}/{setting.described}"] = next(iter(str(error).splitlines()), type(error).__name__)
    loads = _loads(bench, group.settings[0])
    comp: dict[Setting, list[float]] = {}
    comm: dict[Load, list[float]] = {}
    both: dict[tuple[Setting, Load, str], list[Beside]] = {}
    for _ in range(rounds):
        for load in loads:
            comm.setdefault(load, []).append(bench.load_ms(load))
        for setting in errors:
            comp.setdefault(setting, []).append(bench.compute_ms(setting))
            for load in loads:
                for mode, found in _together(bench, setting, load):
                    both.setdefault((setting, load, mode), []).append(found)
    rows = tuple(
        _row(group, setting, load, mode, comp[setting], comm[load], found, errors[setting])
        for (setting, load, mode), found in both.items()
    )
    return rows, failed


def mode_of(setting: Setting, priority: str) -> str:
    """The name of a mode."""
    return ("shaped" if setting.is_shaped else "baseline") + (" + priority" if priority == "high" else "")


def _loads(bench: Any, dot: Setting) -> list[Load]:
    """Of each kind the whole collective, and as much of it as takes half as long as XLA's dot."""
    found = []
    median = lambda time: statistics.median(time() for _ in range(_SIZING))
    dot_ms = median(lambda: bench.compute_ms(dot))
    for kind in bench.kinds:
        full = Load(kind, "full", COLLECTIVE_BYTES)
        full_ms = median(lambda full=full: bench.load_ms(full))
        found += [Load(kind, "half", round(COLLECTIVE_BYTES * dot_ms / 2 / full_ms)), full]
    return found


def _together(bench: Any, setting: Setting, load: Load) -> list[tuple[str, Beside]]:
    found = [(mode_of(setting, priority), bench.both(setting, load, priority)) for priority in bench.priorities]
    if not setting.is_shaped:
        found.insert(0, ("sequential", Beside(bench.sequential_ms(setting, load))))
    return found


def _row(
    group: Group,
    setting: Setting,
    load: Load,
    mode: str,
    comp: list[float],
    comm: list[float],
    found: list[Beside],
    error: float,
) -> Row:
    times = [one.both_ms for one in found]
    middle = sorted(found, key=lambda one: one.both_ms)[len(found) // 2]  # its blocks are reported
    return Row(
        **vars(setting),
        group=group.name,
        load=str(load),
        load_bytes=load.num_bytes,
        mode=mode,
        comp_ms=statistics.median(comp),
        comm_ms=statistics.median(comm),
        both_ms=statistics.median(times),
        least_ms=min(times),
        most_ms=max(times),
        relative_error=error,
        waited_ms=middle.waited_ms,
        span_ms=middle.span_ms,
        comm_sms=middle.comm_sms,
    )
