"""Operations on each element by itself, and those that move elements by their place alone."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.engine.rules import PARTIAL, Eqn, Partitioner, Value, beside, can_be_partial, rule, same, split_dim

ELEMENTWISE = frozenset(
    """
    abs add add_any and asin asinh acos acosh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor
    ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max
    min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial population_count pow random_clone
    random_fold_in random_seed real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor
    zeta
    """.split()
)


@rule(*ELEMENTWISE, converts_partial=True)
def elementwise(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Split as the largest operand is. Scalars and dims of size 1 stay whole."""
    dim, old, new = split_dim(values), eqn.invars[0].aval.ndim, eqn.outvars[0].aval.ndim
    if eqn.primitive.name == "bitcast_convert_type" and old != new:  # the last dim comes or goes
        return same(p, eqn, [p.split(values[0], dim)], dim) if dim < max(old, new) - 1 else None
    if eqn.primitive.name == "random_fold_in" and not draws_alone(values[0]):
        return None
    if any(v.ndim and p.full_shape(v)[dim] not in (1, eqn.outvars[0].aval.shape[dim]) for v in values):
        return None
    stays = lambda v: v.ndim == 0 or p.full_shape(v)[dim] == 1
    return same(p, eqn, [p.whole(v) if stays(v) else p.split(v, dim) for v in values], dim)


@rule("tie", takes_partial=True)
def tie(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value]:
    """The second operand."""
    return [values[1]]


@rule("broadcast_in_dim")
def broadcast_in_dim(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim goes where the dim goes."""
    dim = eqn.params["broadcast_dimensions"][values[0].dim]
    shape = [n // p.degree if i == dim else n for i, n in enumerate(eqn.params["shape"])]
    return same(p, eqn, values, dim, shape=tuple(shape))


@rule("reshape")
def reshape(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim stays the outermost of those that it is merged with or split into.

    Where it is not the outermost, or the new outermost dim does not divide, the value is split along another dim for
    as long as it takes: the outermost of those that are merged, else any that a reshape keeps.
    """
    (value,), old, new = values, eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    if 0 in old:
        return None  # no elements, of which to find the dims
    if (order := eqn.params["dimensions"]) is not None:  # it transposes before
        value, old = Value(lax.transpose(value.x, order), order.index(value.dim)), [old[d] for d in order]
    mine, theirs = next(group for group in merged_dims(old, new) if value.dim in group[0])
    outer = lambda shape: [math.prod(shape[:i]) for i in range(len(shape))]  # those with as many elements before them
    same_parts = [(i, j) for i, n in enumerate(outer(old)) for j, m in enumerate(outer(new)) if n == m]
    pairs = [(i, j) for i, j in same_parts if p.divides(old[i]) and p.divides(new[j])]
    pairs.sort(key=lambda pair: (pair[0] != value.dim, pair[0] not in mine))
    if not pairs:
        return None
    i, j = pairs[0]
    local = [n // p.degree if k == j else n for k, n in enumerate(new)]
    found = Value(lax.reshape(p.split(value, i).x, local), j)
    if i in mine:
        return [found]
    again = next((k for k in theirs if p.divides(new[k])), None)
    return [found if again is None else p.split(found, again)]


def merged_dims(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Which dims of a reshape become which."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        mine, theirs = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(mine), j + len(theirs)
        size = lambda shape, dims: math.prod(shape[d] for d in dims)
        while size(old, mine) != size(new, theirs):
            if j == len(new) or (size(old, mine) < size(new, theirs) and i < len(old)):
                mine.append(i)
                i += 1
            else:
                theirs.append(j)
                j += 1
        groups.append((mine, theirs))
    return groups


@rule("transpose", "squeeze", "stack", "unstack")
def moved_dims(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim goes where the dim goes. One that is taken apart is whole."""
    dim, params = split_dim(values), eqn.params
    match eqn.primitive.name:
        case "transpose":
            to = params["permutation"].index(dim)
        case "squeeze":
            to = dim - sum(a < dim for a in params["dimensions"])
        case "stack":
            to = dim + (params["axis"] <= dim)
        case _ if dim == params["axis"]:
            return None
        case _:
            to = dim - (params["axis"] < dim)
    return same(p, eqn, [p.split(v, dim) for v in values], to)


@rule("slice")
def slice_(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The split dim is taken whole. Of one row of it, the shard that has it is the sum."""
    (value,), params, shape = values, eqn.params, eqn.invars[0].aval.shape
    starts, limits = params["start_indices"], list(params["limit_indices"])
    strides = params["strides"] or [1] * len(shape)
    taken = [d for d, n in enumerate(shape) if (starts[d], limits[d], strides[d]) != (0, n, 1)]
    if value.dim in taken and limits[value.dim] - starts[value.dim] == 1 and can_be_partial(value):
        dim, at = value.dim, starts[value.dim]
        starts = [0 if d == dim else n for d, n in enumerate(starts)]
        limits = [value.shape[dim] if d == dim else n for d, n in enumerate(limits)]
        strides = [1 if d == dim else n for d, n in enumerate(strides)]
        return [one_row(p, Value(lax.slice(value.x, starts, limits, strides), dim), at)]

    def of_shard(value: Value) -> list[Value]:
        ends = [value.shape[d] if d == value.dim else n for d, n in enumerate(limits)]
        return same(p, eqn, [value], value.dim, limit_indices=tuple(ends))

    return beside(p, eqn, values, taken, lambda values: of_shard(values[0]))


def one_row(p: Partitioner, value: Value, at: Any) -> Value:
    """Row `at`, in global view, of a value along its split dim: partial, as the other shards have zeros."""
    at = at - p.shard * value.shape[value.dim]
    inside = (at >= 0) & (at < value.shape[value.dim])
    row = lax.dynamic_slice_in_dim(value.x, jnp.where(inside, at, 0), 1, value.dim)
    return Value(jnp.where(inside, row, jnp.zeros_like(row)), PARTIAL)


def draws_alone(key: Value) -> bool:
    """Whether each key of a batch draws what it draws by itself; with `rbg` the first key draws for all of them."""
    return str(jax.random.key_impl(key.x)).startswith(("threefry", "philox"))


@rule("random_wrap", "random_unwrap", "random_split", "random_bits")
def keys(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Typed keys: the dims of the keys stand first in every form of them, and in what each of them draws."""
    dim = values[0].dim
    if eqn.primitive.name in ("random_split", "random_bits") and not draws_alone(values[0]):
        return None
    return same(p, eqn, values, dim) if dim < min(values[0].ndim, eqn.outvars[0].aval.ndim) else None


@rule("random_gamma")
def random_gamma(p: Partitioner, eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Each key is split by the number of the samples that it draws: only the dims of the keys can be split."""
    key, dim = values[0], split_dim(values)
    if dim >= key.ndim or not draws_alone(key):
        return None
    return same(p, eqn, [p.split(v, dim) for v in values], dim)
