"""State and parameters of a Linen model in host memory: the same numbers, and each array where it was said to be."""

import functools
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jshard as js
from jshard import _compat
from jshard.cluster.topology import parse_topology, topology_devices
from jshard.errors import AnnotationError
from jshard.inspect.audit import CompiledMemory
from jshard.plans.mesh import batch_sharding
from tests.engine.test_offload import MOVES, on_host_in
from tests.gpu_compiler import needs_gpu_compiler
from tests.helpers import with_placement
from tests.linen.test_linen_frozen import Layer, Scanned
from tests.linen_models import Block, Decoder, X, creator, cross_entropy, tokens
from tests.parity import PARAMETER_TOLERANCE

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
UNEVEN = {"shard_dim": 0, "min_size": 1}


def annotated(**settings: Any) -> Any:
    return js.fully_shard(Decoder(depth=2), **with_placement(**{"mesh": js.mesh(), "units": Block, **settings}))


@jax.jit
def step(state: TrainState, ids: Any, labels: Any) -> TrainState:
    """It knows nothing of memories."""
    grads = jax.grad(lambda params: cross_entropy(state.apply_fn({"params": params}, ids), labels))(state.params)
    return state.apply_gradients(grads=grads)


@functools.cache
def trained(
    plain: Any = None,
    units: Any = Block,
    *,
    offload: str | None = "optimizer",
    remat: str = "none",
) -> TrainState:
    """After two steps; without `offload` on plain Optax."""
    model = js.fully_shard(
        plain or Decoder(depth=2),
        mesh=js.mesh(),
        units=units,
        placement=js.ShardPlacement(offload=offload),
        remat=remat,
    )
    state = js.shard_init(creator(model, js.shard_optimizer(model, TX) if offload else TX), model)
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


def test_state_lives_on_the_host_and_trains_the_same():
    found = trained()
    same(found.params, trained(offload=None).params)
    moments = {path: kind for path, (kind, _) in kinds(found.opt_state).items() if "mu" in path or "nu" in path}
    assert sum(map(large, moments)) == 2 * 5
    assert all(kind == ("pinned_host" if large(path) else "device") for path, kind in moments.items())
    assert {kind for kind, _ in kinds(found.params).values()} == {"device"}


def test_parameters_live_on_the_host_and_train_the_same():
    found = trained(Scanned(), Layer, offload="params", remat="offload")
    same(found.params, trained(Scanned(), Layer, offload=None).params)
    for tree in (found.params, found.opt_state):
        memories = {path: kind for path, (kind, shape) in kinds(tree).items()}
        assert all(kind == ("pinned_host" if large(path) else "device") for path, kind in memories.items())
        assert "pinned_host" in memories.values()


# Of the 5 large parameters a block's 4 are fetched forward and backward, the table once; then their gradients, their
# two moments and themselves for the update, which makes the sums, too.
def test_nothing_is_computed_in_host_memory():
    state = trained(offload="params")
    found = on_host_in(jax.make_jaxpr(step)(state, *tokens()).jaxpr)
    assert {eqn.primitive.name for eqn in found} <= MOVES
    assert sum(eqn.primitive.name == "device_put" for eqn in found) == 2 * 4 + 1 + 4 * 5


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


def uneven(offload: str | None) -> TrainState:
    """After a step on three devices."""
    model = js.fully_shard(
        Decoder(depth=1), mesh=js.mesh(devices=jax.devices()[:3]), **with_placement(offload=offload, **UNEVEN)
    )
    state = js.shard_init(creator(model, js.shard_optimizer(model, TX)), model)
    return step(state, X[:15], tokens()[1][:15])


def test_state_that_is_padded_lives_there_too():
    found, wanted = uneven("params"), uneven(None)
    same(found.params, wanted.params)
    assert found.params["table"]["embedding"].sharding.memory_kind == "pinned_host"
    mu = found.opt_state[1][0].mu["table"]["embedding"]
    assert (mu.shape, mu.value.shape, mu.sharding.memory_kind) == ((128, 32), (129, 32), "pinned_host")
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(wanted.opt_state)


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


def test_an_average_of_the_parameters_stays_on_the_device():
    class Averaged(TrainState):
        ema: Any

    model = annotated(offload="params")

    def create() -> Averaged:
        params = model.init(jax.random.key(0), X)["params"]
        return Averaged.create(apply_fn=model.apply, params=params, tx=js.shard_optimizer(model, TX), ema=params)

    state = js.abstract_init(create, model)
    assert {kind for kind, _ in kinds(state.ema).values()} == {"device"}


def test_state_that_is_made_later_lies_there_too():
    state = trained(offload="params")
    for init in (state.tx.init, jax.jit(state.tx.init)):
        assert kinds(init(state.params)) == kinds(state.opt_state)
    decay = optax.GradientTransformation(lambda params: jax.tree.map(lambda x: x * np.ones(x.shape), params), TX.update)
    model = annotated(offload="params")
    jax.eval_shape(model.init, jax.random.key(0), X)
    made = jax.jit(js.shard_optimizer(model, decay).init)(state.params)
    assert kinds(made) == kinds(state.opt_state[1][0].mu)
