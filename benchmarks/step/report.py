"""The tables and pictures of the step benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pictures import new_axes, save
from benchmarks.step import flops
from benchmarks.step.sizes import Sizes
from benchmarks.step.summary import (
    Spread,
    difference,
    grad_norms,
    host_s,
    losses,
    overhead,
    peak_bytes,
    ratios,
    rss_bytes,
    step_s,
)
from benchmarks.tables import markdown_table

_OURS = "jshard"
_RAW = {"jshard chain": "raw Flax", "jshard scan": "raw Flax"}
_OVERHEAD_GOAL, _RAW_GOAL, _HOST_GOAL_MS = 1.10, 1.10, 1.0


def table(result: Mapping[str, Any]) -> list[str]:
    """The tables in Markdown."""
    sizes, candidates = Sizes(**result["sizes"]), result["candidates"]
    lines = [_what(result, sizes), "", *_steps(result, sizes)]
    lines += ["", *(f"Left out: {name}: {why}" for name, why in result["left_out"].items())]
    return [*lines, *_goals(candidates), "", *_losses(candidates)]


def _what(result: Mapping[str, Any], sizes: Sizes) -> str:
    lived = "alive side by side" if result["alive"] else "started again for each turn"
    return (
        f"A GPT of {sizes.num_parameters / 1e6:.1f}M parameters ({sizes.n_layer} layers, d={sizes.d_model}, vocabulary"
        f" {sizes.vocab_size}, {sizes.dtype}, remat {sizes.remat}), batch {sizes.batch} x {sizes.block_size} per"
        f" process, AdamW, gradient norm. {result['processes']} processes on {result['device']}"
        f"{', one thread each, under SCHED_BATCH' if result['device'] == 'cpu' else ''}. {result['rounds']} rounds in"
        f" which every candidate has its turn of {result['steps']} steps, in another order; candidates are {lived}, and"
        " one of them computes at a time. Medians of rounds with their range."
    )


def _steps(result: Mapping[str, Any], sizes: Sizes) -> list[str]:
    peak = result["peak_flops_per_s"]
    head = ["candidate", "step, ms", "sharded / unsharded", "tokens/s", "host, ms"]
    head += ["TFLOP/s per GPU", "of peak", "MFU"] if peak else []
    head += ["peak, MB", "compiled, MB", "collectives in the program", "until ready, s"]
    rows = [_cells(result, sizes, name) for name in result["candidates"]]
    kinds = "of a process" if result["device"] == "cpu" else "of device memory, as the framework counts it"
    notes = [
        f"`peak` is {kinds}, while it trains; `compiled` what XLA lays out for state, batch and temporaries.",
        "`host` is CPU time of the thread that starts a step, the quickest of a turn; an eager step computes in it.",
        "`sharded / unsharded`: over the same framework's unsharded step with the same batch per process, by rounds.",
    ]
    return [*markdown_table(head, rows), "", *notes, *([flops.FORMULA] if peak else [])]


def _cells(result: Mapping[str, Any], sizes: Sizes, name: str) -> list[str]:
    row, peak = result["candidates"][name], result["peak_flops_per_s"]
    facts, times, compared = row["facts"], Spread.of(step_s(row)), overhead(result["candidates"], name)
    cells = [name, times.text(".1f", 1e3), compared.text(".2f") if compared else "1"]
    cells += [f"{result['processes'] * sizes.tokens / times.median:,.0f}", f"{1e3 * host_s(row):.2f}"]
    cells += _utilisation(sizes, times.median, peak) if peak else []
    compiled = facts["compiled_bytes"]
    cells += [f"{(peak_bytes(row) or rss_bytes(row)) / 1e6:,.0f}", f"{compiled / 1e6:,.0f}" if compiled else ""]
    collectives = ", ".join(f"{count} {kind}" for kind, count in sorted(facts["collectives"].items()))
    return [*cells, collectives, f"{facts['ready_s']:.0f}"]


def _utilisation(sizes: Sizes, seconds: float, peak: float) -> list[str]:
    done, model = flops.done_flops(sizes) / seconds, flops.model_flops(sizes) / seconds
    return [f"{done / 1e12:.1f}", f"{done / peak:.1%}", f"{model / peak:.1%}"]


def _goals(candidates: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, raw in _RAW.items():
        if name not in candidates:
            continue
        compared = overhead(candidates, name)
        if compared:
            rows.append([f"{name}: sharded / unsharded <= {_OVERHEAD_GOAL:.2f}", compared.text(".2f")])
        if raw in candidates:
            over = ratios(candidates[raw], candidates[name])
            rows.append([f"{raw}'s step / {name}'s >= {_RAW_GOAL:.1f}", over.text(".2f")])
        rows.append([f"{name}: host <= {_HOST_GOAL_MS:.0f} ms per step", f"{1e3 * host_s(candidates[name]):.2f}"])
    return ["", *markdown_table(["goal", "reached"], rows, num_words=2)] if rows else []


def _losses(candidates: Mapping[str, Any]) -> list[str]:
    lines = []
    for sharded, what in ((True, "Sharded, the global batch"), (False, "Unsharded, the mean over processes")):
        rows = {name: row for name, row in candidates.items() if row["sharded"] == sharded}
        if not rows:
            continue
        apart = difference(candidates, sharded=sharded)
        described = (
            "" if apart is None else f": at most {apart:.1e} apart in {len(losses(next(iter(rows.values()))))} steps"
        )
        cells = [
            [name, *(f"{losses(row)[index]:.6f}" for index in (0, 1, -1)), f"{grad_norms(row)[-1]:.5f}"]
            for name, row in rows.items()
        ]
        head = ["candidate", "first", "second", "last", "last gradient norm"]
        lines += [f"Losses. {what}{described}.", "", *markdown_table(head, cells), ""]
    return lines[:-1]


def pictures(result: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Steps and overheads as bars with their range, and the losses."""
    candidates = result["candidates"]
    bars = {name: Spread.of([1e3 * time for time in step_s(row)]) for name, row in candidates.items()}
    over = {name: found for name in candidates if (found := overhead(candidates, name))}
    made = [_bars(bars, "ms of a step", folder / f"{stem}_steps.svg")]
    if over:
        made.append(_bars(over, "sharded step / unsharded step of the same framework", folder / f"{stem}_overhead.svg"))
    axes = new_axes(width=7, height=4)
    for name, row in candidates.items():
        if row["sharded"]:
            axes.plot(losses(row), label=name, linewidth=1.2, linestyle="-" if name.startswith(_OURS) else "--")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(fontsize=7)
    return [*made, save(axes, folder / f"{stem}_losses.svg")]


def _bars(spreads: Mapping[str, Spread], label: str, path: Path) -> Path:
    axes = new_axes(width=7, height=0.6 + 0.35 * len(spreads))
    for place, (name, spread) in enumerate(spreads.items()):
        color = "#2f9e6e" if name.startswith(_OURS) else "#8a97a6"
        error = [[spread.median - spread.least], [spread.most - spread.median]]
        axes.barh(place, spread.median, xerr=error, color=color, capsize=2)
        axes.annotate(f" {spread.median:.3g}", (spread.most, place), va="center", fontsize=7)
    axes.set_yticks(range(len(spreads)), list(spreads))
    axes.invert_yaxis()
    axes.set_xlabel(label)
    return save(axes, path)
