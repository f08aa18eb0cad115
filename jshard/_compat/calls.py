"""Primitives whose equations hold a program: how they are staged and lowered; and the linear map of a derivative."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import core
from jax.extend import core as jex
from jax.interpreters import mlir, partial_eval

from jshard._compat import private_names

Params = dict[str, Any]
DropUnused = Callable[[list[bool], jex.JaxprEqn], tuple[list[bool], jex.JaxprEqn | None]]
"""From which results are used, and an equation: which operands are used, and a smaller equation."""


def is_literal(atom: object) -> bool:
    """Returns whether an atom of a jaxpr is a literal."""
    return isinstance(atom, jex.Literal)


def stage_with_params(primitive: jex.Primitive, params_of: Callable[..., Params]) -> None:
    """Changes the parameters of a primitive's equations when they become part of a jaxpr, and not before.

    Other transformations ask the primitive for a rule first, and then there is no such equation. If JAX's private table
    is gone, equations keep the parameters that they were bound with.

    Args:
        primitive: the primitive.
        params_of: returns the parameters, from the types of the operands and the parameters before.
    """
    rules = private_names.STAGING_RULES.find()
    if rules is None:
        return

    def stage(trace: private_names.Private, source_info: object, *tracers: core.Tracer, **params: object) -> object:
        staged = params_of([tracer.aval for tracer in tracers], **params)
        return trace.default_process_primitive(primitive, tracers, staged, source_info)

    rules[primitive] = stage


def remove_unused(primitive: jex.Primitive, rule: DropUnused) -> None:
    """Registers the rule by which a primitive's equations lose what nothing uses.

    Args:
        primitive: the primitive.
        rule: returns, from which results are used and an equation, which operands are used, and a smaller equation.
    """

    def of_equation(results_used: list[bool], *rest: Any) -> tuple[list[bool], jex.JaxprEqn | None]:
        return rule(results_used, rest[-1])  # since jax 0.12 the second argument says which operands are references

    partial_eval.dce_rules[primitive] = of_equation


def hold_weakly(kind: type) -> type:
    """Lets JAX's caches hold objects of a class weakly, as they hold jaxprs: they are parameters of equations.

    If the private name is gone, JAX keeps the latest thousands of such objects, with their programs.
    """
    kinds = private_names.WEAK_CACHE_KEYS.find()
    if kinds is not None:
        kinds.add(kind)
    return kind


def check_inside(primitive: jex.Primitive, program_of: Callable[..., jex.ClosedJaxpr]) -> None:
    """Lets `checkify` look into the programs of a primitive's equations; without the private names it does not.

    Args:
        primitive: the primitive.
        program_of: returns the program, from the types of the operands and the parameters.
    """
    error_class = private_names.CHECKIFY_ERROR.find()
    checkify_jaxpr = private_names.CHECKIFY_JAXPR.find()
    rules = private_names.CHECKIFY_RULES.find()
    if error_class is None or checkify_jaxpr is None or rules is None:
        return

    def check(*args: Any, **params: object) -> object:
        context = () if isinstance(args[0], error_class) else args[:1]  # since jax 0.12
        error, enabled_errors, *values = args[len(context) :]
        program = program_of([jax.typeof(x) for x in values], **params)
        return checkify_jaxpr(*context, program, enabled_errors, error, *values)

    rules[primitive] = check


def lower_jaxpr(ctx: mlir.LoweringRuleContext, closed: jex.ClosedJaxpr, operands: Sequence[Any]) -> Any:
    """Lowers a program in place of an equation, without tracing it again as `mlir.lower_fun` would."""
    if _has(closed.jaxpr, ("call_hi_primitive",)):  # since jax 0.12: only a trace for lowering turns it into others
        return mlir.lower_fun(jex.jaxpr_as_fun(closed), multiple_results=True)(ctx, *operands)
    constants = [_lowered_constant(const) for const in closed.consts]
    module_context = ctx.module_context
    # A branch for some platforms is lowered for these alone, as in JAX's own rule for a call.
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
    # Tokens order effects, such as ordered callbacks: the equations after this one continue from these.
    ctx.set_tokens_out(tokens)
    return results


def _lowered_constant(const: object) -> Any:
    """Returns the values of a constant: more than one if its type is made of several, as of a key."""
    values = mlir.ir_constants(const)
    return values[0] if len(values) == 1 else values


def _has(jaxpr: jex.Jaxpr, names: tuple[str, ...]) -> bool:
    """Returns whether a program has equations of certain primitives, also inside of others."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in names:
            return True
        if any(_has(inner, names) for inner in jex.jaxprs_in_params(eqn.params)):
            return True
    return False


@dataclasses.dataclass(frozen=True)
class _LinearFunction:
    """The linear function that `jax.vjp` transposes, as a program."""

    program: jex.Jaxpr  # of the residuals, the tangents that are not zero, and the structured residuals
    residuals: list[jax.Array]
    structured_residuals: list[jax.Array]
    is_zero: list[bool]  # of each result: whether its tangent is zero for all arguments

    @classmethod
    def of(cls, vjp: private_names.Private) -> "_LinearFunction | None":
        """Returns the function of a result of `jax.vjp`; None if it is not where it was, or cannot be run."""
        try:
            sources, is_zero, program = vjp.fun.args[:3]
            # `idx` counts all arguments. In place of one that the function does not read, JAX has an object of this
            # private class, known here by its name: it must stay a leaf, or the numbers would shift.
            arguments = jax.tree.leaves(vjp.args_res, is_leaf=lambda x: type(x).__name__ == "NotNeeded")
            residuals = []
            # A residual is an argument itself, or a value that forward has computed.
            for source in sources:
                values = arguments if source.primal else vjp.opaque_residuals
                residuals.append(values[source.idx])
            structured = jax.tree.leaves(getattr(vjp, "structured_residuals", ()))
            can_run = not _has(program, ("call_hi_primitive_linearized",))
        except (AttributeError, IndexError, TypeError, ValueError):
            return None
        if not can_run:
            return None
        if _has_transposed_only(program):
            program = _of_plain_primitives(program)
        return cls(program, residuals, structured, is_zero)


def tangents_of(
    vjp: private_names.Private, tangents: Sequence[jax.Array], results: Sequence[jax.ShapeDtypeStruct]
) -> list[jax.Array]:
    """Returns the results' tangents of the function of which `jax.vjp` has made `vjp`, for tangents of its argument.

    `jax.vjp` linearises a function and transposes that. Its result holds the linear function under names that are not
    documented. If they have changed, the transpose is transposed again, which JAX cannot do for every function.

    Args:
        vjp: of a function of one list of arrays, which returns a list.
        tangents: of the arrays in the list.
        results: the types of the results.
    """
    linear = _LinearFunction.of(vjp)
    if linear is None:
        transposed_again = jax.linear_transpose(lambda cotangents: vjp(cotangents)[0], list(results))
        return transposed_again(list(tangents))[0]
    # The program computes only the tangents that are not zero for all arguments.
    computed = iter(core.eval_jaxpr(linear.program, linear.residuals, *tangents, *linear.structured_residuals))
    tangents_out = []
    for aval, is_zero in zip(results, linear.is_zero, strict=True):
        tangents_out.append(jax.numpy.zeros(aval.shape, aval.dtype) if is_zero else next(computed))
    return tangents_out


def _of_plain_primitives(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """Returns a linear jaxpr that can be run: since jax 0.12 some of its equations can only be transposed."""
    equations = []
    for eqn in jaxpr.eqns:
        primitive = eqn.primitive
        if _is_transposed_only(eqn):
            primitive = getattr(primitive, "prim", primitive)
        params = {name: _with_plain_primitives(value) for name, value in eqn.params.items()}
        equations.append(eqn.replace(primitive=primitive, params=params))
    return jaxpr.replace(eqns=equations)


def _is_transposed_only(eqn: jex.JaxprEqn) -> bool:
    return eqn.primitive.name.startswith("vjp_node[")


def _with_plain_primitives(value: object) -> object:
    """Returns a parameter of an equation; a program in it, or a tuple of programs, with plain primitives."""
    if isinstance(value, tuple) and value and all(isinstance(x, (jex.Jaxpr, jex.ClosedJaxpr)) for x in value):
        return tuple(map(_with_plain_primitives, value))
    if not isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr)) or not _has_transposed_only(value):
        return value
    if isinstance(value, jex.Jaxpr):
        return _of_plain_primitives(value)
    return jex.ClosedJaxpr(_of_plain_primitives(value.jaxpr), value.consts)


def _has_transposed_only(jaxpr: jex.Jaxpr | jex.ClosedJaxpr) -> bool:
    """Returns whether a program has an equation that can only be transposed, also inside of others."""
    for eqn in jaxpr.eqns:
        if _is_transposed_only(eqn) or any(map(_has_transposed_only, jex.jaxprs_in_params(eqn.params))):
            return True
    return False
