"""Primitives whose equations hold a program: how they are staged and lowered; and the linear map of a derivative."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import core
from jax.extend import core as jex
from jax.interpreters import mlir, partial_eval

Params = dict[str, Any]


def is_literal(atom: Any) -> bool:
    """Whether an atom of a jaxpr is a literal."""
    return isinstance(atom, jex.Literal)


def stage_with_params(primitive: jex.Primitive, params_of: Callable[..., Params]) -> None:
    """Changes the parameters of a primitive's equations when they become part of a jaxpr, and not before.

    Other transformations ask the primitive for a rule first, and then there is no such equation. If JAX's private table
    is gone, equations keep the parameters that they were bound with.

    Args:
        primitive: the primitive.
        params_of: returns the parameters, from the types of the operands and the parameters before.
    """
    try:
        from jax._src.interpreters.partial_eval import custom_staging_rules as rules
    except ImportError:
        return

    def stage(trace: Any, source_info: Any, *tracers: Any, **params: Any) -> Any:
        staged = params_of([tracer.aval for tracer in tracers], **params)
        return trace.default_process_primitive(primitive, tracers, staged, source_info)

    rules[primitive] = stage


def remove_unused(primitive: jex.Primitive, rule: Callable[[list[bool], Any], tuple[list[bool], Any]]) -> None:
    """Registers the rule by which a primitive's equations lose what nothing uses.

    Args:
        primitive: the primitive.
        rule: returns, from which results are used and an equation, which operands are used, and a smaller equation.
    """

    def of_equation(results_used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
        return rule(results_used, rest[-1])  # since jax 0.12 the second argument says which operands are references

    partial_eval.dce_rules[primitive] = of_equation


def hold_weakly(kind: type) -> type:
    """Lets JAX's caches hold objects of a class weakly, as they hold jaxprs: they are parameters of equations.

    If the private name is gone, JAX keeps the latest thousands of such objects, with their programs.
    """
    try:
        from jax._src.util import weakref_cache_key_types
    except ImportError:
        return kind
    weakref_cache_key_types.add(kind)
    return kind


def check_inside(primitive: jex.Primitive, program_of: Callable[..., jex.ClosedJaxpr]) -> None:
    """Lets `checkify` look into the programs of a primitive's equations; without the private names it does not.

    Args:
        primitive: the primitive.
        program_of: returns the program, from the types of the operands and the parameters.
    """
    try:
        from jax._src.checkify import Error, checkify_jaxpr, error_checks
    except ImportError:
        return

    def check(*args: Any, **params: Any) -> Any:
        context = () if isinstance(args[0], Error) else args[:1]  # since jax 0.12
        error, enabled_errors, *values = args[len(context) :]
        program = program_of([jax.typeof(x) for x in values], **params)
        return checkify_jaxpr(*context, program, enabled_errors, error, *values)

    error_checks[primitive] = check


def lower_jaxpr(ctx: Any, closed: jex.ClosedJaxpr, operands: Sequence[Any]) -> Any:
    """Lowers a program in place of an equation, without tracing it again as `mlir.lower_fun` would."""
    if _has(closed.jaxpr, ("call_hi_primitive",)):  # since jax 0.12: only a trace for lowering turns it into others
        return mlir.lower_fun(jex.jaxpr_as_fun(closed), multiple_results=True)(ctx, *operands)
    constants = []
    for const in closed.consts:
        values = mlir.ir_constants(const)
        constants.append(values[0] if len(values) == 1 else values)
    module_context = ctx.module_context
    if ctx.platforms is not None:
        module_context = module_context.replace(platforms=ctx.platforms)
    results, tokens = mlir.jaxpr_subcomp(
        module_context,
        closed.jaxpr,
        ctx.name_stack,
        ctx.tokens_in,
        constants,
        *operands,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        outer_traceback=None,
    )
    ctx.set_tokens_out(tokens)
    return results


def _has(jaxpr: Any, names: tuple[str, ...]) -> bool:
    """Whether a program has equations of some primitives."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in names:
            return True
        if any(_has(inner, names) for inner in jex.jaxprs_in_params(eqn.params)):
            return True
    return False


def tangents_of(vjp: Any, tangents: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """Returns the results' tangents of the function of which `jax.vjp` has made `vjp`, for tangents of its argument.

    `jax.vjp` linearises a function and transposes that. Its result holds the linear function under names that are not
    documented. If they have changed, the transpose is transposed again, which JAX cannot do for every function.

    Args:
        vjp: of a function of one list of arrays, which returns a list.
        tangents: of the arrays in the list.
        results: the types of the results.
    """
    try:
        sources, without_tangent, linear = vjp.fun.args[:3]
        arguments = jax.tree.leaves(vjp.args_res, is_leaf=lambda x: type(x).__name__ == "NotNeeded")
        residuals = [arguments[one.idx] if one.primal else vjp.opaque_residuals[one.idx] for one in sources]
        structured = jax.tree.leaves(getattr(vjp, "structured_residuals", ()))
        can_run = not _has(linear, ("call_hi_primitive_linearized",))
    except (AttributeError, IndexError, TypeError, ValueError):
        can_run = False
    if not can_run:
        transposed_again = jax.linear_transpose(lambda cotangents: vjp(cotangents)[0], list(results))
        return transposed_again(list(tangents))[0]
    linear = _of_plain_primitives(linear) if _has_transposed_only(linear) else linear
    tangents_out = iter(core.eval_jaxpr(linear, residuals, *tangents, *structured))
    filled = []
    for aval, is_zero in zip(results, without_tangent, strict=True):
        filled.append(jax.numpy.zeros(aval.shape, aval.dtype) if is_zero else next(tangents_out))
    return filled


def _of_plain_primitives(jaxpr: Any) -> Any:
    """Returns a linear jaxpr that can be run: since jax 0.12 some of its equations can only be transposed."""
    equations = []
    for eqn in jaxpr.eqns:
        plain = getattr(eqn.primitive, "prim", eqn.primitive) if _is_transposed_only(eqn) else eqn.primitive
        params = {name: _with_plain_primitives(value) for name, value in eqn.params.items()}
        equations.append(eqn.replace(primitive=plain, params=params))
    return jaxpr.replace(eqns=equations)


def _is_transposed_only(eqn: Any) -> bool:
    return eqn.primitive.name.startswith("vjp_node[")


def _with_plain_primitives(value: Any) -> Any:
    if isinstance(value, tuple) and value and all(isinstance(x, (jex.Jaxpr, jex.ClosedJaxpr)) for x in value):
        return tuple(map(_with_plain_primitives, value))
    if not isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr)) or not _has_transposed_only(value):
        return value
    if isinstance(value, jex.Jaxpr):
        return _of_plain_primitives(value)
    return jex.ClosedJaxpr(_of_plain_primitives(value.jaxpr), value.consts)


def _has_transposed_only(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        if _is_transposed_only(eqn) or any(map(_has_transposed_only, jex.jaxprs_in_params(eqn.params))):
            return True
    return False
