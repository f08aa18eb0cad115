"""Times of a product on the GPU that is here: XLA's own and every setting, alone and beside a load, side by side."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jshard import _compat
from jshard.kernels.knobs import KernelError, Occupancy
from jshard.kernels.matmul import matmul, plain_matmul
from jshard.occupancy import CommFootprint
from jshard.occupancy.candidates import Timing
from jshard.occupancy.products import MatrixProduct

ROUNDS = 7
_CALLS = 10  # of a program in one time: so the host is ahead of the device
_WARM_UP = 2
_PRODUCTS = 3  # of a program: that of forward and its two gradients, for which one setting is used
_BESIDE = 2  # of them, the load's bytes: it begins when the first has ended, and the second holds the GPU by then
# A captured graph may run streams as it likes.
_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}


class Bench(Protocol):
    """Runs one product with any setting."""

    def prepare(self, setting: Occupancy | None) -> str:
        """Compiles and warms up; why it cannot run, or nothing."""
        ...

    def time_ns(self, setting: Occupancy | None, *, beside: bool) -> float:
        """Time of one call, with or without the load."""
        ...


@dataclasses.dataclass(frozen=True)
class MeasuredSettings:
    """What was measured, and what could not be."""

    timings: tuple[Timing, ...]  # medians, XLA's own first
    failed: tuple[tuple[Occupancy, str], ...] = ()  # settings that did not run, and why


def measure(bench: Bench, settings: Sequence[Occupancy | None], *, rounds: int = ROUNDS) -> MeasuredSettings:
    """Medians over rounds, in each of which everything is timed once: what the GPU's clock does, it does to all."""
    able: list[Occupancy | None] = []
    failed: list[tuple[Occupancy, str]] = []
    for setting in dict.fromkeys([None, *settings]):
        problem = bench.prepare(setting)
        if problem and setting is not None:
            failed.append((setting, problem))
        else:
            able.append(setting)
    times: dict[tuple[Occupancy | None, bool], list[float]] = {}
    for _ in range(rounds):
        for setting in able:
            for beside in (False, True):
                times.setdefault((setting, beside), []).append(bench.time_ns(setting, beside=beside))
    median = lambda setting, beside: round(statistics.median(times[setting, beside]))
    timings = [Timing(setting=s, alone_ns=median(s, False), both_ns=median(s, True)) for s in able]
    return MeasuredSettings(tuple(timings), tuple(failed))


class GpuBench:
    """A product on the first GPU of this process. Those of an MLP are timed without their activation."""

    def __init__(self, product: MatrixProduct, comm: CommFootprint, load_bytes: int) -> None:
        self._comm = comm
        device = jax.local_devices()[0]
        keys = jax.random.split(jax.random.key(0), 2)
        sizes = (product.m, product.k), (product.k, product.n)
        dtype = jnp.dtype(product.dtype)
        make = jax.jit(lambda key, shape: jax.random.normal(key, shape, dtype), static_argnums=1)
        self._arrays = [jax.device_put(make(key, shape), device) for key, shape in zip(keys, sizes, strict=True)]
        self._load = None
        if comm.ctas:
            self._load = jax.device_put(jnp.zeros(load_shape(comm, _BESIDE * load_bytes), jnp.float32), device)
        self._programs: dict[tuple[Occupancy | None, bool], Callable[[], Any]] = {}

    def prepare(self, setting: Occupancy | None) -> str:
        """Compiles both programs, and runs them."""
        try:
            for beside in (False, True):
                program = self._compiled(setting, beside=beside)
                self._programs[setting, beside] = program
                for _ in range(_WARM_UP):
                    jax.block_until_ready(program())
        except (KernelError, jax.errors.JaxRuntimeError) as error:
            if setting is None:
                raise
            return next(iter(str(error).splitlines()), type(error).__name__)
        return ""

    def time_ns(self, setting: Occupancy | None, *, beside: bool) -> float:
        """Of one call: a program has three."""
        program = self._programs[setting, beside]
        begin_ns, result = time.perf_counter_ns(), None
        for _ in range(_CALLS):
            result = program()
        jax.block_until_ready(result)
        return (time.perf_counter_ns() - begin_ns) / (_CALLS * _PRODUCTS)

    def _compiled(self, setting: Occupancy | None, *, beside: bool) -> Callable[[], Any]:
        run = program_of(setting, self._comm if beside and self._load is not None else None)
        arguments = [*self._arrays, *([self._load] if beside and self._load is not None else [])]
        compiled = jax.jit(run).lower(*arguments).compile(compiler_options=_OPTIONS)
        return lambda: compiled(*arguments)


def program_of(setting: Occupancy | None, comm: CommFootprint | None) -> Callable[..., Any]:
    """A product and then its two gradients, with a load beside these on another stream."""
    multiply = plain_matmul if setting is None else functools.partial(matmul, occupancy=setting, backend="mosaic")

    def run(x: jax.Array, w: jax.Array, *loads: jax.Array) -> tuple[jax.Array, ...]:
        y, back = jax.vjp(multiply, x, w)
        moved = []
        if comm is not None:
            beside = _compat.on_stream(functools.partial(load, comm=comm), 1)
            moved = [beside(array, y[:1]) for array in loads]
        return y, *back(y), *moved

    return run


# A load like a collective's: so many blocks, threads and bytes of shared memory, which copy bytes as long as it takes.

_WARPGROUP = 128
_OTHER_REGISTERS = 16  # of a thread, beside those for what is on the way
_BARRIERS_BYTES = 1024  # of the most that a block can have


def load_shape(comm: CommFootprint, num_bytes: int) -> tuple[int, int, int, int]:
    """The array that the load copies, of at least so many bytes: by block, warpgroup and step, float32."""
    groups = -(-comm.threads // _WARPGROUP)
    on_the_way = _WARPGROUP * max(8, comm.registers - _OTHER_REGISTERS)
    steps = max(1, -(-num_bytes // (4 * comm.ctas * groups * on_the_way)))
    return comm.ctas, groups, steps, on_the_way


def load(x: jax.Array, after: jax.Array, comm: CommFootprint, *, interpret: bool = False) -> jax.Array:
    """Copies an array in blocks like a collective's."""
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
