"""Parameters of a Linen model in host memory: calls fetch them; a `TrainState`'s optimizer state is refused there."""

import jax
import numpy as np
import optax
import pytest
from jax.extend import core as jex

import jshard as js
from jshard import _compat
from jshard.errors import AnnotationError
from tests.linen_models import Block, Decoder, X, creator

MOVES = {"device_put", "optimization_barrier", "pvary", "pcast"}


def annotated(**settings):
    placement = js.ShardPlacement(**{"offload": "params", **settings})
    return js.fully_shard(Decoder(depth=1), mesh=js.mesh(), units=Block, placement=placement)


def on_host_in(jaxpr):
    """The equations that take arrays in host memory, those inside loops and calls too."""
    found = []
    for eqn in jaxpr.eqns:
        inner = list(jex.jaxprs_in_params(eqn.params))
        for one in inner:
            found += on_host_in(one)
        found += [eqn] * (not inner and any(_compat.on_host(v.aval) for v in eqn.invars))
    return found


def test_a_call_fetches_parameters():
    model = annotated()
    variables = js.shard_init(lambda: model.init(jax.random.key(0), X), model)
    assert variables["params"]["block_0"]["Dense_0"]["kernel"].sharding.memory_kind == "pinned_host"
    js.check(model, variables, X)
    with js.global_view():  # a sum of both memories would raise
        jax.eval_shape(model.apply, variables, X[:1])


def test_nothing_is_computed_in_host_memory():
    model = annotated(shard_dim=0, min_size=1)
    params = jax.eval_shape(model.init, jax.random.key(0), X)["params"]
    there = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), jax.memory.Space.Host), params)
    found = on_host_in(jax.make_jaxpr(lambda params: model.apply({"params": params}, X))(there).jaxpr)
    assert found and {eqn.primitive.name for eqn in found} <= MOVES


@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_the_state_of_a_train_state_is_refused(offload):
    model = annotated(offload=offload)
    tx = js.shard_optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    with pytest.raises(
        AnnotationError, match=r"cannot be in host memory(.|\n)*opt_state/1/0/mu/block_0/Dense_0/kernel"
    ):
        js.abstract_init(creator(model, tx), model)
