"""Where a call into an annotated Linen module goes: the region, a unit in it, or plain Flax.

One interceptor of Flax sees every method call inside an annotated module. The outermost call becomes the region; in
it, calls of the chosen submodules become units; everything else runs as it stands.
"""

import contextlib
import contextvars
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax

from jshard._annotation_checks import nothing_to_shard
from jshard._errors import CallError
from jshard._linen import route as new
from jshard._linen.annotation import Annotation, annotation_of, check_found
from jshard._linen.layout import Layout, Seen
from jshard._linen.padded import padding_in
from jshard._linen.stacks import warn_of_stacks
from jshard._linen.survey import Survey
from jshard._linen.values import described, flat, raw_of
from jshard._mesh import data_axes, data_degree, manual_axes
from jshard._nnx import Path, Unit, attach, dotted
from jshard._offload import fetched
from jshard._padded import Padding, logical, padding_of, store
from jshard._replicated import check_replicated, others_in
from jshard.engine.call import Call
from jshard.engine.context import current_region, global_view, in_global_view
from jshard.engine.hosted import all_on_device
from jshard.engine.inputs import BatchSplit, trace_globally
from jshard.engine.island import open_region
from jshard.engine.linen_call import Lifted, View, kind_of, lifted_call
from jshard.engine.linen_fields import Fields
from jshard.engine.linen_values import rules_without
from jshard.engine.outputs import batch_mean
from jshard.engine.padded_gradients import guarded_inside
from jshard.engine.route import refuse_manual, route
from jshard.engine.ungathered import called_inside, run_ungathered
from jshard.engine.unit import run_unit


@dataclasses.dataclass(frozen=True)
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
        return module.path[len(self.prefix) :]


_inside: contextvars.ContextVar[_Inside | None] = contextvars.ContextVar("inside", default=None)
_survey: contextvars.ContextVar[Survey | None] = contextvars.ContextVar("survey", default=None)
_intercepting: contextvars.ContextVar[bool] = contextvars.ContextVar("intercepting", default=False)
# The survey or the layout, as part of jit's cache key: a trace that nn.jit has kept would hide its units from another
# survey, and run them as another annotation says.
_tracing = jax.make_user_context(default_value=None)


def call_annotated(module: nn.Module, plain: Callable[[], Any]) -> Any:
    """Runs a method call of an annotated module with the interceptor in place."""
    if os.environ.get("JSHARD_ENGINE") == "partition":
        return new.call_annotated(module, plain)
    with _interception():
        return plain()


def initialise(module: nn.Module, run: Callable[[], Any]) -> Any:
    """Runs all that makes the variables of a bound, annotated module; alone, a call of a method makes some of them."""
    if os.environ.get("JSHARD_ENGINE") == "partition":
        return new.initialise(module, run)
    annotation = annotation_of(module)
    assert annotation is not None, "it is annotated"
    with _interception():
        return _initialise(annotation, module, run)


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
    module, arguments, survey, inside = context.module, dict(kwargs), _survey.get(), _inside.get()
    is_call = _is_call(module, context.method_name)
    function = context.orig_method.func  # type: ignore[attr-defined]  (a partial of the plain method)
    run = lambda: plain(*args, **arguments)
    if survey is not None:
        out = run()
        if is_call:
            survey.note(module, args, arguments)
        return out
    if in_global_view():
        return _on_device(module, function, args, arguments, run) if is_call else run()
    if inside is None:
        annotation = annotation_of(module) if is_call else None
        if annotation is None:
            return run()
        if module.is_initializing():
            return _initialise(annotation, module, run)
        if not annotation.gathers_all:
            return _beside(_around(annotation, module), module, function, args, arguments, run)
        return _open(annotation, module, function, args, arguments)
    if is_call:
        _refuse_other(inside, module)
        if inside.is_around:
            return _beside(inside, module, function, args, arguments, run)
        if _is_unit(inside, module):
            return _run_unit(inside, module, function, args, arguments)
    return _synchronised(inside, module, run)


def _is_call(module: nn.Module, name: str) -> bool:
    """Whether a method runs the model, as `__call__` and the public ones that Flax's base class lacks."""
    public = not name.startswith("_") and hasattr(type(module), name) and not hasattr(nn.Module, name)
    return module.scope is not None and (public or name == "__call__")


def _initialise(annotation: Annotation, module: nn.Module, run: Callable[[], Any]) -> Any:
    """Lets the model make its variables, and plans for the parameters that it made."""
    survey = Survey(annotation, tuple(module.path))
    with _set(_survey, survey), _tracing(survey):
        out = run()
    leaves = {path: described(leaf, path) for path, leaf in flat(module.variables.get("params", {}))}
    if not leaves:
        _check_has_parameters(annotation, module)
    check_found(annotation, survey.seen, leaves)
    layout = annotation.layout_of(leaves, lambda: survey.seen, keep=True)
    warn_of_stacks(layout.kind, layout.plan, annotation.chosen)
    return out


def _check_has_parameters(annotation: Annotation, module: nn.Module) -> None:
    """Raises if a model without parameters has float arrays in other collections, which nobody would shard."""
    others = [
        other
        for collection in module.variables
        for path, x in flat(module.variables[collection])
        for other in others_in((collection, *path), kind_of(collection)(raw_of(x)))
    ]
    if others:
        raise nothing_to_shard(
            [f"{annotation.base.__name__}: {dotted(other.path)}  {other.form}" for other in others],
            sum(other.bytes for other in others),
            needed="the collection params",
            do='w = self.param("w", nn.initializers.lecun_normal(), (64, 64))  # in place of self.variable(...)',
        )


def _open(annotation: Annotation, module: nn.Module, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The outermost call into the model as one sharded region."""
    prefix = tuple(module.path)
    refuse_manual(annotation.root.mesh, f"{annotation.base.__name__}.{function.__name__}")

    def run(lifted: Lifted, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, View]:
        view = lifted.view(annotation.base)
        survey = lambda: _surveyed(annotation, prefix, lifted, view, function.__name__, args, kwargs)
        inside = _Inside(annotation, annotation.layout_of(lifted.leaves, survey), prefix)
        return _region(inside, lifted, view, function, args, kwargs), view

    return lifted_call(module, function, args, kwargs, prefix=prefix, run=run)


def _region(
    inside: _Inside, lifted: Lifted, view: View, function: Callable, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """A lifted call as a sharded region, which gathers what belongs to no unit inside."""
    part = inside.is_around  # of the model, whose parameters were looked at as a whole
    unit = dataclasses.replace(inside.layout.record((), lifted.params), nested=part)
    attach(view, unit, route)
    _store_padded(view, unit)
    method = _method(lifted, function, dataclasses.replace(inside, is_around=False))
    return open_region(view, unit, method, args, kwargs)


def _on_device(
    module: nn.Module, function: Callable, args: tuple, kwargs: dict[str, Any], plain: Callable[[], Any]
) -> Any:
    """A call in global view; parameters in host memory are brought to the device for it, padded ones guarded."""
    annotation = annotation_of(module)
    if annotation is None or module.is_initializing():
        return plain()
    boxes = any(padding_in(leaf) for _, leaf in flat(module.variables.get("params", {})))
    if not boxes and not annotation.offloads_params:
        return plain()

    def run(lifted: Lifted, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, View]:
        view = lifted.view(annotation.base)
        with all_on_device(view), guarded_inside(view, annotation.root):
            return lifted.run(view, args, kwargs), view

    return lifted_call(module, function, args, kwargs, prefix=tuple(module.path), run=run)


def _around(annotation: Annotation, module: nn.Module) -> _Inside:
    """Where the outermost call is into a model with units that are never gathered."""
    leaves = {path: described(leaf, path) for path, leaf in flat(module.variables.get("params", {}))}
    layout = annotation.known_layout(leaves)
    check_replicated(layout.root, layout.kind)
    return _Inside(annotation, layout, tuple(module.path), is_around=True)


def _beside(
    inside: _Inside,
    module: nn.Module,
    function: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    plain: Callable[[], Any],
) -> Any:
    """A call in global view: around units that are never gathered, of one, or beside them, where it is a region."""
    path, layout = inside.path(module), inside.layout
    if path in layout.around:
        with _set(_inside, inside), _tracing(layout):
            return plain()
    refuse_manual(layout.root.mesh, f"{type(module).__name__}.{function.__name__}")
    gathered = (layout.units[path].settings if path in layout.units else layout.root).policy.gathered

    def run(lifted: Lifted, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, View]:
        view = lifted.view(type(module))
        if gathered:
            return _region(inside, lifted, view, function, args, kwargs), view
        unit = layout.record(path, lifted.params)
        attach(view, unit, route)
        _store_padded(view, unit)
        return run_ungathered(view, unit, _plain_method(lifted, function), args, kwargs), view

    called = _again(function) if gathered and path in layout.units else function
    return lifted_call(module, called, args, kwargs, prefix=inside.prefix, run=run)


def _again(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls itself, so that the interceptor sees a unit inside the region that its call has opened."""

    @functools.wraps(function)
    def again(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(module, function.__name__)(*args, **kwargs)

    return again


def _store_padded(view: View, unit: Unit) -> None:
    """Pads what is to be: parameters may come as plain arrays, or padded for another mesh."""
    for member in unit.members:
        variable, padding = getattr(view, member.path[0]), Padding.of(member.placement)
        if padding_of(variable) != padding:
            value = fetched(logical(variable).get_raw_value())
            store(variable, padding, value if padding is None else padding.pad(value))


def _surveyed(
    annotation: Annotation, prefix: Path, lifted: Lifted, view: View, name: str, args: tuple, kwargs: dict[str, Any]
) -> Seen:
    """The units that a call reaches, from a trace of shapes; for parameters that no `init` has shown.

    A method other than `__call__` need not reach them all.
    """
    survey = Survey(annotation, prefix)

    def method(view: View, *args: Any, **kwargs: Any) -> Any:
        with _interception(), _set(_survey, survey), _tracing(survey):
            return lifted.run(view, args, kwargs)

    call = Call(view, method, args, kwargs)
    whole = BatchSplit(0, 1, (False,) * len(call.arrays), (False,) * len(call.state))
    with global_view():
        trace_globally(call, whole, 0)
    if name == "__call__":
        check_found(annotation, survey.seen, lifted.leaves)
    return survey.seen


def _is_unit(inside: _Inside, module: nn.Module) -> bool:
    """Whether a call is that of a unit; not if the unit runs already, or if all layers of a loop are still there."""
    path = inside.path(module)
    if path == inside.unit or path not in inside.layout.units:
        return False
    layers = inside.layout.layers[path]
    for inner, leaf in flat(module.variables.get("params", {})) if layers else ():
        placed = inside.layout.leaves.get(dotted((*path, *inner)))
        if placed is not None:
            return len(described(leaf, inner).shape) == len(placed.placement.shape) - layers
    return True


def _run_unit(inside: _Inside, module: nn.Module, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A call of a unit inside the region."""
    path, fields = inside.path(module), Fields(module)

    def run(lifted: Lifted, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, View]:
        region = current_region()
        assert region is not None, "inside is set within a region only"
        view = lifted.view(type(module))
        unit = inside.layout.record(path, lifted.params)
        if not unit.policy.gathered:
            raise called_inside(view, function, region)
        attach(view, unit, route)
        plain = _method(lifted, function, dataclasses.replace(inside, unit=path))

        def method(view: View, arrays: list, *args: Any, **kwargs: Any) -> Any:
            with fields.hold(arrays):
                return plain(view, *args, **kwargs)

        method.__name__ = function.__name__
        named = dataclasses.replace(region, names={id(view): dotted(path)})
        return run_unit(view, unit, named, method, (fields.arrays, *args), kwargs, outermost=False), view

    return lifted_call(module, function, args, kwargs, prefix=inside.prefix, run=run)


def _method(lifted: Lifted, function: Callable, inside: _Inside) -> Callable[..., Any]:
    """The lifted call as a method of its view; backward traces it again, later, so it brings its own surroundings."""
    rules = rules_without(manual_axes(inside.layout.root.mesh))

    def method(view: View, *args: Any, **kwargs: Any) -> Any:
        with _interception(), _set(_inside, inside), _tracing(inside.layout), nn.logical_axis_rules(rules):
            return lifted.run(view, args, kwargs)

    method.__name__ = function.__name__
    method.__wrapped__ = function  # type: ignore[attr-defined]  (its parameter names)
    return method


def _plain_method(lifted: Lifted, function: Callable) -> Callable[..., Any]:
    """The lifted call as a method of its view that runs as written."""

    def method(view: View, *args: Any, **kwargs: Any) -> Any:
        with global_view():
            return lifted.run(view, args, kwargs)

    method.__name__ = function.__name__
    return method


def _synchronised(inside: _Inside, module: nn.Module, run: Callable[[], Any]) -> Any:
    """Runs a call that is no unit's; that of a BatchNorm with statistics of the whole batch.

    One with statistics of each data shard keeps their means over the data shards.
    """
    root = inside.layout.root
    if not isinstance(module, nn.BatchNorm) or module.axis_name is not None or data_degree(root.mesh) == 1:
        return run()
    if not root.policy.sync_batch_norm:
        out = run()
        for name in ("mean", "var") if module.is_mutable_collection("batch_stats") else ():
            module.put_variable("batch_stats", name, batch_mean(module.get_variable("batch_stats", name)))
        return out
    object.__setattr__(module, "axis_name", data_axes(root.mesh))
    try:
        return run()
    finally:
        object.__setattr__(module, "axis_name", None)


def _refuse_other(inside: _Inside, module: nn.Module) -> None:
    other = annotation_of(module)
    if other is not None and other is not inside.annotation:
        raise CallError(
            "An annotated Linen module was called inside another one.",
            where=f"{inside.annotation.base.__name__}: {other.base.__name__} {dotted(inside.path(module))}",
            why="the settings of a Linen model are those of one fully_shard, of the outermost module.",
            do='js.fully_shard(model, mesh=mesh, units={Inner: {"remat": "full"}})',
        )
