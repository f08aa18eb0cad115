"""Seconds to trace and to compile a step, by depth: jshard's chain of units and its loop, beside plain Flax."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import jshard as js
from benchmarks.pictures import over_depths
from benchmarks.step.jax_model import adamw, config_of, tokens_like
from benchmarks.step.sizes import Sizes
from benchmarks.step.with_flax import FlaxStep
from benchmarks.tables import markdown_table
from jshard.api.optimizer import abstract_optimizer
from jshard.plans.mesh import batch_sharding
from jshard.recipes.step import lower_step
from models import gpt

TITLE = "Seconds to trace and to compile a step"
MEASURES_TIME = True
_SIZES = Sizes(name="narrow", vocab_size=256, block_size=64, n_layer=1, n_head=4, d_model=128, d_ff=512, batch=1)
_DEPTHS, _ROUNDS = (2, 4, 8, 16, 32), 3
_QUICK_DEPTHS, _QUICK_ROUNDS = (1, 2), 1


def run(*, quick: bool) -> dict[str, Any]:
    """Seconds of every variant at every depth, in turns."""
    depths, rounds = (_QUICK_DEPTHS, _QUICK_ROUNDS) if quick else (_DEPTHS, _ROUNDS)
    for lower in WAYS.values():  # what Python and JAX import and prepare once
        lower(_SIZES).compile()
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in WAYS}
    for round_ in range(rounds):
        for depth in depths:
            print(f"round {round_ + 1}, {depth} layers", flush=True)
            for name, lower in WAYS.items():
                found[name].setdefault(str(depth), []).append(_times(lower, dataclasses.replace(_SIZES, n_layer=depth)))
    return {"sizes": dataclasses.asdict(_SIZES), "devices_in_mesh": jax.device_count(), "seconds": found}


def _times(lower: Callable[[Sizes], jax.stages.Lowered], sizes: Sizes) -> dict[str, float]:
    jax.clear_caches()
    begin = time.perf_counter()
    lowered = lower(sizes)
    traced = time.perf_counter()
    lowered.compile()
    return {"trace_s": traced - begin, "compile_s": time.perf_counter() - traced}


def _jshard(sizes: Sizes, *, scan: bool) -> jax.stages.Lowered:
    mesh, config = js.mesh(), config_of(sizes, scan=scan)
    model = js.abstract_init(lambda: gpt.build(config, nnx.Rngs(0)), lambda model: gpt.annotate(model, mesh))
    optimizer = abstract_optimizer(model, adamw(sizes))
    return lower_step(gpt.loss_fn, model, optimizer, tokens_like(sizes, batch_sharding(mesh)))


def _flax(sizes: Sizes, *, scan: bool) -> jax.stages.Lowered:
    step = FlaxStep.of(sizes, Mesh(np.array(jax.devices()), ("data",)), scan=scan)
    return step.lower(tokens_like(sizes, step.rows))


WAYS: dict[str, Callable[[Sizes], jax.stages.Lowered]] = {
    "jshard chain": lambda sizes: _jshard(sizes, scan=False),
    "jshard scan": lambda sizes: _jshard(sizes, scan=True),
    "raw Flax": lambda sizes: _flax(sizes, scan=False),
    "raw Flax scan": lambda sizes: _flax(sizes, scan=True),
}


def table(result: Mapping[str, Any]) -> list[str]:
    """Seconds to trace + to compile."""
    depths = list(next(iter(result["seconds"].values())))
    text = [
        f"A narrow GPT on {result['devices_in_mesh']} simulated devices, without arrays: seconds to trace and lower +"
        " seconds to compile, medians of rounds in turn. jax's caches are emptied before each.",
        "",
    ]
    rows = [
        [name, *(f"{_median(of[d], 'trace_s'):.1f} + {_median(of[d], 'compile_s'):.1f}" for d in depths)]
        for name, of in result["seconds"].items()
    ]
    return [*text, *markdown_table(["", *(f"{depth} layers" for depth in depths)], rows)]


def pictures(result: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Their sum over the depth."""
    seconds = {
        name: {depth: _median(rounds, "trace_s") + _median(rounds, "compile_s") for depth, rounds in by_depth.items()}
        for name, by_depth in result["seconds"].items()
    }
    return [over_depths(seconds, "seconds to trace and to compile", folder / f"{stem}.svg")]


def _median(rounds: list[Mapping[str, float]], name: str) -> float:
    return statistics.median(one[name] for one in rounds)
