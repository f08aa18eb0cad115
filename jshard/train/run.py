"""A run from its recipe to its last checkpoint: what `jshard train` does once the devices are there.

Everything that can be refused is refused before the first byte is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from flax import nnx
from jax.sharding import Mesh

from jshard import launch
from jshard._live import at_work
from jshard._processes import is_primary
from jshard.checkpoint.lookup import OF_A_RUN, steps_in
from jshard.data import Data, DataError, Loader, local_rows
from jshard.errors import RunError, ShardingError
from jshard.plans.plan import plan
from jshard.recipes.building import batch_like
from jshard.recipes.loss_scale import loss_scale_of
from jshard.recipes.mfu import Mfu, device_peak, peak_bytes
from jshard.recipes.model_file import ModelFile
from jshard.recipes.recipe import Recipe, check_batch, check_recipe
from jshard.recipes.state import check_source
from jshard.recipes.step import EvalStep, TrainStep
from jshard.train.first_loss import explained
from jshard.train.jsonl import Jsonl, plot_loss
from jshard.train.loop import Every, Fitted, evaluate, fit, sample_text
from jshard.train.profile import StepProfile, check_profile, left_to_profile
from jshard.train.progress import Meter, Progress
from jshard.train.run_checkpoints import RunCheckpoints
from jshard.train.run_folder import RunFolder
from jshard.train.run_record import RunRecord
from jshard.train.stop import StopSignal
from jshard.train.trackers import Tracker, Trackers, check_names, open_trackers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """What came of a run.

    Attributes:
        step: the last step that was done.
        val_loss: the last evaluation's; None if the run was stopped before one.
        stopped_by: the signal that ended it early.
        out: its folder.
        checkpoint: the last one.
        sample: text that the model wrote in the end.
    """

    step: int
    val_loss: float | None
    stopped_by: signal.Signals | None
    out: Path
    checkpoint: Path | None
    sample: str | None


def run_recipe(
    model_file: ModelFile,
    recipe: Recipe,
    *,
    mesh: Mesh,
    data: Data,
    out: str | Path,
    name: str = "",
    resume: bool = False,
    track: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    workers: int = 0,
    sample_tokens: int = 256,
    profile: range | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    init_from: Path | None = None,
    stop_deadline_s: float | None = None,
    say: Callable[[str], object] = print,
) -> Finished:
    """Trains a recipe, and writes the record of the run and its checkpoints into `out`.

    `out` receives run.json (what was asked for), metrics.jsonl (a line per step and evaluation), checkpoints/,
    loss.png and sample.txt. SIGTERM and Ctrl-C save after the step that is at work, and the function returns. In
    several processes all of them call it, and the first one writes and speaks.

    Args:
        model_file: the model, its annotation and its loss.
        recipe: what to train.
        mesh: the devices.
        data: what to learn from.
        out: a folder that is empty or does not exist, or with `resume` that of the run to continue.
        name: of the recipe, for the record.
        resume: continue from the last checkpoint in `out`, bit for bit; from the first step where there is none.
        track: further trackers, "tensorboard" and "wandb".
        options: what the command line was given; a resumed run finds it in run.json.
        workers: processes that read the data; see `Loader`.
        sample_tokens: tokens that the model writes in the end, if its file says how; 0 for none.
        profile: numbers of steps to profile, such as range(11, 16); see `StepProfile`.
        compiler_options: for the step, as `js.compiler_options()` gives them; none by default.
        init_from: a checkpoint whose parameters a new run begins with; what `jshard.checkpoint` reads. A run that has
            checkpoints of its own goes on from these, and does not read it again.
        stop_deadline_s: how long after the signal a run that is asked to stop waits for its saves; no limit by default.
        say: prints a line.

    Returns:
        What came of it.

    Raises:
        ShardingError: something asked for cannot be done; nothing was written.
        RunError: the run has failed; the text names its last checkpoint.
    """
    model_file = dataclasses.replace(model_file, data=lambda recipe: data)  # whoever asks it for a batch: it is read
    check_recipe(recipe)
    check_batch(recipe, mesh)
    check_names(track)
    _check_sample(sample_tokens)
    if profile is not None:
        check_profile(profile, num_steps=recipe.num_steps)
    _check_vocabulary(recipe, data)
    loader = _loader(data, recipe, recipe.batch_size, mesh, workers)
    eval_loader = _loader(data, recipe, recipe.batch_size // recipe.accumulate, mesh)
    if init_from is not None and not (resume and steps_in(Path(out) / OF_A_RUN)):
        check_source(model_file, recipe, mesh, init_from)
    say = say if is_primary() else (lambda line: None)
    record = RunRecord.of(recipe, name=name, model_file=model_file.name, data=data, options=options or {})
    with RunFolder.open(out, record, resume=resume) as folder:
        for notice in folder.notices:
            say(notice)
        job = _Job(model_file, recipe, mesh, data, folder, say, profile, compiler_options, init_from, stop_deadline_s)
        return job.run(loader, eval_loader, track, sample_tokens)


class _Job:
    """The part of a run that happens with its folder locked and signals caught."""

    def __init__(
        self,
        model_file: ModelFile,
        recipe: Recipe,
        mesh: Mesh,
        data: Data,
        folder: RunFolder,
        say: Callable[[str], object],
        profile: range | None,
        compiler_options: Mapping[str, Any] | None,
        init_from: Path | None,
        stop_deadline_s: float | None,
    ) -> None:
        self._compiler_options, self._init_from, self._stop = compiler_options, init_from, StopSignal()
        self._model_file, self._recipe, self._mesh, self._data = model_file, recipe, mesh, data
        self._folder, self._say, self._to_profile = folder, say, profile
        left_s = lambda: self._stop.left_s(stop_deadline_s)
        self._checkpoints = RunCheckpoints(model_file, recipe, mesh, folder, say, left_s=left_s)

    def run(self, loader: Loader, eval_loader: Loader, track: Sequence[str], sample_tokens: int) -> Finished:
        """Trains; an error carries a note on how to go on after it."""
        try:
            with self._stop:
                model, optimizer, start_step = self._checkpoints.state(self._init_from)
                if (scale := loss_scale_of(optimizer)) is not None:
                    why = "units are in float16" if self._recipe.loss_scale == "auto" else "the recipe says so"
                    self._say(f"loss scale: dynamic, now {float(scale.scale):g}, as {why}")
                if start_step < self._recipe.num_steps:
                    step = self._step(model, optimizer, start_step)
                    del model, optimizer  # the step holds them, and gives their memory to its results
                    fitted = self._fit(step, start_step, loader, eval_loader, track)
                    model = step.model
                else:
                    fitted = Fitted(start_step)
                    self._say(self._nothing_to_do(start_step))
            return self._finish(model, fitted, sample_tokens)
        except Exception as error:
            if self._checkpoints.is_begun:
                error.add_note(self._checkpoints.how_to_go_on())
            raise

    def _step(self, model: nnx.Module, optimizer: nnx.Optimizer[Any], start_step: int) -> TrainStep:
        recipe, loss_fn = self._recipe, self._model_file.loss_fn
        self._folder.started(step=start_step, mesh=self._mesh)
        self._checkpoints.is_begun = True
        like = batch_like(self._data, recipe.batch_size, self._mesh)
        options, accumulate = self._compiler_options, recipe.accumulate
        with at_work("compiling the step", say=self._say, stream=self._terminal):
            return TrainStep(loss_fn, model, optimizer, like, accumulate=accumulate, compiler_options=options)

    def _nothing_to_do(self, done: int) -> str:
        asked = f"{self._recipe.num_steps} were asked for"
        return f"nothing is left to train: {done} steps are done, and {asked}; --steps {2 * done} goes on."

    def _fit(
        self, step: TrainStep, start_step: int, loader: Loader, eval_loader: Loader, track: Sequence[str]
    ) -> Fitted:
        recipe = self._recipe
        like = batch_like(self._data, eval_loader.batch_size, self._mesh)
        with at_work("compiling the evaluation", say=self._say, stream=self._terminal):
            eval_step = EvalStep(self._model_file.loss_fn, step, like)
        tracker, note = self._tracker(step, start_step, track)
        profile = self._profile(step, start_step, note)
        start_sample = self._folder.samples_before(start_step)
        batches = loader.train(recipe.num_steps, start_step=start_step, start_sample=start_sample)
        try:
            with self._checkpoints:  # whatever comes, a save at work comes to its end
                fitted = fit(
                    step,
                    batches,
                    num_steps=recipe.num_steps,
                    start_step=start_step,
                    tracker=tracker,
                    meter=self._meter(step),
                    evaluation=Every(
                        steps=recipe.eval_every,
                        do=lambda done: self._evaluate(step, eval_step, eval_loader, done),
                    ),
                    checkpoint=Every(
                        steps=recipe.checkpoint_every,
                        do=lambda done: self._checkpoints.save(step, done),
                        check=self._checkpoints.check,
                    ),
                    stop=self._stop,
                    profile=profile,
                    first_loss=functools.partial(self._first_loss, step, start_step),
                )
                self._checkpoints.wait()
            return fitted
        finally:
            with contextlib.suppress(ValueError):  # the thread that reads has it, and waits for data that never come
                batches.close()
            tracker.close()

    def _first_loss(
        self, trained: TrainStep, start_step: int, step: int, batch: Any, wrong: Mapping[str, float]
    ) -> RunError:
        """Looks for the cause with the parameters from before the step, whose arrays make room for them."""
        self._say(f"looking for where {' and '.join(wrong)} of step {step} got NaN/inf, operation by operation ...")
        trained.delete()
        model, source = self._checkpoints.model_before(start_step, self._init_from)
        return explained(self._model_file, self._recipe, model, batch, step=step, wrong=wrong, source=source)

    def _tracker(
        self, step: TrainStep, start_step: int, track: Sequence[str]
    ) -> tuple[Tracker, Callable[[str], object]]:
        """What records the run, and what prints a line while it does."""
        if not self._folder.is_primary:
            return _Notes(), self._say
        folder, resume_after = self._folder, start_step if self._folder.is_resumed else None
        optional = open_trackers(track, out=folder.path, config=folder.config, resume_after=resume_after)
        record = Jsonl(folder.metrics, resume_after=resume_after)
        progress = Progress(self._recipe.num_steps, peak_label=peak_bytes(self._devices, step.peak_bytes)[1])
        return Trackers(_Notes(), record, progress, optional=optional, warn=progress.note), progress.note

    def _profile(self, step: TrainStep, start_step: int, note: Callable[[str], object]) -> StepProfile | None:
        if self._to_profile is None:
            return None
        left, said = left_to_profile(self._to_profile, start_step=start_step)
        if said is not None:
            note(said)
        return StepProfile(self._folder.path, left, program=step.compiled.as_text, say=note) if left else None

    def _meter(self, step: TrainStep) -> Meter:
        tokens, recipe = self._data.tokens_per_sample, self._recipe
        # One process measures: several on one host would take the cores from each other.
        mfu, peak = None, device_peak(self._devices) if self._folder.is_primary else None
        if peak is not None and (self._model_file.flops is not None or tokens is not None):
            planned = plan(step.model, wrt=self._model_file.wrt)
            mfu = Mfu(*self._model_file.step_flops(recipe, planned, tokens or 1), peak)
            self._say(mfu.describe())
        return Meter(
            tokens_per_step=None if tokens is None else recipe.batch_size * tokens,
            samples_per_step=recipe.batch_size if tokens is None else None,
            mfu=mfu,
            peak_bytes=lambda: peak_bytes(self._devices, step.peak_bytes)[0],
        )

    @property
    def _terminal(self) -> TextIO | None:
        """Where this process says what is at work."""
        return sys.stdout if self._folder.is_primary else None

    @property
    def _devices(self) -> list[Any]:
        return list(self._mesh.devices.flat)

    def _evaluate(self, step: TrainStep, eval_step: EvalStep, loader: Loader, done: int) -> float:
        val_loss = evaluate(step, eval_step, loader.held_out(self._recipe.eval_sequences))
        self._checkpoints.worth(done, val_loss)
        return val_loss

    def _finish(self, model: nnx.Module, fitted: Fitted, sample_tokens: int) -> Finished:
        sample = None
        if fitted.stopped_by is None and sample_tokens:
            sample = sample_text(
                self._model_file,
                model,
                self._data,
                self._mesh,
                num_tokens=sample_tokens,
                seed=self._recipe.seed,
            )
        if self._folder.is_primary:
            self._write_end(sample)
        return Finished(
            step=fitted.step,
            val_loss=fitted.val_loss,
            stopped_by=fitted.stopped_by,
            out=self._folder.path,
            checkpoint=self._checkpoints.latest(),
            sample=sample,
        )

    def _write_end(self, sample: str | None) -> None:
        """The sample and the picture; without them the run is still a whole one."""
        try:
            if sample is not None:
                (self._folder.path / "sample.txt").write_text(sample + "\n")
            plot_loss(self._folder.metrics, self._folder.path / "loss.png")
        except (OSError, RunError) as error:
            self._say(f"sample.txt or loss.png could not be written: {error}")


class _Notes:
    """Tells the supervisor of this process, if there is one, how far it is."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        launch.note(step=step)

    def close(self) -> None:
        pass


def _loader(data: Data, recipe: Recipe, batch_size: int, mesh: Mesh, workers: int = 0) -> Loader:
    rows = local_rows(batch_size, mesh)
    return Loader(data=data, batch_size=batch_size, seed=recipe.seed, rows=rows, workers=workers)


def _check_sample(num_tokens: int) -> None:
    if num_tokens < 0:
        raise ShardingError(
            "The model cannot write fewer than no tokens.",
            where=f"--sample-tokens {num_tokens}",
            why="it is the length of the sample in the end; 0 is none.",
            do="--sample-tokens 0",
        )


def _check_vocabulary(recipe: Recipe, data: Data) -> None:
    if data.tokenizer is None:
        return
    has, needs = getattr(recipe.model, "vocab_size", None), data.tokenizer.vocab_size
    if isinstance(has, int) and has < needs:
        raise DataError(
            "The model's vocabulary is smaller than the tokenizer's.",
            where=f"{type(recipe.model).__name__}.vocab_size = {has}",
            why=f"the tokenizer ({data.tokenizer.name}) gives ids up to {needs - 1}.",
            do=f"--set model.vocab_size={needs}",
        )
