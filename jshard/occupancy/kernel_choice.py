"""The room that each kernel leaves to collectives: by the model, or by measurements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from jshard._text import duration
from jshard.kernels.backend import Backend, Occupancy
from jshard.occupancy import CommFootprint, reserved_for
from jshard.occupancy.device import Device
from jshard.occupancy.measured import Measured
from jshard.occupancy.products import MatrixProduct
from jshard.occupancy.step_times import best_reserve, step_times, traffic_of_unit
from jshard.occupancy.timings import Timing, latency_of, quickest, setting_text, total
from jshard.plans.plan import ShardPlan

PRODUCTS = ("matmul", "mlp")
NORMS = ("rms_norm", "layer_norm")

Origin = Literal["fact", "model", "estimate", "measured"]


@dataclasses.dataclass(frozen=True)
class Reason:
    """One decision."""

    what: str  # a kernel, an option, or an environment variable
    chosen: str  # the decision as text
    origin: Origin  # the basis of the decision
    why: str  # the numbers


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """The decision for one kernel."""

    knobs: Occupancy
    reason: Reason
    backend: Backend = "auto"


# ---- by the model


def choices_by_model(
    target: Device, comm: CommFootprint | None, plan: ShardPlan, products: Sequence[MatrixProduct] | None
) -> dict[str, KernelChoice]:
    """Returns the decision for each kernel, by the occupancy model and estimates.

    Args:
        target: the device.
        comm: the collective beside the kernels; None if its footprint is unknown.
        plan: the plan of the model.
        products: the products of the model; None if they are unknown.
    """
    why_nothing = _why_nothing_is_left(target, comm, plan)
    if why_nothing:
        choices = {}
        for name in PRODUCTS:
            choices[name] = KernelChoice(Occupancy(), Reason(name, "as it is", "fact", why_nothing))
        return choices | _norms("fact", why_nothing)
    why = "its blocks are small and short; padding would lose more time than a collective waits."
    assert comm is not None
    return _products_by_model(target, comm, plan, products) | _norms("model", why)


def _why_nothing_is_left(target: Device, comm: CommFootprint | None, plan: ShardPlan) -> str:
    """Returns why no kernel needs to leave anything; empty if kernels do."""
    if target.why_unshaped:
        return target.why_unshaped
    if comm is None:
        return f"the resources of a collective on {target.title} are unknown."
    if not comm.ctas:
        return "copy engines do the gathers, and need no multiprocessors."
    if not any(traffic_of_unit(plan, unit) for unit in plan.units):
        return "nothing is sent on this mesh, so there is nothing to leave room for."
    return ""


def _norms(origin: Origin, why: str) -> dict[str, KernelChoice]:
    choices = {}
    for name in NORMS:
        choices[name] = KernelChoice(Occupancy(persistent=False), Reason(name, "as it is", origin, why))
    return choices


def _products_by_model(
    target: Device, comm: CommFootprint, plan: ShardPlan, products: Sequence[MatrixProduct] | None
) -> dict[str, KernelChoice]:
    """Returns how many multiprocessors the kernels of products leave free."""
    assert target.gpu is not None
    sms = target.gpu.num_sms
    needed = reserved_for(target.gpu, comm)
    assumptions = target.assumptions(math.prod(degree for _, degree in plan.mesh))
    origin: Origin
    if products and assumptions is not None:
        origin = "estimate"
        # From 0 to what the collective fills: the estimate may find that waiting is quicker.
        reserved, seconds = best_reserve(step_times(plan, assumptions, products), needed=needed, sms=sms)
        takes = {count: duration(count_s) for count, count_s in seconds.items()}
        why = (
            f"products and collectives take {takes[reserved]}; {takes[needed]} with {needed} of {sms} SMs left,"
            f" {takes[0]} if collectives wait."
        )
    else:
        origin = "model"
        reserved = needed
        why = f"{comm.ctas} blocks of a collective fill that many of {sms} SMs, and would wait for a whole kernel."
    chosen = f"reserved_sms={reserved}" if reserved else "as it is"
    choices = {}
    for name in PRODUCTS:
        choices[name] = KernelChoice(Occupancy(reserved_sms=reserved), Reason(name, chosen, origin, why))
    return choices


# ---- by measurements


def choices_by_measurement(measured: Measured, products: Sequence[MatrixProduct]) -> dict[str, KernelChoice]:
    """Returns the decision for each kernel that was measured, by the best setting for all its calls together.

    Args:
        measured: the measurements that are valid for the device and the collective.
        products: the products of the model.
    """
    choices = {}
    for kernel in PRODUCTS:
        calls = _calls_by_shape(products, kernel)
        timings_by_shape = {}
        for key, entry in measured.items():
            if key.kernel == kernel:
                timings_by_shape[key.shape, key.dtype] = entry.timings
        timed_calls = []
        for shape, count in calls.items():
            if shape in timings_by_shape:
                timed_calls.append((timings_by_shape[shape], count))
        if timed_calls:
            choices[kernel] = _measured_choice(kernel, timed_calls, num_shapes=len(calls))
    return choices


def _calls_by_shape(products: Sequence[MatrixProduct], kernel: str) -> Mapping[tuple[str, str], int]:
    """Returns how often a kernel is called in forward, by shape and dtype."""
    calls: dict[tuple[str, str], int] = {}
    for product in products:
        if product.kernel == kernel and product.is_16_bits:
            shape = (product.shape, product.dtype)
            calls[shape] = calls.get(shape, 0) + product.count
    return calls


def _measured_choice(kernel: str, calls: list[tuple[tuple[Timing, ...], int]], *, num_shapes: int) -> KernelChoice:
    """Returns the decision for one kernel.

    Args:
        kernel: its name.
        calls: the times of the measured shapes, and how often each is called.
        num_shapes: how many shapes the model has.
    """
    best = quickest(calls)
    coverage = f"{len(calls)} of {num_shapes} shapes measured"
    # XLA's own time is in every entry: a file without it is refused.
    plain_text = duration(total(None, calls).both_ns / 1e9)
    if best.setting is None:
        why = f"{coverage}: XLA's own is fastest beside the load: {plain_text} of a step's forward."
        return KernelChoice(Occupancy(), Reason(kernel, 'backend="xla"', "measured", why), backend="xla")
    why = f"{coverage}: {duration(best.both_ns / 1e9)} beside the load, XLA's own {plain_text}."
    latency_ns = latency_of(best.setting, calls)
    if latency_ns is None:
        # One number is stated for all calls of a kernel.
        why += " The times of calls differ by shape, so the scheduler gets estimates."
    knobs = dataclasses.replace(best.setting, latency_ns=latency_ns)
    return KernelChoice(knobs, Reason(kernel, setting_text(knobs), "measured", why))
