"""Libraries written as bytes: the loader takes them, and their functions return what they should."""

import ctypes
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jshard import _compat
from jshard.cluster import rocm_stubs
from jshard.cluster.elf import Code, ElfError, Function, Import, Imports, by_library, read_imports, shared_library
from jshard.errors import ShardingError
from tests.gpu_compiler import needs_rocm_compiler

x86_64_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux") or sys.maxsize < 2**32, reason="writes libraries for 64-bit Linux"
)
pytestmark = x86_64_linux


def loaded(tmp_path, functions, *, soname="libwritten.so.1"):
    path = tmp_path / soname
    path.write_bytes(shared_library(soname, functions))
    return ctypes.CDLL(str(path))


def test_functions_return_integers_texts_and_nothing_more(tmp_path):
    library = loaded(
        tmp_path,
        [
            Function("fails", "", Code.returning(100)),
            Function("fails_too", "", Code.returning(-1)),
            Function("text", "", Code.returning_address(b"absent\0")),
            Function("count", "", Code.storing_zero(7)),
        ],
    )
    assert (library.fails(), library.fails_too(1, b"x")) == (100, -1)
    library.text.restype = ctypes.c_char_p
    assert library.text() == b"absent"
    count = ctypes.c_int(8)
    assert (library.count(ctypes.byref(count)), count.value) == (7, 0)
    assert not hasattr(library, "another")


def test_what_a_pointer_leads_to_can_be_written(tmp_path):
    library = loaded(tmp_path, [Function("memory", "", Code.returning_address(bytes(256)))])
    library.memory.restype = ctypes.POINTER(ctypes.c_char * 256)
    memory = library.memory().contents
    memory[255] = b"x"
    assert library.memory().contents[255] == b"x"


def test_symbols_have_the_versions_that_are_asked_for(tmp_path):
    """`dlvsym` finds a symbol in a version of it, as the loader does for a library that needs one."""
    names = {("a", "V_1"): 1, ("b", "V_2"): 2, ("c", "V_1"): 3, ("d", ""): 4}
    functions = [Function(name, version, Code.returning(value)) for (name, version), value in names.items()]
    library = loaded(tmp_path, functions, soname="libversioned.so.2")
    find = ctypes.CDLL(None).dlvsym
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    for (name, version), value in names.items():
        assert getattr(library, name)() == value
        if version:
            address = find(library._handle, name.encode(), version.encode())
            assert ctypes.CFUNCTYPE(ctypes.c_int)(address)() == value
            assert find(library._handle, name.encode(), b"V_3") is None


@pytest.mark.parametrize("count", [0, 1, 500])
def test_any_number_of_functions(tmp_path, count):
    functions = [Function(f"function_{i}", f"V_{i % 3}" if i % 4 else "", Code.returning(i)) for i in range(count)]
    library = loaded(tmp_path, functions, soname=f"lib{count}.so")
    assert [getattr(library, function.name)() for function in functions] == list(range(count))


def test_what_a_library_of_this_machine_needs_is_read():
    imports = read_imports(Path(np._core._multiarray_umath.__file__))
    assert "libc.so.6" in imports.libraries
    groups = by_library(imports.symbols)
    assert all(symbol.version.startswith("GLIBC_") for symbol in groups["libc.so.6"])
    assert "PyErr_SetString" in {symbol.name for symbol in groups[""]}  # Python has no versions


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x02\x01" + bytes(100)])
def test_what_is_no_library_is_refused(tmp_path, content):
    path = tmp_path / "plugin.so"
    path.write_bytes(content)
    with pytest.raises(ElfError, match=r"plugin\.so (is not a shared library|has no table of symbols)"):
        read_imports(path)


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """A plugin that the loader refuses, and that needs two absent libraries."""
    symbols = (
        Import("hipGetDeviceCount", "libamdhip64.so.77", "hip_4.2"),
        Import("hipMalloc", "libamdhip64.so.77", "hip_4.2"),
        Import("absentCall", "", ""),
        Import("malloc", "libc.so.6", "GLIBC_2.2.5"),
        Import("free", "", ""),
    )
    libraries = ("libabsent.so.77", "libamdhip64.so.77", "libc.so.6")
    monkeypatch.setattr(rocm_stubs, "read_imports", lambda path: Imports(libraries, symbols))
    return tmp_path / "plugin.so"


def test_missing_libraries_and_no_others_are_replaced(plugin):
    assert rocm_stubs.load_stubs(plugin) == ("libabsent.so.77", "libamdhip64.so.77")
    # By their names, as the loader of the plugin finds them; the files are gone.
    hip, absent = ctypes.CDLL("libamdhip64.so.77"), ctypes.CDLL("libabsent.so.77")
    count = ctypes.c_int(8)
    assert (hip.hipMalloc(None, 8), hip.hipGetDeviceCount(ctypes.byref(count)), count.value) == (100, 100, 0)
    assert absent.absentCall() == 1
    assert not hasattr(hip, "absentCall") and ctypes.CDLL(None).absentCall() == 1  # it is found without a library
    assert not hasattr(absent, "free")  # the C library has it


def test_where_the_plugin_can_be_loaded_nothing_is(monkeypatch):
    monkeypatch.setattr(rocm_stubs, "read_imports", lambda path: pytest.fail("it was read"))
    assert rocm_stubs.load_stubs(Path(np._core._multiarray_umath.__file__)) == ()


@needs_rocm_compiler
def test_the_plugin_is_loaded_with_them():
    program = (
        "import ctypes; from jshard import _compat; from jshard.cluster.rocm_stubs import load_stubs\n"
        "path = next(filter(None, map(_compat.rocm_library, _compat.ROCM.versions)))\n"
        "load_stubs(path); print(bool(ctypes.CDLL(str(path)).GetPjrtApi))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


# ---- what is not compiled for AMD ----------------------------------------------------------------------------------


class Lowered:
    """A lowered program, as far as its text goes."""

    def __init__(self, *operations):
        self.text = "\n".join(f"  %0 = stablehlo.{operation}(%arg0)" for operation in operations)

    def as_text(self):
        return self.text


def refusal(monkeypatch, *operations):
    monkeypatch.setattr(_compat, "ROCM", _compat.ROCM.__class__("rocm", ("rocm7",), device_files=()))
    with pytest.raises(ShardingError) as error:
        rocm_stubs.check_rocm(Lowered(*operations), where="resnet for mi300x:8x8")
    return str(error.value)


def test_convolutions_are_refused_with_the_reason(monkeypatch):
    assert refusal(monkeypatch, "convolution", "dot_general", "convolution") == (
        "The step cannot be compiled for AMD GPUs on a machine without one.\n"
        "  where: resnet for mi300x:8x8\n"
        "  why:   it has 2 convolutions: XLA takes their kernels from MIOpen, which finds no GPU.\n"
        "  do:    jshard plan without --topology estimates its memory and communication, and compiles nothing."
    )


def test_decompositions_are_refused_with_the_names_of_their_calls(monkeypatch):
    said = refusal(monkeypatch, "custom_call @hipsolver_potrf_ffi", "custom_call @Sharding", "convolution")
    assert "it has 1 convolution: XLA" in said
    assert (
        "it calls hipsolver_potrf_ffi, for decompositions such as Cholesky's:"
        " JAX registers these for its ROCm plugin only where that finds a GPU." in said
    )


def test_other_programs_and_machines_with_such_a_gpu_are_not_refused(monkeypatch, tmp_path):
    rocm_stubs.check_rocm(Lowered("dot_general", "custom_call @Sharding"), where="gpt")
    here = _compat.ROCM.__class__("rocm", ("rocm7",), device_files=("null",))
    monkeypatch.setattr(_compat, "ROCM", here)
    rocm_stubs.check_rocm(Lowered("convolution"), where="resnet")


def test_the_patterns_fit_what_jax_lowers_to():
    def program(x):
        image = x[None, None]
        return jax.lax.conv(image, image, (1, 1), "SAME").sum() + jax.numpy.linalg.cholesky(x).sum()

    lowered = jax.jit(program).trace(np.eye(4, dtype="float32")).lower(lowering_platforms=("rocm",))
    text = lowered.as_text()
    assert "stablehlo.convolution(" in text and "stablehlo.custom_call @hipsolver_potrf" in text
