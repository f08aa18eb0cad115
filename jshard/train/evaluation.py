"""The mean loss and metrics over batches that are not trained on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax

from jshard._types import PyTree
from jshard.data.loader import HeldOutBatches
from jshard.launch import phases, set_phase
from jshard.recipes.step import EvalStep, EvaluatedModel, Scalars
from jshard.train.device_batches import BATCHES_AHEAD, to_devices


class _BatchResult(NamedTuple):
    """The scalars of a batch, and the weights of those that have one."""

    scalars: Scalars
    weights: Scalars


def evaluate(step: EvaluatedModel, eval_step: EvalStep, batches: Iterable[PyTree]) -> dict[str, float]:
    """Computes the mean "loss" and metrics over batches of one size, dropout off.

    Args:
        step: holds the parameters.
        eval_step: the compiled loss.
        batches: this process's rows of each batch. Those of `Loader.held_out` count as many times as they have samples.

    Returns:
        The means, after waiting for the devices. A `js.WeightedMean` is the sum of its totals over that of its weights.
    """
    # Once: the step that is trained does not run meanwhile, and so does not replace them.
    leaves = step.model_leaves
    results: list[_BatchResult] = []
    set_phase(phases.DATA)
    with contextlib.closing(to_devices(batches, step.mesh)) as on_devices:
        for batch in on_devices:
            set_phase(phases.EVALUATION)
            results.append(_BatchResult(*eval_step.with_weights(leaves, batch)))
            if len(results) > BATCHES_AHEAD:
                # Without this wait every batch would be in flight at once, and each needs memory.
                results[-1 - BATCHES_AHEAD].scalars["loss"].block_until_ready()
            set_phase(phases.DATA)
    set_phase(phases.EVALUATION)
    results = jax.device_get(results)
    # Batches of one size count alike.
    num_samples = [1] * len(results)
    if isinstance(batches, HeldOutBatches):
        num_samples = batches.num_samples
    return {name: _mean(name, results, num_samples) for name in results[0].scalars}


def _mean(name: str, results: Sequence[_BatchResult], num_samples: Sequence[int]) -> float:
    """Returns the mean of a scalar, by the number of samples in each batch and by its weights."""
    total = 0.0
    total_weight = 0.0
    for result, count in zip(results, num_samples, strict=True):
        weight = count * float(result.weights.get(name, 1))
        if weight:  # the value of a batch without any weight is not a number
            total += float(result.scalars[name]) * weight
            total_weight += weight
    if not total_weight:
        return math.nan
    return total / total_weight
