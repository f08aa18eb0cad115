"""Linen parameters that no dim divides: stored padded in a box, read without it, trained like on one device."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState

import jshard as js
from jshard.errors import AnnotationError
from jshard.linen.boxes import Padded, is_padded
from tests.engine.test_uneven import by_rows
from tests.helpers import with_placement
from tests.linen_models import Residual, creator
from tests.parity import GRADIENT_TOLERANCE, PARAMETER_TOLERANCE, worst

VOCAB, WIDTH = 501, 47  # nothing divides them
ADAMW = optax.chain(optax.clip_by_global_norm(1e-2), optax.adamw(1e-2, eps=1e-3))  # rounding errors stay small
IDS = np.random.default_rng(0).integers(0, VOCAB, (3, 16, 5), dtype=np.int32)
FIRST = IDS[0, :, :-1]


class Decoder(nn.Module):
    """Its table is tied."""

    vocab: int = VOCAB
    width: int = WIDTH

    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(self.vocab, self.width, name="table")
        return table.attend(Residual(48, name="block")(table(ids)))


def mesh_of(degree: str) -> Any:
    return js.mesh(replica=2, fsdp=4) if degree == "2x4" else js.mesh(devices=jax.devices()[: int(degree)])


def annotated(degree: str = "8", plain: nn.Module | None = None, **settings: Any) -> Any:
    """Cut along the first dim, biases too: all are padded where that is odd."""
    return js.fully_shard(
        plain or Decoder(), mesh=mesh_of(degree), **with_placement(**{"units": Residual, "shard_dim": 0, **settings})
    )


def born(model: nn.Module, tx: Any = ADAMW, inputs: Any = FIRST) -> TrainState:
    return js.shard_init(creator(model, js.shard_optimizer(model, tx), inputs), model)


@jax.jit
def step(state: TrainState, ids: Any) -> tuple[TrainState, jax.Array, Any]:
    """Plain Flax, with a penalty on the table, that is read by hand."""

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, ids[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()
        return loss + jnp.mean(params["table"]["embedding"] ** 2) + jnp.abs(params["table"]["embedding"][-1]).sum()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss, grads


def flat(tree: Any) -> dict[str, np.ndarray]:
    """Logical arrays by path."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_padded)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in found}


def kinds(tree: Any) -> list[tuple]:
    """Shape of each stored array, and of what a device holds of it."""
    return [(x.shape, x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)]


def steps(state: TrainState) -> tuple[dict, dict | None]:
    """Parameters after some steps, and gradients of the first."""
    first = None
    for ids in IDS:
        state, _, grads = step(state, ids)
        first = first or flat(grads)
    return flat(state.params), first


@functools.cache
def sharded() -> tuple[Any, TrainState]:
    model = annotated()
    return model, born(model)


def test_three_steps_of_adamw_are_those_of_one_device():
    state = born(annotated("2x4"))
    after, alone = steps(state), steps(creator(Decoder(), ADAMW, FIRST)())
    for found, wanted in zip(after, alone, strict=True):
        assert found.keys() == wanted.keys()
        assert {k: x.shape for k, x in found.items()} == {k: x.shape for k, x in wanted.items()}
        apart = {k: worst(found[k], wanted[k]) for k in wanted}
        assert max(apart.values()) <= max(GRADIENT_TOLERANCE, PARAMETER_TOLERANCE), apart
    moved = np.abs(after[0]["['table']['embedding']"] - np.asarray(state.params["table"]["embedding"]))
    assert moved.max(1).min() > 0  # every row was updated, those of the last device too


def test_born_padded_with_the_values_of_the_plain_model_as_planned():
    model, state = sharded()
    wanted = flat(creator(Decoder(), ADAMW, FIRST)().params)
    for path, x in flat(state.params).items():
        np.testing.assert_array_equal(x, wanted[path])
    placement = js.plan(model).leaf("table/embedding").placement
    for tree in (state.params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
        stored = tree["table"]["embedding"].value
        assert {s.data.shape for s in stored.addressable_shards} == {(63, WIDTH)}
        assert stored.addressable_shards[0].data.nbytes == placement.bytes_per_device
    assert placement.padding == 3 and "dim 0 501 -> 504" in str(js.explain(model, leaves=True))
    abstract = js.abstract_init(creator(model, js.shard_optimizer(model, ADAMW), FIRST), model)
    same = jax.tree.map(lambda x, y: (x.shape, x.sharding) == (y.shape, y.sharding), abstract.params, state.params)
    assert jax.tree.all(same)


# What the user's own code sees.


@functools.cache
def box() -> tuple[Padded, np.ndarray]:
    found = sharded()[1].params["table"]["embedding"]
    return found, np.asarray(creator(Decoder(), ADAMW, FIRST)().params["table"]["embedding"])


def test_a_box_is_read_as_the_logical_array():
    found, plain = box()
    assert (found.shape, found.ndim, found.size, len(found)) == ((VOCAB, WIDTH), 2, VOCAB * WIDTH, VOCAB)
    assert found.dtype == jnp.float32 and found.sharding.spec == jax.P("fsdp", None)
    np.testing.assert_array_equal(found[-1], plain[-1])
    np.testing.assert_array_equal(found.T, plain.T)
    np.testing.assert_allclose(jnp.mean(found), plain.mean(), rtol=1e-4)
    for mine, wanted in [
        (found * 2, plain * 2),
        (1 - found, 1 - plain),
        (found + jnp.asarray(plain), 2 * plain),
        (jnp.asarray(plain) / found, plain / plain),
        (-found, -plain),
        (found > 0, plain > 0),
        (found.T @ found, plain.T @ plain),
    ]:
        assert isinstance(mine, jax.Array)
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5)
    assert sum(1 for _ in found) == VOCAB
    assert repr(found) == "Padded(float32[501, 47], stored [504, 47])"


def test_what_is_written_is_logical(tmp_path):
    """By Flax's serialization, and by a checkpoint, which goes to another mesh."""
    state, plain = sharded()[1], box()[1]
    assert serialization.to_state_dict(state)["params"]["table"]["embedding"].shape == plain.shape
    back = serialization.from_state_dict(state, serialization.msgpack_restore(serialization.to_bytes(state)))
    np.testing.assert_array_equal(back.params["table"]["embedding"], plain)
    assert back.params["table"]["embedding"].value.shape == (504, WIDTH)
    js.checkpoint.save(tmp_path / "run", {"state": state})
    assert js.checkpoint.manifest.read(tmp_path / "run").leaves["state/params/table/embedding"].shape == plain.shape
    model = annotated("5")
    like = js.abstract_init(creator(model, js.shard_optimizer(model, ADAMW), FIRST), model)
    found, wanted = flat(js.checkpoint.restore(tmp_path / "run", like={"state": like})["state"]), flat(state)
    assert found.keys() == wanted.keys()
    for path, x in wanted.items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)


# Optimizers see logical arrays.


class OddTable(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", nn.initializers.normal(1.0), (VOCAB, WIDTH))


OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "several steps": lambda: optax.MultiSteps(optax.adam(1e-2, eps=1e-3), 2).gradient_transformation(),
    "a part": lambda: optax.masked(optax.adam(1e-2), {"kernel": True}),
    "own": by_rows,
}


@functools.cache
def table() -> tuple[Any, np.ndarray]:
    return js.fully_shard(OddTable(), mesh=js.mesh()), np.random.default_rng(1).standard_normal((8, VOCAB), np.float32)


@jax.jit
def table_step(state: TrainState, x: Any) -> TrainState:
    grads = jax.grad(lambda params: jnp.mean((state.apply_fn({"params": params}, x) - 1) ** 2))(state.params)
    return state.apply_gradients(grads=grads)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_with_means_over_parameters_is_exact(name):
    model, x = table()
    found, wanted = born(model, OPTIMIZERS[name](), x), creator(OddTable(), OPTIMIZERS[name](), x)()
    before = kinds(found)
    for _ in range(2):
        found, wanted = table_step(found, x), table_step(wanted, x)
    assert kinds(found) == before
    apart = worst(np.asarray(found.params["kernel"]), np.asarray(wanted.params["kernel"]))
    assert apart <= (1e-6 if name in ("own", "adafactor") else 1e-5)
    assert found.params["kernel"].value.shape == (504, WIDTH)


def by_hand(state: TrainState, x: Any) -> None:
    jax.grad(lambda params: jnp.mean(state.apply_fn({"params": params}, x) ** 2))(state.params)


def in_global_view(state: TrainState, x: Any) -> None:
    with js.global_view():
        jax.jit(by_hand)(state, x)


@pytest.mark.parametrize("update", [table_step, by_hand, in_global_view])
def test_a_padded_parameter_has_no_gradient_for_an_optimizer_that_would_see_the_padding(update):
    model, x = js.fully_shard(OddTable(), mesh=js.mesh()), table()[1]
    state = js.shard_init(creator(model, ADAMW, x), model)
    with pytest.raises(AnnotationError, match=r"Table: kernel  float32\[501, 47\], stored \[504, 47\]") as refused:
        update(state, x)
    assert refused.value.do == "tx = js.shard_optimizer(model, tx)  # around the whole chain"
    js.shard_optimizer(model, ADAMW)
    by_hand(state, x)


# Ways into the model.


def test_a_call_takes_plain_arrays_boxes_and_boxes_of_another_mesh():
    model, state = sharded()
    plain, ids = creator(Decoder(), ADAMW, FIRST)().params, IDS[0, :, :-1]
    wanted = np.asarray(Decoder().apply({"params": plain}, ids))
    with js.global_view():
        within = model.apply({"params": state.params}, ids)
    for found in (
        model.apply({"params": plain}, ids),
        jax.jit(model.apply)({"params": state.params}, ids),
        annotated("2").apply({"params": jax.device_get(state.params)}, ids),
        Decoder().apply({"params": state.params}, ids),
        model.bind({"params": state.params})(ids),
        within,
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    scalar = lambda params: jnp.mean(model.apply({"params": params}, ids) ** 2)
    grads = jax.jit(jax.grad(scalar))(plain)
    assert grads["table"]["embedding"].shape == (VOCAB, WIDTH)
    _, changed = model.apply({"params": state.params}, ids, mutable=["params", "intermediates"])
    assert jax.tree.structure(changed["params"]) == jax.tree.structure(state.params)
    js.check(model, {"params": state.params}, ids)


# Checkpoints hold logical arrays: padding is a matter of the mesh.
