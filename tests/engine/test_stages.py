"""Pipeline stages: a model with `pipe` in its mesh computes what one device computes, and sends what it should."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.errors import CallError
from tests.helpers import fresh, placed
from tests.parity import GRADIENT_TOLERANCE, Trained, compare, train
from tests.stages_model import StagedBlock, StagedConfig, StagedDecoder, token_loss, uneven_tokens
from tests.wide import slow, wide

TX = optax.adamw(1e-2, eps=1e-3)
# Microbatches add up in another order than examples. How far apart that is depends on the CPU's vector units: up to
# 1.9e-6 on one, 3.3e-6 on another.
TOLERANCE = 2 * GRADIENT_TOLERANCE
PIPE_2 = {"pipe": 2, "fsdp": 2}
PLAIN = StagedConfig()


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a mesh and settings."""

    config: StagedConfig = PLAIN
    mesh: dict[str, int] = dataclasses.field(default_factory=lambda: PIPE_2)
    stages: dict[str, object] = dataclasses.field(default_factory=dict)
    fully: dict[str, object] = dataclasses.field(default_factory=dict)
    accumulate: int = 1


ALWAYS = {
    "a tied table, layers that do not divide": Case(StagedConfig(layers=5, tied=True)),
    "sent late, and waiting": Case(mesh={"pipe": 2, "fsdp": 1}, stages={"microbatches": 8, "late": True}),
    "dropout, computed again": Case(StagedConfig(dropout=0.3), stages={"microbatches": 4}, fully={"remat": "full"}),
    "layers called one after another": Case(StagedConfig(dropout=0.3, unrolled=True, masked=True)),
}
MORE = {
    "experts' balance over the whole batch": Case(StagedConfig(experts=True)),
    "chunks of two layers, not all of them there": Case(StagedConfig(layers=5), {"pipe": 4, "fsdp": 1}, {"rounds": 1}),
    "replicas": Case(StagedConfig(layers=6), {"replica": 2, "pipe": 2, "fsdp": 2}),
}
SLOW = {
    "one round for each layer": Case(),
    "microbatches wait before the first place": Case(StagedConfig(masked=True), stages={"microbatches": 4}),
    "microbatches that no place holds whole": Case(mesh={"pipe": 2, "fsdp": 1}, stages={"microbatches": 8}),
    "sent late": Case(stages={"microbatches": 4, "late": True}),
    "neighbouring layers": Case(StagedConfig(dropout=0.3), stages={"rounds": 1}),
    "pipe alone": Case(StagedConfig(tied=True), {"pipe": 4, "fsdp": 1}),
    "microbatches of a step": Case(StagedConfig(dropout=0.3), accumulate=2),
}
CASES = ALWAYS | MORE | SLOW


def build(config: StagedConfig) -> nnx.Module:
    return StagedDecoder(config, nnx.Rngs(0))


def trained(case: Case) -> Trained:
    """Trains the model of a case for two steps."""
    model = placed(functools.partial(build, case.config), functools.partial(annotated, case))
    grad = functools.partial(js.value_and_grad, accumulate=case.accumulate) if case.accumulate > 1 else None
    return train(model, token_loss, (uneven_tokens(),), steps=2, tx=TX, grad=grad)


@functools.cache
def one_device(config: StagedConfig, accumulate: int) -> Trained:
    if accumulate > 1:  # it draws other masks for each microbatch, which only the library does
        return trained(Case(config, {"fsdp": 1}, accumulate=accumulate))
    return train(fresh(functools.partial(build, config)), token_loss, (uneven_tokens(),), steps=2, tx=TX)


def annotated(case: Case, model: nnx.Module) -> nnx.Module:
    size = int(np.prod(list(case.mesh.values())))
    mesh = js.mesh(**case.mesh, devices=jax.devices()[:size])
    model = js.fully_shard(model, units=StagedBlock, mesh=mesh, **case.fully)
    return js.parallel.stages(model, **case.stages)


@pytest.mark.parametrize("name", [*ALWAYS, *map(wide, MORE), *map(slow, SLOW)])
def test_equal_to_one_device(name):
    case = CASES[name]
    run = trained(case)
    difference = compare(run, one_device(case.config, case.accumulate))
    assert difference.gradient <= TOLERANCE, difference
    assert difference.parameters <= GRADIENT_TOLERANCE, difference
    assert difference.loss <= GRADIENT_TOLERANCE, difference
    assert run.traces == 1


# ---- what is sent


def collectives(model: nnx.Module) -> collections.Counter[str]:
    """Counts the collectives of a step's compiled program, each as often as the program has it."""
    step = nnx.jit(nnx.value_and_grad(token_loss))
    text = step.lower(model, uneven_tokens()).compile().as_text()
    names = r" (all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\("
    return collections.Counter(re.findall(names, text))


def test_places_pass_on_activations_and_exchange_parameters():
    plain = placed(functools.partial(build, StagedConfig()), functools.partial(annotated, Case(mesh={"fsdp": 4})))
    counts = collectives(placed(functools.partial(build, StagedConfig()), functools.partial(annotated, Case())))
    assert collectives(plain)["collective-permute"] == 0
    # Of two rounds each is a loop of ticks for itself, forward and backward; the drain has one tick, and sends nothing.
    assert counts["collective-permute"] == 4
    assert counts["all-to-all"] >= 4


# ---- what is refused


class Mixing(StagedBlock):
    """A block whose result depends on the other examples."""

    def __call__(self, x, mask=None):
        return super().__call__(x - x.mean(0, keepdims=True), mask)


def test_a_layer_that_combines_examples_is_refused():
    model = build(StagedConfig())
    model.blocks = nnx.List([Mixing(StagedConfig(), nnx.Rngs(i)) for i in range(4)])
    model = js.fully_shard(model, units=Mixing, mesh=js.mesh(**PIPE_2, devices=jax.devices()[:4]))
    with pytest.raises(CallError, match="combines the examples of its batch") as error:
        jax.eval_shape(nnx.value_and_grad(token_loss), model, uneven_tokens())
    assert "test_stages.py" in str(error.value)


def test_outside_of_the_loop_examples_may_be_combined():
    def centred_loss(model, tokens):
        scores, _ = model(tokens[:, :-1])
        return ((scores - scores.mean(0, keepdims=True)) ** 2).mean()

    model = build(StagedConfig(layers=2))
    wanted = nnx.jit(nnx.value_and_grad(centred_loss))(model, uneven_tokens())
    sharded = annotated(Case(), build(StagedConfig(layers=2)))
    loss, grads = nnx.jit(nnx.value_and_grad(centred_loss))(sharded, uneven_tokens())
    np.testing.assert_allclose(loss, wanted[0], rtol=2e-6)
    largest = max(float(jnp.abs(y).max()) for y in jax.tree.leaves(wanted[1]))
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted[1]), strict=True):
        # Some gradients are zero but for rounding: they are compared with the largest.
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6 * largest)


def test_a_batch_that_does_not_divide_into_microbatches_is_refused():
    model = annotated(Case(stages={"microbatches": 16}), build(StagedConfig(layers=2)))
    with pytest.raises(CallError, match="does not divide into the microbatches") as error:
        jax.eval_shape(nnx.value_and_grad(token_loss), model, uneven_tokens())
    assert "8 examples on each of 2 data shards" in str(error.value)
