"""`jshard train --auto`: the fastest configuration on these devices, by estimates corrected by measured steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
from jshard.cluster.machine import Machine, machine_here
from jshard.cluster.search import Search, is_same, search
from jshard.data import Data, Loader, local_rows
from jshard.errors import ShardingError
from jshard.inspect.tables import FittedTable, add_row, made_table, show
from jshard.plans.batch import shard_batch
from jshard.plans.make_mesh import mesh as make_mesh
from jshard.recipes.building import batch_like, create
from jshard.recipes.ema import ema_of
from jshard.recipes.model_file import ModelFile
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe
from jshard.recipes.step import TrainStep

TRIES = 4
"""The most configurations that are measured."""

_PRIOR = 0.05  # how strongly both factors are pulled to the mean ratio of measured to estimated
_TIMED_STEPS = 3  # after one untimed step


@dataclasses.dataclass(frozen=True)
class MeasuredVariant:
    """A configuration that was tried: its estimate, and the measured seconds of a step; infinite if it did not run."""

    cost: Cost
    step_s: float

    @property
    def did_run(self) -> bool:
        """Returns whether it fits the devices."""
        return math.isfinite(self.step_s)


@dataclasses.dataclass(frozen=True)
class Factors:
    """The corrections from measured steps: factors for the estimated compute time and the exposed time."""

    compute: float = 1.0
    wait: float = 1.0

    def step_s(self, cost: Cost) -> float:
        """Returns the corrected estimate."""
        return self.compute * cost.compute_s + self.wait * cost.exposed_s


@dataclasses.dataclass(frozen=True)
class Feedback:
    """The result of measuring: the configurations in the order they were tried, and the last correction."""

    tried: tuple[MeasuredVariant, ...]
    factors: Factors

    @property
    def best(self) -> MeasuredVariant | None:
        """Returns the fastest that ran."""
        ran = [variant for variant in self.tried if variant.did_run]
        return min(ran, key=lambda variant: variant.step_s, default=None)


def with_feedback(candidates: Search, measure: Callable[[Cost], float], *, tries: int = TRIES) -> Feedback:
    """Tries configurations until none left has a corrected estimate below the fastest measured step.

    The first is the best by the estimates, the second the requested one, which the choice has to beat.
    """
    # `ranked` begins with the fastest by the estimates.
    untried = list(candidates.ranked)
    queue = [untried.pop(0)]
    requested = _requested(untried, candidates)
    if requested is not None:
        untried.remove(requested)
        queue.append(requested)
    tried: list[MeasuredVariant] = []
    while queue and len(tried) < tries:
        cost = queue.pop(0)
        tried.append(MeasuredVariant(cost, measure(cost)))
        factors = fitted(tried)
        untried = [other for other in untried if not is_same(other, cost)]  # the same program under another name
        untried.sort(key=factors.step_s)
        # The requested one is still to be measured: it comes before any choice by factors.
        if queue or not untried:
            continue
        # Infinite while none has run: then every estimate is below it.
        fastest_s = min(variant.step_s for variant in tried)
        if factors.step_s(untried[0]) < fastest_s:
            queue.append(untried.pop(0))
    return Feedback(tuple(tried), fitted(tried))


def _requested(costs: Sequence[Cost], candidates: Search) -> Cost | None:
    """Returns the configuration that was requested; None if it is not among these."""
    for cost in costs:
        if candidates.default is not None and is_same(cost, candidates.default):
            return cost
    return None


def fitted(tried: Sequence[MeasuredVariant]) -> Factors:
    """Returns factors that bring the estimates closest to the measured times.

    They are the least squares of the relative errors. Both are pulled to the mean ratio: of a few configurations with
    like shares of waiting one factor could otherwise take any value.
    """
    ran = [variant for variant in tried if variant.did_run]
    if not ran:
        return Factors()
    # Geometric: a ratio of 2 and one of 1/2 cancel.
    mean = float(np.exp(np.mean([math.log(variant.step_s / variant.cost.step_s) for variant in ran])))
    rows = []
    targets = []
    for variant in ran:
        rows.append([variant.cost.compute_s / variant.step_s, variant.cost.exposed_s / variant.step_s])
        targets.append(1.0)
    # Two more equations, of little weight: each factor equals the mean ratio.
    rows += [[_PRIOR / mean, 0.0], [0.0, _PRIOR / mean]]
    targets += [_PRIOR, _PRIOR]
    solution, *_ = np.linalg.lstsq(np.array(rows), np.array(targets), rcond=None)
    lowest = 0.01 * mean  # a factor of 0 or less would make waiting free
    compute, wait = solution
    return Factors(max(float(compute), lowest), max(float(wait), lowest))


def chosen_variant(
    model_file: ModelFile,
    recipe: Recipe,
    mesh: Mesh,
    data: Data,
    *,
    free: Collection[str],
    compiler_options: Mapping[str, object] | None = None,
    say: Callable[[Any], object] = show,
) -> Variant:
    """Chooses how to split the devices, what to keep and recompute, and the microbatches; the batch stays the same.

    All configurations are estimated, a few are run for some steps, and the measured times correct the estimates. With
    several processes all call it.

    Args:
        model_file: of the model.
        recipe: its recipe.
        mesh: the requested mesh, with the devices of the run.
        data: the data, already read.
        free: the axes whose degrees are chosen; the others stay as requested.
        compiler_options: of the step.
        say: prints lines and tables.

    Raises:
        ShardingError: no configuration fits, by the estimate.
    """
    model_file = dataclasses.replace(model_file, data=lambda recipe: data)  # it is already read
    stream = sys.stdout if is_primary() else None
    # `with_feedback` does not say which try a measurement is.
    tries = itertools.count(1)

    def measure(cost: Cost) -> float:
        what = f"--auto: [{next(tries)} of at most {TRIES}] {cost.variant.command}"
        with at_work(what, say=say, stream=stream) as work:
            step_s = _measured_s(model_file, recipe, mesh, data, cost.variant, compiler_options)
            work.result = _measured_text(step_s, " a step")
        return step_s

    with at_work("--auto: estimating every configuration", say=say, stream=stream) as work:
        # Agreed before the search: with other machines the processes would run different programs.
        costs = Costs(model_file, recipe, _agreed(machine_here(mesh)))
        candidates = search(costs, dict(mesh.shape), free=free)
        work.result = candidates.counted
    if not candidates.ranked:
        raise _nothing_fits(candidates)
    feedback = with_feedback(candidates, measure)
    say(Group(tried_table(feedback), *(Text(line) for line in candidates.left_out)))
    if feedback.best is None:
        raise _nothing_fits(candidates)
    best = feedback.best.cost.variant
    say(f"--auto: chosen {best.command}  # instead of --auto, the next time")
    return best


def _agreed(machine: Machine) -> Machine:
    """Returns the devices as the first process sees them, with the least memory, so that all try the same."""
    machines = exchange("machine", [machine.near, machine.capacity_bytes])
    # A process sees only its own host, and hosts may differ.
    near, _ = machines[0]
    capacities = [capacity for _, capacity in machines]
    least = None
    if None not in capacities:
        least = min(capacities)
    return dataclasses.replace(machine, near=near, capacity_bytes=least)


def _measured_s(
    model_file: ModelFile,
    recipe: Recipe,
    mesh: Mesh,
    data: Data,
    variant: Variant,
    compiler_options: Mapping[str, object] | None,
) -> float:
    """Measures the seconds of a step, the least of several; infinite if there is not enough memory."""
    variant_mesh = make_mesh(**variant.mesh, devices=list(mesh.devices.flat))
    assert isinstance(variant_mesh, Mesh)  # it was given devices
    step_s = math.inf
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # out of memory; any other failure will occur in the run, too
        variant_recipe = override(recipe, variant.settings)
        variant_file = model_file.with_units(variant.units)
        step_s = min(_step_times_s(variant_file, variant_recipe, variant_mesh, data, compiler_options))
    # The slowest: all wait for it in every step. Exchanged also after a failure, as the others wait here.
    return max(exchange("seconds of a step", step_s))


def _step_times_s(
    model_file: ModelFile, recipe: Recipe, mesh: Mesh, data: Data, compiler_options: Mapping[str, object] | None
) -> list[float]:
    """Measures the seconds of some steps."""
    state = create(model_file, recipe, mesh)
    model, _ = state
    step = TrainStep(
        model_file.loss_fn,
        *state,
        batch_like(data, recipe.batch_size, mesh),
        accumulate=recipe.accumulate,
        sync=recipe.sync,
        ema=ema_of(recipe, model, model_file.trained(recipe)),
        compiler_options=compiler_options,
    )
    del model, state  # the step owns the arrays, and reuses their memory
    rows = local_rows(recipe.batch_size, mesh)
    batches = Loader(data=data, batch_size=recipe.batch_size, seed=recipe.seed, rows=rows).train(1)
    # The same batch for every step: its values do not change the time.
    with contextlib.closing(batches):
        batch = shard_batch(next(iter(batches)), mesh)
    times_s = []
    for _ in range(1 + _TIMED_STEPS):
        start_s = time.perf_counter()
        jax.block_until_ready(step(batch))
        times_s.append(time.perf_counter() - start_s)
    return times_s[1:]  # the first one only warms up


def tried_table(feedback: Feedback) -> FittedTable:
    """Returns the configurations that were tried, as a table."""
    factors = feedback.factors
    caption = (
        f"Measured: the least of {_TIMED_STEPS} steps. It corrects the estimates: compute time x {factors.compute:.3g},"
        f" waiting time x {factors.wait:.3g}."
    )
    table = made_table("Configurations tried", "configuration", "mesh", "estimated>", "measured>", "", caption=caption)
    for variant in feedback.tried:
        mesh = " ".join(f"{axis}={degree}" for axis, degree in variant.cost.variant.mesh.items() if degree > 1)
        add_row(
            table,
            variant.cost.variant.name,
            mesh,
            duration(variant.cost.step_s),
            _measured_text(variant.step_s),
            "chosen" if variant is feedback.best else "",
        )
    return table


def _measured_text(step_s: float, unit: str = "") -> str:
    if not math.isfinite(step_s):
        return "does not run"
    return duration(step_s) + unit


def _nothing_fits(candidates: Search) -> ShardingError:
    costs = (*candidates.ranked, *candidates.too_large)
    least = min(costs, key=lambda cost: cost.memory.step_bytes)
    return ShardingError(
        "No configuration of this recipe fits the devices.",
        where=least.variant.command,
        why=f"it needs the least memory: {least.memory.step_bytes / 2**30:.1f} GiB of a device, by the estimate.",
        do="a smaller --set batch_size=N, or more devices.",
    )
