"""One of two processes, four devices each, that gather, load and reshard together, or hand weights to each other.

python in_memory_worker.py PROCESS PORT FOLDER

What a process has found goes to FOLDER/found-PROCESS.json.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard as js
from jshard.errors import FourPartError
from tests.helpers import builder
from tests.in_memory.states import CONFIG, annotator, differences, padded_model, plain_values

PROCESS, FOLDER = int(sys.argv[1]), Path(sys.argv[3])


def gathered_and_loaded() -> dict[str, object]:
    """Whole values in every process, in one, and on every device; and back, from a process that alone has them."""
    model = padded_model(js.mesh(fsdp=8))
    expected = plain_values()
    on_host = js.gather(model)
    on_first = js.gather(model, where="process0")
    on_devices = js.gather(model, where="all")
    local = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), on_devices)
    other = padded_model(js.mesh(replica=2, fsdp=4), seed=1)
    loaded = js.load(other, on_first)
    from_all = js.load(other, on_host)
    return {
        "host": differences(on_host, expected),
        "process0": differences(on_first, expected) if PROCESS == 0 else [str(on_first)],
        "all": differences(local, expected),
        "whole": all(x.is_fully_replicated for x in jax.tree.leaves(on_devices)),
        "loaded": differences(js.gather(loaded), expected),
        "loaded from all": differences(js.gather(from_all), expected),
        "placed": loaded.blocks[0].up.kernel.get_raw_value().sharding
        == other.blocks[0].up.kernel.get_raw_value().sharding,
    }


def resharded() -> dict[str, object]:
    """A model and its optimizer, from all devices to other degrees of all."""
    model = padded_model(js.mesh(fsdp=8))
    optimizer = js.shard_optimizer(model, optax.adamw(1e-3))
    state = {"model": model, "optimizer": optimizer, "step": jnp.array(7)}
    annotate = annotator(js.mesh(replica=2, fsdp=2, tensor=2))
    plan = js.reshard_plan(state, annotate)
    moved = js.reshard(state, annotate)
    return {
        "model": differences(js.gather(moved["model"]), plain_values()),
        "optimizer": differences(js.gather(moved["optimizer"]), js.gather(optimizer)),
        "step": int(moved["step"]),
        "moved": plan.moved_bytes / plan.least_bytes,
        "between": plan.between_processes_bytes > 0,
    }


def handed_over() -> dict[str, object]:
    """Weights of process 0 in process 1, which has no device of theirs, in another dtype."""
    devices = jax.devices()
    trained_on = js.mesh(fsdp=4, devices=devices[:4])
    served_on = js.mesh(fsdp=2, replica=2, devices=devices[4:])
    abstract = js.abstract_init(builder(CONFIG), annotator(trained_on))
    served = js.abstract_init(builder(CONFIG), annotator(served_on))
    half = jax.tree.map(lambda x: _as(x, jnp.bfloat16), nnx.state(served, nnx.Param))
    model = padded_model(trained_on) if PROCESS == 0 else abstract
    plan = js.reshard_plan(nnx.state(model, nnx.Param), half)
    weights = js.reshard(nnx.state(model, nnx.Param), half)
    found: dict[str, object] = {"moved": plan.moved_bytes, "total": plan.total_bytes}
    if PROCESS == 1:
        nnx.update(served, weights)
        expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), plain_values(nnx.Param))
        found["served"] = differences(js.gather(nnx.state(served, nnx.Param)), expected)
    return found


def alone() -> dict[str, object]:
    """A move between devices of process 0, of which process 1 knows nothing."""
    devices = jax.devices()
    if PROCESS == 1:
        return {}
    model = padded_model(js.mesh(fsdp=1, devices=devices[:1]))
    moved = js.reshard(model, annotator(js.mesh(fsdp=3, devices=devices[1:4])))
    return {"model": differences(js.gather(moved), plain_values())}


def _as(x: jax.ShapeDtypeStruct, dtype: object) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)


def mistakes() -> dict[str, object]:
    """A tree that fits nowhere, on one process: both raise, and neither waits."""
    model = padded_model(js.mesh(fsdp=8))
    try:
        js.load(model, {"head": np.zeros(3, np.float32)} if PROCESS == 0 else None)
    except FourPartError as error:
        return {"text": str(error)}
    return {}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"localhost:{sys.argv[2]}", num_processes=2, process_id=PROCESS)
    found = {part.__name__: part() for part in (gathered_and_loaded, resharded, handed_over, alone, mistakes)}
    (FOLDER / f"found-{PROCESS}.json").write_text(json.dumps(found))
