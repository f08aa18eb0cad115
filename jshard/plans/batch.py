"""`js.shard_batch`: a batch from the host, placed over the data axes of a mesh."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jshard._types import PyTree
from jshard.errors import CallError
from jshard.plans.mesh import (
    CONTEXT,
    batch_sharding,
    check_mesh,
    data_degree,
    data_degrees_text,
    degree,
    num_processes,
)
from jshard.plans.numeric import is_numeric


def shard_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """Places a batch from the host over the data axes of the mesh, and its sequences over `context`.

    Args:
        batch: pytree of host arrays whose leading dim is the batch. With several processes each passes its
            own rows, in process order; processes that share rows pass the same ones, with whole sequences.
        mesh: the mesh of the model.

    Returns:
        The same pytree with global arrays, sharded over the data axes on the leading dim; on a mesh with `context`,
        also over that on dim 1 where it divides.

    Raises:
        CallError: a leading dim is not divisible by the number of data shards, or no sequence is by `context`.

    Examples:
        >>> batch = js.shard_batch({"x": np.zeros((16, 4))}, mesh)
    """
    mesh = cast(Mesh, check_mesh(mesh))
    layout = _batch_layout(mesh)
    leaves, tree = jax.tree.flatten(batch)
    # First: the shapes of other objects mean nothing.
    if not all(map(is_numeric, leaves)):
        raise _not_numbers(batch)
    if not all(map(layout.splits, leaves)):
        raise _not_divisible(batch, mesh, layout)
    shardings = [batch_sharding(mesh, layout.global_shape(x)) for x in leaves]
    context_degree = degree(mesh, CONTEXT)
    splits_sequence = any(CONTEXT in sharding.spec for sharding in shardings)
    # One array is enough: others of a batch, such as one label for each row, may have no sequence.
    if context_degree > 1 and not splits_sequence:
        raise _no_sequence(batch, context_degree)
    if layout.is_alone:  # its rows are the whole batch
        return jax.device_put(batch, jax.tree.unflatten(tree, shardings))
    placed = []
    for x, sharding in zip(leaves, shardings, strict=True):
        rows = np.asarray(x)
        placed.append(jax.make_array_from_process_local_data(sharding, rows, layout.global_shape(x)))
    return jax.tree.unflatten(tree, placed)


def _named_leaves(batch: PyTree) -> Iterator[tuple[str, ArrayLike]]:
    """Yields the arrays of a batch, each with its path as the user would write it."""
    for path, x in jax.tree.leaves_with_path(batch):
        yield f"batch{jax.tree_util.keystr(path)}", x


def _with_shape(path: str, x: ArrayLike) -> str:
    return f"{path}  shape {np.shape(x)}"


def _no_sequence(batch: PyTree, context_degree: int) -> CallError:
    return CallError(
        "The batch has no sequence that splits over the context axis.",
        where=[_with_shape(path, x) for path, x in _named_leaves(batch)],
        why=f"a sequence is dim 1 of an array, and none divides by {context_degree}.",
        do=f"pad the sequences to a multiple of {context_degree}, or js.mesh() without {CONTEXT!r}.",
    )


def _not_numbers(batch: PyTree) -> CallError:
    places = []
    for path, x in _named_leaves(batch):
        if not is_numeric(x):
            places.append(f"{path}  {getattr(x, 'dtype', type(x).__name__)}")
    return CallError(
        "The batch holds objects that are not numbers.",
        where=places,
        why="a device holds arrays of numbers; texts, dates and lists of unequal length are not.",
        do='js.shard_batch({"ids": np.asarray(ids, np.int32)}, mesh)  # texts as token ids, padded to one length',
    )


def _not_divisible(batch: PyTree, mesh: Mesh, layout: "_BatchLayout") -> CallError:
    uneven = []
    for path, x in _named_leaves(batch):
        if not layout.splits(x):
            uneven.append(_with_shape(path, x))
    from_each = f" from each of {layout.parts} processes" if layout.parts > 1 else ""
    return CallError(
        "The batch cannot be split over the data shards.",
        where=uneven,
        why=f"that many rows{from_each} over {layout.shards} data shards ({data_degrees_text(mesh)}).",
        do=f"use a global batch that is a multiple of {layout.shards}.",
    )


@dataclasses.dataclass(frozen=True)
class _BatchLayout:
    """How the rows of a batch are spread.

    Attributes:
        shards: the number of data shards.
        parts: the ratio of these to the shards of this process: into so many parts of rows a batch is cut.
        is_alone: whether this is the only process.
    """

    shards: int
    parts: int
    is_alone: bool

    def splits(self, x: ArrayLike) -> bool:
        """Returns whether the rows that this process has are its part of a batch that the data shards divide."""
        # A scalar has no rows to split.
        return np.ndim(x) > 0 and np.shape(x)[0] * self.parts % self.shards == 0

    def global_shape(self, x: ArrayLike) -> tuple[int, ...]:
        """Returns the shape of the array of all processes."""
        rows, *row_shape = np.shape(x)
        return (rows * self.parts, *row_shape)


@functools.lru_cache(maxsize=8)
def _batch_layout(mesh: Mesh) -> _BatchLayout:
    """Returns the layout of batches. Cached: a run calls it before every step."""
    shards = data_degree(mesh)
    # Of an array with one row for each shard: an index is a shard.
    indices = batch_sharding(mesh).addressable_devices_indices_map((shards,)).values()
    # As text: slices have no hash before Python 3.12.
    shards_here = len({str(index) for index in indices})  # devices along other axes have the same rows
    return _BatchLayout(shards, shards // shards_here, is_alone=num_processes(mesh) == 1)
