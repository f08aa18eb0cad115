"""How tests compile: most of what they cost is compiling, so machine code that is slow and soon made will do."""

import importlib.metadata
import os
import sys
from pathlib import Path

XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Programs of XLA:CPU can stop for ever in the threads that divide an operation, most on a loaded machine with few
# cores. Operations are small here, and as soon done by one thread.
XLA_FLAGS += " --xla_cpu_multi_thread_eigen=false"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Emits in half the time. XLA ends the process at a flag that it does not know, and later ones do not know this.
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

# As `python -m jshard` does: what jax and Flax make when they are imported is no garbage, and is not searched for any.
_NO_GARBAGE = "import atexit, gc; gc.set_threshold(200_000, 20, 50); atexit.register(gc.freeze)\n"

_SET_BY_TESTS = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTHONDONTWRITEBYTECODE")


def environment(programs: Path | None = None) -> dict[str, str]:
    """That of a command which a test starts: of a user who sets nothing, but programs are soon compiled.

    Args:
        programs: a folder that keeps them, for commands that compile the same ones.
    """
    found = {name: value for name, value in os.environ.items() if name not in _SET_BY_TESTS}
    found["XLA_FLAGS"] = XLA_FLAGS
    if programs is not None:
        found["JAX_COMPILATION_CACHE_DIR"] = str(programs)
        found["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        found["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    return found


def python(code: str, *arguments: object) -> list[str]:
    """The command that runs code in a process of its own; a search for garbage is a quarter of its start and end."""
    return [sys.executable, "-c", _NO_GARBAGE + code, *map(str, arguments)]
