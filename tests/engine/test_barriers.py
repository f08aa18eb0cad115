"""What a barrier ties, and what stands for values that stay outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jshard as js
from jshard.engine.schedule import unit_schedule
from jshard.engine.schedule.barriers import available_after
from tests.helpers import Block, Config, Decoder, Scanning, equations_and_trips, loss_fn, token_batch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("value", [0, 1, np.nan, -np.inf])
def test_what_is_held_back_keeps_its_values(dtype, value):
    is_whole = jnp.dtype(dtype).kind in "ib"
    inputs = [jnp.full((4, 6), 0 if is_whole else value, dtype), jax.random.key(0), jnp.zeros((0, 3))]
    groups = {"a": jnp.arange(6.0), "b": jnp.array([np.nan, -0.0, np.inf])}, [jnp.arange(4, dtype="int8")]
    held_back = jax.jit(available_after)(inputs, *groups)
    jax.tree.map(np.testing.assert_array_equal, held_back, groups)


def test_inputs_stay_outside_and_one_output_depends_on_them():
    inputs, groups = jnp.ones((8, 16)), [jnp.ones(4), jnp.ones(2)]
    jaxpr = jax.make_jaxpr(available_after)(inputs, groups).jaxpr
    (barrier,) = (eqn for eqn in jaxpr.eqns if eqn.primitive is lax.optimization_barrier_p)
    assert [atom.aval.shape for atom in barrier.invars] == [(), (4,), (2,)]
    assert jaxpr.outvars[0] is barrier.outvars[1]
    assert jaxpr.outvars[1] is not barrier.outvars[2]  # the smaller one
    used = {atom for eqn, _ in equations_and_trips(jaxpr) for atom in eqn.invars if not hasattr(atom, "val")}
    assert barrier.outvars[0] in used


def test_derivatives_and_maps_pass():
    def held(x, w):
        (w,) = available_after(x, w)
        return (w**3).sum()

    x, w = jnp.ones((4, 3)), jnp.arange(1.0, 4)
    assert np.allclose(jax.grad(held, argnums=1)(x, w), 3 * w**2)
    assert np.allclose(jax.hessian(held, argnums=1)(x, w), np.diag(6 * w))
    assert np.allclose(jax.vmap(held, (0, None))(x, w), np.full(4, (w**3).sum()))
    assert np.allclose(jax.grad(held)(x, w), 0)


@pytest.mark.parametrize("inputs", [[], [jnp.zeros((0,))]])
def test_without_inputs_the_groups_are_tied(inputs):
    (numbers,), _ = available_after(inputs, [jnp.arange(3.0)], [jnp.zeros((0,))])
    assert np.array_equal(numbers, np.arange(3.0))


@pytest.mark.parametrize("form", [Decoder, Scanning])
@pytest.mark.parametrize("settings", [{"remat": "none"}, {"remat": "full", "prefetch": 2}, {"prefetch": 0}])
def test_an_element_in_place_of_inputs_changes_no_gradient(form, settings, monkeypatch):
    config = Config(layers=4, attends=False)
    batch = token_batch(config, batch=16, length=8)

    def gradients(*, fuses_units: bool) -> list[np.ndarray]:
        monkeypatch.setattr(unit_schedule, "fuses_units", lambda mesh: fuses_units)
        model = js.fully_shard(form(config, nnx.Rngs(0)), units=Block, mesh=js.mesh(), **settings)
        return jax.tree.leaves(nnx.jit(nnx.grad(loss_fn))(model, *batch))

    for gradient, expected in zip(gradients(fuses_units=True), gradients(fuses_units=False), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
