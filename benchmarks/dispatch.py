"""Host work per step: the time of Python and the runtime for a step, beside the work of the devices.

Three ways to call the same step on the same arrays, and a whole run:

    nnx_jit          `nnx.jit` with the model and the optimizer donated, as most Flax programs do
    cached_partial   the same function behind `nnx.cached_partial`
    train_step       `jshard.train.TrainStep`
    fit              a whole iteration of `jshard.train.fit`: taking the batch, step, scalars, trackers

and two figures that take the last one apart:

    launch           a compiled program that does almost nothing, on as many arrays: XLA's time to start any program
    around           `fit` with a step that returns at once: jshard's own part, without a launch

All are CPU time of the training thread. They exclude waiting (for a device, a batch, or a core used by another
program) and the work of other threads, which read batches and copy them to the devices.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jshard as js
from benchmarks.iterations import Instant, Iterations, Terminal
from benchmarks.tables import markdown_table
from jshard import train
from jshard.data import Loader, load_text, local_rows
from jshard.recipes.building import create
from jshard.recipes.model_file import dense_flops
from jshard.recipes.step import Mfu, Peak, peak_bytes
from jshard.train.records import Jsonl
from jshard.train.trackers import available, open_trackers

TITLE = "Host work per step"
MEASURES_TIME = True
COLUMNS = ("nnx_jit_ms", "cached_partial_ms", "train_step_ms", "launch_ms", "fit_ms", "around_ms")

_MODEL = Path(__file__).parents[1] / "models" / "gpt.py"  # and the text to learn: a loader does not care
_GPT = train.load_model_file(_MODEL)
_FOREVER = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a number of devices.

    Attributes:
        name: for the table.
        num_devices: simulated if more than one.
        num_layers: layers of a GPT of width 16, with many arrays and little arithmetic; None for the recipe `tiny`,
            with a batch of 8 to save time.
        rounds: every figure is the median of this many means, taken in turns with the other figures.
        num_steps: steps of a round.
    """

    name: str
    num_devices: int
    num_layers: int | None = None
    rounds: int = 7
    num_steps: int = 12


FULL = (
    Case(name="tiny", num_devices=1, num_steps=6),
    Case(name="tiny", num_devices=8, num_steps=6),
    Case(name="12 narrow layers", num_devices=1, num_layers=12),
    Case(name="12 narrow layers", num_devices=8, num_layers=12),
    Case(name="48 narrow layers", num_devices=1, num_layers=48),
)
QUICK = (Case(name="1 narrow layer", num_devices=2, num_layers=1, rounds=3, num_steps=4),)


def run(*, quick: bool) -> dict[str, Any]:
    """Measures the cases; a quick run only shows that it works.

    Returns:
        "rows": a dict per case.
    """
    rows = []
    for case in QUICK if quick else FULL:
        print(f"measuring {case.name}, devices: {case.num_devices}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            rows.append(_measure(case, Path(folder)))
        jax.clear_caches()
    return {"rows": rows}


def table(result: Mapping[str, Any]) -> list[str]:
    """The rows in Markdown."""
    rows, ways = result["rows"], [name.removesuffix("_ms") for name in COLUMNS]
    head = ["model, devices", "arrays", *ways, "nnx_jit / train_step", "late batches"]
    parts = list(rows[0]["around_us"])
    by_part = [[_name(row), *(f"{row['around_us'][part]:.0f}" for part in parts)] for row in rows]
    return [
        "Milliseconds of CPU time of the training thread per step, medians; *arrays* are those of the state.",
        "*Late batches*: batches that the loader gave more than 1 ms after they were asked for.",
        "",
        *markdown_table(head, map(_cells, rows)),
        "",
        *markdown_table(["`around` in microseconds", *parts], by_part),
    ]


def _cells(row: Mapping[str, Any]) -> list[str]:
    figures = [f"{row[name]:.2f}" for name in COLUMNS]
    late = f"{row['late_batches']} of {row['iterations']}"
    return [_name(row), str(row["arrays"]), *figures, f"{row['ratio']:.0f}x", late]


def _measure(case: Case, folder: Path) -> dict[str, Any]:
    """The row of a case."""
    setup = _Setup(case, folder)
    ways = {"train_step_ms": lambda: setup.step(setup.batch), "launch_ms": setup.launch(), **setup.flax()}
    times: dict[str, list[float]] = collections.defaultdict(list)
    with setup.iterations("fit", setup.step) as whole, setup.iterations("around", Instant(setup.mesh)) as around:
        for way in ways.values():
            _cpu_ms(way, 2)  # the first call may be another
        for _ in range(case.rounds):
            for name, way in ways.items():
                times[name].append(_cpu_ms(way, case.num_steps))
            times["fit_ms"].append(whole.round())
            times["around_ms"].append(around.round())
    medians = {name: statistics.median(times[name]) for name in COLUMNS}
    return {
        "model": case.name,
        "devices": case.num_devices,
        "arrays": len(setup.leaves()),
        **medians,
        "ratio": medians["nnx_jit_ms"] / medians["train_step_ms"],
        "late_batches": whole.num_late,
        "iterations": whole.num_iterations,
        "around_us": around.parts_us(),
        "smallest_ms": {name: min(times[name]) for name in COLUMNS},
        "largest_ms": {name: max(times[name]) for name in COLUMNS},
        "case": dataclasses.asdict(case),
        "recipe": dataclasses.asdict(setup.recipe),
    }


class _Setup:
    """A case, ready to be measured."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder = case, folder
        self.recipe = _recipe(case)
        mesh = js.mesh(devices=jax.devices()[: case.num_devices])
        assert isinstance(mesh, Mesh)
        self.mesh = mesh
        self._loader = Loader(
            data=load_text([_MODEL], sequence_length=self.recipe.sequence_length),
            batch_size=self.recipe.batch_size,
            seed=0,
            rows=local_rows(self.recipe.batch_size, mesh),
        )
        self.batch = js.shard_batch(next(self._loader.train(1)), mesh)
        self.step = train.TrainStep(_GPT.loss_fn, *create(_GPT, self.recipe, mesh), self.batch)

    def leaves(self) -> list[jax.Array]:
        """The arrays of the model and the optimizer."""
        return jax.tree.leaves(nnx.state((self.step.model, self.step.optimizer)))

    def flax(self) -> dict[str, Callable[[], Any]]:
        """The step as in most Flax programs, and cached; one compiled program serves both."""

        def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> dict[str, jax.Array]:
            loss, grads = js.value_and_grad(_GPT.loss_fn)(model, batch)
            optimizer.update(model, grads)
            return {"loss": loss, "grad_norm": optax.tree.norm(grads)}

        graphdef, state = nnx.split((self.step.model, self.step.optimizer))
        model, optimizer = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
        jitted = nnx.jit(step, donate_argnums=(0, 1))
        jitted(model, optimizer, self.batch)
        with nnx.set_graph_mode(True), nnx.set_graph_updates(True):
            cached = nnx.cached_partial(jitted, model, optimizer)
        return {
            "nnx_jit_ms": lambda: jitted(model, optimizer, self.batch),
            "cached_partial_ms": lambda: cached(self.batch),
        }

    def launch(self) -> Callable[[], Any]:
        """Takes copies of the arrays and returns them; it only computes two sums of the batch."""
        held = [jnp.copy(leaf) for leaf in self.leaves()]

        def nothing(leaves: list[jax.Array], batch: Any) -> tuple[list[jax.Array], Any]:
            return leaves, {name: value.sum().astype(jnp.float32) for name, value in batch.items()}

        shardings = [leaf.sharding for leaf in held], NamedSharding(self.mesh, PartitionSpec())
        program = jax.jit(nothing, donate_argnums=0, out_shardings=shardings).lower(held, self.batch).compile()

        def launch() -> Any:
            nonlocal held
            held, scalars = program(held, self.batch)
            return scalars

        return launch

    def iterations(self, name: str, step: Any) -> Iterations:
        """A run with all output and records of `jshard train`; with TensorBoard if it is installed."""
        folder = self._folder / name
        folder.mkdir()
        tracker = train.Trackers(
            Jsonl(folder / "metrics.jsonl"),
            train.Progress(_FOREVER, stream=Terminal()),
            optional=open_trackers({"tensorboard"} & set(available()), out=folder, config={}),
        )
        batches, num_steps = self._loader.train(_FOREVER), self._case.num_steps
        return Iterations(step, batches, tracker=tracker, meter=self._meter, num_steps=num_steps)

    def _meter(self) -> train.Meter:
        num_tokens = self.recipe.batch_size * self.recipe.sequence_length
        mfu = Mfu(*dense_flops(num_parameters=1, num_tokens=num_tokens), Peak(1.0, "made up"))
        devices, compiled_bytes = list(self.mesh.devices.flat), self.step.peak_bytes
        return train.Meter(
            tokens_per_step=num_tokens, mfu=mfu, peak_bytes=lambda: peak_bytes(devices, compiled_bytes)[0]
        )


def _recipe(case: Case) -> train.Recipe:
    _, tiny = _GPT.recipe("tiny")
    if case.num_layers is None:
        return dataclasses.replace(tiny, batch_size=8)
    narrow = {"n_layer": case.num_layers, "n_head": 2, "d_model": 16, "d_ff": 32, "block_size": 16}
    model = dataclasses.replace(tiny.model, **narrow)
    return dataclasses.replace(tiny, model=model, sequence_length=16, batch_size=8)


def _cpu_ms(way: Callable[[], Any], num_steps: int) -> float:
    """Mean of the calls. One step runs at a time, as in `fit`."""
    took_s = 0.0
    for _ in range(num_steps):
        start_s = time.thread_time()
        scalars = way()
        took_s += time.thread_time() - start_s
        jax.block_until_ready(scalars)
    return took_s / num_steps * 1e3


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['devices']}"
