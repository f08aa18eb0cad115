"""Linen parameters that no dim divides: stored padded in a box, read without it, trained like on one device."""

import copy
import functools
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState
from orbax.checkpoint import v1 as ocp

import jshard as js
from jshard import checkpoint
from jshard.errors import AnnotationError
from jshard.linen.layout import Padded, is_padded
from tests.helpers import with_placement
from tests.linen_models import creator
from tests.parity import GRADIENT_TOLERANCE, PARAMETER_TOLERANCE, worst
from tests.wide import wide

VOCAB, WIDTH = 501, 47  # nothing divides them
ADAMW = optax.chain(optax.clip_by_global_norm(1e-2), optax.adamw(1e-2, eps=1e-3))  # rounding errors stay small
IDS = np.random.default_rng(0).integers(0, VOCAB, (5, 16, 5), dtype=np.int32)
FIRST = IDS[0, :, :-1]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(48)(x)))


class Decoder(nn.Module):
    """Its table is tied."""

    vocab: int = VOCAB
    width: int = WIDTH

    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(self.vocab, self.width, name="table")
        return table.attend(Block(name="block")(table(ids)))


def mesh_of(degree: str) -> Any:
    return js.mesh(replica=2, fsdp=4) if degree == "2x4" else js.mesh(devices=jax.devices()[: int(degree)])


def annotated(degree: str = "8", plain: nn.Module | None = None, **settings: Any) -> Any:
    """Cut along the first dim, biases too: all are padded where that is odd."""
    return js.fully_shard(
        plain or Decoder(), mesh=mesh_of(degree), **with_placement(**{"units": Block, "shard_dim": 0, **settings})
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


def steps(state: TrainState) -> tuple[dict, dict, list[float]]:
    """Parameters after five steps, gradients of the first, all losses."""
    losses, first = [], None
    for ids in IDS:
        state, loss, grads = step(state, ids)
        first, losses = first or flat(grads), [*losses, float(loss)]
    return flat(state.params), first, losses


@functools.cache
def alone() -> tuple[dict, dict, list[float]]:
    return steps(creator(Decoder(), ADAMW, FIRST)())


@functools.cache
def sharded() -> tuple[Any, TrainState]:
    model = annotated()
    return model, born(model)


@pytest.mark.parametrize("degree", [wide("8"), "2x4"])
def test_five_steps_of_adamw_are_those_of_one_device(degree):
    model = annotated(degree)
    state = sharded()[1] if degree == "8" else born(model)
    after = steps(state)
    for found, wanted in zip(after[:2], alone()[:2], strict=True):
        assert found.keys() == wanted.keys()
        assert {k: x.shape for k, x in found.items()} == {k: x.shape for k, x in wanted.items()}
        apart = {k: worst(found[k], wanted[k]) for k in wanted}
        assert max(apart.values()) <= max(GRADIENT_TOLERANCE, PARAMETER_TOLERANCE), apart
    moved = np.abs(after[0]["['table']['embedding']"] - np.asarray(state.params["table"]["embedding"]))
    assert moved.max(1).min() > 0  # every row was updated, those of the last device too


def test_the_step_keeps_its_form_and_the_padding_its_zeros():
    state = sharded()[1]
    after, _, grads = step(state, IDS[0])
    assert jax.tree.structure(after) == jax.tree.structure(state) and kinds(after) == kinds(state)
    boxes = [x for x in jax.tree.leaves((after, grads), is_leaf=is_padded) if is_padded(x)]
    assert len(boxes) == 4 * 3  # table, a kernel and a bias; in params, mu, nu, gradients
    for box in boxes:
        assert not np.asarray(box.value)[box.shape[0] :].any() and np.asarray(box.value).any()


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


def test_a_box_survives_copies_and_flaxs_serialization():
    found, plain = box()
    for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(jax.device_get(found)))):
        assert again.padding == found.padding
        np.testing.assert_array_equal(again, plain)
    state = sharded()[1]
    stored = serialization.to_state_dict(state)
    assert stored["params"]["table"]["embedding"].shape == plain.shape
    back = serialization.from_state_dict(state, serialization.msgpack_restore(serialization.to_bytes(state)))
    np.testing.assert_array_equal(back.params["table"]["embedding"], plain)
    assert back.params["table"]["embedding"].value.shape == (504, WIDTH)


def test_an_average_of_the_parameters_is_right():
    class Averaged(TrainState):
        ema: Any

    model = annotated()

    def create() -> Averaged:
        params = model.init(jax.random.key(0), IDS[0, :, :-1])["params"]
        tx = js.shard_optimizer(model, ADAMW)
        return Averaged.create(apply_fn=model.apply, params=params, tx=tx, ema=jax.tree.map(jnp.zeros_like, params))

    state = js.shard_init(create, model)
    ema = optax.incremental_update(state.params, state.ema, 0.5)
    np.testing.assert_allclose(ema["table"]["embedding"], box()[1] / 2, rtol=1e-6)
    squares = sum(float((x**2).sum()) for x in flat(state.params).values())
    np.testing.assert_allclose(optax.tree.norm(state.params), squares**0.5, rtol=1e-5)


# Optimizers see logical arrays.


class Table(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", nn.initializers.normal(1.0), (VOCAB, WIDTH))


OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "muon": lambda: optax.contrib.muon(1e-2),
    "block rms": lambda: optax.chain(optax.clip_by_block_rms(1e-4), optax.sgd(1.0)),
    "centralized": lambda: optax.chain(optax.centralize(), optax.sgd(1.0, momentum=0.9)),
    "several steps": lambda: optax.MultiSteps(optax.adam(1e-2, eps=1e-3), 2).gradient_transformation(),
    "a part": lambda: optax.masked(optax.adam(1e-2), {"kernel": True}),
    "own": lambda: by_rows(),
}


@functools.cache
def table() -> tuple[Any, np.ndarray]:
    return js.fully_shard(Table(), mesh=js.mesh()), np.random.default_rng(1).standard_normal((8, VOCAB), np.float32)


@jax.jit
def table_step(state: TrainState, x: Any) -> TrainState:
    grads = jax.grad(lambda params: jnp.mean((state.apply_fn({"params": params}, x) - 1) ** 2))(state.params)
    return state.apply_gradients(grads=grads)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_with_means_over_parameters_is_exact(name):
    model, x = table()
    found, wanted = born(model, OPTIMIZERS[name](), x), creator(Table(), OPTIMIZERS[name](), x)()
    before = kinds(found)
    for _ in range(2):
        found, wanted = table_step(found, x), table_step(wanted, x)
    assert kinds(found) == before
    apart = worst(np.asarray(found.params["kernel"]), np.asarray(wanted.params["kernel"]))
    assert apart <= (1e-6 if name in ("own", "adafactor") else 1e-5)
    assert found.params["kernel"].value.shape == (504, WIDTH)


def by_rows() -> optax.GradientTransformation:
    """A user's own transformation, with a mean over rows."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g / jnp.sqrt((g**2).mean(0, keepdims=True) + 1e-12), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def by_hand(state: TrainState, x: Any) -> None:
    jax.grad(lambda params: jnp.mean(state.apply_fn({"params": params}, x) ** 2))(state.params)


def in_global_view(state: TrainState, x: Any) -> None:
    with js.global_view():
        jax.jit(by_hand)(state, x)


@pytest.mark.parametrize("tx", [by_rows(), ADAMW], ids=["own", "adamw"])
@pytest.mark.parametrize("update", [table_step, by_hand, in_global_view])
def test_a_padded_parameter_has_no_gradient_for_an_optimizer_that_would_see_the_padding(update, tx):
    model, x = js.fully_shard(Table(), mesh=js.mesh()), table()[1]
    state = js.shard_init(creator(model, tx, x), model)
    with pytest.raises(AnnotationError, match=r"Table: kernel  float32\[501, 47\], stored \[504, 47\]") as refused:
        update(state, x)
    assert refused.value.do == "tx = js.shard_optimizer(model, tx)  # around the whole chain"
    js.shard_optimizer(model, tx)
    by_hand(state, x)


def test_state_that_is_made_of_boxes_is_boxed():
    model, x = table()
    state = born(model, ADAMW, x)
    for init in (state.tx.init, jax.jit(state.tx.init)):
        again = init(state.params)
        assert jax.tree.structure(again) == jax.tree.structure(state.opt_state)
        assert kinds(again) == kinds(state.opt_state)


def test_state_that_was_not_born_sharded_trains_too():
    model, x = table()
    found, wanted = creator(model, js.shard_optimizer(model, ADAMW), x)(), creator(Table(), ADAMW, x)()
    found, wanted = table_step(found, x), table_step(wanted, x)
    assert isinstance(found.params["kernel"], jax.Array)
    assert worst(np.asarray(found.params["kernel"]), np.asarray(wanted.params["kernel"])) <= 1e-5


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


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = lambda block, x, _: (block(x), None)
        scan = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(Block(name="layers"), x, None)[0]


@pytest.mark.wide
def test_in_a_stack_of_layers_it_sends_what_the_plan_says():
    x = np.random.default_rng(0).standard_normal((16, WIDTH), np.float32)
    model = js.fully_shard(
        Deep(),
        mesh=js.mesh(),
        units=Block,
        placement=js.ShardPlacement(shard_dim=lambda path, shape: 1 if len(shape) == 3 else None),
    )
    state = born(model, ADAMW, x)
    up = state.params["layers"]["Dense_1"]["kernel"]
    assert up.shape == (3, WIDTH, 48) and up.value.addressable_shards[0].data.shape == (3, 6, 48)
    grad = lambda apply: jax.jit(jax.grad(lambda params: jnp.mean(apply({"params": params}, x) ** 2)))
    program = grad(model.apply).lower(state.params).compile()
    assert not js.audit(program, model=model).differences
    found, wanted = flat(program(state.params)), flat(grad(Deep().apply)(creator(Deep(), ADAMW, x)().params))
    assert found.keys() == wanted.keys()
    assert max(worst(found[k], wanted[k]) for k in wanted) <= GRADIENT_TOLERANCE
    outside, inside = (one.apply({"params": state.params}, x) for one in (Deep(), model))
    np.testing.assert_allclose(outside, inside, atol=1e-5)


def test_beside_a_tensor_axis_that_the_model_names():
    init = nn.with_partitioning(nn.initializers.normal(1.0), (None, "tensor"))
    plain = nn.Dense(48, use_bias=False, kernel_init=init)
    x = np.random.default_rng(0).standard_normal((8, WIDTH), np.float32)
    model = js.fully_shard(plain, mesh=js.mesh(fsdp=4, tensor=2), placement=js.ShardPlacement(shard_dim=0))
    variables = js.shard_init(lambda: model.init(jax.random.key(0), x), model)
    kernel = variables["params"]["kernel"]
    assert isinstance(kernel, nn.Partitioned) and is_padded(kernel.value)
    assert kernel.value.value.addressable_shards[0].data.shape == (12, 24)
    scalar = lambda model: jax.jit(jax.grad(lambda params: jnp.mean(model.apply({"params": params}, x) ** 2)))
    js.shard_optimizer(model, ADAMW)
    found = scalar(model)(variables["params"])["kernel"].value
    wanted = scalar(plain)(plain.init(jax.random.key(0), x)["params"])["kernel"].value
    assert worst(np.asarray(found), np.asarray(wanted)) <= GRADIENT_TOLERANCE


def test_small_parameters_that_no_dim_divides_are_replicated_with_one_warning():
    model = js.fully_shard(nn.Dense(20), mesh=js.mesh())
    with pytest.warns(UserWarning, match=r"1 parameter\(s\) of Dense are replicated(.|\n)* 40000 bytes(.|\n)*kernel"):
        js.abstract_init(lambda: model.init(jax.random.key(0), jnp.zeros((8, 500))), model)


# Checkpoints hold logical arrays: padding is a matter of the mesh.


GPT2 = Decoder(50257, 12)
LONG = np.random.default_rng(0).integers(0, 50257, (16, 5), dtype=np.int32)


def gpt2(degree: str) -> tuple[Any, Any]:
    model = annotated(degree, GPT2, shard_dim=None, min_size=2000)
    return model, creator(model, js.shard_optimizer(model, ADAMW), FIRST)


@functools.cache
def saved(folder: Any) -> tuple[dict, float]:
    """Saves after a step on 8 devices; the logical state, and the loss of another step."""
    model, create = gpt2("8")
    state, _, _ = step(js.shard_init(create, model), LONG)
    checkpoint.save(folder / "run", {"state": state}, format="orbax")
    return flat(state), float(step(state, LONG)[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("linen_uneven")


def test_what_is_on_disk_is_logical(folder):
    saved(folder)
    stored = ocp.metadata(str(folder / "run")).metadata["state"]
    moment = stored["opt_state"]["1"]["0"]["mu"]["table"]["embedding"]
    assert tuple(stored["params"]["table"]["embedding"].shape) == tuple(moment.shape) == (50257, 12)
    leaves = checkpoint.manifest.read(folder / "run").leaves
    assert leaves["state/params/table/embedding"].shape == (50257, 12)
    plain = creator(GPT2, ADAMW, FIRST)()
    restored = checkpoint.restore(folder / "run", like={"state": plain}, only="params")["state"]
    np.testing.assert_array_equal(
        restored.params["table"]["embedding"], saved(folder)[0][".params['table']['embedding']"]
    )


@pytest.mark.parametrize("degree", ["1", "4", "5"])
def test_a_checkpoint_goes_to_any_degree_and_training_goes_on(folder, degree):
    wanted, loss = saved(folder)
    model, create = gpt2(degree)
    state = checkpoint.restore(folder / "run", like={"state": js.abstract_init(create, model)})["state"]
    found = flat(state)
    assert found.keys() == wanted.keys()
    for path, x in wanted.items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)
    assert is_padded(state.params["table"]["embedding"]) == (degree == "5")  # 4 divides the width
    if degree == "4":
        np.testing.assert_allclose(float(step(state, LONG)[1]), loss, rtol=2e-6)
