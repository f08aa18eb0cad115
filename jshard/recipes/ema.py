"""An exponential moving average of a model's weights: a part of the state, which the step updates after the weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jshard import _compat
from jshard.inspect.memory import Memory, average_bytes
from jshard.plans.memories import to_device
from jshard.plans.numeric import Value
from jshard.plans.padding import padding_kept
from jshard.plans.placement import Selection
from jshard.plans.plan import ShardPlan
from jshard.plans.streamed_updates import UpdatePart, streamed
from jshard.recipes.recipe import Recipe

WEIGHTS = "weights"
"""The attribute with the averages, and their name in a checkpoint."""

_PART_BYTES = 8 * 2**20  # of averages in host memory that are on the device together


class Ema(nnx.Module):
    """The exponential moving average of a model's weights, and of its BatchNorm statistics.

    Every average is placed like its weight: sharded, padded, and in the same memory. So an update needs no
    communication. Weights that are not trained have no average.

    Args:
        model: an annotated model, with arrays or abstract.
        decay: the share of the average that each update keeps, below 1.
        dtype: of the averages; None for that of each weight. In a narrow one, small updates are lost.
        start_step: until this many steps are done, the averages are the weights themselves.
        warmup: whether the n-th update keeps at most (1 + n) / (10 + n), so that the first weights are soon forgotten.
        wrt: the weights that are trained, as for the optimizer.

    Attributes:
        weights: the averages, as a state with the paths of the model's.
        count: number of updates since the start.

    Examples:
        >>> ema = train.Ema(model, decay=0.999)
        >>> step = train.TrainStep(loss_fn, model, optimizer, batch, ema=ema)
    """

    def __init__(
        self,
        model: nnx.Module,
        *,
        decay: float,
        dtype: jax.typing.DTypeLike | None = "float32",
        start_step: int = 0,
        warmup: bool = True,
        wrt: Selection = nnx.Param,
    ) -> None:
        self.decay = decay
        self.start_step = start_step
        self.warmup = warmup
        variables = list(_averaged_variables(model, wrt))
        leaves, tree = jax.tree.flatten([variable.get_raw_value() for _, variable in variables])
        averages = jax.tree.unflatten(tree, _converted(leaves, dtype))
        weights = []
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        with padding_kept():
            for (path, variable), average in zip(variables, averages, strict=True):
                weights.append((path, variable.replace(average)))
        self.weights = nnx.data(nnx.from_flat_state(weights))
        zero: Any = jax.ShapeDtypeStruct((), jnp.uint32) if is_abstract else jnp.zeros((), jnp.uint32)
        self.count = nnx.Variable(zero)

    def copy_to(self, model: nnx.Module) -> None:
        """Writes the averages into a model as its weights, in their dtypes, and frees those that it had.

        Args:
            model: of the same structure, with arrays.
        """
        current = dict(nnx.to_flat_state(nnx.state(model)))
        for path, average in nnx.to_flat_state(self.weights):
            weight = current.pop(path)
            value = jax.tree.map(_converted_like, average.get_raw_value(), weight.get_raw_value())
            with padding_kept():
                nnx.update(model, nnx.from_flat_state([(path, weight.replace(value))]))

    def update(self, model: nnx.Module, step: jax.Array) -> None:
        """Moves the averages towards the weights.

        Args:
            model: after the update of its weights.
            step: number of completed steps, with this one.
        """
        count = self.count.get_raw_value()
        is_begun = step > self.start_step
        share = jnp.float32(1 - self.decay)
        if self.warmup:
            # 1 - (1 + n) / (10 + n), without the loss of digits in that difference.
            share = jnp.maximum(share, 9.0 / (10.0 + count))
        self.count.set_raw_value(jnp.where(is_begun, count + 1, jnp.zeros_like(count)))

        current = dict(nnx.to_flat_state(nnx.state(model)))
        variables = list(nnx.to_flat_state(self.weights))
        averages, tree = jax.tree.flatten([average.get_raw_value() for _, average in variables])
        weights = jax.tree.leaves([current[path].get_raw_value() for path, _ in variables])
        moved = jax.tree.unflatten(tree, _moved(averages, weights, share, is_begun))
        # The zeros of padding stay zeros, and need not be cleared.
        with padding_kept():
            for (_, average), value in zip(variables, moved, strict=True):
                average.set_raw_value(value)


def ema_of(recipe: Recipe, model: nnx.Module, wrt: Selection) -> Ema | None:
    """Returns the average that a recipe asks for, begun from a model with arrays, or abstract; None without one."""
    if recipe.ema_decay is None:
        return None
    return Ema(
        model,
        decay=recipe.ema_decay,
        dtype=recipe.ema_dtype,
        start_step=recipe.ema_start_step,
        warmup=recipe.ema_warmup,
        wrt=wrt,
    )


def with_averages(memory: Memory, plan: ShardPlan, recipe: Recipe) -> Memory:
    """Returns the memory of a plan, with the averages that a recipe asks for."""
    if recipe.ema_decay is None:
        return memory
    averages = average_bytes(plan, recipe.ema_dtype)
    return dataclasses.replace(memory, averages_bytes=averages.on_device, host_averages_bytes=averages.on_host)


def _averaged_variables(model: nnx.Module, wrt: Selection) -> Iterator[tuple[tuple, nnx.Variable]]:
    """Yields the variables that are averaged, by path: trained weights, and the statistics that belong to them."""
    selected = nnx.state(model, nnx.Any(wrt, nnx.BatchStat))
    for path, variable in nnx.to_flat_state(selected):
        leaves = jax.tree.leaves(variable.get_raw_value())
        # Integers, as of quantized weights, have no average.
        if leaves and all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves):
            yield path, variable


def _converted(leaves: Sequence[Value], dtype: jax.typing.DTypeLike | None) -> list[Value]:
    """Returns arrays in another dtype, each where it was; shapes become shapes."""
    dtypes = [_average_dtype(leaf, dtype) for leaf in leaves]
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        shapes = []
        for leaf, average_dtype in zip(leaves, dtypes, strict=True):
            shapes.append(jax.ShapeDtypeStruct(leaf.shape, average_dtype, sharding=leaf.sharding))
        return shapes

    def convert(leaves: Sequence[jax.Array]) -> list[jax.Array]:
        on_device = to_device(leaves)
        return [x.astype(average_dtype) for x, average_dtype in zip(on_device, dtypes, strict=True)]

    shardings = []
    for leaf in leaves:
        # Counters and statistics may not be on the mesh yet: the step places them.
        is_placed = isinstance(leaf.sharding, NamedSharding)
        shardings.append(_compat.asked_of_results(leaf.sharding) if is_placed else None)
    return jax.jit(convert, out_shardings=shardings)(list(leaves))


def _converted_like(average: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns an average in the dtype and in the memory of its weight."""
    return jax.device_put(_cast(average, weight.dtype), weight.sharding)


@functools.partial(jax.jit, static_argnums=1)
def _cast(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return to_device(x).astype(dtype)


def _average_dtype(leaf: Value, dtype: jax.typing.DTypeLike | None) -> jnp.dtype:
    # Of complex weights a real dtype would drop a half.
    if dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.dtype(leaf.dtype)
    return jnp.dtype(dtype)


def _moved(
    averages: Sequence[jax.Array], weights: Sequence[jax.Array], share: jax.Array, is_begun: jax.Array
) -> list[jax.Array]:
    """Returns averages moved by a share towards weights; the weights themselves before the start."""
    count = len(averages)

    def move(*arrays: jax.Array) -> list[jax.Array]:
        share, is_begun, *others = arrays
        return [_moved_average(x, y, share, is_begun) for x, y in zip(others[:count], others[count:], strict=True)]

    arguments = [share, is_begun, *averages, *weights]
    parts = _host_parts(averages)
    if not parts:
        return move(*arguments)
    return streamed(move, arguments, parts, like=averages)


def _moved_average(average: jax.Array, weight: jax.Array, share: jax.Array, is_begun: jax.Array) -> jax.Array:
    # In a narrow dtype a small share of the difference would be rounded before it is added.
    wide = jnp.promote_types(average.dtype, jnp.float32)
    old = average.astype(wide)
    new = weight.astype(wide)
    moved = old + share.astype(jnp.finfo(wide).dtype) * (new - old)
    return jnp.where(is_begun, moved, new).astype(average.dtype)


def _host_parts(averages: Sequence[jax.Array]) -> list[UpdatePart]:
    """Groups the averages in host memory, so that the device holds few at a time."""
    first_average = 2  # after the share, and whether the average has begun
    parts = [UpdatePart()]
    part_bytes = 0
    for position, average in enumerate(averages):
        if not _compat.on_host(average):
            continue
        parts[-1].arguments += [first_average + position, first_average + len(averages) + position]
        parts[-1].results.append(position)
        part_bytes += average.size * average.dtype.itemsize
        if part_bytes >= _PART_BYTES:
            parts.append(UpdatePart())
            part_bytes = 0
    return [part for part in parts if part.arguments]
