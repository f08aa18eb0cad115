"""How results leave the region: split along their batch dim, or the same on every data shard, or refused."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jshard import _compat
from jshard._errors import CallError
from jshard._nnx import dotted, walk
from jshard.engine.call import Kept, Live, raw
from jshard.engine.collectives import vary
from jshard.engine.context import current_region, in_global_view
from jshard.engine.inputs import GlobalTrace
from jshard.engine.reductions import DECLARED, Mixing


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
        own_statistics: each data shard's BatchNorm has statistics of its own.
        mixing: what the call does with its examples; None if that is not looked at.
    """

    where: str
    axes: tuple[str, ...]
    shards: int
    batch: int
    batch_dim: int
    combine: str | None
    own_statistics: bool = False
    mixing: Mixing | None = None

    @property
    def local_batch(self) -> int:
        """Examples of one data shard."""
        return self.batch // self.shards

    @property
    def _own_part(self) -> str:
        return f"each of {self.shards} data shards computed it from its own {self.local_batch} of {self.batch} examples"

    def output(
        self, x: jax.Array, global_shape: tuple[int, ...], name: str, number: int
    ) -> tuple[jax.Array, PartitionSpec]:
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
            return self._alike(x, number)
        if self.combine is None or (self.combine == "mean" and not jnp.issubdtype(x.dtype, jnp.inexact)):
            raise self._no_batch_dim(x, name)
        return (lax.pmean if self.combine == "mean" else lax.psum)(x, differs), PartitionSpec()

    def state(self, x: Any, global_shape: tuple[int, ...] | None, number: int | None) -> Any:
        """One array of changed state and its spec; None if it differs. A batch dim is found as for outputs."""
        if self.shards == 1:
            return self._alone(x)
        whole = x.shape if global_shape is None or len(global_shape) != x.ndim else global_shape
        dims = [d for d, n in enumerate(x.shape) if n != whole[d]]
        if len(dims) == 1 and x.shape[dims[0]] * self.shards == whole[dims[0]]:
            return self._along(x, dims[0])
        return None if dims or any(a in _compat.varying_axes(x) for a in self.axes) else self._alike(x, number)

    def is_own_statistic(self, owner: Any, name: Any) -> bool:
        """Whether a variable is a mean that a BatchNorm takes over the examples of each data shard, as it was asked."""
        return self.own_statistics and isinstance(owner, nnx.BatchNorm) and name in ("mean", "var")

    def mean(self, x: jax.Array) -> tuple[jax.Array, PartitionSpec]:
        """The mean over the data shards."""
        return lax.pmean(x, tuple(a for a in self.axes if a in _compat.varying_axes(x))), PartitionSpec()

    def state_differs(self, variable: Any, x: jax.Array, path: tuple, line: str) -> CallError:
        """The error for state that is not the same on all data shards."""
        written = f", computed at {line}" if line else ""
        return CallError(
            "State differs between data shards after the call.",
            where=f"{self.where}: {dotted(path)} ({type(variable).__name__}, {_type(x)}){written}",
            why=f"{self._own_part}; jshard cannot know whether it is a mean, a sum or a count.",
            do="with js.global_view(): step(model, batch)  # right for all of them, without a change to the model\n"
            "Only for an unweighted mean over the examples: self.state[...] = js.batch_mean(value); in Linen"
            ' self.sow("losses", name, js.batch_mean(value)).',
        )

    def _alike(self, x: jax.Array, number: int | None) -> tuple[jax.Array, PartitionSpec]:
        """What is the same on all data shards; unless it counts the examples of one."""
        if self.mixing is not None and number is not None:
            self.mixing.refuse_counted(number)
        return x, PartitionSpec()

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
            do="return one value for each example, and combine them outside the model: (l * m).sum() / m.sum()\n"
            "or run the step under js.global_view(), which is right for every output.\n"
            "Only an unweighted mean over equally many examples, or what is the same on all data shards, may be"
            ' declared: return js.batch_mean(x), or js.fully_shard(model, mesh=mesh, outputs="mean").',
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
    batch (a loss, an auxiliary term) passes it through this. Elsewhere it changes nothing. It is not right for a sum,
    a count, or a mean whose weights differ between data shards, such as `(l * m).sum() / m.sum()`.

    Args:
        x: pytree of arrays, each an unweighted mean over the batch.

    Example:
        >>> loss = js.batch_mean(jnp.asarray(2.0))
    """

    def mean(value: jax.Array) -> jax.Array:
        if in_global_view():
            return checkpoint_name(value, DECLARED)
        axes = tuple(sorted(_compat.varying_axes(value) & _compat.manual_axes()))
        return lax.pmean(value, axes) if lax.axis_size(axes) > 1 else value

    return jax.tree.map(mean, x)


def per_shard(x: Any) -> Any:
    """Says that a value in a model belongs to each data shard, by intent.

    Around a constant it lets a loop start from it. Around a value that combines examples, such as a statistic over
    the batch, it says that those of one data shard are meant: other numbers than on one device, and no error. Outside
    an annotated model it changes nothing.

    Args:
        x: pytree of arrays.

    Example:
        >>> carry = js.per_shard(jnp.zeros((16, 64)))
    """
    if in_global_view():
        return jax.tree.map(lambda value: checkpoint_name(value, DECLARED), x)
    region = current_region()
    return x if region is None else jax.tree.map(lambda value: vary(value, region.axes), x)


def changed_state(
    changes: Kept, live: Live, traced: GlobalTrace | None, exit_: Exit
) -> tuple[list, list[PartitionSpec]]:
    """Arrays and specs of the state that a call changed in a live graph."""
    found: list[tuple[Any, PartitionSpec]] = []
    nodes = dict(walk(live.graph)) if changes else {}
    for path, variable in changes:
        leaves: list[Any] = jax.tree.leaves(raw(variable))
        unknown = [None] * len(leaves)
        shapes: Sequence[Any] = unknown if traced is None else traced.state.get(path, unknown)
        numbers: Sequence[Any] = unknown if traced is None else traced.numbers(path) or unknown
        for x, shape, number in zip(leaves, shapes, numbers, strict=True):
            way = exit_.state(x, shape, number)
            if way is None and x.shape == shape and exit_.is_own_statistic(nodes.get(path[:-1]), path[-1]):
                way = exit_.mean(x)
            if way is None:
                line = "" if traced is None or number is None else traced.line(number)
                raise exit_.state_differs(variable, x, path[1:], line)
            found.append(way)
    return [x for x, _ in found], [spec for _, spec in found]


def _type(x: jax.Array) -> str:
    return f"{x.dtype}{list(x.shape)}"
