"""A unit as a function of its shards: gathers them, computes, and reduces their gradients, each in its place."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jshard._mesh import data_axes
from jshard._offload import hosted
from jshard._placement import Placement
from jshard.engine.asked import Asked, filled, is_nothing, values
from jshard.engine.chain import Place, Token
from jshard.engine.collectives import all_reduce, gather_pieces, gather_unit, keep_piece, scatter, scope, vary

Compute = Callable[[list, list, list, list, Token | None], list]


@dataclasses.dataclass(frozen=True)
class Saving:
    """What forward saves for backward.

    Args:
        reshard: True: shards, which backward gathers again. False: gathered parameters. A number k: 1/k of each,
            which backward gathers among k neighbours.
        checkpoint: wraps the computation in `jax.checkpoint`, or does not.
    """

    reshard: bool | int
    checkpoint: Callable[[Compute], Compute]


def sharded(
    compute: Compute, placements: list[Placement], mesh: Mesh, *, saving: Saving, place: Place, name: str
) -> Callable[..., Any]:
    """The unit as a function of its shards.

    Args:
        compute: the unit as a function of its full parameters, the parameters and state of others, its inputs (both
            floating), the rest, and the token of its start, which the units inside wait for.
        placements: those of its parameters.
        mesh: the mesh.
        saving: what forward saves for backward.
        place: its place among the units.
        name: of the unit; the compiled program tells it of each collective.

    Returns:
        A function of (tokens, shards, others, inputs, rest) that returns the results and the tokens that came out.
    """
    axes = data_axes(mesh)

    def begin(wait: Token | None, shards: list, inputs: list) -> tuple[list, list, Token | None]:
        shards, wait = place.gather_after(wait, [vary(x, axes) for x in shards])
        return place.start(wait, gather_unit(shards, placements, mesh), inputs)

    @jax.custom_vjp
    def run(tokens: tuple, shards: list, others: list, inputs: list, fixed: list) -> tuple[list, tuple]:
        wait, order = tokens
        with jax.named_scope(scope(name)):
            full, inputs, started = begin(wait, shards, inputs)
            outs, done = place.finish(started, compute(full, others, inputs, fixed, started))
        return outs, (started, done, order)

    def forward(*args: Any) -> tuple:
        asked = Asked.of(args[1], *args[2:4])
        tokens, shards, others, inputs, fixed = values(args)
        if not asked:
            return run(tokens, shards, others, inputs, fixed), None
        wait, order = tokens
        with jax.named_scope(scope(name)):
            full, inputs, started = begin(wait, shards, inputs)
            step = saving.checkpoint(compute)
            call = lambda full, others, inputs: step(full, others, inputs, fixed, started)
            outs, pull = asked.vjp(call, full, others, inputs)
            outs, done = place.finish(started, outs)
            kept = _kept(saving.reshard, full, shards, placements)
        residuals, tree = jax.tree.flatten(pull)
        slots = tuple(next((i for i, w in enumerate(full) if r is w), None) for r in residuals)
        saved = [r for r, slot in zip(residuals, slots, strict=True) if slot is None]
        if away := hosted(saved):
            outs, sent, order = place.sent(order, outs, [saved[i] for i in away])
            saved = _with(saved, away, sent)
        return (outs, (started, done, order)), (shards, kept, saved, _Pull(tree, slots, asked))

    def backward(residuals: tuple | None, cotangents: tuple) -> tuple:
        gradients, (started, done, order) = cotangents[0], filled(cotangents[1])
        wait = None if started is None else started + done
        if residuals is None or is_nothing(gradients):
            return (place.released(wait, wait), order), None, None, None, None
        shards, kept, saved, pull = residuals
        with jax.named_scope(f"{scope(name)}/backward"):
            gradients, away = filled(gradients), hosted(saved)
            if saving.reshard is not False or away:
                kept = [*(vary(x, axes) for x in kept), *(saved[i] for i in away)]
                kept, gradients, wait = place.gather_again_after(wait, kept, gradients)
                kept, saved = kept[: len(placements)], _with(saved, away, kept[len(placements) :])
            full = _full_again(saving.reshard, kept, placements, mesh)
            full, gradients, started = place.start(wait, full, gradients)
            of_full, of_others, of_inputs = pull.restore(full, saved)(gradients)
            of_full, of_inputs, done = place.reduce_after(started, order, of_full, of_inputs)
            scattered = [None if g is None else scatter(g, p) for g, p in zip(of_full, placements, strict=True)]
            scattered, order = place.reduced(done, scattered)
            of_shards = [None if g is None else all_reduce(g, mesh, x) for g, x in zip(scattered, shards, strict=True)]
            if away := hosted(of_shards):
                sent, order = place.reduced(order, [of_shards[i] for i in away])
                of_shards = _with(of_shards, away, sent)
        return (place.released(started, done), order), of_shards, of_others, of_inputs, None

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _with(arrays: list, at: list[int], values: list) -> list:
    """The arrays with others in some places."""
    new = dict(zip(at, values, strict=True))
    return [new.get(i, x) for i, x in enumerate(arrays)]


def _kept(reshard: bool | int, full: list, shards: list, placements: list[Placement]) -> list:
    if reshard is True:
        return shards
    if reshard is False:
        return full
    return [keep_piece(x, p, reshard) for x, p in zip(full, placements, strict=True)]


def _full_again(reshard: bool | int, kept: list, placements: list[Placement], mesh: Mesh) -> list:
    if reshard is False:
        return kept
    if reshard is True:
        return gather_unit(kept, placements, mesh)
    return [gather_pieces(x, p, reshard) for x, p in zip(kept, placements, strict=True)]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Pull:
    """The structure of a backward function whose gathered parameters were taken out."""

    tree: Any
    slots: tuple[int | None, ...]
    asked: Asked

    def restore(self, full: list, saved: list) -> Callable:
        it = iter(saved)
        pull = jax.tree.unflatten(self.tree, [next(it) if s is None else full[s] for s in self.slots])
        return lambda gradients: self.asked.spread(pull(gradients))
