"""A run from its recipe to its last checkpoint: what `jshard train` does once the devices are there.

Everything that can be refused is refused before the first byte is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jshard import launch
from jshard._live import at_work
from jshard._processes import is_primary
from jshard.api.gradients import loss_scale_of
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.lookup import OF_A_RUN, place_of, steps_in
from jshard.data import Data, DataError, Loader, Tokenizer, local_rows
from jshard.engine.mixing import as_traced
from jshard.errors import FourPartError, RunError
from jshard.inspect.audit import audit
from jshard.launch import StopSignal, stall
from jshard.plans.plan import plan
from jshard.recipes.building import abstract_state, batch_like, check_source
from jshard.recipes.model_file import ModelFile
from jshard.recipes.recipe import Recipe, check_batch, check_recipe
from jshard.recipes.step import EvalStep, HeldModel, Mfu, TrainStep, device_peak, peak_bytes, used_bytes
from jshard.train.compile_cache import keep_programs
from jshard.train.expected import ExpectedStep
from jshard.train.first_loss import explained
from jshard.train.loop import Every, Fitted, evaluate, fit
from jshard.train.memory_copies import MemoryCopies
from jshard.train.progress import Meter, Progress, StepProfile, check_profile, left_to_profile
from jshard.train.records import Jsonl, Trackers, plot_loss
from jshard.train.run_checkpoints import RunCheckpoints
from jshard.train.run_folder import RunFolder
from jshard.train.run_record import RunRecord
from jshard.train.sampling import sample_text
from jshard.train.trackers import check_names, open_trackers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished(Fitted):
    """What came of a run.

    Attributes:
        out: its folder.
        checkpoint: the last one.
        sample: text that the model wrote in the end.
    """

    out: Path
    checkpoint: Place | None
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
    expect: ExpectedStep | None = None,
    init_from: Path | None = None,
    keep_in_memory: int | None = None,
    programs: str | None = None,
    watch: launch.StallWatch | None = None,
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
        sample_tokens: tokens that the model writes in the end, if it is known to be a decoder of text; 0 for none.
        profile: numbers of steps to profile, such as range(11, 16); see `StepProfile`.
        compiler_options: for the step, as `js.compiler_options()` gives them; none by default.
        expect: what the compiled step should be; see `ExpectedStep`.
        init_from: a checkpoint whose parameters a new run begins with; what `jshard.checkpoint` reads. A run that has
            checkpoints of its own goes on from these, and does not read it again.
        keep_in_memory: steps from one copy of the state in the memory of the supervisors to the next; None for none.
        programs: the folder that keeps compiled programs; "beside" for one beside `out`, "none" to compile anew. By
            default as JAX is set.
        watch: ends this process, or has its supervisor end the run, when it makes no progress, or does not stop in
            time when it is asked to; none by default.
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
    if profile is not None:
        check_profile(profile, num_steps=recipe.num_steps)
    check_vocabulary(recipe, data.tokenizer)
    if expect is not None:
        expect.check_request(recipe, mesh)
    loader = _loader(data, recipe, recipe.batch_size, mesh, workers)
    eval_loader = _loader(data, recipe, recipe.batch_size // recipe.accumulate, mesh)
    series = place_of((options or {}).get("checkpoints") or Path(out) / OF_A_RUN)
    if init_from is not None and not (resume and steps_in(series)):
        check_source(model_file, recipe, mesh, init_from)
    say = say if is_primary() else (lambda line: None)
    copies = None
    if keep_in_memory is not None:
        copies = MemoryCopies(keep_in_memory, abstract_state(model_file, recipe, mesh), say)
    if recipe.num_steps <= recipe.warmup_steps and type(recipe).schedule is Recipe.schedule:
        room = f"--set warmup_steps={recipe.num_steps // 10} leaves room for the cosine"
        say(f"warmup_steps={recipe.warmup_steps}: the learning rate rises over all {recipe.num_steps} steps; {room}.")
    record = RunRecord.of(recipe, name=name, model_file=model_file.name, data=data, options=options or {})
    with RunFolder.open(out, record, resume=resume) as folder:
        for notice in folder.notices:
            say(notice)
        if programs is not None:
            say(keep_programs(Path(out).parent, programs))
        stop = StopSignal()
        job = _Job(
            model_file=model_file,
            recipe=recipe,
            mesh=mesh,
            data=data,
            folder=folder,
            checkpoints=RunCheckpoints(model_file, recipe, mesh, folder, say, copies=copies),
            say=say,
            stop=stop,
            watch=watch,
            track=track,
            profile=profile,
            compiler_options=compiler_options,
            expect=expect,
            init_from=init_from,
            sample_tokens=sample_tokens,
        )
        return job.run(loader, eval_loader)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """The part of a run that happens with its folder locked and signals caught."""

    model_file: ModelFile
    recipe: Recipe
    mesh: Mesh
    data: Data
    folder: RunFolder
    checkpoints: RunCheckpoints
    say: Callable[[str], object]
    stop: StopSignal
    watch: launch.StallWatch | None
    track: Sequence[str]
    profile: range | None
    compiler_options: Mapping[str, Any] | None
    expect: ExpectedStep | None
    init_from: Path | None
    sample_tokens: int
    at_the_end: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    def run(self, loader: Loader, eval_loader: Loader) -> Finished:
        """Trains; an error carries a note on how to go on after it."""
        try:
            with self._watching(), self.at_the_end:
                with self.stop:
                    model, optimizer, start_step = self.checkpoints.state(self.init_from)
                    if (scale := loss_scale_of(optimizer)) is not None:
                        why = "units are in float16" if self.recipe.loss_scale == "auto" else "the recipe says so"
                        self.say(f"loss scale: dynamic, now {float(scale.scale):g}, as {why}")
                    if start_step < self.recipe.num_steps:
                        step = self._step(model, optimizer, start_step)
                        del model, optimizer  # the step holds them, and gives their memory to its results
                        fitted = self._fit(step, start_step, loader, eval_loader)
                        model = step.model
                    else:
                        fitted = Fitted(start_step)
                        asked = f"{self.recipe.num_steps} were asked for; --steps {2 * start_step} continues it."
                        self.say(f"nothing is left to train: {start_step} steps are done, and {asked}")
                sample = self._sample(model, fitted)
                finished = self._finish(sample, fitted)
            self.folder.ended("done" if fitted.stopped_by is None else f"stopped by {fitted.stopped_by.name}")
            self._say_attempts()
            return finished
        except Exception as error:
            if isinstance(error, FourPartError):  # else a process may be lost, and the supervisor knows which
                with contextlib.suppress(FourPartError):
                    self.folder.ended(f"{type(error).__name__}: {error.what}")
            if self.checkpoints.is_begun:
                error.add_note(self.checkpoints.how_to_go_on())
            raise

    def _say_attempts(self) -> None:
        if (line := self.folder.said_of_attempts()) is not None:
            self.say(line)

    def _watching(self) -> contextlib.AbstractContextManager[object]:
        if self.watch is None:
            return contextlib.nullcontext()
        alone = None if launch.is_worker() else self.checkpoints.kept
        return self.watch.over(self.folder.path / "stalls", asked_at=self.stop.asked_s, alone=alone, say=self._warn)

    def _warn(self, line: str) -> None:
        print(f"\n{line}", file=sys.stderr, flush=True)

    def _at_work(self, what: str) -> contextlib.AbstractContextManager[object]:
        launch.doing(what)
        return at_work(what, say=self.say, stream=sys.stdout if self.folder.is_primary else None)

    def _step(self, model: nnx.Module, optimizer: nnx.Optimizer[Any], start_step: int) -> TrainStep:
        self.folder.started(step=start_step, mesh=self.mesh)
        self._say_attempts()
        self.checkpoints.is_begun = True
        like = batch_like(self.data, self.recipe.batch_size, self.mesh)
        how = {"accumulate": self.recipe.accumulate, "compiler_options": self.compiler_options}
        rate = self.recipe.recorded_rate
        with self._at_work("compiling the step"):
            step = TrainStep(self.model_file.loss_fn, model, optimizer, like, learning_rate=rate, **how)
        if self.expect is not None:
            planned = as_traced(plan(step.model, wrt=self.model_file.wrt))
            found = audit(step.compiled, plan=planned, accumulate=self.recipe.accumulate)
            self.say(self.expect.check(found, platform=self._devices[0].platform))
        return step

    def _fit(self, step: TrainStep, start_step: int, loader: Loader, eval_loader: Loader) -> Fitted:
        recipe, checkpoints = self.recipe, self.checkpoints
        like = batch_like(self.data, eval_loader.batch_size, self.mesh)
        with self._at_work("compiling the evaluation"):
            eval_step = EvalStep(self.model_file.loss_fn, step, like)
        tracker, note = self._tracker(step, start_step)
        profile = self._profile(step, start_step, note)
        start_sample = self.folder.samples_before(start_step)
        batches = loader.train(recipe.num_steps, start_step=start_step, start_sample=start_sample)

        def evaluated(done: int) -> dict[str, float]:
            found = evaluate(step, eval_step, eval_loader.held_out(recipe.eval_sequences))
            checkpoints.worth(done, found["loss"])
            return found

        self.folder.trains()
        try:
            with checkpoints:  # whatever comes, a save at work comes to its end
                fitted = fit(
                    step,
                    batches,
                    num_steps=recipe.num_steps,
                    start_step=start_step,
                    tracker=tracker,
                    meter=self._meter(step, start_step, start_sample),
                    evaluation=Every(steps=recipe.eval_every, do=evaluated),
                    checkpoint=Every(
                        steps=recipe.checkpoint_every,
                        do=lambda done: checkpoints.save(step, done),
                        check=checkpoints.check,
                    ),
                    copies=checkpoints.every_copy(step),
                    stop=self.stop,
                    profile=profile,
                    first_loss=functools.partial(self._first_loss, step, start_step),
                )
                launch.doing(stall.SAVE)
                checkpoints.wait()
            return fitted
        finally:
            launch.doing("ending")
            with contextlib.suppress(ValueError):  # the thread that reads has it, and waits for data that never come
                batches.close()
            if tracker is not None:
                tracker.close_needed()

    def _first_loss(
        self, trained: TrainStep, start_step: int, step: int, batch: Any, wrong: Mapping[str, float]
    ) -> RunError:
        """Looks for the cause with the parameters from before the step, whose arrays make room for them."""
        launch.doing("looking for a NaN")
        self.say(f"looking for where {' and '.join(wrong)} of step {step} got NaN/inf, operation by operation ...")
        trained.delete()
        model, source = self.checkpoints.model_before(start_step, self.init_from)
        return explained(self.model_file, self.recipe, model, batch, step=step, wrong=wrong, source=source)

    def _tracker(self, step: TrainStep, start_step: int) -> tuple[Trackers | None, Callable[[str], object]]:
        """What records the run, and what prints a line while it does."""
        if not self.folder.is_primary:
            return None, self.say
        folder, resume_after = self.folder, start_step if self.folder.is_resumed else None
        optional = open_trackers(self.track, out=folder.path, config=folder.config, resume_after=resume_after)
        record = _Timed(folder.metrics, resume_after=resume_after)
        progress = Progress(self.recipe.num_steps, peak_label=peak_bytes(self._devices, step.peak_bytes)[1])
        trackers = Trackers(record, progress, optional=optional, warn=progress.note)
        self.at_the_end.callback(trackers.close)  # W&B also takes the plot and the sample
        return trackers, progress.note

    def _profile(self, step: TrainStep, start_step: int, note: Callable[[str], object]) -> StepProfile | None:
        if self.profile is None:
            return None
        left, said = left_to_profile(self.profile, start_step=start_step)
        if said is not None:
            note(said)
        return StepProfile(self.folder.path, left, program=step.compiled.as_text, say=note) if left else None

    def _meter(self, step: TrainStep, start_step: int, start_sample: int) -> Meter:
        tokens, batch_size = self.data.tokens_per_sample, self.recipe.batch_size
        mfu = self._mfu(step, tokens) if self.folder.is_primary else None
        return Meter(
            tokens_per_step=None if tokens is None else batch_size * tokens,
            samples_per_step=batch_size if tokens is None else None,
            start_step=start_step,
            seen=start_sample * (tokens or 1),
            mfu=mfu,
            peak_bytes=lambda: peak_bytes(self._devices, step.peak_bytes)[0],
            used_bytes=lambda: used_bytes(self._devices),
        )

    def _mfu(self, step: TrainStep, tokens: int | None) -> Mfu | None:
        """How the share of the peak is computed. One process asks: several on a host would take each other's cores."""
        peak = device_peak(self._devices)
        if peak is not None and self.model_file.flops is None and tokens is None:
            how = "set Data(tokens_per_sample=...), or, for the MFU alone, flops(recipe) in the model file."
            self.say(f"samples/s instead of tokens/s, and no MFU: {how}")
            return None
        if peak is None:
            return None
        planned = plan(step.model, wrt=self.model_file.wrt)
        mfu = Mfu(*self.model_file.step_flops(self.recipe, planned, tokens), peak)
        self.say(mfu.describe())
        return mfu

    @property
    def _devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    def _sample(self, model: nnx.Module, fitted: Fitted) -> str | None:
        """What the model writes in the end: the work of all processes, one of which may not come to it."""
        if fitted.stopped_by is not None or self.sample_tokens <= 0:
            return None
        launch.doing(stall.SAMPLE)
        asked = self.model_file, self.recipe, model, self.data, self.mesh
        return sample_text(*asked, num_tokens=self.sample_tokens)

    def _finish(self, sample: str | None, fitted: Fitted) -> Finished:
        folder = self.folder
        if folder.is_primary:
            try:
                if sample is not None:
                    (folder.path / "sample.txt").write_text(sample + "\n")
                plot_loss(folder.metrics, folder.path / "loss.png")
            except (OSError, RunError) as error:  # without them the run is still a whole one
                self.say(f"sample.txt or loss.png could not be written: {error}")
        latest = self.checkpoints.latest()
        return Finished(**vars(fitted), out=folder.path, checkpoint=latest, sample=sample)


class _Timed(Jsonl):
    """The record of the run, with the time of each line."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        super().log(step, {**scalars, "time": round(time.time(), 3)})


def _loader(data: Data, recipe: Recipe, batch_size: int, mesh: Mesh, workers: int = 0) -> Loader:
    rows = local_rows(batch_size, mesh)
    return Loader(data=data, batch_size=batch_size, seed=recipe.seed, rows=rows, workers=workers)


def evaluated(model_file: ModelFile, recipe: Recipe, held: HeldModel, data: Data) -> dict[str, float]:
    """Mean "loss" and metrics over the held-out samples, as a run has them between its steps. All processes call it."""
    loader = _loader(data, recipe, recipe.batch_size // recipe.accumulate, held.mesh)
    eval_step = EvalStep(model_file.loss_fn, held, batch_like(data, loader.batch_size, held.mesh))
    return evaluate(held, eval_step, loader.held_out(recipe.eval_sequences))


def check_vocabulary(recipe: Recipe, tokenizer: Tokenizer | None) -> None:
    """Checks that the model has a row for every id of the tokenizer."""
    if tokenizer is None:
        return
    has, needs = getattr(recipe.model, "vocab_size", None), tokenizer.vocab_size
    if isinstance(has, int) and has < needs:
        raise DataError(
            "The model's vocabulary is smaller than the tokenizer's.",
            where=f"{type(recipe.model).__name__}.vocab_size = {has}",
            why=f"the tokenizer ({tokenizer.name}) gives ids up to {needs - 1}.",
            do=f"--set model.vocab_size={needs}",
        )
