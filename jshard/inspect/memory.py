"""The memory of a plan, and of activations kept for backward: bytes on one device, before anything is compiled."""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.extend import core as jex

from jshard import _compat
from jshard.api.fully_shard import repeated_layers, revise
from jshard.engine.context import shapes_only, without_update
from jshard.plans.memories import HOST_KIND, StatePlaces, key_texts
from jshard.plans.mesh import region_degree
from jshard.plans.placement import Placement
from jshard.plans.plan import LeafPlan, ShardPlan, UnitPlan, root_forgotten
from jshard.plans.units import unit_of

Saved = collections.Counter
"""How often an array of (shape and dtype, bytes on one device, first dim) is saved."""

_ON_HOST = " on the host"


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes on one device."""

    # Saved by autodiff between forward and backward, in addition to the stored parameters. It includes gathered
    # parameters that are kept for backward.
    saved_bytes: int
    outside_bytes: int  # the part that no layer saves: for the head and the loss
    recomputed_bytes: int  # what backward computes again of one layer, under its remat policy
    # Saved in host memory, and not included above, except that `recomputed_bytes` counts the part fetched for a layer.
    offloaded_bytes: int = 0


def activations(model: nnx.Module, loss: Callable[..., Any], batch: Any, *, wrt: Any = nnx.Param) -> Activations:
    """Traces the loss of a model, and finds the saved arrays. Nothing is compiled or run."""
    saved = whole = saved_arrays(model, loss, batch, wrt=wrt)
    layers = repeated_layers(model)
    if any(unit_of(module).policy.remat != "none" for module in layers):  # type: ignore[union-attr]
        plain = nnx.merge(*nnx.split(model))
        revise(plain, {"remat": "none"})
        whole = saved_arrays(plain, loss, batch, wrt=wrt)
    return summed(saved, whole, layers.values())


def summed(saved: Saved, whole: Saved, depths: Collection[int]) -> Activations:
    """The sums."""
    here = Saved({kind: n for kind, n in saved.items() if not kind[0].endswith(_ON_HOST)})
    outside = sum(n * size for (_, size, rows), n in here.items() if not _of_layers(n, rows, depths))
    again = max(0, _total(whole) - _total(here)) // max(1, sum(depths))
    return Activations(_total(here), outside, again, _total(saved) - _total(here))


def saved_arrays(model: nnx.Module, loss: Callable[..., Any], batch: Any, *, wrt: Any = nnx.Param) -> Saved:
    """The saved arrays, from one trace; the arguments are those of `activations`."""
    if unit_of(model) is None:
        raise root_forgotten(model)
    arguments = batch if isinstance(batch, tuple) else (batch,)
    graphdef, params, rest = nnx.split(model, wrt, ...)

    def forward(params: Any, rest: Any, arguments: tuple) -> Any:
        # Copied: state that the model changes as it runs, such as dropout's counts, belongs to the inner trace.
        return jax.vjp(lambda params: loss(nnx.merge(graphdef, params, rest, copy=True), *arguments), params)

    with shapes_only(), without_update():
        jaxpr = jax.make_jaxpr(forward)(params, rest, arguments).jaxpr
    found, known = Saved(), set(map(id, jaxpr.invars))
    for eqn in jaxpr.eqns:
        regions = list(_regions(eqn))
        for region in regions:
            found.update(_kind(v.aval, 1) for v in _new(region.outvars, set(map(id, region.invars))))
        if regions or (eqn.primitive.name == "sharding_constraint" and id(eqn.invars[0]) in known):
            known.update(map(id, eqn.outvars))  # already counted; or a parameter that is never gathered
    shards = region_degree(unit_of(model).mesh)  # type: ignore[union-attr]
    found.update(_kind(v.aval, shards) for v in _new(jaxpr.outvars, known))
    return found


def _total(saved: Saved) -> int:
    return sum(n * size for (_, size, _), n in saved.items())


def _of_layers(count: int, rows: int, depths: Collection[int]) -> bool:
    """Whether an array is saved by each layer: one array per layer, or one array of a stack with a row per layer."""
    layers = sum(depths)
    is_stack = any(rows in (depth, depth - 1) for depth in depths if depth > 1)
    return layers > 1 and (is_stack or count >= max(2, layers - 1))


def _regions(eqn: Any) -> Iterator[Any]:
    """The bodies of the sharded regions in an equation: their shapes are those of one device."""
    for inner in jex.jaxprs_in_params(eqn.params):
        if eqn.primitive.name == "shard_map":
            yield inner
        else:
            for nested in inner.eqns:
                yield from _regions(nested)


def _new(variables: Any, given: set[int]) -> list[Any]:
    """The outputs of a program that are not its inputs, each array once."""
    return list({id(v): v for v in variables if not isinstance(v, jex.Literal) and id(v) not in given}.values())


def _kind(aval: Any, shards: int) -> tuple[str, int, int]:
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
        return "key", 0, 0  # random keys
    rows = aval.shape[0] if len(aval.shape) > 1 else 0
    place = _ON_HOST if _compat.on_host(aval) else ""
    return f"{aval.dtype}{aval.shape}{place}", math.prod(aval.shape) * aval.dtype.itemsize // shards, rows


# The memory of a plan: bytes on one device, before anything is compiled.

# The gradients of values saved by the head and the loss, as a share of them; and the share of a layer's recomputed
# values that is live at once. Both are fitted to programs that XLA compiled for GPUs: docs/planning.md.
_HEAD_GRADIENTS, _AT_ONCE = 0.05, 0.85

_STEP = jax.ShapeDtypeStruct((), jnp.uint32)  # added by nnx.Optimizer


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    The first three follow from the plan alone. The others are estimates: the compiler decides what is live at once.
    """

    parameters_bytes: int  # stored parameters
    gradients_bytes: int  # gradients as they leave the sharded region, with the parameters' dtype and placement
    optimizer_bytes: int  # optimizer state
    optimizer: str  # the origin of that state
    # Gathered copies that stay from forward to backward: the root's, and those of units that do not reshard, or that
    # keep a part.
    kept_bytes: int
    largest_unit: str  # the unit with the largest temporary gathered copy
    largest_unit_bytes: int  # that copy
    # The most that is gathered ahead of its use meanwhile; units that leave the order to the compiler, without a
    # bound, count as zero.
    prefetched_bytes: int
    largest_gradient_bytes: int  # the largest gradient of one unit before it is reduced
    layer_gradient_bytes: int  # the same for units inside the root
    activations_bytes: int | None = None  # what autodiff saves for backward; None if it was not estimated
    outside_bytes: int = 0  # the part that only the head and the loss save; with copies that they keep
    recomputed_bytes: int = 0  # what backward computes again of one layer, under its remat policy
    host_parameters_bytes: int = 0  # parameters in host memory, a device's part of them
    host_gradients_bytes: int = 0  # gradients, of those that are trained
    host_optimizer_bytes: int = 0  # optimizer state
    host_activations_bytes: int = 0  # saved by autodiff. All figures above are of the device's own memory.

    def with_activations(self, found: Activations) -> "Memory":
        """The memory with the values that a traced program saves; kept copies are already counted as such."""
        return dataclasses.replace(
            self,
            activations_bytes=max(0, found.saved_bytes - self.kept_bytes),
            outside_bytes=found.outside_bytes,
            recomputed_bytes=found.recomputed_bytes,
            host_activations_bytes=found.offloaded_bytes,
        )

    @property
    def held_bytes(self) -> int:
        """The memory of a device between steps: parameters and optimizer state."""
        return self.parameters_bytes + self.optimizer_bytes

    @property
    def host_bytes(self) -> int:
        """The host memory that a step uses for one device."""
        state = self.host_parameters_bytes + self.host_gradients_bytes + self.host_optimizer_bytes
        return state + self.host_activations_bytes

    @property
    def step_bytes(self) -> int:
        """The peak memory of a device in a step, as far as it is estimated.

        The peak is where backward begins, at the head, or where it computes a layer, whichever is larger.
        """
        standing, gathered = self.held_bytes + self.gradients_bytes, self.largest_unit_bytes + self.prefetched_bytes
        if self.activations_bytes is None:
            return standing + self.kept_bytes + gathered + self.largest_gradient_bytes
        saved = self.kept_bytes + self.activations_bytes
        at_head = saved + int(_HEAD_GRADIENTS * self.outside_bytes)
        in_layer = saved - self.outside_bytes + int(_AT_ONCE * self.recomputed_bytes) + gathered
        return standing + max(at_head, in_layer + self.layer_gradient_bytes)


def memory_of(plan: ShardPlan, *, optimizer: Any = None) -> Memory:
    """Bytes on one device, from the plan."""
    state_bytes, state_away, name = optimizer_bytes(plan, optimizer)
    on_device, away = (_stored_bytes(plan, on_host=on_host) for on_host in (False, True))
    gathered = {unit.name: unit_bytes(plan, unit.name) for unit in plan.units}
    kept, passing = sum(kept_bytes(plan, unit) for unit in plan.units), {"": 0}
    for unit in plan.units:
        if unit.gathered and unit.reshard_after_forward is not False:
            passing[unit.name] = gathered[unit.name]
    rows = sum(copy_bytes(x.placement) // x.placement.layers for x in plan.leaves if x.by_layer)
    at_once = {plan.units[0].name: rows} | passing
    largest = max(at_once, key=lambda name: at_once[name])
    gradients = [_gradient_bytes(plan.unit_leaves(unit.name)) for unit in plan.units]
    return Memory(
        parameters_bytes=on_device[0],
        gradients_bytes=on_device[1],
        optimizer_bytes=state_bytes,
        optimizer=name,
        kept_bytes=kept,
        largest_unit=largest,
        largest_unit_bytes=at_once[largest],
        prefetched_bytes=_prefetched_bytes(plan, passing),
        largest_gradient_bytes=max(gradients),
        layer_gradient_bytes=max(gradients[1:], default=0),
        host_parameters_bytes=away[0],
        host_gradients_bytes=away[1],
        host_optimizer_bytes=state_away,
    )


def _stored_bytes(plan: ShardPlan, *, on_host: bool) -> tuple[int, int]:
    """Bytes for one device of the parameters in one of the memories, and of the gradients of those not frozen."""
    leaves = [leaf for leaf in plan.leaves if leaf.placement.on_host == on_host]
    size = lambda leaves: sum(leaf.placement.bytes_per_device for leaf in leaves)
    return size(leaves), size(leaf for leaf in leaves if leaf.trained)


def _prefetched_bytes(plan: ShardPlan, passing: dict[str, int]) -> int:
    """The most that is gathered ahead: for each unit the next ones, in tree order, or its own layers."""
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


def kept_bytes(plan: ShardPlan, unit: UnitPlan) -> int:
    """Bytes of a unit's gathered parameters that stay from forward to backward."""
    reshard = unit.reshard_after_forward
    if reshard is True:
        return 0
    whole = sum(copy_bytes(leaf.placement) for leaf in plan.unit_leaves(unit.name) if not leaf.by_layer)
    return whole if reshard is False else whole // int(reshard)


def copy_bytes(placement: Placement) -> int:
    """Bytes of the gathered copy on a device, all layers; 0 if the stored array, or its shards, are used directly."""
    same = placement.dim is None and placement.gathered_dtype == placement.dtype and not placement.on_host
    return 0 if same else placement.gathered_bytes


def unit_bytes(plan: ShardPlan, name: str) -> int:
    """Bytes of a unit's gathered copy, of one layer if it is a stack of them."""
    return sum(copy_bytes(leaf.placement) // leaf.placement.layers for leaf in plan.unit_leaves(name))


def _gradient_bytes(leaves: tuple[LeafPlan, ...]) -> int:
    """Bytes of a unit's gradient before its reduce-scatter."""
    reduced = [x.placement for x in leaves if x.placement.dim is not None and x.placement.gathered and x.trained]
    item = lambda p: jnp.dtype(p.reduce_dtype).itemsize
    return sum(p.stored_size * p.degree // p.shards // p.layers * item(p) for p in reduced)


def optimizer_bytes(plan: ShardPlan, optimizer: Any = None) -> tuple[int, int, str]:
    """Bytes of optimizer state on one device, those in host memory for it, and the origin of the state.

    As in `js.shard_optimizer`, state with the shape of its parameter is placed like it, other large state is sharded
    along a divisible dim, and the rest is replicated. An `nnx.Optimizer` with arrays is measured.
    """
    if isinstance(optimizer, nnx.Optimizer):
        state: Any = nnx.state(optimizer)
    else:
        tx = optax.adamw(1e-3) if optimizer is None else optimizer
        state = {"opt_state": jax.eval_shape(tx.init, _abstract_parameters(plan)), "step": _STEP}
    places, degrees, sizes = StatePlaces(plan), dict(plan.mesh), {False: 0, True: 0}
    for path, x in jax.tree.leaves_with_path(state):
        sizes[_state_on_host(path, x, places)] += _state_bytes(path, x, places, degrees)
    return sizes[False], sizes[True], "AdamW assumed" if optimizer is None else "given"


def _abstract_parameters(plan: ShardPlan) -> nnx.State:
    """The trained parameters as from `nnx.state(model, nnx.Param)`, so masks over paths and types work."""
    of = lambda p: nnx.Param(jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.dtype)))
    return nnx.from_flat_state([(leaf.keys[0], of(leaf.placement)) for leaf in plan.leaves if leaf.trained])


def _state_on_host(path: tuple, x: Any, places: StatePlaces) -> bool:
    if getattr(x, "sharding", None) is not None:
        return x.sharding.memory_kind == HOST_KIND
    return places.on_host(key_texts(path), x.shape)


def _state_bytes(path: tuple, x: Any, places: StatePlaces, degrees: dict[str, int]) -> int:
    item = jnp.dtype(x.dtype).itemsize if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else 8
    if getattr(x, "sharding", None) is not None:
        return math.prod(x.sharding.shard_shape(x.shape)) * item
    padding = places.padding(key_texts(path), x.shape)
    shape = x.shape if padding is None else padding.pad(jax.ShapeDtypeStruct(x.shape, x.dtype)).shape
    entries = places.spec(key_texts(path), shape)
    names = [name for e in entries for name in (e if isinstance(e, tuple) else (e,)) if name is not None]
    return math.prod(shape) * item // math.prod(degrees[name] for name in names)
