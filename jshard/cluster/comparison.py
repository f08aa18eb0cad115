"""Several configurations of a recipe on one cluster, compiled and compared side by side."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Group
from rich.text import Text

from jshard._live import at_work
from jshard._text import duration, three_digits
from jshard._types import Json
from jshard.cluster.compile import CompileRequest, Variant, command_line, compile_step
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.report import ClusterPlan, percent
from jshard.errors import FourPartError
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table

_COLUMNS = ("", "mesh??", "GiB>", "fits", "AG>", "RS>?", "AR>?", "loops>", "est. step>", "hidden>", "MFU>")
_CAPTION = (
    "Compiled: peak GiB; AG, RS, AR: elements of all-gathers, reduce-scatters, all-reduces relative to the number of"
    " parameters; loops: collectives in loops that overlap matrix products. Estimated: step, hidden, MFU, as stated,"
    " and below it the range of the assumptions above; the fastest is first and marked *. Configurations that do not"
    " fit have no estimate, as the compiler then trades speed for memory."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """A configuration and its result."""

    variant: Variant
    command: str  # the command line for it, if there is one
    plan: ClusterPlan | None = None  # None if it was not compiled
    error: FourPartError | None = None  # the reason, in that case

    @property
    def fits(self) -> bool:
        """Returns whether it compiles and fits into a device's memory."""
        return self.plan is not None and self.plan.fits

    def to_dict(self) -> dict[str, Json]:
        """Returns its figures, with compiled and estimated ones separate."""
        record = {"name": self.variant.name, "mesh": dict(self.variant.mesh), "command": self.command or None}
        if self.plan is None:
            return record | {"error": str(self.error)}
        return self.plan.to_dict() | record


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Printed):
    """Configurations side by side."""

    rows: tuple[Compared, ...]

    @property
    def ranked(self) -> list[Compared]:
        """Returns those that fit first, fastest first by the stated estimate; those not compiled last."""
        return sorted(self.rows, key=_rank)

    def __rich__(self) -> Group:
        table = made_table("Side by side", *_COLUMNS, caption=_CAPTION)
        for i, row in enumerate(self.ranked):
            _add(table, row, is_fastest=i == 0 and row.fits)
        failed = [Text(f"{row.variant.name}: {row.error}") for row in self.rows if row.error is not None]
        return Group(table, *failed)


def _rank(row: Compared) -> tuple[int, float]:
    if row.plan is None:
        return 2, 0.0
    if not row.fits:
        return 1, 0.0
    return 0, row.plan.estimates.stated.step_s


# ---- compiling them


def compare(requested: CompileRequest, variants: Sequence[Variant], bench: VariantCompiler) -> Comparison:
    """Compiles configurations of a recipe, one after another."""
    rows = []
    for number, variant in enumerate(variants, 1):
        rows.append(bench.compiled(requested, variant, f"{number} of {len(variants)}"))
    return Comparison(rows=tuple(rows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantCompiler:
    """Compiles configurations, shows progress, and keeps the results."""

    cluster: PlannedCluster
    timeout_s: float = 3600  # for each configuration
    say: Callable[[str], object] = lambda line: None  # prints a line
    stream: TextIO | None = None  # for progress; see `at_work`
    rows: list[Compared] = dataclasses.field(default_factory=list)  # results so far, also after an interrupt

    def compiled(self, requested: CompileRequest, variant: Variant, place: str) -> Compared:
        """Compiles one configuration. One that fails is a result, too: the others are still compiled.

        Args:
            requested: the original request.
            variant: the configuration.
            place: which one of how many it is, as text.
        """
        request = variant.of(requested)
        command = command_line(request, assume=self.cluster.assume)
        plan = None
        failure = None
        with at_work(f"[{place}] {variant.name}: {variant.command}", say=self.say, stream=self.stream) as work:
            try:
                step = compile_step(request, timeout_s=self.timeout_s)
                plan = ClusterPlan.of(step, cluster=self.cluster, name=variant.name)
                work.result = plan.verdict
            except FourPartError as error:
                failure = error
                work.result = "does not compile"
        row = Compared(variant=variant, command=command, plan=plan, error=failure)
        self.rows.append(row)
        return row


# ---- the table


def _add(table: FittedTable, row: Compared, *, is_fastest: bool) -> None:
    mesh = [f"{axis}={degree}" for axis, degree in row.variant.mesh.items() if degree > 1]
    if row.plan is None:
        add_row(table, row.variant.name, mesh, *["-"] * (len(_COLUMNS) - 2))
        return
    plan = row.plan
    amounts = [f"{plan.audit.amount(kind):.2f}" for kind in ("all-gather", "reduce-scatter", "all-reduce")]
    add_row(
        table,
        f"{row.variant.name}*" if is_fastest else row.variant.name,
        mesh,
        three_digits(plan.step.memory.peak_bytes / 2**30),
        "yes" if plan.fits else "no",
        *amounts,
        _overlapped_in_loops(plan),
        *_estimate_cells(plan),
    )


def _overlapped_in_loops(plan: ClusterPlan) -> str:
    num_in_loops = len(plan.audit.schedule.in_loops)
    if num_in_loops == 0:
        return "-"
    return f"{num_in_loops - len(plan.audit.not_overlapped())}/{num_in_loops}"


def _estimate_cells(plan: ClusterPlan) -> list[str | list[str]]:
    """Returns the cells of step, hidden and MFU."""
    if not plan.fits:
        return ["-", "-", "-"]
    estimates = plan.estimates
    fastest_s, slowest_s = estimates.span("step_s")
    least_hidden, most_hidden = estimates.span("hidden")
    if plan.cluster.has_bounds_only:
        mfus = sorted(plan.mfu(case) for case in estimates.cases)
        return [
            f"{duration(fastest_s)} to {duration(slowest_s)}",
            f"{percent(least_hidden)} to {percent(most_hidden)}",
            f"{percent(mfus[0])} to {percent(mfus[-1])}",
        ]
    return [
        _with_range(duration(estimates.stated.step_s), duration(fastest_s), duration(slowest_s)),
        _with_range(percent(estimates.stated.hidden), percent(least_hidden), percent(most_hidden)),
        percent(plan.mfu(estimates.stated)),
    ]


def _with_range(stated: str, low: str, high: str) -> list[str]:
    """Returns the lines of a cell: a quantity, and its range with the unit once if both ends have the same."""
    match = re.fullmatch(r"([\d.-]+)(.*)", low)
    assert match is not None  # a number and its unit
    number, unit = match.groups()
    if high.endswith(unit):
        return [stated, f"{number}-{high}"]
    return [stated, f"{low}-{high}"]
