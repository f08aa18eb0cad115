"""What the commands of `jshard ckpt` share: progress, sizes and times as text, and the options for meshes and names."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

import jshard as js
from jshard.api.init import abstract_optimizer
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint.formats.source import Names
from jshard.cli._arguments import num_devices, parse_mesh
from jshard.cli._devices import simulate_devices
from jshard.errors import ShardingError
from jshard.recipes.building import abstract_model
from jshard.recipes.model_file import ModelFile, load_model_file
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe
from jshard.recipes.state import optimizer_of


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while the block works, if that is a terminal.

    Args:
        what: is done.
        total_bytes: how many there are.

    Yields:
        A function that takes the number of bytes that are done since, from any thread.
    """
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def moment(seconds: float | None) -> str:
    """Seconds since 1970 in local time."""
    return "" if seconds is None else datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def mesh_text(mesh: Mapping[str, int]) -> str:
    """The axes of a mesh that split something."""
    return ", ".join(f"{axis}={degree}" for axis, degree in mesh.items() if degree > 1) or "1 device" * bool(mesh)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape without the comma of Python's short tuples."""
    return f"({', '.join(map(str, shape))})"


def as_json(value: Any) -> str:
    """A value as JSON; numbers that are none, which JSON lacks, are null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


# The options that say for which mesh a checkpoint is cut, and what a model's leaves are called elsewhere.


@dataclasses.dataclass(frozen=True)
class Model:
    """A recipe of a model file."""

    file: ModelFile
    recipe: Recipe

    @classmethod
    def load(cls, path: Path | None, recipe: str | None, settings: tuple[str, ...]) -> Model | None:
        """What --model, --recipe and --set ask for; None for no model."""
        if path is None:
            if recipe is not None or settings:
                raise ShardingError(
                    "There is a recipe, and no model file.",
                    where="--recipe, --set",
                    why="they are of the file that --model names.",
                    do="--model gpt",
                )
            return None
        file = load_model_file(path)
        return cls(file, override(file.recipe(recipe)[1], settings))

    def names(self) -> Names:
        """What others call its parameters, layer by layer.

        Raises:
            ShardingError: the file does not say.
        """
        names = self.file.names_elsewhere(self.recipe.model)
        if names is None:
            raise ShardingError(
                "The model file does not say what its parameters are called elsewhere.",
                where=str(self.file.path),
                why="it has no function hf_names(config).",
                do="add it: its result maps each path, such as blocks/0/mlp/up/kernel, to a name;\n"
                "jshard init gpt my_gpt.py  # copies a file that has one\n"
                "Without --model all leaves keep their names.",
            )
        return names

    def specs(self, mesh: Mesh) -> Mapping[str, PartitionSpec]:
        """How its leaves, and those of its optimizer, are sharded on a mesh, by path as a run stores them."""
        model = abstract_model(self.file, self.recipe, mesh)
        optimizer = abstract_optimizer(model, optimizer_of(self.recipe, model), wrt=self.file.wrt)
        state = {"model": model, "optimizer": optimizer}
        found: Mapping[Any, Any] = _leaves.abstract(_leaves.flatten(state))
        shardings = {_leaves.text(path): getattr(leaf, "sharding", None) for path, leaf in found.items()}
        padded = {_leaves.text(path) for path in _leaves.logical_shapes(state)}  # cut as it would be without a model
        return {path: x.spec for path, x in shardings.items() if isinstance(x, NamedSharding) and path not in padded}


def cpu_mesh(text: str) -> Mesh:
    """The mesh that --mesh asks for, over simulated devices."""
    sizes = parse_mesh(text)
    simulate_devices(sizes)
    wanted, there = num_devices(sizes), jax.devices("cpu")
    if wanted > len(there):
        raise ShardingError(
            "There are not as many devices as the mesh has.",
            where=f"--mesh {text}",
            why=f"{wanted} are wanted, and {len(there)} are simulated in this process.",
            do=f"JAX_NUM_CPU_DEVICES={wanted} jshard ckpt ...",
        )
    mesh = js.mesh(**sizes, devices=there[:wanted])
    assert isinstance(mesh, Mesh) and math.prod(mesh.shape.values()) == wanted
    return mesh
