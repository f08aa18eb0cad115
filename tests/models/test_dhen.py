"""models/dhen.py: rows travel and tables stay where they are, and no model has a loss below the floor."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.api.optimizer import abstract_optimizer
from jshard.api.revise import revise_layers
from jshard.inspect.communication import traffic_of
from jshard.inspect.memory import memory_of
from jshard.recipes import building, step
from tests.helpers import compile_to_read
from tests.models.model_files import (
    assert_parity_of,
    assert_plans,
    data_of,
    model_file,
    module,
    neighbour,
    smaller,
    tiny,
)

dhen = module("dhen")

MICRO = smaller(tiny("dhen"), rows=(1024, 64, 64), n_layer=1, d_ff=32)


def test_look_up_in_parts_finds_what_the_whole_table_has():
    config = dataclasses.replace(MICRO.model, compute_dtype="bfloat16")
    model = dhen.build(config, nnx.Rngs(0))
    ids = np.asarray([sample["ids"] for sample in map(data_of("dhen", MICRO).train.__getitem__, range(16))])
    look_up = nnx.jit(lambda model, ids: model.tables(ids))
    wanted = look_up(model, ids)
    assert wanted.dtype == "bfloat16"
    dhen.annotate(model, js.mesh(replica=2))
    np.testing.assert_array_equal(look_up(model, ids), wanted)


def test_trains_sharded_as_on_one_device():
    assert_parity_of("dhen", MICRO)


@pytest.mark.wide
def test_no_collective_has_the_size_of_a_table():
    """Neither a table nor its gradient, whole or in part; and its optimizer state is as it does."""
    recipe = smaller(MICRO, batch_size=16, rows=(65_536, 65_536, 65_536))
    file, mesh = model_file("dhen"), js.mesh(replica=2, fsdp=4)
    model = js.abstract_init(lambda: file.build(recipe.model, nnx.Rngs(0)), lambda model: file.annotate(model, mesh))
    optimizer = abstract_optimizer(model, recipe.optimizer())
    batch = building.batch_like(data_of("dhen", recipe), recipe.batch_size, mesh)
    compiled = compile_to_read(step.lower_step(file.loss_fn, model, optimizer, batch))
    schedule = js.audit(compiled).schedule
    shard_bytes = 65_536 // mesh.shape["fsdp"] * recipe.model.d_model * 4
    assert max(window.full_bytes for window in schedule.windows) < shard_bytes / 10
    sums = [x for path, x in nnx.to_flat_state(nnx.state(optimizer)) if "sum_of_squares" in path and "tables" in path]
    assert len(sums) == 3
    assert all(x.get_raw_value().sharding.spec == jax.P("fsdp", None) for x in sums)
    # State and batch, and what the step makes of the tables: their gradient, and the update.
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes < 1.1 * 2 * 3 * shard_bytes
    assert memory.temp_size_in_bytes < 1.2 * 2 * 3 * shard_bytes


@pytest.mark.wide
def test_the_audit_agrees_with_the_plan():
    """XLA:CPU merges the second gather of unrolled layers with the first: so they are gathered once here."""
    recipe, file, mesh = tiny("dhen"), model_file("dhen"), js.mesh(replica=2, fsdp=4)
    model = js.abstract_init(lambda: file.build(recipe.model, nnx.Rngs(0)), lambda model: file.annotate(model, mesh))
    revise_layers(model, {"reshard_after_forward": False})
    batch = building.batch_like(data_of("dhen", recipe), recipe.batch_size, mesh)
    lowered = nnx.jit(lambda model, batch: nnx.value_and_grad(file.loss_fn)(model, batch)).lower(model, batch).lowered
    found = js.audit(compile_to_read(lowered), model=model)
    assert found.ok, found.differences
    sent = {(row.kind, row.phase): row.total_bytes for row in found.rows if row.unit == "tables" and row.dtype == "f32"}
    rows_bytes = recipe.batch_size * len(recipe.model.rows) * recipe.model.d_model * 4
    there, back = sent["reduce-scatter", "forward"], sent["all-gather", "backward"]
    assert there == rows_bytes and back <= rows_bytes  # between replicas rows are gathered apart


@pytest.mark.wide
def test_rows_that_no_sample_asks_for_stay_as_they_are():
    recipe = dataclasses.replace(MICRO, warmup_steps=0)
    model = dhen.build(recipe.model, nnx.Rngs(0))
    before = model.tables.tables[0][...]
    optimizer = nnx.Optimizer(model, recipe.optimizer(), wrt=nnx.Param)
    ids = jnp.asarray([[3, 5, 7], [900, 5, 8]])
    batch = {"ids": ids, "numbers": jnp.ones((2, recipe.model.num_numbers)), "click": jnp.asarray([0.0, 1.0])}

    @nnx.jit
    def train_step(model, optimizer, batch):
        optimizer.update(model, nnx.grad(dhen.loss_fn)(model, batch))

    for _ in range(2):
        train_step(model, optimizer, batch)
    changed = np.flatnonzero((model.tables.tables[0][...] != before).any(axis=1))
    assert changed.tolist() == [3, 900]


def test_plan_of_768_billion_parameters_cuts_every_table_by_row():
    plan = assert_plans("dhen", "dhen_550m", num_parameters=768_280_268_161, fsdp=512)
    tables = plan.unit_leaves("tables")
    dense = plan.num_parameters - sum(leaf.placement.size for leaf in tables)
    assert (len(tables), dense) == (31, 554_864_001)
    assert {leaf.placement.dim for leaf in tables} == {0}
    held = memory_of(plan, optimizer=model_file("dhen").recipe("dhen_550m")[1].optimizer())
    assert held.largest_unit == "layers/0" and held.largest_unit_bytes < 140 * 2**20
    # Two arrays of every table between steps, and a gradient; the dense part has three and a gradient.
    by_device = [sum(leaf.placement.bytes_per_device for leaf in part) for part in (tables, plan.leaves)]
    assert held.held_bytes == pytest.approx(2 * by_device[0] + 3 * (by_device[1] - by_device[0]), rel=1e-3)
    assert held.step_bytes < 1.1 * 3 * by_device[0]
    assert sum(t.full_bytes for t in traffic_of(plan)) < 10 * dense


# ---- The data --------------------------------------------------------------------------------


def clicks(part=1, **settings):
    return neighbour("clicks").Clicks((1024, 64, 64), 4, 20_000, part, **settings)


def test_who_knows_the_law_has_the_loss_of_the_floor():
    """In the samples drawn; the mean of so many coins is off by three of its deviations once in hundreds of draws."""
    sample, p = clicks().draw(np.arange(20_000))
    loss = -np.where(sample["click"] == 1, np.log(p), np.log1p(-p))
    floor, base = clicks().bounds
    assert abs(loss.mean() - floor) < 3 * loss.std() / np.sqrt(len(loss))
    assert abs(sample["click"].mean() - p.mean()) < 3 * p.std() / np.sqrt(len(p)) + 3 * 0.5 / np.sqrt(len(p))
    # What they know is worth something, and so is what they do not know.
    assert 0.4 < floor < 0.9 * base
    assert 0.2 < p.mean() < 0.5
