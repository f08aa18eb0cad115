"""Between processes on CPUs, devices send parts of gradients and sum them: plan, program and audit agree."""

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

import jshard as js
from jshard.inspect.communication import traffic_of
from jshard.plans import plan as plans
from jshard.plans.mesh import sums_on_arrival
from tests.helpers import Config, Decoder, Scanning, compile_to_read, fresh, loss_fn, token_batch
from tests.parity import flat

CONFIG = Config(layers=1, attends=False)
BATCH = token_batch(CONFIG)

grads_of = nnx.jit(nnx.value_and_grad(loss_fn))


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh needs of a device."""

    id: int
    platform: str
    process_index: int


@pytest.mark.parametrize(
    ("platform", "processes", "expected"),
    [("cpu", (0, 1), True), ("cpu", (0, 0), False), ("gpu", (0, 1), False), ("tpu", (0, 1), False)],
)
def test_only_on_cpus_and_only_between_processes(platform, processes, expected):
    devices = [Device(i, platform, process) for i, process in enumerate(processes)]
    assert sums_on_arrival(Mesh(np.array(devices), ("fsdp",))) is expected


def test_a_mesh_without_devices_has_no_processes():
    assert not sums_on_arrival(AbstractMesh((2,), ("fsdp",)))


def sharded(config: Config, precision: js.MixedPrecision, **degrees: int) -> Any:
    model = fresh(lambda: (Scanning if config.scanned else Decoder)(config, nnx.Rngs(0)))
    mesh = js.mesh(**degrees)
    placement = js.PlacementPolicy(min_size=1)
    for block in [model.blocks] if config.scanned else model.blocks:
        stacked = dataclasses.replace(placement, stacked=int(config.scanned))
        js.fully_shard(block, mesh=mesh, mixed_precision=precision, placement=stacked)
    return js.fully_shard(model, mesh=mesh, mixed_precision=precision, placement=placement)


@pytest.mark.parametrize(
    ("scanned", "degrees"),
    [
        (False, {"fsdp": 8}),
        pytest.param(True, {"fsdp": 8}, marks=pytest.mark.wide),
        pytest.param(False, {"replica": 2, "fsdp": 4}, marks=pytest.mark.wide),
        pytest.param(False, {"fsdp": 4, "tensor": 2}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_parts_are_sent_as_planned_and_sums_are_those_of_a_reduce_scatter(monkeypatch, scanned, degrees):
    config = dataclasses.replace(CONFIG, scanned=scanned, layers=3 if scanned else 1)
    expected_loss, expected = grads_of(sharded(config, js.MixedPrecision(), **degrees), *BATCH)
    monkeypatch.setattr(plans, "sums_on_arrival", lambda mesh: True)  # as between processes
    model = sharded(config, js.MixedPrecision(), **degrees)
    loss, gradients = grads_of(model, *BATCH)
    assert float(loss) == float(expected_loss)
    for path, x in flat(expected).items():
        np.testing.assert_allclose(flat(gradients)[path], x, rtol=1e-5, atol=1e-7, err_msg=path)

    audit = js.audit(compile_to_read(grads_of.lower(model, *BATCH).lowered), model=model)
    assert audit.ok, audit
    planned = {(traffic.kind, traffic.dtype) for traffic in traffic_of(js.plan(model))}
    assert ("all-to-all", "float32") in planned
    assert any(row.kind == "all-to-all" and row.dtype == "f32" for row in audit.rows)
    assert not any(row.kind == "reduce-scatter" and "fsdp" in (row.over or ()) for row in audit.rows)


def test_sums_are_taken_in_the_reduce_dtype_and_a_narrower_wire_is_kept(monkeypatch):
    monkeypatch.setattr(plans, "sums_on_arrival", lambda mesh: True)
    precision = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", keep=("norm/*",))
    placements = [leaf.placement for leaf in js.plan(sharded(CONFIG, precision, fsdp=8)).leaves]
    assert {placement.reduce_wire for placement in placements if placement.dim is not None} == {"float32"}
    narrow = dataclasses.replace(precision, wire_dtype="bfloat16")
    placements = [leaf.placement for leaf in js.plan(sharded(CONFIG, narrow, fsdp=8)).leaves]
    assert {placement.reduce_wire for placement in placements if placement.dim is not None} == {"bfloat16"}


def test_over_inner_axes_one_reduce_scatter_sums_over_all(monkeypatch):
    monkeypatch.setattr(plans, "sums_on_arrival", lambda mesh: True)
    plan = js.plan(sharded(CONFIG, js.MixedPrecision(), fsdp=4, expert=2))
    assert {traffic.kind for traffic in traffic_of(plan)} == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize("scanned", [False, True])
def test_products_of_gradients_are_compiled_as_autodiff_writes_them(monkeypatch, scanned):
    monkeypatch.setattr(plans, "sums_on_arrival", lambda mesh: True)
    config = dataclasses.replace(CONFIG, scanned=scanned, layers=3)
    model = sharded(config, js.MixedPrecision(), fsdp=8)
    compiled = grads_of.lower(model, *BATCH).lowered.compile()
    # Both operands with their contracted dims on the outside: XLA:CPU has no fast kernel for such a product.
    transposed = "lhs_contracting_dims={0}, rhs_contracting_dims={1}"
    lines = cast(str, compiled.as_text()).splitlines()
    assert not [line for line in lines if " dot(" in line and transposed in line]
