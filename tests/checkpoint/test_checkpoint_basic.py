"""Saved state comes back equal, with the shardings of `like`, on the same mesh or another."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard import checkpoint
from jshard.checkpoint import storage
from jshard.errors import RunError
from tests.helpers import placed
from tests.micro_gpt import annotate, build, micro

CONFIG = dataclasses.replace(micro().model, dropout=0.1)


@functools.cache
def builder(seed, config):
    return lambda: build(config, nnx.Rngs(seed))


def make(mesh, seed=0, config=CONFIG):
    model = placed(builder(seed, config), lambda model: annotate(model, mesh))
    optimizer = js.shard_optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    return {"model": model, "optimizer": optimizer, "step": 7}


def arrays(state):
    leaves = jax.tree.leaves((nnx.state(state["model"]), nnx.state(state["optimizer"])))
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state sharded over eight devices, every array of it different from a fresh one, and where it is saved."""
    state = make(js.mesh())
    for part in (state["model"], state["optimizer"]):
        nnx.update(part, jax.tree.map(lambda x: x + 1, nnx.state(part, nnx.Not(nnx.RngKey))))
    path = tmp_path_factory.mktemp("saved") / "c"
    checkpoint.save(path, state)
    return state, path


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"replica": 2, "fsdp": 4}, {"fsdp": 2}, {"fsdp": 1}], ids=str)
def test_round_trip(saved, sizes):
    state, path = saved
    like = make(js.mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())]), seed=1)
    before = [np.asarray(x) for x in arrays(like)]
    restored = checkpoint.restore(path, like=like)

    assert restored["step"] == 7
    assert type(restored["model"]) is type(like["model"])
    for a, b in zip(arrays(state), arrays(restored), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(arrays(like), arrays(restored), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    for a, b in zip(before, arrays(like), strict=True):
        np.testing.assert_array_equal(a, b)  # `like` is left alone


def test_restored_state_trains_on_as_if_never_saved(tmp_path):
    mesh, config = js.mesh(), dataclasses.replace(CONFIG, n_layer=1)
    live = make(mesh, config=config)
    batch = js.shard_batch({"x": np.arange(16 * 8, dtype=np.int32).reshape(16, 8)}, mesh)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: (m(batch["x"]) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    def losses(state):
        return [float(step(state["model"], state["optimizer"], batch)) for _ in range(3)]

    losses(live)
    checkpoint.save(tmp_path / "c", live)
    restored = checkpoint.restore(tmp_path / "c", like=make(mesh, seed=1, config=config))
    assert losses(restored) == losses(live)  # dropout masks included


def test_restore_of_the_model_alone_into_an_abstract_one(saved):
    state, path = saved
    mesh = js.mesh()
    like = js.abstract_init(lambda: build(CONFIG, nnx.Rngs(1)), lambda model: annotate(model, mesh))
    model = checkpoint.restore(path, like={"model": like})["model"]
    for a, b in zip(jax.tree.leaves(nnx.state(state["model"])), jax.tree.leaves(nnx.state(model)), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_plain_pytrees_and_numbers(tmp_path):
    state = {"ema": ({"w": jnp.arange(3.0)}, [jnp.ones(2)]), "step": 3, "lr": 0.5}
    checkpoint.save(tmp_path / "c", state)
    restored = checkpoint.restore(tmp_path / "c", like=jax.tree.map(lambda x: x * 0, state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_another_model_is_told_by_leaf_before_anything_is_read(saved):
    other = make(js.mesh(), config=dataclasses.replace(CONFIG, d_ff=256))
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.restore(saved[1], like=other)
    assert str(caught.value).startswith("The checkpoint does not fit: 18 leaves differ.")
    assert "model/blocks/0/mlp/up/kernel  stored (64, 128)  wanted (64, 256)" in str(caught.value)


def test_missing_and_extra_leaves_are_both_told(tmp_path):
    checkpoint.save(tmp_path / "c", {"a": {"x": jnp.ones(2), "y": jnp.ones(2)}})
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.restore(tmp_path / "c", like={"a": {"x": jnp.ones(2), "z": jnp.ones(2)}})
    assert "a/y  stored (2,)  wanted nothing" in str(caught.value)
    assert "a/z  stored nothing  wanted (2,)" in str(caught.value)


def test_nothing_to_restore(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="no such folder"):
        checkpoint.restore(tmp_path / "gone", like={"step": 0})
    with pytest.raises(checkpoint.CheckpointError, match="not one that save"):
        checkpoint.restore(tmp_path, like={"step": 0})


def test_nothing_is_overwritten(tmp_path):
    checkpoint.save(tmp_path / "c", {"step": 1})
    with pytest.raises(checkpoint.CheckpointError, match="something at that path already"):
        checkpoint.save(tmp_path / "c", {"step": 2})
    assert checkpoint.restore(tmp_path / "c", like={"step": 0}) == {"step": 1}


def test_deleted_arrays_are_named_at_once(tmp_path):
    donated = {"w": jnp.ones(2), "v": {"m": jnp.ones(3)}, "kept": jnp.ones(1)}
    donated["w"].delete()
    donated["v"]["m"].delete()
    with pytest.raises(checkpoint.CheckpointError, match="the values of 2 leaves are gone") as caught:
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


def told_memory(root, *, available, limit, used, cache, group):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:  {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(f"9:cpu:/\n{group}:/job/step\n")
    folder, names = root / "sys/fs/cgroup/memory/job", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    if group == "0:":
        folder, names = root / "sys/fs/cgroup/job", ("max", "current", "inactive_file")
        (folder / "step").mkdir(parents=True)
        (folder / "step" / "memory.max").write_text("max\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
    (folder / f"memory.{names[1]}").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")
    return root


@pytest.mark.parametrize("group", ["0:", "4:memory"])
def test_free_memory_is_what_the_system_or_the_job_has_left(tmp_path, group):
    gib = 1 << 30
    job = told_memory(tmp_path / "a", available=9 * gib, limit=4 * gib, used=3 * gib, cache=gib, group=group)
    host = told_memory(tmp_path / "b", available=gib, limit=4 * gib, used=gib, cache=0, group=group)
    assert storage.free_bytes(job) == 2 * gib
    assert storage.free_bytes(host) == gib
    assert storage.free_bytes(tmp_path / "nothing") > 100 * gib


def test_something_can_be_read_where_no_memory_is_free(monkeypatch):
    monkeypatch.setattr(storage, "free_bytes", lambda: 0)
    assert storage.in_flight_bytes({"n": 3}) == 1  # Orbax refuses 0


@pytest.mark.parametrize(("free_mib", "shard_mib", "mib"), [(9999, 1, 128), (9999, 50, 200), (400, 1, 50), (9, 16, 16)])
def test_reads_in_flight_follow_the_free_memory(monkeypatch, free_mib, shard_mib, mib):
    monkeypatch.setattr(storage, "free_bytes", lambda: free_mib << 20)
    wanted = {"w": np.broadcast_to(np.uint8(0), shard_mib << 20)}
    assert storage.in_flight_bytes(wanted) == mib << 20
