"""Linen models, and the comparison of a sharded one with one device."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jshard as js
from tests.helpers import with_placement

VOCAB, WIDTH = 128, 32


class Block(nn.Module):
    """Compact style, with dropout and BatchNorm if asked for."""

    width: int = WIDTH
    rate: float = 0.0
    norm: bool = False

    @nn.compact
    def __call__(self, x, *, train=True):
        h = nn.Dense(4 * self.width, use_bias=not self.norm)(nn.LayerNorm()(x))
        if self.norm:
            h = nn.BatchNorm(use_running_average=not train)(h)
        h = nn.Dropout(self.rate, deterministic=not train)(nn.gelu(h))
        return x + nn.Dense(self.width)(h)


class TwoLayers(nn.Module):
    """Two dense layers with an activation between them."""

    hidden: int
    out_features: int
    activation: Callable[[jax.Array], jax.Array] = nn.gelu
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        h = self.activation(nn.Dense(self.hidden, dtype=self.dtype)(x))
        return nn.Dense(self.out_features, dtype=self.dtype)(h)


class Residual(nn.Module):
    """A residual block of two dense layers with an activation between them: `Block` without what that has besides."""

    hidden: int
    activation: Callable[[jax.Array], jax.Array] = nn.gelu

    @nn.compact
    def __call__(self, x):
        h = self.activation(nn.Dense(self.hidden)(x))
        return x + nn.Dense(x.shape[-1])(h)


class Tower(nn.Module):
    """Blocks one after the other, and a dense layer behind them."""

    make_block: Callable[..., nn.Module]
    out_features: int
    depth: int = 2

    @nn.compact
    def __call__(self, x):
        for i in range(self.depth):
            x = self.make_block(name=f"block_{i}")(x)
        return nn.Dense(self.out_features, name="head")(x)


class Decoder(nn.Module):
    """Token ids (batch, length) in, logits (batch, length, vocab) out; the table also scores the tokens."""

    depth: int = 4
    rate: float = 0.0
    norm: bool = False
    block: Any = Block

    @nn.compact
    def __call__(self, ids, *, train=True):
        given = {} if train else {"train": False}
        table = nn.Embed(VOCAB, WIDTH, name="table")
        x = table(ids)
        for i in range(self.depth):
            x = self.block(WIDTH, self.rate, self.norm, name=f"block_{i}")(x, **given)
        return table.attend(nn.LayerNorm(name="norm")(x))


class Layer(nn.Module):
    """A block as `nn.scan` has it."""

    width: int = WIDTH
    norm: bool = False

    @nn.compact
    def __call__(self, x, _):
        return Block(self.width, norm=self.norm)(x), None


class Scanned(nn.Module):
    """Layers stacked by `nn.scan`, between a table and a head."""

    width: int = WIDTH
    length: int = 2

    @nn.compact
    def __call__(self, ids):
        scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.length)
        x, _ = scan(self.width, name="layers")(nn.Embed(VOCAB, self.width, name="table")(ids), None)
        return nn.Dense(VOCAB, name="head")(x)


class SetupBlock(nn.Module):
    """Setup style, with a parameter of its own."""

    def setup(self):
        self.norm = nn.LayerNorm()
        self.up, self.down = nn.Dense(4 * WIDTH), nn.Dense(WIDTH)
        self.scale = self.param("scale", nn.initializers.normal(0.1), (1, 1, 32 * WIDTH))

    def __call__(self, x):
        return x + self.down(nn.gelu(self.up(self.norm(x)))) * (1 + self.scale[..., :WIDTH])


class SetupDecoder(nn.Module):
    """Setup style; `encode` and `decode` are methods besides the call, and `tied` reads the table by hand."""

    depth: int = 3

    def setup(self):
        self.table = nn.Embed(VOCAB, WIDTH)
        self.blocks = [SetupBlock() for _ in range(self.depth)]
        self.norm = nn.LayerNorm()

    def encode(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def decode(self, x):
        return self.table.attend(x)

    def tied(self, ids):
        return self.encode(ids) @ self.table.embedding.T

    def __call__(self, ids):
        return self.decode(self.encode(ids))


def tokens(batch: int = 16, length: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets."""
    ids = np.random.default_rng(seed).integers(0, VOCAB, (batch, length + 1), dtype=np.int32)
    return ids[:, :-1], ids[:, 1:]


X, Y = tokens()


def cross_entropy(logits: jax.Array, labels: Any = Y) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def creator(model: Any, tx: Any, inputs: Any = X) -> Callable[[], TrainState]:
    """A function that makes the state of a training."""

    def create() -> TrainState:
        params = model.init(jax.random.key(0), inputs)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return create


def results(model: nn.Module, variables: Any, call: Callable | None = None) -> Any:
    """Loss, gradients of the parameters, and the changed variables, of one call in one program."""
    state = {k: v for k, v in variables.items() if k != "params"}
    call = call or (lambda model, variables, mutable: model.apply(variables, X, mutable=mutable))

    @jax.jit
    def run(params, state):
        def loss(params):
            logits, changed = call(model, {"params": params, **state}, list(state))
            return cross_entropy(logits), changed

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, changed), grads = run(variables["params"], state)
    return loss, grads, changed


@functools.cache
def reference(plain: nn.Module, call: Callable | None) -> tuple[Any, Any]:
    """Variables of a model, and its results on one device."""
    variables = jax.jit(plain.init)(jax.random.key(0), X)
    return variables, results(plain, variables, call)


def assert_equal(
    plain: nn.Module, call: Callable | None = None, *, mesh: Any = None, tolerance: float = 2e-6, **settings: Any
) -> nn.Module:
    """Holds loss, gradients and changed variables of the sharded model against one device; returns that model."""
    variables, wanted = reference(plain, call)
    model = js.fully_shard(plain, mesh=mesh or js.mesh(), **with_placement(**settings))
    found = results(model, variables, call)
    assert_same(found, wanted, tolerance)
    return model


def assert_same(found: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    """Holds two trees of arrays against each other."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    apart = differences(found, wanted)
    assert max(apart.values()) <= tolerance, max(apart.items(), key=lambda item: item[1])


def differences(found: Any, wanted: Any) -> dict[str, float]:
    """Largest difference of each array, relative to its largest element.

    A bias before a norm or a softmax has no gradient but noise: what is below a hundredth of the largest array is
    measured against that.
    """
    pairs = {
        jax.tree_util.keystr(path): (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    }
    floor = max(float(np.abs(b).max()) for _, b in pairs.values()) / 100
    return {k: float(np.abs(a - b).max() / max(np.abs(b).max(), floor)) for k, (a, b) in pairs.items()}
