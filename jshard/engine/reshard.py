"""A unit as a function of its shards: gathers them, computes, and reduces their gradients, each in its place."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jshard._offload import hosted
from jshard._placement import Placement
from jshard.engine.asked import Asked, filled, is_nothing, values
from jshard.engine.chain import Place, Token, both, passed_on
from jshard.engine.collectives import scope
from jshard.engine.pull import Pull
from jshard.engine.wires import Wires

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
    unit = _Sharded(compute, Wires(placements, mesh, saving.reshard), saving, place, name)
    run = jax.custom_vjp(unit.run)
    run.defvjp(unit.forward, unit.backward, symbolic_zeros=True)
    return run


class _Sharded:
    """A unit's call, and its forward and backward where gradients are asked for."""

    def __init__(self, compute: Compute, wires: Wires, saving: Saving, place: Place, name: str) -> None:
        self._compute, self._wires, self._saving, self._place = compute, wires, saving, place
        self._scope = scope(name)

    def run(self, tokens: tuple, shards: list, others: list, inputs: list, fixed: list) -> tuple[list, tuple]:
        wait, order = tokens
        with jax.named_scope(self._scope):
            full, inputs, started = self._begin(wait, shards, inputs)
            outs, done = self._place.finish(started, self._compute(full, others, inputs, fixed, started))
        return outs, (started, done, order)

    def forward(self, *args: Any) -> tuple:
        asked = Asked.of(args[1], *args[2:4])
        tokens, shards, others, inputs, fixed = values(args)
        if not asked:
            return self.run(tokens, shards, others, inputs, fixed), None
        wait, order = tokens
        with jax.named_scope(self._scope):
            full, inputs, started = self._begin(wait, shards, inputs)
            step = self._saving.checkpoint(self._compute)
            call = lambda full, others, inputs: step(full, others, inputs, fixed, started)
            outs, pull = asked.vjp(call, full, others, inputs)
            outs, done = self._place.finish(started, outs)
            kept = self._wires.kept(full)
        pull, saved = Pull.apart(pull, full)
        if away := hosted(saved):
            outs, sent, order = self._place.sent(order, outs, [saved[i] for i in away])
            saved = _with(saved, away, sent)
        return (outs, (started, done, order)), (shards, kept, saved, pull, asked)

    def backward(self, residuals: tuple | None, cotangents: tuple) -> tuple:
        place, (gradients, (started, done, order)) = self._place, (cotangents[0], filled(cotangents[1]))
        if residuals is None or is_nothing(gradients):
            return passed_on(place, (started, done, order)), None, None, None, None
        shards, kept, saved, pull, asked = residuals
        with jax.named_scope(f"{self._scope}/backward"):
            kept = shards if kept is None else kept
            full, saved, gradients, wait = self._again(both(started, done), kept, saved, filled(gradients))
            full, gradients, started = place.start(wait, full, gradients)
            of_full, of_others, of_inputs = asked.spread(pull.together(full, saved)(gradients))
            of_full, of_inputs, done = place.reduce_after(started, order, of_full, of_inputs)
            of_shards, order = self._reduced(done, of_full, shards)
        return (place.released(started, done), order), of_shards, of_others, of_inputs, None

    def _begin(self, wait: Token | None, shards: list, inputs: list) -> tuple[list, list, Token | None]:
        """Forward: the full parameters and the inputs, once the unit may start."""
        shards, wait = self._place.gather_after(wait, self._wires.varied(shards))
        return self._place.start(wait, self._wires.gather(shards), inputs)

    def _again(self, wait: Token | None, kept: list, saved: list, gradients: list) -> tuple:
        """Backward: the full parameters and what was saved, from where they lie."""
        away = hosted(saved)
        if self._wires.gathers_again or away:
            coming = [*self._wires.varied(kept), *(saved[i] for i in away)]
            coming, gradients, wait = self._place.gather_again_after(wait, coming, gradients)
            kept, saved = coming[: len(kept)], _with(saved, away, coming[len(kept) :])
        return self._wires.gather_again(kept), saved, gradients, wait

    def _reduced(self, done: Token | None, of_full: list, shards: list) -> tuple[list, Token | None]:
        """Backward: the gradients of the shards, put where the shards lie, and the token that they are there."""
        scattered, order = self._place.reduced(done, self._wires.scatter(of_full))
        of_shards = self._wires.finish(scattered, shards)
        if away := hosted(of_shards):
            sent, order = self._place.reduced(order, [of_shards[i] for i in away])
            of_shards = _with(of_shards, away, sent)
        return of_shards, order


def _with(arrays: list, at: list[int], values: list) -> list:
    """The arrays with others in some places."""
    new = dict(zip(at, values, strict=True))
    return [new.get(i, x) for i, x in enumerate(arrays)]
