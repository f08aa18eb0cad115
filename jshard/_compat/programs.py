"""Programs: compiler options, partitioner, kernels for NVIDIA GPUs, arrays in host memory; and Flax's modules."""

import contextlib
import functools
import inspect
import itertools
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.linen import module as _linen
from flax.nnx import graphlib
from jax import core
from jax.sharding import NamedSharding, PartitionSpec

ESTIMATES_AMPERE = jax.__version_info__ < (0, 11)
"""Whether XLA's analytical latency estimator is known to work for an A100."""


def init_options(mesh: jax.sharding.Mesh) -> dict[str, str] | None:
    """Compiler options for the program that initialises a model.

    XLA:CPU starts independent computations early by default, and so holds the random bits of many parameters at
    once. Its algebraic simplifier combines the two products in `normal(0.02)`, which changes the last bit.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return None
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", "xla_disable_hlo_passes": "algsimp"}


def use_program_cache(cache: Any, folder: str) -> None:
    """Makes JAX store compiled programs in our own cache; in JAX's own form if JAX has changed.

    In JAX only the first process writes. But on CPUs each has its own programs with its own keys: the others would
    compile at every restart while the first one waits for them, and gloo gives up after 30 s.
    """
    from jax._src import compilation_cache, compiler

    written_by_first: Any = getattr(compiler, "_cache_write", None)
    names = ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]  # and one more until 0.11
    if hasattr(compilation_cache, "get_file_cache"):
        compilation_cache.get_file_cache = lambda path: (cache, path)
        is_cpu = jax.default_backend() == "cpu"
        if (
            is_cpu
            and written_by_first is not None
            and list(inspect.signature(written_by_first).parameters)[:5] == names
        ):
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
        except Exception as error:  # as in JAX: a program that cannot be stored must not end a run
            warnings.warn(f"{module_name} is not stored: {type(error).__name__}: {error}", stacklevel=2)


@contextlib.contextmanager
def cudnn_assumed(version: tuple[int, int], capability: tuple[int, int]) -> Iterator[Callable[[], bool]]:
    """Inside it, JAX assumes a cuDNN and a GPU when it traces and lowers attention; yields whether it checked.

    It checks the loaded library and the first GPU of the process, and a plan has neither. There is no public switch; if
    the private names are gone, this does nothing, and JAX refuses the model.
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

    wrap: Any = getattr(module, "compute_on2", module.compute_on)  # compute_on2 until 0.11
    return wrap(function, compute_type=f"gpu_stream:{stream}", out_memory_spaces=jax.memory.Space.Device)


def mosaic_kernel(body: Any, *, name: str, scratch: list[Any], interpret: bool, **launch: Any) -> Any:
    """A Pallas kernel for NVIDIA GPUs; with `interpret` it runs step by step on a CPU."""
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
    """Reads a part of an array in device memory inside a kernel, with any layout of its users."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    if interpret:  # that of 0.10.2 refuses the load below
        return ref[index]
    load: Any = plgpu.load
    if "idx" in inspect.signature(load).parameters:  # 0.10.2
        return load(ref.at[index], (), optimized=False)
    return load(ref.at[index], optimized=False)


def pallas_transposed(ref: Any) -> Any:
    """A matrix in shared memory with its dims swapped."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    own = vars(plgpu).get("transpose_ref")  # deprecated since references do it themselves
    return own(ref, (1, 0)) if own else ref.transpose((1, 0))


def interpreter_transposes() -> bool:
    """Whether the interpreter of kernels supports a transposed tile; that of 0.10.2 does not."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    return hasattr(plgpu, "InterpretGPUParams")


# Arrays in host memory, also of absent devices.


def on_host(x: Any) -> bool:
    """Whether an array, traced or not, is in host memory, which is part of its type."""
    aval = x if isinstance(x, core.ShapedArray) else jax.typeof(x)
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def host_rows(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An uninitialised array in host memory, to be written row by row.

    Made as `lax.scan` makes its own: XLA:GPU would first create zeros on the device and copy them.
    """
    try:
        from jax._src.lax.lax import empty2
    except ImportError:
        return jax.device_put(jax.numpy.zeros(shape, dtype), jax.memory.Space.Host)
    return jax.lax.broadcast(empty2(jax.numpy.dtype(dtype), memory_space=jax.memory.Space.Host), shape)


def memory_kinds(device: Any) -> list[str]:
    """The memory kinds that programs for a device can name; empty if it does not report them."""
    try:
        return [memory.kind for memory in device.addressable_memories()]
    except (AttributeError, jax.errors.JaxRuntimeError):  # of an absent cluster
        return []


class _HostSharding(NamedSharding):
    """A sharding in host memory for devices that do not report their memories."""

    memory_kind = property(lambda self: "pinned_host")  # pyright: ignore[reportAssignmentType]

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.memory_kind))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HostSharding) and super().__eq__(other)


def host_sharding(mesh: Any, spec: PartitionSpec) -> NamedSharding:
    """A sharding in host memory. jax would drop the kind for absent devices, although the compiler supports it."""
    found = NamedSharding(mesh, spec, memory_kind="pinned_host")
    return found if found.memory_kind else _HostSharding(mesh, spec)


def asked_of_results(sharding: Any) -> Any:
    """A sharding for the results of a program: for absent devices, only their types name the host."""
    return NamedSharding(sharding.mesh, sharding.spec) if isinstance(sharding, _HostSharding) else sharding


# Flax's modules: the graphs of both its interfaces, and its own wrapper around a method of Linen.

LINEN_CALL = "_call_wrapped_method"
"""The method of a Linen module through which every call of its methods goes: `(self, function, args, kwargs)`."""

LINEN_REGISTER = "_register_submodules"
"""The method by which a bound Linen module takes what a field or an attribute has: `(self, name, value)`."""

SETTINGS = frozenset({int, float, bool, str, bytes, type(None), type, types.FunctionType})
"""The usual types of a module's attributes besides modules, variables and arrays."""


def is_linen_module(x: Any) -> bool:
    """Whether a value is a Linen module, which is a dataclass, too; for the parts of the library without Linen."""
    return isinstance(x, nn.Module)


def is_node(x: Any) -> bool:
    """Whether a value is an inner node of a Flax graph; a variable is not.

    Equals Flax's own function, which is slow because it checks every number for being a variable.
    """
    return type(x) in graphlib.GRAPH_REGISTRY or (type(x) not in SETTINGS and graphlib.is_node(x))


def children(node: Any) -> dict[Any, Any]:
    """The attributes or items of a node of a Flax graph, without Flax's internal ones; empty for a leaf.

    `nnx.iter_graph` visits a shared node once; with this it can be visited along every path.
    """
    impl = graphlib.GRAPH_REGISTRY.get(type(node)) or (graphlib.get_node_impl(node) if is_node(node) else None)
    found = {} if impl is None else impl.node_dict(node)
    return {key: child for key, child in found.items() if not str(key).startswith("_pytree__")}


_HANDLED = "method_handler_wrapped"  # Flax's mark of a wrapped method


def is_transformed(method: Any) -> bool:
    """Whether a method was created by one of Flax's transformations, such as `nn.vmap(Model)` or `@nn.remat`.

    Flax handles the method inside it, but not this one again.
    """
    return hasattr(method, _HANDLED) and hasattr(getattr(method, "__wrapped__", None), _HANDLED)


def is_method(function: Callable[..., Any]) -> bool:
    """Whether a function is a method of a Linen module, which Flax calls in its own way."""
    return hasattr(function, _HANDLED)


def linen_children(module: nn.Module) -> list[nn.Module]:
    """The submodules that a bound module has made in its `setup`, or has as fields."""
    return [child for child in module._state.children.values() if isinstance(child, nn.Module)]


def transformed_methods(base: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class that were created by Flax's transformations."""
    return {name: method for name in dir(base) if is_transformed(method := inspect.getattr_static(base, name))}


def run_method(
    function: Callable[..., Any], module: nn.Module, args: tuple, kwargs: Mapping[str, Any], ours: Callable[..., Any]
) -> Any:
    """Runs a plain method of a bound copy of a module, from inside an interceptor of the module's own call.

    Captured results, names and interceptors around ours belong to that call. Interceptors of the model itself, inside
    it, see the copy.
    """
    call: Callable[..., Any] = functools.partial(function, module)
    if is_transformed(function):  # the module inside does all of this
        return call(*args, **kwargs)
    context = nn.module.InterceptorContext(module, function.__name__, call)
    for interceptor in itertools.takewhile(lambda one: one is not ours, _linen._global_interceptor_stack):
        inner = call
        call = lambda *args, inner=inner, interceptor=interceptor, **kw: interceptor(inner, args, kw, context)
    module._try_setup()
    _linen._context.module_stack.append(module)
    try:
        return call(*args, **kwargs)
    finally:
        _linen._context.module_stack.pop()


def exported_state(module: nn.Module) -> Any:
    """The parts of a module's call state that pass to a copy that runs the call, as in Flax's transformations."""
    return module._state.export()


def in_state_of(module: nn.Module, copy: nn.Module) -> nn.Module:
    """A copy of a module with its call state."""
    object.__setattr__(copy, "_state", exported_state(module))
    return copy
