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

from jshard._types import PyTree, TreeDef
from jshard.engine.context import in_plain_flax
from jshard.errors import AnnotationError
from jshard.linen.annotated_class import relaid
from jshard.linen.annotation import annotation_of
from jshard.linen.layout import Layout
from jshard.linen.parameters import as_arrays, flat, flat_params, is_box, nested, raw_of
from jshard.plans.memories import to_device
from jshard.plans.padding import Padding, store
from jshard.plans.policies import UnitPolicy
from jshard.plans.remat import AUTO, NONE
from jshard.plans.units import Method, Path, attach, dotted, located, unit_of

_STATE = "batch_stats", "cache"  # a run updates them, requested or not


class _Calls:
    """Calls of a Linen module; with `mutable`, names of collections, a call also returns their new contents."""

    def __call__(self, *args: object, mutable: str | Sequence[str] = (), **kwargs: object) -> Any:
        return self._run("__call__", args, kwargs, _names(mutable))

    def _named(self, module: nn.Module, name: str) -> object:
        """Returns a method that the user wrote, or another attribute of the module."""
        # Fields and Flax's own methods, such as `init`, are no calls of the model.
        if not callable(getattr(type(module), name, None)) or hasattr(nn.Module, name):
            return getattr(module, name)

        def run(*args: object, mutable: str | Sequence[str] = (), **kwargs: object) -> Any:
            return self._run(name, args, kwargs, _names(mutable))

        return run

    def _run(self, name: str, args: tuple, kwargs: dict[str, object], requested: tuple[str, ...]) -> object:
        """Runs a method; with names of requested collections, returns also their new contents."""
        raise NotImplementedError


def _names(mutable: str | Sequence[str]) -> tuple[str, ...]:
    return (mutable,) if isinstance(mutable, str) else tuple(mutable)


class Initialising(_Calls):
    """A bound Linen module with all collections mutable, which a loss receives while its variables are created.

    `requested` receives the names of the collections that calls request, which are not state of the model.
    """

    def __init__(self, bound: nn.Module, requested: set[str]) -> None:
        self._bound = bound
        self._requested = requested

    def __getattr__(self, name: str) -> Any:
        return self._named(self._bound, name)

    def _run(self, name: str, args: tuple, kwargs: dict[str, object], requested: tuple[str, ...]) -> object:
        self._requested |= set(requested) - set(_STATE)
        # All calls of the loss are on one bound module, whose `sow` appends to what earlier calls sowed.
        before = self._bound.variables
        result = getattr(self._bound, name)(*args, **kwargs)
        if not requested:
            return result
        after = self._bound.variables
        return result, {key: _since(before.get(key, {}), after.get(key, {})) for key in requested}


def _since(before: Mapping[str, PyTree], after: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Returns a collection without the values sown by earlier calls: each call of a `LinenModel` starts empty."""
    earlier = dict(flat(before))
    leaves = []
    for path, value in flat(after):
        earlier_value = earlier.get(path)
        if isinstance(value, tuple) and isinstance(earlier_value, tuple):  # `sow` appends to tuples
            value = value[len(earlier_value) :]
        leaves.append((path, value))
    return nested(leaves)


# Evaluation of a Linen model: dropout off, statistics fixed, whatever the model sets in training.

_FIELDS = ("deterministic", "use_running_average")

# Part of jit's cache key: an nn.jit in the model must not reuse the trace of training.
_is_on = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def inference(is_on: bool) -> Iterator[None]:
    """Sets a module's field `deterministic` or `use_running_average` to True while it is called inside this context."""
    with contextlib.ExitStack() as stack:
        if is_on:
            stack.enter_context(_is_on(True))
            stack.enter_context(nn.intercept_methods(_intercept))
        yield


def _intercept(run: Callable, args: tuple, kwargs: dict[str, object], context: nn.module.InterceptorContext) -> object:
    module = context.module
    before = {}
    for field in dataclasses.fields(module):
        if field.name in _FIELDS:
            before[field.name] = getattr(module, field.name)
    if not before:
        return run(*args, **kwargs)
    args, kwargs = _without(before, context, args, kwargs)
    try:
        for name in before:
            # Past the frozen dataclass; the same object is used again in training.
            object.__setattr__(module, name, True)
        return run(*args, **kwargs)
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


def _without(
    names: dict[str, object], context: nn.module.InterceptorContext, args: tuple, kwargs: dict[str, object]
) -> tuple[tuple, dict[str, object]]:
    """Returns the arguments with these set to None: Flax's modules refuse a setting that is given twice."""
    method = getattr(type(context.module), context.method_name, None) or type(context.module).__call__
    bound = inspect.signature(method).bind_partial(context.module, *args, **kwargs)
    for name in names.keys() & bound.arguments.keys():
        # None is Flax's own default of such an argument: then the field counts.
        bound.arguments[name] = None
    return bound.args[1:], bound.kwargs


# The model.

_PARAMS = "params"
_KINDS: dict[str, type[nnx.Variable]] = {_PARAMS: nnx.Param, "batch_stats": nnx.BatchStat, "cache": nnx.Cache}
_STREAMS = (_PARAMS, "dropout")  # of keys; Flax uses the first for any other stream


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of a variable in Linen's collections, its boxes, and its name in its nnx module."""

    collection: str
    path: Path
    boxes: TreeDef
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

    def __init__(self, module: nn.Module, collections: Mapping[str, PyTree], rngs: nnx.Rngs) -> None:
        # Also a part of the state: the counts of keys are saved and restored with the model.
        self.rngs = rngs
        self.deterministic = False
        annotation = annotation_of(module)
        assert annotation is not None, "checked by the caller"
        _check(module, collections)
        layout = annotation.layout
        unit_kinds = {path: unit.kind for path, unit in layout.records.items() if path}
        # Before the records: `attach` needs the modules that this creates.
        places = _create_variables(self, collections, unit_kinds)
        params_tree = jax.tree.structure(collections.get(_PARAMS, {}), is_leaf=is_box)
        self._linen = _Linen(module, layout, places, params_tree)
        # The records of the Linen module, where plans, reports and `revise` look for those of an nnx model.
        for path, unit in layout.records.items():
            attach(_part(self, path), unit, _run_as_it_is)
        for place in places:
            _store_padded(self._variable(place), layout, place)

    def __getattr__(self, name: str) -> Any:
        # By `vars`: before `__init__` has set it, `self._linen` would come here again, without an end.
        linen = vars(self).get("_linen")
        if linen is None or name.startswith("_"):
            raise AttributeError(name)
        return self._named(linen.module, name)

    @property
    def variables(self) -> dict[str, PyTree]:
        """The variables in Linen's form, by collection."""
        params = []
        states = []
        for place in self._linen.places:
            # Raw, and so padded: the boxes around them say so.
            arrays = jax.tree.leaves(self._variable(place).get_raw_value())
            leaf = jax.tree.unflatten(place.boxes, arrays)
            if place.collection == _PARAMS:
                params.append(leaf)
            else:
                states.append(((place.collection, *place.path), leaf))
        return {_PARAMS: jax.tree.unflatten(self._linen.params_tree, params), **nested(states)}

    def _run(self, name: str, args: tuple, kwargs: dict[str, object], requested: tuple[str, ...]) -> object:
        # In an evaluation no collection is mutable, so that none can change.
        states = [] if self.deterministic else self._linen.states
        module = self._linen.module_for(self._policies())
        # With False, Flax returns the result alone; with an empty list it would return a pair.
        mutable = [*states, *requested] or False
        call = nn.apply(lambda bound: getattr(bound, name)(*args, **kwargs), module, mutable=mutable)
        variables = to_device(self.variables) if in_plain_flax() else self.variables
        with inference(self.deterministic):
            result: Any = call(variables, rngs=self._keys())
        if not mutable:
            return result
        result, changed = result
        # Requested collections, such as sown values, go to the caller and not into the state.
        self._store_changes({key: tree for key, tree in changed.items() if key in states})
        if not requested:
            return result
        return result, {key: changed.get(key, {}) for key in requested}

    def _keys(self) -> dict[str, jax.Array]:
        """Returns keys for a call; outside training the counters do not advance, so that a call changes nothing."""
        rngs = nnx.clone(self.rngs) if self.deterministic else self.rngs
        return {stream: rngs() for stream in _STREAMS}

    def _store_changes(self, changed: Mapping[str, PyTree]) -> None:
        """Writes the collections that a call has changed into the variables."""
        places = {(place.collection, *place.path): place for place in self._linen.places}
        leaves = {}
        for name, tree in changed.items():
            for path, leaf in flat(tree):
                leaves[name, *path] = leaf
        new = sorted(leaves.keys() - places.keys(), key=dotted)
        if new:
            raise AnnotationError(
                "A call of a Linen model creates variables that its init did not create.",
                where=located(type(self._linen.module).__name__, new),
                why="the state of a run has the variables created by init; a step cannot add others.",
                do="create them in init too: without a condition on self.is_initializing().",
            )
        for key, leaf in leaves.items():
            self._variable(places[key]).set_raw_value(as_arrays(raw_of(leaf)))

    def _variable(self, place: _Place) -> nnx.Variable:
        return vars(_part(self, place.path[:-1]))[place.name]

    def _policies(self) -> dict[Path, UnitPolicy]:
        """Returns the current settings of the units, from their records, which `revise` may have changed."""
        policies = {}
        for path in self._linen.layout.records:
            record = unit_of(_part(self, path))
            if record is not None:
                policies[path] = record.policy
        return policies


@dataclasses.dataclass(eq=False)
class _Linen:
    """The parts of a `LinenModel` except its arrays; a constant of its graph."""

    module: nn.Module  # the annotated one
    layout: Layout
    places: tuple[_Place, ...]  # parameters first, in the order of `params_tree`
    params_tree: TreeDef  # with a leaf for each box
    _modules: dict[tuple[tuple[Path, UnitPolicy], ...], nn.Module] = dataclasses.field(default_factory=dict)

    @property
    def states(self) -> list[str]:
        """The collections that a call in training may change."""
        return sorted({place.collection for place in self.places} - {_PARAMS})

    def module_for(self, policies: Mapping[Path, UnitPolicy]) -> nn.Module:
        """Returns the module whose units have these settings: always the same, as JAX's caches know it by identity."""
        if in_plain_flax():
            return _plain_flax(self.module, policies)
        # Policies are frozen values, so equal settings find the module made before.
        key = tuple(policies.items())
        if key not in self._modules:
            self._modules[key] = relaid(self.module, lambda layout: layout.with_policies(policies))
        return self._modules[key]


def _plain_flax(module: nn.Module, policies: Mapping[Path, UnitPolicy]) -> nn.Module:
    """Returns the unannotated module, for a comparison with the compiler's own partitioning."""
    annotation = annotation_of(module)
    assert annotation is not None
    default = UnitPolicy().mixed_precision
    changed = []
    for path, policy in policies.items():
        if policy.remat not in (AUTO, NONE) or policy.mixed_precision != default:
            changed.append(path)
    if changed:
        raise AnnotationError(
            "A Linen model can be compared with plain Flax only in its own dtypes.",
            where=located(annotation.base.__name__, changed),
            why="mixed_precision and remat of the annotation are jshard's; without it the model has neither.",
            do="leave gspmd out of --compare, or set both in the model: nn.Dense(..., dtype=jnp.bfloat16), nn.remat.",
        )
    return annotation.plain(module)


def _run_as_it_is(module: nnx.Module, method: Method, args: tuple, kwargs: dict[str, object]) -> object:
    """Runs a method of a `LinenModel` as plain Flax: the Linen module inside it calls the engine."""
    return method(module, *args, **kwargs)


def _create_variables(
    model: LinenModel, collections: Mapping[str, PyTree], unit_kinds: Mapping[Path, str]
) -> tuple[_Place, ...]:
    """Puts the variables into modules of the model, which it creates."""
    for path in unit_kinds:
        _part(model, path, unit_kinds)
    places = []
    for collection, path, leaf in _variables(collections):
        part = _part(model, path[:-1], unit_kinds)
        name = path[-1]
        if name in vars(part):  # Linen has a namespace for each collection
            name = f"{collection}:{name}"
        variable_class = _KINDS.get(collection, nnx.Variable)
        setattr(part, name, variable_class(as_arrays(raw_of(leaf))))
        # The structure has the boxes, without the array: `variables` puts them around it again.
        places.append(_Place(collection, path, jax.tree.structure(leaf), name))
    return tuple(places)


def _store_padded(variable: nnx.Variable, layout: Layout, place: _Place) -> None:
    """Marks a parameter that is stored padded, so that an optimizer sees the logical one."""
    if place.collection != _PARAMS:
        return
    leaf = layout.leaves.get(place.path)
    if leaf is None:  # a random key
        return
    padding = Padding.of(leaf.placement)
    if padding is not None:
        store(variable, padding, variable.get_raw_value())


def _variables(collections: Mapping[str, PyTree]) -> Iterator[tuple[str, Path, object]]:
    """Yields the variables in collections, parameters first, each with its collection and path."""
    for path, leaf in flat_params(collections.get(_PARAMS, {})):
        yield _PARAMS, path, leaf
    for collection in sorted(collections.keys() - {_PARAMS}):
        for path, leaf in flat(collections[collection]):
            yield collection, path, leaf


def _part(model: nnx.Module, path: Path, kinds: Mapping[Path, str] | None = None) -> nnx.Module:
    """Returns the module at a path; with `kinds`, which names the classes of units, missing modules are created."""
    for i, key in enumerate(path):
        if kinds is not None and key not in vars(model):
            setattr(model, key, _part_class(kinds.get(path[: i + 1], "Part"))())
        model = vars(model)[key]
    return model


@functools.cache
def _part_class(kind: str) -> type[_Part]:
    """Returns a class with the name of the Linen class: units of one class are layers of one kind."""
    # Made by calling the metaclass, as the class statement does: a module of NNX needs it.
    metaclass: Any = type(_Part)
    return metaclass(kind, (_Part,), {"__module__": __name__})


def _check(module: nn.Module, collections: Mapping[str, PyTree]) -> None:
    if OVERWRITTEN in collections:
        raise AnnotationError(
            "A run does not update the scales of fp8 products.",
            where=f"{type(module).__name__}: collection {OVERWRITTEN}",
            why="their gradients are their new values, and an optimizer would take them for gradients.",
            do="write your own loop: docs/linen.md, 3. Train, with flax.linen.fp8_ops and its TrainState.",
        )
    taken = {"rngs", "deterministic", "variables", "_linen"}
    first_keys = {str(path[0]) for _, path, _ in _variables(collections)}
    used = sorted(first_keys & taken)
    if used:
        raise AnnotationError(
            "A name in a Linen model is already used.",
            where=[f"{type(module).__name__}: {name}" for name in used],
            why=f"the model of a run has its own attributes: {', '.join(sorted(taken))}.",
            do=f'rename it: name="{used[0]}_0"',
        )
