"""Opaque calls: declared and known ones run on the examples of a shard, a user's `shard_map` in place, others whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard.engine.context import traced_for
from tests.engine.on_shards import ONE_BY_8, TWO_BY_4, check, check_on, mesh_of, on_shards

rng = np.random.default_rng(0)
X = rng.normal(size=(32, 16)).astype("f")
W = rng.normal(size=(16, 16)).astype("f") / 4
Q = rng.normal(size=(32, 6, 8)).astype("f")
K = rng.normal(size=(8, 8)).astype("f")
ONE, TWO = mesh_of(*ONE_BY_8), mesh_of(*TWO_BY_4)
WITH_TENSOR = mesh_of(2, 2, 2)


def whole(found):
    return [m for m in found.moved if m.kind != "sum"]


# ---- js.per_example


def pallas_rows(x, w):
    """A kernel whose grid is made for the number of rows."""

    def kernel(x, w, y):
        y[...] = jnp.tanh(x[...] @ w[...])

    row = lambda *shape: pl.BlockSpec((2, *shape), lambda i: (i, *(0 for _ in shape)))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype),
        grid=(x.shape[0] // 2,),
        in_specs=[row(16), pl.BlockSpec(w.shape, lambda i: (0, 0))],
        out_specs=row(16),
        interpret=True,
    )(x, w)


@jax.custom_vjp
def flash(q, k):
    """Attention as kernels keep it: rows of examples and heads, and what they sum to, as residuals."""
    return flash_forward(q, k)[0]


def flash_forward(q, k):
    scores = jnp.einsum("btd,bsd->bts", q, k)
    sums = jax.nn.logsumexp(scores, -1)
    out = jax.nn.softmax(scores) @ k
    return out, (q, k, out, sums.reshape(-1, 2))


def flash_backward(kept, d):
    q, k, out, sums = kept
    p = jnp.exp(jnp.einsum("btd,bsd->bts", q, k) - sums.reshape(q.shape[:2])[..., None])
    ds = p * (d @ k.swapaxes(1, 2) - (d * out).sum(-1, keepdims=True))
    return ds @ k, ds.swapaxes(1, 2) @ q + p.swapaxes(1, 2) @ d


flash.defvjp(flash_forward, flash_backward)


def test_a_kernel_runs_on_the_examples_of_a_shard():
    """Seen to fail with the rule turned down: the operand is gathered."""
    found = check(js.per_example(pallas_rows, in_axes=(0, None)), X, W, gradients=False)
    assert not found.moved
    assert "32x16" not in found.text.split("sdy.manual_computation")[1].split("sdy.return")[0]
    found = check(pallas_rows, X, W, gradients=False)
    assert [m.kind for m in found.moved] == ["whole"]


def test_residuals_stay_on_their_shard():
    """Seen to fail with backward's results taken for whole, and with `own` split along another dim."""
    attend = js.per_example(flash)
    functions = (
        lambda q, w: attend(jnp.sin(q), q @ w),
        lambda q, w: jnp.stack([attend(q * s, q @ w) for s in (1, 2)]).sum(0),
        lambda q, w: jax.vmap(attend)(jnp.stack([q, q * 2]), jnp.stack([q @ w, q])).sum(0),
        # Small numbers, as large scores magnify rounding: with those of `q`, of one device too.
        lambda q, w: lax.scan(lambda h, s: (attend(h, h @ w) * s, h.sum()), 0.3 * q, jnp.array([0.2, 0.3, 0.4]))[0],
        lambda q, w: jax.checkpoint(lambda q: attend(jnp.sin(q), q @ w))(q),
        lambda q, w: js.per_example(jax.checkpoint(flash))(q, q @ w),
        lambda q, w: lax.cond(q.sum() > 0, attend, lambda q, k: q, q, q @ w),
    )
    for fn in functions:
        found = check(fn, Q, K)
        assert not whole(found)


def test_gradients_of_what_all_examples_share_are_summed():
    """Seen to fail with PARTIAL left out: eight times too small."""
    project = js.per_example(lambda x, w: jnp.tanh(x @ w["a"] + w["b"][None]), in_axes=(0, None))
    found = check(lambda x, a, b: project(x, {"a": a, "b": b}), X, W, W[0])
    assert not whole(found)


def test_a_policy_knows_what_a_declared_function_names():
    """As kernels name what they keep. Seen to fail where names stayed inside: forward ran twice under both policies."""

    def forward(x, w):
        y = checkpoint_name(jnp.exp(x @ w), "kept")
        return y, (x, w, y)

    fn = jax.custom_vjp(lambda x, w: forward(x, w)[0])
    fn.defvjp(forward, lambda kept, dy: (dy * kept[2] @ kept[1].T, kept[0].T @ (dy * kept[2])))
    declared = js.per_example(fn, in_axes=(0, None))

    def num_calls(name):
        kept = jax.checkpoint(declared, policy=jax.checkpoint_policies.save_only_these_names(name))
        program = jax.make_jaxpr(jax.grad(lambda x, w: jnp.sin(kept(x, w)).sum(), (0, 1)))(X, W)
        return str(program).count(" = per_example[")

    assert (num_calls("another"), num_calls("kept")) == (3, 2)


def test_own_kernels_run_on_a_shard():
    """Seen to fail without per_example in the kernels: x and its gradient are gathered."""
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (rng.normal(size=(32, 2, 128)), rng.normal(size=(128, 128)) / 8))
    scale = jnp.linspace(0.5, 2, 128, dtype=jnp.bfloat16)
    with traced_for(ONE):
        for fn, args in (
            (functools.partial(js.kernels.matmul, backend="interpret"), (x, w, scale)),
            (functools.partial(js.kernels.rms_norm, backend="interpret"), (x, scale)),
            (lambda x, u, d: js.kernels.mlp(x, u, d, backend="interpret"), (x, w, w.T)),
        ):
            assert "per_example" in str(jax.make_jaxpr(fn)(*args))
            assert not whole(on_shards(fn, args, ONE, run=False))


# ---- known ones


def cudnn(monkeypatch):
    module = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(module, "check_compute_capability", lambda *args: True)
    if hasattr(module, "is_cuda_compute_capability_equal"):
        monkeypatch.setattr(module, "is_cuda_compute_capability_equal", lambda *args: False)


def test_cudnn_attention_takes_a_shards_examples(monkeypatch):
    """Traced, as CPU has no cuDNN: the shapes of its calls. Seen to fail without the rule."""
    cudnn(monkeypatch)
    q = jnp.ones((32, 16, 4, 64), jnp.bfloat16)
    bias = jnp.zeros((1, 4, 16, 16), jnp.bfloat16)
    lengths = jnp.full((32,), 16)

    def attend(q, k, v, bias):
        return jax.nn.dot_product_attention(
            q, k, v, bias, query_seq_lengths=lengths, key_value_seq_lengths=lengths, implementation="cudnn"
        )

    calls = []
    from jax._src.cudnn import fused_attention_stablehlo as module

    for name in ("_dot_product_attention_fwd_p_wrapper", "_dot_product_attention_bwd_p_wrapper"):
        primitive = getattr(module, name)
        bind = primitive.bind
        monkeypatch.setattr(
            primitive, "bind", lambda *xs, bind=bind, **p: calls.append([x.shape for x in xs]) or bind(*xs, **p)
        )
    on_shards(attend, (q, q, q, bias), TWO, run=False)
    local = [shapes for shapes in calls if shapes[0][0] == 4]
    assert len(local) == 2  # forward and backward
    for shapes in local:
        assert all(s == (4, 16, 4, 64) for s in shapes[:3]) and shapes[3] == (1, 4, 16, 16) and shapes[4] == (4,)


def test_rows_in_groups_are_multiplied_where_they_are():
    """Tokens sorted by expert. Seen to fail with the group sizes of the whole batch."""
    experts = np.stack([W, W * 2, -W, W.T])
    sizes = jnp.array([10, 0, 17, 5], jnp.int32)
    found = check(lambda x, e: lax.ragged_dot(jnp.sin(x), e, sizes), X, experts)
    assert not whole(found)

    def sorted_by_expert(x, e):
        choice = (x[:, 0] > 0) * 2 + (x[:, 1] > 0)
        order = jnp.argsort(choice)
        y = lax.ragged_dot(x[order], e, jnp.bincount(choice, length=4))
        return jnp.zeros_like(y).at[order].set(y)

    found = check(js.per_example(sorted_by_expert, in_axes=(0, None)), X, experts)
    assert not whole(found)


def test_calls_with_a_program_are_opened():
    @custom_partitioning
    def double(x):
        return jnp.sin(x) * 2

    double.def_partition(
        partition=lambda mesh, args, result: (mesh, lambda x: jnp.sin(x) * 2, result.sharding, [args[0].sharding]),
        sharding_rule="i j -> i j",
    )
    found = check(lambda x: double(x) + x, X, gradients=False)
    assert not found.moved
    solve = lambda a, b: jnp.linalg.solve(a, b)
    systems = X[:, :9].reshape(32, 3, 3) + 5 * np.eye(3, dtype="f")
    found = check(solve, systems, X[:, :3, None], tolerance=5e-5)
    assert not found.moved
    check(lambda x, b: jax.scipy.sparse.linalg.cg(lambda v: v + x.T @ (x @ v), b)[0], X, W[0], tolerance=2e-5)


# ---- a user's shard_map


def in_place(mesh, axes, **how):
    """Everything that a body may do over data axes."""

    def body(x, w):
        mean = lax.pmean(x.mean(0, keepdims=True), axes)
        near = lax.ppermute(x, axes[-1], [(i, (i + 1) % mesh.shape[axes[-1]]) for i in range(mesh.shape[axes[-1]])])
        everyone = lax.all_gather(x, axes, tiled=True)
        c, rows = lax.scan(lambda c, _: (c * 0.5 + lax.psum(c, axes), c.sum()), x @ w, None, 3)
        y = jnp.where(lax.axis_index(axes[-1]) == 1, x, jnp.tanh(near)) + mean + everyone[:1] + c
        return y, lax.psum(rows.sum() + y.sum(), axes), lax.pmax(lax.stop_gradient(y).max(), axes)

    specs = {"in_specs": (P(axes), P()), "out_specs": (P(axes), P(), P())}
    return jax.shard_map(body, mesh=mesh, **specs, **how)


@pytest.mark.parametrize("axes", [("replica", "fsdp"), ("fsdp",), ("fsdp", "replica")], ids=str)
def test_over_data_axes_its_body_runs_in_place(axes):
    """Seen to fail with the operands whole in place of split, and with the results taken for whole."""
    check_on(TWO, lambda x, w: in_place(TWO, axes, check_vma=len(axes) > 1)(jnp.sin(x), w), X, W)


def test_over_other_axes_the_data_axes_are_untouched():
    """Seen to fail with the specs of the data axes dropped, and with axis_names of the whole mesh."""
    mesh = WITH_TENSOR

    def body(x, w):
        h = jnp.tanh(x @ w)
        h = h * (1 + lax.axis_index("tensor"))
        both = lax.all_gather(h, "tensor", axis=1, tiled=True) + lax.all_gather(x[:, :8], "tensor").sum(0).repeat(2, 1)
        h = h + lax.psum_scatter(both, "tensor", scatter_dimension=1, tiled=True)
        return lax.psum(h @ w.T, "tensor"), h - h.mean(0, keepdims=True), x.sum(0) * 1.0

    over = functools.partial(jax.shard_map, mesh=mesh, axis_names={"tensor"})
    fn = over(body, in_specs=(P(), P(None, "tensor")), out_specs=(P(), P(None, "tensor"), P()))
    found = check_on(mesh, lambda x, w: fn(jnp.sin(x), w), X, W)
    assert {m.kind for m in found.moved} <= {"sum", "move"}
    number = lambda x: x * (1 + lax.axis_index("tensor")) + jnp.arange(x.shape[0])[:, None]
    rows = over(number, in_specs=P("tensor"), out_specs=P("tensor"))
    check_on(mesh, lambda x: rows(jnp.sin(x)), X)
