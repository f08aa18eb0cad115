"""A loop over layers gathers a trip's weights in the trip before, whatever its form, and gives the same gradients."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend import core as jex

import jshard as js
from tests.engine.test_token_chain import Region
from tests.helpers import (
    compile_to_read,
    equations_and_trips,
    equations_run,
    fresh,
    mean_square,
    placed,
    with_placement,
)
from tests.parity import GRADIENT_TOLERANCE, flat, worst
from tests.toy_models import Residual, ScannedTower

WIDTH, LAYERS = 32, 5
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def block(rngs: nnx.Rngs) -> Residual:
    return Residual(WIDTH, 2 * WIDTH, rngs, use_bias=False)


class WithSharedParameter(Residual):
    """A block with a parameter that all layers share."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(WIDTH, 2 * WIDTH, rngs, use_bias=False)
        self.shared = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 8)

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x @ self.shared[...])


def stack(kind: Callable, *lengths: int) -> Any:
    build = lambda rngs: kind(rngs)
    for n in reversed(lengths):
        build = nnx.split_rngs(splits=n)(nnx.vmap(build, in_axes=0, out_axes=0))
    return build(nnx.Rngs(0))


def over(step: Callable, *axes: Any) -> Callable:
    """The user's own `nnx.scan` over modules, each stacked or, without an axis, the same in all trips."""
    return lambda x, *parts: nnx.scan(step, in_axes=(nnx.Carry, *axes), out_axes=nnx.Carry)(x, *parts)


def each(x: jax.Array, *blocks: Residual) -> jax.Array:
    return functools.reduce(lambda x, block: block(x), blocks, x)


def by_lax(x: jax.Array, blocks: nnx.Module, wrap: Callable = lambda f: f, **settings: Any) -> jax.Array:
    """The user's own `jax.lax.scan`."""
    graphdef, state = nnx.split(blocks)
    step = wrap(lambda x, state: (nnx.merge(graphdef, state)(x), None))
    return lax.scan(step, x, state, **settings)[0]


def shared_stack() -> WithSharedParameter:
    model = stack(WithSharedParameter, LAYERS)
    model.shared.set_value(model.shared[0])
    return model


@dataclasses.dataclass(frozen=True)
class Form:
    """A loop.

    Args:
        build: makes the modules in it.
        run: the loop.
        stacked: leading dims of each module.
        gathers: what is gathered, of what all parameters are.
    """

    build: Callable[[], tuple]
    run: Callable[..., jax.Array]
    stacked: tuple[int, ...] = (1,)
    gathers: float = 2.0


ONE = lambda: (stack(block, LAYERS),)
SHARED = nnx.StateAxes({nnx.PathContains("shared"): None, ...: 0})

FORMS = {
    "nnx.scan": Form(ONE, over(each, 0)),
    "reverse": Form(ONE, functools.partial(by_lax, reverse=True)),
    "jax.checkpoint": Form(ONE, functools.partial(by_lax, wrap=jax.checkpoint)),
    "a parameter for all layers": Form(lambda: (shared_stack(),), over(each, SHARED), gathers=2.0 * 25 / 21),
    "two units": Form(lambda: (stack(block, LAYERS), stack(block, LAYERS)), over(each, 0, 0), (1, 1)),
    "nested": Form(lambda: (stack(block, 3, 4),), over(lambda x, inner: over(each, 0)(x, inner), 0), (2,)),
    "a unit called twice": Form(ONE, over(lambda x, block: block(block(x)), 0), gathers=4.0),
    "a unit for all trips": Form(
        lambda: (stack(block, LAYERS), stack(block)),
        over(lambda x, block, one: one(block(x)), 0, None),
        (1, 0),
        2.0 * 10 / 6,
    ),
}


class RunsForm(nnx.Module):
    def __init__(self, name: str):
        self.name, self.parts = name, nnx.List(FORMS[name].build())

    def __call__(self, x: jax.Array) -> jax.Array:
        return FORMS[self.name].run(x, *self.parts)


@functools.cache
def builder(name: str) -> Callable[[], RunsForm]:
    return lambda: RunsForm(name)


def annotate(mesh: jax.sharding.Mesh, model: RunsForm, **settings: Any) -> None:
    for part, stacked in zip(model.parts, FORMS[model.name].stacked, strict=True):
        js.fully_shard(part, mesh=mesh, **with_placement(stacked=stacked, min_size=WIDTH, **settings))
    js.fully_shard(model, mesh=mesh)


@functools.cache
def wanted(name: str) -> dict[str, np.ndarray]:
    """Gradients on one device."""
    return flat(nnx.jit(nnx.grad(mean_square))(fresh(builder(name)), X))


def check(name: str, axes: dict[str, int], **settings: Any) -> None:
    mesh = js.mesh(**axes)
    model = placed(builder(name), lambda model: annotate(mesh, model, **settings))
    found = flat(nnx.jit(nnx.grad(mean_square))(model, X))
    apart = {k: worst(found[k], x) for k, x in wanted(name).items()}
    assert max(apart.values()) <= GRADIENT_TOLERANCE, max(apart.items(), key=lambda item: item[1])


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_of_one_device(name):
    check(name, {"fsdp": -1})


@pytest.mark.parametrize(
    ("axes", "settings"),
    [
        ({"replica": 2, "fsdp": 4}, {"prefetch": 3, "remat": "full"}),
        ({"fsdp": -1}, {"prefetch": "48KiB", "remat": "dots"}),
        ({"fsdp": -1}, {"prefetch": 0, "reshard_after_forward": 2}),
        ({"fsdp": -1}, {"prefetch": 40, "reshard_after_forward": False}),
    ],
    ids=str,
)
def test_and_in_every_schedule(axes, settings):
    check("nnx.scan", axes, **settings)


@functools.cache
def traced(name: str, **settings: Any) -> Any:
    """The program of the gradients, and the model."""
    mesh = js.mesh()
    model = js.abstract_init(builder(name), lambda model: annotate(mesh, model, **settings))
    graphdef, state = nnx.split(model)
    return jax.jit(lambda state, x: nnx.grad(mean_square)(nnx.merge(graphdef, state), x)).trace(state, X), model


def loops_with(name: str, jaxpr: Any) -> list[Any]:
    """Bodies of the innermost loops in which a primitive is found."""
    loops = [e.params["jaxpr"].jaxpr for e in equations_run(jaxpr) if e.primitive.name == "scan"]
    has = lambda name, body: any(e.primitive.name == name for e in equations_run(body))
    return [body for body in loops if has(name, body) and not has("scan", body)]


gathering_loops = functools.partial(loops_with, "all_gather")
reducing_loops = functools.partial(loops_with, "reduce_scatter")


def uses(name: str, eqn: Any) -> bool:
    inner = jex.jaxprs_in_params(eqn.params)
    return eqn.primitive.name == name or any(e.primitive.name == name for one in inner for e in equations_run(one))


def waits_for_a_gather(body: Any) -> bool:
    """Whether the first product of a trip needs what the same trip gathers."""
    late: set[Any] = set()
    for eqn in body.eqns:
        needs = any(isinstance(a, jex.Var) and a in late for a in eqn.invars)
        if uses("dot_general", eqn):
            return needs or uses("all_gather", eqn)
        if needs or uses("all_gather", eqn):
            late.update(eqn.outvars)
    raise AssertionError("a trip without a product")


def reduces_its_own(body: Any) -> bool:
    """Whether a trip reduces gradients that it computes itself."""
    region = Region(body)
    return any(region.waits_for(one, region.of_kind("dot_general")) for one in region.of_kind("reduce_scatter"))


@pytest.mark.parametrize("name", FORMS)
def test_a_trip_computes_with_what_the_trip_before_gathered(name):
    loops = gathering_loops(traced(name)[0].jaxpr.jaxpr)
    assert len(loops) == 2  # forward and backward
    assert not any(map(waits_for_a_gather, loops))
    late = gathering_loops(traced(name, prefetch=0)[0].jaxpr.jaxpr)
    assert len(late) == 2
    assert all(map(waits_for_a_gather, late))


@pytest.mark.parametrize("settings", [{}, {"prefetch": 2}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("name", ["nnx.scan", "reverse"])
def test_gradients_are_reduced_in_the_trip_after_theirs(name, settings):
    loops = reducing_loops(traced(name, **settings)[0].jaxpr.jaxpr)
    assert len(loops) == 1  # backward
    assert not any(map(reduces_its_own, loops))
    assert any(map(reduces_its_own, reducing_loops(traced(name, prefetch=0)[0].jaxpr.jaxpr)))


def elements_sent(jaxpr: Any, kind: str) -> int:
    """Elements that a kind of collective takes in, over all trips."""
    sent = ((eqn, trips) for eqn, trips in equations_and_trips(jaxpr) if eqn.primitive.name == kind)
    return sum(trips * sum(a.aval.size for a in eqn.invars) for eqn, trips in sent)


SETTINGS = {
    "as it is": ({}, 1.0),
    "two ahead": ({"prefetch": 2, "remat": "full"}, 1.0),
    "bytes": ({"prefetch": "48KiB", "remat": "dots"}, 1.0),
    "more than there are": ({"prefetch": 40}, 1.0),
    "the compiler's order": ({"prefetch": "compiler"}, 1.0),
    "zero2": ({"prefetch": 2, "reshard_after_forward": False}, 0.5),
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, "as it is") for name in FORMS] + [(name, how) for name in ("nested", "jax.checkpoint") for how in SETTINGS],
)
def test_no_schedule_gathers_or_reduces_for_nothing(name, settings):
    settings, part = SETTINGS[settings]
    program, model = traced(name, **settings)
    total = sum(leaf.placement.size for leaf in js.plan(model).leaves)
    if part < 1 and name == "jax.checkpoint":
        part = 1.0  # the user's remat runs forward again
    assert 8 * elements_sent(program.jaxpr.jaxpr, "all_gather") / total == pytest.approx(part * FORMS[name].gathers)
    assert elements_sent(program.jaxpr.jaxpr, "reduce_scatter") / total == pytest.approx(FORMS[name].gathers / 2)


# ---- A loop outside of any region ---------------------------------------------------------------


@pytest.mark.parametrize(("layers", "stacked"), [(5, 1), (128, 0)])
def test_outside_a_call_a_layer_is_a_row_of_its_stack(layers, stacked):
    """128 layers are the largest dim, along which the stack is split; of 5 a dim of the layer is."""

    def loss(layers):
        run = nnx.scan(lambda x, layer: nnx.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return (run(X, layers) ** 2).mean()

    build = lambda: stack(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs), layers)
    placement = js.PlacementPolicy(stacked=stacked, min_size=WIDTH)
    model = js.shard_init(build, lambda m: js.fully_shard(m, mesh=js.mesh(), placement=placement))
    found, wanted = (flat(nnx.jit(nnx.grad(loss))(layers)) for layers in (model, build()))
    assert max(worst(found[path], x) for path, x in wanted.items()) <= GRADIENT_TOLERANCE


# ---- Layers that no unit is made of --------------------------------------------------------------


DEPTH = 6


class LoopsBy(ScannedTower):
    """A tower whose loop is of any form."""

    loop = "nnx.scan"

    def __init__(self, rngs: nnx.Rngs):
        layer = lambda rngs: Residual(WIDTH, 4 * WIDTH, rngs, nnx.tanh, use_bias=False)
        super().__init__(layer, DEPTH, nnx.Linear(WIDTH, 2, rngs=rngs), rngs)

    def __call__(self, x):
        if self.loop == "nnx.scan":
            return super().__call__(x)
        graph, state = nnx.split(self.blocks)
        trip = lambda x, state: (nnx.merge(graph, state)(x), None)
        if self.loop == "remat":
            trip = jax.checkpoint(trip)
        return self.head(lax.scan(trip, x, state)[0])


def named_tower(name: str, loop: str = "nnx.scan", mesh: dict | None = None, **settings) -> nnx.Module:
    """Under a name of its own, as what was said is not said again; the three lines."""
    kind = type(name, (LoopsBy,), {"loop": loop})
    annotate = lambda m: js.fully_shard(m, mesh=js.mesh(**mesh or {}), **settings)
    return placed(lambda: kind(nnx.Rngs(0)), annotate)


def step(model, x):
    return nnx.value_and_grad(mean_square)(model, x)


BFLOAT16 = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32", output_dtype="float32")


@pytest.mark.parametrize(
    ("loop", "mesh", "settings"),
    [
        ("remat", {"replica": 2, "fsdp": 4}, {}),
        ("nnx.scan", {}, {"mixed_precision": BFLOAT16}),
    ],
    ids=["remat, hsdp", "bfloat16"],
)
def test_each_layer_is_reduced_in_its_trip(loop, mesh, settings):
    """Nowhere is the gradient of all layers whole. Seen to fail with `row_shards` empty."""
    made = named_tower("Reduced", loop, mesh, **settings)
    compiled = compile_to_read(nnx.jit(step).lower(made, X).lowered)
    text = compiled.as_text()
    whole = [f"[{DEPTH},{WIDTH},{4 * WIDTH}]", f"[{DEPTH},{4 * WIDTH},{WIDTH}]"]
    assert not [shape for shape in whole if shape in text]
    assert js.audit(compiled, model=made).ok
    if "mixed_precision" not in settings:
        loss, gradients = nnx.jit(step)(made, X)
        wanted, of_plain = nnx.jit(step)(LoopsBy(nnx.Rngs(0)), X)
        assert abs(float(loss - wanted)) <= 1e-5
        found, of_plain = flat(gradients), flat(of_plain)
        assert max(worst(found[path], x) for path, x in of_plain.items()) <= GRADIENT_TOLERANCE


class Waves(nnx.Module):
    """A layer of which forward saves several arrays of one type."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 8)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.sin(jnp.cos(x @ self.kernel[...]))


def test_buffers_of_one_type_are_not_copied_before_the_loop():
    """XLA merges buffers that begin alike. Seen to fail with all of them zero."""
    build = lambda: ScannedTower(Waves, DEPTH, nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(1)), nnx.Rngs(0))

    def annotate(model: ScannedTower) -> None:
        js.fully_shard(model.blocks, mesh=js.mesh(), **with_placement(stacked=1, min_size=WIDTH))
        js.fully_shard(model, mesh=js.mesh())

    model = placed(build, annotate)
    text = compile_to_read(nnx.jit(step).lower(model, X).lowered).as_text() or ""
    entry = text[text.index("\nENTRY ") :]
    saved = f"f32[{DEPTH},{len(X) // 8},{WIDTH}]"
    assert saved in entry
    assert not re.findall(rf"= {re.escape(saved)}\S* copy\(", entry)


# ---- Units in one loop with settings of their own ------------------------------------------------


@pytest.mark.parametrize("prefetch", [(1, 0), (0, 2), ("compiler", 1), (1, "compiler")], ids=str)
def test_units_in_a_loop_may_prefetch_differently(prefetch):
    """A unit on demand in front of one that defers its gradients must not expect a gather that it did not begin."""
    mesh = js.mesh()

    def annotate_each(model: RunsForm) -> None:
        for part, ahead in zip(model.parts, prefetch, strict=True):
            js.fully_shard(part, mesh=mesh, prefetch=ahead, **with_placement(stacked=1, min_size=WIDTH))
        js.fully_shard(model, mesh=mesh)

    name = "two units"
    model = placed(builder(name), annotate_each)
    gradients = flat(nnx.jit(nnx.grad(mean_square))(model, X))
    apart = {path: worst(gradients[path], x) for path, x in wanted(name).items()}
    assert max(apart.values()) <= GRADIENT_TOLERANCE, apart


# ---- What all layers read ------------------------------------------------------------------------


class ReadsContext(nnx.Module):
    """A layer that also reads a value that all layers share, as those of a decoder read the output of an encoder."""

    def __init__(self, rngs: nnx.Rngs):
        self.of_x = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.of_context = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.of_x(x)) * self.of_context(context)


class ReadContext(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.encoder = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(ReadsContext))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        context = self.encoder(x)
        run = nnx.scan(lambda x, block: block(x, context), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.blocks)


def test_what_all_layers_read_is_saved_once():
    """Where it was a result of each layer's forward, a row of it was saved for each."""

    def annotate(model: ReadContext) -> None:
        js.fully_shard(model.blocks, mesh=js.mesh(), remat="full", **with_placement(stacked=1, min_size=WIDTH))
        js.fully_shard(model, mesh=js.mesh(), remat="none")

    model = placed(lambda: ReadContext(nnx.Rngs(0)), annotate)
    graphdef, params = nnx.split(model)
    grad = jax.grad(lambda params: mean_square(nnx.merge(graphdef, params, copy=True), X))
    loops = [eqn for eqn in equations_run(jax.make_jaxpr(grad)(params).jaxpr) if eqn.primitive.name == "scan"]
    stacked = [v.aval.shape for v in loops[0].outvars if v.aval.shape[0] == LAYERS]  # of forward
    assert stacked == [(LAYERS, len(X) // 8, WIDTH)]  # what each layer begins with, and not the context

    sharded = flat(grad(params))
    plain_graphdef, plain_params = nnx.split(ReadContext(nnx.Rngs(0)))
    plain = flat(jax.grad(lambda params: mean_square(nnx.merge(plain_graphdef, params, copy=True), X))(plain_params))
    assert max(worst(sharded[path], x) for path, x in plain.items()) <= GRADIENT_TOLERANCE
