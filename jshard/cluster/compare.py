"""Several ways to train a recipe on one cluster, compiled side by side, and what to try when a step does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Group
from rich.text import Text

from jshard._live import at_work
from jshard._text import duration, three_digits
from jshard.cluster.compile import CompiledStep, CompileRequest, compile_step
from jshard.cluster.costs import Cost, Costs
from jshard.cluster.estimate import PlannedCluster
from jshard.cluster.report import ClusterPlan
from jshard.cluster.variants import Variant, command_line
from jshard.errors import AnnotationError, FourPartError
from jshard.inspect.tables import FittedTable, add_row, made_table, printed
from jshard.plans.mesh import FSDP, REPLICA, data_shards

_COLUMNS = "", "mesh??", "GiB>", "fits", "AG>", "RS>?", "AR>?", "loops>", "est. step>", "hidden>", "MFU>"
_CAPTION = (
    "Compiled: GiB at the peak; AG, RS, AR: elements of all-gathers, reduce-scatters, all-reduces by the number of"
    " parameters; loops: collectives in loops with matrix products beside them. Estimated: step, hidden, MFU, as stated"
    " and below it the range of the assumptions above, the quickest first and marked *; nothing is estimated of what"
    " does not fit, as the compiler then saves memory instead of time."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """One way, and what came of it.

    Attributes:
        variant: the way.
        command: the command line that asks for it, if one does.
        plan: as compiled; None where it was not.
        error: then why.
    """

    variant: Variant
    command: str
    plan: ClusterPlan | None = None
    error: FourPartError | None = None

    @property
    def fits(self) -> bool:
        """Whether it compiles into the memory of a device."""
        return self.plan is not None and self.plan.fits

    def to_dict(self) -> dict[str, Any]:
        """Its figures, the compiled and the estimated apart."""
        given = {"name": self.variant.name, "mesh": dict(self.variant.mesh), "command": self.command or None}
        if self.plan is None:
            return given | {"error": str(self.error)}
        return self.plan.to_dict() | given


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Ways side by side.

    Attributes:
        rows: the ways.
    """

    rows: tuple[Compared, ...]

    def __rich__(self) -> Group:
        table = made_table("Side by side", *_COLUMNS, caption=_CAPTION)
        ranked = sorted(self.rows, key=_rank)
        for row in ranked:
            _add(table, row, is_quickest=row is ranked[0] and row.fits)
        failed = [f"{row.variant.name}: {row.error}" for row in self.rows if row.error is not None]
        return Group(table, *map(Text, failed))

    def __str__(self) -> str:
        return printed(self)

    __repr__ = __str__

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows, for JSON."""
        return [row.to_dict() for row in self.rows]


def compare(asked: CompileRequest, variants: Sequence[Variant], bench: VariantCompiler) -> Comparison:
    """Compiles ways to train a recipe, one after another.

    Args:
        asked: what the ways differ from.
        variants: the ways. One that cannot be compiled says so in its row.
        bench: where they are compiled.
    """
    count = len(variants)
    return Comparison(rows=tuple(bench.compiled(asked, v, f"{i} of {count}") for i, v in enumerate(variants, 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantCompiler:
    """Where ways are compiled. It says which is at work and for how long, and keeps what came of them.

    Attributes:
        cluster: the cluster.
        timeout_s: seconds for each way.
        say: prints a line.
        stream: on which it does; see `at_work`.
        rows: the ways that are done, also those of a command that is interrupted.
    """

    cluster: PlannedCluster
    timeout_s: float = 3600
    say: Callable[[str], object] = lambda line: None
    stream: TextIO | None = None
    rows: list[Compared] = dataclasses.field(default_factory=list)

    def compiled(self, asked: CompileRequest, variant: Variant, place: str) -> Compared:
        """Compiles one way.

        Args:
            asked: what it differs from.
            variant: the way.
            place: which of how many it is: "2 of 5".
        """
        with at_work(f"[{place}] {variant.name}: {variant.command}", say=self.say, stream=self.stream) as work:
            found = self._compiled(asked, variant)
            work.result = "does not compile" if found.plan is None else found.plan.verdict
        self.rows.append(found)
        return found

    def _compiled(self, asked: CompileRequest, variant: Variant) -> Compared:
        request = variant.of(asked)
        found = Compared(variant=variant, command=command_line(request, known=self.cluster.known))
        try:
            step: CompiledStep = compile_step(request, timeout_s=self.timeout_s)
            return dataclasses.replace(found, plan=ClusterPlan.of(step, cluster=self.cluster, name=variant.name))
        except FourPartError as error:
            return dataclasses.replace(found, error=error)


def _rank(row: Compared) -> tuple[bool, bool, float]:
    """What fits first, the quickest by the stated estimate before the others; what was not compiled last."""
    if row.plan is None:
        return True, True, 0.0
    return False, not row.fits, row.plan.estimates.stated.step_s if row.fits else 0.0


def _add(table: FittedTable, row: Compared, *, is_quickest: bool = False) -> None:
    mesh = [f"{axis}={n}" for axis, n in row.variant.mesh.items() if n > 1]
    if row.plan is None:
        add_row(table, row.variant.name, mesh, *["-"] * (len(_COLUMNS) - 2))
        return
    plan, audit = row.plan, row.plan.audit
    loops = audit.schedule.in_loops
    amounts = [f"{audit.amount(kind):.2f}" for kind in ("all-gather", "reduce-scatter", "all-reduce")]
    add_row(
        table,
        row.variant.name + "*" * is_quickest,
        mesh,
        three_digits(plan.step.memory.peak_bytes / 2**30),
        "yes" if plan.fits else "no",
        *amounts,
        f"{len(loops) - len(audit.not_overlapped())}/{len(loops)}" if loops else "-",
        *(_estimates(plan) if plan.fits else "---"),
    )


def _estimates(plan: ClusterPlan) -> tuple[list[str], list[str], str]:
    found = plan.estimates
    return (
        _span(found.stated.step_s, found.step_s, duration),
        _span(found.stated.hidden, found.hidden, "{:.1%}".format),
        f"{plan.mfu(found.stated):.1%}",
    )


def _span(stated: float, ends: tuple[float, float], text: Callable[[float], str]) -> list[str]:
    low, high = map(text, ends)
    number, unit = re.fullmatch(r"([\d.-]+)(.*)", low).groups()  # type: ignore[union-attr]
    return [text(stated), f"{number if high.endswith(unit) else low}-{high}"]


# What to try when a step does not fit: ways that hold less, each compiled before it is named.

_TRIES = 4  # compiled at most
_MARGIN = 0.95  # of the memory, by the estimate
_REMATS = {"none": ("dots", "full"), "dots": ("full",), "full": ()}


def suggestions(
    costs: Costs,
    asked: CompileRequest,
    mesh: Mapping[str, int],
    *,
    bench: VariantCompiler,
    peak_bytes: int,
) -> tuple[Compared, ...]:
    """Ways that hold less than what was asked for and does not fit, the quickest by the estimate first.

    Compiles until one fits, and returns what it tried. The batch of a step stays as it is.

    Args:
        costs: estimates for the recipe.
        asked: what does not fit.
        mesh: its mesh.
        bench: where they are compiled.
        peak_bytes: what it needs, as compiled: the estimates are corrected by it.
    """
    now = costs.of(Variant(name="asked", mesh=mesh))
    wrong = max(1.0, peak_bytes / now.memory.step_bytes)  # the estimate was at least that much too low
    room = _MARGIN * bench.cluster.topology.device.hbm_bytes / wrong
    tried: list[Compared] = []
    for cost in sorted(_less(costs, mesh), key=lambda cost: cost.step_s):
        if cost.memory.step_bytes <= room:
            room = cost.memory.step_bytes - 1  # if it does not fit, only what holds less is worth another try
            tried.append(bench.compiled(asked, cost.variant, f"{len(tried) + 1} of at most {_TRIES}"))
            if tried[-1].fits or len(tried) == _TRIES:
                break
    return tuple(tried)


def _less(costs: Costs, mesh: Mapping[str, int]) -> Iterator[Cost]:
    """The ways that can hold less: layers computed again, microbatches, parameters spread wider and let go."""
    devices, recipe = mesh[REPLICA] * mesh[FSDP], costs.recipe
    rows = recipe.batch_size // recipe.accumulate // data_shards(mesh)
    microbatches = [n for n in range(1, rows + 1) if rows % n == 0]
    remats = (None, *_REMATS.get(costs.remat, ("full",)))
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
        with contextlib.suppress(AnnotationError):  # on the wider mesh a large parameter may not divide
            yield costs.of(variant)
