"""How results leave the region: split along their batch dim, or the same on every data shard, or refused."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jshard import _compat
from jshard._errors import CallError
from jshard._nnx import Path, dotted
from jshard.engine.call import raw
from jshard.engine.collectives import vary
from jshard.engine.context import current_region, in_global_view

BATCH_MEAN = "jshard_batch_mean"
"""Marks a declared mean over the batch in a program traced in global view."""


@dataclasses.dataclass(frozen=True)
class Exit:
    """The way out of a region.

    Args:
        where: the call, for messages.
        axes: the data axes.
        shards: number of data shards.
        batch: global batch size.
        batch_dim: its dim in arguments, and in state that holds a batch.
        combine: `mean` or `sum` for outputs without a batch dim; None refuses them.
    """

    where: str
    axes: tuple[str, ...]
    shards: int
    batch: int
    batch_dim: int
    combine: str | None

    @property
    def local_batch(self) -> int:
        """Examples of one data shard."""
        return self.batch // self.shards

    @property
    def _own_part(self) -> str:
        return f"each of {self.shards} data shards computed it from its own {self.local_batch} of {self.batch} examples"

    def output(self, x: jax.Array, global_shape: tuple[int, ...], name: str) -> tuple[jax.Array, PartitionSpec]:
        """One output and its spec. Its batch dim is the one that is smaller here than in global view."""
        if self.shards == 1:
            return self._alone(x)
        if len(global_shape) != x.ndim:
            raise self._odd_shape(x, global_shape, name)
        dims = [d for d in range(x.ndim) if x.shape[d] != global_shape[d]]
        if len(dims) == 1 and x.shape[dims[0]] * self.shards == global_shape[dims[0]]:
            return self._along(x, dims[0])
        if dims:
            raise self._odd_shape(x, global_shape, name)
        differs = tuple(a for a in self.axes if a in _compat.varying_axes(x))
        if not differs:
            return x, PartitionSpec()
        if self.combine is None or (self.combine == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact)):
            raise self._no_batch_dim(x, name)
        return (lax.pmean if self.combine == "mean" else lax.psum)(x, differs), PartitionSpec()

    def state(
        self, variable: Any, x: Any, global_shape: tuple[int, ...] | None, path: tuple
    ) -> tuple[Any, PartitionSpec]:
        """One array of changed state and its spec. A batch dim is found as for outputs."""
        differs = tuple(a for a in self.axes if a in _compat.varying_axes(x))
        if not differs:
            return x, PartitionSpec()
        if self.shards == 1:
            return self._alone(x)
        whole = x.shape if global_shape is None or len(global_shape) != x.ndim else global_shape
        dims = [d for d, n in enumerate(x.shape) if n != whole[d]]
        if len(dims) == 1 and x.shape[dims[0]] * self.shards == whole[dims[0]]:
            return self._along(x, dims[0])
        if not dims and isinstance(variable, nnx.BatchStat) and jnp.issubdtype(x.dtype, jnp.floating):
            return lax.pmean(x, differs), PartitionSpec()  # statistics that were asked for per shard
        raise CallError(
            "State differs between data shards after the call.",
            where=f"{self.where}: {dotted(path)} ({type(variable).__name__}, {_type(x)})",
            why=self._own_part + ".",
            do="make it the same on all: self.state[...] = js.batch_mean(value);"
            ' in Linen self.sow("losses", name, js.batch_mean(value)).',
        )

    def _along(self, x: jax.Array, dim: int) -> tuple[jax.Array, PartitionSpec]:
        return vary(x, self.axes), PartitionSpec(*[None] * dim, self.axes)

    def _alone(self, x: jax.Array) -> tuple[jax.Array, PartitionSpec]:
        """One data shard holds everything; a scalar then leaves as one row."""
        differs = bool(_compat.varying_axes(x))
        return (vary(x, self.axes), PartitionSpec(self.axes)) if differs else (x, PartitionSpec())

    def _no_batch_dim(self, x: jax.Array, name: str) -> CallError:
        return CallError(
            "An output has no batch dim and differs between data shards.",
            where=f"{self.where} returned {name or 'an array'}: {_type(x)}",
            why=f"{self._own_part}, and jshard cannot know how to combine them.",
            do="return js.batch_mean(x), right for a mean over the batch and for what is the same on all shards;"
            ' or js.fully_shard(model, mesh=mesh, outputs="mean").',
        )

    def _odd_shape(self, x: jax.Array, global_shape: tuple[int, ...], name: str) -> CallError:
        return CallError(
            "An output does not split along the batch.",
            where=f"{self.where} returned {name or 'an array'}",
            why=f"its shape is {tuple(global_shape)} for {self.batch} examples and {x.shape} for {self.local_batch};"
            f" exactly one dim may differ, {self.shards} times as large.",
            do="compute it outside the model from an output that has the batch dim, or call under js.global_view().",
        )


def batch_mean(x: Any) -> Any:
    """The mean over all data shards of a mean over each shard's part of the batch.

    Inside an annotated model each data shard sees its part of the batch; a model that returns a mean over the
    batch (a loss, an auxiliary term) passes it through this. Elsewhere it changes nothing.

    Args:
        x: pytree of arrays, each a mean over the batch.

    Example:
        >>> loss = js.batch_mean(jnp.asarray(2.0))
    """

    def mean(value: jax.Array) -> jax.Array:
        if in_global_view():
            return checkpoint_name(value, BATCH_MEAN)
        axes = tuple(sorted(_compat.varying_axes(value) & _compat.manual_axes()))
        return lax.pmean(value, axes) if lax.axis_size(axes) > 1 else value

    return jax.tree.map(mean, x)


def per_shard(x: Any) -> Any:
    """Says that a constant belongs to each data shard, so that a loop in a model may start from it.

    Elsewhere it changes nothing.

    Args:
        x: pytree of arrays.

    Example:
        >>> carry = js.per_shard(jnp.zeros((16, 64)))
    """
    region = current_region()
    return x if region is None else jax.tree.map(lambda value: vary(value, region.axes), x)


def changed_state(changes: Sequence, shapes: Mapping[Path, list], exit_: Exit) -> tuple[list, list[PartitionSpec]]:
    """Arrays and specs of the state that a call changed."""
    arrays, specs = [], []
    for path, variable in changes:
        leaves = jax.tree.leaves(raw(variable))
        for leaf, shape in zip(leaves, shapes.get(path, [None] * len(leaves)), strict=True):
            x, spec = exit_.state(variable, leaf, shape, path[1:])
            arrays.append(x)
            specs.append(spec)
    return arrays, specs


def _type(x: jax.Array) -> str:
    return f"{x.dtype}{list(x.shape)}"
