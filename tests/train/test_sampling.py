"""What is written token by token is what the whole forward pass would write, on every mesh; a run ends with some."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.errors import ShardingError
from jshard.recipes.building import new_model
from jshard.train import load_model_file, sampling
from jshard.train.sampling import Draw, Sampler
from tests.micro_gpt import MODELS, micro

FILES = {name: load_model_file(MODELS / f"{name}.py") for name in ("gpt", "llama", "linen_gpt")}
SMALL = {"block_size": 32, "n_layer": 2, "n_head": 2, "d_model": 64, "vocab_size": 260}
OF = {"gpt": {"d_ff": 128}, "llama": {"d_ff": 128, "n_kv_head": 2}, "linen_gpt": {}}
PROMPT = np.random.default_rng(0).integers(0, 256, 5)
ONE, EIGHT, THREE = {"fsdp": 1}, {"fsdp": 8}, {"replica": 2, "fsdp": 2, "tensor": 2}


def recipe_of(name, **config):
    _, tiny = FILES[name].recipe("tiny")
    model = dataclasses.replace(tiny.model, **SMALL | OF[name] | config)
    return dataclasses.replace(micro(), model=model, sequence_length=16)


def sampler_of(name, mesh, draw, **config):
    recipe = recipe_of(name, **config)
    model = new_model(FILES[name], recipe, mesh)
    nnx.update(model, jax.tree.map(lambda x: 5 * x, nnx.state(model, nnx.Param)))  # attention counts for something
    return model, Sampler(model, mesh, window=recipe.sequence_length, num_ids=256, draw=draw)


def mesh_of(sizes):
    return js.mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


@pytest.mark.parametrize(
    ("name", "sizes", "config"),
    [
        ("gpt", ONE, {"positions": "learned"}),
        ("gpt", EIGHT, {"scan": True, "tied": False}),
        ("gpt", THREE, {"split_sequence": True, "compute_dtype": "bfloat16"}),
        ("llama", EIGHT, {}),
        ("llama", THREE, {"scan": True}),
        ("linen_gpt", EIGHT, {}),
    ],
)
def test_the_likeliest_tokens_are_those_of_the_whole_forward_pass(name, sizes, config):
    mesh = mesh_of(sizes)
    model, sampler = sampler_of(name, mesh, Draw(temperature=0.0), **config)
    text = sampler.continued(PROMPT, 11)  # 16 tokens: a window
    assert text.dtype == np.int32 and text[:5].tolist() == PROMPT.tolist()
    call = nnx.jit(lambda model, ids: model(ids).astype(jnp.float32))
    scores = np.asarray(call(model, np.tile(text, (8, 1))))[0, 4:-1, :256]
    best = np.take_along_axis(scores, text[5:, None].astype(int), axis=1)[:, 0]
    slack = 0.2 if config.get("compute_dtype") else 1e-4  # two may be as likely as each other, up to rounding
    np.testing.assert_allclose(best, scores.max(1), atol=slack)
    assert scores.max(1).min() > np.median(scores) + 5 * slack


def test_a_full_window_is_read_again_by_the_same_two_programs(monkeypatch):
    traced, decoded = [], sampling._decode
    monkeypatch.setattr(sampling, "_decode", lambda *args: traced.append(args) or decoded(*args))
    _, sampler = sampler_of("gpt", mesh_of(EIGHT), Draw(temperature=0.0))
    text = sampler.continued(PROMPT, 20)
    assert len(text) == 25 and len(traced) == 2
    # A window of 16 gives the 17th token, and then its last half begins the next.
    np.testing.assert_array_equal(text[17:], sampler.continued(text[9:17], 8)[8:])


def test_a_draw():
    scores = jnp.array([0.0, 3.0, 1.0, 2.9])
    assert Draw(temperature=0.0).token(scores, 0) == 1
    drawn = {int(Draw(temperature=2.0, top_k=2).token(scores, number)) for number in range(40)}
    assert drawn == {1, 3}
    all_of_them = [int(Draw(temperature=5.0, seed=seed).token(scores, n)) for seed in (0, 1) for n in range(40)]
    assert set(all_of_them) == {0, 1, 2, 3} and all_of_them[:40] != all_of_them[40:]
    with pytest.raises(ShardingError, match="temperature 0 takes the likeliest"):
        Draw(temperature=-1.0)
