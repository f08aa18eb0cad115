"""A model in the three lines of `js.fully_shard` beside the same model on one device: every array that comes out."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard as js

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
    return np.asarray(jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value)


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
