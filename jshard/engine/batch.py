"""The batch of a call: which of its arguments are split over the data shards, and a warning where work is not.

The numbers are those of one device either way. What has no batch is whole on every device, which then computes all that
follows from it: slow, so it is said once.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jshard import _compat
from jshard.engine.context import in_shapes_only
from jshard.engine.values import LocalProduct

WARNED_FLOPS = 1e9
WARNED_SHARE = 0.1
"""Of the products of one device, in forward."""

_LISTED = 4
_warned: set[tuple[str, bool, tuple[str, ...]]] = set()


def batch_size(arrays: Sequence[Any], degree: int) -> int:
    """The size of the batch: the leading size that most of the arguments have, by count, then by elements.

    A size that is another dim of an array beside it comes last, but for that of the first argument: a mask (tokens,
    tokens) or positions (tokens, ...) beside ids (examples, tokens). It is only a matter of speed: an array that is
    split and has no batch, or has one and is whole, gives the same numbers.
    """
    votes: dict[int, tuple[int, int]] = collections.defaultdict(lambda: (0, 0))
    for x in arrays:
        if x.ndim and x.shape[0] and x.shape[0] % degree == 0:
            count, size = votes[x.shape[0]]
            votes[x.shape[0]] = count + 1, size + x.size
    first = next(iter(votes), 0)
    is_inner = lambda n: n != first and any(n in x.shape[1:] and x.shape[0] != n for x in arrays if x.ndim)
    return max(votes, key=lambda n: (not is_inner(n), *votes[n]), default=0)


def warn_of_whole(
    call: str, arguments: Sequence[Any], batch: int, degree: int, products: Sequence[LocalProduct]
) -> None:
    """Warns of large products that every device computes for all examples; once for each call and their lines.

    A single example is computed so on any number of devices.

    Args:
        call: the model and its method: `GPT.__call__`.
        arguments: shapes of the arguments.
        batch: their `batch_size`.
        degree: the number of data shards.
        products: of the forward program.
    """
    lines: dict[str, float] = collections.defaultdict(float)
    for one in products:
        if one.is_whole:
            lines[one.where or "the model"] += one.flops
    total, whole = sum(one.flops for one in products), sum(lines.values())
    rows = [x for x in arguments if x.ndim and x.shape[0] > 1 and not _is_key(x)]
    others = [x for x in rows if x.shape[0] != batch]
    if not others or whole < max(WARNED_FLOPS, WARNED_SHARE * total) or in_shapes_only():
        return
    listed = sorted(lines, key=lambda line: -lines[line])
    if (key := (call, bool(batch), tuple(listed))) in _warned:
        return
    _warned.add(key)
    why, do = _beside(others, batch, degree) if batch else _no_batch(rows, degree)
    where = [f"{line}: {lines[line] / 1e9:,.1f} GFLOP" for line in listed[:_LISTED]]
    more = [f"and {len(listed) - _LISTED} more lines"] if len(listed) > _LISTED else []
    what = f"{call}: every device computes products for all examples, {whole / total:.0%} of what it multiplies:"
    _compat.warn_user("\n  ".join([what, *where, *more, why, do]))


def _no_batch(rows: Sequence[Any], degree: int) -> tuple[str, str]:
    size = max(rows, key=lambda x: x.size).shape[0]
    fewer = size // degree * degree
    line = f" To leave out the last of {size}: x = x[:{fewer}]" if fewer else ""
    return (
        f"No argument has a leading dim that divides by {degree}, the number of data shards: {_shapes(rows)}.",
        f"A batch of a multiple of {degree} is split.{line}",
    )


def _beside(others: Sequence[Any], batch: int, degree: int) -> tuple[str, str]:
    largest = max(others, key=lambda x: x.size)
    why = f"Of the arguments those with a leading dim of {batch} are split, and these are whole: {_shapes(others)}."
    if batch in largest.shape[1:-1]:
        dim = largest.shape.index(batch, 1)
        return why, (
            f"If dim {dim} is that of the examples, give it first: x = jnp.moveaxis(x, {dim}, 0)"
            f"; in the model: x = jnp.moveaxis(x, 0, {dim})"
        )
    return why, f"If their rows are examples, too: a number of them that all arguments have, a multiple of {degree}."


def _shapes(rows: Sequence[Any]) -> str:
    more = [f"and {len(rows) - _LISTED} more"] if len(rows) > _LISTED else []
    return ", ".join([*(f"{x.dtype}{list(x.shape)}" for x in rows[:_LISTED]), *more])


def _is_key(x: Any) -> bool:
    """Whether an array is a random key, typed or of the old kind."""
    old = x.dtype == jnp.uint32 and x.ndim == 1 and x.size in (2, 4)
    return old or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
