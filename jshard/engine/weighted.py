"""Means with weights: a loss as a total and a weight, and their running mean over microbatches.

The mean over the tokens that a mask keeps is not the mean of the microbatches' means, because microbatches keep
different numbers of tokens. It is the sum of their totals divided by the sum of their weights.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jshard.errors import CallError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedMean:
    """A mean as a total and a weight, for a loss that is not a plain mean over the batch.

    A masked loss returns it in place of the quotient. `js.value_and_grad`, `jshard train` and its evaluations then
    divide the sum of the totals by the sum of the weights, over all microbatches or batches. A loss that is a plain
    mean over the batch needs none of this.

    Args:
        total: the sum, such as `(losses * mask).sum()`.
        weight: what it is divided by, such as `mask.sum()`. It has no gradient.

    Examples:
        >>> def loss_fn(model, inputs, targets, mask):
        ...     losses = optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets)
        ...     return js.WeightedMean((losses * mask).sum(), mask.sum())
    """

    total: jax.Array | float
    weight: jax.Array | float

    @property
    def mean(self) -> jax.Array:
        """The quotient, for `nnx.value_and_grad` and other code that needs a scalar."""
        _check(self)
        # The weight is a count, or sums of a mask. Were it differentiated, a mask that the model computes would get a
        # gradient that plain division by a number does not have.
        dtype = _wide(self)
        return jnp.asarray(self.total, dtype) / lax.stop_gradient(jnp.asarray(self.weight, dtype))


def mean_of(loss: WeightedMean | jax.Array) -> jax.Array:
    """The mean that a loss stands for; a plain value is returned unchanged."""
    return loss.mean if isinstance(loss, WeightedMean) else loss


def mean_over(stacked: WeightedMean | jax.Array) -> jax.Array:
    """The mean of values stacked over microbatches, by their weights if they have any."""
    if isinstance(stacked, WeightedMean):
        return jax.tree.map(lambda x: x.sum(0), stacked).mean  # the mean of the sums, not the mean of means
    return stacked.mean(0)


def with_total(loss: WeightedMean | jax.Array, change: Callable[[jax.Array], jax.Array]) -> WeightedMean | jax.Array:
    """A loss with a function applied to its value, or to the total of a weighted one."""
    if isinstance(loss, WeightedMean):
        return WeightedMean(change(jnp.asarray(loss.total)), loss.weight)
    return change(loss)


def value_and_weight(loss: WeightedMean | jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The mean to differentiate, and its weight; None for a loss without one.

    With the weight 0 it is the total: a microbatch of nothing but padding adds nothing, rather than 0 / 0.
    """
    if not isinstance(loss, WeightedMean):
        return loss, None
    _check(loss)
    # The mean, not the total: gradients of means are of one size whatever the weights, and do not overflow.
    weight = lax.stop_gradient(jnp.asarray(loss.weight, _wide(loss)))
    return jnp.asarray(loss.total, weight.dtype) / nonzero(weight), weight


def nonzero(weight: jax.Array) -> jax.Array:
    """The weight as a divisor: 1 in place of 0."""
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)


@dataclasses.dataclass(frozen=True)
class MeanShares:
    """The factors of a mean so far and of the next value in their joint mean.

    Sums of values times weights would overflow in float16, and lose the digits that a mean keeps.
    """

    mean: jax.Array
    value: jax.Array

    @classmethod
    def of(cls, before: jax.Array, weight: jax.Array) -> "MeanShares":
        """Those of a mean with the weight `before`, and a value with a weight."""
        # A weight of 0 counts as 1, as in `value_and_weight`: the value is then a total, which is 0 for padding alone.
        after = nonzero(before + weight)
        return cls(nonzero(before) / after, nonzero(weight) / after)

    def joint(self, mean: jax.Array, value: jax.Array) -> jax.Array:
        """The joint mean, in the dtype of the mean so far; it is computed in at least float32."""
        dtype = mean.dtype if jnp.finfo(mean.dtype).bits >= 32 else jnp.float32
        return (mean.astype(dtype) * self.mean + value.astype(dtype) * self.value).astype(mean.dtype)


def _wide(loss: WeightedMean) -> np.dtype:
    """The dtype of the quotient: a count of tokens needs more digits than bfloat16 has."""
    return jnp.promote_types(jnp.result_type(loss.total), jnp.float32)


def _is_real_scalar(x: ArrayLike) -> bool:
    return jnp.ndim(x) == 0 and not jnp.issubdtype(jnp.result_type(x), jnp.complexfloating)


def _check(loss: WeightedMean) -> None:
    """Raises unless both are real scalars."""
    parts = {"total": loss.total, "weight": loss.weight}
    wrong = [name for name, x in parts.items() if not _is_real_scalar(x)]
    if wrong:
        raise CallError(
            "A weighted mean is not a quotient of two real numbers.",
            where=[f"js.WeightedMean: {name}  {jnp.result_type(x)}{list(jnp.shape(x))}" for name, x in parts.items()],
            why=f"{' and '.join(wrong)} must be a real scalar, a sum over the whole batch.",
            do="js.WeightedMean((losses * mask).sum(), mask.sum())",
        )
