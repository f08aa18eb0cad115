"""A Linen model as an nnx model, so that plans, steps, evaluations, optimizers and checkpoints share their code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITTEN

from jshard.engine.context import in_plain_flax
from jshard.errors import AnnotationError
from jshard.linen.annotated_class import relaid
from jshard.linen.annotation import annotation_of
from jshard.linen.layout import Layout
from jshard.linen.parameters import as_arrays, flat, flat_params, is_box, nested, raw_of
from jshard.plans.memories import to_device
from jshard.plans.padding import Padding, store
from jshard.plans.policies import UnitPolicy
from jshard.plans.units import Path, attach, dotted, unit_of

_STATE = "batch_stats", "cache"  # a run updates them, requested or not


class _Calls:
    """Calls of a Linen module; with `mutable`, names of collections, a call also returns their new contents."""

    def __call__(self, *args: Any, mutable: str | Sequence[str] = (), **kwargs: Any) -> Any:
        return self._run("__call__", args, kwargs, _names(mutable))

    def _named(self, module: nn.Module, name: str) -> Any:
        """A method that the user wrote, or another attribute of the module."""
        if not callable(getattr(type(module), name, None)) or hasattr(nn.Module, name):
            return getattr(module, name)
        return lambda *args, mutable=(), **kwargs: self._run(name, args, kwargs, _names(mutable))

    def _run(self, name: str, args: tuple, kwargs: dict[str, Any], asked: tuple[str, ...]) -> Any:
        raise NotImplementedError


def _names(mutable: str | Sequence[str]) -> tuple[str, ...]:
    return (mutable,) if isinstance(mutable, str) else tuple(mutable)


class Initialising(_Calls):
    """A bound Linen module with all collections mutable, which a loss receives while its variables are created.

    `asked` receives the names of the collections that calls request, which are not state of the model.
    """

    def __init__(self, bound: nn.Module, asked: set[str]) -> None:
        self._bound, self._asked = bound, asked

    def __getattr__(self, name: str) -> Any:
        return self._named(self._bound, name)

    def _run(self, name: str, args: tuple, kwargs: dict[str, Any], asked: tuple[str, ...]) -> Any:
        self._asked |= set(asked) - set(_STATE)
        before = self._bound.variables
        out = getattr(self._bound, name)(*args, **kwargs)
        after = self._bound.variables
        return (out, {key: _since(before.get(key, {}), after.get(key, {})) for key in asked}) if asked else out


def _since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """A collection without the values sown by earlier calls: each call of a `LinenModel` starts empty."""
    old = dict(flat(before))
    is_sown = lambda path, value: isinstance(value, tuple) and isinstance(old.get(path), tuple)
    return nested((path, x[len(old[path]) :] if is_sown(path, x) else x) for path, x in flat(after))


# Evaluation of a Linen model: dropout off, statistics fixed, whatever the model sets in training.

_FIELDS = ("deterministic", "use_running_average")

# Part of jit's cache key: an nn.jit in the model must not reuse the trace of training.
_is_on = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def inference(is_on: bool) -> Iterator[None]:
    """Inside this context, a module's field `deterministic` or `use_running_average` is treated as True."""
    with contextlib.ExitStack() as stack:
        if is_on:
            stack.enter_context(_is_on(True))
            stack.enter_context(nn.intercept_methods(_intercept))
        yield


def _intercept(run: Callable, args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext) -> Any:
    module = context.module
    before = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.name in _FIELDS}
    if not before:
        return run(*args, **kwargs)
    args, kwargs = _without(before, context, args, kwargs)
    try:
        for name in before:
            object.__setattr__(module, name, True)
        return run(*args, **kwargs)
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


def _without(
    names: dict[str, Any], context: nn.module.InterceptorContext, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments with these set to None: Flax's modules refuse a setting that is given twice."""
    method = getattr(type(context.module), context.method_name, None) or type(context.module).__call__
    given = inspect.signature(method).bind_partial(context.module, *args, **kwargs)
    for name in names.keys() & given.arguments.keys():
        given.arguments[name] = None
    return given.args[1:], given.kwargs


# The model.

_PARAMS = "params"
_KINDS: dict[str, type[nnx.Variable]] = {_PARAMS: nnx.Param, "batch_stats": nnx.BatchStat, "cache": nnx.Cache}
_STREAMS = (_PARAMS, "dropout")  # of keys; Flax uses the first for any other stream


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of a variable in Linen's collections, its boxes, and its name in its nnx module."""

    collection: str
    path: Path
    boxes: Any  # a treedef
    name: str


class _Part(nnx.Module):
    """The variables of a Linen module inside the model."""


class LinenModel(_Calls, nnx.Module):
    """A Linen model that holds its variables. It is called like an nnx model or a bound Linen module.

    Its methods and fields are those of the Linen module. Each call has its own random keys, counted in `rngs`. With
    `deterministic`, dropout is off and statistics are fixed; see `jshard.recipes.linen_model`.

    Args:
        module: the annotated Linen module, whose parameters are known from `init`.
        collections: its variables; arrays or shapes.
        rngs: the source of the keys of its calls.
    """

    def __init__(self, module: nn.Module, collections: Mapping[str, Any], rngs: nnx.Rngs) -> None:
        self.rngs, self.deterministic = rngs, False
        annotation = annotation_of(module)
        assert annotation is not None, "checked by the caller"
        _check(module, collections)
        layout = annotation.layout
        places = _hold(self, collections, {path: unit.kind for path, unit in layout.records.items() if path})
        params_tree = jax.tree.structure(collections.get(_PARAMS, {}), is_leaf=is_box)
        self._linen = _Linen(module, layout, places, params_tree)
        for path, unit in layout.records.items():
            attach(_part(self, path), unit, _as_it_is)
        for place in places:
            _store_padded(self._variable(place), layout, place)

    def __getattr__(self, name: str) -> Any:
        linen = vars(self).get("_linen")
        if linen is None or name.startswith("_"):
            raise AttributeError(name)
        return self._named(linen.module, name)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables in Linen's form, by collection."""
        raw = lambda place: jax.tree.leaves(self._variable(place).get_raw_value())
        leaf = lambda place: jax.tree.unflatten(place.boxes, raw(place))
        params = [leaf(place) for place in self._linen.places if place.collection == _PARAMS]
        states = [place for place in self._linen.places if place.collection != _PARAMS]
        found = nested(((place.collection, *place.path), leaf(place)) for place in states)
        return {_PARAMS: jax.tree.unflatten(self._linen.params_tree, params)} | found

    def _run(self, name: str, args: tuple, kwargs: dict[str, Any], asked: tuple[str, ...]) -> Any:
        states = [] if self.deterministic else self._linen.states
        module = self._linen.module_for(self._policies())
        call = nn.apply(lambda bound: getattr(bound, name)(*args, **kwargs), module, mutable=[*states, *asked] or False)
        variables = to_device(self.variables) if in_plain_flax() else self.variables
        with inference(self.deterministic):
            out: Any = call(variables, rngs=self._keys())
        if not states and not asked:
            return out
        out, changed = out
        self._take({key: tree for key, tree in changed.items() if key in states})
        return (out, {key: changed.get(key, {}) for key in asked}) if asked else out

    def _keys(self) -> dict[str, jax.Array]:
        """Keys for a call; outside training the counters do not advance, so that a call changes nothing."""
        rngs = nnx.clone(self.rngs) if self.deterministic else self.rngs
        return {stream: rngs() for stream in _STREAMS}

    def _take(self, changed: Mapping[str, Any]) -> None:
        held = {(place.collection, *place.path): place for place in self._linen.places}
        found = {(name, *path): leaf for name, tree in changed.items() for path, leaf in flat(tree)}
        if new := sorted(dotted(key) for key in found.keys() - held.keys()):
            raise AnnotationError(
                "A call of a Linen model creates variables that its init did not create.",
                where=[f"{type(self._linen.module).__name__}: {path}" for path in new],
                why="the state of a run has the variables created by init; a step cannot add others.",
                do="create them in init too: without a condition on self.is_initializing().",
            )
        for key, leaf in found.items():
            self._variable(held[key]).set_raw_value(as_arrays(raw_of(leaf)))

    def _variable(self, place: _Place) -> nnx.Variable:
        return vars(_part(self, place.path[:-1]))[place.name]

    def _policies(self) -> dict[Path, UnitPolicy]:
        """The current settings of the units, from their records."""
        records = ((path, unit_of(_part(self, path))) for path in self._linen.layout.records)
        return {path: record.policy for path, record in records if record is not None}


@dataclasses.dataclass(eq=False)
class _Linen:
    """The parts of a `LinenModel` except its arrays; a constant of its graph."""

    module: nn.Module  # the annotated one
    layout: Layout
    places: tuple[_Place, ...]  # parameters first, in the order of `params_tree`
    params_tree: Any  # a treedef, with a leaf for each box
    _modules: dict[Any, nn.Module] = dataclasses.field(default_factory=dict)

    @property
    def states(self) -> list[str]:
        """The collections that a call in training may change."""
        return sorted({place.collection for place in self.places} - {_PARAMS})

    def module_for(self, policies: Mapping[Path, UnitPolicy]) -> nn.Module:
        """The module whose units have these settings."""
        if in_plain_flax():
            return _plain_flax(self.module, policies)
        key = tuple(policies.items())
        if key not in self._modules:
            self._modules[key] = relaid(self.module, lambda layout: layout.with_policies(policies))
        return self._modules[key]


def _plain_flax(module: nn.Module, policies: Mapping[Path, UnitPolicy]) -> nn.Module:
    """The unannotated module, for a comparison with the compiler's own partitioning."""
    annotation = annotation_of(module)
    assert annotation is not None
    plain = UnitPolicy().mixed_precision
    own = [path for path, policy in policies.items() if policy.remat != "none" or policy.mixed_precision != plain]
    if own:
        raise AnnotationError(
            "A Linen model can be compared with plain Flax only in its own dtypes.",
            where=[f"{annotation.base.__name__}: {dotted(path)}" for path in own],
            why="mixed_precision and remat of the annotation are jshard's; without it the model has neither.",
            do="leave gspmd out of --compare, or set both in the model: nn.Dense(..., dtype=jnp.bfloat16), nn.remat.",
        )
    return annotation.plain(module)


def _as_it_is(module: nnx.Module, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """The route of a `LinenModel`; the Linen module has another."""
    return method(module, *args, **kwargs)


def _hold(model: LinenModel, collections: Mapping[str, Any], kinds: Mapping[Path, str]) -> tuple[_Place, ...]:
    """Puts the variables into modules of the model, which it creates."""
    for path in kinds:
        _part(model, path, kinds)
    places = []
    for collection, path, leaf in _variables(collections):
        part, name = vars(_part(model, path[:-1], kinds)), path[-1]
        name = f"{collection}:{name}" if name in part else name  # Linen has a namespace for each collection
        setattr(_part(model, path[:-1]), name, _KINDS.get(collection, nnx.Variable)(as_arrays(raw_of(leaf))))
        places.append(_Place(collection, path, jax.tree.structure(leaf), name))
    return tuple(places)


def _store_padded(variable: nnx.Variable, layout: Layout, place: _Place) -> None:
    """Marks a parameter that is stored padded, so that an optimizer sees the logical one."""
    leaf = layout.leaves.get(place.path) if place.collection == _PARAMS else None
    padding = None if leaf is None else Padding.of(leaf.placement)
    if padding is not None:
        store(variable, padding, variable.get_raw_value())


def _variables(collections: Mapping[str, Any]) -> Iterator[tuple[str, Path, Any]]:
    for collection in sorted(collections, key=lambda name: (name != _PARAMS, name)):
        leaves = flat_params if collection == _PARAMS else flat
        for path, leaf in leaves(collections[collection]):
            yield collection, path, leaf


def _part(model: nnx.Module, path: Path, kinds: Mapping[Path, str] | None = None) -> nnx.Module:
    """The module at a path; with `kinds`, which names the classes of units, missing modules are created."""
    for i, key in enumerate(path):
        if kinds is not None and key not in vars(model):
            setattr(model, key, _part_class(kinds.get(path[: i + 1], "Part"))())
        model = vars(model)[key]
    return model


@functools.cache
def _part_class(kind: str) -> type[_Part]:
    """A class with the name of the Linen class: units of one class are layers of one kind."""
    metaclass: Any = type(_Part)
    return metaclass(kind, (_Part,), {"__module__": __name__})


def _check(module: nn.Module, collections: Mapping[str, Any]) -> None:
    if OVERWRITTEN in collections:
        raise AnnotationError(
            "A run does not update the scales of fp8 products.",
            where=f"{type(module).__name__}: collection {OVERWRITTEN}",
            why="their gradients are their new values, and an optimizer would take them for gradients.",
            do="write your own loop: docs/linen.md, 3. Train, with flax.linen.fp8_ops and its TrainState.",
        )
    taken = {"rngs", "deterministic", "variables", "_linen"}
    used = sorted({str(path[0]) for _, path, _ in _variables(collections)} & taken)
    if used:
        raise AnnotationError(
            "A name in a Linen model is already used.",
            where=[f"{type(module).__name__}: {name}" for name in used],
            why=f"the model of a run has its own attributes: {', '.join(sorted(taken))}.",
            do=f'rename it: name="{used[0]}_0"',
        )
