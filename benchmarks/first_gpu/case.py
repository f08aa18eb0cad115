"""The day a GPU is there: kernels, a step, the plan, a run that is resumed, and overlap, on one GPU of any kind.

Each part has a process of its own and a share of the minutes. The report is written after each of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence

import jax

from benchmarks.first_gpu.parts import CARD, PARTS
from benchmarks.first_gpu.session import DONE, PartResult, Session
from benchmarks.first_gpu.worker import Figures, Setup
from benchmarks.tables import markdown_table
from jshard._types import Json

TITLE = "The day a GPU is there"
MEASURES_TIME = True

_MINUTES = 10.0
_BATCH = 8


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this case."""
    others = [name for name in PARTS if name != CARD]
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="for all parts (%(default)g)")
    parser.add_argument(
        "--device", choices=("gpu", "cpu"), help="cpu: a dry run with tiny sizes; default: gpu, with --quick cpu"
    )
    parser.add_argument("--parts", metavar="NAMES", help=f"of: {','.join(others)}; all by default")
    parser.add_argument(
        "--batch", type=int, default=_BATCH, help="sequences of 1024 tokens in a step (%(default)s); fewer need less"
    )


def run(*, quick: bool, minutes: float, device: str | None, parts: str | None, batch: int) -> Iterator[dict[str, Json]]:
    """Yields the figures after each part; see `arguments`."""
    names = [CARD, *_chosen(parts)]
    # This process must not take the memory of the GPU; its report counts devices.
    jax.config.update("jax_platforms", "cpu")
    device = device or ("cpu" if quick else "gpu")
    if not minutes > 0 or batch < 1:
        sys.exit(f"first_gpu: --minutes {minutes:g} must be more than 0, and --batch {batch} 1 or more")
    # Sizes for a GPU would take a CPU hours.
    setup = Setup(device=device, quick=quick or device == "cpu", batch=batch, seconds=0.0)
    session = Session(names=names, seconds=60 * minutes, setup=setup)
    for results in session.run():
        card = results[CARD]
        if device == "gpu" and card.figures.get("platform", "gpu") != "gpu":
            sys.exit(f"No GPU is here: JAX sees {card.figures['kind']}. A dry run on it: first_gpu --device cpu")
        yield _result(setup, minutes, results)


def _chosen(parts: str | None) -> list[str]:
    """Returns the names of the parts, in their order."""
    others = [name for name in PARTS if name != CARD]
    if parts is None:
        return others
    requested = [name.strip() for name in parts.split(",")]
    unknown = [name for name in requested if name not in PARTS]
    if unknown:
        sys.exit(f"no parts: {', '.join(unknown)}; there are: {', '.join(others)}")
    return [name for name in others if name in requested]


def _result(setup: Setup, minutes: float, results: Mapping[str, PartResult]) -> dict[str, Json]:
    card = results[CARD].figures
    return {
        "quick": setup.quick,
        "device": setup.device,
        "devices": [card.get("kind", "an unknown card")],
        "minutes": minutes,
        "batch": setup.batch,
        "worker_versions": card.get("versions", {}),
        "parts": {name: dataclasses.asdict(result) for name, result in results.items()},
    }


# ---- the report


def table(result: Figures) -> list[str]:
    """Returns the lines of the report: how the parts went, and a section for each of them."""
    parts = {name: PartResult(**part) for name, part in result["parts"].items()}
    lines = [*_words(result), "", *_summary(parts)]
    for name, part in parts.items():
        if part.figures or part.last_lines:
            lines += ["", f"## {PARTS[name].title}", "", *_section(name, part)]
    return lines


def _words(result: Figures) -> list[str]:
    words = [
        "One device. Every figure is labelled: *measured* on the device, *compiled* by its compiler, or *estimated*.",
        f"{result['minutes']:g} minutes were there for all parts, and what a part did not use went to the later ones.",
    ]
    if result["device"] == "cpu":
        words.append("**A dry run: on the CPU, with tiny sizes. No figure says anything about a GPU.**")
    return words


def _summary(parts: Mapping[str, PartResult]) -> list[str]:
    rows = []
    for name, part in parts.items():
        left_out = str(len(part.figures.get("left_out", {})) or "")
        rows.append([name, part.outcome, left_out, f"{part.share_s / 60:.1f}", f"{part.used_s / 60:.1f}"])
    return markdown_table(["part", "outcome", "left out", "share, min", "used, min"], rows, num_words=2)


def _section(name: str, part: PartResult) -> list[str]:
    lines = []
    if part.outcome != DONE:
        lines += [f"**Not complete: {part.outcome}.** The last lines of its output:", "", *_block(part.last_lines), ""]
    if part.figures:
        lines += PARTS[name].load().table(part.figures)
    for what, why in part.figures.get("left_out", {}).items():
        lines += ["", f"Left out: {what}: {why}"]
    return lines


def _block(text: Sequence[str]) -> list[str]:
    return ["```", *text, "```"]
