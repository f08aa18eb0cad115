"""An encoder and a decoder as Flax's own examples write them, unchanged."""

from typing import Any

import flax.linen as nn
import jax
import pytest

import jshard as js
from tests.linen_models import VOCAB, WIDTH, X, cross_entropy, differences, tokens

TOLERANCE = 2e-6


def attend(name: str, x: jax.Array, *others: Any, mask: Any) -> jax.Array:
    normed = nn.LayerNorm(name=f"{name}_norm")(x)
    return x + nn.MultiHeadDotProductAttention(num_heads=2, name=name)(normed, *others, mask=mask)


class EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None):
        x = attend("own", x, mask=mask)
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(64)(nn.LayerNorm()(x))))


class DecoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x, encoded, mask, cross_mask):
        x = attend("cross", attend("own", x, mask=mask), encoded, mask=cross_mask)
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(64)(nn.LayerNorm()(x))))


class Encoder(nn.Module):
    table: nn.Module

    @nn.compact
    def __call__(self, ids):
        x = self.table(ids)
        x = EncoderBlock(name="block")(x, mask=nn.make_attention_mask(ids > 0, ids > 0))
        return nn.LayerNorm()(x)


class Decoder(nn.Module):
    table: nn.Module

    @nn.compact
    def __call__(self, encoded, source, target):
        x, cross_mask = self.table(target), nn.make_attention_mask(target > 0, source > 0)
        x = DecoderBlock(name="block")(x, encoded, nn.make_causal_mask(target), cross_mask)
        return self.table.attend(nn.LayerNorm()(x))


class Translator(nn.Module):
    """One table for the source, the target and the scores."""

    def setup(self):
        self.table = nn.Embed(VOCAB, WIDTH)
        self.encoder, self.decoder = Encoder(self.table), Decoder(self.table)

    def encode(self, source):
        return self.encoder(source)

    def decode(self, encoded, source, target):
        return self.decoder(encoded, source, target)

    def __call__(self, source, target):
        return self.decode(self.encode(source), source, target)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("regions", "units"), [(1, [EncoderBlock, DecoderBlock]), (2, [Encoder, DecoderBlock, "decoder"])], ids=str
)
def test_an_encoder_and_a_decoder_that_share_a_table(regions, units):
    source = tokens(seed=3, length=6)[0]
    variables = jax.jit(Translator().init)(jax.random.key(0), source, X)

    def loss(model, variables):
        if regions == 1:
            return cross_entropy(model.apply(variables, source, X))
        encoded = model.apply(variables, source, method="encode")
        return cross_entropy(model.apply(variables, encoded, source, X, method="decode"))

    run = lambda model: jax.jit(jax.value_and_grad(lambda v: loss(model, v)))(variables)
    model = js.fully_shard(Translator(), mesh=js.mesh(replica=2, fsdp=4), units=units, remat="dots")
    assert max(differences(run(model), run(Translator())).values()) <= TOLERANCE
    jax.eval_shape(model.init, jax.random.key(0), source, X)
    plan = js.plan(model)
    assert plan.leaf("table/embedding").unit == "(root)"
    assert plan.leaf("decoder/block/own/query/kernel").unit == "decoder/block"
