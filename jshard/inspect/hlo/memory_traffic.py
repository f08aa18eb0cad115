"""The bytes of device memory that an instruction of a compiled program reads and writes."""

import functools
from collections.abc import Iterable, Iterator

from jshard.inspect.hlo.module import Computation, Instruction, arrays, item_bytes

# They move no data, or move it beside the computation.
FREE_OPCODES = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id copy-start copy-done"
    " slice-start slice-done iota add-dependency opt-barrier optimization-barrier domain".split()
)
# They touch a part of their operand: a layer of a stack. The whole stack would count again in each round of a loop.
_SLICES = ("dynamic-slice", "slice", "gather")
_ASSUMED_ITEM_BYTES = 4  # of an element type that is not known: an estimate is better than an error


@functools.lru_cache(maxsize=4096)
def shape_bytes(shape: str) -> float:
    """Returns the bytes of a shape, tuples added up; an unknown element type counts as four bytes."""
    total = 0.0
    for array in arrays(shape):
        try:
            total += array.num_elements * item_bytes(array.dtype)
        except KeyError:
            total += array.num_elements * _ASSUMED_ITEM_BYTES
    return total


def _bytes_of(instruction: Instruction | None) -> float:
    """Returns the bytes of an instruction's result; 0 if it is not in the text."""
    if instruction is None:
        return 0.0
    return shape_bytes(instruction.shape)


def instruction_bytes(home: Computation, instruction: Instruction) -> float:
    """Returns the bytes of operands and result; of a slice, or an update in place, only those of the part."""
    if instruction.opcode in _SLICES:
        return 2 * shape_bytes(instruction.shape)  # read and written
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _bytes_of(home.operand(instruction, 1))  # the part that is written into the first operand
    return shape_bytes(instruction.shape) + sum(map(_bytes_of, home.operands(instruction)))


# ---- fusions


def fusion_bytes(body: Computation) -> float:
    """Returns the bytes that a fusion reads and writes: values inside cost nothing, slices count by their own size."""
    if "async_collective_fusion" in body.name:
        return _async_fusion_bytes(body)
    memory_bytes = _written_bytes(body, body.root)
    for instruction in body.instructions:
        if instruction.opcode == "parameter":
            memory_bytes += _read_bytes(body, instruction)
    return memory_bytes


def _read_bytes(body: Computation, value: Instruction) -> float:
    """Returns the bytes that a fusion reads of one of its inputs."""
    whole = shape_bytes(value.shape)
    users = body.users.get(value.name, [])
    if not users:
        return whole
    parts = 0.0
    for user in users:
        if user.opcode in _SLICES:
            parts += shape_bytes(user.shape)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue  # updated in place
        elif user.opcode == "bitcast":
            parts += _read_bytes(body, user)
        else:
            return whole
    return min(whole, parts)


def _written_bytes(body: Computation, result: Instruction | None) -> float:
    """Returns the bytes that a fusion writes for a result."""
    if result is None:
        return 0.0
    if result.opcode == "dynamic-update-slice":
        return 2 * _bytes_of(body.operand(result, 1))  # the part is also read: a row of a stack, for instance
    if result.opcode == "bitcast":
        return _written_bytes(body, body.operand(result, 0))
    if result.opcode == "tuple":
        return sum(_written_bytes(body, part) for part in body.operands(result))
    return shape_bytes(result.shape)


def _async_fusion_bytes(body: Computation) -> float:
    """Returns the bytes of a TPU's fusion that also carries the buffers of a collective in flight.

    Only what its own computation touches is counted: the collective has been counted by itself. With the buffers, a
    schedule that hides its communication would look slower than one that does not.
    """
    computing: set[str] = set()
    read: dict[str, Instruction] = {}  # by name, since several instructions may read one parameter
    for instruction in body.instructions:
        if _computes(instruction):
            computing.add(instruction.name)
            for source in _sources(body, instruction.operands):
                if source.opcode == "parameter":
                    read[source.name] = source
    written = [source for source in _sources(body, _result_names(body)) if source.name in computing]
    return sum(map(_bytes_of, read.values())) + sum(map(_bytes_of, written))


def _computes(instruction: Instruction) -> bool:
    """Returns whether an instruction of a fusion is neither free nor a part of a collective."""
    is_collective = instruction.opcode.startswith(("all-", "reduce-scatter"))
    return instruction.opcode not in FREE_OPCODES and instruction.opcode != "custom-call" and not is_collective


def _result_names(body: Computation) -> tuple[str, ...]:
    """Returns the names of the results of a computation, parts of a tuple one by one."""
    if body.root is None:
        return ()
    if body.root.opcode == "tuple" and body.root.operands:
        return body.root.operands
    return (body.root.name,)


def _sources(body: Computation, names: Iterable[str]) -> Iterator[Instruction]:
    """Yields the origins of some values, as far as they are in the text."""
    for name in names:
        source = body.source(body.by_name.get(name))
        if source is not None:
            yield source
