"""What a model sends as it mixes the examples of its batch: warned of, listed by line, kept apart, or refused."""

import json
import linecache
import re
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import pallas as pl

import jshard as js
from jshard.engine.mixing import Mixing
from jshard.inspect.audit import audit

BATCH, INPUTS, WIDTH = 1024, 16, 256  # the whole batch of features is 1 MiB
BATCH_BYTES = BATCH * WIDTH * 4


class Contrast(nnx.Module):
    """In-batch negatives of ranked features: two lines that need the whole batch, and one that needs a small sum."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(INPUTS, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.linear(x)
        h = h - h.mean(0, keepdims=True)
        ranked = jnp.sort(h, axis=0)
        return h @ ranked.T


class LinenContrast(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Dense(WIDTH)(x)
        return h @ h.T


def annotated(name: str, **settings: Any) -> nnx.Module:
    """The model; under a name of its own, as what was warned of is not said again."""
    kind = type(name, (Contrast,), {})
    return js.abstract_init(lambda: kind(nnx.Rngs(0)), lambda m: js.fully_shard(m, mesh=js.mesh(), **settings))


def traced(model: nnx.Module, batch: int = BATCH) -> Any:
    step = nnx.jit(nnx.value_and_grad(lambda model, x: (model(x) ** 2).mean()))
    return step.lower(model, jax.ShapeDtypeStruct((batch, INPUTS), jnp.float32)).lowered


def quietly(model: nnx.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return traced(model)


def source(where: str) -> str:
    """The text of the line at `file:line (function)`."""
    found = re.search(r"test_mixing_is_shown.py:(\d+) \(", where)
    return linecache.getline(__file__, int(found[1])).strip() if found else where


def test_a_line_that_sends_much_is_warned_of_once_with_its_bytes():
    model = annotated("Warned")
    with pytest.warns(UserWarning, match="mixes the examples of its batch") as caught:
        traced(model)
    listed = [line for one in caught for line in str(one.message).splitlines()[1:]]
    texts = [source(line) for line in listed]
    assert sorted(texts) == ["h = self.linear(x)", "ranked = jnp.sort(h, axis=0)", "return h @ ranked.T"]
    assert all(f"{BATCH_BYTES:,} bytes" in line for line in listed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced(model, batch=2 * BATCH)  # another trace of the same lines


class Kernel(nnx.Module):
    """The engine cannot look into a kernel."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(INPUTS, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.linear(x)
        return pl.pallas_call(lambda x, y: y.__setitem__(..., x[...]), out_shape=h, interpret=True)(h)


def test_of_a_kernel_the_warning_names_per_example():
    """Seen to fail with `pallas_call` left out of the opaque ones."""
    model = js.abstract_init(lambda: Kernel(nnx.Rngs(0)), lambda m: js.fully_shard(m, mesh=js.mesh()))
    with pytest.warns(UserWarning, match=r"pallas_call, gathered(.|\n)*js.per_example\(f\) around a function f"):
        nnx.jit(lambda model, x: model(x)).lower(model, jax.ShapeDtypeStruct((BATCH, INPUTS), jnp.float32))


def lines_of(found: tuple[Mixing, ...]) -> dict[str, int]:
    """Bytes by the text of the line."""
    sums: dict[str, int] = {}
    for one in found:
        sums[source(one.where)] = sums.get(source(one.where), 0) + one.bytes
    return sums


def test_explain_lists_the_lines_of_an_nnx_model_once_it_was_called():
    model = annotated("Explained")
    assert js.explain(model).mixing == () and "own mixing" not in str(js.explain(model))
    quietly(model)
    found = js.explain(model)
    sums = lines_of(found.mixing)
    assert sums["ranked = jnp.sort(h, axis=0)"] >= BATCH_BYTES and sums["return h @ ranked.T"] >= BATCH_BYTES
    assert sums["h = h - h.mean(0, keepdims=True)"] < BATCH_BYTES / 100
    assert "Communication of the model's own mixing of examples" in str(found)
    assert [Mixing(**one) for one in json.loads(found.to_json())["mixing"]] == [*found.mixing]
    quietly(model)
    assert js.explain(model).mixing == found.mixing  # of the last trace, not of all


def test_explain_lists_the_lines_of_a_linen_model():
    model = js.fully_shard(LinenContrast(), mesh=js.mesh())
    x = jax.ShapeDtypeStruct((BATCH, INPUTS), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    assert js.explain(model).mixing == ()
    with pytest.warns(UserWarning, match="LinenContrast mixes the examples"):
        jax.eval_shape(model.apply, variables, x)
    assert lines_of(js.explain(model).mixing) == {"return h @ h.T": BATCH_BYTES}


def test_audit_distinguishes_the_lines_from_parameters():
    model = annotated("Audited")
    found = audit(quietly(model), model=model)
    assert found.ok, found.differences
    gathered = [row for row in found.mixing if row.windows[0].kind == "all-gather"]
    assert {source(m.where) for row in gathered for m in row.mixing} >= {"return h @ ranked.T"}
    assert sum(row.total_bytes for row in gathered) >= BATCH_BYTES
    assert found.amount("all-gather") == pytest.approx(1, abs=0.1)  # the kernel: backward of the root needs no other
    assert not any(w.mixing for row in found.rows for w in row.windows)
    assert "Collectives of the model's own mixing of examples (compiled)" in str(found)
    (first, *_) = json.loads(found.to_json())["mixing"]
    assert first["total_bytes"] == found.mixing[0].total_bytes and first["lines"][0]["where"]


# ---- Products that every device computes ---------------------------------------------------------


WIDE = 1024  # a product with 1,020 rows is 2.1 GFLOP


class Towers(nnx.Module):
    """Two sets of examples, of one size or of two."""

    def __init__(self, rngs: nnx.Rngs):
        self.images = nnx.Linear(WIDE, WIDE, use_bias=False, rngs=rngs)
        self.texts = nnx.Linear(WIDE, WIDE, use_bias=False, rngs=rngs)

    def __call__(self, x, y=None):
        x = self.images(x)
        return x if y is None else x @ self.texts(y).T


def named_towers(name: str, kind: type = Towers, **mesh: Any) -> nnx.Module:
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


def test_a_batch_that_does_not_divide_is_said_once_with_its_lines_and_a_line_to_write():
    """Seen to fail with the line of the library, and with a batch of 1,024."""
    made = named_towers("Odd")
    (text,) = called(made, (1020, WIDE))
    what, where, why, do = text.splitlines()
    assert what == "Odd.__call__: every device computes products for all examples, 100% of its multiplications:"
    assert source(where) == "x = self.images(x)" and where.endswith(": 2.1 GFLOP")
    assert why.endswith("divides by 8, the number of data shards: float32[1020, 1024].")
    assert do.endswith("is split. To drop the last of 1020: x = x[:1016]")
    assert called(made, (1020, WIDE)) == called(made, (1012, WIDE)) == []


def test_what_it_says_to_write_is_split():
    made = named_towers("Few")
    assert called(made, (1016, WIDE)) == called(made, (1024, WIDE)) == []
    (text,) = called(made, (3, 400, WIDE))
    assert text.endswith("A batch size that is a multiple of 8 is split.")
    assert called(made, (8, 400, WIDE)) == []


class Merged(nnx.Module):
    """Products of parameters alone, as of adapters that are merged before they are used."""

    def __init__(self, rngs: nnx.Rngs):
        self.down = nnx.Param(jnp.ones((WIDE, WIDE)))
        self.up = nnx.Param(jnp.ones((WIDE, WIDE)))

    def __call__(self, x):
        kernel = self.down[...] @ self.up[...]
        return x @ kernel


class OneByOne(Merged):
    """A loop over the examples, each of which every device computes."""

    def __call__(self, x):
        step = lambda carry, row: (carry, row @ self.up[...])
        return jax.lax.scan(step, 0, x)[1]


class Deep(Merged):
    """The same in a loop over layers, and behind a function that jax traces once."""

    def __call__(self, x):
        merge = jax.jit(lambda a, b: a @ b)
        step = lambda x, _: (jnp.tanh(x @ merge(self.down[...], self.up[...])), None)
        return jax.lax.scan(step, x, length=3)[0]


@pytest.mark.parametrize(
    ("kind", "line", "what", "amount"),
    [
        (
            Merged,
            "kernel = self.down[...] @ self.up[...]",
            "products of parameters and constants whole, 89%",
            "2.1 of 2.4",
        ),
        (
            OneByOne,
            "step = lambda carry, row: (carry, row @ self.up[...])",
            "products for all examples, 100%",
            "2.1 of 2.1",
        ),
        (Deep, "merge = jax.jit(lambda a, b: a @ b)", "products of parameters and constants whole, 89%", "6.4 of 7.2"),
    ],
)
def test_more_than_a_share_of_the_batch_is_said_once_with_its_cause_and_the_way(kind, line, what, amount):
    made = named_towers(f"Whole{kind.__name__}", kind)
    (text,) = called(made, (1024, WIDE))
    first, where, why, do = text.splitlines()
    assert first == f"Whole{kind.__name__}.__call__: every device computes {what} of its multiplications:"
    assert source(where) == line
    assert f"{amount} GFLOP on each device" in why and "8" in why
    assert ("(x @ a) @ b" in do) if "parameters" in what else ("js.per_example(f)" in do)
    assert called(made, (1024, WIDE)) == []


def test_the_same_of_a_linen_model():
    class MergedInLinen(nn.Module):
        @nn.compact
        def __call__(self, x):
            down, up = (self.param(name, nn.initializers.ones, (WIDE, WIDE)) for name in ("down", "up"))
            return x @ (down @ up)

    model = js.fully_shard(MergedInLinen(), mesh=js.mesh())
    x = jax.ShapeDtypeStruct((2048, WIDE), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    with pytest.warns(UserWarning, match="MergedInLinen.*every device computes products of parameters and constants"):
        jax.jit(model.apply).lower(params, x)


class Tenth(Merged):
    def __call__(self, x):
        few = self.down[:16] @ self.up[...]
        return (x @ self.down[...]) + few.sum()


@pytest.mark.parametrize(
    ("shapes", "mesh"),
    [
        (((1, 1020, WIDE),), {}),  # a single example
        (((12, WIDE),), {}),  # 25 MFLOP
        (((1020, WIDE),), {"devices": jax.devices()[:1]}),  # one data shard
        (((1020, WIDE),), {"fsdp": 1, "tensor": 8}),
        (((1024, WIDE), (1024, WIDE)), {}),
        (((4096, WIDE), (36, WIDE)), {}),  # less than a tenth
    ],
)
def test_programs_that_are_fine_are_not_said(shapes, mesh):
    assert called(named_towers("Fine", **mesh), *shapes) == []


def test_less_than_a_tenth_of_the_products_of_a_device_is_not_said():
    assert called(named_towers("LessThanATenth", Tenth), (4096, WIDE)) == []
    assert called(named_towers("OnOneShard", Merged, devices=jax.devices()[:1]), (1024, WIDE)) == []
