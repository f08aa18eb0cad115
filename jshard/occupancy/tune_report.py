"""The tables of `jshard tune`: the products of a model, and the times of their settings."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Group, RenderableType
from rich.text import Text

from jshard._text import duration, human_bytes
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.occupancy import CommFootprint
from jshard.occupancy.products import MatrixProduct
from jshard.occupancy.timings import Timing, quickest, setting_text, total

_ESTIMATED = (
    "est.: 60 % of the peak for every tile, collectives at the assumed rates of the links. It ranks settings by the"
    " room that they leave, not by speed; run this on the GPU to measure."
)
_MEASURED = (
    "times of one call: alone, and until it and a load of the collectives' bytes have ended. The load imitates a"
    " collective: it copies in the GPU's own memory with as many blocks, threads and bytes of shared memory."
)


@dataclasses.dataclass(frozen=True)
class TuneRow:
    """One size of product."""

    product: MatrixProduct  # the sizes
    count: int  # calls in forward
    units: str  # their units
    load_bytes: int  # of the collectives beside one call
    load_ns: float  # their estimated time
    timings: tuple[Timing, ...] = ()  # empty for a dtype that is left to XLA

    def __str__(self) -> str:
        product = self.product
        text = f"{product.kernel} {product.shape} {product.dtype}, x{self.count} in {self.units}"
        if self.load_bytes:
            text += f", beside {human_bytes(self.load_bytes)} of collectives"
        return text


@dataclasses.dataclass(frozen=True, repr=False)
class TuneReport(Printed):
    """The products of a model; it prints as tables."""

    device: str  # its display name
    comm: CommFootprint  # the collective beside them
    rows: tuple[TuneRow, ...]  # the products, the most work first
    estimated: str = ""  # a remark printed first if the occupancy model replaced a GPU

    def __rich__(self) -> Group:
        parts: list[RenderableType] = []
        if self.estimated:
            parts.append(Text(self.estimated))
        parts.append(Text(self._headline()))
        for row in self.rows:
            if row.timings:
                parts += [Text(), _estimated_table(row) if self.estimated else _measured_table(row)]
        for row in self.rows:
            if not row.timings:
                parts.append(Text(f"left to XLA: {row}: the kernels need 16 bits"))
        return Group(*parts, Text(), Text(_ESTIMATED if self.estimated else _MEASURED))

    def to_json(self) -> str:
        """Returns everything, for JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def _headline(self) -> str:
        headline = f"{self.device}, beside {self.comm}"
        if self.comm.ctas:
            headline += f", {self.comm.ctas} blocks"
        return headline


def _measured_table(row: TuneRow) -> FittedTable:
    """Returns the times of one product, with the chosen setting marked."""
    calls = [(row.timings, 1)]
    best = quickest(calls)
    caption = "nothing was faster beside the load than XLA's own"
    if best.setting is not None:
        plain = total(None, calls)
        beside = best.both_ns / plain.both_ns
        alone = best.alone_ns / plain.alone_ns
        caption = f"{beside:.2f} x XLA's time beside the load, {alone:.2f} x alone"
    table = made_table(str(row), "setting", "alone>", "beside>", "", caption=caption)
    for timing in _sorted(row.timings):
        _add_timing(table, timing, "chosen" if timing.setting == best.setting else "")
    return table


def _estimated_table(row: TuneRow) -> FittedTable:
    """Returns the estimated times of one product. Nothing is chosen by them."""
    table = made_table(str(row), "setting", "est. alone>", "est. beside>", "", caption="")
    for timing in _sorted(row.timings):
        _add_timing(table, timing, "")
    return table


def _sorted(timings: tuple[Timing, ...]) -> list[Timing]:
    return sorted(timings, key=lambda timing: (timing.both_ns, timing.alone_ns))


def _add_timing(table: FittedTable, timing: Timing, mark: str) -> None:
    alone_text = duration(timing.alone_ns / 1e9)
    both_text = duration(timing.both_ns / 1e9)
    add_row(table, setting_text(timing.setting), alone_text, both_text, mark)
