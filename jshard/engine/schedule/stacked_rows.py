"""The rows of a loop's stacked results: written into buffers, or added to running sums."""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Var, jaxpr_as_fun

from jshard import _compat
from jshard.engine.rules import Value
from jshard.engine.rules.loops import Scan, crossing_arrays
from jshard.engine.rules.values import arrays_of
from jshard.engine.schedule.prefetch import row_start
from jshard.engine.selections import merged, others, picked


def sums_of_loop(scan: Scan, sums: Mapping[Var, Value]) -> dict[int, Value]:
    """Returns the running sums to which a loop can add its rows, by the index of the stacked result.

    Args:
        scan: the loop.
        sums: by the stack that is added to each.
    """
    own = {}
    stacks = scan.eqn.outvars[scan.n_carry :]
    for k, (stack, state) in enumerate(zip(stacks, scan.row_states, strict=True)):
        total = sums.get(stack)
        # An iteration has a row of the sum itself where it reduces its gradient to the shards of the sum.
        if total is not None and total.state == state and scan.passed_through[k] is None:
            own[k] = total
    return own


@functools.partial(jax.jit, static_argnums=3)  # so that the program has it once
def written(
    buffers: list[jax.Array], rows: list[jax.Array], row_number: jax.Array, are_sums: tuple[bool, ...]
) -> list[jax.Array]:
    """Returns buffers with a row written into each, or added where they are sums."""
    results = []
    for buffer, row, is_sum in zip(buffers, rows, are_sums, strict=True):
        with_dim = lax.broadcast(row, (1,))
        start = row_start(buffer, row_number)
        if is_sum:
            before = lax.dynamic_slice_p.bind(buffer, *start, slice_sizes=with_dim.shape)
            with_dim = before + with_dim.astype(buffer.dtype)
        results.append(lax.dynamic_update_slice_p.bind(buffer, with_dim, *start))
    return results


def laid_out_by_dims(row: jax.Array) -> jax.Array:
    """Returns a row that is stored in the order of its dims."""
    # A collective takes and returns parts that are contiguous. Without this, the compiler carries the layout of a row
    # of which it gathers the last dim over to the whole stack, and copies that before the loop: twice the parameters on
    # a device. Mixtral 8x7B on 64 H100: 26.3 -> 23.7 GiB.
    is_typed_key = jnp.issubdtype(row.dtype, jax.dtypes.extended)
    if row.ndim < 2 or is_typed_key or _compat.on_host(row) or _compat.automatic_axes():
        return row
    return with_layout_constraint(row, Layout(tuple(range(row.ndim))))


def run_adding(scan: Scan, sums: Mapping[int, Value]) -> list[Value]:
    """Runs a loop in its traced form, but adds rows to running sums, by the index of the stacked result."""
    iterate = jaxpr_as_fun(scan.traced)
    shared = crossing_arrays(scan.shared)
    # Rows of what is passed through are not among the outputs.
    outputs = [k for k, position in enumerate(scan.passed_through) if position is None]
    is_sum = [k in sums for k in outputs]
    all_sums = (True,) * len(sums)

    def step(
        state: tuple[list[jax.Array], list[jax.Array]], inputs: tuple[jax.Array, list[jax.Array]]
    ) -> tuple[tuple[list[jax.Array], list[jax.Array]], list[jax.Array]]:
        carry, totals = state
        row_number, rows = inputs
        results = iterate(*shared, *carry, *rows)
        stacked: Sequence[jax.Array] = results[scan.n_carry :]
        totals = written(totals, picked(is_sum, stacked), row_number, all_sums)
        return (results[: scan.n_carry], totals), others(is_sum, stacked)

    totals = arrays_of(sums[k] for k in outputs if k in sums)
    inputs = (jnp.arange(scan.length, dtype=jnp.int32), arrays_of(scan.scanned))
    unroll = scan.eqn.params["unroll"]
    (last, totals), stacked = lax.scan(
        step, (scan.start, totals), inputs, length=scan.length, reverse=scan.reverse, unroll=unroll
    )
    return scan.results(last, merged(is_sum, totals, stacked))
