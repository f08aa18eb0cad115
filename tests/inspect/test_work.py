"""Operations and memory traffic of compiled instructions are counted as they run."""

import pytest

from jshard.inspect.hlo.module import parse_module
from jshard.inspect.hlo.work import EqualProducts, OpWork
from jshard.inspect.hlo.worker import Worker
from tests.scheduled_text import computation, program


def work_of(*lines: str, computations: str = "") -> OpWork:
    """The work of the last instruction of an entry."""
    module = parse_module(program(*lines, computations=computations))
    home = module.computations[module.entry]
    return Worker(module).work(home, home.instructions[-1])


def test_a_batched_product():
    found = work_of(
        "%a = bf16[4,8,16]{2,1,0} constant({...})",
        "%b = bf16[4,16,32]{2,1,0} constant({...})",
        "%c = f32[4,8,32]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}",
    )
    product = EqualProducts("bf16", 2 * 4 * 8 * 16 * 32, sizes=(4, 8, 32, 16))
    assert found == OpWork((product,), (4 * 8 * 16 + 4 * 16 * 32) * 2 + 4 * 8 * 32 * 4)


def test_a_batched_product_as_a_tpu_writes_it():
    """A convolution whose window is the batch, spread so that each batch meets its own kernel place alone."""
    found = work_of(
        "%a = bf16[4,8,16]{2,1,0} constant({...})",
        "%b = bf16[4,16,32]{2,1,0} constant({...})",
        "%c = f32[4,8,32]{2,1,0} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
    )
    assert found.flops == (("bf16", 2 * 4 * 8 * 16 * 32),)


def test_a_convolution_counts_no_padding():
    found = work_of(
        "%x = f32[2,5,5,3]{3,2,1,0} constant({...})",
        "%k = f32[3,3,3,7]{3,2,1,0} constant({...})",
        "%y = f32[2,5,5,7]{3,2,1,0} convolution(%x, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
    )
    inside = (5 * 3 - 2) ** 2  # in each row and column three places of the kernel meet the image, two at its ends
    assert found.total_flops == 2 * 2 * inside * 3 * 7


@pytest.mark.parametrize("batch", [1, 4])
def test_products_of_a_library(batch: int):
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_batch_dimensions":["0"]}}}' if batch > 1 else "{}"
    found = work_of(
        f"%a = bf16[{batch},8,16]{{2,1,0}} constant({{...}})",
        f"%b = bf16[{batch},16,32]{{2,1,0}} constant({{...}})",
        f"%c = (bf16[{batch},8,32]{{2,1,0}}, s8[64]{{0}}) custom-call(%a, %b),"
        f' custom_call_target="__cublas$lt$matmul", backend_config={config}',
    )
    assert found.total_flops == pytest.approx(2 * batch * 8 * 16 * 32)
    assert found.matmuls == 1


def kernel(name: str, *operands: str, out: str = "bf16[64,256]{1,0}") -> OpWork:
    names = [f"%x{i}" for i in range(len(operands))]
    return work_of(
        *(f"{name} = {shape} constant({{...}})" for name, shape in zip(names, operands, strict=True)),
        f'%y = {out} custom-call({", ".join(names)}), custom_call_target="mosaic_gpu_v2",'
        f' metadata={{op_name="jit(f)/jshard.kernels.k[mosaic]/{name}/mpmd_map"}}',
    )


def test_products_of_our_kernels():
    """Every matrix but the first is multiplied with it; vectors are added."""
    x, w, wide, b = "bf16[64,128]{1,0}", "bf16[128,256]{1,0}", "bf16[256,128]{1,0}", "bf16[256]{0}"
    flops = 2 * 64 * 128 * 256
    assert kernel("jshard_matmul_nn_persistent", x, w).flops == (("bf16", flops),)
    assert kernel("jshard_matmul_nt_tiled", x, wide, b).flops == (("bf16", flops),)
    kept = f"({', '.join(['bf16[64,256]{1,0}'] * 3)})"
    gated = kernel("jshard_mlp_silu_persistent", x, w, w, out=kept)
    assert gated.flops == (("bf16", 2 * flops),) and gated.matmuls == 2
    assert gated.memory_bytes == 2 * (64 * 128 + 2 * 128 * 256 + 3 * 64 * 256)
    assert kernel("jshard_rms_norm", wide, b, out="bf16[256,128]{1,0}").flops == ()
    assert kernel("someones_matmul", x, w).uncounted == ("mosaic_gpu_v2",)


@pytest.mark.parametrize(("target", "products"), [("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)])
def test_attention_of_a_library(target: str, products: int):
    heads = "bf16[2,128,4,64]{3,2,1,0}"
    found = work_of(
        *(f"%{name} = {heads} constant({{...}})" for name in "qkv"),
        f'%o = ({heads}, u8[0]{{0}}) custom-call(%q, %k, %v), custom_call_target="{target}",'
        ' backend_config={"cudnn_fmha_backend_config":{"mask_type":"CAUSAL"}}',
    )
    assert found.total_flops == products * 2 * (2 * 4 * 128 * 128 * 64) / 2
    assert found.matmuls == products


@pytest.mark.parametrize(("kernel", "products"), [("fwd_residuals", 2), ("dq_no_residuals", 3), ("dkv", 4)])
@pytest.mark.parametrize(("positions", "part"), [("s32[512,128]{1,0}", (4 + 1) / (2 * 4)), ("f32[4,512]{1,0}", 1)])
@pytest.mark.parametrize("batch", [2, 1])
def test_splash_attention_of_a_tpu_and_the_blocks_of_a_causal_mask(kernel, products, positions, part, batch):
    q, k = "bf16[2,4,512,64]{3,2,1,0}", "bf16[2,2,512,64]{3,2,1,0}"
    if batch == 1:  # libtpu drops the dim
        q, k = "bf16[4,512,64]{2,1,0}", "bf16[2,512,64]{2,1,0}"
    found = work_of(
        "%grid = s8[1,4,4]{2,1,0} constant({...})",
        *(f"%{name} = {shape} constant({{...}})" for name, shape in zip("qkv", (q, k, k), strict=True)),
        f"%places = {positions} constant({{...}})",
        f"%splash_mha_{kernel}.5 = ({q}, f32[2,4,512]{{2,1,0}}) custom-call(%grid, %grid, %q, %k, %v, %places),"
        ' custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n"block_q":"128"\n}}',
    )
    assert found.total_flops == part * products * 2 * (batch * 4 * 512 * 512 * 64)
    assert found.products[0].is_attention and not found.uncounted


FUSED = computation(
    "fused",
    "%stack = f32[96,1000]{1,0} parameter(0)",
    "%flat = f32[96000]{0} bitcast(%stack)",
    "%at = s32[] parameter(1)",
    "%layer = f32[1000]{0} dynamic-slice(%flat, %at), dynamic_slice_sizes={1000}",
    "%scale = f32[1000]{0} parameter(2)",
    "%viewed = f32[1000]{0} bitcast(%scale)",
    "ROOT %out = f32[1000]{0} multiply(%layer, %viewed)",
)
UPDATED = computation(
    "updated",
    "%stack = f32[96000]{0} parameter(0)",
    "%layer = f32[1000]{0} parameter(1)",
    "%at = s32[] parameter(2)",
    "ROOT %out = f32[96000]{0} dynamic-update-slice(%stack, %layer, %at)",
)


def test_a_fusion_reads_the_layer_and_not_the_stack():
    found = work_of("%y = f32[1000]{0} fusion(%s, %i, %c), kind=kLoop, calls=%fused", computations=FUSED)
    assert found == OpWork(memory_bytes=3 * 4000 + 4)


def test_a_fusion_writes_the_layer_and_not_the_stack():
    found = work_of("%y = f32[96000]{0} fusion(%s, %l, %i), kind=kLoop, calls=%updated", computations=UPDATED)
    assert found == OpWork(memory_bytes=3 * 4000 + 4)


NESTED = FUSED + computation(
    "product",
    "%stack = f32[96,1000]{1,0} parameter(0)",
    "%at = s32[] parameter(1)",
    "%scale = f32[1000]{0} parameter(2)",
    "%left = f32[1000]{0} fusion(%stack, %at, %scale), kind=kLoop, calls=%fused",
    "ROOT %out = f32[1000]{0} negate(%left)",
)


def test_a_fusion_in_a_fusion_reads_the_layer_and_not_the_stack():
    found = work_of("%y = f32[1000]{0} fusion(%s, %i, %c), kind=kOutput, calls=%product", computations=NESTED)
    assert found == OpWork(memory_bytes=3 * 4000 + 4)


BESIDE_A_GATHER = computation(
    "async_collective_fusion.1",
    "%stack = f32[96,1000]{1,0} parameter(0)",
    "%layer = f32[1000]{0} parameter(1)",
    "%at = s32[] parameter(2)",
    "%zero = s32[] constant(0)",
    "%twice = f32[1000]{0} add(%layer, %layer)",
    "%row = f32[1,1000]{1,0} bitcast(%twice)",
    "%updated = f32[96,1000]{1,0} dynamic-update-slice(%stack, %row, %at, %zero)",
    "%shard = f32[250000]{0} parameter(3)",
    "%whole = f32[2000000]{0} all-gather(%shard), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}",
    "ROOT %out = (f32[96,1000]{1,0}, f32[2000000]{0}) tuple(%updated, %whole)",
)


def test_a_fusion_beside_a_collective_writes_the_layer_and_not_the_stack():
    found = work_of(
        "%y = (f32[96,1000]{1,0}, f32[2000000]{0}) fusion(%s, %l, %i, %w), kind=kOutput,"
        " calls=%async_collective_fusion.1",
        computations=BESIDE_A_GATHER,
    )
    assert found == OpWork(memory_bytes=3 * 4000 + 4)  # as the same without a collective, above


def test_a_collective_that_continues_is_no_traffic():
    """A SparseCore carries it out; its buffers are in the shape of each of its instructions."""
    pair = "((f32[1000]{0}), f32[1000]{0})"
    assert work_of(f"%next = {pair} call-update(%begun, %other)") == OpWork()


def test_a_row_fetched_from_the_host_is_no_traffic_of_the_device():
    """Such a fusion names the whole stack: it would count as that, and in each round of a loop."""
    stack, row = "f32[4,1000]{1,0:S(5)}", "f32[1,1000]{1,0}"
    text = program(
        f"%stack = {stack} constant({{...}})",
        f"%begun = (({stack}, s32[]), {row}, u32[]) fusion-start(%stack), kind=kLoop",
        f"%row = {row} fusion-done(%begun)",
        f"%twice = {row} add(%row, %row)",
    )
    module = parse_module(text)
    home, worker = module.computations["main"], Worker(module)
    work = {name: worker.work(home, home.by_name[name]).memory_bytes for name in ("begun", "row", "twice")}
    assert work["begun"] == work["row"] == 0 and work["twice"] > 0
