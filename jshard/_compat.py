"""Every difference between versions of jax and flax, and every name of theirs that is not public."""

import contextlib
import importlib.metadata
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flax
import jax
from flax.nnx import graphlib
from jax import core

LINEN_CALL = "_call_wrapped_method"
"""The method of a Linen module through which every call of its methods goes: `(self, function, args, kwargs)`."""

_LIBRARY = tuple(str(pathlib.Path(file or "").parent) for file in (jax.__file__, flax.__file__, __file__))


def varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over which a value inside `shard_map` differs."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def manual_axes() -> frozenset[str]:
    """Mesh axes that are manual where we are: not empty inside a `shard_map`."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


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


def children(node: Any) -> Mapping[Any, Any]:
    """The attributes or items of a node of a Flax graph; empty for a leaf.

    `nnx.iter_graph` visits a shared node once; this is the step to visit it along every path.
    """
    if not graphlib.is_node(node):
        return {}
    impl = graphlib.get_node_impl(node)
    return {} if impl is None else impl.node_dict(node)


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
