"""The kernels as the compilers of GPUs make them: no spills, tensor cores, and the registers of the tables.

Compiling needs the extra `plan-gpu`, and no GPU. What reads the compiler's words is tested everywhere.
"""

import dataclasses

import pytest

from benchmarks.kernels.compiled import CompiledKernel, compile_calls
from benchmarks.kernels.table import OF_AMPERE, OF_HOPPER, Table, assembled, calls, source
from jshard.errors import MissingExtraError
from jshard.occupancy import drain, footprint, gpu, paddings, resident
from jshard.occupancy.shipped_kernels import SHIPPED, ShippedKernel
from tests.gpu_compiler import needs_gpu_compiler, without_gpu_compiler
from tests.occupancy.absent_gpu import needs_ampere_kernels


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The kernels of a table, by call."""

    table: Table
    kernels: tuple[tuple[CompiledKernel, ...], ...]

    @property
    def shipped(self) -> tuple[ShippedKernel, ...]:
        return SHIPPED[self.table.generation.capability].kernels


TABLES = [
    pytest.param(OF_HOPPER, id="hopper"),
    pytest.param(OF_AMPERE, id="ampere", marks=needs_ampere_kernels),
]
ARCHS = {OF_HOPPER: ("sm_90a", "wgmma.mma_async"), OF_AMPERE: ("sm_80", "mma.sync")}


@pytest.fixture(scope="module", params=TABLES)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    table = request.param
    return Compiled(table, compile_calls(calls(table), device=table.device, timeout_s=900))


@needs_gpu_compiler
@pytest.mark.timeout(1200)
def test_every_kernel_compiles_without_spills_and_its_products_run_on_the_tensor_cores(compiled):
    table = compiled.table
    kernels = [kernel for of_call in compiled.kernels for kernel in of_call]
    assert len(kernels) >= len(table.forms) * 3 + 4 * 6 + 4 * 2
    arch, instruction = ARCHS[table]
    assert {kernel.arch for kernel in kernels} == {arch}
    assert not [kernel.launch.name for kernel in kernels if kernel.spill_bytes]
    for kernel in kernels:
        is_product = "norm" not in kernel.launch.name
        assert kernel.instructions == ((instruction,) if is_product else ()), kernel
        assert kernel.registers * kernel.launch.threads <= 65_536
    of_matmuls = compiled.kernels[: len(table.forms)]
    for of_call in of_matmuls:
        assert len({(kernel.launch.threads, kernel.launch.smem_bytes) for kernel in of_call}) == 1
        if not table.has_transposed:  # of a matmul transposed operands take no more
            assert len({kernel.registers for kernel in of_call}) == 1


@needs_gpu_compiler
@pytest.mark.timeout(1200)
def test_the_table_is_what_is_compiled_now(compiled):
    """If this fails for a change that is meant, `python -m benchmarks.kernels.table` prints the new table."""
    forms = assembled(compiled.table, compiled.kernels)
    without_registers = [dataclasses.replace(form, registers=1) for form in forms]
    assert [dataclasses.replace(kernel, registers=1) for kernel in compiled.shipped] == without_registers
    if source(compiled.kernels) == SHIPPED[compiled.table.generation.capability].source:
        assert [kernel.registers for kernel in compiled.shipped] == [form.registers for form in forms]


@pytest.mark.parametrize(
    ("name", "version", "drains"),
    [
        # Tiled 128x64x64/3 and /2, 64x128x64/3, 64x64x64/2: as they are, and 64x64x64/2 with one block left.
        ("a100", "2.28.9", [1, 2, 1, 3, 1]),
        ("a100", "2.30.7", [1, 2, 1, 3, 1]),
        ("a40", "2.28.9", [1, 1, 1, 2, 1]),
        ("a40", "2.30.7", [1, 1, 1, 2, 1]),
    ],
)
def test_the_drain_of_amperes_products_beside_nccl(name, version, drains):
    facts = gpu(name)
    ring = footprint("ring", gpu=facts, version=version).block
    forms = [kernel for kernel in SHIPPED[8].kernels if kernel.name == "matmul_nn_tiled"]
    smallest = forms[-1].block
    blocks_left, pad_bytes = paddings(facts, smallest)[-1]
    assert blocks_left == 1
    blocks = [*(kernel.block for kernel in forms), smallest.padded(pad_bytes)]
    assert all(resident(facts, block) for block in blocks)
    assert [drain(facts, block, ring) for block in blocks] == drains


def test_each_shipped_form_runs_on_both_gpus_of_the_generation():
    for kernel in SHIPPED[8].kernels:
        assert resident(gpu("a100"), kernel.block) and resident(gpu("a40"), kernel.block), kernel


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
