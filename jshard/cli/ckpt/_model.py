"""The model of a checkpoint that is rewritten: its names in other libraries, and how its leaves are sharded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jshard as js
from jshard._text import counted, human_bytes
from jshard.checkpoint.formats import Names
from jshard.checkpoint.lookup import local_path
from jshard.checkpoint.manifest import Manifest
from jshard.checkpoint.state import leaf_values
from jshard.checkpoint.state import leaves as _leaves
from jshard.cli._arguments import Settings
from jshard.cli._devices import num_devices, parse_mesh, simulate_devices
from jshard.cli._recipe_request import stored_settings
from jshard.cli._stored import StoredRun
from jshard.cli.ckpt import as_json
from jshard.cli.ckpt._leaf_tree import num_bytes_of
from jshard.errors import ShardingError
from jshard.inspect.tables import show
from jshard.recipes.building import abstract_state
from jshard.recipes.hf_config import ADAPTER
from jshard.recipes.lora import adapter_config, lora_of
from jshard.recipes.model_file import ModelFile, load_model_file
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Options shared by the commands that rewrite a checkpoint."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """Model file, or the name of a model included in jshard. Its annotation decides how leaves are sharded, and its
    hf_names(config) maps its parameters' names to other libraries; without it they keep their names."""
    recipe: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the recipe; the file's first by default."""
    set: Settings = ()
    """Override a value of the recipe; repeatable: --set model.n_layer=4."""
    json: bool = False
    """Print JSON only."""

    def requested_model(self, weights: Path | None = None) -> Model | None:
        """Returns the requested model, with the settings in the config.json of Hugging Face's `weights`."""
        if self.model is not None:
            file = load_model_file(self.model)
            _, recipe = file.recipe(self.recipe)
            if weights is not None:
                # Before --set, which is stronger than the weights' own config.
                recipe = override(recipe, stored_settings(file, recipe, weights))
            return Model(file, override(recipe, self.set))
        if self.recipe is not None or self.set:
            raise ShardingError(
                "There is a recipe, and no model file.",
                where="--recipe, --set",
                why="they are of the file that --model names.",
                do="--model gpt",
            )
        return None


@dataclasses.dataclass(frozen=True)
class Model:
    """A recipe of a model file, and the run that it was read from, if any."""

    file: ModelFile
    recipe: Recipe
    run: StoredRun | None = None

    def names(self) -> Names:
        """Returns the names of its parameters in other libraries, layer by layer."""
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

    def companion_files(self) -> dict[str, str]:
        """Returns the texts of the files that other libraries need beside its arrays, by name."""
        config = self.file.config_elsewhere(self.recipe.model)
        if config is None:
            return {}
        tokenizer = {} if self.run is None else self.run.tokenizer_texts()
        return {"config.json": as_json(config) + "\n", **tokenizer}

    def specs(self, mesh: Mesh) -> Mapping[str, PartitionSpec]:
        """Returns how its leaves, and those of its optimizer, are sharded on a mesh, by path as a run stores them."""
        state = abstract_state(self.file, self.recipe, mesh)
        # In a checkpoint a padded leaf has its shape without padding, which its spec may not divide. Without a spec it
        # is cut as it would be without a model.
        padded = {_leaves.text(path) for path in _leaves.logical_shapes(state)}
        leaves = leaf_values.abstract(_leaves.flatten(state))
        specs: dict[str, PartitionSpec] = {}
        for key_path, leaf in leaves.items():
            path = _leaves.text(key_path)
            sharding = getattr(leaf, "sharding", None)
            if isinstance(sharding, NamedSharding) and path not in padded:
                specs[path] = sharding.spec
        return specs


def adapter_files(model: Model, arrays: Collection[str]) -> dict[str, str]:
    """Returns the texts of the files that PEFT needs beside arrays with its names, by name."""
    base = "" if model.run is None else str(model.run.options.get("init_from") or "")
    their_config = model.file.config_elsewhere(model.recipe.model) or {}
    lora = lora_of(model.recipe.model)
    config = adapter_config(lora, arrays, base=base, model_type=their_config.get("model_type"))
    tokenizer = {} if model.run is None else model.run.tokenizer_texts()
    return {ADAPTER: as_json(config) + "\n", **tokenizer}


def other_model(
    args: ModelArgs, path: Path, *, count: int, singular: str, plural: str, lines: Sequence[str], extra: str = ""
) -> ShardingError:
    """Returns the error for leaves, a line each, of which one "is missing" or many "are missing".

    Args:
        args: the options that name the model.
        path: the checkpoint.
        count: how many leaves the model lists.
        singular: what is wrong with one leaf.
        plural: the same with several.
        lines: the leaves.
        extra: what else may be done.
    """
    return ShardingError(
        f"The checkpoint is not of this model: {counted(len(lines), f'leaf {singular}', f'leaves {plural}')}.",
        where=[str(path), *lines],
        why=f"hf_names of {args.model} lists {counted(count, 'leaf')}.",
        do=f"choose the recipe that has its size: --recipe NAME, or --set model.n_layer=N{extra or '.'}",
    )


def show_written(out: Path, manifest: Manifest, *, json: bool) -> None:
    """Prints one line on a checkpoint that was written, or the same as JSON."""
    num_leaves = len(manifest.leaves)
    num_bytes = num_bytes_of(manifest.leaves.values())
    if json:
        path = str(local_path(out))
        print(as_json({"path": path, "leaves": num_leaves, "bytes": num_bytes, "mesh": dict(manifest.mesh)}))
    else:
        show(f"{out}: {counted(num_leaves, 'leaf')}, {human_bytes(num_bytes, 1)}")


def cpu_mesh(text: str) -> Mesh:
    """Returns the mesh of --mesh, over simulated devices. Call it before anything asks JAX for devices."""
    sizes = parse_mesh(text)
    simulate_devices(sizes)  # has no effect on a number that the user has set
    count = num_devices(sizes)
    # By name: an accelerator may be the default of JAX here.
    devices = jax.devices("cpu")
    if count > len(devices):
        raise ShardingError(
            "There are not as many devices as the mesh has.",
            where=f"--mesh {text}",
            why=f"{count} are wanted, and {len(devices)} are simulated in this process.",
            do=f"JAX_NUM_CPU_DEVICES={count} jshard ckpt ...",
        )
    mesh = js.mesh(**sizes, devices=devices[:count])
    assert isinstance(mesh, Mesh)  # devices were not given as a number
    assert math.prod(mesh.shape.values()) == count
    return mesh
