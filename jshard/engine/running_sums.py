"""Gradients of microbatches that are added to running sums where a loop over layers computes them.

The backward of a loop stacks the gradients of all its layers. Added to the sum after the loop, the stack of a
microbatch is in memory beside it, as large as the sum. So backward takes the sum, and each iteration adds to its row:

    stacked     backward --> stack --+
                sum -----------------+--> sum
    in place    sum --> backward, with layer i added to row i --> sum

That is the same program if nothing else reads the gradients of the microbatch. The program says so: a gradient is a
result of the backward of one call, and its only use is to be added. So these stay apart: gradients that the loss reads
itself, those of parameters that several calls use, and those of a call in a function of its own, such as a `jax.jit` of
the user's. A mean with weights is no plain sum, and on pipeline stages each place has rows of its own.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jshard import _compat
from jshard._types import PyTree
from jshard.engine.program import evaluate_jaxpr, types_of, variables_among
from jshard.engine.region_call import RegionCall, region_p
from jshard.engine.selections import at_positions


@dataclasses.dataclass(frozen=True)
class _SummingCall:
    """A backward that adds gradients to running sums, in place of one that returns them.

    Attributes:
        call: the call with sums.
        num_operands: how many operands are in front of the sums; copies are behind them.
        sums: which sums it takes, by position among the gradients of the program around.
    """

    call: RegionCall
    num_operands: int
    sums: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LossGradients:
    """A loss and its gradients, as a program that is traced once, and may add some of the gradients to running sums.

    Attributes:
        program: takes the leaves of its arguments; returns those of a value, then those of the gradients.
        types: a value and gradients, as types.
        calls: those that add to sums, by the id of the equation in whose place they are.
    """

    program: ClosedJaxpr
    types: tuple[PyTree, PyTree]
    calls: Mapping[int, _SummingCall] = dataclasses.field(default_factory=dict)

    @classmethod
    def traced(cls, grad: Callable[..., tuple[PyTree, PyTree]], *arguments: PyTree) -> "LossGradients":
        """Traces a function such as `jax.value_and_grad` returns."""
        program, types = jax.make_jaxpr(grad, return_shape=True)(*arguments)
        return cls(program, types)

    def adding_to(self, sums: PyTree) -> "LossGradients":
        """Returns the program that adds gradients in place, as far as it can, to sums of these types."""
        jaxpr = self.program.jaxpr
        types = types_of(jax.tree.leaves(sums))
        gradients = _used_once(jaxpr, first=len(jaxpr.outvars) - len(types))
        calls = {}
        for eqn in jaxpr.eqns:
            is_whole_call = eqn.primitive is region_p and eqn.params["used"] is None
            if not is_whole_call:
                continue
            call: RegionCall = eqn.params["call"]
            sum_of = {i: gradients[v] for i, v in enumerate(eqn.outvars) if v in gradients and call.adds_in_place(i)}
            if sum_of:
                with_sums = call.with_sums({i: types[position] for i, position in sum_of.items()})
                calls[id(eqn)] = _SummingCall(with_sums, len(call.operands), tuple(sum_of.values()))
        return dataclasses.replace(self, calls=calls)

    def run(self, arguments: tuple[PyTree, ...], sums: PyTree) -> tuple[PyTree, PyTree]:
        """Runs the program; returns the value and the gradients, in place of some of which the new sums."""

        # Jitted for a call outside of `jax.jit`. Inlined, so that the program around does not have it as a function.
        def run(arguments: tuple[PyTree, ...], sums: list[jax.Array]) -> list[jax.Array]:
            def bind(eqn: JaxprEqn, values: list[jax.Array]) -> list[jax.Array]:
                summing = self.calls.get(id(eqn))
                if summing is None:
                    return _compat.bind(eqn, values)
                end = summing.num_operands
                return summing.call.bind([*values[:end], *at_positions(sums, summing.sums), *values[end:]])

            return evaluate_jaxpr(self.program, jax.tree.leaves(arguments), bind)

        results = jax.jit(run, inline=True)(arguments, jax.tree.leaves(sums))
        return jax.tree.unflatten(jax.tree.structure(self.types), results)

    def added(self, sums: PyTree, gradients: PyTree) -> PyTree:
        """Returns sums with the gradients of a run added, of which some are the new sums already."""
        in_place = {position for summing in self.calls.values() for position in summing.sums}
        totals, tree = jax.tree.flatten(sums)
        for position, gradient in enumerate(jax.tree.leaves(gradients)):
            before = totals[position]
            totals[position] = gradient if position in in_place else before + gradient.astype(before.dtype)
        return jax.tree.unflatten(tree, totals)


def _used_once(jaxpr: Jaxpr, *, first: int) -> dict[Var, int]:
    """Returns the results of a program, from the first of them on, that nothing in it reads, with their positions."""
    num_uses = Counter(variables_among(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        num_uses.update(variables_among(eqn.invars))
    positions = {}
    for position, atom in enumerate(jaxpr.outvars[first:]):
        if isinstance(atom, Var) and num_uses[atom] == 1:
            positions[atom] = position
    return positions
