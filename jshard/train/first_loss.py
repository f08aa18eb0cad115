"""Why the first loss of a run is not finite: a value that was not finite before, or the first operation to yield NaN.

No update has been made by then, so the learning rate is not the cause. The loss is computed once more with the plain
model and the checks of `jax.experimental.checkify`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import checkify
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from jshard import _compat
from jshard._types import PyTree
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
_OUT_OF_BOUNDS = re.compile(r"index (-?\d+) is out of bounds for axis \d+ with size (\d+)")


@dataclasses.dataclass(frozen=True)
class _WrongElement:
    """The first element of an array that fails a test.

    Attributes:
        position: its indices, as text.
        value: its value.
        count: how many elements of the array fail.
        largest: the largest element of the array.
    """

    position: str
    value: np.ndarray
    count: int
    largest: np.ndarray


@dataclasses.dataclass(frozen=True)
class _FailedCheck:
    """A failed check of `checkify`.

    Attributes:
        message: its text.
        place: the line of the user's program.
        quantity: what was computed, "the loss" or "the gradient".
    """

    message: str
    place: str
    quantity: str

    @property
    def operation(self) -> str:
        """Returns the name of the operation that yields a NaN."""
        return _operation_in(self.message)


@dataclasses.dataclass(frozen=True)
class _Search:
    """A search for the cause.

    Attributes:
        leaves: the arrays of the model's state and of the batch, by path.
        everywhere: the sharding of results that every process can read.
        symptom: the scalars that are not finite and their step, as text.
    """

    model_file: ModelFile
    recipe: Recipe
    model: nnx.Module
    batch: PyTree
    leaves: Mapping[str, jax.Array]
    everywhere: NamedSharding
    symptom: str


def explained(
    model_file: ModelFile,
    recipe: Recipe,
    model: nnx.Module,
    batch: PyTree,
    *,
    step: int,
    not_finite: Mapping[str, float],
    source: str,
) -> RunError:
    """Creates the error of a step before any update, with the place where the loss or the gradients became NaN or inf.

    Args:
        model_file: has the loss.
        recipe: the settings that the advice may change.
        model: annotated, as it was before the step.
        batch: the batch of the step.
        step: its number.
        not_finite: the scalars that are not finite.
        source: the origin of the parameters.
    """
    search = _Search(
        model_file=model_file,
        recipe=recipe,
        model=model,
        batch=batch,
        leaves=_leaves_by_path(model, batch),
        everywhere=_replicated_like(batch),
        symptom=_symptom(not_finite, step),
    )
    try:
        # Inputs first: a NaN in one would be found in the first operation that reads it, which is not at fault.
        error = _error_of_leaf(search, source)
        if error is not None:
            return error
        failed = _failed_check(search)
    except _FAILURES as failure:  # a failed search must not hide the original error
        unknown = unexplained(step, batch, not_finite)
        unknown.add_note(f"The search for the cause failed: {type(failure).__name__}: {str(failure)[:500]}")
        return unknown
    if failed is None:
        return unexplained(step, batch, not_finite)
    # A failed check is one of two: of an index, or of a NaN.
    lookup = _OUT_OF_BOUNDS.search(failed.message)
    if lookup is not None:
        return _error_of_lookup(search, failed, index=int(lookup[1]), rows=int(lookup[2]))
    return _error_of_operation(search, failed)


def _symptom(not_finite: Mapping[str, float], step: int) -> str:
    values = ", ".join(f"{name} = {value}" for name, value in not_finite.items())
    return f"{values} at step {step}, before any update"


def _replicated_like(batch: PyTree) -> NamedSharding:
    """Returns the sharding of a result on the devices of the batch that every process can read."""
    rows = next(x for x in jax.tree.leaves(batch) if x.ndim)
    return NamedSharding(rows.sharding.mesh, PartitionSpec())


def _leaves_by_path(model: nnx.Module, batch: PyTree) -> dict[str, jax.Array]:
    """Returns the arrays of the model's state and of the batch by their paths in readable form."""
    _, state = nnx.split(model)
    leaves, _ = jax.tree_util.tree_flatten_with_path((state, batch))
    return {_readable(path): leaf for path, leaf in leaves}


def _readable(path: tuple[object, ...]) -> str:
    """Returns the path of a leaf of (state, batch) in readable form."""
    # JAX has a class of key for each kind of container, each with another attribute.
    first, *rest = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path)
    if first == 0:
        # "value" is the array in an nnx variable.
        return dotted(tuple(key for key in rest if key != "value"))
    return "batch" + "".join(f"[{key!r}]" for key in rest).replace("'", '"')


# A value that is not finite before anything is computed.


def _error_of_leaf(search: _Search, source: str) -> RunError | None:
    """Creates the error for the first array that is not finite; None if all are."""
    for path, leaf in search.leaves.items():
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        wrong = _first_wrong(lambda x: ~jnp.isfinite(x), leaf, search.everywhere)
        if wrong is None:
            continue
        do = "change its initialiser, or the checkpoint it comes from: jnp.isfinite(x).all() must hold."
        if path.startswith("batch"):
            source = "as read from the data"
            do = "give finite samples: check each with np.isfinite(x).all()."
        return RunError(
            f"{path} is not finite.",
            where=f"{path}[{wrong.position}] = {float(wrong.value)}",
            why=f"not finite: {wrong.count:,} of its {leaf.size:,} values, {source}; {search.symptom}.",
            do=do,
        )
    return None


def _first_wrong(
    is_wrong: Callable[[jax.Array], jax.Array], x: jax.Array, everywhere: NamedSharding
) -> _WrongElement | None:
    """Returns the first wrong element of an array; None without one."""

    def search(x: jax.Array) -> tuple[jax.Array, ...]:
        wrong = is_wrong(x).reshape(-1)
        # The first True; 0 if there is none, which `count` says.
        index = jnp.argmax(wrong)
        return index, x.reshape(-1)[index], wrong.sum(), x.max()

    index, value, count, largest = jax.device_get(jax.jit(search, out_shardings=everywhere)(x))
    if not count:
        return None
    position = ", ".join(str(int(i)) for i in np.unravel_index(index, x.shape))
    return _WrongElement(position, value, int(count), largest)


# The first operation that yields a NaN.


def _failed_check(search: _Search) -> _FailedCheck | None:
    """Finds the first operation that indexes beyond the end of an array, or yields a NaN.

    None if the plain model has none. An infinite loss may have none; then its gradient has one.
    """
    loss_fn = search.model_file.loss
    wrt = search.model_file.trained(search.recipe)
    graphdef, state = nnx.split(search.model)

    def plain() -> contextlib.AbstractContextManager[object]:
        # Linen has its dtypes in the module; plain nnx follows those of the units.
        return global_view() if isinstance(search.model, LinenModel) else plain_flax()

    def loss(state: nnx.State, batch: PyTree) -> object:
        with plain():
            return loss_fn(nnx.merge(graphdef, state, copy=True), batch)

    def gradients(state: nnx.State, batch: PyTree) -> object:
        with plain():
            grad = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))
            grads = grad(nnx.merge(graphdef, state, copy=True), batch)
        return sum(x.sum() for x in jax.tree.leaves(grads))

    # The loss first: a NaN in forward also makes its gradient NaN.
    for quantity, compute in {"the loss": loss, "the gradient": gradients}.items():
        # Index checks, too: a lookup beyond the end yields NaN, and the message has the index.
        checked = checkify.checkify(compute, errors=checkify.nan_checks | checkify.index_checks)
        error, _ = jax.jit(checked, out_shardings=search.everywhere)(state, search.batch)
        failed = error.get_exception()
        if failed is None:
            continue
        message = str(failed)
        place = _compat.failed_check(failed, below=__file__)
        if not place:
            place = _places_in_program(compute, state, search.batch, message)
        return _FailedCheck(message, place, quantity)
    return None


def _places_in_program(
    compute: Callable[[nnx.State, PyTree], object], state: nnx.State, batch: PyTree, message: str
) -> str:
    """Names the lines that may have failed: `checkify` does not know the line of every operation."""
    primitive = "gather" if _OUT_OF_BOUNDS.search(message) else _operation_in(message)
    jaxpr = jax.make_jaxpr(compute)(state, batch).jaxpr
    places = dict.fromkeys(_places(jaxpr, primitive, _shape_in(message), ""))  # each once
    return " or ".join(list(places)[:_PLACES]) or "an unknown line"


def _places(jaxpr: Jaxpr, primitive: str, shape: str, place_of_call: str) -> Iterator[str]:
    """Yields the places of an operation in a program, on an array of a shape if that is known.

    A jitted function of JAX does not record its caller, so its operations are at the place of the call.
    """
    for eqn in jaxpr.eqns:
        place = _compat.user_place(eqn).partition(" ")[0] or place_of_call
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from _places(inner, primitive, shape, place)
        if eqn.primitive.name != primitive or not place:
            continue
        if not shape or str(getattr(eqn.invars[0].aval, "shape", None)) == shape:
            yield place


def _operation_in(message: str) -> str:
    return message.rpartition(": ")[2].rstrip(". ")


def _shape_in(message: str) -> str:
    return message.partition("array of shape ")[2].partition(":")[0]


def _error_of_operation(search: _Search, failed: _FailedCheck) -> RunError:
    return RunError(
        f"`{failed.operation}` yields a value that is not finite.",
        where=f"{failed.place}: {failed.operation}",
        why=f"{search.symptom}; it is the first operation of {failed.quantity} that yields a NaN.",
        do="keep its input in range on that line, such as jnp.log(jnp.maximum(x, 1e-6)) for jnp.log(x);"
        ' jax.debug.print("{}", x) prints it.',
    )


# A lookup beyond the end of an array, which yields NaN.


def _error_of_lookup(search: _Search, failed: _FailedCheck, *, index: int, rows: int) -> RunError:
    """Creates the error for a lookup beyond the end: it names the array, and the index in the batch."""
    sequence_length = search.recipe.sequence_length
    # The message has only the shape of the array that is indexed.
    table = _table_of_shape(search.leaves, _shape_in(failed.message))
    where = [f"{failed.place}: lookup in {table}"]
    count_text = ""
    largest = max(index, sequence_length - 1)
    remedy = f"keep the index within 0 to {rows - 1}"
    # Positions, most likely: a table with a row for each has fewer than the sequence needs.
    if sequence_length > rows:
        remedy = f"--set sequence_length={rows}"
    batch_index = _batch_index_beyond(search, rows)
    if batch_index is None:
        where.append(f"index {index}, which is not in the batch: it is computed, or a position")
    else:
        path, wrong = batch_index
        index = int(wrong.value)
        largest = int(wrong.largest)
        where.append(f"{path}[{wrong.position}] = {index}")
        count_text = f"; {wrong.count:,} of {search.leaves[path].size:,} values of {path} are out of range"
        remedy = f"keep {path} within 0 to {rows - 1}"
    return RunError(
        f"Row {index} of {table} does not exist.",
        where=where,
        why=f"it has {rows:,} rows, 0 to {rows - 1}, and another row is NaN{count_text}; {search.symptom}.",
        do=_larger_table(table, rows, largest, search.recipe) + remedy,
    )


def _table_of_shape(leaves: Mapping[str, jax.Array], shape: str) -> str:
    """Names the only array of a shape; describes it if there are several."""
    tables = [path for path, leaf in leaves.items() if str(leaf.shape) == shape]
    if len(tables) == 1:
        return tables[0]
    return f"an array of shape {shape}"


def _batch_index_beyond(search: _Search, rows: int) -> tuple[str, _WrongElement] | None:
    """Finds the first integers of the batch that are out of range; None if all are in range."""

    def is_beyond(x: jax.Array) -> jax.Array:
        # Negative indices down to -rows count from the end.
        return (x < -rows) | (x >= rows)

    for path, leaf in search.leaves.items():
        if path.startswith("batch") and jnp.issubdtype(leaf.dtype, jnp.integer):
            wrong = _first_wrong(is_beyond, leaf, search.everywhere)
            if wrong is not None:
                return path, wrong
    return None


def _larger_table(table: str, rows: int, largest: int, recipe: Recipe) -> str:
    """Names the setting of the recipe that equals the size of the table; else describes the change."""
    if largest < rows:
        return ""
    fits = []
    if dataclasses.is_dataclass(recipe.model):
        for field in dataclasses.fields(recipe.model):
            if getattr(recipe.model, field.name) == rows:
                fits.append(f"--set model.{field.name}={largest + 1}, or ")
    # Of several fields with that value none can be named.
    if len(fits) == 1:
        return fits[0]
    return f"give {table} {largest + 1} rows, or "
