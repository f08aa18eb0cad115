"""The kernels as the compiler of a Hopper GPU makes them: no spills, tensor cores, and the registers of the table.

Compiling needs the extra `plan-gpu`, and no GPU. What reads the compiler's words is tested everywhere.
"""

import pytest

from benchmarks.kernels.compiled import assembler, compile_calls
from benchmarks.kernels.table import assembled, calls
from jshard import _compat
from jshard.errors import MissingExtraError
from jshard.occupancy.shipped_kernels import SHIPPED, SHIPPED_SOURCE
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
    by_form = lambda kernels: {(k.registers, k.launch.threads, k.launch.smem_bytes) for k in kernels}
    assert all(len(by_form(kernels)) == 1 for kernels in shipped[:4])  # of a matmul transposed operands take no more
    for kernel in found:
        assert kernel.uses_wgmma is ("norm" not in kernel.launch.name), kernel
        assert kernel.registers * kernel.launch.threads <= 65_536


@needs_gpu_compiler
@pytest.mark.timeout(1200)
def test_the_table_is_what_is_compiled_now(shipped):
    """If this fails for a change that is meant, `python -m benchmarks.kernels.table` prints the new table."""
    forms = assembled(shipped)
    whole = lambda form: (form.name, form.tiles, form.threads, form.smem_bytes, form.persistent)
    assert [whole(kernel) for kernel in SHIPPED] == [whole(form) for form in forms]
    if f"compiled for sm_90a by {assembler()} with jax {_compat.jax_version()}" == SHIPPED_SOURCE:
        assert [kernel.registers for kernel in SHIPPED] == [form.registers for form in forms]


@without_gpu_compiler
def test_without_the_extra():
    with pytest.raises(MissingExtraError) as reported:
        compile_calls(calls())
    assert str(reported.value) == (
        "The GPU compiler is not installed.\n"
        "  where: registers and spills of a kernel\n"
        "  why:   it needs jax[cuda12-local] and nvidia-cuda-nvcc-cu12, but no GPU, driver or CUDA.\n"
        "  do:    pip install 'jshard[plan-gpu]'"
    )
