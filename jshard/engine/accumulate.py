"""Gradient accumulation: reduce every microbatch into a sharded sum, or gather once and reduce once."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard._errors import AnnotationError, CallError
from jshard._linen.annotation import annotation_of
from jshard._linen.layout import Layout
from jshard._linen.optimizer import places_of
from jshard._linen.trained import Trained, joined
from jshard._nnx import Unit, dotted, plain_class, unit_of
from jshard._offload import back, to_device
from jshard._placement import Placement
from jshard._plan import root_forgotten
from jshard._state_places import key_texts
from jshard.engine.context import Copies, copies_scope
from jshard.engine.microbatches import microbatches
from jshard.engine.once import Once


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    model: nn.Module | None = None,
    accumulate: int = 1,
    sync: str = "each",
    has_aux: bool = False,
    wrt: Any = nnx.Param,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` over microbatches; of a Linen model `jax.value_and_grad`.

    The batch is cut into `accumulate` microbatches along its batch dim; loss and gradients are the means over
    them. State that an nnx model changes (BatchNorm, dropout counts) passes from one to the next.

    Args:
        loss_fn: `loss_fn(model, *batch)`, a mean over the batch, in global view; of a Linen model
            `loss_fn(params, *batch)`.
        model: the annotated Linen model that `loss_fn` calls; nnx models are their own.
        accumulate: number of microbatches.
        sync: `"each"`: every microbatch gathers parameters and reduce-scatters gradients; the sum is sharded.
            `"last"`: parameters are gathered once and gradients reduced once per step; each device holds the
            full parameters and gradients of the model meanwhile. What is never gathered is as with `"each"`.
        has_aux: `loss_fn` returns `(loss, aux)`; aux comes back stacked over the microbatches.
        wrt: the parameters to differentiate with respect to, as `nnx.Optimizer` takes them: an nnx filter. The others
            are frozen: gathered, and nothing more. Of a Linen model a path pattern such as `"*/lora_*"`, a function of
            (path, parameter), the path as a tuple, or a list of these.

    Returns:
        A function of `(model, *batch)`, or `(params, *batch)`, that returns `(loss, gradients)`, or
        `((loss, aux), gradients)`. The gradients of a Linen model have the form of `params`; in the place of a frozen
        array is an `optax.MaskedNode`, which `optax.apply_updates` leaves the parameter alone for.

    Raises:
        AnnotationError: the model is not annotated, or `wrt` chooses none of a Linen model's parameters.
        CallError: the batch does not divide into microbatches that divide over the data shards; or no call of the
            model is with the parameters that were gathered for it.

    Example:
        >>> grad_fn = js.value_and_grad(loss_fn, accumulate=4, sync="last")
        >>> loss, grads = nnx.jit(lambda model, x: grad_fn(model, x))(model, x)
    """
    if not isinstance(accumulate, int) or accumulate < 1 or sync not in ("each", "last"):
        raise AnnotationError(
            "There is no such way to accumulate.",
            where=f"value_and_grad(accumulate={accumulate!r}, sync={sync!r})",
            why='accumulate is a number of microbatches, sync is "each" or "last".',
            do='js.value_and_grad(loss_fn, accumulate=4, sync="last")',
        )
    steps, once = accumulate, sync == "last"

    @functools.wraps(loss_fn)
    def of_nnx(model: nnx.Module, *batch: Any) -> Any:
        unit = unit_of(model)
        if unit is None:
            raise root_forgotten(model)
        if steps == 1:
            return nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt), has_aux=has_aux)(model, *batch)
        loss = _nnx_loss(loss_fn, model, unit, has_aux, wrt)
        if once:
            _check_parameters(loss.params, loss.name)
        value, aux, grads, state = _accumulated(loss, batch, steps, once=once)
        nnx.update(model, state)
        return ((value, aux) if has_aux else value), grads

    @functools.wraps(loss_fn)
    def of_linen(params: Any, *batch: Any) -> Any:
        layout = _layout(model)
        trained, frozen = Trained(layout, wrt).split(params)
        if steps == 1:
            of_trained = lambda trained, *batch: loss_fn(joined(trained, frozen), *batch)
            return jax.value_and_grad(of_trained, has_aux=has_aux)(trained, *batch)
        loss = _linen_loss(loss_fn, trained, frozen, layout, has_aux)
        value, aux, grads, _ = _accumulated(loss, batch, steps, once=once)
        return ((value, aux) if has_aux else value), grads

    return of_nnx if model is None else of_linen


@dataclasses.dataclass(frozen=True)
class _Loss:
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


def _accumulated(loss: _Loss, batch: Any, steps: int, *, once: bool) -> tuple[jax.Array, Any, Any, Any]:
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


def _nnx_loss(loss_fn: Callable, model: nnx.Module, unit: Unit, has_aux: bool, wrt: Any) -> _Loss:
    graphdef, params, frozen, state = nnx.split(model, wrt, nnx.Param, ...)

    def run(params: Any, frozen: Any, state: Any, part: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        live = nnx.merge(graphdef, params, frozen, state, copy=True)
        out = loss_fn(live, *part)
        value, aux = out if has_aux else (out, None)
        return value, (aux, nnx.split(live, wrt, nnx.Param, ...)[3])

    def placements(state: Any) -> list[Placement | None]:  # in the order of its leaves: both are sorted
        members = [unit.by_path.get(path) for path, _ in nnx.to_flat_state(state)]
        return [None if member is None else member.placement for member in members]

    placed = placements(params), placements(frozen)
    return _Loss(run, params, frozen, state, placed, unit, plain_class(model).__name__)


def _linen_loss(loss_fn: Callable, trained: Any, frozen: Any, layout: Layout, has_aux: bool) -> _Loss:
    places = places_of(layout)

    def run(params: Any, frozen: Any, state: Any, part: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        out = loss_fn(joined(params, frozen), *part)
        value, aux = out if has_aux else (out, None)
        return value, (aux, state)

    def placement(path: tuple, x: Any) -> Placement | None:
        found = places.parameter(key_texts(path))
        return found if found is not None and found.stored_shape == jnp.shape(x) else None

    placed = [[placement(path, x) for path, x in jax.tree.leaves_with_path(tree)] for tree in (trained, frozen)]
    return _Loss(run, trained, frozen, (), (placed[0], placed[1]), layout.root, layout.kind)


def _layout(model: Any) -> Layout:
    """The layout of a Linen model whose loss is given."""
    annotation = annotation_of(model)
    if annotation is None:
        raise root_forgotten(model)
    return annotation.layout


def _check_parameters(params: Any, name: str) -> None:
    """Raises for variables that are differentiated and no parameters: they have no shards."""
    kinds = [(dotted(path), type(v).__name__) for path, v in nnx.to_flat_state(params) if not isinstance(v, nnx.Param)]
    if kinds:
        raise CallError(
            "Gradients are asked for of what is no parameter.",
            where=[f"{name}: {path}  {kind}" for path, kind in kinds],
            why='sync="last" gathers parameters and reduces their gradients; these are whole on every device.',
            do='js.value_and_grad(loss_fn, accumulate=4, sync="each"), or derive their class from nnx.Param.',
        )


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
        warnings.warn(
            f"{len(names)} parameter(s) of {model} are gathered once for all microbatches, and then again in each:"
            f" {why}.{listed}",
            stacklevel=2,
        )
