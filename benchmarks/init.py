"""Seconds and memory to create a sharded model: jshard, Flax's guide, and a whole model that is sharded afterwards.

Each runs in fresh processes, in turns. The devices are simulated in one process, so its memory is that of all of them:
a model that was never whole takes its own size once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pictures import over_depths
from benchmarks.step.sizes import Sizes
from benchmarks.tables import markdown_table

TITLE = "Seconds and memory to create a sharded model"
MEASURES_TIME = True
_ROOT = Path(__file__).parents[1]
_SIZES = Sizes(name="wide", vocab_size=8192, block_size=256, n_layer=1, n_head=8, d_model=768, d_ff=3072, batch=1)
_DEPTHS, _ROUNDS = (4, 12, 24), 3
_QUICK = dataclasses.replace(_SIZES, vocab_size=64, d_model=64, d_ff=256)


def run(*, quick: bool) -> dict[str, Any]:
    """Seconds and bytes of every variant at every depth."""
    sizes, depths, rounds = (_QUICK, (1,), 1) if quick else (_SIZES, _DEPTHS, _ROUNDS)
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in WAYS}
    for round_ in range(rounds):
        for depth in depths:
            print(f"round {round_ + 1}, {depth} layers", flush=True)
            for name in WAYS:
                asked = json.dumps([name, dataclasses.asdict(dataclasses.replace(sizes, n_layer=depth))])
                child = subprocess.run(
                    [sys.executable, "-m", "benchmarks.init", asked],
                    stdout=subprocess.PIPE,
                    check=True,
                    text=True,
                    cwd=_ROOT,
                    env=os.environ | {"JAX_PLATFORMS": "cpu"},
                )
                found[name].setdefault(str(depth), []).append(json.loads(child.stdout.splitlines()[-1]))
    parameters = {str(d): dataclasses.replace(sizes, n_layer=d).num_parameters for d in depths}
    return {"sizes": dataclasses.asdict(sizes), "parameters": parameters, "found": found}


def child(asked: str) -> dict[str, float]:
    """One variant, in this process."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    name, given = json.loads(asked)
    jax.block_until_ready(jax.numpy.ones(8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    jax.block_until_ready(WAYS[name](Sizes(**given)))
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "rss_bytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}


def _jshard(sizes: Sizes) -> Any:
    from flax import nnx

    import jshard as js
    from benchmarks.step.jax_model import config_of
    from models import gpt

    mesh, config = js.mesh(), config_of(sizes, scan=False)
    return nnx.state(js.shard_init(lambda: gpt.build(config, nnx.Rngs(0)), lambda model: gpt.annotate(model, mesh)))


def _flax(sizes: Sizes, *, under_jit: bool) -> Any:
    import jax
    import numpy as np
    from flax import nnx
    from jax.sharding import Mesh

    from benchmarks.step.with_flax import model_shardings, new_model

    shardings = model_shardings(sizes, Mesh(np.array(jax.devices()), ("data",)))
    create = lambda: nnx.state(new_model(sizes, 8, scan=False))
    return jax.jit(create, out_shardings=shardings)() if under_jit else jax.device_put(create(), shardings)


WAYS: dict[str, Callable[[Sizes], Any]] = {
    "js.shard_init": _jshard,
    "jit with out_shardings (Flax's guide)": lambda sizes: _flax(sizes, under_jit=True),
    "whole, then cut": lambda sizes: _flax(sizes, under_jit=False),
}


def table(result: Mapping[str, Any]) -> list[str]:
    """Seconds, and memory relative to the size of the model."""
    depths = list(result["parameters"])
    text = [
        "GPTs of one width in float32 on 8 simulated devices; seconds from nothing to arrays, tracing and compiling"
        " included; and how far the peak of the process rose, by the bytes of the model. Medians of fresh processes.",
        "",
    ]
    head = ["", *(f"{d} layers, {result['parameters'][d] / 1e6:.0f}M" for d in depths)]
    rows = [
        [name, *(f"{_seconds(of[d]):.1f} s, {_copies(of[d], result['parameters'][d]):.1f}x" for d in depths)]
        for name, of in result["found"].items()
    ]
    return [*text, *markdown_table(head, rows)]


def pictures(result: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Seconds over the depth."""
    seconds = {
        name: {depth: _seconds(rounds) for depth, rounds in by_depth.items()}
        for name, by_depth in result["found"].items()
    }
    return [over_depths(seconds, "seconds", folder / f"{stem}.svg")]


def _seconds(rounds: list[Mapping[str, float]]) -> float:
    return statistics.median(one["seconds"] for one in rounds)


def _copies(rounds: list[Mapping[str, float]], num_parameters: int) -> float:
    """The memory in multiples of the model's float32 parameters."""
    return statistics.median(one["rss_bytes"] for one in rounds) / (4 * num_parameters)


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1])))
