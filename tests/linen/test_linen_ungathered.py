"""A unit of a Linen model that is never gathered: it and what is around it run as written, the rest in regions."""

import collections
import functools
import re
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import jshard as js
from jshard.inspect.memory import memory_of
from jshard.linen import route
from tests.helpers import compile_to_read, equations_run, with_placement
from tests.linen_models import WIDTH, Block, Layer, assert_same

ROWS, BATCH = 1001, 16  # rows divide by nothing: the table is stored padded
NEVER = {"placement": js.ShardPlacement(gathered=False, shard_dim=0)}
UNITS = {"table": NEVER, Block: {}}


class Tower(nn.Module):
    """All that is beside the table: one region."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Block(WIDTH, name=f"block_{i}")(x)
        return nn.Dense(WIDTH)(x)


class Clicks(nn.Module):
    """Setup style: two methods of the table, and a unit that is called beside it."""

    remat: bool = False

    def setup(self):
        self.table = nn.Embed(ROWS, WIDTH)
        self.tower = (nn.remat(Tower) if self.remat else Tower)()
        self.last = Block(WIDTH)

    def rows(self, ids):
        return self.table(ids)

    def __call__(self, ids):
        return self.table.attend(self.last(self.tower(self.rows(ids))))


class Nested(nn.Module):
    """Compact style, with the table two modules deep, and state beside it."""

    @nn.compact
    def __call__(self, ids):
        x = Lookup(name="lookup")(ids)
        return nn.BatchNorm(use_running_average=False, name="norm")(Tower(name="tower")(x))


class Lookup(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Dense(WIDTH)(nn.Embed(ROWS, WIDTH, name="table")(ids))


IDS = np.random.default_rng(0).integers(0, ROWS, BATCH, dtype=np.int32)


def made(plain: nn.Module, mesh: Any, **settings: Any) -> tuple[nn.Module, Any]:
    """An annotated model, and its variables without arrays."""
    model = js.fully_shard(plain, mesh=mesh, **with_placement(**{"units": UNITS, **settings}))
    js.shard_optimizer(model, optax.sgd(0.1))  # the table is padded
    return model, js.abstract_init(lambda: model.init(jax.random.key(0), IDS), model)


def results(model: nn.Module, variables: Any) -> Any:
    """Loss, changed state and gradients of a call."""
    state = {k: v for k, v in variables.items() if k != "params"}

    def loss(params, state):
        out, changed = model.apply({"params": params, **state}, IDS, mutable=list(state))
        return ((out - np.linspace(-1, 1, BATCH)[:, None]) ** 2).mean(), changed

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"], state)


def test_gradients_equal_those_of_one_device():
    plain = Nested()
    model = js.fully_shard(plain, mesh=js.mesh(replica=2), units={"lookup/table": NEVER, Block: {}})
    js.shard_optimizer(model, optax.sgd(0.1))
    variables = js.shard_init(lambda: model.init(jax.random.key(0), IDS), model)
    found = results(model, variables)
    assert_same(nn.unbox(found), results(plain, nn.unbox(jax.device_get(variables))), 5e-6)


def test_each_call_beside_it_is_a_region_that_gathers_once_a_pass():
    """And a unit that is called beside it is let go after forward, as one in a region's midst."""
    model, variables = made(Clicks(), js.mesh())
    loss = lambda params: (model.apply({"params": params}, IDS) ** 2).mean()
    program = equations_run(jax.make_jaxpr(jax.grad(loss))(variables["params"]).jaxpr)
    gathers = [eqn.outvars[0].aval.shape for eqn in program if eqn.primitive.name == "all_gather"]
    # Three blocks, before and again after; the head of the tower is the root's, and kept.
    assert sorted(shape for shape in gathers if len(shape) == 2) == [(32, 32)] + [(32, 128)] * 6 + [(128, 32)] * 6


def test_regions_that_flax_transforms_gather_for_themselves_and_are_told():
    model, variables = made(Clicks(remat=True), js.mesh())
    loss = lambda params, ids: (model.apply({"params": params}, ids) ** 2).mean()
    run = js.value_and_grad(loss, model=model, accumulate=2, sync="last")
    with pytest.warns(
        UserWarning, match=r"and then again in each[\S\s]*\n  tower/Dense_0/bias\n  tower/Dense_0/kernel"
    ):
        jax.eval_shape(run, variables["params"], IDS)


def test_a_whole_model_may_be_one():
    plain = nn.Embed(ROWS, WIDTH)
    model = js.fully_shard(plain, mesh=js.mesh(), placement=js.ShardPlacement(gathered=False, shard_dim=0))
    js.shard_optimizer(model, optax.sgd(0.1))
    variables = js.shard_init(lambda: model.init(jax.random.key(0), IDS), model)
    assert [unit.gathered for unit in js.plan(model).units] == [False]
    assert "Never gathered: (root)" in str(js.explain(model))
    loss = lambda model, v: (model.apply(v, IDS) ** 2).mean()
    found = jax.jit(jax.grad(functools.partial(loss, model)))(variables)
    assert found["params"]["embedding"].value.sharding.spec[0] == "fsdp"
    assert_same(nn.unbox(found), jax.grad(functools.partial(loss, plain))(nn.unbox(jax.device_get(variables))))


# ---- Layers that nn.scan stacks and no unit names ------------------------------------------------


LAYERS = 4
SHAPE = jax.ShapeDtypeStruct((16, WIDTH), "float32")
KERNEL = 4 * WIDTH * WIDTH


class Stack(nn.Module):
    """Layers in a loop, each with parameters of its own or all with the same."""

    lifted: Any = None

    @nn.compact
    def __call__(self, x):
        lifted = self.lifted or {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(Layer, length=LAYERS, **lifted)(name="layers")(x, None)[0]


class Model(nn.Module):
    tower: Any

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, name="head")(self.tower(x))


def annotated(tower: nn.Module | None = None, **settings: Any) -> nn.Module:
    model = js.fully_shard(Model(tower or Stack()), mesh=js.mesh(), **settings)
    jax.eval_shape(model.init, jax.random.key(0), SHAPE)
    return model


@pytest.fixture
def all_are_large(monkeypatch):
    """Whatever is stacked is worth a warning, reported anew."""
    monkeypatch.setattr(route, "_LARGE_BYTES", 1)
    route.warn_of_stacks.cache_clear()


NOT_AHEAD = {
    "a unit beside": ("head", "(root)", "each layer when it is due"),
    "a unit around": (Stack, "tower", "all layers at once"),
}


@pytest.mark.parametrize(("units", "unit", "how"), NOT_AHEAD.values(), ids=NOT_AHEAD)
def test_layers_that_no_unit_names_are_told(all_are_large, units, unit, how):
    size = 4 * LAYERS * 2 * KERNEL
    with pytest.warns(UserWarning, match=re.escape(f"tower/layers  {size} bytes, by {unit}, {how}")) as reported:
        model = annotated(units=units)
    assert len(reported) == 1
    plan = js.plan(model)
    assert plan.unscheduled_stacks == {("tower/layers", unit): size}
    assert js.ShardPlan.from_json(plan.to_json()) == plan
    words = f"Stacked layers: tower/layers, 128.00 KiB, gathered by {unit}, {how}: no unit is inside their loop"
    assert words in " ".join(str(js.explain(model)).split())


@pytest.mark.parametrize(("units", "loop", "whole"), [("head", 2, False), (Stack, 0, True)], ids=str)
def test_the_program_does_as_told(units, loop, whole):
    """A layer's kernel at a time, forward and backward; or those of all layers before the first."""
    model = annotated(units=units)
    params = js.abstract_init(lambda: model.init(jax.random.key(0), SHAPE)["params"], model)
    grad = jax.jit(jax.grad(lambda params, x: (model.apply({"params": params}, x) ** 2).mean()))
    found = js.audit(compile_to_read(grad.lower(params, SHAPE)), model=model)
    gathered = collections.Counter()
    for window in found.schedule.windows:
        for _, shape in window.arrays if window.kind == "all-gather" else ():
            gathered[shape] += window.executions
    assert gathered[WIDTH, 4 * WIDTH] == loop * LAYERS
    assert gathered[LAYERS, WIDTH, 4 * WIDTH] in ((1, 2) if whole else (0,))  # XLA:CPU may join those of both passes
    assert found.ok, found.differences
    memory = memory_of(js.plan(model))  # two kernels of four bytes an element; the head may be the root's, and kept
    assert memory.largest_unit_bytes == 2 * KERNEL * 4 * (LAYERS if whole else 1)
    assert memory.kept_bytes == (4 * WIDTH * WIDTH if whole else 0)
