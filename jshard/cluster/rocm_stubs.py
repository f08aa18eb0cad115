"""Stand-ins for the libraries of ROCm, with which JAX's ROCm plugin compiles on a machine without ROCm.

XLA's compiler for AMD GPUs is complete in the plugin: LLVM, the linker and the device's own library are linked into
it. But the plugin also needs the libraries that run programs, and the loader refuses it without them. So each missing
one is written as a small library with the functions that the plugin's own tables name, and loaded before the plugin.
There is no list of these names to maintain.

Nothing runs, so the plugin calls few of them: where it asks for devices, the answer is that there are none. A function
that a later version calls returns an error, which the plugin handles or reports; at worst it aborts, which is why this
happens in the process that compiles and nowhere else. Programs that need more are refused, by `check_rocm`.
"""

from __future__ import annotations

import collections
import ctypes
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from jshard import _compat
from jshard._text import counted
from jshard.cluster.elf import Code, Function, Import, by_library, read_imports, shared_library
from jshard.errors import ShardingError

# ---- stand-ins

_HIP = "libamdhip64.so"  # the library of the driver; a version follows in its file name
_NO_DEVICE = Code.returning(100)  # hipErrorNoDevice
_ERROR = Code.returning(1)  # an error of each of the others
_TEXT = Code.returning_address(b"ROCm is not installed\0")

_TEXTS = ("hipGetErrorString", "hipGetErrorName", "ncclGetErrorString", "ncclGetLastError")
_SPECIAL = {
    **dict.fromkeys(_TEXTS, _TEXT),
    "hipGetDeviceCount": Code.storing_zero(100),
    # Called while the plugin is loaded, for its own kernels: it must return a handle.
    "__hipRegisterFatBinary": Code.returning_address(bytes(256)),
}


def load_stubs(plugin: Path) -> tuple[str, ...]:
    """Loads stand-ins for the libraries that a plugin needs and the loader does not find.

    Args:
        plugin: the file of the plugin.

    Returns:
        The file names of the missing libraries; empty if the plugin can be loaded as it is.

    Raises:
        ElfError: the file is not a shared library.
        OSError: the loader refuses a stand-in.
    """
    if _loaded(str(plugin)) is not None:  # ROCm is installed where only the plugin looks for it
        return ()
    imports = read_imports(plugin)
    available = [ctypes.CDLL(None)]  # what this process has loaded
    missing = []
    for name in imports.libraries:
        library = _loaded(name)
        if library is None:
            missing.append(name)
        else:
            available.append(library)
    functions = _functions_by_library(imports.symbols, missing, available)
    with tempfile.TemporaryDirectory(prefix="jshard-rocm-") as folder:
        for name in missing:
            path = Path(folder) / name
            path.write_bytes(shared_library(name, functions[name]))
            # The files may go then: what is loaded stays. Global, so that functions without a library are found.
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return tuple(missing)


def _loaded(name: str) -> ctypes.CDLL | None:
    """Returns a library; None if the loader does not find it, or something that it needs."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _functions_by_library(
    symbols: Sequence[Import], missing: Sequence[str], available: Sequence[ctypes.CDLL]
) -> dict[str, list[Function]]:
    """Returns the functions of each missing library."""
    groups = by_library(symbols)
    functions = {name: [_stub(symbol) for symbol in groups.get(name, ())] for name in missing}
    # The tables do not say which library has a function without a version. Any of the missing ones will do.
    unplaced = [symbol for symbol in groups.get("", ()) if not _is_in(symbol.name, available)]
    if missing:
        functions[missing[0]] += [_stub(symbol) for symbol in unplaced]
    return functions


def _is_in(name: str, libraries: Sequence[ctypes.CDLL]) -> bool:
    return any(hasattr(library, name) for library in libraries)


def _stub(symbol: Import) -> Function:
    """Returns the function that stands for a symbol."""
    general = _NO_DEVICE if symbol.library.startswith(_HIP) else _ERROR
    return Function(symbol.name, symbol.version, _SPECIAL.get(symbol.name, general))


# ---- programs that cannot be compiled with them

_CONVOLUTION = re.compile(r"\bstablehlo\.convolution\b")
# Calls of a library: JAX registers what they call where its ROCm plugin finds a GPU, and nowhere else.
_LIBRARY_CALL = re.compile(r"\bstablehlo\.custom_call @(hip\w+)")


def check_rocm(lowered: jax.stages.Lowered, *, where: str) -> None:
    """Refuses a program that cannot be compiled for AMD GPUs here; does nothing on a machine with such a GPU.

    Args:
        lowered: the program, lowered for AMD GPUs.
        where: what is compiled, for the error.

    Raises:
        ShardingError: the program has operations that need a GPU while they are compiled.
    """
    if not _compat.ROCM.are_useless({}):
        return
    reasons = _reasons(lowered.as_text())
    if reasons:
        raise ShardingError(
            "The step cannot be compiled for AMD GPUs on a machine without one.",
            where=where,
            why="\n".join(reasons),
            do="jshard plan without --topology estimates its memory and communication, and compiles nothing.",
        )


def _reasons(program: str) -> list[str]:
    """Returns why a program cannot be compiled, a line for each kind of operation."""
    reasons = []
    num_convolutions = len(_CONVOLUTION.findall(program))
    if num_convolutions:
        reasons.append(
            f"it has {counted(num_convolutions, 'convolution', 'convolutions')}:"
            " XLA takes their kernels from MIOpen, which finds no GPU."
        )
    calls = collections.Counter(_LIBRARY_CALL.findall(program))
    if calls:
        names = ", ".join(calls)
        reasons.append(
            f"it calls {names}, for decompositions such as Cholesky's:"
            " JAX registers these for its ROCm plugin only where that finds a GPU."
        )
    return reasons
