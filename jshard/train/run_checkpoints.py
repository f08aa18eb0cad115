"""The checkpoints of a run: its initial state, its saves, and how to continue after it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from flax import nnx

from jshard import checkpoint, launch
from jshard._live import at_work
from jshard._text import counted
from jshard.checkpoint import Checkpointer, CheckpointError, Keep
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.errors import DamagedError
from jshard.checkpoint.readers import own_checkpoint
from jshard.data.stream_source import StreamedSamples, StreamPosition
from jshard.recipes.building import RunState, create, create_from, has_average, new_model, restore
from jshard.recipes.ema import ema_of
from jshard.recipes.hf_config import config_file
from jshard.recipes.model_file import ModelFile
from jshard.recipes.recipe import Recipe
from jshard.recipes.step import TrainStep
from jshard.train.hooks import MemoryCopyHook, SavedHook, named
from jshard.train.memory_copies import MemoryCopies
from jshard.train.records import keep_on_disk
from jshard.train.run_folder import RunFolder
from jshard.train.run_options import RunOptions

DATA = "data"
"""The name in a checkpoint of the position in the stream of a run."""


class RunCheckpoints:
    """The checkpoints in the folder of a run; as a context it waits for a save in progress when it ends.

    Args:
        model_file: creates the model and the optimizer.
        recipe: their settings.
        options: the devices, how to print, and what to do with initial parameters that have no place in the model.
        folder: has the checkpoints.
        copies: the copies of the state in memory; None if there are none.

    Attributes:
        is_begun: whether there is something to continue from; a refused run leaves nothing.
    """

    def __init__(
        self,
        model_file: ModelFile,
        recipe: Recipe,
        options: RunOptions,
        folder: RunFolder,
        *,
        copies: MemoryCopies | None = None,
    ) -> None:
        self._model_file = model_file
        self._recipe = recipe
        self._options = options
        self._folder = folder
        self._copies = copies
        keep = Keep(
            last=recipe.keep_checkpoints,
            best=recipe.keep_best,
            metric=recipe.monitor,
            higher_is_better=recipe.monitor_mode == "max",
        )
        self._series = Checkpointer(folder.checkpoints, keep=keep)
        self._metrics: dict[int, Mapping[str, float]] = {}  # of the last evaluation, by step
        self._saved_step: int | None = None
        self._saved_hooks: Sequence[SavedHook] = ()
        self._newest: Place | None = None  # known without reading the disk, which may hang
        self._is_from_memory = False
        train = options.data.train
        self._stream = train if isinstance(train, StreamedSamples) else None
        self.is_begun = False

    def __enter__(self) -> RunCheckpoints:
        self._series.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error other processes may be gone, and a copy in progress would wait for them.
        if self._copies is not None and kind is None:
            self._copies.close()
        # Waits for a save in progress; only then is its checkpoint complete.
        self._series.__exit__(kind, error, traceback)
        if kind is None:
            self._report_newest()

    def state(self, init_from: Path | None) -> RunState:
        """Returns the state of the newest checkpoint or copy in memory; a new one if there is none.

        It has an average of the weights if the recipe asks for one. The stream that the run reads is at its step.

        Args:
            init_from: the checkpoint with the initial parameters of a new run; see `create_from`.
        """
        state = self._newest_state(init_from)
        if self._stream is not None and state.step:
            self._move_stream(self._stream, state.step)
        return state

    def _newest_state(self, init_from: Path | None) -> RunState:
        latest = self._series.agreed_latest()
        if latest is not None and not self._folder.is_resumed:  # in a bucket: the folder of a new run is empty
            raise CheckpointError(
                "The address has the checkpoints of another run.",
                where=f"--checkpoints {self._folder.checkpoints}",
                why=f"the newest is of step {latest}; a new run would continue from it, and delete the older ones.",
                do="name an empty address; or resume that run: --out FOLDER --resume",
            )
        copy = self._from_memory(newer_than=latest)
        if copy is not None:
            # A folder of a later step that was copied in part would hinder its save.
            self._series.set_aside_newer(copy.step)
            self._options.say(f"resumed from the copy in memory of step {copy.step}; the newest checkpoint: {latest}")
            launch.note(step=copy.step)
            return self._with_average(copy)
        if latest is None:
            self._series.set_aside_newer(-1)  # a partial copy would hinder a save
            return self._with_average(RunState(*self._new(init_from), 0))
        return self._with_average(self._restored(latest, init_from))

    def _move_stream(self, stream: StreamedSamples[Any], step: int) -> None:
        """Makes the places known that the newest checkpoint up to a step has; without them all is read again."""
        for stored in reversed(self._series.steps()):
            place = self._series.path(stored)
            if stored <= step and DATA in own_checkpoint(place, verify=False).leaves:
                checkpoint.restore(place, {DATA: StreamPosition(stream, 0)})
                return
        samples = counted(self._folder.samples_before(step), "sample")
        self._options.say(f"no checkpoint has a place in the stream: its first {samples} are read again, and skipped")

    def _restored(self, latest: int, init_from: Path | None) -> RunState:
        """Restores the newest sound checkpoint; a damaged one is passed over."""
        try:
            state = restore(self._model_file, self._recipe, self._options.mesh, self._series, latest)
        except CheckpointError as error:
            # Neither a damaged file, nor one that this process does not see, is the fault of the model file.
            if isinstance(error, DamagedError) or latest not in self._series.steps():
                raise
            raise CheckpointError(
                error.what,
                where=error.where,
                why=f"{self._model_file.path} now builds a model or an optimizer that differs from the run's.",
                do="resume with the file as it was; or begin a new run: without --resume, in another --out.",
            ) from error
        path = self._path(state.step)
        if init_from is not None:
            self._options.say(f"the run began with the parameters of {init_from}, and continues with its own")
        # The steps after a damaged checkpoint are done again, and its place is needed for the new save.
        self._series.set_aside_newer(state.step)
        self._options.say(f"resumed from {path}")
        if self._recipe.ema_decay is None and has_average(path):
            self._options.say("the average of the weights ends here: ema_decay is none; older checkpoints have it")
        launch.note(step=state.step, checkpoint=str(path))
        self._newest = path
        return state

    def model_before(self, start_step: int, init_from: Path | None) -> tuple[nnx.Module, str]:
        """Returns the model once more as `state` returned it, and the origin of its parameters."""
        model_file, recipe, mesh = self._model_file, self._recipe, self._options.mesh
        if self._is_from_memory:
            # Less 1, as `newer_than` excludes its own step, and the copy is of `start_step`.
            copy = self._from_memory(newer_than=start_step - 1)
            if copy is not None:
                return copy.model, f"as in the copy in memory of step {start_step}"
        if start_step:
            state = restore(model_file, recipe, mesh, self._series, start_step)
            return state.model, f"as in {self._path(start_step)}"
        if init_from is not None:
            model, _ = create_from(
                model_file, recipe, mesh, init_from, extra=self._options.extra, adapters=self._options.adapters
            )
            return model, f"as in {init_from}"
        return new_model(model_file, recipe, mesh), f"as initialised by {model_file.path}"

    def call_when_saved(self, hooks: Sequence[SavedHook]) -> None:
        """Calls these hooks for every checkpoint that is complete from now on, in the first process."""
        if self._folder.is_primary:
            self._saved_hooks = hooks

    def record_metrics(self, done: int, metrics: Mapping[str, float]) -> None:
        """Records the results of the evaluation after a step, for a save of that step."""
        self._metrics = {done: metrics}  # only the last: a save of a later step has none

    def save(self, step: TrainStep, done: int) -> None:
        """Starts to save the state of a step, in the background, unless that was done."""
        if done == self._saved_step:
            return
        self._saved_step = done
        if self._folder.is_primary:
            keep_on_disk(self._folder.metrics)  # the record of a checkpoint must survive a power cut, too
        state = _named_state(step, done)
        if self._stream is not None:
            state[DATA] = StreamPosition(self._stream, self._folder.samples_before(done))
        self.wait()  # for the previous one: a series writes one checkpoint at a time
        self._series.save_async(done, state, metrics=self._metrics.get(done))
        self._report_newest()

    def memory_copy_hook(self, step: TrainStep) -> MemoryCopyHook | None:
        """Returns when and how the state is copied to the memory of the supervisors; None if it is not."""
        copies = self._copies
        if copies is None:
            return None

        def keep_record() -> None:
            if self._folder.is_primary:
                keep_on_disk(self._folder.metrics)

        def copy(done: int) -> None:
            # A run that continues from a copy finds the record of the steps before it.
            copies.keep(_named_state(step, done), done, before=keep_record)

        return MemoryCopyHook(every=copies.every, run=copy)

    def check(self) -> None:
        """Raises the error of a save in the background."""
        self._series.check()
        self._report_newest()

    def wait(self) -> None:
        """Waits until no save is in progress."""
        self._series.wait()

    def latest(self) -> Place | None:
        """Returns the newest checkpoint."""
        latest = self._series.latest()
        return None if latest is None else self._path(latest)

    def describe_newest(self) -> str:
        """Names the last checkpoint, from memory, for a report while the disk may hang."""
        if self._newest is None:
            return "no checkpoint was written yet"
        return f"last good checkpoint: {self._newest}"

    def how_to_continue(self) -> str:
        """Returns the note that is added to an error."""
        path = self.latest()
        if path is None:
            return f"no checkpoint was saved yet; --out {self._folder.path} --resume starts at the first step."
        return f"last good checkpoint: {path}; --out {self._folder.path} --resume continues from it."

    def _from_memory(self, *, newer_than: int | None) -> RunState | None:
        """Returns the state of a copy in memory that is newer than the checkpoints; None without one."""
        if self._copies is None or not self._folder.is_resumed:
            return None
        state = self._copies.restore(newer_than=newer_than)
        self._is_from_memory = state is not None
        if state is None:
            return None
        return RunState.of(state)

    def _with_average(self, state: RunState) -> RunState:
        """Returns the state with an average of the weights, which begins now if the run had none, and says so."""
        if state.ema is not None or self._recipe.ema_decay is None:
            return state
        if state.step:
            self._options.say(f"the average of the weights begins after step {state.step}, with those of that step")
        return state._replace(ema=ema_of(self._recipe, state.model, self._model_file.trained(self._recipe)))

    def _new(self, init_from: Path | None) -> tuple[nnx.Module, nnx.Optimizer]:
        """Creates the state of a new run."""
        if init_from is None:
            stream = sys.stdout if self._folder.is_primary else None
            with at_work("initialising the parameters", say=self._options.say, stream=stream):
                state = create(self._model_file, self._recipe, self._options.mesh)
        else:
            state = create_from(
                self._model_file,
                self._recipe,
                self._options.mesh,
                init_from,
                extra=self._options.extra,
                adapters=self._options.adapters,
            )
            self._options.say(self._origin(init_from))
        self.is_begun = True
        return state

    def _origin(self, init_from: Path) -> str:
        """Describes where the parameters of a new run come from."""
        adapters = "" if self._options.adapters is None else f", and the adapters of {self._options.adapters}"
        if self._model_file.hf_types and config_file(init_from) is not None:
            return f"parameters of {init_from}, with the settings of its config.json{adapters}"
        return f"parameters of {init_from}{adapters}"

    def _path(self, step: int) -> Place:
        """Returns the path of a checkpoint, relative as the folder of the run was given."""
        return self._folder.checkpoints / str(step)

    def _report_newest(self) -> None:
        """Reports a completed checkpoint to the supervisor."""
        done = self._series.completed
        if done is not None and self._path(done) != self._newest:
            self._newest = self._path(done)
            launch.note(checkpoint=str(self._newest))
            for hook in self._saved_hooks:
                with named(hook, done):
                    hook.run(done, self._newest)


def _named_state(step: TrainStep, done: int) -> dict[str, object]:
    """Returns the state as it is stored."""
    return RunState(step.model, step.optimizer, done, step.ema).named()
