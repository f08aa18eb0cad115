"""The results that a loop over stages stacks: what each layer returns, for each microbatch."""

import abc
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from jshard.engine.rules import PARTIAL, Shard, Staged, State, Value
from jshard.engine.stages import exchanges
from jshard.engine.stages.layer_inputs import ScannedParameter
from jshard.plans.stages import StageLayout


@dataclasses.dataclass(frozen=True)
class ChunkRun:
    """What a place runs in a tick.

    Attributes:
        round: in which it is.
        chunk: which of its chunks that is, from the first layers to the last.
        microbatch: which one it runs.
        is_layer: for each layer of the chunk, whether there is such a layer.
        is_busy: whether the place has a microbatch to run; else it computes as if.
    """

    round: jax.Array
    chunk: jax.Array
    microbatch: jax.Array
    is_layer: jax.Array
    is_busy: jax.Array

    @property
    def is_real(self) -> jax.Array:
        """For each layer of the chunk, whether its results count."""
        return self.is_layer & self.is_busy


@dataclasses.dataclass(frozen=True)
class StackedResult(abc.ABC):
    """One of the results that a loop stacks.

    A place has a *buffer* for it, to which each tick writes the rows of its chunk and microbatch.

    Attributes:
        row: the type of a layer's result for one microbatch.
        layout: which layers are where.
    """

    row: ShapedArray
    layout: StageLayout

    @abc.abstractmethod
    def empty(self) -> jax.Array:
        """Returns the buffer before the first tick."""

    @abc.abstractmethod
    def written(self, buffer: jax.Array, rows: jax.Array, run: ChunkRun) -> jax.Array:
        """Returns the buffer with the rows of a chunk."""

    @abc.abstractmethod
    def value(self, buffer: jax.Array) -> Value:
        """Returns the result of the loop."""


@dataclasses.dataclass(frozen=True)
class StackedRows(StackedResult):
    """What is split along the examples, or the same for all of them: it stays on its stage.

    Attributes:
        dim: the dim along which a row is split; None if it is whole.
        num_microbatches: whose parts are along it.
    """

    dim: int | None
    num_microbatches: int

    def empty(self) -> jax.Array:
        """Returns zeros, which are never read: each row is written by its microbatches."""
        shape = list(self.row.shape)
        if self.dim is not None:
            shape[self.dim] *= self.num_microbatches
        return exchanges.zeros((self.layout.layers_per_place, *shape), self.row.dtype)

    def written(self, buffer: jax.Array, rows: jax.Array, run: ChunkRun) -> jax.Array:
        """Returns the buffer with the rows of a chunk; an idle place leaves it as it is."""
        zero = np.int32(0)
        start: list[jax.Array | np.integer] = [run.chunk * self.layout.layers_per_chunk, *[zero] * self.row.ndim]
        if self.dim is not None:
            start[1 + self.dim] = run.microbatch * np.int32(self.row.shape[self.dim])
        before = lax.dynamic_slice(buffer, start, rows.shape)
        is_real = run.is_real.reshape(-1, *[1] * self.row.ndim)
        return lax.dynamic_update_slice(buffer, jnp.where(is_real, rows, before), start)

    def value(self, buffer: jax.Array) -> Value:
        """Returns the rows on their stages."""
        return Value(buffer, Staged(self.layout, self.dim))


@dataclasses.dataclass(frozen=True)
class StackedSums(StackedResult):
    """What is partial: the sum over the microbatches is a part of the value of each layer."""

    def empty(self) -> jax.Array:
        """Returns zeros, to which rows are added."""
        return jnp.zeros((self.layout.layers_per_place, *self.row.shape), self.row.dtype)

    def written(self, buffer: jax.Array, rows: jax.Array, run: ChunkRun) -> jax.Array:
        """Returns the buffer with the rows of a chunk added."""
        start = [run.chunk * self.layout.layers_per_chunk, *[np.int32(0)] * self.row.ndim]
        before = lax.dynamic_slice(buffer, start, rows.shape)
        return lax.dynamic_update_slice(buffer, before + _real_rows(rows, run), start)

    def value(self, buffer: jax.Array) -> Value:
        """Returns the layers of this place among zeros: a part of the sum over all shards."""
        return Value(exchanges.among_zeros(buffer, self.layout), PARTIAL)


@dataclasses.dataclass(frozen=True)
class StackedGradients(StackedResult):
    """Gradients of a scanned parameter: added over the microbatches of a round, then reduced beside the next one.

    In a tick some places are in one round and some still in the one before it. So there are two buffers, which take
    turns, each with the layers of one chunk.

    Attributes:
        parameter: how the parameter is stored.
        sum_dtype: in which the microbatches are added.
        dtype: of the reduced gradient.
    """

    parameter: ScannedParameter
    sum_dtype: np.dtype
    dtype: np.dtype

    def empty(self) -> jax.Array:
        """Returns zeros for both buffers."""
        return jnp.zeros((2, self.layout.layers_per_chunk, *self.row.shape), self.sum_dtype)

    def written(self, buffer: jax.Array, rows: jax.Array, run: ChunkRun) -> jax.Array:
        """Returns the buffers, with the rows of a chunk added to that of its round."""
        start = [run.round % 2, *[np.int32(0)] * (self.row.ndim + 1)]
        # Cast here, where they are added: cast in the layer, the wider array would be a result of a conditional.
        added = _real_rows(rows, run).astype(self.sum_dtype)[None]
        before = lax.dynamic_slice(buffer, start, added.shape)
        return lax.dynamic_update_slice(buffer, before + added, start)

    def begun(self, buffer: jax.Array, round_number: jax.Array | int) -> jax.Array:
        """Returns the buffers when a round begins: its sums start at zero, where those of two rounds before were."""
        start = [jnp.int32(round_number % 2), *[np.int32(0)] * (self.row.ndim + 1)]
        return lax.dynamic_update_slice(buffer, jnp.zeros((1, *buffer.shape[1:]), buffer.dtype), start)

    def sums(self, buffer: jax.Array, round_number: jax.Array | int) -> jax.Array:
        """Returns the sums of a round, when all places have left it."""
        return lax.dynamic_index_in_dim(buffer, jnp.int32(round_number % 2), 0, keepdims=False)

    def value(self, buffer: jax.Array) -> Value:
        """Returns the gradients of all layers as they are stored, from the reduced ones of this place."""
        parameter = self.parameter
        x = exchanges.from_stages(buffer, self.layout, parameter.dim_over_pipe(buffer), parameter.stored)
        return Value(x.astype(self.dtype), Shard(parameter.stored))


def _real_rows(rows: jax.Array, run: ChunkRun) -> jax.Array:
    """Returns the rows of a chunk, with zeros for those that do not count."""
    is_real = run.is_real.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(is_real, rows, jnp.zeros_like(rows))


# ---- carries


@dataclasses.dataclass(frozen=True)
class FinalCarry:
    """A carry after the last layer, which the last place collects for all microbatches.

    Attributes:
        part: the type of the carry of one microbatch.
        state: its state.
        num_microbatches: whose parts are collected.
    """

    part: ShapedArray
    state: State
    num_microbatches: int

    def empty(self) -> jax.Array:
        """Returns the array before the first microbatch is through; of a sum it is zero, and else never read."""
        shape = list(self.part.shape)
        if isinstance(self.state, int):
            shape[self.state] *= self.num_microbatches
        return exchanges.zeros(tuple(shape), self.part.dtype)

    def written(self, collected: jax.Array, x: jax.Array, microbatch: jax.Array, is_through: jax.Array) -> jax.Array:
        """Returns the array with the carry of a microbatch, where that is through all layers."""
        if self.state == PARTIAL:
            return collected + jnp.where(is_through, x, jnp.zeros_like(x))
        if not isinstance(self.state, int):
            return jnp.where(is_through, x, collected)
        start: list[jax.Array | np.integer] = [np.int32(0)] * x.ndim
        start[self.state] = microbatch * np.int32(x.shape[self.state])
        before = lax.dynamic_slice(collected, start, x.shape)
        return lax.dynamic_update_slice(collected, jnp.where(is_through, x, before), start)

    def value(self, collected: jax.Array, last_place: int) -> Value:
        """Returns the result of the loop, from what the last place has collected."""
        if self.state == PARTIAL:
            return Value(collected, PARTIAL)  # the other places have added nothing
        dim = self.state if isinstance(self.state, int) else None
        return Value(exchanges.from_place(collected, last_place, dim), self.state)
