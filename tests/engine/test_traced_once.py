"""The Python of a user's model runs as often under `js.fully_shard` as without it, and its program grows little."""

import collections
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import jshard as js
from tests.helpers import placed

WIDTH, LAYERS = 32, 2
X = np.random.default_rng(0).standard_normal((16, WIDTH)).astype(np.float32)
RUNS: collections.Counter[str] = collections.Counter()


def runs(call: Callable[[], Any]) -> dict[str, int]:
    """How often the Python of the model, and of its blocks, runs in a call."""
    RUNS.clear()
    call()
    return dict(RUNS)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        RUNS["block"] += 1
        return x + self.norm(self.linear(x))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, how: str = ""):
        self.how = how
        self.blocks = (
            nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))(rngs)
            if how == "scan"
            else nnx.List([Layer(rngs) for _ in range(LAYERS)])
        )

    def __call__(self, x):
        RUNS["model"] += 1
        if self.how == "scan":
            return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x) if self.how == "remat" else block(x)
        return x


def sharded(how: str = "") -> Any:
    def annotate(model: Any) -> None:
        for block in [model.blocks] if how == "scan" else model.blocks:
            js.fully_shard(block, mesh=mesh, placement=js.ShardPlacement(stacked=int(how == "scan")))
        js.fully_shard(model, mesh=mesh)

    mesh = js.mesh()
    return placed(lambda: Model(nnx.Rngs(0), how), annotate)


def loss(model, x):
    return (model(x) ** 2).mean()


STEPS: dict[str, Callable[[], Callable[..., Any]]] = {
    "eager": lambda: lambda model, x: model(x),
    "jit": lambda: nnx.jit(lambda model, x: model(x)),
    "eager gradients": lambda: nnx.value_and_grad(loss),
    "jitted gradients": lambda: nnx.jit(lambda model, x: nnx.value_and_grad(loss)(model, x)),
    "accumulated": lambda: nnx.jit(lambda model, x: js.value_and_grad(loss, accumulate=2)(model, x)),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, "") for name in STEPS]
    + [(name, how) for name in ("jitted gradients", "eager") for how in ("remat", "scan")],
)
def test_a_models_python_runs_once(name: str, how: str):
    step, plain, model = STEPS[name](), Model(nnx.Rngs(0), how), sharded(how)
    wanted = runs(lambda: STEPS["jitted gradients" if name == "accumulated" else name]()(plain, X))
    found = runs(lambda: step(model, X))
    assert found["model"] == wanted["model"] == 1
    assert 1 <= found["block"] <= wanted["block"]


def test_a_compiled_step_runs_no_python():
    step, model = STEPS["jitted gradients"](), sharded()
    assert runs(lambda: step(model, X)) in ({"model": 1, "block": LAYERS}, {"model": 1, "block": 1})
    assert runs(lambda: [step(model, X) for _ in range(3)]) == {}


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
    [(True, True, ""), (True, True, "remat"), (True, False, ""), (False, True, "scan")],
)
def test_a_linen_models_python_runs_once(gradients: bool, jitted: bool, how: str):
    plain = LinenModel(how)
    variables = jax.jit(plain.init)(jax.random.key(0), X)
    state = {"batch_stats": variables["batch_stats"]}

    def step(model: nn.Module) -> Callable[..., Any]:
        def run(params, x):
            out, changed = model.apply({"params": params, **state}, x, mutable=["batch_stats"])
            return (out**2).mean(), changed

        run = jax.value_and_grad(run, has_aux=True) if gradients else run
        return jax.jit(run) if jitted else run

    model = js.fully_shard(plain, mesh=js.mesh(), units=LinenLayer)
    jax.eval_shape(model.init, jax.random.key(0), X)  # the plan is made from it
    wanted = runs(lambda: step(plain)(variables["params"], X))
    found = runs(lambda: step(model)(variables["params"], X))
    assert 1 <= found["model"] <= wanted["model"] and 1 <= found["block"] <= wanted["block"]
