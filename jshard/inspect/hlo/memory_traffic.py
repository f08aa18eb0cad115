"""The bytes of device memory that an instruction of a compiled program reads and writes."""

import functools
from collections.abc import Iterable, Iterator

from jshard.inspect.hlo.module import Computation, Instruction, Module, arrays, item_bytes

# They move no data, or move it beside the computation.
FREE_OPCODES = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id copy-start copy-done"
    " slice-start slice-done async-update call-update send send-done recv recv-done iota add-dependency opt-barrier"
    " optimization-barrier domain".split()
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


def fusion_bytes(module: Module, body: Computation) -> float:
    """Returns the bytes that a fusion reads and writes: values inside cost nothing, slices count by their own size."""
    if "async_collective_fusion" in body.name:
        return _async_fusion_bytes(module, body)
    memory_bytes = _written_bytes(body, body.root)
    for instruction in body.instructions:
        if instruction.opcode == "parameter":
            memory_bytes += _read_bytes(module, body, instruction)
    return memory_bytes


def _read_bytes(module: Module, body: Computation, value: Instruction) -> float:
    """Returns the bytes that a fusion reads of one of its inputs."""
    whole = shape_bytes(value.shape)
    users = body.users.get(value.name, [])
    if not users:
        return whole
    parts = 0.0
    for user in users:
        if user.opcode == "bitcast":
            parts += _read_bytes(module, body, user)
        else:
            parts += sum(_bytes_of_operand(module, user, place, value) for place in _places(user, value.name))
    return min(whole, parts)


def _places(user: Instruction, name: str) -> list[int]:
    """Returns at which places an instruction has an operand."""
    return [place for place, operand in enumerate(user.operands) if operand == name]


def _bytes_of_operand(module: Module, user: Instruction, place: int, operand: Instruction) -> float:
    """Returns the bytes that an instruction of a fusion reads of an operand: of a stack, only the layer it takes."""
    if place == 0 and user.opcode in _SLICES:
        return shape_bytes(user.shape)
    if place == 0 and user.opcode == "dynamic-update-slice":
        return 0.0  # updated in place
    whole = shape_bytes(operand.shape)
    if user.opcode != "fusion":
        return whole
    # A TPU nests fusions: that of a product contains those of its operands.
    parts = 0.0
    for nested in module.callees(user):
        for inner in nested.instructions:
            if inner.opcode == "parameter" and inner.inside.strip() == str(place):
                parts += _read_bytes(module, nested, inner)
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


def _async_fusion_bytes(module: Module, body: Computation) -> float:
    """Returns the bytes of a TPU's fusion that also carries the buffers of a collective in flight.

    Only what its own computation touches is counted: the collective has been counted by itself. With the buffers, a
    schedule that hides its communication would look slower than one that does not.
    """
    computing: set[str] = set()
    read_bytes: dict[str, float] = {}  # of parameters, by name, since several instructions may read one
    for instruction in body.instructions:
        if not _computes(instruction):
            continue
        computing.add(instruction.name)
        for place, name in enumerate(instruction.operands):
            source = body.source(body.by_name.get(name))
            if source is not None and source.opcode == "parameter":
                part = read_bytes.get(source.name, 0.0) + _bytes_of_operand(module, instruction, place, source)
                read_bytes[source.name] = min(part, shape_bytes(source.shape))
    written = [source for source in _sources(body, _result_names(body)) if source.name in computing]
    return sum(read_bytes.values()) + sum(_written_bytes(body, source) for source in written)


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
