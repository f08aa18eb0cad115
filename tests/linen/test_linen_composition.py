"""Linen models that keep state, draw random numbers, share modules, or use Flax's lifted transformations."""

import collections
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard as js
from tests.linen_models import (
    VOCAB,
    WIDTH,
    Block,
    Decoder,
    Layer,
    SetupBlock,
    SetupDecoder,
    X,
    assert_equal,
    cross_entropy,
    differences,
)


def equal(found: Any, wanted: Any) -> bool:
    return max(differences(found, wanted).values()) <= 2e-6


def test_dropout_differs_between_shards_and_repeats():
    plain, ids = Decoder(depth=1, rate=0.3), np.repeat(X[:1], 16, 0)
    variables = plain.init(jax.random.key(0), X, train=False)
    gradients = []
    for remat in ("none", "full"):
        model = js.fully_shard(plain, mesh=js.mesh(), units=Block, remat=remat)
        run = lambda v, model=model: model.apply(v, ids, rngs={"dropout": jax.random.key(1)})
        loss = jax.jit(jax.value_and_grad(lambda v, run=run: cross_entropy(run(v))))
        gradients += [loss(variables), loss(variables)]
    assert len(np.unique(np.asarray(jax.jit(run)(variables)).round(5), axis=0)) == 16
    assert all(equal(other, gradients[0]) for other in gradients[1:])  # backward draws the masks of forward again


class Draws(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (64, 64))
        return nn.Dropout(0.5, deterministic=False)(x) + 0 * (x @ kernel)


class DrawsTwice(nn.Module):
    @nn.compact
    def __call__(self, x):
        unit, other = Draws(name="unit"), Draws(name="other")
        return unit(x), unit(x), other(x)


def test_every_call_draws_its_own_numbers_and_one_shard_those_of_plain_flax():
    ones, keys = np.ones((16, 64), np.float32), {"dropout": jax.random.key(1)}
    variables = DrawsTwice().init({"params": jax.random.key(0), **keys}, ones)
    run = lambda model: jax.jit(lambda v: model.apply(v, ones, rngs=keys))(variables)
    first, second, other = run(js.fully_shard(DrawsTwice(), mesh=js.mesh(), units=Draws))
    assert (first != second).any() and (first != other).any() and (second != other).any()
    single = js.fully_shard(DrawsTwice(), mesh=js.mesh(devices=jax.devices()[:1]), units=Draws)
    for found, wanted in zip(run(single), run(DrawsTwice()), strict=True):
        np.testing.assert_array_equal(found, wanted)


class Counts(nn.Module):
    """Sows an array with a batch dim and a mean, counts its calls, and keeps a number."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(WIDTH)(x)
        self.sow("intermediates", "hidden", h)
        self.sow("losses", "size", jnp.square(h).mean())
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value = calls.value + 1
        self.variable("counts", "number", lambda: 1).value = 2
        both = self.variable("counts", "both", lambda: {"mean": jnp.zeros(WIDTH), "count": (jnp.zeros(()), None)})
        both.value = {"mean": 0.9 * both.value["mean"] + h.mean((0, 1)), "count": both.value["count"]}
        return h


class CountsTwice(nn.Module):
    @nn.compact
    def __call__(self, ids):
        unit = Counts(name="unit")
        x = unit(unit(nn.Embed(VOCAB, WIDTH, name="table")(ids)))
        self.sow("intermediates", "last", x)
        return nn.Dense(VOCAB, name="head")(Counts(name="other")(x))


@pytest.mark.parametrize(
    "settings",
    [
        {"mutable": True},
        {"mutable": nn.DenyList(["params"])},
        {"mutable": ["counts"], "capture_intermediates": lambda module, name: isinstance(module, nn.Dense)},
    ],
    ids=["all", "deny", "filtered"],
)
def test_state_and_what_is_sown_are_those_of_plain_flax(settings):
    variables = CountsTwice().init(jax.random.key(0), X)
    variables = {"params": variables["params"], "counts": variables["counts"]}
    model = js.fully_shard(CountsTwice(), mesh=js.mesh(), units=Counts)
    run = lambda model: jax.jit(lambda v: model.apply(v, X, **settings))(variables)
    found, wanted = run(model), run(CountsTwice())
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert equal(found, wanted)


def test_a_table_read_by_hand():
    by_hand = lambda model, variables, mutable: model.apply(variables, X, method="tied", mutable=mutable)
    assert_equal(SetupDecoder(depth=1), by_hand, units=[SetupBlock, "table"])


class Given(nn.Module):
    @nn.compact
    def __call__(self, x, table):
        return table.attend(nn.Dense(WIDTH)(x))


class Gives(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(VOCAB, WIDTH, name="table")
        return Given(name="given")(table(ids), table)


def test_a_shared_module_is_gathered_by_the_root():
    plan = js.plan(assert_equal(Gives(), units=Given))
    assert plan.leaf("table/embedding").unit == "(root)"


def test_units_inside_units():
    plan = js.plan(assert_equal(Decoder(depth=2), units=[Block, nn.Dense]))
    assert plan.leaf("block_1/Dense_0/kernel").unit == "block_1/Dense_0"
    assert plan.leaf("block_1/LayerNorm_0/scale").unit == "block_1"


def test_blocks_under_transformations_of_the_models_own():
    plan = js.plan(assert_equal(Decoder(depth=2, block=nn.jit(nn.remat(Block))), units=Block))
    assert [unit.kind for unit in plan.units] == ["Decoder", "Block", "Block"]


class Scans(nn.Module):
    """A scan over layers, their statistics stacked too; and copies by vmap."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH, name="table")(ids)
        axes: Any = {"params": 0, "batch_stats": 0}
        scan = nn.scan(nn.remat(Layer, prevent_cse=False), axes, split_rngs={"params": True}, length=3)
        x, _ = scan(norm=True, name="layers")(x, None)
        copies = nn.vmap(
            SetupBlock, in_axes=None, out_axes=0, axis_size=2, variable_axes={"params": 0}, split_rngs={"params": True}
        )
        return nn.Dense(VOCAB, name="head")(copies(name="copies")(x).mean(0))


def test_layers_that_a_scan_or_a_vmap_stacks():
    model = assert_equal(Scans(), units=[Layer, SetupBlock])
    layers = [leaf.placement.layers for leaf in js.plan(model).leaves if leaf.unit != "(root)"]
    assert set(layers) == {2, 3}


class Crosses(nn.Module):
    """Adds an array that it was given as a field."""

    other: jax.Array

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x + self.other)


class Masked(nn.Module):
    """Arrays of numpy are constants of the model: it may look at them."""

    offset: int

    @nn.compact
    def __call__(self, x, mask, *, causal):
        assert isinstance(mask, np.ndarray) and mask.any()
        weights = jnp.where(np.roll(mask, self.offset, 0), 1.0, 0.5) if causal else 1.0
        return nn.Dense(WIDTH)(jnp.einsum("btd,ts->bsd", x, weights))


class Mixture(nn.Module):
    """An array of the model as a field of a unit, masks of numpy, a loop over time, and a choice between units."""

    def setup(self):
        self.table, self.head = nn.Embed(VOCAB, WIDTH), nn.Dense(VOCAB)
        self.first, self.second, self.cell = Block(), Block(), nn.RNN(nn.SimpleCell(WIDTH))
        self.masked = [Masked(0), Masked(1)]

    @nn.compact
    def __call__(self, ids):
        x = self.table(ids)
        x = Crosses(2 * x, name="crosses")(x)
        x = self.cell(x)
        for masked in self.masked:
            x = masked(x, np.tri(x.shape[1], dtype=bool), causal=np.bool_(True))
        branches = [lambda model, x: model.first(x), lambda model, x: model.second(x)]
        if self.is_initializing():
            x = branches[0](self, branches[1](self, x))
        return self.head(nn.switch(jnp.int32(1), branches, self, x))


def test_fields_and_constants_that_are_arrays_loops_over_time_and_branches():
    assert_equal(Mixture(), units=[Crosses, nn.RNN, Block, Masked])


class Twice(nn.Module):
    """One module by two fields, and one that has another's scope."""

    def setup(self):
        self.table = nn.Embed(VOCAB, WIDTH)
        self.lora = Lora(nn.Dense(WIDTH, use_bias=False))
        block = Block()
        self.both = [block, block]

    def __call__(self, ids):
        return self.table.attend(self.both[1](self.lora(self.both[0](self.table(ids)))))


class Lora(nn.Module):
    dense: nn.Module

    def setup(self):
        nn.share_scope(self, self.dense)

    @nn.compact
    def __call__(self, x):
        down = self.param("down", nn.initializers.normal(), (x.shape[-1], 4))
        up = self.param("up", nn.initializers.normal(), (4, WIDTH))
        return self.dense(x) + x @ down @ up


class Intercepts(nn.Module):
    """Puts interceptors of its own around its units."""

    @nn.compact
    def __call__(self, ids):
        def doubled(call, args, kwargs, context):
            return call(*args, **kwargs) * (2 if context.method_name == "__call__" else 1)

        table = nn.Embed(VOCAB, WIDTH, name="table")
        x = table(ids)
        with nn.intercept_methods(doubled):
            x = Block(name="first")(x)
        return table.attend(Block(name="second")(x))


@pytest.mark.parametrize(
    ("model", "units"),
    [
        (Twice(), [Block, Lora]),
        (Intercepts(), Block),
    ],
    ids=str,
)
def test_names_scopes_and_interceptors_of_the_models_own(model, units):
    assert_equal(model, units=units)


def test_an_interceptor_of_the_users_sees_each_call_once():
    seen: list[str] = []

    def note(call, args, kwargs, context):
        seen.append(f"{'/'.join(context.module.path)}.{context.method_name}")
        return call(*args, **kwargs)

    variables = jax.jit(Decoder(depth=2).init)(jax.random.key(0), X)
    model = js.fully_shard(Decoder(depth=2), mesh=js.mesh(), units=Block)
    jax.eval_shape(model.init, jax.random.key(0), X)
    with nn.intercept_methods(note):
        jax.eval_shape(model.apply, variables, X)
        found = [*seen]
        seen.clear()
        jax.eval_shape(Decoder(depth=2).apply, variables, X)
    assert collections.Counter(found) == collections.Counter(seen)


def regions(function: Any, *args: Any) -> int:
    return str(jax.make_jaxpr(function)(*args)).count("shard_map")


def test_every_way_into_the_model_is_one_region():
    plain = SetupDecoder(depth=1)
    variables = jax.jit(plain.init)(jax.random.key(0), X)
    model = js.fully_shard(plain, mesh=js.mesh(), units=SetupBlock)
    assert isinstance(model, SetupDecoder) and repr(model) == repr(plain)
    ways = [
        lambda v: model.apply(v, X, method="encode"),
        lambda v: model.apply(v, X, method=SetupDecoder.encode),
        lambda v: model.apply(v, X, method=model.encode),
        lambda v: model.apply(v, X, method=lambda module, x: module.encode(x)),
        lambda v: model.bind(v).encode(X),
        lambda v: nn.apply(lambda module, x: module.encode(x), model)(v, X),
    ]
    wanted = plain.apply(variables, X, method="encode")
    for way in ways:
        assert regions(way, variables) == 1
        assert equal(jax.jit(way)(variables), wanted)
    assert equal(model.apply(variables, X), plain.apply(variables, X))  # not in a jit
    with js.global_view():
        assert regions(lambda v: model.apply(v, X[:3]), variables) == 0


def test_check_compares_with_global_view():
    plain = Decoder(depth=1, norm=True)
    variables = jax.jit(plain.init)(jax.random.key(0), X)
    model = js.fully_shard(plain, mesh=js.mesh(), units=Block)
    report = js.check(model, variables, X, train=False)
    assert report.worst < 1e-5 and "block_0/Dense_0/kernel" in report.gradients
    report = js.check(model, variables, X, loss_fn=lambda v, x: model.apply(v, x, train=False)[:, :1].mean())
    assert report.worst < 1e-5 and list(report.outputs) == ["output"]


def test_an_annotated_model_is_pickled():
    model = js.fully_shard(Decoder(depth=1), mesh=js.mesh(), units=Block)
    variables = model.init(jax.random.key(0), X)
    again = pickle.loads(pickle.dumps(model))
    assert js.plan(again) == js.plan(model)
    np.testing.assert_array_equal(again.apply(variables, X), model.apply(variables, X))
