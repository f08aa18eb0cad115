"""A batch that every device computes whole is said, once, with the line; so are large arrays beside a batch."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.engine.batch import batch_size

LARGE = 16384  # rows of 256 bytes: 4 MiB


class Graph(nnx.Module):
    """Sends from node to node along edges."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, nodes, senders=None, receivers=None, mask=None):
        sent = self.linear(nodes)
        if senders is None:
            return sent if mask is None else sent * mask[None, :, 0]
        return jax.ops.segment_sum(sent[senders], receivers, len(nodes))


def model() -> Graph:
    return js.fully_shard(Graph(nnx.Rngs(0)), mesh=js.mesh())


def rows(n: int) -> np.ndarray:
    return np.linspace(-1, 1, n * 64, dtype=np.float32).reshape(n, 64)


def said(run) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    found = [one for one in caught if "leading dim" in str(one.message)]
    assert {one.filename for one in found} <= {__file__}
    return [str(one.message) for one in found]


def test_a_batch_that_does_not_divide_is_said_once_with_the_line_and_a_line_to_write():
    made = model()
    (text,) = said(lambda: made(rows(12)))
    first, listed, advice, few = text.splitlines()
    assert first.startswith("Graph.__call__: no argument has a leading dim that divides by 8")
    assert listed == "  float32[12, 64]  3,072 bytes"
    assert "x = x[:8]  # or padded to 16" in advice and "with js.global_view(): y = model(x)" in few
    np.testing.assert_allclose(made(rows(12)), Graph(nnx.Rngs(0))(rows(12)), rtol=1e-5, atol=1e-5)
    assert said(lambda: model()(rows(12))) == []


def test_what_it_says_to_write_is_split():
    made = model()
    assert said(lambda: made(rows(20)[:16])) == []
    (text,) = said(lambda: made(rows(3)))
    assert "x = jnp.resize(x, (8, *x.shape[1:]))" in text
    x = rows(3)
    assert said(lambda: made(jnp.resize(x, (8, *x.shape[1:])))) == []
    with js.global_view():
        assert said(lambda: made(rows(5))) == []


def test_a_single_example_is_no_batch():
    assert said(lambda: model()(rows(1))) == []
    assert said(lambda: model()(rows(1)[0, :60].sum() + jnp.ones((1, 64)))) == []


def test_one_data_shard_has_the_whole_batch_anyway():
    made = js.fully_shard(Graph(nnx.Rngs(0)), mesh=js.mesh(devices=jax.devices()[:1]))
    assert said(lambda: made(rows(13))) == []


def test_a_linen_model_says_it_too():
    made = js.fully_shard(nn.Dense(64), mesh=js.mesh())
    variables = js.shard_init(lambda: made.init(jax.random.key(0), rows(8)), made)
    (text,) = said(lambda: made.apply(variables, rows(12)))
    assert text.startswith("Dense.__call__: no argument has a leading dim that divides by 8")


def test_a_graphs_large_nodes_beside_more_arrays_of_edges_are_said():
    made, edges = model(), np.arange(32768, dtype=np.int32) % LARGE
    (text,) = said(lambda: made(rows(LARGE), edges, edges))
    first, listed, advice = text.splitlines()
    assert first.startswith("Graph.__call__: the batch is the leading dim of size 32768")
    assert listed == "  float32[16384, 64]  4,194,304 bytes"
    line = "x = jnp.pad(x, [(0, 16384)] + [(0, 0)] * (x.ndim - 1))"
    assert advice.endswith(line)
    padded = jnp.pad(rows(LARGE), [(0, 16384)] + [(0, 0)])
    assert said(lambda: made(padded, edges, edges)) == []


def test_small_arrays_beside_the_batch_are_not_said():
    edges = np.arange(64, dtype=np.int32) % 24
    assert said(lambda: model()(rows(24), edges, edges)) == []


def test_a_mask_over_another_dim_of_the_batch_is_neither_the_batch_nor_said():
    x, mask = rows(16), np.ones((64, 16384), np.float32)
    assert mask.nbytes > 2**20
    made = model()
    assert said(lambda: made(x, mask=mask)) == []
    np.testing.assert_allclose(made(x, mask=mask), Graph(nnx.Rngs(0))(x, mask=mask), rtol=1e-5, atol=1e-5)
    assert batch_size([x, mask], 8) == batch_size([mask, x], 8) == 16
    assert batch_size([np.zeros((64, 128)), np.zeros((128, 64, 2))], 8) == 128


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_a_random_key_is_no_batch(key):
    class Noisy(Graph):
        def __call__(self, key):
            return self.linear(jax.random.normal(key, (1, 64)))

    made = js.fully_shard(Noisy(nnx.Rngs(0)), mesh=js.mesh())
    assert said(lambda: made(key)) == []
