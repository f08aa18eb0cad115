"""`overlap`: multiprocessors that kernels leave to collectives, and XLA and NCCL settings, for a plan on a device."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
from flax import nnx
from rich.console import Group
from rich.text import Text

from jshard._paths import expanded
from jshard._text import duration
from jshard.cluster.options import IN_FLIGHT, compiler_options
from jshard.cluster.replay import Assumptions
from jshard.errors import RunError
from jshard.inspect.communication import FORWARD, Traffic, traffic_of
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.kernels.backend import Backend, Occupancy
from jshard.occupancy import COPY_ENGINE, FOOTPRINTS, CommFootprint, OccupancyError, footprint, reserved_for, resident
from jshard.occupancy.device import Device, MatrixProduct, device_named, products_of
from jshard.occupancy.footprints import RING_THREADS, parsed_version
from jshard.occupancy.measured import (
    CacheError,
    Measured,
    default_path,
    footprint_text,
    latency_of,
    load,
    of_first,
    parsed,
    quickest,
    setting_text,
    text_of,
    total,
)
from jshard.plans.plan import ShardPlan, UnitPlan
from jshard.plans.plan import plan as plan_of

PRODUCTS, NORMS = ("matmul", "mlp"), ("rms_norm", "layer_norm")
_LEGEND = (
    'from: "measured" on this kind of device; "model" computed from facts about the device, its kernels and NCCL;'
    ' "estimate" compares times under stated assumptions. Only a measurement shows the fastest: jshard tune'
)


@dataclasses.dataclass(frozen=True)
class Reason:
    """One decision."""

    what: str  # a kernel, an option, or an environment variable
    chosen: str  # the decision as text
    origin: Literal["fact", "model", "estimate", "measured"]  # the basis of the decision
    why: str  # the numbers


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Overlap(Printed):
    """The result of `js.tune_overlap`. `print` it; a notebook displays it; `to_json` is for programs.

    Attributes:
        device: as text.
        comm: the collective beside the kernels; None if its footprint on this device is unknown.
        occupancy: the occupancy argument for each kernel: "matmul", "mlp", "rms_norm" and "layer_norm".
        backends: the `backend` of each kernel: "auto", or "xla" where XLA's own was measured to be faster.
        compiler_options: for `jax.jit(compiler_options=...)`.
        environment: variables for NCCL. Nothing is set: `exports` has the lines for a shell.
        reasons: the basis of each decision.
        notes: further remarks.
    """

    device: str
    comm: CommFootprint | None
    occupancy: Mapping[str, Occupancy]
    backends: Mapping[str, Backend]
    compiler_options: Mapping[str, Any]
    environment: Mapping[str, str]
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()

    @property
    def exports(self) -> tuple[str, ...]:
        """Lines for the shell that starts the run."""
        return tuple(f"export {name}={value}" for name, value in self.environment.items())

    def __rich__(self) -> Group:
        kernels = [reason for reason in self.reasons if reason.what in self.occupancy]
        others = [reason for reason in self.reasons if reason.what not in self.occupancy]
        tables = [_reasons_table("Kernels: how much they leave", "kernel", kernels)]
        tables += [_reasons_table("Compiler (xla_gpu_...) and NCCL", "option", others)] if others else []
        spaced = [part for table in tables for part in (Text(), table)]
        exports = ["For the shell, nothing is set:", *(f"  {line}" for line in self.exports)] if self.exports else []
        return Group(Text(self._headline()), *spaced, Text(), *map(Text, (*exports, *self.notes, _LEGEND)))

    def to_json(self) -> str:
        """Everything as text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def _headline(self) -> str:
        if self.comm is None:
            return f"{self.device}: the resources of a collective on it are unknown"
        if not self.comm.ctas:
            return f"{self.device}, collectives by {self.comm}: they use no multiprocessor"
        block = f"{self.comm.threads} threads x {self.comm.registers} registers, {self.comm.smem_bytes:,} B"
        return f"{self.device}, beside {self.comm}: {self.comm.ctas} blocks of {block}"


def _reasons_table(title: str, column: str, reasons: Sequence[Reason]) -> FittedTable:
    table = made_table(title, column, "chosen", "from", "why")
    for reason in reasons:
        add_row(table, reason.what.removeprefix("xla_gpu_"), reason.chosen, reason.origin, reason.why)
    return table


def tune_overlap(
    model_or_plan: nnx.Module | nn.Module | ShardPlan,
    *,
    device: str | None = None,
    comm: str | CommFootprint = "ring",
    nccl: str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    batch: Any = None,
    cache: str | Path | None = None,
) -> Overlap:
    """Chooses how much of a GPU a step's kernels leave to its collectives, and the settings of XLA and NCCL.

    Nothing is set or run: the result has the arguments for `js.kernels`, the compiler options and the variables
    to export, each with its reason. Persistent kernels leave free the multiprocessors that a collective fills, as
    long as that costs less than waiting. Measurements of `jshard tune` on the same kind of device take precedence
    over models. Where the kernels do not run, nothing is left free. With several processes, all of them must call it,
    and the measurements of the first one are used.

    Args:
        model_or_plan: an annotated model, nnx or Linen, concrete or abstract, or its plan.
        device: a name as in a topology, "h200", or with a cluster, "h200:64x8"; the present one by default.
        comm: the collective beside the kernels: "ring", "tree", "nvls", "pat", "p2p", "symmetric", "copy-engine", or a
            `jshard.occupancy.CommFootprint`.
        nccl: version of NCCL, e.g. "2.30.7"; by default the newest whose kernels were read.
        loss_fn: function of an nnx model and the batch. With it and `batch` the model's products are known, and with them
            each unit's computation and the measurements that apply to it.
        batch: the global batch, abstract or real; a tuple is passed as several arguments of `loss_fn`.
        cache: file of `jshard tune`; the user's by default.

    Returns:
        An `Overlap`: print it to see the choices and the reasons.

    Raises:
        AnnotationError: the root of the model is not annotated.
        OccupancyError: the device or footprint is unknown, or the collective would fill every multiprocessor.
        CacheError: the given `cache` cannot be read.

    Example:
        >>> shaped = js.tune_overlap(model, device="h200")
        >>> shaped.occupancy["matmul"].reserved_sms
        16
        >>> step = jax.jit(lambda x: x + 1, compiler_options=dict(shaped.compiler_options))
    """
    target, products = device_named(device), None
    plan = model_or_plan if isinstance(model_or_plan, ShardPlan) else plan_of(model_or_plan)
    if loss_fn is not None and batch is not None and isinstance(model_or_plan, nnx.Module):
        products = products_of(model_or_plan, loss_fn, batch)
    beside = _footprint(comm, target, nccl)
    kernels = _by_model(target, beside, plan, products)
    measured, notes = _measurements(cache)
    if beside is not None and not target.why_unshaped:
        if products is None:
            notes.append(_UNKNOWN)
        fitting = {key: one for key, one in measured.items() if key.holds_for(target.is_of, footprint_text(beside))}
        kernels |= _by_measurement(fitting, products or ())
    reasons = [one.reason for one in kernels.values()]
    options, environment = _side(target, beside, kernels, nccl, reasons, notes)
    return Overlap(
        device=target.title,
        comm=beside,
        occupancy={name: one.knobs for name, one in kernels.items()},
        backends={name: one.backend for name, one in kernels.items()},
        compiler_options=options,
        environment=environment,
        reasons=tuple(reasons),
        notes=tuple(notes),
    )


_UNKNOWN = "The model's products are unknown, so no measurement was used: pass the nnx model, loss_fn= and batch=."


def _footprint(comm: str | CommFootprint, target: Device, nccl: str | None) -> CommFootprint | None:
    """The collective beside the kernels; None on a device for which it is unknown."""
    if isinstance(comm, CommFootprint):
        return comm
    if target.gpu is None and comm in FOOTPRINTS and comm != COPY_ENGINE.name:
        return None
    return footprint(comm, gpu=target.gpu, version=nccl)  # type: ignore[arg-type]  # copy engines need none


def _measurements(cache: str | Path | None) -> tuple[Measured, list[str]]:
    """The measurements of the first process, and a note if the user's own file cannot be read."""
    path = default_path() if cache is None else expanded(cache)
    try:
        return parsed(of_first(lambda: text_of(load(path)), where="js.tune_overlap"), path), []
    except (CacheError, RunError) as error:
        if cache is not None:
            raise
        note = f"The measurements in {path} were not used: {error.why}"
        warnings.warn(note, stacklevel=3)
        return {}, [note]


# The room that each kernel leaves.


@dataclasses.dataclass(frozen=True)
class _Shaped:
    """The decision for one kernel."""

    knobs: Occupancy
    reason: Reason
    backend: Backend = "auto"


def _by_model(
    target: Device, comm: CommFootprint | None, plan: ShardPlan, products: Sequence[MatrixProduct] | None
) -> dict[str, _Shaped]:
    """The room that each kernel leaves, by the model."""
    why = target.why_unshaped
    if not why and comm is None:
        why = f"the resources of a collective on {target.title} are unknown."
    if not why and comm is not None and not comm.ctas:
        why = "copy engines do the gathers, and need no multiprocessors."
    if not why and not any(traffic_of_unit(plan, unit) for unit in plan.units):
        why = "nothing is sent on this mesh, so there is nothing to leave room for."
    norms_why = why or "its blocks are small and short; padding would lose more time than a collective waits."
    norms = {
        name: _Shaped(Occupancy(persistent=False), Reason(name, "as it is", "fact" if why else "model", norms_why))
        for name in NORMS
    }
    if why or target.gpu is None or comm is None:
        plain = Occupancy()
        return {name: _Shaped(plain, Reason(name, "as it is", "fact", why)) for name in PRODUCTS} | norms
    sms, needed = target.gpu.num_sms, reserved_for(target.gpu, comm)
    reserved, origin = needed, "model"
    why = f"{comm.ctas} blocks of a collective fill that many of {sms} SMs, and would wait for a whole kernel."
    assumptions = target.assumptions(math.prod(degree for _, degree in plan.mesh))
    if products and assumptions is not None:
        reserved, times = best_reserve(step_times(plan, assumptions, products), needed=needed, sms=sms)
        origin = "estimate"
        taken = {count: duration(seconds) for count, seconds in times.items()}
        why = f"products and collectives take {taken[reserved]}; {taken[needed]} with {needed} of {sms} SMs left,"
        why += f" {taken[0]} if collectives wait."
    chosen = f"reserved_sms={reserved}" if reserved else "as it is"
    knobs = Occupancy(reserved_sms=reserved)
    return {name: _Shaped(knobs, Reason(name, chosen, origin, why)) for name in PRODUCTS} | norms


def _by_measurement(measured: Measured, products: Sequence[MatrixProduct]) -> dict[str, _Shaped]:
    """The measured kernels, by the best setting for all their calls together."""
    found = {}
    for name in PRODUCTS:
        counts: dict[tuple[str, str], int] = {}
        for product in products:
            if product.kernel == name and product.is_16_bits:
                shape = product.shape, product.dtype
                counts[shape] = counts.get(shape, 0) + product.count
        known = {(key.shape, key.dtype): one.timings for key, one in measured.items() if key.kernel == name}
        timings = [(known[shape], count) for shape, count in counts.items() if shape in known]
        if not timings:
            continue
        best, plain = quickest(timings), total(None, timings)
        of = f"{len(timings)} of {len(counts)} shapes measured"
        if best.setting is None:
            why = f"{of}: XLA's own is fastest beside the load: {duration(plain.both_ns / 1e9)} of a step's forward."
            found[name] = _Shaped(Occupancy(), Reason(name, 'backend="xla"', "measured", why), "xla")
            continue
        why = f"{of}: {duration(best.both_ns / 1e9)} beside the load, XLA's own {duration(plain.both_ns / 1e9)}."
        latency_ns = latency_of(best.setting, timings)
        if latency_ns is None:
            why += " The times of calls differ by shape, so the scheduler gets estimates."
        knobs = dataclasses.replace(best.setting, latency_ns=latency_ns)
        found[name] = _Shaped(knobs, Reason(name, setting_text(knobs), "measured", why))
    return found


# Estimated step times: leaving multiprocessors to collectives, compared with waiting for the collectives.

_BACKWARD = 2.0  # products of backward per product of forward


@dataclasses.dataclass
class StepTimes:
    """Seconds of one step on a device, of forward and of backward."""

    compute_s: list[float]  # on all multiprocessors
    hidden_s: list[float]  # of collectives that another unit's products may hide, with all their blocks running
    exposed_s: list[float]  # of the root's collectives, which no other unit can hide


def traffic_of_unit(plan: ShardPlan, unit: UnitPlan) -> list[Traffic]:
    """The collectives of one unit of a plan, in one step."""
    alone = dataclasses.replace(plan, leaves=plan.unit_leaves(unit.name))
    return [one for one in traffic_of(alone) if one.group_size > 1]


def transfers(plan: ShardPlan, unit: UnitPlan, assumptions: Assumptions) -> list[tuple[Traffic, float]]:
    """The collectives of a unit, each with its seconds per step."""
    layers = max((leaf.placement.layers for leaf in plan.unit_leaves(unit.name)), default=1)
    each_s = lambda one: assumptions.transfer_s(one.kind, one.full_bytes / layers, range(one.group_size))
    return [(one, layers * each_s(one)) for one in traffic_of_unit(plan, unit)]


def step_times(plan: ShardPlan, assumptions: Assumptions, products: Sequence[MatrixProduct]) -> StepTimes:
    """The times of a model's products and of its plan's collectives."""
    found = StepTimes([0.0, 0.0], [0.0, 0.0], [0.0, 0.0])
    for unit in plan.units:
        sent_s = found.exposed_s if unit.name == plan.units[0].name else found.hidden_s
        for one, seconds in transfers(plan, unit, assumptions):
            sent_s[not one.purpose.startswith(FORWARD)] += seconds
        flops = sum(product.flops for product in products if product.unit == unit.name)
        forward_s = flops / (assumptions.flops_per_s * assumptions.matmul_efficiency)
        found.compute_s[0] += forward_s
        found.compute_s[1] += forward_s * (_BACKWARD + (unit.remat == "full"))
    return found


def best_reserve(times: StepTimes, *, needed: int, sms: int) -> tuple[int, Mapping[int, float]]:
    """The number of multiprocessors to leave for the least time, the smallest in a tie; and the time for each."""

    def total_s(reserved: int) -> float:
        parts = zip(times.compute_s, times.hidden_s, times.exposed_s, strict=True)
        if not reserved:
            return sum(map(sum, parts))
        slower = needed / reserved
        return sum(
            max(compute_s * sms / (sms - reserved), hidden_s * slower) + exposed_s * slower
            for compute_s, hidden_s, exposed_s in parts
        )

    found = {reserved: total_s(reserved) for reserved in range(needed + 1)}
    return min(found, key=lambda reserved: (found[reserved], reserved)), found


# Settings of XLA and NCCL.

_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
_PRIORITY = "xla_gpu_enable_highest_priority_async_stream"
_SYMMETRIC = "xla_gpu_experimental_enable_nccl_symmetric_buffers"
_CHANNELS = "xla_gpu_nccl_collective_max_nchannels"
_P2P_CHANNELS = "xla_gpu_nccl_p2p_max_nchannels"
_COPIES = "Reduce-scatters and all-reduces compute: copy engines cannot do them, so they still use multiprocessors."
_CAUTION = (
    "XLA held symmetric kernels back for illegal-memory errors (openxla/xla#33613, #36462): try them before a long run."
)


def _side(
    target: Device,
    comm: CommFootprint | None,
    kernels: Mapping[str, _Shaped],
    nccl: str | None,
    reasons: list[Reason],
    notes: list[str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Compiler options and NCCL variables; adds to the reasons and the notes."""
    platform = target.platform if target.facts is None else target.facts.name
    if target.platform != "gpu":
        return compiler_options(platform=platform), {}
    environment = {}
    if comm is COPY_ENGINE:
        if nccl is not None and parsed_version(nccl) < (2, 28):
            raise OccupancyError(
                "This NCCL cannot use the copy engines.",
                where=f'comm="{COPY_ENGINE.name}", nccl="{nccl}"',
                why="NCCL_CTA_POLICY=ZERO needs 2.28 or newer.",
                do='comm="ring"  # or NCCL 2.28 or newer',
            )
        environment["NCCL_CTA_POLICY"] = "ZERO"
        why = "NCCL 2.28 and newer: gathers and all-to-alls use the copy engines. This may cost bandwidth."
        reasons.append(Reason("NCCL_CTA_POLICY", "ZERO", "fact", why))
        notes.append(_COPIES)
    if comm is not None and comm.name == "ring" and comm.threads != RING_THREADS:
        environment["NCCL_NTHREADS"] = f"{comm.threads - 32}"
        why = "the footprint has fewer threads than NCCL's default; one warp of them synchronises."
        reasons.append(Reason("NCCL_NTHREADS", environment["NCCL_NTHREADS"], "fact", why))
    asked = _asked_of_xla(target, comm, kernels)
    # An option that the installed compiler does not have is omitted, with a warning.
    options = compiler_options(platform=platform, **{name: value for name, (value, _) in asked.items()})
    for name, value in options.items():
        why = asked[name][1] if name in asked else 'of the profile "fastest": docs/schedules.md has what was tried.'
        reasons.append(Reason(name, str(value), "model" if name in (_CHANNELS, _P2P_CHANNELS) else "fact", why))
    if {_CHANNELS, _P2P_CHANNELS} & options.keys() and comm is not None and "ctas: an assumption" in comm.source:
        line = f"The {comm.ctas} blocks of a collective are an assumption, because NCCL chooses by the links:"
        notes.append(f"{line} comm=footprint(..., ctas=N) sets it.")
    if _SYMMETRIC in options:
        notes.append(_CAUTION)
    return options, environment


def _asked_of_xla(
    target: Device, comm: CommFootprint | None, kernels: Mapping[str, _Shaped]
) -> dict[str, tuple[Any, str]]:
    """Compiler options beside the kernels, each with its reason."""
    asked: dict[str, tuple[Any, str]] = {
        _LIMIT: (IN_FLIGHT, "1 by default: a window closes when the next collective starts."),
        _PRIORITY: (True, "the default, set explicitly: it gives a collective the next block's place."),
    }
    if comm is not None and comm.name in ("symmetric", COPY_ENGINE.name):
        asked[_SYMMETRIC] = True, "symmetric kernels and copy engines need NCCL's symmetric memory."
    leaving = [one for one in kernels.values() if one.knobs.reserved_sms]
    if leaving and comm is not None and comm.block is not None and target.gpu is not None:
        ctas = comm.ctas  # it was measured beside all of them
        if all(one.reason.origin != "measured" for one in leaving):
            each = resident(target.gpu, comm.block)
            ctas = min(ctas, *(one.knobs.reserved_sms * each for one in leaving))
        name = _P2P_CHANNELS if comm.name == "p2p" else _CHANNELS
        asked[name] = ctas, "no more blocks than there is room for; XLA passes it to NCCL."
    return asked
