"""Why the first loss of a run is not finite: where in the model it began, and what was looked up there.

No update has been made by then, so the learning rate is not the cause. The loss is traced once more, as the plain model
computes it, and runs with a mark beside every value: the first step of the computation from which the loss has its NaN
or its infinity. A value that is not finite and does not reach the loss, such as a mask of -inf, leaves no mark on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core as jex
from jax.sharding import NamedSharding, PartitionSpec

from jshard import _compat
from jshard._errors import RunError
from jshard._nnx import dotted
from jshard.engine.context import global_view, plain_flax
from jshard.train.linen_model import LinenModel
from jshard.train.loop import unexplained
from jshard.train.model_file import ModelFile
from jshard.train.settings.recipe import Recipe

# A mark is one number, so that a maximum of marks is the mark of the worst value: its level, then its place, the first
# one the largest. A constant has no place: the equation that uses it is the place.
_FINITE, _GIVEN_INF, _INF, _NAN = range(4)  # a constant -inf, as in a mask, is not the cause of a NaN
_PLACES = 1 << 26
# Else XLA:CPU copies what came before a value into the program of its mark, for minutes.
_UNFUSED = {"xla_disable_hlo_passes": "fusion,cpu-instruction-fusion", "xla_backend_optimization_level": 0}
_MOVING = frozenset("reshape broadcast_in_dim transpose squeeze copy copy_p neg sharding_constraint".split())
_INLINED = frozenset("jit pjit closed_call checkpoint remat remat2 custom_jvp_call custom_vjp_call".split())


@dataclasses.dataclass(frozen=True)
class Leaf:
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
    index: int = 0


Origin = Leaf | Equation | Lookup | None


@dataclasses.dataclass(frozen=True)
class _Marked:
    """A value, the mark of what is not finite in it, with the index of a lookup, and the leaves that it is from."""

    value: Any
    mark: Any = 0
    index: Any = None
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
    paths = [_path(path) for path, _ in flat]

    def computed(leaves: list[Any]) -> list[Any]:
        state, batch = jax.tree.unflatten(tree, leaves)
        merged = nnx.merge(graphdef, state, copy=True)
        # Linen has its dtypes in the module; the plain Flax of nnx follows those of the units.
        with global_view() if isinstance(model, LinenModel) else plain_flax():
            if not of_gradients:
                return [loss_fn(merged, batch)]
            return jax.tree.leaves(nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(merged, batch))

    leaves = [leaf for _, leaf in flat]
    closed = jax.make_jaxpr(computed)(leaves)
    marking = _Marking()

    def run(leaves: list[Any]) -> jax.Array:
        given = [
            _Marked(x, _placed(_level(x), marking.place(Leaf(path, x))), leaves=frozenset({path}))
            for path, x in zip(paths, leaves, strict=True)
        ]
        mark, index = _worst(marking.run(closed.jaxpr, closed.consts, given))
        return jnp.stack([jnp.int32(mark), jnp.int32(0 if index is None else index)])

    mark, index = map(int, _on_all(run)(leaves))
    if not mark:
        return None
    place = _PLACES - 1 - mark % _PLACES
    found = marking.places[place] if mark % _PLACES else Equation("a constant", "the loss")
    if isinstance(found, Leaf):
        return Leaf(found.path, leaves[paths.index(found.path)])
    return dataclasses.replace(found, index=index) if isinstance(found, Lookup) else found


class _Marking:
    """Runs a jaxpr with a mark beside every value.

    Attributes:
        places: what the marks mean, by number.
    """

    def __init__(self) -> None:
        self.places: list[Any] = []

    def place(self, *found: Any) -> int:
        """The number of the first of new places."""
        self.places += found
        return len(self.places) - len(found)

    def run(
        self, jaxpr: Any, consts: Sequence[Any], given: Sequence[_Marked], around: tuple[str, ...] = ()
    ) -> list[_Marked]:
        """The results. `around` is the stack of an enclosing call of `jax.jit`, which may be traced for another one."""
        values: dict[Any, _Marked] = dict(zip(jaxpr.constvars, map(_constant, consts), strict=True))
        values |= zip(jaxpr.invars, given, strict=True)
        read = lambda v: _constant(v.val) if isinstance(v, jex.Literal) else values[v]
        for eqn in jaxpr.eqns:
            values |= zip(eqn.outvars, self._equation(eqn, list(map(read, eqn.invars)), around), strict=True)
        return list(map(read, jaxpr.outvars))

    def _equation(self, eqn: Any, given: list[_Marked], around: tuple[str, ...]) -> list[_Marked]:
        name, stack = eqn.primitive.name, _compat.user_frames(eqn, below=__file__)
        if around and stack[-len(around) :] != around:
            stack = around
        inner = [p for p in eqn.params.values() if hasattr(getattr(p, "jaxpr", p), "eqns")]
        if name == "scan":
            return self._scan(eqn, inner[0], given, stack)
        if name in _INLINED and len(inner) == 1:
            return self.run(*_parts(inner[0]), given, stack if name in ("jit", "pjit") else around)
        results = _compat.bind(eqn, [x.value for x in given])
        leaves = frozenset().union(*(x.leaves for x in given))
        if name in _MOVING:
            return [dataclasses.replace(given[0], value=results[0])]
        worst, inherited = _worst(given)
        place, index = self.place(Equation(name, stack[0] if stack else "an unknown line")), None
        if name == "gather":
            place, index = self._lookup(eqn, *given, self.places[place].place)
        found = []
        for x in results:
            mark, is_own = _mark_of(_level(x), worst, place)
            if index is not None or inherited is not None:
                index_of_x = jnp.where(is_own, 0 if index is None else index, 0 if inherited is None else inherited)
            else:
                index_of_x = None
            is_passed_on = len(given) == 1 or jnp.issubdtype(x.dtype, jnp.integer)
            found.append(_Marked(x, mark, index_of_x, leaves if is_passed_on else frozenset()))
        return found

    def _lookup(self, eqn: Any, table: _Marked, indices: _Marked, place: str) -> tuple[Any, Any]:
        """The place of a lookup, and the first index out of range; a place for each dim that it indexes."""
        dims = eqn.params["dimension_numbers"].start_index_map
        shape, sizes = table.value.shape, eqn.params["slice_sizes"]
        shown = next(iter(table.leaves), f"an array of shape {tuple(shape)}")
        first = self.place(*(Lookup(place, shown, shape[dim], indices.leaves) for dim in dims))
        flat = indices.value.reshape(-1, len(dims)).astype(jnp.int32)
        last = jnp.array([[shape[dim] - sizes[dim] for dim in dims]], jnp.int32)
        is_out = (flat < 0) | (flat > jnp.broadcast_to(last, flat.shape))
        at = jnp.argmax(is_out.reshape(-1))
        return first + at % len(dims), flat.reshape(-1)[at]

    def _scan(self, eqn: Any, body: Any, given: list[_Marked], around: tuple[str, ...]) -> list[_Marked]:
        num_consts, num_carry = _compat.scan_arguments(eqn)
        consts, carry, xs = _cut(given, num_consts, num_carry)

        def one(carried: list[Any], x: list[Any]) -> Any:
            inputs = [
                *consts,
                *(
                    dataclasses.replace(c, value=v, mark=m, index=i)
                    for c, (v, m, i) in zip(carry, carried, strict=True)
                ),
                *(dataclasses.replace(c, value=v, mark=_left(c.mark, v)) for c, v in zip(xs, x, strict=True)),
            ]
            results = [_as_arrays(r) for r in self.run(*_parts(body), inputs)]
            return results[:num_carry], results[num_carry:]

        how = {"length": eqn.params["length"], "reverse": eqn.params["reverse"]}
        carried, stacked = jax.lax.scan(one, [_as_arrays(c) for c in carry], [x.value for x in xs], **how)
        worst = [(jnp.max(marks), indices[jnp.argmax(marks)]) for _, marks, indices in stacked]
        return [_Marked(*c) for c in carried] + [_Marked(s[0], *w) for s, w in zip(stacked, worst, strict=True)]


def _parts(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and its constants, closed or not."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _cut(values: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return values[:first], values[first : first + second], values[first + second :]


def _level(x: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size:
        return _FINITE
    x = jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
    of = lambda level: jax.lax.full(x.shape, level, jnp.int8)
    levels = jax.lax.select(jax.lax.is_finite(x), of(_FINITE), jax.lax.select(x != x, of(_NAN), of(_INF)))
    return jnp.max(levels).astype(jnp.int32)


def _placed(level: Any, place: int | jax.Array) -> Any:
    """The mark of a value that has its level from a place."""
    return 0 if isinstance(level, int) else jnp.where(level == _FINITE, 0, level * _PLACES + _PLACES - 1 - place)


def _mark_of(level: Any, worst: Any, place: int | jax.Array) -> tuple[Any, Any]:
    """The mark of a result, and whether what is not finite in it is its own: not from the worst that went in."""
    if isinstance(level, int):
        return 0, True
    if isinstance(worst, int) and not worst:
        return _placed(level, place), True
    is_masked = (worst // _PLACES == _GIVEN_INF) & (level == _INF)
    is_own = (worst % _PLACES == 0) | ((worst // _PLACES < _INF) & ~is_masked)
    own = _placed(jnp.where(is_masked, _GIVEN_INF, level), place)
    return jnp.where(level == _FINITE, 0, jnp.where(is_own, own, worst)), is_own


def _left(mark: Any, value: Any) -> Any:
    """The mark of a part of a value, which may be finite."""
    level = _level(value)
    return 0 if isinstance(level, int) or isinstance(mark, int) else jnp.where(level == _FINITE, 0, mark)


def _constant(value: Any) -> _Marked:
    if not jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.inexact):
        return _Marked(value)
    is_finite = isinstance(value, (float, np.generic, np.ndarray)) and np.isfinite(np.asarray(value, np.float32)).all()
    if is_finite:
        return _Marked(value)
    level = _level(jnp.asarray(value))
    return _Marked(value, jnp.where(level == _INF, _GIVEN_INF, level) * _PLACES)


def _as_arrays(x: _Marked) -> tuple[Any, jax.Array, jax.Array]:
    return x.value, jnp.int32(x.mark), jnp.int32(0 if x.index is None else x.index)


def _worst(found: Sequence[_Marked]) -> tuple[Any, Any]:
    """The mark of the value that is least finite, the first of these, and its index."""
    mark, index = 0, None
    for x in found:
        if isinstance(x.mark, int) and not x.mark:
            continue
        if index is not None or x.index is not None:
            index = jnp.where(mark >= x.mark, 0 if index is None else index, 0 if x.index is None else x.index)
        mark = x.mark if isinstance(mark, int) and not mark else jax.lax.max(mark, x.mark)
    return mark, index


def _on_all(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one program, its results on all devices of its arguments: every process can read them."""

    def run(x: Any) -> Any:
        mesh = next(leaf.sharding.mesh for leaf in jax.tree.leaves(x) if isinstance(leaf.sharding, NamedSharding))
        options = _UNFUSED if mesh.devices.flat[0].platform == "cpu" else None
        return jax.jit(function, out_shardings=NamedSharding(mesh, PartitionSpec()), compiler_options=options)(x)

    return run


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
    except Exception as error:  # a search that fails must not hide what it was for
        unknown = unexplained(step, batch, wrong)
        unknown.add_note(f"The search for the cause failed: {type(error).__name__}: {str(error)[:500]}")
        return unknown
    then = f"{', '.join(f'{name} = {value}' for name, value in wrong.items())} at step {step}, before any update"
    match found:
        case Lookup():
            return _of_lookup(found, then, recipe, batch)
        case Leaf():
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
        why=f"{then}; as one program on whole arrays, the same batch and parameters give finite numbers.",
        do="print(js.check(model, batch, loss_fn=loss_fn))",
    )


def _of_lookup(found: Lookup, then: str, recipe: Recipe, batch: Any) -> RunError:
    arrays = {_path((1, *path)): x for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]}
    rows, where = found.num_rows, [f"{found.place}: lookup in {found.table}"]
    key = next(iter(found.indices), None)
    out = None if key is None or len(found.indices) > 1 else _out_of_range(arrays[key], rows)
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


def _of_leaf(found: Leaf, then: str, source: str) -> RunError:
    def look(x: jax.Array) -> Any:
        flat = ~jnp.isfinite(x).reshape(-1)
        at = jnp.argmax(flat)
        return at, x.reshape(-1)[at].astype(jnp.float32), flat.sum()

    at, value, count = _on_all(look)(found.value)
    position = ", ".join(map(str, _position(int(at), found.value.shape)))
    if found.path.startswith("batch"):
        source, do = "as the data give it", "give finite samples: check each with np.isfinite(x).all()."
    else:
        do = "change its initialiser, or the checkpoint that it is from: jnp.isfinite(x).all() must hold."
    return RunError(
        f"{found.path} is not finite.",
        where=f"{found.path}[{position}] = {float(value)}",
        why=f"not finite: {int(count):,} of its {found.value.size:,} values, {source}; {then}.",
        do=do,
    )


def _out_of_range(x: jax.Array, rows: int) -> tuple[tuple[int, ...], int, int, int] | None:
    """Position and value of the first index out of range, their number and the largest; None if all are in range."""

    def look(x: jax.Array) -> Any:
        flat = x.reshape(-1)
        is_out = (flat < -rows) | (flat >= rows)
        at = jnp.argmax(is_out)
        return at, flat[at], is_out.sum(), flat.max()

    at, value, count, largest = map(int, _on_all(look)(x))
    return (_position(at, x.shape), value, count, largest) if count else None


def _position(at: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        found.append(at % size)
        at //= size
    return tuple(reversed(found))
