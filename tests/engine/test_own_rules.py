"""Functions with derivatives of their own keep them at every order, inside an annotated model and its units."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js

ROWS = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
DIRECTION = np.cos(np.arange(ROWS.size, dtype=np.float32)).reshape(ROWS.shape)


@jax.custom_jvp
def doubling(x: jax.Array) -> jax.Array:
    """A rule that is not the derivative, and that calls the function: code that loses it gives other numbers."""
    return jnp.sin(x)


@doubling.defjvp
def _(primals: Any, tangents: Any) -> Any:
    y = doubling(primals[0])
    return y, 2 * y * tangents[0]


@jax.custom_vjp
def scaling(x: jax.Array) -> jax.Array:
    return jnp.cos(x)


scaling.defvjp(lambda x: (scaling(x), x), lambda x, ct: (3 * scaling(x) * ct,))


@jax.custom_jvp
def safe_norm(x: jax.Array) -> jax.Array:
    """Has a derivative at zero, where that of the square root is infinite."""
    return jnp.sqrt((x * x).sum(-1))


@safe_norm.defjvp
def _(primals: Any, tangents: Any) -> Any:
    norm = safe_norm(primals[0])
    return norm, (primals[0] * tangents[0]).sum(-1) / jnp.where(norm > 0, norm, 1)


def matrices(y: jax.Array) -> jax.Array:
    factors = 0.3 * y.reshape(-1, 4, 4)
    return jnp.einsum("bij,bkj->bik", factors, factors) + jnp.eye(4)[None]


def linear_solve(a: jax.Array, b: jax.Array) -> jax.Array:
    solve = lambda matvec, b: jnp.linalg.solve(a, b)
    return jax.lax.custom_linear_solve(lambda x: a @ x, b, solve, transpose_solve=solve, symmetric=True)


def root(a: jax.Array, b: jax.Array) -> jax.Array:
    """Where tanh(z) + a z = b: the derivative is that of the equation, whatever finds the root."""

    def solve(f: Callable, start: jax.Array) -> jax.Array:
        step = lambda _, z: z - f(z) / 3
        return jax.lax.fori_loop(0, 20, step, start)

    def tangent_solve(g: Callable, y: jax.Array) -> jax.Array:
        return y / g(jnp.ones_like(y))

    scale = 1 + a.mean() ** 2
    return jax.lax.custom_root(lambda z: jnp.tanh(z) + scale * z - b, jnp.zeros_like(b), solve, tangent_solve)


def fixed_point(a: jax.Array, b: jax.Array) -> jax.Array:
    """An implicit layer: its backward solves a linear system by conjugate gradients."""
    return jax.scipy.sparse.linalg.cg(lambda x: a @ x + 0.1 * x, b, maxiter=8)[0]


FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "custom_jvp": doubling,
    "custom_vjp": scaling,
    "safe norm at zero": lambda y: safe_norm((y - y[:, :1]).reshape(-1, 16, 1))[..., None],
    "custom_linear_solve": lambda y: jax.vmap(linear_solve)(matrices(y), y[:, :4]),
    "custom_root": lambda y: jax.vmap(root)(y[:, :4], y[:, 4:8]),
    "conjugate gradients": lambda y: jax.vmap(fixed_point)(matrices(y), y[:, :4]),
    "cholesky": lambda y: jax.vmap(lambda a, b: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), b))(
        matrices(y), y[:, :4]
    ),
}
WITHOUT_FORWARD_MODE = ("custom_vjp",)
PLACEMENT = js.PlacementPolicy(min_size=1, allow_replicated=["shift"])


class AppliesItsFunction(nnx.Module):
    def __init__(self, function: Callable[[jax.Array], jax.Array]) -> None:
        self.dense = nnx.Linear(4, 16, rngs=nnx.Rngs(0))
        self.function = function

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(self.dense(x))


class ShiftsBeforeIt(nnx.Module):
    def __init__(self, function: Callable[[jax.Array], jax.Array]) -> None:
        self.layer = AppliesItsFunction(function)
        self.shift = nnx.Param(0.1 * jnp.ones((1, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x + self.shift[...])


def derivatives(model: ShiftsBeforeIt, x: jax.Array, *, has_forward_mode: bool) -> dict[str, Any]:
    graph, params = nnx.split(model)
    along = lambda params, t: (nnx.merge(graph, params, copy=True)(x + t * DIRECTION) ** 3).sum()
    loss = lambda params: along(params, 0.0)
    first = jax.grad(along, argnums=1)
    second = jax.grad(first, argnums=1)
    results = {
        "gradient": jax.grad(loss)(params),
        "gradient of a derivative": jax.grad(lambda params: first(params, 0.0))(params),
        "gradient of a second derivative": jax.grad(lambda params: second(params, 0.0))(params),
    }
    if has_forward_mode:
        results["forward over reverse"] = jax.jvp(jax.grad(loss), (params,), (params,))[1]
        results["forward"] = jax.jvp(loss, (params,), (params,))[1]
    return results


@pytest.mark.parametrize("units", [None, AppliesItsFunction], ids=["no units", "units"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rule_is_followed_to_third_order_in_both_modes(name, units):
    function = FUNCTIONS[name]
    run = functools.partial(derivatives, has_forward_mode=name not in WITHOUT_FORWARD_MODE)
    wanted = nnx.jit(run)(ShiftsBeforeIt(function), ROWS)
    model = js.fully_shard(ShiftsBeforeIt(function), mesh=js.mesh(), units=units, placement=PLACEMENT)
    got = nnx.jit(run)(model, ROWS)
    for order, tree in wanted.items():
        leaves = list(zip(jax.tree.leaves(got[order]), jax.tree.leaves(tree), strict=True))
        scale = max(float(np.abs(b).max()) for _, b in leaves)
        for ours, theirs in leaves:
            assert np.isfinite(np.asarray(theirs)).all()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4 * scale, err_msg=order)


def test_what_has_no_forward_mode_says_so_as_without_jshard():
    model = js.fully_shard(ShiftsBeforeIt(scaling), mesh=js.mesh(), units=AppliesItsFunction, placement=PLACEMENT)

    def forward(model: ShiftsBeforeIt) -> jax.Array:
        return jax.jvp(model, (ROWS,), (DIRECTION,))[1]

    with pytest.raises(TypeError, match="forward-mode autodiff"):
        forward(ShiftsBeforeIt(scaling))
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        nnx.jit(forward)(model)
