"""An update of arrays in host memory, in parts: the device never holds all of it.

At most two parts are on the device: while one computes, the other is copied in or back. A barrier keeps each part from
beginning before the results of the second part before it are on the host.

The update is the user's, a function of all arrays at once. So it is traced to a program, of which only those equations
run that a part's results need.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jshard import _compat
from jshard.plans.array_paths import Keys, tail_in
from jshard.plans.memories import fetched, placed_like
from jshard.plans.placement import Placement

Update = Callable[..., list[jax.Array]]
"""A function of arrays, flat, that returns the updated ones."""

_PART_BYTES = 8 * 2**20  # of parameters on a device: large enough to copy well
_IN_FLIGHT = 2  # parts on the device at once: one is copied in or out while the other computes


@dataclasses.dataclass
class UpdatePart:
    """What is updated together: matching positions of arguments and of results of the update."""

    arguments: list[int] = dataclasses.field(default_factory=list)
    results: list[int] = dataclasses.field(default_factory=list)


def parts_of(
    offloaded: Mapping[Keys, Placement], arguments: Sequence[Keys], results: Sequence[Keys], gradients: Sequence[Keys]
) -> list[UpdatePart]:
    """Groups parameters with their gradients and state, ordered by when the gradients arrive.

    The path of an argument or a result ends in that of a parameter, or belongs to no parameter. Parameters without a
    gradient are frozen, and in no part.
    """
    argument_positions = _positions_by_parameter(offloaded, arguments)
    result_positions = _positions_by_parameter(offloaded, results)
    trained = _positions_by_parameter(offloaded, gradients).keys()
    parts = [UpdatePart()]
    part_bytes = 0
    for path in reversed(list(offloaded)):  # backward ends with the first parameters
        if path not in trained:
            continue
        parts[-1].arguments += argument_positions.get(path, [])
        parts[-1].results += result_positions.get(path, [])
        part_bytes += offloaded[path].bytes_per_device
        # A parameter is never cut, so a part may be larger.
        if part_bytes >= _PART_BYTES:
            parts.append(UpdatePart())
            part_bytes = 0
    # The last one may be empty.
    return [part for part in parts if part.arguments]


def _positions_by_parameter(parameters: Mapping[Keys, Placement], paths: Sequence[Keys]) -> dict[Keys, list[int]]:
    """Returns for each parameter the positions of the paths that end in its path; none for one without such paths."""
    positions: dict[Keys, list[int]] = {}
    for position, path in enumerate(paths):
        parameter = tail_in(parameters, path)
        if parameter is not None:
            positions.setdefault(parameter, []).append(position)
    return positions


def streamed(
    function: Update, arguments: Sequence[jax.Array], parts: Sequence[UpdatePart], like: Sequence[jax.Array | None]
) -> list[jax.Array]:
    """Returns the results of a function on the device; those of each part go to their memory before a later part.

    Arrays on the host are fetched when their part begins. Results in no part are computed last; values only passed on
    stay where they are.

    Args:
        function: of the arguments, flat.
        arguments: arrays, in the memory of either.
        parts: in the order in which they run.
        like: for each result an array whose memory it is moved to, or None for the device.
    """
    program = _LazyProgram(function, arguments)
    results = program.unchanged_arguments(like)
    host_results: list[list[int]] = []  # of each part that has run: the positions of its results on the host
    for part in parts:
        values = [arguments[i] for i in part.arguments]
        if len(host_results) < _IN_FLIGHT:
            values = lax.optimization_barrier(values)  # none is used before the last of them, a gradient, exists
        else:
            positions = host_results[-_IN_FLIGHT]
            values, copied = lax.optimization_barrier((values, [results[i] for i in positions]))
            for i, x in zip(positions, copied, strict=True):
                results[i] = x  # else the output of the barrier is unused, and XLA removes it with its input
        program.set_arguments(part.arguments, values)
        on_host = []
        for i in part.results:
            results[i] = placed_like(program.result(i), like[i])
            if _compat.on_host(results[i]):
                on_host.append(i)
        host_results.append(on_host)
    for i, x in enumerate(results):
        if x is None:
            results[i] = placed_like(program.result(i), like[i])
    return results


class _LazyProgram:
    """A traced function whose results are computed one by one, each with the missing values that it needs."""

    def __init__(self, function: Update, arguments: Sequence[jax.Array]) -> None:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
        closed = jax.make_jaxpr(function)(*shapes)
        # Optax corrects the bias of a whole tree in one call, which would need all of the state at once.
        if any(map(_is_plain_call, closed.jaxpr.eqns)):
            closed = jax.make_jaxpr(lambda *xs: _run_without_calls(closed, xs))(*shapes)
        self._inputs = closed.jaxpr.invars
        self._results = closed.jaxpr.outvars
        self._arguments = dict(zip(self._inputs, arguments, strict=True))
        self._known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        # Programs are in single assignment: each variable has one equation.
        self._makers: dict[Var, JaxprEqn] = {}
        for eqn in closed.jaxpr.eqns:
            self._makers.update(dict.fromkeys(eqn.outvars, eqn))

    def unchanged_arguments(self, like: Sequence[jax.Array | None]) -> list[Any]:
        """Returns the results that are unchanged arguments, such as frozen parameters; None for the others."""
        unchanged: list[Any] = []
        for variable, target in zip(self._results, like, strict=True):
            # In a jaxpr a result that is passed on is the argument's variable itself.
            argument = None if isinstance(variable, Literal) else self._arguments.get(variable)
            target_on_host = target is not None and _compat.on_host(target)
            stays = argument is not None and _compat.on_host(argument) == target_on_host
            unchanged.append(argument if stays else None)
        return unchanged

    def set_arguments(self, positions: Sequence[int], values: Sequence[jax.Array]) -> None:
        """Replaces some arguments from here on; values that were used before stay."""
        for i, x in zip(positions, values, strict=True):
            # The first value stays: equations that have run used it.
            self._known.setdefault(self._inputs[i], fetched(x))

    def result(self, position: int) -> jax.Array:
        """Returns a result. Runs the equations that it needs and that have not run yet."""
        needed = [self._results[position]]
        while needed:  # a stack in place of a recursion, because programs are deep
            variable = needed[-1]
            if self._is_known(variable):
                needed.pop()
            elif variable in self._arguments:
                self._known[variable] = fetched(self._arguments[variable])
            else:
                maker = self._makers[variable]
                missing = [operand for operand in maker.invars if not self._is_known(operand)]
                if missing:
                    needed += missing
                else:
                    self._run(maker)
        return self._value(self._results[position])

    def _run(self, eqn: JaxprEqn) -> None:
        results = _compat.bind(eqn, [self._value(operand) for operand in eqn.invars])
        self._known |= dict(zip(eqn.outvars, results, strict=True))

    def _is_known(self, variable: Var | Literal) -> bool:
        return isinstance(variable, Literal) or variable in self._known

    def _value(self, variable: Var | Literal) -> jax.Array:
        return variable.val if isinstance(variable, Literal) else self._known[variable]


def _is_plain_call(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a `jax.jit` that requires no shardings: its equations may run one by one."""
    if eqn.primitive.name != "jit":
        return False
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return not any(isinstance(x, jax.sharding.Sharding) for x in shardings)


def _run_without_calls(closed: ClosedJaxpr, arguments: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the results of a program, with each jitted function in it traced equation by equation."""
    jaxpr = closed.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    known = dict(zip(inputs, [*closed.consts, *arguments], strict=True))

    def value(variable: Var | Literal) -> jax.Array:
        return variable.val if isinstance(variable, Literal) else known[variable]

    for eqn in jaxpr.eqns:
        operands = list(map(value, eqn.invars))
        if _is_plain_call(eqn):
            results = _run_without_calls(eqn.params["jaxpr"], operands)
        else:
            results = _compat.bind(eqn, operands)
        known |= dict(zip(eqn.outvars, results, strict=True))
    return list(map(value, jaxpr.outvars))
