"""`overlap`: how much kernels leave to collectives, and what XLA and NCCL are told, for one plan on one device."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
from flax import nnx

from jshard._errors import RunError
from jshard._plan import plan as plan_of
from jshard._shard_plan import ShardPlan
from jshard.cluster.options import compiler_options
from jshard.kernels.occupancy import COPY_ENGINE, FOOTPRINTS, CommFootprint, OccupancyError, footprint
from jshard.kernels.shaping.device import Device, device_named
from jshard.kernels.shaping.kernels import Shaped, measured_kernels, room_for, shaped_kernels
from jshard.kernels.shaping.nccl import side_of
from jshard.kernels.shaping.products import Product, products_of
from jshard.kernels.shaping.result import Overlap, Reason
from jshard.kernels.shaping.waiting import unit_times
from jshard.kernels.tuning.agree import of_first
from jshard.kernels.tuning.cache import CacheError, Entries, default_path, load, parsed, text_of


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
    """Chooses how much of a GPU the kernels of a step leave to its collectives, and what XLA and NCCL are told.

    Nothing is set and nothing is run: the result says what to call `js.kernels` with, what to compile with, and what
    to export, and for each what it rests on. Persistent kernels leave the multiprocessors that a collective fills, as
    long as that costs less than waiting; kernels of small blocks are padded. What `jshard tune` has measured on the
    same kind of device counts for more than any model. Where the kernels do not run, nothing is left. In several
    processes all of them call it, and what the first one has measured counts.

    Args:
        model_or_plan: an annotated model, of nnx or Linen, concrete or abstract, or its plan.
        device: as in a topology, "h200", or with its cluster, "h200:64x8"; the one that is here by default.
        comm: what runs beside the kernels: "ring", "tree", "nvls", "pat", "p2p", "symmetric", "copy-engine", or a
            `js.kernels.occupancy.CommFootprint`.
        nccl: version of NCCL, e.g. "2.30.7"; the newest whose kernels were read by default.
        loss: function of an nnx model and the batch. With it and `batch` the products of the model are known: what a
            unit computes, and which measurements are of it.
        batch: the global batch, abstract or real; a tuple stands for several arguments of `loss`.
        cache: file of `jshard tune`; by default that of the user.

    Returns:
        An `Overlap`: print it to see what was chosen and why.

    Raises:
        AnnotationError: the root of the model is not annotated.
        OccupancyError: there is no such device or footprint, or it would take every multiprocessor.
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
    num_devices = _size(plan)
    units = unit_times(plan, target.assumptions(num_devices), products)
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
        options = compiler_options(platform=_platform(target))
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


_PROFILE = 'of the profile "fastest": js.compiler_options says what was measured.'


def _products(model: Any, loss: Callable[..., Any] | None, batch: Any) -> tuple[Product, ...] | None:
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
    if target.gpu is None or not target.gpu.is_nvidia:
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
        told = f"The measurements in {path} were not used: {error.why}"
        warnings.warn(told, stacklevel=3)
        return {}, [told]


def _without(target: Device, products: tuple[Product, ...] | None) -> list[str]:
    if products is not None or target.why_unshaped:
        return []
    return [
        "What the model computes is not known, and nothing measured was used: give the nnx model, loss= and batch=."
    ]


def _size(plan: ShardPlan) -> int:
    size = 1
    for _, degree in plan.mesh:
        size *= degree
    return size


def _platform(target: Device) -> str:
    return target.facts.name if target.facts is not None else target.platform
