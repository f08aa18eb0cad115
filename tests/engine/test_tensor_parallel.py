"""A tensor axis inside the region: products split by columns and rows, and what is between them along the sequence.

On replica x fsdp x tensor. XLA:CPU writes its own reduce-scatters as an all-reduce and a slice; compiled for GPUs, the
all-reduces over `tensor` that go with a split sequence are reduce-scatters.
"""

import collections
import dataclasses
import functools
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jshard as js
from jshard.errors import AnnotationError
from jshard.train import load_model_file
from tests.helpers import compile_to_read, loss_fn, mean_square, with_placement
from tests.micro_gpt import MODELS, micro
from tests.parity import assert_parity, worst
from tests.toy_models import Residual, Tied, Tower, TwoLayers

GPT_FILE = load_model_file(MODELS / "gpt.py")
gpt = sys.modules[GPT_FILE.build.__module__]

MICRO = dataclasses.replace(micro().model, n_layer=4, n_head=4, remat="none")
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
    """The rows of the table that are elsewhere, the gradient of what they score, and the softmax over both parts."""
    rest = [row for row in step.rows if "tensor" in row.over and not (row.unit or "").startswith("blocks")]
    assert {(row.kind, row.over) for row in rest} == {("all-reduce", ("tensor",))}
    assert sum(row.total_bytes for row in rest) <= 2.1 * ACTIVATION


@pytest.mark.wide
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


TIED = {"table/embedding": ("tensor", None)}
X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
TOKENS = BATCH["inputs"] % 64, BATCH["targets"] % 64


def annotate_split(table, *, mesh=None, **settings):
    def annotate(model):
        on = mesh or js.mesh(fsdp=1, tensor=8)
        js.parallel.split(model, table)
        js.fully_shard(model, units=nnx.Linear, mesh=on, **with_placement(**settings))

    return annotate


def test_on_a_tensor_axis_alone_a_tied_table_trains_in_microbatches_as_on_one_device():
    grad = lambda loss: js.value_and_grad(loss, accumulate=2, sync="last")
    assert_parity(lambda: Tied(64, 32, nnx.Rngs(0)), annotate_split(TIED), loss_fn, TOKENS, grad=grad)


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
        grads = nnx.jit(nnx.grad(mean_square))(model, ids_BT)
        found.append(np.asarray(grads.table.embedding[...]))
    assert worst(found[1], found[0]) <= 2e-6
    assert not found[1][24:].any()


# ---- Axes that a model names ---------------------------------------------------------------------


ROWS = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
NAMES = {"up": ("fsdp", "tp"), "down": ("tp", "fsdp")}


def named(names: dict[str, tuple]) -> Residual:
    """A block with names that public models have: `fsdp`, and a tensor axis of their own."""
    model = Residual(64, 64, nnx.Rngs(0))
    model.up.kernel.set_metadata(out_sharding=names["up"], eager_sharding=False)
    model.down.kernel.set_metadata(out_sharding=names["down"], eager_sharding=False)
    return model


def specs(model) -> dict:
    return {leaf.path: leaf.placement.spec for leaf in js.plan(model).leaves if leaf.path.endswith("kernel")}


def test_axes_that_split_nothing_are_dropped():
    model = js.fully_shard(named(NAMES), mesh=js.mesh())
    assert specs(model) == {"up/kernel": ("fsdp", None), "down/kernel": ("fsdp", None)}
    grad = nnx.jit(nnx.grad(lambda model: (model(ROWS) ** 2).mean()))
    found, wanted = grad(model), grad(named(NAMES))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)


def test_fsdp_moves_beside_a_tensor_axis_that_is_kept():
    names = {"up": ("fsdp", "tensor"), "down": ("tensor", "fsdp")}
    model = js.fully_shard(named(names), mesh=js.mesh(fsdp=4, tensor=2))
    assert specs(model) == {"up/kernel": ("fsdp", "tensor"), "down/kernel": ("tensor", "fsdp")}


TABLE = {"*up/kernel": (None, "tensor"), "*down/kernel": ("tensor", None)}
X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)


def pairs() -> Tower:
    rngs = nnx.Rngs(0)
    return Tower([TwoLayers(64, 128, 64, rngs) for _ in range(2)])


def annotated_pairs() -> Tower:
    return js.fully_shard(pairs(), units=TwoLayers, mesh=js.mesh(fsdp=4, tensor=2))


@pytest.mark.parametrize("part", [lambda m: m, lambda m: m.blocks, lambda m: m.blocks[0], lambda m: m.blocks[0].up])
def test_axes_named_after_the_annotation_are_refused(part):
    model = annotated_pairs()
    before = jax.tree.map(lambda x: x.sharding, nnx.state(model))
    named = part(model)
    table = {"*kernel": (None, "tensor")} if isinstance(named, nnx.Linear) else TABLE
    with pytest.raises(AnnotationError, match=r"(?s)named after the annotation.*do: +js.parallel.split"):
        js.parallel.split(named, table)
    assert jax.tree.map(lambda x: x.sharding, nnx.state(model)) == before
    np.testing.assert_allclose(model(X), pairs()(X), rtol=1e-5, atol=1e-5)


def test_axes_named_after_shard_init_are_refused():
    annotate = lambda model: js.fully_shard(model, mesh=js.mesh(fsdp=4, tensor=2))
    for model in (
        js.shard_init(pairs, annotate),
        js.abstract_init(pairs, annotate),
    ):
        with pytest.raises(AnnotationError, match="named after the annotation"):
            js.parallel.split(model, TABLE)


def test_an_axis_that_a_variable_names_after_the_annotation_is_refused_by_the_next_call():
    model = annotated_pairs()
    model.blocks[1].up.kernel.set_metadata(out_sharding=(None, "tensor"))
    with pytest.raises(AnnotationError, match=r"(?s)named after the annotation.*Tower: blocks/1/up/kernel"):
        model(X)


def test_axes_may_be_named_until_the_root_is_annotated_and_more_than_once():
    model, mesh = pairs(), js.mesh(fsdp=4, tensor=2)
    js.parallel.split(model, {"*up/kernel": ("tensor", None)})
    for block in model.blocks:
        js.fully_shard(block, mesh=mesh)
    js.parallel.split(model, TABLE)
    js.fully_shard(model, mesh=mesh)
    assert model.blocks[0].up.kernel.sharding.spec == PartitionSpec("fsdp", "tensor")
    assert model.blocks[0].down.kernel.sharding.spec == PartitionSpec("tensor", "fsdp")
    np.testing.assert_allclose(model(X), pairs()(X), rtol=1e-5, atol=1e-5)


def test_a_table_with_a_wrong_row_names_no_axis():
    model = pairs()
    with pytest.raises(AnnotationError, match="matches no parameter"):
        js.parallel.split(model, TABLE | {"nothing": (None,)})
    assert model.blocks[0].up.kernel.get_metadata("out_sharding", None) is None
