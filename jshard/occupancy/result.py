"""`Overlap`: how a step was shaped, and why; what it takes if multiprocessors are left to collectives."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Group
from rich.text import Text

from jshard._text import duration, human_bytes, joined_name, name_pattern
from jshard.cluster.replay import Assumptions
from jshard.inspect.communication import traffic_of
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.kernels.backend import Backend
from jshard.kernels.knobs import Occupancy
from jshard.occupancy import CommFootprint
from jshard.occupancy.products import MatrixProduct
from jshard.plans.plan import ShardPlan, UnitPlan

Origin = Literal["fact", "model", "estimate", "measured", "assumption"]

_LEGEND = (
    'from: "measured" on this kind of device; "model" computed from facts about the device, its kernels and NCCL;'
    ' "estimate" compares times under stated assumptions. What is quickest only a measurement says: jshard tune'
)


@dataclasses.dataclass(frozen=True)
class Reason:
    """One thing that was decided."""

    what: str  # a kernel, an option, or a variable of the environment
    chosen: str  # what was decided, in words
    origin: Origin  # what the decision rests on
    why: str  # the numbers


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Overlap(Printed):
    """What `js.overlap` chose. `print` it; in a notebook it shows itself; `to_json` for programs.

    Attributes:
        device: in words.
        comm: what runs beside the kernels; None where nobody knows what a collective takes there.
        occupancy: by kernel, "matmul", "mlp", "rms_norm" and "layer_norm", what to call it with.
        backends: by kernel its `backend`: "auto", or "xla" where XLA's own was measured to be quicker.
        compiler_options: what `jax.jit(compiler_options=...)` takes.
        environment: variables for NCCL. Nothing is set: `exports` has the lines for a shell.
        units: what the units send and compute, as the choice saw it.
        reasons: for each decision what it rests on.
        notes: what else there is to know.
    """

    device: str
    comm: CommFootprint | None
    occupancy: Mapping[str, Occupancy]
    backends: Mapping[str, Backend]
    compiler_options: Mapping[str, Any]
    environment: Mapping[str, str]
    units: tuple[UnitTimes, ...]
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()

    @property
    def exports(self) -> tuple[str, ...]:
        """Lines for the shell that starts the run."""
        return tuple(f"export {name}={value}" for name, value in self.environment.items())

    def __rich__(self) -> Group:
        kernels = [reason for reason in self.reasons if reason.what in self.occupancy]
        others = [reason for reason in self.reasons if reason.what not in self.occupancy]
        tables = [_units_table(self.units)] if self.units else []
        tables.append(_reasons_table("Kernels: how much they leave", "kernel", kernels))
        tables += [_reasons_table("Compiler (xla_gpu_...) and NCCL", "option", others)] if others else []
        spaced = [part for table in tables for part in (Text(), table)]
        exports = ["For the shell, nothing is set:", *(f"  {line}" for line in self.exports)] if self.exports else []
        return Group(Text(self._headline()), *spaced, Text(), *map(Text, (*exports, *self.notes, _LEGEND)))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "device": self.device,
            "comm": None if self.comm is None else dataclasses.asdict(self.comm),
            "occupancy": {name: dataclasses.asdict(knobs) for name, knobs in self.occupancy.items()},
            "backends": dict(self.backends),
            "compiler_options": dict(self.compiler_options),
            "environment": dict(self.environment),
            "units": [dataclasses.asdict(unit) for unit in self.units],
            "reasons": [dataclasses.asdict(reason) for reason in self.reasons],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1)

    def _headline(self) -> str:
        if self.comm is None:
            return f"{self.device}: what a collective takes of it is not known"
        if not self.comm.ctas:
            return f"{self.device}, collectives by {self.comm}: no multiprocessor is taken"
        block = f"{self.comm.threads} threads x {self.comm.registers} registers, {self.comm.smem_bytes:,} B"
        return f"{self.device}, beside {self.comm}: {self.comm.ctas} blocks of {block}"


def _units_table(units: tuple[UnitTimes, ...]) -> FittedTable:
    caption = "Bytes of whole arrays, by step. Times: estimates, forward + backward, links at their assumed slowest."
    columns = "unit", "gathered>", "reduced>", "sent>", "collectives>", "products>"
    table = made_table("Units: what there is to hide, and behind what", *columns, caption=caption)
    for unit in units:
        add_row(
            table,
            f"{unit.unit}  x{unit.count}" if unit.count > 1 else unit.unit,
            human_bytes(unit.gathered_bytes),
            human_bytes(unit.reduced_bytes),
            human_bytes(unit.wire_bytes),
            _times(unit.communication_s),
            "not known" if unit.compute_s is None else _times(unit.compute_s),
        )
    return table


def _reasons_table(title: str, column: str, reasons: list[Reason]) -> FittedTable:
    table = made_table(title, column, "chosen", "from", "why")
    for reason in reasons:
        add_row(table, reason.what.removeprefix("xla_gpu_"), reason.chosen, reason.origin, reason.why)
    return table


def _times(pair: tuple[float, float]) -> str:
    return " + ".join(map(duration, pair)) if any(pair) else "-"


# What a step takes if multiprocessors are left to collectives, against waiting for them: the stated model.

_BACKWARD = 2.0  # products of backward for one of forward
_FORWARD = "parameters for forward"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """Equal units of a plan, all of them together, on one device."""

    unit: str  # their name
    count: int = 1  # how many layers they are
    gathered_bytes: int = 0  # of the whole arrays, in forward
    reduced_bytes: int = 0  # of the whole gradients
    wire_bytes: float = 0.0  # what a device sends, forward and backward
    # Of forward and of backward, all blocks of the collectives running; an estimate.
    communication_s: tuple[float, float] = (0.0, 0.0)
    # Of forward and of backward, on all multiprocessors; an estimate, None where it is not known.
    compute_s: tuple[float, float] | None = None
    is_root: bool = False  # its collectives have no other unit to hide behind


def unit_times(
    plan: ShardPlan, assumptions: Assumptions | None, products: Sequence[MatrixProduct] | None
) -> tuple[UnitTimes, ...]:
    """What the units of a plan send, and how long that and their products take; equal ones of a list are added up."""
    groups: dict[Any, list[tuple[int | None, UnitTimes]]] = {}
    for unit in plan.units:
        times = times_of_unit(plan, unit, assumptions, products)
        pattern, index = name_pattern(unit.name)
        key = pattern, times.gathered_bytes, times.reduced_bytes
        groups.setdefault(key, []).append((index, times))
    return tuple(
        _added(joined_name(pattern, [index for index, _ in found]), [times for _, times in found])
        for (pattern, *_), found in groups.items()
    )


def step_s(units: Sequence[UnitTimes], *, reserved: int, needed: int, sms: int) -> float:
    """What the units take with so many multiprocessors left to the collectives, by the model above."""
    total = 0.0
    for unit in units:
        for compute_s, communication_s in zip(unit.compute_s or (0.0, 0.0), unit.communication_s, strict=True):
            if not reserved:
                total += compute_s + communication_s
                continue
            slower_s = communication_s * needed / reserved
            alone_s = slower_s if unit.is_root else slower_s / unit.count
            total += max(compute_s * sms / (sms - reserved), slower_s - alone_s) + alone_s
    return total


def best_reserve(units: Sequence[UnitTimes], *, needed: int, sms: int) -> tuple[int, Mapping[int, float]]:
    """The number of multiprocessors to leave with the least time, the fewer of equals; and the time of each number."""
    times = {r: step_s(units, reserved=r, needed=needed, sms=sms) for r in range(needed + 1)}
    return min(times, key=lambda r: (times[r], r)), times


def times_of_unit(
    plan: ShardPlan, unit: UnitPlan, assumptions: Assumptions | None, products: Sequence[MatrixProduct] | None
) -> UnitTimes:
    """What one unit of a plan sends, and how long that and its products take; arguments as of `unit_times`."""
    leaves = plan.unit_leaves(unit.name)
    layers = max((leaf.placement.layers for leaf in leaves), default=1)
    found = [one for one in traffic_of(dataclasses.replace(plan, leaves=leaves)) if one.group_size > 1]
    spent, compute_s = [0.0, 0.0], None
    if assumptions is not None:
        for one in found:
            each_s = assumptions.transfer_s(one.kind, one.full_bytes / layers, range(one.group_size))
            spent[one.purpose != _FORWARD] += layers * each_s
        if products is not None:
            flops = sum(product.flops for product in products if product.unit == unit.name)
            forward_s = flops / (assumptions.flops_per_s * assumptions.matmul_efficiency)
            compute_s = forward_s, forward_s * (_BACKWARD + (unit.remat == "full"))
    return UnitTimes(
        unit=unit.name,
        count=layers,
        gathered_bytes=sum(one.full_bytes for one in found if one.purpose == _FORWARD),
        reduced_bytes=sum(one.full_bytes for one in found if one.kind == "reduce-scatter"),
        wire_bytes=sum(one.wire_bytes for one in found),
        communication_s=(spent[0], spent[1]),
        compute_s=compute_s,
        is_root=unit.name == plan.units[0].name,
    )


def _added(name: str, units: Sequence[UnitTimes]) -> UnitTimes:
    pairs = [unit.compute_s for unit in units]
    both = lambda found: (sum(first for first, _ in found), sum(second for _, second in found))
    return UnitTimes(
        unit=name,
        count=sum(unit.count for unit in units),
        gathered_bytes=sum(unit.gathered_bytes for unit in units),
        reduced_bytes=sum(unit.reduced_bytes for unit in units),
        wire_bytes=sum(unit.wire_bytes for unit in units),
        communication_s=both([unit.communication_s for unit in units]),
        compute_s=None if None in pairs else both([pair for pair in pairs if pair is not None]),
        is_root=any(unit.is_root for unit in units),
    )
