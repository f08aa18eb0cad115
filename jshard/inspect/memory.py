"""The memory of a plan: bytes on one device, before anything is compiled."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.tree_util import KeyPath

from jshard._text import name_pattern
from jshard._types import PyTree
from jshard.inspect.activations import Activations
from jshard.inspect.communication.staged import paths_gathered_on_stages, paths_reduced_on_stages
from jshard.inspect.staged_memory import StagesMemory, stages_memory
from jshard.plans.array_paths import key_texts
from jshard.plans.memories import HOST_KIND
from jshard.plans.mesh import data_shards
from jshard.plans.model_axes import degree_of
from jshard.plans.placement import Placement
from jshard.plans.plan import LeafPlan, ShardPlan, UnitPlan
from jshard.plans.state_places import StatePlaces
from jshard.plans.units import Path

_STEP = jax.ShapeDtypeStruct((), jnp.uint32)  # added by nnx.Optimizer
_KEY_BYTES = 8  # of a random key

AnyOptimizer = nnx.Optimizer | optax.GradientTransformation
"""An optimizer whose state is counted."""


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
    layer_gradient_bytes: int  # the same for layers: units that there are several of, or stacks of them
    activations_bytes: int | None = None  # what autodiff saves for backward; None if it was not estimated
    # The most that activations, and what is computed from them, take at once: at the head, or wherever no layer
    # computes, and while a layer computes.
    live_outside_bytes: int = 0
    live_in_layers_bytes: int = 0
    sums_bytes: int = 0  # sums of gradients, from the first of several microbatches on
    host_parameters_bytes: int = 0  # parameters in host memory, a device's part of them
    host_gradients_bytes: int = 0  # gradients, of those that are trained
    host_optimizer_bytes: int = 0  # optimizer state
    averages_bytes: int = 0  # averages of the weights that a run keeps
    host_averages_bytes: int = 0  # those in host memory
    unstacked_gradients_bytes: int = 0  # of the gradients, those of parameters that no loop over layers has
    host_activations_bytes: int = 0  # saved by autodiff. All figures above are of the device's own memory.
    # Whether layers are gathered ahead once the gradients of the layer before are reduced, and not beside these.
    gathers_in_turn: bool = False
    stages: StagesMemory | None = None  # of a loop on pipeline stages; the units in it are in no figure of units above

    def with_activations(self, activations: Activations, *, num_microbatches: int = 1) -> "Memory":
        """Returns the memory with the values of a traced program; kept copies are already counted as such.

        Args:
            activations: what it saves, and what is live at once.
            num_microbatches: whose gradients are added.
        """
        return dataclasses.replace(
            self,
            activations_bytes=max(0, activations.saved_bytes - self.kept_bytes),
            live_outside_bytes=round(activations.live.outside),
            live_in_layers_bytes=round(activations.live.in_layers),
            sums_bytes=self.unstacked_gradients_bytes if num_microbatches > 1 else 0,
            host_activations_bytes=activations.offloaded_bytes,
        )

    @property
    def held_bytes(self) -> int:
        """The memory of a device between steps: parameters, optimizer state, and averages of the weights."""
        return self.parameters_bytes + self.optimizer_bytes + self.averages_bytes

    @property
    def host_bytes(self) -> int:
        """The host memory that a step uses for one device."""
        state = self.host_parameters_bytes + self.host_gradients_bytes + self.host_optimizer_bytes
        return state + self.host_averages_bytes + self.host_activations_bytes

    @property
    def step_bytes(self) -> int:
        """The peak memory of a device in a step, as far as it is estimated.

        The peak is where backward begins, at the head, or where it computes a layer, whichever is larger. Of one
        microbatch there are no gradients yet at the head.
        """
        standing = self.held_bytes + self.kept_bytes
        if self.activations_bytes is None:
            beside = max(self._gathered_bytes + self.largest_gradient_bytes, self._on_stages_bytes)
            return standing + self.gradients_bytes + beside
        at_head = standing + self.sums_bytes + self.live_outside_bytes
        return max(at_head, self.in_layer_bytes)

    @property
    def in_layer_bytes(self) -> int:
        """The memory of a device while it computes a layer, with all gradients."""
        beside_copy = self.prefetched_bytes + self.layer_gradient_bytes
        if self.gathers_in_turn:
            beside_copy = max(self.prefetched_bytes, self.layer_gradient_bytes)
        beside_layer = max(self.largest_unit_bytes + beside_copy, self._on_stages_bytes)
        standing = self.held_bytes + self.kept_bytes
        return standing + self.gradients_bytes + self.live_in_layers_bytes + beside_layer

    @property
    def _gathered_bytes(self) -> int:
        return self.largest_unit_bytes + self.prefetched_bytes

    @property
    def _on_stages_bytes(self) -> int:
        return self.stages.total_bytes if self.stages is not None else 0


def memory_of(plan: ShardPlan, *, optimizer: AnyOptimizer | None = None) -> Memory:
    """Returns the bytes on one device, from the plan."""
    state = optimizer_bytes(plan, optimizer)
    temporary = _temporary_copies(plan)
    # A root whose own copy stays still gathers the layers of its loops one at a time.
    copies = {plan.units[0].name: _row_bytes(plan)} | temporary
    largest = max(copies, key=lambda name: copies[name])
    total_kept = 0
    gradients = []
    on_stages = paths_reduced_on_stages(plan)
    for unit in plan.units:
        total_kept += kept_bytes(plan, unit)
        leaves = [leaf for leaf in plan.unit_leaves(unit.name) if leaf.path not in on_stages]
        gradients.append(_unreduced_bytes(leaves))
    return Memory(
        parameters_bytes=parameter_bytes(plan, on_host=False),
        gradients_bytes=parameter_bytes(plan, on_host=False, trained_only=True),
        unstacked_gradients_bytes=_unstacked_gradients_bytes(plan),
        optimizer_bytes=state.on_device,
        optimizer=state.origin,
        kept_bytes=total_kept,
        largest_unit=largest,
        largest_unit_bytes=copies[largest],
        prefetched_bytes=_prefetched_bytes(plan, temporary),
        largest_gradient_bytes=max(gradients),
        layer_gradient_bytes=_layer_gradient_bytes(plan, gradients),
        host_parameters_bytes=parameter_bytes(plan, on_host=True),
        host_gradients_bytes=parameter_bytes(plan, on_host=True, trained_only=True),
        host_optimizer_bytes=state.on_host,
        stages=stages_memory(plan),
    )


def parameter_bytes(plan: ShardPlan, *, on_host: bool, trained_only: bool = False) -> int:
    """Returns the bytes for one device of the parameters in one of the memories.

    Those of the trained ones are also the bytes of gradients.
    """
    leaves = []
    for leaf in plan.leaves:
        if leaf.placement.on_host == on_host and (leaf.trained or not trained_only):
            leaves.append(leaf)
    return stored_bytes(leaves)


def _unstacked_gradients_bytes(plan: ShardPlan) -> int:
    """Returns the bytes of gradients that microbatches do not add to their sum in place, as a loop over layers does."""
    leaves = []
    for leaf in plan.leaves:
        placement = leaf.placement
        if leaf.trained and placement.layers == 1 and not placement.on_host:
            leaves.append(leaf)
    return stored_bytes(leaves)


def stored_bytes(leaves: Iterable[LeafPlan]) -> int:
    """Returns the bytes for one device of some parameters, as they are stored."""
    return sum(leaf.placement.bytes_per_device for leaf in leaves)


def _layer_gradient_bytes(plan: ShardPlan, gradients: Sequence[int]) -> int:
    """Returns the largest gradient of a layer; of any unit inside the root, if the model has no layers.

    Args:
        plan: of the model.
        gradients: the bytes for each unit.
    """
    patterns = [name_pattern(unit.name)[0] for unit in plan.units]
    of_layers = []
    for unit, pattern, size in zip(plan.units, patterns, gradients, strict=True):
        num_layers = max((leaf.placement.layers for leaf in plan.unit_leaves(unit.name)), default=1)
        if num_layers > 1 or patterns.count(pattern) > 1:
            of_layers.append(size)
    return max(of_layers or gradients[1:], default=0)


# ---- gathered copies


def _temporary_copies(plan: ShardPlan) -> dict[str, int]:
    """Returns the bytes of the copies that are gathered for a unit's call, by unit; "" stands for none."""
    copies = {"": 0}
    on_stages = paths_gathered_on_stages(plan)
    for unit in plan.units:
        paths = {leaf.path for leaf in plan.unit_leaves(unit.name)}
        is_on_stages = not paths.isdisjoint(on_stages)
        if unit.gathered and unit.reshard_after_forward is not False and not is_on_stages:
            copies[unit.name] = unit_bytes(plan, unit.name)
    return copies


def _row_bytes(plan: ShardPlan) -> int:
    """Returns the bytes of one row of the stacks that the root gathers layer by layer."""
    return sum(_layer_bytes(leaf) for leaf in plan.leaves if leaf.by_layer)


def _prefetched_bytes(plan: ShardPlan, copies: Mapping[str, int]) -> int:
    """Returns the most that is gathered ahead: for each unit the next ones, in tree order, or its own layers."""
    units = [unit for unit in plan.units if unit.name in copies]
    most = 0
    for position, unit in enumerate(units):
        if unit.prefetch == "compiler":
            continue  # not bounded
        count, _, is_budget = unit.prefetch.partition(" ")  # `2`, or `1048576 bytes`
        num_layers = max((leaf.placement.layers for leaf in plan.unit_leaves(unit.name)), default=1)
        ahead = 0
        if is_budget:
            ahead = min(int(count), sum(copies.values()))
        elif num_layers > 1:
            ahead = min(int(count), num_layers - 1) * copies[unit.name]
        elif position > 0 and int(count) > 0:
            # While the first of the units before it computes, the others and this one are gathered.
            before = units[max(0, position - int(count)) : position]
            ahead = sum(copies[earlier.name] for earlier in before[1:]) + copies[unit.name]
        most = max(most, ahead)
    return most


def kept_bytes(plan: ShardPlan, unit: UnitPlan) -> int:
    """Returns the bytes of a unit's gathered parameters that stay from forward to backward."""
    reshard = unit.reshard_after_forward
    if reshard is True:
        return 0
    copy = sum(copy_bytes(leaf.placement) for leaf in plan.unit_leaves(unit.name) if not leaf.by_layer)
    if reshard is False:
        return copy
    return copy // reshard  # one of that many pieces


def copy_bytes(placement: Placement) -> int:
    """Returns the bytes of the gathered copy on a device, all layers.

    It is 0 if the stored array, or its shards, are used directly.
    """
    is_replicated = placement.dim is None
    if is_replicated and placement.gathered_dtype == placement.dtype and not placement.on_host:
        return 0
    return placement.gathered_bytes


def unit_bytes(plan: ShardPlan, name: str) -> int:
    """Returns the bytes of a unit's gathered copy, of one layer if it is a stack of them."""
    return sum(_layer_bytes(leaf) for leaf in plan.unit_leaves(name))


def _layer_bytes(leaf: LeafPlan) -> int:
    return copy_bytes(leaf.placement) // leaf.placement.layers


def _unreduced_bytes(leaves: Sequence[LeafPlan]) -> int:
    """Returns the bytes of a unit's gradient before its reduce-scatter."""
    total = 0
    for leaf in leaves:
        placement = leaf.placement
        if leaf.trained and placement.gathered and placement.dim is not None:
            elements = placement.stored_size * placement.degree // placement.shards // placement.layers
            total += elements * jnp.dtype(placement.reduce_dtype).itemsize
    return total


def reduces_in_gathered_dtype(plan: ShardPlan) -> bool:
    """Returns whether no gradient of a layer is reduced in a wider dtype than that of its gathered parameter."""
    for leaf in plan.leaves:
        placement = leaf.placement
        if not leaf.trained or not placement.gathered or placement.layers == 1:
            continue
        if jnp.dtype(placement.reduce_dtype).itemsize > jnp.dtype(placement.gathered_dtype).itemsize:
            return False
    return True


# ---- gathered once for all microbatches


def gathered_once(memory: Memory, plan: ShardPlan) -> Memory:
    """Returns the memory of a step whose parameters are gathered once, and whose gradients are reduced once.

    Meanwhile a device holds whole copies of the parameters, and the whole sums of their gradients in the reduce dtype.

    Args:
        memory: of a step that gathers and reduces in each microbatch.
        plan: of the model.
    """
    if data_shards(dict(plan.mesh)) == 1:  # nothing is gathered, nor reduced
        return memory
    copies_bytes = sum(copy_bytes(leaf.placement) for leaf in plan.leaves)
    sums_bytes = whole_sums_bytes(plan)
    return dataclasses.replace(
        memory,
        kept_bytes=copies_bytes,
        largest_unit="",
        largest_unit_bytes=0,
        prefetched_bytes=0,
        gradients_bytes=sums_bytes,
        sums_bytes=sums_bytes,
    )


def whole_sums_bytes(plan: ShardPlan) -> int:
    """Returns the bytes on a device of sums of whole gradients, before they are reduced."""
    total = 0
    for leaf in plan.leaves:
        placement = leaf.placement
        if not leaf.trained or placement.on_host:
            continue
        if placement.gathered:
            total += whole_elements(placement) * jnp.dtype(placement.reduce_dtype).itemsize
        else:
            total += placement.bytes_per_device
    return total


def whole_elements(placement: Placement) -> int:
    """Returns the elements of the gathered copy of a parameter on a device, all layers."""
    return placement.gathered_bytes // jnp.dtype(placement.gathered_dtype).itemsize


# ---- optimizer state, and averages of the weights


class AverageBytes(NamedTuple):
    """The bytes of averages of the weights for one device."""

    on_device: int
    on_host: int


def average_bytes(plan: ShardPlan, dtype: str | None) -> AverageBytes:
    """Returns the bytes of an average of every trained parameter, placed like it.

    Args:
        plan: of the parameters.
        dtype: of the averages; None for that of each parameter.
    """
    on_device = 0
    on_host = 0
    for leaf in plan.leaves:
        if not leaf.trained:
            continue
        placement = leaf.placement
        num_values = placement.bytes_per_device // jnp.dtype(placement.dtype).itemsize
        size = num_values * jnp.dtype(dtype or placement.dtype).itemsize
        if placement.on_host:
            on_host += size
        else:
            on_device += size
    return AverageBytes(on_device, on_host)


class OptimizerBytes(NamedTuple):
    """The bytes of an optimizer's state for one device."""

    on_device: int
    on_host: int
    origin: str  # of the state


def optimizer_bytes(plan: ShardPlan, optimizer: AnyOptimizer | None = None) -> OptimizerBytes:
    """Returns the bytes of optimizer state on one device, those in host memory for it, and the origin of the state.

    As in `js.shard_optimizer`, state with the shape of its parameter is placed like it, other large state is sharded
    along a divisible dim, and the rest is replicated. An `nnx.Optimizer` with arrays is measured.
    """
    origin = "given"
    if optimizer is None:
        origin = "AdamW assumed"
        optimizer = optax.adamw(1e-3)
    state: PyTree
    if isinstance(optimizer, nnx.Optimizer):
        state = nnx.state(optimizer)
    else:
        state = {"opt_state": _abstract_state(optimizer.init, _forms_of_trained(plan)), "step": _STEP}
    places = StatePlaces(plan)
    on_device = 0
    on_host = 0
    for path, array in jax.tree.leaves_with_path(state):
        size = _state_bytes(path, array, places, dict(plan.mesh))
        if _is_on_host(path, array, places):
            on_host += size
        else:
            on_device += size
    return OptimizerBytes(on_device, on_host, origin)


class _Form(NamedTuple):
    """A parameter as an optimizer sees it."""

    keys: Path
    shape: tuple[int, ...]
    dtype: str


def _forms_of_trained(plan: ShardPlan) -> tuple[_Form, ...]:
    """Returns the forms of the trained parameters, which are the same on every mesh."""
    forms = []
    for leaf in plan.leaves:
        if leaf.trained:
            forms.append(_Form(leaf.keys[0], leaf.placement.shape, leaf.placement.dtype))
    return tuple(forms)


@functools.lru_cache(maxsize=4)  # a search asks for one state on many meshes
def _abstract_state(init: Callable[[PyTree], PyTree], forms: tuple[_Form, ...]) -> PyTree:
    """Returns the state of an optimizer.

    Its parameters are as from `nnx.state(model, nnx.Param)`, so that masks over paths and types work.
    """
    params = []
    for form in forms:
        array = jax.ShapeDtypeStruct(form.shape, jnp.dtype(form.dtype))
        params.append((form.keys, nnx.Param(array)))
    return jax.eval_shape(init, nnx.from_flat_state(params))


def _is_on_host(path: KeyPath, array: jax.Array | jax.ShapeDtypeStruct, places: StatePlaces) -> bool:
    sharding = getattr(array, "sharding", None)
    if sharding is not None:
        return sharding.memory_kind == HOST_KIND
    return places.on_host(key_texts(path), array.shape)


def _state_bytes(
    path: KeyPath, array: jax.Array | jax.ShapeDtypeStruct, places: StatePlaces, degrees: Mapping[str, int]
) -> int:
    """Returns the bytes of an array of the state on one device: measured if it is placed, else planned."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    item_bytes = _KEY_BYTES if is_key else jnp.dtype(array.dtype).itemsize
    sharding = getattr(array, "sharding", None)
    if sharding is not None:
        return math.prod(sharding.shard_shape(array.shape)) * item_bytes
    keys = key_texts(path)
    shape = array.shape
    padding = places.padding(keys, shape)
    if padding is not None:
        shape = padding.pad(jax.ShapeDtypeStruct(shape, array.dtype)).shape
    num_shards = 1
    for entry in places.spec(keys, shape):
        num_shards *= degree_of(entry, degrees)
    return math.prod(shape) * item_bytes // num_shards
