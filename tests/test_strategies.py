"""Each strategy's formulas are what its plan holds and what its compiled step sends."""

import dataclasses

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
    return strategy.costs(replica=mesh.shape["replica"], fsdp=mesh.shape["fsdp"])


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


@pytest.mark.parametrize(
    ("name", "degrees", "wire"),
    [
        ("replicate", {"replica": 64}, 2 * 63 / 64),
        ("zero2", {"fsdp": 64}, 2 * 63 / 64),
        ("zero3", {"fsdp": 64}, 3 * 63 / 64),
        ("hsdp", {"fsdp": 8, "replica": 8}, 3 * 7 / 8 + 2 / 8 * 7 / 8),
        ("hpz", {"fsdp": 64}, 2 * 63 / 64 + 7 / 8),
        ("zero3", {}, 0.0),
        ("hpz", {}, 0.0),
    ],
)
def test_the_formulas_written_out(name: str, degrees: dict[str, int], wire: float):
    assert strategies[name].costs(**degrees).wire == pytest.approx(wire)
