"""The ways to run a load beside a product on real GPUs: CuPy on one, a Pallas kernel without it, NCCL on several."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.overlap import programs
from benchmarks.overlap.bench import Beside, Load
from benchmarks.overlap.cupy_load import CupyLoad, spin
from benchmarks.overlap.grid import DOT, Setting, Size
from jshard.occupancy import CommFootprint

_WARM_UP = 2
_BEFORE = 0.1  # of the product's time, until the load is launched: it holds the GPU by then
_LEAST_BEFORE_S = 100e-6

Program = Callable[[], Any]


def _random(shape: tuple[int, ...], seed: int, sharding: Any) -> jax.Array:
    make = jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16), out_shardings=sharding)
    return jax.block_until_ready(make())


def _warm(program: Program) -> Program:
    for _ in range(_WARM_UP):
        jax.block_until_ready(program())
    return program


def _ms(run: Program) -> float:
    begin = time.perf_counter_ns()
    jax.block_until_ready(run())
    return (time.perf_counter_ns() - begin) / 1e6


class CupyBench:
    """One GPU: JAX runs the product on its stream, CuPy the load on one of its own.

    Args:
        load: that CuPy launches.
    """

    kinds = ("copies",)
    priorities = ("default", "high")

    def __init__(self, load: CupyLoad) -> None:
        self._load = load
        self._size: Size | None = None
        self._arrays: tuple[jax.Array, ...] = ()
        self._programs: dict[Setting, Program] = {}
        self._alone_ms: dict[Setting, float] = {}

    def prepare(self, size: Size, setting: Setting) -> float:
        """Compiles and warms up a product; the relative error beside XLA's dot."""
        if size != self._size:
            place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            self._programs, self._arrays, self._size = {}, (), size
            self._arrays = _random((size.m, size.k), 0, place), _random((size.k, size.n), 1, place)
        if setting not in self._programs:
            lowered = jax.jit(programs.product_of(setting)).lower(*self._arrays)
            compiled = lowered.compile(compiler_options=programs.options_of(setting))
            self._programs[setting] = _warm(functools.partial(compiled, *self._arrays))
        self._alone_ms[setting] = self.compute_ms(setting)
        found = programs.unstained(self._programs[setting])
        return programs.relative_error(found, self._programs[Setting(form=DOT)]())

    def compute_ms(self, setting: Setting) -> float:
        """A product alone."""
        return _ms(self._programs[setting])

    def load_ms(self, load: Load) -> float:
        """A load alone."""
        begin = time.perf_counter_ns()
        self._load.launch(load.num_bytes, "default")
        self._load.wait()
        return (time.perf_counter_ns() - begin) / 1e6

    def sequential_ms(self, setting: Setting, load: Load) -> float:
        """A load after a product."""
        return self.compute_ms(setting) + self.load_ms(load)

    def both(self, setting: Setting, load: Load, priority: str) -> Beside:
        """A load that is launched when the product holds the GPU."""
        ahead_ns = self._load.clock_ahead_ns()
        begin = time.perf_counter_ns()
        result = self._programs[setting]()
        spin(max(_LEAST_BEFORE_S, _BEFORE * self._alone_ms[setting] / 1e3))
        launched_ns = self._load.launch(load.num_bytes, priority)
        jax.block_until_ready(result)
        self._load.wait()
        both_ms = (time.perf_counter_ns() - begin) / 1e6
        trace = self._load.trace(launched_ns, ahead_ns)
        return Beside(both_ms, trace.waited_ms, trace.span_ms, trace.sms)


class ProgramBench:
    """Product and load in one program: NCCL on several GPUs, or on one a Pallas kernel on another stream.

    The program has two products, and the load begins with the second: the time of the first is taken off.

    Args:
        comm: what the load is like, where it is a kernel; None: it is NCCL's own.
    """

    def __init__(self, comm: CommFootprint | None) -> None:
        devices = jax.local_devices() if comm is None else jax.local_devices()[:1]
        self.kinds = ("all-reduce", "all-gather") if comm is None else ("copies",)
        self.priorities = ("default", "high") if comm is None else ("default",)
        self._comm, self._count = comm, len(devices)
        self._mesh = jax.sharding.Mesh(np.array(devices), (programs.AXIS,))
        self._size: Size | None = None
        self._arrays: tuple[jax.Array, ...] = ()
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._buffers: dict[Load, jax.Array] = {}

    def prepare(self, size: Size, setting: Setting) -> float:
        """Compiles and warms up a product; the relative error beside XLA's dot."""
        if size != self._size:
            self._programs, self._buffers, self._arrays, self._size = {}, {}, (), size
            split, whole = self._sharding(jax.P(programs.AXIS)), self._sharding(jax.P())
            self._arrays = (
                _random((self._count * size.m, size.k), 0, split),
                *(_random((size.k, size.n), seed, whole) for seed in (1, 2)),
            )
        if setting.form == DOT:
            self._buffers.clear()  # every group has loads of its own
        found = programs.unstained(self._alone(setting))
        return programs.relative_error(found, self._alone(Setting(form=DOT))())

    def compute_ms(self, setting: Setting) -> float:
        """One of the two products alone."""
        return _ms(self._alone(setting)) / 2

    def load_ms(self, load: Load) -> float:
        """A load alone."""
        move = self._move(load)
        run = lambda x, buffer: (move(buffer, x),)
        return _ms(self._kept((load,), run, self._arrays[:1], load, options=programs.OPTIONS))

    def sequential_ms(self, setting: Setting, load: Load) -> float:
        """A load after a product."""
        return self.compute_ms(setting) + self.load_ms(load)

    def both(self, setting: Setting, load: Load, priority: str) -> Beside:
        """A load that begins with the second product."""
        options = programs.options_of(setting)
        with_priority = options
        if self._comm is None:
            with_priority = options | {programs.PRIORITY: priority == "high"}
        run = programs.two_products(setting, self._move(load))
        both = self._kept((setting, load, priority), run, self._arrays, load, options=with_priority)
        first = self._kept((setting, "first"), programs.product_of(setting), self._arrays[:2], options=options)
        return Beside(_ms(both) - _ms(first))

    def _alone(self, setting: Setting) -> Program:
        run = programs.two_products(setting, None)
        return self._kept((setting,), run, self._arrays, options=programs.options_of(setting))

    def _kept(
        self,
        key: tuple[Any, ...],
        run: Callable[..., Any],
        arrays: tuple[jax.Array, ...],
        load: Load | None = None,
        *,
        options: Mapping[str, str | bool],
    ) -> Program:
        """A program, compiled when it is first asked for; with a load its last argument and result is the buffer."""
        if key in self._programs:
            return self._programs[key]
        split, whole = jax.P(programs.AXIS), jax.P()
        specs = (split, *[whole] * (len(arrays) - 1), *([split] if load else []))
        # All-reduces work in place, if they may: else their operand is copied first.
        donate = (len(arrays),) if load and load.kind == "all-reduce" else ()
        jitted = programs.over(self._mesh, run, *specs, donate=donate)
        buffer = lambda: (self._buffer(load),) if load else ()
        compiled = jitted.lower(*arrays, *buffer()).compile(compiler_options=dict(options))

        def call() -> Any:
            results = compiled(*arrays, *buffer())
            if load and donate:
                self._buffers[load] = results[-1]
            return results

        self._programs[key] = _warm(call)
        return call

    def _move(self, load: Load) -> Any:
        return programs.collective(load.kind) if self._comm is None else programs.copies(self._comm)

    def _buffer(self, load: Load) -> jax.Array:
        if load not in self._buffers:
            self._buffers[load] = self._new_buffer(load)
        return self._buffers[load]

    def _new_buffer(self, load: Load) -> jax.Array:
        sharding = self._sharding(jax.P(programs.AXIS))
        if self._comm is not None:
            from jshard.occupancy.gpu_bench import load_shape

            return jnp.zeros(load_shape(self._comm, load.num_bytes), jnp.float32, device=sharding)
        each = load.num_bytes // 2 // (self._count if load.kind == "all-gather" else 1)
        return jnp.zeros((self._count * each,), jnp.bfloat16, device=sharding)

    def _sharding(self, spec: jax.P) -> Any:
        return jax.NamedSharding(self._mesh, spec)
