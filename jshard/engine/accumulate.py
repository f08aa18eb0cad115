"""Gradient accumulation: each microbatch is reduced into a sharded sum, or gathers and reductions happen once."""

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard.engine.context import during
from jshard.engine.inner import over_axes
from jshard.engine.rules import PARTIAL, Shard, Value
from jshard.engine.stored import gather, inner_dims, reduce_gradient
from jshard.engine.weighted import MeanShares, nonzero, value_and_weight
from jshard.errors import CallError
from jshard.plans.memories import back, fetched, key_texts, placed_like, to_device
from jshard.plans.mesh import (
    CONTEXT,
    AnyMesh,
    data_axes,
    data_degree,
    degree,
    inner_axes,
    manual_axes,
    region_axes,
    region_degree,
)
from jshard.plans.placement import Placement, spec_over
from jshard.plans.policies import is_real_float
from jshard.plans.units import Unit


def microbatches(batch: Any, unit: Unit, steps: int, name: str) -> Any:
    """Splits a batch so that every data shard keeps its own examples: microbatch i has rows i, i + steps, and so on.

    Contiguous microbatches would be on a few data shards each, and every step would send their rows to the others.

    Scalars are passed whole to every microbatch. A random key is split, typed or raw. So is each key of an array of
    keys, unless it has one for every row: then they are rows.
    """
    shards = data_degree(unit.mesh)
    flat, _ = jax.tree_util.tree_flatten_with_path(batch)
    rows = {jnp.shape(x)[0] for _, x in flat if jnp.ndim(x) and not _may_be_keys(x)}
    keys = [_may_be_keys(x) and not _is_by_row(x, rows, steps * shards) for _, x in flat]
    arrays = zip(flat, keys, strict=True)
    sized = [(jax.tree_util.keystr(p), jnp.shape(x)) for (p, x), is_key in arrays if jnp.ndim(x) and not is_key]
    bad = [(p, shape) for p, shape in sized if shape[0] % (steps * shards)]
    if bad:
        raise CallError(
            "The batch cannot be cut into microbatches.",
            where=[f"{name}: batch{p}  shape {tuple(s)}" for p, s in bad],
            why=f"{steps} microbatches over {shards} data shards need a leading dim that divides by {steps * shards}.",
            do=f"js.value_and_grad(loss_fn, accumulate=1)  # or a batch that is a multiple of {steps * shards}",
        )
    spec, over = PartitionSpec(None, data_axes(unit.mesh)), degree(unit.mesh, CONTEXT)

    def cut(x: Any, is_key: bool) -> jax.Array:
        x = jnp.asarray(x)
        if is_key:
            return _split_keys(x, steps)
        if not x.ndim:
            return jnp.broadcast_to(x, (steps,))
        rows = x.reshape(x.shape[0] // steps, steps, *x.shape[1:])
        is_split = over > 1 and x.ndim > 1 and x.shape[1] % over == 0
        sharding = NamedSharding(unit.mesh, PartitionSpec(*spec, CONTEXT) if is_split else spec)
        return lax.with_sharding_constraint(jnp.moveaxis(rows, 1, 0), sharding)

    return jax.tree.map(cut, batch, jax.tree.unflatten(jax.tree.structure(batch), keys))


def _is_typed_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _may_be_keys(x: Any) -> bool:
    """Whether an array holds typed keys, or has the form of one raw key, as from `jax.random.PRNGKey`."""
    if _is_typed_key(x):
        return True
    raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return jnp.result_type(x) == raw.dtype and jnp.shape(x) == raw.shape


def _is_by_row(x: Any, rows: set[int], parts: int) -> bool:
    """Whether an array of keys, or of the form of a raw key, has a row for each row of the batch."""
    if not jnp.ndim(x):
        return False
    size = jnp.shape(x)[0]
    return size in rows or (not rows and size % parts == 0)


def _split_keys(keys: jax.Array, steps: int) -> jax.Array:
    """As many new keys for each key, along a new leading dim."""
    if not _is_typed_key(keys) or not keys.ndim:
        return jax.random.split(keys, steps)
    split = jax.vmap(lambda key: jax.random.split(key, steps), out_axes=1)
    return split(keys.ravel()).reshape(steps, *keys.shape)


class Copies:
    """Full copies of parameters, gathered beforehand, by the ids of the stored arrays.

    A parameter that was changed since, or that of another model, is a different array.
    """

    def __init__(self, stored: Sequence[Any], copies: Sequence[Any]) -> None:
        self.by_id = dict(zip(map(id, stored), copies, strict=True))
        self.taken: set[int] = set()  # ids of those that a call has taken
        self.missed = False  # whether a call has gathered on its own


gathered_copies: contextvars.ContextVar[Copies | None] = contextvars.ContextVar("copies", default=None)
"""Copies gathered beforehand; None if each call gathers on its own."""


class Once:
    """The parameters of a tree that are gathered beforehand: those that are ever gathered.

    Empty if all data axes have degree 1. `placements` are those of the tree's leaves; None for a leaf that is
    not a parameter.
    """

    def __init__(self, placements: Sequence[Placement | None], mesh: AnyMesh) -> None:
        found = {i: p for i, p in enumerate(placements) if p is not None and p.gathered and region_degree(mesh) > 1}
        self.at, self.placements, self.mesh = list(found), list(found.values()), mesh
        self.inner = {axis: degree(mesh, axis) for axis in inner_axes(mesh)}

    def gather(self, tree: Any) -> list[jax.Array]:
        """Every data shard's own full copy of the parameters: arrays with one leading row per data shard."""
        if not self.at:
            return []
        stored, own, layout = self._layout()

        def gather_all(*values: Any) -> list:
            found = zip(values, self.placements, strict=True)
            return [gather(Value(x, Shard(p)), p.gathered_dtype)[None] for x, p in found]

        def run(values: list) -> list:
            dims = [inner_dims(p, x.ndim) for x, p in zip(values, self.placements, strict=True)]
            states = {axis: [d.get(axis) for d in dims] for axis in self.inner}
            return over_axes(self.inner, gather_all, list(map(fetched, values)), states, {})

        return jax.shard_map(run, in_specs=(stored,), out_specs=own, **layout)(self.picked(tree))

    def reduce(self, tree: Any, sums: list[jax.Array]) -> list[jax.Array]:
        """The gradients of the shards, from each data shard's gradients of its copies, in the dtypes of the sums."""
        if not self.at:
            return []
        stored, own, layout = self._layout()

        def reduce_all(*sums: Any) -> list:
            return [reduce_gradient(g, p, layout["mesh"]) for g, p in zip(sums, self.placements, strict=True)]

        def run(values: list, sums: list) -> list:
            placed = list(zip(values, self.placements, strict=True))
            whole, dims = ([inner_dims(p, x.ndim, gathered=g) for x, p in placed] for g in (True, False))
            states = {axis: [d.get(axis, PARTIAL) for d in whole] for axis in self.inner}
            wanted = {axis: [d.get(axis) for d in dims] for axis in self.inner}
            found = over_axes(self.inner, reduce_all, [g[0] for g in sums], states, wanted)
            return [placed_like(g, x) for x, g in zip(values, found, strict=True)]

        return jax.shard_map(run, in_specs=(stored, own), out_specs=stored, **layout)(self.picked(tree), sums)

    def picked(self, tree: Any) -> list[Any]:
        """The leaves of a tree at the positions of these parameters."""
        leaves = jax.tree.leaves(tree)
        return [leaves[i] for i in self.at]

    def names(self, tree: Any) -> list[str]:
        """Their paths in a tree, as text."""
        paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
        return ["/".join(key_texts(paths[i])) for i in self.at]

    def _layout(self) -> tuple[list[PartitionSpec], PartitionSpec, dict[str, Any]]:
        """Specs of the parameters and of the values on each data shard; the mesh and manual axes of `shard_map`."""
        mesh, axes = self.mesh, region_axes(self.mesh)
        assert isinstance(mesh, Mesh), "the model has arrays"
        layout = {"mesh": mesh, "axis_names": manual_axes(mesh), "check_vma": False}
        return [spec_over(axes, placement.spec) for placement in self.placements], PartitionSpec(axes), layout


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss as a function of trees of arrays.

    `run` takes parameters, frozen ones, state and a microbatch; it returns the loss, a scalar or a `WeightedMean`, and
    aux with the new state.
    """

    run: Callable[[Any, Any, Any, Any], tuple[Any, tuple[Any, Any]]]
    params: Any  # to differentiate with respect to
    frozen: Any  # the other ones
    state: Any  # passed from one microbatch to the next
    placements: tuple[Sequence[Placement | None], Sequence[Placement | None]]
    """For the leaves of `params`, and of `frozen`; None for leaves that are not parameters."""
    root: Unit
    name: str  # of the model, for messages


def accumulated(loss: Loss, batch: Any, steps: int, *, once: bool) -> tuple[jax.Array, Any, Any, Any]:
    """Loss, aux of every microbatch, gradients, and the state after the last."""
    parts, mesh = microbatches(batch, loss.root, steps, loss.name), loss.root.mesh
    of_params, of_frozen = (Once(placements if once else (), mesh) for placements in loss.placements)
    copies, frozen_copies = of_params.gather(loss.params), of_frozen.gather(loss.frozen)

    def run(params: Any, copies: list, state: Any, part: Any) -> tuple[jax.Array, tuple[Any, Any, Any]]:
        stored = of_params.picked(params) + of_frozen.picked(loss.frozen)
        found = Copies(stored, copies + frozen_copies)
        with during(gathered_copies, found if once else None):
            out = loss.run(params, loss.frozen, state, part)
        names = of_params.names(params) + of_frozen.names(loss.frozen)
        if left := [name for name, x in zip(names, stored, strict=True) if id(x) not in found.taken]:
            _check_left(left, len(names), found.missed, loss.name)
        value, weight = value_and_weight(out[0])
        return value, (*out[1], weight)

    grad = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True), inline=True)  # traced once for all uses

    def step(carry: tuple, part: Any) -> tuple[tuple, Any]:
        total, sums, state, before = carry
        (value, (aux, state, weight)), grads = grad(loss.params, copies, state, part)
        if weight is None:
            sums = jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, to_device(grads))
            return (total + value, sums, state, None), aux
        means = jax.tree.map(MeanShares.of(before, weight).joint, sums, to_device(grads))
        return (total + value * nonzero(weight), means, state, before + weight), aux

    placed = zip(copies, of_params.placements, strict=True)
    zeros = _zero_sums(loss.params, loss.placements[0]), [jnp.zeros_like(x, p.reduce_dtype) for x, p in placed]
    first = jax.tree.map(lambda x: x[0], parts)
    (value, (_, _, weight)), _ = jax.eval_shape(grad, loss.params, copies, loss.state, first)
    none = None if weight is None else jnp.zeros((), weight.dtype)
    begin = (jnp.zeros((), value.dtype), zeros, loss.state, none)
    (total, (grads, of_copies), state, weight), aux = lax.scan(step, begin, parts)
    if once:
        leaves, form = jax.tree.flatten(grads)
        for i, x in zip(of_params.at, to_device(of_params.reduce(loss.params, of_copies)), strict=True):
            leaves[i] = leaves[i] + x
        grads = jax.tree.unflatten(form, leaves)
    if weight is None:
        mean = total / steps
        grads = jax.tree.map(lambda g: g / steps, grads)
    else:
        mean = total / weight  # and the gradients are means already
    # A stored dtype may be too narrow for the sum, but holds the mean as well as it holds the parameter.
    grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, loss.params)
    return mean, aux, back(grads, loss.params), state


def _zero_sums(params: Any, placements: Sequence[Placement | None]) -> Any:
    """Returns zeros to add the gradients of microbatches to, stored as their parameters.

    They have the reduce dtype: in a narrower stored dtype, gradients that are small beside the sum would be lost. If
    the stored dtype is the wider one they have that, which costs nothing between steps.
    """
    leaves, tree = jax.tree.flatten(params)
    zeros = []
    for x, placement in zip(leaves, placements, strict=True):
        dtype = x.dtype if placement is None else _dtype_of_sum(x.dtype, placement.reduce_dtype)
        zeros.append(jnp.zeros_like(x, dtype))
    return jax.tree.unflatten(tree, zeros)


def _dtype_of_sum(stored: Any, reduced: str) -> Any:
    if not is_real_float(stored):  # floats of 8 bits have no common dtype with others
        return reduced
    return jnp.promote_types(stored, reduced)


def _check_left(names: list[str], total: int, missed: bool, model: str) -> None:
    """Warns of copies that no call has used, if a call has gathered on its own; raises if no copy was used."""
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
