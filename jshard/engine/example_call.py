"""The equation of a function that acts on each example.

`per_example_p` keeps a Python function, not its program. A kernel's grid depends on the number of examples, so the
function is traced again for the examples of one shard; `engine/rules/opaque_calls.py` does that when it partitions.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend import core as jex
from jax.interpreters import batching, mlir

from jshard.engine.rules import State
from jshard.errors import CallError


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A function of arrays, and how its operands and results are split over the shards.

    Attributes:
        run: the function, for any number of examples.
        ins: the dim of the examples of each operand; None for an operand that is the same on all shards.
        outs: the same for each result; PARTIAL for a result that is a sum over the shards.
        name: the function's name and place, for messages.
        from_forward: positions of operands that the forward of the same call computed. Forward may have run on the
            whole batch, and a residual of the whole batch is not the residuals of the shards side by side. So backward
            runs on the examples of a shard only where forward did.
    """

    run: Callable[..., Sequence[jax.Array]]
    ins: tuple[int | None, ...]
    outs: tuple[State, ...]
    name: str
    from_forward: tuple[int, ...] = ()

    def without_rows(self, why: str, *where: str) -> CallError:
        """Returns the error for results whose number of rows differs from the number of examples."""
        return CallError(
            "A result of a function declared with js.per_example does not have a row for each example.",
            where=[self.name, *where],
            why=why,
            do="y = js.per_example(fn)(x).mean(0)  # fn returns a row for each example; combine them outside",
        )


# Without a partitioner the equation is the function itself: outside of a region, and where it was gathered for.
def _run(*arrays: jax.Array, body: Body) -> Sequence[jax.Array]:
    return body.run(*arrays)


per_example_p = jex.Primitive("per_example")
per_example_p.multiple_results = True
per_example_p.def_impl(_run)
mlir.register_lowering(per_example_p, mlir.lower_fun(_run, multiple_results=True))


@per_example_p.def_effectful_abstract_eval
def _result_types(*avals: AbstractValue, body: Body) -> tuple[Sequence[AbstractValue], set[jex.Effect]]:
    # A kernel that runs step by step has effects, which must be those of the equation, too.
    program = jax.make_jaxpr(body.run)(*avals)
    return program.out_avals, program.effects


def _batched(
    arrays: Sequence[jax.Array], dims: Sequence[int | None], *, body: Body
) -> tuple[Sequence[jax.Array], list[int]]:
    """Maps the equation over one more dim, for `jax.vmap`.

    The new dim comes after all others, so that the dims of the examples in `body` stay right. The equation stays one,
    and is still split over its examples.
    """
    # The equation must stay: mapped through, its function would be computed for the whole batch on each device.
    operands: list[jax.Array] = []
    in_axes: list[int | None] = []
    for x, dim in zip(arrays, dims, strict=True):
        if dim is None:
            operands.append(x)
            in_axes.append(None)
        else:
            operands.append(jnp.moveaxis(x, dim, -1))
            in_axes.append(-1)

    def run_element(*xs: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(body.run(*xs))

    def run(*xs: jax.Array) -> list[jax.Array]:
        return list(jax.vmap(run_element, tuple(in_axes), -1)(*xs))

    results = per_example_p.bind(*operands, body=dataclasses.replace(body, run=run))
    return results, [x.ndim - 1 for x in results]


batching.primitive_batchers[per_example_p] = _batched
