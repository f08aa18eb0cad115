"""Why the first loss of a run is not finite: where in the model it began, and what was looked up there.

No update has been made by then, so the learning rate is not the cause. The loss is traced once more, as the plain model
computes it, and evaluated equation by equation. Beside each value the host keeps a mark: where its NaN or infinity
comes from. A value that is not finite and does not reach the loss, such as a mask of -inf, leaves no mark on it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core as jex
from jax.sharding import NamedSharding, PartitionSpec

from jshard import _compat
from jshard.engine.context import global_view, plain_flax
from jshard.errors import RunError
from jshard.plans.units import dotted
from jshard.recipes.linen_model import LinenModel
from jshard.recipes.model_file import ModelFile
from jshard.recipes.recipe import Recipe
from jshard.train.loop import unexplained

_FINITE, _GIVEN_INF, _INF, _NAN = range(4)  # a constant -inf, as in a mask, is not the cause of a NaN
_MOVING = frozenset("reshape broadcast_in_dim transpose squeeze copy copy_p neg sharding_constraint".split())
# What a program of the user's that this has not met, or the devices, may raise.
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
_LARGE = 1 << 18  # numbers in an array
_INLINED = frozenset("jit pjit closed_call checkpoint remat remat2 custom_jvp_call custom_vjp_call".split())


@dataclasses.dataclass(frozen=True)
class LossLeaf:
    """A parameter, or an array of the batch, with values that are not finite."""

    path: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Equation:
    """A step of the computation whose inputs are finite, and whose result is not."""

    operation: str
    place: str


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A lookup beyond the end of an array, which gives NaN.

    Attributes:
        place: `file:line` of the lookup.
        table: path of the parameter that is looked up; else the array's shape.
        num_rows: of the table.
        indices: the arrays of the batch that the indices are computed from.
        index: the first one that is out of range.
    """

    place: str
    table: str
    num_rows: int
    indices: frozenset[str]
    index: int


Origin = LossLeaf | Equation | Lookup | None


@dataclasses.dataclass(frozen=True)
class _Mark:
    """What is not finite in a value, and where it comes from: None for a constant, as its first user is the place."""

    level: int
    order: int
    origin: Origin


@dataclasses.dataclass(frozen=True)
class _Marked:
    """A value, with its mark if it is not finite, and the leaves that it is from."""

    value: Any
    mark: _Mark | None = None
    leaves: frozenset[str] = frozenset()


def origin(loss_fn: Callable[..., Any], model: nnx.Module, batch: Any, *, of_gradients: bool, wrt: Any) -> Origin:
    """Where the first value that is not finite, and that reaches the loss, comes from.

    Args:
        loss_fn: `loss_fn(model, batch)`.
        model: annotated, before any update.
        batch: global arrays.
        of_gradients: the loss is finite, its gradients are not.
        wrt: what they are taken of.

    Returns:
        The place; None where the plain model's loss is finite.
    """
    graphdef, state = nnx.split(model)
    flat, tree = jax.tree_util.tree_flatten_with_path((state, batch))
    leaves = [leaf for _, leaf in flat]

    def computed(leaves: list[Any]) -> list[Any]:
        state, batch = jax.tree.unflatten(tree, leaves)
        merged = nnx.merge(graphdef, state, copy=True)
        # Linen has its dtypes in the module; the plain Flax of nnx follows those of the units.
        with global_view() if isinstance(model, LinenModel) else plain_flax():
            if not of_gradients:
                return [loss_fn(merged, batch)]
            return jax.tree.leaves(nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(merged, batch))

    closed = jax.make_jaxpr(computed)(leaves)
    search = _Search(batch)
    given = [search.given(leaf, LossLeaf(_path(path), leaf)) for path, leaf in flat]
    worst = _worst(search.run(closed.jaxpr, closed.consts, given))
    return worst and (worst.origin or Equation("a constant", "the loss"))


class _Search:
    """Evaluates a jaxpr, with a mark beside every value.

    Processes take the same branches, as what the host reads is replicated; and one program runs at a time.

    Args:
        batch: the arrays that say how an array of examples is split.
    """

    def __init__(self, batch: Any) -> None:
        rows = next(x for x in jax.tree.leaves(batch) if x.ndim)
        self._rows = NamedSharding(rows.sharding.mesh, PartitionSpec(*rows.sharding.spec[:1]))
        self._num_shards = rows.shape[0] // rows.sharding.shard_shape(rows.shape)[0]
        self._level = jax.jit(_level, out_shardings=_everywhere(rows))
        self._split: dict[Any, Callable[..., list[Any]]] = {}
        self._order = itertools.count()

    def given(self, value: Any, leaf: LossLeaf | None = None) -> _Marked:
        """A leaf, or a constant, whose infinity may be that of a mask."""
        level = self._level_of(value)
        level = _GIVEN_INF if level == _INF and leaf is None else level
        mark = _Mark(level, next(self._order), leaf) if level else None
        return _Marked(value, mark, frozenset({leaf.path} if leaf else ()))

    def run(
        self, jaxpr: Any, consts: Sequence[Any], given: Sequence[_Marked], around: tuple[str, ...] = ()
    ) -> list[_Marked]:
        """The results. `around` is the stack of an enclosing call of `jax.jit`, which may be traced for another one."""
        values: dict[Any, _Marked] = dict(zip(jaxpr.constvars, map(self.given, consts), strict=True))
        values |= zip(jaxpr.invars, given, strict=True)
        read = lambda v: self.given(v.val) if isinstance(v, jex.Literal) else values[v]
        last = {v: eqn for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, jex.Literal)}
        last |= {v: None for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
        for eqn in jaxpr.eqns:
            values |= zip(eqn.outvars, self._equation(eqn, list(map(read, eqn.invars)), around), strict=True)
            values = {v: x for v, x in values.items() if last.get(v) is not eqn}  # the rest is freed
        return list(map(read, jaxpr.outvars))

    def _equation(self, eqn: Any, given: list[_Marked], around: tuple[str, ...]) -> list[_Marked]:
        name, stack = eqn.primitive.name, _compat.user_frames(eqn, below=__file__)
        if around and stack[-len(around) :] != around:
            stack = around
        inner = [p for p in eqn.params.values() if hasattr(getattr(p, "jaxpr", p), "eqns")]
        if name in _INLINED and len(inner) == 1:
            return self.run(*_parts(inner[0]), given, stack if name in ("jit", "pjit") else around)
        results = jax.block_until_ready(self._bind(eqn, [x.value for x in given], is_opaque=bool(inner)))
        if name in _MOVING:
            return [dataclasses.replace(given[0], value=results[0])]
        levels = list(map(self._level_of, results))
        is_scan = name == "scan" and any(levels)
        worst = self._in_scan(eqn, inner[0], given, levels) if is_scan else [_worst(given)] * len(results)
        leaves = frozenset().union(*(x.leaves for x in given))
        is_passed_on = lambda x: len(given) == 1 or jnp.issubdtype(x.dtype, jnp.integer)
        return [
            _Marked(x, self._mark(level, from_, eqn, given, stack), leaves if is_passed_on(x) else frozenset())
            for x, level, from_ in zip(results, levels, worst, strict=True)
        ]

    def _bind(self, eqn: Any, values: list[Any], *, is_opaque: bool) -> list[Any]:
        """The results of an equation by itself.

        What is made of whole values alone, such as a mask for the scores of all examples, is split in its first dim:
        in the one program of a step no device holds it whole.
        """
        run = lambda *values: _compat.bind(eqn, list(values))
        if is_opaque:
            return jax.jit(run)(*values)
        is_whole = all(x.sharding.is_fully_replicated for x in values if isinstance(x, jax.Array))
        sizes = [v.aval.shape for v in eqn.outvars if v.aval.size >= _LARGE]
        if not is_whole or len(eqn.outvars) != 1 or not sizes or sizes[0][0] % self._num_shards:
            return run(*values)
        key = (eqn.primitive, tuple(eqn.params.items()))  # as jax keeps the program of an equation by itself
        return self._split.setdefault(key, jax.jit(run, out_shardings=self._rows))(*values)

    def _in_scan(self, eqn: Any, body: Any, given: list[_Marked], levels: list[int]) -> list[_Mark | None]:
        """The worst mark of each result, from running the loop until one is found for all that are not finite."""
        num_consts, num_carry = _compat.scan_arguments(eqn)
        consts, carry, xs = given[:num_consts], given[num_consts:][:num_carry], given[num_consts + num_carry :]
        steps = range(eqn.params["length"])
        found: list[_Mark | None] = [None] * len(levels)
        for step in reversed(steps) if eqn.params["reverse"] else steps:
            results = self.run(*_parts(body), [*consts, *carry, *(self._row(x, step) for x in xs)])
            carry = results[:num_carry]
            found = [_worst([x, _Marked(None, mark)]) for x, mark in zip(results, found, strict=True)]
            if all(not level or (mark and mark.level >= level) for level, mark in zip(levels, found, strict=True)):
                break
        return found

    def _row(self, x: _Marked, step: int) -> _Marked:
        row = jax.lax.dynamic_index_in_dim(x.value, step, keepdims=False)
        return dataclasses.replace(x, value=row, mark=x.mark if x.mark and self._level_of(row) else None)

    def _mark(
        self, level: int, worst: _Mark | None, eqn: Any, given: list[_Marked], stack: tuple[str, ...]
    ) -> _Mark | None:
        """The mark of a result: that of the worst that went in, or a new one."""
        if not level:
            return None
        is_mask = worst is not None and worst.level == _GIVEN_INF and level == _INF
        if worst is not None and worst.origin and (worst.level >= _INF or is_mask):
            return worst if is_mask else dataclasses.replace(worst, level=level)
        place = stack[0] if stack else "an unknown line"
        found = (
            _lookup(eqn, given[0], given[1], place, _everywhere(self._rows)) if eqn.primitive.name == "gather" else None
        )
        return _Mark(_GIVEN_INF if is_mask else level, next(self._order), found or Equation(eqn.primitive.name, place))

    def _level_of(self, x: Any) -> int:
        if not jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.inexact):
            return _FINITE
        return int(self._level(x) if isinstance(x, jax.Array) else _level(np.asarray(x), np))


def _level(x: Any, xp: Any = jnp) -> Any:
    return xp.where(xp.isnan(x).any(), _NAN, xp.where(xp.isinf(x).any(), _INF, _FINITE))


def _worst(found: Sequence[_Marked]) -> _Mark | None:
    """The mark of the value that is least finite, the earliest of these."""
    marks = [x.mark for x in found if x.mark]
    return max(marks, key=lambda mark: (mark.level, -mark.order), default=None)


def _parts(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants, closed or not."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _lookup(eqn: Any, table: _Marked, indices: _Marked, place: str, everywhere: NamedSharding) -> Lookup | None:
    """The lookup of an equation, if an index of it is out of range."""
    dims = eqn.params["dimension_numbers"].start_index_map
    shape, sizes = table.value.shape, eqn.params["slice_sizes"]
    last = np.broadcast_to(np.array([shape[dim] - sizes[dim] for dim in dims], np.int32), indices.value.shape)
    found = _first(lambda x: (x < 0) | (x > last), indices.value, everywhere)
    if found is None:
        return None
    shown = next(iter(table.leaves), f"an array of shape {tuple(shape)}")
    return Lookup(place, shown, shape[dims[found[0][-1]]], indices.leaves, int(found[1]))


def _first(
    is_wrong: Callable[[Any], Any], x: jax.Array, everywhere: NamedSharding
) -> tuple[tuple[int, ...], Any, int, Any] | None:
    """Position and value of the first wrong element, the number of these and the largest of all; None without one."""

    def look(x: jax.Array) -> Any:
        wrong = is_wrong(x).reshape(-1)
        at = jnp.argmax(wrong)
        return at, x.reshape(-1)[at], wrong.sum(), x.max()

    at, value, count, largest = jax.device_get(jax.jit(look, out_shardings=everywhere)(x))
    return (tuple(map(int, np.unravel_index(at, x.shape))), value, int(count), largest) if count else None


def _everywhere(x: Any) -> NamedSharding:
    """The sharding of results that every process can read: whole on all devices of an array, or of a sharding."""
    return NamedSharding(getattr(x, "sharding", x).mesh, PartitionSpec())


def _path(path: tuple) -> str:
    """A leaf of (state, batch) as people write it."""
    (first, *rest) = (getattr(k, "key", getattr(k, "name", getattr(k, "idx", k))) for k in path)
    if first == 0:
        return dotted(tuple(key for key in rest if key != "value"))
    return "batch" + "".join(f"[{key!r}]" for key in rest).replace("'", '"')


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
    """The error of a step before any update: it names where the loss, or the gradients, got their NaN or infinity.

    Args:
        model_file: its loss.
        recipe: whose settings a line to paste may change.
        model: annotated, as it was before the step.
        batch: of the step.
        step: its number.
        wrong: the scalars that are not finite.
        source: where the parameters are from.
    """
    loss_fn, wrt = model_file.loss_fn, model_file.wrt
    try:
        found = origin(loss_fn, model, batch, of_gradients="loss" not in wrong, wrt=wrt)
    except _FAILURES as error:  # a search that fails must not hide what it was for
        unknown = unexplained(step, batch, wrong)
        unknown.add_note(f"The search for the cause failed: {type(error).__name__}: {str(error)[:500]}")
        return unknown
    then = f"{', '.join(f'{name} = {value}' for name, value in wrong.items())} at step {step}, before any update"
    match found:
        case Lookup():
            return _of_lookup(found, then, recipe, batch)
        case LossLeaf():
            return _of_leaf(found, then, source)
        case Equation():
            return RunError(
                f"`{found.operation}` makes a value that is not finite.",
                where=f"{found.place}: {found.operation}",
                why=f"{then}; what goes into the operation is finite, and what comes out is not.",
                do="keep its input in range on that line, such as jnp.log(jnp.maximum(x, 1e-6)) for jnp.log(x);"
                ' jax.debug.print("{}", x) prints it.',
            )
    return RunError(
        "The sharded step is not finite, and the plain model is.",
        where=f"step {step}",
        why=f"{then}; operation by operation on whole arrays, the same batch and parameters give finite numbers.",
        do="print(js.check(model, batch, loss_fn=loss_fn))",
    )


def _of_lookup(found: Lookup, then: str, recipe: Recipe, batch: Any) -> RunError:
    arrays = {_path((1, *path)): x for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]}
    rows, where = found.num_rows, [f"{found.place}: lookup in {found.table}"]
    key = next(iter(found.indices), "")
    is_out = lambda x: (x < -rows) | (x >= rows)
    out = _first(is_out, arrays[key], _everywhere(arrays[key])) if len(found.indices) == 1 else None
    if out is not None:
        position, value, count, largest = out
        where.append(f"{key}[{', '.join(map(str, position))}] = {value}")
        counted = f"; {count:,} of {arrays[key].size:,} values of {key} are out of range"
    else:
        value, counted, largest = found.index, "", max(found.index, recipe.sequence_length - 1)
        made = (
            f"computed from {' and '.join(sorted(found.indices))}"
            if found.indices
            else "not from the batch: a position"
        )
        where.append(f"index {value}, {made}")
    return RunError(
        f"Row {value} of {found.table} does not exist.",
        where=where,
        why=f"it has {rows:,} rows, 0 to {rows - 1}, and another row is NaN{counted}; {then}.",
        do=_remedy(found, key if out is not None else None, rows, largest, recipe),
    )


def _remedy(found: Lookup, key: str | None, rows: int, largest: int, recipe: Recipe) -> str:
    """A setting of the recipe that is as large as the table, where there is one; else the change in words."""
    model = recipe.model
    fields = [f.name for f in dataclasses.fields(model)] if dataclasses.is_dataclass(model) else []
    fits = [f"--set model.{name}={largest + 1}" for name in fields if getattr(model, name) == rows and largest >= rows]
    more = fits[0] if len(fits) == 1 else f"give {found.table} {max(largest + 1, rows)} rows" if largest >= rows else ""
    if key is not None:
        less = f"keep {key} within 0 to {rows - 1}"
    elif not found.indices and recipe.sequence_length > rows:
        less = f"--set sequence_length={rows}"
    else:
        less = f"keep the index within 0 to {rows - 1}"
    return f"{more}, or {less}" if more else less


def _of_leaf(found: LossLeaf, then: str, source: str) -> RunError:
    wrong = _first(lambda x: ~jnp.isfinite(x), found.value, _everywhere(found.value))
    assert wrong is not None
    position, value, count, _ = wrong
    if found.path.startswith("batch"):
        source, do = "as the data give it", "give finite samples: check each with np.isfinite(x).all()."
    else:
        do = "change its initialiser, or the checkpoint that it is from: jnp.isfinite(x).all() must hold."
    return RunError(
        f"{found.path} is not finite.",
        where=f"{found.path}[{', '.join(map(str, position))}] = {float(value)}",
        why=f"not finite: {count:,} of its {found.value.size:,} values, {source}; {then}.",
        do=do,
    )
