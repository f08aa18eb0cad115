"""`remat="auto"`: counts what the layers of a program save and compute again by each policy, and sets the chosen one.

This is done when a region is differentiated: its program is traced then, with the sizes of the batch, and it is known
how often each layer runs. All processes count the same.
"""

import contextvars
import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxprs_in_params
from jax.sharding import Mesh

from jshard._text import ATTENTION
from jshard.engine.context import during
from jshard.engine.crossing import AnyCrossing, Crossing, Region
from jshard.engine.layer_uses import UnitUse, UnitUses
from jshard.engine.mixing import ModelKey, key_of, key_of_unit
from jshard.engine.program import Program, abstract
from jshard.engine.rules.products import flops
from jshard.facts.devices import DEVICES, DeviceFacts, device_of
from jshard.plans.mesh import TENSOR, degree
from jshard.plans.plan import ShardPlan
from jshard.plans.remat import AUTO, NONE
from jshard.plans.remat_choice import (
    CANDIDATES,
    LayerGroup,
    RematChoice,
    RematWork,
    choose,
    none_outside_loops,
)

_ROOM = 0.92  # share of a device's memory that a step may use, by the estimate
# Copies of a parameter that is trained: itself, its gradient, and the two means of AdamW.
_TRAINED_COPIES = 4
# Copies of the largest value outside of layers, such as the logits: in float32, and their gradients.
_OUTSIDE_COPIES = 3
_UNKNOWN_DEVICE = "h100"
_MOST_MODELS = 64

_device: contextvars.ContextVar[DeviceFacts | None] = contextvars.ContextVar("device", default=None)
_records: dict[ModelKey, dict[str, RematChoice]] = {}


def chosen_for(device: DeviceFacts) -> AbstractContextManager[None]:
    """A context in which policies are chosen for a device that the mesh does not show, as an abstract mesh."""
    return during(_device, device)


def choose_remats(program: Program, region: Region, operands: Sequence[AnyCrossing], wrt: Sequence[bool]) -> None:
    """Sets the policies of the units in a region's program that leave it to jshard, and records why.

    Args:
        program: the program.
        region: where it runs.
        operands: how its operands enter.
        wrt: with respect to which of them it is differentiated.
    """
    uses = list(UnitUses(program.jaxpr.jaxpr, wrt).by_program.values())
    if not uses:
        return
    facts = _device.get() or _device_of(region)
    # What layers compute is split like the batch, and over `tensor`.
    num_shards = region.degree * degree(region.mesh, TENSOR) if region.batch else 1
    room_bytes = _ROOM * facts.hbm_bytes - _state_bytes(program, region, operands, wrt)
    room_bytes -= _OUTSIDE_COPIES * _largest_bytes(program, region) / num_shards
    choices = dict.fromkeys(uses, _NOT_A_LAYER)
    choices |= _chosen([use for use in uses if _is_layer(use)], facts, num_shards, room_bytes)
    for use, choice in choices.items():
        use.program.settle(choice.remat)
    _note(region, choices)


_NOT_A_LAYER = RematChoice(NONE, "")


def _chosen(
    layers: Sequence[UnitUse], facts: DeviceFacts, num_shards: int, room_bytes: float
) -> dict[UnitUse, RematChoice]:
    """Returns the choices for layers: one for those in loops, and one for the others.

    Args:
        layers: the layers.
        facts: about a device.
        num_shards: how many devices share the work of a layer.
        room_bytes: of a device, for what the layers save.
    """
    choices: dict[UnitUse, RematChoice] = {}
    in_loops = [use for use in layers if use.in_loop]
    outside = [use for use in layers if not use.in_loop]
    most_bytes = sum(use.num_layers * _all_bytes(use.program.jaxpr.jaxpr) for use in outside) / num_shards
    if outside and most_bytes <= room_bytes / 2:
        # As in most models. Nothing has to be differentiated under other policies.
        choices |= dict.fromkeys(outside, none_outside_loops(most_bytes, room_bytes))
        room_bytes -= most_bytes
        outside = []

    groups = [group for group in (in_loops, outside) if group]
    counted = [_counted(group, facts, num_shards) for group in groups]
    for group, choice in zip(groups, choose(counted, facts, room_bytes), strict=True):
        choices |= dict.fromkeys(group, choice)
    return choices


def _is_layer(use: UnitUse) -> bool:
    """Returns whether there is something to choose for a unit: it repeats, as an innermost unit, and has gradients."""
    # With units inside, each of them would run once more; as would one in a `jax.checkpoint` of the model.
    return use.num_layers > 1 and use.is_innermost and not use.is_recomputed and any(use.wrt)


def _device_of(region: Region) -> DeviceFacts:
    """Returns the facts about the devices of a mesh; those of an H100 if they are not known, as on a CPU."""
    facts = None
    if isinstance(region.mesh, Mesh):
        # The same on all processes: the kinds of devices, and not what their drivers say of free memory.
        facts = device_of(region.mesh.devices.flat[0].device_kind)
    return facts or DEVICES[_UNKNOWN_DEVICE]


# ---- memory


def _state_bytes(program: Program, region: Region, operands: Sequence[AnyCrossing], wrt: Sequence[bool]) -> float:
    """Returns the bytes on one device of parameters, their gradients and the state of AdamW."""
    trained = set()
    for crossing, is_trained in zip(operands[: program.num_params], wrt[: program.num_params], strict=True):
        if is_trained and isinstance(crossing, Crossing):
            trained.add(crossing.parameter)
    total = 0
    for member in region.unit.members:
        placement = member.placement
        if placement.on_host:
            continue
        copies = _TRAINED_COPIES if member.path in trained else 1
        if placement.offload and copies > 1:
            copies = 2  # the means are in host memory
        total += copies * placement.bytes_per_device
    return total


def _largest_bytes(program: Program, region: Region) -> int:
    """Returns the bytes of the largest value of all examples outside of units and loops."""
    largest = 0
    for eqn in program.jaxpr.jaxpr.eqns:
        for variable in eqn.outvars:
            aval = abstract(variable)
            if region.batch and aval.shape[:1] == (region.batch,):
                largest = max(largest, _bytes_of(variable))
    return largest


def _all_bytes(jaxpr: Jaxpr) -> int:
    """Returns the bytes of all values that a program computes: more than it can save for backward."""
    total = 0
    for eqn in jaxpr.eqns:
        total += sum(map(_bytes_of, eqn.outvars))
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(eqn.params):
            total += trips * _all_bytes(inner)
    return total


def _bytes_of(variable: Var) -> int:
    aval = abstract(variable)
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0  # random keys
    return math.prod(aval.shape) * aval.dtype.itemsize


# ---- work


def _counted(uses: Sequence[UnitUse], facts: DeviceFacts, num_shards: int) -> LayerGroup:
    """Returns what a device does for the layers of a group, under each policy."""
    works = []
    without_remat_s = 0.0
    for remat in CANDIDATES:
        saved_bytes = 0.0
        products_s = 0.0
        for use in uses:
            gradient = use.program.under(remat).gradient(tuple(use.wrt))
            saved_bytes += use.num_layers * sum(map(_bytes_of, gradient.kept)) / num_shards
            backward = gradient.backward(tuple(gradient.is_float))
            seconds = _products_s(gradient.forward.jaxpr, facts) + _products_s(backward.jaxpr, facts)
            products_s += use.num_layers * seconds / num_shards
        if remat == NONE:
            without_remat_s = products_s
        works.append(RematWork(remat, saved_bytes, max(0.0, products_s - without_remat_s)))
    num_layers = sum(use.num_layers for use in uses)
    return LayerGroup(num_layers, uses[0].in_loop, tuple(works))


def _products_s(jaxpr: Jaxpr, facts: DeviceFacts) -> float:
    """Returns the time of all products in a program, on one device that computes them alone."""
    total_s = 0.0
    for eqn in jaxpr.eqns:
        num_flops = flops(eqn) or _attention_flops(eqn)
        if num_flops:
            peak = facts.product_flops_per_s(str(abstract(eqn.invars[0]).dtype))
            total_s += num_flops / (peak * facts.matmul.stated / 100)
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(eqn.params):
            total_s += trips * _products_s(inner, facts)
    return total_s


def _attention_flops(eqn: JaxprEqn) -> float:
    """Returns the operations of attention in one kernel; 0 for any other equation."""
    if eqn.primitive.name == "pallas_call":
        return getattr(eqn.params.get("cost_estimate"), "flops", 0)
    if eqn.primitive.name != ATTENTION:
        return 0
    query, key, *_ = (abstract(atom) for atom in eqn.invars)
    # Two products with each key, of which causal attention needs half; but a kernel reaches about half of the rate of
    # plain products.
    return 4.0 * math.prod(query.shape) * key.shape[1]


# ---- records of the last traced calls


def _note(region: Region, choices: Mapping[UnitUse, RematChoice]) -> None:
    """Records what was chosen for the units of a model, by their paths."""
    key = key_of_unit(region.unit)
    if len(_records) >= _MOST_MODELS and key not in _records:
        oldest = next(iter(_records))
        _records.pop(oldest)
    record = _records.setdefault(key, {})
    for use, choice in choices.items():
        record |= dict.fromkeys(use.names, choice)


def with_chosen_remats(plan: ShardPlan) -> ShardPlan:
    """Returns a plan with the policies that the last differentiated calls of its model chose, and why.

    Args:
        plan: as it was annotated.
    """
    key = key_of(plan.units[0].kind, plan.mesh, (leaf.placement for leaf in plan.leaves))
    record = _records.get(key, {})
    units = []
    for unit in plan.units:
        choices = [record[path] for path in unit.name.split("+") if path in record]
        if unit.remat == AUTO and choices:
            unit = dataclasses.replace(unit, remat=choices[0].remat, remat_because=choices[0].because)
        units.append(unit)
    return dataclasses.replace(plan, units=tuple(units))
