"""jshard's step: models/gpt.py as it is annotated there, created sharded, in a `TrainStep`."""

from __future__ import annotations

from flax import nnx

import jshard as js
from benchmarks.step.jax_model import Made, adamw, config_of, put_weights, tokens_like
from benchmarks.step.sizes import Sizes
from jshard import train
from jshard.plans.mesh import batch_sharding
from models import gpt


def made(sizes: Sizes, *, scan: bool) -> Made:
    """A step over all devices of all processes."""
    mesh = js.mesh()
    config = config_of(sizes, scan=scan)
    model = js.shard_init(lambda: gpt.build(config, nnx.Rngs(0)), lambda model: gpt.annotate(model, mesh))
    put_weights(model, sizes)
    optimizer = js.shard_optimizer(model, adamw(sizes))
    sharding = batch_sharding(mesh)
    batch = tokens_like(sizes, sharding)
    options = js.compiler_options("fastest", mesh=mesh)
    step = train.TrainStep(gpt.loss_fn, model, optimizer, batch, compiler_options=options)
    return Made.of(step, sharding, step.compiled)
