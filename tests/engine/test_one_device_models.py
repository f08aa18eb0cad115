"""Models that mix examples or keep a state of them, under the three lines: loss, gradients and state of one device."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests.engine.mixing_models import IDS, MODELS, VECTORS, WIDTH, Sows
from tests.engine.one_device import TOLERANCE, annotated, apart, assert_equal, nnx_results, on_host
from tests.wide import wide

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]  # of what the mixing costs
LOOSER: dict[str, float] = {}


@pytest.fixture(autouse=True)
def ranks_as_users_have_them() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def one_device(name: str) -> Any:
    case = MODELS[name]
    return nnx_results(case.build(nnx.Rngs(0)), case.loss, *case.batch)


@pytest.mark.parametrize(
    ("name", "on"),
    [(name, "fsdp=8") for name in MODELS]
    + [(name, "2x4") for name in ("an EMA codebook", "batch norms", "two towers", "scanned blocks", "one large graph")]
    + [(name, "tensor") for name in ("a running normaliser", "recomputed blocks")]
    + [wide(name, on) for name in MODELS for on in ("2x4", "tensor")],
)
def test_equals_one_device(name: str, on: str):
    case = MODELS[name]
    found = nnx_results(annotated(case.build(nnx.Rngs(0)), case.units, on=on), case.loss, *case.batch)
    assert_equal(found, one_device(name), LOOSER.get(name, TOLERANCE))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_a_variable_that_the_call_makes():
    run = nnx.jit(lambda model, x: model(x))
    plain, model = Sows(nnx.Rngs(0)), annotated(Sows(nnx.Rngs(0)))
    found, wanted = (on_host((run(m, VECTORS), nnx.state(m))) for m in (model, plain))
    assert max(apart(found, wanted).values()) <= TOLERANCE
    assert model.mean[0].shape == () and model.hidden[0].shape == VECTORS.shape


class Decodes(nnx.Module):
    """Attention that keeps keys and values of the tokens before."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=True, rngs=rngs)
        self.attention.init_cache((len(IDS), 8, WIDTH))

    def __call__(self, token):
        return self.embed.attend(self.attention(self.embed(token)))


class OwnCache(nnx.Module):
    """A cache of plain variables, of which each example has its own end."""

    def __init__(self, rngs):
        self.embed, self.mix = nnx.Embed(64, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.kept = nnx.Variable(jax.numpy.zeros((len(IDS), 8, WIDTH)))
        self.end = nnx.Variable(jax.numpy.arange(len(IDS), dtype=np.int32) % 3)

    def __call__(self, token):
        h, rows = self.mix(self.embed(token[:, 0])), jax.numpy.arange(len(token))
        self.kept[...] = self.kept[...].at[rows, self.end[...]].set(h)
        self.end[...] += 1
        seen = jax.numpy.arange(8)[None] < self.end[...][:, None]
        return self.embed.attend(jax.numpy.where(seen[..., None], self.kept[...], 0).sum(1))


@pytest.mark.parametrize("kind", [Decodes, OwnCache])
def test_a_cache_of_tokens_before(kind: type):
    run = nnx.jit(lambda model, token: model(token))

    def decoded(model):
        outs = [run(model, IDS[:, i : i + 1]) for i in range(3)]
        return on_host((outs, nnx.state(model)))

    found, wanted = decoded(annotated(kind(nnx.Rngs(0)))), decoded(kind(nnx.Rngs(0)))
    assert max(apart(found, wanted).values()) <= TOLERANCE


@pytest.mark.parametrize("name", ["a masked loss outside", "two towers", "loops over time", "batch norms"])
def test_a_call_outside_jit(name: str):
    case = MODELS[name]
    arguments = (
        [x for x in case.batch if x.dtype == np.float32 or x.ndim == 1][:2]
        if case.units[0].__name__ != "Block"
        else [IDS]
    )
    plain, model = case.build(nnx.Rngs(0)), annotated(case.build(nnx.Rngs(0)), case.units)
    found, wanted = (on_host((m(*arguments), nnx.state(m, nnx.BatchStat))) for m in (model, plain))
    assert max(apart(found, wanted).values()) <= TOLERANCE


@pytest.mark.parametrize("examples", [3, 12, 1])
def test_a_batch_that_does_not_divide(examples: int):
    """It is computed whole, on all devices: slow, and right."""
    case = MODELS["an EMA codebook"]
    found, wanted = (
        nnx_results(model, case.loss, VECTORS[:examples])
        for model in (annotated(case.build(nnx.Rngs(0))), case.build(nnx.Rngs(0)))
    )
    assert_equal(found, wanted)
