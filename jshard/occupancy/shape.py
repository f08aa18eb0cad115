"""`overlap`: how much kernels leave to collectives, and the settings of XLA and NCCL, for one plan on one device."""

from __future__ import annotations

import dataclasses
import math
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
from flax import nnx

from jshard import _compat
from jshard._text import duration
from jshard.cluster.options import compiler_options
from jshard.errors import RunError
from jshard.kernels.backend import Backend
from jshard.kernels.knobs import Occupancy
from jshard.occupancy import (
    COPY_ENGINE,
    FOOTPRINTS,
    CommFootprint,
    GpuFacts,
    OccupancyError,
    footprint,
    plans,
    refusals,
    reserved_for,
    resident,
    shipped_kernels,
)
from jshard.occupancy.cache import CacheError, Entries, default_path, footprint_text, load, of_first, parsed, text_of
from jshard.occupancy.candidates import Timing, together
from jshard.occupancy.device import Device, device_named, side_of
from jshard.occupancy.products import SIXTEEN_BITS, MatrixProduct, by_shape, products_of
from jshard.occupancy.result import Origin, Overlap, Reason, UnitTimes, best_reserve, unit_times
from jshard.plans.plan import ShardPlan
from jshard.plans.plan import plan as plan_of

PRODUCTS, NORMS = ("matmul", "mlp"), ("rms_norm", "layer_norm")
KERNELS = (*PRODUCTS, *NORMS)
_PLAIN = {name: Occupancy(persistent=name in PRODUCTS) for name in KERNELS}


@dataclasses.dataclass(frozen=True)
class Shaped:
    """What was decided for one kernel."""

    knobs: Occupancy
    reason: Reason
    backend: Backend = "auto"


def unshaped(why: str) -> dict[str, Shaped]:
    """Every kernel as it is by default."""
    return {name: Shaped(knobs, Reason(name, "as it is", "fact", why)) for name, knobs in _PLAIN.items()}


def shaped_kernels(
    device: Device, comm: CommFootprint | None, units: Sequence[UnitTimes], products: Sequence[MatrixProduct] | None
) -> dict[str, Shaped]:
    """What each kernel leaves, by the model."""
    if device.why_unshaped or device.gpu is None:
        return unshaped(device.why_unshaped)
    if comm is None:
        return unshaped(f"what a collective takes on {device.title} is not known.")
    if not comm.ctas:
        return unshaped("copy engines move what is gathered: nothing is to be left to them.")
    if units and not any(unit.wire_bytes for unit in units):
        return unshaped("nothing is sent on this mesh: there is nothing to leave room for.")
    reserved, origin, why = _reserve(device.gpu, comm, units, products)
    found = {}
    for name in PRODUCTS:
        chosen = f"reserved_sms={reserved}" if reserved else "as it is"
        found[name] = Shaped(Occupancy(reserved_sms=reserved), Reason(name, chosen, origin, why))
    for name in NORMS:
        found[name] = _padded(device.gpu, comm, name)
    return found


def room_for(device: Device, comm: CommFootprint | None, kernels: Mapping[str, Shaped]) -> int | None:
    """Blocks of a collective that find room where multiprocessors are left to them; None where none are left.

    Where kernels were measured, that was beside all the blocks.
    """
    beside = None if comm is None else comm.block
    leaving = [shaped for shaped in kernels.values() if shaped.knobs.reserved_sms]
    if comm is None or beside is None or device.gpu is None or not leaving:
        return None
    if any(shaped.reason.origin == "measured" for shaped in leaving):
        return comm.ctas
    each = resident(device.gpu, beside)
    return min(comm.ctas, *(shaped.knobs.reserved_sms * each for shaped in leaving))


def _reserve(
    gpu: GpuFacts, comm: CommFootprint, units: Sequence[UnitTimes], products: Sequence[MatrixProduct] | None
) -> tuple[int, Origin, str]:
    """Multiprocessors that a persistent kernel leaves, what that rests on, and why."""
    needed = reserved_for(gpu, comm)
    computing = sum(sum(unit.compute_s or ()) for unit in units)
    if products is None or not computing:
        why = (
            f"{comm.ctas} blocks of a collective fill so many of {gpu.num_sms} SMs, and would wait for a whole kernel."
        )
        return needed, "model", why
    reserved, times = best_reserve(units, needed=needed, sms=gpu.num_sms)
    time = lambda r: duration(times[r])
    if not reserved:
        why = f"waiting costs less: units take {time(0)}, and {time(needed)} with {needed} of {gpu.num_sms} SMs left."
    elif reserved == needed:
        why = f"all {comm.ctas} blocks of a collective run: units take {time(needed)}, and {time(0)} if it waits."
    else:
        why = f"units take {time(reserved)}; {time(needed)} with all {comm.ctas} blocks on {needed} SMs,"
        why += f" {time(0)} if a collective waits."
    return reserved, "estimate", why


def _padded(gpu: GpuFacts, comm: CommFootprint, name: str) -> Shaped:
    """A kernel of small blocks with the padding that the model likes best, if that pays.

    What they move at a time goes with how many of them there are: with n of N on a multiprocessor the kernel takes
    N / n of its time. And what is gained is at most the one time for which a collective would wait.
    """
    kernels = [kernel for kernel in shipped_kernels(gpu) if kernel.is_called(name) and not refusals(gpu, kernel.block)]
    block = max(kernels, key=lambda kernel: kernel.registers).block
    best, top = plans(gpu, block, comm)[0], resident(gpu, block)
    if not best.smem_pad_bytes:
        return Shaped(_PLAIN[name], Reason(name, "as it is", "model", f"{top} blocks on an SM: {best.why}"))
    if 2 * best.blocks_per_sm <= top:
        why = f"with {best.blocks_per_sm} of {top} blocks on an SM it would lose more time than a collective waits."
        return Shaped(_PLAIN[name], Reason(name, "as it is", "model", why))
    knobs = dataclasses.replace(_PLAIN[name], smem_pad_bytes=best.smem_pad_bytes)
    why = f"{best.blocks_per_sm} of {top} blocks on an SM: {best.why}"
    return Shaped(knobs, Reason(name, f"smem_pad_bytes={best.smem_pad_bytes}", "model", why))


def measured_kernels(
    found: Mapping[str, Shaped],
    entries: Entries,
    device: Device,
    comm: CommFootprint,
    products: Sequence[MatrixProduct],
) -> dict[str, Shaped]:
    """The same with what was measured in the place of what was computed."""
    fitting = {
        (key.kernel, key.shape, key.dtype): entry.timings
        for key, entry in entries.items()
        if (key.jax, key.footprint) == (_compat.jax_version(), footprint_text(comm)) and device.is_of(key.device)
    }
    able = tuple(product for product in products if product.dtype in SIXTEEN_BITS)
    timings: dict[str, dict[str, tuple[tuple[Timing, ...], int]]] = {}
    for product, same in by_shape(able).items():
        measured = fitting.get((product.kernel, product.shape, product.dtype))
        if measured is not None:
            count = sum(each.count for each in same)
            timings.setdefault(product.kernel, {})[f"{product.shape} {product.dtype}"] = measured, count
    shapes = {name: {(p.shape, p.dtype) for p in able if p.kernel == name} for name in timings}
    return dict(found) | {name: _measured(name, timings[name], len(shapes[name])) for name in timings}


def _measured(name: str, timings: Mapping[str, tuple[tuple[Timing, ...], int]], num_shapes: int) -> Shaped:
    best = together(timings)
    plain_ns = sum(next(t.both_ns for t in each if t.setting is None) * count for each, count in timings.values())
    of = f"{len(timings)} of {num_shapes} shapes measured"
    if best is None or best.setting is None:
        why = f"{of}: XLA's own is quickest beside the load: {duration(plain_ns / 1e9)} of a step's forward."
        return Shaped(_PLAIN[name], Reason(name, 'backend="xla"', "measured", why), "xla")
    why = f"{of}: {duration(best.both_ns / 1e9)} beside the load, XLA's own {duration(plain_ns / 1e9)}."
    if best.setting.latency_ns is None:
        why += " Calls take different times with different shapes: the scheduler has estimates."
    return Shaped(best.setting, Reason(name, setting_text(best.setting), "measured", why))


def setting_text(knobs: Occupancy | None) -> str:
    """A setting in few words."""
    if knobs is None:
        return "XLA's own"
    tiles = f"{knobs.tile_m}x{knobs.tile_n}x{knobs.tile_k}/{knobs.stages}"
    if knobs.persistent:
        return f"{tiles} persistent" + (f", reserved_sms={knobs.reserved_sms}" if knobs.reserved_sms else "")
    return tiles + (f", smem_pad_bytes={knobs.smem_pad_bytes}" if knobs.smem_pad_bytes else "")


# `js.overlap`.


def overlap(
    model_or_plan: nnx.Module | nn.Module | ShardPlan,
    *,
    device: str | None = None,
    comm: str | CommFootprint = "ring",
    nccl: str | None = None,
    loss: Callable[..., Any] | None = None,
    batch: Any = None,
    cache: str | Path | None = None,
) -> Overlap:
    """Chooses how much of a GPU the kernels of a step leave to its collectives, and what XLA and NCCL are set to.

    Nothing is set and nothing is run: the result says what to call `js.kernels` with, what to compile with, and what
    to export, and for each what it rests on. Persistent kernels leave the multiprocessors that a collective fills, as
    long as that costs less than waiting; kernels of small blocks are padded. What `jshard tune` has measured on the
    same kind of device counts for more than any model. Where the kernels do not run, nothing is left. In several
    processes all of them call it, and what the first one has measured counts.

    Args:
        model_or_plan: an annotated model, of nnx or Linen, concrete or abstract, or its plan.
        device: as in a topology, "h200", or with its cluster, "h200:64x8"; the one that is here by default.
        comm: what runs beside the kernels: "ring", "tree", "nvls", "pat", "p2p", "symmetric", "copy-engine", or a
            `jshard.occupancy.CommFootprint`.
        nccl: version of NCCL, e.g. "2.30.7"; the newest whose kernels were read by default.
        loss: function of an nnx model and the batch. With it and `batch` the products of the model are known: what a
            unit computes, and which measurements are of it.
        batch: the global batch, abstract or real; a tuple stands for several arguments of `loss`.
        cache: file of `jshard tune`; by default that of the user.

    Returns:
        An `Overlap`: print it to see what was chosen and why.

    Raises:
        AnnotationError: the root of the model is not annotated.
        OccupancyError: the device or footprint is not known, or it would take every multiprocessor.
        CacheError: the `cache` that was named cannot be read.

    Example:
        >>> shaped = js.overlap(model, device="h200")
        >>> shaped.occupancy["matmul"].reserved_sms
        16
        >>> step = jax.jit(lambda x: x + 1, compiler_options=dict(shaped.compiler_options))
    """
    target = device_named(device)
    plan = model_or_plan if isinstance(model_or_plan, ShardPlan) else plan_of(model_or_plan)
    products = _products(model_or_plan, loss, batch)
    units = unit_times(plan, target.assumptions(math.prod(degree for _, degree in plan.mesh)), products)
    beside = _footprint(comm, target, nccl)
    kernels = shaped_kernels(target, beside, units, products)
    entries, unread = _entries(cache)
    if products is not None and beside is not None and not target.why_unshaped:
        kernels = measured_kernels(kernels, entries, target, beside, products)
    return _result(target, beside, units, kernels, nccl, [*unread, *_without(target, products)])


def _result(
    target: Device,
    beside: CommFootprint | None,
    units: Sequence[Any],
    kernels: dict[str, Shaped],
    nccl: str | None,
    notes: list[str],
) -> Overlap:
    reasons = [shaped.reason for shaped in kernels.values()]
    options: dict[str, Any] = {}
    environment: dict[str, str] = {}
    if target.platform == "gpu":
        side = side_of(beside, target.gpu, ctas=room_for(target, beside, kernels), version=nccl)
        options = compiler_options(platform="gpu", **side.options)
        # An option that the installed compiler does not know was left out, with a warning.
        reasons += [one for one in side.reasons if one.what in options or one.what in side.environment]
        reasons += [
            Reason(name, str(value), "fact", _PROFILE) for name, value in options.items() if name not in side.options
        ]
        environment, notes = dict(side.environment), [*notes, *side.notes]
    else:
        options = compiler_options(platform=target.facts.name if target.facts is not None else target.platform)
    return Overlap(
        device=target.title,
        comm=beside,
        occupancy=types.MappingProxyType({name: shaped.knobs for name, shaped in kernels.items()}),
        backends=types.MappingProxyType({name: shaped.backend for name, shaped in kernels.items()}),
        compiler_options=types.MappingProxyType(options),
        environment=types.MappingProxyType(environment),
        units=tuple(units),
        reasons=tuple(reasons),
        notes=tuple(notes),
    )


_PROFILE = 'of the profile "fastest": docs/schedules.md has what was measured.'


def _products(model: Any, loss: Callable[..., Any] | None, batch: Any) -> tuple[MatrixProduct, ...] | None:
    if loss is None or batch is None or not isinstance(model, nnx.Module):
        return None
    return products_of(model, loss, batch)


def _footprint(comm: str | CommFootprint, target: Device, nccl: str | None) -> CommFootprint | None:
    """What runs beside the kernels; None on a device of which nobody knows."""
    if isinstance(comm, CommFootprint):
        return comm
    if comm not in FOOTPRINTS:
        raise OccupancyError(
            f"There is no footprint {comm!r}.",
            where=f"comm={comm!r}",
            why=f"there are {', '.join(FOOTPRINTS)}.",
            do='js.overlap(model, comm="ring")',
        )
    if comm == COPY_ENGINE.name:
        return COPY_ENGINE
    if target.gpu is None:
        return None
    return footprint(comm, gpu=target.gpu, version=nccl)


def _entries(cache: str | Path | None) -> tuple[Entries, list[str]]:
    """What was measured, as the first process has it, and what to say of the user's own file if it cannot be read."""
    path = default_path() if cache is None else Path(cache)
    try:
        return parsed(of_first(lambda: text_of(load(path)), where="js.overlap"), path), []
    except (CacheError, RunError) as error:
        if cache is not None:
            raise
        note = f"The measurements in {path} were not used: {error.why}"
        warnings.warn(note, stacklevel=3)
        return {}, [note]


def _without(target: Device, products: tuple[MatrixProduct, ...] | None) -> list[str]:
    if products is not None or target.why_unshaped:
        return []
    return [
        "What the model computes is not known, and nothing measured was used: give the nnx model, loss= and batch=."
    ]
