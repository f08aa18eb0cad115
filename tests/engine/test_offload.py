"""Host memory: the same numbers as without it, arrays where they were said to be, and what the compiler makes of it."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend import core as jex
from jax.sharding import Mesh

import jshard as js
from jshard import _compat
from jshard.api.loss_scale import LossScale, scaled_value_and_grad
from jshard.api.optimizer import abstract_optimizer
from jshard.cluster.topology import parse_topology, topology_devices
from jshard.inspect.audit import CompiledMemory
from jshard.plans import streamed_updates
from jshard.plans.mesh import batch_sharding
from jshard.recipes.step import lower_step
from tests.gpu_compiler import needs_gpu_compiler
from tests.helpers import Config, Decoder, Scanning, loss_fn, placed, token_batch, ups, with_placement
from tests.parity import PARAMETER_TOLERANCE, flat

CONFIG = Config(attends=False)
STACKED = dataclasses.replace(CONFIG, scanned=True)


@functools.cache
def builder(config: Config) -> Any:
    return lambda: (Scanning if config.scanned else Decoder)(config, nnx.Rngs(0))


def annotated(config: Config, mesh: Mesh, make: Any = placed, offload: str | None = None, **settings: Any) -> Any:
    def annotate(model: Decoder) -> None:
        for block in [model.blocks] if config.scanned else model.blocks:
            js.fully_shard(block, mesh=mesh, **with_placement(stacked=int(config.scanned), offload=offload, **settings))
        js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy(offload=offload))

    return make(builder(config), annotate)


@dataclasses.dataclass
class Trained:
    """A model after two steps, and what came of them."""

    model: Decoder
    optimizer: nnx.Optimizer
    losses: list[float]
    gradients: Any


@functools.cache
def trained(config: Config = CONFIG, *, fsdp: int = 8, wrt: Any = nnx.Param, **settings: Any) -> Trained:
    """Two steps that know nothing of memories."""
    mesh = js.mesh(fsdp=fsdp, devices=jax.devices()[:fsdp])
    model = annotated(config, mesh, **settings)
    optimizer = js.shard_optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), wrt=wrt)
    grad_fn = js.value_and_grad(loss_fn, wrt=wrt)

    @nnx.jit
    def step(model: Decoder, optimizer: nnx.Optimizer, *batch: Any) -> tuple[jax.Array, Any]:
        loss, grads = grad_fn(model, *batch)
        optimizer.update(model, grads)
        return loss, grads

    found = [step(model, optimizer, *token_batch(config)) for _ in range(2)]
    return Trained(model, optimizer, [float(loss) for loss, _ in found], found[-1][1])


def kinds(tree: Any) -> dict[str, str]:
    """The memory of each array, by path."""
    return {jax.tree_util.keystr(path): x.sharding.memory_kind for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def same(found: Trained, wanted: Trained) -> None:
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-6)
    mine, theirs = (flat(nnx.state(one.model, nnx.Param)) for one in (found, wanted))
    assert mine.keys() == theirs.keys()
    norm = lambda arrays: np.sqrt(sum(float(np.sum(np.square(x))) for x in arrays))
    assert norm(mine[path] - theirs[path] for path in theirs) < PARAMETER_TOLERANCE * norm(theirs.values())


def large(path: str) -> bool:
    return "kernel" in path or "embedding" in path


@pytest.mark.wide
def test_optimizer_state_lives_on_the_host_and_trains_the_same():
    found = trained(offload="optimizer")
    same(found, trained())
    moments = {path: kind for path, kind in kinds(nnx.state(found.optimizer)).items() if "mu" in path or "nu" in path}
    assert moments and all(kind == ("pinned_host" if large(p) else "device") for p, kind in moments.items())
    assert set(kinds(nnx.state(found.model)).values()) == {"device"}


@pytest.mark.parametrize(
    "settings",
    [{}, {"fsdp": 1}, {"config": STACKED, "remat": "offload"}],
    ids=["fsdp", "one device", "scan, activations too"],
)
def test_parameters_live_on_the_host_and_train_the_same(settings: dict[str, Any]):
    found = trained(offload="params", **settings)
    same(found, trained(settings.get("config", CONFIG)))
    for tree in (nnx.state(found.model), found.gradients):
        assert all(kind == ("pinned_host" if large(path) else "device") for path, kind in kinds(tree).items())


@pytest.mark.wide
def test_what_is_frozen_has_no_gradient_that_goes_to_the_host():
    found = trained(offload="params", remat="offload", wrt=ups)
    same(found, trained(wrt=ups))
    assert all(kind == ("pinned_host" if large(path) else "device") for path, kind in kinds(found.gradients).items())


MOVES = set("device_put dynamic_slice dynamic_update_slice optimization_barrier pvary pcast".split())


def on_host_in(jaxpr: Any) -> list[Any]:
    """Equations of a program that take arrays in host memory; loops and calls opened."""
    found = []
    for eqn in jaxpr.eqns:
        inner = list(jex.jaxprs_in_params(eqn.params))
        found += [e for one in inner for e in on_host_in(one)]
        found += [eqn] * (not inner and any(_compat.on_host(v.aval) for v in eqn.invars))
    return found


def test_nothing_is_computed_in_host_memory_and_what_is_frozen_is_fetched_for_the_model_alone():
    model = annotated(CONFIG, js.mesh(fsdp=8), js.abstract_init, offload="params")
    optimizer = abstract_optimizer(model, LossScale().around(optax.adamw(1e-3)), wrt=ups)
    graphdef, state = nnx.split((model, optimizer))

    def step(state: Any, *batch: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state, copy=True)
        _, grads = scaled_value_and_grad(loss_fn, optimizer, accumulate=2)(model, *batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    jaxpr = jax.make_jaxpr(step)(state, *token_batch(CONFIG)).jaxpr
    assert {eqn.primitive.name for eqn in on_host_in(jaxpr)} <= MOVES
    outside = [e for e in jaxpr.eqns if e.primitive.name == "device_put" and _compat.on_host(e.invars[0].aval)]
    assert outside and {e.outvars[0].aval.shape for e in outside} == {(CONFIG.width, CONFIG.hidden)}


def test_what_jits_the_whole_tree_is_updated_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """As `optax.adamw` does where jax keeps the calls of `jax.jit(..., inline=True)`."""
    monkeypatch.setattr(streamed_updates, "_PART_BYTES", 1)
    model = annotated(CONFIG, js.mesh(fsdp=8), js.abstract_init, offload="optimizer")
    decayed = optax.stateless(lambda updates, params: jax.jit(jax.tree.map, static_argnums=0)(jnp.add, updates, params))
    optimizer = abstract_optimizer(model, optax.chain(optax.trace(0.9), decayed, optax.trace(0.9)))
    graphdef, state = nnx.split((model, optimizer))

    def step(state: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state, copy=True)
        optimizer.update(model, nnx.state(model, nnx.Param))
        return nnx.state((model, optimizer))

    eqns = jax.make_jaxpr(step)(state).jaxpr.eqns
    behind = {v for e in eqns if e.primitive.name == "optimization_barrier" for v in e.outvars}
    puts = [e for e in eqns if e.primitive.name == "device_put"]
    fetched = [e.invars[0] for e in puts if e.params["devices"] == (jax.memory.Space.Device,)]
    assert fetched and behind.issuperset(fetched)


def test_activations_go_to_the_host():
    mesh, config = js.mesh(fsdp=8), STACKED
    model = annotated(config, mesh, js.abstract_init, remat="offload")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh)) for x in token_batch(config)]
    held = js.explain(model, loss_fn=loss_fn, batch=tuple(shapes)).memory
    tokens = 16 * 16 // 8
    assert held.host_activations_bytes == config.layers * tokens * config.hidden * 4


LARGE = Config(layers=8, width=1024, hidden=4096, heads=16, vocab=4096, tied=False, attends=False)
MIB = 2**20
UP_BYTES = 1024 * 4096 * 2  # of a layer's first product, for one sequence


@functools.cache
def compiled(offload: str | None = None, remat: Any = "full", *, scanned: bool = False) -> jax.stages.Compiled:
    """A step on 8 GPUs that are not there, a sequence of 1024 tokens on each."""
    mesh = js.mesh(fsdp=-1, devices=topology_devices(parse_topology("h200:1x8")))
    policy = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")
    config = dataclasses.replace(LARGE, scanned=scanned)
    model = annotated(config, mesh, js.abstract_init, offload, remat=remat, mixed_precision=policy)
    shape = jax.ShapeDtypeStruct((8, 1024), jnp.int32, sharding=batch_sharding(mesh))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    lowered = lower_step(
        lambda model, batch: loss_fn(model, *batch), model, abstract_optimizer(model, tx), (shape, shape)
    )
    return lowered.compile(compiler_options=js.compiler_options("fastest", platform="gpu"))


def figures(**settings: Any) -> tuple[int, CompiledMemory]:
    """What the program needs of the device, and all figures."""
    memory = CompiledMemory.of(compiled(**settings))
    assert memory is not None
    return memory.arguments_bytes + memory.temporaries_bytes, memory


def copies(text: str) -> list[str]:
    """Lines of copies between the memories that the program waits for at once."""
    return [line for line in text.splitlines() if re.search(r" copy\(", line) and "S(5)" in line]


@needs_gpu_compiler
@pytest.mark.usefixtures("no_stored_programs")
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scan"])
def test_on_gpus_what_is_offloaded_leaves_the_device(scanned: bool):
    """Compiled, not run: state and parameters are arguments in host memory, and no more than parts are fetched."""
    here, held = figures(scanned=scanned)
    for offload, arrays in (("optimizer", 2), ("params", 3)):
        need, memory = figures(offload=offload, scanned=scanned)
        moved = memory.host_arguments_bytes
        assert moved == pytest.approx(held.arguments_bytes * arrays / 3, rel=0.01)
        assert memory.host_results_bytes == moved
        assert need < here - 0.45 * moved, (offload, need / MIB, here / MIB, moved / MIB)
        text = compiled(offload=offload, scanned=scanned).as_text() or ""
        assert "copy-start(" in text and not copies(text)


@needs_gpu_compiler
@pytest.mark.usefixtures("no_stored_programs")
@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scan"])
def test_on_gpus_activations_leave_the_device(scanned: bool):
    kept, _ = figures(remat="dots", scanned=scanned)
    need, memory = figures(remat="offload", scanned=scanned)
    assert memory.host_temporaries_bytes == LARGE.layers * UP_BYTES
    assert need < kept
    assert not copies(compiled(remat="offload", scanned=scanned).as_text() or "")
