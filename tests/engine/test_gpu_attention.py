"""Attention by cuDNN as the GPU compiler has it: its calls, its arithmetic, what backward computes again, no scores.

The real compiler of XLA:GPU, for a cluster that is not there: it needs the extra `plan-gpu`, and no GPU.
"""

import re

import pytest

from jshard.cluster.compile import CompileRequest, compile_step
from jshard.inspect.hlo.walk import read_schedule
from tests.gpu_compiler import needs_gpu_compiler
from tests.micro_gpt import MODELS

pytestmark = needs_gpu_compiler

B, T, D, F, V, L = 2, 1024, 512, 2048, 1536, 4  # B on each of eight GPUs; heads of 64
SIZES = {"model.n_layer": L, "model.n_head": 8, "model.d_model": D, "model.d_ff": F, "model.vocab_size": V}
SETTINGS = tuple(f"{k}={v}" for k, v in {**SIZES, "batch_size": 8 * B, "sequence_length": T, "accumulate": 1}.items())

ROWS = 2 * B * T
QKV, OUT, UP, DOWN = ROWS * D * 3 * D, ROWS * D * D, ROWS * D * F, ROWS * F * D
ATTENTION = 2 * 2 * B * T * T * D / 2  # two products, half of each behind the mask


@pytest.mark.parametrize(
    ("remat", "again"), [("full", QKV + OUT + UP + ATTENTION), ("torchtitan_selective", OUT), ("minimal", ATTENTION)]
)
def test_what_is_computed_again(remat, again):
    """The arithmetic of the compiled loops is that of forward, backward, and forward again without what is kept."""
    request = CompileRequest(
        model=str(MODELS / "gpt.py"),
        recipe="gpt2_xl",
        topology="h100:1x8",
        settings=SETTINGS,
        units={"remat": remat},
    )
    step = compile_step(request)
    block = 3 * (QKV + OUT + UP + DOWN) + (1 + 2.5) * ATTENTION
    assert read_schedule(step.text).flops == pytest.approx(L * (block + again) + 3 * ROWS * D * V, rel=1e-3)
    assert "__cudnn$fmhaSoftmaxBackward" in step.text
    assert not re.search(rf"\[\d+,\d+,{T},{T}\]", step.text)  # by example and head
    assert any("cuDNN: version 9.10 is taken to be there" in note for note in step.notes)


def test_a_model_that_calls_it_itself_over_a_tensor_axis(tmp_path):
    text = (MODELS / "gpt.py").read_text()
    own = "jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, is_causal=True, implementation='cudnn')"
    path = tmp_path / "own.py"
    path.write_text(re.sub(r"js\.kernels\.attention\(.*\)", lambda _: own, text))
    assert own in path.read_text()
    request = CompileRequest(
        model=str(path), recipe="gpt2_xl", topology="h100:1x8", settings=SETTINGS, mesh={"fsdp": 4, "tensor": 2}
    )
    step = compile_step(request)
    assert f"bf16[{2 * B},{T},4,64]" in step.text or f"bf16[{2 * B},4,{T},64]" in step.text  # half of the heads
    assert "__cudnn$fmhaSoftmaxBackward" in step.text
