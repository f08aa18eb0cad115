"""Kernels for NVIDIA GPUs, whose interface changes from version to version."""

import inspect
from typing import Any

import jax


def mosaic_kernel(body: Any, *, name: str, scratch: list[Any], interpret: bool, **launch: Any) -> Any:
    """A Pallas kernel for NVIDIA GPUs; with `interpret` one that runs step by step on a CPU."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    interpreter = None
    if interpret:
        # Public since 0.11.
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        interpreter = InterpretGPUParams()
    return plgpu.kernel(
        body, scratch_types=scratch, compiler_params=params, kernel_name=name, interpret=interpreter, **launch
    )


def pallas_load(ref: Any, index: Any, *, interpret: bool) -> jax.Array:
    """Reads a part of an array in device memory inside a kernel, whatever the layout of those that use it."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    if interpret:  # of 0.10.2 it refuses the load below
        return ref[index]
    load: Any = plgpu.load
    if "idx" in inspect.signature(load).parameters:  # 0.10.2
        return load(ref.at[index], (), optimized=False)
    return load(ref.at[index], optimized=False)


def pallas_transposed(ref: Any) -> Any:
    """A matrix in shared memory, its dims swapped."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    own = vars(plgpu).get("transpose_ref")  # deprecated since references do it themselves
    return own(ref, (1, 0)) if own else ref.transpose((1, 0))


def interpreter_transposes() -> bool:
    """Whether the interpreter of kernels knows a transposed tile; that of 0.10.2 does not."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    return hasattr(plgpu, "InterpretGPUParams")
