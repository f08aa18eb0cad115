"""The program itself says when a unit may be gathered: how early, no earlier, and in which order gradients go.

XLA drops a barrier's output that no one uses, with what went in for it; then the chain falls away silently. So
the dependencies are read after the same pruning.
"""

import collections
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import jshard as js
from jshard.engine import gradient_sums
from jshard.engine.schedule import unit_schedule
from jshard.plans.mesh import reduces_before_gathers
from tests.engine.fake_devices import Device
from tests.engine.program_order import Node, Region, regions
from tests.helpers import Block, Config, Decoder, equations_and_trips, loss_fn, token_batch
from tests.linen_models import WIDTH
from tests.linen_models import Layer as LinenLayer

LAYERS = 6
CONFIG = Config(layers=LAYERS, attends=False)
BATCH = token_batch(CONFIG, batch=16, length=8)


@pytest.fixture(autouse=True, scope="module")
def compiler_fuses_units():
    """The programs are those of accelerators: on CPUs, inputs are in the barriers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_schedule, "fuses_units", lambda mesh: True)
        yield


def block(i: int) -> str:
    return f"blocks/{i}"


@functools.cache
def traced(**settings: Any) -> tuple[Region, Region]:
    """The forward and the backward region of a step of the unrolled decoder."""
    mesh = js.mesh(replica=2, fsdp=4)

    def annotate(model: Decoder) -> None:
        js.fully_shard(model, units=Block, mesh=mesh, **settings)

    model = js.abstract_init(lambda: Decoder(CONFIG, nnx.Rngs(0)), annotate)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda params: loss_fn(nnx.merge(graphdef, params, rest, copy=True), *map(jax.numpy.asarray, BATCH))
    found = regions(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    assert len(found) == 2
    return Region(found[0]), Region(found[1])


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_unit_is_gathered_so_far_ahead_and_no_farther(ahead, remat):
    forward, backward = traced(prefetch=ahead, remat=remat)
    for i in range(LAYERS):
        for gather in forward.find("all_gather", block(i)):
            products = lambda k: forward.find("dot_general", block(k))
            for k in range(i):  # gathered while the unit `ahead` units before it computes: after those before that one
                assert forward.waits_for(gather, products(k)) == (k < i - ahead), (i, k)
        again = backward.find("all_gather", block(i), backward=True)
        assert len(again) == 2  # kernels; the rest is too small to shard
        for gather in again:
            for k in range(i + 1, LAYERS):
                waits = backward.waits_for(gather, backward.find("dot_general", block(k), backward=True))
                assert waits == (k > i + ahead), (i, k)
            assert backward.waits_for(gather, backward.of_kind("optimization_barrier"))  # until there are cotangents


def test_gradients_are_reduced_in_order():
    _, backward = traced(prefetch=1, remat="none")
    for i in range(LAYERS - 1):
        later = backward.find("reduce_scatter", block(i + 1), backward=True)
        for reduce in backward.find("reduce_scatter", block(i), backward=True):
            assert backward.waits_for(reduce, later)
        # Backward of one unit runs ahead of one reduction, not of two: what is not yet reduced is bounded.
        if i < LAYERS - 2:
            after_next = backward.find("reduce_scatter", block(i + 2), backward=True)
            assert all(backward.waits_for(g, after_next) for g in backward.find("reduce_scatter", block(i), True))


def test_the_sum_over_replicas_begins_behind_the_next_unit_and_no_unit_waits_for_it():
    """The reduce-scatter has the next unit beside it, the sum over the replicas the one after."""
    _, backward = traced(prefetch=1, remat="none")
    products = lambda k: backward.find("dot_general", block(k), backward=True)
    for i in range(2, LAYERS):
        later = [product for k in range(i - 1) for product in products(k)]
        for reduce in backward.find("reduce_scatter", block(i), backward=True):
            (shard,) = reduce.outputs
            (barrier,) = (n for n in backward.of_kind("optimization_barrier") if shard in n.inputs)
            ordered = barrier.outputs[barrier.inputs.index(shard)]
            (total,) = (n for n in backward.of_kind("psum") if ordered in n.inputs)
            assert backward.waits_for(total, products(i - 1))
            assert not backward.waits_for(total, later)
            assert not any(backward.waits_for(product, [total]) for product in later)


def barriers_behind_the_cast(region: Region, reduction: Node) -> int:
    """How many barriers a gradient passes between the cast to the dtype of its sum, and the sum."""
    made = {v: node for node in region.nodes for v in node.outputs}
    num_barriers = 0
    (x,) = reduction.inputs
    while made[x].kind != "convert_element_type":
        node = made[x]
        num_barriers += node.kind == "optimization_barrier"
        x = node.inputs[node.outputs.index(x)]
    return num_barriers


@pytest.mark.parametrize(("on_tpus", "of_blocks", "of_root"), [(False, 0, 0), (True, 2, 1)])
def test_gradients_are_cast_when_they_are_summed_and_on_tpus_in_front_of_their_barrier(
    on_tpus, of_blocks, of_root, monkeypatch
):
    """Two units' gradients are whole at a time: in the narrower dtype, except where the sum could not be hidden."""
    monkeypatch.setattr(gradient_sums, "is_of_tpus", lambda mesh: on_tpus)
    gradient_sums.reduce_unit.clear_cache()
    half = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")
    _, backward = traced.__wrapped__(prefetch=1, mixed_precision=half)
    gradient_sums.reduce_unit.clear_cache()
    reductions = [n for n in backward.of_kind("reduce_scatter") if n.backward]
    barriers = {(n.unit.startswith("blocks"), barriers_behind_the_cast(backward, n)) for n in reductions}
    assert barriers == {(True, of_blocks), (False, of_root)}


def test_small_gradients_of_all_units_are_summed_at_once_and_no_unit_but_the_last_waits_for_them():
    _, backward = traced(prefetch=1, remat="none")
    joined = [n for n in backward.of_kind("concatenate") if len(n.inputs) > LAYERS]
    (of_all,) = joined  # of each block four: what its norms and the products' biases are
    (total,) = (n for n in backward.of_kind("psum") if of_all.outputs[0] in n.inputs)
    for node in backward.live:
        if node.unit.startswith("blocks") and backward.waits_for(node, [total]):
            assert node.unit == block(0)  # the last one of backward: its gradients are reduced after all others
    num_blocks_before = sum(
        backward.waits_for(total, backward.find("dot_general", block(i), True)) for i in range(LAYERS)
    )
    assert num_blocks_before == LAYERS


def test_without_prefetch_the_order_is_the_compilers():
    forward, backward = traced(prefetch="compiler")
    for i in range(LAYERS):
        for gather in forward.find("all_gather", block(i)):
            assert not any(forward.waits_for(gather, forward.find("dot_general", block(k))) for k in range(LAYERS))
        for gather in backward.find("all_gather", block(i), backward=True):
            products = lambda k: backward.find("dot_general", block(k), backward=True)
            assert not any(backward.waits_for(gather, products(k)) for k in range(LAYERS))
            assert backward.waits_for(gather, backward.of_kind("optimization_barrier"))  # until there are cotangents


def test_backward_waits_for_what_forward_kept_only_where_it_gathers():
    """Held back together, all residuals would be there until the first gradients are."""
    _, backward = traced(reshard_after_forward=False)
    computed = {v for node in backward.nodes for v in node.outputs}
    assert backward.of_kind("reduce_scatter") and not backward.of_kind("all_gather")
    assert not [n for n in backward.of_kind("optimization_barrier") if computed.isdisjoint(n.inputs)]


def test_barriers_of_backward_hold_back_nothing_that_forward_has_saved():
    """Forward would have to store every value that backward reads; else XLA computes cheap ones again."""
    _, backward = traced(prefetch=1, remat="none")
    tied = {v for barrier in backward.of_kind("optimization_barrier") for v in barrier.inputs}
    assert len(backward.activations) > LAYERS
    assert len(tied.intersection(backward.activations)) == 1  # the cotangent of the scores


def programs_of_half(**settings: Any) -> list[Any]:
    """The programs of the forward and the backward region of a decoder that computes in bfloat16."""
    half = js.MixedPrecision(param_dtype="bfloat16", **settings)
    model = js.abstract_init(
        lambda: Decoder(CONFIG, nnx.Rngs(0)),
        lambda model: js.fully_shard(model, units=Block, mesh=js.mesh(), mixed_precision=half, remat="none"),
    )
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda params: loss_fn(nnx.merge(graphdef, params, rest, copy=True), *map(jax.numpy.asarray, BATCH))
    return regions(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)


def test_barriers_of_forward_hold_back_parameters_and_no_activations():
    """XLA computes nothing across a barrier: a residual sum and the norm behind it would be two kernels."""
    forward, _ = programs_of_half()
    held_back = tied(forward)
    assert held_back
    assert max(aval.ndim for aval in held_back) == 2  # activations are (batch, length, width)


def test_small_parameters_that_are_whole_are_behind_no_barrier():
    """Behind one, the scale of a norm is another array in backward, whose kernels read both."""
    for region in map(Region, programs_of_half()):
        tied = {v for barrier in region.of_kind("optimization_barrier") for v in barrier.inputs}
        assert len(region.vectors) >= 3 * LAYERS
        assert tied.isdisjoint(region.vectors)


def test_gradients_wait_in_the_dtype_of_their_sum():
    """Where they do not, each is cast to the stored dtype by a kernel in front of the barrier."""
    _, backward = programs_of_half(reduce_dtype="bfloat16")
    _, sums_in_float32 = programs_of_half(reduce_dtype="float32")
    num_reduced_before = 2 * (LAYERS - 1)  # kernels of the blocks that another one follows
    num_held = lambda program: sum(aval.dtype == jnp.float32 and aval.ndim == 2 for aval in tied(program))
    assert num_held(sums_in_float32) - num_held(backward) == num_reduced_before


def in_flight(region: Region, sizes: dict[str, int], *, backward: bool) -> dict[str, int]:
    """For each unit, the bytes of other units whose gathers may have begun when it starts to compute and that compute
    later."""
    order = list(sizes) if not backward else list(reversed(sizes))
    most = collections.Counter()
    for at, unit in enumerate(order):
        products = region.find("dot_general", unit, backward)
        for later in order[at + 1 :]:
            gathers = region.find("all_gather", later, backward)
            if not any(region.waits_for(g, products) for g in gathers):
                most[unit] += sizes[later]
    return most


@pytest.mark.parametrize("units", [0, 2])
def test_a_budget_in_bytes_is_kept(units):
    mesh = js.mesh(fsdp=-1)
    model = js.abstract_init(lambda: Decoder(CONFIG, nnx.Rngs(0)), lambda m: js.fully_shard(m, units=Block, mesh=mesh))
    plan = js.plan(model)
    size = {
        block(i): sum(x.placement.gathered_bytes for x in plan.unit_leaves(block(i)) if x.placement.dim is not None)
        for i in range(LAYERS)
    }
    unit = size[block(0)]
    forward, backward = traced(prefetch=f"{unit * units + unit // 2} B")
    for found, back in ((forward, False), (backward, True)):
        most = in_flight(found, size, backward=back)
        assert max(most.values(), default=0) == unit * units


class Looped(nnx.Module):
    """A loop between two units."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(32, 32, rngs=rngs), nnx.Linear(32, 32, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(5)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(js.scan_layers(self.layers, jax.numpy.tanh(self.first(x))))


@functools.cache
def looped(ahead: int) -> tuple[Any, Any]:
    """The programs of the forward and the backward region."""
    mesh = js.mesh(replica=2, fsdp=4)

    def annotate(model: Looped) -> None:
        js.fully_shard(model, units=nnx.Linear, mesh=mesh, placement=js.PlacementPolicy(min_size=64), prefetch=ahead)

    model = js.abstract_init(lambda: Looped(nnx.Rngs(0)), annotate)
    graphdef, params = nnx.split(model)
    loss = lambda params, x: (nnx.merge(graphdef, params, copy=True)(x) ** 2).mean()
    x = jax.ShapeDtypeStruct((16, 32), "float32")
    forward, backward = regions(jax.make_jaxpr(jax.grad(loss))(params, x).jaxpr)
    return forward, backward


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_loop_stands_in_the_order_of_the_units_around_it(ahead):
    """Its first layers are gathered beside the unit before it, and the unit after it beside its last layers."""
    found = looped(ahead)
    for region, before, after, is_backward in (
        (Region(found[0]), "first", "last", False),
        (Region(found[1]), "last", "first", True),
    ):
        gathers = region.find("all_gather", "layers/*", is_backward)
        for k, gather in enumerate(gathers[: ahead + 1]):
            assert region.waits_for(gather, region.find("dot_general", before, is_backward)) == (k == ahead), k
        (loop,) = (node for node in region.live if node.kind == "scan")
        last_trips = region.find("dot_general", "layers/*", is_backward)
        for gather in region.find("all_gather", after, is_backward):  # backward of the first needs no kernel
            assert region.waits_for(gather, [loop]) and not region.waits_for(gather, last_trips)


def test_reductions_continue_in_order_through_a_loop():
    """Else gradients of a loop's last trip would be held until the step ends."""
    backward = Region(looped(1)[1])
    of_last_trip = backward.find("reduce_scatter", "layers/*", backward=True)[-1:]
    after = backward.find("reduce_scatter", "first", backward=True)
    assert after and all(backward.waits_for(reduce, of_last_trip) for reduce in after)


def body_of_loop(jaxpr: Any) -> Any:
    (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return loop.params["jaxpr"].jaxpr


def test_what_a_loop_is_scanned_over_is_cut_when_it_is_read():
    """No gather or reduction of a trip waits until the trip has cut its activations from what forward stacked."""
    body = Region(body_of_loop(looped(1)[1]))
    rows = body.of_kind("dynamic_slice")
    assert len(rows) > 1
    for sent in [*body.of_kind("all_gather"), *body.of_kind("reduce_scatter")]:
        assert sum(body.waits_for(sent, [row]) for row in rows) == 1  # the shard of the next trip, which is small


def test_rows_of_peeled_trips_are_cut_when_the_trip_begins():
    """Their stacks are there long before: the copies of all rows would be in memory until then."""
    backward = Region(looped(1)[1])
    stacks = set(backward.activations)
    rows = backward.of_kind("dynamic_slice")
    assert not any(stacks.intersection(row.inputs) for row in rows)
    cotangents = backward.find("dot_general", "last", backward=True)
    saved = [row for row in rows if backward.waits_for(row, cotangents)]  # others are of parameters
    (loop,) = backward.of_kind("scan")
    assert [backward.waits_for(row, [loop]) for row in saved] == [False, True]  # of the first trip, and of the last


def test_a_loop_gathers_large_units_once_the_gradients_of_the_trip_before_are_reduced(monkeypatch):
    """Side by side they take as long, and the memory of both. Small ones need little."""
    small = looped(1)
    monkeypatch.setattr(unit_schedule, "GATHERED_IN_TURN_BYTES", 32 * 32 * 4)
    large = looped.__wrapped__(1)
    for program, in_turn in ((small, False), (large, True)):
        body = Region(body_of_loop(program[1]))
        (reduce,) = body.of_kind("reduce_scatter")
        (gather,) = body.of_kind("all_gather")
        assert body.waits_for(gather, [reduce]) == in_turn


@pytest.mark.parametrize(
    ("kind", "platform", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", True),
        ("NVIDIA A100-SXM4-80GB", "gpu", False),
        ("AMD Instinct MI300X", "gpu", False),
        ("TPU v5p", "tpu", False),
        ("cpu", "cpu", True),
    ],
)
def test_where_collectives_start_as_early_as_possible_gathers_wait_for_no_reduction(kind, platform, expected):
    """The compiler would wait for the reduction at once, to start them."""
    assert reduces_before_gathers(Mesh(np.array([Device(kind, platform)]), ("fsdp",))) is expected


def test_the_unit_before_a_loop_is_reduced_beside_its_first_trip():
    """Else its gradients would be whole while the loop runs."""
    backward = Region(looped(1)[1])
    (loop,) = backward.of_kind("scan")
    reduces = backward.find("reduce_scatter", "last", backward=True)
    assert reduces
    for reduce in reduces:
        assert backward.waits_for(loop, [reduce])
        assert not backward.waits_for(reduce, backward.find("dot_general", "layers/*", backward=True))


class WithHead(Looped):
    """Its head belongs to the root: no unit reduces the gradient."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.head = nnx.Param(jax.random.normal(rngs.params(), (32, 64)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) @ self.head[...]


def test_a_loop_begins_once_the_gradients_of_the_head_are_computed():
    """Else what they are computed from would be in memory while the loop runs."""

    def annotate(model: WithHead) -> None:
        placement = js.PlacementPolicy(min_size=64)
        js.fully_shard(model, units=nnx.Linear, mesh=js.mesh(), placement=placement)

    model = js.abstract_init(lambda: WithHead(nnx.Rngs(0)), annotate)
    graphdef, params = nnx.split(model)
    loss = lambda params, x: (nnx.merge(graphdef, params, copy=True)(x) ** 2).mean()
    x = jax.ShapeDtypeStruct((16, 32), "float32")
    backward = Region(regions(jax.make_jaxpr(jax.grad(loss))(params, x).jaxpr)[1])
    (loop,) = backward.of_kind("scan")
    of_head = [n for n in backward.of_kind("dot_general") if n.unit in ("", "(root)")]
    assert len(of_head) == 2
    assert all(backward.waits_for(loop, [product]) for product in of_head)


def test_without_prefetch_a_trip_ends_when_its_gradients_are_reduced():
    """The compiler runs two trips as one: there would be gradients of two."""
    body = body_of_loop(looped(0)[1])
    region = Region(body)
    (reduce,) = region.of_kind("reduce_scatter")
    late = set(reduce.outputs)
    for node in region.nodes:
        if late.intersection(node.inputs):
            late.update(node.outputs)
    assert late.issuperset(region.results)


class WideLayer(nnx.Module):
    """Its first kernel is sharded along its last dim, which is the longer one."""

    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.numpy.tanh(self.up(x)))


class WideLayers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([WideLayer(rngs) for _ in range(5)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return js.scan_layers(self.layers, x)


@functools.cache
def bodies_of_wide_layers(reduce_dtype: str | None = None) -> list[Any]:
    """The bodies of the loops of forward and backward, whose parameters are gathered in bfloat16."""

    def annotate(model: WideLayers) -> None:
        placement = js.PlacementPolicy(min_size=64)
        half = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype=reduce_dtype)
        settings = {"placement": placement, "mixed_precision": half, "remat": "none"}
        js.fully_shard(model, units=WideLayer, mesh=js.mesh(), **settings)

    model = js.abstract_init(lambda: WideLayers(nnx.Rngs(0)), annotate)
    graphdef, params = nnx.split(model)
    loss = lambda params, x: (nnx.merge(graphdef, params, copy=True)(x).astype("float32") ** 2).mean()
    x = jax.ShapeDtypeStruct((16, 32), "float32")
    return [body_of_loop(region) for region in regions(jax.make_jaxpr(jax.grad(loss))(params, x).jaxpr)]


def tied(body: Any) -> list[Any]:
    """The types of what barriers hold back."""
    types = []
    for eqn, _ in equations_and_trips(body):
        if eqn.primitive.name == "optimization_barrier":
            types += [atom.aval for atom in eqn.invars]
    return types


def test_a_reduction_in_a_wider_dtype_holds_back_no_gather(monkeypatch):
    """It takes as long as two gathers: GPT-175B would wait for it."""
    monkeypatch.setattr(unit_schedule, "GATHERED_IN_TURN_BYTES", 0)
    _, backward = bodies_of_wide_layers.__wrapped__("float32")  # gathered in bfloat16
    body = Region(backward)
    gathers, reductions = body.of_kind("all_gather"), body.of_kind("reduce_scatter")
    assert gathers and reductions
    assert not any(body.waits_for(gather, reductions) for gather in gathers)


def test_gradients_wait_in_the_order_in_which_they_are_sent():
    """Where they do not, the compiler copies each before its reduce-scatter: it sends parts that are contiguous."""
    _, backward = bodies_of_wide_layers()
    # The parameter is (32, 64), and its gradient (64, 32). Two barriers have the parameter: of those that are gathered
    # ahead, and of the gradients that are reduced after small ones.
    assert [v.aval.shape for v in backward.outvars].count((32, 64)) == 1
    assert [aval.shape for aval in tied(backward)].count((32, 64)) == 2


def test_rows_that_are_gathered_ahead_are_cast_before_they_are_tied():
    """Where they are not, each is sliced into an array of its own, in the stored dtype, and read again."""
    forward, _ = bodies_of_wide_layers()  # the barriers of backward also have reduced gradients, as they are stored
    shards = [aval for aval in tied(forward) if aval.shape in ((32, 64 // 8), (64 // 8, 32))]
    assert shards and {aval.dtype for aval in shards} == {jnp.dtype("bfloat16")}


def test_rows_of_parameters_and_gradients_do_not_choose_the_layout_of_their_stacks():
    """Where they do, the compiler copies whole stacks before and after the loop: twice the parameters on a device."""
    forward, backward = bodies_of_wide_layers()
    for body, times in ((forward, 1), (backward, 2)):  # backward also writes the rows of gradients
        found = collections.Counter()
        for eqn, _ in equations_and_trips(body):
            if eqn.primitive.name == "layout_constraint":
                found[eqn.outvars[0].aval.shape] += 1
        assert found[32, 64 // 8] == times and found[64 // 8, 32] == times


@pytest.mark.parametrize(("width", "num_gathers"), [(2048, 1), (4096, 2)])
def test_small_parameters_are_gathered_apart_only_beside_large_ones(width, num_gathers):
    """A second gather of a small block costs the latency of one; behind a large one, a small one would be late."""
    settings = {"mixed_precision": js.MixedPrecision(param_dtype="bfloat16"), "units": nnx.Linear}
    model = js.abstract_init(
        lambda: nnx.Sequential(nnx.Linear(width, width, rngs=nnx.Rngs(0))),
        lambda model: js.fully_shard(model, mesh=js.mesh(), **settings),
    )
    graphdef, params = nnx.split(model)
    x = jax.ShapeDtypeStruct((16, width), "float32")
    jaxpr = jax.make_jaxpr(lambda params, x: nnx.merge(graphdef, params, copy=True)(x))(params, x).jaxpr
    gathers = [eqn for eqn, _ in equations_and_trips(jaxpr) if eqn.params.get("name") == "gather_unit"]
    barriers = [
        eqn for eqn, _ in equations_and_trips(gathers[0].params["jaxpr"].jaxpr) if "barrier" in str(eqn.primitive)
    ]
    assert 1 + len(barriers) == num_gathers


# ---- A unit is gathered once a pass --------------------------------------------------------------


NUM_LAYERS = 4
ROWS = jnp.zeros((16, WIDTH))


class LoopsOrScans(nn.Module):
    remat: bool
    scan: bool

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(LinenLayer) if self.remat else LinenLayer
        if self.scan:
            stacked: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(layer, length=NUM_LAYERS, **stacked)(name="layers")(x, None)[0]
        for _ in range(NUM_LAYERS):
            x, _ = layer()(x, None)
        return x


@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize(
    ("remat", "settings"), [(False, {}), (True, {"prefetch": 0}), (True, {"reshard_after_forward": 4})]
)
def test_each_unit_is_gathered_once_a_pass(settings, remat, scan):
    assert_gathered(2 * NUM_LAYERS, remat, scan, settings)


@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_what_is_kept_is_gathered_once(scan):
    assert_gathered(NUM_LAYERS, False, scan, {"reshard_after_forward": False})


def assert_gathered(times: int, remat: bool, scan: bool, settings: dict[str, Any]) -> None:
    model = js.fully_shard(LoopsOrScans(remat, scan), mesh=js.mesh(), units=LinenLayer, **settings)
    params = js.abstract_init(lambda: model.init(jax.random.key(0), ROWS)["params"], model)
    grad = jax.grad(lambda params: (model.apply({"params": params}, ROWS) ** 2).mean())
    found = collections.Counter()
    for eqn, trips in equations_and_trips(jax.make_jaxpr(grad)(params).jaxpr):
        if eqn.primitive.name == "all_gather":
            found[eqn.outvars[0].aval.shape] += trips
    assert found == {(WIDTH, 4 * WIDTH): times, (4 * WIDTH, WIDTH): times}
