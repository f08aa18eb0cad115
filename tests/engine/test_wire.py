"""Half the wire: parameters gathered in 8 bits with scales, gradients sent in 16 and summed in 32."""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard.engine import gathers, gradient_sums
from jshard.engine.rules import Shard, Value
from jshard.errors import AnnotationError
from jshard.inspect.communication import traffic_of
from jshard.plans import plan as plans
from jshard.plans.placement import Placement, PlacementPolicy, place
from jshard.plans.wires import wire_named
from tests import linen_models
from tests.helpers import Config, Decoder, Scanning, compile_to_read, fresh, loss_fn, token_batch
from tests.parity import flat

HALF = js.MixedPrecision(reduce_dtype="float32", gather_dtype="float8_e4m3fn", wire_dtype="bfloat16")
CONFIG = Config(attends=False)
BATCH = token_batch(CONFIG)


def placement(shape: tuple[int, ...], *, stacked: int = 0, hosts: int = 1, degree: int = 8) -> Placement:
    asked = PlacementPolicy(stacked=stacked, min_size=0)
    return place("kernel", shape, "float32", (), {"replica": 1, "fsdp": degree}, asked, HALF, hosts=hosts)


def on_shards(function: Any, *arrays: Any, ins: Any, out: Any) -> Any:
    mesh = js.mesh(fsdp=8)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False))(*arrays)


# ---- gathers


@pytest.mark.parametrize(
    ("shape", "stacked"), [((64, 24), 0), ((24, 64), 0), ((8, 16, 4), 0), ((3, 40, 16), 1), ((41, 64 * 9), 0)]
)
def test_what_was_quantised_and_gathered_is_the_quantised_whole_bit_for_bit(shape, stacked):
    one = placement(shape, stacked=stacked)
    assert one.gather_wire == "float8_e4m3fn"
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x[(0,) * len(shape)], x[-1] = 1e4, 0.0  # an outlier, and rows of zeros
    whole = jnp.pad(x, [(0, m - n) for n, m in zip(shape, one.stored_shape, strict=True)])
    found = on_shards(
        lambda x: gathers.gather(Value(x, Shard(one)), jnp.float32), whole, ins=one.partition_spec, out=P()
    )
    wire = wire_named("float8_e4m3fn")
    codes, scales = jax.jit(lambda x: wire.packed(x, one.dim, num_layer_dims=stacked))(x)
    wanted = jax.jit(lambda *sent: wire.unpacked(sent, one.dim, jnp.float32, num_layer_dims=stacked))(codes, scales)
    np.testing.assert_array_equal(found, wanted)
    largest = np.abs(x).max(tuple(d for d in range(stacked, x.ndim) if d != one.dim), keepdims=True)
    assert codes.dtype == jnp.uint8 and (np.abs(found - x) <= np.maximum(np.abs(x) / 16, largest / 448 / 2**9)).all()


def quantised(model: nnx.Module, plan: Any) -> None:
    """Rounds each parameter in place, whole, as it is when it is gathered."""
    for leaf in plan.leaves:
        one = leaf.placement
        if one.gather_wire:
            child = lambda node, key: node[key] if isinstance(key, int) else getattr(node, key)
            parameter = functools.reduce(child, leaf.keys[0], model)
            wire = wire_named(one.gather_wire)
            sent = wire.packed(parameter[...], one.dim, num_layer_dims=one.layer_dims)
            parameter[...] = wire.unpacked(sent, one.dim, jnp.float32, num_layer_dims=one.layer_dims)


def plain(config: Config = CONFIG) -> Any:
    return fresh(lambda: (Scanning if config.scanned else Decoder)(config, nnx.Rngs(0)))


def sharded(precision: js.MixedPrecision, config: Config = CONFIG, **degrees: int) -> Any:
    model, mesh = plain(config), js.mesh(**{"fsdp": 8} | degrees)
    for block in [model.blocks] if config.scanned else model.blocks:
        stacked = js.PlacementPolicy(stacked=int(config.scanned))
        js.fully_shard(block, mesh=mesh, mixed_precision=precision, placement=stacked)
    return js.fully_shard(model, mesh=mesh, mixed_precision=precision)


grads_of = nnx.jit(nnx.value_and_grad(loss_fn))


@pytest.mark.parametrize(
    ("config", "degrees"),
    [
        (CONFIG, {"replica": 2, "fsdp": 4}),
        (CONFIG, {"fsdp": 4, "tensor": 2}),
        (CONFIG, {"fsdp": 4, "expert": 2}),
        (dataclasses.replace(CONFIG, scanned=True), {"fsdp": 8}),
    ],
)
def test_a_model_computes_with_what_was_rounded_and_gradients_are_of_that(config, degrees):
    model, rounded = sharded(js.MixedPrecision(gather_dtype="float8_e4m3fn"), config, **degrees), plain(config)
    quantised(rounded, js.plan(model))
    (loss, grads), (wanted, theirs) = grads_of(model, *BATCH), grads_of(rounded, *BATCH)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    exact = float(grads_of(plain(config), *BATCH)[0])
    assert abs(float(wanted) - exact) > 1e-4  # the rounding is seen
    for path, x in flat(theirs).items():
        np.testing.assert_allclose(flat(grads)[path], x, atol=2e-6 * np.abs(x).max(), err_msg=path)


# ---- gradients


def apart(found: dict, wanted: dict) -> float:
    """The relative difference of two trees, L2."""
    squares = lambda arrays: sum(float(np.square(x, dtype=np.float64).sum()) for x in arrays)
    return math.sqrt(squares(found[path] - x for path, x in wanted.items()) / squares(wanted.values()))


@pytest.mark.parametrize("hosts", [1, 2, 8])
def test_each_part_of_a_gradient_is_rounded_once_and_the_sum_is_better_than_that_of_a_ring(hosts):
    one = placement((64, 24), hosts=hosts)
    parts = np.random.default_rng(1).normal(size=(8, 64, 24)).astype(np.float32)
    exact = parts.astype(np.float64).sum(0)
    run = lambda x, to: on_shards(
        lambda x: gradient_sums.reduce_scatter(x[0], to, js.mesh(fsdp=8)), x, ins=P("fsdp"), out=to.partition_spec
    )
    found = np.asarray(run(parts, one), np.float64)
    times = len(one.exchanges({"fsdp": 8}))  # a part is rounded, and where hosts sum first, a sum of parts
    assert (np.abs(found - exact) <= times * 2.0**-8 * np.abs(parts).sum(0, dtype=np.float64)).all()
    ring = parts[0].astype(jnp.bfloat16)
    for part in parts[1:]:
        ring = (ring.astype(np.float32) + part.astype(jnp.bfloat16).astype(np.float32)).astype(jnp.bfloat16)
    error = lambda x: np.sqrt(np.square(np.asarray(x, np.float64) - exact).mean())
    assert error(found) < 0.7 * error(ring)
    whole = np.asarray(run(parts, dataclasses.replace(one, reduce_wire="")), np.float64)
    assert error(whole) < error(found) / 100  # that it is rounded at all


@pytest.mark.parametrize(
    "degrees",
    [{}, {"replica": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}, {"fsdp": 4, "expert": 2}, {"fsdp": 4, "context": 2}],
    ids=str,
)
@pytest.mark.parametrize("hosts", [1, 2])
def test_gradients_are_those_of_one_device_but_for_one_rounding(monkeypatch, hosts, degrees):
    monkeypatch.setattr(plans, "hosts_along", lambda mesh, axis: hosts)
    loss, grads = grads_of(sharded(js.MixedPrecision(reduce_dtype="float32", wire_dtype="bfloat16"), **degrees), *BATCH)
    exact, theirs = grads_of(plain(), *BATCH)
    assert float(loss) == pytest.approx(float(exact), rel=1e-6)
    assert 1e-5 < apart(flat(grads), flat(theirs)) < 4e-3


# ---- what is sent


def bytes_of(plan: Any, paths: list[str]) -> float:
    """Bytes that are sent in a step for each element of some parameters."""
    leaves = tuple(leaf for leaf in plan.leaves if leaf.path in paths)
    sent = sum(t.full_bytes for t in traffic_of(dataclasses.replace(plan, leaves=leaves)))
    return sent / sum(leaf.placement.size for leaf in leaves)


@pytest.mark.parametrize("hosts", [1, 2])
def test_four_bytes_of_a_parameter_are_sent_instead_of_eight(monkeypatch, hosts):
    """Counted in the program that was compiled: elements, and the bytes of those that XLA:CPU does not widen."""
    monkeypatch.setattr(plans, "hosts_along", lambda mesh, axis: hosts)
    model = sharded(
        js.MixedPrecision(
            param_dtype="bfloat16", reduce_dtype="float32", gather_dtype="float8_e4m3fn", wire_dtype="bfloat16"
        )
    )
    plan = js.plan(model)
    before = js.plan(sharded(js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")))
    matrices = [leaf.path for leaf in plan.leaves if leaf.placement.gather_wire and leaf.path.startswith("blocks")]
    assert bytes_of(before, matrices) == 2 + 2 + 4
    scales = 2 * 4 / CONFIG.width  # of rows
    assert bytes_of(plan, matrices) == pytest.approx(4 + (0 if hosts == 1 else 2 / 4) + scales)
    graphdef, state = nnx.split(model)
    step = jax.jit(lambda state, *batch: nnx.value_and_grad(loss_fn)(nnx.merge(graphdef, state), *batch))
    found = js.audit(compile_to_read(step.lower(state, *BATCH)), plan=plan)
    assert found.ok, found
    rows = {(row.kind, row.group_size, row.dtype) for row in found.rows}
    groups = [(8,)] if hosts == 1 else [(4,), (2,)]
    assert {("all-gather", 8, "u8")} | {("all-to-all", *group, "f32") for group in groups} <= rows
    assert not any(row.kind == "reduce-scatter" for row in found.rows)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (
            {"gather_dtype": "bfloat16"},
            "Parameters cannot be gathered in this dtype, and there is no wire of this name",
        ),
        ({"gather_dtype": "int8"}, "Parameters cannot be gathered in this dtype, and there is no wire of this name"),
        ({"wire_dtype": "float8_e4m3b11fnuz"}, "too narrow for a plain cast"),
        ({"param_dtype": "bfloat16", "wire_dtype": "bfloat16"}, "not narrower than their reduce dtype"),
        ({"reduce_dtype": "float32", "wire_dtype": "float32"}, "not narrower than their reduce dtype"),
    ],
)
def test_other_dtypes_are_errors(settings, what):
    with pytest.raises(AnnotationError, match=what):
        js.MixedPrecision(**settings)


def test_vectors_and_what_is_kept_are_not_rounded():
    model = sharded(
        js.MixedPrecision(gather_dtype="float8_e4m3fn", wire_dtype="bfloat16", reduce_dtype="float32", keep=("up/*",))
    )
    wires = {leaf.path: leaf.placement.gather_wire for leaf in js.plan(model).leaves}
    assert wires["blocks/0/down/kernel"] and not wires["blocks/0/up/kernel"] and not wires["blocks/0/up/bias"]


def test_training_continues_as_without():
    """Ten steps of AdamW: losses within half a percent."""
    losses = {}
    for precision in (js.MixedPrecision(reduce_dtype="float32"), HALF):
        model = sharded(precision)
        optimizer = js.shard_optimizer(model, optax.adamw(1e-3))

        @nnx.jit
        def step(model, optimizer, *batch):
            loss, grads = nnx.value_and_grad(loss_fn)(model, *batch)
            optimizer.update(model, grads)
            return loss

        losses[precision] = [float(step(model, optimizer, *BATCH)) for _ in range(10)]
    exact, half = losses.values()
    assert exact[-1] < exact[0] - 0.5
    np.testing.assert_allclose(half, exact, rtol=5e-3)


@pytest.mark.parametrize("sync", ["each", "last"])
def test_microbatches_are_summed_before_or_after_what_is_sent(sync):
    grads = nnx.jit(lambda model, *batch: js.value_and_grad(loss_fn, accumulate=2, sync=sync)(model, *batch))
    loss, found = grads(sharded(js.MixedPrecision(reduce_dtype="float32", wire_dtype="bfloat16")), *BATCH)
    exact, theirs = grads_of(plain(), *BATCH)
    assert float(loss) == pytest.approx(float(exact), rel=1e-6)
    assert 1e-5 < apart(flat(found), flat(theirs)) < 4e-3


def test_a_linen_model_sends_half_as_well():
    plain = linen_models.Residual(256, nn.relu)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)), jnp.float32)

    def outcome(model):
        params = model.init(jax.random.key(0), x)
        return jax.jit(jax.value_and_grad(lambda params: (model.apply(params, x) ** 2).mean()))(params)

    (loss, grads), (exact, theirs) = (
        outcome(js.fully_shard(plain, mesh=js.mesh(fsdp=8), mixed_precision=precision))
        for precision in (js.MixedPrecision(reduce_dtype="float32", wire_dtype="bfloat16"), None)
    )
    assert float(loss) == pytest.approx(float(exact), rel=1e-6)
    assert 1e-5 < apart(*(dict(enumerate(map(np.asarray, jax.tree.leaves(tree)))) for tree in (grads, theirs))) < 4e-3
