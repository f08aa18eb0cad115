"""Models under the three lines of `js.fully_shard` beside the same on one device: a call, or some steps of training.

The same on any mesh, and on several processes: `python -m` of this with PROCESS PORT FILE NAME ... is one of two
processes with four devices each; process 0 writes what the models gave.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

import jshard as js
from tests.engine.mixing_models import LINEN as LINEN_MODELS
from tests.engine.mixing_models import MODELS, VECTORS, WIDTH
from tests.parity import numbers_of

TOLERANCE = 2e-6  # of the largest element of the array
MESHES = {"fsdp=8": {"fsdp": 8}, "2x4": {"replica": 2, "fsdp": 4}, "tensor": {"fsdp": 4, "tensor": 2}}


@functools.cache
def mesh(name: str) -> Any:
    return js.mesh(**MESHES[name])


# ---- Results and their comparison ---------------------------------------------------------------


def on_host(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a tree by path, without padding; keys as their bits."""
    is_array = lambda x: isinstance(x, nnx.Variable) and hasattr(x.get_raw_value(), "shape")
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_array)
    return {jax.tree_util.keystr(path): _bits(x) for path, x in leaves}


def _bits(x: Any) -> np.ndarray:
    value = x.get_raw_value()[tuple(map(slice, x.shape))] if isinstance(x, nnx.Variable) else jnp.asarray(x)
    return np.asarray(numbers_of(value))


def apart(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], floor: float = 0.0) -> dict[str, float]:
    """The largest difference of each array, relative to its largest element; infinite where whole numbers differ."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return {k: _apart(found[k], wanted[k], floor) for k in wanted}


def _apart(found: np.ndarray, wanted: np.ndarray, floor: float) -> float:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), (found.shape, wanted.shape)
    if not jnp.issubdtype(wanted.dtype, jnp.inexact):
        return 0.0 if np.array_equal(found, wanted) else float("inf")
    a, b = (np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64) for x in (found, wanted))
    assert np.isfinite(b).all(), "one device has no finite numbers"
    if not b.size or np.array_equal(a, b):
        return 0.0
    difference = float(np.abs(a - b).max() / max(float(np.abs(b).max()), floor, 1e-30))
    return difference if np.isfinite(difference) else float("inf")


def worst_of(found: Any, wanted: Any) -> tuple[float, str]:
    """The worst of all that a call gave, and where.

    A gradient that is noise, as that of a bias before a norm, is measured against a hundredth of the largest one.
    """
    out, grads = (on_host(tree) for tree in wanted)
    floor = max((float(np.abs(g).max()) for g in grads.values() if g.size), default=0.0) / 100
    differences = apart(on_host(found[0]), out)
    differences |= {f"gradient of {k}": x for k, x in apart(on_host(found[1]), grads, floor).items()}
    return max((x, k) for k, x in differences.items())


def assert_equal(found: Any, wanted: Any, tolerance: float = TOLERANCE) -> None:
    worst, where = worst_of(found, wanted)
    assert worst <= tolerance, f"{where}: {worst:.1e} of the largest element apart"


# ---- nnx ----------------------------------------------------------------------------------------


def nnx_results(model: nnx.Module, loss_fn: Callable, *batch: Any) -> Any:
    """((loss, what it gives besides, changed state), gradients) of one jitted call of plain Flax."""

    @nnx.jit
    def run(model, *batch):
        return nnx.value_and_grad(loss_fn, has_aux=True)(model, *batch)

    (loss, extra), grads = run(model, *batch)
    return (loss, extra, nnx.state(model, nnx.Not(nnx.Param))), grads


def annotate(model: nnx.Module, units: Sequence[type], mesh: Any) -> Any:
    """The three lines; `units` are the classes of the blocks."""
    for _, block in list(nnx.iter_modules(model)):
        if isinstance(block, tuple(units)):
            js.fully_shard(block, mesh=mesh)
    return js.fully_shard(model, mesh=mesh)


def annotated(model: nnx.Module, units: Sequence[type] = (), *, on: str = "fsdp=8") -> Any:
    return annotate(model, units, mesh(on))


# ---- Linen --------------------------------------------------------------------------------------


def streams() -> dict[str, jax.Array]:
    """The keys of a call; not made on import, as several processes meet before that."""
    return {name: jax.random.key(i) for i, name in enumerate(("params", "dropout", "mixup", "noise"))}


@functools.cache
def _variables_of(case: Any) -> Any:
    return jax.jit(case.model.init)(streams(), *case.batch[: case.inputs])


def linen_results(case: Any, on: str | None = None) -> Any:
    """((loss, changed variables), gradients) of one jitted call of plain Linen."""
    variables = _variables_of(case)
    model = js.fully_shard(case.model, mesh=mesh(on), units=case.units) if on else case.model
    params, state = variables["params"], {k: v for k, v in variables.items() if k != "params"}

    @jax.jit
    def run(params, state, *batch):
        def loss_fn(params):
            given = {"params": params, **state}
            out, changed = model.apply(given, *batch[: case.inputs], rngs=streams(), mutable=[*state, "intermediates"])
            return case.loss(out, *batch), changed

        return jax.value_and_grad(loss_fn, has_aux=True)(params)

    return run(params, state, *case.batch)


# ---- Some steps ----------------------------------------------------------------------------------


STEPS = 3
NNX = ("an EMA codebook", "batch norms", "dropout, noise, mixup", "scanned blocks")
LINEN = ("norms and dropout in blocks",)
NAMES = tuple(f"nnx: {name}" for name in NNX) + tuple(f"Linen: {name}" for name in LINEN) + ("masks",)


def trained(name: str, mesh: Any) -> dict[str, np.ndarray]:
    """Losses, parameters and state after some steps; without a mesh, of the plain model."""
    form, _, case = name.partition(": ")
    run: Callable[..., Any] = {"nnx": _nnx, "Linen": _linen, "masks": _masks}[form]
    return {jax.tree_util.keystr(path): _whole(x) for path, x in jax.tree.leaves_with_path(run(case, mesh))}


def _whole(x: Any) -> np.ndarray:
    bits = numbers_of(x)
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
    case = LINEN_MODELS[name]
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
