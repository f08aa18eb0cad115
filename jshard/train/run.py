"""A run from its recipe to its last checkpoint: the part of `jshard train` after the devices are ready.

Every invalid request is refused before the first byte is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from jshard._paths import expanded
from jshard._processes import all_or_none, is_primary
from jshard._text import counted
from jshard.checkpoint.lookup import OF_A_RUN, place_of, steps_in
from jshard.checkpoint.restoring import Extra
from jshard.data import Data, DataError, Loader, Tokenizer, local_rows
from jshard.errors import ShardingError
from jshard.launch import StopSignal
from jshard.recipes.building import abstract_model, abstract_state, batch_like, check_source
from jshard.recipes.model_file import ModelFile
from jshard.recipes.recipe import Recipe, check_batch, check_recipe
from jshard.recipes.step import EvalStep, HeldModel, metric_names
from jshard.train import trackers
from jshard.train.compile_cache import keep_programs
from jshard.train.evaluation import evaluate
from jshard.train.memory_copies import MemoryCopies
from jshard.train.monitoring import monitor_of
from jshard.train.progress import check_profile
from jshard.train.records import Tracker
from jshard.train.run_checkpoints import RunCheckpoints
from jshard.train.run_folder import RunFolder, first_failure
from jshard.train.run_options import RunOptions
from jshard.train.run_record import RunRecord
from jshard.train.training_run import Finished, TrainingRun


def run_recipe(model_file: ModelFile, recipe: Recipe, options: RunOptions) -> Finished:
    """Trains a recipe, and writes the record of the run and its checkpoints into a folder.

    The folder receives run.json (the request), metrics.jsonl (a line per step and evaluation), checkpoints/, loss.png
    and sample.txt. On SIGTERM or Ctrl-C the current step is finished and saved, and the function returns. With several
    processes all of them call it; only the first writes and prints.

    Args:
        model_file: the model, its annotation and its loss.
        recipe: what to train.
        options: the devices, the data, the folder and the rest.

    Returns:
        The result of the run.

    Raises:
        ShardingError: the request cannot be met; nothing was written.
        RunError: the run has failed; the text names its last checkpoint.

    Examples:
        >>> options = RunOptions(mesh=js.mesh(), data=data, out="runs/gpt")
        >>> js.train.run_recipe(model_file, recipe, options)
    """
    model_file = dataclasses.replace(model_file, data=lambda recipe: options.data)  # the data are already read
    options = _for_this_process(options)
    _check_request(recipe, options)
    loader = _loader(options.data, recipe, recipe.batch_size, options.mesh, options.workers)
    # Of the size of a microbatch, for which the step has memory.
    eval_loader = _loader(options.data, recipe, recipe.batch_size // recipe.accumulate, options.mesh)
    _check_monitor(model_file, recipe, options, eval_loader.batch_size)
    check_initial_parameters(
        model_file,
        recipe,
        options.mesh,
        options.init_from,
        extra=options.extra,
        resume=options.resume,
        series=options.command_options.get("checkpoints") or Path(options.out) / OF_A_RUN,
        adapters=options.adapters,
    )
    # Before the folder is opened: it refuses a machine without room for the copies.
    copies = None
    if options.keep_in_memory is not None:
        state = abstract_state(model_file, recipe, options.mesh)
        copies = MemoryCopies(options.keep_in_memory, state, options.say)
    _say_if_only_warmup(recipe, options.say)
    _say_if_average_is_coarse(recipe, options.say)
    record = RunRecord.of(
        recipe,
        name=options.name,
        model_file=model_file.name,
        data=options.data,
        options=options.command_options,
    )
    out = Path(options.out)
    # Up to here nothing was written there: every request that cannot be met was refused.
    with RunFolder.open(out, record, resume=options.resume) as folder:
        for notice in folder.notices:
            options.say(notice)
        if options.programs is not None:
            options.say(keep_programs(out.parent, options.programs))
        run = TrainingRun(
            model_file=model_file,
            recipe=recipe,
            options=options,
            folder=folder,
            checkpoints=RunCheckpoints(model_file, recipe, options, folder, copies=copies),
            stop=StopSignal(),
        )
        return run.run(loader, eval_loader)


def _for_this_process(options: RunOptions) -> RunOptions:
    """Returns the options with the home folder in place of `~` in paths; only the first process prints."""
    init_from = options.init_from
    if init_from is not None:
        init_from = expanded(init_from)
    say = options.say if is_primary() else _say_nothing
    return dataclasses.replace(options, out=expanded(options.out), init_from=init_from, say=say)


def _say_nothing(line: str) -> None:
    pass


def _check_request(recipe: Recipe, options: RunOptions) -> None:
    """Refuses a request that cannot be met, before anything is read, written or compiled."""
    check_recipe(recipe)
    check_batch(recipe, options.mesh)
    check_trackers(options.track)
    if options.profile is not None:
        check_profile(options.profile, num_steps=recipe.num_steps)
    check_vocabulary(recipe, options.data.tokenizer)
    if options.expect is not None:
        options.expect.check_request(recipe, options.mesh)


def _check_monitor(model_file: ModelFile, recipe: Recipe, options: RunOptions, batch_size: int) -> None:
    """Refuses a metric that no evaluation returns."""
    if recipe.monitor == Recipe.monitor:  # every evaluation has a loss
        return
    model = abstract_model(model_file, recipe, options.mesh)
    names = metric_names(model_file.loss_fn, model, batch_like(options.data, batch_size, options.mesh))
    prefixes = ["val_"] if recipe.ema_decay is None else ["val_", "val_ema_"]
    monitor_of(recipe).check([f"{prefix}{name}" for prefix in prefixes for name in names])


def check_initial_parameters(
    model_file: ModelFile,
    recipe: Recipe,
    mesh: Mesh,
    init_from: Path | None,
    *,
    extra: Extra,
    resume: bool,
    series: str | Path | None,
    adapters: Path | None = None,
) -> None:
    """Refuses initial parameters that do not fit, unless the run continues from its own checkpoints.

    Args:
        model_file: the model.
        recipe: what to train.
        mesh: the devices.
        init_from: where the parameters are; None if they are new.
        extra: what to do with those that the model has no place for.
        resume: whether the run continues.
        series: where its own checkpoints are; None if its folder will be a new one.
        adapters: a folder of PEFT beside them.
    """
    # Looked up in any case, and now: a bucket may be missing, or refuse the user.
    is_begun = series is not None and bool(steps_in(place_of(series)))
    # A run that continues from its own checkpoints does not read the source again, which may be gone.
    if init_from is None or (resume and is_begun):
        return
    check_source(model_file, recipe, mesh, init_from, extra=extra, adapters=adapters)


def _say_if_only_warmup(recipe: Recipe, say: Callable[[str], object]) -> None:
    """Says that the learning rate only rises; a recipe with a schedule of its own has its own warmup."""
    if recipe.num_steps > recipe.warmup_steps or type(recipe).schedule is not Recipe.schedule:
        return
    # One step of warmup at least, where there is another one for the cosine.
    warmup_steps = min(max(recipe.num_steps // 10, 1), recipe.num_steps - 1)
    advice = f"--set warmup_steps={warmup_steps} leaves room for the cosine"
    steps = counted(recipe.num_steps, "step")
    say(f"warmup_steps={recipe.warmup_steps}: the learning rate rises over all {steps}; {advice}.")


def _say_if_average_is_coarse(recipe: Recipe, say: Callable[[str], object]) -> None:
    """Says that the dtype of the average rounds away most updates."""
    if recipe.ema_decay is None or recipe.ema_dtype is None:
        return
    share = 1 - recipe.ema_decay
    # The distance from 1 to the next number: of a smaller share of a difference nothing may remain.
    resolution = float(jnp.finfo(recipe.ema_dtype).eps)
    if share < resolution:
        dtype = recipe.ema_dtype
        say(f"ema_dtype={dtype} rounds to {resolution:g}, and an update is {share:g} of the difference: most are lost.")


def _loader(data: Data, recipe: Recipe, batch_size: int, mesh: Mesh, workers: int = 0) -> Loader:
    rows = local_rows(batch_size, mesh)
    return Loader(data=data, batch_size=batch_size, seed=recipe.seed, rows=rows, workers=workers)


def evaluated(model_file: ModelFile, recipe: Recipe, held: HeldModel, data: Data) -> dict[str, float]:
    """Computes the mean "loss" and metrics over the held-out samples, as during a run. All processes call it."""
    loader = _loader(data, recipe, recipe.batch_size // recipe.accumulate, held.mesh)
    eval_step = EvalStep(model_file.loss_fn, held, batch_like(data, loader.batch_size, held.mesh))
    return evaluate(held, eval_step, loader.held_out(recipe.eval_sequences))


def check_trackers(track: Sequence[str | Tracker]) -> None:
    """Refuses trackers that the run could not open, before anything is read, written or compiled.

    All processes call it: a login is needed in the first one only, and if that has none, all raise the error.
    """
    trackers.check_trackers(track)
    # The others have no login, and wait for the outcome.
    error = None
    if is_primary():
        try:
            trackers.check_login(trackers.names_in(track))
        except ShardingError as refused:
            error = refused
    all_or_none("login of the trackers", None, error, failed=first_failure)


def check_vocabulary(recipe: Recipe, tokenizer: Tokenizer | None) -> None:
    """Checks that the model has a row for every id of the tokenizer."""
    if tokenizer is None:
        return
    # By convention: a model file may call it otherwise, and is then not checked.
    rows = getattr(recipe.model, "vocab_size", None)
    num_ids = tokenizer.vocab_size
    if isinstance(rows, int) and rows < num_ids:
        raise DataError(
            "The model's vocabulary is smaller than the tokenizer's.",
            where=f"{type(recipe.model).__name__}.vocab_size = {rows}",
            why=f"the tokenizer ({tokenizer.name}) has ids up to {num_ids - 1}.",
            do=f"--set model.vocab_size={num_ids}",
        )
