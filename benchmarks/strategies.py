"""Strategies over model sizes, as in figure 6 of the FSDP paper (arXiv 2304.11277), compiled for 64 H100.

The paper measures three T5 models; these are three GPTs of their sizes. Nothing is run, no time is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pictures import new_axes, save
from benchmarks.planned import EXPLAINED, MODEL, Point, fitting, rows_of, table_of
from jshard.cluster.compile import CompileRequest
from jshard.cluster.strategies import COMPARED, variants_for
from jshard.cluster.topology import parse_topology

TITLE = "Strategies over model sizes"
MEASURES_TIME = False
_SIZES = {"0.64B": (20, 24, 1536), "2.3B": (28, 20, 2560), "11.3B": (35, 40, 5120)}  # layers, heads, width
_QUICK = {"7M": (2, 4, 128)}
_TOPOLOGY, _EACH = "h100:8x8", 8


def run(*, quick: bool) -> dict[str, Any]:
    """Compiles every strategy at every size."""
    sizes, topology = (_QUICK, "h100:1x8") if quick else (_SIZES, _TOPOLOGY)
    names = ("zero3", "gspmd") if quick else COMPARED
    gpus = parse_topology(topology).num_devices
    points = [
        Point(labels={"model": size, "strategy": variant.name, "mesh": _text(variant.mesh)}, request=variant.of(asked))
        for size, shape in sizes.items()
        for asked in [_asked(shape, gpus, topology)]
        for variant in variants_for(names, asked.mesh, near=8, capacity_bytes=1, held_bytes=lambda mesh: 0)
    ]
    return {"gpus": gpus, "sequences": _EACH, "rows": rows_of(points)}


def _asked(shape: tuple[int, int, int], gpus: int, topology: str) -> CompileRequest:
    layers, heads, width = shape
    changed = {"n_layer": layers, "n_head": heads, "d_model": width, "d_ff": 4 * width}
    settings = (f"batch_size={_EACH * gpus}", *(f"model.{name}={value}" for name, value in changed.items()))
    mesh = {"replica": 1, "fsdp": gpus, "tensor": 1}
    return CompileRequest(
        model=MODEL, recipe="gpt2_xl", settings=settings, mesh=mesh, topology=topology, profile="fastest"
    )


def table(result: Mapping[str, Any]) -> list[str]:
    """The grid."""
    what = (
        f"GPTs with a sequence length of 1024, {result['sequences']} sequences per GPU, bfloat16, layers computed"
        f" again, on {result['gpus']} H100; mesh: replicas x shards. `gspmd` is plain Flax under `jax.jit`, its"
        " parameters sharded as for `zero3`; it reduces gradients in bfloat16, jshard in float32."
    )
    return [EXPLAINED, what, "", *table_of(result["rows"])]


def pictures(result: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """The rate per GPU of each strategy, by size."""
    axes = new_axes(width=7, height=4)
    rows = fitting(result["rows"])
    sizes = list(dict.fromkeys(row["labels"]["model"] for row in rows))
    names = list(dict.fromkeys(row["labels"]["strategy"] for row in rows))
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        of_name = [row for row in rows if row["labels"]["strategy"] == name]
        at = [sizes.index(row["labels"]["model"]) + (place - len(names) / 2 + 0.5) * width for row in of_name]
        axes.bar(at, [row["stated"]["flops_per_s"] / 1e12 for row in of_name], width=0.9 * width, label=name)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_ylabel("estimated TFLOP/s per GPU (the model's)")
    axes.legend(fontsize=8)
    return [save(axes, folder / f"{stem}.svg")]


def _text(mesh: Mapping[str, int]) -> str:
    return f"{mesh['replica']} x {mesh['fsdp']}"
