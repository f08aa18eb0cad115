"""models/resnet.py: the sizes it claims, statistics of the whole batch, and running averages that are kept and used."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

from tests.models.model_files import (
    assert_parity_of,
    assert_plans,
    data_of,
    model_file,
    module,
    smaller,
    tiny,
)

resnet = module("resnet")

MICRO = smaller(tiny("resnet"), batch_size=16, depths=(1, 2), widths=(64, 64), inner_widths=(16, 32), strides=(1, 2))


def test_resnet50_has_the_published_25_557_032_parameters():
    assert_plans("resnet", "resnet50", num_parameters=25_557_032, fsdp=8)


def test_regnet_9b_plans_on_128_devices():
    plan = assert_plans("resnet", "regnet_9b", num_parameters=9_071_372_168, fsdp=128)
    assert sum(unit.kind == "Block" for unit in plan.units) == 29


def test_flops_of_resnet50_are_the_published_4_1_billion_products_an_image():
    _, recipe = model_file("resnet").recipe("resnet50")
    flops, _ = resnet.flops(recipe)
    assert flops / 6 / recipe.batch_size == pytest.approx(4.09e9, rel=0.005)


@pytest.mark.wide
def test_trains_sharded_as_on_one_device_running_averages_included():
    assert_parity_of("resnet", MICRO)


def test_grouped_convolutions_mix_their_groups_alone():
    config = dataclasses.replace(MICRO.model, group_width=8)
    block = resnet.Block(config, 16, 0, 1, rngs=nnx.Rngs(0))
    assert block.around.conv.kernel.shape == (3, 3, 8, 16)
    x = np.random.default_rng(0).normal(size=(1, 4, 4, 16)).astype(np.float32)
    moved = x.copy()
    moved[..., 0] += 1
    changed = (block.around.conv(moved) != block.around.conv(x)).any(axis=(0, 1, 2))
    assert changed[:8].all() and not changed[8:].any()


# ---- The digits ------------------------------------------------------------------------------


def test_held_out_digits_are_never_trained_on():
    digits = data_of("resnet", dataclasses.replace(MICRO, shift=0))
    images = [
        {sample["image"].tobytes() for sample in map(part.__getitem__, range(len(part)))}
        for part in (digits.train, digits.held_out)
    ]
    assert (len(digits.train), len(digits.held_out)) == (1477, 320)
    assert not images[0] & images[1]
