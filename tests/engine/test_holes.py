"""Where a sharded region could be silently wrong: each is right, or an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.errors import CallError
from tests.helpers import Config, abstract, builder, loss_fn, sharded, token_batch

X = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)


def call(model, *args, **kwargs):
    return nnx.jit(lambda model, *args: model(*args, **kwargs))(model, *args)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(64, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


def test_check_compares_state_that_the_call_changed():
    report = js.check(js.fully_shard(Normed(nnx.Rngs(0)), mesh=js.mesh()), X)
    assert report.state.keys() == {"norm/mean", "norm/var"}
    assert "1 outputs, 4 gradients and 2 changed states agree" in str(report)


class Outer(nnx.Module):
    """Has an inner unit whose parameters it uses by `use`."""

    def __init__(self, rngs, use):
        self.inner = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 64, rngs=rngs)
        self.use = use

    def __call__(self, x):
        h = self.out(self.inner(x))
        return h + self.use(self.inner)


READ = {
    "nnx.state": lambda m: sum((v**2).sum() for v in jax.tree.leaves(nnx.state(m, nnx.Param))),
    "nnx.split": lambda m: nnx.split(m)[1]["kernel"].get_raw_value().mean(),
    "indexed leaf": lambda m: jax.tree.leaves(nnx.state(m, nnx.Param))[1][0].sum(),
    "inside a scan": lambda m: jax.lax.map(jnp.sum, m.kernel.get_raw_value()).sum(),
    "inside a branch": lambda m: jax.lax.cond(True, lambda w: w.sum(), lambda w: w.mean(), m.kernel.get_raw_value()),
    "a whole parameter": lambda m: (m.kernel[...] ** 2).sum(),
    "an index": lambda m: m.kernel[3, 5] + m.kernel[60:].sum(),
    "an operator": lambda m: (m.kernel * 2.0).sum(),
    "variables of nnx.state": lambda m: sum((v[...] ** 2).sum() for _, v in nnx.to_flat_state(nnx.state(m, nnx.Param))),
    "a size": lambda m: jnp.float32(m.kernel.size + m.kernel.shape[0] + m.kernel.ndim),
    "a loop": lambda m: sum(row.sum() for row in m.kernel),
}


def test_reads_inside_the_region_are_of_the_whole_parameter():
    build = lambda: Outer(nnx.Rngs(0), lambda m: jnp.stack([use(m) for use in READ.values()]).sum())
    model = build()
    js.fully_shard(model.inner, mesh=js.mesh())
    js.fully_shard(model, mesh=js.mesh())
    np.testing.assert_allclose(call(model, X), build()(X), rtol=2e-5, atol=2e-5)


def test_units_in_a_call_of_their_own_are_right_without_a_root():
    config = Config()
    model, plain = builder(config)(), builder(config)()
    js.fully_shard(model.blocks[0], mesh=js.mesh())
    h = np.random.default_rng(2).standard_normal((16, 8, 64)).astype(np.float32)
    np.testing.assert_allclose(call(model.blocks[0], h), call(plain.blocks[0], h), rtol=1e-5, atol=1e-5)


def test_accumulation_that_syncs_last_works_through_any_method():
    config = Config()
    batch = token_batch(config)

    def by_hand(model, x, y):
        h = model.embed(x)
        for block in model.blocks:
            h = block(h)
        logits = model.embed.attend(model.norm(h))
        return -jax.nn.log_softmax(logits)[jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])[None], y].mean()

    model, plain = sharded(config, js.mesh()), builder(config)()
    grad = js.value_and_grad(by_hand, accumulate=2, sync="last")
    loss, grads = nnx.jit(lambda m, x, y: grad(m, x, y))(model, *batch)
    want_loss, want = nnx.jit(lambda m, x, y: nnx.value_and_grad(by_hand)(m, x, y))(plain, *batch)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for (path, g), (_, w) in zip(nnx.to_flat_state(grads), nnx.to_flat_state(want), strict=True):
        scale = float(jnp.abs(w[...]).max())
        np.testing.assert_allclose(np.asarray(g[...]) / scale, np.asarray(w[...]) / scale, atol=2e-6, err_msg=str(path))


def test_accumulation_that_syncs_last_does_not_take_copies_of_what_was_changed():
    """A parameter that the loss itself perturbs before the call."""

    def perturbed(model, x, y):
        model.embed.embedding[...] = 2 * model.embed.embedding[...]
        return loss_fn(model, x, y)

    config = Config()
    grad = js.value_and_grad(perturbed, accumulate=2, sync="last")
    with pytest.raises(CallError, match="the loss changed them before the call"):
        nnx.eval_shape(lambda m, *batch: grad(m, *batch), abstract(config, js.mesh()), *token_batch(config))
