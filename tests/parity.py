"""One device against the sharded model: the same loss, gradients, state, and parameters after some steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard as js
from tests.helpers import fresh, placed

GRADIENT_TOLERANCE = 2e-6  # of the largest element of the leaf
PARAMETER_TOLERANCE = 2e-6  # relative, L2 over all parameters


@dataclasses.dataclass(frozen=True)
class Trained:
    """What some steps of a model gave."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    traces: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """Worst differences between two runs."""

    gradient: float
    gradient_leaf: str
    parameters: float
    loss: float
    state: float


def train(
    model: nnx.Module,
    loss_fn: Callable,
    batch: tuple | list[tuple],
    *,
    steps: int = 3,
    tx: optax.GradientTransformation | None = None,
    grad: Callable | None = None,
) -> Trained:
    """Plain Flax: `steps` optimizer steps; the gradients are those of the first, so that one program gives all.

    A list of batches has one for each step.
    """
    tx = tx or optax.adamw(1e-3)
    grad_fn = (grad or nnx.value_and_grad)(loss_fn)
    sharded = hasattr(type(model), "_jshard_unit")
    optimizer = js.shard_optimizer(model, tx) if sharded else nnx.Optimizer(model, tx, wrt=nnx.Param)
    traces = 0

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, *batch: Any) -> tuple[jax.Array, Any]:
        nonlocal traces
        traces += 1
        loss, grads = grad_fn(model, *batch)
        optimizer.update(model, grads)
        return loss, grads

    out = [step(model, optimizer, *one) for one in (batch if isinstance(batch, list) else [batch] * steps)]
    parameters, state = nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
    return Trained([float(loss) for loss, _ in out], flat(out[0][1]), flat(parameters), flat(state), traces)


def flat(state: Any) -> dict[str, np.ndarray]:
    """A state by path, on the host."""
    return {"/".join(map(str, path)): _host(leaf) for path, leaf in nnx.to_flat_state(state)}


def _host(leaf: Any) -> np.ndarray:
    value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    whole = np.asarray(numbers_of(value))
    return whole[tuple(map(slice, leaf.shape))]  # without padding


def numbers_of(x: Any) -> Any:
    """An array of numbers as it is, and one of random keys as the numbers that they are made of."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def worst(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference, relative to the largest element."""
    return float(np.abs(found.astype(np.float64) - wanted).max() / max(float(np.abs(wanted).max()), 1e-12))


def compare(found: Trained, wanted: Trained) -> Difference:
    """How far two runs are apart; their trees must be the same."""
    assert found.gradients.keys() == wanted.gradients.keys()
    assert found.state.keys() == wanted.state.keys()
    leaf = max(wanted.gradients, key=lambda k: worst(found.gradients[k], wanted.gradients[k]))
    square = lambda tree: sum(float((np.float64(x) ** 2).sum()) for x in tree.values())
    apart = {k: found.parameters[k] - wanted.parameters[k] for k in wanted.parameters}
    floats = [k for k, x in wanted.state.items() if np.issubdtype(x.dtype, np.floating)]
    for k in wanted.state.keys() - set(floats):
        np.testing.assert_array_equal(found.state[k], wanted.state[k])
    return Difference(
        gradient=worst(found.gradients[leaf], wanted.gradients[leaf]),
        gradient_leaf=leaf,
        parameters=(square(apart) / square(wanted.parameters)) ** 0.5,
        loss=max(abs(a - b) / abs(b) for a, b in zip(found.losses, wanted.losses, strict=True)),
        state=max((worst(found.state[k], wanted.state[k]) for k in floats), default=0.0),
    )


def assert_parity(
    build: Callable[[], nnx.Module],
    annotate: Callable[[nnx.Module], Any],
    loss_fn: Callable,
    batch: tuple | list[tuple],
    *,
    grad: Callable | None = None,
    steps: int = 3,
    tx: optax.GradientTransformation | None = None,
    gradient: float = GRADIENT_TOLERANCE,
    parameters: float = PARAMETER_TOLERANCE,
    wanted: Trained | None = None,
) -> Difference:
    """Trains the plain and the annotated model and holds one against the other.

    With `wanted`, what the plain model gave for the same, it is not trained again.
    """
    wanted = wanted or train(fresh(build), loss_fn, batch, steps=steps, tx=tx)
    found = train(placed(build, annotate), loss_fn, batch, steps=steps, tx=tx, grad=grad)
    apart = compare(found, wanted)
    assert apart.gradient <= gradient, apart
    assert apart.parameters <= parameters, apart
    assert apart.loss <= 2e-6, apart
    assert apart.state <= 1e-5, apart
    assert found.traces == 1
    return apart


def distance(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Difference of two sets of arrays in L2 over all of them, relative to the second."""
    assert found.keys() == wanted.keys()
    square = lambda arrays: sum(float((np.float64(x) ** 2).sum()) for x in arrays)
    return (square(found[k] - wanted[k] for k in wanted) / square(wanted.values())) ** 0.5
