"""One of two processes that accumulate over calls: python -m tests.processes.summing_worker PROCESS PORT.

Prints the largest difference from the gradients of all rows in one batch, relative to the largest gradient. Then
whether a step of one call communicates as planned, and the kinds of its collectives.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

import jshard as js
from tests.toy_models import TwoLayers

process, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)

MESH = js.mesh(replica=2)
ROWS = np.random.default_rng(0).normal(size=(3, 16, 64)).astype(np.float32)


def build() -> TwoLayers:
    return TwoLayers(64, 64, 8, nnx.Rngs(0))


def square(model: nnx.Module, x: jax.Array) -> jax.Array:
    return jnp.square(model(x)).mean()


def own_part(x: np.ndarray) -> np.ndarray:
    return np.split(x, 2)[process]


model = js.shard_init(build, lambda model: js.fully_shard(model, mesh=MESH, placement=js.PlacementPolicy(min_size=1)))
grad_fn = js.value_and_grad(square, sync="none")
call = nnx.jit(lambda model, x: grad_fn(model, x)[1])
add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
total = call(model, js.shard_batch(own_part(ROWS[0]), MESH))
for rows in ROWS[1:]:
    total = add(total, call(model, js.shard_batch(own_part(rows), MESH)))
grads = nnx.jit(js.reduce_gradients)(model, total)

expected = nnx.grad(square)(build(), np.concatenate(ROWS))
worst = 0.0
for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
    whole = multihost_utils.process_allgather(x, tiled=True)
    worst = max(worst, float(np.abs(whole - np.asarray(y)).max() / np.abs(y).max()))
print(f"worst: {worst}", flush=True)

# Over the processes, which the mesh above has copies in.
across = js.fully_shard(build(), mesh=js.mesh(fsdp=8), placement=js.PlacementPolicy(min_size=1))
lowered = nnx.jit(nnx.value_and_grad(square)).lower(across, ROWS[0]).lowered
audit = js.audit(lowered, model=across)
print(f"as planned: {audit.ok} {sorted({row.kind for row in audit.rows})}", flush=True)
