"""Kernels for NVIDIA GPUs: how Pallas takes them in each version, and streams beside that of the program."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jshard._compat import private_names

R = TypeVar("R")

Ref = Any
"""An array in memory inside a kernel of Pallas, which has no public class."""


COMPILES_FOR_AMPERE = jax.__version_info__ >= (0, 12)
"""Whether Pallas Mosaic GPU has the products of Ampere's tensor cores, and copies to shared memory without TMA."""

_ASSUMED_OF_ABSENT = "9.0"  # what JAX assumes of a device that reports no compute capability


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


def gpu_assumed(capability: tuple[int, int]) -> AbstractContextManager[None]:
    """Makes JAX trace and lower kernels for a GPU with this compute capability inside.

    It looks at the devices of the process, and takes an absent one for a Hopper GPU. There is no public switch; if the
    private name is gone, this does nothing.
    """
    return private_names.KERNEL_CAPABILITY.replaced(lambda: capability)


def kernel_capability() -> int:
    """Returns the major compute capability for which JAX traces and lowers kernels now."""
    infer = private_names.KERNEL_CAPABILITY.find()
    if infer is not None:
        major, _ = infer()
        return major
    reported = getattr(jax.devices()[0], "compute_capability", _ASSUMED_OF_ABSENT)
    return int(reported.partition(".")[0])


# ---- products of Ampere's tensor cores, whose operands and sums are in registers


def mma_zeros(shape: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    """Returns the sums of a tile in registers, for products of operands of a dtype."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    layouts: Any = plgpu.Layout
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layouts.MMA_ACC(dtype))


def mma(sums: jax.Array, a: Ref, b: Ref, *, interpret: bool) -> jax.Array:
    """Returns `sums + a @ b` of tiles in shared memory, which are loaded into registers."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    module: Any = plgpu
    a_MK = module.load(a, layout=module.Layout.MMA_LHS(a.dtype), optimized=False)
    b_KN = module.load(b, layout=module.Layout.MMA_RHS(b.dtype), optimized=False)
    if interpret:  # the interpreter has no rule for `mma`
        return sums + jnp.dot(a_MK, b_KN, preferred_element_type=sums.dtype)
    return module.mma(sums, a_MK, b_KN)


def load_for_copy(stage: Ref) -> jax.Array:
    """Reads a tile in shared memory such that threads side by side store to device memory side by side."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    module: Any = plgpu
    swizzle_bytes = module.find_swizzle(stage.shape[-1] * stage.dtype.itemsize * 8)
    copy_layout = module.Layout.SMEM_GMEM_COPY(stage.shape, stage.dtype, swizzle_bytes)
    return module.load(stage, layout=copy_layout, optimized=False)


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
