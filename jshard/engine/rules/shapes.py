"""Operations that move elements by their place alone: reshape, transpose, broadcast, pad, slice; and typed keys."""

import math
from typing import TYPE_CHECKING

from jax import lax

from jshard.engine.rules.table import rule, same, split_dim
from jshard.engine.values import Eqn, Value

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner


@rule("broadcast_in_dim")
def broadcast_in_dim(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim goes where the dim goes."""
    dim = eqn.params["broadcast_dimensions"][values[0].dim]
    shape = [n // p.degree if i == dim else n for i, n in enumerate(eqn.params["shape"])]
    return same(p, eqn, values, dim, shape=tuple(shape))


@rule("reshape")
def reshape(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim stays the outermost of those that it is merged with or split into."""
    (value,) = values
    new, outer = eqn.params["new_sizes"], math.prod(eqn.invars[0].aval.shape[: value.dim])
    for i, size in enumerate(new):
        if math.prod(new[:i]) == outer and p.divides(size):
            return [Value(lax.reshape(value.x, [n // p.degree if j == i else n for j, n in enumerate(new)]), i)]
    return None


@rule("transpose")
def transpose(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim goes where the dim goes."""
    return same(p, eqn, values, eqn.params["permutation"].index(values[0].dim))


@rule("squeeze")
def squeeze(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim stays."""
    return same(p, eqn, values, values[0].dim - sum(a < values[0].dim for a in eqn.params["dimensions"]))


@rule("expand_dims")
def expand_dims(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim stays."""
    kept = [i for i in range(eqn.outvars[0].aval.ndim) if i not in eqn.params["dimensions"]]
    return same(p, eqn, values, kept[values[0].dim])


@rule("stack")
def stack(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """All operands are split alike."""
    dim, axis = split_dim(values), eqn.params["axis"]
    return same(p, eqn, [p.split(v, dim) for v in values], dim + (axis <= dim))


@rule("unstack")
def unstack(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The dim that is taken apart is whole."""
    dim, axis = values[0].dim, eqn.params["axis"]
    return None if dim == axis else same(p, eqn, values, dim - (axis < dim))


@rule("tile")
def tile(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim is not repeated."""
    dim = values[0].dim
    return same(p, eqn, values, dim) if eqn.params["reps"][dim] == 1 else None


@rule("pad")
def pad(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim is not padded."""
    value, fill = values
    if not value.is_split or eqn.params["padding_config"][value.dim] != (0, 0, 0):
        return None
    return same(p, eqn, [value, p.whole(fill)], value.dim)


@rule("slice")
def slice_(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim is taken whole."""
    (value,), params = values, eqn.params
    dim, limits, strides = value.dim, list(params["limit_indices"]), params["strides"]
    if params["start_indices"][dim] != 0 or limits[dim] != eqn.invars[0].aval.shape[dim]:
        return None
    if strides is not None and strides[dim] != 1:
        return None
    limits[dim] = value.shape[dim]
    return same(p, eqn, values, dim, limit_indices=tuple(limits))


@rule("random_wrap", "random_unwrap", "random_fold_in", "random_seed", "random_split")
def keys(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Typed keys: the dims of the keys stand first in every form of them."""
    value = values[0]
    if not value.is_split or value.dim >= min(value.ndim, eqn.outvars[0].aval.ndim):
        return None
    if len(values) > 1 and values[1].state != value.dim:
        return None
    return same(p, eqn, values, value.dim)


@rule("random_bits")
def random_bits(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """A key for each row. `shape` is that of one key's bits."""
    return same(p, eqn, values, values[0].dim)
