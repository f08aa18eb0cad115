"""How early units are gathered: memory and time of a step under each budget, as by the FSDP paper's rate limiter.

Compiled for H100s, for one deep model as a loop and one as consecutive layers. Nothing is run, no time is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pictures import new_axes, save
from benchmarks.planned import EXPLAINED, MODEL, SMALL, Point, fitting, rows_of, table_of
from jshard.cluster.compile import CompileRequest

TITLE = "Budgets of prefetching"
MEASURES_TIME = False
_BUDGETS = (0, 1, 2, 4, "compiler")
_UNROLLED = ("accumulate=1", "batch_size=256", "model.n_layer=8", "model.d_model=2048", "model.n_head=16")
_MODELS: dict[str, dict[str, Any]] = {
    "175B, a loop": {"recipe": "gpt3_175b", "topology": "h100:64x8", "settings": ("batch_size=512",)},
    "0.5B, layers one by one": {
        "recipe": "gpt2_small",
        "topology": "h100:8x8",
        "settings": (*_UNROLLED, "model.d_ff=8192", "model.vocab_size=50304"),
        "units": {"remat": "full"},
    },
}
_QUICK: dict[str, dict[str, Any]] = {
    "small": {
        "recipe": "gpt2_small",
        "topology": "h100:1x8",
        "settings": (*SMALL, "batch_size=8"),
    }
}


def run(*, quick: bool) -> dict[str, Any]:
    """Compiles every model with every budget."""
    points = [
        Point(
            labels={"model": name, "prefetch": str(budget)},
            request=CompileRequest(
                model=MODEL,
                profile="fastest",
                **given | {"units": given.get("units", {}) | {"prefetch": budget}},
            ),
        )
        for name, given in (_QUICK if quick else _MODELS).items()
        for budget in (_BUDGETS[:2] if quick else _BUDGETS)
    ]
    return {"rows": rows_of(points)}


def table(result: Mapping[str, Any]) -> list[str]:
    """The rows."""
    what = "prefetch: units that are gathered and not yet used; compiler: no bound, as early as the compiler likes."
    return [EXPLAINED, what, "", *table_of(result["rows"])]


def pictures(result: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Time over memory, a line for each model."""
    axes = new_axes(width=7, height=4)
    for name in dict.fromkeys(row["labels"]["model"] for row in fitting(result["rows"])):
        rows = [row for row in fitting(result["rows"]) if row["labels"]["model"] == name]
        least = min(row["stated"]["step_s"] for row in rows), min(row["peak_bytes"] for row in rows)
        x, y = ([row["peak_bytes"] / least[1] for row in rows], [row["stated"]["step_s"] / least[0] for row in rows])
        axes.plot(x, y, marker="o", label=name)
        for row, at in zip(rows, zip(x, y, strict=True), strict=True):
            axes.annotate(f" {row['labels']['prefetch']}", at, fontsize=8)
    axes.set_xlabel("peak memory, over the least")
    axes.set_ylabel("estimated step, over the shortest")
    axes.legend(fontsize=8)
    return [save(axes, folder / f"{stem}.svg")]
