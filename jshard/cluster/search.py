"""Chooses among configurations of a recipe by estimates, then by compiling, and suggests others if none fits."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.text import Text

from jshard._live import at_work
from jshard._text import duration
from jshard.cluster.compile import CompileRequest, Variant, command_line
from jshard.cluster.costs import Cost, Costs
from jshard.cluster.report import ClusterPlan, Compared, Comparison, VariantCompiler
from jshard.errors import AnnotationError
from jshard.inspect.tables import Printed, add_row, broken_line, made_table
from jshard.plans.mesh import FSDP, REPLICA, data_shards
from jshard.recipes.overrides import SettingError

ROOM = 0.92
"""Share of a device's memory that a configuration may use, by the estimate."""

_REMATS = "none", "dots", "full"
_MOST_SPLITS = 16
_HAIR = 0.002  # times that differ by less are equal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Every configuration considered."""

    default: Cost  # the requested one
    ranked: tuple[Cost, ...]  # those that fit by the estimate, fastest first; among equal times the smallest first
    too_large: tuple[Cost, ...]  # those that do not fit, smallest first
    refused: Mapping[str, str]  # meshes that cannot be annotated, with the reason

    @property
    def left_out(self) -> tuple[str, ...]:
        """The costs that some estimates do not model, one line each."""
        found = (self.default, *self.ranked, *self.too_large)
        return tuple(dict.fromkeys(f"not in the estimate: {one}" for cost in found for one in cost.left_out))

    @property
    def counted(self) -> str:
        """The number of configurations, and how many of them fit."""
        return f"{len(self.ranked)} of {len(self.ranked) + len(self.too_large)} configurations fit by the estimate"

    def finalists(self, count: int) -> tuple[Cost, ...]:
        """The first configurations of the ranking with different times."""
        found: list[Cost] = []
        for cost in self.ranked:
            if len(found) < count and not (found and _is_equal(cost, found[-1])):
                found.append(cost)
        return tuple(found)


def search(costs: Costs, mesh: Mapping[str, int]) -> Search:
    """Estimates every configuration."""
    default = costs.of(Variant(name="as asked", mesh=mesh))
    found, refused = [default], {}
    for variant in _ways(costs, mesh):
        if variant.mesh_text in refused:
            continue
        try:
            cost = costs.of(variant)
        except SettingError:  # the recipe refuses this number of microbatches
            continue
        except AnnotationError as error:
            refused[variant.mesh_text] = error.what
        else:
            found += [] if is_same(cost, default) else [cost]
    capacity = costs.machine.capacity_bytes
    fits = lambda cost: capacity is None or cost.memory.step_bytes <= ROOM * capacity
    return Search(
        default=default,
        ranked=tuple(_ranked(filter(fits, found))),
        too_large=tuple(sorted((c for c in found if not fits(c)), key=lambda c: c.memory.step_bytes)),
        refused=refused,
    )


def _ranked(found: Iterable[Cost]) -> Iterator[Cost]:
    """Fastest first; configurations of equal time are sorted by memory."""
    rest = sorted(found, key=lambda cost: cost.step_s)
    while rest:
        equal = [cost for cost in rest if cost.step_s <= (1 + _HAIR) * rest[0].step_s]
        yield from sorted(equal, key=lambda cost: cost.memory.step_bytes)
        rest = rest[len(equal) :]


def is_same(cost: Cost, other: Cost) -> bool:
    """Whether two configurations are the same, however their settings are written."""
    return (cost.variant.mesh, cost.memory, cost.step_s) == (other.variant.mesh, other.memory, other.step_s)


def _is_equal(cost: Cost, other: Cost) -> bool:
    return abs(cost.step_s / other.step_s - 1) <= _HAIR


def _ways(costs: Costs, mesh: Mapping[str, int]) -> Iterator[Variant]:
    devices, recipe = mesh[REPLICA] * mesh[FSDP], costs.recipe
    for fsdp in _splits(devices):
        split = dict(mesh) | {REPLICA: devices // fsdp, FSDP: fsdp}
        keep: list[Any] = [True, False] if fsdp > 1 else [True]
        keep += [costs.machine.near] if 1 < costs.machine.near < fsdp and fsdp % costs.machine.near == 0 else []
        for n, reshard, remat in itertools.product(_microbatches(recipe.batch_size, data_shards(mesh)), keep, _REMATS):
            units = {"reshard_after_forward": reshard, "remat": remat}
            yield Variant(
                name=name_of(split, units, n),
                mesh=split,
                accumulate=None if n == recipe.accumulate else n,
                units=units,
            )


def name_of(mesh: Mapping[str, int], units: Mapping[str, Any], accumulate: int) -> str:
    """A short description of a configuration."""
    kept = {True: "zero3", False: "zero2"}.get(units["reshard_after_forward"], "hpz")
    kept = "replicate" if mesh[FSDP] == 1 else f"hsdp {kept}" if mesh[REPLICA] > 1 else kept
    return f"{kept}, {units['remat']}" + (f", {accumulate} parts" if accumulate > 1 else "")


def _splits(devices: int) -> list[int]:
    """Degrees of sharding, the largest first."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    if len(divisors) > _MOST_SPLITS:  # only repeated halves of `devices`, and 1
        divisors = [n for n in divisors if n == 1 or (devices // n) & (devices // n - 1) == 0]
    return divisors[::-1]


def _microbatches(batch_size: int, shards: int) -> list[int]:
    """Numbers of microbatches that divide evenly over the shards; of many, powers of two and one-sequence batches."""
    rows = batch_size // shards
    if rows * shards != batch_size:
        return []
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    return divisors if len(divisors) <= _MOST_SPLITS else [n for n in divisors if n & (n - 1) == 0 or n == rows]


def why_lost(cost: Cost, best: Cost) -> str:
    """Why a configuration that fits was not chosen, as text; "" for the chosen one."""
    slower = cost.step_s / best.step_s - 1
    computes, waits = cost.compute_s - best.compute_s, cost.exposed_s - best.exposed_s
    if _is_equal(cost, best):
        return "holds more" if cost.memory.step_bytes > best.memory.step_bytes else ""
    return f"+{slower:.1%}: {'computes' if computes > waits else 'waits'} more"


# `jshard plan --auto`: ranks many configurations by estimates, and decides by compiling the first of them.

_FINALISTS, _MORE = 3, 3  # configurations to compile; and this many more while none of them fits
_SHOWN, _LARGE = 12, 3


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Chosen(Printed):
    """The result of a search."""

    search: Search
    compiled: tuple[Compared, ...]  # the requested configuration, and the finalists
    best: Compared | None  # the chosen one; None if none fits

    @property
    def fits(self) -> bool:
        """Whether a configuration was found."""
        return self.best is not None

    def __rich__(self) -> Group:
        refused = [f"--mesh {mesh} cannot be annotated: {why}" for mesh, why in self.search.refused.items()]
        lines = map(Text, (*refused, *self.search.left_out))
        parts: list[Any] = [_ranking(self.search), *lines, Text(), Comparison(rows=self.compiled), Text()]
        return Group(*parts, Text(self._verdict(), style="bold"))

    def _verdict(self) -> str:
        if self.best is None:
            return "No compiled configuration fits: it needs more devices, or a smaller batch."
        lines = [f"chosen: {self.best.variant.name}", broken_line(self.best.command)]
        default = self.compiled[0]
        if not default.fits:
            lines.append("the requested configuration does not fit.")
        elif self.best is default:
            lines.append("the requested configuration is the best found.")
        else:
            gain = _step_s(default) / _step_s(self.best)
            lines.append(f"by the estimate {gain:.2f}x as fast as the requested configuration.")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found, first = self.search, self.search.ranked[:1]
        ways = [_way(cost) | {"fits": True, "lost": why_lost(cost, *first)} for cost in found.ranked]
        return {
            "best": None if self.best is None else self.best.command,
            "compiled": [row.to_dict() for row in self.compiled],
            "considered": ways + [_way(cost) | {"fits": False} for cost in found.too_large],
            "refused": dict(self.search.refused),
            "left_out": list(found.left_out),
        }


def _step_s(row: Compared) -> float:
    """Estimated seconds of a step, from the compiled schedule."""
    assert row.plan is not None
    return row.plan.estimates.stated.step_s


def choose(
    costs: Costs,
    asked: CompileRequest,
    mesh: Mapping[str, int],
    *,
    plan: ClusterPlan,
    bench: VariantCompiler,
) -> Chosen:
    """Searches, compiles the first of the ranking, and takes the fastest that fits, including the requested one."""
    with at_work("estimating every configuration", say=bench.say, stream=bench.stream) as work:
        found = search(costs, mesh)
        work.result = found.counted
    line = command_line(asked, assume=bench.cluster.assume)
    compiled = [Compared(variant=Variant(name="as asked", mesh=mesh), command=line, plan=plan)]
    others = [cost for cost in found.finalists(_FINALISTS + _MORE) if cost is not found.default]
    for i, cost in enumerate(others):
        if i >= _FINALISTS and any(row.fits for row in compiled):
            break
        count = min(len(others), _FINALISTS) if i < _FINALISTS else len(others)
        compiled.append(bench.compiled(asked, cost.variant, f"{i + 1} of {count}"))
    fitting = [row for row in compiled if row.fits]
    best = min(fitting, key=_step_s) if fitting else None
    return Chosen(search=found, compiled=tuple(compiled), best=best)


def _ranking(found: Search) -> Any:
    columns = "way", "mesh", "GiB>", "step>", "computes>", "waits>", "why not"
    best, asked = found.ranked[0] if found.ranked else None, found.default
    all_ways = len({id(cost) for cost in (asked, *found.ranked, *found.too_large)})
    caption = (
        "Estimated from the plan, before compiling, to choose what to compile. way: what is kept from forward to"
        " backward, remat, microbatches. waits: for collectives. Of configurations with equal times, the one with the"
        f" least memory is shown. {all_ways} configurations were considered; {len(found.too_large)} do not fit."
    )
    table = made_table("Configurations, by the estimate", *columns, caption=caption)
    others = [cost for cost in (*found.finalists(_SHOWN), *found.too_large[:_LARGE]) if cost is not asked]
    for cost in (asked, *others):
        is_large = any(cost is one for one in found.too_large)
        add_row(table, *_cells(cost), "does not fit" if best is None or is_large else why_lost(cost, best))
    return table


def _cells(cost: Cost) -> list[str]:
    mesh = " ".join(f"{axis}={n}" for axis, n in cost.variant.mesh.items() if n > 1)
    times = cost.step_s, cost.compute_s, cost.exposed_s
    return [cost.variant.name, mesh, f"{cost.memory.step_bytes / 2**30:.1f}", *map(duration, times)]


def _way(cost: Cost) -> dict[str, Any]:
    what = {"name": cost.variant.name, "options": cost.variant.command, "memory_bytes": cost.memory.step_bytes}
    return what | {name: getattr(cost, name) for name in ("step_s", "compute_s", "exposed_s")}


# Suggestions when a step does not fit: configurations with less memory, each compiled before it is suggested.

_TRIES = 4  # compiled at most
_MARGIN = 0.95  # share of the memory, by the estimate
_STRONGER = {"none": ("dots", "full"), "dots": ("full",), "full": ()}


def suggestions(
    costs: Costs,
    asked: CompileRequest,
    mesh: Mapping[str, int],
    *,
    bench: VariantCompiler,
    peak_bytes: int,
) -> tuple[Compared, ...]:
    """Configurations with less memory than the requested one that does not fit, fastest by the estimate first.

    Compiles until one fits, and returns those it tried. The batch of a step does not change. The estimates are
    corrected by the compiled peak of the requested step, `peak_bytes`.
    """
    now = costs.of(Variant(name="asked", mesh=mesh))
    wrong = max(1.0, peak_bytes / now.memory.step_bytes)  # factor by which the estimate was too low
    room = _MARGIN * bench.cluster.topology.device.hbm_bytes / wrong
    tried: list[Compared] = []
    for cost in sorted(_less(costs, mesh), key=lambda cost: cost.step_s):
        if cost.memory.step_bytes <= room:
            room = cost.memory.step_bytes - 1  # if it does not fit, only smaller ones are worth trying
            tried.append(bench.compiled(asked, cost.variant, f"{len(tried) + 1} of at most {_TRIES}"))
            if tried[-1].fits or len(tried) == _TRIES:
                break
    return tuple(tried)


def _less(costs: Costs, mesh: Mapping[str, int]) -> Iterator[Cost]:
    """Configurations that can reduce memory: remat, microbatches, wider sharding, and resharding after forward."""
    devices, recipe = mesh[REPLICA] * mesh[FSDP], costs.recipe
    rows = recipe.batch_size // recipe.accumulate // data_shards(mesh)
    microbatches = [n for n in range(1, rows + 1) if rows % n == 0]
    remats = (None, *_STRONGER.get(costs.remat, ("full",)))
    meshes = [dict(mesh)] + ([dict(mesh) | {REPLICA: 1, FSDP: devices}] if mesh[REPLICA] > 1 else [])
    for wide, remat, n, again in itertools.product(meshes, remats, microbatches, (False, True)):
        units: dict[str, Any] = {} if remat is None else {"remat": remat}
        units |= {"reshard_after_forward": True} if again else {}
        variant = Variant(
            name="suggestion",
            mesh=wide,
            accumulate=None if n == 1 else recipe.accumulate * n,
            units=units,
        )
        with contextlib.suppress(AnnotationError):  # a large parameter may not divide over the wider mesh
            yield costs.of(variant)
