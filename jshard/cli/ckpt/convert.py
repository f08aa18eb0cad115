"""`jshard ckpt reshard`, `import` and `export`: rewrite a checkpoint for another mesh or another library."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jshard as js
from jshard._text import counted, human_bytes
from jshard.checkpoint import leaf_values
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import (
    ArraySource,
    ForeignSource,
    NamedSource,
    Names,
    check_settings,
    foreign_source,
    write_dcp,
    write_safetensors,
)
from jshard.checkpoint.listing import listing
from jshard.checkpoint.lookup import checkpoint_at, is_checkpoint, local_path
from jshard.checkpoint.manifest import Manifest
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.part import ArrayPlace, Part, part_of
from jshard.checkpoint.readers import ForeignCheckpoint, own_checkpoint
from jshard.checkpoint.reshard import import_leaves, reshard
from jshard.checkpoint.verifying import verify
from jshard.cli._arguments import Settings, num_devices, parse, parse_mesh, remark, simulate_devices
from jshard.cli._request import stored_settings
from jshard.cli._stored import StoredRun
from jshard.cli.ckpt import as_json, progress
from jshard.errors import RunError, ShardingError
from jshard.inspect.tables import show
from jshard.recipes.building import abstract_state
from jshard.recipes.model_file import ModelFile, load_model_file
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe
from jshard.train.run_folder import RunFolder
from jshard.train.trust import UntrustedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModelArgs:
    """Options shared by the commands of this module."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """Model file, or the name of a model included in jshard. Its annotation decides how leaves are sharded, and its
    hf_names(config) maps its parameters' names to other libraries; without it they keep their names."""
    recipe: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the recipe; the file's first by default."""
    set: Settings = ()
    """Override a value of the recipe; repeatable: --set model.n_layer=4."""
    json: bool = False
    """Print JSON only."""

    def loaded(self, weights: Path | None = None) -> Model | None:
        """The model that is asked for, if one is, with the settings in the config.json of Hugging Face's `weights`."""
        if self.model is not None:
            file = load_model_file(self.model)
            recipe = file.recipe(self.recipe)[1]
            if weights is not None:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardArgs(_ModelArgs):
    """Rewrites a checkpoint in pieces that suit another mesh, and verifies the checksums of the values meanwhile.

    Any mesh can restore any checkpoint; resharding reduces reads if many do. Without --model, leaves are sharded as
    when they were saved, as far as the mesh allows. It needs no accelerator, and memory for two to three times 256 MiB
    or the largest leaf. Exit codes: 0 done, 1 damaged, or writing failed, 2 invalid request.
    """

    path: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them (its newest is read), or the folder of a run."""
    out: tyro.conf.Positional[Path]
    """A new folder."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=DEGREE,...")] = ""
    """Degrees of the mesh axes, e.g. replica=2,fsdp=16; that many devices are simulated on the CPU (8 by default)."""


def run_reshard(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt reshard`."""
    args = parse(ReshardArgs, argv, command="jshard ckpt reshard")
    model = args.loaded()
    mesh = cpu_mesh(args.mesh)  # before anything asks for devices
    path = checkpoint_at(args.path)
    specs = None if model is None else model.specs(mesh)
    with progress("reshard", listing(path).entries[0].num_bytes) as note:
        manifest = reshard(path, local_path(args.out), mesh, specs=specs, on_written=note)
    _show(args, manifest)
    return 0


def _show(args: ReshardArgs | ImportArgs, manifest: Manifest) -> None:
    """One line on a checkpoint that was written, or the same as JSON."""
    count, num_bytes = len(manifest.leaves), sum(leaf.nbytes for leaf in manifest.leaves.values())
    if args.json:
        path = str(local_path(args.out))
        print(as_json({"path": path, "leaves": count, "bytes": num_bytes, "mesh": dict(manifest.mesh)}))
    else:
        show(f"{args.out}: {counted(count, 'leaf')}, {human_bytes(num_bytes, 1)}")


# `jshard ckpt import FOREIGN OUT`: converts a checkpoint saved by another library.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportArgs(_ModelArgs):
    """Converts a checkpoint of another library: safetensors, PyTorch's distributed checkpoints, DeepSpeed, Orbax.

    With --model the arrays get the model's names and orientation, as its parameters in a checkpoint to restore with
    only="params". It needs memory for two to three times 256 MiB or the largest array. Exit codes: 0 done, 1 damaged,
    or writing failed, 2 invalid request.
    """

    path: tyro.conf.Positional[Path]
    """A safetensors file or a folder of them, or the folder of a checkpoint of PyTorch distributed, DeepSpeed
    ZeRO-3, or Orbax."""
    out: tyro.conf.Positional[Path]
    """A new folder."""
    extra: Literal["error", "ignore"] = "error"
    """What to do with arrays that --model has no place for, such as more layers: refuse, or leave them out."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=DEGREE,...")] = ""
    """The mesh whose shards it is split into, e.g. fsdp=64; any other can restore it, too (default: 8 devices)."""


def run_import(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt import`."""
    args = parse(ImportArgs, argv, command="jshard ckpt import")
    model = args.loaded(args.path)
    mesh = cpu_mesh(args.mesh)
    source = _source(args, model)
    with progress("import", sum(leaf.nbytes for leaf in source.arrays.values())) as note:
        manifest = import_leaves(source, local_path(args.out), mesh, on_written=note)
    _show(args, manifest)
    return 0


def _source(args: ImportArgs, model: Model | None) -> Opened:
    """What is imported, by the paths that it gets."""
    local_path(args.path)
    found = None if is_checkpoint(args.path) else foreign_source(args.path)
    if found is None and not is_checkpoint(args.path):
        raise CheckpointError(
            "There is no checkpoint to import.",
            where=str(args.path),
            why="no such file or folder." if not args.path.exists() else "it is of no format that is known here.",
            do="give a .safetensors file, or a folder: of them, with .metadata, or one that DeepSpeed or Orbax wrote.",
        )
    if found is not None:
        for note in found.notes:
            remark(note)
    if model is None:
        path = args.path.absolute()
        return own_checkpoint(path) if found is None else ForeignCheckpoint(path, found)
    if found is None:
        ours = own_checkpoint(args.path.absolute())
        found = Part(ours, {name: ArrayPlace(name) for name in ours.arrays})
    names = model.names()
    check_settings(args.path, names)
    named = NamedSource(found, names)
    bad = [f"{path}  {', '.join(names)} is not there" for path, names in named.absent.items()]
    do = ""
    if args.extra == "error":
        bad += [f"{name}  has no counterpart in the model" for name in named.unused]
        if not named.absent:
            do = ";\n--extra ignore  # leaves them out: another model is then imported"
    if bad:
        raise _other_model(args, len(named.leaves) + len(named.absent), "differs", "differ", bad, do)
    if named.unused:
        remark(
            f"{counted(len(named.unused), 'array is', 'arrays are')} left out: {', '.join(named.unused[:3])}"
            + ", ..." * (len(named.unused) > 3)
        )
    return Part(named, {f"model/{name}": ArrayPlace(name) for name in named.leaves})


def _other_model(
    args: ImportArgs | ExportArgs, count: int, one: str, many: str, lines: Sequence[str], do: str = ""
) -> Exception:
    """The error for leaves, a line each, of which one "is missing" or many "are missing"."""
    return ShardingError(
        f"The checkpoint is not of this model: {counted(len(lines), f'leaf {one}', f'leaves {many}')}.",
        where=[str(args.path), *lines],
        why=f"hf_names of {args.model} lists {counted(count, 'leaf')}.",
        do=f"choose the recipe that has its size: --recipe NAME, or --set model.n_layer=N{do or '.'}",
    )


# `jshard ckpt export PATH OUT`: writes a checkpoint as safetensors.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportArgs(_ModelArgs):
    """Writes the parameters of a checkpoint as safetensors, or as a distributed checkpoint of PyTorch, array by array.

    For a run, or with --model, they get Hugging Face's names and orientation, layer by layer even if the run had them
    stacked, and a config.json beside them, as far as the model file defines these. The checkpoint is verified
    first. Exit codes: 0 done, 1 damaged, or writing failed, 2 invalid request.
    """

    path: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them (its newest is read), or the folder of a run."""
    out: tyro.conf.Positional[Path]
    """Folder to write into: model.safetensors, or several files with an index; or a checkpoint for
    torch.distributed.checkpoint.load."""
    format: Literal["safetensors", "dcp"] = "safetensors"
    """Format of the files. In dcp, names have dots between the keys, and numbers and strings are also written."""
    part: Annotated[str, tyro.conf.arg(metavar="PREFIX")] = "model"
    """The part of the state: a prefix of the paths, which is removed from the names."""
    extra: Literal["error", "ignore"] = "error"
    """What to do with leaves of that part that the model lacks, such as more layers: refuse, or leave them out."""
    max_shard_gb: Annotated[float, tyro.conf.arg(metavar="GB")] = 5.0
    """Largest size of a file, in 10^9 bytes."""
    own_names: bool = False
    """Keep the model's own names."""
    no_verify: bool = False
    """Skip reading everything first to verify its checksums."""
    trust: bool = False
    """Execute the model file that the run names, although the run was not made by you on this machine."""

    def loaded_for(self, argv: Sequence[str]) -> Model | None:
        """The requested model, or that of the run that saved the checkpoint, if it defines other names."""
        if self.own_names and (self.model is not None or self.recipe is not None or self.set):
            raise ShardingError(
                "Two kinds of names are asked for.",
                where="--own-names --model",
                why="a model file gives the arrays the names that others have for them.",
                do="leave out --own-names; or --model, --recipe and --set.",
            )
        place = self.path.absolute()
        run = next((folder for folder in (place, *place.parents[:2]) if RunFolder.holds_run(folder)), None)
        if run is None or self.recipe is not None or self.set:
            return self.loaded()
        if self.own_names or (self.model is None and (self.format, self.part) != ("safetensors", "model")):
            return None
        try:
            command = ["jshard", "ckpt", "export", *argv]
            stored = StoredRun.read(run, model=self.model, is_trusted=self.trust, command=command)
            model = Model(stored.model_file, stored.recipe, stored)
            model.names()
        except UntrustedError:
            raise
        except ShardingError as error:
            if self.model is not None:
                raise
            remark(f"under the names that the model has here: {error.why}")
            return None
        return model


def run_export(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt export`."""
    args = parse(ExportArgs, argv, command="jshard ckpt export")
    model = args.loaded_for(argv)
    args = args if model is None else dataclasses.replace(args, model=model.file.path)
    path = checkpoint_at(args.path)
    ours = own_checkpoint(path)
    if not args.no_verify:
        _check_good(ours)
    part = part_of(ours, args.part, names=None if model is None else model.names())
    source: ArraySource = part if model is None else _named(args, part, model.names())
    total = sum(leaf.nbytes for leaf in source.leaves.values())
    with progress("export", total) as note:
        if args.format == "dcp":
            begin = f"{args.part.strip('/')}/" if args.part else ""
            values = {} if model is not None else ours.values()
            values = {path.removeprefix(begin): x for path, x in values.items() if path.startswith(begin)}
            files = write_dcp(local_path(args.out), source, values=values, on_written=note)
        else:
            beside = {} if model is None else model.beside()
            how = {"max_shard_bytes": args.max_shard_gb * 1e9, "beside": beside, "on_written": note}
            files = write_safetensors(local_path(args.out), source, **how)
    if args.json:
        print(as_json({"files": list(map(str, files)), "leaves": len(source.leaves), "bytes": total}))
    else:
        names = ", ".join(file.name for file in files)
        show(f"{args.out}: {counted(len(source.leaves), 'array')}, {human_bytes(total, 1)}: {names}")
    return 0


def _check_good(ours: Opened) -> None:
    with progress("verify", sum(leaf.nbytes for leaf in ours.arrays.values())) as note:
        verdict = verify(ours.path, on_read=note)
    if not verdict.is_good:
        raise RunError(
            f"The checkpoint is damaged: {counted(len(verdict.findings), 'finding')}.",
            where=[str(ours.path), *(f"{x.leaf or x.file or 'it'}  {x.why}" for x in verdict.findings)],
            why="what is exported would not be what was saved.",
            do="export another one; --no-verify exports what is there.",
        )


def _named(args: ExportArgs, source: Part, names: Names) -> ArraySource:
    missing = ["/".join(filter(None, (args.part, path))) for path in names if path not in source.leaves]
    if missing:
        raise _other_model(args, len(names), "is missing", "are missing", missing)
    if source.left_over and args.extra == "error":
        do = ";\n--extra ignore  # leaves out what would not be written"
        raise _other_model(args, len(names), "is left over", "are left over", source.left_over, do)
    return ForeignSource(source, names)


# The model, and the mesh.


@dataclasses.dataclass(frozen=True)
class Model:
    """A recipe of a model file."""

    file: ModelFile
    recipe: Recipe
    run: StoredRun | None = None  # that it is of

    def names(self) -> Names:
        """The names of its parameters in other libraries, layer by layer."""
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

    def beside(self) -> dict[str, str]:
        """The files beside its arrays that other libraries need, by name."""
        config = self.file.config_elsewhere(self.recipe.model)
        if config is None:
            return {}
        tokenizer = {} if self.run is None else self.run.tokenizer_texts()
        return {"config.json": as_json(config) + "\n", **tokenizer}

    def specs(self, mesh: Mesh) -> Mapping[str, PartitionSpec]:
        """How its leaves, and those of its optimizer, are sharded on a mesh, by path as a run stores them."""
        state = abstract_state(self.file, self.recipe, mesh)
        found: Mapping[Any, Any] = leaf_values.abstract(_leaves.flatten(state))
        shardings = {_leaves.text(path): getattr(leaf, "sharding", None) for path, leaf in found.items()}
        padded = {_leaves.text(path) for path in _leaves.logical_shapes(state)}  # cut as it would be without a model
        return {path: x.spec for path, x in shardings.items() if isinstance(x, NamedSharding) and path not in padded}


def cpu_mesh(text: str) -> Mesh:
    """The mesh of --mesh, over simulated devices."""
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
