"""Where the platform is faster so, devices send parts of gradients and sum them: plan, program and audit agree."""

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

import jshard as js
from jshard.inspect.communication import traffic_of
from jshard.plans import plan as plans
from jshard.plans.mesh import SumsOnArrival, sums_on_arrival
from tests.engine.fake_devices import Device
from tests.helpers import Config, Decoder, Scanning, compile_to_read, fresh, loss_fn, token_batch
from tests.parity import flat

CONFIG = Config(layers=1, attends=False)
BATCH = token_batch(CONFIG)

grads_of = nnx.jit(nnx.value_and_grad(loss_fn))


@pytest.mark.parametrize(
    ("platform", "kind", "processes", "expected"),
    [
        ("cpu", "cpu", (0, 0, 1, 1), SumsOnArrival.ALWAYS),
        ("cpu", "cpu", (0, 0, 0, 0), SumsOnArrival.NEVER),
        ("gpu", "NVIDIA H100 80GB HBM3", (0, 0, 0, 0), SumsOnArrival.OF_NARROWER),
        ("gpu", "NVIDIA A100-SXM4-80GB", (0, 1, 2, 3), SumsOnArrival.OF_NARROWER),  # a process for each device
        ("gpu", "NVIDIA H100 80GB HBM3", (0, 0, 1, 1), SumsOnArrival.NEVER),
        ("gpu", "AMD Instinct MI300X", (0, 0, 0, 0), SumsOnArrival.NEVER),
        ("tpu", "TPU v5p", (0, 0, 0, 0), SumsOnArrival.NEVER),
    ],
)
def test_where_parts_are_summed_on_arrival(platform, kind, processes, expected):
    devices = [Device(kind, platform, id=i, process_index=process) for i, process in enumerate(processes)]
    assert sums_on_arrival(Mesh(np.array(devices), ("fsdp",))) is expected


def test_gradients_of_stages_are_reduced_in_a_collective():
    devices = [Device("NVIDIA H100 80GB HBM3", id=i) for i in range(4)]
    mesh = Mesh(np.array(devices).reshape(2, 2), ("pipe", "fsdp"))
    assert sums_on_arrival(mesh) is SumsOnArrival.NEVER


def test_a_mesh_without_devices_has_no_processes():
    assert sums_on_arrival(AbstractMesh((2,), ("fsdp",))) is SumsOnArrival.NEVER


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
    monkeypatch.setattr(plans, "sums_on_arrival", lambda mesh: SumsOnArrival.ALWAYS)  # as between processes
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
    monkeypatch.setattr(plans, "sums_on_arrival", lambda mesh: SumsOnArrival.ALWAYS)
    precision = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", keep=("norm/*",))
    placements = [leaf.placement for leaf in js.plan(sharded(CONFIG, precision, fsdp=8)).leaves]
    assert {placement.reduce_wire for placement in placements if placement.dim is not None} == {"float32"}
    narrow = dataclasses.replace(precision, wire_dtype="bfloat16")
    placements = [leaf.placement for leaf in js.plan(sharded(CONFIG, narrow, fsdp=8)).leaves]
    assert {placement.reduce_wire for placement in placements if placement.dim is not None} == {"bfloat16"}


MIXED = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", keep=("norm/*",))


def summed_in_a_host_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "sums_on_arrival", lambda mesh: SumsOnArrival.OF_NARROWER)


def test_of_narrower_gradients_parts_are_sent_as_they_are(monkeypatch):
    summed_in_a_host_of_gpus(monkeypatch)
    plan = js.plan(sharded(CONFIG, MIXED, fsdp=8))
    wires = {leaf.placement.gathered_dtype: leaf.placement.reduce_wire for leaf in plan.leaves}
    assert wires == {"bfloat16": "bfloat16", "float32": ""}
    assert plan.replaces_reduce_scatters
    kinds = {(traffic.kind, traffic.dtype) for traffic in traffic_of(plan.with_reduce_scatters())}
    assert ("reduce-scatter", "float32") in kinds and "all-to-all" not in dict(kinds)


@pytest.mark.parametrize(
    ("part", "sent"),
    [("bfloat16", "bfloat16"), ("float8_e4m3fn", "bfloat16"), ("float16", "float32"), ("float32", "float32")],
)
def test_what_has_not_all_numbers_of_a_part_does_not_send_it(monkeypatch, part, sent):
    summed_in_a_host_of_gpus(monkeypatch)
    plan = js.plan(sharded(CONFIG, MIXED, fsdp=8))
    placement = next(leaf.placement for leaf in plan.leaves if leaf.placement.reduce_wire == "bfloat16")
    assert placement.sending_parts_of(part).reduce_wire == sent
    asked_for = dataclasses.replace(placement, replaces_reduce_scatter=False)
    assert asked_for.sending_parts_of(part).reduce_wire == "bfloat16"


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize(("accumulate", "sync"), [(1, "each"), (2, "each"), (2, "last")])
def test_no_part_is_rounded_and_the_audit_knows_what_is_sent(monkeypatch, scanned, accumulate, sync):
    """Reductions of products in bfloat16 are equal to float32; those of sums of microbatches are sent in float32."""
    config = dataclasses.replace(CONFIG, scanned=scanned, layers=3 if scanned else 2)

    @nnx.jit
    def accumulated(model: Any, tokens: Any, targets: Any) -> Any:
        return js.value_and_grad(loss_fn, accumulate=accumulate, sync=sync)(model, tokens, targets)

    def run(model: Any) -> Any:
        # XLA:CPU would compute in float32 what the program computes in bfloat16, and send more than the program does.
        compiled = accumulated.lower(model, *BATCH).compile({"xla_allow_excess_precision": False})
        return compiled(model, *BATCH)

    expected_loss, expected = run(sharded(config, MIXED, fsdp=8))
    summed_in_a_host_of_gpus(monkeypatch)
    model = sharded(config, MIXED, fsdp=8)
    loss, gradients = run(model)
    assert float(loss) == float(expected_loss)
    for path, x in flat(expected).items():
        scale = np.abs(np.asarray(x)).max()
        np.testing.assert_allclose(flat(gradients)[path], x, rtol=2e-6, atol=1e-6 * scale, err_msg=path)

    lowered = accumulated.lower(model, *BATCH).lowered
    audit = js.audit(compile_to_read(lowered), model=model, accumulate=accumulate, sync=sync)
    assert audit.ok, audit
    # XLA:CPU sends both in float32: only the program that it gets shows what is sent.
    exchanges = [line for line in lowered.as_text().splitlines() if "all_to_all" in line]
    sent = "f32" if sync == "last" else "bf16"
    assert exchanges and all(f"x{sent}>" in line for line in exchanges)


def test_over_inner_axes_one_reduce_scatter_sums_over_all(monkeypatch):
    monkeypatch.setattr(plans, "sums_on_arrival", lambda mesh: SumsOnArrival.ALWAYS)
    plan = js.plan(sharded(CONFIG, js.MixedPrecision(), fsdp=4, expert=2))
    assert {traffic.kind for traffic in traffic_of(plan)} == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize("scanned", [False, True])
def test_products_of_gradients_are_compiled_as_autodiff_writes_them(monkeypatch, scanned):
    monkeypatch.setattr(plans, "sums_on_arrival", lambda mesh: SumsOnArrival.ALWAYS)
    config = dataclasses.replace(CONFIG, scanned=scanned, layers=3)
    model = sharded(config, js.MixedPrecision(), fsdp=8)
    compiled = grads_of.lower(model, *BATCH).lowered.compile()
    # Both operands with their contracted dims on the outside: XLA:CPU has no fast kernel for such a product.
    transposed = "lhs_contracting_dims={0}, rhs_contracting_dims={1}"
    lines = cast(str, compiled.as_text()).splitlines()
    assert not [line for line in lines if " dot(" in line and transposed in line]
