"""A model of one example under a map is split like a batched one: results, operations, memory and bytes of a device."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jshard as js
from tests import linen_models
from tests.toy_models import ResidualLinear, Tower

WIDTH = 64
ROWS = np.random.default_rng(0).normal(size=(128, WIDTH)).astype(np.float32)
"""The features of one example divide by the number of devices, too: they must not be taken for the batch."""

Function = Callable[[Any, jax.Array], jax.Array]


LINEN = linen_models.Tower(functools.partial(linen_models.Residual, WIDTH, nn.tanh), out_features=1)


def net() -> Tower:
    rngs = nnx.Rngs(0)
    return Tower([ResidualLinear(WIDTH, rngs, jnp.tanh) for _ in range(2)], nnx.Linear(WIDTH, 1, rngs=rngs))


def linen(units: Any) -> tuple[Function, Any]:
    model = js.fully_shard(LINEN, mesh=js.mesh(), units=units and linen_models.Residual)
    params = js.shard_init(lambda: model.init(jax.random.key(0), jnp.zeros(WIDTH))["params"], model)
    return lambda params, x: model.apply({"params": params}, x)[..., 0], params


def of_nnx(units: Any) -> tuple[Function, Any]:
    annotate = lambda model: js.fully_shard(model, mesh=js.mesh(), units=units and ResidualLinear)
    model = js.shard_init(net, annotate)
    graph, params = nnx.split(model)
    return lambda params, x: nnx.merge(graph, params, copy=True)(x)[..., 0], params


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program: its results, and what one device does."""

    results: list[np.ndarray]
    flops: float
    temporary_bytes: int
    amounts: dict[str, float]


def compiled(run: Callable[..., Any], params: Any) -> Compiled:
    x = js.shard_batch(ROWS, mesh=js.mesh())
    program = jax.jit(run).lower(params, x).compile()
    results = [np.asarray(y) for y in jax.tree.leaves(program(params, x))]
    totals = js.audit(program).totals
    return Compiled(
        results,
        program.cost_analysis()["flops"],
        program.memory_analysis().temp_size_in_bytes,
        {total.kind: total.total_bytes for total in totals},
    )


def assert_alike(mapped: Compiled, batched: Compiled) -> None:
    for got, wanted in zip(mapped.results, batched.results, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5)
    assert mapped.flops <= 1.05 * batched.flops
    assert mapped.temporary_bytes <= 1.1 * batched.temporary_bytes + 2**16
    assert mapped.amounts.keys() == batched.amounts.keys()
    assert all(mapped.amounts[kind] <= amount for kind, amount in batched.amounts.items())


def mapped(f: Function, **how: Any) -> Function:
    return jax.vmap(f, in_axes=(None, 0), **how)


def square(f: Function) -> Callable[[Any, jax.Array], jax.Array]:
    return lambda params, x: (f(params, x) ** 2).mean()


BATCHED_AND_MAPPED: dict[str, tuple[Callable[[Function], Callable], Callable[[Function], Callable]]] = {
    "a gradient": (
        lambda f: jax.value_and_grad(square(f)),
        lambda f: jax.value_and_grad(square(mapped(f))),
    ),
    "with the name of a mesh axis": (
        lambda f: jax.value_and_grad(square(f)),
        lambda f: jax.value_and_grad(square(mapped(f, spmd_axis_name="fsdp"))),
    ),
    "a gradient of a gradient by the input": (
        lambda f: jax.grad(square(lambda p, x: jax.grad(lambda x: f(p, x).sum())(x))),
        lambda f: jax.grad(square(mapped(jax.grad(f, argnums=1)))),
    ),
    "a gradient of a second derivative by the input": (
        lambda f: jax.grad(
            square(lambda p, x: jax.jvp(jax.grad(lambda x: f(p, x).sum()), (x,), (jnp.ones_like(x),))[1])
        ),
        lambda f: jax.grad(
            square(mapped(lambda p, z: jax.jvp(jax.grad(lambda z: f(p, z)), (z,), (jnp.ones_like(z),))[1]))
        ),
    ),
}


@pytest.mark.parametrize("build", [linen, of_nnx])
@pytest.mark.parametrize("form", BATCHED_AND_MAPPED)
def test_a_mapped_model_costs_a_device_what_the_batched_one_does(form, build):
    f, params = build(units=True)
    batched_form, mapped_form = BATCHED_AND_MAPPED[form]
    assert_alike(compiled(mapped_form(f), params), compiled(batched_form(f), params))


@pytest.mark.parametrize("build", [linen, of_nnx])
def test_gradients_of_single_examples_stay_with_their_device(build):
    """As of differentially private SGD: each is clipped, then they are summed. No device has those of all examples."""

    def clipped(params: Any, row: jax.Array, f: Function) -> Any:
        gradient = jax.grad(lambda params: f(params, row) ** 2)(params)
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
        return jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), gradient)

    def total(f: Function) -> Callable[[Any, jax.Array], Any]:
        each = lambda params, x: jax.vmap(lambda row: clipped(params, row, f))(x)
        return lambda params, x: jax.tree.map(lambda g: g.mean(0), each(params, x))

    f, params = build(units=True)
    program = compiled(total(f), params)
    plain = jax.tree.map(np.asarray, params)
    with js.global_view():
        wanted = jax.jit(total(f))(plain, ROWS)
    for got, value in zip(program.results, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, value, rtol=2e-4, atol=1e-6)
    param_bytes = sum(p.nbytes for p in jax.tree.leaves(plain))
    of_all_examples = len(ROWS) * param_bytes
    assert program.temporary_bytes < 0.5 * of_all_examples
    assert program.amounts["all-gather"] < 2 * param_bytes  # the parameters, and no gradient of an example


def test_nested_maps_split_the_outermost_or_the_one_that_divides():
    f, params = of_nnx(units=True)
    wanted = compiled(jax.value_and_grad(square(mapped(f))), params)
    for outer in (4, 32):
        nested = lambda p, x, n=outer: mapped(mapped(f))(p, x.reshape(n, -1, WIDTH))
        got = compiled(jax.value_and_grad(square(nested)), params)
        np.testing.assert_allclose(got.results[0], wanted.results[0], rtol=1e-4)
        assert got.flops <= 1.05 * wanted.flops
        assert got.amounts["reduce-scatter"] == wanted.amounts["reduce-scatter"]


def test_a_mapped_model_in_a_scan_equals_one_device():
    f, params = of_nnx(units=True)

    def loss(params: Any, x: jax.Array, f: Function) -> jax.Array:
        chunks = x.reshape(4, -1, WIDTH)
        add = lambda total, rows: (total + (mapped(f)(params, rows) ** 2).mean(), None)
        return jax.lax.scan(add, jnp.float32(0), chunks)[0]

    got = compiled(jax.value_and_grad(lambda p, x: loss(p, x, f)), params)
    batched = compiled(jax.value_and_grad(lambda p, x: 4 * square(f)(p, x)), params)
    for ours, wanted in zip(got.results, batched.results, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-4, atol=2e-5)


class Sampler(nnx.Module):
    """Noise of its own for each example, and statistics over nothing but the example."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = self.dense(x) + jax.random.normal(key, (8,))
        return y - y.mean(), (self.dense.kernel[...] ** 2).sum()


def test_keys_are_mapped_and_results_without_examples_are_not():
    def run(model: Sampler) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(1), 16)
        return jax.vmap(model, in_axes=(0, 0), out_axes=(0, None))(jnp.asarray(ROWS[:16]), keys)

    annotated = js.fully_shard(Sampler(nnx.Rngs(0)), mesh=js.mesh(), placement=js.PlacementPolicy(min_size=1))
    for got, wanted in zip(nnx.jit(run)(annotated), nnx.jit(run)(Sampler(nnx.Rngs(0))), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_an_ensemble_of_parameters_equals_one_device():
    """The parameters are mapped, and the batch is that of each member."""
    f, params = of_nnx(units=True)
    scale = jnp.linspace(0.5, 1.5, 3)

    def run(params: Any, x: jax.Array, f: Function) -> Any:
        members = jax.tree.map(lambda p: p[None] * scale.reshape(3, *[1] * p.ndim), params)
        return jax.vmap(jax.value_and_grad(square(f)), in_axes=(0, None))(members, x)

    got = jax.jit(lambda p, x: run(p, x, f))(params, ROWS)
    graph, plain = nnx.split(net())
    wanted = jax.jit(lambda p, x: run(p, x, lambda p, x: nnx.merge(graph, p, copy=True)(x)[..., 0]))(plain, ROWS)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
