"""Loops on pipeline stages, in every form and setting: the loss, results, state and gradients of one device."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jshard as js
from jshard.errors import CallError
from jshard.plans import wires
from jshard.train import load_model_file
from tests import parity
from tests.engine.one_device import assert_equal, nnx_results, on_host
from tests.engine.staged_forms import (
    EXAMPLES,
    LAYERS,
    LENGTH,
    WIDTH,
    Layer,
    Layered,
    Rich,
    X,
    assert_same,
    assert_step,
    in_scan_layers,
    loops_on_stages,
    plain_loss,
    rich,
    stacked,
    staged,
    staged_mesh,
    staged_stacks,
    weighted_loss,
)
from tests.micro_gpt import MODELS
from tests.wide import wide

pytestmark = [
    pytest.mark.usefixtures("ranks_as_users_have_them"),
    pytest.mark.every_set,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of what an operation over the batch costs
]


def named(value: Any) -> str:
    """The name of a set of parameters."""
    if isinstance(value, dict):
        return ",".join(f"{key}={x}" for key, x in value.items()) or "default"
    return getattr(value, "__name__", str(value))


def tower(layers: int = LAYERS, make: Callable[..., Any] = Layer) -> Layered:
    return Layered(nnx.Rngs(0), in_scan_layers, make, layers)


@functools.cache
def wanted(layers: int = LAYERS) -> Any:
    """One step of the tower on one device."""
    return nnx_results(tower(layers), weighted_loss, *EXAMPLES)


def assert_tower(layers: int = LAYERS, **how: Any) -> None:
    model = staged(tower(layers), **how)
    with loops_on_stages():
        results = nnx_results(model, weighted_loss, *EXAMPLES)
    assert_equal(results, wanted(layers))


# ---- forms of loops


class Stacked(nnx.Module):
    """Layers stacked by `nnx.vmap`, and a function that runs them."""

    def __init__(self, rngs: nnx.Rngs, run: Callable[..., Any]) -> None:
        self.layers = stacked(Layer, rngs)
        self.run = run

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.run(x, self.layers)


CARRIED = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
STACKS = {
    "js.scan_layers": lambda x, layers: js.scan_layers(layers, x),
    "nnx.remat": nnx.scan(nnx.remat(lambda x, layer: layer(x)), **CARRIED),
    "reverse": nnx.scan(lambda x, layer: layer(x), reverse=True, **CARRIED),
    "unroll": nnx.scan(lambda x, layer: layer(x), unroll=2, **CARRIED),
}


@pytest.mark.parametrize("form", ["js.scan_layers", "nnx.remat", "reverse", wide("unroll")])
def test_stacked_layers(form):
    assert_step(lambda: Stacked(nnx.Rngs(0), STACKS[form]), lambda model: staged_stacks(model, [model.layers]))


RICH = [
    ({}, {}, {"remat": "full"}),
    wide({"fsdp": 1, "replica": 2}, {"microbatches": 4}, {}),
    wide({}, {}, {}),
    wide({}, {"microbatches": 4, "late": True}, {}),
    wide({}, {"rounds": 1}, {"reshard_after_forward": False}),
    wide({"expert": 2}, {}, {}),
    wide({"fsdp": 1, "context": 2}, {}, {}),
    wide({"fsdp": 1, "tensor": 2}, {}, {}),
]


@pytest.mark.parametrize(("degrees", "stages", "settings"), RICH, ids=named)
def test_layers_with_state_dropout_branches_and_all_kinds_of_arguments(degrees, stages, settings):
    build = lambda: Layered(nnx.Rngs(0), rich, Rich)
    assert_step(build, lambda model: staged(model, Rich, degrees=degrees, stages=stages, **settings))


class TwoTowers(nnx.Module):
    """Layers that read what those of another loop have made."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.decoder = nnx.List([Layer(rngs) for _ in range(LAYERS - 1)])

    def __call__(self, x: jax.Array) -> jax.Array:
        memory = js.scan_layers(self.encoder, x)
        return js.scan_layers(self.decoder, jnp.flip(x, 1), jnp.concatenate([memory, memory], -1))


def test_layers_that_read_the_results_of_another_loop():
    assert_step(lambda: TwoTowers(nnx.Rngs(0)), staged)


class OfSeveral(nnx.Module):
    """A loop over the rows of two units, of one that has none, and of parameters of the root."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = stacked(Layer, rngs), stacked(Layer, rngs)
        self.shared = Layer(rngs)
        self.scale = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (LAYERS, WIDTH)))
        self.mix = nnx.Param(0.1 * jax.random.normal(rngs.params(), (LAYERS, WIDTH, 2 * WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        def run(
            x: jax.Array, first: Layer, second: Layer, scale: jax.Array, mix: jax.Array, shared: Layer
        ) -> jax.Array:
            x = first(x, 0.1 * jnp.tanh(x @ mix)) * scale
            return shared(second(x), 0.1)

        scan = nnx.scan(run, in_axes=(nnx.Carry, 0, 0, 0, 0, None), out_axes=nnx.Carry)
        return scan(x, self.first, self.second, self.scale[...], self.mix[...], self.shared)


def test_rows_of_several_units_and_of_the_root():
    def annotate(model: OfSeveral) -> Any:
        shared = js.PlacementPolicy(min_size=1)
        js.fully_shard(model.shared, mesh=staged_mesh(), placement=shared)
        return staged_stacks(model, [model.first, model.second])

    assert_step(lambda: OfSeveral(nnx.Rngs(0)), annotate)


class Nested(nnx.Module):
    """A loop over stacks of layers, and one over the layers of each, whose stacked results both loops read."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stacks = stacked(lambda rngs: stacked(Layer, rngs), rngs, layers=2)

    def __call__(self, x: jax.Array) -> jax.Array:
        loop = {"in_axes": (nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
        run_layers = nnx.scan(lambda x, layer: (layer(x), x.mean((1, 2))), **loop)

        def run_stack(x: jax.Array, stack: Layer) -> tuple[jax.Array, jax.Array]:
            x, means = run_layers(x, stack)
            return x + means.sum(0)[:, None, None], means

        x, means = nnx.scan(run_stack, **loop)(x, self.stacks)
        return x + means.sum((0, 1))[:, None, None]


def test_loops_in_a_loop():
    assert_step(lambda: Nested(nnx.Rngs(0)), lambda model: staged_stacks(model, [model.stacks], rows=2))


def repeated(model: Layered, x: jax.Array) -> jax.Array:
    """The layers in a loop, in a branch, and computed again."""

    def step(x: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        return js.scan_layers(model.layers, x, 0.1 * number), x.mean((1, 2))

    x, means = lax.scan(step, x, jnp.arange(2.0))
    is_usual = model.matrix[0, 0] > -100
    x = lax.cond(is_usual, lambda x: js.scan_layers(model.layers, x), lambda x: x, x)
    x = jax.checkpoint(lambda x: js.scan_layers(model.layers, x @ model.matrix[...]))(x)
    return x + means.sum(0)[:, None, None]


def test_one_stack_in_several_loops():
    assert_step(lambda: Layered(nnx.Rngs(0), repeated), staged)


@pytest.mark.parametrize(("layers", "places"), [(3, 2), wide(5, 4)])
def test_layers_that_do_not_divide(layers, places):
    assert_tower(layers, degrees={"pipe": places, "fsdp": 1})


def test_fewer_layers_than_places_are_on_no_stages():
    model = staged(tower(2), degrees={"pipe": 4, "fsdp": 1})
    with pytest.raises(AssertionError, match="no loop ran on stages"), loops_on_stages():
        results = nnx_results(model, weighted_loss, *EXAMPLES)
    assert_equal(results, wanted(2))


class Dense(nn.Module):
    """A layer of Linen, with dropout and a result beside the carry."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        h = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        h = nn.Dropout(0.3, deterministic=False)(nn.gelu(h))
        return x + nn.Dense(WIDTH)(h), h.mean((1, 2))


class LinenTower(nn.Module):
    """Layers in `nn.scan`, computed again in backward or not."""

    is_recomputed: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nn.remat(Dense) if self.is_recomputed else Dense
        settings = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}}
        x, means = nn.scan(layer, length=LAYERS, **settings)(name="layers")(nn.Dense(WIDTH, name="first")(x), None)
        return x + means.sum(0)[:, None, None]


@pytest.mark.parametrize(("is_recomputed", "impl"), [(True, "threefry2x32"), wide(False, "rbg")])
def test_layers_of_linen(is_recomputed, impl):
    plain = LinenTower(is_recomputed)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1, impl=impl)}
    params = plain.init(keys, X)["params"]

    def results(model: nn.Module, params: Any) -> Any:
        def loss(params: Any, *examples: Any) -> jax.Array:
            run = functools.partial(model.apply, {"params": params}, rngs={"dropout": keys["dropout"]})
            return plain_loss(run, *examples)

        return jax.jit(jax.value_and_grad(loss))(params, *EXAMPLES)

    model = js.fully_shard(plain, mesh=staged_mesh(), units=Dense, placement=js.PlacementPolicy(min_size=1))
    jax.eval_shape(model.init, keys, X)
    with loops_on_stages():
        on_stages = results(model, js.shard_init(lambda: params, model))
    assert_equal(on_stages, results(plain, params))


# ---- what layers carry and return


class Carries(nnx.Module):
    """Carries of all dtypes, a key that is split in each layer, and sums over the batch, which start above zero."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, carry: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        key, own_key = jax.random.split(carry["key"])
        x = carry["x"] + 0.1 * jnp.tanh(self.linear(carry["x"])) * jax.random.bernoulli(own_key, 0.7, carry["x"].shape)
        is_positive = x > 0
        carry = {
            "x": x,
            "key": key,
            "keys": carry["keys"],
            "half": carry["half"] + x.astype(jnp.float16),
            "brain": carry["brain"] * jnp.bfloat16(1.5),
            "flags": carry["flags"] ^ is_positive,
            "flag": carry["flag"] | True,
            "small": carry["small"] + is_positive.sum((1, 2), dtype=jnp.int8),
            "minus_zero": carry["minus_zero"] * 1,
            "mean": carry["mean"] + (x**2).mean(),
            "count": carry["count"] + is_positive.sum(),
        }
        return carry, {"key": own_key, "keys": jax.random.split(own_key, len(x)), "flags": is_positive}


def of_all_dtypes(impl: str) -> Callable[..., Any]:
    def run(model: Layered, x: jax.Array) -> tuple[jax.Array, Any]:
        key = jax.random.key(3, impl=impl)
        carry = {
            "x": x,
            "key": key,
            "keys": jax.random.split(key, len(x)),
            "half": jnp.zeros(x.shape, jnp.float16),
            "brain": x.astype(jnp.bfloat16),
            "flags": jnp.zeros(x.shape, bool),
            "flag": jnp.zeros((), bool),
            "small": jnp.zeros(len(x), jnp.int8),
            "minus_zero": jnp.full(x.shape, -0.0),
            "mean": jnp.float32(1.5),
            "count": jnp.int32(7),
        }
        carry, outputs = js.scan_layers(model.layers, carry, collect=True)
        y = carry.pop("x") * jnp.sqrt(carry["mean"]) + carry["count"]
        bits = [jax.random.key_data(key) for key in (carry.pop("key"), carry.pop("keys"))]
        outputs = outputs | {name: jax.random.key_data(outputs[name]) for name in ("key", "keys")}
        return y, (carry, bits, outputs, jnp.signbit(carry["minus_zero"]))

    return run


@pytest.mark.parametrize("impl", ["threefry2x32", wide("rbg")])
def test_carries_of_all_dtypes_keys_and_sums(impl):
    assert_step(lambda: Layered(nnx.Rngs(0), of_all_dtypes(impl), Carries), lambda model: staged(model, Carries))


class ReadsSum(Layer):
    """A layer that reads the sum over the batch which the layers carry."""

    def __call__(self, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, mean = carry
        x = super().__call__(x) * jnp.sqrt(mean)
        return x, mean + (x**2).mean()


def test_a_layer_that_reads_a_sum_over_the_batch_is_refused():
    run = lambda model, x: js.scan_layers(model.layers, (x, jnp.float32(1.5)))[0]
    model = staged(Layered(nnx.Rngs(0), run, ReadsSum), ReadsSum)
    with pytest.raises(CallError, match="combines the examples of its batch"):
        jax.eval_shape(nnx.value_and_grad(plain_loss), model, *EXAMPLES)


class Penalised(Layer):
    """A layer that returns a penalty on its weights, which no example is part of."""

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return super().__call__(x), (self.up.kernel[...] ** 2).sum() + jnp.sin(self.down.bias[...]).sum()


@pytest.mark.parametrize("share", [0.0, wide(1.0)])
def test_penalties_on_weights(share):
    def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
        y, penalties = model(x)
        weighted = (penalties * jnp.arange(1.0, LAYERS + 1)).sum()
        return weighted + (y**2).mean() if share else weighted

    run = lambda model, x: js.scan_layers(model.layers, x, collect=True)
    step = nnx.jit(nnx.value_and_grad(loss))
    assert_same(lambda model: step(model, X), lambda: Layered(nnx.Rngs(0), run, Penalised), units=Penalised)


def test_layers_of_an_array_without_examples():
    run = lambda model, x: x @ js.scan_layers(model.layers, model.matrix[...])
    assert_step(lambda: Layered(nnx.Rngs(0), run), staged)


class Coincidence(nnx.Module):
    """Its sequences are as long, and its layers as wide, as the batch is large: nothing is taken for the batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = stacked(Layer, rngs)
        self.scales = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (LAYERS, WIDTH)))
        self.scale = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (WIDTH,)))
        self.state = nnx.BatchStat(jnp.ones((LAYERS, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((WIDTH, WIDTH)))

        def run(x: jax.Array, layer: Layer, scale: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = x * scale * self.scale[...]
            x = jnp.einsum("ts,bsd->btd", mask / mask.sum(-1, keepdims=True), x)
            x = jnp.where(jnp.arange(WIDTH)[:, None] > 2, x, 1.01 * x)
            return layer(x, 0.1), state * jnp.linalg.norm(state * scale)

        scan = nnx.scan(run, in_axes=(nnx.Carry, 0, 0, 0), out_axes=(nnx.Carry, 0))
        x, self.state[...] = scan(x, self.layers, self.scales[...], self.state[...])
        return x


def test_dims_as_large_as_the_batch():
    x, y = np.random.default_rng(0).standard_normal((2, WIDTH, WIDTH, WIDTH)).astype(np.float32)
    batch = (x, y, np.linspace(0.1, 1, WIDTH, dtype=np.float32))
    build = lambda: Coincidence(nnx.Rngs(0))
    assert_step(build, lambda model: staged_stacks(model, [model.layers]), batch=batch)


# ---- meshes

DEGREES = [
    {"pipe": 4, "fsdp": 2},
    {"tensor": 2},
    wide({"pipe": 2, "fsdp": 1}),
    wide({"pipe": 4, "fsdp": 1}),
    wide({"fsdp": 4}),
    wide({"replica": 2}),
    wide({"fsdp": 1, "replica": 2}),
    wide({"pipe": 4, "fsdp": 1, "replica": 2}),
    wide({"pipe": 4, "fsdp": 1, "tensor": 2}),
]


@pytest.mark.parametrize("degrees", DEGREES, ids=named)
def test_beside_other_axes(degrees):
    model = tower(layers=5)
    js.parallel.split(model, {"*/up/*": ("tensor",), "*/down/kernel": ("tensor", None)})
    model = staged(model, degrees=degrees)
    axes = model.layers[0].up.kernel.sharding.spec
    assert any("pipe" in (entry or ()) for entry in axes), axes
    with loops_on_stages():
        results = nnx_results(model, weighted_loss, *EXAMPLES)
    assert_equal(results, wanted(5))


LLAMA_FILE = load_model_file(MODELS / "llama.py")
llama = sys.modules[LLAMA_FILE.build.__module__]
LLAMA = {"vocab_size": 64, "block_size": 32, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "d_model": 32, "d_ff": 64}


@pytest.mark.parametrize(
    ("degrees", "over_context"),
    [
        ({"fsdp": 1, "context": 2}, "ring"),
        wide({"context": 2}, "auto"),
        wide({"context": 2}, "ring"),
        wide({"fsdp": 1, "tensor": 2}, "auto"),
    ],
    ids=named,
)
def test_attention_over_the_context_axis(degrees, over_context):
    ids = np.random.default_rng(0).integers(0, 64, (8, 33), dtype=np.int32)
    batch = {"inputs": ids[:, :-1], "targets": ids[:, 1:]}
    config = llama.LlamaConfig(**LLAMA, scan=True, queries_at_once=16, over_context=over_context)
    step = nnx.jit(nnx.value_and_grad(LLAMA_FILE.loss_fn))
    mesh = staged_mesh(**degrees)
    model = LLAMA_FILE.build(config, nnx.Rngs(0))
    LLAMA_FILE.annotate(model, mesh)
    with loops_on_stages():
        results = step(model, js.shard_batch(batch, mesh))
    assert_equal(results, step(LLAMA_FILE.build(config, nnx.Rngs(0)), batch))


class Experts(nnx.Module):
    """Each token to its best expert of four."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(WIDTH, 4, rngs=rngs)
        self.up = nnx.Param(0.3 * jax.random.normal(rngs.params(), (4, WIDTH, 2 * WIDTH)))
        self.down = nnx.Param(0.3 * jax.random.normal(rngs.params(), (4, 2 * WIDTH, WIDTH)))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        score_BTE = jax.nn.softmax(self.router(x_BTD))
        send_BTE = jax.nn.one_hot(score_BTE.argmax(-1), 4)
        x_EBTD = js.parallel.to_experts(jnp.einsum("bte,btd->ebtd", send_BTE, x_BTD))
        h_EBTF = jnp.tanh(jnp.einsum("ebtd,edf->ebtf", x_EBTD, self.up[...]))
        y_EBTD = js.parallel.from_experts(jnp.einsum("ebtf,efd->ebtd", h_EBTF, self.down[...]))
        return x_BTD + jnp.einsum("bte,ebtd->btd", send_BTE * score_BTE, y_EBTD)


@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        ({"expert": 2}, {}),
        wide({"fsdp": 1, "expert": 2}, {"remat": "full"}),
        wide({"fsdp": 1, "expert": 2, "context": 2}, {}),
        wide({"fsdp": 1, "expert": 4}, {}),
    ],
    ids=named,
)
def test_experts_over_the_expert_axis(degrees, settings):
    def annotate(model: Layered) -> Any:
        js.parallel.split(model, {"*/up": ("expert", None, None), "*/down": ("expert", None, None)})
        return staged(model, Experts, degrees=degrees, **settings)

    assert_step(lambda: tower(make=Experts), annotate)


# ---- settings

SETTINGS = [
    {"reshard_after_forward": False},
    {"remat": "dots", "prefetch": 0},
    {"offload": "params"},
    wide({"reshard_after_forward": False, "remat": "full"}),
    wide({"remat": "full"}),
    wide({"remat": "names:nothing"}),
    wide({"remat": "torchtitan_selective"}),
    wide({"prefetch": 2}),
    wide({"prefetch": "compiler"}),
    wide({"prefetch": "1MiB"}),
    wide({"offload": "optimizer"}),
    wide({"shard_dim": 0}),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_settings_of_units(settings):
    assert_tower(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"reshard_after_forward": 2}, "keep pieces of their parameters"), ({"remat": "offload"}, "in host memory")],
    ids=named,
)
def test_what_a_stage_cannot_keep_for_backward_is_refused(settings, message):
    with pytest.raises(CallError, match=message) as refusal:
        jax.eval_shape(nnx.value_and_grad(plain_loss), staged(tower(), **settings), *EXAMPLES)
    assert "staged_forms.py" in str(refusal.value)


def test_settings_are_revised():
    model = staged(tower(), stages={"microbatches": 4})
    model = js.revise(model, units=Layer, reshard_after_forward=False, remat="full")
    with loops_on_stages():
        results = nnx_results(model, weighted_loss, *EXAMPLES)
    assert_equal(results, wanted())
    with pytest.raises(CallError, match="does not divide into the microbatches"):
        jax.eval_shape(nnx.value_and_grad(plain_loss), model, *[x[:4] for x in EXAMPLES])


@pytest.fixture
def own_wire():
    """A wire in 8 bits, with a scale for each row."""

    def pack(shard: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
        other_dims = tuple(d for d in range(shard.ndim) if d != dim)
        scales = jnp.maximum(jnp.abs(shard).max(other_dims, keepdims=True) / 127, 1e-30)
        return jnp.round(shard / scales).astype(jnp.int8), scales

    before = dict(wires.REGISTERED)
    js.register_wire(
        "rows_in_8_bits", pack=pack, unpack=lambda arrays, dim, dtype: (arrays[0] * arrays[1]).astype(dtype)
    )
    yield
    wires.REGISTERED.clear()
    wires.REGISTERED.update(before)
    jax.clear_caches()


PRECISIONS = [
    wide({"param_dtype": "bfloat16", "reduce_dtype": "float32"}, {}),
    ({"reduce_dtype": "float32", "gather_dtype": "rows_in_8_bits", "wire_dtype": "rows_in_8_bits"}, {}),
    wide({"param_dtype": "bfloat16"}, {}),
    wide({"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32", "keep": ("up/*",)}, {}),
    wide({"param_dtype": "float16", "reduce_dtype": "float32"}, {"pipe": 4, "fsdp": 1}),
    wide({"reduce_dtype": "float32", "wire_dtype": "bfloat16"}, {}),
    wide({"reduce_dtype": "float32", "gather_dtype": "float8_e4m3fn"}, {}),
    wide(
        {"reduce_dtype": "float32", "gather_dtype": "float8_e4m3fn", "wire_dtype": "float8_e5m2"},
        {"pipe": 4, "fsdp": 1},
    ),
]


@pytest.mark.parametrize(("dtypes", "degrees"), PRECISIONS, ids=named)
@pytest.mark.usefixtures("own_wire")
def test_narrow_dtypes_are_as_near_as_without_stages(dtypes, degrees):
    precision = js.MixedPrecision(**dtypes)
    exact = on_host(wanted()[1])
    errors = []
    for mesh in ({"pipe": 1, "fsdp": 4}, degrees):
        model = staged(tower(), degrees=mesh, mixed_precision=precision)
        errors.append(parity.distance(on_host(nnx_results(model, weighted_loss, *EXAMPLES)[1]), exact))
    # Of fewer parts, each rounded for itself, fewer roundings cancel out.
    assert 0 < errors[1] <= 1.5 * errors[0]


@pytest.mark.wide
def test_a_loss_scale_in_half_precision():
    def losses(model: Any, optimizer: nnx.Optimizer, grad_of: Callable[[nnx.Optimizer], Any]) -> list[float]:
        @nnx.jit
        def step(model: Any, optimizer: nnx.Optimizer) -> jax.Array:
            loss, grads = grad_of(optimizer)(model, *EXAMPLES)
            optimizer.update(model, grads)
            return loss

        return [float(step(model, optimizer)) for _ in range(3)]

    plain = tower()
    optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)
    exact = losses(plain, optimizer, lambda _: nnx.value_and_grad(plain_loss))
    half = js.MixedPrecision(param_dtype="float16", reduce_dtype="float32")
    model = staged(tower(), mixed_precision=half)
    optimizer = js.shard_optimizer(model, js.LossScale(initial=2.0**8).around(optax.sgd(0.1)))
    with loops_on_stages():
        scaled = losses(model, optimizer, functools.partial(js.scaled_value_and_grad, plain_loss))
    np.testing.assert_allclose(scaled, exact, rtol=5e-3)


@pytest.mark.parametrize(
    ("sync", "settings"),
    [("each", {}), ("last", {}), wide("none", {}), wide("last", {"reshard_after_forward": False})],
    ids=named,
)
def test_gradients_are_accumulated(sync, settings):
    x, y = np.random.default_rng(1).standard_normal((2, 16, LENGTH, WIDTH)).astype(np.float32)
    batch = (x, y, np.linspace(0.1, 1, 16, dtype=np.float32))
    plain = nnx.jit(nnx.value_and_grad(plain_loss))
    halves = [plain(tower(), *[x[i::2] for x in batch]) for i in range(2)]
    mean = jax.tree.map(lambda one, other: (one + other) / 2, *halves)

    def step(model: nnx.Module, *batch: Any) -> Any:
        loss, grads = js.value_and_grad(plain_loss, accumulate=2, sync=sync)(model, *batch)
        return loss, js.reduce_gradients(model, grads) if sync == "none" else grads

    model = staged(tower(), **settings)
    with loops_on_stages():
        results = nnx.jit(step)(model, *batch)
    assert_equal(results, mean)


# ---- parameters


def odd_dim(_: str, shape: tuple[int, ...]) -> int | None:
    """Shards along a dim of 27, which neither `fsdp` nor `pipe` divides."""
    return shape.index(27) if 27 in shape else None


def odd_tower() -> Layered:
    return tower(4, lambda rngs: Layer(rngs, hidden=27))


@pytest.mark.parametrize("degrees", [{}, wide({"fsdp": 1, "pipe": 4}), wide({"fsdp": 4, "pipe": 2})], ids=named)
def test_padded_parameters_are_trained(degrees):
    annotate = lambda model: staged(model, degrees=degrees, shard_dim=odd_dim)
    with loops_on_stages():
        parity.assert_parity(odd_tower, annotate, plain_loss, EXAMPLES)
    stored = js.abstract_init(odd_tower, annotate).layers[0].up.kernel.get_raw_value()
    assert stored.shape == (WIDTH, 28 if np.prod(list(degrees.values()) or [4]) == 4 else 32)


def ups(path: tuple[Any, ...], variable: Any) -> bool:
    return isinstance(variable, nnx.Param) and "up" in path


def with_adapter(rngs: nnx.Rngs) -> Layer:
    layer = Layer(rngs)
    layer.up = nnx.LoRALinear(WIDTH, 2 * WIDTH, lora_rank=4, rngs=rngs)
    layer.up.lora.lora_b[...] += 0.1
    return layer


@pytest.mark.parametrize(("make", "wrt"), [(Layer, ups), (with_adapter, nnx.LoRAParam)], ids=["frozen", "LoRA"])
def test_frozen_parameters(make, wrt):
    run = nnx.jit(nnx.value_and_grad(plain_loss, argnums=nnx.DiffState(0, wrt)))
    assert_same(lambda model: run(model, *EXAMPLES), lambda: tower(make=make))


@pytest.mark.wide
@pytest.mark.parametrize("offload", [None, "params"])
def test_an_optimizer_of_whole_matrices(offload):
    def trained(model: Any, optimizer: nnx.Optimizer) -> dict[str, np.ndarray]:
        @nnx.jit
        def step(model: Any, optimizer: nnx.Optimizer) -> None:
            optimizer.update(model, nnx.grad(plain_loss)(model, *EXAMPLES))

        for _ in range(3):
            step(model, optimizer)
        return parity.flat(nnx.state(model, nnx.Param))

    muon = optax.contrib.muon(1e-2)
    plain = tower()
    on_one_device = trained(plain, nnx.Optimizer(plain, muon, wrt=nnx.Param))
    model = staged(tower(), offload=offload)
    with loops_on_stages():
        on_stages = trained(model, js.shard_optimizer(model, muon if offload else js.shard_matrices(muon)))
    assert parity.distance(on_stages, on_one_device) <= parity.PARAMETER_TOLERANCE


# ---- states move between meshes


def state_on(**degrees: int) -> dict[str, Any]:
    model = staged(odd_tower(), degrees=degrees, shard_dim=odd_dim)
    return {"model": model, "optimizer": js.shard_optimizer(model, optax.adam(1e-2))}


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    one, other = (on_host(js.gather(state)) for state in (one, other))
    assert one.keys() == other.keys()
    for path in one:
        np.testing.assert_array_equal(one[path], other[path], err_msg=path)


@pytest.mark.parametrize(
    "degrees", [{"pipe": 4, "fsdp": 1}, wide({"pipe": 1, "fsdp": 4}), wide({"pipe": 2, "fsdp": 4})], ids=named
)
def test_a_state_moves_to_other_degrees_and_back(degrees, tmp_path):
    state = state_on()
    step = nnx.jit(lambda model, optimizer: optimizer.update(model, nnx.grad(plain_loss)(model, *EXAMPLES)))
    with loops_on_stages():
        step(state["model"], state["optimizer"])
    js.checkpoint.save(tmp_path / "saved", state)
    restored = js.checkpoint.restore(tmp_path / "saved", like=state_on(**degrees))
    assert_same_state(restored, state)
    assert_same_state(js.reshard(state, state_on(**degrees)), state)
    assert_same_state(js.load(state_on(**degrees), js.gather(state)), state)
    # And on from there.
    for one in (state, restored):
        step(one["model"], one["optimizer"])
    back = js.reshard(restored, state_on())
    assert back["model"].layers[0].up.kernel.sharding == state["model"].layers[0].up.kernel.sharding
    one, other = (parity.flat(nnx.state(tree["model"], nnx.Param)) for tree in (back, state))
    assert parity.distance(one, other) <= parity.PARAMETER_TOLERANCE


def test_weights_are_exported_and_read_on_stages(tmp_path):
    saved = {"model": state_on(pipe=4, fsdp=1)["model"]}
    js.checkpoint.save(tmp_path / "model.safetensors", saved)
    others = Layered(nnx.Rngs(1), in_scan_layers, lambda rngs: Layer(rngs, hidden=27), 4)
    like = {"model": staged(others, shard_dim=odd_dim)}
    assert_same_state(js.checkpoint.restore(tmp_path / "model.safetensors", like=like), saved)
