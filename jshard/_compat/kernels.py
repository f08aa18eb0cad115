"""Kernels for NVIDIA GPUs: how Pallas takes them in each version, and streams beside that of the program."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jshard._compat import private_names

R = TypeVar("R")

Ref = Any
"""An array in memory inside a kernel of Pallas, which has no public class."""


def on_stream(function: Callable[..., R], stream: int) -> Callable[..., R]:
    """Returns a function whose operations run on another stream of the GPU, beside those of the program around it."""
    from jax.experimental import compute_on as module

    wrap: Any = getattr(module, "compute_on2", module.compute_on)  # compute_on2 until 0.11
    return wrap(function, compute_type=f"gpu_stream:{stream}", out_memory_spaces=jax.memory.Space.Device)


def mosaic_kernel(
    body: Callable[..., None], *, name: str, scratch: Sequence[Any], interpret: bool, **launch: Any
) -> Callable[..., Any]:
    """Returns a Pallas kernel for NVIDIA GPUs; with `interpret` it runs step by step on a CPU."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    interpreter = None
    if interpret:
        interpreter = _interpreter_params()
    return plgpu.kernel(
        body, scratch_types=scratch, compiler_params=params, kernel_name=name, interpret=interpreter, **launch
    )


def _interpreter_params() -> Any:
    """Returns the settings of the interpreter, whose class is public since jax 0.11."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    params_class = vars(plgpu).get("InterpretGPUParams")
    if params_class is None:
        params_class = private_names.GPU_INTERPRETER.get()
    return params_class()


def pallas_load(ref: Ref, index: object, *, interpret: bool) -> jax.Array:
    """Reads a part of an array in device memory inside a kernel, with any layout of its users."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    if interpret:  # that of 0.10.2 refuses the load below
        return ref[index]
    load: Any = plgpu.load
    if "idx" in inspect.signature(load).parameters:  # 0.10.2
        return load(ref.at[index], (), optimized=False)
    return load(ref.at[index], optimized=False)


def pallas_transposed(ref: Ref) -> Ref:
    """Returns a matrix in shared memory with its dims swapped."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    transpose = vars(plgpu).get("transpose_ref")  # deprecated since references do it themselves
    if transpose is not None:
        return transpose(ref, (1, 0))
    return ref.transpose((1, 0))


def interpreter_transposes() -> bool:
    """Returns whether the interpreter of kernels supports a transposed tile; that of 0.10.2 does not."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    return hasattr(plgpu, "InterpretGPUParams")
