"""A traced program as a list of operations, and which of their results a compiler stores.

Calls are part of the list, and loops have lists of their own. What is stored follows from a few rules:

- A product, a convolution, a loop, or anything else that is a kernel of its own, stores its results, and reads its
  operands from memory.
- A reduction, a gather or a scatter stores its result. What it reads may be computed as it is read.
- Elementwise arithmetic is computed where it is read. It is stored only for a kernel that reads it from memory, and
  what it is computed from lives until the last of its readers.
- Another shape of the same values is the same value.

Parameters, their gathered copies and their gradients take no memory here: a plan says how large they are, and when.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from jshard import _compat
from jshard.plans.mesh import TENSOR

# Kinds of operations.
FUSED = "fused"  # elementwise
WINDOW = "window"  # a part of its operand
REDUCTION = "reduction"
KERNEL = "kernel"
LOOP = "loop"
UPDATE = "update"  # changes its operand in place
READ = "read"  # has what it reads stored, and nothing else happens

# Phases; and the names of the calls of layers in a trace.
FORWARD = "forward"
BACKWARD = "backward"

_VIEWS = frozenset(
    "copy copy_p expand_dims layout_constraint name pcast pvary reduce_precision reshape reshard sharding_constraint"
    " squeeze stop_gradient transpose".split()
)
_ELEMENTWISE = frozenset(
    "abs acos add add_any and asin atan2 axis_index bitcast_convert_type broadcast_in_dim cbrt ceil clamp concatenate"
    " convert_element_type cos cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow iota is_finite"
    " le log log1p logistic lt max min mul ne neg nextafter not or pad population_count pow random_bits real rem rev"
    " round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stack sub"
    " tan tanh xor".split()
)
_WINDOWS = frozenset("dynamic_slice slice split unstack".split())
_REDUCTIONS = frozenset(
    "argmax argmin gather reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum scatter"
    " scatter-add".split()
)
_LOOPS = frozenset("cond scan while".split())
COLLECTIVES = frozenset(
    "all_gather all_gather_invariant all_to_all pbroadcast pmax ppermute psum psum2 psum_invariant psum_scatter"
    " reduce_scatter".split()
)
# What a gradient passes on its way out of the program: it is cast, cut, scaled and sent.
_OF_GRADIENTS = COLLECTIVES | frozenset(
    "add_any broadcast_in_dim concatenate convert_element_type div mul slice split".split()
)
_SCATTERS = frozenset("all_to_all psum_scatter reduce_scatter".split())  # of whole gradients, to shards of sums
# Of a unit in a list; and of the call of a unit, which is part of the program around it where the unit has regions.
_LAYER_SCOPE = re.compile(r"jshard\[[^\]]*\d\]|jshard\[[^\]]*\]\)*/(forward|backward)")
_WITH_OWN_BODIES = _LOOPS | frozenset("custom_partitioning pallas_call reduce scatter scatter-add".split())


@dataclasses.dataclass(eq=False)
class TracedValue:
    """A value of a program; a view of it is the same value.

    Attributes:
        bytes: on one device.
        part: of the value, if the compiler splits it over more devices than its type says.
        is_free: whether it takes no memory here: a parameter, a copy of one, or a gradient.
        is_small: whether it is a single number, which makes nothing an activation.
        is_shard: whether it is a gradient that is reduced, of which a device has its shard.
        stored: the stored values that it is, or is computed from where it is read.
        reads: what is read from memory for it: stored values, or parts of them.
    """

    bytes: float
    part: float = 1.0
    is_free: bool = False
    is_small: bool = False
    is_shard: bool = False
    stored: frozenset["TracedValue"] = frozenset()
    reads: frozenset["TracedValue"] = frozenset()

    def become_shard(self) -> None:
        """Makes it a shard, whose type says how large it is."""
        self.is_shard = True
        self.bytes /= self.part
        self.part = 1.0

    def store(self) -> None:
        """Has it stored itself."""
        self.stored = frozenset({self})
        self.reads = self.stored


@dataclasses.dataclass(eq=False)
class TracedOp:
    """An operation of a program."""

    kind: str
    operands: list[TracedValue]
    results: list[TracedValue]
    eqn: jex.JaxprEqn
    phase: str  # `forward` or `backward`
    in_layer: bool
    bodies: list["TracedProgram"] = dataclasses.field(default_factory=list)  # of a loop
    part: float | None = None  # that a device has of its types, if it is in a region over `tensor`; else see its values

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.eqn.primitive.name

    @property
    def rounds(self) -> int:
        """How often its bodies run."""
        return self.eqn.params["length"] if self.name == "scan" else 1

    @property
    def num_consts(self) -> int:
        """How many of a loop's operands are the same in all rounds."""
        num_consts, _ = self._scan_arguments
        return num_consts

    @property
    def num_carry(self) -> int:
        """How many of a loop's operands its rounds replace."""
        _, num_carry = self._scan_arguments
        return num_carry

    @property
    def _scan_arguments(self) -> tuple[int, int]:
        return _compat.scan_arguments(self.eqn) if self.name == "scan" else (0, 0)

    @property
    def is_stored(self) -> bool:
        """Whether any of its results is stored; if not, it is no kernel."""
        return any(result in result.stored for result in self.results)


@dataclasses.dataclass(eq=False)
class TracedProgram:
    """Operations in order, without calls."""

    ops: list[TracedOp] = dataclasses.field(default_factory=list)
    inputs: list[TracedValue] = dataclasses.field(default_factory=list)
    outputs: list[TracedValue] = dataclasses.field(default_factory=list)


SizeOf = Callable[[Any], float]
"""The bytes of a value on one device, given its type in a region."""


def program_of(
    jaxpr: jex.Jaxpr,
    *,
    parameters: Sequence[bool],
    gradients: Sequence[bool],
    num_shards: int,
    size_of: SizeOf | None = None,
    tensor: int | None = None,
) -> TracedProgram:
    """Returns a program with what it stores.

    Args:
        jaxpr: the program, in global view.
        parameters: which of its inputs are parameters.
        gradients: which of its results are their gradients.
        num_shards: of a value outside of sharded regions.
        size_of: the bytes of a value; those of its type by default.
        tensor: the degree of that axis; the traced one by default.
    """
    flattener = _Flattener(size_of or bytes_of, tensor)
    program = flattener.program
    values: dict[int, TracedValue] = {}
    for variable, is_parameter in zip(jaxpr.invars, parameters, strict=True):
        value = flattener.new(variable, num_shards)
        value.is_free = is_parameter
        values[id(variable)] = value
        program.inputs.append(value)
    flattener.run(jaxpr, values, num_shards, _Site(FORWARD, in_layer=False))
    program.outputs = [flattener.read(variable, values) for variable in jaxpr.outvars]
    _drop_unused(program)
    _free_gradients(program, gradients, gradients)
    _store(program)
    return program


def bytes_of(aval: Any) -> float:
    """Returns the bytes of a value; a random key has none."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or _compat.on_host(aval) or jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return 0.0
    return float(math.prod(aval.shape) * dtype.itemsize)


# ---- the list


@dataclasses.dataclass(frozen=True)
class _Site:
    """Where in a program an equation is."""

    phase: str
    in_layer: bool
    part: float | None = None  # as in `TracedOp`

    def of(self, eqn: jex.JaxprEqn) -> "_Site":
        """Returns the place of a called program's equations."""
        call = eqn.params.get("name")
        scopes = str(eqn.source_info.name_stack)
        is_layer = call in (FORWARD, BACKWARD) or _LAYER_SCOPE.search(scopes) is not None
        is_backward = call == BACKWARD or "transpose(" in scopes
        return _Site(BACKWARD if is_backward else self.phase, self.in_layer or is_layer, self.part)


@dataclasses.dataclass(frozen=True)
class _NarrowValue:
    """A value, and the dtype that it has."""

    value: TracedValue
    dtype: np.dtype


class _Flattener:
    """Adds the operations of a traced program to a list, through its calls."""

    def __init__(self, size_of: SizeOf, tensor: int | None = None) -> None:
        self.program = TracedProgram()
        self.size_of = size_of
        self.tensor = tensor
        # By a value that is another one in a wider dtype: a compiler removes a cast back.
        self._before_cast: dict[TracedValue, _NarrowValue] = {}

    def new(self, variable: jex.Var, num_shards: int, part_of_type: float | None = None) -> TracedValue:
        aval = variable.aval
        is_small = math.prod(getattr(aval, "shape", ())) == 1
        if part_of_type is not None:
            size = bytes_of(aval) * part_of_type
            part = 1.0 if self.tensor is None else 1 / self.tensor
        else:
            size = self.size_of(aval)
            part = size / bytes_of(aval) if size else 1.0
        value = TracedValue(size / num_shards, part, is_small=is_small)
        value.store()
        return value

    def read(self, variable: jex.Var | jex.Literal, values: Mapping[int, TracedValue]) -> TracedValue:
        if isinstance(variable, jex.Literal):
            return TracedValue(0.0, is_small=True)
        return values[id(variable)]

    def run(self, jaxpr: jex.Jaxpr, values: dict[int, TracedValue], num_shards: int, place: _Site) -> None:
        """Adds the operations of a program.

        Args:
            jaxpr: the program.
            values: those of its variables; of its inputs at first.
            num_shards: of each value, if its types are those of all devices.
            place: of the program.
        """
        for variable in jaxpr.constvars:
            values[id(variable)] = self.new(variable, num_shards)
        for eqn in jaxpr.eqns:
            operands = [self.read(variable, values) for variable in eqn.invars]
            here = place.of(eqn)
            same = self._same_values(eqn, operands, here)
            if same is None:
                same = self._called_values(eqn, operands, num_shards, here)
            if same is None:
                same = self._new_values(eqn, operands, num_shards, here)
            for variable, value in zip(eqn.outvars, same, strict=True):
                values[id(variable)] = value

    def _same_values(self, eqn: jex.JaxprEqn, operands: list[TracedValue], here: _Site) -> list[TracedValue] | None:
        """Returns the results of an equation that computes nothing new; None of another one."""
        name = eqn.primitive.name
        if name in _VIEWS and len(eqn.outvars) == 1:
            return operands[:1]
        if name == "convert_element_type":
            narrow = self._before_cast.get(operands[0])
            return None if narrow is None or narrow.dtype != eqn.params["new_dtype"] else [narrow.value]
        if name == "optimization_barrier":
            self._add(READ, operands, [], eqn, here)
            return operands
        if name == "dynamic_update_slice":
            self._add(UPDATE, operands[:2], [], eqn, here)
            return operands[:1]
        return None

    def _called_values(
        self, eqn: jex.JaxprEqn, operands: list[TracedValue], num_shards: int, here: _Site
    ) -> list[TracedValue] | None:
        """Returns the results of a call, of which the equations are added; None of another equation."""
        body = _called(eqn)
        if body is None:
            return None
        shards = num_shards
        if eqn.primitive.name == "shard_map":
            shards = 1
            here = dataclasses.replace(here, part=self._part_in_region(eqn, here))
        inner = dict(zip(map(id, body.invars), operands, strict=True))
        self.run(body, inner, shards, here)
        return [self.read(variable, inner) for variable in body.outvars]

    def _part_in_region(self, eqn: jex.JaxprEqn, here: _Site) -> float | None:
        """Returns which part of the types in a region a device has: one over `tensor` has those of a degree."""
        if TENSOR not in eqn.params["newly_manual_axes"]:
            return here.part
        traced_degree = dict(eqn.params["mesh"].shape).get(TENSOR, 1)
        if traced_degree == 1:
            return here.part
        return traced_degree / (self.tensor or traced_degree)

    def _new_values(
        self, eqn: jex.JaxprEqn, operands: list[TracedValue], num_shards: int, here: _Site
    ) -> list[TracedValue]:
        """Returns the results of an equation, which is added unless it only computes with parameters."""
        results = [self.new(variable, num_shards, here.part) for variable in eqn.outvars]
        kind = _kind_of(eqn.primitive.name)
        large = [operand for operand in operands if not operand.is_small]
        if kind != LOOP and large and all(operand.is_free for operand in large):
            for result in results:
                result.is_free = True
            return results
        op = self._add(kind, operands, results, eqn, here)
        if eqn.primitive.name == "convert_element_type":
            self._note_cast(eqn, operands[0], results[0])
        if eqn.primitive.name == "scan":
            # A loop over layers, as nearly all are.
            op.bodies = [self._body_of_scan(op, num_shards, dataclasses.replace(here, in_layer=True))]
        elif kind == LOOP:
            op.bodies = list(self._branches(eqn, num_shards, here))
        return results

    def _note_cast(self, eqn: jex.JaxprEqn, narrow: TracedValue, wide: TracedValue) -> None:
        """Remembers what a value was before a cast that loses nothing."""
        narrow_type: Any = eqn.invars[0].aval
        dtype = narrow_type.dtype
        if jnp.promote_types(dtype, eqn.params["new_dtype"]) == eqn.params["new_dtype"]:
            self._before_cast[wide] = _NarrowValue(narrow, dtype)

    def _add(
        self, kind: str, operands: list[TracedValue], results: list[TracedValue], eqn: jex.JaxprEqn, here: _Site
    ) -> TracedOp:
        op = TracedOp(kind, operands, results, eqn, here.phase, here.in_layer, part=here.part)
        self.program.ops.append(op)
        return op

    # ---- loops

    def _body_of_scan(self, op: TracedOp, num_shards: int, here: _Site) -> TracedProgram:
        """Returns the body of a loop; a carry is a parameter's copy if it enters as one and leaves as one."""
        is_free = [operand.is_free for operand in op.operands]
        while True:
            program = self._body_with(op, is_free, num_shards, here)
            turned = []
            for place in range(op.num_carry):
                at = op.num_consts + place
                if is_free[at] and not program.outputs[place].is_free:
                    turned.append(at)
            if not turned:
                break
            for at in turned:
                is_free[at] = False
        for result, output in zip(op.results, program.outputs, strict=True):
            result.is_free = output.is_free
        _drop_unused(program)
        return program

    def _body_with(self, op: TracedOp, is_free: Sequence[bool], num_shards: int, here: _Site) -> TracedProgram:
        body = op.eqn.params["jaxpr"].jaxpr
        flattener = _Flattener(self.size_of, self.tensor)
        values: dict[int, TracedValue] = {}
        for place, variable in enumerate(body.invars):
            value = flattener.new(variable, num_shards)
            value.is_free = is_free[place]
            is_row_of_stack = place >= op.num_consts + op.num_carry
            if is_row_of_stack:
                value.stored = frozenset()  # a part of the stack, unless a kernel needs it alone
            values[id(variable)] = value
            flattener.program.inputs.append(value)
        flattener.run(body, values, num_shards, here)
        flattener.program.outputs = [flattener.read(variable, values) for variable in body.outvars]
        return flattener.program

    def _branches(self, eqn: jex.JaxprEqn, num_shards: int, here: _Site) -> Iterator[TracedProgram]:
        for inner in jex.jaxprs_in_params(eqn.params):
            body = getattr(inner, "jaxpr", inner)
            flattener = _Flattener(self.size_of, self.tensor)
            values = {id(variable): flattener.new(variable, num_shards) for variable in body.invars}
            flattener.program.inputs = [values[id(variable)] for variable in body.invars]
            flattener.run(body, values, num_shards, here)
            flattener.program.outputs = [flattener.read(variable, values) for variable in body.outvars]
            _drop_unused(flattener.program)
            yield flattener.program


def _kind_of(name: str) -> str:
    for kind, names in ((FUSED, _ELEMENTWISE), (WINDOW, _WINDOWS), (REDUCTION, _REDUCTIONS), (LOOP, _LOOPS)):
        if name in names:
            return kind
    return KERNEL


def _called(eqn: jex.JaxprEqn) -> jex.Jaxpr | None:
    """Returns the program that an equation calls once with its operands; None if it calls none so."""
    if eqn.primitive.name in _WITH_OWN_BODIES:
        return None
    for inner in jex.jaxprs_in_params(eqn.params):
        body = getattr(inner, "jaxpr", inner)
        if len(body.invars) == len(eqn.invars) and len(body.outvars) == len(eqn.outvars):
            return body
    return None


def _drop_unused(program: TracedProgram) -> None:
    """Removes operations of whose results none is used."""
    needed = set(program.outputs)
    kept = []
    for op in reversed(program.ops):
        if op.kind == UPDATE:
            is_needed = op.operands[0] in needed
        else:
            is_needed = op.kind == READ or not needed.isdisjoint(op.results)
        if not is_needed:
            continue
        kept.append(op)
        if op.kind != READ:
            needed.update(op.operands)
    program.ops = kept[::-1]


# ---- gradients


def _free_gradients(program: TracedProgram, gradients: Sequence[bool], shards: Sequence[bool]) -> None:
    """Marks the gradients of parameters, as far back as they are only cast, cut, scaled or sent.

    Args:
        program: the operations.
        gradients: which of its results are gradients.
        shards: which of these are shards.
    """
    collected = _Gradients()
    for value, is_gradient, is_shard in zip(program.outputs, gradients, shards, strict=True):
        if is_gradient:
            collected.add(value, is_shard=is_shard)
    for op in reversed(program.ops):
        collected.add_before(op)
    collected.mark()


class _Gradients:
    """Values that are gradients of parameters, collected from the results of a program backward."""

    def __init__(self) -> None:
        self._values: set[TracedValue] = set()
        self._shards: set[TracedValue] = set()  # those of them that are reduced

    def add(self, value: TracedValue, *, is_shard: bool) -> None:
        self._values.add(value)
        if is_shard:
            self._shards.add(value)

    def add_before(self, op: TracedOp) -> None:
        """Adds the operands of an operation that are gradients, because its results are."""
        if op.kind == UPDATE and op.operands[0] in self._values:
            self.add(op.operands[1], is_shard=op.operands[0] in self._shards)
        elif op.name == "scan":
            self._add_before_loop(op)
        elif op.results and self._values.issuperset(op.results) and op.name in _OF_GRADIENTS:
            is_shard = self._shards.issuperset(op.results) and op.name not in _SCATTERS
            for operand in op.operands:
                self.add(operand, is_shard=is_shard)

    def _add_before_loop(self, op: TracedOp) -> None:
        """Adds the carries of a loop that are gradients, and marks those inside."""
        is_gradient = [result in self._values for result in op.results]
        is_shard = [result in self._shards for result in op.results]
        (body,) = op.bodies
        _free_gradients(body, is_gradient, is_shard)
        # A carry is one if it enters as one, whether or not it leaves as another's.
        while turned := _carries_that_enter_as_gradients(op, is_gradient):
            for place in turned:
                is_gradient[place] = True
            _free_gradients(body, is_gradient, is_shard)
        for place, result in enumerate(op.results):
            if not is_gradient[place]:
                continue
            self.add(result, is_shard=is_shard[place])
            if place < op.num_carry:
                self.add(op.operands[op.num_consts + place], is_shard=is_shard[place])

    def mark(self) -> None:
        """Marks the values."""
        for value in self._values:
            value.is_free = True
        for value in self._shards:
            if not value.is_shard:
                value.become_shard()


def _carries_that_enter_as_gradients(op: TracedOp, is_gradient: Sequence[bool]) -> list[int]:
    """Returns the carries that a loop's body takes as gradients, and that are not known as such."""
    (body,) = op.bodies
    places = []
    for place in range(op.num_carry):
        at = op.num_consts + place
        is_known = is_gradient[place] or op.operands[at].is_free
        if body.inputs[at].is_free and not is_known:
            places.append(place)
    return places


# ---- what is stored


def _store(program: TracedProgram) -> None:
    """Decides which values are stored."""
    needed = _read_from_memory(program)
    for value in program.inputs:
        if value in needed:
            value.store()
    for op in program.ops:
        for body in op.bodies:
            _store(body)
        if op.kind not in (FUSED, WINDOW):
            continue
        stored = _union(operand.stored for operand in op.operands)
        reads = _union(operand.reads for operand in op.operands)
        for result in op.results:
            if result in needed:
                continue
            result.stored = stored
            result.reads = reads if op.kind == FUSED else frozenset({result})


def _read_from_memory(program: TracedProgram) -> Collection[TracedValue]:
    """Returns the values that are read from memory, and so have to be stored."""
    needed = set(program.outputs)
    for op in program.ops:
        if op.kind in (KERNEL, LOOP, READ):
            needed.update(op.operands)
        elif op.kind == UPDATE:
            needed.add(op.operands[0])
    return needed


def _union(sets: Iterator[frozenset[TracedValue]]) -> frozenset[TracedValue]:
    return frozenset().union(*sets)
