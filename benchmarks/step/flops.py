"""Arithmetic of a step, by the formula that the FSDP paper takes from Megatron."""

from __future__ import annotations

from benchmarks.step.sizes import Sizes

FORMULA = (
    "model FLOPs of a step = 72 B s l h^2 (1 + s / (6 h) + V / (12 l h)) for B sequences of s tokens, l layers of width"
    " h and a vocabulary of V: Narayanan et al. 2021 (arXiv 2104.04473) without recomputation. Where layers are"
    " computed again (remat full), TFLOP/s count that, too, as that paper and the FSDP paper (arXiv 2304.11277) do:"
    " 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)). MFU is model FLOPs over the peak."
)


def model_flops(sizes: Sizes) -> float:
    """Floating-point operations of a process in a step: forward, and twice that backward."""
    return _flops(sizes, passes=3)


def done_flops(sizes: Sizes) -> float:
    """With what is computed again: with remat, forward comes twice, but for the head."""
    return _flops(sizes, passes=4 if sizes.remat == "full" else 3)


def _flops(sizes: Sizes, *, passes: int) -> float:
    """Matrix products: 24 B s h^2 + 4 B s^2 h in a layer and pass, 2 B s h V in the head, three times."""
    s, h = sizes.block_size, sizes.d_model
    layers = sizes.n_layer * (24 * h * h + 4 * s * h)  # d_ff is 4 h
    return float(sizes.batch * s * (passes * layers + 3 * 2 * h * sizes.vocab_size))
