"""What a plan holds: bytes on one device, before anything is compiled."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jshard._optimizer import StatePlaces, key_texts
from jshard._placement import Placement
from jshard._plan import LeafPlan, ShardPlan

_STEP = jax.ShapeDtypeStruct((), jnp.uint32)  # what nnx.Optimizer adds


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    The first three follow from the plan alone. The others are estimates: the compiler decides what lives when.

    Args:
        parameters_bytes: stored parameters.
        gradients_bytes: gradients as they leave the sharded region, with the parameters' dtype and placement.
        optimizer_bytes: optimizer state.
        optimizer: whose state that is.
        kept_bytes: gathered copies that stay from forward to backward: the root's, and those of units that
            do not reshard, or of which a part is kept.
        largest_unit: the unit with the largest gathered copy, of those that come and go.
        largest_unit_bytes: that copy.
        prefetched_bytes: the most that is gathered ahead of its use meanwhile; without a bound on it, of the units
            that leave the order to the compiler, nothing.
        largest_gradient_bytes: the largest gradient of one unit before it is reduced.
        activations_bytes: what autodiff saves for backward; None if it was not estimated.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    optimizer: str
    kept_bytes: int
    largest_unit: str
    largest_unit_bytes: int
    prefetched_bytes: int
    largest_gradient_bytes: int
    activations_bytes: int | None = None

    @property
    def held_bytes(self) -> int:
        """What a device holds between steps: parameters and optimizer state."""
        return self.parameters_bytes + self.optimizer_bytes

    @property
    def step_bytes(self) -> int:
        """What a device holds at the height of a step, as far as it is estimated."""
        passing = self.kept_bytes + self.largest_unit_bytes + self.prefetched_bytes + self.largest_gradient_bytes
        return self.held_bytes + self.gradients_bytes + passing + (self.activations_bytes or 0)


def memory_of(plan: ShardPlan, *, optimizer: Any = None, activations_bytes: int | None = None) -> Memory:
    """Bytes on one device, from the plan.

    Args:
        plan: the plan.
        optimizer: an `nnx.Optimizer` or an Optax transformation; None assumes `optax.adamw`.
        activations_bytes: what `activations` estimated, to take along.
    """
    state_bytes, name = optimizer_bytes(plan, optimizer)
    gathered = {unit.name: unit_bytes(plan, unit.name) for unit in plan.units}
    kept, passing = 0, {"": 0}
    for unit in plan.units:
        reshard = unit.reshard_after_forward
        if reshard is not True:
            whole = sum(copy_bytes(leaf.placement) for leaf in plan.unit_leaves(unit.name))
            kept += whole if reshard is False else whole // int(reshard)
        if reshard is not False:
            passing[unit.name] = gathered[unit.name]
    largest = max(passing, key=lambda name: passing[name])
    return Memory(
        parameters_bytes=plan.bytes_per_device,
        gradients_bytes=plan.bytes_per_device,
        optimizer_bytes=state_bytes,
        optimizer=name,
        kept_bytes=kept,
        largest_unit=largest,
        largest_unit_bytes=passing[largest],
        prefetched_bytes=_prefetched_bytes(plan, passing),
        largest_gradient_bytes=max(_gradient_bytes(plan.unit_leaves(unit.name)) for unit in plan.units),
        activations_bytes=activations_bytes,
    )


def _prefetched_bytes(plan: ShardPlan, passing: dict[str, int]) -> int:
    """The most that is gathered ahead: of each unit those after it, in the order of the tree, or its own layers."""
    units = [unit for unit in plan.units if unit.name in passing]
    most = 0
    for at, unit in enumerate(units):
        size = passing[unit.name]
        layers = max((leaf.placement.layers for leaf in plan.unit_leaves(unit.name)), default=1)
        count, _, is_budget = unit.prefetch.partition(" ")
        if unit.prefetch == "compiler":
            continue
        if is_budget:
            most = max(most, min(int(count), sum(passing.values())))
        elif layers > 1:
            most = max(most, min(int(count), layers - 1) * size)
        else:
            before = units[max(0, at - int(count)) : at]
            most = max(most, sum(passing[u.name] for u in before[1:]) + size if before else 0)
    return most


def copy_bytes(placement: Placement) -> int:
    """Bytes of the gathered copy on a device, all layers; 0 where the stored array serves as it is."""
    same = placement.dim is None and placement.gathered_dtype == placement.dtype
    return 0 if same else placement.gathered_bytes


def unit_bytes(plan: ShardPlan, name: str) -> int:
    """Bytes of a unit's gathered copy, of one layer if it is a stack of them."""
    return sum(copy_bytes(leaf.placement) // leaf.placement.layers for leaf in plan.unit_leaves(name))


def _gradient_bytes(leaves: tuple[LeafPlan, ...]) -> int:
    """Bytes of a unit's gradient before its reduce-scatter."""
    total = 0
    for leaf in leaves:
        p = leaf.placement
        if p.dim is not None:
            total += p.size * p.degree // p.shards // p.layers * jnp.dtype(p.reduce_dtype).itemsize
    return total


def optimizer_bytes(plan: ShardPlan, optimizer: Any = None) -> tuple[int, str]:
    """Bytes of optimizer state on one device, and whose state it is.

    State with the shape of its parameter lies as the parameter does, other state of a parameter along a dim that
    divides, the rest is replicated, as `js.shard_optimizer` does it. An `nnx.Optimizer` with arrays is measured.
    """
    if isinstance(optimizer, nnx.Optimizer):
        found = jax.tree_util.tree_leaves_with_path(nnx.state(optimizer))
        name = "given"
    else:
        tx = optax.adamw(1e-3) if optimizer is None else optimizer
        state = {"opt_state": jax.eval_shape(tx.init, _abstract_parameters(plan)), "step": _STEP}
        found = jax.tree_util.tree_leaves_with_path(state)
        name = "AdamW assumed" if optimizer is None else "given"
    by_path = {tuple(leaf.path.split("/")): leaf.placement for leaf in plan.leaves}
    places = StatePlaces(by_path, plan.mesh)
    return sum(_state_bytes(path, x, places, dict(plan.mesh)) for path, x in found), name


def _abstract_parameters(plan: ShardPlan) -> nnx.State:
    """The parameters as `nnx.state(model, nnx.Param)` would give them: masks over paths and types work."""
    flat = []
    for leaf in plan.leaves:
        path = tuple(int(k) if k.isdigit() else k for k in leaf.path.split("/"))
        shape = jax.ShapeDtypeStruct(leaf.placement.shape, jnp.dtype(leaf.placement.dtype))
        flat.append((path, nnx.Param(shape)))
    return nnx.from_flat_state(flat)


def _state_bytes(path: tuple, x: Any, places: StatePlaces, degrees: dict[str, int]) -> int:
    item = jnp.dtype(x.dtype).itemsize if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else 8
    if getattr(x, "sharding", None) is not None:
        return math.prod(x.sharding.shard_shape(x.shape)) * item
    entries = places.spec(key_texts(path), x.shape)
    names = [name for e in entries for name in (e if isinstance(e, tuple) else (e,)) if name is not None]
    return math.prod(x.shape) * item // math.prod(degrees[name] for name in names)
