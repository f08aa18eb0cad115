"""Tokens per second of `jshard sample`, with and without the cache of earlier tokens.

The same model, weights and draw: with its method `decode`, which reads one token at a time, and without it, when every
token needs a pass over the whole window. They take turns, and a ratio is computed within each round.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import jshard as js
from benchmarks.tables import markdown_table
from jshard import train
from jshard.recipes.building import create
from jshard.train.sampling import Draw, Sampler

TITLE = "Sampling with and without a cache"
MEASURES_TIME = True

_MODELS = Path(__file__).parents[1] / "models"
_WIDER = {"n_layer": 6, "n_head": 6, "d_model": 384, "d_ff": 1536}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a number of devices, which reads `window` tokens and generates `tokens` after a prompt of 16."""

    name: str
    model: str
    num_devices: int
    window: int
    tokens: int
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rounds: int = 5


FULL = (
    Case(name="gpt, tiny", model="gpt", num_devices=1, window=128, tokens=96),
    Case(name="gpt, tiny", model="gpt", num_devices=8, window=128, tokens=96),
    Case(name="gpt, 11M", model="gpt", num_devices=1, window=512, tokens=96, sizes=_WIDER),
    Case(name="llama, tiny", model="llama", num_devices=1, window=128, tokens=96),
)
QUICK = (Case(name="gpt, tiny", model="gpt", num_devices=2, window=32, tokens=4, rounds=2),)


class Whole(nnx.Module):
    """A model without its `decode`."""

    def __init__(self, model: nnx.Module) -> None:
        self.model = model

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The scores of all tokens."""
        return self.model(tokens)  # pyright: ignore[reportCallIssue]


def run(*, quick: bool) -> dict[str, Any]:
    """Measures the cases; a quick run only shows that it works.

    Returns:
        "rows": a dict per case.
    """
    rows = []
    for case in QUICK if quick else FULL:
        print(f"measuring {case.name}, devices: {case.num_devices}", flush=True)
        rows.append(_measure(case))
        jax.clear_caches()
    return {"rows": rows}


def _measure(case: Case) -> dict[str, Any]:
    model_file = train.load_model_file(_MODELS / f"{case.model}.py")
    _, recipe = model_file.recipe("tiny")
    config = dataclasses.replace(recipe.model, block_size=case.window, **case.sizes)
    recipe = dataclasses.replace(recipe, model=config, sequence_length=case.window)
    mesh = js.mesh(fsdp=-1, devices=jax.devices()[: case.num_devices])
    assert isinstance(mesh, Mesh)
    model, _ = create(model_file, recipe, mesh)
    how = {"window": case.window, "num_ids": 256, "draw": Draw(temperature=0.0)}
    samplers = {"with": Sampler(model, mesh, **how), "without": Sampler(Whole(model), mesh, **how)}
    prompt, took_s = np.arange(16, dtype=np.int32), {name: [] for name in samplers}
    texts = {name: sampler.continued(prompt, case.tokens) for name, sampler in samplers.items()}  # and compiles
    for _ in range(case.rounds):
        for name, sampler in samplers.items():
            begin_s = time.perf_counter()
            sampler.continued(prompt, case.tokens)
            took_s[name].append(time.perf_counter() - begin_s)
    ratios = [slow / quick for quick, slow in zip(took_s["with"], took_s["without"], strict=True)]
    return {
        "name": case.name,
        "devices": case.num_devices,
        "window": case.window,
        "tokens": case.tokens,
        "same_text": bool((texts["with"] == texts["without"]).all()),
        **{f"{name}_tokens_per_s": case.tokens / statistics.median(seconds) for name, seconds in took_s.items()},
        "ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
    }


def table(result: Mapping[str, Any]) -> list[str]:
    """The rows in Markdown."""
    head = ["model, devices", "window", "tokens/s with", "tokens/s without", "with / without", "same text"]
    cells = [
        [
            f"{row['name']}, {row['devices']}",
            str(row["window"]),
            f"{row['with_tokens_per_s']:.0f}",
            f"{row['without_tokens_per_s']:.0f}",
            f"{row['ratio']:.1f}x ({row['lowest_ratio']:.1f} to {row['highest_ratio']:.1f})",
            "yes" if row["same_text"] else "no",
        ]
        for row in result["rows"]
    ]
    said = "Medians of rounds in turn; the prompt has 16 tokens, and the likeliest token is taken."
    return [said, "", *markdown_table(head, cells)]
