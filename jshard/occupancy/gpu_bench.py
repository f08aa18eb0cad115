"""Times on the present GPU: XLA's own product and every setting, alone and beside a load like a collective."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jshard import _compat
from jshard.kernels.backend import KernelError, Occupancy
from jshard.kernels.products import matmul, plain_matmul
from jshard.occupancy import CommFootprint
from jshard.occupancy.products import MatrixProduct

if TYPE_CHECKING:
    from jshard.kernels.product import Ref

CALLS_PER_PRODUCT = 3
"""Products of a program: forward and its two gradients, which share one setting."""

_RUNS = 10  # of a program per time, so that the host is ahead of the device
_WARM_UP = 2
# Products beside the load: it begins when the first has ended, and the second occupies the GPU by then.
_CALLS_BESIDE = CALLS_PER_PRODUCT - 1
# Without command buffers: a captured graph may run streams as it likes.
_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}


class GpuBench:
    """A product on the first GPU of this process. Products of an MLP are timed without their activation.

    Args:
        product: its sizes and dtype.
        comm: the collective that the load is like.
        load_bytes: bytes that the load moves beside one call.
    """

    def __init__(self, product: MatrixProduct, comm: CommFootprint, load_bytes: int) -> None:
        self._comm = comm
        device = jax.local_devices()[0]
        dtype = jnp.dtype(product.dtype)

        def make(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
            return jax.random.normal(key, shape, dtype)

        make_on_device = jax.jit(make, static_argnums=1)
        x_key, w_key = jax.random.split(jax.random.key(0), 2)
        x = make_on_device(x_key, (product.m, product.k))
        w = make_on_device(w_key, (product.k, product.n))
        self._operands = [jax.device_put(x, device), jax.device_put(w, device)]
        self._loads: list[jax.Array] = []  # one, or none beside collectives that use no multiprocessor
        if comm.ctas:
            shape = load_shape(comm, _CALLS_BESIDE * load_bytes)
            self._loads.append(jax.device_put(jnp.zeros(shape, jnp.float32), device))
        self._programs: dict[tuple[Occupancy | None, bool], Callable[[], object]] = {}

    def prepare(self, setting: Occupancy | None) -> str:
        """Compiles both programs, and runs them; returns why a setting cannot run, or an empty text."""
        try:
            for beside in (False, True):
                program = self._compiled(setting, beside=beside)
                self._programs[setting, beside] = program
                for _ in range(_WARM_UP):
                    jax.block_until_ready(program())
        except (KernelError, jax.errors.JaxRuntimeError) as error:
            if setting is None:  # without XLA's own time there is nothing to compare with
                raise
            return next(iter(str(error).splitlines()), type(error).__name__)
        return ""

    def time_ns(self, setting: Occupancy | None, *, beside: bool) -> float:
        """Returns the mean time of one call: a program has three."""
        program = self._programs[setting, beside]
        begin_ns = time.perf_counter_ns()
        result = None
        for _ in range(_RUNS):
            result = program()
        jax.block_until_ready(result)  # the last one: a device runs programs in order
        return (time.perf_counter_ns() - begin_ns) / (_RUNS * CALLS_PER_PRODUCT)

    def _compiled(self, setting: Occupancy | None, *, beside: bool) -> Callable[[], object]:
        """Returns a program as a function without arguments."""
        loads = self._loads if beside else []
        run = program_of(setting, self._comm if loads else None)
        arguments = [*self._operands, *loads]
        compiled = jax.jit(run).lower(*arguments).compile(compiler_options=_OPTIONS)
        return lambda: compiled(*arguments)


def program_of(setting: Occupancy | None, comm: CommFootprint | None) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns a function of a product and then its two gradients, with a load beside these on another stream.

    Args:
        setting: of the kernel; None for XLA's own product.
        comm: the collective that the load is like; None for no load.
    """
    multiply = plain_matmul
    if setting is not None:
        multiply = functools.partial(matmul, occupancy=setting, backend="mosaic")

    def run(x: jax.Array, w: jax.Array, *loads: jax.Array) -> tuple[jax.Array, ...]:
        y, gradients_of = jax.vjp(multiply, x, w)
        copies = []
        if comm is not None:
            on_other_stream = _compat.on_stream(functools.partial(load, comm=comm), 1)
            # A part of `y` is an argument, so that the load begins after the first product.
            copies = [on_other_stream(array, y[:1]) for array in loads]
        return y, *gradients_of(y), *copies

    return run


# ---- a load like a collective: as many blocks, threads and bytes of shared memory, which copy as many bytes

_WARPGROUP = 128
_OTHER_REGISTERS = 16  # of a thread, besides those for data in flight
_BARRIERS_BYTES = 1024  # of the most that a block can have


def load_shape(comm: CommFootprint, num_bytes: int) -> tuple[int, int, int, int]:
    """Returns the shape of the float32 array that the load copies, of at least `num_bytes`.

    Returns:
        Blocks, warpgroups of a block, steps of a warpgroup, and elements that a warpgroup has in its registers.
    """
    groups = -(-comm.threads // _WARPGROUP)
    elements = _WARPGROUP * max(8, comm.registers - _OTHER_REGISTERS)
    bytes_per_step = 4 * comm.ctas * groups * elements
    steps = max(1, -(-num_bytes // bytes_per_step))
    return comm.ctas, groups, steps, elements


def load(x: jax.Array, after: jax.Array, comm: CommFootprint, *, interpret: bool = False) -> jax.Array:
    """Copies an array in blocks like a collective's.

    Args:
        x: of the shape `load_shape`.
        after: an array that must be available before; it is not read.
        comm: the collective.
        interpret: runs without a GPU.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu  # slow to import, and only where a load runs

    ctas, groups, steps, _ = x.shape

    def body(in_ref: Ref, _after_ref: Ref, out_ref: Ref, *_scratch: Ref) -> None:
        block = jax.lax.axis_index("block")
        group = jax.lax.axis_index("warpgroup")

        def step(i: jax.Array, carry: None) -> None:
            index = (block, group, i)
            out_ref[index] = _compat.pallas_load(in_ref, index, interpret=interpret)
            return carry

        jax.lax.fori_loop(0, steps, step, None)

    # Requested and not used: it keeps other blocks away, as that of a collective does.
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
