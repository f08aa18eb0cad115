"""Several ways to train a recipe on one cluster, compiled side by side."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Group
from rich.text import Text

from jshard._live import at_work
from jshard._text import duration, three_digits
from jshard.cluster.compile import CompiledStep, CompileRequest, Variant, command_line, compile_step
from jshard.cluster.estimate import PlannedCluster
from jshard.cluster.report import ClusterPlan
from jshard.errors import AnnotationError, FourPartError, ShardingError
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.plans.mesh import FSDP, REPLICA

GSPMD = "gspmd"
"""The model as plain Flax under `jax.jit`, its parameters sharded as for zero3; the compiler does the rest."""

COMPARED = "replicate", "zero2", "zero3", "hsdp", GSPMD

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
class Comparison(Printed):
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

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows, for JSON."""
        return [row.to_dict() for row in self.rows]


def compare(asked: CompileRequest, variants: Sequence[Variant], bench: VariantCompiler) -> Comparison:
    """Compiles ways to train a recipe, one after another."""
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
        """Compiles one way."""
        with at_work(f"[{place}] {variant.name}: {variant.command}", say=self.say, stream=self.stream) as work:
            found = self._compiled(asked, variant)
            work.result = "does not compile" if found.plan is None else found.plan.verdict
        self.rows.append(found)
        return found

    def _compiled(self, asked: CompileRequest, variant: Variant) -> Compared:
        request = variant.of(asked)
        found = Compared(variant=variant, command=command_line(request, assume=self.cluster.assume))
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
        _span(found.stated.step_s, found.span("step_s"), duration),
        _span(found.stated.hidden, found.span("hidden"), "{:.1%}".format),
        f"{plan.mfu(found.stated):.1%}",
    )


def _span(stated: float, ends: tuple[float, float], text: Callable[[float], str]) -> list[str]:
    low, high = map(text, ends)
    number, unit = re.fullmatch(r"([\d.-]+)(.*)", low).groups()  # type: ignore[union-attr]
    return [text(stated), f"{number if high.endswith(unit) else low}-{high}"]


# The strategies to compare, as ways.


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to shard a model, as keywords; docs/strategies.md has its memory and communication."""

    replica: int = 1
    fsdp: int = -1
    reshard_after_forward: bool | int | None = None
    shard_replicated: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """Keywords for `js.mesh`."""
        return {"replica": self.replica, "fsdp": self.fsdp}

    @property
    def annotation(self) -> dict[str, Any]:
        """Keywords for `js.fully_shard`."""
        return {"reshard_after_forward": self.reshard_after_forward}

    @property
    def optimizer(self) -> dict[str, Any]:
        """Keywords for `js.shard_optimizer`."""
        return {"shard_replicated": self.shard_replicated}


strategies = {
    "replicate": Strategy(replica=-1, fsdp=1),
    "zero1": Strategy(replica=-1, fsdp=1, shard_replicated=True),
    "zero2": Strategy(reshard_after_forward=False),
    "zero3": Strategy(),
    "hsdp": Strategy(replica=2),
    "hsdp_zero2": Strategy(replica=2, reshard_after_forward=False),
    "hpz": Strategy(reshard_after_forward=8),
}
"""The strategies by name."""


def variants_for(
    names: Sequence[str],
    mesh: Mapping[str, int],
    *,
    near: int,
    capacity_bytes: int,
    held_bytes: Callable[[Mapping[str, int]], int],
) -> tuple[Variant, ...]:
    """The strategies to compare, on as many devices as a mesh has.

    Args:
        names: of `strategies`, or `gspmd`.
        mesh: the mesh asked for; it decides the groups of the strategies with replicas if it has replicas itself.
        near: else the devices in each group, or a multiple of them that can hold the state, if there are more than
            those; and the neighbours of hpz.
        capacity_bytes: memory of a device.
        held_bytes: what a device of a mesh holds at least.

    Raises:
        ShardingError: there is no strategy of a name.
    """
    unknown = [name for name in names if name not in (*strategies, GSPMD)]
    if unknown:
        raise ShardingError(
            f"There is no strategy {unknown[0]!r}.",
            where=f"--compare {','.join(names)}",
            why=f"the strategies are {', '.join(strategies)}, and {GSPMD}: plain Flax under jax.jit.",
            do=f"--compare {','.join(COMPARED)}",
        )
    devices = mesh.get(REPLICA, 1) * mesh[FSDP]
    group = mesh[FSDP]
    if mesh.get(REPLICA, 1) == 1 and any(n in strategies and strategies[n].replica > 1 for n in names):

        def fits(size: int) -> bool:
            try:
                return held_bytes(dict(mesh) | {REPLICA: devices // size, FSDP: size}) <= capacity_bytes / 2
            except AnnotationError:  # a large parameter does not divide
                return False

        group = _group(devices, near, fits)
    return tuple(_compared(name, dict(mesh), devices, group, near) for name in dict.fromkeys(names))


def _group(devices: int, near: int, fits: Callable[[int], bool]) -> int:
    """The smallest groups of whole hosts that can hold the state, or the largest there are; within a host its half."""
    fewer = [n for n in range(1, devices) if devices % n == 0] or [1]
    whole = [n for n in fewer if n % near == 0] or fewer[-1:]
    return next(filter(fits, whole), whole[-1])


def _compared(name: str, mesh: dict[str, int], devices: int, group: int, near: int) -> Variant:
    strategy = strategies["zero3" if name == GSPMD else name]
    fsdp = devices if strategy.replica == 1 else 1 if strategy.fsdp == 1 else group
    mesh |= {REPLICA: devices // fsdp, FSDP: fsdp}
    reshard = {"hpz": near}.get(name, strategy.reshard_after_forward)
    units = {} if name == GSPMD else {"reshard_after_forward": True if reshard is None else reshard}
    return Variant(
        name=name,
        mesh=mesh,
        units=units,
        shard_replicated=strategy.shard_replicated,
        plain_flax=name == GSPMD,
    )
