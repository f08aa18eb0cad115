"""Requests that plain Flax would take are taken, or refused with the line that would work."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError, CallError
from jshard.train import TrainStep
from tests.helpers import losses_of_steps, mean_square

X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
PADDED = js.PlacementPolicy(shard_dim=lambda path, shape: 1 if "head" in path else None)


class Classifier(nnx.Module):
    """Its head may be padded, and is replaced by one that `head` makes."""

    def __init__(self, classes=61):
        self.body = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        self.head = head(classes, seed=0)

    def __call__(self, x):
        return self.head(self.body(x))


def head(classes, seed=1):
    return nnx.Linear(64, classes, use_bias=False, rngs=nnx.Rngs(seed))


def annotate(model):
    placement = js.PlacementPolicy(min_size=1, allow_replicated=["*bias"], shard_dim=PADDED.shard_dim)
    return js.fully_shard(model, mesh=js.mesh(), placement=placement)


# ---- The optimizer


@pytest.mark.parametrize(
    "tx", [optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)), optax.polyak_sgd()]
)
def test_an_optimizer_that_needs_the_loss_receives_it_in_a_run(tx):
    plain = Classifier()
    optimizer = nnx.Optimizer(plain, tx, wrt=nnx.Param)
    wanted = []
    for _ in range(3):
        loss, grads = nnx.value_and_grad(mean_square)(plain, X)
        optimizer.update(plain, grads, value=loss)
        wanted.append(float(loss))
    model, x = annotate(Classifier()), js.shard_batch(X, js.mesh())
    step = TrainStep(mean_square, model, js.shard_optimizer(model, tx), x)
    np.testing.assert_allclose([float(step(x)["loss"]) for _ in range(3)], wanted, rtol=1e-5)


def test_an_optimizer_that_needs_more_than_the_loss_is_refused_in_a_run():
    model, x = annotate(Classifier()), js.shard_batch(X, js.mesh())
    with pytest.raises(AnnotationError, match=r"scale_by_zoom_linesearch(.|\n)*'grad' and 'value_fn'"):
        TrainStep(mean_square, model, js.shard_optimizer(model, optax.lbfgs()), x)


def test_the_optimizer_of_a_part_is_refused_with_the_filter_that_selects_it():
    model = annotate(Classifier())
    with pytest.raises(AnnotationError, match="a part of a model that is not a unit"):
        js.shard_optimizer(model.head, optax.sgd(0.1))
    trained = nnx.All(nnx.Param, nnx.PathContains("head"))  # as the error says
    optimizer = js.shard_optimizer(model, optax.sgd(0.1), wrt=trained)
    found = losses_of_steps(model, X, optimizer, js.value_and_grad(mean_square, wrt=trained))
    plain = Classifier()
    part = nnx.Optimizer(plain.head, optax.sgd(0.1), wrt=nnx.Param)
    wanted = []
    for _ in range(3):
        loss, grads = nnx.value_and_grad(mean_square)(plain, X)
        part.update(plain.head, grads["head"])
        wanted.append(float(loss))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_optimizer_of_a_padded_unit_can_be_printed():
    model = Classifier()
    js.fully_shard(model.head, mesh=js.mesh(), placement=js.PlacementPolicy(shard_dim=1))
    annotate(model)
    assert str(js.shard_optimizer(model.head, optax.adam(0.1))).startswith("Optimizer(")


# ---- Random keys over microbatches


def noisy_loss(model, x, key):
    return jnp.square(model(x + jax.random.normal(key, x.shape))).mean()


def accumulated(loss, *batch):
    return nnx.jit(lambda model, *batch: js.value_and_grad(loss, accumulate=2)(model, *batch))(
        annotate(Classifier(64)), *batch
    )


def test_a_key_for_every_row_stays_with_its_row():
    def by_row(model, x, keys):
        return jnp.square(model(x + jax.vmap(lambda key: jax.random.normal(key, (64,)))(keys))).mean()

    keys = jax.random.split(jax.random.key(0), 16)
    found, grads = accumulated(by_row, X, keys)
    wanted, wanted_grads = nnx.value_and_grad(by_row)(Classifier(64), X, keys)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(grads["body"]["kernel"][...], wanted_grads["body"]["kernel"][...], rtol=1e-4, atol=1e-5)


def test_a_raw_key_is_split_like_a_typed_one():
    raw, typed = (accumulated(noisy_loss, X, make(3))[0] for make in (jax.random.PRNGKey, jax.random.key))
    np.testing.assert_allclose(raw, typed, rtol=1e-6)
    halves = [X[i::2] for i in range(2)]
    pairs = zip(halves, jax.random.split(jax.random.key(3), 2), strict=True)
    np.testing.assert_allclose(typed, np.mean([noisy_loss(Classifier(64), x, key) for x, key in pairs]), rtol=1e-5)


def test_each_of_some_keys_is_split():
    def two(model, x, keys):
        return noisy_loss(model, x, keys[0]) + noisy_loss(model, x, keys[1])

    keys = jax.random.split(jax.random.key(0), 2)
    found, _ = accumulated(two, X, keys)
    parts = jnp.stack([jax.random.split(key, 2) for key in keys], axis=1)
    wanted = np.mean([two(Classifier(64), X[i::2], parts[i]) for i in range(2)])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_labels_of_two_rows_are_not_a_raw_key():
    mesh = js.mesh(devices=jax.devices()[:1])
    model = js.fully_shard(Classifier(64), mesh=mesh)
    labelled = lambda model, x, labels: (jnp.square(model(x)).mean(-1) * labels).mean()
    labels = np.array([1, 5], np.uint32)
    found, _ = js.value_and_grad(labelled, accumulate=2)(model, X[:2], labels)
    np.testing.assert_allclose(found, labelled(Classifier(64), X[:2], labels), rtol=1e-5)


# ---- A layer that was replaced after the annotation


def test_a_padded_layer_replaced_by_one_of_the_padded_size_is_refused():
    model = annotate(Classifier())
    model.head = head(64)
    with pytest.raises(CallError, match=r"head/kernel  \[64, 64\], planned \[64, 61\] and stored \[64, 64\]"):
        model(X)
    with pytest.raises(CallError, match="replaced after the annotation"):
        js.shard_optimizer(model, optax.sgd(0.1))


@pytest.mark.parametrize("is_called_first", [True, False])
def test_a_padded_layer_replaced_by_one_of_its_own_size_is_padded_and_trains(is_called_first):
    model, plain = annotate(Classifier()), Classifier()
    model.head, plain.head = head(61), head(61)
    if is_called_first:
        np.testing.assert_allclose(model(X), plain(X), rtol=1e-4, atol=1e-5)
    found = losses_of_steps(model, X, js.shard_optimizer(model, optax.adam(0.01)))
    wanted = losses_of_steps(plain, X, nnx.Optimizer(plain, optax.adam(0.01), wrt=nnx.Param))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert model.head.kernel.get_raw_value().shape == (64, 64)


def test_a_layer_is_given_the_values_of_another():
    model, new = annotate(Classifier()), head(61)
    nnx.update(model.head, nnx.to_pure_dict(nnx.state(new)))
    plain = Classifier()
    plain.head = new
    np.testing.assert_allclose(model(X), plain(X), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*added after the annotation:UserWarning")
@pytest.mark.parametrize(("before", "after"), [(61, 67), (61, 8), (64, 61), (64, 8)])
def test_a_layer_replaced_by_one_of_another_size_trains(before, after):
    model, plain = annotate(Classifier(before)), Classifier(before)
    model.head, plain.head = head(after), head(after)
    found = losses_of_steps(model, X, js.shard_optimizer(model, optax.adam(0.01)))
    wanted = losses_of_steps(plain, X, nnx.Optimizer(plain, optax.adam(0.01), wrt=nnx.Param))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


# ---- Models without arrays, objects without numbers, functions that choose nothing


def test_calls_of_an_abstract_model_are_refused():
    model = js.abstract_init(Classifier, annotate)
    assert nnx.eval_shape(lambda model: model(X), model).shape == (16, 61)
    for call in (model, js.value_and_grad(mean_square), js.value_and_grad(mean_square, accumulate=2)):
        with pytest.raises(CallError, match=r"no arrays(.|\n)*js\.shard_init"):
            call(X) if call is model else call(model, X)
    with pytest.raises(CallError, match="no arrays"):
        TrainStep(mean_square, model, js.shard_optimizer(model, optax.sgd(0.1)), js.shard_batch(X, js.mesh()))


def test_calls_of_a_linen_model_with_abstract_parameters_are_refused():
    model = js.fully_shard(nn.Dense(64), mesh=js.mesh())
    params = js.abstract_init(lambda: model.init(jax.random.key(0), X), model)
    with pytest.raises(CallError, match="no arrays"):
        model.apply(params, X)


@pytest.mark.parametrize(
    "wrong",
    [np.array([None] * 16), np.array(["a"] * 16), np.zeros(16, "M8[s]"), ["a"] * 16],
    ids=["objects", "texts", "dates", "list"],
)
def test_a_batch_of_other_objects_is_refused(wrong):
    with pytest.raises(CallError, match=r"not numbers(.|\n)*batch\['ids'\]"):
        js.shard_batch({"x": X, "ids": wrong}, js.mesh())
    assert js.shard_batch(np.zeros(16, jnp.bfloat16), js.mesh()).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "choice",
    [lambda path, name: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), lambda path, module: nnx.Linear, 3],
    ids=["makes a module", "returns a class", "a number"],
)
def test_a_function_that_makes_modules_chooses_no_units(choice):
    with pytest.raises(AnnotationError, match=r"cannot choose units(.|\n)*units=Block"):
        js.fully_shard(Classifier(64), mesh=js.mesh(), units=choice)


def test_a_linen_factory_chooses_no_units():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64)(x)

    def make_dense(config, name=None):
        return nn.Dense(config.width, name=name)

    model = js.fully_shard(Outer(), mesh=js.mesh(), units=make_dense)
    with pytest.raises(AnnotationError, match=r"units=.*make_dense(.|\n)*units=Block"):
        model.init(jax.random.key(0), X)


def test_an_initialisation_that_needs_values_names_its_line():
    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x):
            ids = jax.random.permutation(self.make_rng("noise"), x.shape[1])[:4]
            return nn.Dense(64)(x[:, ids])

    class Odd(nnx.Module):
        def __init__(self):
            size = int(jax.random.randint(jax.random.key(0), (), 8, 9))
            self.head = head(size)

    model, keys = js.fully_shard(Masked(), mesh=js.mesh()), {"params": jax.random.key(0), "noise": jax.random.key(1)}
    x = np.ones((16, 8, 64), np.float32)
    with pytest.raises(AnnotationError, match=r"test_odd_requests\.py:\d+: return nn\.Dense(.|\n)*jnp\.asarray\(x\)"):
        js.shard_init(lambda: model.init(keys, x), model)
    js.shard_init(lambda: model.init(keys, jnp.asarray(x)), model)  # as the error says
    for place in (js.shard_init, js.abstract_init):
        with pytest.raises(AnnotationError, match=r"test_odd_requests\.py:\d+: size = int"):
            place(Odd, annotate)
