"""The token chain: when each unit may be gathered, tied down in the program itself.

A scalar runs from unit to unit through optimization barriers. With `prefetch=1` the gather of unit i+1 waits for the
start of unit i: it runs while unit i computes, and no earlier. In backward the same edges run the other way, as
cotangents of the scalar, so nothing needs to know the order of calls beforehand; a second scalar keeps the
reduce-scatters in order. That bounds what is gathered and not yet used, and what is not yet reduced: the rate
limiter of FSDP, here a property of the program.

XLA prunes a barrier's outputs that nobody uses, and the whole chain with them. So the scalar, a zero that the
compiler cannot see through, is subtracted from one result of every unit.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jshard import _compat
from jshard._policies import Prefetch
from jshard.engine.collectives import vary

Token = jax.Array


@dataclasses.dataclass(eq=False)
class Link:
    """One unit in the order of calls.

    Args:
        gathered_bytes: size of its gathered parameters on one device.
        started: the token once its parameters are there and it computes.
        done: the token once it has computed.
        order: the token of the reduce-scatters; forward only hands it on.
        prefetches: a later unit is gathered while this one computes. In backward, then, this one is gathered
            while that one computes; else it waits for its incoming gradient.
    """

    gathered_bytes: int
    started: Token
    done: Token
    order: Token
    prefetches: bool = False


class Chain:
    """The units called so far in one trace, and what the next one has to wait for.

    Args:
        axes: the data axes, over which the tokens differ.
        first: the token that the first units wait for: the start of the unit around them.
    """

    def __init__(self, axes: tuple[str, ...], first: Token | None = None) -> None:
        self.axes = axes
        self._trace = jex.get_opaque_trace_state()
        self._first = first
        self._links: list[Link] = []
        self._inner: list[Chain] = []

    def here(self) -> "Chain":
        """This chain, or another where a loop or a checkpoint in the model has begun a trace of its own."""
        now = jex.get_opaque_trace_state()
        for chain in (self, *self._inner):
            if chain._trace == now:
                return chain
        self._inner.append(Chain(self.axes))
        return self._inner[-1]

    def append(self, link: Link) -> None:
        """Adds the unit that was just called."""
        self._links.append(link)

    def next(self, gathered_bytes: int, prefetch: Prefetch) -> "Chained":
        """The place of the unit that is called next."""
        order = self._links[-1].order if self._links else self._zero()
        if self._fits_before_all(gathered_bytes, prefetch):
            return self._place(self._zero() if self._first is None else self._first, order)
        link = self._ahead(gathered_bytes, prefetch)
        if link is None:
            return self._place(self._links[-1].done, order)
        return self._place(link.started, order, behind=link)

    def _fits_before_all(self, gathered_bytes: int, prefetch: Prefetch) -> bool:
        """Whether the next unit may be gathered before the first one computes."""
        if prefetch.budget_bytes is None:
            return not self._links or len(self._links) < (prefetch.units or 0)
        waiting = sum(link.gathered_bytes for link in self._links)
        return not self._links or waiting + gathered_bytes <= prefetch.budget_bytes

    def _place(self, wait: Token, order: Token, *, behind: Link | None = None) -> "Chained":
        return Chained(self.axes, wait, order, behind=behind, chain=self)

    def _ahead(self, gathered_bytes: int, prefetch: Prefetch) -> Link | None:
        """The earliest unit that may compute while the next one is gathered; None: not one."""
        if prefetch.units is not None:
            return self._links[-prefetch.units] if prefetch.units else None
        assert prefetch.budget_bytes is not None
        found, in_forward, in_backward = None, gathered_bytes, 0
        for link in reversed(self._links):
            in_backward += link.gathered_bytes
            if max(in_forward, in_backward) > prefetch.budget_bytes:
                break
            found = link
            in_forward += link.gathered_bytes
        return found

    def _zero(self) -> Token:
        return vary(jnp.zeros(()), self.axes)


class Place:
    """A unit's place among the others, where the compiler chooses the order.

    Only the gather in backward waits, for the unit's incoming gradients: so that the copy of one unit is not brought
    in while another's is still needed.

    Args:
        axes: the data axes.
    """

    tokens: tuple[Token | None, Token | None] = (None, None)

    def __init__(self, axes: tuple[str, ...]) -> None:
        self.axes = axes

    def called(self, gathered_bytes: int, tokens: tuple) -> None:
        """Notes that the unit was called, with the tokens that came out of it."""

    def gather_after(self, wait: Token | None, shards: list) -> tuple[list, Token | None]:
        """Holds the shards back until the unit may be gathered."""
        return shards, wait

    def start(self, wait: Token | None, full: list, inputs: list) -> tuple[list, list, Token | None]:
        """The parameters and the inputs (or incoming gradients) to compute with, and the token of the start."""
        return full, inputs, wait

    def finish(self, started: Token | None, outs: list) -> tuple[list, Token | None]:
        """The results, and the token that they are there."""
        return outs, started

    def sent(self, order: Token | None, outs: list, away: list) -> tuple[list, list, Token | None]:
        """What is saved in host memory, on its way there before the results leave.

        The compiler would else take it there only where backward fetches it, and save nothing.
        """
        (outs, away), _ = tie(None, self.axes, outs, away)
        return outs, away, order

    def gather_again_after(self, wait: Token | None, kept: list, gradients: list) -> tuple[list, list, Token | None]:
        """Backward: holds back what the unit is gathered from, and what lies in host memory."""
        (kept, gradients), wait = tie(wait, self.axes, kept, gradients)
        return kept, gradients, wait

    def reduce_after(
        self, started: Token | None, order: Token | None, of_full: list, of_inputs: list
    ) -> tuple[list, list, Token | None]:
        """Backward: the gradients, and the token that they are there."""
        return of_full, of_inputs, order

    def reduced(self, order: Token | None, scattered: list) -> tuple[list, Token | None]:
        """Backward: the reduced gradients, and the token that they are there."""
        return scattered, order

    def end(self, started: Token | None, order: Token | None, of_inputs: list) -> tuple[list, Token | None]:
        """Backward of what reduces its gradients itself: those of the inputs, and the token that they are there."""
        return of_inputs, order

    def released(self, started: Token | None, done: Token | None) -> Token | None:
        """Backward: the token for the unit that this one's gather waited for."""
        return None


class Chained(Place):
    """A unit's place in the chain.

    Args:
        axes: the data axes.
        wait: what its gather waits for.
        order: the token of the reduce-scatters.
        behind: the unit that computes while this one is gathered; None if none does.
        chain: where it is noted once it was called.
    """

    def __init__(
        self, axes: tuple[str, ...], wait: Token, order: Token, *, behind: Link | None, chain: "Chain"
    ) -> None:
        super().__init__(axes)
        self.tokens = (wait, order)
        self._behind, self._chain = behind, chain
        self._link: Link | None = None
        if behind is not None:
            behind.prefetches = True

    def called(self, gathered_bytes: int, tokens: tuple) -> None:
        """Takes its place in the chain."""
        self._link = Link(gathered_bytes, *tokens)
        self._chain.append(self._link)

    def gather_after(self, wait: Any, shards: list) -> tuple[list, Token]:
        """Ties the shards to the token of the unit behind which they are gathered."""
        (shards,), wait = tie(wait, self.axes, shards)
        return shards, wait

    def start(self, wait: Any, full: list, inputs: list) -> tuple[list, list, Token]:
        """Ties parameters and inputs to each other."""
        (full, inputs), started = tie(wait, self.axes, full, inputs)
        return full, inputs, started

    def finish(self, started: Any, outs: list) -> tuple[list, Token]:
        """Ties a result to the start, and keeps the token in use."""
        at = next((i for i, x in enumerate(outs) if _tied(x, self.axes)), None)
        if at is None:
            return outs, started
        ([out],), done = tie(started, self.axes, [outs[at]])
        return [*outs[:at], _minus(out, done), *outs[at + 1 :]], done

    def sent(self, order: Any, outs: list, away: list) -> tuple[list, list, Token]:
        """Ties the results to what the units before have sent, and the next ones to this: it travels meanwhile."""
        outs, order = self.finish(order, outs)
        (away,), order = tie(order, self.axes, away)
        return outs, away, order

    def gather_again_after(self, wait: Any, kept: list, gradients: list) -> tuple[list, list, Token]:
        """Ties them to a later unit's backward, or to the unit's own incoming gradients."""
        assert self._link is not None, "backward is traced after the call"
        if not self._link.prefetches:
            return super().gather_again_after(wait, kept, gradients)  # pyright: ignore[reportReturnType]
        (kept,), wait = tie(wait, self.axes, kept)
        return kept, gradients, wait

    def reduce_after(self, started: Any, order: Any, of_full: list, of_inputs: list) -> tuple[list, list, Token]:
        """Ties the gradients to each other and to the reduction before."""
        (of_full, of_inputs), order = tie(order, self.axes, of_full, of_inputs)
        at = min((i for i, x in enumerate(of_full) if _tied(x, self.axes)), key=lambda i: of_full[i].size, default=None)
        if at is None:  # all are frozen
            of_inputs, order = self.end(started, order, of_inputs)
            return of_full, of_inputs, order
        return [*of_full[:at], _minus(of_full[at], started + order), *of_full[at + 1 :]], of_inputs, order

    def reduced(self, order: Any, scattered: list) -> tuple[list, Token]:
        """Ties the next reduction to this one."""
        (scattered,), order = tie(order, self.axes, scattered)
        return scattered, order

    def end(self, started: Any, order: Any, of_inputs: list) -> tuple[list, Token]:
        """Keeps both tokens in use."""
        of_inputs, _ = self.finish(started, of_inputs)
        return self.finish(order, of_inputs)

    def released(self, started: Any, done: Any) -> Token:
        """The start of this unit's backward, or its end."""
        return done if self._behind is None else started


def both(started: Token | None, done: Token | None) -> Token | None:
    """Backward: the token that comes of those which forward gave out; None where the compiler chooses the order."""
    return None if started is None or done is None else started + done


def passed_on(place: Place, tokens: tuple) -> tuple[Token | None, Token | None]:
    """Backward of a unit that nobody wants gradients of: its tokens, as if it were not there."""
    started, done, order = tokens
    wait = both(started, done)
    return place.released(wait, wait), order


def _minus(x: jax.Array, zero: Token) -> jax.Array:
    """`x`, in a way that keeps the token in use."""
    return x - zero.astype(x.dtype)


def tie(token: Any, axes: tuple[str, ...], *groups: list) -> tuple[list[list], Any]:
    """The arrays and the token, each available only once all of them are.

    Arrays that are the same on some data shards stay out: a barrier would count them as different too.
    """
    at = [(g, i) for g, group in enumerate(groups) for i, x in enumerate(group) if _tied(x, axes)]
    values, token = lax.optimization_barrier(([groups[g][i] for g, i in at], token))
    out = [list(group) for group in groups]
    for (g, i), x in zip(at, values, strict=True):
        out[g][i] = x
    return out, token


def _tied(x: jax.Array | None, axes: tuple[str, ...]) -> bool:
    return x is not None and jnp.issubdtype(x.dtype, jnp.inexact) and set(axes) <= _compat.varying_axes(x)
