"""Plain Flax under `jax.jit`, sharded as Flax's guide "Scale up on multiple devices" teaches. jshard is not used.

Every matrix says in its metadata which dim is on the mesh axis: its largest, as jshard chooses. The specs of all
variables come from `nnx.get_partition_spec`, the step is a `jax.jit` with these shardings for what goes in and comes
out, and the compiler places the communication. On one device it is the unsharded step of all JAX candidates.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.step.jax_model import Made, adamw, config_of, put_weights, tokens_like
from benchmarks.step.sizes import Sizes
from models import gpt

_AXIS = "data"


class FlaxGPT(gpt.GPT):
    """The model of models/gpt.py with its layers in Flax's own loop and Flax's own rematerialisation."""

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Scores of the next token; see `gpt.GPT`."""
        x_BTD = self.tokens(tokens_BT) + self.positions(jnp.arange(tokens_BT.shape[1]))[None]
        run = nnx.remat(gpt.Block.__call__) if self.config.remat == "full" else gpt.Block.__call__
        if self.config.scan:
            x_BTD = nnx.scan(lambda x, block: run(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x_BTD, self.blocks
            )
        else:
            for block in self.blocks:
                x_BTD = run(block, x_BTD)
        return self.tokens.attend(self.norm(x_BTD))


@dataclasses.dataclass(frozen=True)
class FlaxStep:
    """A step without arrays."""

    graphdef: Any  # of model and optimizer
    state: Any  # their shapes, dtypes and shardings
    rows: NamedSharding  # the sharding of a batch

    @classmethod
    def of(cls, sizes: Sizes, mesh: Mesh, *, scan: bool) -> FlaxStep:
        """The step on a mesh."""
        graphdef, shapes = nnx.split(nnx.eval_shape(lambda: _new(sizes, mesh.size, scan)))
        placed = lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
        state = jax.tree.map(placed, shapes, _shardings(shapes, mesh))
        return cls(graphdef, state, NamedSharding(mesh, PartitionSpec(_AXIS)))

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The program, lowered for the shapes of a batch."""

        def train_step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
            model, optimizer = nnx.merge(self.graphdef, state)
            loss, grads = nnx.value_and_grad(gpt.loss_fn)(model, batch)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), {"loss": loss, "grad_norm": optax.global_norm(grads)}

        shardings = self.shardings
        everywhere = NamedSharding(self.rows.mesh, PartitionSpec())
        jitted = jax.jit(
            train_step, in_shardings=(shardings, self.rows), out_shardings=(shardings, everywhere), donate_argnums=0
        )
        with nnx.use_eager_sharding(False):
            return jitted.lower(self.state, batch)

    @property
    def shardings(self) -> Any:
        """Of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)


def made(sizes: Sizes, *, scan: bool) -> Made:
    """A step over all devices of all processes, its state created under jit: no device ever holds the whole."""
    mesh = Mesh(np.array(jax.devices()), (_AXIS,))
    step = FlaxStep.of(sizes, mesh, scan=scan)
    create = jax.jit(lambda: nnx.state(_new(sizes, mesh.size, scan)), out_shardings=step.shardings)
    with nnx.use_eager_sharding(False):
        model, optimizer = nnx.merge(step.graphdef, create())
        put_weights(model, sizes)
    compiled = step.lower(tokens_like(sizes, step.rows)).compile()
    return Made.of(_Kept(compiled, nnx.state((model, optimizer))), step.rows, compiled)


class _Kept:
    """The step with its state, as a loop would have it in a variable."""

    def __init__(self, compiled: jax.stages.Compiled, state: Any) -> None:
        self._compiled, self._state = compiled, state

    def __call__(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        self._state, scalars = self._compiled(self._state, batch)
        return scalars


def new_model(sizes: Sizes, degree: int, *, scan: bool) -> FlaxGPT:
    """The model, whose matrices say how they are sharded over so many devices."""
    with nnx.use_eager_sharding(False):  # what the metadata says is carried out by the jit around
        model = FlaxGPT(config_of(sizes, scan=scan), rngs=nnx.Rngs(0))
    _name_dims(model, degree, scan)
    _compute_in(model, sizes.dtype)
    return model


def model_shardings(sizes: Sizes, mesh: Mesh) -> Any:
    """Of the model's state, its layers one after another."""
    return _shardings(nnx.state(nnx.eval_shape(lambda: new_model(sizes, mesh.size, scan=False))), mesh)


def _new(sizes: Sizes, degree: int, scan: bool) -> tuple[FlaxGPT, nnx.Optimizer]:
    model = new_model(sizes, degree, scan=scan)
    with nnx.use_eager_sharding(False):
        return model, nnx.Optimizer(model, adamw(sizes), wrt=nnx.Param)


def _shardings(state: Any, mesh: Mesh) -> Any:
    """What the metadata of the variables says, with Flax's own reading of it."""
    specs = nnx.get_partition_spec(state)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _name_dims(model: nnx.Module, degree: int, scan: bool) -> None:
    """Matrices are along their largest dim, what is left along none; a dim of layers is none to shard."""
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        first = 1 if scan and path[0] == "blocks" else 0
        shape = variable.get_value().shape
        dims = [dim for dim in range(first, len(shape)) if shape[dim] % degree == 0]
        if len(shape) - first >= 2 and dims:
            longest = max(dims, key=lambda dim: shape[dim])
            variable.set_metadata(out_sharding=tuple(_AXIS if dim == longest else None for dim in range(len(shape))))


def _compute_in(model: nnx.Module, dtype: str) -> None:
    """What a `dtype=` in every layer's constructor would say; parameters stay float32."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Linear | nnx.LayerNorm | nnx.Embed):
            node.dtype = jnp.dtype(dtype)
