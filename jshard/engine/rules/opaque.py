"""Calls that nothing can be seen of: declared by the user, or known to act on each example by itself.

A call that is neither is computed whole, which is noted: a `pallas_call`, an `ffi_call`. Declare it with
`js.per_example`.
"""

from typing import TYPE_CHECKING, Any

from jshard import _compat
from jshard._errors import CallError
from jshard.engine.per_example import Body
from jshard.engine.rules.calls import opened
from jshard.engine.rules.table import rule, same
from jshard.engine.values import PARTIAL, Eqn, State, Value

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner


# ---- declared


@rule("per_example", converts_partial=True)
def per_example(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """The function on the examples of this shard."""
    body: Body = eqn.params["body"]
    sizes = [p.full_shape(v)[d] for v, d in zip(values, body.ins, strict=True) if d is not None]
    own = [values[k] for k in body.own]
    if not all(map(p.divides, sizes)) or (own and not all(v.is_split for v in own)):
        return None  # forward was computed whole, or this cannot be split
    xs = [p.whole(v).x if d is None else p.split(v, d).x for v, d in zip(values, body.ins, strict=True)]
    try:
        found = body.run(*xs)
    except CallError:
        raise
    except Exception as error:
        raise CallError(
            f"A function declared with js.per_example cannot run on the {sizes[0] // p.degree} examples of a shard.",
            where=[body.name, _compat.user_place(eqn)],
            why=f"{type(error).__name__}: {error}\nIt ran on all {sizes[0]} of the batch; each of the {p.degree} "
            "data shards runs it on its part.",
            do="y = fn(x)  # in place of js.per_example(fn)(x): every device computes it for the whole batch\n"
            "Or write fn for any number of examples.",
        ) from error
    _check_shapes(p, eqn, body, found)
    return [Value(x, state) for x, state in zip(found, body.outs, strict=True)]


def _check_shapes(p: "Partitioner", eqn: Eqn, body: Body, found: Any) -> None:
    wanted = [
        tuple(n // p.degree if i == state else n for i, n in enumerate(atom.aval.shape))
        for atom, state in zip(eqn.outvars, body.outs, strict=True)
    ]
    wrong = [f"{x.shape} instead of {shape}" for x, shape in zip(found, wanted, strict=False) if x.shape != shape]
    if wrong or len(found) != len(wanted):
        raise CallError(
            "A function declared with js.per_example does not have a row of its result for each example.",
            where=[body.name, _compat.user_place(eqn)],
            why=f"on the examples of one of {p.degree} data shards: {', '.join(wrong) or f'{len(found)} results'}.",
            do="y = js.per_example(fn)(x).mean(0)  # fn returns a row for each example; they are combined outside",
        )


# ---- known


@rule("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper", converts_partial=True)
def cudnn_attention(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """CuDNN's attention: every operand that has the batch has it as dim 0.

    Pages of keys and values belong to no example. Dropout's mask depends on the place in the batch: whole.
    """
    query, batch = values[0], p.full_shape(values[0])[0]
    paged = any(v.ndim == 4 for v in values[8:10])
    if not p.divides(batch) or eqn.params["dropout_rate"] or query.ndim != 4:
        return None
    has_batch = [
        0 not in v.shape and v.ndim > 0 and p.full_shape(v)[0] % batch == 0 and not (paged and k in (1, 2))
        for k, v in enumerate(values)
    ]
    states: list[State] = [0] * len(eqn.outvars)
    if len(states) == 4 and not has_batch[3]:  # a bias for all examples: its gradient is their sum
        states[3] = PARTIAL
    xs = [p.split(v, 0).x if each else p.whole(v).x for v, each in zip(values, has_batch, strict=True)]
    return [Value(x, state) for x, state in zip(p.bind(eqn, xs), states, strict=True)]


@rule("scaled_matmul_wrapper", "scaled_matmul")
def scaled_matmul(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """(batch, rows, contracted) times (batch, columns, contracted), each with its scales: batch or rows."""
    left, right, *scales = values
    if 0 in (left.state, right.state) and p.divides(p.full_shape(left)[0]):
        return same(p, eqn, [p.split(v, 0) for v in values], 0)
    if left.state == 1 and len(scales) == 2 and p.divides(p.full_shape(scales[0])[1]):
        return same(p, eqn, [left, p.whole(right), p.split(scales[0], 1), p.whole(scales[1])], 1)
    return None


# ---- with a program that says what they compute


@rule("custom_partitioning")
def custom_partitioning(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """Its function for whole arrays, in place, as JAX itself runs it where all axes are manual."""
    return p.run(*opened(eqn.params["call"]), values)


@rule("custom_linear_solve", takes_partial=True)
def custom_linear_solve(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """Its solver, in place; the other functions are for derivatives, which were taken before."""
    lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
    start = lengths.matvec + lengths.vecmat
    right_sides = values[sum(lengths) :]
    return p.run(*opened(solve), [*values[start : start + lengths.solve], *right_sides])
