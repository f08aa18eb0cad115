"""Annotating a Linen module: a copy whose calls are passed to the engine, as the outermost call or as a unit's call.

A Linen module is a frozen dataclass that is created before its parameters. The annotation is therefore a set of
settings and choices; the layout is computed when `init` or `apply` is traced, and stored with the annotation.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import flax.linen as nn
import jax
from flax.linen.transforms import get_module_scopes
from jax import lax
from jax.sharding import NamedSharding

from jshard import _compat
from jshard._compat import LINEN_CALL, LINEN_REGISTER
from jshard.engine.blame import inside_annotated_call
from jshard.engine.context import during, in_global_view
from jshard.engine.region import run_call
from jshard.errors import AnnotationError, CallError
from jshard.linen.call import (
    PARAMS,
    FreeFunction,
    Lifted,
    LinenCall,
    call_lifted,
    described,
    flat,
    flat_params,
    placeable,
)
from jshard.linen.layout import Layout, Leaf, Seen, SeenUnit, is_padded, warn_of_stacks
from jshard.plans import call_checks, checks, replication
from jshard.plans.array_paths import key_texts
from jshard.plans.mesh import is_concrete
from jshard.plans.placement import PlacementPolicy
from jshard.plans.plan import root_forgotten
from jshard.plans.policies import UnitPolicy
from jshard.plans.units import LogicalOptimizer, Path, Unit, UnitChoice, chosen, dotted

L = TypeVar("L", bound=nn.Module)

_OWN_SETTINGS = ("reshard_after_forward", "mixed_precision", "remat", "prefetch", "placement")
_ROOT = "_jshard_root"  # of a submodule reached from outside: the bound annotated model
_OWN_PLACEMENT = ("shard_dim", "min_size", "offload", "gathered")


@dataclasses.dataclass(eq=False)
class Annotation:
    """The record of `fully_shard` for a Linen module, and the layouts found since."""

    base: type[nn.Module]  # the user's own class
    root: Unit  # without parameters
    choices: tuple[tuple[UnitChoice, Unit], ...]  # which submodules are units, each with the record of its units
    layouts: dict[Any, Layout] = dataclasses.field(default_factory=dict)  # from `init`, by the parameters' shapes
    specs: dict[tuple[Path, tuple[int, ...]], tuple[Any, ...]] = dataclasses.field(default_factory=dict)  # from `init`
    latest: Layout | None = None

    @property
    def gathers_all(self) -> bool:
        """Whether every unit is gathered."""
        return all(record.placement.gathered for record in (self.root, *(record for _, record in self.choices)))

    def match(self, path: Path, module: nn.Module) -> int | None:
        """The first choice that a submodule matches; that choice makes it a unit."""
        found = (i for i, (choice, _) in enumerate(self.choices) if chosen(choice, dotted(path), module))
        return next(found, None) if path else None

    def layout_of(self, leaves: Mapping[Path, Leaf], survey: Callable[[], Seen], *, keep: bool = False) -> Layout:
        """The layout of these parameters: the one found by `init`, or else the one found by a survey.

        `init` reaches every submodule with parameters. A survey of another call is valid only for that call: another
        method may reach other units. Parameters without the boxes of `init` are placed as if they had them. Those that
        were cast since `init` have its layout, with the dtypes that follow from the new ones.
        """
        if keep:
            self.specs |= {(path, leaf.shape): leaf.spec for path, leaf in leaves.items()}
        else:
            leaves = {path: self._boxed(path, leaf) for path, leaf in leaves.items()}
        key = frozenset(leaves.items())
        found = None if keep else self.layouts.get(key) or self._recast(leaves)
        if found is None:
            found = Layout.make(dataclasses.replace(self.root, kind=self.base.__name__), survey(), leaves)
        if keep:
            self.layouts[key] = found
        self.latest = found
        return found

    def _recast(self, leaves: Mapping[Path, Leaf]) -> Layout | None:
        """Returns the layout that `init` found for these parameters in other dtypes; None without one."""
        without_dtypes = lambda items: {(path, dataclasses.replace(leaf, dtype="")) for path, leaf in items}
        key = without_dtypes(leaves.items())
        for known, layout in self.layouts.items():
            if without_dtypes(known) == key:
                recast = layout.with_dtypes({path: leaf.dtype for path, leaf in leaves.items()})
                self.layouts[frozenset(leaves.items())] = recast
                return recast
        return None

    def plain(self, module: nn.Module) -> nn.Module:
        """An annotated module without its annotation."""
        fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init}
        return self.base(**(fields | {"parent": None}))

    def _boxed(self, path: Path, leaf: Leaf) -> Leaf:
        return leaf if any(leaf.spec) else dataclasses.replace(leaf, spec=self.specs.get((path, leaf.shape), leaf.spec))

    @property
    def layout(self) -> Layout:
        """The latest layout; an error if the parameters are not known yet."""
        return self.latest or self._unknown()

    def _unknown(self) -> NoReturn:
        raise AnnotationError(
            "The parameters of a Linen module are not known yet.",
            where=self.base.__name__,
            why="init creates them from its inputs, and it has not been called since fully_shard.",
            do="jax.eval_shape(model.init, jax.random.key(0), x)  # computes nothing",
        )

    def layout_by_init(self, leaves: Mapping[Path, Leaf]) -> Layout | None:
        """The layout found by `init` for these parameters; None if it was not traced."""
        return self.layouts.get(frozenset((path, self._boxed(path, leaf)) for path, leaf in leaves.items()))

    def known_layout(self, leaves: Mapping[Path, Leaf]) -> Layout:
        """The layout found by `init` for these parameters; an error if it was not traced."""
        return self.layout_of(leaves, self._unknown)


def annotation_of(model: Any) -> Annotation | None:
    """The annotation of a Linen module; None for any other object."""
    return getattr(type(model), "_jshard_linen", None)


def annotation_for(model: Any) -> Annotation:
    """The annotation of a Linen module, which must have one."""
    annotation = annotation_of(model)
    if annotation is None:
        raise root_forgotten(model)
    return annotation


def annotated(module: L, root: Unit, units: Any, unit: Unit) -> L:
    """A copy of the module whose calls go through `call_annotated`."""
    _check(module, unit.placement)
    optimizer = LogicalOptimizer("tx = js.shard_optimizer(model, tx)  # around the whole chain")
    root, unit = (dataclasses.replace(one, optimizer=optimizer) for one in (root, unit))
    annotation = Annotation(type(module), root, tuple(_choices(units, unit)))
    return _annotated_again(module.clone(), annotation)  # type: ignore[return-value]


def relaid(module: nn.Module, changed: Callable[[Layout], Layout]) -> nn.Module:
    """An annotated module with changed layouts: other settings for the units found so far."""
    annotation = annotation_for(module)
    assert annotation.latest is not None, "its parameters are known"
    layouts = {key: changed(layout) for key, layout in annotation.layouts.items()}
    again = dataclasses.replace(annotation, layouts=layouts, latest=changed(annotation.latest))
    return _annotated_again(annotation.plain(module), again)


def _annotated_class(annotation: Annotation) -> type[nn.Module]:
    base = annotation.base

    @nn.nowrap
    def routed(self: nn.Module, *args: Any) -> Any:
        return call_annotated(self, getattr(base, LINEN_CALL), *args)

    def through(method: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(method)(lambda self, *args, **kwargs: call_annotated(self, method, *args, **kwargs))

    body: dict[str, Any] = {
        **{name: through(method) for name, method in _compat.transformed_methods(base).items()},
        **_kept_of_class(base),
        **{name: _with_function(getattr(base, name)) for name in ("apply", "init_with_output")},
        LINEN_REGISTER: _linking(base),
        "_jshard_linen": annotation,
        "_jshard_plan": staticmethod(lambda wrt: annotation.layout.plan_for(wrt)),
        LINEN_CALL: routed,
        "__reduce__": nn.nowrap(lambda self: (_annotated_again, (annotation.plain(self), annotation))),
    }
    return type(base.__name__, (base,), body)


def _with_function(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Flax's `apply` for which `method=` may be a function that is no method of the class: it is one call, too."""

    @nn.nowrap
    @functools.wraps(apply)
    def run(self: nn.Module, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        function = getattr(method, "__func__", method)
        if callable(function) and not _compat.is_method(function) and inspect.signature(function).parameters:
            method = functools.partial(call_function, FreeFunction(function))
        return apply(self, *args, method=method, **kwargs)

    return run


def _linking(base: type[nn.Module]) -> Callable[..., None]:
    """How a class takes submodules, of its fields and of `setup`: their calls from outside reach the engine."""

    @nn.nowrap
    def register(self: nn.Module, name: str, value: Any) -> None:
        getattr(base, LINEN_REGISTER)(self, name, value)
        root = self if annotation_of(self) is not None else vars(self).get(_ROOT)
        if root is None or _where.get() is not None:  # inside the model they are called as they are
            return
        for child in _compat.linen_children(self):
            if annotation_of(child) is None and _ROOT not in vars(child):
                object.__setattr__(child, "__class__", _linked_class(type(child)))
                object.__setattr__(child, _ROOT, root)  # Flax's own reference to a parent does not keep it

    return register


@functools.cache
def _linked_class(base: type[nn.Module]) -> type[nn.Module]:
    """The class of submodules of a bound annotated model, as `model.bind(variables).encoder`: calls find the model."""

    def from_outside(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(call_annotated, self, method) if _where.get() is None else method.__get__(self)
            return call(*args, **kwargs)

        return functools.wraps(method)(run)

    body = {
        **{name: from_outside(method) for name, method in _compat.transformed_methods(base).items()},
        **_kept_of_class(base),
        LINEN_REGISTER: _linking(base),
        LINEN_CALL: nn.nowrap(from_outside(getattr(base, LINEN_CALL))),
    }
    return type(base.__name__, (base,), body)


def _kept_of_class(base: type[nn.Module]) -> dict[str, Any]:
    """What a subclass keeps of its base: Flax would make it again."""
    return {
        "__init__": base.__init__,
        "__hash__": base.__hash__,
        "__annotations__": {},
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }


def _annotated_again(plain: nn.Module, annotation: Annotation) -> nn.Module:
    """Called by pickle, because the class of an annotated module is created at run time."""
    object.__setattr__(plain, "__class__", _annotated_class(annotation))
    return plain


def _check(module: nn.Module, placement: PlacementPolicy) -> None:
    found = [name for name, child in _modules(module) if annotation_of(child) is not None]
    if found or module.scope is not None:
        raise AnnotationError(
            "A module is annotated twice, or while it is bound to variables.",
            where=f"{type(module).__name__}: {', '.join(found) or 'bound'}",
            why="one fully_shard sets everything for a Linen model, before init and apply.",
            do='js.fully_shard(Model(), mesh=mesh, units={Block: {"remat": "full"}, "head": {}})',
        )
    if placement.stacked:
        raise AnnotationError(
            "A placement's stacked cannot be set for Linen modules.",
            where=f"fully_shard({type(module).__name__}, stacked={placement.stacked})",
            why="init shows which layers nn.scan stacks.",
            do="js.fully_shard(model, mesh=mesh, units=Block)",
        )


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield "(root)", module
    for field in dataclasses.fields(module):
        value = getattr(module, field.name, None) if field.name not in ("parent", "name") else None
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, nn.Module):
                yield field.name, one


def _choices(units: Any, record: Unit) -> Iterator[tuple[UnitChoice, Unit]]:
    if isinstance(units, Mapping):
        yield from ((choice, _with_settings(record, choice, settings)) for choice, settings in units.items())
    elif units is not None:
        every: Any = units if isinstance(units, Sequence) and not isinstance(units, str) else [units]
        yield from ((choice, record) for choice in every)


def _with_settings(unit: Unit, choice: UnitChoice, settings: Mapping[str, Any]) -> Unit:
    """The record with the settings of one choice applied."""
    own = {name: value for name, value in settings.items() if name in _OWN_SETTINGS}
    inherited = PlacementPolicy(**{name: getattr(unit.placement, name) for name in _OWN_PLACEMENT})
    asked = checks.check_placement(own.pop("placement", inherited))
    fields = [field.name for field in dataclasses.fields(asked) if field.name not in _OWN_PLACEMENT]
    unknown = [name for name in settings if name not in _OWN_SETTINGS]
    unknown += [name for name in fields if getattr(asked, name) != getattr(PlacementPolicy(), name)]
    if unknown:
        raise AnnotationError(
            "A single unit has no such setting.",
            where=f"fully_shard(units={{{_text(choice)}: {dict(settings)!r}}})",
            why=f"{', '.join(map(repr, unknown))}; a unit can set {', '.join(_OWN_SETTINGS)} with"
            f" {', '.join(_OWN_PLACEMENT)}.",
            do='js.fully_shard(model, mesh=mesh, units={Block: {"remat": "full"}})',
        )
    placement = dataclasses.replace(unit.placement, **{name: getattr(asked, name) for name in _OWN_PLACEMENT})
    common = unit.policy if asked.gathered else UnitPolicy()  # the settings for all units do not apply to this one
    made = dataclasses.replace(unit, policy=common.changed(unit.mesh, **own), placement=placement)
    checks.check_unit(made)
    return made


def _check_found(annotation: Annotation, seen: Seen, leaves: Mapping[Path, Leaf]) -> None:
    """Raises for a choice of units, or a pattern in `ignored`, that matches nothing in the initialised model."""
    used = {unit.choice for unit in seen.units.values()}
    unused = [choice for i, (choice, _) in enumerate(annotation.choices) if i not in used]
    if unused:
        raise checks.no_unit_chosen(annotation.base.__name__, ", ".join(map(_text, unused)), seen.kinds, "block_*")
    units = [(), *seen.units]
    names = {dotted(p[len(u) :]) for p in leaves for u in units if p[: len(u)] == u}
    checks.check_patterns_used(annotation.root.placement.ignored, names)


def _text(choice: UnitChoice) -> str:
    return repr(choice) if isinstance(choice, str) else getattr(choice, "__name__", repr(choice))


# The findings of a trace of a Linen model: which chosen submodules it calls, and with which parameters.


def _note(seen: Seen, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Records a call that has just run: inner calls of the same module, in a loop or a checkpoint, came before."""
    path = module.path[len(seen.prefix) :]
    seen.called.add(path)
    seen.kinds.setdefault(type(module).__name__, dotted(path))
    assert module.scope is not None, "a call that runs the model"
    if any("scan(" in part for part in tuple(module.scope.debug_path)[-1:]):  # Flax's own note of a loop
        _note_shapes(seen.loops.setdefault(path, {}), module, path)
    choice = seen.annotation.match(path, module)
    if choice is None:
        return
    if path not in seen.units:
        record = dataclasses.replace(seen.annotation.choices[choice][1], kind=type(module).__name__)
        seen.units[path] = SeenUnit(record, choice)
    unit = seen.units[path]
    _note_shapes(unit.shapes, module, path)
    scopes = {tuple(s.path)[len(seen.prefix) :] for s in get_module_scopes(module, args, kwargs)[0]}
    unit.borrowed |= {p for p in scopes if p[: len(path)] != path}


def _note_shapes(shapes: dict[Path, tuple[int, ...]], module: nn.Module, path: Path) -> None:
    for inner, leaf in placeable(module.variables):
        shapes.setdefault((*path, *inner), described(leaf, (*path, *inner)).shape)


# The dispatch of a call into an annotated Linen module: the engine, as the outermost or a unit's call, or plain Flax.


@dataclasses.dataclass(frozen=True, eq=False)
class _Inside:
    annotation: Annotation
    layout: Layout
    prefix: Path  # of the model
    unit: Path = ()  # that runs
    is_around: bool = False  # in global view, around units that are never gathered

    def path(self, module: nn.Module) -> Path:
        """Path of a module from the annotated one."""
        return tuple(module.path)[len(self.prefix) :]


@dataclasses.dataclass(frozen=True, eq=False)
class _AsWritten:
    """Inside a call in global view: what an annotated model calls on itself is no call from outside."""

    annotation: Annotation


_where: contextvars.ContextVar[_Inside | Seen | _AsWritten | None] = contextvars.ContextVar("where", default=None)
_intercepting: contextvars.ContextVar[bool] = contextvars.ContextVar("intercepting", default=False)
# The survey or the layout, as part of jit's cache key: a trace cached by nn.jit would hide its units from another
# survey, and run them with another annotation.
_tracing = jax.make_user_context(default_value=None)


def call_annotated(module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a method of an annotated module with the interceptor in place.

    Flax does not intercept calls of methods created by its transformations, only those of the methods inside.
    """
    with _interception():
        if not _compat.is_transformed(method):
            return method(module, *args, **kwargs)
        plain = functools.partial(method, module)
        return _intercept(plain, args, kwargs, nn.module.InterceptorContext(module, method.__name__, plain))


def call_function(function: FreeFunction, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a function of a bound, annotated module as one call, like a method of its class."""
    annotation = annotation_of(module)
    run = lambda: function(module, *args, **kwargs)
    if annotation is None or _where.get() is not None:
        return run()
    with _interception():
        if module.is_initializing():
            return _initialise(annotation, module, run)
        if in_global_view():
            return _as_written(annotation, module, function, args, kwargs, run)
        if annotation.gathers_all:
            return _open(annotation, module, function, args, kwargs)
        with _context(_around(annotation, module)):
            return run()


def initialise(module: nn.Module, run: Callable[[], Any]) -> Any:
    """Runs everything that creates a bound, annotated module's variables; a single method call creates only some."""
    with _interception():
        return _initialise(annotation_for(module), module, run)


@contextlib.contextmanager
def _interception() -> Iterator[None]:
    """A context in which Flax passes every method call to `_intercept`; nested uses have no further effect."""
    if _intercepting.get():
        yield
        return
    token = _intercepting.set(True)
    try:
        with nn.intercept_methods(_intercept):
            yield
    finally:
        _intercepting.reset(token)


@contextlib.contextmanager
def _context(where: _Inside | Seen) -> Iterator[None]:
    """The context of a method, which the engine may run at any time."""
    token = _where.set(where)
    try:
        with _interception(), _tracing(where.layout if isinstance(where, _Inside) else where):
            yield
    finally:
        _where.reset(token)


def _intercept(plain: Callable, args: tuple, kwargs: Mapping[str, Any], context: nn.module.InterceptorContext) -> Any:
    """One method call of any module in or around an annotated one."""
    module, where = context.module, _where.get()
    run = lambda: plain(*args, **kwargs)
    if not _is_call(module, context.method_name):
        return run()
    if isinstance(where, Seen):
        out = run()
        _note(where, module, args, dict(kwargs))
        return out
    function = context.orig_method.func  # type: ignore[attr-defined]  (a partial of the plain method)
    if isinstance(where, _AsWritten):
        if annotation_of(module) in (None, where.annotation):
            return run()
        where = None
    if where is None:
        annotation = annotation_of(module)
        if annotation is None:
            return _call_linked(module, function, args, kwargs, run)
        if module.is_initializing():
            return _initialise(annotation, module, run)
        if in_global_view():
            return _as_written(annotation, module, function, args, kwargs, run)
        if annotation.gathers_all:
            return _open(annotation, module, function, args, kwargs)
        where = _around(annotation, module)
    _refuse_other(where, module)
    if where.is_around:
        return _beside(where, module, function, args, kwargs, run)
    return _call_unit(where, module, function, args, kwargs) if _is_unit(where, module) else run()


def _is_call(module: nn.Module, name: str) -> bool:
    """Whether a method runs the model: `__call__`, and public methods that Flax's base class lacks."""
    public = not name.startswith("_") and hasattr(type(module), name) and not hasattr(nn.Module, name)
    return module.scope is not None and (public or name == "__call__")


def _open(annotation: Annotation, module: nn.Module, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    prefix = tuple(module.path)

    def run(call: LinenCall) -> tuple[Any, Lifted]:
        call.optimizer = annotation.root.optimizer
        layout = annotation.layout_of(call.leaves, lambda: _surveyed(annotation, call))
        unit = call.place(layout)
        call.store()
        replication.check_replicated(layout.root, layout.root.kind)
        return _through_engine(call, unit, _Inside(annotation, layout, prefix))

    return call_lifted(module, function, args, kwargs, prefix=prefix, interceptor=_intercept, run=run)


def _call_linked(
    module: nn.Module, function: Callable, args: tuple, kwargs: Mapping[str, Any], plain: Callable[[], Any]
) -> Any:
    """A call from outside of a module that may belong to a bound, annotated model: then it is a region of its own."""
    root = vars(module).get(_ROOT)
    if root is None or module.is_initializing():
        return plain()
    annotation, leaves = annotation_for(root), _leaves(root)
    if in_global_view():
        return _as_written(annotation, module, function, args, kwargs, plain)
    layout = annotation.layout_by_init(leaves)
    if layout is None:
        _warn_of_unknown(annotation.base.__name__, dotted(tuple(module.path)))
        return plain()
    return _beside(_Inside(annotation, layout, tuple(root.path), is_around=True), module, function, args, kwargs, plain)


@functools.cache
def _warn_of_unknown(kind: str, path: str) -> None:
    """Warns, once, of a submodule that is called before the parameters of its model are known."""
    _compat.warn_user(
        f"{path} of {kind} runs in global view, where the compiler places the communication: it is called by itself,"
        f" and init has not been traced, which shows where the parameters of {kind} are. Before the call:\n"
        "  jax.eval_shape(model.init, jax.random.key(0), x)  # computes nothing"
    )


def _as_written(
    annotation: Annotation,
    module: nn.Module,
    function: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    plain: Callable[[], Any],
) -> Any:
    """A call in global view. It runs on a copy only if parameters are stored in another form than the model reads."""

    def run(call: LinenCall) -> tuple[Any, Lifted]:
        call.optimizer = annotation.root.optimizer
        outs, state = call.body(call.logical(call.guarded(call.params)), call.inputs)
        assert call.result is not None, "it has run"
        return call.finish([*outs, *state], call.result)

    with during(_where, _AsWritten(annotation)):
        if not _is_stored_otherwise(module):
            return plain()
        prefix = tuple(module.path)
        return call_lifted(module, function, args, kwargs, prefix=prefix, interceptor=_intercept, run=run)


def _is_stored_otherwise(module: nn.Module) -> bool:
    """Whether a parameter that a bound module may read is padded or in host memory."""
    assert module.scope is not None, "it is bound"
    leaves = [leaf for _, leaf in flat_params(module.scope.root.variables().get(PARAMS, {}))]
    arrays = jax.tree.leaves(leaves)
    return any(map(is_padded, leaves)) or any(isinstance(x, jax.Array) and _compat.on_host(x) for x in arrays)


def _around(annotation: Annotation, module: nn.Module) -> _Inside:
    """The position of the outermost call into a model with units that are never gathered."""
    layout = annotation.known_layout(_leaves(module))
    replication.check_replicated(layout.root, layout.root.kind)
    return _Inside(annotation, layout, tuple(module.path), is_around=True)


def _beside(
    inside: _Inside, module: nn.Module, function: Callable, args: tuple, kwargs: Mapping[str, Any], plain: Callable
) -> Any:
    """A call in global view: around units that are never gathered, of such a unit, or beside them, as a region."""
    if inside.path(module) in inside.layout.around:
        with _context(inside):
            return plain()

    def run(call: LinenCall) -> tuple[Any, Lifted]:
        call.optimizer, unit = inside.layout.root.optimizer, call.place(inside.layout)
        call.store()
        return _through_engine(call, unit, dataclasses.replace(inside, unit=call.path, is_around=False))

    return call_lifted(module, function, args, kwargs, prefix=inside.prefix, interceptor=_intercept, run=run)


def _leaves(module: nn.Module) -> dict[Path, Leaf]:
    return {path: described(leaf, path) for path, leaf in placeable(module.variables)}


def _call_unit(inside: _Inside, module: nn.Module, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:

    def run(call: LinenCall) -> tuple[Any, Lifted]:
        return _through_engine(call, call.place(inside.layout), dataclasses.replace(inside, unit=call.path))

    return call_lifted(module, function, args, kwargs, prefix=inside.prefix, interceptor=_intercept, run=run)


def _through_engine(call: LinenCall, unit: Unit, inside: _Inside) -> tuple[Any, Lifted]:
    call_checks.check_has_arrays(call.where, call.params)
    call.context = lambda: _context(inside)
    return run_call(call, dotted(call.path), unit)


def _is_unit(inside: _Inside, module: nn.Module) -> bool:
    """Whether a call is that of a unit; False if the unit is already running, or if the layers are still stacked."""
    path = inside.path(module)
    if path in ((), inside.unit) or path not in inside.layout.records:
        return False
    layers = inside.layout.records[path].placement.stacked
    for inner, leaf in placeable(module.variables) if layers else ():
        placed = inside.layout.leaves.get((*path, *inner))
        if placed is not None:
            return len(described(leaf, inner).shape) == len(placed.placement.shape) - layers
    return True


def _surveyed(annotation: Annotation, call: LinenCall) -> Seen:
    """The units that a call reaches, from a trace of shapes; for parameters that no `init` was traced for.

    A method other than `__call__` need not reach them all.
    """
    seen = Seen(annotation, call.prefix)
    call.context = lambda: _context(seen)
    with inside_annotated_call(call):
        jax.eval_shape(lambda: call.body(call.logical(call.params), call.inputs))
    if call.function.__name__ == "__call__":
        _check_found(annotation, seen, call.leaves)
    return seen


def _initialise(annotation: Annotation, module: nn.Module, run: Callable[[], Any]) -> Any:
    """Lets the model create its variables, makes the plan, and places the parameters."""
    seen = Seen(annotation, tuple(module.path))
    with _context(seen):
        out = run()
    leaves = _leaves(module)
    if not leaves:
        _check_has_parameters(module, annotation.base.__name__)
    _check_found(annotation, seen, leaves)
    layout = annotation.layout_of(leaves, lambda: seen, keep=True)
    warn_of_stacks(layout.root.kind, layout.plan, tuple(_text(choice) for choice, _ in annotation.choices))
    _place(module, layout)
    return out


_STATE = frozenset({"batch_stats", "cache", "intermediates", "perturbations"})  # cannot be mistaken for parameters


def _check_has_parameters(module: nn.Module, kind: str) -> None:
    """Raises if a model without parameters has float arrays in other collections, which would not be sharded."""
    found = [
        f"{kind}: {dotted(other.path)}  {other.form}"
        for name in module.variables.keys() - _STATE
        for path, x in flat(module.variables[name])
        for other in replication.others_in((name, *path), x, name)
    ]
    if found:
        do = 'w = self.param("w", nn.initializers.lecun_normal(), (64, 64))  # instead of self.variable(...)'
        raise checks.nothing_to_shard(found, needed="the collection params", do=do)


def _place(module: nn.Module, layout: Layout) -> None:
    """Shards the parameters from `init`. One that would be padded is unchanged: its creator reads its shape."""
    mesh = layout.root.mesh
    if not is_concrete(mesh):
        return

    def placed(path: tuple, x: Any) -> Any:
        leaf = layout.leaves.get(key_texts(path))
        if leaf is None or leaf.placement.padding:  # a random key has no place
            return x
        placement = leaf.placement
        return lax.with_sharding_constraint(x, NamedSharding(mesh, placement.partition_spec))

    assert module.scope is not None, "it is bound"
    for name, tree in jax.tree.map_with_path(placed, dict(module.variables.get(PARAMS, {}))).items():
        module.scope.put_variable(PARAMS, name, tree)


def _refuse_other(inside: _Inside, module: nn.Module) -> None:
    other = annotation_of(module)
    if other is not None and other is not inside.annotation:
        raise CallError(
            "An annotated Linen module was called inside another one.",
            where=f"{inside.annotation.base.__name__}: {other.base.__name__} {dotted(inside.path(module))}",
            why="one fully_shard of the outermost module sets everything for a Linen model.",
            do='js.fully_shard(model, mesh=mesh, units={Inner: {"remat": "full"}})',
        )
