"""Layers that were saved stacked for a scan restore into layers one by one, and back: model, optimizer and keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard import checkpoint
from jshard.api.optimizer import abstract_optimizer
from jshard.checkpoint import CheckpointError
from tests.micro_gpt import annotate, build, micro
from tests.wide import wide

CONFIG = dataclasses.replace(micro().model, vocab_size=64, d_model=32, d_ff=64, n_layer=3, dropout=0.1)


def like(scan, mesh=None, **changes):
    """A GPT and its optimizer without arrays."""
    config = dataclasses.replace(CONFIG, scan=scan, **changes)
    mesh = mesh or js.mesh()
    model = js.abstract_init(lambda: build(config, nnx.Rngs(0)), lambda model: annotate(model, mesh))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {"model": model, "optimizer": abstract_optimizer(model, tx), "step": 0}


def drawn(state, seed=0):
    """The state with a random number in every place."""
    draw = np.random.default_rng(seed)
    filled = {}
    for name in state.keys() - {"step"}:
        graphdef, shapes = nnx.split(state[name])
        filled[name] = nnx.merge(graphdef, jax.tree.map(lambda x: random(draw, x), shapes))
    return filled | {"step": 3}


def random(draw, leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(draw.integers(0, 2**32, (*leaf.shape, 2), np.uint32)))
    values = draw.standard_normal(leaf.shape) * 100
    return jax.device_put(values.astype(leaf.dtype), leaf.sharding)


def leaves(state):
    """Every leaf by path as plain numbers, layers one by one."""
    found = {}
    for name in state.keys() - {"step"}:
        for path, variable in nnx.to_flat_state(nnx.state(state[name])):
            leaf, path = variable.get_raw_value(), (name, *map(str, path))
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            values = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
            place = path.index("blocks") + 1 if "blocks" in path else None
            if place is None or path[place].isdecimal():
                found[path] = values
            else:
                found |= {(*path[:place], str(n), *path[place:]): layer for n, layer in enumerate(values)}
    return found


def assert_equal(found, wanted):
    found, wanted = leaves(found), leaves(wanted)
    assert {path[0] for path in found} == {"model", "optimizer"}
    assert found.keys() == wanted.keys() and len(found) > 100
    assert [path for path in found if found[path].tobytes() != wanted[path].tobytes()] == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Both forms, each with numbers of its own: the states, and where they are."""
    folder = tmp_path_factory.mktemp("restack")
    states = {scan: drawn(like(scan)) for scan in (False, True)}
    for scan, state in states.items():
        checkpoint.save(folder / str(scan), state)
    return states, folder


@pytest.mark.parametrize("sizes", [wide({"fsdp": 8}), {"replica": 2, "fsdp": 4}], ids=str)
@pytest.mark.parametrize("scan", [False, True], ids=["stacked to one by one", "one by one to stacked"])
def test_model_optimizer_and_keys(saved, scan, sizes):
    states, folder = saved
    target = like(scan, js.mesh(**sizes))
    restored = checkpoint.restore(folder / str(not scan), like=target)
    assert_equal(restored, states[not scan])
    assert restored["step"] == 3
    for name in ("model", "optimizer"):
        for a, b in zip(*(jax.tree.leaves(nnx.state(state[name])) for state in (restored, target)), strict=True):
            assert a.dtype == b.dtype
            assert b.sharding is None or a.sharding.is_equivalent_to(b.sharding, a.ndim)  # an abstract key is nowhere


def test_only_the_parameters_of_the_other_form(saved):
    scan, (states, folder) = True, saved
    own = drawn({"model": like(scan)["model"]}, seed=1)
    found = leaves(checkpoint.restore(folder / str(not scan), like=own, only="params"))
    stored, own = leaves(states[not scan]), leaves(own)
    assert found.keys() == own.keys()
    for path, values in found.items():
        is_parameter = path[-1] in ("kernel", "bias", "scale", "embedding")
        assert values.tobytes() == (stored if is_parameter else own)[path].tobytes()


@pytest.mark.parametrize(("scan", "depth"), [(False, 2), (False, 4), (True, 4)])
def test_another_depth_is_an_error_that_names_both(saved, scan, depth):
    """In each of the four ways in which stored and wanted may be stacked."""
    texts = []
    for stored in (False, True):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.restore(saved[1] / str(stored), like={"model": like(scan, n_layer=depth)["model"]})
        texts.append("\n".join(caught.value.where))
    one_by_one, stacked = texts
    if scan:
        assert f"model/blocks/attention/out/kernel  stored (3, 32, 32)  wanted ({depth}, 32, 32)" in one_by_one
        assert f"model/blocks/attention/out/kernel  stored (3, 32, 32)  wanted ({depth}, 32, 32)" in stacked
    else:
        assert f"model/blocks/attention/out/kernel  stored 3 layers  wanted {depth}" in stacked
        assert "model/blocks/" + ("3/" if depth == 4 else "2/") in one_by_one


def test_only_one_layer_of_a_stack(tmp_path):
    """A layer that is asked for by its path comes alone; a part with too few layers is still an error."""
    checkpoint.save(tmp_path / "c", {"m": {"blocks": {"w": jnp.arange(6.0).reshape(3, 2)}}})
    like = lambda *layers: {"m": {"blocks": {str(n): {"w": jnp.zeros(2)} for n in layers}}}
    restored = checkpoint.restore(tmp_path / "c", like=like(0, 1, 2), only="m/blocks/1")["m"]["blocks"]
    assert [layer["w"].tolist() for layer in restored.values()] == [[0, 0], [2, 3], [0, 0]]
    alone = checkpoint.restore(tmp_path / "c", like=like(2), only="m/blocks/2/w")["m"]["blocks"]
    assert alone["2"]["w"].tolist() == [4, 5]
    moved = {"n": like(0)["m"]["blocks"]["0"]}
    assert checkpoint.restore(tmp_path / "c", moved, only="n", rename={"n": "m/blocks/1"})["n"]["w"].tolist() == [2, 3]
    with pytest.raises(CheckpointError, match="m/blocks/w  stored 3 layers  wanted 4"):
        checkpoint.restore(tmp_path / "c", like=like(3), only="m/blocks/3")
    for only in ("m/blocks", "params", None):
        state = like(0, 1) if only != "params" else {"m": {"params": like(0, 1)["m"]}}
        rename = {"m/params": "m"} if only == "params" else None
        with pytest.raises(CheckpointError, match="m/blocks/w  stored 3 layers  wanted 2"):
            checkpoint.restore(tmp_path / "c", like=state, only=only, rename=rename)


def test_layers_of_several_shapes_are_no_stack(tmp_path):
    checkpoint.save(tmp_path / "c", {"a": {"0": jnp.ones((2, 3)), "1": jnp.ones((2, 4))}})
    with pytest.raises(CheckpointError, match=r"a  stored layers of shapes \(2, 3\), \(2, 4\)  wanted a stack"):
        checkpoint.restore(tmp_path / "c", like={"a": jnp.ones((2, 2, 3))})
