"""`jshard train --auto`: the quickest way on these devices, by estimates that measured steps correct."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from rich.console import Group
from rich.text import Text

from jshard import _compat
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
from jshard.occupancy.cache import default_path, write_whole
from jshard.plans.mesh import FSDP, REPLICA, shard_batch
from jshard.plans.mesh import mesh as make_mesh
from jshard.plans.padding import logical_shape
from jshard.plans.units import dotted, occurrences
from jshard.recipes.building import abstract_model, batch_like
from jshard.recipes.model_file import ModelFile
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe
from jshard.recipes.state import create
from jshard.recipes.step import TrainStep

TRIES = 4
"""Ways that are measured at most."""

_PRIOR = 0.05  # how firmly both factors are held to the mean ratio of measured to estimated


@dataclasses.dataclass(frozen=True)
class MeasuredVariant:
    """A way that was tried.

    Args:
        cost: its estimate.
        step_s: measured seconds of a step; infinite if it did not run.
    """

    cost: Cost
    step_s: float

    @property
    def sequence_s(self) -> float:
        """Seconds for a sequence of the batch."""
        return self.step_s / self.cost.batch_size


@dataclasses.dataclass(frozen=True)
class Factors:
    """What measured steps say of the estimates.

    Args:
        compute: by which the time that computes is multiplied.
        wait: by which the exposed communication is.
    """

    compute: float = 1.0
    wait: float = 1.0

    def sequence_s(self, cost: Cost) -> float:
        """The corrected estimate for a sequence of the batch."""
        return (self.compute * cost.compute_s + self.wait * cost.exposed_s) / cost.batch_size


@dataclasses.dataclass(frozen=True)
class Feedback:
    """What came of measuring.

    Args:
        tried: the ways, in the order they were tried.
        factors: the last correction.
    """

    tried: tuple[MeasuredVariant, ...]
    factors: Factors

    @property
    def best(self) -> MeasuredVariant | None:
        """The quickest that ran."""
        ran = [one for one in self.tried if math.isfinite(one.step_s)]
        return min(ran, key=lambda one: one.sequence_s, default=None)


def with_feedback(found: Search, measure: Callable[[Cost], float], *, tries: int = TRIES) -> Feedback:
    """Tries ways until none is left that the corrected estimates hold for quicker than the quickest that ran.

    The first is the best by the estimates, the second what was asked for, which the choice has to beat.

    Args:
        found: the ways, by the estimates; at least one fits.
        measure: seconds of a step of one way; infinite if it does not run.
        tries: ways that are measured at most.
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
        left.sort(key=factors.sequence_s)
        if not queue and left and factors.sequence_s(left[0]) < min(one.sequence_s for one in tried):
            queue.append(left.pop(0))
    return Feedback(tuple(tried), fitted(tried))


def fitted(tried: Sequence[MeasuredVariant]) -> Factors:
    """Factors that bring the estimates closest to what was measured, by least squares of the relative errors."""
    ran = [one for one in tried if math.isfinite(one.step_s)]
    if not ran:
        return Factors()
    mean = float(np.exp(np.mean([math.log(one.step_s / one.cost.step_s) for one in ran])))
    rows = [[one.cost.compute_s / one.step_s, one.cost.exposed_s / one.step_s] for one in ran]
    held = [[_PRIOR / mean, 0.0], [0.0, _PRIOR / mean]]
    wanted = [1.0] * len(rows) + [_PRIOR, _PRIOR]
    compute, wait = np.linalg.lstsq(np.array(rows + held), np.array(wanted), rcond=None)[0]
    return Factors(max(float(compute), 0.01 * mean), max(float(wait), 0.01 * mean))


_STEPS = 3  # timed, after one that is not


def chosen_variant(
    model_file: ModelFile,
    recipe: Recipe,
    mesh: Mesh,
    data: Data,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    say: Callable[[Any], object] = show,
) -> Variant:
    """Chooses how the devices are split, what is kept and computed again, and the microbatches; the batch stays.

    What was chosen before for this model, batch and devices is taken again. Otherwise the ways are estimated, a few
    are run for some steps, and the estimates are corrected by what was measured. The choice is remembered in the
    user's cache folder. In several processes all call it, and the first decides.

    Args:
        model_file: the model, its annotation and its loss.
        recipe: what to train.
        mesh: the devices, and how they would be split otherwise.
        data: what to learn from.
        compiler_options: for the steps, as in `run_recipe`.
        say: prints a line, or a table.

    Raises:
        ShardingError: no way fits, by the estimate.
    """
    model_file = dataclasses.replace(model_file, data=lambda recipe: data)  # it is read
    model = abstract_model(model_file, recipe, mesh)
    key, sample = key_of(model, list(mesh.devices.flat)), str(batch_like(data, 1))
    known = recall(key)
    if known is not None and _is_for(known, recipe, sample, mesh):
        say(f"--auto: as {known.origin}")
        return Variant(name="remembered", mesh=known.mesh, units=known.units, accumulate=known.accumulate)

    stream = sys.stdout if is_primary() else None
    tries = itertools.count(1)

    def measure(cost: Cost) -> float:
        what = f"--auto: [{next(tries)} of at most {TRIES}] {cost.variant.command}"
        with at_work(what, say=say, stream=stream) as work:
            step_s = _measured_s(model_file, recipe, mesh, data, cost.variant, compiler_options)
            work.result = f"{duration(step_s)} a step" if math.isfinite(step_s) else "does not run"
        return step_s

    with at_work("--auto: estimating every way", say=say, stream=stream) as work:
        found = search(Costs(model_file, recipe, _agreed(machine_here(mesh))), dict(mesh.shape))
        work.result = found.counted
    best = _quickest(found, measure, say)
    if jax.process_index() == 0:
        path = remember(key, _choice(best, recipe, sample))
        say(f"remembered in {path}" if path is not None else "not remembered: the cache folder cannot be written")
    return best.cost.variant


def _quickest(found: Search, measure: Callable[[Cost], float], say: Callable[[Any], object]) -> MeasuredVariant:
    """The quickest of the ways that were tried."""
    if not found.ranked:
        raise _nothing_fits(found)
    feedback = with_feedback(found, measure)
    say(Group(tried_table(feedback), *map(Text, found.left_out)))
    if feedback.best is None:
        raise _nothing_fits(found)
    return feedback.best


def _choice(best: MeasuredVariant, recipe: Recipe, sample: str) -> CachedVariant:
    variant = best.cost.variant
    return CachedVariant(
        mesh=dict(variant.mesh),
        units=dict(variant.units),
        batch_size=recipe.batch_size,
        accumulate=override(recipe, variant.settings).accumulate,
        sample=sample,
        step_s=best.step_s,
    )


def _is_for(known: CachedVariant, recipe: Recipe, sample: str, mesh: Mesh) -> bool:
    """Whether a choice is one for this batch; of a mesh only replicas and shards are chosen."""
    beside = lambda degrees: {k: n for k, n in degrees.items() if k not in (REPLICA, FSDP) and n > 1}
    is_same_batch = (known.batch_size, known.sample) == (recipe.batch_size, sample)
    return is_same_batch and beside(known.mesh) == beside(mesh.shape)


def _agreed(machine: Machine) -> Machine:
    """The devices as the first process sees them, with the least memory: all processes have to try the same ways."""
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
    """Seconds of a step, the least of some; infinite where there is not enough memory."""
    split = make_mesh(**variant.mesh, devices=list(mesh.devices.flat))
    assert isinstance(split, Mesh)  # it was given devices
    took_s = math.inf
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # out of memory; what else fails will fail in the run
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
    """The ways that were tried, as a table."""
    factors = feedback.factors
    caption = (
        f"Measured: the least of {_STEPS} steps. The estimates, corrected by it: what computes x {factors.compute:.3g},"
        f" what waits x {factors.wait:.3g}."
    )
    table = made_table("Ways that were tried", "way", "mesh", "estimated>", "measured>", "", caption=caption)
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
        "No way to train this recipe fits the devices.",
        where=least.variant.command,
        why=f"it holds least, and needs {least.memory.step_bytes / 2**30:.1f} GiB of a device, by the estimate.",
        do="a smaller --set batch_size=N, or more devices.",
    )


# What was measured to be the quickest is kept for the next time, in a JSON file in the user's cache folder: a row for
# each model and kind and number of devices. A file that cannot be read or written is no reason to stop.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedVariant:
    """A variant that was measured.

    Attributes:
        mesh: degrees of the mesh axes.
        units: settings of the layers, as `jshard.api.fully_shard.revise` takes them.
        batch_size: sequences of a step.
        accumulate: microbatches.
        sample: shapes of the data, as text: other data may suit another variant.
        step_s: measured seconds of a step.
        jax: version; another one compiles other programs, and is measured anew.
        measured_on: date.
    """

    mesh: Mapping[str, int]
    units: Mapping[str, Any]
    batch_size: int
    accumulate: int
    sample: str
    step_s: float
    jax: str = dataclasses.field(default_factory=_compat.jax_version)
    measured_on: str = dataclasses.field(default_factory=lambda: datetime.date.today().isoformat())

    @property
    def origin(self) -> str:
        """Where the choice is from, in words."""
        return f"measured on {self.measured_on}: {self.step_s:.3g} s a step of {self.batch_size}"


def key_of(model: nnx.Module, devices: Sequence[jax.Device]) -> str:  # pyright: ignore[reportInvalidTypeForm]
    """The key of a model on some devices: paths, shapes and dtypes of its parameters, kind and number of devices."""
    params = sorted(
        {f"{dotted(path)} {logical_shape(v)} {v.get_raw_value().dtype}" for v, path, _ in occurrences(model)}
    )
    text = "\n".join([*params, f"{len(devices)} x {devices[0].device_kind}"])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def recall(key: str) -> CachedVariant | None:
    """The choice of a key; None where nothing was measured. In several processes all call, and the first decides."""
    found = exchange("remembered choice", _read().get(key))[0]
    if not isinstance(found, dict):
        return None
    with contextlib.suppress(TypeError):  # of another version of this file
        choice = CachedVariant(**found)
        return choice if choice.jax == _compat.jax_version() else None
    return None


def remember(key: str, choice: CachedVariant) -> Path | None:
    """Keeps a choice, in place of an earlier one of its key.

    Returns:
        The file; None if it could not be written.
    """
    path = _path()
    try:
        write_whole(path, json.dumps(_read() | {key: dataclasses.asdict(choice)}, indent=1))
    except OSError:
        return None
    return path


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _path() -> Path:
    return default_path("choices.json")
