"""The report of the grid: a table for each cluster, with jshard's time and memory as a ratio to GSPMD's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.grid.cells import BFLOAT16, FLOAT32, GSPMD, JSHARD
from benchmarks.grid.rows import Row
from benchmarks.tables import markdown_table
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.topology import parse_topology

_EXPLAINED = (
    "Compiled: peak memory and collectives are the compiler's, and nothing was run. Estimated: times, and the share of"
    " communication that is hidden; they are the compiled schedule played on two streams under the assumptions of"
    " docs/planning.md, the same for both systems."
)
_COMPARED = (
    "jshard is `zero3`, but for GPT 124M, of which GSPMD keeps the gathered parameters for backward, and so does"
    " jshard. Its profile is `fastest`; between hosts also with the flag that describes the cluster to the"
    " compiler's scheduler, which `jshard plan --xla-flags auto` prints (*described*), and the faster one counts. GSPMD"
    " is the same model as plain Flax under `jax.jit`, with its parameters sharded alike: the fastest of XLA's own"
    " options, that profile, and that with the flag. Ratios are jshard / GSPMD: below 1"
    " jshard is faster, or takes less memory. Both reduce gradients in the dtype of their row. Plain Flax reduces in"
    " the dtype in which it computes, bfloat16; for float32 its layers get another product, which gives the gradient of"
    " a weight in float32 (benchmarks/grid/float32_layers.py)."
)
_LEAST = (
    "*Least ratio* is GSPMD's step with all of its communication beside computation, which slows that as the"
    " assumptions say, by its step: no schedule alone makes a step of the same operations shorter than that."
)
_PLAIN_ATTENTION = "attention runs in plain form"  # a note of a compiled step begins so
_PLAIN_EXPLAINED = (
    "attention of GSPMD runs in plain form, which makes arrays of scores: the compiler's partitioner cannot split"
    " a kernel. The time ratios have this difference, too; it is in the products and the elementwise time below."
)
EARLIER = "*"
UNTIL = " until "
_NOTHING = "-"
XLAS_OWN = "XLA's own"
HEAD = [
    "model",
    "reduced in",
    "jshard, ms est.",
    "GSPMD, ms est.",
    "time ratio",
    "least ratio",
    "hidden, est.",
    "GSPMD hidden",
    "peak, GiB",
    "GSPMD peak",
    "peak ratio",
    "collectives",
    "GSPMD collectives",
    "options",
    "GSPMD options",
]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model on a cluster, with gradients reduced in one dtype, by both systems."""

    model: str
    cluster: str
    reduce_dtype: str
    ours: Row | None  # None if there is no row
    theirs: Row | None  # the faster one that fits; None if there is none

    @property
    def is_compared(self) -> bool:
        """Whether both compiled and fit. Times of a program that does not fit mean nothing."""
        return _counts(self.ours) and _counts(self.theirs)

    @property
    def time_ratio(self) -> float:
        """The estimated time of jshard by that of GSPMD."""
        return self.figure("step_s") / self.figure("step_s", of_theirs=True)

    @property
    def least_ratio(self) -> float | None:
        """The time ratio of a step with GSPMD's operations that waits for nothing; None if its waits are not stated."""
        if not _counts(self.theirs) or "exposed_s" not in self.theirs:
            return None
        contention = PlannedCluster(parse_topology(self.cluster)).machine.assumptions.contention
        # Beside computation that takes so much longer, what was a wait costs this part of itself.
        cost_of_hidden = contention / (1 + contention)
        saved_s = self.theirs["exposed_s"] * (1 - cost_of_hidden)
        return 1 - saved_s / self.theirs["step_s"]

    @property
    def peak_ratio(self) -> float:
        """The compiled peak of jshard by that of GSPMD."""
        return self.figure("peak_bytes") / self.figure("peak_bytes", of_theirs=True)

    @property
    def label(self) -> str:
        """Its name in a sentence."""
        return f"{self.model} on {self.cluster}, reduced in {self.reduce_dtype}"

    def figure(self, name: str, *, of_theirs: bool = False) -> Any:
        """Returns a figure of one of the two rows of a pair that is compared."""
        row = self.theirs if of_theirs else self.ours
        assert row is not None
        return row[name]


def _counts(row: Row | None) -> bool:
    return row is not None and "error" not in row and row["fits"]


def _is_earlier(row: Row | None) -> bool:
    """Returns whether a row is from an earlier report."""
    return row is not None and row.get("is_earlier", False)


def pairs_of(rows: Sequence[Row]) -> list[Pair]:
    """Returns what can be compared, in the order of the rows."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for model, cluster in dict.fromkeys((row["model"], row["cluster"]) for row in rows):
        for reduce_dtype in (FLOAT32, BFLOAT16):  # one below the other in the tables
            groups[model, cluster, reduce_dtype] = []
    for row in rows:
        groups[row["model"], row["cluster"], row["reduce_dtype"]].append(row)
    pairs = []
    for (model, cluster, reduce_dtype), group in groups.items():
        if group:
            pairs.append(Pair(model, cluster, reduce_dtype, _of(JSHARD, group), _of(GSPMD, group)))
    return pairs


def _of(system: str, rows: Sequence[Row]) -> Row | None:
    """Returns the row of a system: the fastest one that fits, otherwise any."""
    mine = [row for row in rows if row["system"] == system]
    fitting = [row for row in mine if _counts(row)]
    if fitting:
        return min(fitting, key=lambda row: row["step_s"])
    return next(iter(mine), None)


def in_words(row: Row) -> str:
    """Returns a row in a line, for those who wait."""
    if "error" in row:
        return row["error"]
    words = f"{row['step_s'] * 1e3:.1f} ms, {row['hidden']:.0%} hidden, {row['peak_bytes'] / 2**30:.2f} GiB"
    return f"{words}, {row['collectives']} collectives, compiled in {row['cpu_s']:.0f} s of CPU"


# ---- the report


def report_lines(rows: Sequence[Row], missing: Sequence[str] = ()) -> list[str]:
    """Returns the report in Markdown.

    Args:
        rows: what was compiled.
        missing: labels of what was not.
    """
    pairs = pairs_of(rows)
    lines = [*_worst(pairs), "", _EXPLAINED, "", _COMPARED, "", _LEAST, ""]
    for cluster in dict.fromkeys(pair.cluster for pair in pairs):
        here = [pair for pair in pairs if pair.cluster == cluster]
        lines += [f"## {cluster}", "", *markdown_table(HEAD, map(_cells, here), num_words=2), ""]
    lines += _earlier_in_words(rows)
    lines += _plain_attention_in_words(rows)
    lines += ["## Where jshard's time goes beyond GSPMD's", "", *_differences(pairs), ""]
    lines += _waits(pairs)
    lines += [*_not_compared(pairs), ""]
    if missing:
        lines += [f"{len(missing)} programs have no row:", "", *_by_system(missing), ""]
    return [*lines, *_dates(rows)]


def _worst(pairs: Sequence[Pair]) -> list[str]:
    compared = [pair for pair in pairs if pair.is_compared]
    if not compared:
        return ["No pair has both systems."]
    slowest = max(compared, key=lambda pair: pair.time_ratio)
    largest = max(compared, key=lambda pair: pair.peak_ratio)
    num_slower = sum(pair.time_ratio > 1 for pair in compared)
    return [
        f"Of {len(compared)} pairs jshard is estimated slower in {num_slower}. Its worst time is"
        f" **{slowest.time_ratio:.3f}** of GSPMD's ({slowest.label}), its worst peak **{largest.peak_ratio:.3f}** of"
        f" GSPMD's ({largest.label})."
    ]


def _cells(pair: Pair) -> list[str]:
    time_ratio = least_ratio = peak_ratio = _NOTHING
    if pair.is_compared:
        time_ratio = f"{pair.time_ratio:.3f}"
        peak_ratio = f"{pair.peak_ratio:.3f}"
    if pair.least_ratio is not None:
        least_ratio = f"{pair.least_ratio:.3f}"
    ours = _Cells.of(pair.ours)
    theirs = _Cells.of(pair.theirs)
    times = [ours.step, theirs.step, time_ratio, least_ratio]
    peaks = [ours.peak, theirs.peak, peak_ratio]
    others = [ours.collectives, theirs.collectives, ours.options, theirs.options]
    return [pair.model, pair.reduce_dtype, *times, ours.hidden, theirs.hidden, *peaks, *others]


@dataclasses.dataclass(frozen=True)
class _Cells:
    """The figures of a row as text."""

    step: str
    hidden: str = _NOTHING
    peak: str = _NOTHING
    collectives: str = _NOTHING
    options: str = _NOTHING

    @classmethod
    def of(cls, row: Row | None) -> _Cells:
        if row is None:
            return cls(_NOTHING)
        if "error" in row:
            return cls(row["error"])
        peak = f"{row['peak_bytes'] / 2**30:.2f}"
        # Of a program that does not fit the compiler has saved memory at the price of time.
        if not row["fits"]:
            return cls("does not fit", peak=peak)
        mark = EARLIER if _is_earlier(row) else ""
        return cls(
            step=f"{row['step_s'] * 1e3:.1f}{mark}",
            hidden=f"{row['hidden']:.0%}",
            peak=peak,
            collectives=str(row["collectives"]),
            options=row["profile"] or XLAS_OWN,
        )


def _earlier_in_words(rows: Sequence[Row]) -> list[str]:
    dates = sorted(row["date"] for row in rows if _is_earlier(row))
    if not dates:
        return []
    return [f"{EARLIER} As stated by an earlier report, whose programs were compiled{UNTIL}{dates[-1]} UTC.", ""]


def _plain_attention_in_words(rows: Sequence[Row]) -> list[str]:
    """Returns on which clusters plain Flax computes attention otherwise than jshard."""
    clusters: dict[str, None] = {}
    for row in rows:
        is_plain = any(note.startswith(_PLAIN_ATTENTION) for note in row.get("notes", ()))
        if row["system"] == GSPMD and is_plain:
            clusters[row["cluster"]] = None
    if not clusters:
        return []
    return [f"On {', '.join(clusters)}, {_PLAIN_EXPLAINED}", ""]


# ---- differences by kind


_LEAST_SHOWN_S = 0.05e-3  # else it is rounded to zero
_KINDS = ("products", "attention", "elementwise", "update")


def _differences(pairs: Sequence[Pair]) -> list[str]:
    """Returns a table: milliseconds of jshard's step minus those of GSPMD's, by what the device does or waits for."""
    head = ["model", "cluster", "reduced in", "step", *_KINDS, "exposed communication"]
    rows = []
    for pair in pairs:
        # An earlier report does not state the parts of the time.
        is_stated_whole = _is_earlier(pair.ours) or _is_earlier(pair.theirs)
        if pair.is_compared and not is_stated_whole:
            rows.append([pair.model, pair.cluster, pair.reduce_dtype, *_differences_ms(pair)])
    return ["Milliseconds, estimated; negative: jshard takes less.", "", *markdown_table(head, rows, num_words=3)]


def _differences_ms(pair: Pair) -> list[str]:
    ours, theirs = pair.figure("split_s"), pair.figure("split_s", of_theirs=True)
    seconds = [pair.figure("step_s") - pair.figure("step_s", of_theirs=True)]
    for kind in _KINDS:
        seconds.append(ours[kind] - theirs[kind])
    seconds.append(pair.figure("exposed_s") - pair.figure("exposed_s", of_theirs=True))
    return [f"{1e3 * value:+.1f}" for value in seconds]


# ---- what is exposed


def _waits(pairs: Sequence[Pair]) -> list[str]:
    """Returns a table: milliseconds for which each system waits, by kind of collective."""
    rows = []
    for pair in pairs:
        waits = [_waits_of(pair.ours), _waits_of(pair.theirs)]
        if waits != [_NOTHING, _NOTHING]:
            rows.append([pair.model, pair.cluster, pair.reduce_dtype, *waits])
    if not rows:
        return []
    head = ["model", "cluster", "reduced in", "jshard waits for", "GSPMD waits for"]
    return ["## What is exposed", "", "Milliseconds, estimated.", "", *markdown_table(head, rows, num_words=5), ""]


def _waits_of(row: Row | None) -> str:
    """Returns the exposed time of a row by kind, the longest first; an earlier report does not state it."""
    if row is None or not _counts(row) or _is_earlier(row):
        return _NOTHING
    by_kind = sorted(row["exposed_by_kind_s"].items(), key=lambda item: -item[1])
    waits = [f"{kind} {1e3 * seconds:.1f}" for kind, seconds in by_kind if seconds >= _LEAST_SHOWN_S]
    return ", ".join(waits) or "nothing"


# ---- what the report does not have


def _not_compared(pairs: Sequence[Pair]) -> list[str]:
    """Returns what is not compared, and why; and programs of jshard that do not communicate as planned."""
    lines = []
    for pair in pairs:
        reasons = [_reason("jshard", pair.ours), _reason("GSPMD", pair.theirs)]
        if pair.ours is not None and pair.ours.get("as_planned") is False:
            reasons.append(f"jshard's program differs from its plan: {pair.ours['differences'][0]}")
        lines += [f"- {pair.label}: {reason}" for reason in reasons if reason]
    if not lines:
        return ["Every pair is compared, and each of jshard's programs communicates as planned."]
    return ["Not compared, or not as planned:", "", *lines]


def _by_system(labels: Sequence[str]) -> list[str]:
    """Returns labels of programs, those of a model on a cluster by one system on one line."""
    forms: dict[str, list[str]] = {}
    for label in labels:
        name, reduce_dtype, profile = label.rsplit(" ", 2)
        forms.setdefault(name, []).append(f"{reduce_dtype} {profile}")
    return [f"- {name}: {', '.join(forms_of_name)}" for name, forms_of_name in forms.items()]


def _reason(system: str, row: Row | None) -> str:
    """Returns why a row cannot be compared; empty if it can."""
    if row is None:
        return f"no row of {system}"
    if "error" in row:
        return f"{system} did not compile: {row['error']}"
    if not row["fits"]:
        return f"{system} does not fit: {row['peak_bytes'] / 2**30:.1f} GiB"
    return ""


def _dates(rows: Sequence[Row]) -> list[str]:
    """Returns when the programs were compiled, and by what."""
    lines = []
    rows = [row for row in rows if not _is_earlier(row)]
    for system in (JSHARD, GSPMD):
        dates = sorted(row["date"] for row in rows if row["system"] == system)
        if dates:
            lines.append(f"Programs of {system} were compiled from {dates[0]} to {dates[-1]} UTC.")
    texts = dict.fromkeys(_versions_text(row) for row in rows)
    return [*lines, *(f"Compiled with {text}." for text in texts)]


def _versions_text(row: Row) -> str:
    return ", ".join(f"{name} {version}" for name, version in row["versions"].items())
