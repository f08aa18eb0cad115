"""`tune` measures the products of a model on the present GPU, beside a load like its collectives."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from jshard import _compat
from jshard._text import folded_names
from jshard._types import PyTree
from jshard.errors import ShardingError
from jshard.kernels.backend import Occupancy, fitted
from jshard.kernels.generation import HOPPER, generation_of
from jshard.occupancy import CommFootprint, GpuFacts, Plan, ShippedKernel, plans, shipped_for
from jshard.occupancy import measured as stored
from jshard.occupancy.device import Device
from jshard.occupancy.gpu_bench import CALLS_PER_PRODUCT, GpuBench
from jshard.occupancy.measured import Key, TuningEntry, of_first
from jshard.occupancy.products import MatrixProduct, by_shape, products_of
from jshard.occupancy.step_times import transfers
from jshard.occupancy.tune_report import TuneReport, TuneRow
from jshard.occupancy.tuning_bench import Bench, ModelBench, measure
from jshard.plans.plan import plan as plan_of

NOT_MEASURED = "no GPU here: nothing was measured. The following is an estimate by the occupancy model."


class TuneError(ShardingError):
    """Tuning is not possible because nothing can be measured."""


def tune(
    model: nnx.Module,
    loss: Callable[..., PyTree],
    batch: PyTree,
    *,
    device: Device,
    comm: CommFootprint,
    path: Path,
    again: bool = False,
    say: Callable[[str], object] = lambda line: None,
    bench: Callable[[MatrixProduct, CommFootprint, int], Bench] = GpuBench,
) -> TuneReport:
    """Measures the products of a model, and stores the results in a file.

    With several processes the first one measures, and all use its times.

    Args:
        model: an annotated model.
        loss: function of the model and the batch.
        batch: the global batch, abstract or real.
        device: the present device.
        comm: the collective beside the kernels.
        path: the file of measurements.
        again: whether to measure also what the file has.
        say: prints a line.
        bench: makes the bench of a product, a collective and its bytes.

    Raises:
        TuneError: it is called while a program is traced.
    """
    if _compat.is_tracer(jnp.zeros(())):  # computations in a trace become part of it
        raise TuneError(
            "Kernels cannot be tuned while a program is traced.",
            where="tune(...) inside jax.jit, shard_map, grad or scan",
            why="nothing runs there, so nothing can be timed; a measurement would also change the traced program.",
            do="jshard tune MODEL  # before; js.tune_overlap(model, loss_fn=..., batch=...) reads the measurements",
        )
    gpu = device.gpu
    assert gpu is not None
    rows = _rows(model, products_of(model, loss, batch), device)
    # Products of other dtypes are shown, but left to XLA: no kernel supports them.
    keys = {row: _key(row.product, device, comm) for row in rows if row.product.is_16_bits}

    def measure_missing() -> str:
        entries = stored.load(path)
        for row, key in keys.items():
            if key not in entries or again:
                entries[key] = _measured_entry(row, gpu, comm, bench, say)
                stored.store(path, {key: entries[key]})  # now, so that it is kept if the next one fails
        return stored.text_of({key: entries[key] for key in keys.values()})

    entries = stored.parsed(of_first(measure_missing, where="jshard tune"), path)
    timed_rows = []
    for row in rows:
        if row in keys:
            row = dataclasses.replace(row, timings=entries[keys[row]].timings)
        timed_rows.append(row)
    return TuneReport(device.title, comm, tuple(timed_rows))


def _measured_entry(
    row: TuneRow,
    gpu: GpuFacts,
    comm: CommFootprint,
    bench: Callable[[MatrixProduct, CommFootprint, int], Bench],
    say: Callable[[str], object],
) -> TuningEntry:
    """Measures one product with all its settings."""
    product = row.product
    settings = settings_for(gpu, comm, product)
    say(f"measuring {product.kernel} {product.shape} {product.dtype}: {len(settings)} settings")
    timings, failed = measure(bench(product, comm, row.load_bytes), list(settings))
    for setting, why in failed:
        say(f"  left out, because it does not run: {setting}: {why}")
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return TuningEntry(timings=timings, load_bytes=row.load_bytes, when=when)


def rank(
    model: nnx.Module, loss: Callable[..., PyTree], batch: PyTree, *, device: Device, comm: CommFootprint, why: str
) -> TuneReport:
    """Ranks the same settings by the occupancy model: nothing is measured or stored, and `why` is printed first."""
    assert device.gpu is not None
    timed_rows = []
    for row in _rows(model, products_of(model, loss, batch), device):
        if row.product.is_16_bits:
            settings = settings_for(device.gpu, comm, row.product)
            bench = ModelBench(device.gpu, comm, row.product, row.load_ns, settings)
            timings, _ = measure(bench, list(settings), rounds=1)
            row = dataclasses.replace(row, timings=timings)
        timed_rows.append(row)
    return TuneReport(device.title, comm, tuple(timed_rows), why)


# ---- what is measured


def settings_for(gpu: GpuFacts, comm: CommFootprint, product: MatrixProduct) -> dict[Occupancy, Plan]:
    """Returns every distinct setting that is worth measuring: the shipped forms, with each way to leave room."""
    settings: dict[Occupancy, Plan] = {}
    generation = generation_of(gpu.major) or HOPPER
    for kernel in shipped_for(gpu).kernels:
        if not kernel.is_called("matmul"):
            continue
        knobs = fitted(knobs_of(kernel), product.m, product.n, product.k, generation)
        # By the block as shipped: fitted tiles are no larger, and need no more.
        for plan in plans(gpu, kernel.block, comm, persistent=kernel.persistent):
            setting = dataclasses.replace(
                knobs,
                smem_pad_bytes=plan.smem_pad_bytes,
                reserved_sms=plan.reserved_sms,
            )
            # Two forms may be fitted to one small product: the first one counts.
            settings.setdefault(setting, plan)
    return settings


def knobs_of(kernel: ShippedKernel) -> Occupancy:
    """Returns a shipped form of the product as knobs."""
    tile_m, tile_n, tile_k, stages = map(int, re.split("[x/]", kernel.tiles))
    return Occupancy(tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, stages=stages, persistent=kernel.persistent)


def _key(product: MatrixProduct, device: Device, comm: CommFootprint) -> Key:
    return Key(
        kernel=product.kernel,
        shape=product.shape,
        dtype=product.dtype,
        device=device.kind or device.title,
        footprint=stored.footprint_text(comm),
    )


# ---- the load beside a call


@dataclasses.dataclass(frozen=True)
class _LoadPerFlop:
    """The collectives of a unit, divided over the work of its products."""

    num_bytes: float = 0.0
    ns: float = 0.0


def _rows(model: nnx.Module, products: Sequence[MatrixProduct], device: Device) -> list[TuneRow]:
    """Returns the sizes of products, each with the collectives beside one call of it."""
    loads = _unit_loads(model, products, device)
    rows = []
    for size, same_size in by_shape(tuple(products)).items():
        count = sum(product.count for product in same_size)
        load_bytes = 0.0
        load_ns = 0.0
        for product in same_size:
            load = loads.get(product.unit, _LoadPerFlop())
            # A unit's collectives are spread over all calls of its products: in forward, and for the two gradients of
            # each.
            flops = product.flops / (CALLS_PER_PRODUCT * count)
            load_bytes += flops * load.num_bytes
            load_ns += flops * load.ns
        unit_names = [product.unit for product in same_size if product.unit]
        units = ", ".join(folded_names(unit_names)) or "-"
        rows.append(TuneRow(size, count, units, round(load_bytes), load_ns))
    return rows


def _unit_loads(model: nnx.Module, products: Sequence[MatrixProduct], device: Device) -> dict[str, _LoadPerFlop]:
    """Returns the load of each unit's collectives, forward and backward, per work of its products in forward."""
    plan = plan_of(model)
    assumptions = device.assumptions(math.prod(degree for _, degree in plan.mesh))
    assert assumptions is not None
    loads = {}
    for unit in plan.units:
        flops = sum(product.flops for product in products if product.unit == unit.name)
        # A unit without products has nothing beside which its collectives could run.
        if not flops:
            continue
        unit_transfers = transfers(plan, unit, assumptions)
        loads[unit.name] = _LoadPerFlop(
            num_bytes=sum(traffic.wire_bytes / flops for traffic, _ in unit_transfers),
            ns=sum(1e9 * seconds / flops for _, seconds in unit_transfers),
        )
    return loads
