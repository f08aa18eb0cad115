"""Derivatives beyond the first equal one device: forward mode, second and third order, under each setting."""

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jshard as js
from jshard.engine.region_call import RegionCall
from tests import linen_models
from tests.toy_models import Residual, ScannedTower, Tower
from tests.wide import slow, wide

WIDTH = 16
ROWS = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
DIRECTION = np.sin(np.arange(ROWS.size, dtype=np.float32)).reshape(ROWS.shape)


def block(rngs: nnx.Rngs) -> Residual:
    """Two matrices of different shapes."""
    return Residual(WIDTH, 24, rngs, jnp.tanh)


def head(rngs: nnx.Rngs) -> nnx.Sequential:
    """Parameters of the root, and an operation of its own."""
    return nnx.Sequential(nnx.Linear(WIDTH, 8, rngs=rngs), jnp.sin)


def net() -> Tower:
    rngs = nnx.Rngs(0)
    return Tower([block(rngs) for _ in range(2)], head(rngs))


def scanned_net() -> ScannedTower:
    rngs = nnx.Rngs(0)
    return ScannedTower(block, 3, head(rngs), rngs)


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


FEW = ("penalty", "hessian_product", "mean_flow")
"""Reverse over reverse, forward over reverse, and reverse over forward."""


def check(
    build: Callable[[], nnx.Module], annotate: Callable[[Any], Any], names: Iterable[str], *, tolerance: float = 2e-5
) -> None:
    """Asserts that derivatives of an annotated model are those of a plain one; all in one program."""

    def run(params: Any, x: jax.Array, *, f: Function) -> dict[str, Any]:
        return {name: DERIVATIVES[name](f, params, x) for name in names}

    f, params = function_of(build())
    wanted = jax.jit(functools.partial(run, f=f))(params, ROWS)
    f, params = function_of(js.shard_init(build, annotate))
    got = jax.jit(functools.partial(run, f=f))(params, ROWS)
    differences = {name: worst(got[name], wanted[name]) for name in wanted}
    assert not {name: d for name, d in differences.items() if not d <= tolerance}, differences


SMALL = js.PlacementPolicy(min_size=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "parameters kept": {"reshard_after_forward": False},
    "pieces kept": {"reshard_after_forward": 2},
    "on demand": {"prefetch": 0},
    "by the compiler": {"prefetch": "compiler"},
    "recomputed": {"remat": "full"},
}
MESHES = {"2x4": {"replica": 2, "fsdp": 4}, "8x1": {"replica": 8, "fsdp": 1}, "4x1x2": {"fsdp": 4, "tensor": 2}}


def annotator(axes: dict[str, int] | None = None, units: Any = Residual, **settings: Any) -> Callable[[Any], Any]:
    mesh = js.mesh(**(axes or {}))
    return lambda model: js.fully_shard(model, units=units, mesh=mesh, placement=SMALL, **settings)


def test_each_derivative_equals_one_device():
    check(net, annotator(), DERIVATIVES)


@pytest.mark.parametrize("name", SETTINGS)
def test_second_derivatives_equal_one_device_under_each_setting(name):
    check(net, annotator(**SETTINGS[name]), FEW)


@pytest.mark.parametrize("name", MESHES)
def test_second_derivatives_equal_one_device_on_each_mesh(name):
    check(net, annotator(MESHES[name]), FEW)


PRODUCT = [(mesh, name) for mesh in MESHES for name in SETTINGS]
WIDE = [("2x4", "recomputed"), ("4x1x2", "pieces kept")]


@pytest.mark.parametrize(("mesh", "settings"), [wide(*case) if case in WIDE else slow(*case) for case in PRODUCT])
def test_each_derivative_equals_one_device_under_each_setting_on_each_mesh(mesh, settings):
    if MESHES[mesh]["fsdp"] == 1 and SETTINGS[settings].get("reshard_after_forward") == 2:
        pytest.skip("one device holds each parameter whole: no group of two keeps a piece")
    check(net, annotator(MESHES[mesh], **SETTINGS[settings]), DERIVATIVES)


def test_derivatives_without_units_and_of_one_device_equal():
    check(net, annotator(units=None), FEW)
    one = js.mesh(fsdp=1, devices=jax.devices()[:1])
    check(net, lambda model: js.fully_shard(model, units=Residual, mesh=one), FEW)


def test_second_derivatives_of_stacked_layers_equal_one_device():
    check(scanned_net, stacked, FEW)


def stacked(model: ScannedTower) -> None:
    mesh = js.mesh()
    js.fully_shard(model.blocks, mesh=mesh, placement=js.PlacementPolicy(min_size=1, stacked=1))
    js.fully_shard(model, mesh=mesh, placement=SMALL)


def test_derivatives_of_parameters_in_16_bits_have_their_dtypes_and_are_near():
    policy = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", output_dtype="float32")
    check(net, annotator(mixed_precision=policy), FEW, tolerance=0.1)


# ---- gradients that a model takes of itself


class Potential(nnx.Module):
    """An energy of blocks and its forces."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.block = block(rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda x: (self.block(x) ** 2).sum())(x)


class LinenPotential(nn.Module):
    def setup(self) -> None:
        self.block = linen_models.Residual(24, nn.tanh)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda x: (self.block(x) ** 2).sum())(x)


def _of_energy_and_forces(results: tuple[jax.Array, jax.Array]) -> jax.Array:
    energy, forces = results
    return energy + (forces**2).sum()


@pytest.mark.parametrize("units", [None, Residual], ids=["no units", "units"])
def test_a_gradient_inside_the_model_is_trained_through(units):
    def run(model: Potential) -> Any:
        return nnx.value_and_grad(lambda model: _of_energy_and_forces(model(ROWS)))(model)

    model = js.shard_init(lambda: Potential(nnx.Rngs(0)), annotator(units=units))
    assert worst(nnx.jit(run)(model), nnx.jit(run)(Potential(nnx.Rngs(0)))) <= 2e-5


@pytest.mark.parametrize("units", [None, linen_models.Residual], ids=["no units", "units"])
def test_a_gradient_inside_a_linen_model_is_trained_through(units):
    plain = LinenPotential()
    params = plain.init(jax.random.key(0), ROWS)["params"]
    model = js.fully_shard(plain, mesh=js.mesh(), units=units, placement=SMALL)
    placed = js.shard_init(lambda: model.init(jax.random.key(0), ROWS)["params"], model)

    def run(params: Any, *, model: nn.Module) -> Any:
        return jax.value_and_grad(lambda params: _of_energy_and_forces(model.apply({"params": params}, ROWS)))(params)

    wanted = jax.jit(functools.partial(run, model=plain))(params)
    assert worst(jax.jit(functools.partial(run, model=model))(placed), wanted) <= 2e-5


# ---- what forward mode alone has


class Loop(nnx.Module):
    """A loop whose length is not known: it has no reverse mode."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.block = block(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        length = jnp.int32(3 + (x[0, 0] > 9))
        return jax.lax.while_loop(lambda c: c[0] < length, lambda c: (c[0] + 1, self.block(c[1])), (0, x))[1]


@pytest.mark.parametrize("units", [None, Residual], ids=["no units", "units"])
def test_a_loop_of_unknown_length_has_forward_mode_and_no_other(units):
    wanted_f, wanted_params = function_of(Loop(nnx.Rngs(0)))
    f, params = function_of(js.shard_init(lambda: Loop(nnx.Rngs(0)), annotator(units=units)))
    wanted = jax.jit(lambda p: forward(wanted_f, p, ROWS))(wanted_params)
    assert worst(jax.jit(lambda p: forward(f, p, ROWS))(params), wanted) <= 2e-5
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda p: f(p, ROWS).sum())(params)


# ---- nothing outlives its trace


class Random(nnx.Module):
    """Layers that change their state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.dropout(self.dense(x)))


def test_no_tracer_of_a_unit_outlives_its_trace():
    build = lambda: nnx.Sequential(Random(nnx.Rngs(0)), Random(nnx.Rngs(1)))
    model = js.shard_init(build, lambda model: js.fully_shard(model, units=Random, mesh=js.mesh()))
    step = nnx.jit(lambda model: nnx.value_and_grad(lambda model: (model(jnp.asarray(ROWS)) ** 2).mean())(model)[0])
    with jax.checking_leaks():
        assert np.isfinite(float(step(model)))


def test_no_program_outlives_the_function_that_was_traced():
    """JAX's caches would keep the latest thousands of them."""
    model = js.shard_init(net, annotator())
    f, params = function_of(model)

    def number_of_calls() -> int:
        gc.collect()
        return sum(isinstance(x, RegionCall) for x in gc.get_objects())

    before = number_of_calls()
    for _ in range(3):
        jax.jit(lambda params: penalty(f, params, ROWS)).lower(params)
    assert number_of_calls() <= before
