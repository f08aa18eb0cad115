"""fp8: Flax's products keep their scales right over the shards; what would lose its scale or its fp8 is refused."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, Fp8DirectDotGeneralOp
from flax.training.train_state import TrainState

import jshard as js
from tests.helpers import Block, Config, builder
from tests.parity import worst

# The largest value lies on another shard for each layer and step, far above what the others see.
X = (
    np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    * np.linspace(1, 40, 16, dtype=np.float32)[:, None]
)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Dense(64, dot_general_cls=lambda: Fp8DirectDotGeneralOp(amax_history_length=4))(jax.nn.relu(x))
        return x


def create(model: nn.Module) -> Any:
    def state():
        params = model.init(jax.random.key(0), X)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    return state


@jax.jit
def step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(lambda params: (state.apply_fn(params, x) ** 2).mean())(state.params)
    return state.apply_gradients(grads=grads), loss


def sharded(**settings: Any) -> TrainState:
    model = js.fully_shard(Mlp(), mesh=js.mesh(replica=2, fsdp=4), **settings)
    return js.shard_init(create(model), model)


def test_trains_as_on_one_device():
    """The history of a scale is what the largest over the whole batch was, as if there were no shards."""
    wanted, found = create(Mlp())(), sharded(units=nn.Dense)
    for i in range(4):
        x = np.roll(X, 3 * i, axis=0)
        (wanted, loss), (found, ours) = step(wanted, x), step(found, x)
        np.testing.assert_allclose(ours, loss, rtol=1e-6)
    metas = [state.params[OVERWRITE_WITH_GRADIENT] for state in (found, wanted)]
    assert len({float(x[0]) for x in jax.tree.leaves(metas[1])}) > 8
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *metas)
    of = lambda state: jax.tree.leaves(state.params["params"])
    assert max(worst(np.asarray(a), np.asarray(b)) for a, b in zip(of(found), of(wanted), strict=True)) < 1e-5


def quantised(module: Any) -> Any:
    """What qwix does to a module's class."""
    kind = type(module)
    object.__setattr__(module, "__class__", type(kind.__name__, (kind,), {"_unquantized_type": kind}))
    return module


def test_what_qwix_changed_is_annotated_with_units_and_without():
    model = builder(Config(attends=False))()
    model.blocks = nnx.List([quantised(block) for block in model.blocks])
    assert len(js.plan(js.fully_shard(model, units=Block, mesh=js.mesh())).units) == 3
    for units in (None, Block):
        assert js.fully_shard(quantised(builder(Config(attends=False))()), mesh=js.mesh(), units=units)
    assert js.fully_shard(quantised(Mlp()), mesh=js.mesh(), units=nn.Dense)
