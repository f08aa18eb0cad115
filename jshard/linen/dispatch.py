"""Where a call into an annotated Linen module goes: to the engine, as a region or as a unit's call, or to plain Flax.

Flax passes each method call of any module to `_intercept`. What happens to it depends on what runs already:

    nothing, and the model is called           the call opens a region (`_open_region`)
    nothing, with units that are not gathered  the model runs in global view, and its gathered parts as regions
    nothing, and a submodule is called         as in `model.bind(variables).encoder(x)`: a region of its own
    a region, and a unit is called             the unit's call (`_call_unit`)
    a survey                                   plain Flax; the call is recorded (`Survey.record_call`)
    `js.global_view()`                         plain Flax, on logical arrays
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import flax.linen as nn
import jax
from jax import lax
from jax.sharding import NamedSharding

from jshard import _compat
from jshard.engine.blame import inside_annotated_call
from jshard.engine.context import during, in_global_view
from jshard.engine.region import run_call
from jshard.errors import CallError
from jshard.linen.annotation import Annotation, annotation_for, annotation_of
from jshard.linen.boxes import is_padded
from jshard.linen.call import FreeFunction, InterceptedCall, Lifted, LinenCall, call_lifted
from jshard.linen.layout import Layout, warn_of_stacks
from jshard.linen.parameters import PARAMS, described, described_leaves, flat, flat_params, placeable
from jshard.linen.survey import Survey
from jshard.plans import call_checks, checks, replication
from jshard.plans.array_paths import key_texts
from jshard.plans.mesh import is_concrete
from jshard.plans.units import Method, Path, Unit, dotted

R = TypeVar("R")

ROOT = "_jshard_root"
"""An attribute of a submodule that was reached from outside: the bound annotated model."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Running:
    """An annotated model that runs.

    Attributes:
        annotation: of the model.
        layout: of its parameters.
        prefix: the path of the model.
        unit: the path of the unit that runs, from the model.
        is_global_view: whether the model runs in global view, around units that are never gathered.
    """

    annotation: Annotation
    layout: Layout
    prefix: Path
    unit: Path = ()
    is_global_view: bool = False

    def path(self, module: nn.Module) -> Path:
        """Returns the path of a module from the annotated one."""
        return tuple(module.path)[len(self.prefix) :]


@dataclasses.dataclass(frozen=True, eq=False)
class _AsWritten:
    """Inside a call in global view: what an annotated model calls on itself is no call from outside."""

    annotation: Annotation


_Surroundings = _Running | Survey | _AsWritten
_surroundings: contextvars.ContextVar[_Surroundings | None] = contextvars.ContextVar("surroundings", default=None)
_is_intercepting: contextvars.ContextVar[bool] = contextvars.ContextVar("is_intercepting", default=False)
# The survey or the layout, as part of jit's cache key: a trace cached by nn.jit would hide its units from another
# survey, and run them with another annotation.
_traced_for = jax.make_user_context(default_value=None)


def is_inside_model() -> bool:
    """Returns whether an annotated Linen model runs: its own calls of submodules come from inside."""
    return _surroundings.get() is not None


# Ways into an annotated model.


def call_annotated(module: nn.Module, method: Method, *args: object, **kwargs: object) -> object:
    """Runs a method of an annotated module with the interceptor in place.

    Flax does not intercept calls of methods created by its transformations, only those of the methods inside.
    """
    with _interception():
        if not _compat.is_transformed(method):
            return method(module, *args, **kwargs)
        plain = functools.partial(method, module)
        return _intercept(plain, args, kwargs, nn.module.InterceptorContext(module, method.__name__, plain))


def call_function(function: FreeFunction, module: nn.Module, *args: object, **kwargs: object) -> object:
    """Runs a function of a bound, annotated module as one call, like a method of its class."""
    annotation = annotation_of(module)
    # As in `_run_from_outside`, where Flax does not bring a function that is no method.
    call = InterceptedCall(module, function, args, kwargs, functools.partial(function, module, *args, **kwargs))
    if annotation is None or is_inside_model():
        return call.run_plain()
    with _interception():
        if module.is_initializing():
            return _initialise(annotation, module, call.run_plain)
        if in_global_view():
            return _run_as_written(annotation, call)
        if annotation.gathers_all:
            return _open_region(annotation, call)
        with _context(_in_global_view(annotation, module)):
            return call.run_plain()


def initialise(module: nn.Module, run: Callable[[], R]) -> R:
    """Runs everything that creates a bound, annotated module's variables; a single method call creates only some."""
    with _interception():
        return _initialise(annotation_for(module), module, run)


@contextlib.contextmanager
def _interception() -> Iterator[None]:
    """Makes Flax pass every method call to `_intercept` inside the context; nested uses have no further effect."""
    if _is_intercepting.get():
        yield
        return
    # Flax calls an interceptor once for each time that it was entered: a call would be split twice.
    with during(_is_intercepting, True), nn.intercept_methods(_intercept):
        yield


@contextlib.contextmanager
def _context(surroundings: _Running | Survey) -> Iterator[None]:
    """Sets what a method finds around it; entered at each run, because the engine may run the method at any time."""
    # Hashed by identity: both classes are dataclasses with `eq=False`.
    traced_for = surroundings.layout if isinstance(surroundings, _Running) else surroundings
    with during(_surroundings, surroundings), _interception(), _traced_for(traced_for):
        yield


# Which way a call takes.


def _intercept(
    plain: Callable, args: tuple, kwargs: Mapping[str, object], context: nn.module.InterceptorContext
) -> object:
    """Runs one method call of any module in or around an annotated one."""
    module = context.module
    surroundings = _surroundings.get()
    if not _is_call(module, context.method_name):
        return plain(*args, **kwargs)
    if isinstance(surroundings, Survey):
        result = plain(*args, **kwargs)
        # After the call: in a loop or a checkpoint, inner calls of the module come first (see `record_call`).
        surroundings.record_call(module, args, dict(kwargs))
        return result
    function = context.orig_method.func  # type: ignore[attr-defined]  # a partial of the plain method
    call = InterceptedCall(module, function, args, kwargs, functools.partial(plain, *args, **kwargs))
    if isinstance(surroundings, _AsWritten):
        if annotation_of(module) in (None, surroundings.annotation):
            return call.run_plain()
        surroundings = None  # another annotated model, which the model in global view calls: as from outside
    if surroundings is None:
        return _run_from_outside(call)
    return _run_inside(surroundings, call)


def _is_call(module: nn.Module, name: str) -> bool:
    """Returns whether a method runs the model: `__call__`, and public methods that Flax's base class lacks."""
    if module.scope is None:
        return False
    if name == "__call__":
        return True
    return not name.startswith("_") and hasattr(type(module), name) and not hasattr(nn.Module, name)


def _run_from_outside(call: InterceptedCall) -> object:
    annotation = annotation_of(call.module)
    if annotation is None:
        return _run_linked(call)
    if call.module.is_initializing():
        return _initialise(annotation, call.module, call.run_plain)
    if in_global_view():
        return _run_as_written(annotation, call)
    if annotation.gathers_all:
        return _open_region(annotation, call)
    return _run_beside(_in_global_view(annotation, call.module), call)


def _run_inside(running: _Running, call: InterceptedCall) -> object:
    _refuse_other(running, call.module)
    if running.is_global_view:
        return _run_beside(running, call)
    if _is_unit(running, call.module):
        return _call_unit(running, call)
    return call.run_plain()


def _refuse_other(running: _Running, module: nn.Module) -> None:
    inner = annotation_of(module)
    if inner is not None and inner is not running.annotation:
        raise CallError(
            "An annotated Linen module was called inside another one.",
            where=f"{running.annotation.base.__name__}: {inner.base.__name__} {dotted(running.path(module))}",
            why="one fully_shard of the outermost module sets everything for a Linen model.",
            do='js.fully_shard(model, mesh=mesh, units={Inner: {"remat": "full"}})',
        )


def _is_unit(running: _Running, module: nn.Module) -> bool:
    """Returns whether a call is that of a unit; False if it is already running, or if the layers are still stacked.

    `nn.scan` calls the module of its layers twice: with all of them, and inside the loop with one, which is the unit's.
    """
    path = running.path(module)
    # A method of the unit may call another one of it, which comes here with the same path.
    if path in ((), running.unit) or path not in running.layout.records:
        return False
    num_stacked = running.layout.records[path].placement.stacked
    if not num_stacked:
        return True
    for inner_path, leaf in placeable(module.variables):
        planned = running.layout.leaves.get((*path, *inner_path))
        if planned is not None:
            ndim = len(described(leaf, inner_path).shape)
            return ndim == len(planned.placement.shape) - num_stacked
    return True


# Calls that the engine runs.


def _open_region(annotation: Annotation, call: InterceptedCall) -> object:
    """Runs the outermost call into a model as the region."""
    prefix = tuple(call.module.path)

    def run(linen_call: LinenCall) -> tuple[object, Lifted]:
        linen_call.optimizer = annotation.root.optimizer
        layout = annotation.layout_of(linen_call.leaves, lambda: _surveyed(annotation, linen_call))
        unit = linen_call.place(layout)
        linen_call.store()  # as placed: a plain array may belong to a parameter that is stored padded
        replication.check_replicated(layout.root, layout.root.kind)
        return _run_by_engine(linen_call, unit, _Running(annotation, layout, prefix))

    return call_lifted(call, prefix=prefix, interceptor=_intercept, run=run)


def _call_unit(running: _Running, call: InterceptedCall) -> object:
    def run(linen_call: LinenCall) -> tuple[object, Lifted]:
        unit = linen_call.place(running.layout)
        return _run_by_engine(linen_call, unit, dataclasses.replace(running, unit=linen_call.path))

    return call_lifted(call, prefix=running.prefix, interceptor=_intercept, run=run)


def _run_beside(running: _Running, call: InterceptedCall) -> object:
    """Runs a call in global view: around units that are never gathered, of such a unit, or beside them, as a region."""
    # A table is further inside: its calls, and those beside it, come here one by one.
    if running.path(call.module) in running.layout.global_view_paths:
        with _context(running):
            return call.run_plain()

    def run(linen_call: LinenCall) -> tuple[object, Lifted]:
        linen_call.optimizer = running.layout.root.optimizer
        unit = linen_call.place(running.layout)
        linen_call.store()
        region = dataclasses.replace(running, unit=linen_call.path, is_global_view=False)
        return _run_by_engine(linen_call, unit, region)

    return call_lifted(call, prefix=running.prefix, interceptor=_intercept, run=run)


def _in_global_view(annotation: Annotation, module: nn.Module) -> _Running:
    """Returns the surroundings of the outermost call into a model with units that are never gathered."""
    layout = annotation.known_layout(described_leaves(module.variables))
    replication.check_replicated(layout.root, layout.root.kind)
    return _Running(annotation, layout, tuple(module.path), is_global_view=True)


def _run_linked(call: InterceptedCall) -> object:
    """Runs a call from outside of a module that may belong to a bound, annotated model, as a region of its own."""
    root = vars(call.module).get(ROOT)
    if root is None or call.module.is_initializing():
        return call.run_plain()
    annotation = annotation_for(root)
    leaves = described_leaves(root.variables)
    if in_global_view():
        return _run_as_written(annotation, call)
    # Without a survey, which would see only the units that this call reaches.
    layout = annotation.layout_by_init(leaves)
    if layout is None:
        _warn_of_unknown(annotation.base.__name__, dotted(tuple(call.module.path)))
        return call.run_plain()
    return _run_beside(_Running(annotation, layout, tuple(root.path), is_global_view=True), call)


@functools.cache
def _warn_of_unknown(kind: str, path: str) -> None:
    """Warns, once, of a submodule that is called before the parameters of its model are known."""
    _compat.warn_user(
        f"{path} of {kind} runs in global view, where the compiler places the communication: it is called by itself,"
        f" and init has not been traced, which shows where the parameters of {kind} are. Before the call:\n"
        "  jax.eval_shape(model.init, jax.random.key(0), x)  # computes nothing"
    )


def _run_by_engine(linen_call: LinenCall, unit: Unit, running: _Running) -> tuple[object, Lifted]:
    call_checks.check_has_arrays(linen_call.where, linen_call.params)
    # When the engine runs the method, calls in it must find this model, and the unit that runs: see `_is_unit`.
    linen_call.context = lambda: _context(running)
    return run_call(linen_call, dotted(linen_call.path), unit)


# Calls that plain Flax runs.


def _run_as_written(annotation: Annotation, call: InterceptedCall) -> object:
    """Runs a call in global view; on a copy if parameters are stored in another form than the model reads."""

    def run(linen_call: LinenCall) -> tuple[object, Lifted]:
        linen_call.optimizer = annotation.root.optimizer
        # Gradients of padded parameters are guarded here, as no region does it.
        params = linen_call.logical(linen_call.guarded(linen_call.params))
        outs, state = linen_call.body(params, linen_call.inputs)
        assert linen_call.result is not None, "it has run"
        return linen_call.finish([*outs, *state], linen_call.result)

    with during(_surroundings, _AsWritten(annotation)):
        if not _is_stored_otherwise(call.module):
            return call.run_plain()
        return call_lifted(call, prefix=tuple(call.module.path), interceptor=_intercept, run=run)


def _is_stored_otherwise(module: nn.Module) -> bool:
    """Returns whether a parameter that a bound module may read is padded or in host memory."""
    assert module.scope is not None, "it is bound"
    # Of the outermost scope: a module may borrow others from anywhere below it.
    params = module.scope.root.variables().get(PARAMS, {})
    boxes = [leaf for _, leaf in flat_params(params)]
    if any(map(is_padded, boxes)):
        return True
    return any(isinstance(x, jax.Array) and _compat.on_host(x) for x in jax.tree.leaves(boxes))


def _surveyed(annotation: Annotation, linen_call: LinenCall) -> Survey:
    """Returns the units that a call reaches, from a trace of shapes; for parameters that no `init` was traced for.

    A method other than `__call__` need not reach them all.
    """
    survey = Survey(annotation.choices, linen_call.prefix)
    linen_call.context = lambda: _context(survey)
    with inside_annotated_call(linen_call):
        jax.eval_shape(lambda: linen_call.body(linen_call.logical(linen_call.params), linen_call.inputs))
    if linen_call.function.__name__ == "__call__":
        survey.check(annotation.base.__name__, linen_call.leaves, annotation.root.placement.ignored)
    return survey


# Initialisation.


def _initialise(annotation: Annotation, module: nn.Module, run: Callable[[], R]) -> R:
    """Lets the model create its variables, makes the plan, and places the parameters."""
    kind = annotation.base.__name__
    survey = Survey(annotation.choices, tuple(module.path))
    with _context(survey):
        result = run()
    leaves = described_leaves(module.variables)
    if not leaves:
        _check_has_parameters(module, kind)
    # Before the layout, which would plan without the units that were not found.
    survey.check(kind, leaves, annotation.root.placement.ignored)
    layout = annotation.layout_of_init(leaves, survey)
    warn_of_stacks(layout.root.kind, layout.plan, tuple(units.text for units in annotation.choices))
    _place(module, layout)
    return result


_STATE = frozenset({"batch_stats", "cache", "intermediates", "perturbations"})  # cannot be mistaken for parameters


def _check_has_parameters(module: nn.Module, kind: str) -> None:
    """Raises if a model without parameters has float arrays in other collections, which would not be sharded."""
    places = []
    for name in module.variables.keys() - _STATE:
        for path, x in flat(module.variables[name]):
            for array in replication.others_in((name, *path), x, name):
                places.append(f"{kind}: {dotted(array.path)}  {array.form}")
    if places:
        do = 'w = self.param("w", nn.initializers.lecun_normal(), (64, 64))  # instead of self.variable(...)'
        raise checks.nothing_to_shard(places, needed="the collection params", do=do)


def _place(module: nn.Module, layout: Layout) -> None:
    """Shards the parameters from `init`. One that would be padded is unchanged: its creator reads its shape."""
    mesh = layout.root.mesh
    if not is_concrete(mesh):
        return

    def placed(path: tuple, x: jax.Array) -> jax.Array:
        leaf = layout.leaves.get(key_texts(path))
        if leaf is None or leaf.placement.padding:  # a random key has no place
            return x
        return lax.with_sharding_constraint(x, NamedSharding(mesh, leaf.placement.partition_spec))

    assert module.scope is not None, "it is bound"
    params = dict(module.variables.get(PARAMS, {}))
    for name, tree in jax.tree.map_with_path(placed, params).items():
        module.scope.put_variable(PARAMS, name, tree)
