"""A tensor axis inside the region: products split by columns and rows, and what is between them along the sequence.

On replica x fsdp x tensor. XLA:CPU writes its own reduce-scatters as an all-reduce and a slice; compiled for GPUs, the
all-reduces over `tensor` that go with a split sequence are reduce-scatters.
"""

import collections
import dataclasses
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError, CallError
from jshard.inspect.communication import traffic_of
from jshard.train import load_model_file
from tests.helpers import compile_to_read, with_placement
from tests.micro_gpt import MODELS, micro
from tests.parity import assert_parity, worst

GPT_FILE = load_model_file(MODELS / "gpt.py")
gpt = sys.modules[GPT_FILE.build.__module__]

MICRO = dataclasses.replace(micro().model, n_layer=4, n_head=4)
THREE = {"replica": 2, "fsdp": 2, "tensor": 2}
IDS = np.random.default_rng(0).integers(0, 256, (16, 17), dtype=np.int32)
BATCH = {"inputs": IDS[:, :-1], "targets": IDS[:, 1:]}
ACTIVATION = 16 // 4 * 16 * MICRO.d_model * 4  # bytes of x_BTD on one data shard


def annotator(mesh):
    return lambda model: GPT_FILE.annotate(model, mesh)


@functools.cache
def compiled(config):
    """The audit of a step on all three axes, compiled and not run."""
    mesh = js.mesh(**THREE)
    model = js.abstract_init(lambda: GPT_FILE.build(config, nnx.Rngs(0)), annotator(mesh))
    step = nnx.jit(lambda model, batch: nnx.value_and_grad(gpt.loss_fn)(model, batch))
    return js.audit(compile_to_read(step.lower(model, BATCH).lowered), model=model)


def of_blocks(audit, axes):
    """Executions and bytes by kind and phase, of what the blocks send over some axes."""
    found = collections.Counter()
    for row in audit.rows:
        if row.over == axes and row.unit is not None and row.unit.startswith("blocks"):
            found[row.kind, row.phase] += row.executions
            found[row.kind, row.phase, "bytes"] += row.total_bytes
    return found


def test_training_is_that_of_one_device():
    config = dataclasses.replace(MICRO, n_layer=2, scan=True, split_sequence=True, tied=False, positions="learned")
    build = lambda: GPT_FILE.build(config, nnx.Rngs(0))
    assert_parity(build, annotator(js.mesh(**THREE)), gpt.loss_fn, (BATCH,))


@pytest.fixture(scope="module")
def step():
    return compiled(dataclasses.replace(MICRO, scan=True))


def test_parameters_are_split_over_both_axes(step):
    placements = {leaf.path.replace("/0/", "/"): leaf.placement for leaf in step.plan.leaves}
    kernels = [f"blocks/{name}/kernel" for name in ("attention/qkv", "attention/out", "mlp/up", "mlp/down")]
    for path in (*kernels, "tokens/embedding"):
        assert placements[path].shards == 4 and "tensor" in placements[path].spec, path
    assert placements["blocks/attention/qkv/bias"].shards == placements["blocks/mlp/up/bias"].shards == 2


def test_gathers_move_a_tensor_shard_and_no_more(step):
    """Pitfall: XLA would replicate a tensor axis before a collective over `fsdp`, and gather twice the bytes."""
    blocks = [leaf.placement for leaf in step.plan.leaves if leaf.path.startswith("blocks")]
    whole = sum(p.logical_bytes for p in blocks if p.dim is not None)
    found = of_blocks(step, ("fsdp",))
    assert found["all-gather", "forward", "bytes"] == whole / 2
    assert found["reduce-scatter", "backward", "bytes"] == whole / 2


def test_each_pair_of_products_reduces_once_forward_and_once_backward(step):
    found = of_blocks(step, ("tensor",))
    pairs = 2 * MICRO.n_layer  # attention and the feed-forward half
    wanted = {}
    for phase in ("forward", "backward"):
        wanted |= {("all-reduce", phase): pairs, ("all-reduce", phase, "bytes"): pairs * ACTIVATION}
    assert found == wanted


def test_nothing_else_goes_over_the_tensor_axis_but_tokens_and_scores(step):
    """The rows of the table that lie elsewhere, the gradient of what they score, and the softmax over both parts."""
    rest = [row for row in step.rows if "tensor" in row.over and not (row.unit or "").startswith("blocks")]
    assert {(row.kind, row.over) for row in rest} == {("all-reduce", ("tensor",))}
    assert sum(row.total_bytes for row in rest) <= 2.1 * ACTIVATION


def test_a_split_sequence_is_gathered_before_each_pair_of_products_and_scattered_after():
    audit = compiled(dataclasses.replace(MICRO, scan=True, split_sequence=True))
    found = of_blocks(audit, ("tensor",))
    pairs = 2 * MICRO.n_layer
    assert found["all-gather", "forward"] == pairs
    assert found["all-reduce", "forward"] == pairs
    # Backward gathers what it kept split, and the gradient. The compiler drops the names of some (jax 0.12: of half),
    # so all are counted: the root has the embedding, the last norm, and the gradients of both.
    gathers = [row for row in audit.rows if (row.kind, row.over, row.dtype) == ("all-gather", ("tensor",), "f32")]
    assert 3 * pairs <= sum(row.executions for row in gathers) <= 3 * pairs + 4
    # Besides, gradients of norms and biases, each from a part of the sequence, are summed: vectors, not activations.
    vectors = found["all-reduce", "backward", "bytes"] - pairs * ACTIVATION
    assert 0 <= vectors <= 7 * MICRO.n_layer * MICRO.d_model * 4  # two norms of two vectors, two biases; some spare
    assert {key[0] for key in found} == {"all-gather", "all-reduce"}


# ---- No data axis above 1 ------------------------------------------------------------------------


class Tied(nnx.Module):
    """A table, split by rows, that also scores the tokens."""

    def __init__(self, rngs):
        self.table = nnx.Embed(64, 32, rngs=rngs)
        self.layer = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, ids_BT):
        return self.table.attend(jax.nn.gelu(self.layer(self.table(ids_BT))))


TIED = {"table/embedding": ("tensor", None)}
X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
TOKENS = BATCH["inputs"] % 64, BATCH["targets"] % 64


def annotate_split(table, *, mesh=None, **settings):
    def annotate(model):
        on = mesh or js.mesh(fsdp=1, tensor=8)
        js.parallel.split(model, table)
        js.fully_shard(model, units=nnx.Linear, mesh=on, **with_placement(**settings))

    return annotate


def squared(model, x):
    return (model(x).astype(jnp.float32) ** 2).mean()


def cross_entropy(model, inputs, targets):
    log_p = jax.nn.log_softmax(model(inputs))
    return -jnp.take_along_axis(log_p, targets[..., None], axis=-1).mean()


def test_on_a_tensor_axis_alone_a_tied_table_trains_in_microbatches_as_on_one_device():
    grad = lambda loss: js.value_and_grad(loss, accumulate=2, sync="last")
    assert_parity(lambda: Tied(nnx.Rngs(0)), annotate_split(TIED), cross_entropy, TOKENS, grad=grad)


# ---- The gradient of a table ----------------------------------------------------------------------


class Looked(nnx.Module):
    """A table whose rows are looked up along a sequence that is split, too."""

    def __init__(self, rngs):
        self.table = nnx.Embed(64, 16, rngs=rngs)
        self.layer = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, ids_BT):
        x_BTD = js.parallel.hold(self.table(js.parallel.hold(ids_BT, None, "tensor")), None, "tensor")
        return x_BTD + jax.nn.gelu(self.layer(x_BTD))


@pytest.mark.parametrize("axes", [{"fsdp": 1, "tensor": 8}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_the_gradient_of_a_table_reaches_the_rows_that_were_looked_up_and_no_other(axes):
    """As openxla/xla#42481 has it: the rows' sum over `tensor` after the cut would add up unlike rows."""
    ids_BT = IDS[:8, :16] % 24
    found = []
    for annotate in (
        lambda model: None,
        annotate_split({"table/embedding": ("tensor", None)}, mesh=js.mesh(**axes), min_size=1),
    ):
        model = Looked(nnx.Rngs(0))
        annotate(model)
        grads = nnx.jit(nnx.grad(squared))(model, ids_BT)
        found.append(np.asarray(grads.table.embedding[...]))
    assert worst(found[1], found[0]) <= 2e-6
    assert not found[1][24:].any()


# ---- Axes that a model names ---------------------------------------------------------------------


ROWS = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
NAMES = {"up": ("fsdp", "tp"), "down": ("tp", "fsdp")}


class Named(nnx.Module):
    """Names that public models have: `fsdp`, and a tensor axis of their own."""

    def __init__(self, names, rngs):
        self.up, self.down = (nnx.Linear(64, 64, rngs=rngs) for _ in range(2))
        self.up.kernel.set_metadata(out_sharding=names["up"], eager_sharding=False)
        self.down.kernel.set_metadata(out_sharding=names["down"], eager_sharding=False)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


def specs(model) -> dict:
    return {leaf.path: leaf.placement.spec for leaf in js.plan(model).leaves if leaf.path.endswith("kernel")}


def test_axes_that_split_nothing_are_dropped():
    model = js.fully_shard(Named(NAMES, nnx.Rngs(0)), mesh=js.mesh())
    assert specs(model) == {"up/kernel": ("fsdp", None), "down/kernel": ("fsdp", None)}
    grad = nnx.jit(nnx.grad(lambda model: (model(ROWS) ** 2).mean()))
    found, wanted = grad(model), grad(Named(NAMES, nnx.Rngs(0)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)


def test_fsdp_moves_beside_a_tensor_axis_that_is_kept():
    names = {"up": ("fsdp", "tensor"), "down": ("tensor", "fsdp")}
    model = js.fully_shard(Named(names, nnx.Rngs(0)), mesh=js.mesh(fsdp=4, tensor=2))
    assert specs(model) == {"up/kernel": ("fsdp", "tensor"), "down/kernel": ("tensor", "fsdp")}


def test_an_unknown_axis_is_an_error_where_it_could_be_the_tensor_axis():
    with pytest.raises(AnnotationError, match="'tp': the mesh has"):
        js.fully_shard(Named(NAMES, nnx.Rngs(0)), mesh=js.mesh(fsdp=4, tensor=2))


# ---- Experts on an axis of their own -------------------------------------------------------------


MOE_FILE = load_model_file(MODELS / "moe.py")
moe = sys.modules[MOE_FILE.build.__module__]

# Room for fewer tokens than are sent: some find no place.
MICRO_MOE = dataclasses.replace(
    MOE_FILE.recipe("tiny")[1].model, n_layer=2, n_head=2, n_kv_head=1, d_model=32, d_ff=64, capacity=1.0
)
WITH_EXPERTS = {"replica": 2, "fsdp": 2, "expert": 2}


def build_moe(config=MICRO_MOE):
    return MOE_FILE.build(config, nnx.Rngs(0))


def moe_annotator(mesh):
    return lambda model: MOE_FILE.annotate(model, mesh)


def test_training_of_experts_is_that_of_one_device():
    mesh = js.mesh(fsdp=2, expert=2, tensor=2)
    build = lambda: build_moe(dataclasses.replace(MICRO_MOE, n_layer=1))
    assert_parity(build, moe_annotator(mesh), moe.loss_fn, (BATCH,))


@pytest.fixture(scope="module")
def of_experts():
    """A step on replica x fsdp x expert: its collectives and its plan."""
    mesh = js.mesh(**WITH_EXPERTS)
    model = js.abstract_init(build_moe, moe_annotator(mesh))
    step = nnx.jit(lambda model, batch: nnx.value_and_grad(moe.loss_fn)(model, batch))
    return js.audit(compile_to_read(step.lower(model, BATCH).lowered), model=model)


def test_experts_lie_apart_and_are_sharded_besides(of_experts):
    gate = of_experts.plan.leaf("blocks/moe/experts/gate").placement
    assert gate.spec == (None, "expert", None, "fsdp") and gate.shards == 4
    assert gate.gathered_bytes * 2 == gate.logical_bytes  # never more than those that lie here
    assert of_experts.plan.leaf("blocks/attention/q/kernel").placement.shards == 2


def test_only_tokens_travel_over_the_expert_axis(of_experts):
    over = [row for row in of_experts.rows if "expert" in row.over]
    assert {row.kind for row in over} == {"all-to-all", "all-reduce"}
    exchange = [row for row in over if row.kind == "all-to-all"]
    for phase in ("forward", "backward"):  # there and back in every layer
        assert sum(row.executions for row in exchange if row.phase == phase) == 2 * MICRO_MOE.n_layer
    batch, length = 16 // 8, 16
    places = MICRO_MOE.n_expert * math.ceil(MICRO_MOE.capacity * MICRO_MOE.top_k * length / MICRO_MOE.n_expert)
    each = batch * places * MICRO_MOE.d_model * 4
    assert sum(row.total_bytes for row in exchange) == 4 * MICRO_MOE.n_layer * each


def test_gradients_of_experts_are_not_summed_over_the_expert_axis(of_experts):
    assert of_experts.ok, of_experts.differences
    experts = [leaf for leaf in of_experts.plan.leaves if "/experts/" in leaf.path]
    others = [leaf for leaf in of_experts.plan.leaves if "/experts/" not in leaf.path]
    found = dict.fromkeys((("replica",), ("replica", "expert"), ("replica", "fsdp", "expert")), 0)
    for row in of_experts.rows:
        if row.kind == "all-reduce":
            found[row.over] += row.total_bytes
    assert found["replica",] == sum(leaf.placement.bytes_per_device for leaf in experts)
    shards = sum(leaf.placement.bytes_per_device for leaf in others if leaf.placement.dim is not None)
    assert found["replica", "expert"] == shards
    asked = {t.axes: t.full_bytes for t in traffic_of(of_experts.plan) if t.kind == "all-reduce"}
    assert asked["replica",] == found["replica",] and asked["replica", "expert"] == shards


def test_the_batch_is_split_over_the_expert_axis_too():
    mesh = js.mesh(fsdp=-1, expert=4)
    assert dict(mesh.shape) == {"replica": 1, "fsdp": 2, "expert": 4, "tensor": 1}
    placed = js.shard_batch(np.arange(16), mesh)
    assert {s.data.shape for s in placed.addressable_shards} == {(2,)}
    with pytest.raises(CallError, match=r"over 8 data shards \(fsdp=2, expert=4\)"):
        js.shard_batch(np.arange(12), mesh)


# ---- The model itself ----------------------------------------------------------------------------


def mixture(capacity):
    config = dataclasses.replace(MICRO_MOE, capacity=capacity)
    return moe.MoE(config, rngs=nnx.Rngs(3)), jnp.asarray(
        np.random.default_rng(1).normal(size=(2, 16, 32)), jnp.float32
    )


call_layer = nnx.jit(lambda layer, x: layer(x))


def test_with_room_for_all_it_is_the_mixture_of_the_best_experts():
    layer, x_BTD = mixture(MICRO_MOE.n_expert / MICRO_MOE.top_k)
    found, (share_E, score_E) = call_layer(layer, x_BTD)
    every_EBTD = call_layer(layer.experts, jnp.broadcast_to(x_BTD, (MICRO_MOE.n_expert, *x_BTD.shape)))
    score_BTE = jax.nn.softmax(layer.router(x_BTD))
    best_BTE = jnp.where(score_BTE >= jnp.sort(score_BTE)[..., -MICRO_MOE.top_k, None], score_BTE, 0)
    wanted = jnp.einsum("bte,ebtd->btd", best_BTE / best_BTE.sum(-1, keepdims=True), every_EBTD)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose([share_E.sum(), score_E.sum()], 1, rtol=1e-6)


def test_places_go_to_first_choices_and_to_earlier_tokens():
    layer, _ = mixture(0.5)  # two places for each of eight experts
    chosen_BTn = jnp.asarray([[[0, 1]] * 3 + [[1, 0]] * 13])
    place_BTn, token_BEC = layer.places(chosen_BTn)
    np.testing.assert_array_equal(token_BEC[0], [[0, 1], [3, 4], *[[16, 16]] * 6])
    np.testing.assert_array_equal(place_BTn[0, :4], [[0, 13], [1, 14], [2, 15], [0, 3]])
