"""One device against every strategy, size of mesh, accumulation and form of the model: gradients and parameters.

The default suite runs a set of cases in which every pair of settings occurs; `-m slow` runs them all.
"""

import dataclasses
import functools
import itertools
import json
import os

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from tests.helpers import Config, Decoder, builder, fresh, loss_fn, placed, token_batch
from tests.parity import GRADIENT_TOLERANCE, PARAMETER_TOLERANCE, Trained, compare, flat

STRATEGIES = ("replicate", "zero2", "zero3", "hsdp", "hpz")
DEGREES = ("1", "8", "2x4")
ACCUMULATIONS = ("1", "4 each", "4 last")
FORMS = "tied, unrolled", "untied, scanned"
STEPS = 3
BATCH = token_batch(Config(), batch=32, length=8)  # 4 microbatches over 8 data shards


@dataclasses.dataclass(frozen=True)
class Case:
    strategy: str
    degree: str
    accumulate: str
    form: str

    def __str__(self) -> str:
        return "-".join(dataclasses.astuple(self)).replace(", ", "_").replace(" ", "_")

    @property
    def config(self) -> Config:
        scanned = self.form == "untied, scanned"
        return Config(tied=not scanned, scanned=scanned, attends=False)

    @property
    def senseless(self) -> str:
        """Why there is no such case; empty if there is."""
        if self.strategy == "hsdp" and self.degree != "2x4":
            return "HSDP shards within a group and replicates over groups: it needs a mesh of two dims"
        if self.strategy == "zero3" and self.degree == "2x4":
            return "ZeRO-3 on a mesh of two dims is HSDP"
        if self.strategy == "hpz" and self.degree == "1":
            return "one device has no smaller group to reshard to"
        return ""


def every_case() -> list[Case]:
    product = itertools.product(STRATEGIES, DEGREES, ACCUMULATIONS, FORMS)
    return [case for case in itertools.starmap(Case, product) if not case.senseless]


def pairs(case: Case) -> set[tuple]:
    return set(itertools.combinations(enumerate(dataclasses.astuple(case)), 2))


@functools.cache
def covering_cases() -> list[Case]:
    """Cases in which each possible pair of settings occurs, taken greedily: always the one with most new pairs."""
    cases, chosen = every_case(), []
    missing = set().union(*map(pairs, cases))
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


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
            placement=js.ShardPlacement(ignored=ignored, stacked=int(model.config.scanned)),
        )
    js.fully_shard(model, mesh=mesh, placement=js.ShardPlacement(ignored=ignored))


def train(model: nnx.Module, optimizer: nnx.Optimizer, grad_fn) -> Trained:
    """Some steps; the gradients are those of the first. Steps return them, so that one program gives all."""
    traces = 0

    @nnx.jit
    def step(model, optimizer, inputs, targets):
        nonlocal traces
        traces += 1
        loss, grads = grad_fn(model, inputs, targets)
        optimizer.update(model, grads)
        return loss, grads

    out = [step(model, optimizer, *BATCH) for _ in range(STEPS)]
    return Trained([float(loss) for loss, _ in out], flat(out[0][1]), flat(nnx.state(model, nnx.Param)), {}, traces)


@functools.cache
def one_device(config: Config) -> Trained:
    model = fresh(builder(config))
    return train(model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param), nnx.value_and_grad(loss_fn))


def run(case: Case) -> Trained:
    mesh = make_mesh(case)
    model = placed(builder(case.config), functools.partial(annotate, case, mesh))
    sharded = [leaf for leaf in js.plan(model).leaves if leaf.placement.dim is not None]
    assert bool(sharded) == (case.strategy != "replicate" and case.degree != "1")
    steps, _, sync = case.accumulate.partition(" ")
    grad_fn = js.value_and_grad(loss_fn, accumulate=int(steps), sync=sync or "each")
    return train(model, js.shard_optimizer(model, optax.adamw(1e-3)), grad_fn)


def check(case: Case) -> None:
    found = run(case)
    apart = compare(found, one_device(case.config))
    if "PARITY_REPORT" in os.environ:  # one line of JSON a case, for the worst figures of the grid
        with open(os.environ["PARITY_REPORT"], "a") as file:
            file.write(json.dumps({"case": str(case), **dataclasses.asdict(apart)}) + "\n")
    assert apart.gradient <= GRADIENT_TOLERANCE, apart
    assert apart.parameters <= PARAMETER_TOLERANCE, apart
    assert apart.loss <= 2e-6, apart
    assert found.traces == 1


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_equal_to_one_device(case: Case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in every_case() if case not in set(covering_cases())], ids=str)
def test_equal_to_one_device_whole_grid(case: Case):
    check(case)


def test_the_cases_cover_every_pair():
    cases = covering_cases()
    assert set().union(*map(pairs, cases)) == set().union(*map(pairs, every_case()))
    assert len(cases) < len(every_case()) / 3
    for settings in itertools.product(STRATEGIES, DEGREES):  # what is left out has its reason
        case = Case(*settings, "1", FORMS[0])
        assert (case in every_case()) != bool(case.senseless)


def test_the_comparison_can_fail():
    wanted = one_device(every_case()[0].config)
    worse = {k: x * (1 + 4e-6) for k, x in wanted.gradients.items()}
    moved = {k: x + np.float32(1e-3) * np.abs(x).max() for k, x in wanted.parameters.items()}
    apart = compare(dataclasses.replace(wanted, gradients=worse, parameters=moved), wanted)
    assert apart.gradient > GRADIENT_TOLERANCE
    assert apart.parameters > PARAMETER_TOLERANCE
