"""The batch of a call: which of its arguments are split over the data shards, and a warning where large ones are not.

The numbers are those of one device either way. What has no batch is whole on every device, which then computes all that
follows from it: slow, so it is said once.
"""

import collections
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jshard import _compat
from jshard._nnx import Unit
from jshard.engine.context import in_shapes_only
from jshard.engine.moved import warned_bytes
from jshard.engine.trace import Call
from jshard.engine.values import array_bytes

_LISTED = 8
_warned: set[tuple[str, str]] = set()


def batch_size(arrays: Sequence[Any], degree: int) -> int:
    """The size of the batch: the leading size that most of the arguments have, by count, then by elements.

    A size that is another dim of an array beside it comes last: a mask (tokens, tokens) or positions (tokens, ...)
    beside ids (examples, tokens). It is only a matter of speed: an array that is split and has no batch, or has one and
    is whole, gives the same numbers.
    """
    votes: dict[int, tuple[int, int]] = collections.defaultdict(lambda: (0, 0))
    for x in arrays:
        if x.ndim and x.shape[0] and x.shape[0] % degree == 0:
            count, size = votes[x.shape[0]]
            votes[x.shape[0]] = count + 1, size + x.size
    is_inner = lambda n: any(n in x.shape[1:] and x.shape[0] != n for x in arrays if x.ndim)
    return max(votes, key=lambda n: (not is_inner(n), *votes[n]), default=0)


def warn_of_whole(call: Call, unit: Unit, batch: int, degree: int) -> None:
    """Warns of a batch that every device computes whole, and of large arrays beside it; once for each line and shapes.

    A single example, scalars and random keys are no batch. Neither is what has the length of another dim of the batch,
    such as a mask or positions.

    Args:
        call: the call that opens a region.
        unit: record of the root.
        batch: its `batch_size`.
        degree: the number of data shards.
    """
    arguments = call.inputs[call.num_state :]
    rows = [x for x in arguments if x.ndim and x.shape[0] > 1 and not _is_key(x)]
    if degree == 1 or in_shapes_only() or not rows:
        return
    if not batch:
        _warn(call, rows, *_no_batch(rows, degree))
        return
    dims = {n for x in rows if x.shape[0] == batch for n in x.shape}
    others = [x for x in rows if x.shape[0] not in dims]
    if sum(map(array_bytes, others)) >= warned_bytes(unit):
        _warn(call, others, *_beside(others, batch, degree))


def _no_batch(rows: Sequence[Any], degree: int) -> tuple[str, str]:
    size = max(rows, key=lambda x: x.size).shape[0]
    fewer, more = size // degree * degree, -(-size // degree) * degree
    line = f"x = x[:{fewer}]  # or padded to {more}" if fewer else f"x = jnp.resize(x, ({more}, *x.shape[1:]))"
    return (
        f"no argument has a leading dim that divides by {degree}, the number of data shards. Every device computes the"
        " call for the whole batch:",
        f"A batch of a multiple of {degree} is split: {line}\n"
        "  For a few examples: with js.global_view(): y = model(x)",
    )


def _beside(others: Sequence[Any], batch: int, degree: int) -> tuple[str, str]:
    largest = max(others, key=array_bytes)
    size = largest.shape[0]
    length = max(batch, -(-size // degree) * degree)
    more = length - (size if length > size else batch)
    return (
        f"the batch is the leading dim of size {batch}, and arrays of another one are whole on every device, as is what"
        " is computed of them alone:",
        "If their rows are examples, too (the nodes of a graph beside its edges), pad what is shorter to one length:"
        f" x = jnp.pad(x, [(0, {more})] + [(0, 0)] * (x.ndim - 1))",
    )


def _warn(call: Call, rows: Sequence[Any], what: str, advice: str) -> None:
    listed = [f"{x.dtype}{list(x.shape)}  {array_bytes(x):,} bytes" for x in rows]
    more = [f"and {len(rows) - _LISTED} more"] if len(rows) > _LISTED else []
    text = "\n  ".join([f"{call.where}: {what}", *listed[:_LISTED], *more, advice])
    file, line = _compat.user_line()
    if (file, text) not in _warned:
        _warned.add((file, text))
        warnings.warn_explicit(text, UserWarning, file, line)


def _is_key(x: Any) -> bool:
    """Whether an array is a random key, typed or of the old kind."""
    old = x.dtype == jnp.uint32 and x.ndim == 1 and x.size in (2, 4)
    return old or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
