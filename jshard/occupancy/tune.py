"""`tune` measures the products of a model on the GPU that is here, and reports; `rank` orders settings by the model."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from rich.console import Group
from rich.text import Text

from jshard import _compat
from jshard._text import duration, folded_names, human_bytes
from jshard.cluster.replay import Assumptions
from jshard.errors import ShardingError
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.occupancy import CommFootprint
from jshard.occupancy import cache as stored
from jshard.occupancy.cache import TuningEntry, of_first
from jshard.occupancy.candidates import Candidate, candidates, choose
from jshard.occupancy.device import Device
from jshard.occupancy.measure import Bench, GpuBench, measure
from jshard.occupancy.products import SIXTEEN_BITS, MatrixProduct, by_shape, products_of
from jshard.occupancy.result import times_of_unit
from jshard.occupancy.shape import setting_text
from jshard.plans.plan import ShardPlan
from jshard.plans.plan import plan as plan_of

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
class TuneRow:
    """One size of product."""

    product: MatrixProduct  # the sizes
    same: tuple[MatrixProduct, ...]  # the products of that size, by unit
    left_to_xla: str = ""  # why no kernel takes it; empty if one does
    load_bytes: int = 0  # of the collectives beside one call
    load_ns: float = 0.0  # that they are estimated to take
    ranked: tuple[Candidate, ...] = ()  # the settings, the best by the model first
    measured: TuningEntry | None = None  # what was measured; None where nothing was

    @property
    def count(self) -> int:
        """Calls in forward."""
        return sum(each.count for each in self.same)

    @property
    def units(self) -> str:
        """The units that they are of."""
        return ", ".join(folded_names(each.unit for each in self.same if each.unit)) or "-"


@dataclasses.dataclass(frozen=True, repr=False)
class TuneReport(Printed):
    """The products of a model; printed it is tables."""

    device: str  # in words
    comm: CommFootprint  # what runs beside them
    rows: tuple[TuneRow, ...]  # the products, the most work first
    headline: str = ""  # what is to be known before anything else; empty where all was measured

    def with_measured(self, entries: Sequence[TuningEntry | None]) -> TuneReport:
        """The same with what was measured of each row."""
        rows = [dataclasses.replace(row, measured=entry) for row, entry in zip(self.rows, entries, strict=True)]
        return dataclasses.replace(self, rows=tuple(rows))

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

    def _table(self, row: TuneRow) -> FittedTable:
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
            add_row(
                table,
                setting_text(timing.setting),
                duration(timing.alone_ns / 1e9),
                duration(timing.both_ns / 1e9),
                mark,
            )
        return table


def _ranked(row: TuneRow) -> FittedTable:
    columns = "setting", "est. alone>", "est. beside>", "how it leaves room"
    table = made_table(_title(row), *columns)
    shown = row.ranked[:_SHOWN]
    plain = [one for one in row.ranked[_SHOWN:] if one.setting is None]
    for one in (*shown, *plain):
        add_row(table, setting_text(one.setting), duration(one.alone_ns / 1e9), duration(one.both_ns / 1e9), one.how)
    return table


def _title(row: TuneRow) -> str:
    load = (
        f", beside {human_bytes(row.load_bytes)} of collectives, est. {duration(row.load_ns / 1e9)}"
        if row.load_bytes
        else ""
    )
    return f"{row.product.kernel} {row.product.shape} {row.product.dtype}, x{row.count} in {row.units}{load}"


# `tune`: measures the products of a model on the GPU that is here; `rank` orders their settings by the model alone.

_CALLS = 3  # a product of forward, and its two gradients


class TuneError(ShardingError):
    """Tuning where nothing can be measured."""


def rank(model: nnx.Module, loss: Callable[..., Any], batch: Any, *, device: Device, comm: CommFootprint) -> TuneReport:
    """Every distinct setting for each product of a model, ranked by the model of occupancy. Nothing is measured."""
    plan, products = plan_of(model), products_of(model, loss, batch)
    loads = _loads(plan, products, device)
    assert device.gpu is not None
    rows = []
    for product, same in by_shape(products).items():
        load_bytes, load_ns = loads[product]
        found = ()
        if not _left_to_xla(product):
            how = {"m": product.m, "n": product.n, "k": product.k, "load_ns": load_ns}
            found = candidates(device.gpu, comm, **how)
        rows.append(TuneRow(product, same, _left_to_xla(product), load_bytes, load_ns, ranked=found))
    return TuneReport(device.title, comm, tuple(rows))


def tune(
    model: nnx.Module,
    loss: Callable[..., Any],
    batch: Any,
    *,
    device: Device,
    comm: CommFootprint,
    path: Path,
    again: bool = False,
    say: Callable[[str], object] = lambda line: None,
    bench: Callable[[MatrixProduct, CommFootprint, int], Bench] = GpuBench,
) -> TuneReport:
    """Measures the products of a model, and keeps what came of it in a file.

    In several processes the first one measures, and its choices are those of all.
    """
    refuse_in_a_trace()
    ranked = rank(model, loss, batch, device=device, comm=comm)

    def work() -> str:
        known = stored.load(path)
        for row in ranked.rows:
            key = key_of(row.product, device, comm)
            if row.left_to_xla or (key in known and not again):
                continue
            say(f"measuring {row.product.kernel} {row.product.shape} {row.product.dtype}: {len(row.ranked)} settings")
            entry = _measured(row, bench(row.product, comm, row.load_bytes), say)
            stored.store(path, {key: entry})  # now: what was measured is kept if the next one fails
            known[key] = entry
        keys = [key_of(row.product, device, comm) for row in ranked.rows]
        return stored.text_of({key: known[key] for key in keys if key in known})

    entries = stored.parsed(of_first(work, where="jshard tune"), path)
    return ranked.with_measured([entries.get(key_of(row.product, device, comm)) for row in ranked.rows])


def refuse_in_a_trace() -> None:
    """Raises inside of `jax.jit` and the like, where nothing runs and nothing can be timed."""
    if _compat.is_tracer(jnp.zeros(())):  # what is computed in a trace becomes part of it
        raise TuneError(
            "Kernels cannot be tuned while a program is traced.",
            where="tune(...) inside of jax.jit, shard_map, grad or scan",
            why="nothing runs there, so nothing can be timed; and a measurement would change what is traced.",
            do="tune before: jshard tune MODEL; js.overlap(model, loss=..., batch=...) reads what was measured.",
        )


def key_of(product: MatrixProduct, device: Device, comm: CommFootprint) -> stored.Key:
    """What a measurement of a product holds for."""
    return stored.Key(
        kernel=product.kernel,
        shape=product.shape,
        dtype=product.dtype,
        device=device.kind or device.title,
        jax=_compat.jax_version(),
        footprint=stored.footprint_text(comm),
    )


def _measured(row: TuneRow, bench: Bench, say: Callable[[str], object]) -> stored.TuningEntry:
    found = measure(bench, [one.setting for one in row.ranked])
    for setting, why in found.failed:
        say(f"  left out, as it does not run: {setting}: {why}")
    return stored.TuningEntry(
        choice=choose(found.timings),
        timings=found.timings,
        load_bytes=row.load_bytes,
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _left_to_xla(product: MatrixProduct) -> str:
    if product.dtype in SIXTEEN_BITS:
        return ""
    return f"{product.dtype}: the kernels take bfloat16 and float16"


def _loads(
    plan: ShardPlan, products: Sequence[MatrixProduct], device: Device
) -> Mapping[MatrixProduct, tuple[int, float]]:
    """For each size of product, bytes and nanoseconds of the collectives that are beside one call of it.

    A unit's collectives, forward and backward, are shared out over its products and their gradients by their work.
    """
    assumptions = device.assumptions(math.prod(degree for _, degree in plan.mesh))
    of_unit = {unit.name: _of_unit(plan, unit, assumptions, products) for unit in plan.units}
    found = {}
    for product, same in by_shape(tuple(products)).items():
        calls = _CALLS * sum(each.count for each in same)
        shares = [(each.flops, *of_unit.get(each.unit, (0.0, 0.0))) for each in same]
        found[product] = (
            round(sum(flops * num_bytes for flops, num_bytes, _ in shares) / calls),
            sum(flops * ns for flops, _, ns in shares) / calls,
        )
    return found


def _of_unit(
    plan: ShardPlan, unit: Any, assumptions: Assumptions | None, products: Sequence[MatrixProduct]
) -> tuple[float, float]:
    """Bytes and nanoseconds of a unit's collectives, for each floating-point operation of its products in forward."""
    times = times_of_unit(plan, unit, assumptions, products)
    flops = sum(product.flops for product in products if product.unit == unit.name)
    return (times.wire_bytes / flops, 1e9 * sum(times.communication_s) / flops) if flops else (0.0, 0.0)
