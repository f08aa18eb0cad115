"""A run, from its folder: the recipe it was trained with, and the model of its newest checkpoint."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from flax import nnx
from jax.sharding import Mesh

from jshard import checkpoint, launch
from jshard._children import module_command
from jshard._types import Json
from jshard.checkpoint.errors import SurplusError
from jshard.checkpoint.lookup import checkpoint_at
from jshard.cli._arguments import Count, Extra, Weights
from jshard.cli._config import as_setting
from jshard.cli._data import data_of, tokenizer_of
from jshard.cli._devices import open_mesh, parse_mesh, simulate_devices
from jshard.cli.train import check_processes
from jshard.data import Tokenizer
from jshard.data.files import weighted
from jshard.data.token_files import is_tokens
from jshard.data.tokenizer import tokenizer_file, transformers_files
from jshard.errors import ShardingError
from jshard.recipes.building import abstract_model, check_has_average
from jshard.recipes.ema import Ema, ema_of
from jshard.recipes.model_file import ModelFile, load_model_file
from jshard.recipes.overrides import override, parse_units
from jshard.recipes.recipe import Recipe, tree
from jshard.recipes.step import HeldModel
from jshard.train.run import check_vocabulary
from jshard.train.run_folder import RunFolder
from jshard.train.run_record import NOTHING, differences
from jshard.train.trust import model_of_run


@dataclasses.dataclass(frozen=True)
class RunArgs:
    """Options shared by the commands that take a run."""

    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run. Its newest checkpoint is read."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """Model file, if it has moved since the run."""
    trust: bool = False
    """Execute the model file that the run names, although the run was not made by you on this machine."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A Hugging Face tokenizer.json, if it has moved since the run."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=DEGREE,...")] = ""
    """Degrees of the mesh axes, e.g. replica=2,fsdp=4. By default fsdp takes all devices; without accelerators 8 are
    simulated. It may differ from that of the run."""

    extra: Extra = "error"
    """What to do with parameters of the checkpoint that the model has no place for, because its file has changed:
    refuse, or skip them (ignore)."""
    weights: Weights = "model"
    """Which weights: those of the last step (model), or their exponential moving average (ema), if the run has one."""
    processes: Count = 1
    """Work as N processes on this machine, which share its devices, as a cluster would. Not for clusters."""

    def started(self, command: str, argv: Sequence[str]) -> int | None:
        """Starts the worker processes and returns their exit code; None in those, or with a single process."""
        if launch.is_worker():  # started by the call below
            return None
        command_line = shlex.join(["jshard", command, *argv])
        cluster = launch.detect(command=command_line)
        # A single process needs no supervisor.
        if cluster is None and self.processes == 1:
            return None
        check_processes(self, cluster)
        return launch.supervise(
            module_command("jshard", command, *argv),
            processes=self.processes if cluster is None else None,
            cluster=cluster,
            again=command_line,
        )

    def open_mesh(self) -> Mesh:
        """Returns the mesh over the present devices. Call it before anything asks JAX for devices."""
        sizes = parse_mesh(self.mesh)
        cluster = launch.detect()
        # In this order: JAX reads the number when it opens its devices, and joins the other processes before that.
        simulate_devices(sizes, processes=1 if cluster is None else cluster.num_processes)
        if launch.is_worker():
            launch.start_worker()
        mesh = open_mesh(sizes)
        assert isinstance(mesh, Mesh)  # devices were not given as a number
        return mesh


_SKIP = "or skip them, and use another model: --extra ignore"


def _why_no_run(path: Path) -> str:
    if path.is_dir():
        return "it has no run.json."
    if path.exists():
        return "it is not a folder."
    return f"no such folder, seen from {Path.cwd()}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredRun:
    """The request of a run, as recorded in its folder.

    Attributes:
        path: its folder.
        options: its command-line options.
        data: "description" and "fingerprint" of its training data.
        model_file: the model file in its current state, with the run's settings of the units.
        recipe: with the values of the run, even if the file has changed.
    """

    path: Path
    options: Mapping[str, Json]
    data: Mapping[str, str]
    model_file: ModelFile
    recipe: Recipe

    @classmethod
    def read(
        cls, path: Path, *, model: Path | None = None, is_trusted: bool = False, command: Sequence[str]
    ) -> StoredRun:
        """Reads the record of a run, and its model file or another one.

        Args:
            path: its folder.
            model: the model file; by default the one that the run names.
            is_trusted: whether that one may be executed if the run is not the user's own.
            command: the words of the command, for an error.
        """
        if not RunFolder.holds_run(path):
            raise ShardingError(
                "There is no run.",
                where=str(path),
                why=_why_no_run(path),
                do="name the folder that `jshard train` wrote: runs/gpt-tiny",
            )
        record = RunFolder.record(path)
        if model is None:
            model = model_of_run(record, is_trusted=is_trusted, where=path, command=command)
        model_file = load_model_file(model)
        name = record["name"]
        # The values of the run replace those of any recipe, so another one will do where the run's is gone.
        _, recipe = model_file.recipe(name if name in model_file.recipes else None)
        settings: list[str] = []
        for key, stored, _ in differences(record["recipe"], tree(recipe)):
            # A field that the recipe did not have then has the value of the file.
            if stored is not NOTHING:
                settings.append(as_setting(key, stored))
        options = record["options"]
        return cls(
            path=path,
            options=options,
            data=record["data"],
            model_file=model_file.with_units(parse_units(options.get("unit", ()))),
            recipe=override(recipe, settings),
        )

    def restored_model(
        self, mesh: Mesh, *, extra: Extra = "error", weights: Weights = "model"
    ) -> tuple[HeldModel, int]:
        """Returns the model of the newest checkpoint, and its number of steps. All processes call it."""
        model = abstract_model(self.model_file, self.recipe, mesh)
        # Without the optimizer's state, which is not used, and mostly larger.
        like: dict[str, Any] = {"model": model, "step": 0}
        path = self.options.get("checkpoints") or self.path
        if weights == "ema":
            check_has_average(checkpoint_at(path))
            like["ema"] = self._abstract_average(model)
        try:
            state = checkpoint.restore(path, like=like, extra=extra)
        except SurplusError as error:  # in the words of the command
            do = f"give the model file as it was: --model FILE\n{_SKIP}"
            raise SurplusError(error.what, where=error.where, why=error.why, do=do) from error
        if weights == "ema":
            state["ema"].copy_to(state["model"])
        return HeldModel(state["model"]), int(state["step"])

    def _abstract_average(self, model: nnx.Module) -> Ema:
        recipe = self.recipe
        # A run that continues without an average has it until its next checkpoint.
        if recipe.ema_decay is None:
            recipe = dataclasses.replace(recipe, ema_decay=0.5)
        average = ema_of(recipe, model, self.model_file.trained(recipe))
        assert average is not None  # it has a decay
        return average

    def tokenizer_file(self, requested: Path | None) -> Path | None:
        """Returns the tokenizer's file: the requested one, or that of the run; None for bytes."""
        if requested is not None:
            return requested
        stored = self.options.get("tokenizer")
        return None if stored is None else Path(stored)

    def tokenizer_texts(self) -> dict[str, str]:
        """Returns the files by which Transformers has the tokenizer of the run; none if it is unknown or missing."""
        file = self.tokenizer_file(None)
        if file is not None:
            return transformers_files(file) if tokenizer_file(file).is_file() else {}
        if self.model_file.data is not None or self._reads_token_ids():
            return {}
        return transformers_files(None)

    def tokenizer(self, requested: Path | None = None) -> Tokenizer:
        """Returns the tokenizer of the model."""
        tokenizer = self._tokenizer(requested)
        if tokenizer is None:
            raise ShardingError(
                "The run was not trained on text.",
                where=f"{self.path}: {self.data['description']}",
                why=f"data(recipe) of {self.model_file.path} has no tokenizer.",
                do="Data(..., tokenizer=...)  # in the model file, if its samples are tokens of text",
            )
        check_vocabulary(self.recipe, tokenizer)
        return tokenizer

    def _tokenizer(self, requested: Path | None) -> Tokenizer | None:
        """Returns the tokenizer; None if the model file's own data have none."""
        if self.model_file.data is not None:
            return data_of(self.model_file, self.recipe, (), requested).tokenizer
        file = self.tokenizer_file(requested)
        if file is None and self._reads_token_ids():
            raise ShardingError(
                "The tokenizer of the run is not known.",
                where=f"{self.path}: {self.data['description']}",
                why="it was trained on files of token ids, without a tokenizer.",
                do="--tokenizer tokenizer.json  # the one that encoded the files",
            )
        return tokenizer_of(file)

    def _reads_token_ids(self) -> bool:
        """Returns whether the run was trained on files of token ids alone; then nothing says what encoded them."""
        paths, _ = weighted(self.options.get("data", ()))
        return bool(paths) and all(map(is_tokens, paths))
