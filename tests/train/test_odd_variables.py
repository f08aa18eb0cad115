"""Variables that hold numbers, NumPy arrays or trees train as in plain Flax; other objects are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError
from jshard.train import EvalStep, TrainStep
from tests.helpers import losses_of_steps, mean_square

X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
ROW = np.linspace(0.5, 1.5, 32)[None]  # float64

PARAMETERS = {
    "number": 1.5,
    "complex": 1j,
    "numpy": ROW.astype(np.float32),
    "numpy float64": ROW,
    "numpy scalar": np.float64(2),
    "list": [1.0, 2.0],
    "tuple": (jnp.ones((1, 32)), ROW.astype(np.float32)),
    "dict": {"scale": jnp.ones((1, 32)), "shift": 0.5},
    "none": None,
}
BUFFERS = {"number": 1.5, "integer": 3, "bool": True, "numpy": ROW.astype(np.float32), "tuple": (0.5, ROW)}


def model_of(kind, value):
    class HoldsAnOddVariable(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
            self.odd = kind(value)

        def __call__(self, x):
            for leaf in jax.tree.leaves(self.odd.get_value()):
                x = x * jnp.abs(leaf)
            return self.linear(x)

    return HoldsAnOddVariable


def in_plain_flax(build):
    model = build()
    return losses_of_steps(
        model, X, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), nnx.value_and_grad(mean_square)
    )


def annotate(model):
    return js.fully_shard(model, mesh=js.mesh(), placement=js.PlacementPolicy(min_size=1, allow_replicated=["odd"]))


def trained(build, form):
    model = js.shard_init(build, annotate) if form == "shard_init" else annotate(build())
    optimizer = js.shard_optimizer(model, optax.sgd(0.1))
    if form == "TrainStep":
        x = js.shard_batch(X, js.mesh())
        step = TrainStep(mean_square, model, optimizer, x)
        found = [float(step(x)["loss"]) for _ in range(3)]
        EvalStep(mean_square, step, x)(step.model_leaves, x)
        return found
    settings = {"each": {"accumulate": 2}, "last": {"accumulate": 2, "sync": "last"}}.get(form, {})
    return losses_of_steps(model, X, optimizer, js.value_and_grad(mean_square, **settings))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_that_plain_flax_trains_is_trained(name):
    build = model_of(nnx.Param, PARAMETERS[name])
    expected = in_plain_flax(build)
    forms = ("each", "last", "shard_init", "TrainStep") if name in ("number", "dict") else ("nnx.jit", "TrainStep")
    for form in forms:
        np.testing.assert_allclose(trained(build, form), expected, rtol=1e-5, err_msg=form)


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_plain_flax_takes_is_taken(name):
    build = model_of(nnx.Variable, BUFFERS[name])
    expected = in_plain_flax(build)
    np.testing.assert_allclose(trained(build, "TrainStep"), expected, rtol=1e-5)
    np.testing.assert_allclose(mean_square(annotate(build()), X), expected[0], rtol=1e-5)


def test_numpy_memory_of_a_parameter_stays_its_owners():
    array = np.ones((1, 32), np.float32)
    model = annotate(model_of(nnx.Param, array)())
    array[:] = 2
    assert (np.asarray(model.odd[...]) == 1).all()


@pytest.mark.parametrize("place", [annotate, lambda model: js.shard_init(lambda: model, annotate)])
@pytest.mark.parametrize("value", ["abc", np.array([None]), np.array(["a"])], ids=["text", "objects", "texts"])
def test_a_variable_that_is_no_array_is_refused(value, place):
    with pytest.raises(
        AnnotationError, match=r"holds an object that is not an array(.|\n)*HoldsAnOddVariable: odd  (str|ndarray)"
    ):
        place(model_of(nnx.Variable, value)())
