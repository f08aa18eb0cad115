"""A ResNet, or with other sizes a RegNet: convolutions with batch normalisation, on real images.

    jshard train resnet                        # the tiny recipe, minutes on a laptop
    jshard train resnet --recipe resnet50      # 25.6M parameters
    jshard train resnet --recipe regnet_9b --mesh fsdp=128 --dry-run

Unlike a transformer, it has batch normalisation, which computes statistics over the samples of a batch, on different
devices; jshard makes them those of the whole batch. Its running averages are state without a gradient: the step
updates them, checkpoints store them, and evaluation uses them.

The images are the handwritten digits of `digits.py`, beside this file; large recipes enlarge them.

Names end in the dims of their array:

    B  batch    Y  rows of pixels    X  columns of pixels    C  channels    V  classes
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
from digits import digits
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

import jshard as js
from jshard.data import Data
from jshard.train import Batch, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """Size and kind of a ResNet. Tuples have one entry per stage; the default is ResNet-50."""

    depths: tuple[int, ...] = (3, 4, 6, 3)
    widths: tuple[int, ...] = (256, 512, 1024, 2048)  # channels between blocks
    inner_widths: tuple[int, ...] = (64, 128, 256, 512)  # channels of the 3 x 3 convolutions
    strides: tuple[int, ...] = (1, 2, 2, 2)  # of the first block
    group_width: int = 0  # channels that a 3 x 3 convolution mixes; 0: all
    stem_width: int = 64
    stem_kernel: int = 7
    stem_stride: int = 2
    stem_pool: bool = True  # halves the image once more
    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    momentum: float = 0.9  # of the running averages: the share kept in a step
    # Read by `annotate` only.
    compute_dtype: str = "float32"
    remat: str = "auto"


# ---- The model -------------------------------------------------------------------------------


class ConvNorm(nnx.Module):
    """A convolution without a bias, and batch normalisation, which has one."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        config: ResNetConfig,
        *,
        kernel: int = 1,
        stride: int = 1,
        group_width: int = 0,
        scale: float = 1.0,
        rngs: nnx.Rngs,
    ):
        self.conv = nnx.Conv(
            d_in,
            d_out,
            (kernel, kernel),
            strides=stride,
            feature_group_count=d_out // group_width if group_width else 1,
            use_bias=False,
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
            rngs=rngs,
        )
        scale_init = nnx.initializers.constant(scale)
        self.norm = nnx.BatchNorm(d_out, momentum=config.momentum, scale_init=scale_init, rngs=rngs)

    def __call__(self, x_BYXC: jax.Array) -> jax.Array:
        return self.norm(self.conv(x_BYXC))


class Block(nnx.Module):
    """Narrow, convolve, widen, add to the input. Initially it adds nothing, as the last norm's scale is 0."""

    def __init__(self, config: ResNetConfig, d_in: int, stage: int, stride: int, *, rngs: nnx.Rngs):
        d_inner, d_out = config.inner_widths[stage], config.widths[stage]
        self.narrow = ConvNorm(d_in, d_inner, config, rngs=rngs)
        around = {"kernel": 3, "stride": stride, "group_width": config.group_width}
        self.around = ConvNorm(d_inner, d_inner, config, **around, rngs=rngs)
        self.widen = ConvNorm(d_inner, d_out, config, scale=0.0, rngs=rngs)
        if d_in != d_out or stride != 1:
            self.shortcut = ConvNorm(d_in, d_out, config, stride=stride, rngs=rngs)
        else:
            self.shortcut = None

    def __call__(self, x_BYXC: jax.Array) -> jax.Array:
        shortcut = x_BYXC if self.shortcut is None else self.shortcut(x_BYXC)
        h_BYXC = nnx.relu(self.around(nnx.relu(self.narrow(x_BYXC))))
        return nnx.relu(shortcut + self.widen(h_BYXC))


def list_of_blocks(config: ResNetConfig, rngs: nnx.Rngs) -> nnx.List:
    blocks, d_in = nnx.List(), config.stem_width
    for stage, depth in enumerate(config.depths):
        for n in range(depth):
            stride = config.strides[stage] if n == 0 else 1
            blocks.append(Block(config, d_in, stage, stride, rngs=rngs))
            d_in = config.widths[stage]
    return blocks


class ResNet(nnx.Module):
    """Images in, the scores of their classes out."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        stem = {"kernel": config.stem_kernel, "stride": config.stem_stride}
        self.stem = ConvNorm(config.channels, config.stem_width, config, **stem, rngs=rngs)
        self.blocks = list_of_blocks(config, rngs)
        self.head = nnx.Linear(config.widths[-1], config.num_classes, rngs=rngs)

    def __call__(self, image_BYXC: jax.Array) -> jax.Array:
        x_BYXC = nnx.relu(self.stem(image_BYXC))
        if self.config.stem_pool:
            x_BYXC = nnx.max_pool(x_BYXC, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x_BYXC = block(x_BYXC)
        x_BC = x_BYXC.mean(axis=(1, 2))
        return self.head(x_BC)


# ---- The interface for `jshard train` -----------------------------------------------------------


def build(config: ResNetConfig, rngs: nnx.Rngs) -> ResNet:
    return ResNet(config, rngs=rngs)


def annotate(model: ResNet, mesh: Mesh | AbstractMesh) -> None:
    """Each block is a unit; stem and head belong to the root."""
    config = model.config
    precision = None
    if config.compute_dtype != "float32":
        precision = js.MixedPrecision(param_dtype=config.compute_dtype, reduce_dtype="float32")
    for block in model.blocks:
        js.fully_shard(block, mesh=mesh, mixed_precision=precision, remat=config.remat)
    js.fully_shard(model, mesh=mesh, mixed_precision=precision)


def loss_fn(model: ResNet, batch: Batch) -> jax.Array:
    """Mean cross entropy, in nats per image, over the whole (global) batch."""
    scores_BV = model(batch["image"].astype(model.config.compute_dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores_BV, batch["label"]).mean()


def data(recipe: ResNetRecipe) -> Data:
    config = recipe.model
    shifted = {"shift": recipe.shift, "copies": 16 if recipe.shift else 1, "seed": recipe.seed}
    return digits(size=config.image_size, channels=config.channels, **shifted)


def flops(recipe: ResNetRecipe) -> tuple[float, str]:
    """FLOPs of the convolutions; backward takes twice as many as forward."""
    config = recipe.model
    size = config.image_size // config.stem_stride
    products = config.stem_kernel**2 * config.channels * config.stem_width * size**2
    size //= 2 if config.stem_pool else 1
    d_in = config.stem_width
    for stage, depth in enumerate(config.depths):
        d, d_out, stride = config.inner_widths[stage], config.widths[stage], config.strides[stage]
        group = config.group_width or d
        products += (d_in * d * stride**2 + d_in * d_out + (depth - 1) * d_out * d) * (size // stride) ** 2
        size //= stride
        products += depth * (9 * group * d + d * d_out) * size**2
        d_in = d_out
    return 6.0 * products * recipe.batch_size, "6 x products of the convolutions x images"


# ---- Recipes: a whole run as a value --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetRecipe(Recipe):
    """Gradient descent with momentum, as usual for ResNets, on slightly shifted images."""

    sequence_length: int = 1  # is for text
    weight_decay: float = 5e-5
    momentum: float = 0.9
    shift: int = 1  # largest move of a training image, in pixels of the digits

    def optimizer(self) -> optax.GradientTransformation:
        matrices = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)
        decay = optax.add_decayed_weights(self.weight_decay, mask=matrices)
        return optax.chain(decay, optax.sgd(self.schedule(), momentum=self.momentum, nesterov=True))


def tiny() -> ResNetRecipe:
    """Learns to classify digits in minutes on two CPU cores."""
    return ResNetRecipe(
        model=ResNetConfig(
            depths=(1, 1, 1),
            widths=(64, 128, 256),
            inner_widths=(16, 32, 64),
            strides=(1, 2, 2),
            stem_width=16,
            stem_kernel=3,
            stem_stride=1,
            stem_pool=False,
            image_size=8,
            channels=1,
            num_classes=10,
        ),
        batch_size=64,
        num_steps=400,
        learning_rate=0.1,
        warmup_steps=40,
        eval_every=100,
        eval_sequences=320,
    )


def resnet50() -> ResNetRecipe:
    """25.6M parameters; batch and schedule as in "ImageNet in 1 Hour"."""
    return ResNetRecipe(
        model=ResNetConfig(compute_dtype="bfloat16"),
        batch_size=8192,
        num_steps=14_070,
        learning_rate=3.2,
        warmup_steps=780,
        eval_sequences=8192,
    )


def regnet_9b() -> ResNetRecipe:
    """9.1B parameters, the size of the PyTorch FSDP paper's RegNet: few wide blocks of very different sizes."""
    return ResNetRecipe(
        model=ResNetConfig(
            depths=(2, 7, 19, 1),
            widths=(2048, 4096, 11_264, 28_672),
            inner_widths=(2048, 4096, 11_264, 28_672),
            strides=(2, 2, 2, 2),
            group_width=1024,
            stem_width=32,
            stem_kernel=3,
            stem_pool=False,
            compute_dtype="bfloat16",
            remat="full",
        ),
        batch_size=2048,
        num_steps=62_500,
        learning_rate=0.8,
        warmup_steps=3000,
        eval_sequences=2048,
    )


RECIPES = {"tiny": tiny, "resnet50": resnet50, "regnet_9b": regnet_9b}
