"""Gradient accumulation: reduce every microbatch into a sharded sum, or gather once and reduce once."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._errors import AnnotationError, CallError
from jshard._mesh import data_axes, data_degree, manual_axes
from jshard._nnx import Member, Path, Unit, dotted, plain_class, unit_of, walk
from jshard._offload import back, to_device
from jshard._placement import spec_over
from jshard._plan import root_forgotten
from jshard.engine.call import raw
from jshard.engine.collectives import all_gather, reduce_scatter
from jshard.engine.context import copies_scope


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    accumulate: int = 1,
    sync: str = "each",
    has_aux: bool = False,
    wrt: Any = nnx.Param,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` over microbatches.

    The batch is cut into `accumulate` microbatches along its batch dim; loss and gradients are the means over
    them. State that the model changes (BatchNorm, dropout counts) passes from one to the next.

    Args:
        loss_fn: `loss_fn(model, *batch)`, a mean over the batch, in global view.
        accumulate: number of microbatches.
        sync: `"each"`: every microbatch gathers parameters and reduce-scatters gradients; the sum is sharded.
            `"last"`: parameters are gathered once and gradients reduced once per step; each device holds the
            full parameters and gradients of the model meanwhile. What is never gathered is as with `"each"`.
        has_aux: `loss_fn` returns `(loss, aux)`; aux comes back stacked over the microbatches.
        wrt: the parameters to differentiate with respect to, as `nnx.Optimizer` takes them: an nnx filter. The others
            are frozen: gathered, and nothing more.

    Returns:
        A function of `(model, *batch)` that returns `(loss, gradients)`, or `((loss, aux), gradients)`.

    Raises:
        CallError: the batch does not divide into microbatches that divide over the data shards.

    Example:
        >>> grad_fn = js.value_and_grad(loss_fn, accumulate=4, sync="last")
        >>> loss, grads = nnx.jit(lambda model, x: grad_fn(model, x))(model, x)
    """
    if not isinstance(accumulate, int) or accumulate < 1 or sync not in ("each", "last"):
        raise AnnotationError(
            "There is no such way to accumulate.",
            where=f"value_and_grad(accumulate={accumulate!r}, sync={sync!r})",
            why='accumulate is a number of microbatches, sync is "each" or "last".',
            do='js.value_and_grad(loss_fn, accumulate=4, sync="last")',
        )

    @functools.wraps(loss_fn)
    def run(model: nnx.Module, *batch: Any) -> Any:
        unit = unit_of(model)
        if unit is None:
            raise root_forgotten(model)
        if accumulate == 1:
            return nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt), has_aux=has_aux)(model, *batch)
        parts = _microbatches(batch, unit, accumulate, plain_class(model).__name__)
        return _accumulate(loss_fn, model, unit, parts, accumulate, sync == "last", has_aux, wrt)

    return run


def _accumulate(
    loss_fn: Callable, model: nnx.Module, unit: Unit, parts: Any, steps: int, once: bool, has_aux: bool, wrt: Any
) -> Any:
    graphdef, params, frozen, state = nnx.split(model, wrt, nnx.Param, ...)
    if once:
        _check_parameters(params, plain_class(model).__name__)
    of_params, of_frozen = _Once.of(params, unit, once), _Once.of(frozen, unit, once)
    copies, frozen_copies = of_params.gather(params), of_frozen.gather(frozen)
    dtypes = [member.placement.reduce_dtype for member in of_params.members]

    def loss(params: Any, copies: list, state: Any, part: Any) -> tuple[jax.Array, Any]:
        live = nnx.merge(graphdef, params, frozen, state, copy=True)
        with copies_scope(_by_variable(live, (of_params, copies), (of_frozen, frozen_copies)) if once else None):
            out = loss_fn(live, *part)
        value, aux = out if has_aux else (out, None)
        return value, (aux, nnx.split(live, wrt, nnx.Param, ...)[3])

    def step(carry: tuple, part: Any) -> tuple[tuple, Any]:
        total, sums, state = carry
        (value, (aux, state)), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            params, copies, state, part
        )
        grads = to_device(grads)
        sums = jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grads)
        return (total + value, sums, state), aux

    zeros = jax.tree.map(jnp.zeros_like, params), [jnp.zeros_like(c, d) for c, d in zip(copies, dtypes, strict=True)]
    dtype = jax.eval_shape(loss, params, copies, state, jax.tree.map(lambda x: x[0], parts))[0].dtype
    (total, (grads, of_copies), state), aux = lax.scan(step, (jnp.zeros((), dtype), zeros, state), parts)
    if once:
        grads = of_params.add(grads, to_device(of_params.reduce(params, of_copies)))
    nnx.update(model, state)
    grads = back(jax.tree.map(lambda g: g / steps, grads), params)
    value = total / steps
    return ((value, aux) if has_aux else value), grads


def _check_parameters(params: Any, name: str) -> None:
    """Raises for variables that are differentiated and no parameters: they have no shards."""
    kinds = [(dotted(path), type(v).__name__) for path, v in nnx.to_flat_state(params) if not isinstance(v, nnx.Param)]
    if kinds:
        raise CallError(
            "Gradients are asked for of what is no parameter.",
            where=[f"{name}: {path}  {kind}" for path, kind in kinds],
            why='sync="last" gathers parameters and reduces their gradients; these lie whole on every device.',
            do='js.value_and_grad(loss_fn, accumulate=4, sync="each"), or derive their class from nnx.Param.',
        )


@dataclasses.dataclass(frozen=True)
class _Once:
    """Parameters that are gathered once for all microbatches: those of a state that are ever gathered.

    Args:
        paths: in the state.
        members: their records.
        unit: of the root.
    """

    paths: tuple[Path, ...]
    members: tuple[Member, ...]
    unit: Unit

    @classmethod
    def of(cls, state: Any, unit: Unit, once: bool) -> "_Once":
        """Those of a state of parameters; none if each microbatch gathers for itself."""
        paths = [path for path, _ in nnx.to_flat_state(state)] if once else []
        found = {path: unit.by_path[path] for path in paths if unit.by_path[path].placement.gathered}
        return cls(tuple(found), tuple(found.values()), unit)

    def gather(self, state: Any) -> list:
        """Every data shard's own full copy of the parameters: arrays with one leading row per data shard."""
        if not self.members:
            return []
        mesh, specs, layout = self._layout()

        def gather_all(values: list) -> list:
            return [all_gather(x, m.placement, mesh)[None] for x, m in zip(values, self.members, strict=True)]

        run = jax.shard_map(gather_all, in_specs=(specs,), out_specs=PartitionSpec(data_axes(mesh)), **layout)
        return run(self._values(state))

    def reduce(self, state: Any, sums: list) -> list:
        """The gradients of the shards from each data shard's gradients of its copies."""
        if not self.members:
            return []
        mesh, specs, layout = self._layout()

        def reduce_all(values: list, sums: list) -> list:
            found = zip(values, sums, self.members, strict=True)
            return [reduce_scatter(g[0], m.placement, mesh, x) for x, g, m in found]

        run = jax.shard_map(reduce_all, in_specs=(specs, PartitionSpec(data_axes(mesh))), out_specs=specs, **layout)
        return run(self._values(state), sums)

    def add(self, gradients: Any, more: list) -> Any:
        """Gradients of a state, with more of them for these parameters."""
        by_path = dict(zip(self.paths, more, strict=True))
        flat = [(p, v.replace(raw(v) + by_path[p]) if p in by_path else v) for p, v in nnx.to_flat_state(gradients)]
        return nnx.from_flat_state(flat)

    def _values(self, state: Any) -> list:
        flat = dict(nnx.to_flat_state(state))
        return [raw(flat[path]) for path in self.paths]

    def _layout(self) -> tuple[Mesh, list[PartitionSpec], dict[str, Any]]:
        """The mesh, the parameters' specs over the data axes, and where `shard_map` is manual."""
        mesh = self.unit.mesh
        assert isinstance(mesh, Mesh), "the model has arrays"
        axes = data_axes(mesh)
        specs = [spec_over(axes, member.placement.spec) for member in self.members]
        return mesh, specs, {"mesh": mesh, "axis_names": manual_axes(mesh)}


def _by_variable(live: nnx.Module, *copied: tuple[_Once, list]) -> dict[int, jax.Array]:
    """The copies by the variables of a live model, so that a call into any of its units finds its own."""
    variables = dict(walk(live))
    found = [pair for once, copies in copied for pair in zip(once.paths, copies, strict=True)]
    return {id(variables[path]): copy for path, copy in found}


def _microbatches(batch: Any, unit: Unit, steps: int, name: str) -> Any:
    """Cuts a batch so that every data shard keeps its own examples: microbatch i takes every i-th of them.

    Scalars go to every microbatch whole; a random key is split.
    """
    shards, dim = data_degree(unit.mesh), unit.policy.batch_dim
    flat, _ = jax.tree_util.tree_flatten_with_path(batch)
    arrays = [(jax.tree_util.keystr(p), jnp.shape(x)) for p, x in flat if jnp.ndim(x)]
    bad = [(p, shape) for p, shape in arrays if len(shape) <= dim or shape[dim] % (steps * shards)]
    if bad:
        raise CallError(
            "The batch cannot be cut into microbatches.",
            where=[f"{name}: batch{p}  shape {tuple(s)}" for p, s in bad],
            why=f"{steps} microbatches over {shards} data shards need a batch dim that divides by {steps * shards}.",
            do=f"use a batch that is a multiple of {steps * shards}, or js.value_and_grad(loss_fn, accumulate=1).",
        )
    sharding = NamedSharding(unit.mesh, PartitionSpec(*[None] * (dim + 1), data_axes(unit.mesh)))

    def cut(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(x, steps)
        if not x.ndim:
            return jnp.broadcast_to(x, (steps,))
        rows = x.reshape(*x.shape[:dim], x.shape[dim] // steps, steps, *x.shape[dim + 1 :])
        return lax.with_sharding_constraint(jnp.moveaxis(rows, dim + 1, 0), sharding)

    return jax.tree.map(cut, batch)
