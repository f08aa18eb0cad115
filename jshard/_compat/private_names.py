"""Every private name of JAX, Flax and Orbax that jshard uses, and what happens where a version lacks it.

Such a name may change or go in any release. So each has one record here, the other files of this package look it up by
its record, and no file names it elsewhere: a test reads the source for such names, and another looks up each of them in
the installed versions.

Most have a fallback: what is slower, or not as good, without the name. Those with `needed_for` have none: their absence
is an error that names the version, raised before a model computes anything.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

from jshard.errors import UnsupportedVersionError

Private = Any
"""What has a private name, or came from it: no public type describes it."""


@dataclasses.dataclass(frozen=True)
class SupportedVersions:
    """The versions of a package in which the private names were tested.

    Attributes:
        package: its name for pip.
        first: the lowest version that jshard accepts at all, as in `pyproject.toml`.
        excluded: the first version after the latest one in which the tests have passed.
    """

    package: str
    first: str
    excluded: str


SUPPORTED = {
    "jax": SupportedVersions("jax", first="0.10.2", excluded="0.13"),
    "flax": SupportedVersions("flax", first="0.12.8", excluded="0.13"),
    "orbax": SupportedVersions("orbax-checkpoint", first="0.12.8", excluded="0.13"),
}
"""By the name that the package is imported by."""


@dataclasses.dataclass(frozen=True)
class PrivateName:
    """A private name of a dependency.

    Attributes:
        module: the module that has it.
        path: its name there, with dots for an attribute of what the module has.
        without: what happens if it is gone.
        needed_for: what cannot work without it; empty if there is a fallback.
        is_on_instances: whether only instances of the class have the attribute, and not the class itself.
        since: the version of the package from which on it is used; empty for all that are supported.
    """

    module: str
    path: str
    without: str
    needed_for: str = ""
    is_on_instances: bool = False
    since: str = ""

    @property
    def attribute(self) -> str:
        """The last part of the name."""
        return self.path.rpartition(".")[2]

    def exists(self) -> bool:
        """Returns whether the installed version has the name."""
        try:
            return hasattr(self._owner(), self.attribute)
        except (ImportError, AttributeError):
            return False

    def find(self) -> Private:
        """Returns what has the name; None if the installed version does not have it."""
        try:
            return getattr(self._owner(), self.attribute)
        except (ImportError, AttributeError):
            return None

    def get(self) -> Private:
        """Returns what has the name, which jshard needs.

        Raises:
            UnsupportedVersionError: the installed version does not have it.
        """
        # Not by `find() is None`: what has the name may be None, such as the client of a run that is not distributed.
        if not self.exists():
            raise self.missing()
        return self.find()

    def find_in(self, instance: object) -> Private:
        """Returns the attribute of an instance; None if it has no such attribute."""
        return getattr(instance, self.attribute, None)

    def get_in(self, instance: object) -> Private:
        """Returns the attribute of an instance, which jshard needs.

        Raises:
            UnsupportedVersionError: it has no such attribute.
        """
        try:
            return getattr(instance, self.attribute)
        except AttributeError:
            raise self.missing() from None

    def replace(self, value: object) -> None:
        """Lets the library find another value under this name from now on; does nothing if it is gone."""
        if self.exists():
            setattr(self._owner(), self.attribute, value)

    @contextlib.contextmanager
    def replaced(self, value: object) -> Iterator[None]:
        """Lets the library find another value under this name inside the context; does nothing if it is gone."""
        before = self.find()
        self.replace(value)
        try:
            yield
        finally:
            self.replace(before)

    def missing(self) -> UnsupportedVersionError:
        """Returns the error for an installed version that does not have the name."""
        supported = SUPPORTED[self.module.partition(".")[0]]
        package = supported.package
        version = importlib.metadata.version(package)
        return UnsupportedVersionError(
            f"jshard cannot use the installed version of {package}.",
            where=f"{package} {version}: {self.module}.{self.path}",
            why=f"{self.needed_for or self.without} depend on this private name, which the version does not have;\n"
            f"jshard was tested with {package} from {supported.first} on, up to {supported.excluded}.",
            do=f'pip install "{package}>={supported.first},<{supported.excluded}"',
        )

    def _owner(self) -> Any:
        # Looked up at each use: an import at the top would load Flax and Orbax into processes that need neither.
        owner: Any = importlib.import_module(self.module)
        for part in self.path.split(".")[:-1]:
            owner = getattr(owner, part)
        return owner


# JAX: tracing and primitives.

TRACE_CONTEXT = PrivateName(
    "jax._src.config",
    "trace_context",
    without="no two traces count as made in the same settings: each unit is traced by itself, which is slow",
)
HAS_NUMBERS = PrivateName(
    "jax._src.core",
    "is_concrete",
    without="the numbers of a value that is differentiated count as unknown",
)
TRACER_ORIGIN = PrivateName(
    "jax._src.interpreters.partial_eval",
    "DynamicJaxprTracer._origin_msg",
    without="building a deep model abstractly takes time that grows with the square of its depth",
)
STAGING_RULES = PrivateName(
    "jax._src.interpreters.partial_eval",
    "custom_staging_rules",
    without="equations of jshard keep the parameters that they were bound with",
)
WEAK_CACHE_KEYS = PrivateName(
    "jax._src.util",
    "weakref_cache_key_types",
    without="JAX's caches keep the latest thousands of programs alive",
)
CHECKIFY_ERROR = PrivateName(
    "jax._src.checkify", "Error", without="checkify does not look into the programs of jshard's equations"
)
CHECKIFY_JAXPR = PrivateName("jax._src.checkify", "checkify_jaxpr", without=CHECKIFY_ERROR.without)
CHECKIFY_RULES = PrivateName("jax._src.checkify", "error_checks", without=CHECKIFY_ERROR.without)
COMPUTE_TYPE = PrivateName(
    "jax._src.compute_on",
    "extend_compute_type",
    without="the public `compute_on` takes its place up to jax 0.11; later it is no context any more",
    needed_for="models that use compute_on",
)
EMPTY_ON_HOST = PrivateName(
    "jax._src.lax.lax",
    "empty2",
    without="buffers in host memory are made of zeros on the device, and copied",
)

# JAX: devices and processes.

BACKENDS_ARE_INITIALIZED = PrivateName(
    "jax._src.xla_bridge",
    "backends_are_initialized",
    without="devices count as initialised",
)
CLUSTER_TYPES = PrivateName(
    "jax._src.clusters",
    "ClusterEnv._cluster_types",
    without="only the launchers that jshard knows itself (Slurm, Open MPI, Kubernetes) are recognised",
)
PLUGIN_IS_LOADED = PrivateName(
    "jax._src.lib",
    "xla_client.pjrt_plugin_loaded",
    without="other devices than AMD GPUs work",
    needed_for="plans for AMD GPUs",
)
REGISTER_PLUGIN = PrivateName(
    "jax._src.xla_bridge",
    "register_plugin",
    without=PLUGIN_IS_LOADED.without,
    needed_for=PLUGIN_IS_LOADED.needed_for,
)
DISTRIBUTED_CLIENT = PrivateName(
    "jax._src.distributed",
    "global_state.client",
    without="a run of one process works",
    needed_for="runs of several processes",
)

# JAX: compiled programs on disk.

CACHE_OF_FOLDER = PrivateName(
    "jax._src.compilation_cache",
    "get_file_cache",
    without="compiled programs are stored in JAX's own form, which a killed process may damage",
)
CACHE_PUT = PrivateName(
    "jax._src.compilation_cache",
    "put_executable_and_time",
    without="only the first process stores its compiled programs",
)
CACHE_WRITE = PrivateName("jax._src.compiler", "_cache_write", without=CACHE_PUT.without)

# JAX: kernels for NVIDIA GPUs.

CUDNN_VERSION = PrivateName(
    "jax._src.cudnn.fused_attention_stablehlo",
    "check_cudnn_version",
    without="JAX refuses to plan attention by cuDNN for absent GPUs",
)
CUDNN_AT_LEAST = PrivateName(
    "jax._src.cudnn.fused_attention_stablehlo", "check_compute_capability", without=CUDNN_VERSION.without
)
CUDNN_IS_EQUAL = PrivateName(
    "jax._src.cudnn.fused_attention_stablehlo", "is_cuda_compute_capability_equal", without=CUDNN_VERSION.without
)
GPU_INTERPRETER = PrivateName(
    "jax._src.pallas.mosaic_gpu.interpret.params",
    "InterpretGPUParams",
    without="the public name of jax 0.11 and later is used",
    needed_for="kernels that run step by step on a CPU under jax 0.10",
)

KERNEL_CAPABILITY = PrivateName(
    "jax.experimental.mosaic.gpu.utils",
    "_infer_arch",
    without="kernels are planned for absent Hopper GPUs only",
    since="0.12",
)

# Flax: graphs of NNX, and its variables. `graphlib` has no underscore, but is not documented.

GRAPH_REGISTRY = PrivateName(
    "flax.nnx.graphlib",
    "GRAPH_REGISTRY",
    without="a model is walked by the public names of NNX and of JAX's pytrees, which is slower",
)
GRAPH_NODE_IMPL = PrivateName("flax.nnx.graphlib", "get_node_impl", without=GRAPH_REGISTRY.without)
IS_GRAPH_NODE = PrivateName("flax.nnx.graphlib", "is_node", without=GRAPH_REGISTRY.without)
INTERNAL_PREFIX = "_pytree__"  # of the attributes that NNX itself sets on a module
INTERNAL_STATE = PrivateName(
    "flax.nnx",
    f"Module.{INTERNAL_PREFIX}state",
    without="a module seems to have one attribute more, which holds no array",
    is_on_instances=True,
)
TRACE_STATE = PrivateName(
    "flax.nnx.tracers",
    "TraceState",
    without="plain models work",
    needed_for="parameters that keep their placement when they are written",
)
TRACE_OF_STATE = PrivateName(
    "flax.nnx.tracers", "TraceState._jax_trace", without=TRACE_STATE.without, needed_for=TRACE_STATE.needed_for
)
VARIABLE_TRACE = PrivateName(
    "flax.nnx", "Variable._trace_state", without=TRACE_STATE.without, needed_for=TRACE_STATE.needed_for
)
VARIABLE_VALUE = PrivateName(
    "flax.nnx",
    "Variable._raw_value",
    without="values are written by the public `set_raw_value`, which refuses variables of an outer trace",
)
VARIABLE_METADATA = PrivateName(
    "flax.nnx",
    "Variable._var_metadata",
    without="metadata are read by the public `get_metadata`, which copies them",
)

# Flax: Linen. None of these has a fallback: without them a call of an annotated module would run beside the engine, and
# every parameter would be gathered where the compiler likes.

_LINEN = "Linen models"
_OTHERS = "models of NNX work"
LINEN_CALL_METHOD = PrivateName("flax.linen", "Module._call_wrapped_method", without=_OTHERS, needed_for=_LINEN)
LINEN_REGISTER_METHOD = PrivateName("flax.linen", "Module._register_submodules", without=_OTHERS, needed_for=_LINEN)
LINEN_SETUP = PrivateName("flax.linen", "Module._try_setup", without=_OTHERS, needed_for=_LINEN)
LINEN_STATE = PrivateName("flax.linen", "Module._state", without=_OTHERS, needed_for=_LINEN, is_on_instances=True)
LINEN_INTERCEPTORS = PrivateName("flax.linen.module", "_global_interceptor_stack", without=_OTHERS, needed_for=_LINEN)
LINEN_CALLERS = PrivateName("flax.linen.module", "_context.module_stack", without=_OTHERS, needed_for=_LINEN)
LINEN_IS_HANDLED = PrivateName(
    "flax.linen", "Dense.__call__.method_handler_wrapped", without=_OTHERS, needed_for=_LINEN
)

# Orbax.

ORBAX_DEADLINE = PrivateName(
    "orbax.checkpoint.experimental.v1._src.synchronization.multihost",
    "_DEFAULT_BARRIER_TIMEOUT",
    without="processes wait at Orbax's barriers for its own 300 s",
)
ORBAX_COUNTER = PrivateName(
    "orbax.checkpoint._src.futures.synchronization",
    "OperationIdGenerator._operation_id",
    without="after a failure in some processes only, the next save in Orbax's form may end in a time-out",
)
ORBAX_COUNT = PrivateName(
    "orbax.checkpoint._src.futures.synchronization",
    "OperationIdGenerator.next_operation_id",
    without=ORBAX_COUNTER.without,
)

PRIVATE_NAMES = tuple(value for value in list(globals().values()) if isinstance(value, PrivateName))
"""All of them."""
