"""A call of a Linen model as a function of arrays is the call: outputs, gradients, state and keys, bit for bit."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard as js
from jshard.errors import CallError
from jshard.linen import route
from tests.linen.linen_stand_in import StandIn
from tests.linen_models import VOCAB, WIDTH, Block, Decoder, SetupBlock, SetupDecoder, X, cross_entropy

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(route, "run_call", stand_in)
    return stand_in


def identical(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        assert jnp.result_type(a) == jnp.result_type(b), path
        np.testing.assert_array_equal(_bits(a), _bits(b), err_msg=jax.tree_util.keystr(path))


def _bits(x: Any) -> np.ndarray:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def assert_is_plain(plain: nn.Module, engine: StandIn, call: Callable | None = None, units: Any = Block) -> nn.Module:
    """Holds a call, its gradients in a jit, and what it changes, against plain Flax."""
    call = call or (lambda model, v: model.apply(v, X, rngs=KEYS, mutable=list(v.keys() - {"params"})))
    variables = plain.init(KEYS, X)
    model = js.fully_shard(plain, mesh=js.mesh(), units=units)
    jax.eval_shape(model.init, KEYS, X)

    def loss(params: Any, model: nn.Module) -> Any:
        out = call(model, {**variables, "params": params})
        arrays = [x for x in jax.tree.leaves(out) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
        return sum((x.astype(jnp.float32) ** 2).sum() for x in map(jnp.asarray, arrays)), out

    identical(call(model, variables), call(plain, variables))
    run = lambda model: jax.jit(jax.value_and_grad(functools.partial(loss, model=model), has_aux=True))
    identical(run(model)(variables["params"]), run(plain)(variables["params"]))
    assert engine.calls and "" in engine.traced
    return model


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_a_compact_model(engine, rate, norm):
    assert_is_plain(Decoder(depth=3, rate=rate, norm=norm), engine)


def test_units_inside_units(engine):
    assert_is_plain(Decoder(depth=2, rate=0.1), engine, units=[Block, nn.Dense])
    assert "block_1/Dense_0" in engine.calls


METHODS = {
    "encode": "encode",
    "tied": "tied",
    "function": SetupDecoder.encode,
    "lambda": lambda m, x: m.decode(m.encode(x)),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_setup_and_other_methods(engine, method):
    call = lambda model, v: model.apply(v, X, method=method)
    assert_is_plain(SetupDecoder(depth=2), engine, call, units=[SetupBlock, "table"])
    bound = lambda model, v: model.bind(v).encode(X)
    assert_is_plain(SetupDecoder(depth=2), engine, bound, units=SetupBlock)


class Named(nn.Module):
    """Does something else in one place."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x) * (2 if self.name == "unit_1" else 1)


class HasNamed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + Named(name="unit_1" if self.path[0] == "a_1" else "unit_0")(x)


class ReadsNames(nn.Module):
    inner: Any = Named

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH)(ids)
        for i in range(3):
            x = self.inner(name=f"{'unit' if self.inner is Named else 'a'}_{i}")(x)
        return x


@pytest.mark.parametrize("inner", [Named, HasNamed])
def test_units_that_read_their_names(engine, inner):
    assert_is_plain(ReadsNames(inner), engine, units=inner)


class Keeps(nn.Module):
    """State of every kind: sown, counted, a number, a tree, perturbed, a key."""

    @nn.compact
    def __call__(self, x, train=True):
        h = nn.Dense(WIDTH)(x)
        self.sow("intermediates", "hidden", h)
        self.sow("losses", "size", jnp.square(h).mean(), reduce_fn=lambda a, b: a + b, init_fn=lambda: 0.0)
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value = calls.value + 1
        self.variable("counts", "number", lambda: 1).value = 2
        moments = self.variable("moments", "both", lambda: {"mean": jnp.zeros(WIDTH), "count": (jnp.zeros(()), None)})
        moments.value = {"mean": 0.9 * moments.value["mean"] + h.mean((0, 1)), "count": moments.value["count"]}
        h = self.perturb("h", h)
        drawn = jax.random.normal(self.make_rng("noise"), h.shape) if self.has_rng("noise") else 0.0
        return h + drawn


class KeepsTwice(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH, name="table")(ids)
        unit = Keeps(name="unit")
        x = unit(unit(x))
        self.sow("intermediates", "last", x)
        return Keeps(name="other")(x)


MUTABLE = [True, ["intermediates", "losses", "counts", "moments"], nn.DenyList(["params"]), {"counts", "moments"}]


@pytest.mark.parametrize("mutable", MUTABLE, ids=["all", "list", "deny", "set"])
def test_state_and_new_state(engine, mutable):
    keys = KEYS | {"noise": jax.random.PRNGKey(3)}
    drop = lambda v: {k: x for k, x in v.items() if k in ("params", "counts", "moments", "perturbations")}
    call = lambda model, v: model.apply(drop(v), X, mutable=mutable, rngs=keys)
    assert_is_plain(KeepsTwice(), engine, call, units=Keeps)


def test_a_write_to_what_is_not_mutable_is_the_error_of_flax(engine):
    keys = KEYS | {"noise": jax.random.key(3)}
    model = js.fully_shard(KeepsTwice(), mesh=js.mesh(), units=Keeps)
    variables = model.init(keys, X)
    with pytest.raises(flax.errors.ModifyScopeVariableError, match="calls"):
        model.apply(variables, X, mutable="moments", rngs=keys)


@pytest.mark.parametrize("capture", [True, lambda module, name: module.name == "other"], ids=["all", "one"])
def test_captured_intermediates(engine, capture):
    call = lambda model, v: model.apply(v, X, mutable=["counts", "moments"], capture_intermediates=capture)
    assert_is_plain(KeepsTwice(), engine, call, units=Keeps)


class Head(nn.Module):
    table: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.table.attend(nn.Dense(WIDTH, name="mix")(x))


class Shares(nn.Module):
    """One table, used by the root and, as a field, by a unit."""

    def setup(self):
        self.table = nn.Embed(VOCAB, WIDTH)
        self.block, self.head = Block(), Head(self.table)

    def __call__(self, ids):
        return self.head(self.block(self.table(ids)))


class Given(nn.Module):
    @nn.compact
    def __call__(self, x, table, scale):
        return table.attend(nn.Dense(WIDTH)(x)) * scale.value


class Gives(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(VOCAB, WIDTH, name="table")
        scale = self.variable("scales", "scale", lambda: jnp.full((), 2.0))
        return Given(name="given")(table(ids), table, scale)


class Twice(nn.Module):
    """One module by two fields, and one that has another's scope."""

    def setup(self):
        self.table = nn.Embed(VOCAB, WIDTH)
        self.lora = Lora(nn.Dense(WIDTH, use_bias=False))
        block = Block()
        self.both = [block, block]

    def __call__(self, ids):
        return self.both[1](self.lora(self.both[0](self.table(ids))))


class Lora(nn.Module):
    dense: nn.Module

    def setup(self):
        nn.share_scope(self, self.dense)

    @nn.compact
    def __call__(self, x):
        down = self.param("down", nn.initializers.normal(), (x.shape[-1], 4))
        up = self.param("up", nn.initializers.normal(), (4, WIDTH))
        return self.dense(x) + x @ down @ up


@pytest.mark.parametrize(
    ("model", "units"),
    [
        (Shares(), [Block, Head]),
        (Shares(), [Block, Head, "table"]),
        (Gives(), Given),
        (Twice(), [Block, Lora]),
        (Twice(), "lora"),
    ],
    ids=str,
)
def test_shared_modules_and_scopes(engine, model, units):
    assert_is_plain(model, engine, units=units)


class Layer(nn.Module):
    rate: float = 0.2

    @nn.compact
    def __call__(self, x, _):
        return Block(WIDTH, self.rate, True)(x), x.mean()


class Lifts(nn.Module):
    """Layers by scan, copies by vmap, and blocks under remat and jit."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH, name="table")(ids)
        axes: Any = {"params": 0, "batch_stats": 0}
        scan = nn.scan(nn.remat(Layer, prevent_cse=False), axes, split_rngs={"params": True, "dropout": True}, length=3)
        x, means = scan(name="layers")(x, None)
        copies = nn.vmap(SetupBlock, {"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)
        x = copies(name="copies")(x).mean(0)
        x = nn.jit(Block)(rate=0.1, name="jitted")(nn.remat(Block)(rate=0.3, name="saved")(x))
        return nn.Dense(VOCAB, name="head")(x) + means.sum()


@pytest.mark.parametrize("units", [Layer, Block, SetupBlock, [Layer, nn.Dense], nn.LayerNorm, "head"], ids=str)
def test_transformations_of_flax(engine, units):
    assert_is_plain(Lifts(), engine, units=units)
    assert len(set(engine.calls)) > 1


class Crosses(nn.Module):
    other: jax.Array

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x + self.other)


class Mixture(nn.Module):
    """An array as a field of a unit, numbers and masks of numpy, a loop over time, and a choice between units."""

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


class Masked(nn.Module):
    offset: int

    @nn.compact
    def __call__(self, x, mask, *, causal):
        assert isinstance(mask, np.ndarray) and mask.any()
        weights = jnp.where(np.roll(mask, self.offset, 0), 1.0, 0.5) if causal else 1.0
        return nn.Dense(WIDTH)(jnp.einsum("btd,ts->bsd", x, weights))


def test_fields_constants_loops_over_time_and_branches(engine):
    assert_is_plain(Mixture(), engine, units=[Crosses, nn.RNN, Block, Masked])


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, ids):
        along = lambda *names: nn.with_partitioning(nn.initializers.lecun_normal(), names)
        logical = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
        x = nn.Embed(VOCAB, WIDTH, name="table")(ids)
        x = nn.gelu(nn.Dense(4 * WIDTH, kernel_init=along(None, "tensor"), name="up")(x))
        return nn.Dense(WIDTH, kernel_init=logical, name="down")(x)


def test_boxes_of_flax(engine):
    model = assert_is_plain(Boxed(), engine, units=["up", "down"])
    assert isinstance(model.init(KEYS, X)["params"]["up"]["kernel"], nn.Partitioned)


class Cached(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB, WIDTH, name="table")(ids)
        return nn.MultiHeadDotProductAttention(num_heads=4, decode=True, name="attention")(x)


def test_a_cache(engine):
    call = lambda model, v: model.apply(v, X[:, :1], mutable=["cache"])
    assert_is_plain(Cached(), engine, call, units="attention")


class Outer(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, ids):
        return nn.Dense(8)(self.inner(ids))


def test_an_annotated_model_inside_a_plain_one(engine):
    plain = SetupDecoder(depth=1)
    variables = Outer(plain).init(KEYS, X)
    model = Outer(js.fully_shard(plain, mesh=js.mesh(), units=SetupBlock))
    jax.eval_shape(model.init, KEYS, X)
    identical(model.apply(variables, X), Outer(plain).apply(variables, X))
    assert engine.calls == ["", "blocks_0"]


class Odd(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return Narrow(name="narrow")(nn.Embed(1009, 33, name="table")(ids))


class Narrow(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (33, 1009))
        assert kernel.shape == (33, 1009)
        return x @ kernel


def test_padded_parameters_are_logical_inside(engine):
    model = js.fully_shard(Odd(), mesh=js.mesh(), units=Narrow)
    made = js.shard_init(lambda: model.init(KEYS, X), model)
    plain = Odd().init(KEYS, X)
    assert made["params"]["table"]["embedding"].value.shape == (1016, 33)
    wanted = Odd().apply(plain, X)
    for variables in (made, plain):
        np.testing.assert_allclose(model.apply(variables, X), wanted, rtol=1e-5, atol=1e-6)
    shapes = lambda tree: [x.shape for x in jax.tree.leaves(tree)]
    grads = jax.grad(lambda p: cross_entropy(model.apply({"params": p}, X), X))
    assert shapes(grads(made["params"])) == shapes(made["params"])
    _, changed = model.apply(made, X, mutable=True)
    assert shapes(changed) == shapes(made)


def test_the_python_of_the_model_runs_once(engine):
    runs = Counter()

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x):
            runs["block"] += 1
            return x + nn.Dense(WIDTH)(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            runs["root"] += 1
            x = nn.Embed(VOCAB, WIDTH)(ids)
            for i in range(4):
                x = Counted(name=f"block_{i}")(x)
            return nn.Dense(VOCAB)(x)

    model = js.fully_shard(Model(), mesh=js.mesh(), units=Counted)
    variables = jax.jit(model.init)(KEYS, X)
    runs.clear()
    jax.jit(jax.grad(lambda v: cross_entropy(model.apply(v, X))))(variables)
    assert runs == {"root": 1, "block": 4}


def test_an_interceptor_of_the_users_sees_each_call_once(engine):
    seen: list[str] = []

    def note(call, args, kwargs, context):
        seen.append(f"{'/'.join(context.module.path)}.{context.method_name}")
        return call(*args, **kwargs)

    variables = Decoder(depth=2).init(KEYS, X)
    model = js.fully_shard(Decoder(depth=2), mesh=js.mesh(), units=Block)
    jax.eval_shape(model.init, KEYS, X)
    with nn.intercept_methods(note):
        model.apply(variables, X)
        found = [*seen]
        seen.clear()
        Decoder(depth=2).apply(variables, X)
    assert Counter(found) == Counter(seen)


class Intercepts(nn.Module):
    """Puts interceptors of its own around its units."""

    @nn.compact
    def __call__(self, ids):
        def doubled(call, args, kwargs, context):
            return call(*args, **kwargs) * (2 if context.method_name == "__call__" else 1)

        x = nn.Embed(VOCAB, WIDTH, name="table")(ids)
        with nn.intercept_methods(doubled):
            x = Block(name="first")(x)
        return Block(name="second")(x)


def test_interceptors_of_the_models_own_see_units(engine):
    assert_is_plain(Intercepts(), engine)


def test_a_module_that_leaves_its_call_is_refused(engine):
    class Returns(nn.Module):
        def setup(self):
            self.dense = nn.Dense(WIDTH)

        def __call__(self, x):
            return self.dense(x)

        def layer(self):
            return self.dense

    model = js.fully_shard(Returns(), mesh=js.mesh())
    variables = model.init(KEYS, np.ones((8, WIDTH), np.float32))
    with pytest.raises(CallError, match="returned a module"):
        model.apply(variables, method="layer")


def test_parameters_that_init_makes_are_sharded(engine):
    model = js.fully_shard(Decoder(depth=2), mesh=js.mesh(), units=Block)
    plain = Decoder(depth=2).init(KEYS, X)
    for init in (model.init, jax.jit(model.init)):
        made = init(KEYS, X)
        kernel = made["params"]["block_0"]["Dense_0"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) == (WIDTH, 4 * WIDTH // 8)
    identical(model.init(KEYS, X), plain)
    assert not engine.calls
