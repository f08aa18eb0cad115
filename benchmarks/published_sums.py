"""What a published program sends once a step: the parameters that it gathers, and the gradients that it reduces.

A stage of jshard's plan has both tables of an untied model, whole. In published programs none has both, and devices
along `tensor` have a part each. So less is sent.

ZeRO-1 can also all-reduce whole gradients, of which each device then takes its part. It sends twice as much as a
reduce-scatter, and in float32 twice as much again. Aleph-Alpha/scaling does so (`allreduce_tensor_in_float32` in
src/scaling/core/optimizer/allreduce.py): it copies gradients into buckets, which it divides by the number of data
shards, casts, all-reduces, casts back, and copies back.

And it can deal whole parameters to the devices, each of which then sends its own to all others. InternEvo does so
(`broadcast_params` in internlm/solver/optimizer/hybrid_zero_optim.py): that are as many broadcasts as devices, or as
parameters, where a gather would be one. Each goes once around the ring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from benchmarks.published_pytorch import PyTorchProgram
from benchmarks.published_tensor import tables_elsewhere
from jshard.cluster.assumptions import Assumptions
from jshard.cluster.compile import UnitSettings
from jshard.cluster.costs import Costs
from jshard.inspect.hlo.collectives import group_along
from jshard.inspect.hlo.work import OpWork
from jshard.inspect.memory import whole_elements
from jshard.plans.mesh import FSDP, REPLICA, TENSOR
from jshard.plans.plan import ShardPlan
from jshard.recipes.recipe import gathers_once

_FLOAT32_ITEMSIZE = 4
# Of each gradient in 16 bits, read and written: copied (4), divided (4), cast (6), cast back (6), copied back (4).
_BUCKET_BYTES = 24


def more_once_s(
    program: PyTorchProgram, costs: Costs, mesh: Mapping[str, int], units: UnitSettings, *, is_stage: bool
) -> float:
    """Returns how much longer a step takes after its last microbatch than in jshard's program; negative if it is less.

    Args:
        program: how it is written.
        costs: of the model, or of a stage.
        mesh: degrees of its axes.
        units: settings of the layers.
        is_stage: whether it is a stage of a pipeline.
    """
    group = group_along(mesh, (REPLICA, FSDP))
    if not gathers_once(costs.recipe) or len(group) == 1:
        return 0.0
    plan = costs.traces.plan(tuple(mesh.items()), tuple(units.items()))
    elsewhere = tables_elsewhere(costs, plan, tensor=mesh.get(TENSOR, 1), is_stage=is_stage)
    num_gradients = 0.0
    gradients_bytes = gradients_elsewhere_bytes = parameters_elsewhere_bytes = 0.0
    for leaf in plan.leaves:
        placement = leaf.placement
        if not placement.gathered:
            continue
        elements = whole_elements(placement)
        leaf_bytes = elements * jnp.dtype(placement.reduce_dtype).itemsize
        part = elsewhere.get(leaf.path, 0.0)
        num_gradients += (1 - part) * elements
        gradients_bytes += leaf_bytes
        gradients_elsewhere_bytes += part * leaf_bytes
        parameters_elsewhere_bytes += part * placement.gathered_bytes
    assumptions = costs.machine.assumptions
    more_s = -_sent_s("all-gather", parameters_elsewhere_bytes, group, assumptions)
    if program.broadcasts:
        more_s += broadcasts_s(plan, assumptions)
    if program.whole_sums:
        scattered_s = _sent_s("reduce-scatter", gradients_bytes, group, assumptions)
        return more_s + whole_sums_s(num_gradients, group, assumptions) - scattered_s
    return more_s - _sent_s("reduce-scatter", gradients_elsewhere_bytes, group, assumptions)


def broadcasts_s(plan: ShardPlan, assumptions: Assumptions) -> float:
    """Returns how much longer broadcasts of whole parameters take than a gather of all parts.

    As much is sent in both.

    Args:
        plan: of the model.
        assumptions: about the devices and their links.
    """
    group = group_along(dict(plan.mesh), (FSDP,))
    parameters_bytes = 0
    num_parameters = 0
    for leaf in plan.leaves:
        if leaf.placement.gathered:
            parameters_bytes += leaf.placement.gathered_bytes
            num_parameters += leaf.placement.layers
    num_broadcasts = min(len(group), num_parameters)
    if num_broadcasts <= 1:
        return 0.0
    each_s = assumptions.transfer_s("all-gather", parameters_bytes / num_broadcasts, group)
    return num_broadcasts * each_s - assumptions.transfer_s("all-gather", parameters_bytes, group)


def whole_sums_s(num_gradients: float, group: Sequence[int], assumptions: Assumptions) -> float:
    """Returns the time to add gradients that are whole on all devices of a group, in float32.

    Args:
        num_gradients: how many numbers they are.
        group: positions of the devices in the mesh.
        assumptions: about the devices and their links.
    """
    in_buckets = OpWork(memory_bytes=_BUCKET_BYTES * num_gradients)
    return assumptions.compute_s(in_buckets) + _sent_s(
        "all-reduce", _FLOAT32_ITEMSIZE * num_gradients, group, assumptions
    )


def _sent_s(kind: str, full_bytes: float, group: Sequence[int], assumptions: Assumptions) -> float:
    """Returns the time of a collective of so many bytes in all: 0 of none."""
    return assumptions.transfer_s(kind, full_bytes, group) if full_bytes else 0.0
