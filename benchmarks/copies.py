"""The cost of copies in memory, beside no copies and checkpoints on disk that are saved as often.

One process on simulated devices trains with AdamW, the state donated to each step; every fifth step is copied. The
keeper is a separate process, like a supervisor. The three variants take turns in each round with one state and program.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jshard as js
from benchmarks.tables import markdown_table
from jshard.checkpoint import Checkpointer
from jshard.train.memory_copies import MemoryCopies

TITLE = "Copies in memory"
MEASURES_TIME = True

_KEEPER = """
import json, sys
from jshard.launch.keeper import Keeper
with Keeper() as keeper:
    print(json.dumps(keeper.environ), flush=True)
    sys.stdin.read()
"""
_EVERY, _STEPS, _ROUNDS = 5, 20, 3
_COLUMNS = ("step_ms", "blocked_ms", "complete_ms", "restore_ms")


def run(*, quick: bool) -> dict[str, Any]:
    """Milliseconds by variant and round."""
    width, layers = (64, 2) if quick else (1024, 24)
    jax.config.update("jax_num_cpu_devices", 4)
    with subprocess.Popen(
        [sys.executable, "-c", _KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as keeper:
        assert keeper.stdout is not None and keeper.stdin is not None
        os.environ.update(json.loads(keeper.stdout.readline()))
        try:
            found = _rounds(_Training(width, layers), 1 if quick else _ROUNDS)
        finally:
            keeper.stdin.close()
    return found


def table(result: dict[str, Any]) -> list[str]:
    """Medians of the rounds, with the range."""
    lines = [
        f"{result['state_bytes'] / 1e6:.0f} MB of state; a copy every {_EVERY} of {_STEPS} steps; median of "
        f"{len(result['ways']['none'])} rounds (least to most), milliseconds. CPU.",
        "`step`: the loop over its steps; `blocked`: training waits for a copy; `complete`: what is left after it.",
        "",
    ]
    rows = [
        [way, *(_cell([each.get(column) for each in rounds]) for column in _COLUMNS)]
        for way, rounds in result["ways"].items()
    ]
    return [*lines, *markdown_table(["", *(c.removesuffix("_ms") for c in _COLUMNS)], rows, num_words=1)]


def _cell(values: list[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    return f"{statistics.median(numbers):.0f} ({min(numbers):.0f} to {max(numbers):.0f})" if numbers else "-"


class _Training:
    """A state, and a step that reuses its memory."""

    def __init__(self, width: int, layers: int) -> None:
        sharding = NamedSharding(js.mesh(fsdp=4), PartitionSpec("fsdp"))
        keys = jax.random.split(jax.random.key(0), layers)
        draw = lambda key: jax.device_put(jax.random.normal(key, (width, width)) / width**0.5, sharding)
        params = {str(number): draw(key) for number, key in enumerate(keys)}
        tx = optax.adamw(1e-4)
        self.state = {"params": params, "optimizer": jax.jit(tx.init)(params)}
        self._batch = jax.device_put(jnp.ones((64, width)), sharding)

        def loss(params: Any, x: jax.Array) -> jax.Array:
            for kernel in params.values():
                x = jnp.tanh(x @ kernel)
            return (x**2).mean()

        def step(state: Any, x: jax.Array) -> Any:
            grads = jax.grad(loss)(state["params"], x)
            updates, optimizer = tx.update(grads, state["optimizer"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}

        self._step = jax.jit(step, donate_argnums=0)

    def abstract(self) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)

    def train(self, copy: Callable[[Any, int], object] | None) -> tuple[float, float]:
        """Milliseconds of a step, and of its waiting for a copy."""
        blocked_s, start_s = 0.0, time.perf_counter()
        for number in range(1, _STEPS + 1):
            self.state = jax.block_until_ready(self._step(self.state, self._batch))
            if copy is not None and number % _EVERY == 0:
                began_s = time.perf_counter()
                copy(self.state, number)
                blocked_s += time.perf_counter() - began_s
        return 1e3 * (time.perf_counter() - start_s) / _STEPS, 1e3 * blocked_s * _EVERY / _STEPS


def _rounds(training: _Training, rounds: int) -> dict[str, Any]:
    training.train(None)  # compiles
    ways: dict[str, list[dict[str, float]]] = {"none": [], "copies in memory": [], "checkpoints": []}
    for _ in range(rounds):
        ways["none"].append({"step_ms": training.train(None)[0]})
        copies = MemoryCopies(_EVERY, training.abstract(), print)
        copy = lambda state, number, copies=copies: copies.keep(state, number, before=lambda: None)
        ways["copies in memory"].append(_timed(training, copy, copies.wait, lambda: _restored(training)))
        with tempfile.TemporaryDirectory(dir=Path.home(), prefix=".jshard-benchmark-") as folder:
            series = Checkpointer(folder, keep=1)
            save = lambda state, number, series=series: series.save_async(number, state)
            restore = lambda series=series: series.restore(training.abstract())
            ways["checkpoints"].append(_timed(training, save, series.wait, restore))
    return {"state_bytes": sum(x.nbytes for x in jax.tree.leaves(training.state)), "ways": ways}


def _restored(training: _Training) -> Any:
    return MemoryCopies(_EVERY, training.abstract(), print).restore(newer_than=None)


def _timed(
    training: _Training, copy: Callable[[Any, int], object], wait: Callable[[], object], restore: Callable[[], Any]
) -> dict[str, float]:
    step_ms, blocked_ms = training.train(copy)
    began_s = time.perf_counter()
    wait()
    complete_s = time.perf_counter()
    assert jax.block_until_ready(restore()) is not None
    restored_s = time.perf_counter()
    return {
        "step_ms": step_ms,
        "blocked_ms": blocked_ms,
        "complete_ms": 1e3 * (complete_s - began_s),
        "restore_ms": 1e3 * (restored_s - complete_s),
    }
