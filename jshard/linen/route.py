"""Where a call into an annotated Linen module goes: the engine, as the outermost call or as a unit, or plain Flax."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.linen.transforms import get_module_scopes
from jax import lax
from jax.sharding import NamedSharding

from jshard import _compat
from jshard.engine.context import in_global_view
from jshard.engine.region import run_call
from jshard.errors import CallError
from jshard.linen.annotation import Annotation, annotation_for, annotation_of, check_found
from jshard.linen.call import PARAMS, Lifted, LinenCall, call_lifted, described, flat, nested, raw_of
from jshard.linen.layout import Layout, Seen, SeenUnit
from jshard.plans.checks import nothing_to_shard
from jshard.plans.mesh import is_concrete
from jshard.plans.plan import Leaf, ShardPlan
from jshard.plans.replicated import check_replicated, others_in
from jshard.plans.units import Path, Unit, dotted

_LARGE_BYTES = 64 * 2**20  # of the gathered copy of all layers; below that nobody would miss the time


@functools.cache
def warn_of_stacks(kind: str, plan: ShardPlan, units: tuple[str, ...]) -> None:
    """Warns of large ones, once per model and process; `units` are the choices of units, as text."""
    stacks = {key: size for key, size in plan.unscheduled_stacks.items() if size >= _LARGE_BYTES}
    if not stacks:
        return
    rows = ((path, f"{size} bytes, {plan.how_stacked(path, unit)}") for (path, unit), size in stacks.items())
    listed = "".join(f"\n  {path}  {how}" for path, how in rows)
    named = ", ".join([*units, *(repr(path) for path, _ in stacks)])
    _compat.warn_user(
        f"{len(stacks)} stack(s) of layers of {kind} are not gathered ahead of their use, as no unit is inside their"
        f" loop:{listed}\n  js.fully_shard(model, mesh=mesh, units=[{named}])",
    )


# What a trace of a Linen model shows: which chosen submodules it calls, and with which parameters.


@dataclasses.dataclass(eq=False)
class Survey:
    """Collects the units that a trace of a model calls.

    Args:
        annotation: of the model.
        prefix: path of the model.
        seen: what was found so far.
    """

    annotation: Annotation
    prefix: Path
    seen: Seen = dataclasses.field(default_factory=Seen)

    def note(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Notes a call that has just run: an inner call of the same module, in a loop or a checkpoint, came before."""
        path = module.path[len(self.prefix) :]
        self.seen.called.add(path)
        self.seen.kinds.setdefault(type(module).__name__, dotted(path))
        assert module.scope is not None, "a call that runs the model"
        if any("scan(" in part for part in tuple(module.scope.debug_path)[-1:]):  # Flax's own note of a loop
            _note_shapes(self.seen.loops.setdefault(path, {}), module, path)
        choice = self.annotation.match(path, module)
        if choice is None:
            return
        unit = self.seen.units.get(path)
        if unit is None:
            unit = SeenUnit(type(module).__name__, choice, self.annotation.choices[choice][1])
            self.seen.units[path] = unit
        _note_shapes(unit.shapes, module, path)
        scopes = {tuple(s.path)[len(self.prefix) :] for s in get_module_scopes(module, args, kwargs)[0]}
        unit.borrowed |= {p for p in scopes if p[: len(path)] != path}


def _note_shapes(shapes: dict[Path, tuple[int, ...]], module: nn.Module, path: Path) -> None:
    for inner, leaf in flat(module.variables.get(PARAMS, {})):
        shapes.setdefault((*path, *inner), described(leaf, (*path, *inner)).shape)


# Where a call into an annotated Linen module goes: the engine, as the outermost call or as a unit's, or plain Flax.


@dataclasses.dataclass(frozen=True, eq=False)
class _Inside:
    """Where we are in an annotated Linen model.

    Args:
        annotation: of the model.
        layout: of its parameters.
        prefix: path of the model.
        unit: path of the unit that runs.
        is_around: we are in global view, around units that are never gathered.
    """

    annotation: Annotation
    layout: Layout
    prefix: Path
    unit: Path = ()
    is_around: bool = False

    def path(self, module: nn.Module) -> Path:
        """Path of a module from the annotated one."""
        return tuple(module.path)[len(self.prefix) :]


_STATE = frozenset({"batch_stats", "cache", "intermediates", "perturbations"})  # nobody takes these for parameters

_inside: contextvars.ContextVar[_Inside | None] = contextvars.ContextVar("inside", default=None)
_survey: contextvars.ContextVar[Survey | None] = contextvars.ContextVar("survey", default=None)
_intercepting: contextvars.ContextVar[bool] = contextvars.ContextVar("intercepting", default=False)
# The survey or the layout, as part of jit's cache key: a trace that nn.jit has kept would hide its units from another
# survey, and run them as another annotation says.
_tracing = jax.make_user_context(default_value=None)


def call_annotated(module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a method of an annotated module with the interceptor in place.

    Flax intercepts no call of a method that one of its transformations made, only that of the method inside.
    """
    with _interception():
        if not _compat.is_transformed(method):
            return method(module, *args, **kwargs)
        plain = functools.partial(method, module)
        return _intercept(plain, args, kwargs, nn.module.InterceptorContext(module, method.__name__, plain))


def initialise(module: nn.Module, run: Callable[[], Any]) -> Any:
    """Runs all that makes the variables of a bound, annotated module; alone, a call of a method makes some of them."""
    with _interception():
        return _initialise(annotation_for(module), module, run)


@contextlib.contextmanager
def _interception() -> Iterator[None]:
    """Inside, Flax asks `_intercept` about every method call; once is enough."""
    if _intercepting.get():
        yield
        return
    with _set(_intercepting, True), nn.intercept_methods(_intercept):
        yield


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _intercept(plain: Callable, args: tuple, kwargs: Mapping[str, Any], context: nn.module.InterceptorContext) -> Any:
    """One method call of any module in or around an annotated one."""
    module, inside, survey = context.module, _inside.get(), _survey.get()
    run = lambda: plain(*args, **kwargs)
    if not _is_call(module, context.method_name):
        return run()
    if survey is not None:
        out = run()
        survey.note(module, args, dict(kwargs))
        return out
    function = context.orig_method.func  # type: ignore[attr-defined]  (a partial of the plain method)
    if inside is None:
        annotation = annotation_of(module)
        if annotation is None:
            return run()
        if module.is_initializing():
            return _initialise(annotation, module, run)
        if annotation.gathers_all or in_global_view():
            return _open(annotation, module, function, args, kwargs)
        inside = _around(annotation, module)
    _refuse_other(inside, module)
    if inside.is_around:
        return _beside(inside, module, function, args, kwargs, run)
    return _call_unit(inside, module, function, args, kwargs) if _is_unit(inside, module) else run()


def _is_call(module: nn.Module, name: str) -> bool:
    """Whether a method runs the model, as `__call__` and the public ones that Flax's base class lacks."""
    public = not name.startswith("_") and hasattr(type(module), name) and not hasattr(nn.Module, name)
    return module.scope is not None and (public or name == "__call__")


def _open(annotation: Annotation, module: nn.Module, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The outermost call into the model."""
    prefix = tuple(module.path)

    def run(call: LinenCall) -> tuple[Any, Lifted]:
        call.optimizer = annotation.root.optimizer
        if in_global_view():
            return _plain(call)
        layout = annotation.layout_of(call.leaves, lambda: _surveyed(annotation, call))
        unit = call.place(layout)
        call.store()
        check_replicated(layout.root, layout.kind)
        return _through_engine(call, unit, _Inside(annotation, layout, prefix))

    return call_lifted(module, function, args, kwargs, prefix=prefix, interceptor=_intercept, run=run)


def _around(annotation: Annotation, module: nn.Module) -> _Inside:
    """Where the outermost call is into a model with units that are never gathered."""
    leaves = _leaves(module)
    layout = annotation.known_layout(leaves)
    check_replicated(layout.root, layout.kind)
    return _Inside(annotation, layout, tuple(module.path), is_around=True)


def _leaves(module: nn.Module) -> dict[Path, Leaf]:
    """The parameters of a bound model, described."""
    return {path: described(leaf, path) for path, leaf in flat(module.variables.get(PARAMS, {}))}


def _beside(
    inside: _Inside, module: nn.Module, function: Callable, args: tuple, kwargs: Mapping[str, Any], plain: Callable
) -> Any:
    """A call in global view: around units that are never gathered, of one, or beside them, where it is a region."""
    if inside.path(module) in inside.layout.around:
        with _context(inside):
            return plain()

    def run(call: LinenCall) -> tuple[Any, Lifted]:
        call.optimizer, unit = inside.layout.root.optimizer, call.place(inside.layout)
        call.store()
        return _through_engine(call, unit, dataclasses.replace(inside, unit=call.path, is_around=False))

    return call_lifted(module, function, args, kwargs, prefix=inside.prefix, interceptor=_intercept, run=run)


def _call_unit(inside: _Inside, module: nn.Module, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """The call of a unit inside the model."""

    def run(call: LinenCall) -> tuple[Any, Lifted]:
        return _through_engine(call, call.place(inside.layout), dataclasses.replace(inside, unit=call.path))

    return call_lifted(module, function, args, kwargs, prefix=inside.prefix, interceptor=_intercept, run=run)


def _through_engine(call: LinenCall, unit: Unit, inside: _Inside) -> tuple[Any, Lifted]:
    call.context = lambda: _context(inside)
    return run_call(call, dotted(call.path), unit)


@contextlib.contextmanager
def _context(inside: _Inside | None, survey: Survey | None = None) -> Iterator[None]:
    """The surroundings of a method: the engine runs it when it likes."""
    tracing = inside.layout if inside is not None else survey
    with _interception(), _set(_inside, inside), _set(_survey, survey), _tracing(tracing):
        yield


def _plain(call: LinenCall) -> tuple[Any, Lifted]:
    """The call in global view: as written, its parameters on the device."""
    outs, state = call.body(call.logical(call.guarded(call.params)), call.inputs)
    assert call.result is not None, "it has run"
    return call.finish([*outs, *state], call.result)


def _is_unit(inside: _Inside, module: nn.Module) -> bool:
    """Whether a call is that of a unit; not if the unit runs already, or if all layers of a loop are still there."""
    path = inside.path(module)
    if path == inside.unit or path not in inside.layout.units:
        return False
    layers = inside.layout.layers[path]
    for inner, leaf in flat(module.variables.get(PARAMS, {})) if layers else ():
        placed = inside.layout.leaves.get(dotted((*path, *inner)))
        if placed is not None:
            return len(described(leaf, inner).shape) == len(placed.placement.shape) - layers
    return True


def _surveyed(annotation: Annotation, call: LinenCall) -> Seen:
    """The units that a call reaches, from a trace of shapes; for parameters that no `init` has shown.

    A method other than `__call__` need not reach them all.
    """
    survey = Survey(annotation, call.prefix)
    call.context = lambda: _context(None, survey)
    jax.eval_shape(lambda: call.body(call.logical(call.params), call.inputs))
    if call.function.__name__ == "__call__":
        check_found(annotation, survey.seen, call.leaves)
    return survey.seen


def _initialise(annotation: Annotation, module: nn.Module, run: Callable[[], Any]) -> Any:
    """Lets the model make its variables, plans for the parameters that it made, and places these."""
    survey = Survey(annotation, tuple(module.path))
    with _set(_survey, survey), _tracing(survey):
        out = run()
    leaves = _leaves(module)
    if not leaves:
        _check_has_parameters(annotation, module)
    check_found(annotation, survey.seen, leaves)
    layout = annotation.layout_of(leaves, lambda: survey.seen, keep=True)
    warn_of_stacks(layout.kind, layout.plan, annotation.chosen)
    _place(module, layout)
    return out


def _place(module: nn.Module, layout: Layout) -> None:
    """Shards the parameters that `init` made. One that would be padded stays as it is: who made it reads its shape."""
    mesh = layout.root.mesh
    for path, leaf in flat(module.variables.get(PARAMS, {})) if is_concrete(mesh) else ():
        placement = layout.leaves[dotted(path)].placement
        if not placement.padding:
            sharding = NamedSharding(mesh, placement.partition_spec)
            placed = jax.tree.map(lambda x, sharding=sharding: lax.with_sharding_constraint(x, sharding), leaf)
            assert module.scope is not None, "it is bound"
            module.scope.put_variable(PARAMS, path[0], nested([(path[1:], placed)]) if path[1:] else placed)


def _check_has_parameters(annotation: Annotation, module: nn.Module) -> None:
    """Raises if a model without parameters has float arrays in other collections, which nobody would shard."""
    others = [
        other
        for collection in module.variables.keys() - _STATE
        for path, x in flat(module.variables[collection])
        for other in others_in((collection, *path), raw_of(x))
    ]
    if others:
        raise nothing_to_shard(
            [f"{annotation.base.__name__}: {dotted(other.path)}  {other.form}" for other in others],
            sum(other.bytes for other in others),
            needed="the collection params",
            do='w = self.param("w", nn.initializers.lecun_normal(), (64, 64))  # in place of self.variable(...)',
        )


def _refuse_other(inside: _Inside, module: nn.Module) -> None:
    other = annotation_of(module)
    if other is not None and other is not inside.annotation:
        raise CallError(
            "An annotated Linen module was called inside another one.",
            where=f"{inside.annotation.base.__name__}: {other.base.__name__} {dotted(inside.path(module))}",
            why="the settings of a Linen model are those of one fully_shard, of the outermost module.",
            do='js.fully_shard(model, mesh=mesh, units={Inner: {"remat": "full"}})',
        )
