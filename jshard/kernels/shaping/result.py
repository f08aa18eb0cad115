"""`Overlap`: how a step was shaped, and why; printed it is tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from rich.console import Group
from rich.text import Text

from jshard.inspect.tables import FittedTable, add_row, human_bytes, made_table, printed
from jshard.kernels.knobs import Occupancy
from jshard.kernels.occupancy import CommFootprint
from jshard.kernels.shaping.waiting import UnitTimes
from jshard.kernels.where import Backend

Origin = Literal["fact", "model", "estimate", "measured", "assumption"]

_LEGEND = (
    'from: "measured" on this kind of device; "model" computed from facts about the device, its kernels and NCCL;'
    ' "estimate" compares times under stated assumptions. What is quickest only a measurement says: jshard tune'
)


@dataclasses.dataclass(frozen=True)
class Reason:
    """One thing that was decided.

    Attributes:
        what: a kernel, an option, or a variable of the environment.
        chosen: what was decided, in words.
        origin: what the decision rests on.
        why: the numbers.
    """

    what: str
    chosen: str
    origin: Origin
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Overlap:
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

    def __str__(self) -> str:
        return printed(self)

    __repr__ = __str__

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


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
