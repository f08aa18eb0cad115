"""Arrays of any rank as the matrices that kernels take."""

from __future__ import annotations

import math

import jax
from jax import lax

from jshard import _compat


def as_matrix(x: jax.Array) -> jax.Array:
    """All dims but the last as one."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def as_row(vector: jax.Array, like: jax.Array) -> jax.Array:
    """A vector in the rank and dtype of what it is combined with, row by row."""
    return vector.astype(like.dtype).reshape((1,) * (like.ndim - 1) + vector.shape)


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Inside `shard_map`, counts arrays as different wherever one of them is.

    Outside of a kernel's own gradient: so JAX sums over the axes what each of the devices has of it.
    """
    axes = varying_over(*arrays)
    return tuple(vary(x, axes) for x in arrays)


def varying_over(*arrays: jax.Array) -> frozenset[str]:
    """Axes over which at least one of some arrays is different."""
    return frozenset[str]().union(*map(_compat.varying_axes, arrays))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Counts an array as different over some axes."""
    missing = tuple(sorted(axes - _compat.varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x
