"""Derivatives beyond the first equal one device: forward mode, second and third order, under each setting."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js

WIDTH = 16
ROWS = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
DIRECTION = np.sin(np.arange(ROWS.size, dtype=np.float32)).reshape(ROWS.shape)


class Block(nnx.Module):
    """A layer with two matrices of different shapes."""

    def __init__(self, rngs: nnx.Rngs, hidden: int = 24) -> None:
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    """Layers in a list, between parameters of the root."""

    def __init__(self, rngs: nnx.Rngs, function: Callable = jnp.sin, hidden: int = 24) -> None:
        self.blocks = nnx.List([Block(rngs, hidden) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.function = function

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.function(self.head(x))


class Stacked(nnx.Module):
    """Layers in a stack, run by a scan."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.blocks = make(rngs)
        self.head = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(self.head(js.scan_layers(lambda block, x: block(x), self.blocks, x)))


# ---- derivatives of a function of parameters and rows

Function = Callable[[Any, jax.Array], jax.Array]


def _loss(f: Function, params: Any, x: jax.Array) -> jax.Array:
    return (f(params, x) ** 2).mean()


def forward(f: Function, params: Any, x: jax.Array) -> Any:
    """The tangent of the result, of parameters and rows."""
    return jax.jvp(f, (params, x), (params, DIRECTION))


def linearized(f: Function, params: Any, x: jax.Array) -> Any:
    return jax.linearize(lambda p: f(p, x), params)[1](params)


def penalty(f: Function, params: Any, x: jax.Array) -> Any:
    """The gradient of the norm of a gradient."""
    return jax.grad(lambda p: (jax.grad(lambda x: _loss(f, p, x))(x) ** 2).sum())(params)


def forces(f: Function, params: Any, x: jax.Array) -> Any:
    """The gradient of a loss on an energy and its gradient."""
    return jax.grad(lambda p: sum((y**2).sum() for y in jax.value_and_grad(functools.partial(_loss, f, p))(x)))(params)


def hessian_product(f: Function, params: Any, x: jax.Array) -> Any:
    """Forward over reverse."""
    return jax.jvp(jax.grad(lambda p: _loss(f, p, x)), (params,), (params,))[1]


def hessian_product_by_reverse(f: Function, params: Any, x: jax.Array) -> Any:
    def product(p: Any) -> jax.Array:
        gradient = jax.grad(lambda p: _loss(f, p, x))(p)
        return sum(jnp.vdot(g, q) for g, q in zip(jax.tree.leaves(gradient), jax.tree.leaves(params), strict=True))

    return jax.grad(product)(params)


def mean_flow(f: Function, params: Any, x: jax.Array) -> Any:
    """The gradient of a loss that holds a forward derivative, as of consistency models."""

    def loss(p: Any) -> jax.Array:
        y, dy = jax.jvp(lambda x: f(p, x), (x,), (DIRECTION,))
        return ((y + dy) ** 2).mean() + ((y - jax.lax.stop_gradient(y - dy)) ** 2).mean()

    return jax.value_and_grad(loss)(params)


def jacobian(f: Function, params: Any, x: jax.Array) -> Any:
    """Of a few numbers of the result by a few of the rows, in both modes."""
    few = lambda z: f(params, x.at[0, :3].set(z))[0, :4]
    return jax.jacfwd(few)(x[0, :3]), jax.jacrev(few)(x[0, :3]), jax.hessian(lambda z: few(z).sum())(x[0, :3])


def third(f: Function, params: Any, x: jax.Array) -> Any:
    """A third derivative along a line of rows, and its gradient."""
    along = lambda p, t: f(p, x + t * DIRECTION).sum()
    derivative = jax.grad(jax.grad(jax.grad(along, argnums=1), argnums=1), argnums=1)
    return jax.value_and_grad(lambda p: derivative(p, jnp.float32(0.1)))(params)


DERIVATIVES = {
    one.__name__: one
    for one in (
        forward,
        linearized,
        penalty,
        forces,
        hessian_product,
        hessian_product_by_reverse,
        mean_flow,
        jacobian,
        third,
    )
}


def function_of(model: nnx.Module) -> tuple[Function, Any]:
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params, x: nnx.merge(graph, params, rest, copy=True)(x), params


def worst(ours: Any, wanted: Any) -> float:
    """The largest difference, in units of the largest number of any leaf."""
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True))
    scale = max(float(np.abs(np.asarray(b)).max(initial=0)) for _, b in pairs)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max(initial=0)) for a, b in pairs) / scale


def check(build: Callable[[], nnx.Module], annotate: Callable[[Any], Any], names: Any = DERIVATIVES, tol: float = 2e-5):
    """Asserts that derivatives of an annotated model are those of a plain one; all in one program."""

    def run(params: Any, x: jax.Array, *, f: Function) -> dict[str, Any]:
        return {name: DERIVATIVES[name](f, params, x) for name in names}

    f, params = function_of(build())
    wanted = jax.jit(functools.partial(run, f=f))(params, ROWS)
    model = js.shard_init(build, annotate)
    with js.without_update() if hasattr(js, "without_update") else jax.default_matmul_precision("float32"):
        f, params = function_of(model)
        got = jax.jit(functools.partial(run, f=f))(params, ROWS)
    differences = {name: worst(_logical(got[name]), wanted[name]) for name in names}
    assert not {name: d for name, d in differences.items() if not d <= tol}, differences


def _logical(tree: Any) -> Any:
    return tree


SMALL = js.ShardPlacement(min_size=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "as by default": {},
    "parameters kept": {"reshard_after_forward": False},
    "pieces kept": {"reshard_after_forward": 2},
    "on demand": {"prefetch": 0},
    "by the compiler": {"prefetch": None},
    "recomputed": {"remat": "full"},
}


def annotator(axes: dict[str, int] | None = None, units: Any = Block, **settings: Any) -> Callable[[Any], Any]:
    mesh = js.mesh(**axes) if axes else js.mesh()
    return lambda model: js.fully_shard(model, units=units, mesh=mesh, placement=SMALL, **settings)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_derivative_equals_one_device_under_each_setting(name):
    check(lambda: Net(nnx.Rngs(0)), annotator(**SETTINGS[name]))


@pytest.mark.parametrize(
    "axes", [{"replica": 2, "fsdp": 4}, {"replica": 8, "fsdp": 1}, {"fsdp": 4, "tensor": 2}], ids=str
)
def test_each_derivative_equals_one_device_on_each_mesh(axes):
    check(lambda: Net(nnx.Rngs(0)), annotator(axes))


def test_each_derivative_of_a_model_without_units_equals_one_device():
    check(lambda: Net(nnx.Rngs(0)), annotator(units=None))


def test_each_derivative_of_stacked_layers_equals_one_device():
    check(lambda: Stacked(nnx.Rngs(0)), annotator())
