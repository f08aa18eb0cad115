"""Equations that hold a program: it is run in place."""

from typing import TYPE_CHECKING, Any

import jax
from jax import lax

from jshard.engine.rules.table import rule
from jshard.engine.values import Eqn, Value

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner

REMAT = ("remat", "remat2", "checkpoint")
NAMES = (*"jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split(), *REMAT)


def program(eqn: Eqn) -> tuple[Any, Any]:
    """The jaxpr that a call runs, and its constants."""
    found = next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if eqn.params.get(name) is not None)
    return opened(found)


def opened(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr, closed or not, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


@rule(*NAMES, keeps_stored=True)
def call(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """The program, in place: derivatives were taken before, in global view."""
    name = eqn.params.get("name")
    if eqn.primitive.name in REMAT:
        values = behind_barrier(p, eqn, values)
    with jax.named_scope(name if isinstance(name, str) else eqn.primitive.name):
        return p.run(*program(eqn), values)


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
