"""Gradient accumulation: reduce every microbatch into a sharded sum, or gather once and reduce once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard import _compat
from jshard._errors import CallError
from jshard._nnx import Unit
from jshard._offload import back, to_device
from jshard._placement import Placement
from jshard.engine.context import Copies, copies_scope
from jshard.engine.microbatches import microbatches
from jshard.engine.once import Once


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss as a function of trees of arrays.

    Args:
        run: takes parameters, frozen parameters, state and a microbatch; returns the loss, and aux with the new state.
        params: the parameters to differentiate with respect to.
        frozen: the other ones.
        state: what passes from one microbatch to the next.
        placements: of the leaves of `params`, and of `frozen`; None for what is no parameter.
        root: record of the root.
        name: of the model, for messages.
    """

    run: Callable[[Any, Any, Any, Any], tuple[jax.Array, tuple[Any, Any]]]
    params: Any
    frozen: Any
    state: Any
    placements: tuple[Sequence[Placement | None], Sequence[Placement | None]]
    root: Unit
    name: str


def accumulated(loss: Loss, batch: Any, steps: int, *, once: bool) -> tuple[jax.Array, Any, Any, Any]:
    """Loss, aux of every microbatch, gradients, and the state after the last."""
    parts, mesh = microbatches(batch, loss.root, steps, loss.name), loss.root.mesh
    of_params, of_frozen = (Once.of(placements if once else (), mesh) for placements in loss.placements)
    copies, frozen_copies = of_params.gather(loss.params), of_frozen.gather(loss.frozen)

    def run(params: Any, copies: list, state: Any, part: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        found = Copies(of_params.pairs(params, copies) + of_frozen.pairs(loss.frozen, frozen_copies))
        with copies_scope(found if once else None):
            out = loss.run(params, loss.frozen, state, part)
        if found.left:
            names = of_params.names(params) + of_frozen.names(loss.frozen)
            _tell_of_left([names[i] for i in found.left], len(names), found.missed, loss.name)
        return out

    grad = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True), inline=True)  # traced once for all uses

    def step(carry: tuple, part: Any) -> tuple[tuple, Any]:
        total, sums, state = carry
        (value, (aux, state)), grads = grad(loss.params, copies, state, part)
        sums = jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, to_device(grads))
        return (total + value, sums, state), aux

    zeros = jax.tree.map(jnp.zeros_like, loss.params), of_params.zeros(copies)
    dtype = jax.eval_shape(grad, loss.params, copies, loss.state, jax.tree.map(lambda x: x[0], parts))[0][0].dtype
    (total, (grads, of_copies), state), aux = lax.scan(step, (jnp.zeros((), dtype), zeros, loss.state), parts)
    if once:
        grads = of_params.add(grads, to_device(of_params.reduce(loss.params, of_copies)))
    return total / steps, aux, back(jax.tree.map(lambda g: g / steps, grads), loss.params), state


def _tell_of_left(names: list[str], total: int, missed: bool, model: str) -> None:
    """Tells of copies that no call has taken, if a call has gathered for itself, or if there are no others."""
    why = (
        "the loss changed them before the call (a cast, a stop_gradient, a jit or checkpoint around it), or they are"
        " not stored as js.shard_init stores them"
    )
    if len(names) == total:
        raise CallError(
            "Parameters were gathered once for all microbatches, and no call of the model was with them.",
            where=model,
            why=f"{why}, or it ran in global view; it would gather for itself.",
            do='js.value_and_grad(loss_fn, accumulate=4, sync="each"), or call the model with what loss_fn is given.',
        )
    if missed:
        listed = "".join(f"\n  {name}" for name in names)
        _compat.warn_user(
            f"{len(names)} parameter(s) of {model} are gathered once for all microbatches, and then again in each:"
            f" {why}.{listed}",
        )
