"""Options of the compiler, and programs in its own form."""

from collections.abc import Callable
from typing import Any

import jax


def init_options(mesh: jax.sharding.Mesh) -> dict[str, str] | None:
    """Compiler options for the program that initialises a model.

    XLA:CPU starts independent computations early by default, and so holds the random bits of many parameters at
    once. And its algebraic simplifier joins the two products in `normal(0.02)`, which moves the last bit.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return None
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", "xla_disable_hlo_passes": "algsimp"}


def on_stream(function: Callable[..., Any], stream: int) -> Callable[..., Any]:
    """A function whose operations run on another stream of the GPU, beside those of the program around it."""
    from jax.experimental import compute_on as module

    wrap: Any = getattr(module, "compute_on2", module.compute_on)  # the first until 0.11
    return wrap(function, compute_type=f"gpu_stream:{stream}", out_memory_spaces=jax.memory.Space.Device)


def parsed_program(program: str | bytes) -> Any:
    """A module of MLIR, as `Lowered.as_text()` holds one, and in it the custom calls of Mosaic GPU."""
    import jax.experimental.mosaic.gpu as module
    from jax.interpreters import mlir

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True  # the modules of kernels are in a frozen form of their dialects
    mosaic_gpu: Any = module  # its dialect is not in the names that it exports
    mosaic_gpu.dialect.register_dialect(context)
    with context, mlir.ir.Location.unknown():
        return mlir.ir.Module.parse(program)


# As XLA runs Shardy before it partitions a program; the last two turn what differs into collectives.
_PARTITION = (
    "builtin.module(sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true}),"
    "func.func(sdy-reshard-to-collectives),canonicalize,cse)"
)


def partitioned(lowered: Any) -> Any:
    """The module of a lowered program with the collectives that its shardings ask for, as Shardy finds them.

    None where it cannot be known without a compiler: another partitioner is in use, or these passes have other names.
    """
    from jax.extend.mlir import ir, passmanager

    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return None
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        try:
            passmanager.PassManager.parse(_PARTITION).run(module.operation)
        except (ValueError, ir.MLIRError):
            return None
    return module
