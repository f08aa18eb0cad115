"""A stored parameter that the model has no place for is an error that names it, from every source, or is skipped.

Without it another model would be restored, and nothing would say so.
"""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from orbax.checkpoint import v1 as orbax

import jshard as js
from jshard import checkpoint
from jshard.checkpoint import Checkpointer, CheckpointError, CheckpointWarning
from jshard.checkpoint.errors import SurplusError
from jshard.checkpoint.formats import Stored, write_safetensors
from jshard.recipes.building import check_source, create_from
from jshard.recipes.model_file import load_model_file
from tests.checkpoint.checkpoint_states import Held
from tests.checkpoint.dcp_fixture import split, write_dcp
from tests.checkpoint.test_checkpoint_zero import save as torch_save
from tests.micro_gpt import MODELS, micro

LAYERS = {f"blocks.{i}.kernel": np.full((4, 4), i + 1.0, np.float32) for i in range(3)}


def nested(layers):
    return {"blocks": {str(i): {"kernel": jnp.asarray(x)} for i, x in enumerate(layers.values())}}


def write_index(path):
    """A folder with an index, as Transformers writes large models."""
    names = list(LAYERS)
    index = {name: f"model-0000{1 + (name == names[-1])}-of-00002.safetensors" for name in names}
    for file in sorted(set(index.values())):
        part = path / "part"
        write_safetensors(part, Held({name: LAYERS[name] for name in names if index[name] == file}))
        (part / "model.safetensors").rename(path / file)
    part.rmdir()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write_series(path):
    Checkpointer(path).save(7, {"params": nested(LAYERS), "step": 7})


SOURCES = {
    "jshard": lambda path: checkpoint.save(path, {"params": nested(LAYERS), "opt": {"mu": jnp.ones(3)}}),
    "a series": write_series,
    "Orbax": lambda path: orbax.save(str(path), {"params": nested(LAYERS), "opt": {"mu": jnp.ones(3)}}),
    "DCP": lambda path: write_dcp(path, {name: split(x, 2) for name, x in LAYERS.items()}, {"epoch": 7}),
    "safetensors": lambda path: write_safetensors(path, Held(LAYERS)),
    "torch.save": lambda path: path.mkdir() or torch_save(path / "pytorch_model.bin", LAYERS),
    "an index": lambda path: path.mkdir() or write_index(path),
}


class LayersAndState(nnx.Module):
    """Layers without biases, random keys, and if asked for also statistics."""

    def __init__(self, num_layers, *, has_statistics=False, rate=0.5):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(num_layers)])
        if has_statistics:
            self.norm = nnx.BatchNorm(4, use_bias=False, use_scale=False, rngs=rngs)
        if rate:
            self.drop = nnx.Dropout(rate, rngs=rngs)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.filterwarnings("ignore:.*no checksums:jshard.checkpoint.CheckpointWarning")
def test_surplus_parameters_are_an_error_that_names_them_unless_they_are_skipped_on_purpose(tmp_path, source):
    SOURCES[source](tmp_path / "c")
    like = {"params": nested({name: LAYERS[name] * 0 for name in list(LAYERS)[:2]})}
    for only in ("params", None):
        if only is None and source == "DCP":
            continue  # its value is a leaf too
        with pytest.raises(
            SurplusError, match=r"has 1 leaf that the state has no place for\.\n(.|\n)*blocks/2/kernel  stored \(4, 4\)"
        ):
            checkpoint.restore(tmp_path / "c", like, only=only)
    with pytest.warns(CheckpointWarning, match=r"1 stored leaf is skipped:\n  (params/)?blocks/2/kernel"):
        restored = checkpoint.restore(tmp_path / "c", like, only="params", extra="ignore")
    assert restored["params"]["blocks"]["1"]["kernel"][0, 0] == 2
    whole = {"params": nested({name: x * 0 for name, x in LAYERS.items()})}
    restored = checkpoint.restore(tmp_path / "c", whole, only="params")  # values and optimizer state: silently
    assert restored["params"]["blocks"]["2"]["kernel"][0, 0] == 3


def trained(num_layers, **options):
    model = LayersAndState(num_layers, **options)
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), "step": 3}


def test_only_params_of_a_training_state_skips_what_is_no_parameter_silently(tmp_path):
    """Optimizer state, random keys and counters of the model, and statistics that the model has a place for."""
    checkpoint.save(tmp_path / "c", trained(2, has_statistics=True))
    for like in (LayersAndState(2, has_statistics=True), LayersAndState(2, has_statistics=True, rate=0)):
        restored = checkpoint.restore(tmp_path / "c", {"model": like}, only="params")["model"]
        np.testing.assert_array_equal(restored.blocks[1].kernel, LayersAndState(2).blocks[1].kernel)
    checkpoint.restore(tmp_path / "c", LayersAndState(2, has_statistics=True), only="params", rename={"": "model"})
    with pytest.raises(SurplusError, match=r"has 2 leaves(.|\n)*model/norm/mean(.|\n)*model/norm/var"):
        checkpoint.restore(tmp_path / "c", {"model": LayersAndState(2)}, only="params")


def test_optimizer_state_of_a_flat_checkpoint_is_no_parameter(tmp_path):
    """Other libraries save the model without a name beside its optimizer."""
    arrays = LAYERS | {f"optimizer.state.{name}.exp_avg": x for name, x in LAYERS.items()}
    write_safetensors(tmp_path / "c", Held(arrays | {"lr_scheduler.last": np.ones(2, np.float32)}))
    names = {f"blocks/{i}/kernel": name for i, name in enumerate(LAYERS)}
    for how in ({}, {"names": names}):
        restored = checkpoint.restore(tmp_path / "c", {"model": LayersAndState(3)}, only="params", **how)["model"]
        assert restored.blocks[2].kernel[0, 0] == 3


def test_surplus_layers_of_stacks(tmp_path):
    """Stored as a stack or one by one, and restored as either."""
    stack = lambda count: {"params": {"blocks": {"kernel": jnp.ones((count, 4, 4))}}}
    one_by_one = lambda count: {"params": {"blocks": {str(i): {"kernel": jnp.ones((4, 4))} for i in range(count)}}}
    for number, (form, like) in enumerate([(stack, one_by_one), (one_by_one, stack)]):
        checkpoint.save(tmp_path / str(number), form(3))
        for only in ("params", None):
            with pytest.raises(CheckpointError, match=r"params/blocks/kernel  stored (3 layers|\(3, 4, 4\))  wanted"):
                checkpoint.restore(tmp_path / str(number), like(2), only=only)
            with pytest.warns(CheckpointWarning, match=r"2 of 3 layers are restored|1 stored leaf is skipped"):
                restored = checkpoint.restore(tmp_path / str(number), like(2), only=only, extra="ignore")
            assert jax.tree.map(jnp.shape, restored) == jax.tree.map(jnp.shape, like(2))


def test_surplus_parameters_of_linen(tmp_path):
    class Deep(nn.Module):
        depth: int

        @nn.compact
        def __call__(self, x):
            for _ in range(self.depth):
                x = nn.Dense(4)(x)
            return x

    def state(depth):
        params = Deep(depth).init(jax.random.key(0), jnp.ones((1, 4)))["params"]
        return {"train": TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))}

    checkpoint.save(tmp_path / "c", state(3))
    checkpoint.restore(tmp_path / "c", state(3), only="params")
    with pytest.raises(SurplusError, match=r"has 2 leaves(.|\n)*train/params/Dense_2/bias"):
        checkpoint.restore(tmp_path / "c", state(2), only="params")


NAMES = {
    "embedding": "wte.weight",
    "blocks/0/kernel": Stored("h.0.weight", transpose=True),
    "head": "lm_head.weight",
}
THEIRS = {
    "wte.weight": np.arange(32, dtype=np.float32).reshape(8, 4),
    "h.0.weight": np.eye(4, dtype=np.float32),
    "lm_head.weight": np.arange(32, dtype=np.float32).reshape(8, 4),
}


def test_a_head_of_its_own_is_an_error_where_the_model_ties_it_and_a_copy_is_not(tmp_path):
    like = {"params": {"embedding": jnp.zeros((8, 4)), "blocks": {"0": {"kernel": jnp.zeros((4, 4))}}}}
    names = {path: name for path, name in NAMES.items() if path != "head"}
    write_safetensors(tmp_path / "tied", Held(THEIRS))
    with pytest.warns(
        CheckpointWarning, match="1 stored leaf is a copy of another:\n  lm_head.weight  equal to embedding"
    ):
        restored = checkpoint.restore(tmp_path / "tied", like, only="params", names=names)
    np.testing.assert_array_equal(restored["params"]["embedding"], THEIRS["wte.weight"])
    equal_layers = {"wte.weight": THEIRS["wte.weight"], "h.0.weight": np.eye(4), "h.1.weight": np.eye(4)}
    write_safetensors(tmp_path / "equal", Held({name: x.astype(np.float32) for name, x in equal_layers.items()}))
    with pytest.raises(SurplusError, match=r"h\.1\.weight  stored"):  # a layer that only has the same numbers
        checkpoint.restore(tmp_path / "equal", like, only="params", names=names)
    write_safetensors(tmp_path / "own", Held(THEIRS | {"lm_head.weight": THEIRS["wte.weight"] + 1}))
    with pytest.raises(SurplusError) as caught:
        checkpoint.restore(tmp_path / "own", like, only="params", names=names)
    assert "lm_head.weight  stored (8, 4)  wanted nothing" in str(caught.value)
    assert "lm_head.weight differs from embedding: the saved model does not tie its head" in str(caught.value)


def test_a_missing_leaf_is_shown_with_the_stored_name_that_was_looked_for(tmp_path):
    like = {"model": {"embedding": jnp.zeros((8, 4)), "head": jnp.zeros((8, 4))}}
    names = {path: NAMES[path] for path in ("embedding", "head")}
    write_safetensors(tmp_path / "c", Held({"wte.weight": THEIRS["wte.weight"]}))
    with pytest.raises(CheckpointError, match=r"model/head  stored nothing as lm_head.weight  wanted \(8, 4\)"):
        checkpoint.restore(tmp_path / "c", like, names=names)
    with pytest.raises(CheckpointError, match=r"params/head  stored nothing as head  wanted \(8, 4\)"):
        checkpoint.restore(tmp_path / "c", {"params": {"head": jnp.zeros((8, 4))}})


def test_an_array_that_no_name_maps_is_never_hidden_by_a_path_of_its_spelling(tmp_path):
    write_safetensors(tmp_path / "c", Held({"weight": np.ones((2, 2), np.float32), "kernel": np.zeros(3, np.float32)}))
    like = {"model": {"kernel": jnp.zeros((2, 2))}}
    with pytest.raises(SurplusError, match=r"kernel \(not in names\)  stored \(3,\)"):
        checkpoint.restore(tmp_path / "c", like, names={"kernel": "weight"})
    with pytest.warns(CheckpointWarning, match="1 stored leaf is skipped"):
        restored = checkpoint.restore(tmp_path / "c", like, names={"kernel": "weight"}, extra="ignore")
    assert restored["model"]["kernel"][0, 0] == 1


@pytest.mark.parametrize("extra", ["error", "ignore"])
def test_surplus_parameters_of_an_annotated_model(tmp_path, extra):
    arrays = {"kernel": np.ones((8, 8), np.float32), "bias": np.ones(8, np.float32)}
    write_safetensors(tmp_path / "c", Held(arrays | {"next.kernel": np.ones((8, 8), np.float32)}))
    model = js.fully_shard(nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0)), mesh=js.mesh())
    if extra == "error":
        expected = pytest.raises(SurplusError, match=r"has 2 leaves(.|\n)*bias  stored(.|\n)*next/kernel  stored")
    else:
        expected = pytest.warns(CheckpointWarning, match="2 stored leaves are skipped:\n  bias\n  next/kernel")
    with expected:
        checkpoint.restore(tmp_path / "c", {"model": model}, only="params", extra=extra)


@pytest.mark.wide
def test_a_run_does_not_begin_with_a_part_of_another_model_unless_it_is_asked_to(tmp_path):
    """The error names the options of the command, which work when pasted; so does that of missing parameters."""
    file = load_model_file(MODELS / "gpt.py")
    recipe = lambda num_layers: dataclasses.replace(
        micro(), model=dataclasses.replace(micro().model, n_layer=num_layers)
    )
    checkpoint.save(tmp_path / "c", {"model": file.build(recipe(3).model, nnx.Rngs(0)), "step": 1})
    with pytest.raises(CheckpointError, match=r"has 12 leaves(.|\n)*model/blocks/2/\.\.\.  stored 12 leaves") as caught:
        check_source(file, recipe(2), js.mesh(), tmp_path / "c")
    assert f"--init-from {tmp_path / 'c'} --extra ignore" in caught.value.do
    check_source(file, recipe(2), js.mesh(), tmp_path / "c", extra="ignore")
    with pytest.warns(CheckpointWarning, match="12 stored leaves are skipped"):
        create_from(file, recipe(2), js.mesh(), tmp_path / "c", extra="ignore")
    with pytest.raises(CheckpointError, match=r"stored nothing  wanted 12 leaves") as caught:
        check_source(file, recipe(4), js.mesh(), tmp_path / "c")
    assert "`like`" not in caught.value.do and "--recipe NAME" in caught.value.do
