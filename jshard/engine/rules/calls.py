"""Equations that hold a program: it is run in place."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from jax import lax

from jshard.engine.rules.table import rule
from jshard.engine.values import Eqn, Value

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner

T = TypeVar("T")

REMAT = frozenset({"remat2"})
CALLS = REMAT | frozenset(
    """
    jit closed_call custom_jvp_call custom_vjp_call custom_vmap_call composite custom_linear_solve linear_call
    remat_opt eval_jaxpr
    """.split()
)
ANNOTATED = frozenset({"compute_on", "xla_metadata_call"})
"""Calls that say something of the program that they hold, which stays inside of them."""


def program(eqn: Eqn) -> tuple[Any, Any]:
    """The program that a call holds, and its constants."""
    if eqn.primitive.name == "custom_linear_solve":
        return opened(eqn.params["jaxprs"].solve)
    names = ("jaxpr", "call_jaxpr", "call", "callee", "fwd_jaxpr")
    return opened(next(eqn.params[name] for name in names if eqn.params.get(name) is not None))


def opened(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr, closed or not, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def operands(eqn: Eqn, given: Sequence[T]) -> list[T]:
    """Which of a call's operands its program takes."""
    if eqn.primitive.name != "custom_linear_solve":
        return list(given)
    lengths = eqn.params["const_lengths"]
    begin = lengths.matvec + lengths.vecmat
    return [*given[begin : begin + lengths.solve], *given[sum(lengths) :]]


@rule(*CALLS, keeps_stored=True)
def call(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """The program, in place: derivatives were taken before, in global view."""
    if eqn.primitive.name in REMAT:
        values = behind_barrier(p, eqn, values)
    gradients = [k for k, a in enumerate(eqn.outvars) if p.is_for_gradients(a)]
    name = eqn.params.get("name")
    with jax.named_scope(name if isinstance(name, str) else eqn.primitive.name):
        return p.run(*program(eqn), operands(eqn, values), gradients=gradients)


def behind_barrier(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """Operands of a remat in a backward pass: without a barrier XLA would see that forward has computed it."""
    prevents = eqn.params["prevent_cse"]
    if isinstance(prevents, bool):
        prevents = (prevents,) * len(values)
    if not (eqn.params["differentiated"] and any(prevents)):
        return values
    values = [v if v.is_stored else p.cross(v) for v in values]
    tied = [k for k, v in enumerate(values) if prevents[k] and not v.is_stored and not v.is_known]
    for k, x in zip(tied, lax.optimization_barrier([values[k].x for k in tied]), strict=True):
        values[k] = values[k].with_array(x)
    return values


@rule(*ANNOTATED, takes_partial=True)
def annotated_call(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """The same call of the program that runs on a shard."""
    values = [p.land(v) for v in values]
    states: list[Any] = []

    def on_shard(*xs: Any) -> list[Any]:
        found = p.run(*program(eqn), [v.with_array(x) for v, x in zip(values, xs, strict=True)])
        found = [p.land(v) for v in found]
        states.extend(v.state for v in found)
        return [v.x for v in found]

    traced = jax.make_jaxpr(on_shard)(*[v.x for v in values])
    return [Value(x, s) for x, s in zip(p.bind(eqn, [v.x for v in values], jaxpr=traced), states, strict=True)]
