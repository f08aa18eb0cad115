"""Why the first loss of a run is not finite: a value that was not finite before, or the first operation to yield NaN.

No update has been made by then, so the learning rate is not the cause. The loss is computed once more with the plain
model and the checks of `jax.experimental.checkify`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec

from jshard import _compat
from jshard.engine.context import global_view, plain_flax
from jshard.errors import RunError
from jshard.plans.units import dotted
from jshard.recipes.linen_model import LinenModel
from jshard.recipes.model_file import ModelFile
from jshard.recipes.recipe import Recipe
from jshard.train.loop import unexplained

# Errors that the user's program or the devices may raise.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError)
_PLACES = 3  # named, if it is one of several
_BEYOND = re.compile(r"index (-?\d+) is out of bounds for axis \d+ with size (\d+)")


def explained(
    model_file: ModelFile,
    recipe: Recipe,
    model: nnx.Module,
    batch: Any,
    *,
    step: int,
    wrong: Mapping[str, float],
    source: str,
) -> RunError:
    """The error of a step before any update, with the place where the loss or the gradients became NaN or infinite.

    Args:
        model_file: has the loss.
        recipe: the settings that the advice may change.
        model: annotated, as it was before the step.
        batch: the batch of the step.
        step: its number.
        wrong: the scalars that are not finite.
        source: the origin of the parameters.
    """
    then = f"{', '.join(f'{name} = {value}' for name, value in wrong.items())} at step {step}, before any update"
    rows = next(x for x in jax.tree.leaves(batch) if x.ndim)
    everywhere = NamedSharding(rows.sharding.mesh, PartitionSpec())  # readable by every process
    _, state = nnx.split(model)
    leaves = {_path(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path((state, batch))[0]}
    floats = {path: leaf for path, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    try:
        for path, leaf in floats.items():
            if (found := _first(lambda x: ~jnp.isfinite(x), leaf, everywhere)) is not None:
                return _of_leaf(path, found, leaf.size, then, source)
        failed = _failed_check(model_file, model, batch, everywhere)
    except _FAILURES as error:  # a failed search must not hide the original error
        unknown = unexplained(step, batch, wrong)
        unknown.add_note(f"The search for the cause failed: {type(error).__name__}: {str(error)[:500]}")
        return unknown
    if failed is None:
        return unexplained(step, batch, wrong)
    said, place, of = failed
    if beyond := _BEYOND.search(said):
        return _of_lookup(int(beyond[1]), int(beyond[2]), place, said, leaves, then, recipe, everywhere)
    operation = _operation(said)
    return RunError(
        f"`{operation}` yields a value that is not finite.",
        where=f"{place}: {operation}",
        why=f"{then}; it is the first operation of {of} that yields a NaN.",
        do="keep its input in range on that line, such as jnp.log(jnp.maximum(x, 1e-6)) for jnp.log(x);"
        ' jax.debug.print("{}", x) prints it.',
    )


def _failed_check(
    model_file: ModelFile, model: nnx.Module, batch: Any, everywhere: NamedSharding
) -> tuple[str, str, str] | None:
    """The first operation that indexes beyond the end of an array, or yields a NaN; None if the plain model has none.

    An infinite loss may have none; then its gradient has one.

    Returns:
        The message of the check, the place, and the quantity that was computed.
    """
    loss_fn, wrt = model_file.loss, model_file.wrt
    graphdef, state = nnx.split(model)

    def loss(state: Any, batch: Any) -> Any:
        # Linen has its dtypes in the module; plain nnx follows those of the units.
        with global_view() if isinstance(model, LinenModel) else plain_flax():
            return loss_fn(nnx.merge(graphdef, state, copy=True), batch)

    def gradients(state: Any, batch: Any) -> Any:
        with global_view() if isinstance(model, LinenModel) else plain_flax():
            found = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(nnx.merge(graphdef, state, copy=True), batch)
        return sum(x.sum() for x in jax.tree.leaves(found))

    for name, computed in {"the loss": loss, "the gradient": gradients}.items():
        checked = checkify.checkify(computed, errors=checkify.nan_checks | checkify.index_checks)
        error, _ = jax.jit(checked, out_shardings=everywhere)(state, batch)
        if (failed := error.get_exception()) is not None:
            said = str(failed)
            place = _compat.failed_check(failed, below=__file__)
            if not place:
                wanted = "gather" if _BEYOND.search(said) else _operation(said)
                found = _places(jax.make_jaxpr(computed)(state, batch).jaxpr, wanted, _shape(said), "")
                place = " or ".join(list(dict.fromkeys(found))[:_PLACES]) or "an unknown line"
            return said, place, name
    return None


def _places(jaxpr: Any, wanted: str, shape: str, around: str) -> Iterator[str]:
    """The places of an operation in a program, on an array of a shape if that is known.

    A jitted function of JAX does not record its caller: `around` is the place of the call.
    """
    for eqn in jaxpr.eqns:
        place = _compat.user_place(eqn).partition(" ")[0] or around
        for inner in eqn.params.values():
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from _places(getattr(inner, "jaxpr", inner), wanted, shape, place)
        if eqn.primitive.name == wanted and place and (not shape or str(eqn.invars[0].aval.shape) == shape):
            yield place


def _operation(said: str) -> str:
    return said.rpartition(": ")[2].rstrip(". ")


def _shape(said: str) -> str:
    return said.partition("array of shape ")[2].partition(":")[0]


def _first(is_wrong: Callable[[Any], Any], x: jax.Array, everywhere: NamedSharding) -> tuple[str, Any, int, Any] | None:
    """Position and value of the first wrong element, their number, and the largest of all; None without one."""

    def look(x: jax.Array) -> Any:
        wrong = is_wrong(x).reshape(-1)
        at = jnp.argmax(wrong)
        return at, x.reshape(-1)[at], wrong.sum(), x.max()

    at, value, count, largest = jax.device_get(jax.jit(look, out_shardings=everywhere)(x))
    position = ", ".join(str(int(i)) for i in np.unravel_index(at, x.shape))
    return (position, value, int(count), largest) if count else None


def _path(path: tuple) -> str:
    """The path of a leaf of (state, batch) in readable form."""
    (first, *rest) = (getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path)
    if first == 0:
        return dotted(tuple(key for key in rest if key != "value"))
    return "batch" + "".join(f"[{key!r}]" for key in rest).replace("'", '"')


def _of_leaf(path: str, found: tuple[str, Any, int, Any], size: int, then: str, source: str) -> RunError:
    position, value, count, _ = found
    if path.startswith("batch"):
        source, do = "as read from the data", "give finite samples: check each with np.isfinite(x).all()."
    else:
        do = "change its initialiser, or the checkpoint it comes from: jnp.isfinite(x).all() must hold."
    return RunError(
        f"{path} is not finite.",
        where=f"{path}[{position}] = {float(value)}",
        why=f"not finite: {count:,} of its {size:,} values, {source}; {then}.",
        do=do,
    )


def _of_lookup(
    index: int,
    rows: int,
    place: str,
    said: str,
    leaves: Mapping[str, Any],
    then: str,
    recipe: Recipe,
    everywhere: NamedSharding,
) -> RunError:
    """The error for a lookup beyond the end of an array, which yields NaN: the array, and the index in the batch."""
    shape = _shape(said)
    tables = [path for path, leaf in leaves.items() if str(leaf.shape) == shape]
    table = tables[0] if len(tables) == 1 else f"an array of shape {shape}"
    where, counted, largest = [f"{place}: lookup in {table}"], "", max(index, recipe.sequence_length - 1)
    less = f"keep the index within 0 to {rows - 1}"
    if recipe.sequence_length > rows:
        less = f"--set sequence_length={rows}"
    for path, leaf in leaves.items():
        if path.startswith("batch") and jnp.issubdtype(leaf.dtype, jnp.integer):
            found = _first(lambda x: (x < -rows) | (x >= rows), leaf, everywhere)
            if found is not None:
                position, index, count, largest = found
                where.append(f"{path}[{position}] = {index}")
                counted = f"; {count:,} of {leaf.size:,} values of {path} are out of range"
                less = f"keep {path} within 0 to {rows - 1}"
                break
    else:
        where.append(f"index {index}, which is not in the batch: it is computed, or a position")
    return RunError(
        f"Row {index} of {table} does not exist.",
        where=where,
        why=f"it has {rows:,} rows, 0 to {rows - 1}, and another row is NaN{counted}; {then}.",
        do=_remedy(table, rows, int(largest), recipe) + less,
    )


def _remedy(table: str, rows: int, largest: int, recipe: Recipe) -> str:
    """A setting of the recipe that equals the size of the table, if there is one; else a description of the change."""
    if largest < rows:
        return ""
    model = recipe.model
    fields = [field.name for field in dataclasses.fields(model)] if dataclasses.is_dataclass(model) else []
    fits = [f"--set model.{name}={largest + 1}" for name in fields if getattr(model, name) == rows]
    return f"{fits[0] if len(fits) == 1 else f'give {table} {largest + 1} rows'}, or "
