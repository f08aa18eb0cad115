"""The kernels as the compiler of a Hopper GPU makes them: no spills, tensor cores, and the registers of the table.

Compiling needs the extra `plan-gpu`, and no GPU. What reads the compiler's words is tested everywhere.
"""

import pytest

from benchmarks.kernels import compiled
from benchmarks.kernels.compiled import KernelCall, assembler, compile_calls
from benchmarks.kernels.launches import Launch
from benchmarks.kernels.table import assembled, calls
from jshard import _compat
from jshard.cluster.compile import CompileError
from jshard.errors import MissingExtraError
from jshard.kernels import KernelError, Occupancy
from jshard.occupancy import GPUS, shipped_kernels
from tests.gpu_compiler import needs_gpu_compiler, without_gpu_compiler


@pytest.fixture(scope="module")
def shipped():
    return compile_calls(calls(), timeout_s=900)


@needs_gpu_compiler
@pytest.mark.timeout(1200)
def test_every_kernel_compiles_without_spills_and_its_products_run_on_the_tensor_cores(shipped):
    found = [kernel for kernels in shipped for kernel in kernels]
    assert len(found) >= 4 * 3 + 4 * 6 + 4 * 2
    assert {kernel.arch for kernel in found} == {"sm_90a"}
    assert not [kernel.launch.name for kernel in found if kernel.spill_bytes]
    for kernel in found:
        assert kernel.uses_wgmma is ("norm" not in kernel.launch.name), kernel
        assert kernel.registers * kernel.launch.threads <= 65_536


@needs_gpu_compiler
@pytest.mark.timeout(1200)
def test_the_table_is_what_is_compiled_now(shipped):
    """If this fails for a change that is meant, `python -m benchmarks.kernels.table` prints the new table."""
    told = shipped_kernels(GPUS["h200"])
    forms = assembled(shipped)
    whole = lambda form: (form.name, form.tiles, form.threads, form.smem_bytes, form.persistent)
    assert [whole(kernel) for kernel in told] == [whole(form) for form in forms]
    if {kernel.source for kernel in told} == {f"compiled for sm_90a by {assembler()} with jax {_compat.jax_version()}"}:
        assert [kernel.registers for kernel in told] == [form.registers for form in forms]


@needs_gpu_compiler
def test_what_cannot_run_is_told_as_the_kernel_tells_it():
    wanted = KernelCall(
        kernel="matmul", shapes={"x": (512, 512), "w": (512, 512)}, occupancy=Occupancy(smem_pad_bytes=99_999)
    )
    with pytest.raises(KernelError, match="bytes of shared memory, where a block has 232,448 at most"):
        compile_calls([wanted])


@without_gpu_compiler
def test_without_the_extra():
    with pytest.raises(MissingExtraError) as told:
        compile_calls(calls())
    assert str(told.value) == (
        "The GPU compiler is not installed.\n"
        "  where: registers and spills of a kernel\n"
        "  why:   needed are jax[cuda12-local] and nvidia-cuda-nvcc-cu12; no GPU, driver or CUDA.\n"
        "  do:    pip install 'jshard[plan-gpu]'"
    )


def interpreter(folder, monkeypatch, script):
    """Puts a script of the shell in place of the Python that is started."""
    path = folder / "interpreter"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(compiled, "require_compiler", lambda *_, **__: None)
    monkeypatch.setattr(compiled.sys, "executable", str(path))


def test_a_crash_is_told_with_the_last_lines(tmp_path, monkeypatch):
    interpreter(tmp_path, monkeypatch, "echo 'F0000 check failed' >&2; kill -6 $$")
    with pytest.raises(CompileError) as told:
        compile_calls(calls()[:2])
    assert str(told.value) == (
        "The process that compiles has failed.\n"
        "  where: 2 calls of kernels for h200\n"
        "  why:   signal 6; its last lines:\n"
        "         F0000 check failed\n"
        "  do:    JSHARD_DEBUG=1 shows all that it said."
    )


def test_a_compiler_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    interpreter(tmp_path, monkeypatch, "exec sleep 600")
    with pytest.raises(CompileError, match="Compiling takes too long") as told:
        compile_calls(calls()[:1], timeout_s=0.05)
    assert "stopped after 0.05 s" in told.value.why


def words(name, registers, spills=0, product=True):
    """What the compiler says of a kernel, shortened."""
    return f"""\
.visible .entry {name}_mosaic_gpu_kernel(
{"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" if product else "ld.global.b32"}
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{name}_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for {name}_mosaic_gpu_kernel
    0 bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads
ptxas info    : Used {registers} registers, used 16 barriers, 1 bytes smem
"""


def launch(name, smem_bytes=1024, latency_ns=None):
    return Launch(name, (1, 1, 1), 128, smem_bytes, latency_ns)


def matched(known, *launches, said):
    return list(compiled._matched(launches, said, known))


def test_what_the_compiler_says_is_read():
    known = {}
    said = words("a", 90, spills=8) + words("b", 40, product=False) + words("a", 58)
    a, b, again = matched(known, launch("a"), launch("b", latency_ns=5), launch("a", 2048), said=said)
    assert (a.registers, a.spill_bytes, a.static_bytes, a.arch, a.uses_wgmma) == (90, 8, 1, "sm_90a", True)
    assert (b.registers, b.spill_bytes, b.uses_wgmma, b.launch.latency_ns) == (40, 0, False, 5)
    assert again.registers == 90  # of two kernels with one name the most
    # A kernel that was compiled before is not told of again.
    (once_more,) = matched(known, launch("b", latency_ns=7), said=words("c", 30))
    assert (once_more.registers, once_more.launch.latency_ns) == (40, 7)


def test_what_the_compiler_does_not_say_is_an_error():
    with pytest.raises(CompileError, match="has not said what a kernel takes") as told:
        matched({}, launch("a"), said=words("b", 40))
    assert (told.value.where, told.value.why) == (("a",), "it has named b.")
    with pytest.raises(CompileError, match="the assembler's words have changed"):
        matched({}, launch("a"), said=words("a", 40).replace("Used 40", "Takes 40"))
