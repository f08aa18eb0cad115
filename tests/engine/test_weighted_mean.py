"""A masked loss over microbatches is the loss of the whole batch: totals are divided by the sum of the weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.api.loss_scale import LossScale, scaled_value_and_grad
from jshard.errors import CallError
from tests import linen_models
from tests.toy_models import TwoLayers

ROWS, LENGTH, WIDTH = 32, 4, 64
ALL = js.PlacementPolicy(min_size=1)


def two_layers() -> TwoLayers:
    return TwoLayers(WIDTH, WIDTH, 8, nnx.Rngs(0))


def masked_batch():
    """Rows of microbatch i of 4 keep very different numbers of positions; those of the last keep none."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    kept = np.array([4, 2, 1, 0])[np.arange(ROWS) % 4]
    return x, np.arange(LENGTH)[None] < kept[:, None]


def losses_of(out, mask):
    return jnp.square(out.astype(jnp.float32)).sum(-1) * mask


def loss_fn(model, x, mask):
    losses = losses_of(model(x), mask)
    return js.WeightedMean(losses.sum(), mask.sum())


def quotient(model, x, mask):
    return losses_of(model(x), mask).sum() / mask.sum()


def annotated(settings, **how):
    mesh = js.mesh(**settings)

    def annotate(model):
        js.fully_shard(model.up, mesh=mesh, placement=ALL, **how)
        js.fully_shard(model, mesh=mesh, placement=ALL, **how)

    return js.shard_init(two_layers, annotate)


def wanted():
    return nnx.jit(nnx.value_and_grad(quotient))(two_layers(), *masked_batch())


def assert_same(result, expected, rtol=2e-6):
    (loss, grads), (wanted_loss, wanted_grads) = result, expected
    np.testing.assert_allclose(loss, wanted_loss, rtol=rtol)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
        x, y = (np.asarray(each, np.float32) for each in (x, y))
        assert np.abs(x - y).max() <= rtol * 5 * np.abs(y).max()


@pytest.mark.filterwarnings("ignore:.*replicated:UserWarning")
@pytest.mark.parametrize("degrees", [{}, {"replica": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}], ids=str)
@pytest.mark.parametrize(("steps", "sync"), [(1, "each"), (4, "each"), (4, "last")])
def test_a_masked_mean_over_microbatches_is_that_of_the_whole_batch(degrees, steps, sync):
    model = annotated(degrees)
    grad_fn = js.value_and_grad(loss_fn, accumulate=steps, sync=sync)
    result = nnx.jit(lambda model, *batch: grad_fn(model, *batch))(model, *masked_batch())
    assert_same(result, wanted())


@pytest.mark.parametrize(("steps", "sync"), [(1, "each"), (4, "each"), (4, "last")])
def test_a_masked_mean_of_a_linen_model_is_that_of_the_whole_batch(steps, sync):
    plain, (x, mask) = linen_models.TwoLayers(WIDTH, 8), masked_batch()
    model = js.fully_shard(plain, mesh=js.mesh(), placement=ALL)
    params = js.shard_init(lambda: model.init(jax.random.key(0), x), model)
    of = lambda model, params, x, mask: losses_of(model.apply(params, x), mask)

    def loss(params, x, mask):
        losses = of(model, params, x, mask)
        return js.WeightedMean(losses.sum(), mask.sum()), losses.max()

    grad_fn = js.value_and_grad(loss, model=model, accumulate=steps, sync=sync, has_aux=True)
    (value, aux), grads = jax.jit(grad_fn)(params, x, mask)
    expected = jax.value_and_grad(lambda params: of(plain, params, x, mask).sum() / mask.sum())(jax.device_get(params))
    assert_same((value, grads), expected)
    assert aux.shape == (() if steps == 1 else (steps,))


def test_aux_may_be_a_weighted_mean():
    def loss(model, x, mask):
        out = model(x)
        hits = (out[..., 0] > 0) * mask
        return loss_fn(model, x, mask), js.WeightedMean(hits.sum(), mask.sum())

    grad_fn = js.value_and_grad(loss, accumulate=4, has_aux=True)
    (_, aux), _ = nnx.jit(lambda model, *batch: grad_fn(model, *batch))(annotated({}), *masked_batch())
    assert aux.total.shape == aux.weight.shape == (4,)
    np.testing.assert_array_equal(aux.weight, [32, 16, 8, 0])


@pytest.mark.filterwarnings("ignore:.*replicated:UserWarning")
@pytest.mark.parametrize("sync", ["each", "last"])
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_a_masked_mean_in_mixed_precision_is_near_that_of_the_whole_batch(sync, reduce):
    model = annotated({}, mixed_precision=js.MixedPrecision(param_dtype="bfloat16", reduce_dtype=reduce))
    grad_fn = js.value_and_grad(loss_fn, accumulate=4, sync=sync)
    result = nnx.jit(lambda model, *batch: grad_fn(model, *batch))(model, *masked_batch())
    assert_same(result, wanted(), rtol=5e-3)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_scaled_masked_mean_stays_in_the_range_of_float16(steps):
    model = annotated({}, mixed_precision=js.MixedPrecision(param_dtype="float16", reduce_dtype="float16"))
    optimizer = js.shard_optimizer(model, LossScale(initial=2.0**10).around(optax.sgd(1e-3)))
    many = lambda model, x, mask: js.WeightedMean(1e5 * loss_fn(model, x, mask).total, 1e5 * mask.sum())

    @nnx.jit
    def gradients(model, optimizer, x, mask):
        return scaled_value_and_grad(many, optimizer, accumulate=steps)(model, x, mask)

    result = gradients(model, optimizer, *masked_batch())
    assert_same(result, wanted(), rtol=5e-3)


def test_a_plain_mean_is_computed_as_before():
    model, (x, _) = annotated({}), masked_batch()
    plain = lambda model, x: jnp.square(model(x)).mean()
    weighted = lambda model, x: js.WeightedMean(jnp.square(model(x)).sum(), x.shape[0] * LENGTH * 8)
    run = lambda loss: nnx.jit(lambda model, x: js.value_and_grad(loss, accumulate=4)(model, x))(model, x)
    assert_same(run(weighted), run(plain))
    text = str(jax.make_jaxpr(lambda x: js.value_and_grad(plain, accumulate=4)(annotated({}), x)[0])(x))
    assert "select_n" not in text


@pytest.mark.parametrize("steps", [1, 2])
def test_no_gradient_flows_through_the_weight(steps):
    def learned(model, x, mask):
        weights = jax.nn.sigmoid(model(x)[..., 0])
        return js.WeightedMean((weights * losses_of(model(x), mask)).sum(), weights.sum())

    def as_documented(model, x, mask):
        weights = jax.nn.sigmoid(model(x)[..., 0])
        return (weights * losses_of(model(x), mask)).sum() / jax.lax.stop_gradient(weights.sum())

    grad_fn = js.value_and_grad(learned, accumulate=steps)
    result = nnx.jit(lambda model, *batch: grad_fn(model, *batch))(annotated({}), *masked_batch())
    expected = nnx.value_and_grad(as_documented)(two_layers(), *masked_batch())
    assert_same(result, expected)


@pytest.mark.parametrize("steps", [1, 2])
def test_without_any_weight_the_mean_is_not_a_number(steps):
    x, mask = masked_batch()
    grad_fn = js.value_and_grad(loss_fn, accumulate=steps)
    loss, _ = nnx.jit(lambda model, *batch: grad_fn(model, *batch))(annotated({}), x, np.zeros_like(mask))
    assert np.isnan(loss)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_weight_that_is_not_a_scalar_is_refused(steps):
    wrong = lambda model, x, mask: js.WeightedMean(losses_of(model(x), mask).sum(), mask)
    grad_fn = js.value_and_grad(wrong, accumulate=steps)
    with pytest.raises(CallError, match=r"weight  bool\[") as raised:
        functools.partial(grad_fn, annotated({}))(*masked_batch())
    assert raised.value.do == "js.WeightedMean((losses * mask).sum(), mask.sum())"
