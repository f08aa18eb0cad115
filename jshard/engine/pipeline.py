"""The schedule of a scan over equal layers: weights come ahead of their use, gradients go a layer behind.

Forward carries the gathered weights of the next layers, so that layer i+1 is gathered while i computes. Backward does
the same in the other order, and carries the gradients of one layer: reduced while the layer below computes, their
reduce-scatter has a whole layer to hide behind. Without that it waits for its own layer's last product. Over replicas
the shards of the gradients are reduced yet another layer later, as the scattered ones are there only then.

The first gathers come before the loop and the last layers after it, so that nothing is gathered in vain.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jshard._placement import Placement
from jshard.engine.asked import Asked, filled, is_nothing, values
from jshard.engine.chain import Place, both, passed_on
from jshard.engine.collectives import scope
from jshard.engine.pull import Pull
from jshard.engine.reshard import Saving
from jshard.engine.rows import empty, like, put, take
from jshard.engine.wires import Wires

Arrays = tuple[list, list]
"""Arrays that have gradients, and those that have none."""

Layer = Callable[[list, Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
"""A layer as a function of (full parameters, its own inputs, carry, shared inputs) to (carry, outputs)."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a scan over layers is laid out.

    Args:
        length: number of layers.
        depth: how many layers ahead weights are gathered.
        delayed: whether gradients are reduced while the next layer of backward computes.
    """

    length: int
    depth: int
    delayed: bool


def pipelined(
    layer: Layer,
    placements: list[Placement],
    mesh: Mesh,
    *,
    schedule: Schedule,
    saving: Saving,
    place: Place,
    name: str,
) -> Callable[..., Any]:
    """The scan as a function of shards.

    Args:
        layer: one layer, as a function of arrays.
        placements: those of its parameters.
        mesh: the mesh.
        schedule: the layout.
        saving: what forward saves for backward, as for one unit.
        place: its place among the units.
        name: of the layers; the compiled program tells it of each collective.

    Returns:
        A function of (tokens, shards, own inputs, carry, shared inputs) that returns (carry, outputs) and the tokens
        that came out. Shards, own inputs and outputs have a row per layer.
    """
    scan = _Pipelined(layer, Wires(placements, mesh, saving.reshard), schedule, saving, place, name)
    run = jax.custom_vjp(scan.run)
    run.defvjp(scan.forward, scan.backward, symbolic_zeros=True)
    return run


class _Pipelined:
    """The scan, and its forward and backward where gradients are asked for."""

    def __init__(self, layer: Layer, wires: Wires, schedule: Schedule, saving: Saving, place: Place, name: str) -> None:
        self._place, self._scope = place, scope(name)
        self._plain = _Forward(layer, wires, schedule, place)
        saving_for = lambda asked: _Forward(layer, wires, schedule, place, asked=asked, checkpoint=saving.checkpoint)
        self._saving_for = functools.cache(saving_for)  # backward finds what forward has traced

    def run(self, tokens: tuple, shards: list, own: Arrays, carry: Arrays, shared: Arrays) -> tuple:
        with jax.named_scope(self._scope):
            return self._plain(tokens, shards, own, carry, shared)[0]

    def forward(self, *args: Any) -> tuple:
        asked = Asked.of(args[1], *(floats for floats, _ in args[2:]))
        tokens, shards, own, carry, shared = values(args)
        if not asked:
            return self.run(tokens, shards, own, carry, shared), None
        asked = asked.wholly(2)  # what goes from layer to layer has gradients once a layer has
        with jax.named_scope(self._scope):
            out, rows = self._saving_for(asked)(tokens, shards, own, carry, shared)
        return out, (shards, own, shared, rows, asked)

    def backward(self, residuals: tuple | None, cotangents: tuple) -> tuple:
        gradients, tokens = cotangents
        if residuals is None or is_nothing(gradients):
            return passed_on(self._place, filled(tokens)), None, None, None, None
        shards, own, shared, rows, asked = residuals
        with jax.named_scope(f"{self._scope}/backward"):
            run = _Backward(self._saving_for(asked), shards, own, shared, rows)
            tokens, of_shards, of_own, of_carry, of_shared = run(*filled(cotangents))
        return tokens, of_shards, (of_own, None), (of_carry, None), (of_shared, None)


class _Forward:
    """Forward; where gradients are asked for, also what backward needs, a row per layer."""

    def __init__(
        self,
        layer: Layer,
        wires: Wires,
        schedule: Schedule,
        place: Place,
        *,
        asked: Asked | None = None,
        checkpoint: Callable = lambda layer: layer,
    ) -> None:
        self.wires, self.schedule, self.place, self.asked = wires, schedule, place, asked
        self._layer = checkpoint(layer)
        # Traced once for the loop and for the layers after it; `pull` is what the trace leaves behind.
        self._one = jax.jit(self._compute, inline=True)
        self.pull: Pull | None = None

    def __call__(self, tokens: tuple, shards: list, own: Arrays, carry: Arrays, shared: Arrays) -> tuple:
        wires, (length, depth) = self.wires, (self.schedule.length, self.schedule.depth)
        wait, order = tokens
        first, wait = self.place.gather_after(wait, wires.varied([x[i] for i in range(depth) for x in shards]))
        ahead = [wires.gather(first[i * len(shards) : (i + 1) * len(shards)]) for i in range(depth)]
        rows = self._rows(shards, own, carry, shared)

        def compute(i: Any, carry: Arrays, full: list, rows: list) -> tuple[Arrays, list]:
            carry, outs, saved = self._one(full, take(own, i), carry, shared)
            return carry, put(rows, i, [outs, saved, wires.kept(full) if self.asked else None])

        def step(state: tuple, i: jax.Array) -> tuple[tuple, None]:
            carry, ahead, rows = state
            ahead, floats, later = wires.once_there(ahead, carry[0], take(shards, i + depth))
            full, *ahead = [*ahead, wires.gather(later)]
            carry, rows = compute(i, (floats, carry[1]), full, rows)
            return (carry, ahead, rows), None

        (carry, ahead, rows), _ = lax.scan(step, (carry, ahead, rows), jnp.arange(length - depth))
        started = wait
        for i, full in zip(range(length - depth, length), ahead, strict=True):
            if i == length - 1:
                full, floats, started = self.place.start(wait, full, carry[0])
                carry = floats, carry[1]
            carry, rows = compute(i, carry, full, rows)
        floats, done = self.place.finish(started, carry[0])
        outs, saved, kept = rows
        return (((floats, carry[1]), outs), (started if depth else done, done, order)), (saved, kept)

    def _compute(self, full: list, own: Arrays, carry: Arrays, shared: Arrays) -> tuple[Arrays, Arrays, list]:
        if self.asked is None:
            carry, outs = self._layer(full, own, carry, shared)
            return carry, outs, []

        def call(full: list, own_floats: list, floats: list, shared_floats: list) -> tuple:
            carry_out, outs = self._layer(full, (own_floats, own[1]), (floats, carry[1]), (shared_floats, shared[1]))
            return (carry_out[0], outs[0]), (carry_out[1], outs[1])

        groups = full, own[0], carry[0], shared[0]
        (floats, out_floats), pull, (rest, out_rest) = self.asked.vjp(call, *groups, has_aux=True)
        self.pull, saved = Pull.apart(pull, (full, own, shared))
        return (floats, rest), (out_floats, out_rest), saved

    def _rows(self, shards: list, own: Arrays, carry: Arrays, shared: Arrays) -> list:
        """Empty rows for outputs, for what is saved, and for the kept parts of the parameters."""

        def one(shards: list, own: Arrays, carry: Arrays, shared: Arrays) -> list:
            full = self.wires.gather(shards)
            _, outs, saved = self._one(full, own, carry, shared)
            return [outs, saved, self.wires.kept(full) if self.asked else None]

        first = take(shards, 0), take(own, 0)
        jaxpr, shapes = jax.make_jaxpr(one, return_shape=True)(*first, carry, shared)
        rows = [empty(aval, self.schedule.length) for aval in jaxpr.out_avals]
        return jax.tree.unflatten(jax.tree.structure(shapes), rows)


class _State(NamedTuple):
    """What goes from layer to layer of backward.

    Args:
        floats: gradient of the layer's output, then of its input.
        before: full gradients of the layer above, not yet reduced.
        waiting: scattered ones of the layer above that, not yet reduced over replicas.
        of_shards: gradients of the shards, a row per layer; None for one that is frozen, here and elsewhere.
        of_own: of the layers' own inputs, likewise.
        sums: of the shared inputs.
    """

    floats: list
    before: list | None
    waiting: list | None
    of_shards: list
    of_own: list
    sums: list


class _Backward:
    """Backward, from the last layer to the first."""

    def __init__(self, forward: _Forward, shards: list, own: Arrays, shared: Arrays, rows: tuple) -> None:
        self._forward, self._wires, self._place = forward, forward.wires, forward.place
        self._schedule = forward.schedule
        assert forward.asked is not None, "backward is for what was asked"
        self._asked = forward.asked
        self._shards, self._own, self._shared = shards, own, shared
        self._saved, kept = rows
        self._kept = kept or shards
        self._depth = self._schedule.depth if self._wires.gathers_again else 0
        self._one = jax.jit(self._compute, inline=True)

    def __call__(self, of_out: tuple, of_tokens: tuple) -> tuple:
        ((floats, _), (of_outs, _)), (started, done, order) = of_out, of_tokens
        wires, place, length, depth = self._wires, self._place, self._schedule.length, self._depth
        wait = both(started, done)
        first = wires.varied([x[length - 1 - i] for i in range(depth) for x in self._kept])
        if wires.gathers_again:
            first, floats, wait = place.gather_again_after(wait, first, floats)
        width = len(self._kept)
        ahead = [wires.gather_again(first[i * width : (i + 1) * width]) for i in range(depth)]
        state, ahead = self._rounds((self._begin(floats), ahead), of_outs)
        for i, full in zip(range(depth - 1, -1, -1), ahead, strict=True):
            if i == 0:
                full, floats, wait = place.start(wait, full, state.floats)
                state = state._replace(floats=floats)
            state, order = self._layer(i, state, full, of_outs, order)
        state, order = self._end(state, wait, order)
        tokens = place.released(wait if depth else order, order), order
        return tokens, state.of_shards, state.of_own, state.floats, state.sums

    def _begin(self, floats: list) -> _State:
        given = self._shards, self._own[0], [], self._shared[0]
        asked = zip(given, self._asked.groups, strict=True)
        of_shards, of_own, _, sums = (
            [like(x) if f else None for x, f in zip(xs, fs, strict=False)] for xs, fs in asked
        )
        return _State(floats, None, None, of_shards, of_own, sums)

    def _rounds(self, carry: tuple, of_outs: list) -> tuple:
        """All layers but those that are gathered after the last round."""
        step = functools.partial(self._round, of_outs=of_outs)
        last, depth = self._schedule.length - 1, self._depth
        if self._schedule.delayed:  # the first layer of backward finds nothing to reduce
            carry, last = step(carry, last)[0], last - 1
            if self._wires.has_replicas and last >= depth:  # and the second nothing to reduce over replicas
                carry, last = step(carry, last)[0], last - 1
        if last >= depth:
            carry, _ = lax.scan(step, carry, jnp.arange(last, depth - 1, -1))
        return carry

    def _round(self, carry: tuple, i: Any, *, of_outs: list) -> tuple[tuple, None]:
        """One layer of backward, while one further down is gathered."""
        (state, ahead), wires = carry, self._wires
        later = take(self._kept, i - self._depth)
        if wires.gathers_again:
            ahead, floats, later = wires.once_there(ahead, state.floats, later)
            state = state._replace(floats=floats)
        full, *ahead = [*ahead, wires.gather_again(later)]
        if state.before is not None and wires.gathers_again:
            state = state._replace(before=wires.after_small(ahead[-1] if ahead else full, state.before))
        return (self._layer(i, state, full, of_outs, None)[0], ahead), None

    def _layer(self, i: Any, state: _State, full: list, of_outs: list, order: Any) -> tuple[_State, Any]:
        """Reduces what is left of the layers above, and computes the gradients of layer i."""
        state, order = self._reduced(i, state, order)
        floats, before, waiting, of_shards, of_own, sums = state
        saved, outs = take(self._saved, i), take(of_outs, i)
        of_full, of_mine, floats, more = self._one(full, take(self._own, i), saved, floats, outs)
        if self._schedule.delayed:
            before = of_full
        else:
            of_shards = put(of_shards, i, self._wires.finish(self._wires.scatter(of_full), self._shards))
        sums = jax.tree.map(jnp.add, sums, more)
        return _State(floats, before, waiting, of_shards, put(of_own, i, of_mine), sums), order

    def _reduced(self, i: Any, state: _State, order: Any) -> tuple[_State, Any]:
        """Over replicas what layer i+2 has left, then over shards what i+1 has."""
        wires, (floats, before, waiting, of_shards, of_own, sums) = self._wires, state
        if waiting is not None:
            finished, waiting = wires.finish(waiting, self._shards), None
            if before is not None:
                before = lax.optimization_barrier((wires.varied(finished), before))[1]
            of_shards = put(of_shards, i + 2, finished)
        if before is not None:
            scattered, order = self._place.reduced(order, wires.scatter(before))
            if wires.has_replicas:
                waiting = scattered
            else:
                of_shards = put(of_shards, i + 1, wires.finish(scattered, self._shards))
        return _State(floats, None, waiting, of_shards, of_own, sums), order

    def _end(self, state: _State, wait: Any, order: Any) -> tuple[_State, Any]:
        """Reduces what the first layers have left."""
        wires, place, (floats, before, waiting, of_shards, of_own, sums) = self._wires, self._place, state
        if waiting is not None:
            of_shards = put(of_shards, 1, wires.finish(waiting, self._shards))
        if before is not None:
            before, floats, order = place.reduce_after(wait, order, before, floats)
            scattered, order = place.reduced(order, wires.scatter(before))
            of_shards = put(of_shards, 0, wires.finish(scattered, self._shards))
        else:
            floats, order = place.end(wait, order, floats)
        return _State(floats, None, None, of_shards, of_own, sums), order

    def _compute(self, full: list, own: Arrays, saved: list, floats: list, of_outs: list) -> tuple:
        assert self._forward.pull is not None, "forward was traced"
        pull = self._forward.pull.together((full, own, self._shared), saved)
        return tuple(self._asked.spread(pull((floats, of_outs))))
