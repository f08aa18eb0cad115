"""`audit`: the communication, memory and overlap of a compiled program, compared with its plan."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import AbstractMesh
from rich.console import Group
from rich.text import Text

from jshard._text import folded_names, human_bytes, name_pattern
from jshard.engine.layer_stacks import as_traced
from jshard.engine.mixing import Mixing
from jshard.errors import ShardingError
from jshard.inspect.communication import Difference, differences, without_mixing
from jshard.inspect.hlo import Schedule, Window
from jshard.inspect.hlo.collectives import KINDS
from jshard.inspect.hlo.module import item_bytes
from jshard.inspect.hlo.walk import read_schedule
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.plans.plan import ShardPlan
from jshard.plans.plan import plan as make_plan

_ENTRY = re.compile(r"entry_computation_layout=\{\((.*?)\)->")
_ON_HOST = re.compile(r"(\w+)\[([\d,]*)\]\{[^}]*S\(5\)[^}]*\}")  # XLA's memory space 5 is the host's

_SHOWN = 10
_PER_ITERATION = " +: per iteration of a loop of unknown length."


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledMemory:
    """Bytes on one device, as laid out by the compiler."""

    arguments_bytes: int  # state and batch
    results_bytes: int  # results, most of which reuse an argument's buffer
    shared_bytes: int  # the results that do
    temporaries_bytes: int  # everything between
    peak_bytes: int  # the most at one time
    host_arguments_bytes: int = 0  # arguments in host memory; the figures above are of the device's own memory
    host_results_bytes: int = 0  # results in host memory
    host_temporaries_bytes: int = 0  # everything between, in host memory

    @property
    def host_bytes(self) -> int:
        """The program's host memory; results reuse the buffers of arguments."""
        return max(self.host_arguments_bytes, self.host_results_bytes) + self.host_temporaries_bytes

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "CompiledMemory | None":
        """The compiler's figures for a program; None if it has none."""
        found: Any = compiled.memory_analysis()
        if found is None:
            return None
        memory = cls(
            arguments_bytes=found.argument_size_in_bytes,
            results_bytes=found.output_size_in_bytes,
            shared_bytes=found.alias_size_in_bytes,
            temporaries_bytes=found.temp_size_in_bytes,
            peak_bytes=found.peak_memory_in_bytes,
            host_arguments_bytes=found.host_argument_size_in_bytes,
            host_results_bytes=found.host_output_size_in_bytes,
            host_temporaries_bytes=found.host_temp_size_in_bytes,
        )
        # On some platforms the compiler's peak is not that of the device's own memory.
        temporaries = memory.temporaries_bytes
        standing = memory.arguments_bytes + memory.results_bytes - memory.shared_bytes
        peak = memory.peak_bytes
        if peak - standing <= temporaries / 100:  # XLA:CPU omits the temporaries
            peak = standing + temporaries
        elif memory.host_bytes:  # it includes host memory
            peak = min(peak, standing + temporaries)
        return dataclasses.replace(memory, peak_bytes=peak)


@dataclasses.dataclass(frozen=True)
class TrafficRow:
    """Equal collectives of a program."""

    kind: str  # `all-gather`, `reduce-scatter`, ..
    dtype: str  # on the wire, by HLO's names
    over: tuple[str, ...] | None  # the mesh axes; None if no mesh is known
    group_size: int  # devices of a group
    unit: str | None  # the unit, equal ones of a list folded as `blocks/0..11`; None if unknown
    phase: str | None  # `forward` or `backward`; None if unknown
    in_loop: bool  # they are inside a loop
    windows: tuple[Window, ...]  # the collectives
    mixing: tuple[Mixing, ...] = ()  # the lines that mix examples by them, with the bytes requested in one execution

    @property
    def executions(self) -> int:
        """How often they run in total in one run of the program."""
        return sum(w.executions for w in self.windows)

    @property
    def per_iteration(self) -> bool:
        """Whether some are in a loop of unknown length: those are counted for one iteration."""
        return any(w.per_iteration for w in self.windows)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arrays, over all executions."""
        return sum(w.total_bytes for w in self.windows)

    @property
    def num_async(self) -> int:
        """The number of those during which computation continues."""
        return sum(w.is_async for w in self.windows)

    @property
    def num_overlapped(self) -> int:
        """The number of those with matrix products between start and end."""
        return sum(w.is_overlapped for w in self.windows)

    @property
    def matmuls(self) -> tuple[int, int]:
        """Fewest and most matrix products between start and end."""
        counts = [w.matmuls for w in self.windows]
        return min(counts), max(counts)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        counted = {"executions": self.executions, "total_bytes": self.total_bytes}
        counted |= {"per_iteration": True} if self.per_iteration else {}
        if self.mixing:
            lines = [{"where": m.where, "operation": m.operation, "kind": m.kind} for m in self.mixing]
            names = ("dtype", "over", "group_size", "phase")
            return {"lines": lines, "collective": self.kind, **{name: getattr(self, name) for name in names}, **counted}
        names = "kind", "dtype", "over", "group_size", "unit", "phase", "in_loop"
        fields = {name: getattr(self, name) for name in (*names, *counted, "num_async", "num_overlapped", "matmuls")}
        return {**fields, "instructions": len(self.windows)}


@dataclasses.dataclass(frozen=True)
class Total:
    """All collectives of one kind."""

    kind: str
    total_bytes: int  # bytes of the whole arrays, over all executions, in the dtypes on the wire
    elements: int  # numbers of elements over all executions, whatever their dtype


def _rows_of(windows: Iterable[Window]) -> tuple[TrafficRow, ...]:
    """The collectives, equal ones grouped, the largest first: by unit, or by the lines of the model."""
    alike: dict[Any, list[Window]] = {}
    for w in windows:
        whose = w.mixing or (bool(w.loop), frozenset(name_pattern(unit)[0] for unit in w.units))
        alike.setdefault((whose, w.kind, w.dtype, w.axes, len(w.group), w.phase), []).append(w)
    rows = []
    for (_, kind, dtype, axes, group_size, phase), found in alike.items():
        unit = ", ".join(folded_names(sorted({unit for w in found for unit in w.units}))) or None
        first = found[0]
        rows.append(
            TrafficRow(kind, dtype, axes, group_size, unit, phase, bool(first.loop), tuple(found), first.mixing)
        )
    return tuple(sorted(rows, key=lambda row: -row.total_bytes))


def _total_of(kind: str, windows: Iterable[Window]) -> Total:
    chosen = [w for w in windows if w.kind == kind]
    sizes = [(size * w.executions, item_bytes(dtype)) for w in chosen for dtype, size in w.sizes]
    return Total(kind, sum(size for size, _ in sizes), round(sum(size / item for size, item in sizes)))


@dataclasses.dataclass(frozen=True, repr=False)
class Audit(Printed):
    """The result of `js.audit`. `print` it; a notebook displays it; `to_json` is for programs."""

    schedule: Schedule  # the collectives and the steps of the program
    plan: ShardPlan | None = None  # of the model; None if none was given
    memory: CompiledMemory | None = None  # of one device; None if only a text was given
    differences: tuple[Difference, ...] = ()  # between program and plan; empty without a plan
    notes: tuple[Difference, ...] = ()  # differences from the plan that are specific to XLA:CPU

    @property
    def ok(self) -> bool:
        """Whether the program communicates as planned, except for differences specific to XLA:CPU: see `notes`."""
        return not self.differences

    @property
    def rows(self) -> tuple[TrafficRow, ...]:
        """The collectives except those of the model's own mixing, equal ones grouped, the largest first."""
        return _rows_of(self._others)

    @property
    def mixing(self) -> tuple[TrafficRow, ...]:
        """The collectives of lines of the model that mix examples, the largest first."""
        return _rows_of(without_mixing(self.schedule.windows)[1])

    @functools.cached_property
    def _others(self) -> list[Window]:
        return without_mixing(self.schedule.windows)[0]

    @property
    def totals(self) -> tuple[Total, ...]:
        """The totals by kind, without the model's own mixing."""
        kinds = {w.kind for w in self._others}
        return tuple(_total_of(kind, self._others) for kind in KINDS if kind in kinds)

    def amount(self, kind: str) -> float:
        """Elements sent by a kind such as `all-gather`, divided by the number of parameters: 2.0 is each one twice.

        Parameters that are never gathered, and elements of the model's own mixing, are excluded.
        """
        if self.plan is None:
            raise ShardingError(
                "The audit has no plan.",
                where=f"amount({kind!r})",
                why="the ratio needs the number of parameters, which a program does not contain.",
                do="js.audit(program, model=model)",
            )
        return _total_of(kind, self._others).elements / self.plan.gathered_part.num_parameters

    def not_overlapped(self, *, in_loops: bool = True, at_least_bytes: int = 0) -> tuple[Window, ...]:
        """The collectives that block, or overlap with no matrix product.

        Args:
            in_loops: only those inside loops.
            at_least_bytes: only those whose whole arrays are at least this large.
        """
        return self.schedule.not_overlapped(in_loops=in_loops, at_least_bytes=at_least_bytes)

    def __rich__(self) -> Group:
        parts: list[Any] = [Text(_headline(self)), Text(), _collectives_table(self)]
        if self.mixing:
            parts += [Text(), _mixing_table(self.mixing)]
        if self.memory is not None:
            parts += [Text(), _memory_table(self.memory)]
        return Group(*parts, Text(), *map(Text, _closing_lines(self)))

    def to_json(self) -> str:
        """Everything as JSON text."""
        memory = None if self.memory is None else dataclasses.asdict(self.memory)
        whole = {
            "num_devices": self.schedule.num_devices,
            "flops_per_device": self.schedule.flops,
            "parameter_bytes": None if self.plan is None else self.plan.logical_bytes,
            "num_parameters": None if self.plan is None else self.plan.num_parameters,
            "collectives": [row.to_dict() for row in self.rows],
            "mixing": [row.to_dict() for row in self.mixing],
            "totals": [dataclasses.asdict(total) for total in self.totals],
            "not_overlapped_in_loops": [w.name for w in self.not_overlapped()],
            "memory_per_device": memory,
            "differences": [dataclasses.asdict(d) for d in self.differences],
            "kernels": [dataclasses.asdict(use) for use in self.schedule.kernels],
            "notes": [*self.schedule.notes, *map(str, self.notes)],
            "ok": self.ok,
        }
        return json.dumps(whole, indent=1)


def audit(
    program: Any,
    *,
    model: nnx.Module | nn.Module | None = None,
    plan: ShardPlan | None = None,
    memory: CompiledMemory | None = None,
    accumulate: int = 1,
    sync: str = "each",
) -> Audit:
    """Reads a compiled train step: its collectives, their overlap, its memory, and its differences from the plan.

    Args:
        program: the result of `jax.jit(step).lower(...)` or its `compile()`, or the text of a compiled program.
        model: the annotated model, concrete or abstract, to compare with.
        plan: its plan.
        memory: bytes of one device, for a program that is given as text.
        accumulate: as in `js.value_and_grad`; the plan is multiplied by it.
        sync: as in `js.value_and_grad`.

    Returns:
        An `Audit`: print it, show it in a notebook, take its JSON, or look at `differences`.

    Raises:
        ProgramError: the program has communication that cannot be interpreted, or none at all.

    Example:
        >>> lowered = nnx.jit(nnx.value_and_grad(loss_fn)).lower(model, x).lowered
        >>> print(js.audit(lowered, model=model))
    """
    if isinstance(program, jax.stages.Lowered):
        program = program.compile()
    if memory is None and isinstance(program, jax.stages.Compiled):
        memory = CompiledMemory.of(program)
    if plan is None and model is not None:
        plan = as_traced(make_plan(model))
    mesh = None if plan is None else AbstractMesh(tuple(n for _, n in plan.mesh), tuple(a for a, _ in plan.mesh))
    schedule = read_schedule(program, mesh=mesh, expect_collectives=True)
    on_cpu = isinstance(program, jax.stages.Compiled) and _platform(program) == "cpu"
    found = ()
    if plan is not None:
        found = differences(schedule.windows, plan, accumulate=accumulate, sync=sync, on_cpu=on_cpu)
    if plan is not None and any(leaf.placement.on_host for leaf in plan.leaves):
        found += _host_differences(program if isinstance(program, str) else program.as_text() or "", plan)
    notes = tuple(d for d in found if d.by_cpu)
    return Audit(schedule, plan, memory, tuple(d for d in found if not d.by_cpu), notes)


def _host_differences(text: str, plan: ShardPlan) -> tuple[Difference, ...]:
    """Differences where parameters planned in host memory are not among the program's arguments there."""
    planned = sum(leaf.placement.bytes_per_device for leaf in plan.leaves if leaf.placement.on_host)
    layout = _ENTRY.search(text)
    arrays = _ON_HOST.findall(layout[1]) if layout else []
    compiled = sum(math.prod(int(n) for n in dims.split(",") if n) * round(item_bytes(d)) for d, dims in arrays)
    if compiled >= planned:
        return ()
    words = (
        f"{human_bytes(planned)} of parameters are planned in host memory; {human_bytes(compiled)} of arguments are."
    )
    return (Difference(words, None, None, ()),)


def _platform(program: jax.stages.Compiled) -> str | None:
    """The platform that a program was compiled for; None if it has no arguments that show it."""
    devices = (d for sharding in jax.tree.leaves(program.input_shardings) for d in sharding.device_set)
    return next((d.platform for d in devices), None)


def _headline(found: Audit) -> str:
    schedule = found.schedule
    overlapped = sum(w.is_overlapped for w in schedule.windows)
    text = (
        f"Compiled for {schedule.num_devices} devices: {len(schedule.windows)} collectives in the text,"
        f" {sum(w.is_async for w in schedule.windows)} async, {overlapped} with matrix products between start and end"
    )
    if schedule.in_loops:
        blocked = len(found.not_overlapped())
        text += f"; in loops {len(schedule.in_loops)}, {len(schedule.in_loops) - blocked} with matrix products"
    return text


def _collectives_table(found: Audit) -> FittedTable:
    plan = found.plan
    caption = "runs: instructions, and executions with loops counted. arrays: whole ones, in the dtype on the wire."
    caption += _PER_ITERATION * any(row.per_iteration for row in found.rows)
    columns = ["collective", "over", "dtype??", "unit", "runs>?", "arrays>", "async>", "matmuls>"]
    if plan is not None:
        which = "" if plan.gathered_part.leaves == plan.leaves else " that are gathered"
        caption += f" copies: elements by the number of parameters{which}."
        columns.insert(6, "copies>")
    table = made_table("Collectives of one device (compiled)", *columns, caption=caption)
    for row in found.rows:
        unit = "-" if row.unit is None else f"{row.unit} {row.phase or ''}".rstrip()
        runs = str(len(row.windows)) if row.executions == len(row.windows) else f"{len(row.windows)}: {row.executions}"
        runs += "+" * row.per_iteration
        cells = [row.kind, _over(row), row.dtype, unit, runs, human_bytes(row.total_bytes)]
        if plan is not None:
            cells.append(_copies(_total_of(row.kind, row.windows).elements, plan))
        fewest, most = row.matmuls
        cells += [f"{row.num_async} of {len(row.windows)}", str(most) if fewest == most else f"{fewest}..{most}"]
        add_row(table, *cells)
    for total in found.totals:
        cells = [f"total {total.kind}", "", "", "", "", human_bytes(total.total_bytes)]
        cells += [_copies(total.elements, plan)] if plan is not None else []
        add_row(table, *cells, "", "", style="bold")
    return table


def _mixing_table(rows: Iterable[TrafficRow]) -> FittedTable:
    columns = "line", "operation", "collective", "over?", "phase??", "runs>?", "arrays>"
    rows = tuple(rows)
    caption = "In these lines the model uses other examples of its batch. A compiler may join several lines."
    caption += _PER_ITERATION * any(row.per_iteration for row in rows)
    table = made_table("Collectives of the model's own mixing of examples (compiled)", *columns, caption=caption)
    for row in rows:
        lines = [list(dict.fromkeys(texts)) for texts in zip(*((m.line, m.operation) for m in row.mixing), strict=True)]
        counts = str(row.executions) + "+" * row.per_iteration, human_bytes(row.total_bytes)
        add_row(table, *lines, row.kind, _over(row), row.phase or "-", *counts)
    return table


def _over(row: TrafficRow) -> str:
    return f"{', '.join(row.over)} ({row.group_size})" if row.over else f"({row.group_size})"


def _copies(elements: float, plan: ShardPlan) -> str:
    return f"{elements / (plan.gathered_part.num_parameters or 1):.2f}"


def _memory_table(memory: CompiledMemory) -> FittedTable:
    caption = "peak: the most in use at once, by the compiler; other rows: all that it reserves."
    below = memory.peak_bytes < memory.arguments_bytes + memory.temporaries_bytes
    table = made_table("Memory of one device (compiled)", "", "bytes>", caption=caption * below)
    add_row(table, "arguments: state and batch", human_bytes(memory.arguments_bytes))
    add_row(table, "results that reuse no argument's buffer", human_bytes(memory.results_bytes - memory.shared_bytes))
    add_row(table, "temporaries", human_bytes(memory.temporaries_bytes))
    add_row(table, "peak", human_bytes(memory.peak_bytes), style="bold", end_section=bool(memory.host_bytes))
    if memory.host_bytes:
        add_row(table, "in host memory: arguments", human_bytes(memory.host_arguments_bytes))
        add_row(table, "in host memory: temporaries", human_bytes(memory.host_temporaries_bytes))
    return table


def _closing_lines(found: Audit) -> list[str]:
    lines = [f"Kernels: {', '.join(map(str, found.schedule.kernels))}."] if found.schedule.kernels else []
    lines += [f"Not counted: {note}" for note in found.schedule.notes]
    exposed = sorted(found.not_overlapped(), key=lambda w: -w.full_bytes * w.executions)
    if not any(w.is_async for w in found.schedule.windows):
        lines.append("Every collective blocks: nothing is computed meanwhile, as on CPU.")
    elif exposed:
        lines.append("In loops, blocking or overlapped by no matrix product:")
        how = {True: "async", False: "blocking"}
        lines += [f"  {w.kind} {w.name}, {human_bytes(w.full_bytes)}, {how[w.is_async]}" for w in exposed[:_SHOWN]]
        lines += [f"  ... and {len(exposed) - _SHOWN} more"] if len(exposed) > _SHOWN else []
    if found.plan is None:
        return [*lines, "There is no plan to compare with."]
    if found.notes:
        lines += ["Differs from the plan on CPU only:", *(f"  {d}" for d in found.notes)]
    if found.ok:
        return [*lines, "Communicates as planned."]
    return [*lines, "Differs from the plan:", *(f"  {d}" for d in found.differences)]
