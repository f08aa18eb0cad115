"""`jshard train --auto`: the fastest configuration on these devices, by estimates corrected by measured steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Group
from rich.text import Text

from jshard._live import at_work
from jshard._processes import exchange, is_primary
from jshard._text import duration
from jshard.cluster.compile import Variant
from jshard.cluster.costs import Cost, Costs
from jshard.cluster.estimate import Machine, machine_here
from jshard.cluster.search import Search, is_same, search
from jshard.data import Data, Loader, local_rows
from jshard.errors import ShardingError
from jshard.inspect.tables import FittedTable, add_row, made_table, show
from jshard.plans.batch import shard_batch
from jshard.plans.make_mesh import mesh as make_mesh
from jshard.recipes.building import batch_like, create
from jshard.recipes.model_file import ModelFile
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe
from jshard.recipes.step import TrainStep

TRIES = 4
"""The most configurations that are measured."""

_PRIOR = 0.05  # how strongly both factors are pulled to the mean ratio of measured to estimated


@dataclasses.dataclass(frozen=True)
class MeasuredVariant:
    """A configuration that was tried: its estimate, and the measured seconds of a step; infinite if it did not run."""

    cost: Cost
    step_s: float


@dataclasses.dataclass(frozen=True)
class Factors:
    """The corrections from measured steps: factors for the estimated compute time and the exposed time."""

    compute: float = 1.0
    wait: float = 1.0

    def step_s(self, cost: Cost) -> float:
        """The corrected estimate."""
        return self.compute * cost.compute_s + self.wait * cost.exposed_s


@dataclasses.dataclass(frozen=True)
class Feedback:
    """The result of measuring: the configurations in the order they were tried, and the last correction."""

    tried: tuple[MeasuredVariant, ...]
    factors: Factors

    @property
    def best(self) -> MeasuredVariant | None:
        """The fastest that ran."""
        ran = [one for one in self.tried if math.isfinite(one.step_s)]
        return min(ran, key=lambda one: one.step_s, default=None)


def with_feedback(found: Search, measure: Callable[[Cost], float], *, tries: int = TRIES) -> Feedback:
    """Tries configurations until none left has a corrected estimate below the fastest measured step.

    The first is the best by the estimates, the second the requested one, which the choice has to beat.
    """
    left = list(found.ranked)
    queue = [left.pop(0)]
    asked = next((cost for cost in left if is_same(cost, found.default)), None)
    if asked is not None:
        left.remove(asked)
        queue.append(asked)
    tried: list[MeasuredVariant] = []
    while queue and len(tried) < tries:
        cost = queue.pop(0)
        tried.append(MeasuredVariant(cost, measure(cost)))
        factors = fitted(tried)
        left = [other for other in left if not is_same(other, cost)]  # the same program under another name
        left.sort(key=factors.step_s)
        if not queue and left and factors.step_s(left[0]) < min(one.step_s for one in tried):
            queue.append(left.pop(0))
    return Feedback(tuple(tried), fitted(tried))


def fitted(tried: Sequence[MeasuredVariant]) -> Factors:
    """Factors that bring the estimates closest to the measured times, by least squares of the relative errors."""
    ran = [one for one in tried if math.isfinite(one.step_s)]
    if not ran:
        return Factors()
    mean = float(np.exp(np.mean([math.log(one.step_s / one.cost.step_s) for one in ran])))
    rows = [[one.cost.compute_s / one.step_s, one.cost.exposed_s / one.step_s] for one in ran]
    held = [[_PRIOR / mean, 0.0], [0.0, _PRIOR / mean]]
    wanted = [1.0] * len(rows) + [_PRIOR, _PRIOR]
    compute, wait = np.linalg.lstsq(np.array(rows + held), np.array(wanted), rcond=None)[0]
    return Factors(max(float(compute), 0.01 * mean), max(float(wait), 0.01 * mean))


_STEPS = 3  # timed, after one untimed step


def chosen_variant(
    model_file: ModelFile,
    recipe: Recipe,
    mesh: Mesh,
    data: Data,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    say: Callable[[Any], object] = show,
) -> Variant:
    """Chooses how to split the devices, what to keep and recompute, and the microbatches; the batch stays the same.

    All configurations are estimated, a few are run for some steps, and the measured times correct the estimates. With
    several processes all call it.

    Raises:
        ShardingError: no configuration fits, by the estimate.
    """
    model_file = dataclasses.replace(model_file, data=lambda recipe: data)  # it is already read
    stream = sys.stdout if is_primary() else None
    tries = itertools.count(1)

    def measure(cost: Cost) -> float:
        what = f"--auto: [{next(tries)} of at most {TRIES}] {cost.variant.command}"
        with at_work(what, say=say, stream=stream) as work:
            step_s = _measured_s(model_file, recipe, mesh, data, cost.variant, compiler_options)
            work.result = f"{duration(step_s)} a step" if math.isfinite(step_s) else "does not run"
        return step_s

    with at_work("--auto: estimating every configuration", say=say, stream=stream) as work:
        found = search(Costs(model_file, recipe, _agreed(machine_here(mesh))), dict(mesh.shape))
        work.result = found.counted
    feedback = with_feedback(found, measure) if found.ranked else None
    if feedback is not None:
        say(Group(tried_table(feedback), *map(Text, found.left_out)))
    if feedback is None or feedback.best is None:
        raise _nothing_fits(found)
    best = feedback.best.cost.variant
    say(f"--auto: chosen {best.command}  # instead of --auto, the next time")
    return best


def _agreed(machine: Machine) -> Machine:
    """The devices as the first process sees them, with the least memory, so that all processes try the same."""
    seen = exchange("machine", [machine.near, machine.capacity_bytes])
    capacities = [capacity for _, capacity in seen]
    least = None if None in capacities else min(capacities)
    return dataclasses.replace(machine, near=seen[0][0], capacity_bytes=least)


def _measured_s(
    model_file: ModelFile,
    recipe: Recipe,
    mesh: Mesh,
    data: Data,
    variant: Variant,
    compiler_options: Mapping[str, Any] | None,
) -> float:
    """Seconds of a step, the least of several; infinite if there is not enough memory."""
    split = make_mesh(**variant.mesh, devices=list(mesh.devices.flat))
    assert isinstance(split, Mesh)  # it was given devices
    took_s = math.inf
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # out of memory; any other failure will occur in the run, too
        changed = override(recipe, variant.settings)
        took_s = min(_steps_s(model_file.with_units(variant.units), changed, split, data, compiler_options))
    return max(exchange("seconds of a step", took_s))


def _steps_s(
    model_file: ModelFile, recipe: Recipe, mesh: Mesh, data: Data, compiler_options: Mapping[str, Any] | None
) -> list[float]:
    state = create(model_file, recipe, mesh)
    like = batch_like(data, recipe.batch_size, mesh)
    how = {"accumulate": recipe.accumulate, "compiler_options": compiler_options}
    step = TrainStep(model_file.loss_fn, *state, like, **how)
    del state
    rows = local_rows(recipe.batch_size, mesh)
    batches = Loader(data=data, batch_size=recipe.batch_size, seed=recipe.seed, rows=rows).train(1)
    with contextlib.closing(batches):
        batch = shard_batch(next(iter(batches)), mesh)
    found = []
    for _ in range(1 + _STEPS):
        start_s = time.perf_counter()
        jax.block_until_ready(step(batch))
        found.append(time.perf_counter() - start_s)
    return found[1:]


def tried_table(feedback: Feedback) -> FittedTable:
    """The configurations that were tried, as a table."""
    factors = feedback.factors
    caption = (
        f"Measured: the least of {_STEPS} steps. It corrects the estimates: compute time x {factors.compute:.3g},"
        f" waiting time x {factors.wait:.3g}."
    )
    table = made_table("Configurations tried", "configuration", "mesh", "estimated>", "measured>", "", caption=caption)
    for one in feedback.tried:
        mesh = " ".join(f"{axis}={n}" for axis, n in one.cost.variant.mesh.items() if n > 1)
        measured = duration(one.step_s) if math.isfinite(one.step_s) else "does not run"
        add_row(
            table,
            one.cost.variant.name,
            mesh,
            duration(one.cost.step_s),
            measured,
            "chosen" * (one is feedback.best),
        )
    return table


def _nothing_fits(found: Search) -> ShardingError:
    least = min((*found.ranked, *found.too_large), key=lambda cost: cost.memory.step_bytes)
    return ShardingError(
        "No configuration of this recipe fits the devices.",
        where=least.variant.command,
        why=f"it needs the least memory: {least.memory.step_bytes / 2**30:.1f} GiB of a device, by the estimate.",
        do="a smaller --set batch_size=N, or more devices.",
    )
