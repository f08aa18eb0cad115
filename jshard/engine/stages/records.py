"""What loops on stages gather and send, for `js.explain` and `js.audit`; kept beyond the trace, for each model."""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jshard.engine.mixing import ModelKey, key_of_unit
from jshard.engine.rules import PARTIAL, Value
from jshard.engine.stages.layer_inputs import ScannedParameter
from jshard.engine.stages.layer_program import LayerProgram
from jshard.engine.stages.stacked_results import FinalCarry, StackedGradients
from jshard.plans.plan import LeafPlan, ShardPlan
from jshard.plans.staged_loops import (
    BACKWARD,
    BY_ROUND,
    BY_TICK,
    FORWARD,
    FROM_LAST_PLACE,
    OFF_THEIR_STAGES,
    TO_ALL_PLACES,
    TO_NEXT_PLACE,
    TO_THEIR_STAGES,
    LoopOnStages,
    PlaceTransfer,
    StagedGradient,
    StagedParameter,
    TracedStages,
)
from jshard.plans.units import Unit

StagesRecord = LoopOnStages | PlaceTransfer

SentArray = jax.Array | jax.ShapeDtypeStruct | ShapedArray
"""An array that is sent, or its type."""

_MOST_MODELS = 64

_records: dict[ModelKey, dict[Hashable, TracedStages]] = {}


# ---- one loop


def records_of(layer: LayerProgram, trips: int) -> list[StagesRecord]:
    """Returns the records of a loop that has run.

    Args:
        layer: the program of its layers.
        trips: how often the loop runs, in the loops around it.
    """
    loop = LoopOnStages(
        phase=FORWARD,  # until it is known whose program the loop is in
        units=tuple(dict.fromkeys(unit.scheduled.unit.settings.name for unit in layer.inputs.gathers.units)),
        schedule=layer.schedule,
        parameters=tuple(_parameters(layer)),
        gradients=tuple(_gradients(layer)),
        carry_bytes=sum(_sent_bytes(x) for x in layer.carry_types),
        entering_bytes=sum(_sent_bytes(value.x) for value in _entering(layer)),
    )
    records: list[StagesRecord] = [loop, *_transfers(layer)]
    return [record.repeated(trips) for record in records]


def _parameters(layer: LayerProgram) -> Iterator[StagedParameter]:
    """Yields the parameters that the loop gathers."""
    inputs = layer.inputs
    by_round = {k for unit in inputs.gathers.units for k in unit.scanned}
    for k, parameter in inputs.parameters.items():
        if k in inputs.gathers.unread and k not in by_round:
            continue  # backward, for one, may need the type alone
        gathered = BY_ROUND if k in inputs.gathers.unread else BY_TICK
        yield StagedParameter(parameter.paths, str(inputs.scanned[k].x.dtype), gathered)


def _gradients(layer: LayerProgram) -> Iterator[StagedGradient]:
    """Yields the gradients that the loop reduces."""
    results = [result for result in layer.results if isinstance(result, StackedGradients)]
    named = {result.parameter.paths for result in results}
    # The gradients of layers that are no units are known by how they are stored. Of parameters that are stored alike it
    # makes no difference which one it is.
    others = [parameter for parameter in layer.inputs.parameters.values() if parameter.paths not in named]
    for result in results:
        paths = result.parameter.paths or _taken(others, result.parameter)
        yield StagedGradient(paths, str(result.sum_dtype))


def _taken(parameters: list[ScannedParameter], gradient: ScannedParameter) -> tuple[str, ...]:
    """Returns the paths of the first parameter that is stored as a gradient is, and takes it from the list."""
    for position, parameter in enumerate(parameters):
        if parameter.stored == gradient.stored:
            return parameters.pop(position).paths
    return ()


# ---- activations


def _entering(layer: LayerProgram) -> list[Value]:
    """Returns the values whose examples are gathered from all places."""
    return [value for value in (*layer.inputs.shared, *layer.inputs.starts) if value.is_split]


def _transfers(layer: LayerProgram) -> Iterator[PlaceTransfer]:
    """Yields what the places send to each other, but for parameters and gradients."""
    for value in _entering(layer):
        yield _transfer("all-gather", value.x, TO_ALL_PLACES)
    for k in layer.inputs.dealt:
        yield _transfer("all-to-all", layer.inputs.scanned[k].x, TO_THEIR_STAGES)
    for x in layer.carry_types:
        yield _transfer("collective-permute", x, TO_NEXT_PLACE, times=layer.schedule.num_sends)
    for final in layer.final_carries:
        yield from _leaving(final, layer.schedule.layout.num_places)


def _leaving(final: FinalCarry, num_places: int) -> Iterator[PlaceTransfer]:
    """Yields what the last place sends of a carry; of a sum it sends nothing, as the sum is taken later."""
    if final.state == PARTIAL:
        return
    if isinstance(final.state, int):
        yield _transfer("all-to-all", final.part, FROM_LAST_PLACE, times=final.num_microbatches)
    else:
        yield _transfer("all-gather", final.part, FROM_LAST_PLACE, times=num_places)


def record_off_stages(value: Value, trips: int) -> PlaceTransfer:
    """Returns the record of a stack that leaves its stages; see `StagesPartitioner.off_stages`."""
    staged = value.staged
    if staged.row_dim is None:
        return _transfer("all-gather", value.x, OFF_THEIR_STAGES, times=trips * staged.layout.num_places)
    return _transfer("all-to-all", value.x, OFF_THEIR_STAGES, times=trips)


def _transfer(kind: str, x: SentArray, purpose: str, times: int = 1) -> PlaceTransfer:
    dtype = "uint32" if _is_key(x) else str(x.dtype)
    return PlaceTransfer(kind, dtype, _sent_bytes(x) * times, purpose)


def _sent_bytes(x: SentArray) -> int:
    """Returns the bytes of an array; typed keys are sent as the numbers that they are made of."""
    return x.size * x.dtype.itemsize


def _is_key(x: SentArray) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


# ---- records of the last traced calls


def note_stages(unit: Unit, call: str, part: str, phase: str, records: Sequence[StagesRecord]) -> None:
    """Keeps the records of a program; earlier ones of the same part are replaced.

    Args:
        unit: the root of the model.
        call: the model and its method, such as `GPT.__call__`.
        part: which program of the call.
        phase: forward, or backward.
        records: of the program.
    """
    key = key_of_unit(unit)
    if len(_records) >= _MOST_MODELS and key not in _records:
        oldest = next(iter(_records))
        _records.pop(oldest)
    loops = []
    transfers = []
    for record in records:
        record = dataclasses.replace(record, phase=phase)
        if isinstance(record, LoopOnStages):
            loops.append(record)
        else:
            transfers.append(record)
    _records.setdefault(key, {})[call, part] = TracedStages(tuple(loops), tuple(transfers))


def traced_stages(key: ModelKey, plan: ShardPlan) -> TracedStages:
    """Returns what the last traced calls of a model did on stages: forward and backward.

    Args:
        key: of the model.
        plan: its plan. If only forward was traced, it says how backward will be.
    """
    loops: list[LoopOnStages] = []
    transfers: list[PlaceTransfer] = []
    for part in _records.get(key, {}).values():
        loops += part.loops
        transfers += part.transfers
    if all(loop.phase == FORWARD for loop in loops):
        loops += [_backward_of(loop, plan) for loop in loops]
        transfers += [dataclasses.replace(transfer, phase=BACKWARD) for transfer in transfers]
    return TracedStages(tuple(loops), tuple(transfers))


def _backward_of(loop: LoopOnStages, plan: ShardPlan) -> LoopOnStages:
    """Returns the backward loop of one that has run forward, as far as it follows from that."""
    reshard_of_unit = {unit.name: unit.reshard_after_forward for unit in plan.units}
    gathered_again = []
    gradients = []
    for parameter in loop.parameters:
        leaf = _leaf_at(plan, parameter.paths)
        if leaf is None:
            continue
        if reshard_of_unit[leaf.unit] is True:
            gathered_again.append(parameter)
        if leaf.trained:
            gradients.append(StagedGradient(parameter.paths, leaf.placement.dtype))
    return dataclasses.replace(loop, phase=BACKWARD, parameters=tuple(gathered_again), gradients=tuple(gradients))


def _leaf_at(plan: ShardPlan, paths: Sequence[str]) -> LeafPlan | None:
    leaves = plan.leaves_at(paths)
    return leaves[0] if leaves else None
