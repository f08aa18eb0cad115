"""The adapter for nnx: a method call on a module, taken apart into arrays."""

import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jshard.engine.call import Before, guarded, is_array, raw, refuse_written
from jshard.engine.call import MethodCall as Parts
from jshard.plans.padding import padding_of, store
from jshard.plans.replicated import check_replicated, others_in, warn_of_others, warn_of_unplanned
from jshard.plans.units import NESTED, Unit, detach, dotted, nested_units, numberless, plain_class, unit_of

_names: contextvars.ContextVar[Mapping[Any, str]] = contextvars.ContextVar("names")


class NnxCall:
    """A call of a method of an annotated module: `jshard.engine.trace.Call`."""

    def __init__(self, module: nnx.Module, method: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self._parts = parts = Parts(module, method, args, kwargs)
        self.where, self._path = parts.where, _path_of(module)
        self.name = self._path or plain_class(module).__name__
        members = [_member(parts, path) for path, _ in parts.params]
        planned = [i for i, member in enumerate(members) if member is not None]
        self._planned = planned
        self.params = [raw(parts.params[i][1]) for i in planned]
        self.placements = [members[i].placement for i in planned]
        self.owners = [members[i].owner if members[i].placement.gathered else NESTED for i in planned]
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
        entering = dict(zip(self._planned, values, strict=True))
        everything = [entering.get(i) for i in range(len(self._parts.params))]
        found = guarded(self._parts, everything)
        return [found[i] for i in self._planned]

    def warn(self, unit: Unit) -> None:
        """Names what the annotation could not shard, or never saw."""
        name = self.where.split(".")[0]
        if not unit.nested:
            check_replicated(unit, name)
            others = (other for path, x in self._parts.state if path[0] == 0 for other in others_in(path[1:], x))
            warn_of_others(unit, name, tuple(others))
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


def _member(parts: Parts, path: tuple) -> Any:
    """The record of a parameter: of the module's own, or of an annotated module among the arguments."""
    module, relative = (parts.graph[0], path[1:]) if path[0] == 0 else (parts.graph[1][path[1]], path[2:])
    unit = unit_of(module)
    return None if unit is None else unit.by_path.get(relative)
