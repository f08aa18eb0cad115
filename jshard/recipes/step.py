"""The step of a run: one compiled program over a state that is flattened once; and its use of the devices.

`nnx.jit` traverses the model and the optimizer on every call, in Python, which takes milliseconds for a deep model. A
run calls one function millions of times on one state, so here the state is flattened when the step is created, passed
as a flat list of donated arrays, and put back into the objects only when they are requested.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard import _compat
from jshard._text import counted
from jshard._types import PyTree, TreeDef
from jshard.api.loss_scale import loss_scale_of, scaled_value_and_grad
from jshard.engine.weighted import WeightedMean, mean_of, mean_over
from jshard.errors import AnnotationError
from jshard.facts.devices import peak_of
from jshard.plans.array_paths import paths_of
from jshard.plans.buffers import apart, as_array, placed_apart
from jshard.plans.call_checks import check_has_arrays
from jshard.plans.memories import placed_like, to_device
from jshard.plans.numeric import is_numeric
from jshard.plans.padding import padding_kept
from jshard.plans.plan import root_forgotten
from jshard.plans.units import unit_of
from jshard.recipes.ema import WEIGHTS, Ema
from jshard.recipes.model_file import LossFn, with_metrics

Scalars = dict[str, jax.Array]
M = TypeVar("M", bound=nnx.Module)


class TrainStep:
    """Loss, gradients and update as one program, compiled once, for one model and its optimizer.

    The step then owns the arrays: each call replaces them with new ones and frees the old ones. `model` and
    `optimizer` return the objects with the current arrays. The program is compiled on construction, for the
    shapes and shardings of `batch` and of the state; it is never traced again.

    Args:
        loss_fn: `loss_fn(model, batch)`, the mean loss over the global batch; or `(loss, metrics)` with a dict of
            scalars that are also means over the batch. Each may be a `js.WeightedMean`.
        model: an annotated model, with its arrays on the mesh.
        optimizer: its `nnx.Optimizer`; `js.shard_optimizer` creates one whose whole state is on the mesh. Parameters
            that it does not update are frozen; with a `LossScale` around it the loss is scaled.
        batch: a batch as in later calls (`js.shard_batch`); only shapes and shardings are read.
        accumulate: number of microbatches of a batch; loss and metrics are the means over them, by their weights.
        sync: when gradients are reduced, in "each" microbatch or after the "last"; as for `js.value_and_grad`.
        learning_rate: the optimizer's schedule, for the record.
        ema: an average of the model's weights, which the step updates after them; none by default.
        compiler_options: as from `js.compiler_options()`; none by default.

    Raises:
        AnnotationError: the model is not annotated, or arrays of the state are not on its mesh.

    Examples:
        >>> step = train.TrainStep(loss_fn, model, optimizer, batch)
        >>> scalars = step(batch)  # returns at once; the devices are still at work
        >>> float(scalars["loss"])
    """

    def __init__(
        self,
        loss_fn: LossFn,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        batch: PyTree,
        *,
        accumulate: int = 1,
        sync: str = "each",
        learning_rate: optax.Schedule | None = None,
        ema: Ema | None = None,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        # One graph of all, so that a variable that two of them hold is one argument of the program.
        self._objects = _state_objects(model, optimizer, ema)
        self.mesh = _mesh(model)
        self._graphdef, state = nnx.split(self._objects)
        # The model is the first of these, so its arrays are the first leaves: see `model_leaves`.
        self._leaves, self._tree = jax.tree.flatten(_on_mesh(state, self.mesh))
        self._num_model_leaves = len(jax.tree.leaves(nnx.state(model)))
        traced = _traced(
            loss_fn,
            self._graphdef,
            self._tree,
            self._leaves,
            batch,
            self.mesh,
            accumulate=accumulate,
            sync=sync,
            learning_rate=learning_rate,
        )
        self._program = traced.lower().compile(compiler_options=dict(compiler_options or {}))

    def __call__(self, batch: PyTree) -> Scalars:
        """Starts a step and returns without waiting for it.

        Args:
            batch: with the shapes and shardings that the step was created for.

        Returns:
            The scalars "loss", "grad_norm" (before clipping), "param_norm" (after the update; without parameters in
            host memory), "learning_rate" if the schedule is known, and the loss's metrics, on the devices; with a
            loss scale also "loss_scale" and "skipped_steps", after the step.
        """
        # The arrays of the step before are donated: references to them are to deleted buffers.
        self._leaves, scalars = self._program(self._leaves, batch)
        return scalars

    @property
    def model(self) -> Any:
        """The model with the arrays after the last step. The next call of the step invalidates its arrays."""
        return self._current()[0]

    @property
    def optimizer(self) -> nnx.Optimizer:
        """The optimizer, with the state after the last step."""
        return self._current()[1]

    @property
    def ema(self) -> Ema | None:
        """The average of the weights after the last step; None without one."""
        return _ema_in(self._current())

    @property
    def model_leaves(self) -> Sequence[jax.Array]:
        """The model's current arrays, in the order of its state; see `EvalStep`."""
        return self._leaves[: self._num_model_leaves]

    @property
    def averaged_leaves(self) -> Sequence[jax.Array]:
        """`model_leaves`, with the averages in place of the weights; they have the dtype of the averages."""
        return [self._leaves[position] for position in self._averaged_positions]

    @functools.cached_property
    def _averaged_positions(self) -> Sequence[int]:
        """For each array of the model the position of its average, or its own, among the arrays of the state."""
        paths = paths_of(jax.tree.unflatten(self._tree, self._leaves))
        averages = {}
        for position, (owner, *path) in enumerate(paths):
            if owner == _EMA and path[0] == WEIGHTS:
                averages[tuple(path[1:])] = position
        positions = []
        for position, (_, *path) in enumerate(paths[: self._num_model_leaves]):
            positions.append(averages.get(tuple(path), position))
        return positions

    def delete(self) -> None:
        """Frees its arrays; the step can no longer be called."""
        for leaf in self._leaves:
            leaf.delete()

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled program, for inspection."""
        return self._program

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Peak bytes per device of the compiled program: state, batch and temporaries."""
        return program_bytes(self._program)

    def _current(self) -> _StateObjects:
        # The program has kept the zeros of padding, so that nothing has to be cleared.
        with padding_kept():
            nnx.update(self._objects, jax.tree.unflatten(self._tree, self._leaves))
        return self._objects


_StateObjects = tuple[Any, ...]
"""Model and optimizer, and the average of the weights if there is one."""

_EMA = "2"  # the number of the average among the objects, as text


def _state_objects(model: nnx.Module, optimizer: nnx.Optimizer, ema: Ema | None) -> _StateObjects:
    if ema is None:
        return model, optimizer
    return model, optimizer, ema


def _ema_in(objects: _StateObjects) -> Ema | None:
    return objects[2] if len(objects) > 2 else None


def lower_step(
    loss_fn: LossFn,
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    batch: PyTree,
    *,
    accumulate: int = 1,
    sync: str = "each",
    ema: Ema | None = None,
) -> jax.stages.Lowered:
    """Returns the program of a `TrainStep`, lowered but not compiled: the state and the batch may be abstract."""
    return trace_step(loss_fn, model, optimizer, batch, accumulate=accumulate, sync=sync, ema=ema).lower()


def trace_step(
    loss_fn: LossFn,
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    batch: PyTree,
    *,
    accumulate: int = 1,
    sync: str = "each",
    ema: Ema | None = None,
) -> jax.stages.Traced:
    """Returns the traced JAX program of `lower_step`, with the same arguments; its equations can be read."""
    mesh = _mesh(model)
    everywhere = NamedSharding(mesh, PartitionSpec())
    graphdef, state = nnx.split(_state_objects(model, optimizer, ema))
    leaves, tree = jax.tree.flatten(jax.tree.map(as_array, state))
    placed = []
    for leaf in leaves:
        # As `_on_mesh` does with arrays: counters of an optimizer may not be on the mesh yet.
        sharding = getattr(leaf, "sharding", None) or everywhere
        placed.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
    return _traced(loss_fn, graphdef, tree, placed, batch, mesh, accumulate=accumulate, sync=sync, learning_rate=None)


def _traced(
    loss_fn: LossFn,
    graphdef: nnx.GraphDef,
    tree: TreeDef,
    leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
    batch: PyTree,
    mesh: Mesh,
    *,
    accumulate: int,
    sync: str,
    learning_rate: optax.Schedule | None,
) -> jax.stages.Traced:
    paths_before = _paths(jax.tree.unflatten(tree, leaves))

    def step(leaves: list[jax.Array], batch: PyTree) -> tuple[list[jax.Array], Scalars]:
        objects: _StateObjects = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))
        model, optimizer = objects[:2]
        rate: dict[str, jax.typing.ArrayLike] = {}
        if learning_rate is not None:  # of this step: the update counts on
            rate["learning_rate"] = learning_rate(optimizer.step[...])
        run = scaled_value_and_grad(with_metrics(loss_fn), optimizer, accumulate=accumulate, sync=sync, has_aux=True)
        (loss, metrics), grads = run(model, batch)
        # Of microbatches, metrics come stacked.
        mean = mean_over if accumulate > 1 else mean_of
        metrics = {name: mean(metric) for name, metric in metrics.items()}
        _update(optimizer, model, grads, loss)
        # After the update.
        ema = _ema_in(objects)
        if ema is not None:
            ema.update(model, optimizer.step[...])
        params = nnx.state(model, optimizer.wrt)
        state = nnx.state(objects)
        _check_unchanged(paths_before, _paths(state))
        scalars = {"loss": loss, "grad_norm": optax.tree.norm(to_device(grads)), **rate, **metrics}
        # The norm would copy parameters from host memory to the device at each step, for a number in the record.
        if not any(map(_compat.on_host, jax.tree.leaves(params))):
            scalars["param_norm"] = optax.tree.norm(params)
        loss_scale = loss_scale_of(optimizer)
        if loss_scale is not None:
            scalars["loss_scale"] = loss_scale.scale
            scalars["skipped_steps"] = loss_scale.skipped
        return jax.tree.leaves(state), scalars

    shardings = [_compat.asked_of_results(leaf.sharding) for leaf in leaves]
    everywhere = NamedSharding(mesh, PartitionSpec())
    # Results have the shardings of the arguments: they take over their buffers, and fit the next call of the program.
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere)).trace(leaves, batch)


def _update(optimizer: nnx.Optimizer, model: nnx.Module, grads: nnx.State, loss: jax.Array) -> None:
    """Updates the model; a transformation that takes arguments beside the gradients receives the loss as `value`."""
    extra = {}
    # A plain transformation refuses further arguments.
    if isinstance(optimizer.tx, optax.GradientTransformationExtraArgs):
        extra["value"] = loss
    try:
        optimizer.update(model, grads, **extra)
    except TypeError as error:
        missing = re.search(r"(\w+).*missing \d+ required keyword-only arguments?: (.*)", str(error))
        if missing is None:
            raise
        raise AnnotationError(
            "The optimizer needs arguments that a step of a run does not have.",
            where=missing[1],
            why=f"it needs {missing[2]}; a run passes the loss as 'value'. A line search evaluates the loss again.",
            do="write the step yourself: optimizer.update(model, grads, value=loss, grad=grads, value_fn=value_fn)",
        ) from error


def _check_unchanged(before: set[str], after: set[str]) -> None:
    """Raises if a step changes the structure of the state, because the run could not continue."""
    if before != after:
        created = [f"{path}  new" for path in sorted(after - before)]
        removed = [f"{path}  gone" for path in sorted(before - after)]
        raise AnnotationError(
            "The step changes the structure of the model or the optimizer.",
            where=created + removed,
            why=f"{len(before)} arrays went in, {len(after)} came out.",
            do="create every variable in __init__; drop sown values with nnx.pop inside the loss.",
        )


@dataclasses.dataclass(frozen=True)
class AveragedModel:
    """The model of a step with the averages of its weights, with the model interface of a `TrainStep`.

    Attributes:
        step: was created with an `Ema`.

    Raises:
        AnnotationError: it was not.

    Examples:
        >>> averaged = train.AveragedModel(step)
        >>> train.evaluate(averaged, train.EvalStep(loss_fn, averaged, batch), loader.held_out(100))
    """

    step: TrainStep

    def __post_init__(self) -> None:
        if self.step.ema is None:
            raise AnnotationError(
                "The step keeps no average of the weights.",
                where="AveragedModel(step)",
                why="it was created without ema=.",
                do="TrainStep(loss_fn, model, optimizer, batch, ema=js.train.Ema(model, decay=0.999))",
            )

    @property
    def mesh(self) -> Mesh:
        """The mesh of the step."""
        return self.step.mesh

    @property
    def model(self) -> nnx.Module:
        """The model of the step, whose weights `model_leaves` replace."""
        return self.step.model

    @property
    def model_leaves(self) -> Sequence[jax.Array]:
        """The current averages, and the model's other arrays, in the order of its state."""
        return self.step.averaged_leaves


@dataclasses.dataclass(frozen=True)
class HeldModel:
    """A model that is not trained, with the model interface of a `TrainStep`."""

    model: nnx.Module

    @property
    def mesh(self) -> Mesh:
        """The mesh it was annotated for."""
        return _mesh(self.model)

    @property
    def model_leaves(self) -> Sequence[jax.Array]:
        """Its arrays, in the order of its state."""
        return jax.tree.leaves(nnx.state(self.model))


EvaluatedModel = TrainStep | AveragedModel | HeldModel
"""What `evaluate` takes: a mesh, a model, and the arrays that it has now."""


class EvalStep:
    """Loss and metrics without gradients, dropout off, statistics fixed: compiled once, for a `TrainStep`'s arrays.

    Args:
        loss_fn: `loss_fn(model, batch)`, as for the step.
        step: the step whose model is evaluated, or a model that is not trained. Its arrays may have other dtypes than
            the weights, as averages have.
        batch: a batch as in later calls.

    Examples:
        >>> evaluate = train.EvalStep(loss_fn, step, batch)
        >>> scalars = evaluate(step.model_leaves, batch)
    """

    def __init__(self, loss_fn: LossFn, step: EvaluatedModel, batch: PyTree) -> None:
        graphdef, state = nnx.split(inference_view(step.model))
        model_arrays, tree = jax.tree.flatten(state)

        def evaluate(leaves: Sequence[jax.Array], batch: PyTree) -> tuple[Scalars, dict[str, jax.Array | float]]:
            stored = [_in_dtype_of(x, like) for x, like in zip(leaves, model_arrays, strict=True)]
            model = nnx.merge(graphdef, jax.tree.unflatten(tree, stored))
            loss, metrics = with_metrics(loss_fn)(model, batch)
            values = {"loss": loss, **metrics}
            means = {}
            weights = {}
            for name, x in values.items():
                means[name] = mean_of(x)
                if isinstance(x, WeightedMean):
                    weights[name] = x.weight
            return means, weights

        everywhere = NamedSharding(step.mesh, PartitionSpec())
        # Nothing is donated: the arrays are those of the step, which trains on with them.
        leaves = list(step.model_leaves)
        self._program = jax.jit(evaluate, out_shardings=everywhere).lower(leaves, batch).compile()

    def __call__(self, leaves: Sequence[jax.Array], batch: PyTree) -> Scalars:
        """Returns the "loss" and the metrics, on the devices, without waiting for them."""
        return self.with_weights(leaves, batch)[0]

    def with_weights(self, leaves: Sequence[jax.Array], batch: PyTree) -> tuple[Scalars, Scalars]:
        """Returns the same, and the weights of those that are a `js.WeightedMean`."""
        return self._program(list(leaves), batch)


def metric_names(loss_fn: LossFn, model: nnx.Module, batch: PyTree) -> list[str]:
    """Returns the names of the scalars of an evaluation, "loss" first; model and batch may be abstract."""
    graphdef, state = nnx.split(inference_view(model))

    def names_of(state: nnx.State, batch: PyTree) -> dict[str, jax.Array]:
        _, metrics = with_metrics(loss_fn)(nnx.merge(graphdef, state), batch)
        return {name: mean_of(metric) for name, metric in metrics.items()}

    return ["loss", *jax.eval_shape(names_of, state, batch)]


def _in_dtype_of(x: jax.Array, like: Any) -> jax.Array:
    dtype = getattr(like, "dtype", x.dtype)  # a number of Python has none
    if x.dtype == dtype:
        return x
    return placed_like(to_device(x).astype(dtype), like)


def inference_view(model: M) -> M:
    """Returns the model with dropout off and statistics fixed. It shares the arrays; `model` itself is unchanged."""
    return nnx.with_attributes(model, raise_if_not_found=False, deterministic=True, use_running_average=True)


def program_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes per device of a compiled program: arguments, results that do not alias them, temporaries."""
    memory: Any = compiled.memory_analysis()
    # Donated arguments and their results are one buffer, counted among the arguments.
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def _mesh(model: nnx.Module) -> Mesh:
    unit = unit_of(model)
    if unit is None:
        raise root_forgotten(model)
    assert isinstance(unit.mesh, Mesh)  # the model has arrays, so it was annotated with devices
    return unit.mesh


def _on_mesh(state: nnx.State, mesh: Mesh) -> nnx.State:
    """Returns the state with unplaced arrays (an optimizer's counters) moved to the mesh; raises for arrays elsewhere.

    No two arrays share a buffer: `nnx.clone` and some transformations of Optax keep one array under two names.
    """
    flat, tree = jax.tree_util.tree_flatten_with_path(state)
    _check_arrays(flat)
    check_has_arrays("TrainStep(loss_fn, model, optimizer, batch)", [leaf for _, leaf in flat])
    devices = set(mesh.devices.flat)
    elsewhere = []
    for path, leaf in flat:
        if isinstance(leaf, jax.Array) and leaf.committed and leaf.sharding.device_set != devices:
            elsewhere.append(f"{_path(path)}  on {', '.join(sorted(map(str, leaf.devices())))}")
    if elsewhere:
        raise AnnotationError(
            f"Not on the mesh of the run: {counted(len(elsewhere), 'array')} of the state.",
            where=elsewhere,
            why=f"the mesh has {len(devices)} devices: {dict(mesh.shape)}.",
            do="optimizer = js.shard_optimizer(model, tx), and js.shard_init or js.fully_shard for the model.",
        )
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = []
    for _, leaf in flat:
        if not isinstance(leaf, jax.Array) or leaf.sharding.device_set != devices:
            leaf = placed_apart(as_array(leaf), everywhere)
        placed.append(leaf)
    return jax.tree.unflatten(tree, apart(placed))  # the step donates all of them


def _check_arrays(flat: Sequence[tuple[tuple, object]]) -> None:
    """Raises for leaves of the state that no compiled step can have."""
    wrong = []
    for path, leaf in flat:
        if not is_numeric(leaf):
            wrong.append(f"{_path(path)}  {type(leaf).__name__}")
    if wrong:
        raise AnnotationError(
            "The state of a run holds objects that are not arrays.",
            where=wrong,
            why="a compiled step takes arrays and numbers only.",
            do='self.name = "..."  # a plain attribute, instead of nnx.Variable(...)',
        )


def _paths(state: nnx.State) -> set[str]:
    """Returns the paths of the arrays in a state, in readable form."""
    return {_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]}


_OWNERS = {"0": "model", "1": "optimizer", _EMA: "ema"}  # in the order of `_state_objects`


def _path(path: tuple) -> str:
    """Returns a path in the objects of a state in readable form."""
    first, *rest = map(_key_text, path)
    owner = _OWNERS[first]
    keys = [key for key in rest if key != "value"]
    return "/".join([owner, *keys])


def _key_text(key: object) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


# Model FLOPs utilisation: the share of the devices' peak used for the model's arithmetic; and peak memory.


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak arithmetic of all devices of a run together, and the source of that figure."""

    flops_per_s: float
    source: str


def device_peak(devices: Sequence[jax.Device]) -> Peak | None:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the total peak of devices; None if unknown: for CPUs, and with a warning for other accelerators.

    It is dense bf16 (of a V100, which has none, fp16), whatever dtype the model computes in.
    """
    if devices[0].platform == "cpu":
        # Nobody states a peak for CPUs, and a measured matrix product is none: others exceed it.
        return None
    kinds = sorted({device.device_kind for device in devices})
    known_peak = peak_of(kinds[0]) if len(kinds) == 1 else None
    if known_peak is None:
        warnings.warn(f"The peak of {', '.join(kinds)} is unknown, so no MFU is shown.", stacklevel=2)
        return None
    flops_per_s, source = known_peak
    each = f"{len(devices)} x {flops_per_s / 1e12:g}e12 of {kinds[0]}"
    dtype = "fp16" if "V100" in kinds[0] else "bf16"
    return Peak(len(devices) * flops_per_s, f"{each}: dense {dtype}, {source}")


@dataclasses.dataclass(frozen=True)
class Mfu:
    """Model FLOPs utilisation of a run.

    Attributes:
        flops_per_step: the model's arithmetic in a step, over all devices.
        formula: the formula of that number.
        peak: of all devices.

    Examples:
        >>> peak = device_peak(jax.devices())
        >>> mfu = Mfu(*dense_flops(num_parameters=1_425_600, num_tokens=4096), peak)
        >>> mfu.of(step_s=0.131)
        0.231
    """

    flops_per_step: float
    formula: str
    peak: Peak

    def of(self, step_s: float) -> float:
        """Returns the share of the peak, 0 to 1, at so many seconds per step."""
        return self.flops_per_step / step_s / self.peak.flops_per_s

    def describe(self) -> str:
        """Returns one line: the formula and the figures that it uses."""
        return (
            "MFU = flops per step / step time / peak; "
            f"flops per step = {self.formula} = {self.flops_per_step:.2e}; "
            f"peak = {self.peak.flops_per_s:.2e} flops/s ({self.peak.source})"
        )


def peak_bytes(devices: Sequence[jax.Device], compiled_bytes: int) -> tuple[int, str]:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the peak memory of a device of this process, in bytes, and the kind of that figure.

    "measured" is the backend's figure since the process began; "compiled" is that of the compiled step, used
    for backends that do not report memory, such as the CPU's.
    """
    measured = _most_bytes(devices, "peak_bytes_in_use")
    if measured is None:
        return compiled_bytes, "compiled"
    return measured, "measured"


def used_bytes(devices: Sequence[jax.Device]) -> int | None:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the most memory in use on a device of this process, in bytes; None if the backend does not report it."""
    return _most_bytes(devices, "bytes_in_use")


def _most_bytes(devices: Sequence[jax.Device], figure: str) -> int | None:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the largest of a figure that the devices of this process report; None if none does."""
    reported = []
    for device in devices:
        if device.process_index == jax.process_index():
            bytes_ = (device.memory_stats() or {}).get(figure)
            if bytes_ is not None:
                reported.append(bytes_)
    return max(reported, default=None)
