"""A wire from outside the package: int8 in blocks, within its bounds and in the bytes that are planned."""

import collections
import dataclasses
import math
import pathlib
import re
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
from jshard.inspect.communication.comparison import hlo_dtype
from jshard.plans import plan as plans
from jshard.plans import wires
from jshard.plans.placement import Placement, PlacementPolicy, place
from tests import linen_models
from tests.engine.test_wire import BATCH, CONFIG, apart, grads_of, on_shards, plain, quantised, sharded
from tests.helpers import compile_to_read, loss_fn
from tests.parity import flat
from tests.wide import wide

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "numerics.md"
(QUANTISER,) = re.findall(r"^```python\n(def largest_other_dim.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def int8_blocks():
    """The quantiser of the page."""
    before = dict(wires.REGISTERED)
    exec(QUANTISER, {"jax": jax, "jnp": jnp, "js": js})
    yield wires.REGISTERED["int8_blocks"]
    wires.REGISTERED.clear()
    wires.REGISTERED.update(before)
    jax.clear_caches()


def precision(**settings: Any) -> js.MixedPrecision:
    both = {"reduce_dtype": "float32", "gather_dtype": "int8_blocks", "wire_dtype": "int8_blocks"}
    return js.MixedPrecision(**both | settings)


def placement(shape: tuple[int, ...], *, stacked: int = 0, hosts: int = 1, shard_dim: int | None = None) -> Placement:
    policy = PlacementPolicy(stacked=stacked, min_size=0, shard_dim=shard_dim)
    return place("kernel", shape, "float32", (), {"replica": 1, "fsdp": 8}, policy, precision(), hosts=hosts)


def largest_of_blocks(x: np.ndarray, dim: int) -> np.ndarray:
    """The largest absolute value of the block of each element: 32 values across a dim of each matrix."""
    across = x.ndim - 1 if dim == x.ndim - 2 else x.ndim - 2
    largest = np.empty_like(x)
    for start in range(0, x.shape[across], 32):
        block = [slice(None)] * x.ndim
        block[across] = slice(start, start + 32)
        largest[tuple(block)] = np.abs(x[tuple(block)]).max(across, keepdims=True)
    return largest


def test_the_quantiser_of_the_page_is_short():
    lines = [line for line in QUANTISER.splitlines() if line and not line.startswith("js.")]
    assert len(lines) <= 20


# ---- gathers

GATHERED = [((64, 40), 0, None), ((40, 64), 0, None), ((3, 64, 40), 1, 1), ((3, 40, 64), 1, 2), ((41, 576), 0, 0)]


@pytest.mark.parametrize(("shape", "stacked", "shard_dim"), GATHERED)
def test_a_gathered_matrix_is_off_by_no_more_than_its_blocks_allow(shape, stacked, shard_dim):
    stored = placement(shape, stacked=stacked, shard_dim=shard_dim)
    assert stored.gather_wire == "int8_blocks"
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x[..., 0, 0], x[..., -1, :] = 1e4, 0.0
    padded = jnp.pad(x, [(0, m - n) for n, m in zip(shape, stored.stored_shape, strict=True)])
    result = on_shards(
        lambda x: gathers.gather(Value(x, Shard(stored)), jnp.float32), padded, ins=stored.partition_spec, out=P()
    )
    error = np.abs(np.asarray(result, np.float64) - x)
    bound = largest_of_blocks(x, stored.dim) / 254
    assert (error <= bound * (1 + 1e-5)).all()
    assert (error > bound / 2).any()  # that it is rounded at all


DEGREES = [{"replica": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}, {"fsdp": 4, "expert": 2}, {"fsdp": 4, "context": 2}]


ROUNDED = [({}, False), ({}, True), (DEGREES[1], True), (DEGREES[2], False)]
MORE_ROUNDED = [wide(degrees, scanned) for degrees in DEGREES for scanned in (False, True)]


@pytest.mark.parametrize(("degrees", "scanned"), [*ROUNDED, *MORE_ROUNDED], ids=str)
def test_a_model_computes_with_what_was_rounded_and_gradients_are_of_that(degrees, scanned):
    config = dataclasses.replace(CONFIG, scanned=scanned)
    model, rounded = sharded(js.MixedPrecision(gather_dtype="int8_blocks"), config, **degrees), plain(config)
    quantised(rounded, js.plan(model))
    (loss, grads), (rounded_loss, rounded_grads) = grads_of(model, *BATCH), grads_of(rounded, *BATCH)
    assert float(loss) == pytest.approx(float(rounded_loss), rel=1e-6)
    exact = float(grads_of(plain(config), *BATCH)[0])
    assert abs(float(rounded_loss) - exact) > 1e-5  # the rounding is seen
    for path, x in flat(rounded_grads).items():
        np.testing.assert_allclose(flat(grads)[path], x, atol=2e-6 * np.abs(x).max(), err_msg=path)


def test_pieces_of_a_gathered_copy_are_sent_as_it_is():
    model = sharded(precision())
    again = js.fully_shard(
        plain(), units="blocks/*", mesh=js.mesh(), mixed_precision=precision(), reshard_after_forward=4
    )
    (loss, grads), (same_loss, same_grads) = grads_of(again, *BATCH), grads_of(model, *BATCH)
    assert float(loss) == pytest.approx(float(same_loss), rel=1e-6)
    for path, x in flat(same_grads).items():
        np.testing.assert_allclose(flat(grads)[path], x, atol=1e-5 * np.abs(x).max(), err_msg=path)
    sent = {t.dtype for t in traffic_of(js.plan(again)) if t.kind == "all-gather" and t.group_size == 4}
    assert sent == {"float32"}


# ---- gradients


@pytest.mark.parametrize("hosts", [1, 2, 8])
@pytest.mark.parametrize(("shape", "stacked", "shard_dim"), GATHERED)
def test_a_sum_is_off_by_no_more_than_the_blocks_of_its_parts_allow(hosts, shape, stacked, shard_dim):
    stored = placement(shape, stacked=stacked, hosts=hosts, shard_dim=shard_dim)
    parts = np.random.default_rng(1).normal(size=(8, *shape)).astype(np.float32)
    result = on_shards(
        lambda x: gradient_sums.reduce_scatter(x[0], stored, js.mesh(fsdp=8)),
        parts,
        ins=P("fsdp"),
        out=stored.partition_spec,
    )
    rows = tuple(slice(0, size) for size in shape)
    exact = parts.astype(np.float64).sum(0)
    error = np.abs(np.asarray(result, np.float64)[rows] - exact)
    bound = sum(largest_of_blocks(part, stored.dim) for part in parts) / 254
    if 1 < hosts < 8:  # sums of a host are rounded once more; they hold no more than the sum of their parts
        of_hosts = (np.abs(parts).reshape(hosts, -1, *shape)).sum(1)
        bound = bound + sum(largest_of_blocks(part, stored.dim) for part in of_hosts) * (1 + 1 / 127) / 254
    assert (error <= bound * (1 + 1e-5)).all()
    assert (error > bound / 10).any()  # that it is rounded at all


def bounds_of_gradients(plan: Any, num_shards: int) -> dict[str, np.ndarray]:
    """The sum over the data shards' parts of the largest value of a block over 254, by parameter of the wire."""
    bounds: dict[str, Any] = collections.defaultdict(float)
    dims = {leaf.path: leaf.placement.dim for leaf in plan.leaves if leaf.placement.reduce_wire}
    for rows in zip(*(np.split(x, num_shards) for x in BATCH), strict=True):
        _, part = grads_of(plain(), *rows)
        for path, x in flat(part).items():
            name = path.replace(".", "/")
            if name in dims:
                bounds[path] += largest_of_blocks(np.asarray(x) / num_shards, dims[name]) / 254
    return bounds


SUMMED = [({}, ""), ({}, "last"), (DEGREES[0], "each"), (DEGREES[1], "last"), (DEGREES[2], ""), (DEGREES[3], "")]
MORE_SUMMED = [wide(degrees, sync) for degrees in DEGREES for sync in ("", "each", "last")]


@pytest.mark.parametrize(("degrees", "sync"), [*SUMMED, *MORE_SUMMED], ids=str)
def test_gradients_of_a_model_are_those_of_float32_within_the_bound(degrees, sync):
    model = sharded(js.MixedPrecision(reduce_dtype="float32", wire_dtype="int8_blocks"), **degrees)
    run = grads_of
    if sync:
        run = nnx.jit(lambda model, *batch: js.value_and_grad(loss_fn, accumulate=2, sync=sync)(model, *batch))
    loss, grads = run(model, *BATCH)
    exact_loss, exact = grads_of(plain(), *BATCH)
    assert float(loss) == pytest.approx(float(exact_loss), rel=1e-6)
    # Parts of more rows hold no more than the sum of those of fewer: with 16 parts the bound is that of any mesh.
    bounds = bounds_of_gradients(js.plan(model), 16)
    assert len(bounds) >= 4
    errors = {path: np.abs(flat(grads)[path] - flat(exact)[path]) for path in bounds}
    for path, bound in bounds.items():
        assert (errors[path] <= bound + 2e-6 * np.abs(flat(exact)[path]).max()).all(), path
    assert max((errors[path] / bounds[path].max()).max() for path in bounds) > 0.02  # that they are rounded at all


# ---- what is sent


@pytest.mark.parametrize(
    ("hosts", "degrees", "scanned"),
    [(1, {}, False), (2, {}, False), (1, {"replica": 2, "fsdp": 4}, False), (1, {"fsdp": 4, "tensor": 2}, False)]
    + [(1, {"fsdp": 4, "expert": 2}, False), (1, {}, True)],
    ids=str,
)
def test_a_program_sends_the_bytes_that_pack_returns(monkeypatch, hosts, degrees, scanned):
    monkeypatch.setattr(plans, "hosts_along", lambda mesh, axis: hosts)
    model = sharded(precision(), dataclasses.replace(CONFIG, scanned=scanned), **degrees)
    plan = js.plan(model)
    graphdef, state = nnx.split(model)
    step = jax.jit(lambda state, *batch: nnx.value_and_grad(loss_fn)(nnx.merge(graphdef, state), *batch))
    audit = js.audit(compile_to_read(step.lower(state, *BATCH)), plan=plan)
    assert audit.ok, audit
    compiled: collections.Counter[tuple[str, int, str]] = collections.Counter()
    for row in audit.rows:
        for window in row.windows:
            for dtype, size in window.sizes:
                compiled[row.kind, row.group_size, dtype] += size * window.executions
    # Exchanges of gradients, as many bytes as planned, in both dtypes.
    exchanges = planned_bytes(plan, "all-to-all")
    assert {dtype for _, _, dtype in exchanges} == {"s8", "f32"}
    assert {key: size for key, size in compiled.items() if key[0] == "all-to-all"} == exchanges
    # Gathers of codes: XLA:CPU may gather once for forward and backward, and does all that forward needs.
    for key, size in planned_bytes(plan, "all-gather").items():
        if key[2] == "s8":
            assert size / 2 <= compiled[key] <= size
    if not degrees and hosts == 1:
        matrices = [leaf.placement.shape[-2:] for leaf in plan.leaves if leaf.placement.reduce_wire]
        layers = [leaf.placement.layers for leaf in plan.leaves if leaf.placement.reduce_wire]
        codes = sum(n * math.prod(shape) for n, shape in zip(layers, matrices, strict=True))
        assert exchanges == {("all-to-all", 8, "s8"): codes, ("all-to-all", 8, "f32"): codes / 32 * 4}


def planned_bytes(plan: js.ShardPlan, kind: str) -> dict[tuple[str, int, str], int]:
    sizes: collections.Counter[tuple[str, int, str]] = collections.Counter()
    for traffic in traffic_of(plan):
        if traffic.kind == kind:
            sizes[kind, traffic.group_size, hlo_dtype(traffic.dtype)] += traffic.full_bytes
    return dict(sizes)


def test_vectors_and_what_is_kept_are_sent_without_the_wire():
    model = sharded(precision(keep=("up/*",)))
    for leaf in js.plan(model).leaves:
        is_packed = leaf.path.endswith("kernel") and "up/" not in leaf.path
        if leaf.path.startswith("blocks"):
            names = (leaf.placement.gather_wire, leaf.placement.reduce_wire)
            assert names == (("int8_blocks",) * 2 if is_packed else ("", "")), leaf.path


def test_a_sharded_vector_is_sent_without_the_wire():
    policy = PlacementPolicy(min_size=0)
    bias = place("bias", (64,), "float32", (), {"replica": 1, "fsdp": 8}, policy, precision())
    assert (bias.dim, bias.gather_wire, bias.reduce_wire) == (0, "", "")


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("degrees", [{}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_the_functions_see_one_layer_of_one_shard(degrees, scanned):
    shapes = set()

    def pack(shard: jax.Array, dim: int) -> tuple[jax.Array, ...]:
        shapes.add((shard.shape, dim))
        return (shard,)

    js.register_wire("seen", pack=pack, unpack=first)
    policy = js.MixedPrecision(reduce_dtype="float32", gather_dtype="seen", wire_dtype="seen")
    config = dataclasses.replace(CONFIG, scanned=scanned)
    model = sharded(policy, config, **degrees)
    layers = [leaf.placement for leaf in js.plan(model).leaves if leaf.placement.gather_wire]
    planned = {(layer.shard_of_layer(dict(js.plan(model).mesh)), layer.dim_of_layer) for layer in layers}
    shapes.clear()
    grads_of.lower(model, *BATCH)
    assert shapes == planned


def test_the_functions_see_one_layer_of_a_stack_that_is_sent_at_once():
    shapes = set()

    def pack(shard: jax.Array, dim: int) -> tuple[jax.Array, ...]:
        shapes.add((shard.shape, dim))
        return (shard,)

    js.register_wire("int8_blocks", pack=pack, unpack=first, replace=True)
    stored = placement((3, 64, 40), stacked=1, hosts=2)
    stack = np.random.default_rng(2).normal(size=(3, 64, 40)).astype(np.float32)

    def there_and_back(x: jax.Array) -> jax.Array:
        whole = gathers.gather(Value(x, Shard(stored)), jnp.float32)
        return gradient_sums.reduce_scatter(whole, stored, js.mesh(fsdp=8))

    shapes.clear()
    result = on_shards(there_and_back, stack, ins=stored.partition_spec, out=stored.partition_spec)
    assert shapes == {((8, 40), 0)}
    np.testing.assert_allclose(result, 8 * stack, rtol=1e-6)


def test_a_plan_holds_the_name_and_is_read_back():
    plan = js.plan(sharded(precision()))
    assert js.ShardPlan.from_json(plan.to_json()) == plan
    assert "int8_blocks" in {leaf.placement.gather_wire for leaf in plan.leaves}
    sent = {traffic.dtype for traffic in js.explain(sharded(precision())).traffic if traffic.kind == "all-to-all"}
    assert sent == {"int8", "float32"}


# ---- models


def test_float8_with_scales_is_a_wire_of_gradients_as_well():
    loss, grads = grads_of(sharded(js.MixedPrecision(reduce_dtype="float32", wire_dtype="float8_e4m3fn")), *BATCH)
    exact_loss, exact = grads_of(plain(), *BATCH)
    assert float(loss) == pytest.approx(float(exact_loss), rel=1e-6)
    assert 1e-3 < apart(flat(grads), flat(exact)) < 2.0**-4


def test_training_continues_as_without():
    """Ten steps of AdamW: losses within a percent."""
    losses = {}
    for policy in (js.MixedPrecision(reduce_dtype="float32"), precision()):
        model = sharded(policy)
        optimizer = js.shard_optimizer(model, optax.adamw(1e-3))

        @nnx.jit
        def step(model, optimizer, *batch):
            loss, grads = nnx.value_and_grad(loss_fn)(model, *batch)
            optimizer.update(model, grads)
            return loss

        losses[policy] = [float(step(model, optimizer, *BATCH)) for _ in range(10)]
    exact, packed = losses.values()
    assert exact[-1] < exact[0] - 0.5
    np.testing.assert_allclose(packed, exact, rtol=1e-2)


def test_a_linen_model_is_sent_over_it_as_well():
    layers = linen_models.Residual(256, nn.relu)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)), jnp.float32)

    def gradients(policy: js.MixedPrecision | None) -> tuple[float, dict[int, np.ndarray]]:
        model = js.fully_shard(layers, mesh=js.mesh(fsdp=8), mixed_precision=policy)
        params = model.init(jax.random.key(0), x)
        loss, grads = jax.jit(jax.value_and_grad(lambda params: (model.apply(params, x) ** 2).mean()))(params)
        return float(loss), dict(enumerate(map(np.asarray, jax.tree.leaves(grads))))

    exact_loss, exact = gradients(None)
    loss, grads = gradients(precision(gather_dtype=None))
    assert loss == pytest.approx(exact_loss, rel=1e-6)
    assert 1e-5 < apart(grads, exact) < 1e-2
    loss, _ = gradients(precision())
    assert 1e-6 < abs(loss / exact_loss - 1) < 1e-2


# ---- registration


def rows(shard: jax.Array, dim: int) -> tuple[jax.Array, ...]:
    return (shard,)


def first(arrays: tuple[jax.Array, ...], dim: int, dtype: Any) -> jax.Array:
    return arrays[0].astype(dtype)


def doubled(arrays: tuple[jax.Array, ...], dim: int, dtype: Any) -> jax.Array:
    return 2 * arrays[0].astype(dtype)


def test_a_replaced_wire_is_that_of_programs_which_were_compiled_before():
    js.register_wire("plain", pack=rows, unpack=first)
    js.register_wire("plain", pack=rows, unpack=first)  # the same again
    model = sharded(js.MixedPrecision(reduce_dtype="float32", wire_dtype="plain"))
    _, grads = grads_of(model, *BATCH)
    with pytest.raises(AnnotationError, match="There is a wire or a dtype of this name"):
        js.register_wire("plain", pack=rows, unpack=doubled)
    js.register_wire("plain", pack=rows, unpack=doubled, replace=True)
    _, grads_of_doubled = grads_of(model, *BATCH)
    path = next(path for path in flat(grads) if "up" in path and "kernel" in path)
    gradient = flat(grads)[path]
    np.testing.assert_allclose(flat(grads_of_doubled)[path], 2 * gradient, atol=1e-6 * np.abs(gradient).max())


@pytest.mark.parametrize("name", ["int8", "bfloat16", "float8_e4m3fn"])
def test_a_dtype_is_no_name_of_a_wire(name):
    with pytest.raises(AnnotationError, match="There is a wire or a dtype of this name"):
        js.register_wire(name, pack=rows, unpack=first, replace=True)


def fails(shard: jax.Array, dim: int) -> tuple[jax.Array, ...]:
    raise ValueError("no matrix of mine")


@pytest.mark.parametrize(
    ("pack", "unpack", "why"),
    [
        (fails, first, "pack(shard, 0) raised ValueError: no matrix of mine"),
        (lambda x, dim: x, first, "returned float32 (32, 64), which is no tuple of arrays"),
        (lambda x, dim: (), first, "returned a tuple (), which is no tuple of arrays"),
        (lambda x, dim: (x.reshape(-1),), first, "returned float32 (2048,): it has no part of 2 dims to gather"),
        (lambda x, dim: (x.astype(jnp.uint2),), first, "numbers of 2 bits are not sent"),
        (rows, lambda arrays, dim, dtype: arrays[1], "unpack(arrays, 0, float32) raised IndexError"),
        (rows, lambda arrays, dim, dtype: arrays[0].T, "of 8 shards returned float32 (64, 256), not float32 (256, 64)"),
        (rows, lambda arrays, dim, dtype: arrays[0] > 0, "returned bool (256, 64), not float32 (256, 64)"),
    ],
)
def test_functions_that_do_not_fit_are_an_error_of_the_annotation(pack, unpack, why):
    js.register_wire("faulty", pack=pack, unpack=unpack)
    with pytest.raises(AnnotationError, match=re.escape(why)) as raised:
        sharded(js.MixedPrecision(gather_dtype="faulty"))
    assert "The wire 'faulty' does not fit a parameter." in str(raised.value) and "up/kernel" in str(raised.value)
