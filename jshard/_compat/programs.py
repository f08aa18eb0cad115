"""Programs: options of the compiler, its partitioner, and kernels for NVIDIA GPUs."""

import contextlib
import inspect
import warnings
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


def use_program_cache(cache: Any, folder: str) -> None:
    """Lets JAX keep compiled programs in a cache of our own; in a folder as JAX writes it, where JAX has changed.

    JAX lets the first process alone write. But on CPUs each has programs of its own, under keys of its own: the others
    would compile at every restart while the first one waits for them, and gloo gives up after 30 s.
    """
    from jax._src import compilation_cache, compiler

    written_by_first: Any = getattr(compiler, "_cache_write", None)
    names = ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]  # and until 0.11 one more
    if hasattr(compilation_cache, "get_file_cache"):
        compilation_cache.get_file_cache = lambda path: (cache, path)
        if written_by_first is not None and list(inspect.signature(written_by_first).parameters)[:5] == names:
            compiler._cache_write = _written_by_all
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", folder)


def _written_by_all(
    cache_key: str, compile_time_secs: float, module_name: str, backend: Any, executable: Any, host_callbacks: Any = ()
) -> None:
    from jax._src import compilation_cache

    least_s: Any = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    if not host_callbacks and compile_time_secs >= least_s:
        try:
            compilation_cache.put_executable_and_time(
                cache_key, module_name, executable, backend, int(compile_time_secs)
            )
        except Exception as error:  # as JAX does: a program that cannot be kept is no reason to end a run
            warnings.warn(f"{module_name} is not kept: {type(error).__name__}: {error}", stacklevel=2)


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
