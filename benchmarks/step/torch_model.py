"""The GPT of models/gpt.py in PyTorch's idiom, after minGPT. Names end in dims as there."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.step.inputs import initial_weights
from benchmarks.step.sizes import Sizes


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values come from one product."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.n_head = sizes.n_head
        self.qkv = nn.Linear(sizes.d_model, 3 * sizes.d_model)
        self.out = nn.Linear(sizes.d_model, sizes.d_model)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:  # noqa: D102
        B, T, D = x_BTD.shape
        q, k, v = (
            part.view(B, T, self.n_head, D // self.n_head).transpose(1, 2) for part in self.qkv(x_BTD).split(D, dim=2)
        )
        y_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """The feed-forward half of a block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.d_model, sizes.d_ff)
        self.down = nn.Linear(sizes.d_ff, sizes.d_model)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))


class Block(nn.Module):
    """One layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.d_model, eps=1e-5)
        self.attention = Attention(sizes)
        self.mlp_norm = nn.LayerNorm(sizes.d_model, eps=1e-5)
        self.mlp = MLP(sizes)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GPT(nn.Module):
    """Tokens and targets in, the mean cross entropy out; the head is the table of the tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.remat = sizes.remat == "full"
        self.tokens = nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.positions = nn.Embedding(sizes.block_size, sizes.d_model)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.n_layer)])
        self.norm = nn.LayerNorm(sizes.d_model, eps=1e-5)

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:  # noqa: D102
        positions_T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        x_BTD = self.tokens(inputs_BT) + self.positions(positions_T)
        for block in self.blocks:
            x_BTD = checkpoint(block, x_BTD, use_reentrant=False) if self.remat else block(x_BTD)
        logits_BTV = F.linear(self.norm(x_BTD), self.tokens.weight).float()
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


@torch.no_grad()
def put_weights(model: GPT, sizes: Sizes) -> None:
    """The same values as in JAX; a Linear of PyTorch is (out, in)."""
    parameters = dict(model.named_parameters())
    for path, value in initial_weights(sizes):
        name, kind = path.replace("/", ".").rsplit(".", 1)
        parameter = parameters.pop(f"{name}.{'bias' if kind == 'bias' else 'weight'}")
        whole = torch.from_numpy(np.ascontiguousarray(value.T if kind == "kernel" else value)).to(parameter.device)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.copy_(whole)
    if parameters:
        raise RuntimeError(f"parameters without a value: {[*parameters]}")
