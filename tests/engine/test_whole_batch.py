"""Products that every device computes for all examples are said once, with their lines; what the batch of a call is."""

import linecache
import re
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.engine.moved import batch_size

WIDTH = 1024  # a product with 1,020 rows is 2.1 GFLOP


class Towers(nnx.Module):
    """Two sets of examples, of one size or of two."""

    def __init__(self, rngs: nnx.Rngs):
        self.images = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.texts = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x, y=None):
        x = self.images(x)
        return x if y is None else x @ self.texts(y).T


def model(name: str, kind: type = Towers, **mesh: Any) -> nnx.Module:
    """Under a name of its own, as what was said is not said again."""
    made = type(name, (kind,), {})
    return js.abstract_init(lambda: made(nnx.Rngs(0)), lambda m: js.fully_shard(m, mesh=js.mesh(**mesh)))


def said(run) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert {one.filename for one in caught} <= {__file__}
    texts = [linecache.getline(__file__, one.lineno).strip() for one in caught]
    assert texts == ["nnx.jit(lambda model, args: model(*args)).lower(model, args)"] * len(caught), texts
    return [text for text in map(str, (one.message for one in caught)) if "every device computes" in text]


def called(model: nnx.Module, *shapes: tuple[int, ...]) -> list[str]:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def run() -> None:
        nnx.jit(lambda model, args: model(*args)).lower(model, args)

    return said(run)


def source(where: str) -> str:
    found = re.search(r"test_whole_batch.py:(\d+) \(", where)
    return linecache.getline(__file__, int(found[1])).strip() if found else where


def test_a_batch_that_does_not_divide_is_said_once_with_its_lines_and_a_line_to_write():
    """Seen to fail with the line of the library, and with a batch of 1,024."""
    made = model("Odd")
    (text,) = called(made, (1020, WIDTH))
    what, where, why, do = text.splitlines()
    assert what == "Odd.__call__: every device computes products for all examples, 100% of what it multiplies:"
    assert source(where) == "x = self.images(x)" and where.endswith(": 2.1 GFLOP")
    assert why.endswith("divides by 8, the number of data shards: float32[1020, 1024].")
    assert do.endswith("is split. To leave out the last of 1020: x = x[:1016]")
    assert called(made, (1020, WIDTH)) == called(made, (1012, WIDTH)) == []


def test_what_it_says_to_write_is_split():
    made = model("Few")
    assert called(made, (1016, WIDTH)) == called(made, (1024, WIDTH)) == []
    (text,) = called(made, (3, 400, WIDTH))
    assert text.endswith("A batch of a multiple of 8 is split.")
    assert called(made, (8, 400, WIDTH)) == []


@pytest.mark.parametrize(
    ("shapes", "mesh"),
    [
        (((1, 1020, WIDTH),), {}),  # a single example
        (((12, WIDTH),), {}),  # 25 MFLOP
        (((1020, WIDTH),), {"devices": jax.devices()[:1]}),  # one data shard
        (((1020, WIDTH),), {"fsdp": 1, "tensor": 8}),
        (((1024, WIDTH), (1024, WIDTH)), {}),
        (((4096, WIDTH), (36, WIDTH)), {}),  # less than a tenth
    ],
)
def test_programs_that_are_fine_are_not_said(shapes, mesh):
    assert called(model("Fine", **mesh), *shapes) == []


@pytest.mark.parametrize("texts", [1020, 512])
def test_of_two_sets_of_examples_the_one_that_is_whole_is_said(texts):
    (text,) = called(model(f"Towers{texts}"), (1024, WIDTH), (texts, WIDTH))
    _, where, why, do = text.splitlines()
    assert source(where) == "return x if y is None else x @ self.texts(y).T"
    assert why.endswith(f"dim of 1024 are split, and these are whole: float32[{texts}, 1024].")
    assert do.endswith("a number of them that all arguments have, a multiple of 8.")


def test_layers_in_a_loop_count_with_their_trips():
    """1 GFLOP in 16 trips of 67 MFLOP; seen to fail with the trips left out."""

    class Looped(Towers):
        def __call__(self, x):
            return jax.lax.scan(lambda x, _: (jnp.tanh(self.images(x)), None), x, length=16)[0]

    (text,) = called(model("Looped", Looped), (34, WIDTH))
    assert text.splitlines()[1].endswith(": 1.1 GFLOP")
    assert called(model("LoopedAll", Looped), (40, WIDTH)) == []


def test_a_linen_model_says_it_too():
    class LinenTower(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(x)

    made, x = js.fully_shard(LinenTower(), mesh=js.mesh()), jnp.ones((1020, WIDTH))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        variables = js.shard_init(lambda: made.init(jax.random.key(0), x), made)
    with pytest.warns(UserWarning, match=r"LinenTower.__call__: every device") as caught:
        jax.jit(made.apply).lower(variables, x)
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.parametrize(
    ("shapes", "batch"),
    [
        ([(16, 128), (128, 128)], 16),  # ids and a mask of tokens
        ([(16, 128), (128,), (128, 64), (128, 64)], 16),  # positions, and tables of angles
        ([(64, 64), (64, 64)], 64),  # as many tokens as examples
        ([(64, 128, 32), (64,)], 64),  # weights of examples
        ([(64, 784), (64,), (512, 64)], 64),  # a table as wide as the batch is large
        ([(8, 1), (8,), (8,), (16, 8, 128, 4), (16, 8, 128, 4)], 8),  # caches of layers, stacked
        ([(4,), (64, 8), (64,)], 64),
        ([(12, 4), (12,)], 0),
        ([(), (1, 8)], 0),
        ([], 0),
    ],
)
def test_the_batch_is_the_size_that_leads_and_is_no_inner_dim(shapes, batch):
    """Seen to fail by count alone: 2 to 4 of these."""
    assert batch_size([np.zeros(shape) for shape in shapes], 8) == batch
