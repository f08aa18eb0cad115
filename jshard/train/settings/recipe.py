"""A recipe: a whole training run as a value."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training run as a value.

    Attributes:
        model: the frozen config that the model file's `build` takes.
        sequence_length: tokens per sequence.
        batch_size: sequences per step, over all devices and microbatches.
        num_steps: optimizer steps.
        learning_rate: peak of the schedule: linear warmup, then a cosine down to a tenth.
        warmup_steps: steps of warmup.
        weight_decay: AdamW's decay, on matrices only (not on biases and norms).
        b1: AdamW's decay of the first moment.
        b2: AdamW's decay of the second moment.
        clip_norm: largest global norm of the gradient.
        loss_scale: "dynamic", "none", or "auto": dynamic where units compute or reduce in float16.
        accumulate: microbatches per step.
        eval_every: steps between two evaluations; the last step is always followed by one.
        eval_sequences: held-out sequences per evaluation, spread evenly over the held-out text.
        checkpoint_every: steps between two checkpoints; the last step is always followed by one.
        keep_checkpoints: checkpoints that stay; older ones are deleted.
        seed: seed of the parameters, of dropout and of the sample order.

    A subclass may add settings of its own and override `schedule` and `optimizer`.
    """

    model: Any
    sequence_length: int
    batch_size: int
    num_steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    clip_norm: float = 1.0
    loss_scale: str = "auto"
    accumulate: int = 1
    eval_every: int = 1000
    eval_sequences: int = 1024
    checkpoint_every: int = 1000
    keep_checkpoints: int = 3
    seed: int = 0

    def schedule(self) -> optax.Schedule:
        """The learning rate as a function of the step."""
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=min(self.warmup_steps, self.num_steps),
            decay_steps=max(self.num_steps, self.warmup_steps + 1),
            end_value=self.learning_rate / 10,
        )

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW behind a clip of the global gradient norm."""
        adamw = optax.adamw(
            self.schedule(),
            b1=self.b1,
            b2=self.b2,
            weight_decay=self.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
        )
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), adamw)
