"""What both JAX workers share: the model of models/gpt.py with the given weights, its loss, its optimizer."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.step.inputs import initial_weights
from benchmarks.step.sizes import Sizes
from jshard.inspect import collectives
from jshard.recipes.step import program_bytes
from models.gpt import GPTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """A step that is ready to run.

    Attributes:
        step: takes a batch, keeps the state, gives the scalars "loss" and "grad_norm".
        batch_sharding: of a batch.
        compiled_bytes: per device, as the compiler counts them.
        collectives: instructions of the compiled program, by kind; those in a loop once.
    """

    step: Callable[[Any], dict[str, jax.Array]]
    batch_sharding: jax.sharding.NamedSharding
    compiled_bytes: int
    collectives: dict[str, int]

    @classmethod
    def of(cls, step: Callable, sharding: jax.sharding.NamedSharding, compiled: jax.stages.Compiled) -> Made:
        """With what is read off the compiled program."""
        return cls(
            step=step,
            batch_sharding=sharding,
            compiled_bytes=program_bytes(compiled),
            collectives=dict(Counter(c.kind for c in collectives(compiled) if len(c.group) > 1)),
        )


def config_of(sizes: Sizes, *, scan: bool) -> GPTConfig:
    """The `GPTConfig` of these sizes."""
    names = ("vocab_size", "block_size", "n_layer", "n_head", "d_model", "d_ff", "remat")
    given = {name: getattr(sizes, name) for name in names}
    return GPTConfig(**given, scan=scan, compute_dtype=sizes.dtype)


def adamw(sizes: Sizes) -> optax.GradientTransformation:
    """The optimizer of all candidates."""
    return optax.adamw(sizes.learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)


def tokens_like(sizes: Sizes, sharding: jax.sharding.NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
    """A global batch without arrays."""
    shape = sizes.batch * sharding.mesh.size, sizes.block_size
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return {"inputs": tokens, "targets": tokens}


def put_weights(model: nnx.Module, sizes: Sizes) -> None:
    """Gives every parameter its initial value; each process makes all of them and keeps its parts."""
    variables = {"/".join(map(str, path)): value for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    stacks: dict[str, list[np.ndarray]] = {}
    for path, value in initial_weights(sizes):
        target = path if path in variables else re.sub(r"blocks/\d+", "blocks", path)
        stacks.setdefault(target, []).append(value)
        if target == path or len(stacks[target]) == sizes.n_layer:
            values = stacks.pop(target)
            _put(variables.pop(target), values[0] if target == path else np.stack(values))
    if variables or stacks:
        raise RuntimeError(f"parameters without a value: {[*variables]}; values without a parameter: {[*stacks]}")


def _put(variable: nnx.Variable, value: np.ndarray) -> None:
    old = variable.get_value()
    if old.size != value.size:
        raise RuntimeError(f"a parameter of shape {old.shape} was given a value of shape {value.shape}")
    value = value.reshape(old.shape)  # queries, keys and values: a dim of their own here, one after another there
    variable.set_value(jax.make_array_from_callback(value.shape, old.sharding, lambda index: value[index]))
