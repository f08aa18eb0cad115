"""The model of the step benchmark as numbers: what every framework builds in its own way."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """A GPT as in models/gpt.py (learned positions, tied head, no dropout), and the batch of a process."""

    name: str  # for the report. vocab_size, block_size, n_layer, n_head, d_model, d_ff: as in `GPTConfig`.
    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    d_model: int
    d_ff: int
    batch: int  # sequences of a process, each of `block_size` tokens
    dtype: str = "float32"  # that matrix products compute in; parameters and optimizer are float32
    remat: str = "none"  # "none", or "full": layers are computed again in backward
    learning_rate: float = 3e-4  # of AdamW

    @property
    def num_parameters(self) -> int:
        """All of them, the tied table once."""
        return sum(math.prod(kind.shape) for kind in self.parameters().values())

    @property
    def tokens(self) -> int:
        """Tokens of a process in a step."""
        return self.batch * self.block_size

    def parameters(self) -> dict[str, Initial]:
        """Every parameter by its path in models/gpt.py."""
        V, T, D, F = self.vocab_size, self.block_size, self.d_model, self.d_ff
        residual = 0.02 / math.sqrt(2 * self.n_layer)
        found = {"tokens/embedding": Initial((V, D), 0.02), "positions/embedding": Initial((T, D), 0.02)}
        found |= _norm("norm", D)
        for layer in range(self.n_layer):
            block = f"blocks/{layer}"
            found |= _norm(f"{block}/attention_norm", D) | _norm(f"{block}/mlp_norm", D)
            found |= _linear(f"{block}/attention/qkv", D, 3 * D, 0.02)
            found |= _linear(f"{block}/attention/out", D, D, residual)
            found |= _linear(f"{block}/mlp/up", D, F, 0.02)
            found |= _linear(f"{block}/mlp/down", F, D, residual)
        return found


@dataclasses.dataclass(frozen=True)
class Initial:
    """How a parameter begins: normal numbers of this standard deviation around `mean`."""

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def _norm(name: str, width: int) -> dict[str, Initial]:
    return {f"{name}/scale": Initial((width,), 0.0, 1.0), f"{name}/bias": Initial((width,), 0.0)}


def _linear(name: str, d_in: int, d_out: int, std: float) -> dict[str, Initial]:
    return {f"{name}/kernel": Initial((d_in, d_out), std), f"{name}/bias": Initial((d_out,), 0.0)}


def _gpt2(name: str, n_layer: int, n_head: int, d_model: int, *, batch: int) -> Sizes:
    return Sizes(
        name=name,
        vocab_size=50257,
        block_size=1024,
        n_layer=n_layer,
        n_head=n_head,
        d_model=d_model,
        d_ff=4 * d_model,
        batch=batch,
        dtype="bfloat16",
        remat="full",
    )


_15M = Sizes(name="15m", vocab_size=512, block_size=256, n_layer=8, n_head=6, d_model=384, d_ff=1536, batch=4)
_QUICK = Sizes(name="quick", vocab_size=64, block_size=16, n_layer=2, n_head=2, d_model=32, d_ff=128, batch=2)
SIZES = {
    sizes.name: sizes
    for sizes in (
        _QUICK,
        _15M,
        _gpt2("gpt2_small", 12, 12, 768, batch=16),
        _gpt2("gpt2_xl", 48, 25, 1600, batch=16),
    )
}
