"""The checkpoints of a run: its initial state, its saves, and how to continue after it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jshard import launch
from jshard._live import at_work
from jshard.checkpoint import Checkpointer, CheckpointError
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.errors import DamagedError
from jshard.checkpoint.restoring import Extra
from jshard.recipes.building import create, create_from, new_model, restore
from jshard.recipes.hf_config import config_file
from jshard.recipes.model_file import ModelFile
from jshard.recipes.recipe import Recipe
from jshard.recipes.step import TrainStep
from jshard.train.loop import Every
from jshard.train.memory_copies import MemoryCopies
from jshard.train.records import keep_on_disk
from jshard.train.run_folder import RunFolder

State = tuple[nnx.Module, nnx.Optimizer[Any], int]


class RunCheckpoints:
    """The checkpoints in the folder of a run; as a context it waits for a save in progress when it ends.

    Attributes:
        is_begun: whether there is something to continue from; a refused run leaves nothing.
    """

    def __init__(
        self,
        model_file: ModelFile,
        recipe: Recipe,
        mesh: Mesh,
        folder: RunFolder,
        say: Callable[[str], object],
        *,
        copies: MemoryCopies | None = None,
        extra: Extra = "error",
    ) -> None:
        self._model_file, self._recipe, self._mesh, self._folder, self._say = model_file, recipe, mesh, folder, say
        self._series = Checkpointer(folder.checkpoints, keep=recipe.keep_checkpoints)
        self._val_losses: dict[int, float] = {}  # the last one, by step
        self._newest: Place | None = None  # known without reading the disk
        self._copies, self._is_from_memory = copies, False
        self._extra: Extra = extra  # what to do with initial parameters that the model has no place for
        self.is_begun = False

    def __enter__(self) -> RunCheckpoints:
        self._series.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self._copies is not None and kind is None:
            self._copies.close()
        self._series.__exit__(kind, *error)
        if kind is None:
            self._note()

    def state(self, init_from: Path | None) -> State:
        """The model, the optimizer and the number of completed steps, from the newest checkpoint, or new.

        Args:
            init_from: the checkpoint with the initial parameters of a new run; see `create_from`.
        """
        latest = self._series.agreed_latest()
        if latest is not None and not self._folder.is_resumed:  # in a bucket: the folder of a new run is empty
            raise CheckpointError(
                "The address has the checkpoints of another run.",
                where=f"--checkpoints {self._folder.checkpoints}",
                why=f"the newest is of step {latest}; a new run would continue from it, and delete the older ones.",
                do="name an empty address; or resume that run: --out FOLDER --resume",
            )
        if (found := self._from_memory(newer_than=latest)) is not None:
            self._series.set_aside_newer(found[2])
            self._say(f"resumed from the copy in memory of step {found[2]}; the newest checkpoint: {latest}")
            launch.note(step=found[2])
            return found
        if latest is None:
            self._series.set_aside_newer(-1)  # a partial copy would hinder a save
            return *self._new(init_from), 0
        try:
            state = restore(self._model_file, self._recipe, self._mesh, self._series, latest)
        except CheckpointError as error:
            if isinstance(error, DamagedError) or latest not in self._series.steps():  # not visible to this process
                raise
            raise CheckpointError(
                error.what,
                where=error.where,
                why=f"{self._model_file.path} now builds a model or an optimizer that differs from the run's.",
                do="resume with the file as it was; or begin a new run: without --resume, in another --out.",
            ) from error
        path = self._path(state[2])
        if init_from is not None:
            self._say(f"the run began with the parameters of {init_from}, and continues with its own")
        self._series.set_aside_newer(state[2])
        self._say(f"resumed from {path}")
        launch.note(step=state[2], checkpoint=str(path))
        self._newest = path
        return state

    def model_before(self, start_step: int, init_from: Path | None) -> tuple[nnx.Module, str]:
        """The model once more as `state` returned it, and the origin of its parameters."""
        where = self._model_file, self._recipe, self._mesh
        if self._is_from_memory and (found := self._from_memory(newer_than=start_step - 1)) is not None:
            return found[0], f"as in the copy in memory of step {start_step}"
        if start_step:
            return restore(*where, self._series, start_step)[0], f"as in {self._path(start_step)}"
        if init_from is not None:
            return create_from(*where, init_from, extra=self._extra)[0], f"as in {init_from}"
        return new_model(*where), f"as initialised by {self._model_file.path}"

    def worth(self, done: int, val_loss: float) -> None:
        """Records the validation loss of the state after a step, for a save of that step."""
        self._val_losses = {done: val_loss}

    def save(self, step: TrainStep, done: int) -> None:
        """Starts to save the state of a step, in the background."""
        if self._folder.is_primary:
            keep_on_disk(self._folder.metrics)  # the record of a checkpoint must survive a power cut, too
        state = {"model": step.model, "optimizer": step.optimizer, "step": done}
        metrics = {"val_loss": self._val_losses[done]} if done in self._val_losses else None
        self.wait()  # for the previous one
        self._series.save_async(done, state, metrics=metrics)
        self._note()

    def every_copy(self, step: TrainStep) -> Every | None:
        """When and how the state is copied to the memory of the supervisors; None if it is not."""
        if (copies := self._copies) is None:
            return None
        # A run that continues from a copy finds the record of the steps before it.
        before = (lambda: keep_on_disk(self._folder.metrics)) if self._folder.is_primary else (lambda: None)
        state = lambda done: {"model": step.model, "optimizer": step.optimizer, "step": done}
        return Every(steps=copies.every, do=lambda done: copies.keep(state(done), done, before=before))

    def check(self) -> None:
        """Raises the error of a save in the background."""
        self._series.check()
        self._note()

    def wait(self) -> None:
        """Waits until no save is in progress."""
        self._series.wait()

    def latest(self) -> Place | None:
        """The newest checkpoint."""
        latest = self._series.latest()
        return None if latest is None else self._path(latest)

    def kept(self) -> str:
        """The last checkpoint, from memory, for a report while the disk may hang."""
        return "no checkpoint was written yet" if self._newest is None else f"last good checkpoint: {self._newest}"

    def how_to_go_on(self) -> str:
        """The note added to an error."""
        path = self.latest()
        if path is None:
            return f"no checkpoint was saved yet; --out {self._folder.path} --resume starts at the first step."
        return f"last good checkpoint: {path}; --out {self._folder.path} --resume continues from it."

    def _from_memory(self, *, newer_than: int | None) -> State | None:
        """The state of a copy in memory that is newer than the checkpoints; None without one."""
        if self._copies is None or not self._folder.is_resumed:
            return None
        state = self._copies.restore(newer_than=newer_than)
        self._is_from_memory = state is not None
        return None if state is None else (state["model"], state["optimizer"], int(state["step"]))

    def _new(self, init_from: Path | None) -> tuple[nnx.Module, nnx.Optimizer[Any]]:
        if init_from is None:
            stream = sys.stdout if self._folder.is_primary else None
            with at_work("initialising the parameters", say=self._say, stream=stream):
                begun = create(self._model_file, self._recipe, self._mesh)
        else:
            begun = create_from(self._model_file, self._recipe, self._mesh, init_from, extra=self._extra)
            self._say(self._described(init_from))
        self.is_begun = True
        return begun

    def _described(self, init_from: Path) -> str:
        """What a run begins with."""
        if self._model_file.hf_types and config_file(init_from) is not None:
            return f"parameters of {init_from}, with the settings of its config.json"
        return f"parameters of {init_from}"

    def _path(self, step: int) -> Place:
        """The path of a checkpoint, relative as the folder of the run was given."""
        return self._folder.checkpoints / str(step)

    def _note(self) -> None:
        """Reports a completed checkpoint to the supervisor."""
        done = self._series.completed
        if done is not None and self._path(done) != self._newest:
            self._newest = self._path(done)
            launch.note(checkpoint=str(self._newest))
