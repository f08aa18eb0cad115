"""Layers in the forms in which they run on pipeline stages, and one step of a model of them beside one device."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jshard as js
from jshard.engine.stages import region_partitioner
from tests.engine.one_device import apart, nnx_results, on_host, worst_of
from tests.helpers import fresh, with_placement

WIDTH, LAYERS, BATCH, LENGTH = 16, 4, 8, 6
TOLERANCE = 2e-6  # of the largest element of an array
_RANDOM = np.random.default_rng(0)
X, Y = (_RANDOM.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32) for _ in range(2))
# Half of the weights are nearly nothing: a mean of the means of microbatches would show.
WEIGHT = np.where(np.arange(BATCH) < BATCH // 2, 0.01, 1.0).astype(np.float32)
EXAMPLES = (X, Y, WEIGHT)
Loss = Callable[..., Any]
Build = Callable[[], Any]


# ---- layers


class Layer(nnx.Module):
    """A residual layer; `extra` is added inside."""

    def __init__(self, rngs: nnx.Rngs, hidden: int = 2 * WIDTH) -> None:
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, extra: jax.Array | float = 0.0) -> Any:
        return x + self.down(jnp.tanh(self.up(x) + extra))


class Rich(nnx.Module):
    """A layer with all that is hard, and right: dropout, state, branches, loops, and arguments of every kind."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.direction = nnx.BatchStat(jnp.ones(WIDTH) / 4)  # of the weights alone, as for a spectral norm
        self.load = nnx.BatchStat(jnp.zeros(WIDTH))  # a mean over all examples, which the layer does not read

    def __call__(
        self,
        carry: dict[str, jax.Array],
        rows: dict[str, jax.Array],
        mask: jax.Array,
        times: jax.Array,
        bias: jax.Array,
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        self._follow_weights()
        x = carry["x"]
        h = x * mask[..., None] + rows["cache"] + bias + jnp.sin(times)[:, None]
        h = jnp.einsum("ts,bsd->btd", _within(times, rows["window"]), h)
        h = self.down(self.dropout(nnx.gelu(self.up(h))))
        h = lax.cond(rows["flag"], lambda h: 2 * h, jnp.sin, h)
        h = h + _smoothed(h)
        h = lax.fori_loop(0, 3, lambda i, h: h * 0.9 + 0.01 * i, h)
        self.load[...] = 0.9 * self.load[...] + 0.1 * lax.stop_gradient(h).mean((0, 1))
        x = x + h
        is_large = (x > 3).any((1, 2))
        carry = {"x": x, "depth": carry["depth"] + 1, "was_large": carry["was_large"] | is_large}
        return carry, {"kv": h, "of_example": (h**2).mean((1, 2)), "sum": h.sum((0, 1)), "depth": carry["depth"]}

    def _follow_weights(self) -> None:
        self.calls[...] += 1
        kernel = self.up.kernel[...]
        direction = kernel @ (kernel.T @ self.direction[...])
        self.direction[...] = direction / jnp.linalg.norm(direction)


def _within(times: jax.Array, window: jax.Array) -> jax.Array:
    """Weights of a mean over the neighbours in a window, which differs by layer."""
    weights = jnp.abs(times[:, None] - times[None]) <= window
    return weights / weights.sum(-1, keepdims=True)


def _smoothed(h: jax.Array) -> jax.Array:
    """What a recurrence over time makes of it."""

    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(0.5 * state + x)
        return state, state

    _, states = lax.scan(step, jnp.zeros_like(h[:, 0]), jnp.moveaxis(h, 1, 0))
    return jnp.moveaxis(states, 0, 1)


# ---- models


class Layered(nnx.Module):
    """Layers, a matrix of the root, and a function of all of this and the input."""

    def __init__(
        self, rngs: nnx.Rngs, run: Callable[..., Any], make: Callable[..., Any] = Layer, layers: int = LAYERS
    ) -> None:
        self.layers = nnx.List([make(rngs) for _ in range(layers)])
        self.matrix = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 4)
        self.run = run

    def __call__(self, x: jax.Array) -> Any:
        return self.run(self, x)


def in_scan_layers(model: Layered, x: jax.Array) -> jax.Array:
    """The layers between two products with the matrix."""
    x = js.scan_layers(model.layers, x @ model.matrix[...])
    return x @ model.matrix[...]


def rich(model: Layered, x: jax.Array) -> tuple[jax.Array, Any]:
    """Layers of `Rich`, and a product of their sums over the batch outside of the loop."""
    carry = {"x": x, "depth": jnp.zeros((), jnp.int32), "was_large": jnp.zeros(x.shape[0], bool)}
    numbers = jnp.arange(LAYERS)
    rows = {"cache": numbers[:, None, None, None] * x, "window": numbers, "flag": numbers % 2 == 0}
    mask = (x.sum(-1) > -3).astype(jnp.float32)
    times = jnp.arange(LENGTH, dtype=jnp.float32)
    carry, outs = js.scan_layers(model.layers, carry, mask, times, model.matrix[0], xs=rows, collect=True)
    balance = ((outs["sum"] / x.shape[0]) ** 2).mean()
    y = carry["x"] + outs["kv"].sum(0) + outs["of_example"].mean() + balance
    return y, (carry["depth"], carry["was_large"], outs)


def stacked(make: Callable[[nnx.Rngs], Any], rngs: nnx.Rngs, layers: int = LAYERS) -> Any:
    """Layers as one module, each variable of which has a row for each."""
    return nnx.split_rngs(splits=layers)(nnx.vmap(make))(rngs)


# ---- losses


def weighted_loss(model: Callable[..., Any], x: jax.Array, y: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    """A mean weighted by examples, of what a model gives, or of its first result; the others beside it."""
    results = model(x)
    out, extra = results if isinstance(results, tuple) else (results, None)
    error = ((out - y) ** 2).mean((1, 2))
    return (weight * error).sum() / weight.sum(), extra


def plain_loss(model: Callable[..., Any], x: jax.Array, y: jax.Array, weight: jax.Array) -> jax.Array:
    """The same, alone."""
    return weighted_loss(model, x, y, weight)[0]


# ---- on stages


def staged_mesh(**degrees: int) -> Any:
    """A mesh of as many devices as its degrees say: `pipe=2, fsdp=2`, unless they are others."""
    degrees = {"pipe": 2, "fsdp": 2} | degrees
    return js.mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])


def staged(
    model: Any,
    units: Any = Layer,
    *,
    degrees: dict[str, int] | None = None,
    stages: dict | None = None,
    **settings: Any,
) -> Any:
    """The annotated model: parameters of any size are sharded, as far as its settings do not say otherwise."""
    mesh = staged_mesh(**degrees or {})
    model = js.fully_shard(model, units=units, mesh=mesh, **with_placement(**{"min_size": 1} | settings))
    return js.parallel.stages(model, **stages or {})


def staged_stacks(model: Any, stacks: list[Any], *, rows: int = 1, **degrees: int) -> Any:
    """The annotated model, whose units are stacks of layers."""
    mesh = staged_mesh(**degrees)
    for stack in stacks:
        js.fully_shard(stack, mesh=mesh, placement=js.PlacementPolicy(stacked=rows, min_size=1))
    return js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy(min_size=1))


@contextlib.contextmanager
def loops_on_stages() -> Iterator[None]:
    """A context that fails unless a loop has run on stages in it."""
    num_loops = 0
    plain = region_partitioner.StagedLoop

    class Counted(plain):
        def run(self) -> Any:
            nonlocal num_loops
            num_loops += 1
            return super().run()

    region_partitioner.StagedLoop = Counted
    try:
        yield
    finally:
        region_partitioner.StagedLoop = plain
    assert num_loops, "no loop ran on stages"


def assert_step(build: Build, annotate: Callable[[Any], Any], loss: Loss = weighted_loss, batch: Any = EXAMPLES) -> Any:
    """One step's loss, results, changed state and gradients are those of one device; returns the annotated model."""
    wanted = nnx_results(fresh(build), loss, *batch)
    model = annotate(fresh(build))
    with loops_on_stages():
        results = nnx_results(model, loss, *batch)
    worst, where = worst_of(results, wanted)
    assert worst <= TOLERANCE, f"{where}: {worst:.1e} of the largest element apart"
    return model


def assert_same(run: Callable[[Any], Any], build: Build, tolerance: float = TOLERANCE, **how: Any) -> None:
    """What a function makes of a model is the same on stages; errors are relative to 1e-3 at least."""
    wanted = on_host(run(fresh(build)))
    with loops_on_stages():
        results = on_host(run(staged(fresh(build), **how)))
    worst, where = max((x, key) for key, x in apart(results, wanted, 1e-3).items())
    assert worst <= tolerance, f"{where}: {worst:.1e} of the largest element apart"
