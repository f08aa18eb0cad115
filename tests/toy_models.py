"""Plain nnx models, for tests that need a model and nothing special about it; `linen_models` has those of Linen."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Activation = Callable[[jax.Array], jax.Array]
"""Applied between layers. It is looked up when the model is made, not when it is called."""


class TwoLayers(nnx.Module):
    """Two linear layers, `up` and `down`, with an activation between them."""

    def __init__(
        self, in_features: int, hidden: int, out_features: int, rngs: nnx.Rngs, activation: Activation = nnx.gelu
    ) -> None:
        self.up = nnx.Linear(in_features, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, out_features, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.activation(self.up(x)))


class Residual(nnx.Module):
    """A residual block of two linear layers, `up` and `down`, with an activation between them."""

    def __init__(
        self, width: int, hidden: int, rngs: nnx.Rngs, activation: Activation = nnx.gelu, use_bias: bool = True
    ) -> None:
        self.up = nnx.Linear(width, hidden, use_bias=use_bias, rngs=rngs)
        self.down = nnx.Linear(hidden, width, use_bias=use_bias, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.activation(self.up(x)))


class ResidualLinear(nnx.Module):
    """A residual block of one linear layer, `linear`, and an activation."""

    def __init__(self, width: int, rngs: nnx.Rngs, activation: Activation = nnx.gelu, use_bias: bool = True) -> None:
        self.linear = nnx.Linear(width, width, use_bias=use_bias, rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.activation(self.linear(x))


class Tower(nnx.Module):
    """`blocks` one after the other, and a `head` behind them if it has one."""

    def __init__(self, blocks: Sequence[nnx.Module], head: nnx.Module | None = None) -> None:
        self.blocks = nnx.List(blocks)
        self.head = head

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class ScannedTower(nnx.Module):
    """`blocks` stacked by `nnx.vmap` and run by `nnx.scan`, and a `head` behind them."""

    def __init__(self, make_block: Callable[[nnx.Rngs], nnx.Module], depth: int, head: Any, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.split_rngs(splits=depth)(nnx.vmap(make_block))(rngs)
        self.head = head

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(x, self.blocks))


class Normed(nnx.Module):
    """A linear layer, `linear`, and a `norm` of the batch, which has settings of its own."""

    def __init__(self, in_features: int, out_features: int, rngs: nnx.Rngs, **norm: Any) -> None:
        self.linear = nnx.Linear(in_features, out_features, rngs=rngs)
        self.norm = nnx.BatchNorm(out_features, rngs=rngs, **norm)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.linear(x))


class Tied(nnx.Module):
    """A `table` of tokens that also scores them, with a `layer` between."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(vocab, width, rngs=rngs)
        self.layer = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.table.attend(nnx.gelu(self.layer(self.table(ids))))


class Bigram(nnx.Module):
    """Scores of the next token by the last alone: a table, `embed`, and a `head`."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> None:
        self.embed = nnx.Embed(vocab, width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.head(self.embed(ids))


class Cube(nnx.Module):
    """A parameter of 64 KiB and more, `odd`, all of whose dims are smaller than the axis."""

    def __init__(self) -> None:
        self.odd = nnx.Param(jnp.ones((7, 7, 7, 7, 7)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.odd[0, 0, 0, 0, 0]
