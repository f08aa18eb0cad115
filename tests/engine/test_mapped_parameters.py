"""A map over parameters, as of an ensemble, where units keep gathered copies: results are those of each model alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from tests import linen_models
from tests.engine.test_vmap import LINEN, ROWS, WIDTH, net
from tests.toy_models import ResidualLinear

Loss = Callable[[Any, jax.Array], jax.Array]


def square(call: Callable[[Any, jax.Array], jax.Array]) -> Loss:
    return lambda params, x: jnp.square(call(params, x)).mean()


def of_nnx(reshard: bool | int) -> tuple[Loss, Loss, Any]:
    """The losses of the sharded model and of the plain one, and the parameters of three."""
    annotate = lambda model: js.fully_shard(model, mesh=js.mesh(), units=ResidualLinear, reshard_after_forward=reshard)
    graph, params = nnx.split(js.shard_init(net, annotate))
    plain_graph, _ = nnx.split(net())
    call_with = lambda graph: lambda params, x: nnx.merge(graph, params, copy=True)(x)
    return square(call_with(graph)), square(call_with(plain_graph)), stacked(nnx.to_pure_dict(params))


def linen(reshard: bool | int) -> tuple[Loss, Loss, Any]:
    model = js.fully_shard(LINEN, mesh=js.mesh(), units=linen_models.Residual, reshard_after_forward=reshard)
    params = js.shard_init(lambda: model.init(jax.random.key(0), jnp.zeros(WIDTH))["params"], model)
    call_with = lambda model: lambda params, x: model.apply({"params": params}, x)
    return square(call_with(model)), square(call_with(LINEN)), stacked(params)


def stacked(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), jax.device_get(params))


def looped(loss: Loss) -> Loss:
    def run(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda total, _: (total + loss(params, x + total), None), 0.0, length=2)[0]

    return run


def branched(loss: Loss) -> Loss:
    def run(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 100, lambda: 2 * loss(params, x), lambda: loss(params, x))

    return run


def squared_gradient(loss: Loss) -> Loss:
    def run(params: Any, x: jax.Array) -> jax.Array:
        return sum(jnp.square(g).sum() for g in jax.tree.leaves(jax.grad(loss)(params, x)))

    return run


def of_each_part(loss: Loss) -> Loss:
    parts = lambda x: x.reshape(2, -1, WIDTH)
    return lambda params, x: jax.vmap(loss, in_axes=(None, 0))(params, parts(x)).sum()


def mapped(gradient: Loss) -> Loss:
    return jax.vmap(gradient, in_axes=(0, None))


def kernels_alone(loss: Loss) -> Loss:
    """Each model has kernels of its own; the biases are those of the first."""

    def run(params: Any, x: jax.Array) -> Any:
        axes = jax.tree.map_with_path(lambda path, _: 0 if "kernel" in str(path) else None, params)
        of_all = jax.tree.map_with_path(lambda path, v: v if "kernel" in str(path) else v[0], params)
        return jax.vmap(jax.grad(loss), in_axes=(axes, None))(of_all, x)

    return run


FORMS: dict[str, Callable[[Loss], Loss]] = {
    "gradients": lambda loss: mapped(jax.grad(loss)),
    "gradients of a sum": lambda loss: jax.grad(lambda params, x: mapped(loss)(params, x).sum()),
    "in a loop": lambda loss: mapped(jax.grad(looped(loss))),
    "in a branch": lambda loss: mapped(jax.grad(branched(loss))),
    "rematerialised": lambda loss: mapped(jax.grad(jax.checkpoint(loss))),
    "under a second map": lambda loss: mapped(jax.grad(of_each_part(loss))),
    "gradients of gradients": lambda loss: mapped(jax.grad(squared_gradient(loss))),
    "tangents": lambda loss: mapped(lambda params, x: jax.linearize(lambda p: loss(p, x), params)[1](params)),
    "of some parameters": kernels_alone,
}


@pytest.mark.parametrize("reshard", [False, 2], ids=["kept", "kept in pieces"])
@pytest.mark.parametrize("build", [of_nnx, linen])
@pytest.mark.parametrize("form", FORMS)
def test_of_units_that_keep_gathered_copies(form, build, reshard):
    loss, plain, params = build(reshard)
    results = jax.jit(FORMS[form](loss))(params, jnp.asarray(ROWS))
    expected = jax.jit(FORMS[form](plain))(params, jnp.asarray(ROWS))
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())
