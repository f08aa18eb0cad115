"""One of two processes, four devices each, that train layers on stages along the processes.

python staged_worker.py PROCESS PORT FOLDER

They take a step, save, restore onto stages within a process, and take another step. Process 0 writes FOLDER/steps.npz.
"""

import os
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import jshard as js
from tests.engine.one_device import on_host
from tests.engine.staged_forms import EXAMPLES, Layer, Layered, in_scan_layers, plain_loss


def trained(model, optimizer):
    """The loss of a step, and the parameters after it."""

    @nnx.jit
    def step(model, optimizer, *examples):
        loss, grads = nnx.value_and_grad(plain_loss)(model, *examples)
        optimizer.update(model, grads)
        return loss

    loss = step(model, optimizer, *EXAMPLES)
    return {"loss": np.asarray(loss)} | on_host(js.gather(nnx.state(model, nnx.Param)))


def state_on(mesh):
    """A model and its optimizer."""
    model = js.fully_shard(
        Layered(nnx.Rngs(0), in_scan_layers), units=Layer, mesh=mesh, placement=js.PlacementPolicy(min_size=1)
    )
    return {"model": model, "optimizer": js.shard_optimizer(model, optax.adam(1e-2, eps=1e-3))}


def steps_of(first, second, folder):
    """A step on a mesh, and one on another after a restore."""
    state = state_on(first)
    results = {f"0 {key}": x for key, x in trained(**state).items()}
    js.checkpoint.save(folder, state)
    state = js.checkpoint.restore(folder, like=state_on(second))
    return results | {f"1 {key}": x for key, x in trained(**state).items()}


def main():
    process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    over_processes = js.mesh(pipe=2, fsdp=4)
    assert [device.process_index for device in over_processes.devices.reshape(2, -1)[:, 0]] == [0, 1]
    in_processes = js.mesh(replica=2, pipe=2, fsdp=2)
    results = steps_of(over_processes, in_processes, folder / "saved")
    if process == 0:
        np.savez(folder / "steps.npz", **results)
    jax.distributed.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
