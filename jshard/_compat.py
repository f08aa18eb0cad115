"""Every difference between versions of what we stand on, and every name of theirs that is not public."""

import atexit
import concurrent.futures.thread  # noqa: F401  it closes the pools: what is noted after it is called before it
import contextlib
import importlib.metadata
import inspect
import os
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import flax
import jax
from flax import nnx
from flax.nnx import graphlib
from jax import core
from jax.sharding import NamedSharding, PartitionSpec

LINEN_CALL = "_call_wrapped_method"
"""The method of a Linen module through which every call of its methods goes: `(self, function, args, kwargs)`."""

_MAPPING, _TRANSFORMING = ("jax", "optax", "jshard"), ("init_fn", "update_fn", "init", "update")
_LIBRARY = tuple(str(pathlib.Path(file or "").parent) for file in (jax.__file__, flax.__file__, __file__))


def varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over which a value inside `shard_map` differs."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def manual_axes() -> frozenset[str]:
    """Mesh axes that are manual where we are: not empty inside a `shard_map`."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def on_host(x: Any) -> bool:
    """Whether an array, traced or not, lies in the host's memory: that is part of its type."""
    aval = x if isinstance(x, core.ShapedArray) else jax.typeof(x)
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def host_rows(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array in the host's memory, to be written row by row; what it holds before does not count.

    As `lax.scan` makes its own: of zeros that are put there, XLA:GPU would make a copy on the device first, which is
    what happens where the private name is gone.
    """
    try:
        from jax._src.lax.lax import empty2
    except ImportError:
        return jax.device_put(jax.numpy.zeros(shape, dtype), jax.memory.Space.Host)
    return jax.lax.broadcast(empty2(jax.numpy.dtype(dtype), memory_space=jax.memory.Space.Host), shape)


def bind(eqn: Any, values: list[Any]) -> list[Any]:
    """Runs an equation of a jaxpr on other values; its results."""
    found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(found) if eqn.primitive.multiple_results else [found]


def memory_kinds(device: Any) -> list[str]:
    """The kinds of memory that programs for a device can name; empty where it does not say."""
    try:
        return [memory.kind for memory in device.addressable_memories()]
    except (AttributeError, jax.errors.JaxRuntimeError):  # of a cluster that is not there
        return []


class _HostSharding(NamedSharding):
    """A sharding in the host's memory of devices that do not say which memories they have."""

    memory_kind = property(lambda self: "pinned_host")  # pyright: ignore[reportAssignmentType]

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.memory_kind))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HostSharding) and super().__eq__(other)


def host_sharding(mesh: Any, spec: PartitionSpec) -> NamedSharding:
    """A sharding in the host's memory.

    Of the devices of a GPU cluster that is not there jax knows no memories, and would drop the kind without a word; the
    compiler knows it.
    """
    found = NamedSharding(mesh, spec, memory_kind="pinned_host")
    return found if found.memory_kind else _HostSharding(mesh, spec)


def asked_of_results(sharding: Any) -> Any:
    """A sharding for the results of a program: of devices that are not there, their types alone name the host."""
    return NamedSharding(sharding.mesh, sharding.spec) if isinstance(sharding, _HostSharding) else sharding


def is_carry_mismatch(error: TypeError) -> bool:
    """Whether jax refused a loop because its carry varies over a mesh axis at the end and not at the start."""
    return "manual axis types do not match" in str(error) or "to='varying'" in str(error)


def is_tracer(x: Any) -> bool:
    """Whether a value is being traced, rather than there."""
    return isinstance(x, core.Tracer)


@contextlib.contextmanager
def fast_shape_tracing() -> Iterator[None]:
    """Inside, building a large model abstractly takes time linear in its size.

    Flax asks every traced RNG counter for its sharding; jax answers with an AttributeError whose text, which Flax
    throws away, costs a search through the whole program so far: quadratic, two thirds of the time for 96 layers.
    There is no public switch; where the private name is gone, this does nothing.
    """
    try:
        from jax._src.interpreters.partial_eval import DynamicJaxprTracer as tracer

        search = tracer._origin_msg
    except (ImportError, AttributeError):
        yield
        return
    tracer._origin_msg = lambda self: ""
    try:
        yield
    finally:
        tracer._origin_msg = search


SETTINGS = frozenset({int, float, bool, str, bytes, type(None), type, types.FunctionType})
"""Types of most of what a module holds besides modules, variables and arrays."""


def is_node(x: Any) -> bool:
    """Whether something has a place of its own in a Flax graph and things in it; a variable has not.

    As Flax's own function, which takes long, as it asks of every number whether it is a variable.
    """
    return type(x) in graphlib.GRAPH_REGISTRY or (type(x) not in SETTINGS and graphlib.is_node(x))


def children(node: Any) -> dict[Any, Any]:
    """The attributes or items of a node of a Flax graph, without those that Flax keeps for itself; empty for a leaf.

    `nnx.iter_graph` visits a shared node once; this is the step to visit it along every path.
    """
    impl = graphlib.GRAPH_REGISTRY.get(type(node)) or (graphlib.get_node_impl(node) if is_node(node) else None)
    found = {} if impl is None else impl.node_dict(node)
    return {key: child for key, child in found.items() if not str(key).startswith("_pytree__")}


def is_quantised(module: Any) -> bool:
    """Whether a module's calls go through qwix, which replaces products while they are traced."""
    return hasattr(type(module), "_unquantized_type")


def init_options(mesh: jax.sharding.Mesh) -> dict[str, str] | None:
    """Compiler options for the program that initialises a model.

    XLA:CPU starts independent computations early by default, and so holds the random bits of many parameters at
    once. And its algebraic simplifier joins the two products in `normal(0.02)`, which moves the last bit.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return None
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", "xla_disable_hlo_passes": "algsimp"}


def _frames(eqn: Any) -> list[Any]:
    traceback = getattr(eqn.source_info, "traceback", None)
    return list(traceback.frames) if traceback is not None else []


def frame_files(eqn: Any) -> str:
    """The files of the Python stack that made an equation of a jaxpr, one per line."""
    return "\n".join(frame.file_name for frame in _frames(eqn))


def user_frame(eqn: Any) -> str:
    """`file:line` of the user's code that made an equation: the innermost frame outside jax, flax and jshard."""
    for frame in _frames(eqn):
        if not frame.file_name.startswith((*_LIBRARY, "<")):
            return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num}"
    return "an unknown place"


def scope_of(eqn: Any) -> str:
    """The `jax.named_scope` around an equation, inside its own jaxpr."""
    return str(eqn.source_info.name_stack)


def called_by_optimizer() -> bool:
    """Whether the function that asks was called by the module of Flax in which `nnx.Optimizer` is."""
    return sys._getframe(2).f_globals.get("__name__") == nnx.Optimizer.__module__


def called_by_optax() -> bool:
    """Whether the function that asks was called, by way of jax's maps over trees, by a transformation of Optax.

    Not so Optax's functions of trees, such as `apply_updates` and `tree.norm`.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _MAPPING:
        if frame.f_code.co_name in _TRANSFORMING and frame.f_globals["__name__"].startswith("optax."):
            return True
        frame = frame.f_back
    return False


def launcher_cluster(environ: Mapping[str, str]) -> tuple[str, str, int, int] | None:
    """What JAX's own detection of cluster launchers finds: name, coordinator, number of processes, id of this one.

    None where there is no launcher, or only one process, or where the private module has changed.
    """
    try:
        from jax._src.clusters import ClusterEnv

        kinds = ClusterEnv._cluster_types
    except (ImportError, AttributeError):
        return None
    with _environment(environ):
        kind = next((kind for kind in kinds if not kind.opt_in_only_method and kind.is_env_present()), None)
        if kind is None or kind.get_process_count() < 2:
            return None
        port = environ.get("JAX_COORDINATOR_PORT")
        coordinator = kind.get_coordinator_address(timeout_secs=60, override_coordinator_port=port)
        name = kind.name or kind.__name__.removesuffix("Cluster").lower()  # that of Kubernetes has none
        return name, coordinator, kind.get_process_count(), kind.get_process_id()


@contextlib.contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Inside, these are the environment variables: JAX's detection reads no others."""
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def coordinator() -> Any:
    """The client of the service that the processes of a run share: keys, values and waits with a time limit.

    None in a single process, or where the private module has changed. `jax.distributed` has no public name for it.
    """
    try:
        from jax._src.distributed import global_state

        return global_state.client
    except (ImportError, AttributeError):
        return None


def plugin_versions(cuda: str) -> tuple[str, str]:
    """The versions of jaxlib and of its plugin for a CUDA version, such as "cuda12": a compiler needs them equal."""
    return importlib.metadata.version("jaxlib"), importlib.metadata.version(f"jax-{cuda}-plugin")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of some packages, for what was written by them."""
    return {package: importlib.metadata.version(package) for package in packages}


def jax_version() -> str:
    """The version of jax, for what was measured under it."""
    return jax.__version__


def before_threads_end(work: Callable[[], object]) -> None:
    """Calls something when the program ends, while thread pools still take work.

    `atexit` comes after they have closed. Where the private name is gone, it has to do.
    """
    getattr(threading, "_register_atexit", atexit.register)(work)


def set_orbax_deadline(timeout_s: float) -> None:
    """How long processes wait for each other at Orbax's barriers: 300 s for most, and there is no option for it.

    Where the private name is gone, this does nothing.
    """
    with contextlib.suppress(ImportError):
        from orbax.checkpoint.experimental.v1._src.synchronization import multihost

        multihost._DEFAULT_BARRIER_TIMEOUT = max(1, int(timeout_s))


def orbax_operations(least: int = 0) -> int:
    """How many operations Orbax has counted in this process, once it has counted at least some number of them.

    Its barriers are called by that number, which every process counts for itself: after one that failed in some
    process alone, no two would meet again. Where the private name is gone, this does nothing.
    """
    try:
        from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator as generator

        while generator._operation_id < least:
            generator.next_operation_id()
        return int(generator._operation_id)
    except (ImportError, AttributeError):
        return 0


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


def interpreter_transposes() -> bool:
    """Whether the interpreter of kernels knows a transposed tile; that of 0.10.2 does not."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    return hasattr(plgpu, "InterpretGPUParams")


def abstract_device() -> Any:
    """Kind, platform and number of cores of the devices of the mesh in use; None where no mesh is, or it has none."""
    return jax.sharding.get_abstract_mesh().abstract_device


def automatic_axes() -> dict[str, int]:
    """Axes of the mesh in use over which the compiler splits arrays, with their degrees, those of degree 1 left out."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes and mesh.shape[axis] > 1}


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


def on_stream(function: Callable[..., Any], stream: int) -> Callable[..., Any]:
    """A function whose operations run on another stream of the GPU, beside those of the program around it."""
    from jax.experimental import compute_on as module

    wrap: Any = getattr(module, "compute_on2", module.compute_on)  # the first until 0.11
    return wrap(function, compute_type=f"gpu_stream:{stream}", out_memory_spaces=jax.memory.Space.Device)


def pallas_transposed(ref: Any) -> Any:
    """A matrix in shared memory, its dims swapped."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    own = vars(plgpu).get("transpose_ref")  # deprecated since references do it themselves
    return own(ref, (1, 0)) if own else ref.transpose((1, 0))
