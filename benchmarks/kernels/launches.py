"""What kernels ask of a GPU, read from the program as it was lowered: neither a GPU nor its compiler is needed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mosaic_gpu
from jax.interpreters import mlir

_TARGETS = ("mosaic_gpu", "mosaic_gpu_v2")  # what the custom calls of Mosaic GPU are called


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel as the program starts it."""

    name: str  # of the kernel
    grid: tuple[int, int, int]  # thread blocks, in each of three dims
    threads: int  # of a block
    smem_bytes: int  # dynamic shared memory of a block, its barriers included
    latency_ns: int | None  # how long it takes as stated to XLA's scheduler; None if nothing is stated

    @property
    def num_blocks(self) -> int:
        """Thread blocks in all."""
        return math.prod(self.grid)


def launches(lowered: jax.stages.Lowered | str) -> tuple[Launch, ...]:
    """The Mosaic GPU kernels of a program, in its order; of a loop or a function those that are written in it, once.

    Examples:
        >>> h200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
        >>> with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=h200)):
        ...     lowered = jax.jit(js.kernels.matmul).trace(x, w).lower(lowering_platforms=("cuda",))
        >>> launches(lowered)[0].threads
        384
    """
    text = lowered if isinstance(lowered, str) else lowered.as_text()
    return tuple(_launch(call) for call in _operations(_parsed(text)) if _is_kernel(call))


def _parsed(program: str | bytes) -> Any:
    """A module of MLIR, as `Lowered.as_text()` holds one, and in it the custom calls of Mosaic GPU."""
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True  # the modules of kernels are in a frozen form of their dialects
    dialects: Any = mosaic_gpu  # its dialect is not in the names that it exports
    dialects.dialect.register_dialect(context)
    with context, mlir.ir.Location.unknown():
        return mlir.ir.Module.parse(program)


def _is_kernel(operation: Any) -> bool:
    is_call = operation.name == "stablehlo.custom_call"
    return is_call and operation.attributes["call_target_name"].value in _TARGETS


def _launch(call: Any) -> Launch:
    module = _parsed(call.attributes["mhlo.backend_config"]["module"].value_bytes)
    launch = next(each for each in _operations(module) if each.name.endswith("gpu.launch"))
    stated = call.attributes.get("mhlo.frontend_attributes")
    latency = stated["latency_metadata"] if stated is not None and "latency_metadata" in stated else None
    grid, threads, smem_bytes = _sizes(launch)
    return Launch(
        name=module.operation.attributes["sym_name"].value,
        grid=grid,
        threads=threads,
        smem_bytes=smem_bytes,
        latency_ns=None if latency is None else int(latency.value),
    )


def _sizes(launch: Any) -> tuple[tuple[int, int, int], int, int]:
    """Grid, threads and dynamic shared memory: constants, after what on the stream comes before."""
    first = len(launch.results)  # a token goes in where one comes out
    numbers = [each.owner.attributes["value"].value for each in list(launch.operands)[first:]]
    return (numbers[0], numbers[1], numbers[2]), math.prod(numbers[3:6]), numbers[-1]


def _operations(module: Any) -> Iterator[Any]:
    """Every operation of a module, in its order, those inside of others too."""
    pending = [module.operation]
    while pending:
        operation = pending.pop()
        yield operation
        inner = [each.operation for region in operation.regions for block in region for each in block]
        pending.extend(reversed(inner))
