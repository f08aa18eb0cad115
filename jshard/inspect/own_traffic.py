"""What a model sends over the axes that are its own, `tensor` and `expert`: read off a trace, nothing is compiled."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jshard._mesh import EXPERT, TENSOR
from jshard._nnx import unit_of
from jshard._plan import root_forgotten
from jshard.engine.context import shapes_only, without_update
from jshard.inspect.module import ProgramError
from jshard.inspect.partitioned import Amounts, Sent, partitioned_collectives


def own_traffic(model: nnx.Module, loss: Callable[..., Any], batch: Any, *, wrt: Any = nnx.Param) -> Amounts | None:
    """The collectives of forward and backward over `tensor` and `expert`; None where they cannot be known.

    Those over the data axes alone are a plan's. So are sums over `expert`: of gradients of what all experts share.

    Args:
        model: the annotated model; its arrays and its mesh may be abstract.
        loss: called with the model and the batch, as in training.
        batch: the global batch, abstract or real.
        wrt: the parameters that are trained, as in `js.plan`.
    """
    root = unit_of(model)
    if root is None:
        raise root_forgotten(model)
    graphdef, params, rest = nnx.split(model, wrt, ...)

    def backward(params: Any, rest: Any, batch: Any) -> Any:
        # Copied: what the model changes as it runs, as dropout's counts, belongs to the inner trace.
        run = lambda params: loss(nnx.merge(graphdef, params, rest, copy=True), batch)
        return jax.value_and_grad(run)(params)

    try:
        with shapes_only(), without_update():
            lowered = jax.jit(backward).trace(params, rest, batch).lower(lowering_platforms=("cuda",))
        found = partitioned_collectives(lowered, root.mesh)
    except (NotImplementedError, ProgramError):  # an operation or a collective that is known to the compiler alone
        return None
    return None if found is None else {one: amount for one, amount in found.items() if _is_own(one)}


def _is_own(one: Sent) -> bool:
    return TENSOR in one.axes or (EXPERT in one.axes and one.kind != "all-reduce")


def at_rows(few: Amounts, more: Amounts, rows: tuple[int, int, int]) -> Amounts:
    """What so many sequences send: a straight line through two numbers of them.

    Args:
        few: what some send.
        more: what more of them send.
        rows: how many those are, and for how many it is asked.
    """
    low, high, asked = rows
    found = {}
    for one, (count, size) in few.items():
        growth = (more.get(one, (count, size))[1] - size) / (high - low)
        found[one] = count, max(0.0, size + (asked - low) * growth)
    return found
