"""Time of every kernel of jshard beside the same as XLA compiles it, forward and with its gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.overlap.programs import MOST_ERROR, OPTIONS, relative_error, unstained, wrong_result
from benchmarks.overlap.records import KernelTime
from jshard import kernels

DIRECTIONS = ("forward", "both")
_BATCH_S = 20e-3  # of calls in one time, so that the host's part is small
_WARM_UP = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A kernel on arrays."""

    kernel: str  # its name in `jshard.kernels`.
    shape: str  # in words
    arrays: Mapping[str, tuple[int, ...]] = dataclasses.field(hash=False)  # the shapes by argument
    settings: tuple[tuple[str, Any], ...] = ()  # its other arguments, as pairs
    backend: str = "mosaic"  # the form of the kernel

    @property
    def name(self) -> str:
        """As `--only` takes it."""
        gate = " gated" if "w_gate" in self.arrays else ""
        return f"kernels/{self.kernel}{gate} {self.shape}"

    def ours(self, arrays: Mapping[str, jax.Array]) -> Any:
        """The kernel."""
        return getattr(kernels, self.kernel)(**arrays, **dict(self.settings), backend=self.backend)

    def plain(self, arrays: Mapping[str, jax.Array]) -> Any:
        """The same by XLA; of products its dot."""
        if self.kernel == "matmul":
            return arrays["x"] @ arrays["w"]
        return getattr(kernels, self.kernel)(**arrays, **dict(self.settings), backend="xla")


def cases(*, quick: bool = False) -> tuple[Case, ...]:
    """What is measured."""
    least = 16 if quick else 1
    part = lambda *sizes: tuple(max(128, size // least) for size in sizes)
    found = [
        Case(kernel="matmul", shape=f"{m} x {n} x {k}", arrays={"x": (m, k), "w": (k, n)})
        for m, n, k in (
            part(*sizes)
            for sizes in ((8192, 8192, 8192), (8192, 57344, 8192), (16384, 4096, 4096), (4096, 14336, 4096))
        )
    ]
    m, d, f = part(8192, 4096, 14336)
    up = {"x": (m, d), "w_up": (d, f), "w_down": (f, d)}
    found.append(Case(kernel="mlp", shape=f"{m} x {d} x {f}", arrays=up, settings=(("activation", "gelu"),)))
    gated = up | {"w_gate": (d, f)}
    found.append(Case(kernel="mlp", shape=f"{m} x {d} x {f}", arrays=gated, settings=(("activation", "silu"),)))
    for rows, width in (part(16384, 4096), part(16384, 1024)):
        for kernel, vectors in (("rms_norm", ("scale",)), ("layer_norm", ("scale", "bias"))):
            arrays = {"x": (rows, width), "residual": (rows, width)} | dict.fromkeys(vectors, (width,))
            found.append(Case(kernel=kernel, shape=f"{rows} x {width}", arrays=arrays))
    return tuple(found)


def program(case: Case, direction: str, *, ours: bool) -> Callable[[dict[str, jax.Array]], Any]:
    """What is timed: the result, or with it the gradients of all arrays."""
    run = case.ours if ours else case.plain
    if direction == "forward":
        return run

    def both(arrays: dict[str, jax.Array]) -> Any:
        result, back = jax.vjp(run, arrays)
        return result, back(result)

    return both


def measure(case: Case, *, rounds: int) -> tuple[KernelTime, ...]:
    """Times of a case, in turn with those of XLA."""
    arrays = _arrays(case)
    found = []
    for direction in DIRECTIONS:
        ours, plain = (_compiled(program(case, direction, ours=mine), arrays) for mine in (True, False))
        error = relative_error(unstained(ours), plain())
        if not error <= MOST_ERROR:
            raise wrong_result(f"{case.name}, {direction}", error)
        counts = [_calls(run) for run in (ours, plain)]
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for run, count, kept in zip((ours, plain), counts, times, strict=True):
                kept.append(_each_ms(run, count))
        ours_ms, plain_ms = map(statistics.median, times)
        found.append(
            KernelTime(
                kernel=case.name.removeprefix("kernels/").removesuffix(f" {case.shape}"),
                shape=case.shape,
                direction=direction,
                ours_ms=ours_ms,
                plain_ms=plain_ms,
                relative_error=error,
            )
        )
    return tuple(found)


def _arrays(case: Case) -> dict[str, jax.Array]:
    """Random ones, the matrices of variance 1 / K: so is what comes of them."""
    found = {}
    for i, (name, shape) in enumerate(case.arrays.items()):
        scale = 1 / math.sqrt(shape[0]) if name.startswith("w") else 1.0
        make = jax.jit(functools.partial(_normal, i, shape, scale))
        found[name] = jax.block_until_ready(make())
    return found


def _normal(seed: int, shape: tuple[int, ...], scale: float) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(jnp.bfloat16)


def _compiled(run: Callable[..., Any], arrays: dict[str, jax.Array]) -> Callable[[], Any]:
    compiled = jax.jit(run).lower(arrays).compile(compiler_options=OPTIONS)
    for _ in range(_WARM_UP):
        jax.block_until_ready(compiled(arrays))
    return lambda: compiled(arrays)


def _calls(run: Callable[[], Any]) -> int:
    return max(1, min(200, round(_BATCH_S * 1e3 / _each_ms(run, 3))))


def _each_ms(run: Callable[[], Any], count: int) -> float:
    begin, result = time.perf_counter_ns(), None
    for _ in range(count):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter_ns() - begin) / 1e6 / count
