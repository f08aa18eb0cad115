"""The `context` axis: sequences split over devices, attention by heads or a ring, the numbers of one device."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.errors import CallError
from jshard.kernels import KernelError
from jshard.recipes.recipe import RecipeError, check_batch
from jshard.train import load_model_file
from tests.fake_cudnn import fake_cudnn
from tests.micro_gpt import MODELS
from tests.parity import flat, worst

LLAMA_FILE = load_model_file(MODELS / "llama.py")
llama = sys.modules[LLAMA_FILE.build.__module__]
CONFIG = llama.LlamaConfig(
    vocab_size=64, block_size=32, n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=64, scan=True, queries_at_once=16
)
IDS = np.random.default_rng(0).integers(0, 64, (8, 33), dtype=np.int32)
BATCH = {"inputs": IDS[:, :-1], "targets": IDS[:, 1:]}
EXACT = 1e-6  # of the largest element of a leaf


def outcome(model, loss_fn, batch, grad=nnx.value_and_grad):
    loss, grads = nnx.jit(lambda model, batch: grad(loss_fn)(model, batch))(model, batch)
    return flat(nnx.state(grads)) | {"loss": np.asarray(loss)}


def assert_exact(found, wanted):
    assert found.keys() == wanted.keys()
    assert {k: worst(found[k], wanted[k]) for k in wanted if worst(found[k], wanted[k]) > EXACT} == {}


# ---- Llama, by the mesh alone --------------------------------------------------------------------


@functools.cache
def plain():
    return outcome(LLAMA_FILE.build(CONFIG, nnx.Rngs(0)), LLAMA_FILE.loss_fn, BATCH)


def test_parameters_are_stored_over_both_axes():
    parts = {x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(placed(js.mesh(fsdp=4, context=2)).blocks.mlp)}
    assert parts == {(2, 32, 8), (2, 8, 32)}


def placed(mesh, **settings):
    config = dataclasses.replace(CONFIG, **settings)
    return js.shard_init(lambda: LLAMA_FILE.build(config, nnx.Rngs(0)), lambda model: LLAMA_FILE.annotate(model, mesh))


MESHES = [
    {"fsdp": 4, "context": 2},
    {"fsdp": 2, "context": 4},  # keys and values have two heads
    {"replica": 2, "fsdp": 2, "context": 2},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"fsdp": 1, "context": 4, "tensor": 2},  # heads are not enough for both
]
RINGS = [{"fsdp": 2, "context": 4}, {"replica": 2, "fsdp": 1, "context": 2, "tensor": 2}]


named = lambda x: x if isinstance(x, str) else ",".join(f"{a}={n}" for a, n in x.items())
CASES = [*((degrees, "auto") for degrees in MESHES), *((degrees, "ring") for degrees in RINGS)]


@pytest.mark.parametrize(("degrees", "over_context"), CASES, ids=named)
def test_loss_and_gradients_are_those_of_one_device(degrees, over_context):
    mesh = js.mesh(**degrees)
    batch = js.shard_batch(BATCH, mesh)
    assert batch["inputs"].sharding.shard_shape((8, 32))[1] == 32 // degrees["context"]
    assert_exact(outcome(placed(mesh, over_context=over_context), LLAMA_FILE.loss_fn, batch), plain())


@pytest.mark.wide
@pytest.mark.parametrize("sync", ["each", "last"])
def test_microbatches_are_those_of_one_device(sync):
    mesh = js.mesh(fsdp=2, context=4)
    grad = functools.partial(js.value_and_grad, accumulate=2, sync=sync)
    assert_exact(outcome(placed(mesh), LLAMA_FILE.loss_fn, js.shard_batch(BATCH, mesh), grad), plain())


@pytest.mark.wide
def test_a_checkpoint_restores_onto_other_degrees(tmp_path):
    js.checkpoint.save(tmp_path / "saved", {"model": placed(js.mesh(fsdp=4, context=2))})
    for degrees in ({"fsdp": 2, "context": 4}, {"fsdp": 8}):
        like = {"model": placed(js.mesh(**degrees))}
        model = js.checkpoint.restore(tmp_path / "saved", like=like)["model"]
        assert_exact(flat(nnx.state(model)), flat(nnx.state(LLAMA_FILE.build(CONFIG, nnx.Rngs(0)))))


# ---- what is sent, and what is computed ----------------------------------------------------------

B, T, H, G, K = 8, 64, 8, 4, 8


class GroupedQueries(nnx.Module):
    """Attention whose queries share keys, which is a unit."""

    def __init__(self, rngs, num_heads=H):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.q, self.k, self.v = linear(H * K, num_heads * K), linear(H * K, G * K), linear(H * K, G * K)
        self.out = linear(num_heads * K, H * K)

    def __call__(self, x_BTD, **how):
        heads = lambda y: y.reshape(*y.shape[:2], -1, K)
        y = js.kernels.attention(heads(self.q(x_BTD)), heads(self.k(x_BTD)), heads(self.v(x_BTD)), **how)
        return x_BTD + self.out(y.reshape(*x_BTD.shape[:2], -1))


class AroundOneUnit(nnx.Module):
    def __init__(self, rngs):
        self.layer = GroupedQueries(rngs)

    def __call__(self, x_BTD, **how):
        return self.layer(x_BTD, **how)


X = np.random.default_rng(1).normal(size=(B, T, H * K)).astype(np.float32)


def squared(model, x, **how):
    return (model(x, **how).astype(jnp.float32) ** 2).mean()


@functools.cache
def audited(over_context="auto", **degrees):
    mesh = js.mesh(**degrees)
    model = js.fully_shard(AroundOneUnit(nnx.Rngs(0)), mesh=mesh, units=GroupedQueries)
    step = nnx.jit(nnx.value_and_grad(functools.partial(squared, is_causal=True, over_context=over_context)))
    return js.audit(step.lower(model, js.shard_batch(X, mesh)).lowered, model=model)


@pytest.mark.parametrize("context", [2, 4])
def test_queries_keys_values_and_results_are_exchanged_once_each_way(context):
    found = audited(fsdp=8 // context, context=context)
    assert found.ok, found.differences
    rows = [row for row in found.rows if row.over == ("context",) and row.kind == "all-to-all"]
    for phase in ("forward", "backward"):
        of_phase = [row for row in rows if row.phase == phase]
        assert sum(row.executions for row in of_phase) == 4
        assert sum(row.total_bytes for row in of_phase) == (2 * H + 2 * G) * K * B * T // 8 * 4
    assert not found.mixing
    # Parameters are gathered, and gradients scattered, over it and `fsdp` at once; nothing else goes over it.
    assert found.amount("reduce-scatter") == 1.0 <= found.amount("all-gather") <= 2.0  # XLA:CPU joins them, or some
    others = [row for row in found.rows if "context" in row.over and row not in rows]
    assert {row.kind for row in others if row.over == ("fsdp", "context")} == {"all-gather", "reduce-scatter"}
    assert sum(row.total_bytes for row in others if row.over == ("context",)) <= 64  # the loss


@pytest.mark.parametrize("context", [2, 4, 8])
def test_each_device_has_its_part_of_the_work(context):
    whole, part = audited(fsdp=8).schedule.flops, audited(fsdp=8 // context, context=context).schedule.flops
    assert part == pytest.approx(whole, rel=0.02)


NEW = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 12)
ATTENTION = 2 * B * T * T * H * K / 8  # flops of one product of queries with keys


@pytest.mark.parametrize("context", [2, 4, 8])
def test_in_a_ring_keys_and_values_go_round_and_half_of_the_work_is_left_out(context):
    found = audited("ring", fsdp=8 // context, context=context)
    assert found.ok, found.differences
    shards = {"all-gather", "reduce-scatter"} if context == 8 else set()
    kinds = {row.kind for row in found.rows if row.over == ("context",)}
    assert kinds == {"collective-permute", "all-reduce"} | shards
    forward = [row for row in found.rows if (row.kind, row.phase) == ("collective-permute", "forward")]
    chunks = ((2 * H + 2 * G) * K + H) * B * T // 8 * 4  # q, k, v and the result, in and out of pairs, with its sums
    stay = chunks // 2 if context == 2 else 0  # of two devices, where every other chunk is
    assert sum(row.total_bytes for row in forward) == chunks - stay + (context - 1) * 2 * G * K * B * T // 8 * 4
    plain = audited(fsdp=8).schedule.flops - 6 * ATTENTION
    seen = (2 * context + 1) / (4 * context)
    products = 7 if NEW else 6  # backward makes the scores again, which XLA:CPU of jax 0.10 merges with forward's
    assert found.schedule.flops == pytest.approx(plain + products * ATTENTION * seen, rel=0.02)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_ring_with_and_without_a_mask(is_causal):
    run = functools.partial(squared, is_causal=is_causal)
    model = js.fully_shard(GroupedQueries(nnx.Rngs(0)), mesh=js.mesh(fsdp=2, context=4))
    found = outcome(model, functools.partial(run, over_context="ring"), X)
    assert_exact(found, outcome(GroupedQueries(nnx.Rngs(0)), run, X))


def test_cudnn_runs_on_a_part_of_the_heads(monkeypatch):
    with fake_cudnn(monkeypatch):
        for degrees in ({"fsdp": 4, "context": 2}, {"fsdp": 2, "context": 2, "tensor": 2}):
            mesh = js.mesh(**degrees)
            half = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", output_dtype="float32")
            model = GroupedQueries(nnx.Rngs(0))
            js.parallel.split(model, {"[qkv]/kernel": (None, "tensor"), "out/kernel": ("tensor", None)})
            js.fully_shard(model, mesh=mesh, mixed_precision=half)
            run = lambda model, x: squared(model, x, is_causal=True, backend="cudnn")
            program = nnx.jit(nnx.value_and_grad(run)).lower(model, js.shard_batch(X, mesh)).lowered
            found = js.audit(program, model=model)
            assert [use.form for use in found.schedule.kernels] == ["cudnn"]
            assert not found.mixing  # else it was gathered
            assert "all-gather" not in {row.kind for row in found.rows if row.over == ("tensor",)}
            alike = outcome(model, run, js.shard_batch(X, mesh))
            wanted = outcome(GroupedQueries(nnx.Rngs(0)), functools.partial(squared, is_causal=True), X)
            assert max(worst(alike[k], wanted[k]) for k in wanted) < 0.05


def test_cudnn_has_all_heads_of_a_device_where_tensor_does_not_divide_them(monkeypatch):
    """Each device along `context` has one head, which two devices along `tensor` compute alike."""
    mesh = js.mesh(fsdp=1, context=4, tensor=2)
    model = GroupedQueries(nnx.Rngs(0), num_heads=4)
    js.parallel.split(model, {"[qkv]/kernel": (None, "tensor"), "out/kernel": ("tensor", None)})
    half = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", output_dtype="float32")
    js.fully_shard(model, mesh=mesh, mixed_precision=half)
    run = functools.partial(squared, is_causal=True)
    wanted = outcome(GroupedQueries(nnx.Rngs(0), num_heads=4), run, X)
    with fake_cudnn(monkeypatch):
        found = outcome(model, functools.partial(run, backend="cudnn"), js.shard_batch(X, mesh))
    assert max(worst(found[k], wanted[k]) for k in wanted) < 0.05


def split_over_tensor(mesh):
    """A model of which `tensor` splits the heads."""
    model = GroupedQueries(nnx.Rngs(0))
    js.parallel.split(model, {"[qkv]/kernel": (None, "tensor"), "out/kernel": ("tensor", None)})
    return js.fully_shard(model, mesh=mesh)


def test_heads_that_tensor_splits_are_exchanged_over_context_alone():
    mesh = js.mesh(fsdp=2, context=2, tensor=2)
    model = split_over_tensor(mesh)
    step = nnx.jit(nnx.value_and_grad(functools.partial(squared, is_causal=True)))
    found = js.audit(step.lower(model, js.shard_batch(X, mesh)).lowered, model=model)
    exchanges = [row for row in found.rows if row.kind == "all-to-all"]
    assert {row.over for row in exchanges} == {("context",)}
    assert sum(row.executions for row in exchanges) == 8
    assert {row.kind for row in found.rows if row.over == ("tensor",)} == {"all-reduce"}


@pytest.mark.parametrize("num_heads", [1, H])
def test_a_bias_belongs_to_its_head_where_both_axes_split_them(num_heads):
    bias = np.random.default_rng(2).normal(size=(1, num_heads, T, T)).astype(np.float32)
    mesh = js.mesh(fsdp=2, context=2, tensor=2)
    run = functools.partial(squared, bias=bias)
    found = outcome(split_over_tensor(mesh), run, js.shard_batch(X, mesh))
    assert_exact(found, outcome(GroupedQueries(nnx.Rngs(0)), run, X))


# ---- models that know nothing of the axis --------------------------------------------------------


class Along(nnx.Module):
    """Looks along the sequence in many ways."""

    def __init__(self, rngs):
        self.q, self.out, self.drop = (
            nnx.Linear(64, 64, rngs=rngs),
            nnx.Linear(64, 64, rngs=rngs),
            nnx.Dropout(0.1, rngs=rngs),
        )

    def __call__(self, x):
        q = self.q(x).reshape(*x.shape[:2], 4, 16)
        y = jax.nn.dot_product_attention(q, q, q, is_causal=True).reshape(x.shape)
        y = self.drop(self.out(y)) + 0.1 * jnp.cumsum(x, 1) + jnp.roll(x, 1, axis=1)
        y = jnp.concatenate([0 * y[:, :1], y[:, :-1]], axis=1)
        last, _ = jax.lax.scan(lambda h, x: (0.5 * h + x, None), 0 * y[:, 0], jnp.swapaxes(y, 0, 1))
        return y.mean(1) + last


def test_any_model_is_right_without_a_setting():
    mesh = js.mesh(fsdp=2, context=4)
    build = lambda: Along(nnx.Rngs(0, dropout=1))
    found = outcome(js.fully_shard(build(), mesh=mesh), squared, js.shard_batch(X, mesh))
    assert_exact(found, outcome(build(), squared, X))


class Mixture(nnx.Module):
    """Experts and attention."""

    def __init__(self, rngs):
        self.router, self.layer = nnx.Linear(64, 4, rngs=rngs), GroupedQueries(rngs)
        self.up = nnx.Param(0.1 * jax.random.normal(rngs.params(), (4, 64, 64)))

    def __call__(self, x_BTD):
        send_BTE = jax.nn.softmax(self.router(x_BTD))
        x_EBTD = js.parallel.to_experts(jnp.einsum("bte,btd->ebtd", send_BTE, x_BTD))
        y_EBTD = js.parallel.from_experts(nnx.relu(jnp.einsum("ebtd,edf->ebtf", x_EBTD, self.up[...])))
        return self.layer(y_EBTD.sum(0), is_causal=True)


def test_beside_an_expert_axis():
    mesh = js.mesh(fsdp=2, expert=2, context=2)
    model = Mixture(nnx.Rngs(0))
    js.parallel.split(model, {"up": ("expert", None, None)})
    js.fully_shard(model, mesh=mesh)
    found = outcome(model, squared, js.shard_batch(X, mesh))
    assert_exact(found, outcome(Mixture(nnx.Rngs(0)), squared, X))


# ---- errors --------------------------------------------------------------------------------------


def test_what_does_not_divide_is_an_error():
    mesh = js.mesh(fsdp=2, context=4)
    with pytest.raises(CallError, match=r"no sequence that splits(.|\n)*\(8,\)(.|\n)*none divides by 4"):
        js.shard_batch(np.zeros(8), mesh)
    with pytest.raises(CallError, match=r"no sequence that splits(.|\n)*multiple of 4"):
        js.shard_batch({"x": np.zeros((8, 30)), "y": np.zeros(8)}, mesh)
    model = js.fully_shard(GroupedQueries(nnx.Rngs(0)), mesh=mesh)
    with pytest.raises(CallError, match=r"GroupedQueries.__call__: float32\[8, 30, 64\](.|\n)*degree 4"):
        model(X[:, :30])
    six = js.fully_shard(GroupedQueries(nnx.Rngs(0), num_heads=6), mesh=mesh)
    with pytest.raises(KernelError, match=r"heads: q has 6(.|\n)*ring: 8 does not divide 36(.|\n)*--mesh context=2"):
        six(X[:, :36], is_causal=True)
    with pytest.raises(KernelError, match=r"heads: q has 6 heads, not divisible by 4(.|\n)*--mesh context=2"):
        six(X, is_causal=True, over_context="heads")
    recipe = dataclasses.replace(LLAMA_FILE.recipes["tiny"](), sequence_length=130)
    with pytest.raises(RecipeError, match=r"--set sequence_length=128  # or a smaller mesh: --mesh context=2"):
        check_batch(recipe, mesh)
