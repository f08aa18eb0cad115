"""A call as a program: the user's method runs once, on abstract arrays, in global view."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol

import jax
from jax.extend import core as jex

from jshard import _compat
from jshard._text import ATTENTION, CONTEXT
from jshard.engine import rules
from jshard.engine.blame import inside_annotated_call
from jshard.engine.context import attention_again
from jshard.engine.program import Program, abstract, evaluate_jaxpr
from jshard.errors import CallError
from jshard.plans.placement import Placement
from jshard.plans.remat import ATTENTION_AGAIN, Remat, kept_names


class Call(Protocol):
    """A call into an annotated module, split into arrays by the adapter of its kind of module."""

    where: str  # class and method, for messages
    location: str  # the same, after the path of a unit inside the model
    params: list[Any]  # the parameters under the module as they are stored, tied ones once
    placements: list[Placement | None]  # of each parameter; None for one added after the annotation
    owners: list[str]  # who gathers each parameter: this module, a unit inside, or one around it
    names: list[str]  # path of each parameter from the module
    inputs: list[Any]  # all other arrays: state, then arguments
    num_state: int  # how many of the inputs are state
    result: Any  # for `finish`, besides arrays; set by `body`
    written: Sequence[str]
    """Places of parameters that the method wrote, set by `body`. Their values before, then after, are the last of the
    state. Most are the same: `nnx.remat` writes back whatever it was given."""

    @property
    def key(self) -> Hashable:
        """Equal for calls that run the same program on arrays of the same types."""

    def guarded(self, values: Sequence[Any]) -> list[Any]:
        """The parameters, or copies of them, entering the region; raises if they cannot be differentiated."""
        ...

    def body(self, params: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the method on a plain copy of the module: arrays of its result, and of the state it changed or made."""
        ...

    def keep_written(self, numbers: Sequence[int]) -> None:
        """Sets which of the `written` parameters the method has changed: their values are the last outputs."""

    def without_passed(self, outs: Sequence[Any]) -> list[Any]:
        """The outputs of `body` outside a trace, with the written parameters that it has changed as the last ones."""
        ...

    def finish(self, outs: Sequence[Any], result: Any) -> Any:
        """Writes the state back to the caller's objects, and returns the method's result."""


def trace_call(call: Call, body: Callable, params: list[Any], inputs: list[Any], remat: Remat) -> tuple[Program, list]:
    """Traces a call's body, a function of parameters and inputs: a program, and constants to append to its operands."""
    with inside_annotated_call(call), attention_again(remat == ATTENTION_AGAIN) as attention_calls:
        closed = jax.make_jaxpr(body)(params, inputs)
    _warn_of_names(call, closed.jaxpr, remat, len(attention_calls))
    if n := len(call.written):  # the program omits the parameters that were only passed through
        outs = closed.jaxpr.outvars
        pairs = zip(outs[-2 * n : -n], outs[-n:], strict=True)
        changed = [i for i, (old, new) in enumerate(pairs) if not _is_passed(closed.jaxpr, old, new)]
        call.keep_written(changed)
        results = [*outs[: -2 * n], *(outs[-n:][i] for i in changed)]
        closed = jex.ClosedJaxpr(_compat.with_results(closed.jaxpr, results), closed.consts)
    if names := _compat.axis_names(closed.jaxpr):  # backward is traced where that axis no longer exists
        raise CallError(
            "The model has collectives over an axis that a vmap or pmap around it names.",
            where=f"{call.where}: {', '.join(map(repr, names))}",
            why="an annotated model is called on the whole batch: its means already cover the batch.",
            do="nn.BatchNorm(axis_name=None)  # and call it without the vmap\n"
            "If the vmap is inside the model: js.fully_shard(model, mesh=mesh)  # and no units in it",
        )
    consts = list(closed.consts)
    if consts:
        run = lambda *xs: evaluate_jaxpr(jex.ClosedJaxpr(closed.jaxpr, xs[len(xs) - len(consts) :]), xs[: -len(consts)])
        closed = jax.make_jaxpr(run)(*params, *inputs, *map(abstract, consts))
    return Program(closed, len(params), remat=remat), consts


def _warn_of_names(call: Call, jaxpr: Any, remat: Remat, attention_calls: int) -> None:
    """Warns of a policy by names if the program has none of them."""
    names, found = kept_names(remat), set(_names_in(jaxpr)) | ({CONTEXT} if attention_calls else set())
    if remat == ATTENTION_AGAIN and not attention_calls:
        why, do = "everything is kept: it does not call js.kernels.attention", "y = js.kernels.attention(q, k, v)"
    elif names and not found & {*names}:
        why = f"nothing is kept: it names only {', '.join(sorted(found))}" if found else "nothing is kept by name"
        do = f"x = jax.ad_checkpoint.checkpoint_name(x, {names[0]!r})"
    else:
        return
    _compat.warn_user(f"remat={remat!r} matches nothing in {call.where}: {why}. In the model: {do}")


def _names_in(jaxpr: Any) -> Iterator[str]:
    """The names of values, for policies; the results of cuDNN's attention have one by themselves."""
    for e in jaxpr.eqns:
        if e.primitive.name == "name":
            yield e.params["name"]
        elif e.primitive.name == ATTENTION:
            yield CONTEXT
        for inner in jex.jaxprs_in_params(e.params):
            yield from _names_in(inner)


def _is_passed(jaxpr: Any, old: Any, new: Any) -> bool:
    """Whether a variable is another one, passed through calls and loops."""
    while new is not old:
        e = next((e for e in jaxpr.eqns if new in e.outvars), None)
        if e is None:
            return False
        at = next((i for i, inner, v, out in _handed(e, e.outvars.index(new)) if _is_passed(inner, v, out)), None)
        if at is None:
            return False
        new = e.invars[at]
    return True


def _handed(e: Any, k: int) -> Iterator[tuple[int, Any, Any, Any]]:
    """Operands that a result could be: the number of each, the program inside, and both variables there."""
    if e.primitive.name == "scan":
        (inner, _), (n_consts, n_carry) = rules.opened(e.params["jaxpr"]), _compat.scan_arguments(e)
        at = [n_consts + k] if k < n_carry else range(n_consts + n_carry, len(e.invars))
        yield from ((i, inner, inner.invars[i], inner.outvars[k]) for i in at)
    elif e.primitive.name in rules.CALLS:
        inner, _ = rules.program(e)
        at = rules.operands(e, range(len(e.invars)))
        yield from ((i, inner, v, inner.outvars[k]) for i, v in zip(at, inner.invars, strict=True))
