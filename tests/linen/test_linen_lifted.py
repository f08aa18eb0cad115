"""Flax's lifted transformations in a Linen model and in its units: values and gradients are those of one device."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard as js
from tests.linen_models import Residual, differences

WIDTH, BATCH = 16, 8
X = np.random.default_rng(0).standard_normal((BATCH, WIDTH)).astype(np.float32)


class Unit(Residual):
    """A unit of every model here."""

    hidden: int = 2 * WIDTH
    activation: Callable[[jax.Array], jax.Array] = jnp.tanh


class Carry(nn.Module):
    """A block as a scan has it."""

    @nn.compact
    def __call__(self, x, _):
        return Unit(name="block")(x), x.mean()


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Carry, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, means = scan(name="layers")(x, None)
        return x + means.sum()


class Recomputed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Unit, policy=jax.checkpoint_policies.dots_saveable)(name="block")(x)


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(Unit)(name="second")(nn.jit(Unit)(name="first")(x))


class Copies(nn.Module):
    """Members of an ensemble."""

    @nn.compact
    def __call__(self, x):
        members = nn.vmap(
            Unit, in_axes=None, out_axes=1, axis_size=3, variable_axes={"params": 0}, split_rngs={"params": True}
        )
        return members(name="members")(x).mean(1)


class OverTime(nn.Module):
    """One block for every place of a sequence."""

    @nn.compact
    def __call__(self, x):
        places = nn.vmap(Unit, in_axes=1, out_axes=1, variable_axes={"params": None}, split_rngs={"params": False})
        return places(name="block")(jnp.stack([x, x[:, ::-1]], 1)).sum(1)


class Chooses(nn.Module):
    """A branch by what the whole batch holds, and one by a number."""

    def setup(self):
        self.first, self.second = Unit(), Unit()

    def __call__(self, x):
        if self.is_initializing():
            return self.first(self.second(x))
        first = lambda model, x: model.first(x)
        second = lambda model, x: model.second(x)
        x = nn.cond(x.mean() > -10.0, first, second, self, x)
        return nn.switch((x.sum() > -1e6).astype(jnp.int32), [first, second], self, x)


class Repeats(nn.Module):
    """A loop whose length the batch decides; counts its turns."""

    def setup(self):
        self.block = Unit()
        self.turns = self.variable("counts", "turns", lambda: jnp.zeros((), jnp.int32))

    def __call__(self, x):
        if self.is_initializing():
            return self.block(x)

        def more(model, carry):
            return jnp.logical_and(carry[1] < 5, jnp.abs(carry[0]).max() < 100.0)

        def turn(model, carry):
            model.turns.value += 1
            return 1.5 * model.block(carry[0]), carry[1] + 1

        looped, _ = nn.while_loop(more, turn, self, (x, 0), carry_variables="counts")
        return self.block(looped)


class OwnRule(nn.Module):
    """Its backward doubles the gradient of the block's input and leaves those of the parameters."""

    @nn.compact
    def __call__(self, x):
        block = Unit(name="block")

        def forward(module, x):
            return nn.vjp(lambda module, x: module(x), module, x)

        def backward(residual, out):
            parameters, x = residual(out)
            return parameters, 2.0 * x

        return nn.custom_vjp(lambda module, x: module(x), forward, backward)(block, x)


class Slopes(nn.Module):
    """The pullback of a block is a part of what the model gives."""

    @nn.compact
    def __call__(self, x):
        out, pullback = nn.vjp(lambda module, x: module(x), Unit(name="block"), x)
        return out + 0.1 * pullback(jnp.cos(x))[1]


class Directions(nn.Module):
    """The tangent of a block is a part of what the model gives."""

    @nn.compact
    def __call__(self, x):
        block = Unit(name="block")
        if self.is_initializing():
            return block(x)
        out, tangent = nn.jvp(lambda module, x: module(x), block, (x,), (jnp.cos(x),), {})
        return out + 0.1 * tangent


class Mapped(nn.Module):
    """Weights are normalised on their way to the block."""

    @nn.compact
    def __call__(self, x):
        normal = lambda params: jax.tree.map(lambda p: p / (1.0 + jnp.abs(p).max()), params)
        normalised = nn.map_variables(Unit, "params", normal, init=self.is_initializing())
        return normalised(name="block")(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "scan": Scanned,
    "remat": Recomputed,
    "jit": Jitted,
    "vmap over members": Copies,
    "vmap over time": OverTime,
    "cond and switch": Chooses,
    "while_loop": Repeats,
    "custom_vjp": OwnRule,
    "vjp": Slopes,
    "jvp": Directions,
    "map_variables": Mapped,
}
# A loop of unknown length has no gradient by reverse mode.
FORWARD_ONLY = ("while_loop",)


@pytest.mark.parametrize("name", MODELS)
def test_a_lifted_transformation_around_units_equals_one_device(name: str):
    plain = MODELS[name]()
    variables = plain.init(jax.random.key(0), X)
    placement = js.PlacementPolicy(min_size=1)
    sharded = js.fully_shard(MODELS[name](), mesh=js.mesh(), units=Unit, placement=placement)

    def run(model: nn.Module) -> Any:
        def loss(params, x):
            given = {**variables, "params": params}
            out, changed = model.apply(given, x, mutable=["counts"])
            return (out**2).mean(), (out, changed)

        if name in FORWARD_ONLY:
            return jax.jit(loss)(variables["params"], X)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(variables["params"], X)

    worst = max(differences(run(sharded), run(plain)).values())
    assert worst <= 5e-6, worst
