"""Values that are no arrays come back as they were: enums, keys of dict-like nodes, numbers that a dtype can hold."""

import enum
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning
from jshard.checkpoint.state.leaves import flatten, text

# ---- Enums and other subclasses of plain values --------------------------------------------------------


class Phase(str, enum.Enum):  # noqa: UP042  # as people write it, and its `str` is not its value
    WARM = "warm"
    MAIN = "main"


class Text(enum.StrEnum):
    A = "a"
    B = "b"


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Rate(float, enum.Enum):
    LOW = 0.125
    HIGH = 0.5


class Flags(enum.IntFlag):
    X = 1
    Y = 2


class Plain(enum.Enum):
    COLD = "cold"
    HOT = 7
    MILD = 0.5


class Loud(str):
    def __str__(self):
        return f"{super().__str__()}!"


MEMBERS = {
    "str": (Phase.MAIN, Phase.WARM, "main"),
    "StrEnum": (Text.B, Text.A, "b"),
    "IntEnum": (Number.TWO, Number.ONE, 2),
    "float": (Rate.HIGH, Rate.LOW, 0.5),
    "IntFlag": (Flags.X | Flags.Y, Flags.X, 3),
    "plain, text": (Plain.COLD, Plain.HOT, "cold"),
    "plain, int": (Plain.HOT, Plain.HOT, 7),
    "a subclass of str": (Loud("x"), Loud(""), "x"),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_of_an_enum_is_stored_as_its_value_and_restored_as_the_member(tmp_path, name):
    member, other, value = MEMBERS[name]
    js.checkpoint.save(tmp_path / "c", {"phase": member, "x": jnp.ones(2)})
    plain = js.checkpoint.restore(tmp_path / "c", like={"phase": type(value)(), "x": jnp.ones(2)})["phase"]
    assert plain == value and type(plain) is type(value)
    if not (name.startswith("plain") and type(member.value) is not type(other.value)):
        again = js.checkpoint.restore(tmp_path / "c", like={"phase": other, "x": jnp.ones(2)})["phase"]
        assert again == member and type(again) is type(member)


def test_an_enum_whose_value_is_no_data_is_refused_when_it_is_saved(tmp_path):
    odd = enum.Enum("odd", {"A": (1, 2)})
    with pytest.raises(CheckpointError, match=r"1 leaf is not data\.\n  where: phase  a odd"):
        js.checkpoint.save(tmp_path / "c", {"phase": odd.A})


def test_a_text_enum_that_an_earlier_version_stored_by_its_name_is_restored(tmp_path):
    js.checkpoint.save(tmp_path / "c", {"phase": "Phase.MAIN"})
    assert js.checkpoint.restore(tmp_path / "c", like={"phase": Phase.WARM})["phase"] is Phase.MAIN


def test_a_value_that_is_no_member_is_an_error_with_its_path(tmp_path):
    js.checkpoint.save(tmp_path / "c", {"a": {"phase": "cool", "number": 3}})
    for like in ({"phase": Phase.WARM, "number": 0}, {"phase": "", "number": Number.ONE}):
        with pytest.raises(CheckpointError, match="cannot be given the type") as caught:
            js.checkpoint.restore(tmp_path / "c", like={"a": like})
        assert caught.value.where[0].startswith(("a/phase  stored 'cool'", "a/number  stored 3"))


# ---- Nodes that JAX numbers ------------------------------------------------------------------------------


class Table(Mapping):
    """A dict of a library's own, registered without keys."""

    def __init__(self, items):
        self.items_ = dict(items)

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


class Sorted(Table):
    """The same, flattened in the order of its keys."""


class Bag:
    """No mapping, but it keeps its keys beside its children."""

    def __init__(self, **items):
        self.__dict__.update(items)


class Pair:
    """Numbered by right: its children have no keys."""

    def __init__(self, first, second):
        self.both = [first, second]


def in_order(node):
    return tuple(node.values()), tuple(node)


def by_key(node):
    keys = sorted(node)
    return tuple(node[key] for key in keys), (tuple(keys), "static")


jax.tree_util.register_pytree_node(Table, in_order, lambda keys, values: Table(zip(keys, values, strict=True)))
jax.tree_util.register_pytree_node(Sorted, by_key, lambda aside, values: Sorted(zip(aside[0], values, strict=True)))
jax.tree_util.register_pytree_node(
    Bag,
    lambda bag: (tuple(vars(bag).values()), tuple(vars(bag))),
    lambda keys, values: Bag(**dict(zip(keys, values, strict=True))),
)
jax.tree_util.register_pytree_node(Pair, lambda pair: (pair.both, None), lambda _, both: Pair(*both))


def bag(items):
    return Bag(**items)


@pytest.mark.parametrize("make", [Table, Sorted, bag])
def test_dict_like_nodes_without_keys_are_restored_by_key(tmp_path, make):
    values = {"b": jnp.full(2, 1.0), "a": jnp.full(2, 2.0), "deep": {"c": make({"y": jnp.ones(3), "x": jnp.zeros(3)})}}
    turned = {key: values[key] for key in ("deep", "a", "b")}
    turned["deep"] = {"c": make({"x": jnp.ones(3), "y": jnp.ones(3)})}
    js.checkpoint.save(tmp_path / "c", {"state": [make(values)]})
    found = js.checkpoint.restore(tmp_path / "c", like={"state": [make(turned)]})["state"][0]
    assert type(found) is type(make(values)) and list(vars(found)) == list(vars(make(turned)))
    get = found.__getitem__ if isinstance(found, Table) else vars(found).__getitem__
    inner = get("deep")["c"]
    inner = inner.items_ if isinstance(inner, Table) else vars(inner)
    assert get("a").tolist() == [2.0, 2.0] and get("b").tolist() == [1.0, 1.0]
    assert inner["x"].tolist() == [0.0] * 3 and inner["y"].tolist() == [1.0] * 3
    with pytest.raises(CheckpointError, match=r"1 leaf differs|2 leaves differ"):
        js.checkpoint.restore(tmp_path / "c", like={"state": [make({**values, "b2": values["b"]})]})


def test_dict_like_nodes_hold_parameters_and_optimizer_state(tmp_path):
    params = Table({"w": jnp.arange(8.0), "b": jnp.ones(8)})
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    paths = sorted(map(text, flatten(state)))
    assert {"params/w", "params/b", "opt_state/0/mu/w", "opt_state/0/nu/b"} <= set(paths)
    js.checkpoint.save(tmp_path / "c", state)
    other = Table({"b": jnp.zeros(8), "w": jnp.zeros(8)})
    like = {"params": other, "opt_state": optax.adam(1e-3).init(other)}
    found = js.checkpoint.restore(tmp_path / "c", like=like)
    np.testing.assert_array_equal(found["params"]["w"], params["w"])
    only = js.checkpoint.restore(tmp_path / "c", like=like, only="params")
    np.testing.assert_array_equal(only["params"]["b"], params["b"])


class Heads(nnx.Module):
    def __init__(self, order):
        heads = {name: nnx.Param(jnp.full(2, float(ord(name)))) for name in order}
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
        self.heads = nnx.data({"inner": Table(heads)})


def test_dict_like_nodes_in_a_module_are_restored_by_key(tmp_path):
    model = Heads("ba")
    js.checkpoint.save(tmp_path / "c", {"model": model})
    assert "model/heads/inner/a" in map(text, flatten({"model": model}))
    for options in ({}, {"only": "params"}):
        found = js.checkpoint.restore(tmp_path / "c", like={"model": Heads("ab")}, **options)["model"]
        heads = found.heads["inner"]
        assert heads["a"][0] == ord("a") and heads["b"][0] == ord("b") and list(heads) == ["a", "b"]


def test_nodes_without_keys_keep_their_numbers(tmp_path):
    js.checkpoint.save(tmp_path / "c", {"pair": Pair(1.0, 2.0)})
    assert [text(path) for path in flatten({"pair": Pair(1.0, 2.0)})] == ["pair/0", "pair/1"]
    assert js.checkpoint.restore(tmp_path / "c", like={"pair": Pair(0.0, 0.0)})["pair"].both == [1.0, 2.0]


def test_dict_like_nodes_of_earlier_checkpoints_are_restored_by_number_with_a_warning(tmp_path):
    js.checkpoint.save(tmp_path / "c", {"state": {"0": jnp.ones(2), "1": jnp.zeros(3)}})  # as it was stored
    like = {"state": Table({"b": jnp.zeros(2), "a": jnp.ones(3)})}
    with pytest.warns(CheckpointWarning, match="stored by number, and read in the order of `like`") as caught:
        found = js.checkpoint.restore(tmp_path / "c", like=like)["state"]
    assert "state/b  stored as state/0" in str(caught[0].message)
    assert found["b"].tolist() == [1.0, 1.0] and found["a"].tolist() == [0.0] * 3


# ---- Numbers -----------------------------------------------------------------------------------------------

FITS = {
    "float32": (16_777_216, jnp.float32(0)),
    "bfloat16": (256, jnp.bfloat16(0)),
    "float16": (2048, jnp.float16(0)),
    "float8": (16, jnp.float8_e4m3fn(0)),
    "complex64": (3, jnp.complex64(0)),
    "int8": (-128, jnp.int8(0)),
    "uint8": (255, jnp.uint8(0)),
    "bool": (True, jnp.bool_(False)),
    "host float64": (2**53, np.float64(0)),
    "Python float": (2**53, 0.0),
    "Python bool": (1, False),
}
DOES_NOT = {
    "float32": (16_777_217, jnp.float32(0)),
    "float32, large": (2**53 + 1, jnp.float32(0)),
    "bfloat16": (257, jnp.bfloat16(0)),
    "float16": (2049, jnp.float16(0)),
    "float16, infinite": (70_000, jnp.float16(0)),
    "float8": (17, jnp.float8_e4m3fn(0)),
    "complex64": (16_777_217, jnp.complex64(0)),
    "int8": (128, jnp.int8(0)),
    "uint8": (-1, jnp.uint8(0)),
    "bool": (2, jnp.bool_(False)),
    "host float64": (2**53 + 1, np.float64(0)),
    "Python float": (2**53 + 1, 0.0),
    "Python bool": (2, False),
    "an array into a Python float": (np.asarray(2**53 + 1), 0.0),
    "unsigned into a Python float": (np.asarray(2**64 - 1, np.uint64), 0.0),
}


@pytest.mark.parametrize("name", FITS)
def test_an_integer_is_restored_into_any_dtype_that_has_it(tmp_path, name):
    value, like = FITS[name]
    js.checkpoint.save(tmp_path / "c", {"x": value})
    found = js.checkpoint.restore(tmp_path / "c", like={"x": like})["x"]
    assert found == value and (type(found) is type(like) or found.dtype == like.dtype)


@pytest.mark.parametrize("name", DOES_NOT)
def test_an_integer_that_a_dtype_cannot_hold_is_refused_and_not_rounded(tmp_path, name):
    value, like = DOES_NOT[name]
    js.checkpoint.save(tmp_path / "c", {"x": value})
    with pytest.raises(CheckpointError, match="A stored number does not fit") as caught:
        js.checkpoint.restore(tmp_path / "c", like={"x": like})
    assert caught.value.where[0].startswith("x  ")


KINDS = {
    "float into int": (0.5, 0),
    "float into an int array": (1.0, jnp.int32(0)),
    "float into bool": (1.0, False),
    "float into a bool array": (1.0, jnp.bool_(False)),
    "a bool array into float": (jnp.bool_(True), 0.0),
    "a bool array into int": (jnp.bool_(True), 0),
    "complex into float": (jnp.complex64(1j), 0.0),
    "a text into int": ("1", 0),
    "int into a text": (1, ""),
    "a key into int": (jax.random.key(0), 0),
}


@pytest.mark.parametrize("name", KINDS)
def test_values_of_other_kinds_are_refused_as_arrays_of_them_are(tmp_path, name):
    value, like = KINDS[name]
    js.checkpoint.save(tmp_path / "c", {"x": value})
    with pytest.raises(CheckpointError, match=r"does not fit: 1 leaf differs(.|\n)*x  stored"):
        js.checkpoint.restore(tmp_path / "c", like={"x": like})


def test_an_integer_of_more_than_64_bits_is_refused_when_it_is_saved(tmp_path):
    for value in (2**63, -(2**63) - 1, 2**70):
        with pytest.raises(CheckpointError, match=r"x  an int of \d+ bits"):
            js.checkpoint.save(tmp_path / "c", {"x": value})
