"""`jshard plan --auto`: ranks many configurations by estimates, and decides by compiling the first of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from jshard._live import at_work
from jshard._text import duration
from jshard._types import Json
from jshard.cluster.comparison import Compared, Comparison, VariantCompiler
from jshard.cluster.compile import CompileRequest, Variant, command_line
from jshard.cluster.costs import Cost, Costs
from jshard.cluster.report import ClusterPlan
from jshard.cluster.search import Search, search, why_lost
from jshard.inspect.tables import FittedTable, Printed, add_row, broken_line, made_table

_FINALISTS = 3  # configurations to compile
_MORE_FINALISTS = 3  # and this many more while none of them fits
# Rows of the table.
_SHOWN_FITTING = 10
_SHOWN_TOO_LARGE = 3


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Chosen(Printed):
    """The result of a search."""

    search: Search
    compiled: tuple[Compared, ...]  # the requested configuration, and the finalists
    best: Compared | None  # the chosen one; None if none fits

    @property
    def fits(self) -> bool:
        """Returns whether a configuration was found."""
        return self.best is not None

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [_ranking_table(self.search)]
        for mesh, why in self.search.refused.items():
            parts.append(Text(f"--mesh {mesh} cannot be annotated: {why}"))
        parts += [Text(line) for line in self.search.left_out]
        parts += [Text(), Comparison(rows=self.compiled)]
        parts += [Text(), Text(self._verdict(), style="bold")]
        return Group(*parts)

    def _verdict(self) -> str:
        if self.best is None:
            return "No compiled configuration fits: it needs more devices, or a smaller batch."
        lines = [f"chosen: {self.best.variant.name}", broken_line(self.best.command)]
        # `choose` puts the requested one first.
        default = self.compiled[0]
        if not default.fits:
            lines.append("the requested configuration does not fit.")
        elif self.best is default:
            lines.append("the requested configuration is the best found.")
        else:
            gain = _step_s(default) / _step_s(self.best)
            lines.append(f"by the estimate {gain:.2f}x as fast as the requested configuration.")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Json]:
        """Returns the result for JSON."""
        considered = []
        for cost in self.search.ranked:
            lost = why_lost(cost, self.search.ranked[0])
            considered.append(_record(cost) | {"fits": True, "lost": lost})
        for cost in self.search.too_large:
            considered.append(_record(cost) | {"fits": False})
        return {
            "best": None if self.best is None else self.best.command,
            "compiled": [row.to_dict() for row in self.compiled],
            "considered": considered,
            "refused": dict(self.search.refused),
            "left_out": list(self.search.left_out),
        }


def choose(
    costs: Costs,
    requested: CompileRequest,
    mesh: Mapping[str, int],
    *,
    free: Collection[str],
    plan: ClusterPlan,
    bench: VariantCompiler,
) -> Chosen:
    """Searches, compiles the first of the ranking, and takes the fastest that fits, including the requested one.

    Args:
        costs: estimates for the recipe on the cluster.
        requested: the original request.
        mesh: its mesh.
        free: the axes whose degrees are chosen.
        plan: the result of compiling it.
        bench: compiles the others.
    """
    with at_work("estimating every configuration", say=bench.say, stream=bench.stream) as work:
        searched = search(costs, mesh, free=free)
        work.result = searched.counted
    command = command_line(requested, assume=bench.cluster.assume)
    compiled = [Compared(variant=Variant(name="as asked", mesh=mesh), command=command, plan=plan)]
    finalists = searched.finalists(_FINALISTS + _MORE_FINALISTS)
    # The requested one is compiled already: it is `plan`.
    candidates = [cost for cost in finalists if cost is not searched.default]
    for number, cost in enumerate(candidates, 1):
        is_extra = number > _FINALISTS
        if is_extra and any(row.fits for row in compiled):
            break
        # How many there will be is not known before: more only while none fits.
        count = len(candidates) if is_extra else min(len(candidates), _FINALISTS)
        compiled.append(bench.compiled(requested, cost.variant, f"{number} of {count}"))
    fitting = [row for row in compiled if row.fits]
    best = min(fitting, key=_step_s, default=None)
    return Chosen(search=searched, compiled=tuple(compiled), best=best)


def _step_s(row: Compared) -> float:
    """Returns the estimated seconds of a step, from the compiled schedule."""
    assert row.plan is not None
    return row.plan.estimates.stated.step_s


# ---- the configurations as a table, and for JSON


def _ranking_table(searched: Search) -> FittedTable:
    """Returns the table of the requested configuration, and the best ones of those that fit and do not fit."""
    num_considered = len(searched.considered)
    num_too_large = len(searched.too_large)
    caption = (
        "Estimated from the plan, before compiling, to choose what to compile. way: what is kept from forward to"
        " backward, remat, microbatches. waits: for collectives. Of configurations with equal times, the one with the"
        f" least memory is shown. {num_considered} configurations were considered; {num_too_large} do not fit."
    )
    columns = ("way", "mesh", "GiB>", "step>", "computes>", "waits>", "why not")
    table = made_table("Configurations, by the estimate", *columns, caption=caption)
    for cost in _shown(searched):
        add_row(table, *_cells(cost), _why_not(cost, searched))
    return table


def _shown(searched: Search) -> Iterator[Cost]:
    """Yields the configurations of the table, the requested one first."""
    if searched.default is not None:
        yield searched.default
    for cost in (*searched.finalists(_SHOWN_FITTING), *searched.too_large[:_SHOWN_TOO_LARGE]):
        if cost is not searched.default:
            yield cost


def _why_not(cost: Cost, searched: Search) -> str:
    does_not_fit = any(cost is other for other in searched.too_large)
    if does_not_fit or not searched.ranked:
        return "does not fit"
    return why_lost(cost, searched.ranked[0])


def _cells(cost: Cost) -> list[str]:
    split = [f"{axis}={degree}" for axis, degree in cost.variant.mesh.items() if degree > 1]
    peak_gib = cost.memory.step_bytes / 2**30
    return [
        cost.variant.name,
        " ".join(split),
        f"{peak_gib:.1f}",
        duration(cost.step_s),
        duration(cost.compute_s),
        duration(cost.exposed_s),
    ]


def _record(cost: Cost) -> dict[str, Json]:
    return {
        "name": cost.variant.name,
        "options": cost.variant.command,
        "memory_bytes": cost.memory.step_bytes,
        "step_s": cost.step_s,
        "compute_s": cost.compute_s,
        "exposed_s": cost.exposed_s,
    }
