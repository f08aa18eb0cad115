"""What the partitioner makes of a step along the axes that split a data shard's program, before anything is compiled.

A region is manual over the data axes, `expert` and `context`: collectives over these are in the program that is traced.
Over `tensor` the compiler decides. It propagates the shardings that the model declares, and inserts collectives where a
product has parts of a sum. JAX's partitioner, Shardy, does both by passes over the lowered program. Here these passes
run alone, on a program of a few examples: they take less than a second.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jshard._compat.compiler import MlirOperation, partitioned_module, shardings_of_region
from jshard._types import PyTree
from jshard.engine.context import shapes_only, without_update
from jshard.inspect.hlo.collectives import axes_of_groups
from jshard.inspect.traced_loss import loss_of_parameters
from jshard.kernels.device import TracedDevice, planned_for
from jshard.plans.mesh import CONTEXT, EXPERT, TENSOR, AnyMesh
from jshard.plans.placement import Selection
from jshard.plans.units import unit_of

MODEL_AXES = (EXPERT, CONTEXT, TENSOR)
"""The axes over which the devices of a data shard share its work."""

_PLAIN_DEVICE = TracedDevice("cpu", "cpu")  # without the kernels of an accelerator
_SHARDY = "sdy."
_KINDS = ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter")
_REGION = "sdy.manual_computation"
_MAKES_CONSTANTS = (".broadcast_in_dim", ".constant", ".iota")
_AXIS = re.compile(r'"(\w+)"(?::\((\d+)\)(\d+))?')  # in texts of Shardy: `"fsdp"`, or `"fsdp":(2)4` for a part of it


@dataclasses.dataclass(frozen=True, order=True)
class ModelCollective:
    """Equal collectives of a model over its own axes."""

    kind: str  # of HLO, `all-reduce` for instance
    axes: tuple[str, ...]
    full_bytes: int  # of each: bytes of the whole array, as in `Window`
    is_part: bool = False  # of an array that `tensor` splits, over which it is not sent


class ArrayForm(NamedTuple):
    """The form of an array: the bytes of an element, and the shape."""

    item_bytes: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array_type: Any) -> ArrayForm:
        """Returns the form of an array in a lowered program."""
        item_bytes = max(1, array_type.element_type.width // 8)
        return cls(item_bytes, tuple(array_type.shape))

    @property
    def bytes(self) -> int:
        """Returns the bytes of the array."""
        return math.prod(self.shape) * self.item_bytes


@dataclasses.dataclass(frozen=True)
class _Program:
    """A partitioned program."""

    functions: Mapping[str, MlirOperation]  # by name
    mesh: AnyMesh

    @classmethod
    def of(cls, lowered: jax.stages.Lowered, mesh: AnyMesh) -> _Program:
        module = partitioned_module(lowered)
        functions = {}
        for operation in module.regions[0].blocks[0].operations:
            if operation.operation.name == "func.func":
                functions[operation.attributes["sym_name"].value] = operation.operation
        return cls(functions, mesh)

    def divided_over(self, text: str) -> int:
        """Returns the number of parts that a sharding, as text, makes of an array."""
        degrees = dict(self.mesh.shape)
        return math.prod(int(match[3] or degrees[match[1]]) for match in _AXIS.finditer(text))


@dataclasses.dataclass(frozen=True)
class PartitionedStep:
    """What the partitioner makes of one forward and backward pass.

    Attributes:
        collectives: how often each of the model's own axes runs. Those of parameters are not among them: they are over
            the data axes, perhaps together with others.
        over_tensor: which share of the values of each form is split over `tensor`.
    """

    collectives: Mapping[ModelCollective, int]
    over_tensor: Mapping[ArrayForm, float]


def partitioned_step(
    model: nnx.Module, loss: Callable[..., PyTree], batch: PyTree, *, wrt: Selection = nnx.Param
) -> PartitionedStep:
    """Partitions one forward and backward pass.

    Args:
        model: annotated, without arrays.
        loss: of the model and a batch.
        batch: shapes of it.
        wrt: the parameters that are trained.
    """
    unit = unit_of(model)
    assert unit is not None
    loss_of, arguments = loss_of_parameters(model, loss, batch, wrt)

    def step(params: PyTree, rest: PyTree, of_batch: tuple[PyTree, ...]) -> PyTree:
        result, backward = jax.vjp(lambda params: loss_of(params, rest, of_batch), params)
        cotangent = jax.tree.map(jnp.ones_like, result)
        return backward(cotangent)

    program = _Program.of(_lowered(step, arguments), unit.mesh)
    counts: collections.Counter[ModelCollective] = collections.Counter()
    for collective, count in _counted(program, program.functions["main"]).items():
        if set(collective.axes) <= set(MODEL_AXES):
            counts[collective] = count
    return PartitionedStep(counts, _shares(_values(program)))


def shares_over_tensor(
    forward: Callable[..., PyTree], arguments: Sequence[PyTree], mesh: AnyMesh
) -> Mapping[ArrayForm, float]:
    """Returns which share of the results of each form the compiler splits over `tensor`.

    A kernel of an accelerator saves other arrays than the plain operations in its place. Its operands are among both.

    Args:
        forward: the function.
        arguments: shapes of its arguments, with their shardings.
        mesh: of the shardings.

    Returns:
        The share by form, of the results of the program and of its regions; in a region, shapes are those of a shard.
    """
    program = _Program.of(_lowered(forward, arguments), mesh)
    return _shares(_results(program))


def _shares(values: Iterable[tuple[ArrayForm, str]]) -> dict[ArrayForm, float]:
    """Returns which share of values of each form is split over `tensor`, given their shardings as text."""
    total: collections.Counter[ArrayForm] = collections.Counter()
    split: collections.Counter[ArrayForm] = collections.Counter()
    for form, sharding in values:
        total[form] += 1
        split[form] += f'"{TENSOR}"' in sharding
    return {form: split[form] / count for form, count in total.items()}


def _values(program: _Program) -> Iterator[tuple[ArrayForm, str]]:
    """Yields the values of a program, with their shardings as text; that of a whole value is empty."""
    for function in program.functions.values():
        yield from _values_in(function)


def _values_in(operation: MlirOperation) -> Iterator[tuple[ArrayForm, str]]:
    for inner in _operations(operation):
        if inner.name.endswith(_MAKES_CONSTANTS):
            continue  # not stored; one number everywhere has no sharding
        if inner.name == _REGION:  # its results are those of operations in it
            yield from _values_in(inner)
            continue
        shardings = [""] * len(inner.results)
        if "sdy.sharding" in inner.attributes:
            _, *shardings = str(inner.attributes["sdy.sharding"]).split("<@")
        for value, sharding in zip(inner.results, shardings, strict=False):
            if hasattr(value.type, "shape"):
                yield ArrayForm.of(value.type), sharding
        yield from _values_in(inner)


def _results(program: _Program) -> Iterator[tuple[ArrayForm, str]]:
    """Yields the results of a program and those of its regions, with their shardings as text."""
    main = program.functions["main"]
    result_types = main.attributes["function_type"].value.results
    for result_type, attributes in zip(result_types, main.attributes["res_attrs"], strict=True):
        sharding = str(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else ""
        yield ArrayForm.of(result_type), sharding
    for function in program.functions.values():
        yield from _results_of_regions(function)


def _results_of_regions(operation: MlirOperation) -> Iterator[tuple[ArrayForm, str]]:
    for inner in _operations(operation):
        if inner.name == _REGION:
            # The types of what the region returns are those of a shard.
            *_, terminator = inner.regions[0].blocks[0].operations
            for value, sharding in zip(terminator.operands, shardings_of_region(inner), strict=True):
                yield ArrayForm.of(value.type), sharding
        yield from _results_of_regions(inner)


def _lowered(function: Callable[..., PyTree], arguments: Sequence[PyTree]) -> jax.stages.Lowered:
    # The kernels of an accelerator send nothing, and need its compiler.
    with shapes_only(), without_update(), planned_for(_PLAIN_DEVICE):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cpu",))


# ---- the collectives of a program


def _counted(program: _Program, operation: MlirOperation) -> collections.Counter[ModelCollective]:
    """Counts the collectives that the operations inside another one execute."""
    counts: collections.Counter[ModelCollective] = collections.Counter()
    for region in operation.regions:
        counts.update(_counted_in_region(program, region))
    return counts


def _counted_in_region(program: _Program, region: Any) -> collections.Counter[ModelCollective]:
    counts: collections.Counter[ModelCollective] = collections.Counter()
    for operation in _operations_in_region(region):
        counts.update(_counted_of(program, operation))
    return counts


def _counted_of(program: _Program, operation: MlirOperation) -> collections.Counter[ModelCollective]:
    """Counts what one operation executes."""
    if operation.name == "func.call":
        return _counted(program, program.functions[operation.attributes["callee"].value])
    if operation.name == "stablehlo.while":
        trips = _trips(operation)
        in_a_trip = _counted(program, operation)
        return collections.Counter({collective: trips * count for collective, count in in_a_trip.items()})
    if operation.name in ("stablehlo.case", "stablehlo.if"):
        # One of the branches runs. Which one is not known here, so it is the one that sends most.
        branches = [_counted_in_region(program, region) for region in operation.regions]
        return max(branches, key=_total_bytes)
    kind = _kind_of(operation)
    if kind is None:
        return _counted(program, operation)
    if _is_summed_with_another(operation):
        return collections.Counter()
    return collections.Counter([_collective(program, operation, kind)])


def _total_bytes(counts: Mapping[ModelCollective, int]) -> int:
    return sum(count * collective.full_bytes for collective, count in counts.items())


def _trips(loop: MlirOperation) -> int:
    """Returns how often a loop runs: JAX's loops count from 0 to a constant. 1 if that is unknown."""
    condition = loop.regions[0].blocks[0]
    for operation in condition.operations:
        if operation.operation.name != "stablehlo.compare":
            continue
        limit = operation.operands[1]
        if not hasattr(limit.owner, "attributes"):  # an argument, which the loop carries along
            limit = loop.operands[limit.arg_number]
        source = limit.owner
        if hasattr(source, "attributes") and "value" in source.attributes:
            return max(1, int(next(iter(source.attributes["value"]))))
    return 1


# ---- one collective


def _kind_of(operation: MlirOperation) -> str | None:
    """Returns the HLO kind of a collective; None if an operation is none."""
    _, _, name = operation.name.partition(".")
    if name not in _KINDS:
        return None
    return name.replace("_", "-")


def _collective(program: _Program, operation: MlirOperation, kind: str) -> ModelCollective:
    if operation.name.startswith(_SHARDY):
        axes, group_size = _axes_of_shardy(program, operation, kind)
    else:
        axes, group_size = _axes_of_traced(program, operation, kind)
    full_bytes = sum(_local_bytes(program, operation, result) for result in operation.results)
    if kind == "reduce-scatter":
        full_bytes *= group_size  # its result is one part
    is_part = TENSOR not in axes and _is_split_over_tensor(operation)
    return ModelCollective(kind, axes, full_bytes, is_part)


def _is_split_over_tensor(operation: MlirOperation) -> bool:
    """Returns whether each device along `tensor` has another part of a result."""
    name = f'"{TENSOR}"'
    if "out_sharding" in operation.attributes:
        return name in str(operation.attributes["out_sharding"])
    outer = operation.parent
    while outer is not None:
        # In a region of its own over this axis, where the types are those of a part.
        if outer.name == "sdy.manual_computation" and name in str(outer.attributes["manual_axes"]):
            return True
        outer = outer.parent
    return False


def _axes_of_shardy(program: _Program, operation: MlirOperation, kind: str) -> tuple[tuple[str, ...], int]:
    """Returns the axes of a collective that Shardy inserted, and the size of its groups."""
    texts = []
    for name in operation.attributes:
        if name != "out_sharding":
            texts.append(str(operation.attributes[name]))
    text = " ".join(texts)
    if kind == "collective-permute":  # between the sharding of the operand and that of the result
        text = str(operation.attributes["out_sharding"])
    axes = dict.fromkeys(match[1] for match in _AXIS.finditer(text))
    in_order = tuple(axis for axis in program.mesh.axis_names if axis in axes)
    return in_order, program.divided_over(text)


def _axes_of_traced(program: _Program, operation: MlirOperation, kind: str) -> tuple[tuple[str, ...], int]:
    """Returns the axes of a collective that was traced, and the size of its groups."""
    if kind == "collective-permute":
        source, target, *_ = operation.attributes["source_target_pairs"]
        return axes_of_groups((int(source), int(target)), program.mesh), 2
    groups = operation.attributes["replica_groups"]
    names = re.findall(r'axis_ref<name = "(\w+)"', str(groups))
    if names:  # as newer versions of JAX write them
        degrees = dict(program.mesh.shape)
        axes = tuple(axis for axis in program.mesh.axis_names if axis in names)
        return axes, math.prod(degrees[axis] for axis in axes)
    num_groups, _ = groups.type.shape
    positions = [int(position) for position in groups]
    group = tuple(positions[: len(positions) // num_groups])
    return axes_of_groups(group, program.mesh), len(group)


def _local_bytes(program: _Program, operation: MlirOperation, result: Any) -> int:
    """Returns the bytes of a result on one device."""
    sharding = ""
    if "out_sharding" in operation.attributes:
        sharding = str(operation.attributes["out_sharding"])
    return ArrayForm.of(result.type).bytes // program.divided_over(sharding)


def _is_summed_with_another(operation: MlirOperation) -> bool:
    """Returns whether the compiler joins an all-reduce with another: the results of both are only added.

    Of such a sum, the last all-reduce is left.
    """
    if operation.name != "sdy.all_reduce":
        return False
    uses = list(operation.results[0].uses)
    if len(uses) != 1 or uses[0].owner.name != "stablehlo.add":
        return False
    addition = uses[0].owner
    left, right = addition.operands
    if uses[0].operand_number == 0:
        return _is_all_reduced(right)
    return _is_sum(left) and _is_all_reduced(left)


def _is_all_reduced(value: Any) -> bool:
    """Returns whether a value is the result of an all-reduce, or a sum of such results."""
    if _is_sum(value):
        return all(_is_all_reduced(operand) for operand in value.owner.operands)
    return _name_of_source(value) == "sdy.all_reduce"


def _is_sum(value: Any) -> bool:
    return _name_of_source(value) == "stablehlo.add"


def _name_of_source(value: Any) -> str:
    """Returns the name of the operation that makes a value; "" for an argument of a function."""
    return getattr(value.owner, "name", "")


# ---- what jaxlib's bindings do not have


def _operations(operation: MlirOperation) -> Iterator[MlirOperation]:
    """Yields the operations directly inside another."""
    for region in operation.regions:
        yield from _operations_in_region(region)


def _operations_in_region(region: Any) -> Iterator[MlirOperation]:
    for block in region.blocks:
        for operation in block.operations:
            yield operation.operation
