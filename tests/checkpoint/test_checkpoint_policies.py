"""Whatever a state is made of comes back as it was; and parts of it, by other names and in other dtypes, as asked."""

import contextlib
import enum
from typing import NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard import checkpoint
from jshard.checkpoint import CheckpointError, CheckpointWarning
from jshard.checkpoint.state import leaves as _leaves
from jshard.errors import RunError
from tests.checkpoint.checkpoint_states import raw


class EveryKindOfState(nnx.Module):
    """Two blocks, a tied layer, dropout, statistics, and a variable that holds a tree."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.tied = self.blocks[0]
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.cache = nnx.Variable({"at": jnp.int32(seed), "seen": (jnp.ones(2) * seed, jnp.zeros(0))})


def plain(state):
    """A state without the classes of nnx."""
    is_nnx = lambda x: isinstance(x, nnx.Pytree)
    return jax.tree.map(lambda x: nnx.state(x) if is_nnx(x) else x, state, is_leaf=is_nnx)


class Phase(enum.IntEnum):
    WARM = 1
    DONE = 2


linen = nn.Dense(3)


def train_state(seed):
    params = linen.init(jax.random.key(seed), jnp.ones((1, 4)))["params"]
    return TrainState.create(apply_fn=linen.apply, params=params, tx=optax.chain(optax.clip(1.0), optax.adamw(1e-3)))


def are_matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def adam_of(seed, tx):
    model = EveryKindOfState(seed)
    return {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)}


# By what a state is made of: the state with the numbers of a seed.
STATES = {
    "a module alone": EveryKindOfState,
    "nnx.State": lambda seed: nnx.state(EveryKindOfState(seed)),
    "Linen's TrainState": lambda seed: {"train": train_state(seed), "epoch": seed},
    "frozen dicts": lambda seed: {"v": flax.core.freeze({"params": {"w": jnp.ones(3) * seed}})},
    "a list": lambda seed: [jnp.arange(3) + seed, (seed, {"a": jnp.ones(1) * seed})],
    "an array": lambda seed: jnp.arange(3) + seed,
    "a number": lambda seed: seed,
    "keys that separate keys": lambda seed: {
        "a/b": {"c.d": jnp.ones(2) * seed, "": seed, "%": seed + 1, ".": seed + 2, "..": seed + 3, "ä ö": seed + 4},
        "a": {"b": {"c.d": jnp.ones(1) * seed}, "b/c": seed, "%2F": seed},
    },
    "empty arrays and none": lambda seed: {"e": jnp.zeros((0, 3)), "n": np.zeros((2, 0)), "x": None, "s": seed},
    "numbers of Python": lambda seed: {
        "b": seed > 0, "i": -seed - 2**40, "f": seed + 0.1, "big": 2**63 - 1, "p": Phase(seed + 1)
    },
    "not finite": lambda seed: {"n": float("nan") if seed else 0.0, "i": -float("inf") * seed if seed else 0.0},
    "texts": lambda seed: {"t": f"Zürich/{seed}\n", "empty": "" if seed else "full", "s": np.str_(f"s{seed}")},
    "scalars of numpy": lambda seed: {
        name: np.dtype(name).type(seed) for name in ("float64", "float32", "int8", "uint64", "bool")
    },
    "arrays of numpy": lambda seed: {
        "f": np.arange(3.0) + seed, "b": np.array([True, seed > 0]), "big": np.arange(3, dtype=">i4") + seed,
        "strided": (np.arange(12) + seed)[::3], "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3) * seed),
        "zero dims": np.array(3.5 * seed),
    },
    "narrow dtypes": lambda seed: {
        name: (jnp.ones(3) * seed).astype(name)
        for name in ("bfloat16", "float16", "int8", "int4", "bool", "float8_e4m3fn", "complex64")
    },
    "random keys": lambda seed: {
        "one": jax.random.key(seed), "rbg": jax.random.key(seed, impl="rbg"), "old": jax.random.PRNGKey(seed),
        "many": jax.random.split(jax.random.key(seed), (2, 3)),
    },
    "masked": lambda seed: adam_of(seed, optax.masked(optax.adam(1e-3), are_matrices)),
    "injected hyperparameters": lambda seed: adam_of(seed, optax.inject_hyperparams(optax.adamw)(1e-3 * seed)),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_it_comes_back_as_it_was(tmp_path, name):
    make = STATES[name]
    state, like = make(1), make(0)
    checkpoint.save(tmp_path / "c", state)
    restored = checkpoint.restore(tmp_path / "c", like=like)
    assert jax.tree.structure(plain(restored)) == jax.tree.structure(plain(like))
    assert raw(plain(restored)) == raw(plain(state))
    assert raw(plain(like)) == raw(plain(make(0)))  # `like` is left alone


def test_the_next_random_numbers_are_those_that_would_have_come(tmp_path):
    model, other = EveryKindOfState(1), EveryKindOfState(2)
    draw = lambda model: np.asarray(model.drop(jnp.ones(64)))
    draw(model)
    checkpoint.save(tmp_path / "c", model)
    restored = checkpoint.restore(tmp_path / "c", like=other)
    assert restored.tied is restored.blocks[0]
    for _ in range(2):
        np.testing.assert_array_equal(draw(restored), draw(model))


def test_a_key_of_the_old_form_becomes_one_of_the_new_and_back(tmp_path):
    """PRNGKey's numbers are those of a typed key: one by one, stacked, over a mesh, on the host."""
    old, sharding = jax.random.split(jax.random.PRNGKey(3), 2), NamedSharding(js.mesh(), P())
    new = jax.random.wrap_key_data(old)
    checkpoint.save(tmp_path / "old", {"one": old[0], "many": old, "layers": old})
    checkpoint.save(tmp_path / "new", {"one": new[0], "many": new, "layers": new})
    keys, numbers = jnp.broadcast_to(jax.random.key(0), 2), jnp.zeros((2, 2), jnp.uint32)
    typed = {"one": jax.device_put(keys[0], sharding), "many": keys, "layers": [keys[0], keys[0]]}
    plain = {"one": jax.device_put(numbers[0], sharding), "many": np.asarray(numbers), "layers": [*numbers]}
    with pytest.warns(CheckpointWarning, match=r"4 leaves change dtype:\n  one  uint32 -> key<fry>"):
        restored = checkpoint.restore(tmp_path / "old", like=typed)
    wanted = {"one": new[0], "many": new, "layers": [*new]}
    assert raw(restored) == raw(wanted) and restored["one"].sharding == sharding
    with pytest.warns(CheckpointWarning, match=r"4 leaves change dtype:\n  one  key<fry> -> uint32"):
        restored = checkpoint.restore(tmp_path / "new", like=plain)
    assert raw(restored) == raw({"one": old[0], "many": np.asarray(old), "layers": [*old]})
    with pytest.raises(CheckpointError, match=r"one  stored \(2,\) uint32  wanted \(4,\) key<rbg>(.|\n)*impl="):
        checkpoint.restore(tmp_path / "old", like={"one": jax.random.key(0, impl="rbg")})


# What cannot be saved.


def test_deleted_arrays_are_named_at_once(tmp_path):
    donated = {"w": jnp.ones(2), "v": {"m": jnp.ones(3)}, "kept": jnp.ones(1)}
    donated["w"].delete()
    donated["v"]["m"].delete()
    with pytest.raises(CheckpointError, match="the values of 2 leaves are gone") as caught:
        checkpoint.save(tmp_path / "c", donated)
    assert caught.value.where == ("w", "v/m") and "state = step(state, batch)" in str(caught.value)


def test_what_cannot_be_asked_for_its_state_is_an_error_in_four_parts(tmp_path):
    class Position:
        def get_state(self):
            raise OSError("the data are gone")

        def set_state(self, state):
            pass

    with pytest.raises(RunError, match="the data are gone") as caught:
        checkpoint.save(tmp_path / "c", {"data": Position(), "step": 1})
    assert isinstance(caught.value.__cause__, OSError) and not list(tmp_path.iterdir())


# Parts.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("policies") / "c"
    checkpoint.save(path, adam_of(1, optax.adam(1e-3)) | {"ema": {"w": jnp.ones(3)}, "step": 1})
    return path


def state(seed=0):
    return adam_of(seed, optax.adam(1e-3)) | {"ema": {"w": jnp.zeros(3)}, "step": 0}


def from_saved(restored, own):
    """Paths of leaves that are those that were saved, out of those in which the two states differ."""
    wanted, own, found = (raw(plain(x)) for x in (state(1) | {"ema": {"w": jnp.ones(3)}, "step": 1}, own, restored))
    differ = {path for path in wanted if wanted[path] != own[path]}
    assert all(found[path] in (wanted[path], own[path]) for path in wanted)
    return {path for path in differ if found[path] == wanted[path]}, differ


def test_only_the_parameters(saved):
    own = state(2)
    taken, _ = from_saved(checkpoint.restore(saved, like=own, only="params"), own)
    assert taken == {f"['model']['blocks'][{n}]['kernel'].value" for n in range(2)}


class WithHead(NamedTuple):
    """A part of a state that holds a module."""

    head: nnx.Module
    moments: nnx.State


class Flat(NamedTuple):
    """A state as those write it who do without Flax."""

    params: dict
    opt_state: tuple


def with_parameters(x):
    """States of all kinds, every number of them `x`; and the beginnings of the paths of their parameters."""
    linear = lambda: jax.tree.map(lambda _: jnp.full(2, x), nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    w = {"w": jnp.full(2, x)}
    moments = jax.tree.map(lambda _: jnp.full((), x), optax.adamw(1e-3).init({"params": w}))
    frozen = flax.core.freeze({"params": w, "batch_stats": w})
    return {
        "Linen's variables": ({"params": w, "batch_stats": w}, {"params"}),
        "under a name": ({"model": frozen, "opt": moments, "step": x}, {"model/params"}),
        "TrainState": (TrainState(x, len, w, optax.identity(), moments), {"params"}),
        "a named tuple": ({"train": Flat(w, moments)}, {"train/params"}),
        "a module in a named tuple": (WithHead(linear(), nnx.state(linear())), {"head"}),
        "nested modules": ({"net": {"one": linear(), "two": [linear()]}, "other": w}, {"net"}),
        "nnx.State": (nnx.state(linear()), {"bias", "kernel"}),
    }


@pytest.mark.parametrize("name", with_parameters(0.0))
@pytest.mark.parametrize("is_abstract", [False, True], ids=["live", "abstract"])
def test_only_the_parameters_of_other_kinds_of_states(tmp_path, name, is_abstract):
    stored, begins = with_parameters(1.0)[name]
    like, _ = with_parameters(0.0)[name]
    if is_abstract:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x, like)
    checkpoint.save(tmp_path / "c", stored)
    warns = pytest.warns(CheckpointWarning, match="(leaf stays|leaves stay) abstract, as in `like`")
    with warns if is_abstract and name != "nnx.State" else contextlib.nullcontext():
        restored = checkpoint.restore(tmp_path / "c", like=like, only="params")
    for path, leaf in _leaves.flatten(restored).items():
        is_parameter = any(f"{_leaves.text(path)}/".startswith(f"{begin}/") for begin in begins)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            assert is_abstract and not is_parameter
        else:
            assert np.all(np.asarray(leaf) == is_parameter), path


def test_tied_parameters_go_to_both_places(tmp_path):
    """They are stored under one path: who unties them says so, and who ties them leaves the others out."""
    untied, tied = (
        nnx.Dict(a=nnx.Linear(2, 3, rngs=nnx.Rngs(n)), b=nnx.Linear(2, 3, rngs=nnx.Rngs(9))) for n in (0, 1)
    )
    tied["b"] = tied["a"]
    checkpoint.save(tmp_path / "c", {"net": tied})
    with pytest.raises(CheckpointError, match="net/b"):
        checkpoint.restore(tmp_path / "c", like={"net": untied})
    restored = checkpoint.restore(tmp_path / "c", like={"net": untied}, rename={"net/b": "net/a"})["net"]
    assert restored["a"] is not restored["b"]
    for name in "ab":
        np.testing.assert_array_equal(restored[name].kernel, tied["a"].kernel)
    checkpoint.save(tmp_path / "untied", {"net": untied})
    with pytest.warns(CheckpointWarning, match="2 stored leaves are skipped:\n  net/b/bias"):
        restored = checkpoint.restore(tmp_path / "untied", like={"net": tied}, extra="ignore")["net"]
    assert restored["a"] is restored["b"]
    np.testing.assert_array_equal(restored["a"].kernel, untied["a"].kernel)


def test_only_what_is_below_a_path(saved):
    own = state(2)
    for only, count in (("model/blocks/0", 1), ("model/blocks", 2), ("ema", 1), ("step", 1)):
        taken, _ = from_saved(checkpoint.restore(saved, like=own, only=only), own)
        assert len(taken) == count and all(only.split("/")[0] in path for path in taken), only


def test_missing_leaves_stay_and_are_listed_once(saved):
    like = {"ema": {"w": jnp.zeros(3), "new": jnp.arange(2)}, "also": 5, "step": 0}
    with pytest.raises(CheckpointError, match=r"(?s)also  stored nothing  wanted \(\).*ema/new  stored nothing"):
        checkpoint.restore(saved, like=like)
    with pytest.warns(CheckpointWarning) as reported:
        restored = checkpoint.restore(saved, like=like, missing="init")
    assert [str(x.message).partition("; ")[2] for x in reported] == [
        "2 leaves keep their values in `like`:\n  ema/new\n  also"
    ]
    assert (restored["also"], restored["step"], list(restored["ema"]["new"])) == (5, 1, [0, 1])


def test_what_is_abstract_and_missing_cannot_stay(saved):
    like = {"ema": {"w": jnp.zeros(3), "new": jax.ShapeDtypeStruct((2,), jnp.float32)}}
    with pytest.raises(CheckpointError, match=r"ema/new  abstract, and not stored"):
        checkpoint.restore(saved, like=like, missing="init")


def test_extra_leaves_are_left_out_and_listed_once(saved):
    model = nnx.Dict(blocks=EveryKindOfState(0).blocks)
    with pytest.raises(
        CheckpointError, match=r"model/norm/mean  stored \(4,\)  wanted nothing|model/norm/\.\.\.  stored 4 leaves"
    ):
        checkpoint.restore(saved, like={"model": model})
    with pytest.warns(CheckpointWarning, match="9 stored leaves are skipped:\n  model/") as reported:
        checkpoint.restore(saved, like={"model": model}, extra="ignore")
    assert len(reported) == 1


def test_an_unknown_policy_is_refused(saved):
    for options in ({"missing": "ignore"}, {"extra": "init"}):
        with pytest.raises(CheckpointError, match="it must be one of"):
            checkpoint.restore(saved, like={"step": 0}, **options)


# Dtypes.


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (jnp.ones(2), jnp.ones(2, int)),
        (1.5, 0),
        ("a", 0),
        (jnp.ones(2, bool), jnp.ones(2)),
        (jax.random.key(0), jax.random.key(0, impl="rbg")),
    ],
)
def test_no_value_is_lost_by_a_change_of_dtype(tmp_path, stored, wanted):
    checkpoint.save(tmp_path / "c", {"x": stored})
    with pytest.raises(CheckpointError, match=r"x  stored .* wanted"):
        checkpoint.restore(tmp_path / "c", like={"x": wanted})


def test_numbers_and_arrays_without_dims_stand_for_each_other(tmp_path):
    checkpoint.save(tmp_path / "c", {"a": 3, "b": jnp.int32(4), "c": 0.5, "d": np.float32(2)})
    like = {"a": jnp.int32(0), "b": 0, "c": jnp.float32(0), "d": 0.0}
    restored = checkpoint.restore(tmp_path / "c", like=like)
    assert raw(restored) == raw({"a": jnp.int32(3), "b": 4, "c": jnp.float32(0.5), "d": 2.0})


def test_floating_dtypes_change_and_are_listed_once(tmp_path):
    values = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    sharding = NamedSharding(js.mesh(), P("fsdp"))
    state = {"a": jax.device_put(values, sharding), "b": values.astype(np.float64), "i": np.arange(3, dtype=np.int8)}
    checkpoint.save(tmp_path / "c", state)
    like = {"a": jax.device_put(jnp.zeros((8, 16), jnp.bfloat16), sharding)}
    like |= {"b": jnp.zeros((8, 16)), "i": jnp.zeros(3, jnp.int32)}
    with pytest.warns(CheckpointWarning) as reported:
        restored = checkpoint.restore(tmp_path / "c", like=like)
    assert [str(x.message).partition("; ")[2] for x in reported] == [
        "3 leaves change dtype:\n  a  float32 -> bfloat16\n  b  float64 -> float32\n  i  int8 -> int32"
    ]
    np.testing.assert_array_equal(restored["a"], values.astype(jnp.bfloat16))
    np.testing.assert_array_equal(restored["b"], values)
    assert restored["a"].sharding == sharding
    assert {k: x.dtype for k, x in restored.items()} == {k: x.dtype for k, x in like.items()}


# Meshes that are active, and kinds of axes.


@pytest.mark.parametrize("active", ["none", "another"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_the_mesh_that_is_active_does_not_matter(tmp_path, kind, active):
    names = ("x", "fsdp"), ("y", "z")
    mesh, other = (Mesh(np.array(jax.devices()).reshape(2, 4), pair, axis_types=(kind,) * 2) for pair in names)
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    sharding, stacked = NamedSharding(mesh, P("fsdp", "x")), NamedSharding(mesh, P(None, "fsdp", "x"))
    lay = lambda x: jax.device_put(x, stacked if x.ndim == 3 else sharding)
    two = np.stack([values, values + 1])
    state = {"w": lay(values), "cast": lay(values), "layers": [*map(lay, two)], "stack": lay(two), "step": 1}
    state |= {"key": jax.random.key(1)}
    like = {"w": lay(0 * values), "cast": lay(jnp.zeros((8, 8), jnp.bfloat16)), "layers": lay(0 * two), "step": 0}
    like |= {"stack": [*map(lay, 0 * two)], "key": jax.random.key(0)}
    with jax.set_mesh(other) if active != "none" else contextlib.nullcontext():
        checkpoint.save(tmp_path / "c", state)
        with pytest.warns(CheckpointWarning, match="1 leaf changes dtype"):
            restored = checkpoint.restore(tmp_path / "c", like=like)
    np.testing.assert_array_equal(restored["w"], values)
    np.testing.assert_array_equal(restored["cast"], values.astype(jnp.bfloat16))
    np.testing.assert_array_equal(restored["layers"], two)
    np.testing.assert_array_equal(np.stack([*map(np.asarray, restored["stack"])]), two)
    assert jax.random.key_data(restored["key"]).tolist() == jax.random.key_data(state["key"]).tolist()
    for a, b in zip(*(jax.tree.leaves({**tree, "key": 0}) for tree in (restored, like)), strict=True):
        assert isinstance(a, int) or a.sharding == b.sharding
