"""models/vdit.py: recipes have the sizes they claim, adaLN-Zero begins at zero, noise knows its sample alone."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from tests.models.model_files import (
    assert_parity_of,
    assert_plans,
    first_batches,
    module,
    neighbour,
    smaller,
    tiny,
)

vdit, digits = module("vdit"), neighbour("digits")

IMAGE = dataclasses.replace(tiny("vdit").model, n_layer=1, d_model=64)
VIDEO = dataclasses.replace(IMAGE, num_frames=4, image_size=16, patch_frames=2, patch_size=4)
MICRO = smaller(tiny("vdit"), n_layer=2)
MICRO_VIDEO = dataclasses.replace(MICRO, model=dataclasses.replace(VIDEO, n_layer=2, scan=True))


def awake(config):
    """A model in which nothing is zero any more, as after some training."""
    model = vdit.build(config, nnx.Rngs(0))
    params, rng = jax.device_get(nnx.state(model, nnx.Param)), np.random.default_rng(1)
    nnx.update(model, jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), params))
    return model


def inputs(config, num=8):
    rng = np.random.default_rng(0)
    video = jnp.asarray(rng.normal(size=(num, *config.shape)), jnp.float32)
    return video, jnp.linspace(0, 0.9, num), jnp.arange(num) % 10


call = nnx.jit(lambda model, *args: model(*args))


def test_dit_xl_2_has_the_published_675_million_parameters():
    """The paper's model counts its fixed table of positions, and has a second half of the output for variances."""
    positions, variances = 256 * 1152, 16 * 1152 + 16
    published = 675_129_632
    assert_plans("vdit", "dit_xl_2", num_parameters=published - positions - variances, fsdp=128)


def test_vdit_4b_plans_on_128_devices():
    assert_plans("vdit", "vdit_4b", num_parameters=4_035_164_192, fsdp=128)


def test_patches_put_together_are_the_video():
    config = VIDEO
    video, *_ = inputs(config)
    patches = vdit.patchify(video, config)
    assert patches.shape == (8, np.prod(config.grid), np.prod(config.patch_shape))
    np.testing.assert_array_equal(vdit.unpatchify(patches, config), video)
    frames, side = config.patch_frames, config.patch_size
    np.testing.assert_array_equal(patches[:, 1], video[:, :frames, :side, side : 2 * side].reshape(8, -1))


def test_fresh_model_predicts_zero_and_its_blocks_do_nothing():
    model = vdit.build(VIDEO, nnx.Rngs(0))
    assert not call(model, *inputs(VIDEO)).any()
    rng = np.random.default_rng(0)
    x, c = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in [(2, 5, 64), (2, 64)])
    np.testing.assert_array_equal(call(model.blocks[0], x, c), x)
    assert jnp.abs(call(awake(VIDEO), *inputs(VIDEO))).max() > 0.1


@pytest.mark.wide
def test_samples_draw_their_own_noise_wherever_they_are_in_the_batch():
    rng = np.random.default_rng(0)
    config, num = IMAGE, 2000
    batch = {"seed": rng.integers(2**32, size=num, dtype=np.uint32), "label": np.arange(num, dtype=np.int32) % 10}
    noise, t, labels = vdit.noised(config, batch)
    few = vdit.noised(config, {key: value[5:9][::-1] for key, value in batch.items()})
    for all_drawn, drawn in zip((noise, t, labels), few, strict=True):
        np.testing.assert_array_equal(drawn, all_drawn[5:9][::-1])
    dropped = np.asarray(labels) == config.num_classes
    assert 0.08 < dropped.mean() < 0.12
    np.testing.assert_array_equal(labels[~dropped], batch["label"][~dropped])
    assert abs(float(noise.mean())) < 0.01 and abs(float(noise.std()) - 1) < 0.01
    assert abs(float(t.mean()) - 0.5) < 0.03 and abs(np.corrcoef(t, dropped)[0, 1]) < 0.08


class Oracle(nnx.Module):
    """Knows the videos, and so the velocity: from where one is at time t straight on to the video."""

    def __init__(self, config, video):
        self.config, self.video = config, nnx.Variable(video)

    def __call__(self, x, t, labels):
        return (self.video[...] - x) / (1 - t[:, None, None, None, None])


@pytest.mark.wide
def test_loss_is_zero_for_the_velocity_of_the_straight_line_alone():
    batch = first_batches("vdit", MICRO, steps=1)[0]
    oracle = Oracle(IMAGE, jnp.asarray(batch["video"]))
    assert nnx.jit(vdit.loss_fn)(oracle, batch) < 1e-8
    noise, *_ = vdit.noised(IMAGE, batch)
    fresh = nnx.jit(vdit.loss_fn)(vdit.build(IMAGE, nnx.Rngs(0)), batch)
    np.testing.assert_allclose(fresh, np.square(batch["video"] - noise).mean(), rtol=1e-6)


def test_sample_follows_the_velocity_to_the_video():
    video, _, labels = inputs(VIDEO)
    found = vdit.sample(Oracle(VIDEO, video), labels, key=jax.random.key(0), num_steps=5)
    np.testing.assert_allclose(found, video, atol=1e-5)


@pytest.mark.wide
def test_zero3_trains_as_one_device():
    assert_parity_of("vdit", MICRO)


@pytest.mark.wide
def test_video_in_a_loop_over_layers_trains_as_one_device():
    assert_parity_of("vdit", MICRO_VIDEO)


def test_products_are_in_the_dtype_of_computation_and_times_are_not():
    config = dataclasses.replace(MICRO_VIDEO.model, compute_dtype="bfloat16")
    mesh = js.mesh()
    model = js.abstract_init(lambda: vdit.build(config, nnx.Rngs(0)), lambda model: vdit.annotate(model, mesh))
    batch = first_batches("vdit", MICRO_VIDEO, steps=1)[0]
    text = nnx.jit(vdit.loss_fn).lower(model, batch).lowered.as_text()
    products = re.findall(r"dot_general.* : \(tensor<\S*x(\w+)>, tensor<\S*x(\w+)>\)", text)
    assert len(products) >= 8 and set(products) == {("bf16", "bf16")}
    assert re.search(r"cosine .*tensor<1x128xf32>", text)
    assert not re.search(r"tensor<1xbf16>", text)


def test_digits_bounce_off_the_edges_and_stay_whole():
    way = np.arange(-2, 11)[:, None] * np.ones(2)
    there = [2, 1, 0, 1, 2, 3, 4, 3, 2, 1, 0, 1, 2]
    np.testing.assert_array_equal(digits.bounced(way, np.array([4, 0])), np.stack([there, [0] * 13], axis=1))
    video = digits.Clips("train", (40, 16, 16, 2))[7]["video"]
    ink = (video - video.min()).sum((1, 2))
    np.testing.assert_allclose(ink, np.full((40, 2), ink[0, 0]), rtol=1e-5)
    assert len(np.unique(video, axis=0)) > 10
