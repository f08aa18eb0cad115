"""One device against every strategy, size of mesh, accumulation and form of the model: gradients and parameters."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from tests.helpers import Config, Decoder, builder, fresh, loss_fn, token_batch
from tests.parity import GRADIENT_TOLERANCE, PARAMETER_TOLERANCE, Trained, assert_parity, compare, train

ADAMW = optax.adamw(1e-2, eps=1e-3)  # gradients that are zero but for rounding stay small
BATCH = token_batch(Config(), batch=32, length=8)  # 4 microbatches over 8 data shards


class Case(NamedTuple):
    strategy: str
    degree: str
    accumulate: str
    form: str

    @property
    def config(self) -> Config:
        scanned = self.form == "untied, scanned"
        return Config(tied=not scanned, scanned=scanned, attends=False)


LIST, STACK = "tied, unrolled", "untied, scanned"
# Every pair of settings but for what makes no sense: HSDP is ZeRO-3 on a mesh of two dims, hpZ needs a smaller group.
CASES = [
    Case("replicate", "8", "4 last", LIST),
    Case("replicate", "2x4", "4 each", STACK),
    Case("zero2", "1", "4 last", STACK),
    Case("zero2", "8", "1", LIST),
    Case("zero2", "2x4", "4 each", LIST),
    Case("zero3", "1", "1", LIST),
    Case("zero3", "8", "4 each", STACK),
    Case("zero3", "8", "4 last", LIST),
    Case("hsdp", "2x4", "1", STACK),
    Case("hsdp", "2x4", "4 last", LIST),
    Case("hpz", "8", "4 each", LIST),
    Case("hpz", "2x4", "1", STACK),
]


def make_mesh(case: Case) -> jax.sharding.Mesh:
    if case.degree == "2x4":
        return js.mesh(replica=2, fsdp=4)
    size = int(case.degree)
    axes = {"replica": size, "fsdp": 1} if case.strategy == "replicate" else {"fsdp": size}
    return js.mesh(**axes, devices=jax.devices()[:size])


def annotate(case: Case, mesh: jax.sharding.Mesh, model: Decoder) -> None:
    group = max(mesh.shape["fsdp"] // 2, 1)
    reshard = {"zero2": False, "zero3": True, "hsdp": True, "hpz": group, "replicate": None}[case.strategy]
    ignored = nnx.Param if case.strategy == "replicate" else None  # on 2x4 the fsdp axis would shard
    for block in [model.blocks] if model.config.scanned else model.blocks:
        js.fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=reshard,
            placement=js.PlacementPolicy(ignored=ignored, stacked=int(model.config.scanned)),
        )
    js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy(ignored=ignored))


@functools.cache
def one_device(config: Config) -> Trained:
    return train(fresh(builder(config)), loss_fn, BATCH, tx=ADAMW)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_equal_to_one_device(case: Case):
    annotated = functools.partial(annotate, case, make_mesh(case))
    model = js.abstract_init(builder(case.config), annotated)
    sharded = [leaf for leaf in js.plan(model).leaves if leaf.placement.dim is not None]
    assert bool(sharded) == (case.strategy != "replicate" and case.degree != "1")
    steps, _, sync = case.accumulate.partition(" ")
    grad = functools.partial(js.value_and_grad, accumulate=int(steps), sync=sync or "each")
    wanted = one_device(case.config)
    assert_parity(builder(case.config), annotated, loss_fn, BATCH, grad=grad, tx=ADAMW, wanted=wanted)


def test_the_comparison_can_fail():
    wanted = one_device(CASES[0].config)
    worse = {k: x * (1 + 4e-6) for k, x in wanted.gradients.items()}
    moved = {k: x + np.float32(1e-3) * np.abs(x).max() for k, x in wanted.parameters.items()}
    apart = compare(dataclasses.replace(wanted, gradients=worse, parameters=moved), wanted)
    assert apart.gradient > GRADIENT_TOLERANCE
    assert apart.parameters > PARAMETER_TOLERANCE
