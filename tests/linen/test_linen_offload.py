"""State and parameters of a Linen model in host memory: the same numbers, and each array where it was said to be."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jshard as js
from tests.engine.test_offload import MOVES, large, on_host_in
from tests.helpers import with_placement
from tests.linen_models import Block, Decoder, Layer, Scanned, X, creator, cross_entropy, tokens
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
        placement=js.PlacementPolicy(offload=offload),
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


def same(found: Any, wanted: Any) -> None:
    square = lambda tree: sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(tree))
    apart = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), found, wanted)
    assert (square(apart) / square(wanted)) ** 0.5 <= PARAMETER_TOLERANCE


@pytest.mark.wide
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


def test_an_update_that_was_changed_or_is_for_others_is_added_again():
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


def uneven(offload: str | None) -> TrainState:
    """After a step on three devices."""
    model = js.fully_shard(
        Decoder(depth=1), mesh=js.mesh(devices=jax.devices()[:3]), **with_placement(offload=offload, **UNEVEN)
    )
    state = js.shard_init(creator(model, js.shard_optimizer(model, TX)), model)
    return step(state, X[:15], tokens()[1][:15])


@pytest.mark.wide
def test_state_that_is_padded_lives_there_too():
    found, wanted = uneven("params"), uneven(None)
    same(found.params, wanted.params)
    assert found.params["table"]["embedding"].sharding.memory_kind == "pinned_host"
    mu = found.opt_state[1][0].mu["table"]["embedding"]
    assert (mu.shape, mu.value.shape, mu.sharding.memory_kind) == ((128, 32), (129, 32), "pinned_host")
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(wanted.opt_state)


def test_state_that_is_made_later_is_placed_there_too():
    state = trained(offload="params")
    for init in (state.tx.init, jax.jit(state.tx.init)):
        assert kinds(init(state.params)) == kinds(state.opt_state)
    decay = optax.GradientTransformation(lambda params: jax.tree.map(lambda x: x * np.ones(x.shape), params), TX.update)
    model = annotated(offload="params")
    jax.eval_shape(model.init, jax.random.key(0), X)
    made = jax.jit(js.shard_optimizer(model, decay).init)(state.params)
    assert kinds(made) == kinds(state.opt_state[1][0].mu)
