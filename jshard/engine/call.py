"""A method call on a module as a function of arrays: split, merged again, and its changes written back."""

import collections
import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from jshard import _compat
from jshard.engine import border
from jshard.engine.context import during, guard, parameters_are_fixed, region_mesh
from jshard.errors import CallError
from jshard.plans.checks import (
    check_axes_are_placed,
    check_has_arrays,
    check_replicated,
    check_stored,
    others_of,
    warn_of_unplanned,
)
from jshard.plans.memories import fetched, place_variable, stored_array
from jshard.plans.mesh import NUMBERS
from jshard.plans.padding import Padding, is_as_placed, logical_shape, padding_of, store
from jshard.plans.placement import Placement
from jshard.plans.plan import LeafPlan, as_stored
from jshard.plans.units import (
    NESTED,
    Path,
    Unit,
    detach,
    dotted,
    holds_array,
    is_key,
    nested_units,
    numberless,
    plain_class,
    unit_of,
    units_in,
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


def has_gradient(x: Any) -> bool:
    """Returns whether an array can be differentiated: real and complex floats of any size.

    Whether a policy casts it is another question: `jshard.plans.policies.is_real_float`.
    """
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
        self.arguments = border.Arguments(args, kwargs, (args, kwargs), is_leaf=is_nnx)
        self._leaves = self.arguments.leaves
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
        static = [(type(x), x) for i, x in enumerate(self._leaves) if i not in dynamic]  # 1, 1.0 and True are equal
        return self.method, self._graphdef, self.arguments.form, tuple(self._arrays), tuple(static)

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
        args, kwargs = self.arguments.form.together(leaves, [])
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
        if written := [f"{where}: {dotted(p[1:])}" for p, v in changed if isinstance(v, nnx.Param)]:
            raise _parameter_written(
                written,
                why="the layers run in one loop, which has their parameters as its input.",
                do="for layer in layers: x = layer(x)  # in place of js.scan_layers",
            )
        return changed

    def changed(self, live: Live, where: str) -> Kept:
        """Variables that the method changed or created, including parameters; raises for a changed plain attribute."""
        variables, attributes = live.contents()
        before, made_anew = self.attributes, (str, bytes, int, float, complex)  # such may be equal and another object
        same = lambda a, b: a is b or (type(a) is type(b) and isinstance(a, made_anew) and a == b)
        if lost := [p for p, x in attributes.items() if p not in before or not same(before[p], x)]:
            if built := self._built(live):
                raise _built_inside([f"{where}: {text}" for text in built])
            raise CallError(
                "A plain attribute was written inside the call.",
                where=[f"{where}: {dotted(path[1:])}" for path in lost],
                why="the call runs on a copy of the module; only nnx Variables are copied back.",
                do="self.count = nnx.Variable(jnp.zeros((), int))  # keep it in a variable",
            )
        return [(p, v) for p, v in variables if not _same(v.get_raw_value(), self.values.get(p))]

    def _built(self, live: Live) -> list[str]:
        """The modules that the method built: for each attribute that holds some, its path, their number and class."""
        # What holds something was there before. An attribute that was None was no module.
        known = {path[:length] for path in (*self.values, *self.attributes) for length in range(len(path))}
        classes = collections.defaultdict[Path, list[str]](list)
        for path, x in walk(live.graph):
            if isinstance(x, nnx.Module) and not isinstance(x, nnx.List | nnx.Dict) and path not in known:
                outermost = next(path[:length] for length in range(len(path) + 1) if path[:length] not in known)
                classes[outermost].append(plain_class(x).__name__)
        return [f"{dotted(path[1:])}  {names[0]}{_and_more(names)}" for path, names in classes.items()]


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _built_inside(places: Sequence[str]) -> CallError:
    return CallError(
        "Layers were built inside the call.",
        where=places,
        why="the call runs on a copy of the module, which is then dropped, and js.fully_shard has not seen them: their"
        " parameters would neither be sharded nor trained.",
        do="model(x)  # once, the plain model, before js.fully_shard; for js.shard_init, where the model is built",
    )


def _parameter_written(places: Sequence[str], *, why: str, do: str) -> CallError:
    return CallError("A parameter was written inside the call.", where=places, why=why, do=do)


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
        self.location = f"{self._path}: {self.where}" if self._path else self.where
        members: list[Any] = [_member(parts, path, variable) for path, variable in parts.params]
        self._planned = planned = [i for i, member in enumerate(members) if member is not None]
        is_outermost = region_mesh() is None
        if is_outermost:
            for i in planned:
                module, _ = _module_around(parts, parts.params[i][0])
                place_variable(parts.params[i][1], members[i].placement, cast(Unit, unit_of(module)).mesh)
        self.placements = [members[i].placement for i in planned]
        self.params = [raw(parts.params[i][1]) for i in planned]
        if is_outermost:  # traced arrays of a model that was merged from a plain state are not padded yet
            self.params = [_as_stored(x, placement) for x, placement in zip(self.params, self.placements, strict=True)]
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
        found = []
        for path, variable in params:
            module, relative = _module_around(self._parts, path)
            found.append((variable, unit_of(module), relative))
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
        check_axes_are_placed(self._parts.graph[0], placed, unit.mesh)
        unplanned = []
        for i, (path, variable) in enumerate(self._parts.params):
            is_argument = path[0] != 0
            if i not in planned and not is_argument and holds_array(variable) and not is_key(raw(variable)):
                unplanned.append(dotted(path[1:]))
        warn_of_unplanned(unplanned, self.where)

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
        arguments = self._parts.arguments.live(live.args, live.kwargs)
        with during(_names, _names_inside(live.module, self._path)):
            out = self._parts.method(live.module, *live.args, **live.kwargs)
        changed = before.changed(live, self.where)
        changes = [(path, v) for path, v in changed if not isinstance(v, nnx.Param)]
        passed = [(path, v) for path, v in changed if isinstance(v, nnx.Param)]
        results = border.results(out, arguments, self.location)
        leaves, of_results = _divided(results.leaves)
        changed_arguments = self._parts.arguments.changes(arguments, self.location)
        form = None if changed_arguments is None else changed_arguments.form
        in_arguments, of_arguments = _divided([] if changed_arguments is None else changed_arguments.leaves)
        state, state_tree = jax.tree.flatten([raw(v) for _, v in changes])
        # Equal calls share the outcome: it must hold no array of this trace, which ends here.
        empty = [(path, v.replace(None)) for path, v in changes]
        self.result = Outcome(results.form, of_results, empty, state_tree, form, of_arguments)
        old, new = [before.values.get(path) for path, _ in passed], [raw(v) for _, v in passed]
        self._written = [path for path, _ in passed]
        self.written = [f"{self.location}: {dotted(path[1:])}" for path in self._written]
        unlike = [place for place, x, y in zip(self.written, old, new, strict=True) if not _have_one_form(x, y)]
        if unlike:
            raise _parameter_written(
                unlike,
                why="it is new, or has another shape than before the call.",
                do="make every parameter in the model's __init__, in the form that the call gives it; or, if the first"
                " call makes it:\nmodel(x)  # once, the plain model, before js.fully_shard",
            )
        return leaves, [*state, *in_arguments, *old, *new]

    def keep_written(self, numbers: Sequence[int]) -> None:
        """Makes some of the `written` parameters results: the call has changed them, not only passed them on."""
        self.result = dataclasses.replace(self.result, written=tuple(self._written[i] for i in numbers))

    def without_passed(self, outs: Sequence[Any]) -> list[Any]:
        """The outputs of a run of `body` without a trace of its own, with the parameters that it has changed."""
        n = len(self.written)
        if not n:
            return list(outs)
        pairs = list(zip(outs[-2 * n : -n], outs[-n:], strict=True))
        stored = [self._stored(path) for path in self._written]
        is_changed = lambda i, old, new: new is not old and new.dtype == stored[i].dtype and not parameters_are_fixed()
        numbers = [i for i, (old, new) in enumerate(pairs) if is_changed(i, old, new)]
        self.keep_written(numbers)
        return [*outs[: -2 * n], *(pairs[i][1] for i in numbers)]

    def finish(self, outs: Sequence[Any], result: "Outcome") -> Any:
        """Writes state back to the caller's objects, and returns the method's result."""
        arrays = iter(outs)
        leaves = _joined(result.of_results, arrays)
        state = list(itertools.islice(arrays, result.state_tree.num_leaves))
        values = jax.tree.unflatten(result.state_tree, state)
        self._parts.write_back([(path, v.replace(x)) for (path, v), x in zip(result.changes, values, strict=True)])
        if result.arguments is not None:
            self._parts.arguments.write(result.arguments, _joined(result.of_arguments, arrays))
        self._write_parameters(dict(zip(result.written, arrays, strict=True)))
        return self._parts.arguments.result(result.results, leaves)

    def _write_parameters(self, values: Mapping[Path, Any]) -> None:
        """Writes parameters that the call has changed, as Flax's WeightNorm does; outside the model in their places."""
        if not values:
            return
        is_outermost = region_mesh() is None
        if is_outermost:
            self._check_written(values)
        variables, placements = dict(self._parts.params), dict(zip(self._planned_paths, self.placements, strict=True))
        for path, x in values.items():
            module, _ = _module_around(self._parts, path)
            unit = unit_of(module)
            if is_outermost and unit is not None and path in placements:
                x = stored_array(x, placements[path], unit.mesh)
            variables[path].set_raw_value(x)

    @property
    def _planned_paths(self) -> list[Path]:
        return [self._parts.params[i][0] for i in self._planned]

    def _check_written(self, values: Mapping[Path, Any]) -> None:
        """Raises for parameters that would lose digits, or that further microbatches would not see."""
        places = {path: f"{self.where}: {dotted(path[1:])}" for path in values}
        rounded = [f"{places[path]}  {text}" for path, x in values.items() if (text := self._rounding(path, x))]
        if rounded:
            raise _parameter_written(
                rounded,
                why="the call has a rounded copy of the parameter: written back, it would lose the other digits of the"
                " stored one at each step.",
                do="js.fully_shard(model.layer, mesh=mesh)  # first, the layer that writes, with no mixed_precision",
            )
        if parameters_are_fixed():
            raise _parameter_written(
                [*places.values()],
                why="the microbatches of a step share their parameters, and this one would be that of the next.",
                do="js.value_and_grad(loss_fn, accumulate=1)",
            )

    def _rounding(self, path: Path, written: Any) -> str:
        """In which dtype a written parameter was read or computed; empty if in the one that it is stored in."""
        stored = str(self._stored(path).dtype)
        dtypes = [str(written.dtype)]
        placement = dict(zip(self._planned_paths, self.placements, strict=True)).get(path)
        if placement is not None:
            dtypes += [placement.gathered_dtype, placement.gather_wire or stored]
        other = next((dtype for dtype in dtypes if dtype != stored), "")
        return other and f"stored as {stored}, used as {other}"

    def _stored(self, path: Path) -> Any:
        return raw(dict(self._parts.params)[path])


def _have_one_form(x: Any, y: Any) -> bool:
    """Whether two values of a parameter are arrays of one shape."""
    return is_array(x) and is_array(y) and x.shape == y.shape


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results and changes of a call without the arrays: equal calls share it.

    Leaves are listed as one-tuples; None stands for an array.
    """

    results: border.Form
    of_results: Sequence[tuple | None]
    changes: Kept
    state_tree: Any
    arguments: border.Form | None  # after the method, if it changed something in them
    of_arguments: Sequence[tuple | None]
    written: tuple[Path, ...] = ()  # parameters, whose new values are the last outputs


def _divided(leaves: Sequence[Any]) -> tuple[list[Any], list[tuple | None]]:
    """The arrays among leaves, and the other leaves in their places."""
    return list(filter(is_array, leaves)), [None if is_array(x) else (x,) for x in leaves]


def _joined(static: Sequence[tuple | None], arrays: Iterator[Any]) -> list[Any]:
    return [next(arrays) if leaf is None else leaf[0] for leaf in static]


def _as_stored(x: Any, placement: Placement) -> Any:
    padding = Padding.of(placement)
    return x if padding is None or x.shape != placement.shape else padding.pad(x)


def _names_inside(module: nnx.Module, name: str) -> dict[Any, str]:
    """Paths of the inner units from the root, by id of their modules; by class, for the copies that a loop makes."""
    prefix, found = f"{name}/" if name else "", {}
    for path, unit in nested_units(module):
        if path:
            kind, found[id(unit)] = type(unit), prefix + dotted(path)
            found[kind] = numberless(found[id(unit)]) if kind in found else found[id(unit)]
    return found


def _module_around(parts: MethodCall, path: Path) -> tuple[Any, Path]:
    """Returns the module of a parameter, the called one or one among the arguments, and the path from there."""
    if path[0] == 0:
        return parts.graph[0], path[1:]
    return parts.graph[1][path[1]], path[2:]


def _member(parts: MethodCall, path: Path, variable: nnx.Variable) -> LeafPlan | None:
    """Returns how a parameter is placed, with the dtypes that follow from its value.

    None if it was added after the annotation, or has another size than was planned.
    """
    module, relative = _module_around(parts, path)
    unit = unit_of(module)
    member = None if unit is None else unit.by_path.get(relative)
    if member is None or not is_as_placed(variable, member.placement):
        return None
    return as_stored(member, raw(variable).dtype, lambda: units_in(module))


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
        _compat.write_past_home(v, x)
    try:
        yield
    finally:
        for v, old, x in held:
            if v.get_raw_value() is x:
                _compat.write_past_home(v, old)
