"""How much each kernel leaves to a collective: by the model of occupancy, and by what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jshard import _compat
from jshard.kernels.knobs import Occupancy
from jshard.kernels.occupancy import (
    CommFootprint,
    GpuFacts,
    plans,
    refusals,
    reserved_for,
    resident,
    shipped_kernels,
)
from jshard.kernels.shaping.device import Device
from jshard.kernels.shaping.products import SIXTEEN_BITS, Product, by_shape
from jshard.kernels.shaping.result import Origin, Reason, duration
from jshard.kernels.shaping.waiting import UnitTimes, best_reserve
from jshard.kernels.tuning.cache import Entries, footprint_text
from jshard.kernels.tuning.choose import Timing, together
from jshard.kernels.where import Backend

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
    device: Device, comm: CommFootprint | None, units: Sequence[UnitTimes], products: Sequence[Product] | None
) -> dict[str, Shaped]:
    """What each kernel leaves, by the model.

    Args:
        device: it runs on.
        comm: what runs beside it; None where that is not known.
        units: what they send and compute.
        products: of the model; None where they are not known.

    Raises:
        OccupancyError: the collective would take every multiprocessor.
    """
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

    Args:
        device: it runs on.
        comm: what runs beside the kernels.
        kernels: as they were shaped.
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
    gpu: GpuFacts, comm: CommFootprint, units: Sequence[UnitTimes], products: Sequence[Product] | None
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
    if not kernels:
        return Shaped(_PLAIN[name], Reason(name, "as it is", "fact", "the registers of its blocks were not read yet."))
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
    found: Mapping[str, Shaped], entries: Entries, device: Device, comm: CommFootprint, products: Sequence[Product]
) -> dict[str, Shaped]:
    """The same with what was measured in the place of what was computed.

    Args:
        found: by the model.
        entries: of the tuner.
        device: it runs on; of one that is only named, measurements of any GPU of that name count.
        comm: what runs beside the kernels.
        products: of the model.
    """
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
        why += " Calls take different times with different shapes: the scheduler is told estimates."
    return Shaped(best.setting, Reason(name, told(best.setting), "measured", why))


def told(knobs: Occupancy | None) -> str:
    """A setting in few words."""
    if knobs is None:
        return "XLA's own"
    tiles = f"{knobs.tile_m}x{knobs.tile_n}x{knobs.tile_k}/{knobs.stages}"
    if knobs.persistent:
        return f"{tiles} persistent" + (f", reserved_sms={knobs.reserved_sms}" if knobs.reserved_sms else "")
    return tiles + (f", smem_pad_bytes={knobs.smem_pad_bytes}" if knobs.smem_pad_bytes else "")
