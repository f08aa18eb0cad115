"""State and parameters of a Linen model in host memory: the same numbers, and each array where it was said to be."""

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
from jshard.cluster.topology import parse_topology, topology_devices
from jshard.errors import AnnotationError
from jshard.inspect.audit import CompiledMemory
from jshard.plans.mesh import batch_sharding
from tests.gpu_compiler import needs_gpu_compiler
from tests.helpers import with_placement
from tests.linen.test_linen_frozen import Layer, Scanned
from tests.linen_models import Block, Decoder, X, creator, cross_entropy, tokens
from tests.parity import PARAMETER_TOLERANCE
from tests.wide import wide

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
UNEVEN = {"shard_dim": 0, "min_size": 1}


def annotated(**settings: Any) -> Any:
    return js.fully_shard(Decoder(depth=2), **with_placement(**{"mesh": js.mesh(), "units": Block, **settings}))


@jax.jit
def step(state: TrainState, ids: Any, labels: Any) -> TrainState:
    """It knows nothing of memories."""
    grads = jax.grad(lambda params: cross_entropy(state.apply_fn({"params": params}, ids), labels))(state.params)
    return state.apply_gradients(grads=grads)


def in_microbatches(model: Any, accumulate: int) -> Any:
    loss = lambda params, ids, labels: cross_entropy(model.apply({"params": params}, ids), labels)
    grad = js.value_and_grad(loss, model=model, accumulate=accumulate, sync="last")
    return jax.jit(lambda state, *batch: state.apply_gradients(grads=grad(state.params, *batch)[1]))


@functools.cache
def trained(
    plain: Any = None,
    units: Any = Block,
    *,
    fsdp: int = 8,
    offload: str | None = "optimizer",
    tx: Any = TX,
    accumulate: int = 1,
    remat: str = "none",
) -> TrainState:
    """After two steps; without `offload` on plain Optax."""
    mesh = js.mesh(devices=jax.devices()[:fsdp])
    model = js.fully_shard(
        plain or Decoder(depth=2), mesh=mesh, units=units, placement=js.ShardPlacement(offload=offload), remat=remat
    )
    taken = step if accumulate == 1 else in_microbatches(model, accumulate)
    state = js.shard_init(creator(model, js.shard_optimizer(model, tx) if offload else tx), model)
    before = kinds(state)
    for seed in range(2):
        state = taken(state, *tokens(seed=seed))
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


@pytest.mark.parametrize("settings", [{}, wide({"fsdp": 1})], ids=str)
def test_state_lives_on_the_host_and_trains_the_same(settings: dict[str, int]):
    found = trained(**settings)
    same(found.params, trained(offload=None).params)
    moments = {path: kind for path, (kind, _) in kinds(found.opt_state).items() if "mu" in path or "nu" in path}
    assert sum(map(large, moments)) == 2 * 5
    assert all(kind == ("pinned_host" if large(path) else "device") for path, kind in moments.items())
    assert {kind for kind, _ in kinds(found.params).values()} == {"device"}


SCANNED = {"plain": Scanned(), "units": Layer, "remat": "offload"}


@pytest.mark.parametrize(
    "settings", [wide({}), SCANNED, wide({"accumulate": 2})], ids=lambda settings: "-".join(settings)
)
def test_parameters_live_on_the_host_and_train_the_same(settings: dict[str, Any]):
    found = trained(offload="params", **settings)
    same(found.params, trained(offload=None, **{k: v for k, v in settings.items() if k in ("plain", "units")}).params)
    for tree in (found.params, found.opt_state):
        memories = {path: kind for path, (kind, shape) in kinds(tree).items()}
        assert all(kind == ("pinned_host" if large(path) else "device") for path, kind in memories.items())
        assert "pinned_host" in memories.values()


@pytest.mark.wide
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


MOVES = {"device_put", "optimization_barrier", "pvary", "pcast"}


# Of the 5 large parameters a block's 4 are fetched forward and backward, the table once; then their gradients, their
# two moments and themselves for the update, which makes the sums, too.
@pytest.mark.parametrize(("offload", "fetches"), [("optimizer", 2 * 5), ("params", 2 * 4 + 1 + 4 * 5)])
def test_nothing_is_computed_in_host_memory(offload: str, fetches: int):
    state = trained(offload=offload)
    found = on_host_in(jax.make_jaxpr(step)(state, *tokens()).jaxpr)
    assert {eqn.primitive.name for eqn in found} <= MOVES
    assert sum(eqn.primitive.name == "device_put" for eqn in found) == fetches


def test_an_update_that_was_changed_or_is_for_others_is_added_anew():
    state = trained(offload="params")
    gradients = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding), state.params)

    @jax.jit
    def halved(state: TrainState) -> Any:
        updates, _ = state.tx.update(gradients, state.opt_state, state.params)
        by_half = optax.apply_updates(state.params, jax.tree.map(lambda x: 0.5 * x, updates))
        double = optax.apply_updates(state.params, state.params)
        return optax.apply_updates(state.params, updates), by_half, optax.apply_updates(double, updates)

    whole, half, of_double = (jax.device_get(tree) for tree in halved(state))
    middle = jax.tree.map(lambda x, y: (x + y) / 2, jax.device_get(state.params), whole)
    same(half, middle)
    same(of_double, jax.tree.map(lambda x, y: x + y, jax.device_get(state.params), whole))
    assert {kind for kind, _ in kinds(halved(state)[1]).values()} == {"device", "pinned_host"}


def test_a_call_in_global_view_fetches_parameters():
    model = js.fully_shard(Decoder(depth=1), mesh=js.mesh(), units=Block, placement=js.ShardPlacement(offload="params"))
    variables = js.shard_init(lambda: model.init(jax.random.key(0), X), model)
    js.check(model, variables, X)
    with js.global_view():  # a sum of both memories would raise
        jax.eval_shape(model.apply, variables, X[:1])


@functools.cache
def uneven(offload: str | None) -> TrainState:
    """After a step on three devices."""
    model = js.fully_shard(
        Decoder(depth=1), mesh=js.mesh(devices=jax.devices()[:3]), **with_placement(offload=offload, **UNEVEN)
    )
    state = js.shard_init(creator(model, js.shard_optimizer(model, TX)), model)
    return step(state, X[:15], tokens()[1][:15])


@pytest.mark.parametrize("offload", [wide("optimizer"), "params"])
def test_state_that_is_padded_lives_there_too(offload: str):
    found, wanted = uneven(offload), uneven(None)
    same(found.params, wanted.params)
    assert found.params["table"]["embedding"].sharding.memory_kind == (
        "pinned_host" if offload == "params" else "device"
    )
    mu = found.opt_state[1][0].mu["table"]["embedding"]
    assert (mu.shape, mu.value.shape, mu.sharding.memory_kind) == ((128, 32), (129, 32), "pinned_host")
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(wanted.opt_state)


def test_logical_arrays_on_the_host_are_padded_on_the_device():
    model = js.fully_shard(
        Decoder(depth=1), mesh=js.mesh(devices=jax.devices()[:3]), **with_placement(offload="params", **UNEVEN)
    )
    params = jax.eval_shape(model.init, jax.random.key(0), X[:15])["params"]
    there = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), jax.memory.Space.Host), params)
    found = on_host_in(jax.make_jaxpr(lambda params: model.apply({"params": params}, X[:15]))(there).jaxpr)
    assert {eqn.primitive.name for eqn in found} <= MOVES


@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_a_checkpoint_keeps_the_memory_and_the_values(tmp_path, offload: str):
    state = trained(offload=offload)
    js.checkpoint.save(tmp_path / "one", {"state": state})
    model = annotated(offload=offload, mesh=js.mesh(devices=jax.devices()[:4]))
    like = js.abstract_init(creator(model, js.shard_optimizer(model, TX)), model)
    found = js.checkpoint.restore(tmp_path / "one", like={"state": like})["state"]
    memories = lambda tree: {path: memory for path, (memory, _) in kinds(tree).items()}
    assert memories(found) == memories(state)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert len(found.opt_state[1][0].mu["table"]["embedding"].sharding.device_set) == 4


@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_state_that_optax_alone_made_is_refused(offload: str):
    model = annotated(offload=offload)
    with pytest.raises(AnnotationError, match=r"would not be in host(.|\n)*opt_state/1/0/mu/block_0/Dense_0/kernel"):
        js.shard_init(creator(model, TX), model)
    assert js.shard_init(lambda: model.init(jax.random.key(0), X), model)


def test_units_may_differ_in_what_is_offloaded():
    model = annotated(
        units={
            "block_0": {"placement": js.ShardPlacement(offload="optimizer")},
            Block: {"placement": js.ShardPlacement(offload="params")},
        }
    )
    state = js.abstract_init(creator(model, js.shard_optimizer(model, TX)), model)
    hosted = [path for path, (kind, _) in kinds(state).items() if kind == "pinned_host"]
    of_state = [path for path in hosted if "opt_state" in path]
    assert len(of_state) == 2 * 2 * 2 and not any("table" in path for path in hosted)
    assert len(hosted) == len(of_state) + 2 and sum("params['block_1']" in path for path in hosted) == 2
    with pytest.raises(AnnotationError, match="offload='cpu'"):
        annotated(units={Block: {"placement": js.ShardPlacement(offload="cpu")}})


@needs_gpu_compiler
@pytest.mark.usefixtures("no_stored_programs")
@pytest.mark.parametrize(("offload", "arrays"), [("optimizer", 2), ("params", 3)])
def test_on_gpus_it_leaves_the_device(offload: str, arrays: int):
    """Compiled, not run: these of three arrays are arguments in host memory, and no copy is waited for at once."""
    mesh = js.mesh(fsdp=-1, devices=topology_devices(parse_topology("h200:1x8")))
    model = annotated(mesh=mesh, offload=offload, min_size=1)
    state = js.abstract_init(creator(model, js.shard_optimizer(model, TX)), model)
    batch = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh)) for x in tokens()]
    shardings = jax.tree.map(lambda x: _compat.asked_of_results(x.sharding), state)
    lowered = jax.jit(step, donate_argnums=0, out_shardings=shardings).lower(state, *batch)
    compiled = lowered.compile(compiler_options=js.compiler_options("fastest", platform="gpu"))
    memory, text = CompiledMemory.of(compiled), compiled.as_text() or ""
    assert memory is not None
    assert memory.host_arguments_bytes == memory.host_results_bytes
    assert memory.host_arguments_bytes == pytest.approx(arrays * js.plan(model).bytes_per_device, rel=0.01)
    assert not [line for line in text.splitlines() if re.search(r" copy\(", line) and "S(5)" in line]


@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_an_average_of_the_parameters_stays_on_the_device(offload: str):
    class Averaged(TrainState):
        ema: Any

    model = annotated(offload=offload)

    def create() -> Averaged:
        params = model.init(jax.random.key(0), X)["params"]
        return Averaged.create(apply_fn=model.apply, params=params, tx=js.shard_optimizer(model, TX), ema=params)

    state = js.abstract_init(create, model)
    assert {kind for kind, _ in kinds(state.ema).values()} == {"device"}


@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_state_that_is_made_later_lies_there_too(offload: str):
    state = trained(offload=offload)
    for init in (state.tx.init, jax.jit(state.tx.init)):
        assert kinds(init(state.params)) == kinds(state.opt_state)
    decay = optax.GradientTransformation(lambda params: jax.tree.map(lambda x: x * np.ones(x.shape), params), TX.update)
    model = annotated(offload=offload)
    jax.eval_shape(model.init, jax.random.key(0), X)
    made = jax.jit(js.shard_optimizer(model, decay).init)(state.params)
    assert kinds(made) == kinds(state.opt_state[1][0].mu)
