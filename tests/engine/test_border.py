"""What crosses the border of a call: objects that JAX does not know are taken apart, or refused by name."""

import collections
import dataclasses
import enum
import functools
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js

X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)


@dataclasses.dataclass
class Act:
    h: Any
    name: str = "hidden"
    parts: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    h: Any
    scale: float = 2.0


@dataclasses.dataclass
class Strict:
    """A class whose constructor counts, and changes its values."""

    h: Any
    built: dataclasses.InitVar[list]
    norm: Any = dataclasses.field(init=False)

    def __post_init__(self, built):
        built.append(1)
        self.norm = (self.h**2).mean()
        self.h = self.h * 2


class Items(dict):
    __getattr__ = dict.__getitem__


class Rows(list):
    pass


Pair = collections.namedtuple("Pair", "a, b")
BUILT: list[int] = []

# How a result is made of h, and h taken out of it again.
RECORDS = {
    "dataclass": (lambda h: Act(h), lambda r: r.h),
    "frozen, with slots": (lambda h: Frozen(h), lambda r: r.h * r.scale),
    "nested": (lambda h: Act(Act(h), parts=[Frozen(h)]), lambda r: r.h.h + r.parts[0].h),
    "in containers": (
        lambda h: {"a": [Act(h)], "b": Pair(Frozen(h), (Act(h),))},
        lambda r: r["a"][0].h + r["b"].b[0].h,
    ),
    "with a constructor that computes": (lambda h: Strict(h, BUILT), lambda r: r.h * r.norm),
    "namespace": (lambda h: types.SimpleNamespace(h=h, name="x"), lambda r: r.h),
    "dict with attributes": (lambda h: Items(h=h, name="x"), lambda r: r.h),
    "own list": (lambda h: Rows([h, "x"]), lambda r: r[0]),
}


class NnxBlock(nnx.Module):
    def __init__(self, record: str, rngs: nnx.Rngs):
        self.record = record
        self.linear = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, r):
        make, take = RECORDS[self.record]
        return make(jnp.tanh(self.linear(take(r))))


class NnxModel(nnx.Module):
    def __init__(self, record: str, rngs: nnx.Rngs):
        self.record = record
        self.blocks = nnx.List([NnxBlock(record, rngs) for _ in range(2)])
        self.head = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, r):
        for block in self.blocks:
            r = block(r)
        make, take = RECORDS[self.record]
        return make(self.head(take(r)))


class LinenBlock(nn.Module):
    record: str

    @nn.compact
    def __call__(self, r):
        make, take = RECORDS[self.record]
        return make(jnp.tanh(nn.Dense(32)(take(r))))


class LinenModel(nn.Module):
    record: str

    @nn.compact
    def __call__(self, r):
        for _ in range(2):
            r = LinenBlock(self.record)(r)
        make, take = RECORDS[self.record]
        return make(nn.Dense(8)(take(r)))


def nnx_loss(model, x, record):
    make, take = RECORDS[record]
    return (take(model(make(x))) ** 2).mean()


def equal(found, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, wanted)


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("record", RECORDS)
def test_a_record_crosses_the_border_of_an_nnx_model_and_its_units(record, jitted):
    run = nnx.value_and_grad(functools.partial(nnx_loss, record=record))
    run = nnx.jit(run) if jitted else run
    loss, grads = run(NnxModel(record, nnx.Rngs(0)), X)
    model = js.fully_shard(NnxModel(record, nnx.Rngs(0)), units=NnxBlock, mesh=js.mesh())
    BUILT.clear()
    found, found_grads = run(model, X)
    equal(found, loss)
    equal(nnx.to_pure_dict(found_grads), nnx.to_pure_dict(grads))
    if record.startswith("with a constructor"):
        assert len(BUILT) <= 4, "the border built objects by their constructor"


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_crosses_the_border_of_a_linen_model_and_its_units(record):
    make, take = RECORDS[record]
    plain = LinenModel(record)
    variables = plain.init(jax.random.key(0), make(jnp.asarray(X)))
    loss_of = lambda model, v: (take(model.apply(v, make(X))) ** 2).mean()
    wanted = jax.jit(jax.value_and_grad(functools.partial(loss_of, plain)))(variables)
    model = js.fully_shard(LinenModel(record), units=LinenBlock, mesh=js.mesh())
    placed = js.shard_init(lambda: model.init(jax.random.key(0), make(jnp.asarray(X))), model)
    equal(jax.jit(jax.value_and_grad(functools.partial(loss_of, model)))(placed), wanted)
    equal(take(model.apply(placed, make(X))), take(plain.apply(variables, make(X))))


class Root(nnx.Module):
    """Does something odd with its argument."""

    def __init__(self, does, rngs: nnx.Rngs):
        self.does = does
        self.linear = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, r):
        return self.does(self, r)


class Outer(nnx.Module):
    def __init__(self, does, rngs: nnx.Rngs):
        self.inner = nnx.List([Root(does, rngs), Root(does, rngs)])

    def __call__(self, r):
        results = [inner(r) for inner in self.inner]
        return r, results


def annotated(does):
    return js.fully_shard(Outer(does, nnx.Rngs(0)), units=Root, mesh=js.mesh())


def test_the_batch_in_an_object_is_split():
    def forward(model, r):
        return model(r).h

    does = lambda self, r: Act(self.linear(r.h))
    model = js.fully_shard(Root(does, nnx.Rngs(0)), mesh=js.mesh())
    for h in (X, jnp.asarray(X)):
        out = nnx.jit(lambda model, h=h: model(Act(h)).h)(model)
        assert out.sharding.shard_shape(out.shape) == (2, 32), "each device computed the whole batch"
    Thing = type("Thing", (), {})  # not a record: an argument of any class is taken apart
    thing = Thing()
    thing.h = jnp.asarray(X)
    assert forward(model, thing).sharding.shard_shape((16, 32)) == (2, 32)


def test_an_argument_that_is_returned_is_the_callers():
    act = Act(jnp.asarray(X))
    model = annotated(lambda self, r: (r, self.linear(r.h)))
    same, results = model(act)
    assert same is act and all(result[0] is act for result in results)


def test_what_a_unit_changes_in_its_arguments_is_changed():
    def does(self, r):
        h = self.linear(r["act"].h)
        r["losses"].append(h.mean())
        r["act"].norm = (h**2).mean()
        r["last"] = h
        r.pop("mask", None)
        return h

    def run(model):
        r = {"act": Act(jnp.asarray(X)), "losses": [], "mask": 1}
        kept = r["act"], r["losses"]
        model(r)
        assert kept[0] is r["act"] and kept[1] is r["losses"] and "mask" not in r
        return vars(r["act"]), r["losses"], r["last"]

    wanted = run(Outer(does, nnx.Rngs(0)))
    assert len(wanted[1]) == 2
    found = run(annotated(does))
    assert wanted[0].pop("name") == found[0].pop("name")
    equal(found, wanted)


class Mode(enum.Enum):
    A = 1


class Settings:
    """A plain object without arrays of JAX; its NumPy numbers are read while the model is traced."""

    def __init__(self):
        self.sizes = np.array([8, 4])


def test_objects_without_arrays_pass_as_they_are():
    settings = Settings()

    def does(self, r):
        h, rest = r[0], r[1:]
        return self.linear(h).reshape(-1, *settings.sizes), *rest

    rest = ("name", Mode.A, 3, None, jax.nn.relu, settings, Act("no array"))
    out = annotated(does)((jnp.asarray(X), *rest))[1][1]
    assert all(x is y for x, y in zip(out[1:], rest, strict=True))


def test_units_called_with_equal_numbers_of_other_types_differ():
    does = lambda self, r: self.linear(r[0]) * (2 if r[1] is True else 1)
    model, plain = annotated(does), Outer(does, nnx.Rngs(0))
    call = lambda model: nnx.jit(lambda model, x: [model.inner[0]((x, flag)) for flag in (1, True)])(model, X)
    equal(call(model), call(plain))

    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.inner = Root(does, rngs)

        def __call__(self, x):
            return self.inner((x, 1)), self.inner((x, True))

    both = js.fully_shard(Twice(nnx.Rngs(0)), units=Root, mesh=js.mesh())(X)
    equal(both[1], 2 * both[0])


class Distribution:
    def __init__(self, mean, kind):
        self.mean, self.kind = mean * 3, kind

    def sample(self):
        return self.mean


class Slotted:
    __slots__ = ("mean",)

    def __init__(self, mean):
        self.mean = mean

    def sample(self):
        return self.mean


OPAQUE = {
    "class": (lambda h: Distribution(h, "normal"), lambda r: r.sample(), "a Distribution, .mean: float32[16, 32]"),
    "slots": (lambda h: Slotted(h), lambda r: r.sample(), "a Slotted, .mean: float32[16, 32]"),
    "in a dataclass": (lambda h: Act(Slotted(h)), lambda r: r.h.sample(), "a Slotted, .mean"),
    "closure": (lambda h: lambda: h + 1, lambda r: r(), "a function, closure over h"),
    "partial": (lambda h: functools.partial(jnp.add, h), lambda r: r(1), "a partial, .args[0]"),
    "bound method": (lambda h: Slotted(h).sample, lambda r: r(), "a method, .sample of.mean"),
    "generator": (lambda h: (y for y in [h]), lambda r: next(r), "a generator"),
    "iterator": (lambda h: iter([h]), lambda r: next(r), "a list_iterator"),
    "deque": (lambda h: collections.deque([h]), lambda r: r[0], "a deque, [0]"),
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_an_object_that_would_carry_arrays_out_is_refused_by_name(kind):
    make, take, text = OPAQUE[kind]
    does = lambda self, r: make(self.linear(r))
    model = js.fully_shard(Root(does, nnx.Rngs(0)), mesh=js.mesh())
    run = nnx.jit(lambda model, x: take(model(x)))
    with pytest.raises(js.ShardingError, match="A method returned an object that JAX does not know") as caught:
        run(model, X)
    assert f"Root.__call__: {text}" in str(caught.value)
    with js.global_view():
        found = run(model, X)
    equal(found, run(Root(does, nnx.Rngs(0)), X))
    with pytest.raises(js.ShardingError, match=r"inner/0: Root\.__call__"):
        annotated(does)(X)


class LinenRoot(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x):
        return OPAQUE[self.kind][0](nn.Dense(32)(x))


@pytest.mark.parametrize("kind", ["class", "closure", "generator"])
def test_a_linen_model_refuses_it_too_and_returns_it_in_global_view(kind):
    _, take, text = OPAQUE[kind]
    model = js.fully_shard(LinenRoot(kind), mesh=js.mesh())
    params = js.shard_init(lambda: model.init(jax.random.key(0), X), model)
    run = lambda: take(model.apply(params, X))
    with pytest.raises(js.ShardingError) as caught:
        run()
    assert f"LinenRoot.__call__: {text}" in str(caught.value)
    with js.global_view():
        equal(run(), take(LinenRoot(kind).apply(params, X)))


@pytest.mark.parametrize("kind", ["class", "slots"])
def test_the_lines_of_the_message_make_the_class_known(kind):
    name = {"class": "Distribution", "slots": "Slotted"}[kind]
    _, take, _ = OPAQUE[kind]
    cls = type(name, (globals()[name],), {"__slots__": ()} if kind == "slots" else {})  # the class stays unknown
    build = (lambda h: cls(h, "normal")) if kind == "class" else cls
    does = lambda self, r: build(self.linear(r))
    model = js.fully_shard(Root(does, nnx.Rngs(0)), mesh=js.mesh())
    with pytest.raises(js.ShardingError) as caught:
        model(X)
    lines = caught.value.do.partition("\nor with")[0]
    exec(lines, {"jax": jax, name: cls})
    result = model(X)
    equal(take(result), take(does(Root(does, nnx.Rngs(0)), X)))
    assert kind == "slots" or result.kind == "normal"


def test_an_array_stored_in_an_argument_without_arrays_is_refused():
    log, acts = Settings(), []

    def stores(self, r):
        r[1].norm = self.linear(r[0]).mean()
        return r[0]

    def hooks(self, r):
        r[1](self.linear(r[0]))
        return r[0]

    with pytest.raises(js.ShardingError, match=r"stored an array in an argument[\s\S]*a Settings, \.norm"):
        annotated(stores)((jnp.asarray(X), log))
    for hook in (lambda h: acts.append(h), acts.append):
        with pytest.raises(js.ShardingError, match="stored an array in an argument"):
            annotated(hooks)((jnp.asarray(X), hook))
        acts.clear()


def test_check_and_accumulation_know_records():
    model = js.fully_shard(NnxModel("dataclass", nnx.Rngs(0)), units=NnxBlock, mesh=js.mesh())
    report = js.check(model, Act(X))
    assert report.outputs.keys() == {".h"} and report.worst < 1e-4
    loss_fn = lambda model, r: (model(r).h ** 2).mean()
    one = js.value_and_grad(loss_fn)(model, Act(X))
    for sync in ("each", "last"):
        several = js.value_and_grad(loss_fn, accumulate=2, sync=sync)(model, Act(X))
        equal(several[0], one[0])
        equal(nnx.to_pure_dict(several[1]), nnx.to_pure_dict(one[1]))


def test_a_cycle_and_a_shared_object_stay_what_they_are():
    act = Act(jnp.asarray(X))
    act.parts = [act]
    seen = []

    def does(self, r):
        seen.append((r["a"].parts[0] is r["a"], r["a"] is r["b"]))
        out = Act(self.linear(r["a"].h))
        out.parts = {"me": out, "it": r["a"]}
        return out

    model = js.fully_shard(Root(does, nnx.Rngs(0)), mesh=js.mesh())
    out = model({"a": act, "b": act})
    assert seen == [(True, True)] and out.parts["me"] is out and out.parts["it"] is act


def test_a_closure_over_an_outer_trace_passes_in_and_out():
    """Its arrays belong to the caller: they outlive the call."""

    def run(model, x):
        scale = x.mean()
        out = model((x, lambda h: h * scale))
        return out[1](out[0]).sum()

    does = lambda self, r: (r[1](self.linear(r[0])), r[1])
    loss = nnx.jit(nnx.value_and_grad(run))
    model = js.fully_shard(Root(does, nnx.Rngs(0)), mesh=js.mesh())
    found, wanted = loss(model, X), loss(Root(does, nnx.Rngs(0)), X)
    equal(found[0], wanted[0])
    equal(nnx.to_pure_dict(found[1]), nnx.to_pure_dict(wanted[1]))
