"""A DHEN, which predicts clicks: embedding tables far larger than the rest, below an ensemble of interactions.

    jshard train dhen                        # the tiny recipe, minutes on a laptop
    jshard train dhen --recipe dhen_550m --mesh fsdp=512 --dry-run

After "DHEN: A Deep and Hierarchical Ensemble Network for Large-Scale Click-Through Rate Prediction" (Zhang et al.,
2022). A sample has some ids (user, place, ad) and some numbers. Each id becomes a row of its table, the numbers become
one more row, and every layer applies several kinds of interaction to all rows. The samples come from `clicks.py`,
beside this file: they follow a known law, so the smallest possible loss is known.

The two halves are sharded differently. The layers are units, gathered one after another. Tables must never be
gathered: they take most of the memory of all devices together, and a step reads little of them. So ids are sent
to the devices that have the rows, and rows are sent back: traffic grows with the batch, not with the tables.

Names end in the dims of their array:

    B  batch                    D  width of a row (d_model)     P  pairs of slots
    C  categories = tables      S  slots = categories + 1       H  attention heads
    N  numbers of a sample      F  hidden width (d_ff)          K  width of one head (d_head)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clicks import clicks
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import jshard as js
from jshard.data import Data
from jshard.train import Batch, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class DHENConfig:
    """Size of a DHEN. Parameters are float32 regardless of `compute_dtype`."""

    rows: tuple[int, ...] = (4096, 2048, 1024, 1024, 512, 512, 512)  # of each table; they divide by the fsdp degree
    num_numbers: int = 4
    n_layer: int = 2
    d_model: int = 16
    n_head: int = 2
    d_head: int = 8
    d_ff: int = 128
    compute_dtype: str = "float32"

    @property
    def slots(self) -> int:
        """The number of rows of a sample in a layer: one per id, and one for the numbers."""
        return len(self.rows) + 1

    @property
    def width(self) -> int:
        """All slots of a sample, concatenated."""
        return self.slots * self.d_model


# ---- The tables ------------------------------------------------------------------------------


def look_up(tables_RD: Sequence[jax.Array], ids_BC: jax.Array, first_row: Sequence[jax.Array | int]) -> jax.Array:
    """A row for each id; zeros if the row is not in this part of the table, which starts at `first_row`."""
    found = []
    for c, (table_RD, first) in enumerate(zip(tables_RD, first_row, strict=True)):
        row = ids_BC[..., c] - first
        is_here = (row >= 0) & (row < table_RD.shape[0])
        rows_BD = table_RD[jnp.where(is_here, row, 0)]
        found.append(jnp.where(is_here[..., None], rows_BD, 0))
    return jnp.stack(found, axis=-2)


class Tables(nnx.Module):
    """An embedding table per category. It is called in global view, and on a mesh sends the rows itself."""

    def __init__(self, config: DHENConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.05)
        self.tables = nnx.List([nnx.Param(init(rngs.params(), (rows, config.d_model))) for rows in config.rows])
        self.dtype = jnp.dtype(config.compute_dtype)
        self.mesh: Mesh | AbstractMesh | None = None  # `annotate` sets it

    def __call__(self, ids_BC: jax.Array) -> jax.Array:
        tables = [table[...] for table in self.tables]
        if self.mesh is None:
            return look_up(tables, ids_BC, [0] * len(tables)).astype(self.dtype)
        return self._across(self.mesh, tables, ids_BC)

    def _across(self, mesh: Mesh | AbstractMesh, tables: list[jax.Array], ids_BC: jax.Array) -> jax.Array:
        """Every device looks up all ids in its part of the tables; the sum of the results is scattered.

        Every replica does so for the ids of all replicas. In backward, the gradients of the rows take the same path
        back, so each device has the whole gradient of its part, and nothing of a table's size is ever sent.
        """
        replicas, shards = mesh.shape["replica"], mesh.shape["fsdp"]

        def lookup_here(tables: list[jax.Array], ids: jax.Array) -> jax.Array:
            first_row = [jax.lax.axis_index("fsdp") * table.shape[0] for table in tables]
            rows = look_up(tables, ids, first_row).astype(self.dtype)  # all but one are zeros: the sum is exact
            return jax.lax.psum_scatter(rows, "fsdp", scatter_dimension=1, tiled=True)

        by_row, everywhere, by_sample = PartitionSpec("fsdp"), PartitionSpec(), PartitionSpec("replica", "fsdp")
        lookup = jax.shard_map(
            lookup_here, mesh=mesh, in_specs=(by_row, everywhere), out_specs=PartitionSpec(None, "fsdp")
        )
        rows = lookup(tables, ids_BC.reshape(replicas, shards, -1, len(tables)))
        rows = jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, by_sample))
        return rows.reshape(*ids_BC.shape, -1)


# ---- The ensemble ----------------------------------------------------------------------------


class Dots(nnx.Module):
    """The similarity of each pair of slots: dot products, then a network."""

    def __init__(self, config: DHENConfig, *, rngs: nnx.Rngs):
        num_pairs = config.slots * (config.slots + 1) // 2
        self.up = nnx.Linear(num_pairs, config.d_ff, rngs=rngs)
        self.down = nnx.Linear(config.d_ff, config.width, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        dots_BSS = jnp.einsum("bsd,btd->bst", x_BSD, x_BSD) / x_BSD.shape[-1]
        dots_BP = dots_BSS[:, *np.triu_indices(x_BSD.shape[1])]
        return self.down(nnx.relu(self.up(dots_BP))).reshape(x_BSD.shape)


class Attention(nnx.Module):
    """Self-attention between slots."""

    def __init__(self, config: DHENConfig, *, rngs: nnx.Rngs):
        D, HK = config.d_model, config.n_head * config.d_head
        self.n_head = config.n_head
        self.qkv = nnx.Linear(D, 3 * HK, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(HK, D, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        B, S, _ = x_BSD.shape
        qkv_BSHK = self.qkv(x_BSD).reshape(B, S, 3 * self.n_head, -1)
        y_BSHK = jax.nn.dot_product_attention(*jnp.split(qkv_BSHK, 3, axis=2))
        return self.out(y_BSHK.reshape(B, S, -1))


class Cross(nnx.Module):
    """Each number of a sample times a weighted sum of all: each layer raises the degree of the products by one."""

    def __init__(self, config: DHENConfig, *, rngs: nnx.Rngs):
        self.weigh = nnx.Linear(config.width, config.width, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return x_BSD * self.weigh(x_BSD.reshape(len(x_BSD), -1)).reshape(x_BSD.shape)


class Mix(nnx.Module):
    """A weighted sum of everything, the simplest interaction of all slots."""

    def __init__(self, config: DHENConfig, *, rngs: nnx.Rngs):
        self.weigh = nnx.Linear(config.width, config.width, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return self.weigh(x_BSD.reshape(len(x_BSD), -1)).reshape(x_BSD.shape)


class Layer(nnx.Module):
    """One level of the hierarchy: the sum of all interactions and a shortcut, normalised."""

    def __init__(self, config: DHENConfig, *, rngs: nnx.Rngs):
        kinds = (Dots, Attention, Cross, Mix)
        self.interactions = nnx.List([kind(config, rngs=rngs) for kind in kinds])
        self.norm = nnx.LayerNorm(config.d_model, rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return self.norm(x_BSD + sum(interaction(x_BSD) for interaction in self.interactions))


class DHEN(nnx.Module):
    """Numbers and looked-up rows in, the logit of a click out."""

    def __init__(self, config: DHENConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.tables = Tables(config, rngs=rngs)
        self.numbers = nnx.Linear(config.num_numbers, config.d_model, rngs=rngs)
        self.norm = nnx.LayerNorm(config.d_model, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.n_layer)])
        self.head = nnx.Linear(config.width, 1, rngs=rngs)

    def __call__(self, numbers_BN: jax.Array, rows_BCD: jax.Array) -> jax.Array:
        numbers_BD = self.numbers(numbers_BN.astype(rows_BCD.dtype))
        x_BSD = self.norm(jnp.concatenate([rows_BCD, numbers_BD[:, None]], axis=1))
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(x_BSD.reshape(len(x_BSD), -1))[:, 0]


# ---- The interface for `jshard train` -----------------------------------------------------------


def build(config: DHENConfig, rngs: nnx.Rngs) -> DHEN:
    return DHEN(config, rngs=rngs)


def annotate(model: DHEN, mesh: Mesh | AbstractMesh) -> None:
    """Tables are sharded by row and never gathered; each layer is a unit; the root has the rest."""
    precision = None
    if model.config.compute_dtype != "float32":
        precision = js.MixedPrecision(param_dtype=model.config.compute_dtype, reduce_dtype="float32")
    model.tables.mesh = mesh
    js.fully_shard(model.tables, mesh=mesh, placement=js.PlacementPolicy(shard_dim=0, gathered=False))
    for layer in model.layers:
        js.fully_shard(layer, mesh=mesh, mixed_precision=precision)
    js.fully_shard(model, mesh=mesh, mixed_precision=precision)


def click_logits(model: DHEN, batch: Batch) -> jax.Array:
    rows_BCD = model.tables(batch["ids"])  # before the model, whose parameters are gathered
    return model(batch["numbers"], rows_BCD).astype(jnp.float32)


def loss_fn(model: DHEN, batch: Batch) -> jax.Array:
    """Mean binary cross entropy, in nats per sample, over the whole (global) batch."""
    return optax.sigmoid_binary_cross_entropy(click_logits(model, batch), batch["click"]).mean()


def data(recipe: DHENRecipe) -> Data:
    config = recipe.model
    return clicks(config.rows, config.num_numbers, num_samples=recipe.num_samples, num_held_out=recipe.num_held_out)


def flops(recipe: DHENRecipe) -> tuple[float, str]:
    """FLOPs of the layers; tables and head are negligible."""
    config, batch_size = recipe.model, recipe.batch_size
    S, D, F, W, A = config.slots, config.d_model, config.d_ff, config.width, config.n_head * config.d_head
    dots = S * S * D + F * (S * (S + 1) // 2 + W)
    attention = S * 4 * D * A + 2 * S * S * A
    products = config.n_layer * (dots + attention + 2 * W * W)
    return 6.0 * products * batch_size, f"6 x {products:,} products of the layers x {batch_size:,} samples"


# ---- Recipes: a whole run as a value --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class DHENRecipe(Recipe):
    """Tables use Adagrad, which does not change rows without samples. The rest uses AdamW."""

    sequence_length: int = 1  # is for text
    num_samples: int
    num_held_out: int = 16_384
    table_learning_rate: float

    def optimizer(self) -> optax.GradientTransformation:
        rates = self.schedule()
        table_rates = lambda step: rates(step) * (self.table_learning_rate / self.learning_rate)
        adagrad = optax.adagrad(table_rates, initial_accumulator_value=0.0)
        kind = lambda path, _: "table" if jax.tree_util.keystr(path, simple=True).startswith("tables") else "dense"
        kinds = lambda params: jax.tree.map_with_path(kind, params)
        return optax.multi_transform({"table": adagrad, "dense": super().optimizer()}, kinds)


def tiny() -> DHENRecipe:
    """Trains on two CPU cores in minutes, close to the floor."""
    return DHENRecipe(
        model=DHENConfig(),
        batch_size=512,
        num_samples=1_024_000,
        num_steps=2000,
        learning_rate=5e-3,
        table_learning_rate=0.1,
        warmup_steps=50,
        eval_every=500,
        eval_sequences=16_384,
    )


def dhen_550m() -> DHENRecipe:
    """550M parameters above tables of 768 billion, as in the PyTorch FSDP paper."""
    return DHENRecipe(
        model=DHENConfig(
            rows=(2**29,) * 10 + (2**26,) * 9 + (2**21,) * 12,
            num_numbers=512,
            n_layer=8,
            d_model=128,
            n_head=4,
            d_head=128,
            d_ff=7680,
            compute_dtype="bfloat16",
        ),
        batch_size=65_536,
        num_samples=2**32,
        num_steps=65_536,
        learning_rate=1e-3,
        table_learning_rate=2e-2,
        warmup_steps=2000,
    )


RECIPES = {"tiny": tiny, "dhen_550m": dhen_550m}
