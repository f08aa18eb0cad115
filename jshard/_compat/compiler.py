"""The compiler: its options, its cache of programs, and what it assumes of absent GPUs."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
from jax.experimental.compilation_cache import compilation_cache

from jshard._compat import private_names

ESTIMATES_AMPERE = jax.__version_info__ < (0, 11)
"""Whether XLA's analytical latency estimator is known to work for an A100; that of jaxlib 0.12 ends the process."""


def init_options(mesh: jax.sharding.Mesh) -> dict[str, str] | None:
    """Returns compiler options for the program that initialises a model; None for those by default.

    XLA:CPU starts independent computations early by default, and so holds the random bits of many parameters at
    once. Its algebraic simplifier combines the two products in `normal(0.02)`, which changes the last bit.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return None
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", "xla_disable_hlo_passes": "algsimp"}


# The parameters of JAX's function that stores a program, by which it is recognised; until 0.11 one more follows.
_CACHE_WRITE_PARAMETERS = ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]


def use_program_cache(cache: object, folder: str) -> None:
    """Makes JAX store compiled programs in a cache of ours, from every process of a run on CPUs.

    In JAX only the first process writes. But on CPUs each has its own programs with its own keys: the others would
    compile at every restart while the first one waits for them, and gloo gives up after 30 s.

    Args:
        cache: the programs, by key: `get` and `put`, and `_path`, which JAX reads.
        folder: its folder, which JAX shows in messages.
    """
    can_replace = private_names.CACHE_OF_FOLDER.exists()
    if can_replace and jax.default_backend() == "cpu" and _is_known_cache_write():
        private_names.CACHE_WRITE.replace(_write_from_any_process)
    set_program_cache(cache, folder)


def set_program_cache(cache: object, folder: str) -> None:
    """Makes JAX store compiled programs in a cache of ours; in its own form if the private name is gone."""
    private_names.CACHE_OF_FOLDER.replace(lambda path: (cache, path))
    compilation_cache.reset_cache()  # JAX keeps the cache that it opened first, and would never call the function above
    jax.config.update("jax_compilation_cache_dir", folder)


def _is_known_cache_write() -> bool:
    """Returns whether JAX's function that stores a program can be replaced by the one below."""
    written_by_first = private_names.CACHE_WRITE.find()
    if written_by_first is None or not private_names.CACHE_PUT.exists():
        return False
    parameters = list(inspect.signature(written_by_first).parameters)
    return parameters[: len(_CACHE_WRITE_PARAMETERS)] == _CACHE_WRITE_PARAMETERS


def _write_from_any_process(
    cache_key: str,
    compile_time_secs: float,
    module_name: str,
    backend: object,
    executable: object,
    host_callbacks: Sequence[object] = (),
) -> None:
    """Does what JAX's own function does, without its first condition: that the process is the first."""
    least_s: float = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    if host_callbacks or compile_time_secs < least_s:
        return
    put = private_names.CACHE_PUT.get()
    try:
        put(cache_key, module_name, executable, backend, int(compile_time_secs))
    except Exception as error:  # as in JAX: a program that cannot be stored must not end a run
        # The run continues, and the next one compiles this program again.
        warnings.warn(f"{module_name} is not stored: {type(error).__name__}: {error}", stacklevel=2)


class _AssumedCudnn:
    """A cuDNN and a GPU, in place of the loaded library and the first GPU of the process.

    Attributes:
        was_checked: whether JAX has asked for the version, as it does when it lowers attention.
    """

    def __init__(self, version: tuple[int, int], capability: tuple[int, int]) -> None:
        self._version = version
        self._capability = capability
        self.was_checked = False

    def version(self) -> int:
        """Returns the version as cuDNN itself writes it."""
        self.was_checked = True
        major, minor = self._version
        return major * 10_000 + minor * 100

    def is_at_least(self, capability: str) -> bool:
        """Returns whether the GPU has at least a compute capability, such as "9.0"."""
        # As numbers: as text, "10.0" would be below "9.0".
        return self._capability >= _numbers(capability)

    def is_equal(self, capability: str) -> bool:
        """Returns whether the GPU has a compute capability."""
        return self._capability == _numbers(capability)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("."))


@contextlib.contextmanager
def cudnn_assumed(version: tuple[int, int], capability: tuple[int, int]) -> Iterator[Callable[[], bool]]:
    """Makes JAX assume a cuDNN and a GPU when it lowers attention inside; yields whether it has checked them.

    It checks the loaded library and the first GPU of the process, and a plan has neither. There is no public switch; if
    the private names are gone, this does nothing, and JAX refuses the model.
    """
    assumed = _AssumedCudnn(version, capability)
    with contextlib.ExitStack() as stack:
        stack.enter_context(private_names.CUDNN_VERSION.replaced(assumed.version))
        stack.enter_context(private_names.CUDNN_AT_LEAST.replaced(assumed.is_at_least))
        stack.enter_context(private_names.CUDNN_IS_EQUAL.replaced(assumed.is_equal))
        yield lambda: assumed.was_checked


# ---- JAX's partitioner, Shardy, run on a lowered program without a compiler: passes that jaxlib does not document

MlirOperation: TypeAlias = Any
"""An operation of a lowered program: jaxlib's bindings have no types."""

# As XLA runs them: shardings are propagated; where an operand's is not the one that an operation needs, it is resharded
# by collectives.
_PASSES = (
    "sdy-propagation-pipeline",
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "func.func(sdy-reshard-to-collectives)",
)


def partitioned_module(lowered: jax.stages.Lowered) -> MlirOperation:
    """Returns the program with the shardings of all values, and with the collectives that they need."""
    from jaxlib.mlir import passmanager

    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        for passes in _PASSES:
            passmanager.PassManager.parse(f"builtin.module({passes})").run(module.operation)
    return module.operation


def shardings_of_region(region: MlirOperation) -> list[str]:
    """Returns the shardings of a manual region's results, as text."""
    from jaxlib.mlir.dialects import sdy

    attribute: Any = sdy.TensorShardingPerValueAttr(region.attributes["out_shardings"])
    return [str(sharding) for sharding in attribute.shardings]
