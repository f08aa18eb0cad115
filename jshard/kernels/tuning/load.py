"""A load like a collective's: so many blocks, threads and bytes of shared memory, which copy bytes as long as it takes.

It stands for a collective on a machine with one GPU. It reads and writes device memory as fast as it can, where the
blocks of a collective also wait for links. Nobody can tell the compiler how many registers to give a thread: it is made
to need as many as a collective's by what is on its way at once (compiled for sm_90a: 14 more than that, no spills).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jshard import _compat
from jshard.kernels.occupancy import CommFootprint

_WARPGROUP = 128
_OTHER_REGISTERS = 16  # of a thread, beside those for what is on the way
_BARRIERS_BYTES = 1024  # of the most that a block can have


def load_shape(comm: CommFootprint, num_bytes: int) -> tuple[int, int, int, int]:
    """The array that the load copies, of at least so many bytes: by block, warpgroup and step, float32.

    Args:
        comm: what it is like.
        num_bytes: to be read and written.
    """
    groups = -(-comm.threads // _WARPGROUP)
    on_the_way = _WARPGROUP * max(8, comm.registers - _OTHER_REGISTERS)
    steps = max(1, -(-num_bytes // (4 * comm.ctas * groups * on_the_way)))
    return comm.ctas, groups, steps, on_the_way


def load(x: jax.Array, after: jax.Array, comm: CommFootprint, *, interpret: bool = False) -> jax.Array:
    """Copies an array in blocks like a collective's.

    Args:
        x: of `load_shape`.
        after: a small array; the load begins when it is there.
        comm: what it is like; its threads are rounded up to warpgroups.
        interpret: whether to run step by step on a CPU.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu  # slow to import, and only where a load runs

    ctas, groups, steps, _ = x.shape

    def body(in_ref: Any, _: Any, out_ref: Any, *__: Any) -> None:
        block, group = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")

        def step(i: jax.Array, carry: None) -> None:
            at = block, group, i
            out_ref[at] = _compat.pallas_load(in_ref, at, interpret=interpret)
            return carry

        jax.lax.fori_loop(0, steps, step, None)

    smem_bytes = max(0, comm.smem_bytes - _BARRIERS_BYTES) // 1024 * 1024
    return _compat.mosaic_kernel(
        body,
        name="jshard_tuning_load",
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch=[plgpu.SMEM((smem_bytes,), jnp.int8)] if smem_bytes else [],
        grid=(ctas,),
        grid_names=("block",),
        num_threads=groups,
        thread_name="warpgroup",
        interpret=interpret,
    )(x, after)
