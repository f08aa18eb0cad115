"""Errors that pass through the trace of a call keep type and text, and say where in the model they come from."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js

X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
SEEN: list = []


def branch(h):
    return h if h.sum() > 0 else -h


def to_numpy(h):
    return h + jnp.asarray(np.asarray(h))


def to_float(h):
    return h * float(h.mean())


def to_index(h):
    return h * list(range(3))[jnp.argmax(h[0]) % 3]


def mask(h):
    return h + h[h > 0].sum()


def leak(h):
    SEEN.append(h)
    return h + SEEN[0]


def shapes(h):
    return h @ jnp.ones((31, 3))


def own(h):
    raise KeyError("mine")


NEEDS_NUMBERS = {
    branch: jax.errors.TracerBoolConversionError,
    to_numpy: jax.errors.TracerArrayConversionError,
    to_float: jax.errors.ConcretizationTypeError,
    to_index: jax.errors.TracerIntegerConversionError,
    mask: jax.errors.NonConcreteBooleanIndexError,
}
OTHERS = {shapes: TypeError, own: KeyError}


class Block(nnx.Module):
    def __init__(self, does, rngs):
        self.linear = nnx.Linear(32, 32, rngs=rngs)
        self.does = does

    def __call__(self, x):
        return self.does(self.linear(x))


class Model(nnx.Module):
    def __init__(self, does, rngs):
        self.blocks = nnx.List([Block(does, rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class LinenBlock(nn.Module):
    does: object

    @nn.compact
    def __call__(self, x):
        return self.does(nn.Dense(32)(x))


class LinenModel(nn.Module):
    does: object

    @nn.compact
    def __call__(self, x):
        return LinenBlock(self.does, name="second")(LinenBlock(lambda h: h, name="first")(x))


def ours(error):
    """The note of jshard; there is one."""
    (note,) = [note for note in error.__notes__ if "annotated module" in note]
    return note


@pytest.mark.parametrize("units", [None, Block], ids=["root", "units"])
@pytest.mark.parametrize("does", [*NEEDS_NUMBERS, *OTHERS])
def test_an_error_says_which_module_and_line_it_comes_from(does, units):
    kind = (NEEDS_NUMBERS | OTHERS)[does]
    plain = Model(does, nnx.Rngs(0))
    with pytest.raises(kind) as wanted:
        nnx.jit(lambda model, x: model(x))(plain, X)
    model = js.fully_shard(Model(does, nnx.Rngs(0)), units=units, mesh=js.mesh())
    for run in (model, lambda x: nnx.jit(lambda model, x: model(x))(model, x)):
        with pytest.raises(kind) as caught:
            run(X)
        assert type(caught.value) is type(wanted.value)
        if does in OTHERS:
            assert str(caught.value) == str(wanted.value)
        assert re.search(
            r"blocks/0: Block\.__call__, at " if units else r"module: Model\.__call__, at ", ours(caught.value)
        )
        assert re.search(rf"at test_blame\.py:\d+ \({does.__name__}\)", ours(caught.value))
        assert "annotated module" not in str(caught.value)


@pytest.mark.parametrize("does", NEEDS_NUMBERS)
def test_code_that_needs_numbers_is_shown_the_way_out_where_it_is_one(does):
    model, plain = js.fully_shard(Model(does, nnx.Rngs(0)), mesh=js.mesh()), Model(does, nnx.Rngs(0))
    run = lambda model: model(X)
    gradient = lambda model: nnx.to_pure_dict(nnx.grad(lambda model: model(X).sum())(model))
    mapped = lambda model: jax.vmap(model)(X[None])
    for call, helps in (
        (run, True),
        (gradient, does not in (to_numpy, to_float)),  # these break in a gradient of plain Flax, too
        (nnx.jit(run), False),
        (nnx.jit(gradient), False),
        (mapped, False),
    ):
        with pytest.raises(NEEDS_NUMBERS[does]) as caught:
            call(model)
        has_hint = "with js.global_view():" in ours(caught.value)
        if not helps:
            assert not has_hint or call is gradient
            continue
        assert has_hint
        with js.global_view():
            found = call(model)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-5), found, call(plain))


def test_a_leaked_array_is_noted_too():
    SEEN.clear()
    model = js.fully_shard(Model(leak, nnx.Rngs(0)), units=Block, mesh=js.mesh())
    model.blocks[0](X)
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        model.blocks[0](X)
    SEEN.clear()
    assert "Block.__call__" in ours(caught.value) and "with js.global_view():" in ours(caught.value)


@pytest.mark.parametrize("units", [None, LinenBlock], ids=["root", "units"])
@pytest.mark.parametrize("traced", [False, True], ids=["not initialised", "initialised"])
def test_a_linen_model_does_the_same(units, traced):
    variables = LinenModel(branch).init(jax.random.key(0), X)
    model = js.fully_shard(LinenModel(branch), units=units, mesh=js.mesh())
    if traced:
        blank = js.fully_shard(LinenModel(lambda h: h), units=units, mesh=js.mesh())
        jax.eval_shape(blank.init, jax.random.key(0), X)
        with js.global_view():
            model.init(jax.random.key(0), X)
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        model.apply(variables, X)
    assert re.search(r"Linen(Block|Model)\.__call__, at test_blame\.py:\d+ \(branch\)", ours(caught.value))
    assert ("second: LinenBlock" in ours(caught.value)) == (units is not None and traced)
    with js.global_view():
        found = model.apply(variables, X)
    np.testing.assert_allclose(found, LinenModel(branch).apply(variables, X), rtol=1e-5, atol=1e-6)


def test_an_error_in_four_parts_has_no_note():
    model = js.fully_shard(Model(lambda h: iter([h]), nnx.Rngs(0)), units=Block, mesh=js.mesh())
    with pytest.raises(js.ShardingError) as caught:
        model(X)
    assert not any("annotated module" in note for note in getattr(caught.value, "__notes__", ()))
