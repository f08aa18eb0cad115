"""What the compiled program computes again by each remat policy, and keeps; the gradients of one device with each."""

import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.engine import program
from jshard.inspect.activations import saved_arrays
from jshard.train import load_model_file
from tests.helpers import mean_square
from tests.micro_gpt import MODELS, micro
from tests.toy_models import Tower
from tests.wide import wide

GPT_FILE = load_model_file(MODELS / "gpt.py")
gpt = sys.modules[GPT_FILE.build.__module__]
# In a loop: where layers are unrolled XLA:CPU may find that two of a kind are one.
CONFIG = dataclasses.replace(micro().model, n_layer=2, scan=True)

# Of a block's six products backward needs all results but the last: qkv, scores, context, out, up, down.
AGAIN = {
    "full": ["qkv", "scores", "context", "out", "up"],
    "dots": [],
    "dots_with_no_batch_dims": ["scores", "context"],
    "attention": ["scores"],  # its result is kept, so the second product is not needed again
    "torchtitan_selective": ["scores", "out"],  # qkv, up, and the context are kept
    "minimal": ["scores", "context"],
    "minimal_flash": ["scores"],
    "save_dot_with_context_except_mlp": ["scores", "up"],
    "names:qkv_proj,mlpwi": ["scores", "context", "out"],
}


FEW = ("torchtitan_selective",)


def gradients(remat, mesh):
    """The compiled program of the gradients, and what it gives."""
    config = dataclasses.replace(CONFIG, remat=remat)
    model = js.shard_init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), lambda model: gpt.annotate(model, mesh))
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (8, config.block_size + 1))
    batch = js.shard_batch({"inputs": ids[:, :-1], "targets": ids[:, 1:]}, mesh)
    step = nnx.jit(js.value_and_grad(GPT_FILE.loss_fn)).lower(model, batch).compile()
    return step.as_text(), step(model, batch)


@pytest.fixture(scope="module")
def kept():
    """What one device gives that keeps everything; how many products the program of eight has."""
    _, found = gradients("none", js.mesh(devices=jax.devices()[:1]))
    text, _ = gradients("none", js.mesh())
    return found, products(text)


def products(text):
    return len(re.findall(r"= \S+ dot\(|custom_call_target=\"__onednn\$matmul", text))


@pytest.mark.wide
@pytest.mark.parametrize("remat", [name if name in FEW else wide(name) for name in AGAIN])
def test_what_is_computed_again(kept, remat):
    (loss, grads), num_products = kept
    text, (found, others) = gradients(remat, js.mesh())
    assert products(text) == num_products + len(AGAIN[remat])
    np.testing.assert_allclose(float(found), float(loss), rtol=1e-5)
    for x, y in zip(jax.tree.leaves(others), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6 * max(float(np.abs(y).max()), 1e-3))


def test_equal_layers_are_differentiated_once(monkeypatch):
    """Seen to fail where each had a policy of its own, equal to none: as many derivatives as layers."""
    made, of = [], program.Gradient
    monkeypatch.setattr(program, "Gradient", lambda *args: made.append(args) or of(*args))
    mesh, config = js.mesh(devices=8), dataclasses.replace(CONFIG, n_layer=3, scan=False, remat="dots")
    model = js.abstract_init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), lambda model: gpt.annotate(model, mesh))
    ids = jax.ShapeDtypeStruct((8, config.block_size), "int32")
    saved_arrays(model, GPT_FILE.loss_fn, {"inputs": ids, "targets": ids})
    blocks = [wrt for one, wrt in made if one.remat == "dots"]
    assert len(blocks) == 1


# ---- What is kept --------------------------------------------------------------------------------


SEQUENCES = np.random.default_rng(0).normal(size=(8, 6, 16)).astype(np.float32)


class Attention(nnx.Module):
    """Autodiff keeps its masked scores for their maximum, which has no gradient."""

    def __init__(self, rngs: nnx.Rngs):
        self.project = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        q = self.project(x)
        return jax.nn.dot_product_attention(*3 * (q[:, :, None],), is_causal=True)[:, :, 0]


def attention_and_head() -> Tower:
    rngs = nnx.Rngs(0)
    return Tower([Attention(rngs)], nnx.Linear(16, 1, rngs=rngs))


def test_scores_are_not_kept():
    """Seen to fail where all that autodiff keeps was: the scores before their maximum is subtracted, too."""
    model = js.fully_shard(attention_and_head(), mesh=js.mesh(), units=Attention)
    saved = saved_arrays(model, mean_square, jnp.asarray(SEQUENCES))
    scores = {x: n for x, n in saved.items() if x.dtype == "float32" and x.form.shape[-2:] == (6, 6)}
    assert sum(scores.values()) == 2  # the exponentials, and the weights
    plain = attention_and_head()
    (loss, grads), (wanted, wanted_grads) = (
        nnx.jit(nnx.value_and_grad(mean_square))(m, jnp.asarray(SEQUENCES)) for m in (model, plain)
    )
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for found, one in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-6)
