"""Calls whose inside the engine does not partition: functions declared per example, and kernels with a batch."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from jshard import _compat
from jshard.engine.rules.building_blocks import same, shard_shape, split_all
from jshard.engine.rules.calls import opened
from jshard.engine.rules.registry import OperandStates, Partitioner, rule
from jshard.engine.rules.values import PARTIAL, State, Value, in_states, type_of
from jshard.errors import CallError

if TYPE_CHECKING:
    from jshard.engine.example_call import Body

# ---- js.per_example


@rule("per_example", operands=OperandStates.PARTIAL_BESIDE_SPLIT)
def per_example(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Runs the function on the examples of this shard."""
    body: Body = eqn.params["body"]
    batch_sizes = [p.full_shape(v)[dim] for v, dim in zip(operands, body.ins, strict=True) if dim is not None]
    if not all(map(p.divides, batch_sizes)):
        return None  # shards would have unequal numbers of examples
    # Residuals of the whole batch are not those of the shards side by side: they cannot be cut.
    if not all(operands[i].is_split for i in body.from_forward):
        return None  # forward was computed whole, and these are its residuals
    arrays = _split_arrays(p, operands, body.ins)
    # The user's function is traced here on fewer examples for the first time: what it raises is no fault of the engine.
    try:
        results = body.run(*arrays)
    except CallError:
        raise
    except Exception as error:
        raise CallError(
            f"A function declared with js.per_example cannot run on the {batch_sizes[0] // p.degree} examples of a"
            " shard.",
            where=[body.name, _compat.user_place(eqn)],
            why=f"{type(error).__name__}: {error}\nIt ran on all {batch_sizes[0]} of the batch; each of the {p.degree} "
            "data shards runs it on its part.",
            do="y = fn(x)  # instead of js.per_example(fn)(x): every device computes it for the whole batch\n"
            "Or write fn for any number of examples.",
        ) from error
    _check_shapes(p, eqn, body, results)
    return in_states(results, body.outs)


def _split_arrays(p: Partitioner, operands: Sequence[Value], dims: Sequence[int | None]) -> list[jax.Array]:
    """Returns the arrays of a shard, each split along a dim, or whole."""
    arrays = []
    for value, dim in zip(operands, dims, strict=True):
        local = p.whole(value) if dim is None else p.split(value, dim)
        arrays.append(local.x)
    return arrays


def _check_shapes(p: Partitioner, eqn: JaxprEqn, body: "Body", results: Sequence[jax.Array]) -> None:
    """Raises if a function has other results for a part of the examples than that part of its results for all."""
    # The shapes that the trace for all examples had, divided along the dim of the examples.
    expected_shapes = []
    for variable, state in zip(eqn.outvars, body.outs, strict=True):
        shape = tuple(type_of(variable).shape)
        if isinstance(state, int):
            shape = shard_shape(p, shape, state)
        expected_shapes.append(shape)
    wrong = []
    for x, shape in zip(results, expected_shapes, strict=False):
        if x.shape != shape:
            wrong.append(f"{x.shape} instead of {shape}")
    if wrong or len(results) != len(expected_shapes):
        difference = ", ".join(wrong) or f"{len(results)} results"
        why = f"on the examples of one of {p.degree} data shards: {difference}."
        raise body.without_rows(why, _compat.user_place(eqn))


# ---- attention by cuDNN

_BIAS = 3
_LENGTHS_AND_PAGES = range(4, 10)
_PAGE_TABLES = slice(8, 10)
_PAGED = (1, 2)
"""Positions of operands of cuDNN's attention: (query, key, value, bias, lengths and pages ...). With page tables, keys
and values are pages, and belong to no example."""


@rule(
    "dot_product_attention_fwd_wrapper",
    "dot_product_attention_bwd_wrapper",
    operands=OperandStates.PARTIAL_BESIDE_SPLIT,
)
def cudnn_attention(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits the batch, dim 0 of the operands that have it. Queries that are split along their heads stay split.

    Over axes other than the data axes it runs on a part of the heads, as split by `tensor`.
    """
    query = operands[0]
    # Dropout's mask depends on the position in the batch: a shard's own rows would get that of the first ones.
    if eqn.params["dropout_rate"] or query.ndim != 4:
        return None
    heads = _Heads.of(eqn)
    is_paged = any(v.ndim == 4 for v in operands[_PAGE_TABLES])

    def run_on_shard(*xs: jax.Array) -> list[jax.Array]:
        return p.bind(eqn, list(xs))

    run: Callable[..., Sequence[jax.Array]] = run_on_shard
    is_split_along_heads = query.state == heads.operand_dims[0] and not is_paged and all(map(p.divides, heads.sizes))
    # If an inner axis is still to be partitioned, its partitioner must meet this equation, not a `shard_map` around it.
    if p.is_last:
        num_shards = p.degree if is_split_along_heads else 1
        run = _on_part_of_heads(heads, run_on_shard, num_shards)
    if is_split_along_heads:
        results = run(*_split_arrays(p, operands, heads.operand_dims))
        return in_states(results, heads.result_dims)

    batch_size = p.full_shape(query)[0]
    if not p.divides(batch_size):
        return None
    # Queries, keys, values and lengths of an example stay together: attention is over the positions of one example.
    batch_dims = _batch_dims(p, operands, batch_size, is_paged=is_paged)
    states: list[State] = [0] * len(eqn.outvars)
    has_bias_gradient = len(states) == 4  # in backward; forward has two results
    if has_bias_gradient and batch_dims[_BIAS] is None:
        states[_BIAS] = PARTIAL  # the gradient of a bias for all examples is a sum over them
    return in_states(run(*_split_arrays(p, operands, batch_dims)), states)


def _batch_dims(p: Partitioner, operands: Sequence[Value], batch_size: int, *, is_paged: bool) -> list[int | None]:
    """Returns the dim of the batch of each operand; None where it has none."""
    dims: list[int | None] = []
    for position, value in enumerate(operands):
        # The number of pages may divide like a batch, and is none.
        is_page = is_paged and position in _PAGED
        has_batch = _has_batch(p, value, batch_size) and not is_page
        dims.append(0 if has_batch else None)
    return dims


def _has_batch(p: Partitioner, value: Value, batch_size: int) -> bool:
    """Returns whether dim 0 of an operand is the batch, perhaps merged with the heads. Empty operands are absent."""
    return 0 not in value.shape and value.ndim > 0 and p.full_shape(value)[0] % batch_size == 0


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Where an attention's operands and results have their heads.

    Attributes:
        operand_dims: the dim of the heads of each operand; None where there is none.
        result_dims: of each result.
        sizes: the number of heads of each array that has them.
    """

    operand_dims: list[int | None]
    result_dims: list[int | None]
    sizes: list[int]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "_Heads":
        """Finds the heads in an equation."""
        array_dim = 2 - eqn.params["layout"]  # (B, T, H, K), or (B, H, T, K)
        operand_dims = _head_dims(eqn.invars, array_dim)
        result_dims = _head_dims(eqn.outvars, array_dim)
        sizes = [*_head_sizes(eqn.invars, operand_dims), *_head_sizes(eqn.outvars, result_dims)]
        return cls(operand_dims, result_dims, sizes)


def _head_dims(atoms: Sequence[Var | Literal], array_dim: int) -> list[int | None]:
    """Returns the dim of the heads of each operand, or of each result: gradients are in the order of the operands."""
    return [_head_dim(position, type_of(atom).shape, array_dim) for position, atom in enumerate(atoms)]


def _head_sizes(atoms: Sequence[Var | Literal], dims: Sequence[int | None]) -> list[int]:
    """Returns the number of heads of each array that has them."""
    sizes = []
    for atom, dim in zip(atoms, dims, strict=True):
        if dim is not None:
            sizes.append(type_of(atom).shape[dim])
    return sizes


def _head_dim(position: int, shape: tuple[int, ...], array_dim: int) -> int | None:
    """Returns the dim of the heads: dim 1 of the bias, of the sums of forward, and of their gradients."""
    if 0 in shape or position in _LENGTHS_AND_PAGES:
        return None
    if position == _BIAS or len(shape) == 3:
        return 1
    return array_dim


def _on_part_of_heads(
    heads: _Heads, run: Callable[..., Sequence[jax.Array]], num_shards: int
) -> Callable[..., Sequence[jax.Array]]:
    """Returns the call on a part of the heads, over axes that the compiler splits arrays over.

    The compiler cannot split the call: it would gather its operands. If the devices do not divide the heads, each has
    all of them.

    Args:
        heads: of the whole call.
        run: the call.
        num_shards: over which its heads are split already.
    """
    axes = _compat.automatic_axes()
    if not axes:
        return run  # nothing but the data axes splits the arrays, and over those the call is on one shard
    num_parts = math.prod(axes.values())
    over = tuple(axes)
    # Keys and values may have fewer heads than queries.
    if any(size % (num_shards * num_parts) for size in heads.sizes):
        over = None

    def spec(dim: int | None) -> P:
        if dim is None:
            return P()
        return P(*[None] * dim, over)

    in_specs = tuple(spec(dim) for dim in heads.operand_dims)
    out_specs = [spec(dim) for dim in heads.result_dims]
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False)


# ---- other calls


@rule("scaled_matmul_wrapper", "scaled_matmul")
def scaled_matmul(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits the batch, or rows: it is (batch, rows, contracted) times (batch, columns, contracted), with scales."""
    left, right, *scales = operands
    is_batch_split = 0 in (left.state, right.state)
    if is_batch_split and p.divides(p.full_shape(left)[0]):
        return same(p, eqn, split_all(p, operands, 0), 0)
    # Rows of the left operand, with their scales, are rows of the result.
    if left.state == 1 and len(scales) == 2 and p.divides(p.full_shape(scales[0])[1]):
        local = [left, p.whole(right), p.split(scales[0], 1), p.whole(scales[1])]
        return same(p, eqn, local, 1)
    return None


@rule("custom_partitioning")
def custom_partitioning(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs its function for whole arrays in place, as JAX itself does where all axes are manual."""
    return p.run(*opened(eqn.params["call"]), operands)
