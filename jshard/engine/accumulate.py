"""Gradient accumulation: each microbatch is reduced into a sharded sum, or gathers and reductions happen once."""

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jshard import _compat
from jshard._types import PyTree
from jshard.engine.context import during
from jshard.engine.gathers import gather
from jshard.engine.gradient_sums import reduce_gradient
from jshard.engine.inner import over_axes
from jshard.engine.rules import PARTIAL, Shard, State, Value
from jshard.engine.running_sums import LossGradients
from jshard.engine.selections import at_positions
from jshard.engine.stored import inner_dims
from jshard.engine.weighted import MeanShares, WeightedMean, nonzero, value_and_weight
from jshard.errors import CallError
from jshard.plans.array_paths import key_texts
from jshard.plans.memories import back, fetched, placed_like, to_device
from jshard.plans.mesh import (
    CONTEXT,
    TENSOR,
    AnyMesh,
    data_axes,
    data_degree,
    degree,
    inner_axes,
    manual_axes,
    region_axes,
    region_degree,
)
from jshard.plans.model_axes import spec_over
from jshard.plans.placement import Placement
from jshard.plans.policies import is_real_float
from jshard.plans.units import Unit

T = TypeVar("T")


def microbatches(batch: PyTree, unit: Unit, steps: int, name: str) -> PyTree:
    """Splits a batch so that every data shard keeps its own examples: microbatch i has rows i, i + steps, and so on.

    Contiguous microbatches would be on a few data shards each, and every step would send their rows to the others.

    Scalars are passed whole to every microbatch. A random key is split, typed or raw. So is each key of an array of
    keys, unless it has one for every row: then they are rows.

    Args:
        batch: arrays with examples along dim 0.
        unit: the root of the model.
        steps: the number of microbatches.
        name: of the model, for messages.

    Returns:
        The batch with a leading dim for the microbatches.

    Raises:
        CallError: the number of examples does not divide.
    """
    # Each microbatch must divide by the data shards, too.
    num_parts = steps * data_degree(unit.mesh)
    row_counts = _row_counts(batch)

    def is_keys(x: ArrayLike) -> bool:
        return _may_be_keys(x) and not _is_by_row(x, row_counts, num_parts)

    # Before the first array is cut, so that the error has all that do not divide.
    _check_rows_divide(batch, is_keys, steps, num_parts, name)

    def cut(x: ArrayLike) -> jax.Array:
        x = jnp.asarray(x)
        if is_keys(x):
            return _split_keys(x, steps)
        if not x.ndim:
            return jnp.broadcast_to(x, (steps,))
        # Neighbouring rows go to different microbatches, so that no row leaves its data shard.
        rows = x.reshape(x.shape[0] // steps, steps, *x.shape[1:])
        sharding = NamedSharding(unit.mesh, _microbatch_spec(x, unit.mesh))
        return lax.with_sharding_constraint(jnp.moveaxis(rows, 1, 0), sharding)

    return jax.tree.map(cut, batch)


def _row_counts(batch: PyTree) -> set[int]:
    """Returns the sizes of dim 0 of what is certainly no key."""
    counts = set()
    for x in jax.tree.leaves(batch):
        if jnp.ndim(x) and not _may_be_keys(x):
            counts.add(jnp.shape(x)[0])
    return counts


def _check_rows_divide(
    batch: PyTree, is_keys: Callable[[ArrayLike], bool], steps: int, num_parts: int, name: str
) -> None:
    places = []
    for path, x in jax.tree.leaves_with_path(batch):
        shape = jnp.shape(x)
        if shape and not is_keys(x) and shape[0] % num_parts:
            places.append(f"{name}: batch{jax.tree_util.keystr(path)}  shape {tuple(shape)}")
    if places:
        raise CallError(
            "The batch cannot be cut into microbatches.",
            where=places,
            why=f"{steps} microbatches over {num_parts // steps} data shards need a leading dim that divides by"
            f" {num_parts}.",
            do=f"js.value_and_grad(loss_fn, accumulate=1)  # or a batch that is a multiple of {num_parts}",
        )


def _microbatch_spec(x: jax.Array, mesh: AnyMesh) -> PartitionSpec:
    """Returns how microbatches of an array are split: the examples over the data axes, a sequence over `context`."""
    context_degree = degree(mesh, CONTEXT)
    has_sequence = context_degree > 1 and x.ndim > 1 and x.shape[1] % context_degree == 0
    if has_sequence:
        return PartitionSpec(None, data_axes(mesh), CONTEXT)
    return PartitionSpec(None, data_axes(mesh))


def _is_typed_key(x: ArrayLike) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _may_be_keys(x: ArrayLike) -> bool:
    """Returns whether an array holds typed keys, or has the form of one raw key, as from `jax.random.PRNGKey`."""
    if _is_typed_key(x):
        return True
    # A raw key has no type of its own, only the form of the default implementation's data. That of a typed key, because
    # JAX may be set to refuse `jax.random.PRNGKey`.
    raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return jnp.result_type(x) == raw.dtype and jnp.shape(x) == raw.shape


def _is_by_row(x: ArrayLike, rows: set[int], parts: int) -> bool:
    """Returns whether an array of keys, or of the form of a raw key, has a row for each row of the batch."""
    if not jnp.ndim(x):
        return False
    size = jnp.shape(x)[0]
    # Without other arrays there are no rows to compare with: keys are rows if they can be cut like them.
    return size in rows or (not rows and size % parts == 0)


def _split_keys(keys: jax.Array, steps: int) -> jax.Array:
    """Returns `steps` new keys for each key, along a new leading dim."""
    if not _is_typed_key(keys) or not keys.ndim:  # an array of words is one key of the old form
        return jax.random.split(keys, steps)
    split = jax.vmap(lambda key: jax.random.split(key, steps), out_axes=1)
    return split(keys.ravel()).reshape(steps, *keys.shape)


class Copies:
    """Full copies of parameters, gathered beforehand, by the ids of the stored arrays.

    A parameter that was changed since, or that of another model, is a different array.

    Attributes:
        by_id: the copies.
        taken: ids of those that a call has taken.
        missed: whether a call has gathered on its own.
    """

    def __init__(self, stored: Sequence[jax.Array], copies: Sequence[jax.Array]) -> None:
        # By identity: a call gets parameters, not their paths. While copies are available, the trace holds the stored
        # arrays, so that no other array can have one of these ids.
        self.by_id = {id(x): copy for x, copy in zip(stored, copies, strict=True)}
        self.taken: set[int] = set()
        self.missed = False


gathered_copies: contextvars.ContextVar[Copies | None] = contextvars.ContextVar("copies", default=None)
"""Copies gathered beforehand; None if each call gathers on its own."""


class GatheredOnce:
    """The parameters of a tree that are gathered once for all microbatches: those that are ever gathered.

    Attributes:
        positions: of these parameters among the leaves of the tree. None if all data axes have degree 1.
        placements: how they are stored.
        mesh: the mesh.
        inner: the inner axes of the mesh and their degrees.
    """

    def __init__(self, placements: Sequence[Placement | None], mesh: AnyMesh) -> None:
        """Chooses them by the placements of the tree's leaves; None for a leaf that is not a parameter."""
        self.positions: list[int] = []
        self.placements: list[Placement] = []
        # One device with all of the batch has all of each parameter: there is nothing to gather, nor to reduce.
        if region_degree(mesh) > 1:
            for i, placement in enumerate(placements):
                if placement is not None and placement.gathered:
                    self.positions.append(i)
                    self.placements.append(placement)
        self.mesh = mesh
        self.inner = {axis: degree(mesh, axis) for axis in inner_axes(mesh)}

    def gather(self, tree: PyTree) -> list[jax.Array]:
        """Gathers every data shard's own full copy of the parameters: arrays with one leading row per data shard."""
        if not self.positions:
            return []

        # A dim for the data shards: each has a copy of its own, and so, later, a sum of its own gradients. Replicated,
        # they would be one array, whose gradient is reduced in each microbatch.
        def gather_all(*arrays: jax.Array) -> list[jax.Array]:
            copies = []
            for x, placement in zip(arrays, self.placements, strict=True):
                copies.append(gather(Value(x, Shard(placement)), placement.gathered_dtype)[None])
            return copies

        def run(arrays: list[jax.Array]) -> list[jax.Array]:
            states = self._states_by_axis(arrays, gathered=False, without_dim=None)
            return over_axes(self.inner, gather_all, [fetched(x) for x in arrays], states, {})

        return self._shard_map(run, in_specs=(self._stored_specs(),), out_specs=self._copy_spec())(self.picked(tree))

    def reduce(self, tree: PyTree, sums: list[jax.Array]) -> list[jax.Array]:
        """Reduces each data shard's gradients of its copies to the stored shards, in the dtypes of the sums."""
        if not self.positions:
            return []
        mesh = self._concrete_mesh()

        def reduce_all(*sums: jax.Array) -> list[jax.Array]:
            shards = []
            for x, placement in zip(sums, self.placements, strict=True):
                shards.append(reduce_gradient(x, placement, mesh, x.dtype))
            return shards

        def run(arrays: list[jax.Array], sums: list[jax.Array]) -> list[jax.Array]:
            # Each place along an inner axis has summed the gradients of its own examples or tokens, for all of a copy
            # that is not split over the axis.
            states = self._states_by_axis(arrays, gathered=True, without_dim=PARTIAL)
            targets = self._states_by_axis(arrays, gathered=False, without_dim=None)
            own_sums = [x[0] for x in sums]
            gradients = over_axes(self.inner, reduce_all, own_sums, states, targets)
            return [placed_like(g, x) for x, g in zip(arrays, gradients, strict=True)]

        specs = self._stored_specs()
        return self._shard_map(run, in_specs=(specs, self._copy_spec()), out_specs=specs)(self.picked(tree), sums)

    def _states_by_axis(
        self, arrays: Sequence[jax.Array], *, gathered: bool, without_dim: State
    ) -> dict[str, list[State]]:
        """Returns the states of the parameters over each inner axis.

        Args:
            arrays: the parameters as they are stored.
            gathered: whether the states are those of the gathered copies.
            without_dim: the state of a parameter that is not split over an axis.
        """
        states: dict[str, list[State]] = {axis: [] for axis in self.inner}
        for x, placement in zip(arrays, self.placements, strict=True):
            dims = inner_dims(placement, x.ndim, gathered=gathered)
            for axis in self.inner:
                states[axis].append(dims.get(axis, without_dim))
        return states

    def picked(self, tree: PyTree) -> list[jax.Array]:
        """Returns the leaves of a tree at the positions of these parameters."""
        return at_positions(jax.tree.leaves(tree), self.positions)

    def names(self, tree: PyTree) -> list[str]:
        """Returns their paths in a tree, as text."""
        names = []
        for path, _ in at_positions(jax.tree.leaves_with_path(tree), self.positions):
            names.append("/".join(key_texts(path)))
        return names

    def _concrete_mesh(self) -> Mesh:
        assert isinstance(self.mesh, Mesh), "the model has arrays"
        return self.mesh

    def _stored_specs(self) -> list[PartitionSpec]:
        axes = region_axes(self.mesh)
        return [spec_over(axes, placement.spec) for placement in self.placements]

    def _copy_spec(self) -> PartitionSpec:
        """Returns the spec of an array with a row for each data shard."""
        return PartitionSpec(region_axes(self.mesh))

    def _shard_map(self, function: Callable[..., T], *, in_specs: PyTree, out_specs: PyTree) -> Callable[..., T]:
        mesh = self._concrete_mesh()
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=manual_axes(mesh),
            check_vma=False,
        )


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss as a function of trees of arrays.

    Attributes:
        run: takes parameters, frozen ones, state and a microbatch; returns the loss, a scalar or a `WeightedMean`, and
            aux with the new state.
        params: to differentiate with respect to.
        frozen: the other parameters.
        state: what is passed from one microbatch to the next.
        placements: for the leaves of `params`, and of `frozen`; None for leaves that are not parameters.
        root: the root of the model.
        name: of the model, for messages.
    """

    run: Callable[[PyTree, PyTree, PyTree, PyTree], tuple[jax.Array | WeightedMean, tuple[PyTree, PyTree]]]
    params: PyTree
    frozen: PyTree
    state: PyTree
    placements: tuple[Sequence[Placement | None], Sequence[Placement | None]]
    root: Unit
    name: str


@dataclasses.dataclass(frozen=True)
class Sums:
    """What is summed over microbatches, before the gradients of gathered copies are reduced.

    Attributes:
        value: the sum of the losses, or of the totals of weighted means.
        weight: the sum of the weights of weighted means; None for plain ones.
        gradients: with respect to the parameters as they are stored. For weighted means these are means.
        copies: with respect to each data shard's own copies: arrays with one row per data shard. Means like these.
        aux: of every microbatch.
        state: after the last microbatch.
    """

    value: jax.Array
    weight: jax.Array | None
    gradients: PyTree
    copies: list[jax.Array]
    aux: PyTree
    state: PyTree


def accumulated(
    loss: Loss, batch: PyTree, steps: int, *, once: bool, dtype: DTypeLike | None = None
) -> tuple[jax.Array, PyTree, PyTree, PyTree]:
    """Computes a loss and its gradients over microbatches.

    Args:
        loss: the loss.
        batch: the whole batch.
        steps: the number of microbatches.
        once: whether parameters are gathered, and gradients reduced, once for all microbatches.
        dtype: of the gradients; None for those of the parameters.

    Returns:
        The loss, aux of every microbatch, gradients, and the state after the last microbatch.
    """
    param_placements, _ = loss.placements
    params_once = GatheredOnce(param_placements if once else (), loss.root.mesh)
    sums = summed(loss, batch, steps, params_once, once=once)
    grads = sums.gradients
    if once:
        grads = with_reduced_copies(grads, params_once, params_once.reduce(loss.params, sums.copies))
    if sums.weight is None:
        mean = sums.value / steps
        grads = jax.tree.map(lambda g: g / steps, grads)
    else:
        mean = sums.value / sums.weight  # and the gradients are means already
    # A stored dtype may be too narrow for the sum, but holds the mean as well as it holds the parameter.
    grads = jax.tree.map(lambda g, x: g.astype(gradient_dtype(x.dtype, dtype)), grads, loss.params)
    return mean, sums.aux, back(grads, loss.params), sums.state


def summed(loss: Loss, batch: PyTree, steps: int, params_once: GatheredOnce, *, once: bool) -> Sums:
    """Sums a loss and its gradients over microbatches; one microbatch is the batch as it is, without stacked aux.

    Args:
        loss: the loss.
        batch: the whole batch.
        steps: the number of microbatches.
        params_once: the parameters that are gathered once, and whose gradients are not reduced here.
        once: whether frozen parameters are gathered once, too.
    """
    is_cut = steps > 1
    parts = microbatches(batch, loss.root, steps, loss.name) if is_cut else batch
    param_placements, frozen_placements = loss.placements
    # Frozen parameters are gathered as often as the others. Their copies have no gradient, so `run` is no function of
    # them.
    frozen_once = GatheredOnce(frozen_placements if once else (), loss.root.mesh)
    # Outside of the loop over microbatches, whose body takes them as constants.
    copies = params_once.gather(loss.params)
    frozen_copies = frozen_once.gather(loss.frozen)

    # With respect to the copies, too: what calls take of them is the part of the gradient that is reduced at the end.
    def run(
        params: PyTree, copies: list, state: PyTree, part: PyTree
    ) -> tuple[jax.Array, tuple[PyTree, PyTree, jax.Array | None]]:
        stored = params_once.picked(params) + frozen_once.picked(loss.frozen)
        available = Copies(stored, copies + frozen_copies)
        with during(gathered_copies, available if once else None):
            value, aux = loss.run(params, loss.frozen, state, part)
        # Inside of the trace: copies are taken while the loss is traced, and it is traced once.
        _check_taken(available, stored, params_once.names(params) + frozen_once.names(loss.frozen), loss.name)
        value, weight = value_and_weight(value)
        return value, (*aux, weight)

    # The carry of a scan has its types from the start, and only the loss says those of its value and weight.
    first = jax.tree.map(lambda x: x[0], parts) if is_cut else parts
    grad = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)
    gradients = LossGradients.traced(grad, loss.params, copies, loss.state, first)
    (value_type, (_, _, weight_type)), _ = gradients.types
    # The order of these lines is that of the zeros in the program.
    param_sums = _zero_sums(loss.params, param_placements)
    copy_sums = []
    for x, placement in zip(copies, params_once.placements, strict=True):
        copy_sums.append(jnp.zeros_like(x, placement.reduce_dtype))
    if weight_type is None:  # a mean with weights is no plain sum
        gradients = gradients.adding_to((param_sums, copy_sums))

    def step(carry: tuple, part: PyTree) -> tuple[tuple, PyTree]:
        total, sums, state, weight_before = carry
        # Gradients of offloaded parameters come in host memory, where nothing is computed.
        (value, (aux, state, weight)), grads = gradients.run((loss.params, copies, state, part), sums)
        if weight is None:
            sums = gradients.added(sums, to_device(grads))
            return (total + value, sums, state, None), aux
        # Gradients are a running mean; the loss is a mean as well, and times its weight the total again.
        means = jax.tree.map(MeanShares.of(weight_before, weight).joint, sums, to_device(grads))
        return (total + value * nonzero(weight), means, state, weight_before + weight), aux

    no_weight = None if weight_type is None else jnp.zeros((), weight_type.dtype)
    first_carry = (jnp.zeros((), value_type.dtype), (param_sums, copy_sums), loss.state, no_weight)
    if is_cut:
        last_carry, aux = lax.scan(step, first_carry, parts)
    else:
        last_carry, aux = step(first_carry, parts)
    total, (param_sums, copy_sums), state, weight = last_carry
    param_sums = _as_stored(param_sums, param_placements, loss.root.mesh)
    return Sums(total, weight, param_sums, copy_sums, aux, state)


def gradient_dtype(stored: np.dtype, requested: DTypeLike | None) -> DTypeLike:
    """Returns the dtype of a gradient; `requested` is for parameters that are real floats."""
    if requested is None or not is_real_float(stored):
        return stored
    return requested


def _check_taken(available: Copies, stored: Sequence[jax.Array], names: Sequence[str], model: str) -> None:
    """Warns of copies that no call has taken, or raises; `names` are the paths of the stored arrays."""
    unused = [name for name, x in zip(names, stored, strict=True) if id(x) not in available.taken]
    if unused:
        _check_unused(unused, len(names), available.missed, model)


def with_reduced_copies(grads: PyTree, once: GatheredOnce, reduced: Sequence[jax.Array]) -> PyTree:
    """Returns the gradients of parameters, with those of their copies added."""
    # Both are parts of one gradient: a loss may use a parameter outside of the model as well, as a penalty does.
    leaves, tree = jax.tree.flatten(grads)
    for i, x in zip(once.positions, to_device(reduced), strict=True):
        leaves[i] = leaves[i] + x
    return jax.tree.unflatten(tree, leaves)


def _zero_sums(params: PyTree, placements: Sequence[Placement | None]) -> PyTree:
    """Returns zeros to add the gradients of microbatches to, stored as their parameters.

    They have the reduce dtype: in a narrower stored dtype, gradients that are small beside the sum would be lost. If
    the stored dtype is the wider one they have that, which costs nothing between steps.
    """
    leaves, tree = jax.tree.flatten(params)
    zeros = []
    for x, placement in zip(leaves, placements, strict=True):
        # Without a placement it is no parameter of the plan, and no policy of dtypes applies to it.
        dtype = x.dtype if placement is None else _dtype_of_sum(x.dtype, placement.reduce_dtype)
        zeros.append(jnp.zeros_like(x, dtype))
    return jax.tree.unflatten(tree, zeros)


def _as_stored(sums: PyTree, placements: Sequence[Placement | None], mesh: AnyMesh) -> PyTree:
    """Constrains sums of gradients to the placements of their parameters along `tensor`.

    A region leaves that axis to the compiler, which would split a sum where the parameter is whole.
    """
    if not isinstance(mesh, Mesh) or degree(mesh, TENSOR) == 1:
        return sums
    leaves, tree = jax.tree.flatten(sums)
    constrained = []
    for x, placement in zip(leaves, placements, strict=True):
        if placement is not None and not placement.on_host and x.ndim == len(placement.spec):
            x = lax.with_sharding_constraint(x, NamedSharding(mesh, placement.partition_spec))
        constrained.append(x)
    return jax.tree.unflatten(tree, constrained)


def _dtype_of_sum(stored: np.dtype, reduced: str) -> DTypeLike:
    if not is_real_float(stored):  # floats of 8 bits have no common dtype with others
        return reduced
    return jnp.promote_types(stored, reduced)


def _check_unused(names: list[str], total: int, missed: bool, model: str) -> None:
    """Warns of copies that no call has used, if a call has gathered on its own; raises if no copy was used."""
    # Not each unused copy is a mistake: a loss need not call all of the model.
    why = (
        "the loss changed them before the call (a cast, a stop_gradient, a jit or checkpoint around it), or they are"
        " not stored as by js.shard_init"
    )
    if len(names) == total:
        raise CallError(
            "Parameters were gathered once for all microbatches, but no call of the model used them.",
            where=model,
            why=f"{why}, or the call ran in global view; it would gather on its own.",
            do='js.value_and_grad(loss_fn, accumulate=4, sync="each")  # or pass loss_fn\'s parameters to the model',
        )
    if missed:
        listed = "".join(f"\n  {name}" for name in names)
        _compat.warn_user(
            f"{len(names)} parameter(s) of {model} are gathered once for all microbatches, and again in each:"
            f" {why}.{listed}",
        )
