"""What a user of Linen models can do wrong, for the golden texts: each function raises."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard as js
from tests.helpers import with_placement

X = np.arange(16 * 64, dtype=np.float32).reshape(16, 64) / 1024
KEY = jax.random.key(0)
NEVER = {"placement": js.PlacementPolicy(gathered=False)}


class Model(nn.Module):
    inner: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, name="first")(x)
        return (self.inner or nn.Dense(64, name="second"))(x)


class Number(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale, bias = self.param("both", lambda key: (2.0, jnp.zeros(64)))
        return x * scale + bias[None]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(64)(x), None


class Stack(nn.Module):
    """Layers stacked along the first dim, or another."""

    length: int = 3
    dim: int = 0

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(Layer, variable_axes={"params": self.dim}, split_rngs={"params": True}, length=self.length)
        return scanned(name="layers")(x, None)[0]


def stacked_layers() -> None:
    jax.eval_shape(shard(Stack(8192)).init, KEY, X)


class Rows(nn.Module):
    """A table, and a parameter of its own."""

    @nn.compact
    def __call__(self, x):
        x = x @ self.param("scale", nn.initializers.ones, (64, 64))
        return x + nn.Embed(96, 64, name="table")(jnp.zeros(16, int))


class Constant(nn.Module):
    """Weights in a collection that is not params."""

    @nn.compact
    def __call__(self, x):
        return x @ self.variable("constants", "w", lambda: jnp.ones((64, 64))).value


class Returns(nn.Module):
    """Its result is a module."""

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(64)
        dense(x)
        return dense


def shard(model: nn.Module | None = None, **settings: Any) -> Any:
    return js.fully_shard(model or Model(), **with_placement(**{"mesh": js.mesh(), **settings}))


def init(**settings: Any) -> Any:
    return shard(**settings).init(KEY, X)


def variables() -> Any:
    return Model().init(KEY, X)


def annotated_inside() -> None:
    class Around(nn.Module):
        def setup(self):
            self.inner = shard(nn.Dense(64))

        def __call__(self, x):
            return self.inner(x)

    shard(Around()).apply(Around().init(KEY, X), X)


def call_in_a_shard_map() -> None:
    made, model = variables(), shard()
    run = lambda x: model.apply(made, x)
    jax.shard_map(run, mesh=js.mesh(), in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))(X)


def explain_with_a_loss() -> None:
    model = shard()
    jax.eval_shape(model.init, KEY, X)
    js.explain(model, loss_fn=lambda params, x: 0.0, batch=X)


def optax_alone() -> None:
    model = shard(nn.Embed(501, 47))
    params = js.shard_init(lambda: model.init(KEY, jnp.zeros(8, int)), model)["params"]
    jax.grad(lambda params: model.apply({"params": params}, jnp.zeros(8, int)).mean())(params)


def optax_alone_on_the_host() -> None:
    model = shard(offload="optimizer")

    def create() -> Any:
        params = model.init(KEY, X)["params"]
        return params, optax.sgd(1e-3, momentum=0.9).init(params)

    js.shard_init(create, model)


def planned(**settings: Any) -> Any:
    model = shard()
    jax.eval_shape(model.init, KEY, X)
    return js.value_and_grad(jnp.sum, model=model, **settings)({})


def gathered_for_nothing() -> None:
    model = shard()
    params = js.abstract_init(lambda: model.init(KEY, X), model)["params"]

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return model.apply({"params": halves}, x).mean()

    jax.eval_shape(js.value_and_grad(loss_fn, model=model, accumulate=2, sync="last"), params, X)


ERRORS: dict[str, Callable[[], Any]] = {
    "linen: annotated twice": lambda: shard(shard()),
    "linen: annotated inside": annotated_inside,
    "linen: stacked": lambda: shard(stacked=1),
    "linen: a unit's settings": lambda: shard(units={nn.Dense: {"batch_dim": 1}}),
    "linen: settings by unit of an nnx model": lambda: js.fully_shard(
        nnx.Linear(64, 64, rngs=nnx.Rngs(0)), mesh=js.mesh(), units={nnx.Linear: {}}
    ),
    "linen: scan_layers": lambda: js.scan_layers([nn.Dense(64)], X),
    "linen: no unit": lambda: init(units=["first", "block_*"]),
    "linen: pattern unused": lambda: init(ignored="*/biass"),
    "linen: not known yet": lambda: js.plan(shard()),
    "linen: init without annotation": lambda: js.shard_init(variables, Model()),
    "linen: build returns the module": lambda: js.shard_init(Model, lambda model: None),
    "linen: settings of an optimizer": lambda: js.shard_optimizer(shard(), optax.adam(1e-3), shard_replicated=True),
    "linen: optax alone, padded": optax_alone,
    "linen: optax alone, on the host": optax_alone_on_the_host,
    "linen: value_and_grad": lambda: js.value_and_grad(lambda model, x: 0.0)(shard(), X),
    "linen: value_and_grad, none is selected": lambda: planned(wrt=nnx.LoRAParam),
    "linen: value_and_grad, wrt without use": lambda: planned(wrt=["second/*", "*/lora_*"]),
    "linen: value_and_grad, other parameters": gathered_for_nothing,
    "linen: returns a module": lambda: shard(Returns()).apply(Returns().init(KEY, X), X),
    "linen: layers along the last dim": lambda: shard(Stack(dim=-1), units=nn.Dense).init(KEY, X),
    "linen: a number as parameter": lambda: shard(Number()).init(KEY, X),
    "linen: in a shard_map": call_in_a_shard_map,
    "linen: explain": explain_with_a_loss,
    "linen: check without variables": lambda: js.check(shard(), X),
    "linen: no parameters": lambda: shard(Constant()).init(KEY, X),
    "linen: never gathered, with what is around": lambda: shard(Rows(), units={"table": NEVER}).init(KEY, X),
    "linen: never gathered, not known yet": lambda: shard(units={"first": NEVER}).apply(variables(), X),
}
