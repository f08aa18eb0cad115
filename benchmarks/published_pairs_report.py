"""The report of published pairs: how many the plan orders as they were measured, and which configurations fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.ranking import (
    APART,
    Configuration,
    Judge,
    Knobs,
    Pair,
    apart,
    by_plan,
    by_rule,
    fits,
    is_conflicting,
    pairs_of,
    score,
    separated,
    worst,
)
from benchmarks.tables import markdown_table

_SHOWN_WORST = 20


def table(result: Mapping[str, Any]) -> list[str]:
    """The counts, those of each source, what fits, and the pairs that are ordered most wrongly."""
    configurations = [_configuration(entry) for entry in result["configurations"]]
    pairs = pairs_of(configurations)
    sources = dict.fromkeys(entry["source"] for entry in result["configurations"])
    return [
        *_how(result),
        *_counts(pairs),
        *_by_source(pairs),
        *_what_fits(configurations),
        *_worst(pairs),
        *_refused(result["refused"]),
        "Sources:",
        "",
        *(f"- {source}" for source in sources),
    ]


def _configuration(entry: Mapping[str, Any]) -> Configuration:
    return Configuration(
        id=entry["id"],
        group=entry["group"],
        knobs=Knobs(**entry["knobs"]),
        published=entry.get("tokens_per_s_per_device"),
        planned=entry["planned_tokens_per_s_per_device"],
        planned_to_fit=entry["fits"],
    )


def _how(result: Mapping[str, Any]) -> list[str]:
    words = "estimated before compiling" if result["by"] == "estimate" else "compiled for its cluster, and estimated"
    missing = dict.fromkeys(text for entry in result["configurations"] for text in entry["not_in_the_estimate"])
    lines = [f"Planned, and nothing was run: each configuration is {words}, and pairs are ordered by tokens a second"]
    lines[0] += " and device. Pairs that differ by a tenth or less are apart. Of ties, half count as ordered."
    if missing:
        lines += ["", f"Not in the estimate: {'; '.join(missing)}."]
    return [*lines, ""]


def _counts(pairs: Sequence[Pair]) -> list[str]:
    far = apart(pairs)
    conflicting = [pair for pair in far if is_conflicting(pair)]
    agreeing = [pair for pair in far if not is_conflicting(pair)]
    near = [pair for pair in pairs if pair.gap <= APART]
    kinds = {
        "**more than 10 % apart**": far,
        "of these, knobs pull against each other": conflicting,
        "of these, knobs agree or are equal": agreeing,
        "at most 10 % apart": near,
    }
    rows = [[kind, str(len(them)), _share(them, by_plan), _share(them, by_rule)] for kind, them in kinds.items()]
    return [*markdown_table(["pairs", "number", "ordered by the plan", "by the rule of thumb"], rows), ""]


def _share(pairs: Sequence[Pair], judge: Judge) -> str:
    result = score(pairs, judge)
    if not result.total:
        return "-"
    ties = f", {result.tied} tied" if result.tied else ""
    return f"{result.share:.1%} ({result.wrong} wrong{ties})"


def _by_source(pairs: Sequence[Pair]) -> list[str]:
    far = apart(pairs)
    rows = []
    shares: dict[Judge, list[float]] = {by_plan: [], by_rule: []}
    for source in dict.fromkeys(pair.faster.source for pair in far):
        mine = [pair for pair in far if pair.faster.source == source]
        conflicting = [pair for pair in mine if is_conflicting(pair)]
        cells = [str(len(mine)), _share(mine, by_plan), _share(mine, by_rule)]
        cells += [str(len(conflicting)), _share(conflicting, by_plan), _share(conflicting, by_rule)]
        rows.append([source, *cells])
        for judge, each in shares.items():
            each.append(score(mine, judge).share)
    means = {judge: math.fsum(each) / len(each) for judge, each in shares.items() if each}
    head = ["source", "pairs", "plan", "rule", "conflicting", "plan", "rule"]
    lines = ["Of the pairs more than 10 % apart, by source:", "", *markdown_table(head, rows), ""]
    if means:
        words = f"Each source counted once: the plan {means[by_plan]:.1%}, the rule {means[by_rule]:.1%}."
        lines += [words, ""]
    return lines


def _what_fits(configurations: Sequence[Configuration]) -> list[str]:
    counts = fits(configurations)
    total, right = separated(configurations)
    lines = [
        f"{counts.ran} configurations ran, of which {counts.ran_as_planned} are planned to fit."
        f" {counts.out_of_memory} ran out of memory, of which {counts.out_of_memory_as_planned} are planned not to fit."
    ]
    if total:
        lines[0] += (
            f" Together {counts.share:.1%} are planned as they were. Of {total} pairs of which one ran out of memory,"
            f" {right} are separated ({right / total:.1%})."
        )
    return [*lines, ""]


def _worst(pairs: Sequence[Pair]) -> list[str]:
    rows = [
        [pair.faster.id, pair.slower.id, f"{1 + pair.gap:.2f}", f"{1 + pair.planned_gap:.2f}"]
        for pair in worst(apart(pairs), _SHOWN_WORST)
    ]
    if not rows:
        return []
    head = ["faster, as published", "slower", "published ratio", "planned ratio"]
    return ["Ordered most wrongly:", "", *markdown_table(head, rows, num_words=2), ""]


def _refused(refused: Mapping[str, str]) -> Iterator[str]:
    if refused:
        yield "Not planned:"
        yield ""
        yield from (f"- {name}: {why}" for name, why in refused.items())
        yield ""
