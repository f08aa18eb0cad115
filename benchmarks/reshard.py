"""A model moved to another mesh in memory, beside a checkpoint that is saved and restored there.

Training holds a model on four devices, generation on four others; the weights are moved as every few steps. Both ways
take turns in one process, after one round in which programs are compiled. The devices are simulated: bytes between them
are copies in memory, and the checkpoint stays in the page cache.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

import jshard as js
from benchmarks.step.jax_model import config_of
from benchmarks.step.sizes import Sizes
from benchmarks.tables import markdown_table
from models import gpt

TITLE = "A move to another mesh in memory, and through a checkpoint"
MEASURES_TIME = True
_SIZES = Sizes(name="wide", vocab_size=8192, block_size=256, n_layer=12, n_head=8, d_model=768, d_ff=3072, batch=1)
_QUICK = dataclasses.replace(_SIZES, vocab_size=64, d_model=64, d_ff=256, n_layer=2)
_ROUNDS = 5


def run(*, quick: bool) -> dict[str, Any]:
    """Measures both ways in turns."""
    jax.config.update("jax_num_cpu_devices", 8)
    config = config_of(_QUICK if quick else _SIZES, scan=False)
    devices = jax.devices()
    trained_on = js.mesh(fsdp=4, devices=devices[:4])
    served_on = js.mesh(replica=2, fsdp=2, devices=devices[4:])

    def serve(model: nnx.Module) -> None:
        gpt.annotate(model, served_on)

    model = js.shard_init(lambda: gpt.build(config, nnx.Rngs(0)), lambda model: gpt.annotate(model, trained_on))
    like = js.abstract_init(lambda: gpt.build(config, nnx.Rngs(0)), serve)
    seconds: dict[str, list[float]] = {"memory": [], "checkpoint": []}
    for number in range(1 + (1 if quick else _ROUNDS)):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            jax.block_until_ready(nnx.state(js.reshard(model, serve)))
            moved = time.perf_counter()
            js.checkpoint.save(Path(folder) / "model", {"model": model})
            restored = js.checkpoint.restore(Path(folder) / "model", like={"model": like})
            jax.block_until_ready(nnx.state(restored["model"]))
            end = time.perf_counter()
        if number:  # the first one compiles
            seconds["memory"].append(moved - begin)
            seconds["checkpoint"].append(end - moved)
    plan = js.reshard_plan(model, serve)
    return {
        "parameters": js.plan(model).num_parameters,
        "moved_bytes": plan.moved_bytes,
        "least_bytes": plan.least_bytes,
        "seconds": seconds,
    }


def table(result: Mapping[str, Any]) -> list[str]:
    """Returns the report's lines."""
    memory = statistics.median(result["seconds"]["memory"])
    checkpoint = statistics.median(result["seconds"]["checkpoint"])
    ratio = statistics.median(
        file / move for move, file in zip(result["seconds"]["memory"], result["seconds"]["checkpoint"], strict=True)
    )
    rows = [
        ["js.reshard", f"{memory:.2f}", "1.0"],
        ["js.checkpoint.save, then restore", f"{checkpoint:.2f}", f"{ratio:.1f}"],
    ]
    what = (
        f"{result['parameters'] / 1e6:.0f} million parameters in float32, from fsdp=4 to replica=2, fsdp=2 on four"
        f" other devices: {result['moved_bytes'] / 1e6:.0f} MB leave their device, of at least"
        f" {result['least_bytes'] / 1e6:.0f} MB."
    )
    return [what, "", *markdown_table(["way", "seconds (median)", "beside js.reshard (median of ratios)"], rows)]
