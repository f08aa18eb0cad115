"""Optimizers on sharded state beside the same on one device: the difference of the parameters after some steps.

Every Optax optimizer runs unchanged, in global view, so only the order of summation can differ. For its size, one
device also runs the same samples in another order. No time is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jshard as js
from benchmarks.tables import markdown_table
from jshard.train import Batch
from models.gpt import GPT, GPTConfig, annotate, loss_fn

TITLE = "Optimizers on sharded state, beside one device"
MEASURES_TIME = False

STEPS = 5
_CONFIG = GPTConfig(
    vocab_size=256, block_size=32, n_layer=2, n_head=2, d_model=64, d_ff=128, positions="rotary", tied=True
)
MESHES: dict[str, Callable[[], Mesh]] = {
    "ZeRO-3": lambda: js.mesh(),
    "HSDP 2 x 4": lambda: js.mesh(replica=2),
    "FSDP 4 x tensor 2": lambda: js.mesh(tensor=2),
}
_REORDERED = "one device, reordered"


def matrices(params: Any) -> Any:
    """A mask: matrices only."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


class ShampooState(NamedTuple):
    """Sums of the outer products of the gradients, along each dim; for a vector, sums of the squares."""

    left: Any
    right: Any


def shampoo(learning_rate: float, epsilon: float = 1e-3) -> optax.GradientTransformation:
    """Shampoo (Gupta et al. 2018, arXiv 1802.09568, algorithm 1): it needs every gradient as a whole matrix."""

    def init(params: Any) -> ShampooState:
        def side(dim: int) -> Callable[[jax.Array], jax.Array]:
            return lambda p: epsilon * (jnp.eye(p.shape[dim], dtype=p.dtype) if p.ndim == 2 else jnp.ones_like(p))

        return ShampooState(jax.tree.map(side(0), params), jax.tree.map(side(-1), params))

    def root(sums: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(sums)
        return (vectors * jnp.maximum(values, epsilon)[None] ** -0.25) @ vectors.T

    def direction(g: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        return root(left) @ g @ root(right) if g.ndim == 2 else g / jnp.sqrt(left)

    def update(grads: Any, state: ShampooState, params: Any = None) -> tuple[Any, ShampooState]:
        del params
        left = jax.tree.map(lambda g, sums: sums + (g @ g.T if g.ndim == 2 else g**2), grads, state.left)
        right = jax.tree.map(lambda g, sums: sums + (g.T @ g if g.ndim == 2 else g**2), grads, state.right)
        updates = jax.tree.map(lambda *of_leaf: -learning_rate * direction(*of_leaf), grads, left, right)
        return updates, ShampooState(left, right)

    return optax.GradientTransformation(init, update)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "sgd, Nesterov momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-3),
    "adamw, decay of matrices alone": lambda: optax.adamw(1e-3, weight_decay=0.1, mask=matrices),
    "adamw, schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(1e-4, 1e-2, 2, STEPS)),
    "adam, clip by the global norm": lambda: optax.chain(optax.clip_by_global_norm(1e-2), optax.adam(1e-3)),
    "sgd, clip by the block's rms": lambda: optax.chain(optax.clip_by_block_rms(1e-2), optax.sgd(0.1)),
    "sgd, adaptive clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "lion": lambda: optax.lion(1e-4),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "adafactor, not factored": lambda: optax.adafactor(1e-2, factored=False),
    "lamb": lambda: optax.lamb(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
    "shampoo": lambda: shampoo(1e-2),
    "adamw, MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(),
    "sgd, EMA of the updates": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "schedule-free adamw": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "adamw for matrices, sgd for vectors": lambda: optax.partition(
        {"matrix": optax.adamw(1e-3), "vector": optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params),
    ),
}


def run(*, quick: bool) -> dict[str, Any]:
    """Largest differences, by optimizer and mesh."""
    names = list(OPTIMIZERS)[:2] if quick else list(OPTIMIZERS)
    return {"steps": STEPS, "difference": {name: _differences(name) for name in names}}


def table(result: Mapping[str, Any]) -> list[str]:
    """The differences in Markdown."""
    text = [
        f"A GPT of {_num_parameters():,} float32 parameters (two blocks, tied table) after {result['steps']} steps on",
        "8 simulated devices, beside one device: the largest difference of a parameter, relative to the largest of its",
        "array. Last column: one device with the samples of each batch in another order, beside itself.",
        "",
    ]
    columns = [*MESHES, _REORDERED]
    rows = [[name, *(f"{found[key]:.1e}" for key in columns)] for name, found in result["difference"].items()]
    return [*text, *markdown_table(["optimizer", *columns], rows)]


def _differences(name: str) -> dict[str, float]:
    wanted = _trained(name)
    found = {mesh: _apart(_trained(name, mesh), wanted) for mesh in MESHES}
    return found | {_REORDERED: _apart(_trained(name, reordered=True), wanted)}


def _plain() -> GPT:
    return GPT(_CONFIG, rngs=nnx.Rngs(0))


def _sharded(name: str) -> GPT:
    mesh = MESHES[name]()

    def with_tensor_axis(model: GPT) -> None:
        for block in model.blocks if mesh.shape["tensor"] > 1 else ():
            block.mlp.up.kernel.set_metadata(out_sharding=(None, "tensor"))
            block.mlp.down.kernel.set_metadata(out_sharding=("tensor", None))
        annotate(model, mesh)

    return js.shard_init(_plain, with_tensor_axis)


def _trained(name: str, mesh: str | None = None, *, reordered: bool = False) -> dict[str, np.ndarray]:
    with nnx.use_eager_sharding(False):  # the axes that the model names are jshard's to apply
        model = _plain() if mesh is None else _sharded(mesh)
        tx = OPTIMIZERS[name]()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param) if mesh is None else js.shard_optimizer(model, tx)

        @nnx.jit
        def step(model: GPT, optimizer: nnx.Optimizer, batch: Batch) -> None:
            optimizer.update(model, nnx.grad(loss_fn)(model, batch))

        for number in range(STEPS):
            step(model, optimizer, _batch(number, reordered))
    return _host(model)


def _batch(number: int, reordered: bool) -> Batch:
    text = np.random.default_rng(number).integers(0, _CONFIG.vocab_size, (16, _CONFIG.block_size + 1), np.int32)
    text = text[::-1] if reordered else text
    return {"inputs": jnp.asarray(text[:, :-1]), "targets": jnp.asarray(text[:, 1:])}


def _host(model: GPT) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(nnx.state(model, nnx.Param))
    return {jax.tree_util.keystr(path): np.asarray(x, np.float64) for path, x in leaves}


def _apart(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> float:
    return max(float(np.abs(found[k] - x).max() / max(np.abs(x).max(), 1e-30)) for k, x in wanted.items())


def _num_parameters() -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(nnx.eval_shape(_plain), nnx.Param)))
