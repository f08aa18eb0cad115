"""What PyTorch does otherwise than jshard's program: what it keeps of a layer, and what it computes again.

Without checkpointing autograd keeps the operands that the gradient of each operation needs, in the dtype that it
computed with. JAX's `none` keeps more, among it norms in float32, and a policy that names products, as the files have
it, keeps less. So the time of such a configuration is that of the policy, and its memory is counted here.

The loss is not compiled: in its backward there are three arrays in float32 beside the logits.

Tensor parallel layers of Megatron and others divide the tables of tokens and head as well, by words; models/llama.py
and gpt.py keep them whole.

With full checkpointing PyTorch calls the layer again. XLA leaves out what no gradient needs: the last product of the
layer, and the sum of its parts over `tensor`.

What is divided over `tensor`, and what is sent once a step, are in `published_tensor` and `published_sums`.

Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.1, of a GPT in 16 bits: 34 bytes for each token and
feature, with 2 for masks of dropout, which these runs lack, and without the scores, which flash attention does not
keep. The layers of a Llama are counted in the same way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jshard.cluster.assumptions import Assumptions
from jshard.cluster.search import ROOM as JAX_ROOM
from jshard.inspect.hlo.work import EqualProducts, OpWork
from jshard.plans.mesh import CONTEXT, TENSOR
from jshard.recipes.recipe import Recipe

_ITEMSIZE = 2  # of 16 bits
_FLOAT32_ITEMSIZE = 4
# What a norm in single operations reads and writes of each value, beyond a fused one, as `RMSNorm` of LLaMA's own code:
# x.float(), .pow(2).mean(), x * rsqrt(...), .type_as(x), * weight. Forward 36 bytes and not 4; backward 76, not 8.
_NORM_FORWARD_BYTES = 32
_NORM_BACKWARD_BYTES = 68


@dataclasses.dataclass(frozen=True)
class KeptByPyTorch:
    """The values that are kept of a token in a layer: their widths, added up."""

    whole: float  # on each device along `tensor`
    split: float  # over these devices

    @classmethod
    def of(cls, config: Any, *, unfused_norms: bool = False, split_sequence: bool = False) -> KeptByPyTorch:
        """Returns what is kept of a layer of a model of `models/`.

        Args:
            config: of the model.
            unfused_norms: a norm is several operations.
            split_sequence: sequences are split over `tensor` between products.
        """
        width = config.d_model
        # Both norms: the input, and the result, which is the input of products.
        of_norms = 2 * 2 * width
        if unfused_norms:  # in place of the input its copy in float32; and what is multiplied with the weight
            of_norms += 2 * 2 * width
        if hasattr(config, "n_kv_head"):
            # Queries, keys, values, and the result of attention.
            of_attention = 2 * (config.n_head + config.n_kv_head) * config.head_width
            # The gate before and after its function, what it is multiplied with, and the product.
            of_mlp = 4 * config.d_ff
        else:
            of_attention = 4 * width
            of_mlp = 2 * config.d_ff  # before and after the function
        if split_sequence or getattr(config, "split_sequence", False):
            return cls(0.0, of_norms + of_attention + of_mlp)
        return cls(of_norms, of_attention + of_mlp)

    def bytes_on(self, degree: int) -> float:
        """Returns the bytes of a token in a layer, on each of so many devices along `tensor`."""
        return _ITEMSIZE * (self.whole + self.split / degree)


RESERVED = 1.22
"""What PyTorch's allocator reserves for values that come and go, for each byte that is live.

Of the 77.0 GiB that torchtitan reports of Llama 3 8B on eight GPUs, 64 to 68 were live (docs/planning.md), and 15 of
these are parameters, gradients and the state of the optimizer, which stay: (77 - 15) / (66 - 15).
"""

ROOM = 0.97
"""The share of a device's memory that is left for it, beside CUDA's context and the buffers of a few communicators.

These take 2 to 3 GiB: an assumption.
"""


@dataclasses.dataclass(frozen=True)
class PyTorchProgram:
    """How a published program is written.

    Attributes:
        remat: the policy of its layers, as in the file.
        is_compiled: `torch.compile` fuses what XLA does.
        unfused_norms: a norm is several operations.
        split_sequence: sequences are split over `tensor` between products.
        whole_logits: each device along `tensor` has all logits.
        fused_loss: the loss is one kernel.
        kept_logits: the logits of a microbatch stay until those of the next one are computed.
        whole_sums: gradients are all-reduced whole, in float32, and each device takes its part of them.
        broadcasts: each device has whole parameters, which it sends to all others once a step.
        blocking_sums: nothing is computed while values are added over `tensor`.
        sums_each_product: cotangents of a value that several products take are added over `tensor` for each of them.
    """

    remat: str
    is_compiled: bool = False
    unfused_norms: bool = False
    split_sequence: bool = False
    whole_logits: bool = False
    fused_loss: bool = False
    kept_logits: bool = False
    whole_sums: bool = False
    broadcasts: bool = False
    blocking_sums: bool = False
    sums_each_product: bool = False


@dataclasses.dataclass(frozen=True)
class EagerMicrobatch:
    """What a microbatch takes in PyTorch, where that is more than in jshard's program; 0 where it is not.

    Attributes:
        layers_bytes: what all layers keep for backward.
        logits_bytes: the most that logits, and what is computed from them, take at once; 0 for jshard's own.
        more_s: how much longer it computes; negative if it is shorter.
        more_once_s: how much longer a step takes after its last microbatch; negative if it is shorter.
        splits_tables: whether the tables of tokens and head are split over `tensor`.
        reserved: of memory for values that come and go, for each byte of them.
        room: the share of a device's memory that may be reserved.
    """

    layers_bytes: int = 0
    logits_bytes: int = 0
    more_s: float = 0.0
    more_once_s: float = 0.0
    splits_tables: bool = False
    reserved: float = 1.0
    room: float = JAX_ROOM


def eager_microbatch(
    program: PyTorchProgram, recipe: Recipe, mesh: Mapping[str, int], *, rows: int, assumptions: Assumptions
) -> EagerMicrobatch:
    """Returns what a microbatch takes in PyTorch.

    Args:
        program: how it is written.
        recipe: of the model.
        mesh: degrees of its axes.
        rows: the sequences of a microbatch.
        assumptions: about the device and its links.
    """
    recomputes = program.remat == "full"
    layers_bytes = 0
    of_logits = 0
    more_s = 0.0
    if not program.is_compiled:
        of_logits = logits_bytes(
            recipe,
            mesh,
            rows=rows,
            whole=program.whole_logits,
            fused_loss=program.fused_loss,
            kept=program.kept_logits and recipe.accumulate > 1,
        )
    if program.remat == "none" and not program.is_compiled:
        layers_bytes = kept_bytes(
            recipe,
            mesh,
            rows=rows,
            unfused_norms=program.unfused_norms,
            split_sequence=program.split_sequence,
        )
    if recomputes and not program.is_compiled:
        more_s += computed_again_s(recipe, mesh, rows=rows, assumptions=assumptions)
    if program.unfused_norms:
        more_s += unfused_norms_s(recipe, mesh, rows=rows, is_repeated=recomputes, assumptions=assumptions)
    return EagerMicrobatch(layers_bytes, of_logits, more_s, splits_tables=True, reserved=RESERVED, room=ROOM)


def kept_bytes(
    recipe: Recipe,
    mesh: Mapping[str, int],
    *,
    rows: int,
    unfused_norms: bool = False,
    split_sequence: bool = False,
) -> int:
    """Returns what PyTorch keeps of all layers without checkpointing, on one device.

    Args:
        recipe: of the model.
        mesh: degrees of its axes.
        rows: the sequences of a microbatch.
        unfused_norms: as for `KeptByPyTorch.of`.
        split_sequence: as for `KeptByPyTorch.of`.
    """
    kept = KeptByPyTorch.of(recipe.model, unfused_norms=unfused_norms, split_sequence=split_sequence)
    tokens = _tokens(recipe, mesh, rows)
    return round(recipe.model.n_layer * tokens * kept.bytes_on(mesh.get(TENSOR, 1)))


def logits_bytes(
    recipe: Recipe,
    mesh: Mapping[str, int],
    *,
    rows: int,
    whole: bool = False,
    fused_loss: bool = False,
    kept: bool = False,
) -> int:
    """Returns what the loss takes in backward: the logits in 16 bits, and three arrays of their size in float32.

    These are the result of the log-softmax, its cotangents, and those of the logits.

    Args:
        recipe: of the model.
        mesh: degrees of its axes.
        rows: the sequences of a microbatch.
        whole: whether each device along `tensor` has all of them.
        fused_loss: the loss is one kernel: beside the logits there are only their gradients in 16 bits.
        kept: whether those of the microbatch before are still there, in 16 bits.
    """
    num_logits = _tokens(recipe, mesh, rows) * recipe.model.vocab_size
    if not whole:
        num_logits /= mesh.get(TENSOR, 1)
    beside_them = _ITEMSIZE if fused_loss else 3 * _FLOAT32_ITEMSIZE
    if kept:
        beside_them += _ITEMSIZE
    return round(num_logits * (_ITEMSIZE + beside_them))


def computed_again_s(recipe: Recipe, mesh: Mapping[str, int], *, rows: int, assumptions: Assumptions) -> float:
    """Returns the time of what full checkpointing computes again for a microbatch, and XLA leaves out.

    Args:
        recipe: of the model.
        mesh: degrees of its axes.
        rows: the sequences of a microbatch.
        assumptions: about the device and its links.
    """
    config = recipe.model
    tensor = mesh.get(TENSOR, 1)
    tokens = _tokens(recipe, mesh, rows)
    sizes = (1.0, tokens, config.d_model, config.d_ff / tensor)
    product = EqualProducts("bf16", 2 * math.prod(sizes), sizes=sizes)
    layer_s = assumptions.compute_s(OpWork((product,)))
    if tensor > 1:
        sum_bytes = _ITEMSIZE * tokens * config.d_model
        layer_s += assumptions.transfer_s("all-reduce", sum_bytes, range(tensor))
    return config.n_layer * layer_s


def unfused_norms_s(
    recipe: Recipe, mesh: Mapping[str, int], *, rows: int, is_repeated: bool, assumptions: Assumptions
) -> float:
    """Returns how much longer the norms of a microbatch take as single operations, each of which reads and writes.

    Args:
        recipe: of the model.
        mesh: degrees of its axes.
        rows: the sequences of a microbatch.
        is_repeated: whether forward is computed again for backward.
        assumptions: about the device.
    """
    num_values = 2 * recipe.model.n_layer * recipe.model.d_model * _tokens(recipe, mesh, rows)
    if getattr(recipe.model, "split_sequence", False):
        num_values /= mesh.get(TENSOR, 1)
    forwards = 2 if is_repeated else 1
    num_bytes = num_values * (forwards * _NORM_FORWARD_BYTES + _NORM_BACKWARD_BYTES)
    return assumptions.compute_s(OpWork(memory_bytes=num_bytes))


def _tokens(recipe: Recipe, mesh: Mapping[str, int], rows: int) -> float:
    """Returns the tokens of a microbatch on one device."""
    return rows * recipe.sequence_length / mesh.get(CONTEXT, 1)
