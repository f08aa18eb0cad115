"""Kernels in sharded programs: XLA hides as many collectives behind them as behind its own matrix products.

The real compiler of XLA:GPU, for a cluster that is not there: it needs the extra `plan-gpu`, and no GPU.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jshard as js
from jshard.api.optimizer import abstract_optimizer
from jshard.cluster.topology import parse_topology, topology_devices, traced_for_device
from jshard.inspect.audit import Audit, audit
from jshard.plans.mesh import batch_sharding
from jshard.recipes.step import lower_step
from models.gpt import GPT, GPTConfig, annotate, loss_fn
from tests.gpu_compiler import needs_gpu_compiler
from tests.occupancy.absent_gpu import needs_ampere_kernels

pytestmark = [needs_gpu_compiler, pytest.mark.usefixtures("no_stored_programs")]

LAYERS, WIDTH = 4, 4096
LARGE_BYTES = 2**20  # below it are biases and norms, gathered in no time


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Eight GPUs that are not there."""

    mesh: jax.sharding.Mesh
    options: dict[str, Any]  # of the fastest profile
    least_options: dict[str, Any]  # with which XLA overlaps collectives at all


CLUSTERS = ["h200:1x8", pytest.param("a100-80:1x8", marks=needs_ampere_kernels)]


@pytest.fixture(params=CLUSTERS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with cluster_of(request.param) as cluster:
        yield cluster


@contextlib.contextmanager
def cluster_of(name: str) -> Iterator[Cluster]:
    topology = parse_topology(name)
    assert topology.device is not None
    with traced_for_device(topology.device):
        mesh = js.mesh(fsdp=-1, devices=topology_devices(topology))
        options = js.compiler_options("fastest", platform=topology.device.name)
        yield Cluster(mesh, options, least_options={} if topology.device.name == "h200" else options)


def hidden(cluster: Cluster, multiply: Callable[[jax.Array, jax.Array], jax.Array]) -> int:
    """Gathers that are overlapped in a program of four sharded layers and their gradients."""

    def run(x, weights):
        def loss(weights):
            y = x
            for w in weights:
                y = multiply(y, jax.lax.all_gather(w, "fsdp", tiled=True))
            return y.astype(jnp.float32).sum()

        return jax.grad(loss)(weights)

    rows = PartitionSpec("fsdp")
    sharded = jax.jit(jax.shard_map(run, mesh=cluster.mesh, in_specs=(rows, rows), out_specs=rows))
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(cluster.mesh, rows))
    lowered = sharded.trace(array(8 * WIDTH, WIDTH), [array(WIDTH, WIDTH)] * LAYERS).lower()
    program = lowered.compile(compiler_options=cluster.least_options)
    return sum(w.is_overlapped for w in audit(program).schedule.windows if w.kind == "all-gather")


def test_as_many_gathers_overlap_as_with_a_product_of_xla(cluster: Cluster):
    plain = hidden(cluster, jnp.matmul)
    assert plain >= LAYERS - 2
    assert hidden(cluster, js.kernels.matmul) >= plain


def test_without_a_word_on_how_long_it_takes_a_kernel_hides_less(monkeypatch: pytest.MonkeyPatch):
    """It counts as free. On an A100 collectives start as early as they can, whatever is beside them."""
    with cluster_of("h200:1x8") as hopper:
        stated = hidden(hopper, js.kernels.matmul)
        monkeypatch.setattr("jshard.kernels.run_product.stated", lambda latency_ns: contextlib.nullcontext())
        assert hidden(hopper, js.kernels.matmul) < stated


def scanned(cluster: Cluster, mlp: str, reduce_dtype: str = "bfloat16") -> Audit:
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
        reduce_dtype=reduce_dtype,
        remat="full",
        mlp=mlp,
        attention="xla",  # JAX asks for cuDNN, which is not here
    )
    model = js.abstract_init(lambda: GPT(config, rngs=nnx.Rngs(0)), lambda model: annotate(model, cluster.mesh))
    optimizer = abstract_optimizer(model, optax.adamw(1e-3))
    tokens = jax.ShapeDtypeStruct((8, 1024), jnp.int32, sharding=batch_sharding(cluster.mesh))
    lowered = lower_step(loss_fn, model, optimizer, {"inputs": tokens, "targets": tokens})
    return audit(lowered.compile(compiler_options=cluster.options), model=model)


def large_in_loops(audited: Audit) -> list[tuple[str, bool]]:
    """The kind of each large collective in loops, and whether a product is beside it."""
    large = [window for window in audited.schedule.in_loops if window.full_bytes >= LARGE_BYTES]
    return sorted((window.kind, window.is_overlapped) for window in large)


def test_parts_that_are_summed_on_arrival_are_sent_beside_a_kernel_as_beside_products(cluster: Cluster):
    """Reduced in float32: more collectives than reduce-scatters, of which one gather of an iteration has no product."""
    plain, ours = scanned(cluster, "plain", "float32"), scanned(cluster, "pallas", "float32")
    assert plain.ok and ours.ok
    assert large_in_loops(ours) == large_in_loops(plain)
    exchanges = [is_overlapped for kind, is_overlapped in large_in_loops(ours) if kind == "all-to-all"]
    assert exchanges and all(exchanges)


def test_in_a_scan_with_prefetch_every_large_collective_has_a_product_beside_it(cluster: Cluster):
    plain, ours = scanned(cluster, "plain"), scanned(cluster, "pallas")
    assert plain.ok and ours.ok
    assert large_in_loops(ours) == large_in_loops(plain) and not ours.not_overlapped(at_least_bytes=LARGE_BYTES)
    (use,) = [kernel for kernel in ours.schedule.kernels if kernel.kernel != "attention"]
    # Forward, its second run for backward, and four gradients of two products each.
    assert (use.kernel, use.form) == ("mlp", "mosaic") and use.calls >= 2 + 2 + 4
    assert "mlp on Mosaic GPU" in str(ours) and {kernel.kernel for kernel in plain.schedule.kernels} == {"attention"}
