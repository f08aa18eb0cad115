"""A method call on a module as a function of arrays: taken apart, put together again, its changes written back."""

import contextvars
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jshard import _compat
from jshard.engine.context import guard
from jshard.errors import CallError
from jshard.plans.checks import check_replicated, warn_of_unplanned
from jshard.plans.padding import logical_shape, padding_of, store
from jshard.plans.units import NESTED, Path, Unit, detach, dotted, nested_units, numberless, plain_class, unit_of, walk

Kept = list[tuple[Path, Any]]
"""Paths with variables; an array that a module holds as a plain attribute stands for itself."""


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
    """A module and arguments put together from arrays.

    `graph` is the module with the nnx objects among the arguments: they may share variables.
    """

    graph: tuple[nnx.Module, tuple[Any, ...]]
    args: tuple
    kwargs: dict[str, Any]

    @property
    def module(self) -> nnx.Module:
        """The module whose method runs."""
        return self.graph[0]

    def variables(self, kind: type[nnx.Variable] = nnx.Variable) -> Kept:
        """The variables of a kind, by path."""
        return [(p, v) for p, v in walk(self.graph) if isinstance(v, kind)]

    def contents(self) -> tuple[Kept, dict[Path, Any]]:
        """The variables, and what plain attributes hold, by path."""
        variables, attributes = [], {}
        for path, x in walk(self.graph, settings=True):
            if type(x) not in _compat.SETTINGS and isinstance(x, nnx.Variable):
                variables.append((path, x))
            elif not _compat.is_node(x):
                attributes[path] = x
        return variables, attributes


class MethodCall:
    """One call, taken apart.

    Attributes:
        params: the parameters, with paths that start with 0 in the module, 1 in the arguments.
        state: the other variables, in the same form.
        arrays: the array arguments.
    """

    def __init__(self, module: nnx.Module, method: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self.method = method
        self.where = f"{plain_class(module).__name__}.{method.__name__}"
        self._leaves, self._tree = jax.tree.flatten((args, kwargs), is_leaf=is_nnx)
        self._objects = [i for i, leaf in enumerate(self._leaves) if is_nnx(leaf)]
        self._arrays = [i for i, leaf in enumerate(self._leaves) if is_array(leaf)]
        self.arrays = [self._leaves[i] for i in self._arrays]
        self.graph = (module, tuple(self._leaves[i] for i in self._objects))
        self._graphdef, params, state = nnx.split(self.graph, nnx.Param, ...)
        self.params: Kept = list(nnx.to_flat_state(params))
        self.state: Kept = list(nnx.to_flat_state(state))

    @property
    def has_objects(self) -> bool:
        """Whether nnx objects are among the arguments."""
        return bool(self._objects)

    def difference(self, other: "MethodCall") -> str:
        """Where another call's module is built differently; empty if it is not."""
        mine, theirs = ({p: jax.tree.map(_kind, raw(v)) for p, v in c.params + c.state} for c in (self, other))
        unlike = [p for p in dict.fromkeys([*mine, *theirs]) if mine.get(p) != theirs.get(p)]
        if unlike:
            return "; ".join(f"{dotted(p[1:])}: {mine.get(p, 'none')} and {theirs.get(p, 'none')}" for p in unlike[:4])
        return "" if self._graphdef == other._graphdef else "their attributes or annotations differ."

    def key(self) -> tuple:
        """Equal for calls that run the same program on arrays of the same types."""
        arrays = set(self._arrays)
        static = [x for i, x in enumerate(self._leaves) if i not in arrays and i not in self._objects]
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
        for i, x in zip(self._arrays, arrays, strict=True):
            leaves[i] = x
        for i, x in zip(self._objects, graph[1], strict=True):
            leaves[i] = x
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        return Live(graph, args, kwargs)

    def write_back(self, changes: Kept) -> None:
        """Carries what the call changed over to the caller's objects."""
        mine = dict(walk(self.graph)) if changes else {}
        for path, new in changes:
            if path in mine:
                mine[path].set_raw_value(new.get_raw_value())
            else:
                setattr(mine[path[:-1]], str(path[-1]), new)


@dataclasses.dataclass(frozen=True)
class Before:
    """What a live graph held before its method ran."""

    values: dict[Path, Any]
    attributes: dict[Path, Any]

    @classmethod
    def of(cls, live: Live) -> "Before":
        """What a live graph holds now."""
        variables, attributes = live.contents()
        return cls({p: v.get_raw_value() for p, v in variables}, attributes)

    def changes(self, live: Live, where: str) -> Kept:
        """State that the method changed or made.

        Raises:
            CallError: it wrote a parameter, or a plain attribute: neither could leave the call.
        """
        changed = self.changed(live, where)
        refuse_written([f"{where}: {dotted(p[1:])}" for p, v in changed if isinstance(v, nnx.Param)])
        return changed

    def changed(self, live: Live, where: str) -> Kept:
        """Variables that the method changed or made, parameters among them.

        Raises:
            CallError: it wrote a plain attribute, which could not leave the call.
        """
        variables, attributes = live.contents()
        changed = [(p, v) for p, v in variables if not _same(v.get_raw_value(), self.values.get(p))]
        before = self.attributes
        lost = [dotted(p[1:]) for p, x in attributes.items() if p not in before or not _same_setting(before[p], x)]
        if lost:
            raise CallError(
                "A plain attribute was written inside the call.",
                where=[f"{where}: {path}" for path in lost],
                why="the call runs on a copy of the module; only nnx Variables come back.",
                do="keep it in a variable: self.count = nnx.Variable(jnp.zeros((), int)).",
            )
        return changed


def refuse_written(places: Sequence[str]) -> None:
    """Raises if parameters were written inside a call, at these places."""
    if places:
        raise CallError(
            "A parameter was written inside the call.",
            where=places,
            why="the call runs on a copy of the module; of what it writes, parameters do not come back.",
            do="update parameters outside the model, as nnx.Optimizer does.",
        )


def _kind(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _same_setting(a: Any, b: Any) -> bool:
    """Whether a plain attribute holds what it held; a text or a number may be made anew."""
    return a is b or (type(a) is type(b) and isinstance(a, (str, bytes, int, float, complex)) and a == b)


def _same(a: Any, b: Any) -> bool:
    old, new = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(old) == len(new) and all(x is y for x, y in zip(old, new, strict=True))


# The adapter: a call of an annotated module as an engine takes it.

_names: contextvars.ContextVar[Mapping[Any, str]] = contextvars.ContextVar("names")


class NnxCall:
    """A call of a method of an annotated module: `jshard.engine.trace.Call`."""

    def __init__(self, module: nnx.Module, method: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self._parts = parts = MethodCall(module, method, args, kwargs)
        self.where, self._path = parts.where, _path_of(module)
        self.name = self._path or plain_class(module).__name__
        around = [_unit_around(parts, path) for path, _ in parts.params]
        members: list[Any] = [None if unit is None else unit.by_path.get(path) for unit, path in around]
        planned = [i for i, member in enumerate(members) if member is not None]
        self._planned = planned
        self.params = [raw(parts.params[i][1]) for i in planned]
        self.placements = [members[i].placement for i in planned]
        self.owners = [members[i].role if members[i].placement.gathered else NESTED for i in planned]
        self.names = [dotted(parts.params[i][0][1:]) for i in planned]
        params, state, arrays = parts.values()
        unplanned = [x for i, x in enumerate(params) if members[i] is None]
        of_state, self._state_tree = jax.tree.flatten((unplanned, state))
        self.inputs, self.num_state = [*of_state, *arrays], len(of_state)
        self.key = parts.key(), self._state_tree
        self.result: Any = None
        self.written: Sequence[str] = ()

    def guarded(self, values: Sequence[Any]) -> list[Any]:
        """The parameters on their way in; gradients of padded ones are refused if an optimizer would see padding."""
        name, padded = self.where.split(".")[0], {}
        for i, (path, variable) in enumerate(self._parts.params[at] for at in self._planned):
            unit, relative = _unit_around(self._parts, path)
            if unit is not None and unit.optimizer is not None and padding_of(variable) is not None:
                padded[i] = stored_text(name, relative, variable), unit.optimizer
        return guard(values, padded)

    def warn(self, unit: Unit) -> None:
        """Names what the annotation could not shard, or never saw."""
        name = self.where.split(".")[0]
        if not unit.nested:
            check_replicated(unit, name)
        planned = set(self._planned)
        paths = [path for i, (path, _) in enumerate(self._parts.params) if i not in planned and not path[0]]
        warn_of_unplanned([dotted(path[1:]) for path in paths], self.where)

    def body(self, params: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The method's results and the changed state, as arrays, from logical parameters and inputs."""
        unplanned, state = jax.tree.unflatten(self._state_tree, inputs[: self.num_state])
        planned, rest = dict(zip(self._planned, params, strict=True)), iter(unplanned)
        values = [planned[i] if i in planned else next(rest) for i in range(len(self._parts.params))]
        live = self._parts.put_together(values, state, inputs[self.num_state :])
        detach(live.module)
        for _, one in live.variables(nnx.Param):
            if padding_of(one) is not None:
                store(one, None, one.get_raw_value())  # inside, arrays are logical
        before = Before.of(live)
        token = _names.set(_names_inside(live.module, self._path))
        try:
            out = self._parts.method(live.module, *live.args, **live.kwargs)
        finally:
            _names.reset(token)
        changed = before.changed(live, self.where)
        changes = [(path, v) for path, v in changed if not isinstance(v, nnx.Param)]
        passed = [(path, v) for path, v in changed if isinstance(v, nnx.Param)]
        leaves, tree = jax.tree.flatten(out)
        dynamic = [is_array(x) for x in leaves]
        state, state_tree = jax.tree.flatten([raw(v) for _, v in changes])
        static = [None if is_dynamic else x for x, is_dynamic in zip(leaves, dynamic, strict=True)]
        self.result = tree, dynamic, static, changes, state_tree
        old = jax.tree.leaves([before.values.get(path) for path, _ in passed])
        new = jax.tree.leaves([raw(v) for _, v in passed])
        places = [f"{self.where}: {dotted(path[1:])}" for path, v in passed for _ in jax.tree.leaves(raw(v))]
        if len(old) != len(new):
            refuse_written(places)
        self.written = places
        return [x for x, is_dynamic in zip(leaves, dynamic, strict=True) if is_dynamic], [*state, *old, *new]

    def finish(self, outs: Sequence[Any], result: Any) -> Any:
        """Writes state back to the caller's objects, and returns the method's result."""
        tree, dynamic, static, changes, state_tree = result
        it = iter(outs)
        leaves = [next(it) if is_dynamic else x for x, is_dynamic in zip(static, dynamic, strict=True)]
        values = jax.tree.unflatten(state_tree, list(it))
        self._parts.write_back([(path, v.replace(x)) for (path, v), x in zip(changes, values, strict=True)])
        return jax.tree.unflatten(tree, leaves)


def _names_inside(module: nnx.Module, name: str) -> dict[Any, str]:
    """Paths from the root of the units inside, by id of their modules; by class, for the copies that a loop makes."""
    prefix, found = f"{name}/" if name else "", {}
    for path, unit in nested_units(module):
        if path:
            kind, found[id(unit)] = type(unit), prefix + dotted(path)
            found[kind] = numberless(found[id(unit)]) if kind in found else found[id(unit)]
    return found


def _path_of(module: nnx.Module) -> str:
    """Path of a unit from the root; of one of equal layers, with `*` for its number. Empty for the root."""
    names = _names.get({})
    return names.get(id(module)) or names.get(type(module), "")


def _unit_around(parts: MethodCall, path: tuple) -> tuple[Unit | None, tuple]:
    """The module that a parameter is of, the called one or one among the arguments, and the path from there."""
    module, relative = (parts.graph[0], path[1:]) if path[0] == 0 else (parts.graph[1][path[1]], path[2:])
    return unit_of(module), relative


def stored_text(model: str, path: tuple, variable: nnx.Variable) -> str:
    """A padded parameter, for messages."""
    shape, stored = logical_shape(variable), variable.get_raw_value()
    return f"{model}: {dotted(path)}  {stored.dtype}{list(shape)}, stored {list(stored.shape)}"
