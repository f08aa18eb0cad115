"""A diffusion transformer in one readable file: DiT (Peebles & Xie 2022, arXiv 2212.09748), for images and video.

    jshard train vdit                         # the tiny recipe: handwritten digits of 8 x 8 pixels
    jshard train vdit --recipe tiny_video     # digits that move
    jshard plan vdit --recipe vdit_4b --topology h100:16x8

An image is a video of one frame. The model turns noise into videos of a class by rectified flow (Liu et al. 2022,
arXiv 2209.03003): it learns the velocity of a sample on the straight line from noise to video. If you copy this
file, also copy `digits.py`, beside it, or define other `data`.

Names end in the dims of their array:

    B  batch                 N  patches, of all frames                   D  model width (d_model)
    T  frames                P  numbers in a patch                       H  heads
    Y  rows                  S  sinusoids that encode a time            K  width of one head (D / H)
    X  columns               M  modulations of a block: 6, or 2
    C  channels
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from digits import NUM_CLASSES, clips
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh

import jshard as js
from jshard.data import Data
from jshard.train import Batch, Recipe

NUM_SINUSOIDS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class VDiTConfig:
    """Size and kind of a diffusion transformer. Parameters are float32 regardless of `compute_dtype`."""

    num_frames: int = 1  # 1 for an image
    image_size: int = 8  # rows, and columns
    channels: int = 1
    patch_frames: int = 1
    patch_size: int = 2
    num_classes: int = NUM_CLASSES
    n_layer: int = 4
    n_head: int = 4
    d_model: int = 128
    attention: str = "auto"  # or "cudnn", "xla"; auto: by cuDNN in 16 bits on NVIDIA GPUs, elsewhere in plain form
    label_dropout: float = 0.1  # share of samples trained without class, for guidance
    scan: bool = False  # the blocks in one module, run as one loop: compile time does not grow with depth
    # Read by `annotate` only: an unsharded model computes in float32 and keeps every activation.
    compute_dtype: str = "float32"
    reduce_dtype: str = "float32"  # of gradients on their way to each other
    remat: str = "auto"

    def __post_init__(self) -> None:
        if self.num_frames % self.patch_frames or self.image_size % self.patch_size:
            raise ValueError(
                f"patches of {self.patch_frames} x {self.patch_size} x {self.patch_size} do not tile "
                f"num_frames={self.num_frames} of image_size={self.image_size}"
            )
        if self.d_model % self.n_head or self.d_model % 4:
            raise ValueError(
                f"d_model={self.d_model} does not split into n_head={self.n_head} and 4 parts of positions"
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of a sample: T, Y, X, C."""
        return (self.num_frames, self.image_size, self.image_size, self.channels)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Number of patches in time, vertically and horizontally; N is their product."""
        side = self.image_size // self.patch_size
        return (self.num_frames // self.patch_frames, side, side)

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """Shape of a patch: frames, rows, columns, channels; P is their product."""
        return (self.patch_frames, self.patch_size, self.patch_size, self.channels)


# ---- Patches and positions ---------------------------------------------------------------------


def patchify(video_BTYXC: jax.Array, config: VDiTConfig) -> jax.Array:
    """Cuts videos into patches in time and space, in reading order; `unpatchify` is the inverse."""
    (t, y, x), (f, h, w, c) = config.grid, config.patch_shape
    cut = video_BTYXC.reshape(-1, t, f, y, h, x, w, c).transpose(0, 1, 3, 5, 2, 4, 6, 7)
    return cut.reshape(-1, t * y * x, f * h * w * c)


def unpatchify(patches_BNP: jax.Array, config: VDiTConfig) -> jax.Array:
    (t, y, x), (f, h, w, c) = config.grid, config.patch_shape
    cut = patches_BNP.reshape(-1, t, y, x, f, h, w, c).transpose(0, 1, 4, 2, 5, 3, 6, 7)
    return cut.reshape(-1, *config.shape)


def sinusoids(at: jax.Array, width: int) -> jax.Array:
    """Encodes numbers as sinusoids of many wavelengths, in a new last dim."""
    frequency_s = 10_000.0 ** (-jnp.arange(width // 2) / (width // 2))
    angle = jnp.multiply.outer(at.astype(jnp.float32), frequency_s)
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def positions(config: VDiTConfig) -> jax.Array:
    """Positions of patches: half of the features encode the row, half the column; the frame is added to both."""
    (t, y, x), D = config.grid, config.d_model
    rows_YXD = jnp.broadcast_to(sinusoids(jnp.arange(y), D // 2)[:, None], (y, x, D // 2))
    columns_YXD = jnp.broadcast_to(sinusoids(jnp.arange(x), D // 2)[None], (y, x, D // 2))
    place_TYXD = jnp.concatenate([rows_YXD, columns_YXD], axis=-1)[None]
    if t > 1:
        place_TYXD += sinusoids(jnp.arange(t), D)[:, None, None]
    return place_TYXD.reshape(t * y * x, D)


# ---- The model -------------------------------------------------------------------------------


def linear(d_in: int, d_out: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(d_in, d_out, kernel_init=nnx.initializers.xavier_uniform(), rngs=rngs)


def linear_from_zero(d_in: int, d_out: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """The zero of adaLN-Zero: a layer whose output is zero at initialisation."""
    return nnx.Linear(d_in, d_out, kernel_init=nnx.initializers.zeros, rngs=rngs)


def layer_norm(config: VDiTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A norm without parameters: scale and shift depend on time and class."""
    return nnx.LayerNorm(config.d_model, epsilon=1e-6, use_bias=False, use_scale=False, rngs=rngs)


class Modulation(nnx.Module):
    """Time and class as `num` rows of the model's width, shared by all patches of a sample."""

    def __init__(self, config: VDiTConfig, num: int, *, rngs: nnx.Rngs):
        self.num = num
        self.rows = linear_from_zero(config.d_model, num * config.d_model, rngs=rngs)

    def __call__(self, c_BD: jax.Array) -> list[jax.Array]:
        rows_BMD = self.rows(nnx.silu(c_BD)).reshape(len(c_BD), self.num, -1)
        return jnp.split(rows_BMD, self.num, axis=1)


def modulated(x_BND: jax.Array, shift_B1D: jax.Array, scale_B1D: jax.Array) -> jax.Array:
    return x_BND * (1 + scale_B1D) + shift_B1D


class Attention(nnx.Module):
    """Self-attention over all patches of all frames."""

    def __init__(self, config: VDiTConfig, *, rngs: nnx.Rngs):
        D = config.d_model
        self.n_head = config.n_head
        self.backend: Any = config.attention
        self.qkv = linear(D, 3 * D, rngs=rngs)
        self.out = linear(D, D, rngs=rngs)

    def __call__(self, x_BND: jax.Array) -> jax.Array:
        B, N, D = x_BND.shape
        qkv_BND = checkpoint_name(self.qkv(x_BND), "qkv_proj")  # names are for remat policies
        qkv_BNHK = qkv_BND.reshape(B, N, 3 * self.n_head, D // self.n_head)
        y_BNHK = js.kernels.attention(*jnp.split(qkv_BNHK, 3, axis=2), backend=self.backend)
        return checkpoint_name(self.out(y_BNHK.reshape(B, N, D)), "out_proj")


class MLP(nnx.Module):
    """The feed-forward half of a block: expand, activate, contract, each patch independently."""

    def __init__(self, config: VDiTConfig, *, rngs: nnx.Rngs):
        self.up = linear(config.d_model, 4 * config.d_model, rngs=rngs)
        self.down = linear(4 * config.d_model, config.d_model, rngs=rngs)

    def __call__(self, x_BND: jax.Array) -> jax.Array:
        h_BNF = jax.nn.gelu(checkpoint_name(self.up(x_BND), "mlpwi"))
        return checkpoint_name(self.down(h_BNF), "mlpwo")


class Block(nnx.Module):
    """One layer: attention, then feed-forward, each shifted, scaled and gated by time and class."""

    def __init__(self, config: VDiTConfig, *, rngs: nnx.Rngs):
        self.modulation = Modulation(config, 6, rngs=rngs)
        self.norm = layer_norm(config, rngs)  # without parameters, so both halves share it
        self.attention = Attention(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BND: jax.Array, c_BD: jax.Array) -> jax.Array:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c_BD)
        x_BND = x_BND + gate1 * self.attention(modulated(self.norm(x_BND), shift1, scale1))
        return x_BND + gate2 * self.mlp(modulated(self.norm(x_BND), shift2, scale2))


def all_blocks(config: VDiTConfig, rngs: nnx.Rngs) -> Any:
    """A list of blocks; with `scan` one module of all, whose variables have a leading dim of layers."""
    if not config.scan:
        return nnx.List([Block(config, rngs=rngs) for _ in range(config.n_layer)])

    @nnx.split_rngs(splits=config.n_layer)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)

    return build(rngs)


class Condition(nnx.Module):
    """Time and class as one row of features. Class `num_classes` means no class."""

    def __init__(self, config: VDiTConfig, *, rngs: nnx.Rngs):
        D, normal = config.d_model, nnx.initializers.normal(0.02)
        self.up = nnx.Linear(NUM_SINUSOIDS, D, kernel_init=normal, rngs=rngs)
        self.down = nnx.Linear(D, D, kernel_init=normal, rngs=rngs)
        self.labels = nnx.Embed(config.num_classes + 1, D, embedding_init=normal, rngs=rngs)
        self.labels.dtype = None  # computes in the table's current dtype

    def __call__(self, t_B: jax.Array, labels_B: jax.Array) -> jax.Array:
        time_BS = sinusoids(1000 * t_B, NUM_SINUSOIDS).astype(self.up.kernel.dtype)
        return self.down(nnx.silu(self.up(time_BS))) + self.labels(labels_B)


class VDiT(nnx.Module):
    """Maps partly noisy videos to the velocity of every number."""

    def __init__(self, config: VDiTConfig, *, rngs: nnx.Rngs):
        self.config = config
        P = int(np.prod(config.patch_shape))
        self.patches = linear(P, config.d_model, rngs=rngs)
        self.condition = Condition(config, rngs=rngs)
        self.blocks = all_blocks(config, rngs)
        self.modulation = Modulation(config, 2, rngs=rngs)
        self.norm = layer_norm(config, rngs)
        self.out = linear_from_zero(config.d_model, P, rngs=rngs)

    def __call__(self, video_BTYXC: jax.Array, t_B: jax.Array, labels_B: jax.Array) -> jax.Array:
        patches_BNP = patchify(video_BTYXC, self.config).astype(self.patches.kernel.dtype)
        x_BND = self.patches(patches_BNP)
        x_BND += positions(self.config).astype(x_BND.dtype)[None]
        c_BD = self.condition(t_B, labels_B)
        if self.config.scan:
            x_BND = js.scan_layers(self.blocks, x_BND, c_BD)
        else:
            for block in self.blocks:
                x_BND = block(x_BND, c_BD)
        shift, scale = self.modulation(c_BD)
        return unpatchify(self.out(modulated(self.norm(x_BND), shift, scale)), self.config)


@nnx.jit(static_argnames="num_steps")
def sample(
    model: VDiT, labels_B: jax.Array, *, key: jax.Array, num_steps: int = 50, guidance: float = 2.0
) -> jax.Array:
    """A video for each label: follows the model's velocity from noise, in equal steps (Euler's method).

    Guidance (Ho & Salimans 2022, arXiv 2207.12598) extrapolates from the velocity without class past that with class; 1
    is none. `jshard train` samples text only, so this is for a script or a notebook, where this file is `vdit`:

        from jshard.recipes.building import restore

        checkpoints = js.checkpoint.Checkpointer("runs/vdit-tiny/checkpoints")
        model, _, _ = restore(js.train.load_model_file("vdit.py"), vdit.tiny(), js.mesh(), checkpoints)
        videos = vdit.sample(model, jnp.arange(16) % 10, key=jax.random.key(0))  # must divide over the devices
    """
    config, graphdef, state = model.config, *nnx.split(model)  # the loop below is a JAX loop, which takes arrays
    no_label_B = jnp.full_like(labels_B, config.num_classes)

    def step(number: jax.Array, video_BTYXC: jax.Array) -> jax.Array:
        t_B = jnp.full(labels_B.shape, number / num_steps, jnp.float32)
        here = nnx.merge(graphdef, state)
        with_class, without = (here(video_BTYXC, t_B, labels).astype(jnp.float32) for labels in (labels_B, no_label_B))
        return video_BTYXC + (without + guidance * (with_class - without)) / num_steps

    noise_BTYXC = jax.random.normal(key, (len(labels_B), *config.shape))
    return jax.lax.fori_loop(0, num_steps, step, noise_BTYXC)


# ---- The interface for `jshard train` -----------------------------------------------------------


def build(config: VDiTConfig, rngs: nnx.Rngs) -> VDiT:
    return VDiT(config, rngs=rngs)


def annotate(model: VDiT, mesh: Mesh | AbstractMesh) -> None:
    """A unit for each block (or the stack of them); the root has the rest."""
    config = model.config
    precision = outer = None
    if config.compute_dtype != "float32":
        precision = js.MixedPrecision(param_dtype=config.compute_dtype, reduce_dtype=config.reduce_dtype)
        outer = dataclasses.replace(precision, cast_inputs=False)  # bfloat16 would be too coarse for times
    blocks, stacked = ([model.blocks], 1) if config.scan else (model.blocks, 0)
    for block in blocks:
        js.fully_shard(
            block,
            mesh=mesh,
            mixed_precision=precision,
            remat=config.remat,
            placement=js.PlacementPolicy(stacked=stacked),
        )
    js.fully_shard(model, mesh=mesh, mixed_precision=outer)


def noised(config: VDiTConfig, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Noise, time and label of each sample, drawn from the sample's seed, so that they are the same on any mesh."""

    def draw(seed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        noise_key, time_key, label_key = jax.random.split(jax.random.key(seed), 3)
        dropped = jax.random.bernoulli(label_key, config.label_dropout)
        return jax.random.normal(noise_key, config.shape), jax.random.uniform(time_key), dropped

    noise_BTYXC, t_B, dropped_B = jax.vmap(draw)(batch["seed"])
    return noise_BTYXC, t_B, jnp.where(dropped_B, config.num_classes, batch["label"])


def loss_fn(model: VDiT, batch: Batch) -> jax.Array:
    """Mean squared error of the velocity: equation 1 of arXiv 2209.03003, noise at time 0 and video at time 1."""
    video_BTYXC = batch["video"]
    noise_BTYXC, t_B, labels_B = noised(model.config, batch)
    t_B1111 = t_B[:, None, None, None, None]
    between_BTYXC = t_B1111 * video_BTYXC + (1 - t_B1111) * noise_BTYXC
    velocity_BTYXC = model(between_BTYXC, t_B, labels_B).astype(jnp.float32)
    return jnp.square(velocity_BTYXC - (video_BTYXC - noise_BTYXC)).mean()


def data(recipe: Recipe) -> Data:
    """Digits on the canvas of the config. In the large recipes they stand in for latents."""
    return clips(recipe.model.shape)


def flops(recipe: Recipe) -> tuple[float, str]:
    """FLOPs: weights applied per patch, weights applied per sample (the modulations), and full attention."""
    config: VDiTConfig = recipe.model
    B, L, D, N = recipe.batch_size, config.n_layer, config.d_model, int(np.prod(config.grid))
    num = B * L * (72 * D**2 * N + 36 * D**2 + 12 * D * N**2)
    return float(num), f"{B:,} samples x {L} layers x (72 x {D}^2 x {N} + 36 x {D}^2 + 12 x {D} x {N}^2)"


# ---- Recipes: a whole run as a value --------------------------------------------------------------


def tiny() -> Recipe:
    """1.3M parameters, digits of 8 x 8 pixels: trains on two CPU cores in minutes, to a validation loss of 0.49.

    A logistic regression with 96% accuracy on the real held-out digits classifies 97% of its samples as the requested
    digit, and all of those with guidance 2.
    """
    return Recipe(
        model=VDiTConfig(),
        sequence_length=1,  # is for text
        batch_size=64,
        num_steps=2000,
        learning_rate=2e-3,
        warmup_steps=100,
        weight_decay=0.0,
        eval_every=500,
    )


def tiny_video() -> Recipe:
    """The same model over 8 frames of 16 x 16 pixels with a moving digit."""
    config = VDiTConfig(num_frames=8, image_size=16, patch_frames=2, patch_size=4)
    return dataclasses.replace(tiny(), model=config, batch_size=32, num_steps=1500)


def large(config: VDiTConfig, *, batch_size: int, num_steps: int, warmup_steps: int) -> Recipe:
    """Shared by the recipes below: latents of 32 x 32 x 4, ImageNet's classes, and DiT's optimizer."""
    return Recipe(
        model=dataclasses.replace(
            config, image_size=32, channels=4, num_classes=1000, scan=True, compute_dtype="bfloat16", remat="full"
        ),
        sequence_length=1,
        batch_size=batch_size,
        num_steps=num_steps,
        learning_rate=1e-4,
        warmup_steps=warmup_steps,
        weight_decay=0.0,
        b2=0.999,
    )


def dit_xl_2() -> Recipe:
    """DiT-XL/2 for ImageNet of 256 x 256 pixels as latents of 32 x 32 x 4; its batch, rate and steps.

    675M parameters: the paper's count without the table of positions and the half of the output for variances.
    """
    config = VDiTConfig(n_layer=28, n_head=16, d_model=1152)
    return large(config, batch_size=256, num_steps=400_000, warmup_steps=1000)


def vdit_4b() -> Recipe:
    """4.0B parameters, the size of the vDiT in ByteCheckpoint (arXiv 2407.20143); depth and width are chosen here.

    16 frames of latents of 32 x 32 x 4, in 2048 patches.
    """
    config = VDiTConfig(num_frames=16, patch_frames=2, n_layer=34, n_head=20, d_model=2560)
    return large(config, batch_size=512, num_steps=200_000, warmup_steps=2000)


RECIPES = {"tiny": tiny, "tiny_video": tiny_video, "dit_xl_2": dit_xl_2, "vdit_4b": vdit_4b}
