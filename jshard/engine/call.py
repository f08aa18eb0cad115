"""A method call on a module as a function of arrays: taken apart, put together again, its changes written back."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.custom_derivatives import SymbolicZero

from jshard import _compat
from jshard.engine.context import is_without_update
from jshard.errors import AnnotationError, CallError
from jshard.plans.padding import logical_shape, padding_of
from jshard.plans.units import LogicalOptimizer, Path, Unit, dotted, plain_class, unit_of, walk

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
        arrays: the array arguments, and `names` for each: the name or position of its argument.
    """

    def __init__(self, module: nnx.Module, method: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self.method = method
        self.where = f"{plain_class(module).__name__}.{method.__name__}"
        flat, self._tree = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_nnx)
        self._leaves = [leaf for _, leaf in flat]
        self._objects = [i for i, leaf in enumerate(self._leaves) if is_nnx(leaf)]
        self._arrays = [i for i, leaf in enumerate(self._leaves) if is_array(leaf)]
        self.arrays = [self._leaves[i] for i in self._arrays]
        self._paths = [flat[i][0] for i in self._arrays]
        self.graph = (module, tuple(self._leaves[i] for i in self._objects))
        self._graphdef, params, state = nnx.split(self.graph, nnx.Param, ...)
        self.params: Kept = list(nnx.to_flat_state(params))
        self.state: Kept = list(nnx.to_flat_state(state))

    def argument_names(self, parameter_names: Sequence[str]) -> list[str]:
        """The argument that each array belongs to, given the method's parameter names."""
        names = []
        for kind, key, *_ in self._paths:
            if kind.idx == 1:
                names.append(key.key)
            else:
                names.append(parameter_names[key.idx] if key.idx < len(parameter_names) else str(key.idx))
        return names

    def positions(self) -> list[int | str]:
        """Position or name of the argument that each array belongs to."""
        return [key.key if kind.idx == 1 else key.idx for kind, key, *_ in self._paths]

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


# Gradients of padded parameters: refused where the optimizer that they are for would see the padding.

Refuse = Callable[[Sequence[bool]], None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _guarded(refuse: Refuse, arrays: list[Any]) -> list[Any]:
    return arrays


@functools.partial(_guarded.defjvp, symbolic_zeros=True)
def _differentiated(
    refuse: Refuse, arrays: tuple[list[Any]], tangents: tuple[list[Any]]
) -> tuple[list[Any], list[Any]]:
    refuse([not isinstance(tangent, SymbolicZero) for tangent in tangents[0]])
    return arrays[0], tangents[0]


def guarded(call: MethodCall, values: Sequence[Any]) -> list[Any]:
    """The parameters of a call; to differentiate with respect to a padded one is refused as long as it would be wrong.

    Args:
        call: the call.
        values: what its parameters enter as.
    """
    guards = {}
    for i, (path, variable) in enumerate(call.params):
        optimizer = _optimizer(call, path)
        if padding_of(variable) is not None and optimizer is not None and _refuses(optimizer):
            guards[i] = path, variable, optimizer
    name = call.where.split(".")[0]
    return _all_guarded(
        values, {i: (_text(name, path[1:], one), optimizer) for i, (path, one, optimizer) in guards.items()}
    )


def guard(values: Sequence[Any], padded: Mapping[int, str], optimizer: LogicalOptimizer | None) -> list[Any]:
    """The same of stored arrays, given the positions of the padded ones, each with its name for messages."""
    refuses = optimizer is not None and _refuses(optimizer)
    return _all_guarded(values, {i: (text, optimizer) for i, text in padded.items()} if refuses else {})


def _all_guarded(values: Sequence[Any], guards: Mapping[int, tuple[str, Any]]) -> list[Any]:
    if not guards:
        return list(values)
    refuse = _refusal(list(guards.values()))
    after = dict(zip(guards, _guarded(refuse, [values[i] for i in guards]), strict=True))
    return [after.get(i, x) for i, x in enumerate(values)]


@contextlib.contextmanager
def guarded_inside(module: nnx.Module, unit: Unit) -> Iterator[None]:
    """Inside, the same of the parameters that a unit's module holds, which runs in global view."""
    name, optimizer = plain_class(module).__name__, unit.optimizer
    found = [(path, one) for path, one in walk(module) if padding_of(one) is not None and isinstance(one, nnx.Param)]
    found = [(path, one) for path, one in found if _compat.is_tracer(one.get_raw_value())]
    if not found or optimizer is None or not _refuses(optimizer):
        yield
        return
    refuse = _refusal([(_text(name, path, one), optimizer) for path, one in found])
    before = [one.get_raw_value() for _, one in found]
    after = _guarded(refuse, before)
    for (_, one), x in zip(found, after, strict=True):
        one.set_raw_value(x, _unsafe_bypass_check=True)
    try:
        yield
    finally:
        for (_, one), stored, x in zip(found, before, after, strict=True):
            if one.get_raw_value() is x:
                one.set_raw_value(stored, _unsafe_bypass_check=True)


def _optimizer(call: MethodCall, path: tuple) -> LogicalOptimizer | None:
    """That of the model that a parameter of a call belongs to: the called one, or one among the arguments."""
    unit = unit_of(call.graph[0] if path[0] == 0 else call.graph[1][path[1]])
    return None if unit is None else unit.optimizer


def _refuses(optimizer: LogicalOptimizer) -> bool:
    return not optimizer.exists and not is_without_update()


def _refusal(arrays: Sequence[tuple[str, LogicalOptimizer]]) -> Refuse:
    """What raises if one of some arrays is differentiated: late, as a trace may be older than the optimizer."""

    def refuse(perturbed: Sequence[bool]) -> None:
        bad = [one for one, is_bad in zip(arrays, perturbed, strict=True) if is_bad and not one[1].exists]
        if bad:
            raise AnnotationError(
                "A padded parameter was differentiated, and js.shard_optimizer was not called for its model.",
                where=[text for text, _ in bad],
                why="the stored array ends in zeros. An optimizer that js.shard_optimizer did not make counts them in"
                " its means over the parameter, and its updates would be wrong.",
                do=bad[0][1].do,
            )

    return refuse


def _text(model: str, path: tuple, variable: nnx.Variable) -> str:
    shape, stored = logical_shape(variable), variable.get_raw_value()
    return f"{model}: {dotted(path)}  {stored.dtype}{list(shape)}, stored {list(stored.shape)}"
