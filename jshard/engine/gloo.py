"""All-gathers and reduce-scatters between CPU processes, as all-to-alls: there gloo carries them.

Gloo's own all-gather and reduce-scatter take about twice as long as its all-to-all of the same bytes. The program
names what each one stands for, and `js.audit` counts it as that. Other backends have their own, and keep them.
"""

import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jshard._mesh import FSDP, num_processes

_STANDS_FOR = re.compile(r"jshard as ([a-z-]+)")


def carries(mesh: Mesh) -> bool:
    """Whether gloo carries the collectives of a mesh."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu" and num_processes(mesh) > 1


def all_gather(shard: jax.Array, dim: int, degree: int) -> jax.Array:
    """`lax.all_gather(..., tiled=True)` over `fsdp`: every device sends its shard to each of the others."""
    with jax.named_scope("jshard as all-gather"):
        pieces = lax.all_to_all(jnp.broadcast_to(shard, (degree, *shard.shape)), FSDP, 0, 0)
    joined = jnp.moveaxis(pieces, 0, dim)
    return joined.reshape(*shard.shape[:dim], degree * shard.shape[dim], *shard.shape[dim + 1 :])


def reduce_scatter(full: jax.Array, dim: int, degree: int) -> jax.Array:
    """`lax.psum_scatter(..., tiled=True)` over `fsdp`: every device gets its part of all, and adds them up."""
    pieces = full.reshape(*full.shape[:dim], degree, full.shape[dim] // degree, *full.shape[dim + 1 :])
    with jax.named_scope("jshard as reduce-scatter"):
        pieces = lax.all_to_all(pieces, FSDP, dim, dim)
    return pieces.sum(dim)


def stands_for(op_name: str) -> str | None:
    """The kind of collective that an operation of a compiled program stands for, by its name; None if it is itself."""
    found = _STANDS_FOR.search(op_name)
    return found.group(1) if found else None
