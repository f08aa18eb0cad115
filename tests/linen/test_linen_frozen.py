"""A frozen parameter of a Linen model is gathered, and nothing more; a `TrainState` trains the rest as ever."""

import functools
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jshard as js
from jshard.recipes.building import create
from jshard.train import TrainStep, load_model_file
from tests.engine.test_frozen import sent_in
from tests.helpers import with_placement
from tests.linen_models import VOCAB, WIDTH, Block, Decoder, Layer, Scanned, X, Y, creator, cross_entropy, tokens
from tests.parity import PARAMETER_TOLERANCE, flat

LAYERS = 2
KERNEL = 4 * WIDTH * WIDTH  # elements of a block's Dense_0, as of its Dense_1
TABLE = VOCAB * WIDTH
UPS = "*/Dense_0/*"  # the first matrix of every block, and its bias


def annotated(plain: nn.Module | None = None, **settings: Any) -> nn.Module:
    return js.fully_shard(
        plain or Decoder(LAYERS), **with_placement(**{"mesh": js.mesh(), "units": [Block], **settings})
    )


def abstract(model: nn.Module) -> Any:
    return js.abstract_init(lambda: model.init(jax.random.key(0), X)["params"], model)


def gradients(model: nn.Module, **settings: Any) -> Any:
    loss_fn = lambda params, ids, labels: cross_entropy(model.apply({"params": params}, ids), labels)
    return js.value_and_grad(loss_fn, model=model, **settings)


def sent(model: nn.Module, **settings: Any) -> dict[str, int]:
    """Elements that each kind of collective takes in."""
    return sent_in(jax.make_jaxpr(gradients(model, **settings))(abstract(model), X, Y).jaxpr)


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2, "sync": "last"}], ids=str)
def test_what_is_frozen_is_not_reduced(settings):
    model = annotated() if settings else annotated(Scanned(), units=Layer)
    found, everything = sent(model, wrt=UPS, **settings), sent(model, **settings)
    assert found["reduce_scatter"] == LAYERS * KERNEL
    assert found["psum"] <= LAYERS * 4 * WIDTH + 8  # their biases, and the loss
    assert everything["reduce_scatter"] == 2 * LAYERS * KERNEL + TABLE * (1 if settings else 2)  # one is tied
    assert everything["all_gather"] >= found["all_gather"] > 0  # backward needs a frozen weight, where it continues


# What comes out.

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def updated(state: TrainState, grad: Any) -> TrainState:
    """After two steps."""
    step = jax.jit(lambda state, *batch: state.apply_gradients(grads=grad(state.params, *batch)[1]))
    for seed in range(2):
        state = step(state, *tokens(seed=seed))
    return state


@functools.cache
def reference(plain: nn.Module, trained: str) -> tuple[Any, Any]:
    """Parameters before and after, on one device, by Optax alone."""
    model = annotated(plain, units=None, shard_dim=0)  # a scan by itself draws other last bits
    params = nn.unbox(jax.device_get(js.shard_init(lambda: model.init(jax.random.key(0), X)["params"], model)))
    labels = jax.tree.map_with_path(lambda path, _: trained in jax.tree_util.keystr(path), params)
    tx = optax.partition({True: TX, False: optax.set_to_zero()}, labels)
    loss = lambda params, ids, labels: cross_entropy(plain.apply({"params": params}, ids), labels)
    state = TrainState.create(apply_fn=plain.apply, params=params, tx=tx)
    return params, updated(state, jax.value_and_grad(loss)).params


def assert_trained(found: Any, plain: nn.Module, trained: str) -> None:
    """Holds what is trained against one device, and the rest against what it was."""
    before, after = reference(plain, trained)
    found = nn.unbox(jax.device_get(found))
    assert jax.tree.structure(found) == jax.tree.structure(after)
    pairs = zip(jax.tree.leaves_with_path(after), jax.tree.leaves(before), jax.tree.leaves(found), strict=True)
    for (path, wanted), old, new in pairs:
        if trained in jax.tree_util.keystr(path):
            assert (np.asarray(wanted) != old).any()
            assert np.linalg.norm(new - wanted) <= 2 * PARAMETER_TOLERANCE * np.linalg.norm(wanted), path
        else:
            np.testing.assert_array_equal(new, old)


def test_trains_as_on_one_device_and_leaves_the_frozen_alone():
    """Layers of a scan, in host memory."""
    plain, wrt = Scanned(), "*Dense_0/*"
    model = annotated(plain, units=Layer, offload="params")

    create = creator(model, js.shard_optimizer(model, TX, wrt=wrt))
    state = updated(js.shard_init(create, model), gradients(model, wrt=wrt))
    assert_trained(state.params, plain, "Dense_0")
    moments = [jax.tree_util.keystr(path) for path, x in jax.tree.leaves_with_path(state.opt_state) if x.ndim]
    assert moments and all("Dense_0" in path for path in moments)


@pytest.mark.wide
def test_the_optimizer_leaves_out_frozen_parameters_whatever_the_gradients():
    """The step of plain Flax: `jax.grad` makes all gradients."""
    model = annotated()

    create = creator(model, js.shard_optimizer(model, TX, wrt=UPS))
    loss = lambda params, ids, labels: cross_entropy(model.apply({"params": params}, ids), labels)
    assert_trained(updated(js.shard_init(create, model), jax.value_and_grad(loss)).params, Decoder(LAYERS), "Dense_0")


def test_in_the_place_of_a_frozen_gradient_is_nothing():
    model = annotated()
    params = abstract(model)
    _, grads = jax.eval_shape(gradients(model, wrt=UPS), params, X, Y)
    assert grads.keys() == params.keys()
    assert isinstance(grads["table"]["embedding"], optax.MaskedNode)
    assert [x.shape for x in jax.tree.leaves(grads["block_0"])] == [(4 * WIDTH,), (WIDTH, 4 * WIDTH)]
    tx = optax.adamw(1e-3)
    with pytest.raises(ValueError, match="Frozen"):  # and not decayed silently
        jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, params), params)


def test_patterns_functions_and_lists_of_them_choose():
    model = annotated()
    abstract(model)
    names = lambda wrt: {leaf.path for leaf in js.plan(model, wrt=wrt).leaves if leaf.trained}
    ups = {f"block_{i}/Dense_0/{name}" for i in range(LAYERS) for name in ("kernel", "bias")}
    assert names(UPS) == names(lambda path, x: "Dense_0" in path) == ups
    assert names([UPS, "norm/*"]) == ups | {"norm/scale", "norm/bias"}
    assert names(lambda path, x: x.ndim == 2 and path[0] != "table") == {
        f"block_{i}/Dense_{k}/kernel" for i in range(LAYERS) for k in (0, 1)
    }


# A model file.


def test_a_model_file_says_what_is_trained(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(f"from tests.micro_linen import RECIPES, annotate, build\nwrt = {[UPS, 'norm/*']}\n")
    file = load_model_file(path)
    recipe, mesh = file.recipe()[1], js.mesh()
    model, optimizer = create(file, recipe, mesh)
    before = flat(nnx.state(model, nnx.Param))
    is_trained = lambda path: "Dense_0" in path or path.startswith("norm")
    assert {leaf.path for leaf in js.plan(model, wrt=file.wrt).leaves if leaf.trained} == set(
        filter(is_trained, before)
    )
    ids, labels = tokens(length=recipe.sequence_length)
    batch = js.shard_batch({"inputs": ids, "targets": labels}, mesh)
    step = TrainStep(file.loss_fn, model, optimizer, batch)
    for _ in range(2):  # the first rate of the warmup may be none
        step(batch)
    after = flat(nnx.state(step.model, nnx.Param))
    assert {path for path, x in after.items() if (x != before[path]).any()} == set(filter(is_trained, before))
    moments = [x for x in jax.tree.leaves(nnx.state(step.optimizer)) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sum(x.size for path, x in before.items() if is_trained(path))
