"""Whatever a user's model and loss do, the sharded model equals the plain one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard.errors import AnnotationError
from tests.helpers import Config, Decoder, annotator, builder, loss_fn, placed, token_batch
from tests.parity import assert_parity, flat, train, worst
from tests.wide import wide

CONFIG = Config(attends=False)
BATCH = token_batch(CONFIG)
# Adam divides a gradient by its own size: where the penalty is a bias's whole gradient, rounding becomes a step.
PENALTY_TOLERANCE = 1e-5
HYBRID = {"replica": 2, "fsdp": 4}  # sums over both axes; the other tests have one


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def penalty(model):
    return 1e-3 * sum((x**2).sum() for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_penalty_over_all_parameters_outside_the_model():
    loss = lambda model, x, y: loss_fn(model, x, y) + penalty(model)
    assert_parity(builder(CONFIG), annotator(js.mesh(**HYBRID)), loss, BATCH, parameters=PENALTY_TOLERANCE)


def test_penalty_with_accumulation_that_syncs_last():
    loss = lambda model, x, y: loss_fn(model, x, y) + penalty(model)
    grad = lambda f: js.value_and_grad(f, accumulate=2, sync="last")
    assert_parity(builder(CONFIG), annotator(js.mesh()), loss, BATCH, grad=grad, parameters=PENALTY_TOLERANCE)


class TiedByHand(Decoder):
    """Reads parameters of inner units from the root: a whole one, a row, and one inside a product."""

    def __call__(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        first = self.blocks[0]
        extra = (
            (first.up.kernel[...] ** 2).sum() + first.down.kernel[3].sum() + (jnp.ones((1, 64)) @ first.up.kernel).sum()
        )
        assert first.up.kernel.shape == (64, 256) and first.up.kernel.ndim == 2 and first.up.kernel.size == 64 * 256
        return x @ self.embed.embedding[...].T + 0.01 * extra * x.mean(-1, keepdims=True)


def test_parameters_read_outside_their_unit():
    build = lambda: TiedByHand(CONFIG, nnx.Rngs(0))
    assert_parity(build, annotator(js.mesh(**HYBRID)), loss_fn, BATCH)


class Layer(nnx.Module):
    def __init__(self, width, rngs, *, rate=0.0, norm=True):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs) if norm else None
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, mask=None, *, positions=None, train=True, activation="gelu"):
        h = self.linear(x)
        if activation == "gelu":
            h = jax.nn.gelu(h)
        if mask is not None:
            h = h * mask
        if positions is not None:
            h = h + jnp.sin(positions)[..., None].reshape((1,) * (2 - positions.ndim) + (*positions.shape, 1))
        if self.norm is not None:
            h = self.norm(h, use_running_average=not train)
        return x + self.drop(h, deterministic=not train)


class Awkward(nnx.Module):
    """A model with keyword arguments, masks, flags, several methods, BatchNorm and dropout."""

    def __init__(self, rngs, *, rate=0.0, norm=False, width=64, vocab=256):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, rngs, rate=rate, norm=norm) for _ in range(2)])
        self.head = nnx.Linear(width, vocab, rngs=rngs)
        self.table = nnx.data(jnp.linspace(0.5, 1.5, width))  # an array that is not a variable

    def __call__(self, x, mask=None, *, positions=None, train=True):
        h = self.embed(x) * self.table[None, None]
        for layer in self.layers:
            h = layer(h, mask=mask, positions=positions, train=train)
        return self.head(h)

    def encode(self, x):
        h = self.embed(x) * self.table[None, None]
        for layer in self.layers:
            h = layer(h)
        return h

    def decode(self, h):
        return self.head(h)

    def loss(self, x, y):
        return cross_entropy(self(x), y)

    def many(self, x):
        h = self.encode(x)
        return {
            "logits": self.head(h),
            "flat": h.reshape(-1, h.shape[-1]),
            "time_major": jnp.swapaxes(h, 0, 1),
            "auxiliary": (h**2).mean(),
            "weight": (self.head.kernel[...] ** 2).sum(),
            "name": "awkward",
            "layers": 2,
        }

    def num_parameters(self):
        return sum(x.size for x in jax.tree.leaves(nnx.state(self, nnx.Param)))

    def doubled(self):
        return self.embed.embedding[...] * 2


def awkward(**settings):
    return lambda: Awkward(nnx.Rngs(0), **settings)


def annotate_awkward(mesh, **settings):
    def annotate(model):
        for layer in model.layers:
            js.fully_shard(layer, mesh=mesh)
        js.fully_shard(model, mesh=mesh, **settings)

    return annotate


LENGTH = BATCH[0].shape[1]
RNG = np.random.default_rng(1)
KEYWORDS = {
    "batch mask, positions": (
        (RNG.random((16, LENGTH, 1)) > 0.3).astype(np.float32),
        np.arange(LENGTH, dtype=np.float32),
    ),
    "broadcast mask, batch positions": (
        np.ones((1, LENGTH, 1), np.float32),
        np.tile(np.arange(LENGTH, dtype=np.float32), (16, 1)),
    ),
}


@pytest.mark.parametrize("case", KEYWORDS)
def test_masks_and_keyword_arguments(case):
    mask, positions = KEYWORDS[case]
    loss = lambda m, x, y, mask, positions: cross_entropy(m(x, mask=mask, positions=positions, train=True), y)
    # Length equals batch (16): which of them carries the batch is found from what the model does with it.
    assert_parity(awkward(), annotate_awkward(js.mesh()), loss, (*BATCH, mask, positions))


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x, y: cross_entropy(m.decode(m.encode(x)), y),
        lambda m, x, y: m.loss(x, y),
        lambda m, x, y: cross_entropy(m.decode(m.layers[0](m.encode(x))), y),
        lambda m, x, y: cross_entropy(m(x), y) * 2.0 + (m.many(x)["weight"] * 1e-3),
        lambda m, x, y: cross_entropy(jnp.where((y > 100)[..., None], m(x), 0.0), y),
    ],
    ids=["two calls", "loss inside", "an inner unit called alone", "loss and a weight", "masked loss"],
)
def test_methods_and_several_calls(loss):
    assert_parity(awkward(), annotate_awkward(js.mesh()), loss, BATCH)


def test_batch_norm_sees_the_whole_batch():
    # Statistics are sums over the batch in another order; the gradient of a normalised activation magnifies that.
    mesh = js.mesh(**HYBRID)
    assert_parity(awkward(norm=True), annotate_awkward(mesh), loss_of_call, BATCH, gradient=2e-5, parameters=1e-4)


def loss_of_call(model, x, y):
    return cross_entropy(model(x), y)


def test_every_kind_of_output():
    model, plain = placed(awkward(), annotate_awkward(js.mesh())), awkward()()
    run = nnx.jit(lambda model, x: {k: v for k, v in model.many(x).items() if k != "name"})
    found, wanted = run(model, BATCH[0]), plain.many(BATCH[0])
    assert found["layers"] == 2
    for key in ("logits", "flat", "time_major", "auxiliary", "weight"):
        np.testing.assert_allclose(found[key], wanted[key], rtol=2e-5, atol=1e-5)
    assert found["flat"].sharding.shard_shape(found["flat"].shape) == (16 * LENGTH // 8, 64)
    assert found["time_major"].sharding.shard_shape(found["time_major"].shape) == (LENGTH, 2, 64)


def test_calls_without_jit_and_without_a_batch():
    model, plain = placed(awkward(), annotate_awkward(js.mesh())), awkward()()
    np.testing.assert_allclose(model(BATCH[0]), plain(BATCH[0]), rtol=1e-5, atol=1e-5)
    assert model.num_parameters() == plain.num_parameters()
    np.testing.assert_array_equal(model.doubled(), plain.doubled())


def test_any_batch_runs_in_global_view_and_outside():
    model, plain = placed(awkward(), annotate_awkward(js.mesh())), awkward()()
    run = nnx.jit(lambda model, x: model(x))
    with js.global_view():
        np.testing.assert_allclose(run(model, BATCH[0][:3]), plain(BATCH[0][:3]), rtol=1e-5, atol=1e-5)
    # The jitted function is traced anew outside, where each device computes all of a batch that does not divide.
    np.testing.assert_allclose(run(model, BATCH[0][:3]), plain(BATCH[0][:3]), rtol=1e-5, atol=1e-5)


class Attender(nnx.Module):
    """Attention with intermediates, or with a decoding cache."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 64, rngs=rngs, decode=False)
        self.head = nnx.Linear(64, 256, rngs=rngs)

    def __call__(self, x):
        h = self.attention(self.embed(x), sow_weights=True)
        self.sow(nnx.Intermediate, "hidden", h)
        return self.head(h)

    def step(self, x):
        return self.head(self.attention(self.embed(x), decode=True))


def attender(annotate):
    model = Attender(nnx.Rngs(0))
    model.attention.init_cache((16, 8, 64))
    return js.fully_shard(model, mesh=js.mesh()) if annotate else model


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_intermediates():
    model, plain = attender(True), attender(False)
    found, wanted = nnx.jit(lambda m, x: m(x))(model, BATCH[0]), nnx.jit(lambda m, x: m(x))(plain, BATCH[0])
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    sown, want = (
        {p: v.get_raw_value()[0] for p, v in nnx.to_flat_state(nnx.state(m, nnx.Intermediate))} for m in (model, plain)
    )
    assert sown.keys() == want.keys() and len(sown) == 2
    for path in want:
        np.testing.assert_allclose(sown[path], want[path], atol=1e-5)


def test_decoding_cache_stays_split():
    model, plain = attender(True), attender(False)
    step = nnx.jit(lambda m, x: m.step(x))
    for i in range(3):
        token = BATCH[0][:, i : i + 1]
        np.testing.assert_allclose(step(model, token), step(plain, token), atol=1e-5)
    cached = model.attention.cached_key.get_raw_value()
    assert cached.sharding.shard_shape(cached.shape) == (2, 8, 4, 16)
    assert int(model.attention.cache_index[...]) == 3


class Noisy(nnx.Module):
    """Random numbers from the module's own stream, from an Rngs argument, and from a key argument."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 64, rngs=rngs)
        self.drop = nnx.Dropout(0.5)
        self.own = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.own(self.embed(x))

    def with_rngs(self, x, rngs):
        return self.drop(self.embed(x), rngs=rngs)

    def with_key(self, x, key):
        return self.embed(x) * jax.random.bernoulli(key, 0.5, (*x.shape, 64))


def noisy():
    return js.fully_shard(Noisy(nnx.Rngs(0)), mesh=js.mesh())


SAME = np.tile(BATCH[0][:1], (16, 1))  # sixteen equal rows, two a data shard


def shards_differ(h):
    return all(not np.allclose(h[0], h[2 * shard]) for shard in range(1, 8))


def test_dropout_masks_differ_between_shards_and_calls_and_repeat():
    call = nnx.jit(lambda m, x: m(x))
    model = noisy()
    first, second = np.asarray(call(model, SAME)), np.asarray(call(model, SAME))
    assert shards_differ(first) and not np.allclose(first[0], first[1])
    assert not np.allclose(first, second)
    again = noisy()
    np.testing.assert_array_equal(first, call(again, SAME))
    state = flat(nnx.state(model, nnx.RngState))
    want = flat(nnx.state(Noisy(nnx.Rngs(0)), nnx.RngState))
    assert {k for k in state if not np.array_equal(state[k], want[k])} == {"own/rngs/count"}
    assert state["own/rngs/count"] == want["own/rngs/count"] + 2


def test_rngs_and_keys_among_the_arguments():
    model, rngs = noisy(), nnx.Rngs(dropout=3)
    call = nnx.jit(lambda m, x, r: m.with_rngs(x, r))
    first, second = np.asarray(call(model, SAME, rngs)), np.asarray(call(model, SAME, rngs))
    assert shards_differ(first) and not np.allclose(first, second)
    assert int(rngs.dropout.count[...]) == 2
    key = nnx.jit(lambda m, x, k: m.with_key(x, k))(model, SAME, jax.random.key(1))
    assert shards_differ(np.asarray(key))


def test_recomputation_sees_the_same_mask():
    grads = []
    for remat in ("none", "dots", "full"):
        build = awkward(rate=0.3)

        def annotate(model, remat=remat):
            for layer in model.layers:
                js.fully_shard(layer, mesh=js.mesh(), remat=remat)
            js.fully_shard(model, mesh=js.mesh())

        model = placed(build, annotate)
        grads.append(flat(nnx.jit(lambda m, x, y: nnx.grad(loss_of_call)(m, x, y))(model, *BATCH)))
    for other in grads[1:]:
        assert max(worst(other[k], grads[0][k]) for k in other) < 1e-6


def test_a_tensor_axis_of_the_models_own():
    def annotate(model):
        for block in model.blocks:
            block.up.kernel.set_metadata(out_sharding=(None, "tensor"))
            block.down.kernel.set_metadata(out_sharding=("tensor", None))
        annotator(mesh)(model)

    mesh = js.mesh(fsdp=4, tensor=2)
    with nnx.use_eager_sharding(False):
        assert_parity(builder(CONFIG), annotate, loss_fn, BATCH)
        model = placed(builder(CONFIG), annotate)
    assert model.blocks[0].up.kernel.get_raw_value().sharding.spec == P("fsdp", "tensor")


def test_second_derivatives_by_reverse_mode():
    def curvature(model, x, y):
        def norm(model):
            return sum((g**2).sum() for g in jax.tree.leaves(nnx.grad(loss_fn)(model, x, y)))

        return nnx.grad(norm)(model)

    model, plain = placed(builder(CONFIG), annotator(js.mesh())), builder(CONFIG)()
    found, wanted = (flat(nnx.jit(curvature)(m, *BATCH)) for m in (model, plain))
    assert max(worst(found[k], wanted[k]) for k in wanted) < 1e-5


def test_forward_mode_in_global_view():
    model, plain = placed(builder(CONFIG), annotator(js.mesh())), builder(CONFIG)()

    def along(model, x, y):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        run = lambda p: loss_fn(nnx.merge(graphdef, p, rest), x, y)
        return jax.jvp(run, (params,), (params,))[1]

    with pytest.raises(TypeError, match="forward-mode"):
        nnx.jit(along)(model, *BATCH)
    with js.global_view():
        found = nnx.jit(along)(model, *BATCH)
    np.testing.assert_allclose(found, nnx.jit(along)(plain, *BATCH), rtol=1e-5)


class Stack(nnx.Module):
    """Layers with a parameter of the stack's own."""

    def __init__(self, rngs):
        self.layers = nnx.List([Layer(64, rngs, norm=False) for _ in range(2)])
        self.out = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, h, memory=None):
        for layer in self.layers:
            h = layer(h)
        return self.out(h if memory is None else h + memory.mean(1, keepdims=True))


class EncoderDecoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 64, rngs=rngs)
        self.encoder, self.decoder = Stack(rngs), Stack(rngs)

    def __call__(self, x, y):
        return self.embed.attend(self.decoder(self.embed(y), self.encoder(self.embed(x))))


def encoder_decoder_loss(model, x, y):
    return cross_entropy(model(x, x), y)


@functools.cache
def encoder_decoder_on_one_device():
    return train(EncoderDecoder(nnx.Rngs(0)), encoder_decoder_loss, BATCH)


@pytest.mark.parametrize("settings", [wide({}), {"remat": "full"}, wide({"reshard_after_forward": 2})], ids=str)
def test_units_inside_units(settings):
    def annotate(model):
        for stack in (model.encoder, model.decoder):
            for layer in stack.layers:
                js.fully_shard(layer, mesh=mesh, **settings)
            js.fully_shard(stack, mesh=mesh, **settings)
        js.fully_shard(model, mesh=mesh)

    mesh = js.mesh(replica=2)
    wanted = encoder_decoder_on_one_device()
    assert_parity(lambda: EncoderDecoder(nnx.Rngs(0)), annotate, encoder_decoder_loss, BATCH, wanted=wanted)


def test_parameters_added_after_the_annotation_are_right_and_named():
    def grown(annotate):
        model = awkward()()
        if annotate:
            annotate_awkward(js.mesh())(model)
        model.layers[0].linear.scale = nnx.Param(jnp.full((64,), 1.5))
        return model

    def loss(model, x, y):
        h = model.encode(x) * model.layers[0].linear.scale[None, None]
        return cross_entropy(model.decode(h), y)

    run = nnx.jit(lambda model, x, y: nnx.value_and_grad(loss)(model, x, y))
    with pytest.warns(UserWarning, match=r"after the annotation(.|\n)*layers/0/linear/scale"):
        value, grads = run(grown(True), *BATCH)
    want, want_grads = run(grown(False), *BATCH)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    found, wanted = flat(grads), flat(want_grads)
    assert max(worst(found[k], wanted[k]) for k in wanted) < 2e-6
    with pytest.raises(AnnotationError, match="never saw"):
        js.plan(grown(True))
