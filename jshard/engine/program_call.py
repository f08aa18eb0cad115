"""Calls of traced programs as equations, with rules that give calls of new programs.

A call of an annotated module is one equation: that of a region, or of a unit inside it. JAX's transformations ask
the primitive for rules, and every rule answers with calls of other programs in global view, where each function still
has the rules that its author gave it. Only lowering partitions. JAX's primitive for `jax.jit` works in the same way.

    transformation     what becomes of a call
    jvp, linearize     a call of the forward program, then one of the linear map from its residuals and the tangents
    transpose          of a linear map: a call of the backward program
    vmap               a call of the program over one more dim
    lowering           the program on one data shard

So derivatives of any order and mode, and maps, are programs like the first.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad, partial_eval

from jshard import _compat
from jshard.engine.program import Gradient, Program, abstract_all, dependents, evaluate_jaxpr, types_of
from jshard.engine.selections import at_positions, merged, others, picked, positions_of
from jshard.engine.values import has_gradient
from jshard.plans.memories import placed_like

Tangent: TypeAlias = jax.Array | ad.Zero
"""A tangent or a cotangent, as JAX gives it to a rule."""


class ProgramCall(abc.ABC):
    """A call of a program: the parameter of an equation that defines what it means, how it is run, and its rules.

    Operands are those of the program, then *copies*: gathered parameters that an earlier call has returned after the
    results of its program. A copy only saves a gather. Derivatives know nothing of it: they are those of the parameter.

    Attributes:
        program: the program, in global view, without copies.
        constants: operands without a derivative, by position: copies of parameters among the residuals.
        constant_results: results without a tangent, of the same kind.
        adjoint: if the call is the linear map of a derivative: its transpose.
        returns_copies: whether it returns copies.
    """

    program: Program
    returns_copies: bool
    constants: frozenset[int]
    constant_results: frozenset[int]
    adjoint: "Adjoint | None"

    saves_operands_themselves: ClassVar[bool] = False
    """Whether residuals that are operands of the call are saved as these, and not as results of its forward."""

    @abc.abstractmethod
    def bind(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Calls the program on operands; returns its results, then copies."""

    @abc.abstractmethod
    def derivative(self, wrt: tuple[bool, ...], avals: Sequence[ShapedArray]) -> "Derivative":
        """Returns the derivative with respect to some operands of the program; `avals` are those of all operands."""

    @abc.abstractmethod
    def pushforward(self, wrt: tuple[bool, ...], avals: Sequence[ShapedArray]) -> "Pushforward":
        """Returns results and tangents as one call, for programs that cannot be linearised."""

    @abc.abstractmethod
    def transposed(self, linear: tuple[bool, ...], live: tuple[bool, ...]) -> "ProgramCall":
        """Returns the transpose of a program that is linear in some operands together.

        Its operands are the others, then the cotangents of the `live` results; its results are the cotangents of the
        linear operands.
        """

    def copies_of(
        self, outs: Sequence[jax.Array], primals: Sequence[jax.Array], staged: ClosedJaxpr | None
    ) -> Sequence[jax.Array]:
        """Returns the copies that an equation returns, given those that its derivative's forward has returned."""
        del primals, staged
        return outs

    @abc.abstractmethod
    def mapped(self, size: int, is_mapped: tuple[bool, ...], *, takes_copies: bool) -> "MappedCall":
        """Returns the call over one more dim, the first of some of the program's operands.

        Args:
            size: of the dim.
            is_mapped: for each operand of the program, whether it has the dim.
            takes_copies: whether the call gets the copies that the one before it would get.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class Derivative:
    """The derivative of a call.

    Attributes:
        forward: takes the operands of the call; returns its results, the residuals, then copies.
        linear: takes the parameters, the residuals, the tangents of the operands that the derivative is with respect
            to, then copies; returns the tangents of results.
        num_residuals: how many residuals there are.
        has_tangent: for each result of the call, whether its tangent is among those that `linear` returns.
    """

    forward: ProgramCall
    linear: ProgramCall
    num_residuals: int
    has_tangent: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Pushforward:
    """The derivative of a call in forward mode alone.

    Attributes:
        call: takes the operands, then the tangents of those that the derivative is with respect to; returns the
            results and tangents.
        has_tangent: for each result, whether its tangent is returned.
        order: what each output is: the result at that position, or the tangent that is so many further on.
    """

    call: ProgramCall
    has_tangent: tuple[bool, ...]
    order: tuple[int, ...]

    @classmethod
    def order_of(cls, has_tangent: Sequence[bool], num_targets: int) -> tuple[int, ...]:
        """Returns the order in which gradients, results with a target, and their tangents come first."""
        # A call says of its first results how they leave: the tangent of a gradient is stored like the gradient.
        num_results = len(has_tangent)
        tangent_of: dict[int, int] = {}
        for result in positions_of(has_tangent):
            tangent_of[result] = num_results + len(tangent_of)  # tangents follow the results, without gaps
        order: list[int] = []
        for group in (range(num_targets), range(num_targets, num_results)):
            order += group
            order += [tangent_of[i] for i in group if i in tangent_of]
        return tuple(order)


class Adjoint(abc.ABC):
    """The transpose of the linear map of a derivative: the backward pass, which has a schedule of its own.

    Attributes:
        gradient: the derivative.
        has_tangent: for each result of the call that was differentiated, whether it can have a cotangent.
    """

    gradient: Gradient
    has_tangent: tuple[bool, ...]

    def live_results(self, live: tuple[bool, ...]) -> tuple[bool, ...]:
        """Returns for each result whether its cotangent is given; `live` omits the results without a tangent."""
        remaining = iter(live)
        return tuple(next(remaining) if has_tangent else False for has_tangent in self.has_tangent)

    def takes(self, linear: Sequence[bool]) -> bool:
        """Returns whether the linear operands are all tangents and nothing else."""
        # JAX may ask for the transpose with respect to some of the tangents. Backward is made for all of them together.
        num_tangents = sum(self.gradient.wrt)
        num_known = len(linear) - num_tangents
        return not any(linear[:num_known]) and all(linear[num_known:])

    @abc.abstractmethod
    def backward(self, live: tuple[bool, ...]) -> ProgramCall:
        """Returns the call that takes the parameters, the residuals, the cotangents that are live, then copies."""


@dataclasses.dataclass(frozen=True, eq=False)
class MappedCall:
    """A call over one more dim, and how its operands and results are brought into their form."""

    call: ProgramCall
    is_mapped: tuple[bool, ...]

    def enter(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns operands, mapped along dim 0, as the call takes them."""
        return list(operands)

    def leave(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns results, mapped along dim 0, as those of the call that was mapped."""
        return list(results)


def jvp_rule(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, call: ProgramCall, jaxpr: ClosedJaxpr | None
) -> tuple[list[jax.Array], list[Tangent]]:
    """Calls forward, then the linear map from its residuals and the tangents.

    Args:
        primals: operands.
        tangents: of each operand, or `ad.Zero`.
        call: the parameter of the equation.
        jaxpr: the other parameter. An equation that has it may be part of a jaxpr, with a fixed number of results.
    """
    # JAX has no rule for reverse mode: it linearises by this rule, which must leave an equation that is linear in the
    # tangents, and transposes that. So residuals are results of one equation and operands of the other, and backward is
    # what the transpose of the second one calls.
    num_operands = len(call.program.jaxpr.in_avals)
    wrt = _differentiated(primals[:num_operands], tangents[:num_operands], call.constants)
    if not any(wrt):
        # The call as it is, without the residuals that the forward of a derivative would return.
        results = call.bind(primals)
        return results, zero_tangents(results)

    nonzero_tangents = cast(list[jax.Array], picked(wrt, tangents[:num_operands]))
    try:
        derivative = call.derivative(wrt, types_of(primals))
    except (NotImplementedError, TypeError, ValueError):
        # Not each function can be linearised: a loop that runs until a condition holds has forward mode alone.
        if any(isinstance(t, partial_eval.JaxprTracer) for t in nonzero_tangents):
            raise  # this is linearisation, for reverse mode: with unknown tangents, results would be unknown as well
        return _pushed_forward(primals, nonzero_tangents, wrt, call)
    outs = derivative.forward.bind(primals)
    num_results = len(derivative.has_tangent)
    num_saved = num_results + derivative.num_residuals
    residuals = outs[num_results:num_saved]
    copies = outs[num_saved:]
    if call.saves_operands_themselves:
        residuals = _with_operands(residuals, primals, derivative)

    # Parameters are operands of the linear map, which computes again what depends on them alone: see `Gradient.kept`.
    # So no gathered parameter is a residual.
    params = primals[: call.program.num_params]
    result_tangents = derivative.linear.bind([*params, *residuals, *nonzero_tangents, *copies])

    results = outs[:num_results]
    zeros = zero_tangents(others(derivative.has_tangent, results))
    all_tangents: list[Tangent] = merged(derivative.has_tangent, result_tangents, zeros)
    if call.returns_copies:
        of_equation = call.copies_of(copies, primals, jaxpr)
        results += of_equation
        all_tangents += zero_tangents(of_equation)
    return results, all_tangents


def _with_operands(
    residuals: Sequence[jax.Array], primals: Sequence[jax.Array], derivative: Derivative
) -> list[jax.Array]:
    """Returns the residuals; those that are operands of the call are these operands, and no results of forward."""
    # A loop stacks what the calls in its body return, also a value that is the same in each iteration: the output of an
    # encoder, a mask. JAX sees that an operand is the same, and saves it once.
    jaxpr = derivative.forward.program.jaxpr.jaxpr
    operand_of = dict(zip(jaxpr.invars, primals, strict=False))  # copies are operands behind those of the program
    first_residual = len(derivative.has_tangent)
    saved = []
    for residual, variable in zip(residuals, jaxpr.outvars[first_residual:], strict=True):
        operand = None if _compat.is_literal(variable) else operand_of.get(variable)
        is_same = operand is not None and jax.typeof(operand) == jax.typeof(residual)  # as it is, and not cast
        saved.append(operand if is_same else residual)
    return saved


def _differentiated(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], constants: frozenset[int]
) -> tuple[bool, ...]:
    """Returns for each operand whether the derivative is with respect to it."""
    # A copy of a parameter that forward kept is no variable of its own: the parameter, which is an operand as well, has
    # the derivative. With one for both, it would be counted twice.
    wrt = []
    for position, (primal, tangent) in enumerate(zip(primals, tangents, strict=True)):
        has_tangent = not isinstance(tangent, ad.Zero) and has_gradient(primal)
        wrt.append(has_tangent and position not in constants)
    return tuple(wrt)


def _pushed_forward(
    primals: Sequence[jax.Array], nonzero_tangents: Sequence[jax.Array], wrt: tuple[bool, ...], call: ProgramCall
) -> tuple[list[jax.Array], list[Tangent]]:
    """Calls one program that computes results and tangents together."""
    pushforward = call.pushforward(wrt, types_of(primals))
    num_operands = len(wrt)
    outs = pushforward.call.bind([*primals[:num_operands], *nonzero_tangents, *primals[num_operands:]])
    by_position = dict(zip(pushforward.order, outs, strict=True))
    num_results = len(pushforward.has_tangent)
    results = at_positions(by_position, range(num_results))
    result_tangents = at_positions(by_position, range(num_results, len(outs)))
    zeros = zero_tangents(others(pushforward.has_tangent, results))
    return results, merged(pushforward.has_tangent, result_tangents, zeros)


def zero_tangents(arrays: Sequence[jax.Array]) -> list[Tangent]:
    """Returns the tangents of arrays that do not depend on what is differentiated."""
    return [ad.Zero(aval.to_tangent_aval()) for aval in types_of(arrays)]


def transpose_rule(
    cotangents: Sequence[Tangent], *operands: Any, call: ProgramCall, jaxpr: ClosedJaxpr | None
) -> list[jax.Array | None]:
    """Calls backward, or the transpose of a program that is no derivative; returns cotangents of linear operands."""
    del jaxpr
    # A result that the loss does not use has no cotangent: backward is traced for the others.
    live = tuple(not isinstance(ct, ad.Zero) for ct in cotangents)
    if not any(live):
        return [None] * len(operands)
    num_operands = len(call.program.jaxpr.in_avals)
    linear = tuple(ad.is_undefined_primal(x) for x in operands[:num_operands])
    known = others(linear, operands[:num_operands])
    copies = operands[num_operands:]

    transposed = call.transposed(linear, live)
    results = transposed.bind([*known, *cast(list[jax.Array], picked(live, cotangents)), *copies])
    gradients = []
    for x, operand in zip(results, picked(linear, operands[:num_operands]), strict=True):
        gradients.append(placed_like(x, operand.aval))  # of an offloaded parameter: in host memory
    # A copy has none: the parameter, which is an operand as well, has the gradient.
    no_gradients = [None] * (num_operands - len(gradients))
    return [*merged(linear, gradients, no_gradients), *[None] * len(copies)]


def batch_rule(
    operands: Sequence[jax.Array], dims: Sequence[int | None], *, call: ProgramCall, jaxpr: ClosedJaxpr | None
) -> tuple[list[jax.Array], list[int | None]]:
    """Calls the program over one more dim; returns results and where each has that dim."""
    num_operands = len(call.program.jaxpr.in_avals)
    is_mapped = [dim is not None for dim in dims]
    size = mapped_size(operands, dims)
    rows_first = [_with_rows_first(x, dim) for x, dim in zip(operands, dims, strict=True)]
    copies = rows_first[num_operands:]
    # A copy for each row is no copy of the parameter: it is gathered again.
    takes_copies = not any(is_mapped[num_operands:])
    if not takes_copies:
        copies = []

    mapped = call.mapped(size, tuple(is_mapped[:num_operands]), takes_copies=takes_copies)
    outs = mapped.call.bind([*mapped.enter(rows_first[:num_operands]), *copies])
    num_results = len(mapped.is_mapped)
    results = mapped.leave(outs[:num_results])
    returned_copies = outs[num_results:]
    result_dims = _dims_of_rows(mapped.is_mapped)
    copy_dims: list[int | None] = [None] * len(returned_copies)
    if jaxpr is not None:
        expected = list(jaxpr.out_avals[num_results:]) if call.returns_copies else []
        if types_of(returned_copies) != expected:
            # A staged equation has a fixed number of results. Whatever is mapped is not taken for a copy.
            returned_copies = [jnp.zeros((size, *aval.shape), aval.dtype) for aval in expected]
            copy_dims = [_FIRST] * len(returned_copies)
    return [*results, *returned_copies], [*result_dims, *copy_dims]


_FIRST = 0  # the dim along which mapped operands and results have their rows


def _dims_of_rows(is_mapped: Sequence[bool]) -> list[int | None]:
    return [_FIRST if has_rows else None for has_rows in is_mapped]


def mapped_size(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> int:
    """Returns the number of rows of the operands that are mapped; JAX has compared them."""
    for x, dim in zip(operands, dims, strict=True):
        if dim is not None:
            return x.shape[dim]
    raise ValueError("Nothing is mapped.")


def _with_rows_first(x: jax.Array, dim: int | None) -> jax.Array:
    return x if dim is None else jnp.moveaxis(x, dim, _FIRST)


# ---- programs that the rules of all calls need


def mapped_program(jaxpr: ClosedJaxpr, size: int, is_mapped: Sequence[bool]) -> tuple[ClosedJaxpr, tuple[bool, ...]]:
    """Maps a program over the first dim of some of its operands; returns also which results have that dim, first.

    A result that does not depend on a mapped operand, such as state that follows from the parameters, has no such dim.
    """
    # Asked beforehand, as `jax.vmap` takes `out_axes` before it runs. With 0 for each, what does not depend would be
    # repeated for each row, and state of a model would change its shape.
    mapped_operands = picked(is_mapped, jaxpr.jaxpr.invars)
    depends = dependents(jaxpr.jaxpr, mapped_operands)
    results = tuple(not _compat.is_literal(atom) and atom in depends for atom in jaxpr.jaxpr.outvars)
    rows = []
    for aval, has_rows in zip(abstract_all(jaxpr.jaxpr.invars), is_mapped, strict=True):
        shape = (size, *aval.shape) if has_rows else aval.shape
        rows.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type))

    def run(*xs: jax.Array) -> list[jax.Array]:
        return evaluate_jaxpr(jaxpr, xs)

    mapped = jax.vmap(
        run,
        in_axes=tuple(_dims_of_rows(is_mapped)),
        out_axes=_dims_of_rows(results),
        axis_size=size,
    )
    return jax.make_jaxpr(mapped)(*rows), results


def transposed_program(jaxpr: ClosedJaxpr, linear: Sequence[bool], live: Sequence[bool]) -> ClosedJaxpr:
    """Returns the transpose of a program that is linear in some operands; see `ProgramCall.transposed`."""
    avals = abstract_all(jaxpr.jaxpr.invars)
    num_known = len(avals) - sum(linear)

    def transposed(*operands: jax.Array) -> list[jax.Array]:
        known = operands[:num_known]
        cotangents = operands[num_known:]

        def of_linear(*xs: jax.Array) -> list[jax.Array]:
            return picked(live, evaluate_jaxpr(jaxpr, merged(linear, xs, known)))

        return list(jax.linear_transpose(of_linear, *picked(linear, avals))(list(cotangents)))

    result_avals = abstract_all(picked(live, jaxpr.jaxpr.outvars))
    return jax.make_jaxpr(transposed)(*others(linear, avals), *result_avals)


def tangent_program(gradient: Gradient, has_tangent: Sequence[bool]) -> ClosedJaxpr:
    """Returns the linear map of a derivative, with the tangents of some of the results that are floats."""
    jaxpr = gradient.tangents
    float_has_tangent = picked(gradient.is_float, has_tangent)
    results = picked(float_has_tangent, jaxpr.jaxpr.outvars)
    return ClosedJaxpr(_compat.with_results(jaxpr.jaxpr, results), jaxpr.consts)


def pushforward_program(
    jaxpr: ClosedJaxpr, wrt: Sequence[bool], has_tangent: Sequence[bool], order: Sequence[int]
) -> ClosedJaxpr:
    """Returns the program that computes results and tangents, in an order, from operands and the tangents of some."""
    avals = abstract_all(jaxpr.jaxpr.invars)

    def run(*operands: jax.Array) -> list[jax.Array]:
        primals = operands[: len(avals)]
        tangents = operands[len(avals) :]
        fixed = others(wrt, primals)

        def of_variables(*variables: jax.Array) -> list[jax.Array]:
            return evaluate_jaxpr(jaxpr, merged(wrt, variables, fixed))

        results, result_tangents = jax.jvp(of_variables, tuple(picked(wrt, primals)), tuple(tangents))
        outs = [*results, *picked(has_tangent, result_tangents)]
        return at_positions(outs, order)

    return jax.make_jaxpr(run)(*avals, *picked(wrt, avals))
