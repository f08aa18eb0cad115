"""What the GPU compiler makes of the schedules: every collective of a loop beside matrix products, memory as planned.

The real compiler of XLA:GPU, for a cluster that is not there: it needs the extra `plan-gpu`, and no GPU.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jshard as js
from jshard import _compat
from jshard.api.optimizer import abstract_optimizer
from jshard.cluster.compile import CompileRequest, compile_step
from jshard.cluster.topology import parse_topology, topology_devices
from jshard.inspect.audit import Audit, audit
from jshard.inspect.hlo import Compute, Loop, Step, Window
from jshard.inspect.hlo.walk import read_schedule
from jshard.inspect.hlo.work import OpWork
from jshard.plans.mesh import batch_sharding
from jshard.recipes.step import lower_step
from tests.gpu_compiler import needs_gpu_compiler
from tests.helpers import Config, Decoder, Scanning, loss_fn
from tests.linen_models import Layer
from tests.micro_gpt import MODELS

pytestmark = [needs_gpu_compiler, pytest.mark.usefixtures("no_stored_programs")]


LARGE = Config(layers=6, width=2048, hidden=8192, heads=16, vocab=512, tied=False)
LARGE_BYTES = 2**20
WEIGHTS_FLOPS = 2 * 1024 * 2048 * (4 * 2048 + 2 * 8192)  # of the gradients of a block's weights
UNIT_BYTES = 2 * (2048 * (4 * 2048 + 2 * 8192) + 8192 + 2048)  # of a block, in bfloat16, without what is replicated


@functools.cache
def compiled(
    *,
    scan: bool = False,
    ahead: int | str = 1,
    loop: bool = False,
    profile: str | None = "fastest",
    half: bool = False,
    vocab: int = LARGE.vocab,
    topology: str = "h100:8x8",
) -> Audit:
    """A training step on 64 GPUs, 8 in each host; one sequence of 1024 tokens on each."""
    config = dataclasses.replace(LARGE, scanned=loop, vocab=vocab)
    mesh = js.mesh(fsdp=-1, devices=topology_devices(parse_topology(topology)))
    wires = {"gather_dtype": "float8_e4m3fn", "wire_dtype": "bfloat16"} if half else {}
    policy = js.MixedPrecision(
        param_dtype="bfloat16", reduce_dtype="float32", output_dtype="float32" if loop else None, **wires
    )

    def build() -> Decoder:
        return (Scanning if scan else Decoder)(config, nnx.Rngs(0))

    def annotate(model: Decoder) -> None:
        for unit in [model.blocks] if loop else model.blocks:
            js.fully_shard(
                unit,
                mesh=mesh,
                mixed_precision=policy,
                remat="full",
                prefetch=ahead,
                placement=js.PlacementPolicy(stacked=1 if loop else 0),
            )
        js.fully_shard(model.head, mesh=mesh, mixed_precision=policy, reshard_after_forward=False)
        js.fully_shard(model, mesh=mesh, mixed_precision=policy)

    model = js.abstract_init(build, annotate)
    shape = jax.ShapeDtypeStruct((64, 1024), jnp.int32, sharding=batch_sharding(mesh))
    lowered = lower_step(
        lambda model, batch: loss_fn(model, *batch), model, abstract_optimizer(model, optax.adamw(1e-3)), (shape, shape)
    )
    return audit(lowered.compile(compiler_options=js.compiler_options(profile, platform="gpu")), model=model)


def amounts(found: Audit) -> tuple[float, float, float]:
    return tuple(found.amount(kind) for kind in ("all-gather", "reduce-scatter", "all-reduce"))


@pytest.mark.parametrize("form", [{"scan": True}, {"loop": True}], ids=["scan_layers", "nnx.scan"])
def test_in_a_scan_every_large_collective_has_a_matrix_product_beside_it(form):
    found = compiled(**form)
    # Four gathers in forward and four in backward, a reduction, each twice as loops are double-buffered, some merged.
    assert len([w for w in found.schedule.in_loops if w.full_bytes > LARGE_BYTES]) >= 2 * (4 + 4 + 1) - 4
    assert found.not_overlapped(at_least_bytes=LARGE_BYTES) == ()
    # So have those beside the loop; in forward nothing computes before the first layer.
    last = [w for w in found.schedule.windows if w.kind == "all-gather" and w.phase == "backward"]
    assert all(w.is_overlapped for w in last if w.full_bytes > LARGE_BYTES)
    gathers, reduces, all_reduces = amounts(found)
    assert gathers == pytest.approx(2.0, abs=0.02)
    assert reduces == pytest.approx(1.0, abs=0.01)
    assert all_reduces < 0.001
    assert found.ok, found.differences


class Checkpointed(nn.Module):
    """A checkpoint of the user's in a loop of Flax's."""

    @nn.compact
    def __call__(self, x):
        stacked: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(nn.remat(Layer), length=LARGE.layers, **stacked)(LARGE.width, name="layers")(x, None)[0]


def test_a_checkpoint_in_a_loop_has_the_same_schedule():
    mesh = js.mesh(fsdp=-1, devices=topology_devices(parse_topology("h100:8x8")))
    model = js.fully_shard(Checkpointed(), mesh=mesh, units=Layer)
    x = jax.ShapeDtypeStruct((64 * 1024, 2048), jnp.float32, sharding=batch_sharding(mesh))
    params = js.abstract_init(lambda: model.init(jax.random.key(0), jax.ShapeDtypeStruct(x.shape, x.dtype)), model)
    lowered = jax.jit(jax.grad(lambda params, x: (model.apply(params, x) ** 2).mean())).lower(params, x)
    found = audit(lowered.compile(compiler_options=js.compiler_options("fastest", platform="gpu")), model=model)
    assert found.not_overlapped(at_least_bytes=LARGE_BYTES) == ()
    gathers, reduces, _ = amounts(found)
    assert (gathers, reduces) == (pytest.approx(2.0, abs=0.02), pytest.approx(1.0, abs=0.01))


def test_the_check_notices_collectives_that_lose_their_overlap():
    assert compiled(scan=True, ahead=0).not_overlapped(at_least_bytes=LARGE_BYTES)
    assert compiled(loop=True, ahead=0).not_overlapped(at_least_bytes=LARGE_BYTES)


def bytes_of(window: Any) -> int:
    return window.full_bytes * window.executions


def overlapped(found: Audit) -> float:
    """Part of the bytes of large collectives that have matrix products beside them."""
    large = [w for w in found.schedule.windows if w.full_bytes > LARGE_BYTES]
    return sum(bytes_of(w) for w in large if w.is_overlapped) / sum(map(bytes_of, large))


def test_unrolled_the_chain_overlaps_and_bounds_memory():
    chain, free = compiled(), compiled(ahead="compiler")
    assert overlapped(chain) > max(0.85, overlapped(free))
    gathers, reduces, _ = amounts(chain)
    assert gathers == pytest.approx(2.0, abs=0.02)  # re-gathers are not merged with the gathers of forward
    assert reduces == pytest.approx(1.0, abs=0.01)
    scatters = [w for w in chain.schedule.windows if w.kind == "reduce-scatter" and w.full_bytes > LARGE_BYTES]
    assert len(scatters) >= LARGE.layers  # one for each unit, and not one for all at the end
    assert chain.memory.peak_bytes < free.memory.peak_bytes - UNIT_BYTES  # without a schedule several are there at once


@pytest.mark.parametrize("form", [{}, {"scan": True}, {"loop": True}], ids=["unrolled", "scan_layers", "nnx.scan"])
def test_the_embedding_is_reduced_beside_products_of_the_first_block(form):
    """Its gradient comes last; those of the block's weights, which nothing needs, are computed after it."""
    found = compiled(vocab=32_768, **form)
    reductions = [w for w in found.schedule.windows if w.kind == "reduce-scatter" and not w.loop]
    (embedding,) = (w for w in reductions if w.units == ("(root)",) and w.full_bytes > LARGE_BYTES)
    assert embedding.flops > 0.5 * WEIGHTS_FLOPS
    assert reductions.index(embedding) < len(reductions) - 1  # the block is reduced after it


@pytest.mark.skipif(not _compat.ESTIMATES_AMPERE, reason="XLA starts collectives early there since jax 0.11.")
def test_on_ampere_a_block_is_reduced_in_parts():
    """XLA starts each one kernel before its result is read: of one reduction, most would have nothing beside it."""
    in_parts, at_once = compiled(scan=True, topology="a100-80:8x8"), compiled(scan=True)
    count = lambda found: len([w for w in found.schedule.in_loops if w.kind == "reduce-scatter"])
    assert count(in_parts) >= 3 * count(at_once)  # of 64 and 32 MiB in float32, which it would join


def test_half_the_wire_is_sent_beside_products():
    """Gathers in 8 bits; gradients in 16 within hosts of 8, and an eighth between them: one of each for a unit."""
    found, plain = (compiled(scan=True, half=half) for half in (True, False))
    assert found.ok, found
    assert found.not_overlapped(at_least_bytes=LARGE_BYTES) == ()
    large = [w for w in found.schedule.in_loops if w.full_bytes > LARGE_BYTES]
    of_most = lambda w: max(w.sizes, key=lambda size: size[1])[0]  # the compiler joins scales with what is near
    assert {(w.kind, len(w.group), of_most(w)) for w in large} == {("all-gather", 64, "u8"), ("all-to-all", 8, "bf16")}
    between = [w for w in large if w.kind == "all-to-all" and w.group[1] - w.group[0] == 8]
    within = [w for w in large if w.kind == "all-to-all" and w.group[1] - w.group[0] == 1]
    assert sum(map(bytes_of, within)) == 8 * sum(map(bytes_of, between))
    sent = lambda audit: sum(map(bytes_of, audit.schedule.in_loops))
    assert sent(found) == pytest.approx((4 + 0.25) / 8 * sent(plain), rel=0.01)


# ---- Pipeline stages -----------------------------------------------------------------------------


PLACES, ROUNDS = 2, 5  # rounds enough for a loop over those that are alike, forward and backward
SEQUENCES = 4  # of a data shard
ROUND_FLOPS = 2 * SEQUENCES * 1024 * 2048 * (4 * 2048 + 2 * 8192)  # of a layer on all of them, without its attention


@functools.cache
def staged(*, late: bool) -> Audit:
    """A training step on 16 GPUs, 8 in each host: each host is a stage."""
    config = dataclasses.replace(LARGE, layers=PLACES * ROUNDS)
    mesh = js.mesh(pipe=PLACES, fsdp=-1, devices=topology_devices(parse_topology("h100:2x8")))
    policy = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")

    def annotate(model: Decoder) -> None:
        blocks: Any = model.blocks  # a list, as the layers are not scanned by Flax
        for block in blocks:
            js.fully_shard(block, mesh=mesh, mixed_precision=policy, remat="full")
        js.fully_shard(model, mesh=mesh, mixed_precision=policy)
        js.parallel.stages(model, late=late)

    model = js.abstract_init(lambda: Scanning(config, nnx.Rngs(0)), annotate)
    shape = jax.ShapeDtypeStruct((SEQUENCES * 8, 1024), jnp.int32, sharding=batch_sharding(mesh))
    lowered = lower_step(
        lambda model, batch: loss_fn(model, *batch), model, abstract_optimizer(model, optax.adamw(1e-3)), (shape, shape)
    )
    return audit(lowered.compile(compiler_options=js.compiler_options("fastest", platform="gpu")), model=model)


def share(windows: list[Window], beside: list[Window]) -> float:
    """Part of the bytes of some collectives that others of them have."""
    return sum(map(bytes_of, beside)) / sum(map(bytes_of, windows))


def over_stage(found: Audit, kind: str, phase: str) -> list[Window]:
    """The large collectives of layers, over the data axes of a stage."""
    windows = [w for w in found.schedule.windows if w.kind == kind and w.axes == ("fsdp",) and w.phase == phase]
    return [w for w in windows if w.full_bytes > LARGE_BYTES]


@pytest.mark.parametrize("late", [False, True])
def test_stages_gather_and_reduce_beside_all_ticks_of_a_round(late):
    found = staged(late=late)
    for phase, flops in ("forward", ROUND_FLOPS), ("backward", 2 * ROUND_FLOPS):
        gathers = over_stage(found, "all-gather", phase)
        # Those of the first round have nothing before them.
        beside = [w for w in gathers if w.is_async and w.flops >= flops]
        assert share(gathers, beside) == pytest.approx(1 - 1 / ROUNDS, abs=0.001), phase
    # Of five rounds three are reduced beside the round after the next, one beside the last ticks, and one behind them.
    reductions = over_stage(found, "reduce-scatter", "backward")
    beside = [w for w in reductions if w.is_async and w.flops >= 2 * ROUND_FLOPS]
    assert share(reductions, beside) == pytest.approx(1 - 2 / ROUNDS, abs=0.001)
    assert share(reductions, [w for w in reductions if w.is_overlapped]) == pytest.approx(1 - 1 / ROUNDS, abs=0.001)


def test_late_sending_has_the_next_microbatch_beside_it():
    """Between start and end is the conditional that holds a layer: its products are counted."""
    shares = {}
    for late in (False, True):
        windows = [w for w in staged(late=late).schedule.windows if w.kind == "collective-permute"]
        between_stages = [w for w in windows if w.axes == ("pipe",)]
        shares[late] = share(between_stages, [w for w in between_stages if w.is_overlapped])
    # In the last ticks of both loops there is nothing left to compute beside what is sent.
    assert shares[True] > 0.9
    assert shares[False] < 0.2


# ---- Attention by cuDNN --------------------------------------------------------------------------


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
    assert any("cuDNN: version 9.10 is assumed" in note for note in step.notes)


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


def test_forward_saves_no_more_than_plain_jit():
    """Barriers around saved values would have it store every elementwise one; around inputs, read each once more."""
    settings = ("model.n_layer=2", "model.vocab_size=512", "batch_size=128", "accumulate=1", "learning_rate=1e-3")

    def step_of(*, plain_flax: bool) -> tuple[float, int]:
        request = CompileRequest(
            model="gpt",
            recipe="gpt2_small",
            topology="h100:1x8",
            mesh={"fsdp": 8},
            settings=settings,
            profile="fastest",
            plain_flax=plain_flax,
        )
        step = compile_step(request)
        computing = computations(read_schedule(step.text).steps)
        elementwise_bytes = sum(work.memory_bytes for work in computing if not work.products)
        return elementwise_bytes, step.memory.peak_bytes

    elementwise_bytes, peak_bytes = step_of(plain_flax=False)
    plain_elementwise_bytes, plain_peak_bytes = step_of(plain_flax=True)
    assert elementwise_bytes <= 1.03 * plain_elementwise_bytes
    assert peak_bytes <= 1.05 * plain_peak_bytes


def computations(steps: Iterable[Step]) -> Iterator[OpWork]:
    """The work of all instructions that compute; of a program without loops."""
    for step in steps:
        assert not isinstance(step, Loop)
        if isinstance(step, Compute):
            yield step.work
