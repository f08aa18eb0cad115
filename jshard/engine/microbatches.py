"""A batch, cut into microbatches."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jshard._errors import CallError
from jshard._mesh import data_axes, data_degree
from jshard._nnx import Unit


def microbatches(batch: Any, unit: Unit, steps: int, name: str) -> Any:
    """Cuts a batch so that every data shard keeps its own examples: microbatch i takes every i-th of them.

    Scalars go to every microbatch whole; a random key is split.

    Args:
        batch: pytree of arrays.
        unit: record of the root.
        steps: number of microbatches.
        name: of the model, for messages.
    """
    shards = data_degree(unit.mesh)
    flat, _ = jax.tree_util.tree_flatten_with_path(batch)
    arrays = [(jax.tree_util.keystr(p), jnp.shape(x)) for p, x in flat if jnp.ndim(x)]
    bad = [(p, shape) for p, shape in arrays if shape[0] % (steps * shards)]
    if bad:
        raise CallError(
            "The batch cannot be cut into microbatches.",
            where=[f"{name}: batch{p}  shape {tuple(s)}" for p, s in bad],
            why=f"{steps} microbatches over {shards} data shards need a leading dim that divides by {steps * shards}.",
            do=f"use a batch that is a multiple of {steps * shards}, or js.value_and_grad(loss_fn, accumulate=1).",
        )
    sharding = NamedSharding(unit.mesh, PartitionSpec(None, data_axes(unit.mesh)))

    def cut(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(x, steps)
        if not x.ndim:
            return jnp.broadcast_to(x, (steps,))
        rows = x.reshape(x.shape[0] // steps, steps, *x.shape[1:])
        return lax.with_sharding_constraint(jnp.moveaxis(rows, 1, 0), sharding)

    return jax.tree.map(cut, batch)
