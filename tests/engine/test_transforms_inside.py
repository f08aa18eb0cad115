"""Flax's own transformations inside a model; its Python runs as often as without `js.fully_shard`."""

import collections
import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

import jshard as js
from tests.helpers import mean_square, placed

X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)


class LooksUpGelu(nnx.Module):
    """A block that looks its activation up when it is called, as tools that replace operations expect."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.down = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Rematted(LooksUpGelu):
    __call__ = nnx.remat(LooksUpGelu.__call__)


def run(block, x):
    return block(x)


def loop(block, x):
    return nnx.fori_loop(0, 2, lambda i, carry: (carry[0], carry[0](carry[1])), (block, x))[1]


def scan(block, x):
    step = lambda carry, _: ((carry[0], carry[0](carry[1])), None)
    (_, x), _ = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))((block, x), jnp.arange(2))
    return x


FORMS = {
    "a decorated method": (Rematted, run),
    "jit": (LooksUpGelu, lambda block, x: nnx.jit(run)(block, x)),
    "jit of remat": (LooksUpGelu, lambda block, x: nnx.jit(nnx.remat(run))(block, x)),
    "cond": (LooksUpGelu, lambda block, x: nnx.cond(x.sum() > 0, run, lambda block, x: 2 * block(x), block, x)),
    "vmap": (LooksUpGelu, lambda block, x: nnx.vmap(run, in_axes=(None, 0))(block, x)),
    "fori_loop": (LooksUpGelu, loop),
    "scan": (LooksUpGelu, scan),
}


def model_of(block, call):
    class CallsItsBlocksBy(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([block(rngs) for _ in range(2)])
            self.head = nnx.Linear(64, 8, rngs=rngs)

        def __call__(self, x):
            for block in self.blocks:
                x = call(block, x)
            return self.head(x)

    return CallsItsBlocksBy(nnx.Rngs(0))


def step():
    return nnx.jit(nnx.value_and_grad(mean_square))


@functools.cache
def wanted():
    """The forms that call each block once compute the same."""
    return step()(model_of(LooksUpGelu, run), X)


TWICE = ("cond", "fori_loop", "scan")


@pytest.mark.parametrize("form", FORMS)
def test_equal_to_one_device(form):
    block, call = FORMS[form]
    model = js.fully_shard(model_of(block, call), mesh=js.mesh(), units=None if form == "cond" else block)
    plain = step()(model_of(block, call), X) if form in TWICE else wanted()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), step()(model, X), plain)


@pytest.mark.parametrize("form", ["a decorated method", "jit of remat"])
def test_nothing_more_is_sent(form):
    def collectives(block, call):
        model = js.fully_shard(model_of(block, call), mesh=js.mesh())
        text = step().lower(model, X).as_text()
        return collections.Counter(re.findall(r"stablehlo\.(all_gather|all_reduce|reduce_scatter)", text))

    assert collectives(*FORMS[form]) == collectives(LooksUpGelu, run)


def intercepted(model):
    """What qwix does: operations are others while the root's call is traced, and modules keep notes of them."""
    kind, gelu = type(model), nnx.gelu

    def call(self, x):
        nnx.gelu = nnx.relu
        try:
            for block in self.blocks:
                block.note = "".join(["x,y", "->z"])
            return kind.__call__(self, x)
        finally:
            nnx.gelu = gelu

    for block in model.blocks:
        block.note = "x,y->z"
    object.__setattr__(model, "__class__", type(kind.__name__, (kind,), {"_unquantized_type": kind, "__call__": call}))
    return model


def test_operations_that_are_replaced_while_the_call_runs_are_replaced_in_units():
    build = lambda: intercepted(model_of(LooksUpGelu, run))
    model = js.fully_shard(build(), units=LooksUpGelu, mesh=js.mesh())
    found, replaced = step()(model, X), step()(build(), X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), found, replaced)
    assert abs(wanted()[0] - replaced[0]) > 1e-3 * replaced[0]


@pytest.mark.parametrize("degree", [1, 8])
def test_checkify_looks_into_units(degree):
    """On one device a unit is a call like any other. Seen to fail there while it was an equation."""

    class Checked(LooksUpGelu):
        def __call__(self, x):
            checkify.check(jnp.all(x < 3), "large: {x}", x=x.max())
            return super().__call__(x)

    mesh = js.mesh(fsdp=degree, devices=jax.devices()[:degree])
    build = lambda block: nnx.Sequential(block(nnx.Rngs(0)), block(nnx.Rngs(1)))
    model = js.shard_init(lambda: build(Checked), lambda m: js.fully_shard(m, units=Checked, mesh=mesh))
    graph, state = nnx.split(model)
    grad = jax.grad(lambda state, x: (nnx.merge(graph, state)(x) ** 2).mean())
    of_plain = jax.tree.leaves(nnx.jit(nnx.grad(mean_square))(build(LooksUpGelu), X / 10))
    for x, is_large in ((X / 10, False), (X, True)):
        error, grads = jax.jit(checkify.checkify(grad))(state, x)
        assert ("large: " in (error.get() or "")) == is_large
        for a, b in zip(jax.tree.leaves(grads), of_plain, strict=True) if not is_large else ():
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# ---- How often a model's Python runs -------------------------------------------------------------


WIDTH, LAYERS = 32, 2
ROWS = np.random.default_rng(0).standard_normal((16, WIDTH)).astype(np.float32)
RUNS: collections.Counter[str] = collections.Counter()


def runs(call: Callable[[], Any]) -> dict[str, int]:
    """How often the Python of the model, and of its blocks, runs in a call."""
    RUNS.clear()
    call()
    return dict(RUNS)


class CountingLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        RUNS["block"] += 1
        return x + self.norm(self.linear(x))


class Counting(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, how: str = ""):
        self.how = how
        self.blocks = (
            nnx.split_rngs(splits=LAYERS)(nnx.vmap(CountingLayer))(rngs)
            if how == "scan"
            else nnx.List([CountingLayer(rngs) for _ in range(LAYERS)])
        )

    def __call__(self, x):
        RUNS["model"] += 1
        if self.how == "scan":
            return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x) if self.how == "remat" else block(x)
        return x


def counting(how: str = "") -> Any:
    def annotate(model: Any) -> None:
        for block in [model.blocks] if how == "scan" else model.blocks:
            js.fully_shard(block, mesh=mesh, placement=js.PlacementPolicy(stacked=int(how == "scan")))
        js.fully_shard(model, mesh=mesh)

    mesh = js.mesh()
    return placed(lambda: Counting(nnx.Rngs(0), how), annotate)


def loss(model, x):
    return (model(x) ** 2).mean()


def jitted() -> Any:
    """Made again, as a trace that is kept runs no Python."""
    return nnx.jit(lambda model, x: nnx.value_and_grad(loss)(model, x))


STEPS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model(ROWS),
    "jit": lambda model: nnx.jit(lambda model, x: model(x)).lower(model, ROWS),
    "gradients": lambda model: jitted().lower(model, ROWS),
    "accumulated": lambda model: nnx.jit(js.value_and_grad(loss, accumulate=2)).lower(model, ROWS),
}


@pytest.mark.parametrize(
    ("name", "how"), [(name, "") for name in STEPS] + [("gradients", "remat"), ("gradients", "scan"), ("eager", "scan")]
)
def test_a_models_python_runs_once(name: str, how: str):
    plain, model = Counting(nnx.Rngs(0), how), counting(how)
    wanted = runs(lambda: STEPS["gradients" if name == "accumulated" else name](plain))
    found = runs(lambda: STEPS[name](model))
    assert found["model"] == wanted["model"] == 1
    assert 1 <= found["block"] <= wanted["block"]


def test_a_compiled_step_runs_no_python():
    model, step = counting(), jitted()
    assert runs(lambda: step(model, ROWS)) in ({"model": 1, "block": LAYERS}, {"model": 1, "block": 1})
    assert runs(lambda: [step(model, ROWS) for _ in range(3)]) == {}


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        RUNS["block"] += 1
        return x + nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))


class LinenModel(nn.Module):
    how: str = ""

    @nn.compact
    def __call__(self, x):
        RUNS["model"] += 1
        if self.how == "scan":
            axes = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True}}
            body = nn.scan(lambda block, x, _: (block(x), None), length=LAYERS, **axes)
            return body(LinenLayer(), x, None)[0]
        layer = nn.remat(LinenLayer) if self.how == "remat" else LinenLayer
        for i in range(LAYERS):
            x = layer(name=f"block_{i}")(x)
        return x


@pytest.mark.parametrize(
    ("gradients", "jitted", "how"),
    [(True, True, "remat"), (True, False, ""), (False, True, "scan")],
)
def test_a_linen_models_python_runs_once(gradients: bool, jitted: bool, how: str):
    plain = LinenModel(how)
    variables = jax.jit(plain.init)(jax.random.key(0), ROWS)
    state = {"batch_stats": variables["batch_stats"]}

    def step(model: nn.Module) -> Callable[..., Any]:
        def run(params, x):
            out, changed = model.apply({"params": params, **state}, x, mutable=["batch_stats"])
            return (out**2).mean(), changed

        run = jax.value_and_grad(run, has_aux=True) if gradients else run
        return jax.jit(run).lower if jitted else run

    model = js.fully_shard(plain, mesh=js.mesh(), units=LinenLayer)
    jax.eval_shape(model.init, jax.random.key(0), ROWS)  # the plan is made from it
    wanted = runs(lambda: step(plain)(variables["params"], ROWS))
    found = runs(lambda: step(model)(variables["params"], ROWS))
    assert 1 <= found["model"] <= wanted["model"] and 1 <= found["block"] <= wanted["block"]
