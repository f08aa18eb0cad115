"""Models whose layers run on pipeline stages, each in its own form, beside the same model on one device."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard as js
from jshard.plans.stages import Stages
from jshard.plans.units import attach, unit_of
from tests.engine.one_device import assert_equal, nnx_results
from tests.helpers import fresh, with_placement

WIDTH, LAYERS, BATCH, LENGTH = 16, 4, 8, 6
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
Y = RANDOM.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
# Every other weight is nearly nothing: a mean of the means of microbatches would show.
WEIGHT = np.where(np.arange(BATCH) < BATCH // 2, 0.01, 1.0).astype(np.float32)
SHARD_ALL = js.PlacementPolicy(min_size=1)


class Layer(nnx.Module):
    """A residual layer; `extra` is added inside."""

    def __init__(self, rngs: nnx.Rngs, hidden: int = 2 * WIDTH) -> None:
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, extra: jax.Array | float = 0.0) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x) + extra))


class Tower(nnx.Module):
    """Layers in `js.scan_layers`, between two matrices of their own."""

    def __init__(self, rngs: nnx.Rngs, make: Callable[[nnx.Rngs], nnx.Module] = Layer, layers: int = LAYERS) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([make(rngs) for _ in range(layers)])
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(js.scan_layers(self.layers, self.first(x)))


def weighted_loss(model: Callable[..., Any], x: jax.Array, y: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    """A mean weighted by examples, of what a model gives, or of its first result; the others beside it."""
    out = model(x)
    out, extra = out if isinstance(out, tuple) else (out, None)
    error = ((out - y) ** 2).mean((1, 2))
    return (weight * error).sum() / weight.sum(), extra


def staged_mesh(**degrees: int) -> Any:
    """A mesh of as many devices as its degrees say."""
    degrees = {"pipe": 2, "fsdp": 2} | degrees
    count = int(np.prod(list(degrees.values())))
    return js.mesh(**degrees, devices=jax.devices()[:count])


def staged(model: Any, units: Any, stages: Stages | None = None, mesh: Any = None, **settings: Any) -> Any:
    """The model on stages: its units and their settings, and those of the loop."""
    model = js.fully_shard(model, units=units, mesh=mesh or staged_mesh(), **with_placement(**settings))
    return with_stages(model, stages)


def with_stages(model: Any, stages: Stages | None) -> Any:
    """The annotated model with other settings of its loops."""
    if stages is not None:
        unit = unit_of(model)
        unit = dataclasses.replace(unit, policy=dataclasses.replace(unit.policy, stages=stages))
        attach(model, unit, type(model)._jshard_route)
    return model


def assert_parity(
    build: Callable[[], nnx.Module],
    units: Any = Layer,
    *,
    loss: Callable = weighted_loss,
    batch: tuple = (X, Y, WEIGHT),
    tolerance: float = 2e-6,
    **how: Any,
) -> Any:
    """One step's loss, results, changed state and gradients are those of one device."""
    wanted = nnx_results(fresh(build), loss, *batch)
    model = staged(fresh(build), units, **how)
    found = nnx_results(model, loss, *batch)
    assert_equal(found, wanted, tolerance)
    return model
