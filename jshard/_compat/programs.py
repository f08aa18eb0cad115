"""Programs: options of the compiler, its partitioner, and kernels for NVIDIA GPUs."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def cudnn_assumed(version: tuple[int, int], capability: tuple[int, int]) -> Iterator[Callable[[], bool]]:
    """Inside, JAX takes a cuDNN and a GPU to be there as it traces and lowers attention; gives whether it has asked.

    It asks the library that is loaded, and the first GPU of the process: a plan is made without either. There is no
    public switch; where the private names are gone, this does nothing, and JAX refuses the model.
    """
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module
    except ImportError:
        yield lambda: False
        return
    asked: list[str] = []
    of = lambda text: tuple(int(number) for number in text.split("."))
    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": lambda: asked.append("version") or version[0] * 10_000 + version[1] * 100,
        "check_compute_capability": lambda text: capability >= of(text),
        "is_cuda_compute_capability_equal": lambda text: capability == of(text),
    }
    before = {name: getattr(module, name) for name in answers if hasattr(module, name)}
    for name in before:
        setattr(module, name, answers[name])
    try:
        yield lambda: bool(asked)
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def on_stream(function: Callable[..., Any], stream: int) -> Callable[..., Any]:
    """A function whose operations run on another stream of the GPU, beside those of the program around it."""
    from jax.experimental import compute_on as module

    wrap: Any = getattr(module, "compute_on2", module.compute_on)  # the first until 0.11
    return wrap(function, compute_type=f"gpu_stream:{stream}", out_memory_spaces=jax.memory.Space.Device)


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
