"""Effects happen once, arrays are where the user said; what stays split gathers nothing, and sums come late."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jshard.engine.rules import PARTIAL
from tests.engine.on_shards import ONE_BY_8, TWO_BY_4, check_on, mesh_of, on_shards, run_alone

rng = np.random.default_rng(0)
X = rng.normal(size=(32, 16)).astype("f")
ONE, TWO = mesh_of(*ONE_BY_8), mesh_of(*TWO_BY_4)


def calls_of(fn, *args, gradients=False):
    """What a function that gets a callback reported; of one run on the shards."""
    seen = []

    def report(*xs):
        seen.append(tuple(np.array(x) for x in xs))
        return np.float32(len(seen))

    run = lambda *args: fn(report, *args)
    jax.block_until_ready(on_shards(run, args, TWO, gradients=gradients).outs)
    jax.effects_barrier()
    return seen


def test_callbacks_run_once_with_whole_values():
    """Seen to fail without the condition on the first shard (8 calls), and with a shard's values."""
    for fn in (
        lambda report, x: (jax.debug.callback(report, x), x * 2)[1],
        lambda report, x: io_callback(report, jax.ShapeDtypeStruct((), jnp.float32), x),
        lambda report, x: io_callback(report, jax.ShapeDtypeStruct((), jnp.float32), x, ordered=True),
        lambda report, x: jax.pure_callback(report, jax.ShapeDtypeStruct((), jnp.float32), x),
        lambda report, x: lax.cond(x[0, 0] < 9, lambda x: jax.debug.callback(report, x), lambda x: None, x) or x,
        lambda report, x: jax.checkpoint(lambda x: (jax.debug.callback(report, x), x)[1])(x),
    ):
        seen = calls_of(fn, X)
        assert len(seen) == 1
        np.testing.assert_array_equal(seen[0][0], X)


def test_callbacks_in_loops_and_for_rows():
    one = jax.ShapeDtypeStruct((), jnp.float32)

    def loop(report, x):
        return lax.scan(lambda c, i: (c, io_callback(report, one, i, c.sum(), ordered=True)), x, jnp.arange(3))[0]

    seen = calls_of(loop, X)
    assert [int(i) for i, _ in seen] == [0, 1, 2]
    np.testing.assert_allclose([s for _, s in seen], X.sum(), rtol=1e-5)
    rows = calls_of(lambda report, x: jax.vmap(lambda r: (jax.debug.callback(report, r[0]), r)[1])(x), X)
    assert sorted(float(r) for (r,) in rows) == sorted(X[:, 0].tolist())
    row = jax.ShapeDtypeStruct((16,), jnp.float32)
    sort = lambda x: jax.vmap(lambda r: jax.pure_callback(np.sort, row, r, vmap_method="broadcast_all"))(x)
    check_on(TWO, sort, X, gradients=False)
    check_on(TWO, lambda x: jax.pure_callback(lambda a: np.sort(a, 0), x, x), X, gradients=False)
    test = lambda report, c: (jax.debug.callback(report, c.sum()), c.sum() > 1)[1]
    twice = lambda report, x: lax.while_loop(
        lambda c: test(report, c), lambda c: c * 0.5, jnp.abs(x) / jnp.abs(x).sum() * 3
    )
    assert len(calls_of(twice, X)) == 3
    branch = lambda report, x: lax.cond(x[0, 0] > 9, lambda x: jax.debug.callback(report, x), lambda x: None, x) or x
    assert calls_of(branch, X) == []


def test_prints_are_printed_once(capfd):
    calls_of(lambda report, x: (jax.debug.print("rows {} sum {:.3f}", x.shape[0], x.sum()), x)[1], X)
    assert capfd.readouterr().out.splitlines() == [f"rows 32 sum {X.sum():.3f}"]


def test_callbacks_in_backward():
    watched = jax.custom_vjp(lambda report, x: x, nondiff_argnums=(0,))
    watched.defvjp(lambda report, x: (x, None), lambda report, _, g: (jax.debug.callback(report, g), (g,))[1])
    seen = calls_of(lambda report, x: watched(report, jnp.sin(x)), X, gradients=True)
    assert len(seen) == 1 and seen[0][0].shape == (32, 16)


# ---- where arrays are


def constraints_of_the_user(found):
    """Those of the program that name an axis; each of them names the compiler's, and no other."""
    lines = [line for line in found.text.splitlines() if "sharding_constraint" in line and '{"' in line]
    assert all('"tensor"' in line and "fsdp" not in line and "replica" not in line for line in lines)
    return lines


def test_constraints_keep_the_compilers_axes():
    """Seen to fail with constraints dropped, and with the data axes kept."""
    mesh = mesh_of(2, 2, 2)
    for spec in (
        P(("replica", "fsdp"), "tensor"),
        P("fsdp", ("replica", "tensor")),
        P(P.UNCONSTRAINED, "tensor"),
        P(("fsdp", "tensor")),
    ):
        fn = lambda x, spec=spec: lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, spec)) * 2
        found = check_on(mesh, fn, X)
        assert len(constraints_of_the_user(found)) == 2  # forward and backward
        put = lambda x, spec=spec: jax.device_put(jnp.sin(x), NamedSharding(mesh, spec)) * 2
        if P.UNCONSTRAINED not in spec:
            check_on(mesh, put, X)
    for plain in (ONE, TWO):
        fn = lambda x, plain=plain: lax.with_sharding_constraint(x, NamedSharding(plain, P(None, "fsdp"))) * 2
        found = check_on(plain, fn, X)
        assert not found.moved and "sharding_constraint" not in found.text


def test_memories_are_kept():
    """Seen to fail with `device_put` as a rule that does nothing."""
    mesh = ONE
    host = lambda x: jax.device_put(jax.device_put(jnp.sin(x), jax.memory.Space.Host), jax.memory.Space.Device) * 2
    found = on_shards(host, (X,), mesh, gradients=False, run=False)
    assert "Host" in found.text or "host" in found.text
    assert not found.moved
    kind = NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host")
    found = on_shards(lambda x: jax.device_put(jnp.sin(x), kind), (X,), mesh, gradients=False, run=False)
    assert "Host" in found.text or "host" in found.text


def test_an_equation_without_results_takes_a_sum_over_the_shards():
    check_on(ONE, lambda x: (lax.dce_sink(x.sum(0)), x * 2)[1], X)


# ---- What stays split, and what partial ----------------------------------------------------------


BATCH = 32
Array = jax.Array


class Run:
    """A function on 8 shards: of arguments those are split whose first dim is the batch.

    Args:
        function: of arrays.
        args: whole ones.
        gradients: which of its results are gradients.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, gradients: Any = ()) -> None:
        found = run_alone(function, args, mesh_of(*ONE_BY_8), batch=BATCH, gradients=gradients)
        self.kinds, self.states, self.lowered = [moved.kind for moved in found.moved], found.states, found.lowered
        for got, want in zip(found.outs, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
            np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=1e-5, atol=1e-5)


def normal(*shape: int) -> Array:
    return jax.random.normal(jax.random.key(len(shape)), shape)


NORMAL, W = normal(BATCH, 16), normal(16, 8)
LABELS = jnp.arange(BATCH) * 7 % 16


def test_indices_that_count_the_batch_gather_nothing() -> None:
    picks: list[Callable[..., Array]] = [
        lambda x, labels: x[jnp.arange(BATCH), labels],
        lambda x, labels: x[jnp.arange(x.shape[0])[:, None], labels[:, None] + jnp.arange(2)[None]],
        lambda x, labels: jnp.take_along_axis(x, labels[:, None], 1),
        lambda x, labels: x.at[jnp.arange(BATCH), labels].set(0.0),
        lambda x, labels: jax.vmap(lambda row, label: row[label])(x, labels),
    ]
    both = lambda pick, x, labels: (pick(x, labels), jax.grad(lambda x: (pick(x, labels) ** 2).sum())(x))
    run = Run(lambda x, labels: [both(pick, x, labels) for pick in picks], NORMAL, LABELS % 15)
    assert run.kinds == [] and set(run.states) == {0}


def test_indices_that_only_look_as_if_they_counted_are_gathered_for() -> None:
    for rows in (jnp.arange(BATCH)[::-1], (jnp.arange(BATCH) + 1) % BATCH, jnp.arange(BATCH) // 2):
        assert "whole" in Run(lambda x, labels, rows=rows: x[rows * 1, labels], NORMAL, LABELS).kinds
    assert "whole" in Run(lambda x, i: x[jnp.arange(16), i], NORMAL, jnp.arange(16)).kinds


def test_operations_along_the_batch_move_shards_and_gather_nothing() -> None:
    functions: list[Callable[..., Array]] = [
        lambda x: jnp.sort(x, 0),
        lambda x: jnp.flip(x, 0),
        lambda x: jnp.roll(x, 3, 0),
        lambda x: jnp.cumsum(x, 0),
        lambda x: x[:16] * x[16:],
        lambda x: x[1:] - x[:-1],
        lambda x: jnp.concatenate([x, x], 0),
        lambda x: jnp.pad(x, ((8, 0), (0, 0))),
        lambda x: x.reshape(4, 8, 16).std(0),
        lambda x: jnp.swapaxes(x.reshape(BATCH, 8, 2), 0, 1).reshape(-1, 2),
    ]
    run = Run(lambda x: [function(x) for function in functions], NORMAL)
    assert set(run.kinds) == {"move"} and all(isinstance(state, int) for state in run.states)


def test_one_row_of_the_batch_is_a_sum() -> None:
    run = Run(lambda x: (x[3], x[(x[:, 0].argmax() + 2) % BATCH]), NORMAL)
    assert run.states == [PARTIAL, PARTIAL]


def experts(x: Array, w: Array) -> Array:
    """Each expert's rows of w are sliced, as of a stack of experts."""
    return sum(jnp.tanh(x @ w[2 * i : 2 * i + 2].T).sum() for i in range(8))  # type: ignore[return-value]


def test_gradients_of_experts_are_summed_once() -> None:
    grad = lambda x, w: jax.grad(experts, 1)(x, w)
    w = normal(16, 16)
    assert "sum" in Run(grad, NORMAL, w).kinds
    run = Run(grad, NORMAL, w, gradients=[0])
    assert run.kinds == [] and run.states == [PARTIAL]
    inside = Run(jax.jit(grad), NORMAL, w, gradients=[0])
    assert inside.kinds == [] and inside.states == [PARTIAL]


def test_what_does_not_flow_to_a_gradient_alone_is_summed_before_it_grows() -> None:
    both = lambda x, w: (jax.grad(experts, 1)(x, w), (jnp.pad(x.sum(0), (0, 16)) ** 2).sum())
    run = Run(both, NORMAL, normal(16, 16), gradients=[0])
    assert run.kinds == ["sum"]


def test_a_mean_over_the_batch_sends_no_batch_in_backward() -> None:
    """Its cotangent is summed before it is broadcast: only in the gradient of the weight it would be so anyway."""

    def centered(x: Array, w: Array) -> Array:
        y = x * w[None]
        return (jnp.tanh(y - y.mean(0, keepdims=True)) ** 2).sum()

    run = Run(lambda x, w: jax.grad(centered, 1)(x, w), NORMAL, normal(16), gradients=[0])
    assert "reduce_scatter" not in run.lowered.as_text()
    assert run.states == [PARTIAL]


def test_empty_arrays_and_dims_of_numpy() -> None:
    functions: list[Callable[..., Any]] = [
        lambda x: jnp.concatenate([x[:, :0], x], 1),
        lambda x: (x[:, :0] * 2, x[:0].sum(0)),
        lambda x: x[:0].reshape(0, 4, 4).sum((1, 2)),
        lambda x: jnp.zeros((0, BATCH)) @ x,
        lambda x: x.reshape(np.int64(4), np.int64(8), np.int32(16)).transpose(np.array([1, 0, 2])),
        lambda x: jnp.squeeze(x[:, None], np.int64(1)),
        lambda x: jax.vjp(lambda x, i: x * i.astype(x.dtype), x, jnp.arange(BATCH)[:, None])[1](x)[0],
    ]
    run = Run(lambda x: [function(x) for function in functions], NORMAL)
    assert run.kinds == ["move", "whole", "move"]
    assert run.states == [0, 0, 0, None, PARTIAL, 0, 0, 0]


def test_bits_of_an_old_stream_are_those_of_one_device() -> None:
    with jax.threefry_partitionable(False):
        run = Run(lambda x: x * jax.random.bernoulli(jax.random.key(3), 0.5, x.shape), NORMAL)
    # Their positions depend on the whole shape, so no shard can draw its own bits.
    assert run.kinds == ["made whole"]
    assert run.states == [0]
