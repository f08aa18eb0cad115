"""Meshes that people arrive with: their kinds of axes, and those that are in use around a step."""

import contextlib
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import jshard as js
from jshard.errors import CallError, MeshError
from tests.helpers import Config, Decoder, fresh, loss_fn, token_batch
from tests.parity import assert_parity

CONFIG = Config(layers=1, attends=False)
EXPLICIT = AxisType.Explicit
MESHES: dict[str, Any] = {
    "made by jax": lambda: jax.make_mesh((2, 4), ("replica", "fsdp")),  # Explicit since jax 0.11
    "explicit": lambda: jax.make_mesh((8,), ("fsdp",), axis_types=(EXPLICIT,)),
    "explicit, in part": lambda: jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(EXPLICIT, AxisType.Auto)),
    "of devices": lambda: Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "fsdp")),
}


def annotator(mesh: Any) -> Any:
    def annotate(model: Decoder) -> None:
        js.fully_shard(model.blocks[0], mesh=mesh)
        js.fully_shard(model, mesh=mesh)

    return annotate


@pytest.mark.parametrize("name", MESHES)
def test_a_step_on_any_of_them_is_that_of_one_device(name):
    mesh = MESHES[name]()
    batch = js.shard_batch(token_batch(CONFIG), mesh)
    assert all(x.sharding.mesh.axis_types == (AxisType.Auto,) * len(mesh.axis_names) for x in batch)
    assert_parity(lambda: Decoder(CONFIG, nnx.Rngs(0)), annotator(mesh), loss_fn, batch)


def test_a_linen_model_takes_a_mesh_with_explicit_axes():
    mesh, x = MESHES["explicit"](), np.ones((8, 64), np.float32)
    model = js.fully_shard(nn.Dense(64), mesh=mesh)
    params = js.shard_init(lambda: model.init(jax.random.key(0), x), model, mesh=mesh)
    kernel = params["params"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) != kernel.shape
    wanted = nn.Dense(64).apply(jax.device_get(params), x)
    np.testing.assert_allclose(jax.jit(model.apply)(params, js.shard_batch(x, mesh)), wanted, rtol=1e-6, atol=1e-6)


def step_of(mesh: Any) -> Any:
    model = fresh(lambda: Decoder(CONFIG, nnx.Rngs(0)))
    annotator(mesh)(model)
    optimizer = js.shard_optimizer(model, optax.adamw(1e-3))

    @nnx.jit
    def step(model, optimizer, *batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, *batch)
        optimizer.update(model, grads)
        return loss

    return lambda: [float(step(model, optimizer, *token_batch(CONFIG))) for _ in range(2)]


@pytest.mark.wide
def test_a_mesh_with_auto_axes_may_be_in_use():
    mesh = js.mesh(fsdp=8)
    alone = step_of(mesh)()
    with jax.set_mesh(mesh):
        assert step_of(mesh)() == pytest.approx(alone, rel=1e-6)


def test_under_one_with_explicit_axes_a_call_says_what_to_do():
    mesh = MESHES["explicit"]()
    run = step_of(mesh)
    with jax.set_mesh(mesh), pytest.raises(CallError, match="under a mesh with Explicit axes") as raised:
        run()
    line = str(raised.value).split("do:")[1].split(": ...")[0].strip()
    with contextlib.ExitStack() as stack:
        exec(f"stack.enter_context({line.removeprefix('with ')})", {"jax": jax, "mesh": mesh, "stack": stack})
        found = run()
    assert found == pytest.approx(step_of(js.mesh(fsdp=8))(), rel=1e-6)


def test_manual_axes_and_other_names_are_refused():
    for types, match in ((AxisType.Manual, "has Manual axes"), (EXPLICIT, "no axis to shard over")):
        names = ("fsdp",) if types is AxisType.Manual else ("data",)
        mesh = jax.sharding.AbstractMesh((8,), names, axis_types=(types,))
        with pytest.raises(MeshError, match=match):
            js.fully_shard(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), mesh=mesh)


def test_a_plan_needs_no_devices():
    mesh = jax.sharding.AbstractMesh((4, 2), ("fsdp", "tensor"), axis_types=(EXPLICIT,) * 2)
    model = js.fully_shard(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), mesh=mesh)
    assert js.plan(model).mesh == (("fsdp", 4), ("tensor", 2))
