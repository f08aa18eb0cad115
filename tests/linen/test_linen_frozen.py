"""A parameter that a Linen model's loss does not differentiate is gathered, and nothing more."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util
from flax.training.train_state import TrainState

import jshard as js
from jshard.checkpoint import CheckpointWarning
from jshard.recipes.building import abstract_model
from jshard.recipes.model_file import ModelFileError
from jshard.recipes.state import check_source, create, create_from
from jshard.train import TrainStep, load_model_file
from tests.engine.test_frozen import sent_in
from tests.linen_models import VOCAB, WIDTH, Block, Decoder, X, Y, cross_entropy, tokens
from tests.parity import PARAMETER_TOLERANCE, flat

LAYERS = 2
KERNEL = 4 * WIDTH * WIDTH  # elements of a block's Dense_0, as of its Dense_1
TABLE = VOCAB * WIDTH
UPS = "*/Dense_0/*"  # the first matrix of every block, and its bias


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Block(name="block")(x), None


class Scanned(nn.Module):
    """The decoder with its blocks as one stack."""

    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(VOCAB, WIDTH, name="table")
        scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return table.attend(nn.LayerNorm(name="norm")(scan(name="layers")(table(ids), None)[0]))


def annotated(plain: nn.Module | None = None, **settings: Any) -> nn.Module:
    return js.fully_shard(plain or Decoder(LAYERS), **{"mesh": js.mesh(), "units": [Block], **settings})


def parts(params: Any) -> tuple[Any, Any]:
    """The parameters that are trained, and the frozen ones."""
    flat = traverse_util.flatten_dict(params)
    pick = lambda trained: {path: x for path, x in flat.items() if ("Dense_0" in path) == trained}
    return tuple(traverse_util.unflatten_dict(pick(trained)) for trained in (True, False))


def together(*some: Any) -> Any:
    return traverse_util.unflatten_dict({k: v for part in some for k, v in traverse_util.flatten_dict(part).items()})


def gradients(model: nn.Module, frozen: Any = None, **settings: Any) -> Any:
    """Of the loss as a function of what is trained."""
    whole = lambda trained: trained if frozen is None else together(frozen, trained)
    loss_fn = lambda trained, *batch: cross_entropy(model.apply({"params": whole(trained)}, batch[0]), batch[1])
    return js.value_and_grad(loss_fn, model=model, **settings)


def sent(model: nn.Module, *, frozen: bool, **settings: Any) -> dict[str, int]:
    """Elements that each kind of collective takes in."""
    params = js.abstract_init(lambda: model.init(jax.random.key(0), X)["params"], model)
    trained, rest = parts(params) if frozen else (params, {})
    program = lambda trained, rest: gradients(model, rest or None, **settings)(trained, X, Y)
    return sent_in(jax.make_jaxpr(program)(trained, rest).jaxpr)


CASES = {
    "zero3": ({}, {}, 1),
    "nn.scan": ({"plain": Scanned(), "units": Layer}, {}, 1),
    "each": ({}, {"accumulate": 2}, 2),
    "last": ({}, {"accumulate": 2, "sync": "last"}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_frozen_is_not_reduced(case):
    annotation, settings, times = CASES[case]
    model = annotated(**annotation)
    found, everything = sent(model, frozen=True, **settings), sent(model, frozen=False, **settings)
    assert found["reduce_scatter"] == times * LAYERS * KERNEL
    assert found["psum"] <= times * LAYERS * 4 * WIDTH + 8  # their biases, and the loss
    assert everything["reduce_scatter"] == times * (2 * LAYERS * KERNEL + TABLE)
    assert everything["all_gather"] >= found["all_gather"] > 0  # backward needs a frozen weight, where it goes on


TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def test_a_state_of_what_is_trained_trains_as_on_one_device():
    model = annotated()

    def trained(model: nn.Module, tx: Any) -> Any:
        params = model.init(jax.random.key(0), X)["params"]
        mine, frozen = parts(params)
        return TrainState.create(apply_fn=model.apply, params=mine, tx=tx), frozen

    def updated(state: TrainState, frozen: Any, grad: Any) -> Any:
        step = jax.jit(lambda state, rest, *batch: state.apply_gradients(grads=grad(state.params, rest, *batch)))
        for seed in range(2):
            state = step(state, frozen, *tokens(seed=seed))
        return state.params

    ours = lambda mine, rest, *batch: gradients(model, rest)(mine, *batch)[1]
    found = updated(*js.shard_init(lambda: trained(model, js.shard_optimizer(model, TX)), model), ours)
    loss = lambda mine, rest, ids, labels: cross_entropy(
        Decoder(LAYERS).apply({"params": together(rest, mine)}, ids), labels
    )
    wanted = updated(*trained(Decoder(LAYERS), TX), jax.grad(loss))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for new, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(new - right) <= 2 * PARAMETER_TOLERANCE * np.linalg.norm(right)


def test_the_plan_knows_what_a_pattern_freezes():
    model = annotated()
    jax.eval_shape(model.init, jax.random.key(0), X)
    names = lambda wrt: {leaf.path for leaf in js.plan(model, wrt=wrt).leaves if leaf.trained}
    ups = {f"block_{i}/Dense_0/{name}" for i in range(LAYERS) for name in ("kernel", "bias")}
    assert names(UPS) == names(lambda path, x: "Dense_0" in path) == ups
    assert names([UPS, "norm/*"]) == ups | {"norm/scale", "norm/bias"}


# A model file.

FILE = """
from tests.micro_linen import RECIPES, annotate, build

wrt = {wrt!r}
"""


def model_file(folder: Any, wrt: Any) -> Any:
    path = folder / f"{abs(hash(str(wrt)))}.py"
    path.write_text(FILE.format(wrt=wrt))
    return load_model_file(path)


def test_a_model_file_says_what_is_trained(tmp_path):
    file = model_file(tmp_path, [UPS, "norm/*"])
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


def test_a_run_begins_with_a_base_that_lacks_what_is_trained(tmp_path):
    file, mesh = model_file(tmp_path, "block_1/*"), js.mesh()
    recipe = file.recipe()[1]
    shallow = dataclasses.replace(recipe, seed=3, model=dataclasses.replace(recipe.model, depth=1))
    base, _ = create(dataclasses.replace(file, wrt=nnx.Param), shallow, mesh)
    js.checkpoint.save(tmp_path / "base", {"model": base})
    check_source(file, recipe, mesh, tmp_path / "base")
    with pytest.warns(CheckpointWarning, match="6 leaves stay as `like` has them"):
        model, _ = create_from(file, recipe, mesh, tmp_path / "base")
    found, wanted = (flat(nnx.state(one, nnx.Param)) for one in (model, base))
    assert found.keys() - wanted.keys() == {path for path in found if path.startswith("block_1")}
    assert all((found[path] == x).all() for path, x in wanted.items())


def test_a_model_file_that_trains_nothing_is_refused(tmp_path):
    file = model_file(tmp_path, "*/lora_*")
    with pytest.raises(ModelFileError, match=r"No parameter of the model is trained(.|\n)*block_0/Dense_0/bias"):
        abstract_model(file, file.recipe()[1], js.mesh())
