"""A method call on a module as a function of arrays: split, merged again, and its changes written back."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jshard import _compat
from jshard.engine.context import during, guard
from jshard.errors import CallError
from jshard.plans.checks import check_has_arrays, check_replicated, check_stored, others_of, warn_of_unplanned
from jshard.plans.memories import fetched
from jshard.plans.mesh import NUMBERS
from jshard.plans.padding import is_as_placed, logical_shape, padding_of, store
from jshard.plans.units import (
    NESTED,
    Path,
    Unit,
    detach,
    dotted,
    holds_array,
    nested_units,
    numberless,
    plain_class,
    unit_of,
    walk,
)

Kept = list[tuple[Path, Any]]
"""Paths with variables; an array that is a plain attribute of a module is its own entry."""


def is_nnx(x: Any) -> bool:
    """Objects that travel with the module, in one graph, rather than as arrays."""
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def is_array(x: Any) -> bool:
    """Whether a leaf of arguments or results is an array, traced or not."""
    return isinstance(x, (jax.Array, np.ndarray))


def raw(leaf: Any) -> Any:
    """The value in a variable; an array is its own value."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def is_float(x: Any) -> bool:
    """Whether an array has gradients."""
    return jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)


@dataclasses.dataclass(frozen=True)
class Live:
    """A module and arguments merged from arrays; `graph` has the nnx objects among them: they may share."""

    graph: tuple[nnx.Module, tuple[Any, ...]]
    args: tuple
    kwargs: dict[str, Any]

    @property
    def module(self) -> nnx.Module:
        """The module whose method runs."""
        return self.graph[0]

    def contents(self) -> tuple[Kept, dict[Path, Any]]:
        """The variables and the values of plain attributes, by path."""
        variables, attributes = [], {}
        for path, x in walk(self.graph, settings=True):
            if type(x) not in _compat.SETTINGS and isinstance(x, nnx.Variable):
                variables.append((path, x))
            elif not _compat.is_node(x):
                attributes[path] = x
        return variables, attributes


class MethodCall:
    """One call, split into parameters, other variables (state), and arrays among the arguments.

    The paths of variables start with 0 in the module, 1 in the arguments.
    """

    def __init__(self, module: nnx.Module, method: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self.method = method
        self.where = f"{plain_class(module).__name__}.{method.__name__}"
        self._leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=is_nnx)
        self._objects = [i for i, leaf in enumerate(self._leaves) if is_nnx(leaf)]
        self.has_objects = bool(self._objects)
        self._arrays = [i for i, leaf in enumerate(self._leaves) if is_array(leaf)]
        self.arrays = [self._leaves[i] for i in self._arrays]
        self.graph = (module, tuple(self._leaves[i] for i in self._objects))
        self._graphdef, params, state = nnx.split(self.graph, nnx.Param, ...)
        self.params: Kept = list(nnx.to_flat_state(params))
        self.state: Kept = list(nnx.to_flat_state(state))

    def difference(self, other: "MethodCall") -> str:
        """Where another call's module differs in structure; empty if it does not."""
        kind = lambda x: f"{x.dtype}{list(x.shape)}"
        mine, theirs = ({p: jax.tree.map(kind, raw(v)) for p, v in c.params + c.state} for c in (self, other))
        unlike = [p for p in dict.fromkeys([*mine, *theirs]) if mine.get(p) != theirs.get(p)]
        if unlike:
            return "; ".join(f"{dotted(p[1:])}: {mine.get(p, 'none')} and {theirs.get(p, 'none')}" for p in unlike[:4])
        return "" if self._graphdef == other._graphdef else "their attributes or annotations differ."

    def key(self) -> tuple:
        """Equal for calls that run the same program on arrays of the same types."""
        dynamic = {*self._arrays, *self._objects}
        static = [x for i, x in enumerate(self._leaves) if i not in dynamic]
        return self.method, self._graphdef, self._tree, tuple(self._arrays), tuple(static)

    def values(self) -> tuple[list, list, list]:
        """The arrays of the call: parameters, state (each a pytree), arguments."""
        return [raw(v) for _, v in self.params], [raw(v) for _, v in self.state], self.arrays

    def put_together(self, params: Sequence, state: Sequence, arrays: Sequence) -> Live:
        """A fresh copy of module and arguments that holds these values."""
        given = zip(self.params + self.state, [*params, *state], strict=True)
        flat = [(p, v.replace(x) if isinstance(v, nnx.Variable) else x) for (p, v), x in given]
        graph = nnx.merge(self._graphdef, nnx.from_flat_state(flat), copy=True)
        leaves = list(self._leaves)
        for i, x in zip([*self._arrays, *self._objects], [*arrays, *graph[1]], strict=True):
            leaves[i] = x
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        return Live(graph, args, kwargs)

    def write_back(self, changes: Kept) -> None:
        """Writes the changes of the call to the caller's objects."""
        mine = dict(walk(self.graph)) if changes else {}
        for path, new in changes:
            if path in mine:
                mine[path].set_raw_value(new.get_raw_value())
            else:
                setattr(mine[path[:-1]], str(path[-1]), new)


@dataclasses.dataclass(frozen=True)
class Before:
    """The contents of a live graph before its method ran."""

    values: dict[Path, Any]
    attributes: dict[Path, Any]

    @classmethod
    def of(cls, live: Live) -> "Before":
        """Its current contents."""
        variables, attributes = live.contents()
        return cls({p: v.get_raw_value() for p, v in variables}, attributes)

    def changes(self, live: Live, where: str) -> Kept:
        """State that the method changed or created; raises for changed parameters and attributes, which get lost."""
        changed = self.changed(live, where)
        refuse_written([f"{where}: {dotted(p[1:])}" for p, v in changed if isinstance(v, nnx.Param)])
        return changed

    def changed(self, live: Live, where: str) -> Kept:
        """Variables that the method changed or created, including parameters; raises for a changed plain attribute."""
        variables, attributes = live.contents()
        before, made_anew = self.attributes, (str, bytes, int, float, complex)  # such may be equal and another object
        same = lambda a, b: a is b or (type(a) is type(b) and isinstance(a, made_anew) and a == b)
        if lost := [p for p, x in attributes.items() if p not in before or not same(before[p], x)]:
            raise CallError(
                "A plain attribute was written inside the call.",
                where=[f"{where}: {dotted(path[1:])}" for path in lost],
                why="the call runs on a copy of the module; only nnx Variables are copied back.",
                do="self.count = nnx.Variable(jnp.zeros((), int))  # keep it in a variable",
            )
        return [(p, v) for p, v in variables if not _same(v.get_raw_value(), self.values.get(p))]


def refuse_written(places: Sequence[str]) -> None:
    """Raises if parameters were written inside a call, at these places."""
    if places:
        raise CallError(
            "A parameter was written inside the call.",
            where=places,
            why="the call runs on a copy of the module; written parameters are not copied back.",
            do="update parameters outside the model, as nnx.Optimizer does.",
        )


def _same(a: Any, b: Any) -> bool:
    old, new = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(old) == len(new) and all(x is y for x, y in zip(old, new, strict=True))


# ---- the adapter: a call of an annotated module as the engine takes it

_names: contextvars.ContextVar[Mapping[Any, str]] = contextvars.ContextVar("names")
"""Paths of units from the root; of one of equal layers, with `*` for its number."""


class NnxCall:
    """A call of a method of an annotated module: `jshard.engine.trace.Call`."""

    def __init__(self, module: nnx.Module, method: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self._parts = parts = MethodCall(module, method, args, kwargs)
        names = _names.get({})
        self.where, self._path = parts.where, names.get(id(module)) or names.get(type(module), "")
        self.name = self._path or plain_class(module).__name__
        around = [_unit_around(parts, path) for path, _ in parts.params]
        members: list[Any] = [_member(*place, v) for place, (_, v) in zip(around, parts.params, strict=True)]
        self._planned = planned = [i for i, member in enumerate(members) if member is not None]
        self.params = [raw(parts.params[i][1]) for i in planned]
        self.placements = [members[i].placement for i in planned]
        self.owners = [members[i].role if members[i].placement.gathered else NESTED for i in planned]
        self.names = [dotted(parts.params[i][0][1:]) for i in planned]
        params, state, arrays = parts.values()
        unplanned = [x for i, x in enumerate(params) if members[i] is None]
        of_state, self._state_tree = jax.tree.flatten((unplanned, state))
        of_state = [jax.numpy.asarray(x) if isinstance(x, NUMBERS) else x for x in of_state]
        self.inputs, self.num_state = [*of_state, *arrays], len(of_state)
        self.key = parts.key(), self._state_tree
        self.result: Any = None
        self.written: Sequence[str] = ()

    def guarded(self, values: Sequence[Any]) -> list[Any]:
        """The input parameters; gradients of padded ones are refused if an optimizer would see the padding."""
        params = [self._parts.params[at] for at in self._planned]
        found = [(v, *_unit_around(self._parts, path)) for path, v in params]
        return _guarded(self.where.split(".")[0], values, found)

    def warn(self, unit: Unit) -> None:
        """Reports parameters that the annotation could not shard, or that were added after it."""
        name = self.where.split(".")[0]
        check_has_arrays(self.where, self.params)
        params = [self._parts.params[at] for at in self._planned]
        placed = [(path[1:], v, p) for (path, v), p in zip(params, self.placements, strict=True)]
        check_stored(name, placed)
        if not unit.nested:
            check_replicated(unit, name, others_of(self._parts.graph[0]))
        planned = set(self._planned)
        added = [(path, v) for i, (path, v) in enumerate(self._parts.params) if i not in planned and not path[0]]
        paths = [path for path, v in added if holds_array(v)]
        warn_of_unplanned([dotted(path[1:]) for path in paths], self.where)

    def body(self, params: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The method's results and the changed state, as arrays, from logical parameters and inputs."""
        unplanned, state = jax.tree.unflatten(self._state_tree, inputs[: self.num_state])
        planned, rest = dict(zip(self._planned, params, strict=True)), iter(unplanned)
        values = [planned[i] if i in planned else next(rest) for i in range(len(self._parts.params))]
        live = self._parts.put_together(values, state, inputs[self.num_state :])
        detach(live.module)
        for _, one in walk(live.graph):
            if isinstance(one, nnx.Param) and padding_of(one) is not None:
                store(one, None, one.get_raw_value())  # inside, arrays are logical
        before = Before.of(live)
        with during(_names, _names_inside(live.module, self._path)):
            out = self._parts.method(live.module, *live.args, **live.kwargs)
        changed = before.changed(live, self.where)
        changes = [(path, v) for path, v in changed if not isinstance(v, nnx.Param)]
        passed = [(path, v) for path, v in changed if isinstance(v, nnx.Param)]
        leaves, tree = jax.tree.flatten(out)
        state, state_tree = jax.tree.flatten([raw(v) for _, v in changes])
        self.result = tree, [None if is_array(x) else (x,) for x in leaves], changes, state_tree
        old = jax.tree.leaves([before.values.get(path) for path, _ in passed])
        new = jax.tree.leaves([raw(v) for _, v in passed])
        places = [f"{self.where}: {dotted(path[1:])}" for path, v in passed for _ in jax.tree.leaves(raw(v))]
        if len(old) != len(new):
            refuse_written(places)
        self.written = places
        return list(filter(is_array, leaves)), [*state, *old, *new]

    def finish(self, outs: Sequence[Any], result: Any) -> Any:
        """Writes state back to the caller's objects, and returns the method's result."""
        tree, static, changes, state_tree = result
        it = iter(outs)
        leaves = [next(it) if one is None else one[0] for one in static]
        values = jax.tree.unflatten(state_tree, list(it))
        self._parts.write_back([(path, v.replace(x)) for (path, v), x in zip(changes, values, strict=True)])
        return jax.tree.unflatten(tree, leaves)


def _names_inside(module: nnx.Module, name: str) -> dict[Any, str]:
    """Paths of the inner units from the root, by id of their modules; by class, for the copies that a loop makes."""
    prefix, found = f"{name}/" if name else "", {}
    for path, unit in nested_units(module):
        if path:
            kind, found[id(unit)] = type(unit), prefix + dotted(path)
            found[kind] = numberless(found[id(unit)]) if kind in found else found[id(unit)]
    return found


def _unit_around(parts: MethodCall, path: tuple) -> tuple[Unit | None, tuple]:
    """The module of a parameter, the called one or one among the arguments, and the path from there."""
    module, relative = (parts.graph[0], path[1:]) if path[0] == 0 else (parts.graph[1][path[1]], path[2:])
    return unit_of(module), relative


def _member(unit: Unit | None, path: tuple, variable: nnx.Variable) -> Any:
    """The plan of a parameter; None if it was added after the annotation, or has another size than was planned."""
    member = None if unit is None else unit.by_path.get(path)
    return member if member is None or is_as_placed(variable, member.placement) else None


def _guarded(model: str, values: Sequence[Any], params: Sequence[tuple[Any, Unit | None, tuple]]) -> list[Any]:
    """Values of parameters (variable, unit, path); see `guard`."""
    padded = {}
    for i, (v, unit, path) in enumerate(params):
        if unit is not None and unit.optimizer is not None and padding_of(v) is not None:
            x = v.get_raw_value()
            text = f"{model}: {dotted(path)}  {x.dtype}{list(logical_shape(v))}, stored {list(x.shape)}"
            padded[i] = text, unit.optimizer
    return guard(values, padded)


@contextlib.contextmanager
def as_plain(module: nnx.Module, unit: Unit) -> Iterator[None]:
    """A context in which a unit's module runs in global view; afterwards unwritten variables have their old values.

    Its parameters are on the device: products do not accept arrays of both memories. Differentiating a padded one
    raises while an optimizer would see the padding.
    """
    params = [(v, unit, path) for path, v in walk(module) if isinstance(v, nnx.Param)]
    before = [v.get_raw_value() for v, *_ in params]
    arrays = list(before)
    if any(member.placement.on_host for member in unit.members):
        arrays = [fetched(x) if _compat.on_host(x) else x for x in arrays]
    at = [i for i, (v, *_) in enumerate(params) if padding_of(v) is not None and _compat.is_tracer(arrays[i])]
    guarded = _guarded(plain_class(module).__name__, [arrays[i] for i in at], [params[i] for i in at])
    for i, x in zip(at, guarded, strict=True):
        arrays[i] = x
    held = [(v, old, x) for (v, *_), old, x in zip(params, before, arrays, strict=True) if x is not old]
    for v, _, x in held:
        v.set_raw_value(x, _unsafe_bypass_check=True)
    try:
        yield
    finally:
        for v, old, x in held:
            if v.get_raw_value() is x:
                v.set_raw_value(old, _unsafe_bypass_check=True)
