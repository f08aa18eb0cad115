"""`audit`: the communication, memory and overlap of a compiled program, compared with its plan."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import AbstractMesh
from rich.console import Group, RenderableType
from rich.text import Text

from jshard._text import human_bytes
from jshard.engine.layer_stacks import as_traced
from jshard.errors import ShardingError
from jshard.inspect.communication import CPU, TPU, Difference, differences, without_mixing
from jshard.inspect.compiled_traffic import Total, TrafficRow, rows_of, total_of
from jshard.inspect.hlo import Schedule, Window
from jshard.inspect.hlo.collectives import KINDS
from jshard.inspect.hlo.module import item_bytes
from jshard.inspect.hlo.walk import CompiledProgram, read_schedule
from jshard.inspect.memory import parameter_bytes
from jshard.inspect.tables import FittedTable, Printed, add_row, dicts_of, made_table
from jshard.plans.plan import ShardPlan
from jshard.plans.plan import plan as make_plan

# The layouts of the program's arguments.
_ENTRY = re.compile(r"entry_computation_layout=\{\((.*?)\)->")
_ON_HOST = re.compile(r"(\w+)\[([\d,]*)\]\{[^}]*S\(5\)[^}]*\}")  # XLA's memory space 5 is the host's

_TILES_OF_TPU = ":T("  # in the layouts of arrays: only a TPU's are tiled

_SHOWN = 10  # exposed collectives in a report


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
        """Returns the compiler's figures for a program; None if it has none."""
        analysis: Any = compiled.memory_analysis()  # JAX declares no type: it depends on the backend
        if analysis is None:
            return None
        memory = cls(
            arguments_bytes=analysis.argument_size_in_bytes,
            results_bytes=analysis.output_size_in_bytes,
            shared_bytes=analysis.alias_size_in_bytes,
            temporaries_bytes=analysis.temp_size_in_bytes,
            peak_bytes=analysis.peak_memory_in_bytes,
            host_arguments_bytes=analysis.host_argument_size_in_bytes,
            host_results_bytes=analysis.host_output_size_in_bytes,
            host_temporaries_bytes=analysis.host_temp_size_in_bytes,
        )
        return dataclasses.replace(memory, peak_bytes=memory._peak_on_device())

    def _peak_on_device(self) -> int:
        """Returns the peak of the device's own memory, which on some platforms is not the compiler's."""
        standing = self.arguments_bytes + self.results_bytes - self.shared_bytes
        if self.peak_bytes - standing <= self.temporaries_bytes / 100:  # XLA:CPU omits the temporaries
            return standing + self.temporaries_bytes
        if self.host_bytes:  # the compiler's peak includes host memory
            return min(self.peak_bytes, standing + self.temporaries_bytes)
        return self.peak_bytes


@dataclasses.dataclass(frozen=True, repr=False)
class Audit(Printed):
    """The result of `js.audit`. `print` it; a notebook displays it; `to_json` is for programs."""

    schedule: Schedule  # the collectives and the steps of the program
    plan: ShardPlan | None = None  # of the model; None if none was given
    memory: CompiledMemory | None = None  # of one device; None if only a text was given
    differences: tuple[Difference, ...] = ()  # between program and plan; empty without a plan
    # Differences from the plan that the compiler is known for: XLA:CPU, or that of TPUs.
    notes: tuple[Difference, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the program communicates as planned, except for known forms of its compiler: see `notes`."""
        return not self.differences

    @property
    def rows(self) -> tuple[TrafficRow, ...]:
        """The collectives except those of the model's own mixing, equal ones grouped, the largest first."""
        return rows_of(self._others)

    @property
    def mixing(self) -> tuple[TrafficRow, ...]:
        """The collectives of lines of the model that mix examples, the largest first."""
        _, of_mixing = without_mixing(self.schedule.windows)
        return rows_of(of_mixing)

    @functools.cached_property
    def _others(self) -> list[Window]:
        others, _ = without_mixing(self.schedule.windows)
        return others

    @property
    def totals(self) -> tuple[Total, ...]:
        """The totals by kind, without the model's own mixing."""
        kinds = {window.kind for window in self._others}
        return tuple(total_of(kind, self._others) for kind in KINDS if kind in kinds)

    def amount(self, kind: str) -> float:
        """Returns the elements sent by a kind such as `all-gather` per parameter: 2.0 is each one twice.

        Parameters that are never gathered, and elements of the model's own mixing, are excluded.
        """
        if self.plan is None:
            raise ShardingError(
                "The audit has no plan.",
                where=f"amount({kind!r})",
                why="the ratio needs the number of parameters, which a program does not contain.",
                do="js.audit(program, model=model)",
            )
        return total_of(kind, self._others).elements / self.plan.gathered_part.num_parameters

    def not_overlapped(self, *, in_loops: bool = True, at_least_bytes: int = 0) -> tuple[Window, ...]:
        """Returns the collectives that block, or overlap with no matrix product.

        Args:
            in_loops: only those inside loops.
            at_least_bytes: only those whose whole arrays are at least this large.
        """
        return self.schedule.not_overlapped(in_loops=in_loops, at_least_bytes=at_least_bytes)

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [Text(_headline(self)), Text(), _collectives_table(self)]
        if self.mixing:
            parts += [Text(), _mixing_table(self.mixing)]
        if self.memory is not None:
            parts += [Text(), _memory_table(self.memory)]
        return Group(*parts, Text(), *map(Text, _closing_lines(self)))

    def to_json(self) -> str:
        """Returns everything as JSON text."""
        values = {
            "num_devices": self.schedule.num_devices,
            "flops_per_device": self.schedule.flops,
            "parameter_bytes": None if self.plan is None else self.plan.logical_bytes,
            "num_parameters": None if self.plan is None else self.plan.num_parameters,
            "collectives": [row.to_dict() for row in self.rows],
            "mixing": [row.to_dict() for row in self.mixing],
            "totals": dicts_of(self.totals),
            "not_overlapped_in_loops": [window.name for window in self.not_overlapped()],
            "memory_per_device": None if self.memory is None else dataclasses.asdict(self.memory),
            "differences": dicts_of(self.differences),
            "kernels": dicts_of(self.schedule.kernels),
            "notes": [*self.schedule.notes, *map(str, self.notes)],
            "ok": self.ok,
        }
        return json.dumps(values, indent=1)


def audit(
    program: CompiledProgram | jax.stages.Lowered,
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
        sync: as in `js.value_and_grad`; with `"none"` no gradient is expected to be reduced.

    Returns:
        An `Audit`: print it, show it in a notebook, take its JSON, or look at `differences`.

    Raises:
        ProgramError: the program has communication that cannot be interpreted, or none at all.

    Examples:
        >>> lowered = nnx.jit(nnx.value_and_grad(loss_fn)).lower(model, x).lowered
        >>> print(js.audit(lowered, model=model))
    """
    if isinstance(program, jax.stages.Lowered):
        program = program.compile()
    if memory is None and isinstance(program, jax.stages.Compiled):  # a text has no figures of memory
        memory = CompiledMemory.of(program)
    if plan is None and model is not None:
        plan = as_traced(make_plan(model))
    if plan is None:
        return Audit(read_schedule(program, expect_collectives=True), memory=memory)

    schedule = read_schedule(program, mesh=_mesh_of(plan), expect_collectives=True)
    of_any_compiler: list[Difference] = []
    notes: list[Difference] = []
    for difference in _differences(program, schedule, plan, accumulate=accumulate, sync=sync):
        if difference.by_compiler:
            notes.append(difference)
        else:
            of_any_compiler.append(difference)
    return Audit(schedule, plan, memory, differences=tuple(of_any_compiler), notes=tuple(notes))


def _differences(
    program: jax.stages.Compiled | str, schedule: Schedule, plan: ShardPlan, *, accumulate: int, sync: str
) -> tuple[Difference, ...]:
    """Returns the differences of a program from its plan, those that its compiler is known for included."""
    platform = _known_platform(program)
    from_plan = differences(
        schedule.windows,
        plan,
        accumulate=accumulate,
        sync=sync,
        platform=platform,
        num_slices=schedule.num_slices,
    )
    return from_plan + _host_differences(program, plan)


def _mesh_of(plan: ShardPlan) -> AbstractMesh:
    degrees = dict(plan.mesh)
    # Without devices: collectives are written with positions in the mesh.
    return AbstractMesh(tuple(degrees.values()), tuple(degrees))


def _host_differences(program: jax.stages.Compiled | str, plan: ShardPlan) -> tuple[Difference, ...]:
    """Returns a difference if parameters planned in host memory are not among the program's arguments there."""
    planned_bytes = parameter_bytes(plan, on_host=True)
    if not planned_bytes:
        return ()
    text = program if isinstance(program, str) else program.as_text()
    compiled_bytes = _host_arguments_bytes(text or "")
    if compiled_bytes >= planned_bytes:
        return ()
    planned = f"{human_bytes(planned_bytes)} of parameters are planned in host memory"
    words = f"{planned}; {human_bytes(compiled_bytes)} of arguments are."
    return (Difference(words, planned=None, compiled=None, axes=()),)


def _host_arguments_bytes(text: str) -> int:
    """Returns the bytes of the arguments that a program takes in host memory."""
    layout = _ENTRY.search(text)
    if layout is None:
        return 0
    total_bytes = 0
    for dtype, dims in _ON_HOST.findall(layout[1]):
        size = round(item_bytes(dtype))
        for dim in dims.split(","):
            size *= int(dim) if dim else 1  # a scalar has no dims
        total_bytes += size
    return total_bytes


def _known_platform(program: jax.stages.Compiled | str) -> str:
    """Returns the platform of a program whose compiler has forms of its own; empty for others, and if unknown."""
    if isinstance(program, str):
        return TPU if _TILES_OF_TPU in program else ""
    platform = _platform(program)
    return platform if platform in (CPU, TPU) else ""


def _platform(program: jax.stages.Compiled) -> str | None:
    """Returns the platform that a program was compiled for; None if it has no arguments that show it."""
    for sharding in jax.tree.leaves(program.input_shardings):
        for device in sharding.device_set:
            return device.platform
    return None


# ---- the report


def _headline(audit: Audit) -> str:
    schedule = audit.schedule
    text = (
        f"Compiled for {schedule.num_devices} devices: {len(schedule.windows)} collectives in the text,"
        f" {schedule.num_async} async, {schedule.num_overlapped} with matrix products between start and end"
    )
    num_in_loops = len(schedule.in_loops)
    if num_in_loops:
        num_overlapped_in_loops = num_in_loops - len(audit.not_overlapped())
        text += f"; in loops {num_in_loops}, {num_overlapped_in_loops} with matrix products"
    return text


def _collectives_table(audit: Audit) -> FittedTable:
    plan = audit.plan
    caption = "runs: instructions, and executions with loops counted. arrays: whole ones, in the dtype on the wire."
    caption += _note_on_loops(audit.rows)
    columns = ["collective", "over", "dtype??", "unit", "runs>?", "arrays>", "async>", "matmuls>"]
    if plan is not None:
        caption += " copies: elements by the number of parameters"
        if plan.gathered_part.leaves != plan.leaves:
            caption += " that are gathered"
        caption += "."
        columns.insert(6, "copies>")  # beside the bytes, from which it follows
    table = made_table("Collectives of one device (compiled)", *columns, caption=caption)
    for row in audit.rows:
        add_row(table, *_row_cells(row, plan))
    for total in audit.totals:
        arrays = human_bytes(total.total_bytes)
        copies = _copies_cell(total, plan)
        add_row(table, f"total {total.kind}", "", "", "", "", arrays, *copies, "", "", style="bold")
    return table


def _row_cells(row: TrafficRow, plan: ShardPlan | None) -> list[str]:
    num_windows = len(row.windows)
    unit = "-"
    if row.unit is not None:
        unit = f"{row.unit} {row.phase or ''}".rstrip()
    runs = str(num_windows)
    if row.executions != num_windows:
        runs = f"{num_windows}: {row.executions}"
    if row.per_iteration:
        runs += "+"
    fewest, most = row.matmuls
    matmuls = str(most)
    if fewest < most:
        matmuls = f"{fewest}..{most}"
    return [
        row.kind,
        _over(row),
        row.dtype,
        unit,
        runs,
        human_bytes(row.total_bytes),
        *_copies_cell(total_of(row.kind, row.windows), plan),
        f"{row.num_async} of {num_windows}",
        matmuls,
    ]


def _copies_cell(total: Total, plan: ShardPlan | None) -> list[str]:
    """Returns the elements by the number of parameters; no cell without a plan."""
    if plan is None:
        return []
    num_parameters = plan.gathered_part.num_parameters or 1  # if all units are never gathered
    return [f"{total.elements / num_parameters:.2f}"]


def _mixing_table(rows: Sequence[TrafficRow]) -> FittedTable:
    columns = ("line", "operation", "collective", "over?", "phase??", "runs>?", "arrays>")
    caption = "In these lines the model uses other examples of its batch. A compiler may join several lines."
    caption += _note_on_loops(rows)
    table = made_table("Collectives of the model's own mixing of examples (compiled)", *columns, caption=caption)
    for row in rows:
        lines = list(dict.fromkeys(mixing.line for mixing in row.mixing))
        operations = list(dict.fromkeys(mixing.operation for mixing in row.mixing))
        runs = str(row.executions)
        if row.per_iteration:
            runs += "+"
        arrays = human_bytes(row.total_bytes)
        add_row(table, lines, operations, row.kind, _over(row), row.phase or "-", runs, arrays)
    return table


def _note_on_loops(rows: Iterable[TrafficRow]) -> str:
    """Returns what + means in the rows of a table; empty if none has it."""
    if any(row.per_iteration for row in rows):
        return " +: per iteration of a loop of unknown length."
    return ""


def _over(row: TrafficRow) -> str:
    """Returns the axes and the size of the groups; the size alone if no mesh is known."""
    if not row.over:
        return f"({row.group_size})"
    return f"{', '.join(row.over)} ({row.group_size})"


def _memory_table(memory: CompiledMemory) -> FittedTable:
    caption = ""
    if memory.peak_bytes < memory.arguments_bytes + memory.temporaries_bytes:
        caption = "peak: the most in use at once, by the compiler; other rows: all that it reserves."
    table = made_table("Memory of one device (compiled)", "", "bytes>", caption=caption)
    add_row(table, "arguments: state and batch", human_bytes(memory.arguments_bytes))
    add_row(table, "results that reuse no argument's buffer", human_bytes(memory.results_bytes - memory.shared_bytes))
    add_row(table, "temporaries", human_bytes(memory.temporaries_bytes))
    add_row(table, "peak", human_bytes(memory.peak_bytes), style="bold", end_section=bool(memory.host_bytes))
    if memory.host_bytes:
        add_row(table, "in host memory: arguments", human_bytes(memory.host_arguments_bytes))
        add_row(table, "in host memory: temporaries", human_bytes(memory.host_temporaries_bytes))
    return table


def _closing_lines(audit: Audit) -> list[str]:
    lines = []
    if audit.schedule.kernels:
        lines.append(f"Kernels: {', '.join(map(str, audit.schedule.kernels))}.")
    lines += [f"Not counted: {note}" for note in audit.schedule.notes]
    return [*lines, *_overlap_lines(audit), *_plan_lines(audit)]


def _overlap_lines(audit: Audit) -> list[str]:
    """Returns the collectives in loops that are not hidden by matrix products, the largest first."""
    if not audit.schedule.num_async:
        return ["Every collective blocks: nothing is computed meanwhile, as on CPU."]
    exposed = sorted(audit.not_overlapped(), key=lambda window: -window.full_bytes * window.executions)
    if not exposed:
        return []
    lines = ["In loops, blocking or overlapped by no matrix product:"]
    for window in exposed[:_SHOWN]:
        form = "async" if window.is_async else "blocking"
        lines.append(f"  {window.kind} {window.name}, {human_bytes(window.full_bytes)}, {form}")
    if len(exposed) > _SHOWN:
        lines.append(f"  ... and {len(exposed) - _SHOWN} more")
    return lines


def _plan_lines(audit: Audit) -> list[str]:
    """Returns how the program differs from the plan."""
    if audit.plan is None:
        return ["There is no plan to compare with."]
    lines = []
    if audit.notes:
        lines += _titled("Differs from the plan in ways of this platform's compiler:", audit.notes)
    if audit.ok:
        return [*lines, "Communicates as planned."]
    return lines + _titled("Differs from the plan:", audit.differences)


def _titled(title: str, descriptions: Iterable[Difference]) -> list[str]:
    """Returns a title, and differences below it."""
    return [title, *(f"  {description}" for description in descriptions)]
