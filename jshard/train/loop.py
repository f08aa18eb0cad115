"""The training loop: build sharded, step, evaluate, leave a record.

The pieces are public and plain; `fit` strings them together, and a script of one's own can do the
same with other pieces in between.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jshard as js
from jshard import checkpoint
from jshard.train import data
from jshard.train.metrics import MetricsWriter, Progress, plot_loss
from jshard.train.model_file import Batch, LossFn, ModelFile
from jshard.train.recipe import Recipe

TrainStep = Callable[[Any, nnx.Optimizer, Batch], dict[str, jax.Array]]


def create(model_file: ModelFile, recipe: Recipe, mesh: Mesh) -> tuple[nnx.Module, nnx.Optimizer[Any]]:
    """The model and its optimizer, every leaf born sharded."""
    model = js.shard_init(
        lambda: model_file.build(recipe.model, nnx.Rngs(recipe.seed)),
        lambda model: model_file.annotate(model, mesh),
        mesh=mesh,
    )
    return model, js.shard_optimizer(model, recipe.optimizer())


def make_train_step(loss_fn: LossFn, *, accumulate: int = 1) -> TrainStep:
    """A compiled step: loss, gradients, update.

    Args:
        loss_fn: the mean loss over the global batch.
        accumulate: microbatches that the batch is cut into.

    Returns:
        A function of (model, optimizer, batch) that updates the first two in place and returns the
        scalars "loss" and "grad_norm" (before clipping).
    """

    # The old parameters and moments are donated: they are dead once the new ones are there.
    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def train_step(model: Any, optimizer: nnx.Optimizer, batch: Batch) -> dict[str, jax.Array]:
        loss, grads = js.value_and_grad(loss_fn, accumulate=accumulate)(model, batch)
        optimizer.update(model, grads)
        return {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    return train_step


def make_eval_step(loss_fn: LossFn) -> Callable[[Any, Batch], jax.Array]:
    """The compiled loss, without gradients."""
    return nnx.jit(loss_fn)


def evaluate(
    eval_step: Callable[[Any, Batch], jax.Array],
    model: nnx.Module,
    batches: Iterable[dict[str, np.ndarray]],
    mesh: Mesh,
) -> float:
    """Mean loss over `batches`, all of one size, with dropout off."""
    model.eval()
    try:
        losses = [float(eval_step(model, js.shard_batch(batch, mesh))) for batch in batches]
    finally:
        model.train()
    return sum(losses) / len(losses)


def fit(model_file: ModelFile, recipe: Recipe, *, mesh: Mesh, corpus: data.Corpus, out: Path) -> float:
    """Trains a recipe from scratch and writes the record of the run into `out`.

    `out` (made here, by the first process) receives recipe.json, metrics.jsonl with a line per
    step, loss.png, and the final state in checkpoint/.

    Args:
        model_file: the model, its annotation and its loss.
        recipe: what to train.
        mesh: the devices.
        corpus: the text.
        out: a folder that does not exist yet.

    Returns:
        The validation loss after the last step.

    Raises:
        ShardingError: the batch does not split over the mesh, or the text is too short.
    """
    loader = data.Loader(
        corpus=corpus,
        sequence_length=recipe.sequence_length,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        rows=data.local_rows(recipe.batch_size, mesh),
    )
    if jax.process_index() == 0:
        out.mkdir(parents=True)
        (out / "recipe.json").write_text(json.dumps(dataclasses.asdict(recipe), indent=2, default=str) + "\n")
    model, optimizer = create(model_file, recipe, mesh)
    train_step = make_train_step(model_file.loss_fn, accumulate=recipe.accumulate)
    eval_step = make_eval_step(model_file.loss_fn)
    progress = Progress(recipe.num_steps, recipe.batch_size * recipe.sequence_length)
    val_loss = float("nan")
    with MetricsWriter(out / "metrics.jsonl") as metrics:
        for step, batch in enumerate(loader.train(recipe.num_steps), start=1):
            scalars = jax.device_get(train_step(model, optimizer, js.shard_batch(batch, mesh)))
            progress.update(step, float(scalars["loss"]))
            metrics.write(step=step, tokens_per_s=progress.tokens_per_s, **scalars)
            if step % recipe.eval_every == 0 or step == recipe.num_steps:
                batches = loader.held_out(recipe.eval_sequences)
                val_loss = evaluate(eval_step, model, batches, mesh)
                metrics.write(step=step, val_loss=val_loss)
                progress.note(f"step {step}: validation loss {val_loss:.4f}")
    state = {"model": model, "optimizer": optimizer, "step": recipe.num_steps}
    checkpoint.save(out / "checkpoint", state)
    if jax.process_index() == 0:
        plot_loss(out / "metrics.jsonl", out / "loss.png")
    return val_loss
