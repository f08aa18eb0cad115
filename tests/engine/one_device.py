"""A model in the three lines of `js.fully_shard` beside the same model on one device: every array that comes out."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard as js
from tests.engine.batch_bodies import BATCH, GROUPS, WIDTH

TOLERANCE = 2e-6  # of the largest element of the array
MESHES = {"fsdp=8": {"fsdp": 8}, "2x4": {"replica": 2, "fsdp": 4}, "tensor": {"fsdp": 4, "tensor": 2}}
X = np.random.default_rng(1).standard_normal((BATCH, WIDTH)).astype(np.float32)


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


# ---- The functions of batch_bodies, each behind a layer of its own ------------------------------


class Body(nnx.Module):
    """A layer, and what a user wrote behind it."""

    def __init__(self, group: str, name: str, rngs: nnx.Rngs):
        self.group, self.name = group, name
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.weight = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x: jax.Array) -> Any:
        return GROUPS[self.group][self.name](self.linear(x), self.weight[...])


class Bodies(nnx.Module):
    def __init__(self, group: str, names: Sequence[str], rngs: nnx.Rngs):
        self.bodies = nnx.List([Body(group, name, rngs) for name in names])

    def __call__(self, x: jax.Array) -> dict[str, Any]:
        return {body.name: body(x) for body in self.bodies}


class LinenBody(nn.Module):
    group: str
    body: str

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(WIDTH, use_bias=False, name="linear")(x)
        weight = self.param("weight", nn.initializers.lecun_normal(), (WIDTH, WIDTH))
        return GROUPS[self.group][self.body](h, weight)


class LinenBodies(nn.Module):
    group: str
    bodies: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        return {body: LinenBody(self.group, body, name=f"body_{i}")(x) for i, body in enumerate(self.bodies)}


def mixed_loss(out: Any) -> jax.Array:
    """Every float that comes out has a say, each its own."""
    floats = [x.astype(jnp.float32) for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.sin(3 * x).mean() if x.ndim else x for x in floats), jnp.zeros(()))


def body_results(group: str, names: tuple[str, ...], on: str | None, linen: bool = False) -> dict[str, Any]:
    """What each of these functions gave in one program: ((outputs,), gradients) by name."""
    run = _linen_bodies if linen else _nnx_bodies
    out, grads = run(group, names, on)
    return {name: ((out[name],), grads[i]) for i, name in enumerate(names)}


def _nnx_bodies(group: str, names: tuple[str, ...], on: str | None) -> Any:
    model = Bodies(group, names, nnx.Rngs(0))
    if on:
        annotated(model, (Body,), on=on)

    def loss_fn(model, x):
        out = model(x)
        return mixed_loss(out), out

    (_, out, _), grads = nnx_results(model, loss_fn, X)
    return out, [grads["bodies"][i] for i in range(len(names))]


def _linen_bodies(group: str, names: tuple[str, ...], on: str | None) -> Any:
    plain = LinenBodies(group, names)
    variables = _variables_of_bodies(plain)
    model = js.fully_shard(plain, mesh=mesh(on), units=LinenBody) if on else plain

    @jax.jit
    def run(params):
        def loss_fn(params):
            out = model.apply({"params": params}, X)
            return mixed_loss(out), out

        return jax.value_and_grad(loss_fn, has_aux=True)(params)

    (_, out), grads = run(variables["params"])
    return out, [grads[f"body_{i}"] for i in range(len(names))]


@functools.cache
def _variables_of_bodies(plain: LinenBodies) -> Any:
    return jax.jit(plain.init)(jax.random.key(0), X)


@functools.cache
def of_bodies(group: str, names: tuple[str, ...], linen: bool) -> dict[str, Any]:
    return body_results(group, names, None, linen)


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
