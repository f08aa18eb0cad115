"""Between forward and backward nothing is kept that no gradient needs, whatever autodiff keeps."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard as js
from jshard.inspect.memory import saved_arrays

X = np.random.default_rng(0).normal(size=(8, 6, 16)).astype(np.float32)


class Attention(nnx.Module):
    """Autodiff keeps its masked scores for their maximum, which has no gradient."""

    def __init__(self, rngs: nnx.Rngs):
        self.project = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        q = self.project(x)
        return jax.nn.dot_product_attention(*3 * (q[:, :, None],), is_causal=True)[:, :, 0]


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = Attention(rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.attention(x))


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def test_scores_are_not_kept():
    """Seen to fail where all that autodiff keeps was: the scores before their maximum is subtracted, too."""
    model = js.fully_shard(Model(nnx.Rngs(0)), mesh=js.mesh(), units=Attention)
    saved = saved_arrays(model, loss_fn, jnp.asarray(X))
    scores = {kind: n for (kind, _, _), n in saved.items() if kind.startswith("float32") and kind.endswith("6, 6)")}
    assert sum(scores.values()) == 2  # the exponentials, and the weights
    plain = Model(nnx.Rngs(0))
    (loss, grads), (wanted, wanted_grads) = (
        nnx.jit(nnx.value_and_grad(loss_fn))(m, jnp.asarray(X)) for m in (model, plain)
    )
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for found, one in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-6)
