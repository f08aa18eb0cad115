"""The batch of a call, and a warning for work that the data shards do not divide.

The results equal those of one device either way: what has no batch is whole on every device. Only speed differs.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.extend.core import Jaxpr, JaxprEqn

from jshard import _compat
from jshard._text import shortened
from jshard.engine.context import in_shapes_only
from jshard.engine.program import abstract_all
from jshard.engine.rules.products import flops
from jshard.engine.selections import picked
from jshard.engine.values import type_texts

WARNED_FLOPS = 1e8
WARNED_PART = 0.1
"""A share of the products of one device, in forward: of those that each device would not compute if all were split."""

_SHOWN = 4

Shapes = tuple[tuple[int, ...], ...]
ProductPlace = tuple[str, Shapes]
"""The user's line of a product, and its shapes: a line may have several products."""

_warned: set[tuple[str, bool, tuple[str, ...]]] = set()


@dataclasses.dataclass(frozen=True)
class LocalProduct:
    """The products of one equation as one device computes them, in all trips of the loops around.

    Attributes:
        flops: floating-point operations.
        is_whole: whether every device computes the same.
        where: the user's line, if it is whole.
        shapes: of operands and results, if it is whole.
    """

    flops: float
    is_whole: bool
    where: str
    shapes: Shapes = ()

    @property
    def place(self) -> ProductPlace:
        """Its line and shapes."""
        return self.where or "the model", self.shapes

    def repeated(self, trips: float) -> "LocalProduct":
        """Returns the record multiplied by a loop's trips."""
        return dataclasses.replace(self, flops=self.flops * trips)


def shapes_of(eqn: JaxprEqn) -> Shapes:
    """Returns the shapes of the operands and results of an equation."""
    return tuple(aval.shape for aval in abstract_all([*eqn.invars, *eqn.outvars]))


# ---- which size is the batch


def batch_size(arrays: Sequence[jax.ShapeDtypeStruct], degree: int) -> int:
    """Chooses the size of the batch: the leading size that most of the arguments have, by count, then by elements.

    A size that is also another dim of a second array comes last, except that of the first argument: it is likely the
    length of a sequence, as in a mask (tokens, tokens) or positions (tokens, ...) beside ids (examples, tokens).
    A wrong choice costs speed only.

    Args:
        arrays: the arguments.
        degree: the number of shards that must divide the size.

    Returns:
        The size; 0 if no argument has a leading dim that divides.
    """
    candidates: dict[int, _Votes] = collections.defaultdict(_Votes)
    for x in arrays:
        if not x.ndim:
            continue
        size = x.shape[0]
        if size and size % degree == 0:
            candidates[size].num_arrays += 1
            candidates[size].num_elements += x.size
    if not candidates:
        return 0
    # Dicts keep their order, so it is that of the first argument with a size that divides.
    first = next(iter(candidates))

    def rank(size: int) -> tuple[bool, int, int]:
        votes = candidates[size]
        is_leading_only = size == first or not _is_inner_size(size, arrays)
        return is_leading_only, votes.num_arrays, votes.num_elements

    return max(candidates, key=rank)


@dataclasses.dataclass
class _Votes:
    num_arrays: int = 0
    num_elements: int = 0


def _is_inner_size(size: int, arrays: Iterable[jax.ShapeDtypeStruct]) -> bool:
    """Returns whether an array has this size in another dim than its first."""
    return any(x.ndim and x.shape[0] != size and size in x.shape[1:] for x in arrays)


# ---- the warning


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """The forward of a call, and the products that one device computes in it.

    Attributes:
        name: the model and its method.
        arguments: its arguments.
        batch: the size of its batch; 0 for none.
        degree: the number of data shards.
        products: the products of one device.
        products_of_examples: returns the products that depend on the examples. The others depend on parameters and
            constants alone. It walks over the program, so it is called only for a warning.
    """

    name: str
    arguments: Sequence[jax.ShapeDtypeStruct]
    batch: int
    degree: int
    products: Sequence[LocalProduct]
    products_of_examples: Callable[[], set[ProductPlace]]


def warn_of_whole(call: TracedCall) -> None:
    """Warns of large products of forward that every device computes whole; once for a call and their lines.

    A single example is computed this way on any number of devices, so it is no reason to warn.
    """
    rows = [x for x in call.arguments if _has_rows(x)]
    if not rows or in_shapes_only():  # of an estimate's trace, nothing will run
        return
    work = _Work.of(call.products, call.degree)
    if not work.is_worth_a_warning:
        return
    key = (call.name, bool(call.batch), tuple(work.lines))  # without sizes: another batch is no other warning
    if key in _warned:
        return
    _warned.add(key)
    _compat.warn_user("\n  ".join(_warning(call, rows, work)))


@dataclasses.dataclass(frozen=True)
class _Work:
    """What one device computes.

    Attributes:
        flops_by_line: of products that every device computes whole, the largest line first.
        total_flops: of all products.
        degree: the number of data shards.
    """

    flops_by_line: dict[str, float]
    total_flops: float
    degree: int

    @classmethod
    def of(cls, products: Sequence[LocalProduct], degree: int) -> "_Work":
        by_line: dict[str, float] = collections.defaultdict(float)
        for product in products:
            if product.is_whole:
                by_line[product.where or "the model"] += product.flops
        largest_first = dict(sorted(by_line.items(), key=lambda item: -item[1]))
        return cls(largest_first, sum(product.flops for product in products), degree)

    @property
    def lines(self) -> list[str]:
        return list(self.flops_by_line)

    @property
    def whole_flops(self) -> float:
        return sum(self.flops_by_line.values())

    @property
    def is_worth_a_warning(self) -> bool:
        # If they were split, each device would still compute its part of them.
        avoidable = self.whole_flops * (1 - 1 / self.degree)
        return avoidable >= max(WARNED_FLOPS, WARNED_PART * self.total_flops)

    @property
    def share(self) -> str:
        return f"{self.whole_flops / self.total_flops:.0%} of its multiplications"

    @property
    def amounts(self) -> str:
        return f"{self.whole_flops / 1e9:,.1f} of {self.total_flops / 1e9:,.1f} GFLOP on each device"

    @property
    def listed(self) -> list[str]:
        texts = [f"{line}: {work / 1e9:,.1f} GFLOP" for line, work in self.flops_by_line.items()]
        return shortened(texts, _SHOWN, " lines")


def _has_rows(x: jax.ShapeDtypeStruct) -> bool:
    """Returns whether an argument may have examples: it has more than one row, and is no key."""
    return x.ndim > 0 and x.shape[0] > 1 and not _is_key(x)


def _is_key(x: jax.ShapeDtypeStruct) -> bool:
    """Returns whether an argument is a random key, also one of the old form."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return True
    return x.dtype == jnp.uint32 and x.ndim == 1 and x.size in (2, 4)  # the words of threefry, and of rbg


def _warning(call: TracedCall, rows: Sequence[jax.ShapeDtypeStruct], work: _Work) -> list[str]:
    """Returns the lines of the warning: what, where, why, what to do."""
    examples = f"{call.name}: every device computes products for all examples, {work.share}:"
    constants = f"{call.name}: every device computes products of parameters and constants whole, {work.share}:"
    unsplit = [x for x in rows if x.shape[0] != call.batch]
    if unsplit and not call.batch:
        return [examples, *work.listed, *_why_nothing_divides(rows, call.degree)]
    if unsplit:
        return [examples, *work.listed, *_why_arguments_are_whole(unsplit, call.batch, call.degree)]

    whole_places = {product.place for product in call.products if product.is_whole}
    # All arguments are split, and some products still are not: those of parameters alone, or those that no rule
    # divides.
    if call.products_of_examples().isdisjoint(whole_places):
        why = f"They do not depend on the batch, so its {call.degree} parts do not divide them: {work.amounts}."
        do = "Apply the factors to the examples one by one, (x @ a) @ b; or compute the product once, outside the step."
        return [constants, *work.listed, why, do]
    why = f"The {call.degree} data shards do not divide them, although the batch is split: {work.amounts}."
    do = "f = js.per_example(f)  # around these lines, if they treat each example independently"
    return [examples, *work.listed, why, do]


def _why_nothing_divides(rows: Sequence[jax.ShapeDtypeStruct], degree: int) -> tuple[str, str]:
    why = f"No argument has a leading dim that divides by {degree}, the number of data shards: {_types(rows)}."
    size = max(rows, key=lambda x: x.size).shape[0]
    divisible = size // degree * degree
    do = f"A batch size that is a multiple of {degree} is split."
    if divisible:
        do += f" To drop the last of {size}: x = x[:{divisible}]"
    return why, do


def _why_arguments_are_whole(unsplit: Sequence[jax.ShapeDtypeStruct], batch: int, degree: int) -> tuple[str, str]:
    why = f"Arguments with a leading dim of {batch} are split; these are whole: {_types(unsplit)}."
    largest = max(unsplit, key=lambda x: x.size)
    if batch not in largest.shape[1:-1]:
        do = f"If their rows are also examples: the same number in all arguments, a multiple of {degree}."
        return why, do
    dim = largest.shape.index(batch, 1)
    do = (
        f"If dim {dim} is the examples, move it first: x = jnp.moveaxis(x, {dim}, 0)"
        f"; in the model: x = jnp.moveaxis(x, 0, {dim})"
    )
    return why, do


def _types(arrays: Sequence[jax.ShapeDtypeStruct]) -> str:
    return ", ".join(shortened(type_texts(arrays), _SHOWN))


# ---- which products depend on the examples


def products_that_depend(jaxpr: Jaxpr, depends: Sequence[bool]) -> set[ProductPlace]:
    """Returns the products of a program that depend on some of its operands, such as the examples of a batch.

    Args:
        jaxpr: the program.
        depends: for each operand, whether it is one of these.
    """
    return _dependence(jaxpr, depends, ()).products


@dataclasses.dataclass(frozen=True)
class _Dependence:
    """What depends on the chosen operands of a program: for each result, whether it does; and the products that do."""

    results: list[bool]
    products: set[ProductPlace]


def _dependence(jaxpr: Jaxpr, depends: Sequence[bool], enclosing: tuple[JaxprEqn, ...]) -> _Dependence:
    """Follows a program.

    Args:
        jaxpr: the program.
        depends: for each operand, whether what depends on it is followed.
        enclosing: the equations that the program is inside of. They have the user's line where its own have none.
    """
    dependent = set(picked(depends, jaxpr.invars))

    def are_dependent(atoms: Sequence[jex.Var | jex.Literal]) -> list[bool]:
        return [isinstance(atom, jex.Var) and atom in dependent for atom in atoms]

    products: set[ProductPlace] = set()
    for eqn in jaxpr.eqns:
        operands = are_dependent(eqn.invars)
        if not any(operands):
            continue
        if flops(eqn):
            products.add((_first_place((eqn, *reversed(enclosing))), shapes_of(eqn)))
        programs = [_dependence_inside(inner, eqn, operands, enclosing) for inner in jex.jaxprs_in_params(eqn.params)]
        for program in programs:
            products |= program.products
        dependent.update(_results_of_any(programs, eqn.outvars))
    return _Dependence(are_dependent(jaxpr.outvars), products)


def _results_of_any(programs: Sequence[_Dependence], results: Sequence[jex.Var]) -> list[jex.Var]:
    """Returns which results of an equation depend: those that do in one of its programs, else all."""
    # A program with another number of results, such as the condition of a loop, says nothing of these.
    comparable = [program.results for program in programs if len(program.results) == len(results)]
    if not comparable:
        return list(results)
    dependent = []
    for variable, depends in zip(results, zip(*comparable, strict=True), strict=True):
        if any(depends):
            dependent.append(variable)
    return dependent


def _dependence_inside(
    program: Jaxpr | jex.ClosedJaxpr, eqn: JaxprEqn, operands: list[bool], enclosing: tuple[JaxprEqn, ...]
) -> _Dependence:
    """Follows a program of an equation; in a scan, until what it carries depends on no more."""
    jaxpr = program.jaxpr if isinstance(program, jex.ClosedJaxpr) else program
    enclosing = (*enclosing, eqn)
    num_operands = len(jaxpr.invars)
    # Each program of a while loop takes its own part of the operands: all of them are followed.
    if eqn.primitive.name == "while" or num_operands > len(operands):
        return _dependence(jaxpr, [True] * num_operands, enclosing)
    operands_inside = operands[len(operands) - num_operands :]  # a branch of a cond takes all but the index
    if eqn.primitive.name != "scan":
        return _dependence(jaxpr, operands_inside, enclosing)
    num_consts, num_carry = _compat.scan_arguments(eqn)
    # It ends: what is carried only ever becomes dependent, and there are so many carried values.
    while True:
        trip = _dependence(jaxpr, operands_inside, enclosing)
        has_changed = False
        for position, is_dependent in enumerate(trip.results[:num_carry], num_consts):
            if is_dependent and not operands_inside[position]:
                operands_inside[position] = True  # by what the trip before has carried
                has_changed = True
        if not has_changed:
            return trip


def _first_place(equations: Iterable[JaxprEqn]) -> str:
    for eqn in equations:
        place = _compat.user_place(eqn)
        if place:
            return place
    return "the model"
