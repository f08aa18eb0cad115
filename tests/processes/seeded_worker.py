"""One of two processes that initialise a model: python -m tests.processes.seeded_worker PROCESS PORT.

Each case prints the error of this process, or that there is none, and the sum of the model's first kernel.
"""

import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

import jshard as js

process, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)


class Noisy(nnx.Module):
    """A layer whose values NumPy makes."""

    def __init__(self, seed: int):
        values = np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32)
        self.kernel = nnx.Param(jax.numpy.asarray(values))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...]


def annotate(model: nnx.Module) -> None:
    js.fully_shard(model, mesh=js.mesh())


def linen(seed: int) -> Any:
    model = js.fully_shard(nn.Dense(64), mesh=js.mesh())
    return js.shard_init(lambda: model.init(jax.random.key(seed), np.ones((8, 64), np.float32)), model)


def with_key(seed: int) -> nnx.Module:
    key = jax.random.key(seed)
    return js.shard_init(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(key)), annotate)


CASES: dict[str, Callable[[int], Any]] = {
    "seed": lambda seed: js.shard_init(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(seed)), annotate),
    "key": with_key,
    "numpy": lambda seed: js.shard_init(lambda: Noisy(seed), annotate),
    "linen": linen,
    "shape": lambda seed: js.shard_init(lambda: nnx.Linear(64, 64 + 64 * seed, rngs=nnx.Rngs(0)), annotate),
}
for name, build in CASES.items():
    for seeds in ("same", "different"):
        try:
            model = build(process if seeds == "different" else 0)
        except js.ShardingError as error:
            print(f"{name} {seeds}: {' '.join(str(error).split())}", flush=True)
            continue
        kernel = max(jax.tree.leaves(nnx.state(model) if isinstance(model, nnx.Module) else model), key=np.size)
        whole = multihost_utils.process_allgather(kernel, tiled=True)
        print(f"{name} {seeds}: {float(np.abs(whole).sum()):.4f}", flush=True)
