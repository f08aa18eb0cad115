"""Checkpoints that an older jshard wrote are restored: `fixtures/checkpoints_of_0_1`, `fixtures/checkpoints_packed`.

Version 0.1.0 saved the first one; the second one is of the day on which files were packed for the first time. Each was
made once, by `python -m` of this module in a checkout of that time, and is never renewed: what it holds is what people
have on their disks.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jshard as js
from jshard.data.batches import GlobalBatches

FIXTURES = Path(__file__).parents[1] / "fixtures"
BEFORE = [FIXTURES / "checkpoints_of_0_1", FIXTURES / "checkpoints_packed"]


class PaddedWithDropout(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.odd = nnx.Linear(7, 5, rngs=rngs)  # no axis divides them: held padded
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def state_on(num_devices: int) -> dict[str, Any]:
    """A small state of every kind of leaf, of zeros."""
    mesh = js.mesh(fsdp=num_devices, devices=jax.devices()[:num_devices])

    def put(shape: tuple[int, ...], dtype: Any, *spec: str | None) -> jax.Array:
        return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, PartitionSpec(*spec)))

    model = js.fully_shard(
        PaddedWithDropout(nnx.Rngs(0)), mesh=mesh, placement=js.PlacementPolicy(shard_dim=-1, min_size=1)
    )
    return {
        "params": {
            "kernel": put((8, 6), jnp.bfloat16, "fsdp"),
            "layers": put((3, 4, 8), jnp.float32, None, None, "fsdp"),
        },
        "model": model,
        "optimizer": js.shard_optimizer(model, optax.sgd(0.1, momentum=0.9)),
        "data": GlobalBatches(range(1000), batch_size=8, rows=range(8)),
        "key": jax.device_put(jax.random.key(0), NamedSharding(mesh, PartitionSpec())),
        "host": np.zeros(3, np.int64),
        "step": 0,
        "rate": 0.0,
        "name": "",
    }


def filled(state: dict[str, Any]) -> dict[str, Any]:
    """The same with numbers that are known."""
    for part in (state["model"], state["optimizer"]):
        nnx.update(part, jax.tree.map(_counted, nnx.state(part, nnx.Not(nnx.RngState))))
    state["params"] = jax.tree.map(_counted, state["params"])
    state["key"] = jax.device_put(jax.random.key(7), state["key"].sharding)
    state["data"].samples = 48
    return state | {"host": np.array([1, 2, 2**40]), "step": 100, "rate": 0.125, "name": "before"}


def _counted(x: jax.Array) -> jax.Array:
    counted = np.arange(x.size).reshape(x.shape) % 97
    return jax.device_put(jnp.asarray(counted, x.dtype), x.sharding)


def values(state: dict[str, Any]) -> list[Any]:
    """All that a state holds, without the padding."""
    odd = state["model"].odd
    trace = nnx.to_pure_dict(nnx.state(state["optimizer"]))
    leaves = jax.tree.leaves((state["params"], odd.kernel.get_raw_value()[:7, :5], odd.bias.get_raw_value()[:5]))
    moments = [x[tuple(slice(0, n) for n in (7, 5)[-x.ndim :])] if x.ndim else x for x in jax.tree.leaves(trace)]
    keys = [jax.random.key_data(state["key"]), state["model"].drop.rngs.count.get_raw_value()]
    return [
        *(np.asarray(x).astype(np.float64) for x in (*leaves, *moments, *keys, state["host"])),
        *(state["data"].samples, state["step"], state["rate"], state["name"]),
    ]


@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("before", BEFORE, ids=lambda path: path.name)
def test_a_checkpoint_of_before_is_restored(before, num_devices):
    wanted = values(filled(state_on(2)))
    with js.checkpoint.Checkpointer(before) as checkpoints:
        restored = checkpoints.restore(state_on(num_devices))
    for own, other in zip(values(restored), wanted, strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("before", BEFORE, ids=lambda path: path.name)
def test_a_series_of_before_continues(before, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(before, folder)
    assert js.checkpoint.verify(folder / "100").is_good
    with js.checkpoint.Checkpointer(folder, keep=1) as checkpoints:
        assert checkpoints.latest() == 100
        checkpoints.save(200, filled(state_on(2)))
        assert checkpoints.steps() == [200]
    assert [json.loads(line)["step"] for line in (folder / "history.jsonl").read_text().splitlines()] == [100, 200]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    with js.checkpoint.Checkpointer(sys.argv[1]) as written:
        written.save(100, filled(state_on(2)), metrics={"val_loss": 1.5})
