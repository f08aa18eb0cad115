"""`tune` measures the products of a model on the present GPU, beside a load like its collectives, and reports."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Group
from rich.text import Text

from jshard import _compat
from jshard._text import duration, folded_names, human_bytes
from jshard.errors import ShardingError
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.kernels.backend import KernelError, Occupancy, fitted, product_ns
from jshard.kernels.products import matmul, plain_matmul
from jshard.occupancy import SHIPPED, CommFootprint, GpuFacts, Plan, ShippedKernel, plans, reserved_for
from jshard.occupancy import measured as stored
from jshard.occupancy.device import Device, MatrixProduct, by_shape, products_of
from jshard.occupancy.measured import Key, Timing, TuningEntry, of_first, quickest, setting_text
from jshard.occupancy.overlap import transfers
from jshard.plans.plan import plan as plan_of

NOT_MEASURED = "no GPU here: nothing was measured. The following is an estimate by the occupancy model."
_ESTIMATED = (
    "est.: 60 % of the peak for every tile, collectives at the assumed rates of the links. It ranks settings by the"
    " room that they leave, not by speed; run this on the GPU to measure."
)
_MEASURED = (
    "times of one call: alone, and until it and a load of the collectives' bytes have ended. The load imitates a"
    " collective: it copies in the GPU's own memory with as many blocks, threads and bytes of shared memory."
)


class TuneError(ShardingError):
    """Tuning is not possible because nothing can be measured."""


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
        load = f", beside {human_bytes(self.load_bytes)} of collectives" if self.load_bytes else ""
        return f"{product.kernel} {product.shape} {product.dtype}, x{self.count} in {self.units}{load}"


@dataclasses.dataclass(frozen=True, repr=False)
class TuneReport(Printed):
    """The products of a model; it prints as tables."""

    device: str  # its display name
    comm: CommFootprint  # the collective beside them
    rows: tuple[TuneRow, ...]  # the products, the most work first
    estimated: str = ""  # a remark printed first if the occupancy model replaced a GPU

    def __rich__(self) -> Group:
        head = f"{self.device}, beside {self.comm}" + (f", {self.comm.ctas} blocks" if self.comm.ctas else "")
        first = [Text(self.estimated)] if self.estimated else []
        word = "est. " if self.estimated else ""
        tables = [part for row in self.rows if row.timings for part in (Text(), _table(row, word))]
        left = [Text(f"left to XLA: {row}: the kernels need 16 bits") for row in self.rows if not row.timings]
        return Group(*first, Text(head), *tables, *left, Text(), Text(_ESTIMATED if self.estimated else _MEASURED))

    def to_json(self) -> str:
        """Everything, for JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def _table(row: TuneRow, word: str) -> FittedTable:
    best, (plain, *_) = quickest([(row.timings, 1)]), (one for one in row.timings if one.setting is None)
    beside, alone = best.both_ns / plain.both_ns, best.alone_ns / plain.alone_ns
    caption = f"{beside:.2f} x XLA's time beside the load, {alone:.2f} x alone"
    if best.setting is None or word:
        caption = "" if word else "nothing was faster beside the load than XLA's own"
    table = made_table(str(row), "setting", f"{word}alone>", f"{word}beside>", "", caption=caption)
    for one in sorted(row.timings, key=lambda each: (each.both_ns, each.alone_ns)):
        mark = "chosen" if one.setting == best.setting and not word else ""
        add_row(table, setting_text(one.setting), duration(one.alone_ns / 1e9), duration(one.both_ns / 1e9), mark)
    return table


# Times on the present GPU: XLA's own product and every setting, alone and beside a load, side by side.

ROUNDS = 7
_CALLS = 10  # of a program per time, so that the host is ahead of the device
_WARM_UP = 2
_PRODUCTS = 3  # of a program: forward and its two gradients, which share one setting
_BESIDE = 2  # of them, beside the load: it begins when the first has ended, and the second occupies the GPU by then
# A captured graph may run streams as it likes.
_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}


def measure(
    bench: Any, settings: Sequence[Occupancy], *, rounds: int = ROUNDS
) -> tuple[tuple[Timing, ...], list[tuple[Occupancy, str]]]:
    """Medians over rounds, each of which times everything once, so that the GPU's clock affects all alike.

    Args:
        bench: a `GpuBench`, or a replacement.
        settings: settings to time, in addition to XLA's own.
        rounds: number of times per setting.

    Returns:
        The times, XLA's own first; and the settings that did not run, with the reason.
    """
    problems = {setting: bench.prepare(setting) for setting in dict.fromkeys([None, *settings])}
    able = [setting for setting, problem in problems.items() if not problem]
    times: dict[tuple[Occupancy | None, bool], list[float]] = {}
    for _ in range(rounds):
        for setting in able:
            for beside in (False, True):
                times.setdefault((setting, beside), []).append(bench.time_ns(setting, beside=beside))
    median = lambda setting, beside: round(statistics.median(times[setting, beside]))
    timings = [Timing(setting=s, alone_ns=median(s, False), both_ns=median(s, True)) for s in able]
    return tuple(timings), [(setting, problem) for setting, problem in problems.items() if setting and problem]


class GpuBench:
    """A product on the first GPU of this process. Products of an MLP are timed without their activation."""

    def __init__(self, product: MatrixProduct, comm: CommFootprint, load_bytes: int) -> None:
        self._comm = comm
        device = jax.local_devices()[0]
        keys = jax.random.split(jax.random.key(0), 2)
        sizes = (product.m, product.k), (product.k, product.n)
        dtype = jnp.dtype(product.dtype)
        make = jax.jit(lambda key, shape: jax.random.normal(key, shape, dtype), static_argnums=1)
        self._arrays = [jax.device_put(make(key, shape), device) for key, shape in zip(keys, sizes, strict=True)]
        self._load = None
        if comm.ctas:
            self._load = jax.device_put(jnp.zeros(load_shape(comm, _BESIDE * load_bytes), jnp.float32), device)
        self._programs: dict[tuple[Occupancy | None, bool], Callable[[], Any]] = {}

    def prepare(self, setting: Occupancy | None) -> str:
        """Compiles both programs, and runs them; returns why a setting cannot run, or an empty text."""
        try:
            for beside in (False, True):
                program = self._compiled(setting, beside=beside)
                self._programs[setting, beside] = program
                for _ in range(_WARM_UP):
                    jax.block_until_ready(program())
        except (KernelError, jax.errors.JaxRuntimeError) as error:
            if setting is None:
                raise
            return next(iter(str(error).splitlines()), type(error).__name__)
        return ""

    def time_ns(self, setting: Occupancy | None, *, beside: bool) -> float:
        """The times of one call: a program has three."""
        program = self._programs[setting, beside]
        begin_ns, result = time.perf_counter_ns(), None
        for _ in range(_CALLS):
            result = program()
        jax.block_until_ready(result)
        return (time.perf_counter_ns() - begin_ns) / (_CALLS * _PRODUCTS)

    def _compiled(self, setting: Occupancy | None, *, beside: bool) -> Callable[[], Any]:
        run = program_of(setting, self._comm if beside and self._load is not None else None)
        arguments = [*self._arrays, *([self._load] if beside and self._load is not None else [])]
        compiled = jax.jit(run).lower(*arguments).compile(compiler_options=_OPTIONS)
        return lambda: compiled(*arguments)


def program_of(setting: Occupancy | None, comm: CommFootprint | None) -> Callable[..., Any]:
    """A product and then its two gradients, with a load beside these on another stream."""
    multiply = plain_matmul if setting is None else functools.partial(matmul, occupancy=setting, backend="mosaic")

    def run(x: jax.Array, w: jax.Array, *loads: jax.Array) -> tuple[jax.Array, ...]:
        y, back = jax.vjp(multiply, x, w)
        moved = []
        if comm is not None:
            beside = _compat.on_stream(functools.partial(load, comm=comm), 1)
            moved = [beside(array, y[:1]) for array in loads]
        return y, *back(y), *moved

    return run


# A load like a collective: as many blocks, threads and bytes of shared memory, which copy as many bytes.

_WARPGROUP = 128
_OTHER_REGISTERS = 16  # of a thread, besides those for data in flight
_BARRIERS_BYTES = 1024  # of the most that a block can have


def load_shape(comm: CommFootprint, num_bytes: int) -> tuple[int, int, int, int]:
    """The array that the load copies, of at least `num_bytes`: by block, warpgroup and step, float32."""
    groups = -(-comm.threads // _WARPGROUP)
    on_the_way = _WARPGROUP * max(8, comm.registers - _OTHER_REGISTERS)
    steps = max(1, -(-num_bytes // (4 * comm.ctas * groups * on_the_way)))
    return comm.ctas, groups, steps, on_the_way


def load(x: jax.Array, after: jax.Array, comm: CommFootprint, *, interpret: bool = False) -> jax.Array:
    """Copies an array in blocks like a collective's."""
    import jax.experimental.pallas.mosaic_gpu as plgpu  # slow to import, and only where a load runs

    ctas, groups, steps, _ = x.shape

    def body(in_ref: Any, _: Any, out_ref: Any, *__: Any) -> None:
        block, group = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")

        def step(i: jax.Array, carry: None) -> None:
            at = block, group, i
            out_ref[at] = _compat.pallas_load(in_ref, at, interpret=interpret)
            return carry

        jax.lax.fori_loop(0, steps, step, None)

    smem_bytes = max(0, comm.smem_bytes - _BARRIERS_BYTES) // 1024 * 1024
    return _compat.mosaic_kernel(
        body,
        name="jshard_tuning_load",
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch=[plgpu.SMEM((smem_bytes,), jnp.int8)] if smem_bytes else [],
        grid=(ctas,),
        grid_names=("block",),
        num_threads=groups,
        thread_name="warpgroup",
        interpret=interpret,
    )(x, after)


class ModelBench:
    """The expectations of the occupancy model, in place of a `GpuBench`.

    It assumes that all tiles reach the same share of the peak, which is not so: it ranks settings by room only.
    """

    def __init__(self, gpu: GpuFacts, comm: CommFootprint, row: TuneRow, plans: Mapping[Occupancy, Plan]) -> None:
        self._gpu, self._comm, self._row, self._plans = gpu, comm, row, plans
        product = row.product
        self._plain_ns = product_ns(product.m, product.n, product.k, kind=gpu.name)

    def prepare(self, setting: Occupancy | None) -> str:
        """Everything can run."""
        return ""

    def time_ns(self, setting: Occupancy | None, *, beside: bool) -> float:
        """The times of one call: alone, and until the collective has also ended."""
        comm, load_ns, sms = self._comm, self._row.load_ns if beside else 0.0, self._gpu.num_sms
        if setting is None:  # assumed to make the collective wait
            return self._plain_ns + load_ns if comm.ctas else max(self._plain_ns, load_ns)
        plan, product = self._plans[setting], self._row.product
        each = 1 if setting.persistent else plan.blocks_per_sm  # tiles that a multiprocessor computes at once
        tiles = math.ceil(product.m / setting.tile_m) * math.ceil(product.n / setting.tile_n)
        round_ns = self._plain_ns * sms * each / tiles
        alone_ns = round_ns * math.ceil(tiles / ((sms - setting.reserved_sms) * each))
        is_free = sms - math.ceil(tiles / each) >= reserved_for(self._gpu, comm)  # so few tiles that there is room
        if not beside or setting.reserved_sms or not comm.ctas or is_free:
            return max(alone_ns, load_ns)
        if plan.drain is None or plan.drain > 1:  # at worst the collective waits for the whole kernel
            return alone_ns + load_ns
        lost = min(0.99, plan.drain * min(comm.ctas, sms) / (sms * plan.blocks_per_sm))
        return max(alone_ns / (1 - lost), load_ns + plan.drain * round_ns)


# Measuring a model.


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
    bench: Callable[[MatrixProduct, CommFootprint, int], Any] = GpuBench,
) -> TuneReport:
    """Measures the products of a model, and stores the results in a file.

    With several processes the first one measures, and all use its times.
    """
    if _compat.is_tracer(jnp.zeros(())):  # computations in a trace become part of it
        raise TuneError(
            "Kernels cannot be tuned while a program is traced.",
            where="tune(...) inside jax.jit, shard_map, grad or scan",
            why="nothing runs there, so nothing can be timed; a measurement would also change the traced program.",
            do="jshard tune MODEL  # before; js.tune_overlap(model, loss_fn=..., batch=...) reads the measurements",
        )
    assert device.gpu is not None
    gpu, rows = device.gpu, _rows(model, products_of(model, loss, batch), device)
    keys = {row: _key(row.product, device, comm) for row in rows if row.product.is_16_bits}

    def work() -> str:
        known = stored.load(path)
        for row, key in keys.items():
            if key in known and not again:
                continue
            settings = settings_for(gpu, comm, row.product)
            say(f"measuring {row.product.kernel} {row.product.shape} {row.product.dtype}: {len(settings)} settings")
            timings, failed = measure(bench(row.product, comm, row.load_bytes), [*settings])
            for setting, why in failed:
                say(f"  left out, because it does not run: {setting}: {why}")
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            known[key] = TuningEntry(timings=timings, load_bytes=row.load_bytes, when=now)
            stored.store(path, {key: known[key]})  # now, so that it is kept if the next one fails
        return stored.text_of({key: known[key] for key in keys.values()})

    entries = stored.parsed(of_first(work, where="jshard tune"), path)
    found = [dataclasses.replace(row, timings=entries[keys[row]].timings) if row in keys else row for row in rows]
    return TuneReport(device.title, comm, tuple(found))


def rank(
    model: nnx.Module, loss: Callable[..., Any], batch: Any, *, device: Device, comm: CommFootprint, why: str
) -> TuneReport:
    """The same by the occupancy model: nothing is measured or stored, and `why` is printed first."""
    assert device.gpu is not None
    found = []
    for row in _rows(model, products_of(model, loss, batch), device):
        if row.product.is_16_bits:
            settings = settings_for(device.gpu, comm, row.product)
            timings, _ = measure(ModelBench(device.gpu, comm, row, settings), [*settings], rounds=1)
            row = dataclasses.replace(row, timings=timings)
        found.append(row)
    return TuneReport(device.title, comm, tuple(found), why)


def settings_for(gpu: GpuFacts, comm: CommFootprint, product: MatrixProduct) -> dict[Occupancy, Plan]:
    """Every distinct setting that is worth measuring: the shipped forms, with each way to leave room."""
    found: dict[Occupancy, Plan] = {}
    for kernel in SHIPPED:
        if kernel.is_called("matmul"):
            knobs = fitted(knobs_of(kernel), product.m, product.n, product.k)
            for plan in plans(gpu, kernel.block, comm, persistent=kernel.persistent):
                how = {"smem_pad_bytes": plan.smem_pad_bytes, "reserved_sms": plan.reserved_sms}
                found.setdefault(dataclasses.replace(knobs, **how), plan)
    return found


def knobs_of(kernel: ShippedKernel) -> Occupancy:
    """A shipped form of the product as knobs."""
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


def _rows(model: nnx.Module, products: Sequence[MatrixProduct], device: Device) -> list[TuneRow]:
    """The sizes, each with the collectives beside one call of it.

    A unit's collectives, forward and backward, are divided over its products and their gradients by their work.
    """
    plan, per_flop = plan_of(model), {}
    assumptions = device.assumptions(math.prod(degree for _, degree in plan.mesh))
    assert assumptions is not None
    for unit in plan.units:
        flops = sum(product.flops for product in products if product.unit == unit.name)
        sent = transfers(plan, unit, assumptions) if flops else []
        per_flop[unit.name] = (
            sum(one.wire_bytes / flops for one, _ in sent),
            sum(1e9 * seconds / flops for _, seconds in sent),
        )
    rows = []
    for product, same in by_shape(tuple(products)).items():
        count = sum(each.count for each in same)
        beside = [(each.flops / (_PRODUCTS * count), *per_flop.get(each.unit, (0.0, 0.0))) for each in same]
        units = ", ".join(folded_names(each.unit for each in same if each.unit)) or "-"
        load_bytes = round(sum(flops * num_bytes for flops, num_bytes, _ in beside))
        rows.append(TuneRow(product, count, units, load_bytes, sum(flops * ns for flops, _, ns in beside)))
    return rows
