"""Whatever a user's model and loss do, the sharded model equals the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError, CallError
from tests.helpers import Config, abstract, annotator, builder, loss_fn, placed, token_batch
from tests.parity import assert_parity, flat, worst
from tests.toy_models import Normed

CONFIG = Config(attends=False)
BATCH = token_batch(CONFIG)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class TakesMaskAndPositions(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x, mask=None, *, positions=None, train=True):
        h = jax.nn.gelu(self.linear(x)) if train else self.linear(x)
        if mask is not None:
            h = h * mask
        if positions is not None:
            h = h + jnp.sin(positions)[..., None].reshape((1,) * (2 - positions.ndim) + (*positions.shape, 1))
        return x + h


class Awkward(nnx.Module):
    """A model with keyword arguments, masks, flags and several methods."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.head = nnx.Embed(256, 64, rngs=rngs), nnx.Linear(64, 256, rngs=rngs)
        self.layers = nnx.List([TakesMaskAndPositions(rngs) for _ in range(2)])
        self.table = nnx.data(jnp.linspace(0.5, 1.5, 64))  # an array that is not a variable

    def __call__(self, x, mask=None, *, positions=None, train=True):
        h = self.embed(x) * self.table[None, None]
        for layer in self.layers:
            h = layer(h, mask=mask, positions=positions, train=train)
        return self.head(h)

    def encode(self, x):
        h = self.embed(x) * self.table[None, None]
        for layer in self.layers:
            h = layer(h)
        return h

    def decode(self, h):
        return self.head(h)

    def many(self, x):
        h = self.encode(x)
        return {
            "logits": self.head(h),
            "flat": h.reshape(-1, h.shape[-1]),
            "time_major": jnp.swapaxes(h, 0, 1),
            "auxiliary": (h**2).mean(),
            "weight": (self.head.kernel[...] ** 2).sum(),
            "name": "awkward",
            "layers": 2,
        }


def annotate(model):
    js.fully_shard(model, mesh=js.mesh(), units=TakesMaskAndPositions)


LENGTH = BATCH[0].shape[1]
RNG = np.random.default_rng(1)
KEYWORDS = {
    "batch mask, positions": (
        (RNG.random((16, LENGTH, 1)) > 0.3).astype(np.float32),
        np.arange(LENGTH, dtype=np.float32),
    ),
    "broadcast mask, batch positions": (
        np.ones((1, LENGTH, 1), np.float32),
        np.tile(np.arange(LENGTH, dtype=np.float32), (16, 1)),
    ),
}


@pytest.mark.parametrize("case", KEYWORDS)
def test_masks_and_keyword_arguments(case):
    mask, positions = KEYWORDS[case]
    loss = lambda m, x, y, mask, positions: cross_entropy(m(x, mask=mask, positions=positions, train=True), y)
    # Length equals batch (16): which of them carries the batch is found from what the model does with it.
    assert_parity(Awkward, annotate, loss, (*BATCH, mask, positions))


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x, y: cross_entropy(m.decode(m.layers[0](m.encode(x))), y),
        lambda m, x, y: cross_entropy(m(x), y) * 2.0 + (m.many(x)["weight"] * 1e-3),
    ],
    ids=["an inner unit called alone", "loss and a weight"],
)
def test_methods_and_several_calls(loss):
    assert_parity(Awkward, annotate, loss, BATCH)


def test_every_kind_of_output():
    model, plain = placed(Awkward, annotate), Awkward()
    run = nnx.jit(lambda model, x: {k: v for k, v in model.many(x).items() if k != "name"})
    found, wanted = run(model, BATCH[0]), plain.many(BATCH[0])
    assert found["layers"] == 2
    for key in ("logits", "flat", "time_major", "auxiliary", "weight"):
        np.testing.assert_allclose(found[key], wanted[key], rtol=2e-5, atol=1e-5)
    assert found["flat"].sharding.shard_shape(found["flat"].shape) == (16 * LENGTH // 8, 64)
    assert found["time_major"].sharding.shard_shape(found["time_major"].shape) == (LENGTH, 2, 64)


def test_any_batch_runs_in_global_view_and_outside():
    model, plain = placed(Awkward, annotate), Awkward()
    run = nnx.jit(lambda model, x: model(x))
    with js.global_view():
        np.testing.assert_allclose(run(model, BATCH[0][:3]), plain(BATCH[0][:3]), rtol=1e-5, atol=1e-5)
    # The jitted function is traced again outside, where each device computes all of a batch that does not divide.
    np.testing.assert_allclose(run(model, BATCH[0][:3]), plain(BATCH[0][:3]), rtol=1e-5, atol=1e-5)


def test_second_derivatives_by_reverse_mode():
    def curvature(model, x, y):
        def norm(model):
            return sum((g**2).sum() for g in jax.tree.leaves(nnx.grad(loss_fn)(model, x, y)))

        return nnx.grad(norm)(model)

    model, plain = placed(builder(CONFIG), annotator(js.mesh())), builder(CONFIG)()
    found, wanted = (flat(nnx.jit(curvature)(m, *BATCH)) for m in (model, plain))
    assert max(worst(found[k], wanted[k]) for k in wanted) < 1e-5


def test_forward_mode():
    model, plain = placed(builder(CONFIG), annotator(js.mesh())), builder(CONFIG)()

    def along(model, x, y):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        run = lambda p: loss_fn(nnx.merge(graphdef, p, rest), x, y)
        return jax.jvp(run, (params,), (params,))[1]

    wanted = nnx.jit(along)(plain, *BATCH)
    np.testing.assert_allclose(nnx.jit(along)(model, *BATCH), wanted, rtol=1e-5)
    with js.global_view():
        np.testing.assert_allclose(nnx.jit(along)(model, *BATCH), wanted, rtol=1e-5)


def test_parameters_added_after_the_annotation_are_right_and_named():
    def grown(annotated):
        model = Awkward()
        if annotated:
            annotate(model)
        model.layers[0].linear.scale = nnx.Param(jnp.full((64,), 1.5))
        return model

    def loss(model, x, y):
        h = model.encode(x) * model.layers[0].linear.scale[None, None]
        return cross_entropy(model.decode(h), y)

    run = nnx.jit(lambda model, x, y: nnx.value_and_grad(loss)(model, x, y))
    with pytest.warns(UserWarning, match=r"after the annotation(.|\n)*layers/0/linear/scale"):
        value, grads = run(grown(True), *BATCH)
    want, want_grads = run(grown(False), *BATCH)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    found, wanted = flat(grads), flat(want_grads)
    assert max(worst(found[k], wanted[k]) for k in wanted) < 2e-6
    with pytest.raises(AnnotationError, match="added after its annotation"):
        js.plan(grown(True))


# ---- Reads and microbatches ----------------------------------------------------------------------


ROWS = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)


def called(model, *args, **kwargs):
    return nnx.jit(lambda model, *args: model(*args, **kwargs))(model, *args)


def test_check_compares_state_that_the_call_changed():
    report = js.check(js.fully_shard(Normed(64, 64, nnx.Rngs(0)), mesh=js.mesh()), ROWS)
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
    np.testing.assert_allclose(called(model, ROWS), build()(ROWS), rtol=2e-5, atol=2e-5)


def test_units_in_a_call_of_their_own_are_right_without_a_root():
    config = Config()
    model, plain = builder(config)(), builder(config)()
    js.fully_shard(model.blocks[0], mesh=js.mesh())
    h = np.random.default_rng(2).standard_normal((16, 8, 64)).astype(np.float32)
    np.testing.assert_allclose(called(model.blocks[0], h), called(plain.blocks[0], h), rtol=1e-5, atol=1e-5)


def test_accumulation_that_syncs_last_does_not_take_copies_of_what_was_changed():
    """A parameter that the loss itself perturbs before the call."""

    def perturbed(model, x, y):
        model.embed.embedding[...] = 2 * model.embed.embedding[...]
        return loss_fn(model, x, y)

    config = Config()
    grad = js.value_and_grad(perturbed, accumulate=2, sync="last")
    with pytest.raises(CallError, match="the loss changed them before the call"):
        nnx.eval_shape(lambda m, *batch: grad(m, *batch), abstract(config, js.mesh()), *token_batch(config))
