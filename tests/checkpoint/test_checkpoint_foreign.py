"""What other libraries wrote restores, sharded over eight devices: plain Orbax, PyTorch's DCP, safetensors, GPT-2."""

import dataclasses
import functools
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax_v0
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as orbax_v1

import jshard as js
from jshard.checkpoint import CheckpointError, CheckpointWarning
from jshard.checkpoint.formats import write_safetensors
from jshard.checkpoint.readers import own_checkpoint
from jshard.train import load_model_file
from tests.checkpoint.checkpoint_states import Held
from tests.checkpoint.dcp_fixture import put_archive, split, write_dcp
from tests.micro_gpt import MODELS, micro

GPT = load_model_file(MODELS / "gpt.py")
W = np.arange(64 * 6, dtype=np.float32).reshape(64, 6)
B = np.arange(16, dtype=np.float32).astype(jnp.bfloat16)


def sharded(x):
    return jax.device_put(x, jax.sharding.NamedSharding(js.mesh(), jax.sharding.PartitionSpec("fsdp")))


def like():
    """A state of other values, over eight devices."""
    return {"layer": {"w": sharded(np.zeros_like(W)), "b": sharded(np.zeros_like(B))}}


def check(restored):
    for name, wanted in (("w", W), ("b", B)):
        found = restored["layer"][name]
        assert found.dtype == wanted.dtype and found.sharding == like()["layer"][name].sharding
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


PARAMS = {"dense": {"kernel": np.full((8, 4), 1.0, np.float32), "bias": np.full(8, 1.0, np.float32)}}
EMA = jax.tree.map(lambda x: x + 4, PARAMS)
OPT = {"mu": jax.tree.map(lambda x: x + 1, PARAMS), "nu": jax.tree.map(lambda x: x + 2, PARAMS), "count": np.int32(7)}


def write_composite(path, layout, **items):
    """Trees side by side, as Orbax's own users write them; returns the folder of the checkpoint."""
    items = jax.tree.map(jnp.asarray, items)
    if layout == "v1":
        orbax_v1.save_checkpointables(str(path), items)
        return path
    args = orbax_v0.args
    save = args.StandardSave if layout == "v0 StandardSave" else args.PyTreeSave
    with orbax_v0.CheckpointManager(path) as manager:
        saved = {name: save(item) for name, item in items.items()}
        manager.save(1, args=args.Composite(**saved, notes=args.JsonSave({"step": 3})))
        manager.wait_until_finished()
    return path / "1"


LAYOUTS = ["v0 PyTreeSave", "v1"]


def zeros(tree):
    return jax.tree.map(sharded, jax.tree.map(np.zeros_like, tree))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tree_of_a_composite_is_read_by_its_name(tmp_path, layout):
    for name, items in {"a": {"params": PARAMS, "ema_params": EMA}, "b": {"params": PARAMS, "opt": OPT}}.items():
        path = write_composite(tmp_path / name, layout, **items)
        like = jax.tree.map(lambda x: sharded(np.zeros_like(x)) if x.ndim else np.zeros_like(x), items)
        with pytest.warns(CheckpointWarning, match="no checksums"):
            restored = js.checkpoint.restore(path, like)
        jax.tree.map(np.testing.assert_array_equal, restored, items)
        assert restored["params"]["dense"]["kernel"].sharding == like["params"]["dense"]["kernel"].sharding
        for item in items:  # one of them, out of the checkpoint and as a folder of its own
            with pytest.warns(CheckpointWarning, match="no checksums"):
                one = js.checkpoint.restore(path, {item: like[item]})[item]
            with pytest.warns(CheckpointWarning, match="no checksums"):
                alone = js.checkpoint.restore(path / item, like[item])
            jax.tree.map(np.testing.assert_array_equal, one, items[item])
            jax.tree.map(np.testing.assert_array_equal, alone, items[item])


def test_a_composite_is_never_read_as_one_of_its_trees(tmp_path):
    """The advice names the trees that fit, and no moments among them."""
    both = write_composite(tmp_path / "both", "v1", params=PARAMS, ema_params=EMA)
    with pytest.raises(CheckpointError, match="Several stored trees have these leaves") as caught:
        js.checkpoint.restore(both, {"model": zeros(PARAMS)})
    found = [f'restore(path, like, rename={{"model": "{name}"}})' for name in ("ema_params", "params")]
    assert sorted(caught.value.do.splitlines()[1:]) == found
    adam = write_composite(tmp_path / "adam", "v1", params=PARAMS, opt=OPT)
    with pytest.raises(CheckpointError, match='the leaves are stored under "params"'):
        js.checkpoint.restore(adam, zeros(PARAMS))


def test_no_advice_leads_from_parameters_to_moments(tmp_path):
    """Adam's have the tree of the parameters: they fit, and restoring them would be wrong silently."""
    orbax_v1.save(str(tmp_path / "opt"), jax.tree.map(jnp.asarray, OPT))
    orbax_v1.save(str(tmp_path / "sgd"), jax.tree.map(jnp.asarray, {"trace": PARAMS}))
    orbax_v1.save(str(tmp_path / "two"), jax.tree.map(jnp.asarray, {"a": PARAMS, "b": EMA, **OPT}))
    for name in ("opt", "sgd"):
        for like in ({"params": zeros(PARAMS)}, zeros(PARAMS), {"state": {"params": zeros(PARAMS)}}):
            with pytest.raises(CheckpointError, match="leaves differ") as caught:
                js.checkpoint.restore(tmp_path / name, like, extra="ignore")
            assert "rename" not in caught.value.do and "stored under" not in caught.value.do
    with pytest.raises(CheckpointError, match="Several stored trees have these leaves") as caught:
        js.checkpoint.restore(tmp_path / "two", {"params": zeros(PARAMS)})
    lines = caught.value.do.splitlines()
    assert lines[1:] == [f'restore(path, like, rename={{"params": "{name}"}})' for name in "ab"]


def test_a_composite_in_a_composite_is_read_by_the_names_of_both(tmp_path):
    """And a tree may have a leaf that is called as its item: Orbax was asked for a leaf without a name."""
    bias = {"bias": PARAMS["dense"]["bias"]}
    save = orbax_v0.args.StandardSave
    with orbax_v0.Checkpointer(orbax_v0.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "inner", args=orbax_v0.args.Composite(params=save(PARAMS), ema=save(EMA)))
        checkpointer.save(tmp_path / "c", args=orbax_v0.args.Composite(bias=save(bias)))
    (tmp_path / "inner").rename(tmp_path / "c" / "outer")
    (tmp_path / "c" / "outer" / "_CHECKPOINT_METADATA").unlink()  # Orbax writes none there
    whole = {"outer": {"params": PARAMS, "ema": EMA}, "bias": bias}
    for part in (whole, {"outer": whole["outer"]}, {"bias": bias}):
        with pytest.warns(CheckpointWarning, match="no checksums"):
            jax.tree.map(np.testing.assert_array_equal, js.checkpoint.restore(tmp_path / "c", zeros(part)), part)


def test_one_tree_beside_notes_is_read_as_it_is(tmp_path):
    path = write_composite(tmp_path / "c", "v0 StandardSave", params=PARAMS)
    for like, wanted in ((zeros(PARAMS), PARAMS), (zeros({"params": PARAMS}), {"params": PARAMS})):
        with pytest.warns(CheckpointWarning, match="no checksums"):
            jax.tree.map(np.testing.assert_array_equal, js.checkpoint.restore(path, like), wanted)
    with pytest.raises(CheckpointError, match="it is part of a checkpoint, not a whole one") as caught:
        js.checkpoint.restore(path / "notes", zeros(PARAMS))
    assert caught.value.do == f'restore("{path}", like=...)'


@pytest.mark.parametrize("stored", ["new", "old"])
def test_random_keys_by_plain_orbax(tmp_path, stored):
    """Its description does not distinguish  from numbers; both restore into both."""
    keys = {"new": jax.random.key(3), "old": jax.random.PRNGKey(3)}
    orbax_v1.save(str(tmp_path / "c"), {"key": keys[stored]})
    for wanted in keys.values():
        wanted = jax.device_put(wanted, NamedSharding(js.mesh(), P()))
        with pytest.warns(CheckpointWarning, match="no checksums"):
            restored = js.checkpoint.restore(tmp_path / "c", {"key": jax.tree.map(lambda x: x, wanted)})["key"]
        assert restored.dtype == wanted.dtype and restored.sharding == wanted.sharding
        as_numbers = lambda x: np.asarray(jax.random.key_data(x) if x.dtype != np.uint32 else x)
        np.testing.assert_array_equal(as_numbers(restored), [0, 3])


def test_safetensors(tmp_path):
    leaves = Held({"layer.w": W, "layer.b": B})
    write_safetensors(tmp_path / "c", leaves, max_shard_bytes=W.nbytes)  # two files and their index
    reported = js.checkpoint.forecast(tmp_path / "c", {"net": like()})
    assert (reported.wanted_bytes, reported.touched_bytes) == (W.nbytes + B.nbytes,) * 2
    check(js.checkpoint.restore(tmp_path / "c", like()))
    with pytest.raises(CheckpointError, match=r"layer/c  stored nothing  wanted \(2,\)"):
        js.checkpoint.restore(tmp_path / "c", {"layer": {**like()["layer"], "c": jnp.zeros(2)}})


def test_dcp_with_its_values(tmp_path):
    write_dcp(tmp_path / "c", tensors={"layer.w": split(W, 2), "layer.b": split(B, 2)}, values={"step": 7, "name": "x"})
    restored = js.checkpoint.restore(tmp_path / "c", {**like(), "step": 0})
    check(restored)
    assert restored["step"] == 7


def test_a_value_of_dcp_is_unpickled_when_it_is_asked_for(tmp_path):
    """One that names what is not allowed is left where it is; and that is reported to the one who asks for it."""
    write_dcp(tmp_path / "c", {"layer.w": split(W, 2), "layer.b": split(B, 2)}, {"step": 7, "bad": 0, "list": [1]})
    put_archive(tmp_path / "c", "bad", {"archive/data.pkl": pickle.dumps(os.system)})
    assert js.checkpoint.restore(tmp_path / "c", {**like(), "step": 0})["step"] == 7
    rename = {"model": ""}
    with pytest.warns(CheckpointWarning, match="3 stored leaves are skipped:\n  step\n  bad\n  list"):
        check(js.checkpoint.restore(tmp_path / "c", {"model": like()}, rename=rename, extra="ignore")["model"])
    with pytest.raises(CheckpointError, match="bad  stored a value  wanted nothing"):
        js.checkpoint.restore(tmp_path / "c", {"model": like()})
    with pytest.raises(CheckpointError, match="names something that may run code"):
        js.checkpoint.restore(tmp_path / "c", {**like(), "bad": 0})
    with pytest.raises(CheckpointError, match="list  stored nothing"):  # no number, no text
        js.checkpoint.restore(tmp_path / "c", {**like(), "list": 0})


def test_two_names_of_one_path_are_distinguished_by_the_user(tmp_path):
    write_safetensors(tmp_path / "c", Held({"layer.w": W, "layer/w": W}))
    with pytest.raises(CheckpointError, match=r"layer.w  and layer/w: layer/w"):
        js.checkpoint.restore(tmp_path / "c", {"layer": {"w": jnp.asarray(W)}})
    with pytest.warns(CheckpointWarning, match="1 stored leaf is skipped:\n  layer/w"):
        restored = js.checkpoint.restore(tmp_path / "c", {"m": {"w": W * 0}}, names={"w": "layer.w"}, extra="ignore")
    np.testing.assert_array_equal(restored["m"]["w"], W)


def stored_name(name):
    return name if isinstance(name, str) else name.names[0]


def test_gpt2_weights_under_their_names(tmp_path):
    """Exported under Hugging Face's names and read back into a stack of blocks: every parameter."""
    config = dataclasses.replace(micro().model, positions="learned")
    model, names = GPT.build(config, nnx.Rngs(0)), GPT.hf_names(config)
    stored = {
        "/".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    theirs = {path: x.reshape(*x.shape[:-2], -1) if "qkv" in path else x for path, x in stored.items()}
    write_safetensors(tmp_path / "c", Held({stored_name(names[path]): x for path, x in theirs.items()}))

    build = lambda: GPT.build(dataclasses.replace(config, scan=True), nnx.Rngs(1))
    wanted = js.shard_init(build, lambda model: GPT.annotate(model, js.mesh()))
    restored = js.checkpoint.restore(tmp_path / "c", {"model": wanted}, only="params", names=names)["model"]
    found = nnx.to_flat_state(nnx.state(restored, nnx.Param))
    assert len(found) == (len(stored) - 4) // 2 + 4
    for path, x in found:
        keys = list(map(str, path))
        in_stack = keys[0] == "blocks"
        layers = [stored["/".join([keys[0], n, *keys[1:]] if in_stack else keys)] for n in ("01" if in_stack else "0")]
        np.testing.assert_array_equal(x[...], np.stack(layers) if len(layers) > 1 else layers[0])
        assert x[...].sharding.mesh.shape["fsdp"] == 8


def test_plain_orbax_with_lists_and_tuples(tmp_path):
    """As every state of Optax has them: all of it, or one part."""
    state = {
        "params": {"w": jnp.asarray(W)},
        "opt": optax.adam(1e-3).init({"w": jnp.asarray(W)}),
        "lists": [jnp.ones(2)],
    }
    orbax_v1.save(str(tmp_path / "c"), state)
    zeros = jax.tree.map(lambda x: x * 0, state)
    with pytest.warns(CheckpointWarning, match="no checksums"):
        restored = js.checkpoint.restore(tmp_path / "c", zeros)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    with pytest.warns(CheckpointWarning, match="no checksums"):
        part = js.checkpoint.restore(tmp_path / "c", {"params": zeros["params"]})
    np.testing.assert_array_equal(part["params"]["w"], W)


@pytest.mark.parametrize("layout", ["v1", "v0 PyTreeCheckpointer"])
def test_plain_orbax_with_dots_and_slashes_in_its_keys(tmp_path, layout):
    """Orbax writes them as they are; by box, too, as the tools read."""
    keys = {"a.b": 0, "c": {"d/e": 1, "%": 2}, "c/f": {"g.": 3, "0": 4}, "plain": 5}
    state = jax.tree.map(lambda n: jnp.arange(4.0) + n, keys)
    if layout == "v1":
        orbax_v1.save(str(tmp_path / "c"), state)
    else:
        with orbax_v0.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
            checkpointer.save(tmp_path / "c", state)
    with pytest.warns(CheckpointWarning, match="^[^;]*; it has no checksums[^;]*$"):
        restored = js.checkpoint.restore(tmp_path / "c", jax.tree.map(jnp.zeros_like, state))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    with pytest.raises(CheckpointError, match=r"a%2Eb  stored \(4,\)  wanted \(3,\)"):
        js.checkpoint.restore(tmp_path / "c", {"a.b": jnp.zeros(3)})
    source = own_checkpoint(tmp_path / "c")
    assert source.read("a%2Eb", (slice(1, 3),)).tolist() == [1, 2]
    assert source.read("c/f/g%2E", (slice(1, 3),)).tolist() == [4, 5]


def test_one_name_that_is_stored_is_meant(tmp_path):
    """Without it the path would be empty: it is left out where nothing there begins with it."""
    write_safetensors(tmp_path / "c", Held({"a.b": W}))
    write_safetensors(tmp_path / "d", Held({"w": W}))
    for path, like in (("c", {"a": {"b": W * 0}}), ("c", {"m": {"a": {"b": W * 0}}}), ("d", {"w": W * 0})):
        np.testing.assert_array_equal(jax.tree.leaves(js.checkpoint.restore(tmp_path / path, like))[0], W)


def test_a_leaf_that_is_wanted_twice_is_two_arrays(tmp_path):
    js.checkpoint.save(tmp_path / "c", {"model": {"w": jnp.asarray(W)}})
    like = {"model": {"w": jnp.asarray(W)}, "ema": {"w": jnp.asarray(W)}}
    restored = js.checkpoint.restore(tmp_path / "c", like, rename={"ema": "model"})
    assert restored["model"]["w"].unsafe_buffer_pointer() != restored["ema"]["w"].unsafe_buffer_pointer()
    np.testing.assert_array_equal(restored["ema"]["w"], W)


@pytest.mark.parametrize("wanted", [False, jnp.zeros((), bool)], ids=["bool", "array"])
def test_a_number_is_no_truth_value(tmp_path, wanted):
    """Of 5 a restore made True."""
    js.checkpoint.save(tmp_path / "c", {"five": 5, "yes": True, "one": 1})
    with pytest.raises(CheckpointError, match=r"(?s)A stored number does not fit.*five  5.*wants it as bool"):
        js.checkpoint.restore(tmp_path / "c", {"five": wanted})
    assert all(js.checkpoint.restore(tmp_path / "c", {"yes": wanted, "one": wanted}).values())


OVERFLOWS = {
    "float8": (np.float32, jnp.float8_e4m3fn, 1e6),
    "float16": (jnp.bfloat16, jnp.float16, 1e6),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_values_that_overflow_in_the_dtype_of_like_are_reported(tmp_path, name):
    """Beside the warning of the cast, which says nothing of them; values that were infinite stay so silently."""
    stored, wanted, large = OVERFLOWS[name]
    rows = np.stack([np.full(8, 1.0), np.full(8, large), np.full(8, np.inf)]).astype(stored)
    layers = {str(n): row for n, row in enumerate(rows)}
    js.checkpoint.save(tmp_path / "c", {"x": sharded(rows.T), "layers": layers})
    host = lambda shape: np.zeros(shape, wanted)
    for make in (host, lambda shape: jax.device_put(host(shape), NamedSharding(js.mesh(), P()))):
        with pytest.warns(CheckpointWarning) as warned:
            js.checkpoint.restore(tmp_path / "c", {"x": make((8, 3)), "layers": make((3, 8))})
        assert len(warned) == 2
        lines = str(warned[1].message).splitlines()
        dtypes = f"{np.dtype(stored).name} -> {np.dtype(wanted).name}"
        assert lines[1:] == [f"  {path}  {dtypes}: 8 values became inf or nan" for path in ("layers", "x")]
        assert warned[1].filename == __file__
    with pytest.warns(CheckpointWarning, match="change dtype") as warned:
        js.checkpoint.restore(tmp_path / "c", {"layers": {n: host(8) for n in "02"}}, extra="ignore")
    assert not [w for w in warned if "too large" in str(w.message)]


def test_keys_that_are_written_alike_and_keys_that_cannot_be_sorted(tmp_path):
    """1 and "1" beside each other, at the top and below it: JAX takes no such dict apart."""
    state = {1: W, "1": W + 1, "s": {1: W + 2, "1": {2: W + 3, "b": [W + 4]}, "'": W + 5}}
    js.checkpoint.save(tmp_path / "c", state)
    restored = js.checkpoint.restore(tmp_path / "c", state)
    assert [*restored] == [*state] and [*restored["s"]] == [1, "1", "'"]
    for path in ([1], ["1"], ["s", 1], ["s", "1", 2], ["s", "1", "b", 0], ["s", "'"]):
        ours, theirs = functools.reduce(lambda node, key: node[key], path, state), restored
        for key in path:
            theirs = theirs[key]
        np.testing.assert_array_equal(ours, theirs)


def test_a_number_that_does_not_fit_is_an_error(tmp_path):
    js.checkpoint.save(tmp_path / "c", {"tokens": 5_000_000_000})
    write_dcp(tmp_path / "d", {"w": split(W, 1)}, {"tokens": 2**70})
    for name in "cd":
        for wanted in (jnp.int32(0), np.zeros((), np.int32)):
            with pytest.raises(CheckpointError, match=r"A stored number does not fit\.\n  where: tokens"):
                js.checkpoint.restore(tmp_path / name, {"tokens": wanted})
