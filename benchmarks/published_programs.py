"""What the programs of published runs do otherwise than jshard's: their attention, and their elementwise operations.

A published run is planned with jshard's program, which XLA compiles. Where another program ran, two things follow from
its source code, and are put in the place of jshard's:

- Its attention. The kernels of FlashAttention 1 and 2 are slower than cuDNN's on an H100, and that of FlashAttention 1
  on an A100, too. What they reach is in the figures of FlashAttention-2, of both kernels on both devices.
- Its elementwise operations, if PyTorch ran it operation by operation. Each reads its operands and writes its result:
  the bytes of a token in a layer are counted from the source. They replace the bytes that XLA's operations read and
  write before the update, at the same share of the memory's bandwidth. Kernels that have a multiplication in them have
  none, such as a product with its bias, nor have views. What runs beside the computation on another stream (casts and
  copies of gradients that are about to be reduced) is not counted, nor are the norm of all gradients, metrics, and the
  gradients of tables.

With full checkpointing PyTorch computes the last product of a layer again, unless recomputation ends where all that
backward needs is there, which `torch.utils.checkpoint` does from PyTorch 2.1 on, without `use_reentrant`.

Nothing here is fitted to a run. What was counted was chosen after a look at the errors of the rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.published_pytorch import computed_again_s
from jshard.cluster.estimate import Estimate, EstimateRange
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.report import ClusterPlan
from jshard.facts.devices import DeviceFacts
from jshard.inspect.hlo import Compute, Loop, Schedule, Step
from jshard.plans.mesh import data_shards
from jshard.recipes.recipe import Recipe

# ---- attention

Rates = Mapping[int, float]
"""TFLOP/s of forward and backward together, behind a causal mask, by the length of a sequence."""


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """What a kernel reaches, by the width of a head and the major number of the device's compute capability."""

    narrow: Mapping[int, Rates]  # heads of 64
    wide: Mapping[int, Rates]  # heads of 128

    def efficiency(self, device: DeviceFacts, *, head_width: int, sequence_length: int) -> float:
        """Returns the share of a device's peak that the kernel reaches: that of the next shorter measured sequence."""
        rates = (self.wide if head_width > 64 else self.narrow)[_major(device)]
        shorter = [length for length in rates if length <= sequence_length]
        tflops = rates[max(shorter, default=min(rates))]
        return tflops * 1e12 / device.flops_per_s["bf16"]


def _major(device: DeviceFacts) -> int:
    return int(getattr(device.target, "major", 0))


_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def _rates(*tflops: float) -> Rates:
    return dict(zip(_LENGTHS, tflops, strict=True))


# Dao-AILab/flash-attention, README.md and assets: "Attention forward + backward speed", with causal mask, on A100 80GB
# SXM4 and H100 80GB SXM5; the series "FlashAttention" and "FlashAttention-2".
_FLASH_1 = AttentionKernel(
    narrow={8: _rates(58, 70, 77, 87, 92, 97), 9: _rates(104, 123, 136, 138, 149, 156)},
    wide={8: _rates(55, 62, 69, 76, 80, 83), 9: _rates(98, 109, 108, 126, 135, 137)},
)
_FLASH_2 = AttentionKernel(
    narrow={8: _rates(88, 119, 140, 156, 165, 171), 9: _rates(141, 192, 232, 257, 273, 284)},
    wide={8: _rates(99, 133, 155, 173, 182, 189), 9: _rates(163, 221, 265, 294, 308, 328)},
)

# ---- elementwise operations


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The bytes that operations read and write of a token in a layer, for each of its values."""

    width: float = 0.0  # for each feature
    keys: float = 0.0  # for each feature of the keys of all heads
    mlp: float = 0.0  # for each feature within the feed-forward part

    def bytes_of(self, config: Any) -> float:
        """Returns the bytes of a token in a layer of a model of `models/`."""
        num_keys = config.d_model
        if hasattr(config, "n_kv_head"):
            num_keys = config.n_kv_head * config.head_width
        return self.width * config.d_model + self.keys * num_keys + self.mlp * config.d_ff


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """The elementwise operations of a program that PyTorch runs one by one.

    Attributes:
        forward: of a layer.
        backward: of a layer, without what it computes again.
        again: what full checkpointing computes again of a layer.
        always_again: what is computed again without it.
        logit_bytes: read and written for each logit, by the loss in forward and backward.
        gradient_bytes: read and written for each parameter of the whole model in a microbatch.
        sum_bytes: for each parameter in a microbatch after the first.
    """

    forward: Traffic
    backward: Traffic
    again: Traffic
    always_again: Traffic = Traffic()
    logit_bytes: float = 0.0
    gradient_bytes: float = 0.0
    sum_bytes: float = 0.0

    def step_bytes(self, recipe: Recipe, *, num_tokens: float, num_parameters: int) -> float:
        """Returns the bytes of a step on one device.

        Args:
            recipe: of the model.
            num_tokens: of a step on one device.
            num_parameters: of the whole model.
        """
        config = recipe.model
        again = self.again if config.remat == "full" else self.always_again
        of_layer = sum(traffic.bytes_of(config) for traffic in (self.forward, again, self.backward))
        of_token = config.n_layer * of_layer + config.vocab_size * self.logit_bytes
        gradients = recipe.accumulate * self.gradient_bytes + (recipe.accumulate - 1) * self.sum_bytes
        return num_tokens * of_token + num_parameters * gradients


# Bytes for each value in 16 bits.
_ADD = 6  # two are read, one is written
_MULTIPLY_BACKWARD = 12  # of both factors
_FUSED_NORM = 4
_FUSED_NORM_BACKWARD = 10  # of its input; and both arrays are read again for the weight's
_READ = 2
_JOIN = 4  # gradients of the parts of an array are copied into one
_SILU = 4
_SILU_BACKWARD = 6
_FUSED_LOSS = 6  # read; in backward read and written
# Of log-softmax: read and written; in backward zeros are written, two arrays are read and one is written.
_LOSS = 12
# An RMSNorm as LLaMA's own: x.float(), .pow(2).mean(), x * rsqrt(...), .type_as(x), * weight.
_NORM = 36
_NORM_BACKWARD = 76

# Both branches that leave the residual stream, or several products of one input, add their gradients.
_RESIDUALS = 2 * _ADD

_GELU = 4
_GELU_BACKWARD = 6
# mosaicml/llm-foundry, llmfoundry/models/layers (@b2a43a1, of the tables): low_precision_layernorm, exact GELU, a fused
# loss, products with biases, whose gradients read those of the results: of width 1 + 3 + 1, and of the MLP.
_MPT_FORWARD = Traffic(width=2 * _FUSED_NORM + _RESIDUALS, mlp=_GELU)
_MPT = Elementwise(
    forward=_MPT_FORWARD,
    backward=Traffic(
        width=_RESIDUALS + 2 * _FUSED_NORM_BACKWARD + 3 * _JOIN + 5 * _READ,
        mlp=_GELU_BACKWARD + _READ,
    ),
    # Without the sum at the end.
    again=Traffic(width=2 * _FUSED_NORM + _ADD, mlp=_GELU),
    logit_bytes=_FUSED_LOSS,
    gradient_bytes=_JOIN,  # FSDP: of parameters that are views of one array
)
_MPT_WHOLE_AGAIN = dataclasses.replace(_MPT, again=_MPT_FORWARD)

# foundation-model-stack @b06c5df (of fms-fsdp @0d31998): fms/modules, LayerNormParameterized with
# use_high_precision_pow, RotaryEmbedding.adjusted_qk, GatedLinearUnit, three products for queries, keys and values.
# Copies of keys and values for the heads that share them are not counted.
_FMS_ROTARY = 36  # .float() 6, freqs.mul 12, .sum 12, .type_as 6; as much in backward
_FMS = Elementwise(
    forward=Traffic(width=2 * _NORM + _RESIDUALS + _FMS_ROTARY, keys=_FMS_ROTARY, mlp=_SILU + _ADD),
    backward=Traffic(
        width=2 * _NORM_BACKWARD + _RESIDUALS + _FMS_ROTARY + 3 * _ADD,
        keys=_FMS_ROTARY,
        mlp=_SILU_BACKWARD + _MULTIPLY_BACKWARD,
    ),
    again=Traffic(width=2 * _NORM + _ADD + _FMS_ROTARY, keys=_FMS_ROTARY, mlp=_SILU + _ADD),
    logit_bytes=_LOSS,
    gradient_bytes=_JOIN,
)

# InternLM/InternLM @20fe5ac, internlm/model: apex's norm of x.float() in 16 bits, a rotary kernel in place, two
# products for the gated MLP, one for queries, keys and values. Without checkpointing `dropout_selective_checkpoint`
# computes norms and the sum between them again. Logits are cast to float32 (NaiveAMPModel), the loss is one kernel.
_APEX_NORM = 12  # the cast, and the norm
_APEX_NORM_BACKWARD = 16 + 6
_ROTARY_IN_PLACE = 4
_INTERNLM_FORWARD = Traffic(
    width=2 * _APEX_NORM + _RESIDUALS + _ROTARY_IN_PLACE, keys=_ROTARY_IN_PLACE, mlp=_SILU + _ADD
)
_INTERNLM = Elementwise(
    forward=_INTERNLM_FORWARD,
    backward=Traffic(
        width=2 * _APEX_NORM_BACKWARD + _RESIDUALS + _ROTARY_IN_PLACE + _ADD,
        keys=_ROTARY_IN_PLACE,
        mlp=_SILU_BACKWARD + _MULTIPLY_BACKWARD,
    ),
    again=_INTERNLM_FORWARD,
    always_again=Traffic(width=2 * _APEX_NORM + _ADD),
    logit_bytes=6 + 4 + 8 + 6,  # cast; read; read and written; cast
    sum_bytes=_ADD,  # gradients of each parameter are whole on each device
)

# KempnerInstitute/KempnerForge @9f3f03a, kempnerforge/model, where it is not compiled: a norm that multiplies with its
# weight in float32, a rotation in four products of halves, keys and values repeated for each head, three products and
# two for one input.
_KEMPNER_NORM = 40
_KEMPNER_NORM_BACKWARD = 88
_KEMPNER_ROTARY = 18  # four products 8, two sums 6, joined 4
_KEMPNER_ROTARY_BACKWARD = 30  # products 8, a sign 2, sums 6, each half written into zeros 8, added 6
_KEMPNER_KEYS = Traffic(width=4, keys=4)  # read, and written for each head; in backward the reverse
_KEMPNER = Elementwise(
    forward=Traffic(
        width=2 * _KEMPNER_NORM + _RESIDUALS + _KEMPNER_ROTARY + _KEMPNER_KEYS.width,
        keys=_KEMPNER_ROTARY + _KEMPNER_KEYS.keys,
        mlp=_SILU + _ADD,
    ),
    backward=Traffic(
        width=2 * _KEMPNER_NORM_BACKWARD + _RESIDUALS + _KEMPNER_ROTARY_BACKWARD + _KEMPNER_KEYS.width + 3 * _ADD,
        keys=_KEMPNER_ROTARY_BACKWARD + _KEMPNER_KEYS.keys,
        mlp=_SILU_BACKWARD + _MULTIPLY_BACKWARD,
    ),
    again=Traffic(
        width=2 * _KEMPNER_NORM + _ADD + _KEMPNER_ROTARY + _KEMPNER_KEYS.width,
        keys=_KEMPNER_ROTARY + _KEMPNER_KEYS.keys,
        mlp=_SILU + _ADD,
    ),
    logit_bytes=_LOSS,
)

# ---- programs


@dataclasses.dataclass(frozen=True)
class Program:
    """A published program.

    Attributes:
        words: what it is, for the report.
        attention: its kernel; None for cuDNN's, which jshard has, too, and where attention is not one kernel.
        elementwise: its operations; None where a compiler fuses them.
        whole_again: full checkpointing computes the last product of a layer again.
    """

    words: str
    attention: AttentionKernel | None = None
    elementwise: Elementwise | None = None
    whole_again: bool = False


PROGRAMS: Mapping[str, Program] = {
    "unknown": Program("as planned"),
    "jax": Program("JAX, as planned"),
    # flash_attn_triton.py says of itself that forward and backward together are slightly slower than FlashAttention's.
    "mpt": Program("eager, FlashAttention 1 (Triton)", _FLASH_1, _MPT),
    # The tables in "bf16 PURE" are older than those in "amp_bf16": of PyTorch 1.13 (@300cc5c, sweep.sh).
    "mpt_torch_1": Program("eager, FlashAttention 1 (Triton), PyTorch 1.13", _FLASH_1, _MPT_WHOLE_AGAIN, True),
    "fms": Program("eager, FlashAttention 2", _FLASH_2, _FMS),
    # third_party/flash-attention is v1.0.8.
    "internlm": Program("eager, FlashAttention 1", _FLASH_1, _INTERNLM, True),
    # uv.lock has PyTorch 2.11 and cuDNN 9.19, with which attention is cuDNN's on Hopper.
    "kempner": Program("eager, cuDNN attention", None, _KEMPNER),
    "kempner_compiled": Program("compiled, cuDNN attention"),
    "torchtitan": Program("compiled, FlashAttention 2", _FLASH_2),
    # Its norms, rotation, MLP and loss are fused kernels.
    "tinyllama": Program("fused by hand, FlashAttention 2", _FLASH_2),
}

# Of rows that name no program, by the repository with which their source begins.
_OF_REPOSITORIES = {
    "AI-Hypercomputer/maxtext": "jax",
    "NVIDIA/JAX-Toolbox": "jax",
    "mosaicml/llm-foundry": "mpt",
    "foundation-model-stack/fms-fsdp": "fms",
    "InternLM/InternLM": "internlm",
    "KempnerInstitute/KempnerForge": "kempner_compiled",
    "pytorch/torchtitan": "torchtitan",
    "jzhang38/TinyLlama": "tinyllama",
}


def program_of(row: Mapping[str, Any]) -> Program:
    """Returns the program that ran; of an unknown one, jshard's."""
    repository, _, _ = row["source"].partition(" ")
    return PROGRAMS[row.get("program", _OF_REPOSITORIES.get(repository, "unknown"))]


def estimated_as(program: Program, plan: ClusterPlan, recipe: Recipe, *, clock_share: float = 1.0) -> EstimateRange:
    """Returns the estimate of a plan with what a published program does otherwise.

    Args:
        program: that ran.
        plan: of jshard's program.
        recipe: of the model.
        clock_share: of the clock at which the attention kernel was measured.
    """
    schedule = plan.audit.schedule
    if program.elementwise is not None:
        num_tokens = recipe.batch_size * recipe.sequence_length / plan.topology.num_devices
        wanted_bytes = program.elementwise.step_bytes(
            recipe, num_tokens=num_tokens, num_parameters=plan.step.plan.num_parameters
        )
        schedule = with_elementwise_bytes(schedule, wanted_bytes)
    found = _with_attention(program, plan.cluster, recipe, clock_share).estimate(schedule)
    if not program.whole_again or recipe.model.remat != "full":
        return found
    mesh = dict(plan.step.plan.mesh)
    return EstimateRange(*(_with_last_products(case, recipe, mesh) for case in found.cases))


def _with_attention(program: Program, cluster: PlannedCluster, recipe: Recipe, clock_share: float) -> PlannedCluster:
    if program.attention is None:
        return cluster
    config = recipe.model
    efficiency = program.attention.efficiency(
        cluster.topology.device,
        head_width=config.d_model // config.n_head,
        sequence_length=recipe.sequence_length,
    )
    return dataclasses.replace(cluster, known={**cluster.known, "attention_efficiency": clock_share * efficiency})


def _with_last_products(case: Estimate, recipe: Recipe, mesh: Mapping[str, int]) -> Estimate:
    rows = recipe.batch_size // recipe.accumulate // data_shards(mesh)
    more_s = recipe.accumulate * computed_again_s(recipe, mesh, rows=rows, assumptions=case.assumptions)
    return dataclasses.replace(case, step_s=case.step_s + more_s, compute_s=case.compute_s + more_s)


# ---- schedules


def with_elementwise_bytes(schedule: Schedule, num_bytes: float) -> Schedule:
    """Returns a schedule whose elementwise operations before the update read and write so many bytes together."""
    num_before_update = 0
    for i, step in enumerate(schedule.steps):
        if _multiplies(step):
            num_before_update = i + 1
    before, update = schedule.steps[:num_before_update], schedule.steps[num_before_update:]
    factor = num_bytes / elementwise_bytes(before)
    return dataclasses.replace(schedule, steps=(*_scaled(before, factor), *update))


def elementwise_bytes(steps: Sequence[Step]) -> float:
    """Returns the bytes that operations without a product read and write."""
    num_bytes = 0.0
    for step in steps:
        if isinstance(step, Loop):
            num_bytes += step.rounds * elementwise_bytes(step.steps)
        elif isinstance(step, Compute) and not step.work.products:
            num_bytes += step.work.memory_bytes
    return num_bytes


def _scaled(steps: Sequence[Step], factor: float) -> tuple[Step, ...]:
    scaled: list[Step] = []
    for step in steps:
        if isinstance(step, Loop):
            scaled.append(dataclasses.replace(step, steps=_scaled(step.steps, factor)))
        elif isinstance(step, Compute) and not step.work.products:
            work = dataclasses.replace(step.work, memory_bytes=factor * step.work.memory_bytes)
            scaled.append(dataclasses.replace(step, work=work))
        else:
            scaled.append(step)
    return tuple(scaled)


def _multiplies(step: Step) -> bool:
    if isinstance(step, Loop):
        return any(_multiplies(inner) for inner in step.steps)
    return isinstance(step, Compute) and bool(step.work.products)
