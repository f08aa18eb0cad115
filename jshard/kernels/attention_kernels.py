"""The kernels of others that compute attention, cuDNN's and JAX's splash attention: where they can run, and how.

Shapes, as suffixes: B examples; T, S queries and keys; H, G heads of queries and of keys; K elements of a head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jshard._text import CONTEXT as SAVED
from jshard.engine.context import region_mesh
from jshard.engine.per_example import per_example
from jshard.facts.gpu_target import HOPPER
from jshard.kernels.device import TracedDevice, automatic_axes, may_be_split

if TYPE_CHECKING:
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

_AMPERE = 8  # compute capability
_WIDEST = 256  # head dim that cuDNN supports, from Hopper on
_WIDEST_BEFORE_HOPPER = 128
_TPU_BLOCKS = (512, 256, 128)  # positions of a block, as in MaxText; the largest that divides the lengths


@dataclasses.dataclass(frozen=True)
class KernelReasons:
    """Why a kernel cannot run.

    Attributes:
        of_device: on this device at all. These are no surprise, and cause no warning.
        of_arrays: with these arrays.
    """

    of_device: list[str]
    of_arrays: list[str]


def is_16_bits(x: jax.Array) -> bool:
    """Returns whether an array has one of the dtypes that the kernels take."""
    return x.dtype.name in ("bfloat16", "float16")


def _dtype_reasons(q: jax.Array) -> list[str]:
    if is_16_bits(q):
        return []
    return [f"it needs bfloat16 or float16, and q is {q.dtype}"]


# ---- cuDNN, on NVIDIA GPUs


def cudnn_reasons(device: TracedDevice, q: jax.Array, k: jax.Array, bias: jax.Array | None) -> KernelReasons:
    """Returns the reasons of cuDNN 9.10, following the limits in `jax.nn.dot_product_attention`."""
    of_device = []
    if device.platform != "gpu" or device.capability < _AMPERE:
        of_device.append(f"cuDNN attention needs an NVIDIA GPU from Ampere on, not {device.kind}")

    of_arrays = _dtype_reasons(q)
    width = q.shape[-1]
    widest = _WIDEST if device.capability >= HOPPER else _WIDEST_BEFORE_HOPPER
    if width > widest or width % 8:
        of_arrays.append(f"the head dim must be a multiple of 8, at most {widest}, and is {width}")
    num_queries = q.shape[1]
    num_keys = k.shape[1]
    if bias is not None and (num_queries % 2 or num_keys % 2):
        of_arrays.append(f"with a bias the lengths must be even, and are {num_queries} and {num_keys}")
    return KernelReasons(of_device, of_arrays)


# ---- splash attention, on TPUs


def splash_reasons(
    device: TracedDevice, q: jax.Array, k: jax.Array, bias: jax.Array | None, window: int | None
) -> KernelReasons:
    """Returns the reasons of the TPU kernel."""
    of_device = []
    if device.platform != "tpu":
        of_device.append(f"it needs a TPU, not {device.kind}")

    of_arrays = _dtype_reasons(q)
    # Only in a model, whose mesh is known, can `splash_attention` split the heads by itself.
    is_split_outside_of_a_model = region_mesh() is None and bool(automatic_axes())
    if may_be_split() or is_split_outside_of_a_model:
        of_arrays.append("it needs whole arrays; outside a sharded model they may be split over the devices")
    if bias is not None:
        of_arrays.append("it takes no bias")
    num_queries = q.shape[1]
    num_keys = k.shape[1]
    if _tpu_block(num_queries) is None or _tpu_block(num_keys) is None:
        of_arrays.append(f"the lengths must be multiples of 128, and are {num_queries} and {num_keys}")
    width = q.shape[-1]
    if width % 64:
        of_arrays.append(f"the head dim must be a multiple of 64, and is {width}")
    num_heads = k.shape[2]
    num_parts = math.prod(automatic_axes().values())  # `splash_attention` runs on parts of the heads
    if num_heads % num_parts:
        of_arrays.append(f"{num_heads} heads of keys and values cannot be split over {num_parts} devices")
    if window is not None:
        of_arrays.append("it takes no window")
    return KernelReasons(of_device, of_arrays)


def splash_attention(scale: float, *, is_causal: bool, lengths: jax.Array | None) -> Callable[..., jax.Array]:
    """Returns JAX's splash attention, as a function of q, k and v in a form that `splash_reasons` allows.

    It runs on the examples of a shard, and with a `tensor` axis on a part of the heads.

    Args:
        scale: factor of the scores.
        is_causal: whether a position sees only those up to its own.
        lengths: (B,), the number of real keys; None if all are real.
    """

    def run_examples(q_BHTK: jax.Array, k_BGSK: jax.Array, v_BGSK: jax.Array, *lengths_B: jax.Array) -> jax.Array:
        # Inside `shard_map` these are the heads of one device: the kernel is made for so many.
        H, T = q_BHTK.shape[1:3]
        S = k_BGSK.shape[2]
        kernel = _splash_kernel(T, S, H, is_causal=is_causal)

        def run_example(q_HTK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, *length: jax.Array) -> jax.Array:
            segment_ids = [_segment_ids(T, S, num_real) for num_real in length]
            return kernel(q_HTK, k_GSK, v_GSK, *segment_ids)

        return jax.vmap(run_example)(q_BHTK, k_BGSK, v_BGSK, *lengths_B)

    # Lengths are passed as operands and not closed over: they are split along the examples, as q, k and v are.
    run: Callable[..., jax.Array] = per_example(run_examples)
    optional_lengths = [] if lengths is None else [lengths]
    mesh = region_mesh()
    axes = tuple(automatic_axes())
    if mesh is not None and axes:
        # The compiler cannot split a kernel, and would gather the heads.
        heads = P(None, axes)
        # Lengths are the same for all heads.
        in_specs = (heads, heads, heads, *(P() for _ in optional_lengths))
        run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=heads, axis_names=set(axes), check_vma=False)

    def attend(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array) -> jax.Array:
        # The kernel has no factor of its own. In float32, so that the factor is not rounded to 16 bits first.
        q_BTHK = (q_BTHK * jnp.asarray(scale, jnp.float32)).astype(q_BTHK.dtype)
        heads_first = [x.swapaxes(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK)]
        y_BHTK = run(*heads_first, *optional_lengths)
        return y_BHTK.swapaxes(1, 2)

    return attend


def _segment_ids(num_queries: int, num_keys: int, num_real: jax.Array) -> SegmentIds:
    """Returns ids by which no query attends to the keys from `num_real` on: those are of another segment."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds  # slow to import

    of_queries = jnp.ones(num_queries, jnp.int32)
    of_keys = (jnp.arange(num_keys) < num_real).astype(jnp.int32)
    return SegmentIds(of_queries, of_keys)


def _splash_kernel(num_queries: int, num_keys: int, num_heads: int, *, is_causal: bool) -> Callable[..., jax.Array]:
    """Returns the kernel for one example; its result and its sums are named for `jax.checkpoint` policies."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    shape = (num_queries, num_keys)
    if is_causal:
        # The offset aligns the last query with the last key, as the other forms do.
        mask = splash_attention_mask.CausalMask(shape, num_keys - num_queries)
    else:
        mask = splash_attention_mask.FullMask(shape)
    block_q = _tpu_block(num_queries)
    block_kv = _tpu_block(num_keys)
    assert block_q and block_kv, "checked by `splash_reasons`"
    kernel: Any = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * num_heads),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        head_shards=1,  # `splash_attention` splits the heads, outside of the kernel
        q_seq_shards=1,
        residual_checkpoint_name=SAVED,
    )
    return kernel


def _tpu_block(length: int) -> int | None:
    """Returns the positions of a block; None if no block divides a length."""
    for block in _TPU_BLOCKS:
        if length % block == 0:
            return block
    return None
