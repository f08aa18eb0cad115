"""Kernels in sharded programs: XLA hides as many collectives behind them as behind its own matrix products.

The real compiler of XLA:GPU, for a cluster that is not there: it needs the extra `plan-gpu`, and no GPU.
"""

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jshard as js
from jshard.api.optimizer import abstract_optimizer
from jshard.cluster.topology import parse_topology, topology_devices
from jshard.inspect.audit import Audit, audit
from jshard.plans.mesh import batch_sharding
from jshard.recipes.step import lower_step
from models.gpt import GPT, GPTConfig, annotate, loss_fn
from tests.gpu_compiler import needs_gpu_compiler

pytestmark = [needs_gpu_compiler, pytest.mark.usefixtures("no_stored_programs")]

LAYERS, WIDTH = 4, 4096
LARGE_BYTES = 2**20  # below it are biases and norms, gathered in no time


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return js.mesh(fsdp=-1, devices=topology_devices(parse_topology("h200:1x8")))


def hidden(multiply: Callable[[jax.Array, jax.Array], jax.Array]) -> int:
    """Gathers that are overlapped in a program of four sharded layers and their gradients."""

    def run(x, weights):
        def loss(weights):
            y = x
            for w in weights:
                y = multiply(y, jax.lax.all_gather(w, "fsdp", tiled=True))
            return y.astype(jnp.float32).sum()

        return jax.grad(loss)(weights)

    rows = PartitionSpec("fsdp")
    sharded = jax.jit(jax.shard_map(run, mesh=mesh(), in_specs=(rows, rows), out_specs=rows))
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh(), rows))
    program = sharded.trace(array(8 * WIDTH, WIDTH), [array(WIDTH, WIDTH)] * LAYERS).lower().compile()
    return sum(w.is_overlapped for w in audit(program).schedule.windows if w.kind == "all-gather")


def test_as_many_gathers_overlap_as_with_a_product_of_xla(monkeypatch: pytest.MonkeyPatch):
    plain = hidden(jnp.matmul)
    assert plain >= LAYERS - 2
    assert hidden(js.kernels.matmul) >= plain

    # Without a word on how long it takes, the kernel counts as free, and there is nothing to hide behind.
    monkeypatch.setattr("jshard.kernels.mosaic_product.stated", lambda latency_ns: contextlib.nullcontext())
    assert hidden(js.kernels.matmul) < plain


def scanned(mlp: str) -> Audit:
    """A training step of a GPT whose blocks are scanned with the next one's parameters gathered ahead."""
    config = GPTConfig(
        vocab_size=512,
        block_size=1024,
        n_layer=4,
        n_head=16,
        d_model=2048,
        d_ff=8192,
        scan=True,
        compute_dtype="bfloat16",
        remat="full",
        mlp=mlp,
        attention="xla",  # JAX asks for cuDNN, which is not here
    )
    model = js.abstract_init(lambda: GPT(config, rngs=nnx.Rngs(0)), lambda model: annotate(model, mesh()))
    optimizer = abstract_optimizer(model, optax.adamw(1e-3))
    tokens = jax.ShapeDtypeStruct((8, 1024), jnp.int32, sharding=batch_sharding(mesh()))
    lowered = lower_step(loss_fn, model, optimizer, {"inputs": tokens, "targets": tokens})
    return audit(lowered.compile(compiler_options=js.compiler_options("fastest", platform="gpu")), model=model)


def test_in_a_scan_with_prefetch_every_large_collective_has_a_product_beside_it():
    plain, ours = scanned("plain"), scanned("pallas")
    assert plain.ok and ours.ok
    kinds = lambda found: sorted(
        (w.kind, w.is_overlapped) for w in found.schedule.in_loops if w.full_bytes >= LARGE_BYTES
    )
    assert kinds(ours) == kinds(plain) and not ours.not_overlapped(at_least_bytes=LARGE_BYTES)
    (use,) = [kernel for kernel in ours.schedule.kernels if kernel.kernel != "attention"]
    # Forward, its second run for backward, and four gradients of two products each.
    assert (use.kernel, use.form) == ("mlp", "mosaic") and use.calls >= 2 + 2 + 4
    assert "mlp on Mosaic GPU" in str(ours) and {kernel.kernel for kernel in plain.schedule.kernels} == {"attention"}
