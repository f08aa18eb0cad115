"""Transforms of JAX, and programs around a model whose layers run on stages: values and gradients of one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback

import jshard as js
from jshard.errors import CallError, FourPartError
from tests.engine.one_device import apart, on_host
from tests.engine.staged_forms import (
    BATCH,
    EXAMPLES,
    Layer,
    Layered,
    X,
    Y,
    assert_same,
    in_scan_layers,
    plain_loss,
    staged,
)
from tests.wide import wide

pytestmark = [
    pytest.mark.usefixtures("ranks_as_users_have_them"),
    pytest.mark.every_set,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of what an operation over the batch costs
]
SECOND = 5e-6  # of derivatives of derivatives, in which rounding errors add up


def tower() -> Layered:
    return Layered(nnx.Rngs(0), in_scan_layers)


def square(y: jax.Array) -> jax.Array:
    return (jnp.sin(y) ** 2).mean()


def as_function(model: Any) -> tuple[Callable[..., Any], Any]:
    """The model as a function of its parameters and the input, and the parameters."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params, x: nnx.merge(graphdef, params, rest)(x), params


def of_function(transform: Callable[[Callable[..., Any], Any], Any]) -> Callable[[Any], Any]:
    """A transform of the function of a model, compiled with it."""
    return nnx.jit(lambda model: transform(*as_function(model)))


# ---- transforms


def of_examples(run: Callable[..., Any], params: Any) -> Any:
    loss = lambda params, x, y: ((run(params, x[None]) - y) ** 2).mean()
    return jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, X, Y)


def mapped(run: Callable[..., Any], params: Any) -> Any:
    loss = lambda params: (jax.vmap(lambda scale: run(params, scale * X))(jnp.arange(1.0, 3.0)) ** 2).mean()
    return jax.value_and_grad(loss)(params)


def pushed_forward(run: Callable[..., Any], params: Any) -> Any:
    return jax.jvp(run, (params, jnp.asarray(X)), (jax.tree.map(jnp.ones_like, params), jnp.asarray(Y)))


def gradient_of_a_gradient(run: Callable[..., Any], params: Any) -> Any:
    gradient = jax.grad(lambda params: square(run(params, X)))
    return jax.grad(lambda params: sum((x**2).sum() for x in jax.tree.leaves(gradient(params))))(params)


def hessian_times_vector(run: Callable[..., Any], params: Any) -> Any:
    gradient = jax.grad(lambda params: square(run(params, X)))
    return jax.jvp(gradient, (params,), (jax.tree.map(jnp.ones_like, params),))


def hessian_of_a_bias(run: Callable[..., Any], params: Any) -> Any:
    def loss(bias: jax.Array) -> jax.Array:
        changed = jax.tree.map(lambda x: x, params)
        for layer in (1, 3):
            changed["layers"][layer]["down"]["bias"] = changed["layers"][layer]["down"]["bias"].replace(bias)
        return square(run(changed, X))

    return jax.hessian(loss)(params["layers"][1]["down"]["bias"][...])


def computed_again(run: Callable[..., Any], params: Any) -> Any:
    return jax.value_and_grad(lambda params: square(jax.checkpoint(run)(params, X)))(params)


TRANSFORMS = [
    (of_examples, 2e-6),
    (gradient_of_a_gradient, SECOND),
    (hessian_times_vector, SECOND),
    wide(mapped, 2e-6),
    wide(pushed_forward, 2e-6),
    wide(hessian_of_a_bias, SECOND),
    wide(computed_again, 2e-6),
]


@pytest.mark.parametrize(("transform", "tolerance"), TRANSFORMS, ids=lambda x: getattr(x, "__name__", ""))
def test_transforms(transform, tolerance):
    assert_same(of_function(transform), tower, tolerance)


def forward(model: nnx.Module) -> jax.Array:
    return nnx.jit(lambda model, x: model(x))(model, X)


def without_jit(model: nnx.Module) -> Any:
    return nnx.value_and_grad(plain_loss)(model, *EXAMPLES)


def with_respect_to_the_input(model: nnx.Module) -> Any:
    return nnx.jit(nnx.grad(lambda model, x: square(model(x)), argnums=1))(model, X)


def twice(model: nnx.Module) -> Any:
    """Calls of two batch sizes, and a loss that compares all examples with each other."""

    def loss(model: nnx.Module) -> jax.Array:
        one, other = model(X).mean(1), model(np.concatenate([Y, X])).mean(1)
        return -jnp.diag(jax.nn.log_softmax(one @ other.T)).mean()

    return nnx.jit(nnx.value_and_grad(loss))(model)


@pytest.mark.parametrize("run", [twice, wide(without_jit), wide(forward), wide(with_respect_to_the_input)])
def test_calls(run):
    assert_same(run, tower)


@pytest.mark.parametrize("num_examples", [BATCH - 1, wide(1)])
def test_a_batch_that_does_not_divide(num_examples):
    run = nnx.jit(lambda model, x: model(x))
    wanted = on_host(run(tower(), X[:num_examples]))
    results = on_host(run(staged(tower()), X[:num_examples]))
    assert max(apart(results, wanted).values()) <= 2e-6


# ---- numbers that are none


def test_an_example_without_numbers_leaves_the_others_as_they_are():
    x = X.copy()
    x[3] = np.nan

    def loss(model: nnx.Module) -> jax.Array:
        y = model(jnp.where(jnp.isnan(x), 0.0, x))
        return jnp.where(jnp.arange(BATCH)[:, None, None] == 3, 0.0, y**2).mean()

    def run(model: nnx.Module) -> Any:
        y = nnx.jit(lambda model, x: model(x))(model, x)
        is_one = jnp.isnan(y).all((1, 2))
        return jnp.where(jnp.isnan(y), 7.0, y), is_one, nnx.jit(nnx.value_and_grad(loss))(model)

    assert_same(run, tower)


# ---- effects


class Prints(Layer):
    """A layer that prints, whatever it reads."""

    def __call__(self, x: jax.Array) -> jax.Array:
        jax.debug.print("a layer")
        return super().__call__(x)


class Sends(Layer):
    """A layer that sends a number of its own to the host."""

    def __call__(self, x: jax.Array) -> jax.Array:
        io_callback(lambda x: None, None, self.up.bias[0])
        return super().__call__(x)


@pytest.mark.parametrize("make", [Prints, Sends])
def test_effects_of_a_layer_are_refused(make):
    model = staged(Layered(nnx.Rngs(0), in_scan_layers, make), make)
    with pytest.raises(CallError, match="A layer on pipeline stages has an effect") as refusal:
        jax.eval_shape(lambda model, x: model(x), model, X)
    assert "test_stages_transforms.py" in str(refusal.value)


class CallsNumpy(Layer):
    """A layer that computes with NumPy."""

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
        return super().__call__(x) + y


def test_a_callback_in_a_layer_is_refused():
    model = staged(Layered(nnx.Rngs(0), in_scan_layers, CallsNumpy), CallsNumpy)
    with pytest.raises(FourPartError, match="combines the examples"):
        jax.eval_shape(nnx.value_and_grad(plain_loss), model, *EXAMPLES)


def test_outside_of_the_layers_effects_happen_once():
    seen = []

    def run(model: Layered, x: jax.Array) -> jax.Array:
        x = js.scan_layers(model.layers, x)
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
        return x

    model = staged(Layered(nnx.Rngs(0), run))
    y = nnx.jit(lambda model, x: model(x))(model, X)
    jax.effects_barrier()
    np.testing.assert_allclose(seen, [float(y.sum())], rtol=1e-4)
