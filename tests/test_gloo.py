"""Between CPU processes gathers and reductions are all-to-alls: the same gradients, and counted as what they are."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jshard as js
from jshard._mesh import FSDP
from jshard.engine import gloo
from jshard.inspect import collectives, full_bytes
from tests.helpers import Config, annotator, builder, loss_fn, program, token_batch
from tests.parity import assert_parity
from tests.wide import wide

SCANNED = Config(layers=4, scanned=True, tied=False, attends=False)


@pytest.fixture
def carried(monkeypatch):
    """As if gloo carried the collectives of one process."""
    monkeypatch.setattr(gloo, "carries", lambda mesh: True)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("pairs", [("all_gather", "all-gather"), ("reduce_scatter", "reduce-scatter")])
def test_each_gives_what_its_own_collective_gives(dim, pairs):
    name, kind = pairs
    sizes = [2, 3, 5]
    sizes[dim] = 32
    mesh = js.mesh(replica=2, fsdp=4)
    x = np.random.default_rng(0).normal(size=sizes).astype(np.float32)
    native = {
        "all_gather": lambda x: lax.all_gather(x, FSDP, axis=dim, tiled=True),
        "reduce_scatter": lambda x: lax.psum_scatter(x, FSDP, scatter_dimension=dim, tiled=True),
    }[name]
    ours = lambda x: getattr(gloo, name)(x, dim, 4)
    spec = PartitionSpec(*[None] * dim, ("replica", FSDP))

    def both(x):
        return native(x), ours(x)

    compiled = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec)).lower(x).compile()
    np.testing.assert_allclose(*compiled(x), rtol=1e-6)
    found = [c for c in collectives(compiled) if c.kind == kind]
    assert len(found) == 2, "that of XLA and ours"
    assert len({(c.full_bytes, c.group) for c in found}) == 1


@pytest.mark.parametrize("replica", [1, 2])
@pytest.mark.parametrize(
    "config", [wide(Config(attends=False)), Config(vocab=203, width=40, attends=False)], ids=["", "uneven"]
)
def test_gradients_are_those_of_one_device(carried, config, replica):
    mesh = js.mesh(replica=replica)
    assert_parity(builder(config), annotator(mesh), loss_fn, token_batch(config), steps=2)


def test_a_program_is_counted_as_what_it_stands_for(carried):
    made = program.__wrapped__(SCANNED)
    plain = program(SCANNED)
    assert "all-to-all" in made.compiled.as_text()
    assert not [line for line in made.compiled.as_text().splitlines() if " all-gather(" in line]
    for kind in ("all-gather", "reduce-scatter", "all-to-all"):
        over = full_bytes(collectives(made.compiled), kind)
        assert over == pytest.approx(full_bytes(collectives(plain.compiled), kind), rel=0.001)
    audits = [js.audit(one.compiled, plan=one.plan) for one in (made, plain)]
    assert [a.ok for a in audits] == [True, True]


def test_one_process_and_other_devices_keep_their_own():
    assert not gloo.carries(js.mesh())
    assert not gloo.carries(js.mesh(devices=8))
