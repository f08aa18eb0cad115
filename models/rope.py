"""Rotary positions, and how Transformers scales them for sequences that are longer than those of pretraining.

Names end in the dims of their array:

    B  batch                 H  heads                  k  pairs of features of a head, K / 2
    T  position in sequence  K  width of one head
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary positions are changed so that sequences can be longer than in pretraining."""

    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0  # by how much sequences are longer
    original_size: int = 0  # longest sequence of pretraining
    low_freq_factor: float = 1.0  # llama3: slower than so many turns in original_size, a frequency is divided by factor
    high_freq_factor: float = 4.0  # llama3: faster than so many turns, it is kept
    beta_fast: float = 32.0  # yarn: faster than so many turns in original_size, a frequency is kept
    beta_slow: float = 1.0  # yarn: slower than so many turns, it is divided by factor
    truncate: bool = True  # yarn: these two limits are rounded to whole features
    attention_factor: float | None = None  # yarn: queries and keys are multiplied by it; none: 0.1 ln(factor) + 1

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"rope_scaling.factor={self.factor} would shorten sequences")
        if self.kind not in ("default", "linear") and self.original_size < 1:
            raise ValueError(f"rope_scaling.kind={self.kind!r} needs rope_scaling.original_size")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("rope_scaling.low_freq_factor is not below high_freq_factor")

    def check_length(self, block_size: int) -> None:
        """Raises for sequences that are longer than the frequencies here are right for."""
        longest = self.original_size
        if self.kind == "dynamic" and block_size > longest:
            raise ValueError(f"rope_scaling.kind='dynamic' is supported up to block_size={longest}, where it begins")


UNSCALED = RopeScaling()


def rotate(x_BTHK: jax.Array, theta: float, at: Any, scaling: RopeScaling = UNSCALED) -> jax.Array:
    """Rotary positions, from `at` on: rotates each pair of features by an angle that grows with the position.

    In a packed sequence `at` has the position of each token, (B, T).

    A pair is a feature of the first half of a head and its counterpart in the second, as in Hugging Face's
    checkpoints; Meta's own pair neighbours.
    """
    T, K = x_BTHK.shape[1], x_BTHK.shape[3]
    frequency_k = frequencies(theta, K, scaling)
    position_BT = at if jnp.ndim(at) == 2 else (at + jnp.arange(T))[None]
    angle_BTk = position_BT[..., None] * frequency_k[None, None]
    cos, sin = jnp.cos(angle_BTk)[:, :, None], jnp.sin(angle_BTk)[:, :, None]
    x1, x2 = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    if scaling.kind == "yarn":
        turned *= amplitude(scaling)
    return turned.astype(x_BTHK.dtype)


def apart(segments_BT: jax.Array) -> jax.Array:
    """A bias for attention, by which each token of packed texts sees only its own text: 0, or a very small number."""
    is_own_B1TS = segments_BT[:, None, :, None] == segments_BT[:, None, None, :]
    return jnp.where(is_own_B1TS, 0.0, -1e9)


def frequencies(theta: float, K: int, scaling: RopeScaling) -> jax.Array:
    """The angle by which each of the K / 2 pairs of features turns per position."""
    frequency_k = theta ** (-jnp.arange(K // 2) / (K // 2))
    if scaling.kind in ("default", "dynamic"):  # dynamic: nothing changes up to original_size
        return frequency_k
    if scaling.kind == "linear":
        return frequency_k / scaling.factor
    if scaling.kind == "llama3":
        turns_k = scaling.original_size * frequency_k / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        unchanged_k = jnp.clip((turns_k - low) / (high - low), 0, 1)
    else:
        unchanged_k = 1 - yarn_ramp(theta, K, scaling)
    return frequency_k * (unchanged_k + (1 - unchanged_k) / scaling.factor)


def yarn_ramp(theta: float, K: int, scaling: RopeScaling) -> jax.Array:
    """How far each pair is from the fast ones, which keep their frequency (0), to the slow ones (1)."""

    def pair(turns: float) -> float:
        """The pair that turns so many times in `original_size`."""
        return K * math.log(scaling.original_size / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, K - 1)
    if first == last:
        last += 0.001  # a step, without a division by zero
    return jnp.clip((jnp.arange(K // 2) - first) / (last - first), 0, 1)


def amplitude(scaling: RopeScaling) -> float:
    """The factor by which yarn multiplies rotated queries and keys."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1
