"""The options that say for which mesh a checkpoint is cut, and what a model's leaves are called elsewhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jshard as js
from jshard._errors import ShardingError
from jshard._optimizer import abstract_optimizer
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint.formats.names import Names
from jshard.cli._devices import simulate_devices
from jshard.cli._mesh_option import num_devices, parse_mesh
from jshard.train.building import abstract_model
from jshard.train.model_file import ModelFile, load_model_file
from jshard.train.settings.overrides import override
from jshard.train.settings.recipe import Recipe
from jshard.train.state import optimizer_of


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
