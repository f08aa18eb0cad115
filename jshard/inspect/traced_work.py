"""The work of a traced program on one device: its products, what its kernels read and write, and what it sends."""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping

from jax.extend import core as jex

from jshard.engine.rules.products import flops
from jshard.engine.rules.values import type_of
from jshard.inspect.hlo.work import EqualProducts, OpWork
from jshard.inspect.traced_program import (
    COLLECTIVES,
    FUSED,
    KERNEL,
    READ,
    REDUCTION,
    UPDATE,
    WINDOW,
    TracedOp,
    TracedProgram,
    TracedValue,
)
from jshard.plans.mesh import FSDP, REPLICA

_ATTENTION = "dot_product_attention"  # part of the names of cuDNN's operations
_IN_PLACE = ("scatter", "scatter-add")
_NUM_PRODUCTS = 2  # of attention in forward
_NUM_PRODUCTS_BACKWARD = 5
_HLO_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}

_KINDS = {
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "all_to_all": "all-to-all",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
}
_OF_DATA = frozenset((REPLICA, FSDP))


@dataclasses.dataclass(frozen=True)
class AwaitedCollective:
    """A collective of a program over the model's own axes; equal ones have other numbers."""

    kind: str  # by the name of its instruction
    axes: frozenset[str]
    number: int


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """A kernel, and how often it runs.

    Attributes:
        starts: collectives that start just before it.
        waits: collectives of which it is the first to need the result.
    """

    work: OpWork
    rounds: int
    phase: str
    in_layer: bool = False
    is_on_shards: bool = False  # of gradients: it has the less to do, the more devices there are
    is_independent: bool = False  # nothing in its layer waits for it
    starts: tuple[AwaitedCollective, ...] = ()
    waits: tuple[AwaitedCollective, ...] = ()


def kernels(program: TracedProgram, *, rounds: int = 1) -> Iterator[KernelWork]:
    """Yields the kernels of a program; a reduction of what an earlier one reads is part of that one.

    Args:
        program: the operations.
        rounds: how often it runs.
    """
    reduced: set[frozenset[TracedValue]] = set()
    reduced_where_read = _reduced_where_read(program)
    awaited: dict[TracedValue, AwaitedCollective] = {}  # by result, those for which nothing has waited
    started: list[AwaitedCollective] = []  # since the kernel before
    for number, op in enumerate(program.ops):
        for body in op.bodies:
            yield from kernels(body, rounds=rounds * op.rounds)
        if op.name in _KINDS and _axes(op) and _OF_DATA.isdisjoint(_axes(op)):
            collective = AwaitedCollective(_KINDS[op.name], frozenset(_axes(op)), number)
            started.append(collective)
            awaited |= dict.fromkeys(op.results, collective)
        if not _is_kernel(op) or op in reduced_where_read:
            continue
        reads = _reads_of(op)
        if op.kind == REDUCTION and reads in reduced:
            continue
        reduced.add(reads)
        yield KernelWork(
            work=_work_of(op, reads),
            rounds=rounds,
            phase=op.phase,
            in_layer=op.in_layer,
            is_on_shards=_is_on_shards(op),
            is_independent=_is_independent(op),
            starts=tuple(started),
            waits=_first_awaited(op, awaited),
        )
        started = []


def _is_kernel(op: TracedOp) -> bool:
    """Returns whether an operation is a kernel of its own, and no part of another one."""
    if op.bodies or op.kind == READ or op.name in COLLECTIVES:
        return False
    is_fused = op.kind in (FUSED, WINDOW)
    return op.is_stored or not is_fused


def _reads_of(op: TracedOp) -> frozenset[TracedValue]:
    """Returns the values that an operation reads from memory."""
    return frozenset().union(*(operand.reads for operand in op.operands))


def _first_awaited(op: TracedOp, awaited: dict[TracedValue, AwaitedCollective]) -> tuple[AwaitedCollective, ...]:
    """Takes the collectives whose results a kernel reads out of those for which nothing has waited."""
    collectives = set()
    for value in _reads_of(op):
        if value in awaited:
            collectives.add(awaited.pop(value))
    return tuple(sorted(collectives, key=lambda collective: collective.number))


def _is_on_shards(op: TracedOp) -> bool:
    """Returns whether a kernel makes or moves shards of gradients."""
    if op.kind == UPDATE:
        return op.operands[1].is_shard
    return bool(op.results) and all(result.is_shard for result in op.results)


def _is_independent(op: TracedOp) -> bool:
    """Returns whether a kernel stores something for later, or multiplies for the gradient of a parameter."""
    is_stored_away = op.kind == UPDATE
    return is_stored_away or (bool(op.results) and all(result.is_free for result in op.results))


# ---- reductions of rows, as in a softmax

_MOST_IN_A_ROW = 2**15  # elements: what a block of threads holds in half of its registers
_Users = Mapping[TracedValue, Collection[TracedOp | None]]  # which operations use a value; None is the program's end


def _reduced_where_read(program: TracedProgram) -> Collection[TracedOp]:
    """Returns the reductions that are part of the kernels that read their results.

    A block of threads holds a row in its registers. So it reduces the row, and computes with the result and the same
    row, as a softmax does, while it reads the row once. The result is needed nowhere else. XLA does so with rows that
    products have made, as the scores of attention are, and not with those of a norm.
    """
    users = _users_in(program)
    made = _results_of(program, KERNEL)
    reduced = _results_of(program, REDUCTION)
    readers: dict[TracedValue, list[frozenset[TracedValue]]] = collections.defaultdict(list)
    for op in program.ops:
        if op.kind == READ or not (op.bodies or _is_kernel(op)):
            continue
        reads = _reads_of(op)
        for value in reads:
            readers[value].append(reads)
    fused = set()
    for op in program.ops:
        if not _reduces_rows(op) or not _meets_its_row(op.results[0], users):
            continue
        row = _reads_of(op)
        if made >= row - reduced and all(row <= reads for reads in readers[op.results[0]]):
            fused.add(op)
    return fused


def _results_of(program: TracedProgram, kind: str) -> frozenset[TracedValue]:
    """Returns the results of all operations of one kind."""
    return frozenset(result for op in program.ops if op.kind == kind for result in op.results)


def _users_in(program: TracedProgram) -> _Users:
    """Returns the operations that use each value of a program."""
    users: dict[TracedValue, set[TracedOp | None]] = collections.defaultdict(set)
    for op in program.ops:
        if op.kind == READ:
            continue
        for operand in op.operands:
            users[operand].add(op)
    for value in program.outputs:
        users[value].add(None)
    return users


def _reduces_rows(op: TracedOp) -> bool:
    """Returns whether an operation reduces the last dim of an array, of a size that registers hold."""
    if op.kind != REDUCTION or not op.name.startswith("reduce_"):
        return False
    shape = type_of(op.eqn.invars[0]).shape
    return tuple(op.eqn.params["axes"]) == (len(shape) - 1,) and shape[-1] <= _MOST_IN_A_ROW


def _meets_its_row(reduced: TracedValue, users: _Users) -> bool:
    """Returns whether one elementwise operation, perhaps after others on the result alone, spreads a result again."""
    value = reduced
    while len(users.get(value, ())) == 1:
        (user,) = users[value]
        if user is None or user.kind != FUSED:
            return False
        (value,) = user.results
        if value.bytes > reduced.bytes:
            return True
    return False


# ---- what a kernel does


def _work_of(op: TracedOp, reads: frozenset[TracedValue]) -> OpWork:
    """Returns the work of a kernel; `reads` are the values that it reads from memory."""
    # The compiler splits a product if it splits an operand or the result.
    part = op.part
    if part is None:
        part = min(value.part for value in (*op.operands, *op.results))
    products = [_part_of(product, part) for product in _products(op)]
    return OpWork(tuple(products), _traffic_bytes(op, reads))


def _part_of(product: EqualProducts, part: float) -> EqualProducts:
    """Returns a device's part of a product, which has fewer columns."""
    sizes = product.sizes
    if sizes:
        batch, rows, columns, contracted = sizes
        sizes = (batch, rows, columns * part, contracted)
    return dataclasses.replace(product, flops=product.flops * part, sizes=sizes)


def _traffic_bytes(op: TracedOp, reads: frozenset[TracedValue]) -> float:
    """Returns what a kernel reads and writes."""
    if _ATTENTION in op.name:
        return 0.0  # bound by its products
    written = sum(result.bytes for result in op.results)
    if op.kind == UPDATE:
        update = op.operands[1]
        return update.bytes + _bytes_of_all(update.reads)
    if op.kind == WINDOW or op.name == "gather":
        return 2 * written
    if op.name in _IN_PLACE:
        return written + 2 * op.operands[2].bytes
    return written + _bytes_of_all(reads)


def _bytes_of_all(values: frozenset[TracedValue]) -> float:
    # Rounded once: a set has another order in each run, and the numbers of a search are to be the same.
    return math.fsum(value.bytes for value in values)


def _products(op: TracedOp) -> Iterator[EqualProducts]:
    eqn = op.eqn
    if _ATTENTION in op.name:
        query, key = (type_of(atom) for atom in eqn.invars[:2])
        num_products = _NUM_PRODUCTS_BACKWARD if "bwd" in op.name else _NUM_PRODUCTS
        # Each query with each key.
        num_flops = num_products * 2.0 * math.prod(query.shape) * key.shape[1]
        if "CAUSAL" in str(eqn.params.get("mask_type")):
            num_flops /= 2
        yield EqualProducts(_dtype(eqn), num_flops, num_products, is_attention=True)
        return
    num_flops = flops(eqn)
    if num_flops:
        yield EqualProducts(_dtype(eqn), num_flops, sizes=_sizes(eqn))


def _dtype(eqn: jex.JaxprEqn) -> str:
    name = str(type_of(eqn.invars[0]).dtype)
    return _HLO_DTYPES.get(name, name)


def _sizes(eqn: jex.JaxprEqn) -> tuple[float, ...]:
    """Returns batch, rows, columns and contracted elements of a product; empty for a convolution."""
    if eqn.primitive.name != "dot_general":
        return ()
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = (type_of(atom) for atom in eqn.invars[:2])
    num_batch = math.prod(left.shape[dim] for dim in batch)
    num_contracted = math.prod(left.shape[dim] for dim in contracted)
    rows = math.prod(left.shape) / max(num_batch * num_contracted, 1)
    columns = math.prod(right.shape) / max(num_batch * num_contracted, 1)
    return (float(num_batch), rows, columns, float(num_contracted))


# ---- what data shards send each other, as for a norm over the batch


@dataclasses.dataclass(frozen=True)
class DataCollective:
    """A collective of all data shards.

    Attributes:
        kind: by the name of its instruction.
        device_bytes: the array on one device, or its part of it.
        rounds: how often it runs.
        phase: `forward` or `backward`.
    """

    kind: str
    device_bytes: float
    rounds: int
    phase: str

    def full_bytes(self, group_size: int) -> float:
        """Returns the bytes of the whole array; a sum has the same array on each device."""
        return self.device_bytes if self.kind == "all-reduce" else self.device_bytes * group_size


def data_collectives(program: TracedProgram, rounds: int = 1) -> Iterator[DataCollective]:
    """Yields the collectives of a program over data axes that send neither parameters nor gradients."""
    for op in program.ops:
        for body in op.bodies:
            yield from data_collectives(body, rounds * op.rounds)
        if op.name not in _KINDS or not _OF_DATA.issuperset(_axes(op)):
            continue
        kind = _KINDS[op.name]
        for operand, result in zip(op.operands, op.results, strict=False):
            if not operand.is_free and not result.is_free:
                sent = operand if kind == "all-gather" else result
                yield DataCollective(kind, sent.bytes, rounds, op.phase)


def _axes(op: TracedOp) -> tuple[str, ...]:
    params = op.eqn.params
    axes = params["axes"] if "axes" in params else params.get("axis_name", ())
    if isinstance(axes, str):
        return (axes,)
    return tuple(axes)
