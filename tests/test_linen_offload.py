"""Optimizer state of a Linen model in host memory: the same numbers as without it, and where it was said to be."""

import functools
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.extend import core as jex

import jshard as js
from jshard import _compat
from jshard._mesh import batch_sharding
from jshard.cluster.topology import parse_topology, topology_devices
from jshard.inspect.audit import CompiledMemory
from tests.gpu_compiler import needs_gpu_compiler
from tests.linen_models import Block, Decoder, X, cross_entropy, tokens
from tests.parity import PARAMETER_TOLERANCE
from tests.wide import wide

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
UNEVEN = {"shard_dim": 0, "min_size": 1}


def annotated(**settings: Any) -> Any:
    return js.fully_shard(Decoder(depth=2), **{"mesh": js.mesh(), "units": Block, **settings})


def creator(model: Any, tx: Any) -> Any:
    def create() -> TrainState:
        params = model.init(jax.random.key(0), X)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return create


@jax.jit
def step(state: TrainState, ids: Any, labels: Any) -> TrainState:
    """It knows nothing of memories."""
    grads = jax.grad(lambda params: cross_entropy(state.apply_fn({"params": params}, ids), labels))(state.params)
    return state.apply_gradients(grads=grads)


@functools.cache
def trained(*, fsdp: int = 8, offload: str | None = "optimizer", tx: Any = TX) -> TrainState:
    """After two steps; without `offload` on plain Optax."""
    model = annotated(mesh=js.mesh(devices=jax.devices()[:fsdp]), offload=offload)
    state = js.shard_init(creator(model, js.shard_optimizer(model, tx) if offload else tx), model)
    before = kinds(state)
    for seed in range(2):
        state = step(state, *tokens(seed=seed))
        assert kinds(state) == before
    return state


def kinds(tree: Any) -> dict[str, tuple]:
    """The memory of each array and the shape of what a device holds of it, by path."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p): (x.sharding.memory_kind, x.sharding.shard_shape(x.shape)) for p, x in found}


def large(path: str) -> bool:
    return "kernel" in path or "embedding" in path


def same(found: Any, wanted: Any) -> None:
    square = lambda tree: sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(tree))
    apart = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), found, wanted)
    assert (square(apart) / square(wanted)) ** 0.5 <= PARAMETER_TOLERANCE


@pytest.mark.parametrize("fsdp", [8, wide(1)])
def test_state_lives_on_the_host_and_trains_the_same(fsdp: int):
    found = trained(fsdp=fsdp)
    same(found.params, trained(offload=None).params)
    moments = {path: kind for path, (kind, _) in kinds(found.opt_state).items() if "mu" in path or "nu" in path}
    assert sum(map(large, moments)) == 2 * 5
    assert all(kind == ("pinned_host" if large(path) else "device") for path, kind in moments.items())
    assert {kind for kind, _ in kinds(found.params).values()} == {"device"}


def test_a_part_of_the_parameters_is_trained_and_its_state_alone_is_there():
    mask = {"block_0": True, "block_1": False, "table": False, "norm": False}
    frozen = {name: not trains for name, trains in mask.items()}
    tx = optax.chain(optax.masked(optax.adam(1e-3), mask), optax.masked(optax.set_to_zero(), frozen))
    found = trained(tx=tx)
    same(found.params, trained(offload=None, tx=tx).params)
    hosted = [path for path, (kind, _) in kinds(found.opt_state).items() if kind == "pinned_host"]
    assert len(hosted) == 2 * 2 and all("block_0" in path for path in hosted)


def on_host_in(jaxpr: Any) -> list[Any]:
    """The equations that take arrays in host memory, those inside loops and calls too."""
    found = []
    for eqn in jaxpr.eqns:
        inner = list(jex.jaxprs_in_params(eqn.params))
        for one in inner:
            found += on_host_in(one)
        found += [eqn] * (not inner and any(_compat.on_host(v.aval) for v in eqn.invars))
    return found


def test_nothing_is_computed_in_host_memory():
    state = trained()
    found = on_host_in(jax.make_jaxpr(step)(state, *tokens()).jaxpr)
    assert {eqn.primitive.name for eqn in found} == {"device_put", "optimization_barrier"}
    assert sum(eqn.primitive.name == "device_put" for eqn in found) == 2 * 5


def test_state_that_is_padded_lives_there_too():
    def made(offload: str | None) -> TrainState:
        model = js.fully_shard(Decoder(depth=1), mesh=js.mesh(devices=jax.devices()[:3]), offload=offload, **UNEVEN)
        state = js.shard_init(creator(model, js.shard_optimizer(model, TX)), model)
        return step(state, X[:15], tokens()[1][:15])

    found, wanted = made("optimizer"), made(None)
    same(found.params, wanted.params)
    mu = found.opt_state[1][0].mu["table"]["embedding"]
    assert (mu.shape, mu.value.shape, mu.sharding.memory_kind) == ((128, 32), (129, 32), "pinned_host")
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(wanted.opt_state)


def test_a_checkpoint_keeps_the_memory_and_the_values(tmp_path):
    state = trained()
    js.checkpoint.save(tmp_path / "one", {"state": state})
    model = annotated(offload="optimizer", mesh=js.mesh(devices=jax.devices()[:4]))
    like = js.abstract_init(creator(model, js.shard_optimizer(model, TX)), model)
    found = js.checkpoint.restore(tmp_path / "one", like={"state": like})["state"]
    memories = lambda tree: {path: memory for path, (memory, _) in kinds(tree).items()}
    assert memories(found) == memories(state)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert len(found.opt_state[1][0].mu["table"]["embedding"].sharding.device_set) == 4


def test_explain_counts_what_lies_on_the_host():
    found = []
    for offload in (None, "optimizer"):
        model = annotated(offload=offload)
        jax.eval_shape(model.init, jax.random.key(0), X)
        found.append(js.explain(model).memory)
    here, there = found
    hosted = sum(x.nbytes for x in jax.tree.leaves(trained().opt_state) if x.sharding.memory_kind == "pinned_host")
    assert here.host_bytes == 0 and there.host_optimizer_bytes == hosted // 8
    assert there.host_optimizer_bytes + there.optimizer_bytes == here.optimizer_bytes


def test_state_that_optax_alone_made_is_refused():
    model = annotated(offload="optimizer")
    with pytest.raises(js.AnnotationError, match=r"would not lie(.|\n)*opt_state/1/0/mu/block_0/Dense_0/kernel"):
        js.shard_init(creator(model, TX), model)
    assert js.shard_init(lambda: model.init(jax.random.key(0), X), model)


def test_devices_without_host_memory_are_refused(monkeypatch):
    monkeypatch.setattr(_compat, "memory_kinds", lambda device: ["device"])
    with pytest.raises(js.MeshError, match="8 of 8 devices lack it"):
        annotated(offload="optimizer")


def test_units_may_differ_in_what_is_offloaded():
    model = annotated(units={"block_0": {"offload": "optimizer"}, Block: {}})
    state = js.abstract_init(creator(model, js.shard_optimizer(model, TX)), model)
    hosted = [path for path, (kind, _) in kinds(state).items() if kind == "pinned_host"]
    assert len(hosted) == 2 * 2 and all("['block_0']" in path and "opt_state" in path for path in hosted)
    with pytest.raises(js.AnnotationError, match="Host memory for parameters"):
        annotated(units={Block: {"offload": "params"}})
    with pytest.raises(js.AnnotationError, match="There is no such offload"):
        annotated(units={Block: {"offload": "cpu"}})


@needs_gpu_compiler
@pytest.mark.usefixtures("no_stored_programs")
def test_on_gpus_it_leaves_the_device():
    """Compiled, not run: two thirds of the state are arguments in host memory, and no copy is waited for at once."""
    mesh = js.mesh(fsdp=-1, devices=topology_devices(parse_topology("h200:1x8")))
    model = annotated(mesh=mesh, offload="optimizer", min_size=1)
    state = js.abstract_init(creator(model, js.shard_optimizer(model, TX)), model)
    batch = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh)) for x in tokens()]
    shardings = jax.tree.map(lambda x: _compat.asked_of_results(x.sharding), state)
    lowered = jax.jit(step, donate_argnums=0, out_shardings=shardings).lower(state, *batch)
    compiled = lowered.compile(compiler_options=js.compiler_options("fastest", platform="gpu"))
    memory, text = CompiledMemory.of(compiled), compiled.as_text() or ""
    assert memory is not None
    assert memory.host_arguments_bytes == memory.host_results_bytes
    assert memory.host_arguments_bytes == pytest.approx(2 * js.plan(model).bytes_per_device, rel=0.01)
    assert not [line for line in text.splitlines() if re.search(r" copy\(", line) and "S(5)" in line]


def test_an_average_of_the_parameters_stays_on_the_device():
    class Averaged(TrainState):
        ema: Any

    model = annotated(offload="optimizer")

    def create() -> Averaged:
        params = model.init(jax.random.key(0), X)["params"]
        return Averaged.create(apply_fn=model.apply, params=params, tx=js.shard_optimizer(model, TX), ema=params)

    state = js.shard_init(create, model)
    assert {kind for kind, _ in kinds(state.ema).values()} == {"device"}


def test_state_that_is_made_later_lies_there_too():
    state = trained()
    for init in (state.tx.init, jax.jit(state.tx.init)):
        assert kinds(init(state.params)) == kinds(state.opt_state)
