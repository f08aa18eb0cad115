"""An update of arrays in host memory, a part at a time: never is all of it on the device.

An optimizer is a function of whole trees. Its traced program is evaluated here in another order: as far as the results
of some parameters need it, then of the next ones. Left to itself the compiler fetches all of it before forward begins.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

from jshard import _compat
from jshard._offload import fetched, placed_like
from jshard._placement import Placement
from jshard._state_places import Keys, tail_in

_PART_BYTES = 8 * 2**20  # of parameters on a device: large enough to copy well
_IN_FLIGHT = 2  # parts on the device at once: one is fetched or taken back while the other computes

Part = tuple[list[int], list[int]]
"""Positions of arguments and of results that belong together."""


def parts_of(
    offloaded: Mapping[Keys, Placement], arguments: Sequence[Keys], results: Sequence[Keys], gradients: Sequence[Keys]
) -> list[Part]:
    """Parameters with their gradients and their state, several together, those first whose gradients come first.

    Args:
        offloaded: the parameters whose state lies on the host, by path.
        arguments: paths of what the update takes; each ends in that of a parameter, or belongs to none.
        results: likewise of what it makes.
        gradients: paths of the gradients; what has none is frozen, and in no part.
    """
    found: dict[Keys, Part] = {path: ([], []) for path in offloaded}
    for number, paths in enumerate((arguments, results)):
        for i, path in enumerate(paths):
            tail = tail_in(offloaded, path)
            if tail is not None:
                found[tail][number].append(i)
    trained = {tail_in(offloaded, path) for path in gradients}
    parts, size = [([], [])], 0
    for path in reversed([path for path in offloaded if path in trained]):
        for all_of, more in zip(parts[-1], found[path], strict=True):
            all_of.extend(more)
        size += offloaded[path].bytes_per_device
        if size >= _PART_BYTES:
            parts, size = [*parts, ([], [])], 0
    return [part for part in parts if part[0]]


def streamed(function: Callable[..., list], arguments: Sequence, parts: Sequence[Part], like: Sequence) -> list:
    """The results of a function of arrays, those of each part put where their like lies before a later part begins.

    Args:
        function: takes arrays on the device and returns a list of arrays.
        arguments: what it takes; what lies on the host is fetched when its part begins.
        parts: in their order. Results in none of them come at the end; what is only passed on stays where it lies.
        like: for each result, an array whose memory it goes to.
    """
    lazy = _Lazy(function, arguments)
    results = lazy.unchanged(like)
    done: list[list[int]] = []
    for given, made in parts:
        values = [arguments[i] for i in given]
        if len(done) >= _IN_FLIGHT:
            before = done[-_IN_FLIGHT]
            values, found = lax.optimization_barrier((values, [results[j] for j in before]))
            for j, x in zip(before, found, strict=True):
                results[j] = x
        else:
            values = lax.optimization_barrier(values)  # none before the last of them, a gradient, is there
        lazy.give(given, values)
        for j in made:
            results[j] = placed_like(lazy.result(j), like[j])
        done.append([j for j in made if _compat.on_host(results[j])])
    for j in [j for j, x in enumerate(results) if x is None]:
        results[j] = placed_like(lazy.result(j), like[j])
    return results


class _Lazy:
    """A traced function whose results are computed one by one, each with what it needs and was not there."""

    def __init__(self, function: Callable[..., list], arguments: Sequence) -> None:
        closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments))
        self._inputs, self._results = closed.jaxpr.invars, closed.jaxpr.outvars
        self._arguments = dict(zip(self._inputs, arguments, strict=True))
        self._known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._makers = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}

    def unchanged(self, like: Sequence) -> list[Any]:
        """The results that are arguments where they lie, such as frozen parameters; None for the others."""
        found = [None if isinstance(v, jex.Literal) else self._arguments.get(v) for v in self._results]
        stays = lambda x, y: x is not None and _compat.on_host(x) == _compat.on_host(y)
        return [x if stays(x, y) else None for x, y in zip(found, like, strict=True)]

    def give(self, positions: Sequence[int], values: Sequence) -> None:
        """Other values of some arguments, which come from now on; those that are needed already stay."""
        for i, x in zip(positions, values, strict=True):
            self._known.setdefault(self._inputs[i], fetched(x))

    def result(self, position: int) -> Any:
        """A result."""
        wanted = [self._results[position]]
        while wanted:
            v = wanted[-1]
            if self._is_there(v):
                wanted.pop()
            elif v in self._arguments:
                self._known[v] = fetched(self._arguments[v])
            elif missing := [x for x in self._makers[v].invars if not self._is_there(x)]:
                wanted += missing
            else:
                self._run(self._makers[v])
        return self._value(self._results[position])

    def _run(self, eqn: Any) -> None:
        found = _compat.bind(eqn, [self._value(v) for v in eqn.invars])
        self._known |= dict(zip(eqn.outvars, found, strict=True))

    def _is_there(self, v: Any) -> bool:
        return isinstance(v, jex.Literal) or v in self._known

    def _value(self, v: Any) -> Any:
        return v.val if isinstance(v, jex.Literal) else self._known[v]
