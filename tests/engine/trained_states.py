"""Models whose state is random or of the whole batch, trained some steps: all that comes out, on the host.

The same on one device, on any mesh, and on several processes. `python -m` of this with PROCESS PORT FILE NAME ... is
one of two processes with four devices each; process 0 writes what the models gave.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

import jshard as js
from tests.engine import mixing_linen
from tests.engine.mixing_models import MODELS, VECTORS, WIDTH
from tests.engine.one_device import annotate, streams

STEPS = 3
NNX = ("an EMA codebook", "batch norms", "dropout, noise, mixup", "scanned blocks")
LINEN = ("an EMA codebook", "norms and dropout in blocks")
NAMES = tuple(f"nnx: {name}" for name in NNX) + tuple(f"Linen: {name}" for name in LINEN) + ("masks",)


def trained(name: str, mesh: Any) -> dict[str, np.ndarray]:
    """Losses, parameters and state after some steps; without a mesh, of the plain model."""
    form, _, case = name.partition(": ")
    run: Callable[..., Any] = {"nnx": _nnx, "Linen": _linen, "masks": _masks}[form]
    return {jax.tree_util.keystr(path): _whole(x) for path, x in jax.tree.leaves_with_path(run(case, mesh))}


def _whole(x: Any) -> np.ndarray:
    bits = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(bits if bits.is_fully_addressable else multihost_utils.process_allgather(bits, tiled=True))


def _built(build: Callable[[], Any], units: tuple[type, ...], mesh: Any) -> Any:
    return js.shard_init(build, lambda model: annotate(model, units, mesh)) if mesh else build()


def _nnx(name: str, mesh: Any) -> Any:
    case = MODELS[name]
    model = _built(lambda: case.build(nnx.Rngs(0)), case.units, mesh)

    @nnx.jit
    def step(model, *batch):
        (loss, _), grads = nnx.value_and_grad(case.loss, has_aux=True)(model, *batch)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return loss

    losses = [step(model, *case.batch) for _ in range(STEPS)]
    return losses, nnx.to_pure_dict(nnx.state(model))


def _linen(name: str, mesh: Any) -> Any:
    case = mixing_linen.LINEN[name]
    inputs = case.batch[: case.inputs]
    model = js.fully_shard(case.model, mesh=mesh, units=case.units) if mesh else case.model
    build = lambda: model.init(streams(), *inputs)
    variables = js.shard_init(build, model) if mesh else build()

    @jax.jit
    def step(variables, rngs, *batch):
        state = {k: v for k, v in variables.items() if k != "params"}

        def loss_fn(params):
            out, changed = model.apply({"params": params, **state}, *inputs, rngs=rngs, mutable=list(state))
            return case.loss(out, *batch), changed

        (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(variables["params"])
        return loss, {"params": jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads), **changed}

    losses = []
    for number in range(STEPS):
        rngs = {k: jax.random.fold_in(key, number) for k, key in streams().items()}
        loss, variables = step(variables, rngs, *case.batch)
        losses.append(loss)
    return losses, variables


class Masks(nnx.Module):
    """What dropout keeps of ones, and bits that are drawn."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.drop = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> Any:
        kept = self.drop(jnp.ones_like(self.linear(x)))
        return (
            kept > 0,
            jax.random.bits(self.drop.rngs(), (len(x), 3)),
            jax.random.permutation(self.drop.rngs(), len(x)),
        )


def _masks(_: str, mesh: Any) -> Any:
    model = _built(lambda: Masks(nnx.Rngs(0)), (), mesh)
    run = nnx.jit(lambda model, x: model(x))
    return [run(model, VECTORS) for _ in range(2)]


def _in_a_process(process: int, port: str, file: str, *chosen: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    found = {}
    for sizes, names in (({"fsdp": 8}, chosen[::2]), ({"replica": 2, "fsdp": 4}, chosen[1::2])):
        mesh = js.mesh(**sizes)
        found |= {f"{sizes}|{name}|{key}": x for name in names for key, x in trained(name, mesh).items()}
    if process == 0:
        np.savez(file, **found)
    jax.distributed.shutdown()
    os._exit(0)


if __name__ == "__main__":
    _in_a_process(int(sys.argv[1]), *sys.argv[2:])
