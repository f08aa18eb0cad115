"""Each strategy's formulas, as docs/strategies.md has them, are what its plan holds and its compiled step sends."""

import types

import jax
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.inspect import collectives
from jshard.inspect.communication import traffic_of
from jshard.inspect.memory import memory_of
from tests.helpers import (
    Config,
    abstract,
    compile_to_read,
    full_bytes,
    loss_fn,
    program,
    sharded,
    token_batch,
    wire_bytes,
)

DECODER = Config(layers=12, width=128, hidden=512, vocab=64, scanned=True, attends=False)
STRATEGIES = {  # the mesh, `reshard_after_forward`, and whether the state of replicated parameters is sharded
    "replicate": ({"replica": -1, "fsdp": 1}, None, False),
    "zero1": ({"replica": -1, "fsdp": 1}, None, True),
    "zero2": ({}, False, False),
    "zero3": ({}, None, False),
    "hsdp": ({"replica": 2}, None, False),
    "hsdp_zero2": ({"replica": 2}, False, False),
    "hpz": ({}, 2, False),
}


def formula(name: str, mesh):
    """The tables of docs/strategies.md, in units of P: what a device holds, and what a step sends."""
    _, reshard, shard_replicated = STRATEGIES[name]
    replica, fsdp = mesh.shape["replica"], mesh.shape["fsdp"]
    around = lambda size: (size - 1) / size  # what each device sends once around a ring
    again = {None: fsdp, False: 1}.get(reshard, reshard)  # the group that gathers for backward
    gathers, held, summed = float(fsdp > 1), 1 / fsdp, float(replica > 1) / fsdp
    of_optimizer = summed * shard_replicated  # its new values are gathered over the replicas
    return types.SimpleNamespace(
        held=held,
        optimizer=held / (replica if shard_replicated else 1),
        gathered=gathers / again if reshard is not None else 0.0,
        all_gather=gathers * (1 + (again > 1)) + of_optimizer,
        reduce_scatter=gathers,
        all_reduce=summed,
        wire=gathers * (2 * around(fsdp) + around(again)) + (2 * summed + of_optimizer) * around(replica),
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_memory_is_that_of_the_formula(name: str):
    axes, reshard, _ = STRATEGIES[name]
    mesh = js.mesh(**axes)
    plan = js.plan(abstract(DECODER, mesh, reshard_after_forward=reshard))
    held, costs, whole = memory_of(plan), formula(name, mesh), plan.logical_bytes
    assert held.parameters_bytes / whole == pytest.approx(costs.held, abs=0.01)
    assert held.gradients_bytes / whole == pytest.approx(costs.held, abs=0.01)
    assert held.kept_bytes / whole == pytest.approx(costs.gathered, abs=0.01)  # the root's are 0.4 %


@pytest.mark.parametrize("name", ["replicate", "zero1", "hsdp"])
def test_optimizer_state_is_that_of_the_formula(name: str):
    axes, _, shard_replicated = STRATEGIES[name]
    mesh = js.mesh(**axes)
    model = sharded(Config(layers=1), mesh)
    optimizer = js.shard_optimizer(model, optax.adamw(1e-3), shard_replicated=shard_replicated)
    state = jax.tree.leaves(nnx.state(optimizer))
    share = sum(x.addressable_shards[0].data.nbytes for x in state) / sum(x.nbytes for x in state)
    assert share == pytest.approx(formula(name, mesh).optimizer, abs=0.03)  # small leaves are replicated


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "zero1"])
def test_the_compiled_step_sends_what_the_formula_says(name: str):
    axes, reshard, _ = STRATEGIES[name]
    made = program(DECODER, **axes, reshard_after_forward=reshard)
    costs, whole = formula(name, made.mesh), made.plan.logical_bytes
    found = collectives(made.compiled)
    assert full_bytes(found, "all-gather", over=1) / whole == pytest.approx(costs.all_gather, abs=0.02)
    assert full_bytes(found, "reduce-scatter", over=1) / whole == pytest.approx(costs.reduce_scatter, abs=0.01)
    assert full_bytes(found, "all-reduce", over=1) / whole == pytest.approx(costs.all_reduce, abs=0.01)
    assert wire_bytes(found) / whole == pytest.approx(costs.wire, abs=0.02)
    assert sum(t.wire_bytes for t in traffic_of(made.plan)) / whole == pytest.approx(costs.wire, abs=0.02)


def test_zero1_gathers_what_the_optimizer_made():
    mesh = js.mesh(replica=-1, fsdp=1)
    model = sharded(DECODER, mesh)
    optimizer = js.shard_optimizer(model, optax.adamw(1e-3), shard_replicated=True)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, inputs, targets):
        loss, grads = nnx.value_and_grad(loss_fn)(model, inputs, targets)
        optimizer.update(model, grads)
        return loss

    lowered = step.lower(model, optimizer, *token_batch(DECODER, 8, 8)).lowered
    found = collectives(compile_to_read(lowered))
    costs, whole = formula("zero1", mesh), js.plan(model).logical_bytes
    assert full_bytes(found, "all-gather", over=1) / whole == pytest.approx(costs.all_gather, abs=0.02)
    assert full_bytes(found, "all-reduce", over=1) / whole == pytest.approx(costs.all_reduce, abs=0.02)
    assert wire_bytes(found) / whole == pytest.approx(costs.wire, abs=0.02)
