"""A unit of a Linen model that is never gathered: it and what is around it run as written, the rest in regions."""

import functools
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import jshard as js
from tests.helpers import equations_run, with_placement
from tests.linen_models import WIDTH, Block, Tower, assert_same, creator

ROWS, BATCH = 1001, 16  # rows divide by nothing: the table is stored padded
NEVER = {"placement": js.PlacementPolicy(gathered=False, shard_dim=0)}
UNITS = {"table": NEVER, Block: {}}


class Clicks(nn.Module):
    """Setup style: two methods of the table, and a unit that is called beside it."""

    remat: bool = False

    def setup(self):
        self.table = nn.Embed(ROWS, WIDTH)
        tower = nn.remat(Tower) if self.remat else Tower
        self.tower = tower(Block, WIDTH)  # all that is beside the table: one region
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
        return nn.BatchNorm(use_running_average=False, name="norm")(Tower(Block, WIDTH, name="tower")(x))


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


@pytest.mark.wide
def test_gradients_equal_those_of_one_device():
    plain = Nested()
    model = js.fully_shard(plain, mesh=js.mesh(replica=2), units={"lookup/table": NEVER, Block: {}})
    js.shard_optimizer(model, optax.sgd(0.1))
    variables = js.shard_init(lambda: model.init(jax.random.key(0), IDS), model)
    found = results(model, variables)
    assert_same(nn.unbox(found), results(plain, nn.unbox(jax.device_get(variables))), 5e-6)


@pytest.mark.wide
def test_a_train_state_is_stored_and_trains_as_of_any_unit():
    mesh = js.mesh(replica=2)
    model, _ = made(Clicks(), mesh)
    tx = optax.sgd(0.1, momentum=0.9)
    state = js.shard_init(creator(model, js.shard_optimizer(model, tx), IDS), model)
    wanted = creator(Clicks(), tx, IDS)()

    @jax.jit
    def step(state):
        loss = lambda params: (state.apply_fn({"params": params}, IDS) ** 2).mean()
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for _ in range(2):
        state, wanted = step(state), step(wanted)
    for tree in (state.params, state.opt_state[0].trace):
        stored = tree["table"]["embedding"].value
        assert stored.sharding.spec[0] == "fsdp" and stored.shape[0] % mesh.shape["fsdp"] == 0
    assert_same(nn.unbox(state.params), wanted.params, 5e-6)


def test_each_call_beside_it_is_a_region_that_gathers_once_a_pass():
    """And a unit that is called beside it is let go after forward, as one in a region's midst."""
    model, variables = made(Clicks(), js.mesh())
    loss = lambda params: (model.apply({"params": params}, IDS) ** 2).mean()
    program = equations_run(jax.make_jaxpr(jax.grad(loss))(variables["params"]).jaxpr)
    gathers = [eqn.outvars[0].aval.shape for eqn in program if eqn.primitive.name == "all_gather"]
    # Three blocks, before and again after; the head of the tower is the root's, and kept.
    assert sorted(shape for shape in gathers if len(shape) == 2) == [(32, 32)] + [(32, 128)] * 6 + [(128, 32)] * 6


def test_regions_that_flax_transforms_gather_for_themselves_with_a_warning():
    model, variables = made(Clicks(remat=True), js.mesh())
    loss = lambda params, ids: (model.apply({"params": params}, ids) ** 2).mean()
    run = js.value_and_grad(loss, model=model, accumulate=2, sync="last")
    with pytest.warns(UserWarning, match=r"and again in each[\S\s]*\n  tower/head/bias\n  tower/head/kernel"):
        jax.eval_shape(run, variables["params"], IDS)


def test_a_whole_model_may_be_one():
    plain = nn.Embed(ROWS, WIDTH)
    model = js.fully_shard(plain, mesh=js.mesh(), placement=js.PlacementPolicy(gathered=False, shard_dim=0))
    js.shard_optimizer(model, optax.sgd(0.1))
    variables = js.shard_init(lambda: model.init(jax.random.key(0), IDS), model)
    assert [unit.gathered for unit in js.plan(model).units] == [False]
    assert "Never gathered: (root)" in str(js.explain(model))
    loss = lambda model, v: (model.apply(v, IDS) ** 2).mean()
    found = jax.jit(jax.grad(functools.partial(loss, model)))(variables)
    assert found["params"]["embedding"].value.sharding.spec[0] == "fsdp"
    assert_same(nn.unbox(found), jax.grad(functools.partial(loss, plain))(nn.unbox(jax.device_get(variables))))
