"""A call as a program: the user's method runs once, on abstract arrays, in global view."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from jshard import _compat
from jshard._text import ATTENTION, CONTEXT
from jshard.engine import rules
from jshard.engine.blame import inside_annotated_call
from jshard.engine.context import attention_again
from jshard.engine.program import Atom, Program, abstract_all, evaluate_jaxpr
from jshard.engine.selections import at_positions
from jshard.engine.values import MethodResult
from jshard.errors import CallError
from jshard.plans.placement import Placement
from jshard.plans.remat import ATTENTION_AGAIN, Remat, kept_names


class Call(Protocol):
    """A call into an annotated module, split into arrays by the adapter of its kind of module."""

    where: str  # class and method, for messages
    location: str  # the same, after the path of a unit inside the model
    params: list[jax.Array]  # the parameters under the module as they are stored, tied ones once
    placements: list[Placement | None]  # of each parameter; None for one added after the annotation
    owners: list[str]  # who gathers each parameter: this module, a unit inside, or one around it
    names: list[str]  # path of each parameter from the module
    inputs: list[jax.Array]  # all other arrays: state, then arguments
    num_state: int  # how many of the inputs are state
    result: Any  # for `finish`, besides arrays; set by `body`
    written: Sequence[str]
    """Places of parameters that the method wrote, set by `body`. Their values before, then after, are the last of the
    state. Most are the same: `nnx.remat` writes back whatever it was given."""

    @property
    def key(self) -> Hashable:
        """Equal for calls that run the same program on arrays of the same types."""

    def guarded(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """The parameters, or copies of them, entering the region; raises if they cannot be differentiated."""
        ...

    def body(self, params: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs the method on a plain copy of the module: arrays of its result, and of the state it changed or made."""
        ...

    def keep_written(self, numbers: Sequence[int]) -> None:
        """Sets which of the `written` parameters the method has changed: their values are the last outputs."""

    def without_passed(self, outs: Sequence[jax.Array]) -> list[jax.Array]:
        """The outputs of `body` outside a trace, with the written parameters that it has changed as the last ones."""
        ...

    def finish(self, outs: Sequence[jax.Array], result: Any) -> MethodResult:
        """Writes the state back to the caller's objects, and returns the method's result."""


def trace_call(
    call: Call,
    body: Callable[..., list[jax.Array]],
    params: list[jax.ShapeDtypeStruct],
    inputs: list[jax.ShapeDtypeStruct],
    remat: Remat,
) -> tuple[Program, list[jax.Array]]:
    """Traces a call's body, a function of parameters and inputs.

    Returns:
        The program, and constants to append to its operands.
    """
    # The user's Python runs here, once. Derivatives and the programs of data shards come from the jaxpr: so side
    # effects happen once, and all of them see the same random numbers and branches.
    with inside_annotated_call(call), attention_again(remat == ATTENTION_AGAIN) as attention_calls:
        closed = jax.make_jaxpr(body)(params, inputs)
    _warn_of_names(call, closed.jaxpr, remat, len(attention_calls))
    if call.written:
        closed = _without_passed_parameters(closed, call)
    _refuse_collectives(closed.jaxpr, call)

    consts = list(closed.consts)
    if consts:
        closed = _with_constants_as_operands(closed, [*params, *inputs])
    return Program(closed, len(params), remat=remat), consts


def _without_passed_parameters(closed: ClosedJaxpr, call: Call) -> ClosedJaxpr:
    """Returns the program without the results of written parameters that were only passed through.

    Its last results are the parameters before the call, then after it. Those that the method has changed stay: the
    call keeps their numbers.
    """
    # Left among the results, a parameter would be gathered to be returned whole, for nothing.
    results = closed.jaxpr.outvars
    num_written = len(call.written)
    before = results[-2 * num_written : -num_written]
    after = results[-num_written:]
    changed = [i for i in range(num_written) if not _is_passed(closed.jaxpr, before[i], after[i])]
    call.keep_written(changed)
    kept_results = [*results[: -2 * num_written], *at_positions(after, changed)]
    return ClosedJaxpr(_compat.with_results(closed.jaxpr, kept_results), closed.consts)


def _refuse_collectives(jaxpr: Jaxpr, call: Call) -> None:
    """Raises for collectives over an axis of a `vmap` around the call: backward is traced where it no longer exists."""
    names = _compat.axis_names(jaxpr)
    if not names:
        return
    raise CallError(
        "The model has collectives over an axis that a vmap or pmap around it names.",
        where=f"{call.where}: {', '.join(map(repr, names))}",
        why="an annotated model is called on the whole batch: its means already cover the batch.",
        do="nn.BatchNorm(axis_name=None)  # and call it without the vmap\n"
        "If the vmap is inside the model: js.fully_shard(model, mesh=mesh)  # and no units in it",
    )


def _with_constants_as_operands(closed: ClosedJaxpr, operands: list[jax.ShapeDtypeStruct]) -> ClosedJaxpr:
    """Returns a program that takes its constants as its last operands: they may be tracers of one call."""
    num_operands = len(operands)

    def run(*xs: jax.Array) -> list[jax.Array]:
        consts = xs[num_operands:]
        return evaluate_jaxpr(ClosedJaxpr(closed.jaxpr, consts), xs[:num_operands])

    return jax.make_jaxpr(run)(*operands, *abstract_all(closed.consts))


# ---- policies by names


def _warn_of_names(call: Call, jaxpr: Jaxpr, remat: Remat, num_attention_calls: int) -> None:
    """Warns of a policy by names if the program has none of them."""
    if remat == ATTENTION_AGAIN:
        if num_attention_calls:
            return
        why = "everything is kept: it does not call js.kernels.attention"
        line = "y = js.kernels.attention(q, k, v)"
    else:
        policy_names = kept_names(remat)
        program_names = set(_names_in(jaxpr))
        if num_attention_calls:
            program_names.add(CONTEXT)
        if not policy_names or program_names & set(policy_names):
            return
        why = "nothing is kept by name"
        if program_names:
            why = f"nothing is kept: it names only {', '.join(sorted(program_names))}"
        line = f"x = jax.ad_checkpoint.checkpoint_name(x, {policy_names[0]!r})"
    _compat.warn_user(f"remat={remat!r} matches nothing in {call.where}: {why}. In the model: {line}")


def _names_in(jaxpr: Jaxpr) -> Iterator[str]:
    """Yields the names of values, for policies; the results of cuDNN's attention have one by themselves."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        elif eqn.primitive.name == ATTENTION:
            yield CONTEXT
        for inner in jaxprs_in_params(eqn.params):
            yield from _names_in(inner)


# ---- parameters that are passed through


@dataclasses.dataclass(frozen=True)
class _Passage:
    """A way in which a result of an equation may be one of its operands: through the program inside.

    Attributes:
        operand: the number of the operand.
        inner: the program inside.
        old: the operand's variable there.
        new: the result's variable there.
    """

    operand: int
    inner: Jaxpr
    old: Atom
    new: Atom


def _is_passed(jaxpr: Jaxpr, old: Atom, new: Atom) -> bool:
    """Returns whether a variable is another one, passed through calls and loops."""
    # From the result back, as each equation says where its result comes from; by identity, which is all that a variable
    # has.
    while new is not old:
        operand = _operand_that_is(jaxpr, new)
        if operand is None:
            return False
        new = operand
    return True


def _operand_that_is(jaxpr: Jaxpr, result: Atom) -> Atom | None:
    """Returns the operand that an equation returns as this result; None if it computes it, or is not there."""
    for eqn in jaxpr.eqns:
        if result in eqn.outvars:
            for passage in _passages(eqn, eqn.outvars.index(result)):
                if _is_passed(passage.inner, passage.old, passage.new):
                    return eqn.invars[passage.operand]
            return None
    return None


def _passages(eqn: JaxprEqn, result: int) -> Iterator[_Passage]:
    """Yields the ways in which a result, by its number, may be an operand."""
    if eqn.primitive.name == "scan":
        inner, _ = rules.opened(eqn.params["jaxpr"])
        num_consts, num_carry = _compat.scan_arguments(eqn)
        # What is carried may come from its own place in the carry; a stacked result from any scanned operand, whose
        # rows the body returns.
        operands: Sequence[int] = range(num_consts + num_carry, len(eqn.invars))
        if result < num_carry:
            operands = [num_consts + result]
        for operand in operands:
            yield _Passage(operand, inner, inner.invars[operand], inner.outvars[result])
    elif eqn.primitive.name in rules.CALLS:
        inner, _ = rules.program(eqn)
        operands = rules.operands(eqn, range(len(eqn.invars)))
        for operand, variable in zip(operands, inner.invars, strict=True):
            yield _Passage(operand, inner, variable, inner.outvars[result])
