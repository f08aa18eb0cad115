"""A unit that is never gathered: sharded as any other, its call runs as written in global view; nothing else moves."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard.errors import CallError
from jshard.inspect.communication import traffic_of
from jshard.inspect.memory import memory_of
from tests.helpers import compile_to_read, placed, with_placement
from tests.parity import GRADIENT_TOLERANCE, PARAMETER_TOLERANCE, compare, train
from tests.toy_models import ResidualLinear, Tower

ROWS, WIDTH, BATCH = 1001, 32, 16  # rows divide by nothing: the table is stored padded


class CountedTable(nnx.Module):
    """Rows of a table that is read as one logical array; the compiler says how."""

    def __init__(self, rngs: nnx.Rngs):
        self.rows = nnx.Param(jax.random.normal(rngs.params(), (ROWS, WIDTH)))
        self.scale = nnx.Param(jnp.full((WIDTH,), 2.0, jnp.float32))
        self.calls = nnx.Variable(jnp.zeros((), int))

    def __call__(self, ids):
        self.calls[...] += 1
        return self.rows[...][ids] * self.scale[None]

    def all_of_it(self, ids):
        """Holds the whole table on every device."""
        return jax.lax.with_sharding_constraint(self.rows[...], jax.NamedSharding(js.mesh(), P()))[ids]


class BesideATable(Tower):
    """Its call does not use its table: that is called, or read, beside it."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__([ResidualLinear(WIDTH, rngs) for _ in range(2)], nnx.Linear(WIDTH, WIDTH, rngs=rngs))
        self.table = CountedTable(rngs)


def build():
    return BesideATable(nnx.Rngs(0))


def by_row(path, shape):
    return 0 if path == "rows" else None


def annotator(mesh, **settings):
    def annotate(model):
        js.fully_shard(model.table, mesh=mesh, **with_placement(gathered=False, shard_dim=by_row, **settings))
        js.fully_shard(model, mesh=mesh, units=ResidualLinear, reshard_after_forward=False)

    return annotate


def loss_fn(model, ids, targets):
    return jnp.mean((model(model.table(ids)) - targets) ** 2) + 1e-3 * jnp.mean(model.table.rows[...] ** 2)


RNG = np.random.default_rng(0)
DATA = RNG.integers(0, ROWS, BATCH, dtype=np.int32), RNG.normal(size=(BATCH, WIDTH)).astype(np.float32)


def abstract(mesh, **settings):
    model = js.abstract_init(build, annotator(mesh, **settings))
    js.shard_optimizer(model, optax.sgd(0.1))  # the table is padded
    return model


@functools.cache
def audited():
    """The gradients, compiled for abstract arrays, and what the audit says of it; no optimizer says where they are."""
    model = abstract(js.mesh(replica=2))
    error = lambda model, ids, targets: jnp.mean((model(model.table(ids)) - targets) ** 2)
    lowered = nnx.jit(lambda model, *batch: nnx.value_and_grad(error)(model, *batch)).lower(model, *DATA).lowered
    compiled = compile_to_read(lowered)
    return compiled, js.audit(compiled, model=model)


@pytest.mark.wide
def test_microbatches_reduced_at_the_end_are_those_of_one_device():
    """The others' copies are gathered once; the table has none, and its gradients are summed as they come."""
    grad = lambda f: js.value_and_grad(f, accumulate=2, sync="last")
    model = placed(build, annotator(js.mesh(replica=2)))
    js.shard_optimizer(model, optax.sgd(0.1))
    program = str(jax.make_jaxpr(lambda state, *batch: grad_of(model, grad, state, *batch))(nnx.state(model), *DATA))
    rows = re.findall(rf"f32\[(\d+),{WIDTH}\]\S* = all_gather\[", program)
    assert rows and set(rows) == {str(WIDTH)}  # the kernels of the blocks and of the head
    wanted, found = train(build(), loss_fn, DATA, steps=2), train(model, loss_fn, DATA, steps=2, grad=grad)
    assert int(found.state["table/calls"]) == 2 * int(wanted.state["table/calls"])
    apart = compare(dataclasses.replace(found, state=wanted.state), wanted)
    assert apart.gradient <= GRADIENT_TOLERANCE and apart.parameters <= PARAMETER_TOLERANCE, apart


def grad_of(model, grad, state, *batch):
    live = nnx.merge(nnx.graphdef(model), state, copy=True)
    return grad(loss_fn)(live, *batch)


# ---- Where it is ---------------------------------------------------------------------------


def test_parameters_gradients_and_optimizer_state_are_sharded_as_of_any_unit():
    compiled, _ = audited()
    found = [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(compiled.output_shardings)]
    assert [tuple(x.spec)[:1] for name, x in found if "rows" in name] == [("fsdp",)]  # the gradient
    model = abstract(js.mesh())
    for holder in (model, js.shard_optimizer(model, optax.adamw(1e-3))):
        rows = [x.get_raw_value() for path, x in nnx.to_flat_state(nnx.state(holder)) if "rows" in path]
        assert rows and all(x.sharding.spec == P("fsdp", None) for x in rows)
        assert {x.shape for x in rows} == {(1008, WIDTH)}


# ---- What is planned, and what is compiled ----------------------------------------------------


def test_plan_traffic_and_memory_know_that_nothing_is_gathered():
    plan = js.plan(abstract(js.mesh()))
    assert [unit.name for unit in plan.units if not unit.gathered] == ["table"]
    assert js.ShardPlan.from_json(plan.to_json()) == plan
    of_table = dataclasses.replace(plan, leaves=plan.unit_leaves("table"))
    assert traffic_of(of_table) == ()
    held = memory_of(of_table)
    assert held.parameters_bytes == held.gradients_bytes == 1008 * WIDTH * 4 // 8 + WIDTH * 4
    assert (held.kept_bytes, held.largest_unit_bytes, held.prefetched_bytes, held.largest_gradient_bytes) == (0,) * 4
    assert traffic_of(plan) == traffic_of(plan.gathered_part)
    root, block, table = (unit for unit in plan.units if unit.name in ("(root)", "blocks/0", "table"))
    block = dataclasses.replace(block, reshard_after_forward=True)
    few = dataclasses.replace(plan, units=(root, table, block))
    assert memory_of(few).prefetched_bytes == 0  # nothing is gathered while the table's call runs
    assert plan.gathered_part.num_parameters == plan.num_parameters - ROWS * WIDTH - WIDTH


def test_explain_says_never():
    text = str(js.explain(abstract(js.mesh())))
    (row,) = [line for line in text.splitlines() if line.startswith(" table ")]
    assert row.split()[-5:] == ["never", "f32", "-", "-", "-"]
    assert "Never gathered: table" in text
    assert "3,168 of them, 12.38 KiB = P, are" in text and "frozen" not in text


def test_the_audit_reports_if_the_compiler_gathers_it_after_all():
    loss = lambda model, ids, targets: jnp.mean((model(model.table.all_of_it(ids)) - targets) ** 2)
    model = abstract(js.mesh())
    step = nnx.jit(lambda model, *batch: nnx.value_and_grad(loss)(model, *batch))
    found = js.audit(compile_to_read(step.lower(model, *DATA).lowered), model=model)
    reported = {(d.compiled, d.words.partition(":")[0]) for d in found.differences}
    assert ("all-gather", "all-gather of parameters that are never gathered") in reported
    assert all(kind in ("all-gather", "all-reduce") for kind, _ in reported)


# ---- What changes the others leaves it as it is ------------------------------------------------


def test_a_call_in_global_view_and_one_of_the_model_check_out():
    model = placed(build, annotator(js.mesh()))
    with js.global_view():
        wanted = model(model.table(DATA[0]))
    np.testing.assert_allclose(model(model.table(DATA[0])), wanted, rtol=1e-5, atol=1e-5)
    js.check(model, *DATA, loss_fn=loss_fn)


# ---- Inside the region -----------------------------------------------------------------------


class Around(BesideATable):
    """A model whose call may use its table."""

    def __init__(self, use, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.use = use

    def __call__(self, x):
        return self.use(self, x)


class Reads(nnx.Module):
    """A unit that is given the table."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, table):
        return self.linear(x) + table.rows[...][:BATCH]


READS = {
    "rows": lambda model, x: x + model.table.rows[...][jnp.arange(BATCH)],
    "jit": lambda model, x: jax.jit(lambda x, w: x @ w.T)(x, model.table.rows[...]),
    "a loop": lambda model, x: jax.lax.fori_loop(0, 2, lambda i, x: x @ model.table.rows[...][:WIDTH], x),
    "a unit that is given it": lambda model, x: model.reads(x, model.table),
}


@pytest.mark.parametrize(("name", "gradients"), [("rows", True), *((name, False) for name in READS)])
def test_an_operation_inside_that_reads_it_is_refused_with_its_line(name, gradients):
    def annotate(model):
        js.fully_shard(model.reads, mesh=js.mesh())
        annotator(js.mesh())(model)

    def make():
        model = Around(READS[name], nnx.Rngs(0))
        model.reads = Reads(nnx.Rngs(1))
        return model

    model = placed(make, annotate)
    js.shard_optimizer(model, optax.sgd(0.1))
    loss = lambda model, x: model(x).mean()
    run = nnx.jit(nnx.grad(loss) if gradients else loss)
    with pytest.raises(CallError, match=r"(?s)never gathered was read.*table/rows.*test_ungathered\.py:\d+"):
        run(model, DATA[1])
