"""What a program does besides computing happens once, with whole values; where arrays lie is as the user said."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify, io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.engine.on_shards import ONE_BY_8, TWO_BY_4, check_on, mesh_of, on_shards

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


def test_checkify():
    def guarded(x):
        checkify.check(jnp.all(x < 1e9), "rows of {n}", n=x.sum())
        checkify.check(x.sum() > 1e9, "a sum of {n}", n=x.sum())
        return jnp.log(x)

    run = checkify.checkify(guarded, errors=checkify.user_checks | checkify.nan_checks)
    error, tree = [], []

    def flat(x):
        found, structure = jax.tree.flatten(run(x))
        tree[:] = [structure]
        return found

    found = on_shards(flat, (np.abs(X) + 1,), TWO, gradients=False)
    error, _ = jax.tree.unflatten(tree[0], found.outs)
    assert "a sum of" in error.get()


# ---- where arrays lie


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
