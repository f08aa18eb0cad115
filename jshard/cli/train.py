"""`jshard train MODEL.py`: trains a recipe, or with --dry-run prints its plan."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import Mesh

import jshard as js
from jshard._errors import ShardingError
from jshard._mesh import AnyMesh
from jshard.cli._mesh_option import abstract_mesh, describe_devices, parse_mesh, simulate_devices
from jshard.train import ModelFile, Recipe, load_model_file


@dataclasses.dataclass(frozen=True)
class TrainArgs:
    """Trains a recipe of a model file fully sharded.

    Writes metrics.jsonl, loss.png, recipe.json and a final checkpoint into a new folder.
    """

    model: tyro.conf.Positional[Path]
    """Python file with the model, its annotation and its recipes, e.g. models/gpt.py."""
    recipe: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the recipe; the file's first by default."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=DEGREE,...")] = ""
    """Degrees of the mesh axes, e.g. replica=2,fsdp=4 (default: fsdp takes all devices; on a CPU 8 are simulated)."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Optimizer steps, instead of the recipe's."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Seed of parameters, dropout and sample order, instead of the recipe's."""
    data: tuple[Path, ...] = ()
    """Text files, or folders of them; by default the sources of Python's standard library."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder to write, which must not exist; by default runs/MODEL-RECIPE, with a number if that is taken."""
    dry_run: bool = False
    """Print the plan and stop: needs no device and no memory for parameters."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard train`."""
    args = tyro.cli(TrainArgs, prog="jshard train", args=argv, config=(tyro.conf.FlagCreatePairsOff,))
    model_file = load_model_file(args.model)
    name, recipe = model_file.recipe(args.recipe)
    recipe = _with_options(recipe, args)
    sizes = parse_mesh(args.mesh)
    if args.dry_run:
        _print_plan(model_file, recipe, abstract_mesh(sizes))
        return 0
    simulate_devices(sizes)
    out = _free_folder(args.out, f"{args.model.stem}-{name}")
    mesh = js.mesh(**sizes)
    print(describe_devices())
    _print_plan(model_file, recipe, mesh)
    return _train(model_file, recipe, mesh, args.data, out)


def _train(model_file: ModelFile, recipe: Recipe, mesh: AnyMesh, paths: Sequence[Path], out: Path) -> int:
    assert isinstance(mesh, Mesh)
    from jshard.train.data import load_corpus  # a dry run does without grain
    from jshard.train.loop import fit

    corpus = load_corpus(paths)
    print(corpus.description)
    val_loss = fit(model_file, recipe, mesh=mesh, corpus=corpus, out=out)
    print(f"\nvalidation loss {val_loss:.4f} nats per byte after {recipe.num_steps} steps")
    print(f"{out}/: metrics.jsonl  loss.png  recipe.json  checkpoint/")
    return 0


def _with_options(recipe: Recipe, args: TrainArgs) -> Recipe:
    if args.steps is not None and args.steps < 1:
        raise ShardingError(
            "There is nothing to train.",
            where=f"--steps {args.steps}",
            why="a run has at least one step.",
            do="--steps 1, or --dry-run to see the plan alone.",
        )
    options = {"num_steps": args.steps, "seed": args.seed}
    return dataclasses.replace(recipe, **{key: value for key, value in options.items() if value is not None})


def _print_plan(model_file: ModelFile, recipe: Recipe, mesh: AnyMesh) -> None:
    model = js.abstract_init(
        lambda: model_file.build(recipe.model, nnx.Rngs(recipe.seed)),
        lambda model: model_file.annotate(model, mesh),
    )
    tokens = jax.ShapeDtypeStruct((recipe.batch_size // recipe.accumulate, recipe.sequence_length), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    print(js.explain(model, optimizer=recipe.optimizer(), loss=model_file.loss_fn, batch=batch))


def _free_folder(asked: Path | None, name: str) -> Path:
    if asked is None:
        numbered = (Path("runs", f"{name}-{number}") for number in itertools.count(2))
        return next(path for path in itertools.chain([Path("runs", name)], numbered) if not path.exists())
    if asked.exists():
        raise ShardingError(
            "The run would overwrite another.",
            where=f"--out {asked}",
            why="there is something at that path already.",
            do="name a folder that does not exist, or leave --out away: a free name under runs/ is taken.",
        )
    return asked
