"""What `jshard tune` says: for each product what was measured, or where nothing was, a ranking that says so."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from jshard.inspect.tables import FittedTable, add_row, folded_names, human_bytes, made_table, printed
from jshard.kernels.occupancy import CommFootprint
from jshard.kernels.shaping.kernels import told
from jshard.kernels.shaping.products import Product
from jshard.kernels.tuning.cache import Entry
from jshard.kernels.tuning.candidates import Candidate

_SHOWN = 4  # settings of a ranking, in the table; JSON has all
NOT_MEASURED = "no GPU here: nothing was measured. What follows is an estimate, by the model of occupancy."
_ESTIMATED = (
    "est.: 60 % of the peak for every tile, collectives at the rates that links are assumed to reach. It ranks how"
    " settings leave room, not how quick they are; run this on the GPU to know."
)
_MEASURED = (
    "times of one call: alone, and until it and a load of the collectives' bytes have ended. The load copies in the"
    " GPU's own memory with as many blocks, threads and bytes of shared memory: it is like a collective, and is none."
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One size of product.

    Attributes:
        product: the sizes.
        same: the products of that size, by unit.
        left_to_xla: why no kernel takes it; empty if one does.
        load_bytes: of the collectives beside one call.
        load_ns: that they are estimated to take.
        ranked: the settings, the best by the model first.
        measured: what was measured; None where nothing was.
    """

    product: Product
    same: tuple[Product, ...]
    left_to_xla: str = ""
    load_bytes: int = 0
    load_ns: float = 0.0
    ranked: tuple[Candidate, ...] = ()
    measured: Entry | None = None

    @property
    def count(self) -> int:
        """Calls in forward."""
        return sum(each.count for each in self.same)

    @property
    def units(self) -> str:
        """The units that they are of."""
        return ", ".join(folded_names(each.unit for each in self.same if each.unit)) or "-"


@dataclasses.dataclass(frozen=True)
class TuneReport:
    """The products of a model; printed it is tables.

    Attributes:
        device: in words.
        comm: what runs beside them.
        rows: the products, the most work first.
        headline: what is to be known before anything else; empty where all was measured.
    """

    device: str
    comm: CommFootprint
    rows: tuple[Row, ...]
    headline: str = ""

    def with_measured(self, entries: Sequence[Entry | None]) -> TuneReport:
        """The same with what was measured of each row."""
        rows = [dataclasses.replace(row, measured=entry) for row, entry in zip(self.rows, entries, strict=True)]
        return dataclasses.replace(self, rows=tuple(rows))

    def __str__(self) -> str:
        return printed(self)

    def __rich__(self) -> Group:
        head = [self.headline] if self.headline else []
        head.append(f"{self.device}, beside {self.comm}" + (f", {self.comm.ctas} blocks" if self.comm.ctas else ""))
        if not self.rows:
            return Group(*map(Text, (*head, "the model has no products of two matrices.")))
        tables = [self._table(row) for row in self.rows if not row.left_to_xla]
        left = [f"left to XLA: {_title(row)}: {row.left_to_xla}" for row in self.rows if row.left_to_xla]
        legends = [_MEASURED] if any(row.measured for row in self.rows) else []
        legends += [_ESTIMATED] if any(not row.measured and not row.left_to_xla for row in self.rows) else []
        spaced = [part for table in tables for part in (Text(), table)]
        last = ["\n".join(left)] if left else []
        return Group(*map(Text, head), *spaced, *map(Text, "\n\n".join([*last, *legends]).splitlines()))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "headline": self.headline,
            "device": self.device,
            "footprint": dataclasses.asdict(self.comm),
            "products": [dataclasses.asdict(row) | {"count": row.count, "units": row.units} for row in self.rows],
        }

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=2)

    def _table(self, row: Row) -> FittedTable:
        if row.measured is None:
            return _ranked(row)
        entry = row.measured
        table = made_table(_title(row), "setting", "alone>", "beside>", "", caption=entry.choice.why)
        for timing in sorted(entry.timings, key=lambda each: (each.both_ns, each.alone_ns)):
            chosen = timing.setting is entry.choice.setting is None or (
                entry.choice.setting is not None
                and timing.setting == dataclasses.replace(entry.choice.setting, latency_ns=None)
            )
            mark = "chosen" if chosen else ""
            add_row(table, told(timing.setting), _us(timing.alone_ns), _us(timing.both_ns), mark)
        return table


def _ranked(row: Row) -> FittedTable:
    columns = "setting", "est. alone>", "est. beside>", "how it leaves room"
    table = made_table(_title(row), *columns)
    shown = row.ranked[:_SHOWN]
    plain = [one for one in row.ranked[_SHOWN:] if one.setting is None]
    for one in (*shown, *plain):
        add_row(table, told(one.setting), _us(one.alone_ns), _us(one.both_ns), one.how)
    return table


def _title(row: Row) -> str:
    load = f", beside {human_bytes(row.load_bytes)} of collectives, est. {_us(row.load_ns)}" if row.load_bytes else ""
    return f"{row.product.kernel} {row.product.shape} {row.product.dtype}, x{row.count} in {row.units}{load}"


def _us(ns: float) -> str:
    return f"{ns / 1e3:,.0f} us"
