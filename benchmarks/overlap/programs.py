"""The JAX programs of the benchmark: products, and products with something that moves beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.overlap.grid import TRITON, Setting
from jshard import _compat
from jshard.errors import RunError
from jshard.kernels.products import matmul
from jshard.occupancy import CommFootprint

AXIS = "device"
MOST_ERROR = 1e-2
OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}  # a captured graph runs streams as it likes
PRIORITY = "xla_gpu_enable_highest_priority_async_stream"
_TRITON: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": True, "xla_gpu_cublas_fallback": False}


def product_of(setting: Setting) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The product of two matrices by a setting."""
    if setting.knobs is None:
        return jnp.matmul
    return functools.partial(matmul, occupancy=setting.knobs, backend="mosaic")


def options_of(setting: Setting) -> dict[str, str | bool]:
    """Returns the options with which programs of a setting are compiled."""
    return OPTIONS | _TRITON if setting.form == TRITON else OPTIONS


def over(mesh: jax.sharding.Mesh, run: Callable[..., Any], *specs: jax.P, donate: tuple[int, ...] = ()) -> Any:
    """A jitted function that every device runs on its part; each device's results are parts of the whole's."""
    parts = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=jax.P(AXIS), check_vma=False)
    return jax.jit(parts, donate_argnums=donate)


def two_products(setting: Setting, move: Callable[..., jax.Array] | None) -> Callable[..., tuple[jax.Array, ...]]:
    """A product, and then another one beside what moves: that begins when the first has ended, as the second does."""
    multiply = product_of(setting)

    def run(x: jax.Array, first_w: jax.Array, second_w: jax.Array, *buffers: jax.Array) -> tuple[jax.Array, ...]:
        first = multiply(x, first_w)
        x, first, *waiting = lax.optimization_barrier((x, first, *buffers))
        moved = [move(buffer, first) for buffer in waiting] if move else []
        return first, multiply(x, second_w), *moved

    return run


def collective(kind: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """NCCL's, over all devices."""
    if kind == "all-reduce":
        return lambda buffer, _: lax.psum(buffer, AXIS)
    return lambda buffer, _: lax.all_gather(buffer, AXIS, tiled=True)


def copies(comm: CommFootprint) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A kernel with a collective's blocks, on another stream of the same priority."""
    from jshard.occupancy.gpu_bench import load  # imports Pallas, which only few runs need

    beside = _compat.on_stream(functools.partial(load, comm=comm), 1)
    return lambda buffer, first: beside(buffer, first[:1])


def unstained(run: Callable[[], Any]) -> Any:
    """A result that is written where NaNs were: a kernel that leaves elements out does not find right ones there."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), run())
    stains = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype, device=x.sharding), shapes)
    jax.block_until_ready(stains)
    del stains  # the allocator gives the same memory again, as a rule
    return run()


def wrong_result(what: str, error: float) -> RunError:
    """The error that a result is not that of XLA."""
    return RunError(
        f"The result is wrong: its relative error is {error:.1e}.",
        where=what,
        why=f"beside XLA's, and roundings to 16 bits make up at most {MOST_ERROR}.",
        do="report this with your GPU, driver and version of jax.",
    )


def relative_error(found: Any, wanted: Any) -> float:
    """How far results are from others, in the norm of all of them."""
    norm = lambda tree: sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))
    away = jax.jit(lambda a, b: jnp.sqrt(norm(jax.tree.map(lambda x, y: x.astype(jnp.float32) - y, a, b)) / norm(b)))
    return float(away(found, wanted))
