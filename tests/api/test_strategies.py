"""Each strategy's formulas, as docs/strategies.md has them, are what its plan holds and its compiled step sends."""

import dataclasses
import types

import jax
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.inspect import collectives, full_bytes, wire_bytes
from jshard.inspect.communication import traffic_of
from jshard.inspect.memory import memory_of
from jshard.plans.policies import Strategy, strategies
from tests.helpers import Block, Config, abstract, builder, compile_to_read, loss_fn, program, sharded, token_batch

DECODER = Config(layers=12, width=128, hidden=512, vocab=64, scanned=True, attends=False)
NAMES = ["replicate", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2", "hpz"]


def for_eight(name: str) -> Strategy:
    """The strategy with groups that eight devices can show."""
    strategy = strategies[name]
    return dataclasses.replace(strategy, reshard_after_forward=2) if name == "hpz" else strategy


def formula(strategy: Strategy, mesh):
    """The tables of docs/strategies.md, in units of P: what a device holds, and what a step sends."""
    replica, fsdp = mesh.shape["replica"], mesh.shape["fsdp"]
    around = lambda size: (size - 1) / size  # what each device sends once around a ring
    reshard = strategy.reshard_after_forward
    again = {None: fsdp, True: fsdp, False: 1}.get(reshard, reshard)  # the group that gathers for backward
    gathers, held, summed = float(fsdp > 1), 1 / fsdp, float(replica > 1) / fsdp
    of_optimizer = summed * strategy.shard_replicated  # its new values are gathered over the replicas
    return types.SimpleNamespace(
        parameters=held,
        gradients=held,
        optimizer=held / (replica if strategy.shard_replicated else 1),
        gathered=gathers / again if reshard not in (None, True) else 0.0,
        all_gather=gathers * (1 + (again > 1)) + of_optimizer,
        reduce_scatter=gathers,
        all_reduce=summed,
        wire=gathers * (2 * around(fsdp) + around(again)) + (2 * summed + of_optimizer) * around(replica),
    )


def test_the_strategies_are_these():
    assert list(strategies) == NAMES
    assert all(strategy.name == name and strategy.summary for name, strategy in strategies.items())
    with pytest.raises(TypeError):
        strategies["mine"] = strategies["zero3"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategies["zero3"].fsdp = 4


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_that_of_the_formula(name: str):
    strategy = for_eight(name)
    mesh = js.mesh(**strategy.mesh)
    plan = js.plan(abstract(DECODER, mesh, **strategy.annotation))
    held, costs = memory_of(plan), formula(strategy, mesh)
    whole = plan.logical_bytes
    replicated = sum(leaf.placement.logical_bytes for leaf in plan.replicated if mesh.shape["fsdp"] > 1)
    assert replicated < 0.01 * whole
    assert held.parameters_bytes / whole == pytest.approx(costs.parameters, abs=0.01)
    assert held.gradients_bytes / whole == pytest.approx(costs.gradients, abs=0.01)
    assert held.kept_bytes / whole == pytest.approx(costs.gathered, abs=0.01)  # the root's are 0.4 %


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_state_is_that_of_the_formula(name: str):
    strategy = for_eight(name)
    mesh = js.mesh(**strategy.mesh)
    model = sharded(Config(layers=1), mesh, **strategy.annotation)
    optimizer = js.shard_optimizer(model, optax.adamw(1e-3), **strategy.optimizer)
    state = jax.tree.leaves(nnx.state(optimizer))
    on_first = sum(x.addressable_shards[0].data.nbytes for x in state)
    share = on_first / sum(x.nbytes for x in state)
    assert share == pytest.approx(formula(strategy, mesh).optimizer, abs=0.03)  # small leaves are replicated


@pytest.mark.parametrize("name", [name for name in NAMES if name != "zero1"])
def test_the_compiled_step_sends_what_the_formula_says(name: str):
    strategy = for_eight(name)
    made = program(DECODER, **strategy.mesh, **strategy.annotation)
    costs, whole = formula(strategy, made.mesh), made.plan.logical_bytes
    found = collectives(made.compiled)
    assert full_bytes(found, "all-gather", over=1) / whole == pytest.approx(costs.all_gather, abs=0.02)
    assert full_bytes(found, "reduce-scatter", over=1) / whole == pytest.approx(costs.reduce_scatter, abs=0.01)
    assert full_bytes(found, "all-reduce", over=1) / whole == pytest.approx(costs.all_reduce, abs=0.01)
    assert wire_bytes(found) / whole == pytest.approx(costs.wire, abs=0.02)
    assert sum(t.wire_bytes for t in traffic_of(made.plan)) / whole == pytest.approx(costs.wire, abs=0.02)


def test_zero1_gathers_what_the_optimizer_made():
    strategy = strategies["zero1"]
    mesh = js.mesh(**strategy.mesh)
    model = sharded(DECODER, mesh, **strategy.annotation)
    optimizer = js.shard_optimizer(model, optax.adamw(1e-3), **strategy.optimizer)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, inputs, targets):
        loss, grads = nnx.value_and_grad(loss_fn)(model, inputs, targets)
        optimizer.update(model, grads)
        return loss

    lowered = step.lower(model, optimizer, *token_batch(DECODER, 8, 8)).lowered
    found = collectives(compile_to_read(lowered))
    costs, whole = formula(strategy, mesh), js.plan(model).logical_bytes
    assert full_bytes(found, "all-gather", over=1) / whole == pytest.approx(costs.all_gather, abs=0.02)
    assert full_bytes(found, "all-reduce", over=1) / whole == pytest.approx(costs.all_reduce, abs=0.02)
    assert wire_bytes(found) / whole == pytest.approx(costs.wire, abs=0.02)


def test_a_strategy_goes_into_the_one_call_form():
    strategy = dataclasses.replace(strategies["hsdp"], replica=4)
    mesh = js.mesh(**strategy.mesh)
    assert dict(mesh.shape) == {"replica": 4, "fsdp": 2, "tensor": 1}
    annotate = lambda m: js.fully_shard(m, units=Block, mesh=mesh, **strategy.annotation)
    plan = js.plan(js.abstract_init(builder(Config()), annotate))
    assert [unit.reshard_after_forward for unit in plan.units] == [False, True, True]
