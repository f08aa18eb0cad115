"""Inspection of traces: axes, tracers, and the equations of a program with the settings at their trace."""

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
from jax import core
from jax.extend import core as jex
from jax.extend import random as jex_random
from jax.extend import source_info_util
from jax.interpreters import partial_eval

from jshard._compat import private_names


def trace_context() -> Hashable:
    """Returns the settings on which a trace depends: precision of products, dtype promotion, the mesh, user contexts.

    If the private name is gone, each result is different.
    """
    context = private_names.TRACE_CONTEXT.find()
    return object() if context is None else context()


def varying_axes(x: object) -> frozenset[str]:
    """Returns the manual mesh axes over which a value inside `shard_map` differs."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def manual_axes() -> frozenset[str]:
    """Returns the mesh axes that are manual in the current context: not empty inside a `shard_map`."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def automatic_axes() -> dict[str, int]:
    """Returns the axes of the mesh in use over which the compiler splits arrays, with their degrees above 1."""
    mesh = jax.sharding.get_abstract_mesh()
    degrees = {}
    for axis in mesh.axis_names:
        if axis not in mesh.manual_axes and mesh.shape[axis] > 1:
            degrees[axis] = mesh.shape[axis]
    return degrees


def has_devices() -> bool:
    """Returns whether this process has initialised its devices; True if the private name is gone."""
    are_initialized = private_names.BACKENDS_ARE_INITIALIZED.find()
    return True if are_initialized is None else are_initialized()


def abstract_device() -> Any:
    """Returns kind, platform and number of cores of the devices of the mesh in use; None without a mesh or devices."""
    return jax.sharding.get_abstract_mesh().abstract_device


def is_tracer(x: object) -> bool:
    """Returns whether a value is traced, not concrete."""
    return isinstance(x, core.Tracer)


def is_concrete(x: object) -> bool:
    """Returns whether the numbers of a value are known, also in code that is differentiated; False if unknown."""
    if not is_tracer(x):
        return True
    has_numbers = private_names.HAS_NUMBERS.find()
    return False if has_numbers is None else has_numbers(x)


def in_trace() -> bool:
    """Returns whether operations are being traced, whatever their operands."""
    # Inside a trace even a constant is an equation of it.
    return is_tracer(jax.numpy.zeros(()))


def bind(eqn: jex.JaxprEqn, values: Sequence[object]) -> list[Any]:
    """Runs an equation of a jaxpr on other values; returns its results."""
    # `get_bind_params` turns programs among the parameters back into the functions that some primitives bind.
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    if eqn.primitive.multiple_results:
        return list(results)
    return [results]


def equation_setting(eqn: jex.JaxprEqn) -> Hashable:
    """Returns the name scopes around an equation, its effects, and the other settings at its trace."""
    return eqn.source_info.name_stack, eqn.ctx, frozenset(eqn.effects)


def is_same_rule(one: object, other: object) -> bool:
    """Returns whether two equations of `jax.custom_jvp` have one rule, without static arguments; False if unknown."""
    rule = _custom_rule(one)
    return rule is not None and rule is _custom_rule(other)


def _custom_rule(memoized: private_names.Private) -> object:
    """Returns the user's function in an equation of `jax.custom_jvp`, two closures deep; None for any other form."""
    try:
        wrapped = inspect.getclosurevars(memoized.f).nonlocals["fn"]
        rule = inspect.getclosurevars(wrapped).nonlocals["jvp"]
        # One transform flattens its arguments; more of them hold static ones, which the function does not show.
        return rule.f if len(rule.transforms) == 1 else None
    except (AttributeError, KeyError, TypeError):
        return None


def with_results(jaxpr: jex.Jaxpr, outvars: Sequence[jex.Var]) -> jex.Jaxpr:
    """Returns a jaxpr with other results."""
    # The paths name the old results; JAX's own checks refuse a jaxpr with more or fewer paths than results.
    return jaxpr.replace(outvars=outvars, debug_info=jaxpr.debug_info._replace(result_paths=None))


def axis_names(jaxpr: jex.Jaxpr) -> list[str]:
    """Returns the axes of a vmap or a shard_map around that a program's collectives name."""
    names = [getattr(effect, "name", None) for effect in jaxpr.effects]
    return sorted(str(name) for name in names if name is not None)


def has_effects(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation does something besides computing. In JAX to name an axis counts as an effect."""
    return any(getattr(effect, "name", None) is None for effect in eqn.effects)


@contextlib.contextmanager
def equation_context(eqn: jex.JaxprEqn) -> Iterator[None]:
    """Gives operations traced inside the lines, names and settings (compute_on, metadata, mesh) of an equation."""
    with running(eqn), eqn.ctx.manager:
        yield


def scan_arguments(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """Returns how many arguments of an equation of `jax.lax.scan` are constants, and how many are carried."""
    # Up to jax 0.11.
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.12
    return len(list(consts)), len(list(carry))


@contextlib.contextmanager
def fast_shape_tracing() -> Iterator[None]:
    """Makes the time to build a large model abstractly, inside this context, linear in its size.

    Flax reads the sharding of every traced RNG counter; jax raises an AttributeError whose text, which Flax discards,
    costs a search through the whole program so far: quadratic, two thirds of the time for 96 layers. There is no public
    switch; if the private name is gone, this does nothing.
    """
    with private_names.TRACER_ORIGIN.replaced(lambda tracer: ""):
        yield


@contextlib.contextmanager
def running(eqn: jex.JaxprEqn) -> Iterator[None]:
    """Gives operations traced inside the lines, names and settings of an equation; the mesh stays the same."""
    # Below the scopes that are open here, as if the equation were traced inside them.
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with contextlib.ExitStack() as contexts:
        for context in _settings(eqn.ctx):
            contexts.enter_context(context)
        contexts.enter_context(source_info_util.user_context(eqn.source_info.traceback, name_stack=stack))
        yield


@contextlib.contextmanager
def line_of(eqn: jex.JaxprEqn) -> Iterator[None]:
    """Gives operations traced inside the user's line of an equation, and not its names."""
    with source_info_util.user_context(eqn.source_info.traceback):
        yield


def _settings(context: private_names.Private) -> Iterator[contextlib.AbstractContextManager[object]]:
    """Yields the settings of a user's `compute_on`, `set_xla_metadata` or `threefry_partitionable` at an equation."""
    if context.compute_type is not None:
        yield _compute_on(context.compute_type)
    if context.xla_metadata:
        from jax.experimental.xla_metadata import set_xla_metadata

        yield set_xla_metadata(**context.xla_metadata)
    # Random numbers depend on it: an equation must draw the bits that its own trace asked for.
    partitionable: Any = jax.threefry_partitionable
    if context.threefry_partitionable != partitionable.value:
        yield partitionable(context.threefry_partitionable)


def _compute_on(compute_type: str) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which operations run on the host, or on another stream."""
    extend_compute_type = private_names.COMPUTE_TYPE.find()
    if extend_compute_type is not None:
        return extend_compute_type(compute_type)
    from jax.experimental import compute_on as module

    compute_on: Any = module.compute_on
    if "out_memory_spaces" in inspect.signature(compute_on).parameters:  # since jax 0.12 it wraps a function
        raise private_names.COMPUTE_TYPE.missing()
    return compute_on(compute_type)


def threefry_bits() -> Callable[[jax.Array, int, tuple[int, ...]], jax.Array] | None:
    """Returns the function that draws the bits of threefry keys, of a key's data, the bits' width and their shape.

    They equal those of `jax.random.bits`, which is one equation for any generator. This one is made of elementwise
    equations over the positions of the bits, so a shard can draw its own. None if this version of JAX does not
    offer it.
    """
    impl = getattr(jex_random, "threefry_prng_impl", None)
    return getattr(impl, "random_bits", None)


def without_dead_code(
    closed: jex.ClosedJaxpr, keep: Sequence[bool] = (), results_used: Sequence[bool] = ()
) -> tuple[jex.ClosedJaxpr, list[bool]]:
    """Returns a program without the parts that its results do not need, and which of its inputs it then has.

    Args:
        closed: the program.
        keep: for each input, whether it is kept in any case; by default none.
        results_used: for each result, whether it is kept; by default all.
    """
    keep = keep or [False] * len(closed.jaxpr.invars)
    results_used = results_used or [True] * len(closed.jaxpr.outvars)
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, list(results_used), list(keep))
    return jex.ClosedJaxpr(jaxpr, closed.consts), list(used)
