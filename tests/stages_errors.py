"""What a user of pipeline stages can do wrong, for the golden texts: each function raises, or warns."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard.plans.stages import Stages, StageSchedule

X = np.arange(16 * 64, dtype=np.float32).reshape(16, 64) / 1024


class Layer(nnx.Module):
    """One linear layer; `use(layer, x)` is its call."""

    def __init__(self, use: Callable, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(64, 64, rngs=rngs)
        self.use = use

    def __call__(self, x):
        return self.use(self, x)


class Layers(nnx.Module):
    """Four layers, in one loop or each with a scale of its own."""

    def __init__(self, use: Callable, *, is_loop: bool) -> None:
        self.blocks = nnx.List([Layer(use, nnx.Rngs(i)) for i in range(4)])
        self.is_loop = is_loop

    def __call__(self, x):
        if self.is_loop:
            return js.scan_layers(self.blocks, x)
        for i, block in enumerate(self.blocks):
            x = block(x[:, : 64 - i])
            x = jnp.concatenate([x, x], axis=1)[:, : 64 - i - 1]
        return x


def plain(layer, x):
    return layer.out(x)


def activated(layer, x):
    return jnp.tanh(layer.out(x))


def narrower(layer, x):
    return x @ layer.out.kernel[: x.shape[1], : x.shape[1]]


def run_on_stages(use: Callable = plain, *, is_loop: bool = True, microbatches: int | None = None, **settings) -> None:
    model = js.fully_shard(Layers(use, is_loop=is_loop), units=Layer, mesh=js.mesh(pipe=2, fsdp=4), **settings)
    model = js.parallel.stages(model, microbatches=microbatches)
    jax.eval_shape(nnx.grad(lambda model, x: (model(x) ** 2).sum()), model, X)


def combine_examples(layer, x):
    return layer.out(x - x.mean(0, keepdims=True))


def over_data_axes(layer, x):
    mesh = js.mesh(pipe=2, fsdp=4)
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))(layer.out(x))


def print_sum(layer, x):
    jax.debug.print("{}", x.sum())
    return layer.out(x)


def layers_that_differ() -> None:
    run_on_stages(narrower, is_loop=False)


ERRORS: dict[str, Callable[[], object]] = {
    "stages: too few microbatches": lambda: StageSchedule.of(8, 4, Stages(microbatches=6, late=True)),
    "stages: a setting": lambda: Stages(sum_dtype="int8"),
    "stages: a batch of few examples": lambda: run_on_stages(microbatches=8),
    "stages: a layer that combines examples": lambda: run_on_stages(combine_examples),
    "stages: a shard_map over data axes": lambda: run_on_stages(over_data_axes),
    "stages: an effect in a layer": lambda: run_on_stages(print_sum),
    "stages: pieces kept for backward": lambda: run_on_stages(reshard_after_forward=2),
    "stages: activations in host memory": lambda: run_on_stages(activated, remat="offload"),
    "stages: layers that differ, fallback='error'": lambda: run_on_stages(narrower, is_loop=False, fallback="error"),
}
