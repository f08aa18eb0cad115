"""`jshard plan --auto`: the best of many ways by the estimates, settled by compiling the first of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from jshard._live import at_work
from jshard.cluster.compare import Bench, Compared, Comparison
from jshard.cluster.compile import CompileRequest
from jshard.cluster.costs import Cost, Costs
from jshard.cluster.report import ClusterPlan, seconds
from jshard.cluster.search import Search, search, why_lost
from jshard.cluster.variants import Variant, command_line
from jshard.inspect.tables import add_row, broken_line, made_table, printed

_FINALISTS, _MORE = 3, 3  # ways that are compiled; and again so many while none of them fits
_SHOWN, _LARGE = 12, 3


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Chosen:
    """What a search has found.

    Attributes:
        search: every way, by the estimates.
        compiled: the way that was asked for, and the finalists.
        best: the chosen one of them; None if none fits.
    """

    search: Search
    compiled: tuple[Compared, ...]
    best: Compared | None

    @property
    def fits(self) -> bool:
        """Whether a way was found."""
        return self.best is not None

    def __rich__(self) -> Group:
        refused = [f"--mesh {mesh} cannot be annotated: {why}" for mesh, why in self.search.refused.items()]
        told = map(Text, (*refused, *self.search.left_out))
        parts: list[Any] = [_ranking(self.search), *told, Text(), Comparison(rows=self.compiled), Text()]
        return Group(*parts, Text(self._verdict(), style="bold"))

    def __str__(self) -> str:
        return printed(self)

    __repr__ = __str__

    def _verdict(self) -> str:
        if self.best is None:
            return "None of the compiled ways fits: it needs more devices, or a smaller batch."
        lines = [f"chosen: {self.best.variant.name}", broken_line(self.best.command)]
        default = self.compiled[0]
        if not default.fits:
            lines.append("what was asked for does not fit.")
        elif self.best is default:
            lines.append("what was asked for is the best that was found.")
        else:
            gain = sequence_s(default) / sequence_s(self.best)
            lines.append(f"by the estimate {gain:.2f}x as fast as what was asked for.")
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


def sequence_s(row: Compared) -> float:
    """Estimated seconds for a sequence of the batch, by the compiled schedule."""
    assert row.plan is not None
    return row.plan.estimates.stated.step_s / row.plan.step.batch_size


def choose(
    costs: Costs,
    asked: CompileRequest,
    mesh: Mapping[str, int],
    *,
    plan: ClusterPlan,
    bench: Bench,
    batch_sizes: Sequence[int] = (),
) -> Chosen:
    """Searches, compiles the first of the ranking, and takes the quickest that fits of them and what was asked for.

    Args:
        costs: estimates for the recipe on the cluster.
        asked: what was asked for.
        mesh: its mesh.
        plan: as compiled.
        bench: where they are compiled.
        batch_sizes: as in `search`.
    """
    with at_work("estimating every way", say=bench.say, stream=bench.stream) as work:
        found = search(costs, mesh, batch_sizes=batch_sizes)
        work.result = found.counted
    line = command_line(asked, known=bench.cluster.known)
    compiled = [Compared(variant=Variant(name="as asked", mesh=mesh), command=line, plan=plan)]
    others = [cost for cost in found.finalists(_FINALISTS + _MORE) if cost is not found.default]
    for i, cost in enumerate(others):
        if i >= _FINALISTS and any(row.fits for row in compiled):
            break
        count = min(len(others), _FINALISTS) if i < _FINALISTS else len(others)
        compiled.append(bench.compiled(asked, cost.variant, f"{i + 1} of {count}"))
    fitting = [row for row in compiled if row.fits]
    best = min(fitting, key=sequence_s) if fitting else None
    return Chosen(search=found, compiled=tuple(compiled), best=best)


def _ranking(found: Search) -> Any:
    columns = "way", "mesh", "GiB>", "step>", "computes>", "waits>", "why not"
    caption = (
        "Estimated from the plan, before anything is compiled, to choose what is compiled. way: what is kept from"
        " forward to backward, remat, microbatches. waits: for collectives, and copies from and to the host. Of"
        " ways that take the same time the one that holds least is shown."
    )
    table = made_table("Ways, by the estimate", *columns, caption=caption)
    best = found.ranked[0] if found.ranked else None
    asked = found.default
    others = [cost for cost in (*found.finalists(_SHOWN), *found.too_large[:_LARGE]) if cost is not asked]
    for cost in (asked, *others):
        is_large = any(cost is one for one in found.too_large)
        add_row(table, *_cells(cost), "does not fit" if best is None or is_large else why_lost(cost, best))
    all_ways = len({id(cost) for cost in (asked, *found.ranked, *found.too_large)})
    table.caption = f"{caption} {all_ways} ways were looked at, of which {len(found.too_large)} do not fit."
    return table


def _cells(cost: Cost) -> list[str]:
    mesh = " ".join(f"{axis}={n}" for axis, n in cost.variant.mesh.items() if n > 1)
    times = cost.step_s, cost.compute_s, cost.exposed_s
    return [cost.variant.name, mesh, f"{cost.memory.step_bytes / 2**30:.1f}", *map(seconds, times)]


def _way(cost: Cost) -> dict[str, Any]:
    return {
        "name": cost.variant.name,
        "options": cost.variant.command,
        "memory_bytes": cost.memory.step_bytes,
        "step_s": cost.step_s,
        "compute_s": cost.compute_s,
        "exposed_s": cost.exposed_s,
        "own_s": cost.own_s,
        "host_s": cost.host_s,
        "batch_size": cost.batch_size,
    }
