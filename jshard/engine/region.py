"""The sharded region: the outermost call into an annotated model, as programs on one data shard.

The call is traced once, in global view, and differentiated there. Forward and backward are each a `jax.shard_map` over
the data axes, automatic over the others, in which the program is interpreted on a shard. Parameters enter as their
shards; everything else enters split along the batch, where it has one, or whole. All around the region the user's
program stays in global view, so penalties, metrics and optimizers see whole parameters.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh, PartitionSpec

from jshard import _compat
from jshard._mesh import data_axes, data_degree, manual_axes
from jshard._nnx import NESTED, Unit
from jshard._placement import spec_over
from jshard._policies import checkpoint_policy
from jshard.engine.schedule import ShardedPartitioner, tied
from jshard.engine.trace import Call, Program, Static, abstract, is_float, picked, trace
from jshard.engine.units import computes_in, region_trace
from jshard.engine.values import Moved, Shard, State, Value


def open_region(call: Call, unit: Unit) -> Any:
    """Runs the outermost call into an annotated model."""
    policy = unit.policy
    own = [
        placement is not None and owner != NESTED for placement, owner in zip(call.placements, call.owners, strict=True)
    ]
    body = computes_in(call, policy.mixed_precision)

    def cast_own(params: list[Any], inputs: list[Any]) -> list[Any]:
        gathered = [
            x.astype(p.gathered_dtype) if mine and p is not None and is_float(x) else x
            for x, p, mine in zip(params, call.placements, own, strict=True)
        ]
        return body(gathered, inputs)

    logical = [
        x if p is None else jax.ShapeDtypeStruct(p.shape, x.dtype)
        for x, p in zip(map(abstract, call.params), call.placements, strict=True)
    ]
    with region_trace():
        program, consts = trace(cast_own, logical, list(map(abstract, call.inputs)), remat=remat_of(unit))
    operands = [*call.params, *call.inputs, *consts]
    region = Region(cast(Mesh, unit.mesh), call, program, consts)
    eager = not any(_compat.is_tracer(x) for x in operands)
    run = differentiable(region)
    outs = (jax.jit(run) if eager else run)(*operands)
    return call.finish(outs, call.result)


def remat_of(unit: Unit) -> Any:
    """The remat policy of a unit as a program takes it."""
    asked = unit.policy.remat
    return asked if asked in ("none", "full") else checkpoint_policy(asked)


def batch_size(arrays: Sequence[Any], degree: int) -> int:
    """The size of the batch: the leading size that most of the arguments have, by count, then by elements.

    It is only a matter of speed: an array that is split and has no batch, or has one and is whole, gives the same
    numbers.
    """
    votes: dict[int, tuple[int, int]] = collections.defaultdict(lambda: (0, 0))
    for x in arrays:
        if x.ndim and x.shape[0] and x.shape[0] % degree == 0:
            count, size = votes[x.shape[0]]
            votes[x.shape[0]] = count + 1, size + x.size
    return max(votes, key=lambda n: votes[n], default=0)


class Region:
    """One call's region.

    Args:
        mesh: the mesh of the model.
        call: the call.
        program: its program; the operands are parameters, inputs and constants.
        consts: the constants.
    """

    def __init__(self, mesh: Mesh, call: Call, program: Program, consts: Sequence[Any]) -> None:
        self.mesh, self.program = mesh, program
        self.axes, self.degree = data_axes(mesh), data_degree(mesh)
        arguments = call.inputs[call.num_state :] or call.inputs
        self.batch = batch_size(arguments, self.degree)
        self.states: list[State] = [
            None if p is None else Shard(p, name=name) for p, name in zip(call.placements, call.names, strict=True)
        ]
        self.states += [self._split(x) for x in (*call.inputs, *consts)]
        self.moved: list[Moved] = []

    def _split(self, x: Any) -> State:
        return 0 if self.batch and x.ndim and x.shape[0] == self.batch else None

    def partitioned(
        self, jaxpr: Any, states: Sequence[State], wanted: Sequence[State] | None = None, *, is_backward: bool = False
    ) -> tuple[Callable[..., list[Any]], list[State]]:
        """A program as a function of global arrays, and a list that has the states of its results once it has run.

        Args:
            jaxpr: the program, closed.
            states: of its operands.
            wanted: of its first results; the others leave as they come.
            is_backward: nothing is gathered before the other operands are there.
        """
        found: list[State] = []
        out_specs: list[PartitionSpec] = []

        def on_shard(*xs: Any) -> list[Any]:
            p = ShardedPartitioner(self.mesh, [self.batch] if self.batch else [])
            arrays = [x[0] if is_local(s) else x for x, s in zip(xs, states, strict=True)]
            values = [Value(x, s) for x, s in zip(arrays, states, strict=True)]
            if is_backward:
                late = [v for v in values if v.is_stored and not v.shard.pieces and not _compat.on_host(v.x)]
                rest = [v for v in values if not v.is_stored]
                shards, others = tied([v.x for v in late], [v.x for v in rest])
                for v, x in zip([*late, *rest], [*shards, *others], strict=True):
                    v.x = x
            outs = p.run_body(jaxpr.jaxpr, jaxpr.consts, values)
            asked = list(wanted or ())
            stored_at = [i for i, s in enumerate(asked) if isinstance(s, Shard)]
            stored = p.store_unit([outs[i] for i in stored_at], [cast(Shard, asked[i]) for i in stored_at])
            at = dict(zip(stored_at, stored, strict=True))
            outs = [
                at[i] if i in at else p.in_state(v, asked[i]) if i < len(asked) else p.land(p.settle(v))
                for i, v in enumerate(outs)
            ]
            self.moved += p.moved
            found[:] = [v.state for v in outs]
            out_specs[:] = [self._spec(v.x, v.state) for v in outs]
            return [self._leaving(v) for v in outs]

        in_specs = tuple(self._spec_of_operand(s) for s in states)
        run = jax.shard_map(
            on_shard,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=manual_axes(self.mesh),
            check_vma=False,
        )  # shard_map reads out_specs after it has traced the body, which fills the list
        return run, found

    def _spec_of_operand(self, state: State) -> PartitionSpec:
        if is_local(state):
            return PartitionSpec(self.axes)
        if isinstance(state, Shard):
            return spec_over(tuple(manual_axes(self.mesh)), state.placement.spec)
        return PartitionSpec() if state is None else PartitionSpec(*[None] * cast(int, state), self.axes)

    def _spec(self, x: Any, state: State) -> PartitionSpec:
        if isinstance(state, Shard) and not state.pieces:
            entries = state.placement.spec
            extra = x.ndim - len(entries)  # rows of a loop, stacked, or a row alone
            entries = (None,) * extra + tuple(entries) if extra > 0 else tuple(entries[-extra:])
            return spec_over(tuple(manual_axes(self.mesh)), entries)
        return self._spec_of_operand(state)

    def _leaving(self, value: Value) -> Any:
        if is_local(value.state):
            return value.x[None]
        return value.x


def is_local(state: State) -> bool:
    """Whether a value is each device's own, and no part of an array: it crosses with a dim for the devices."""
    return isinstance(state, Shard) and bool(state.pieces)


def differentiable(region: Region) -> Callable[..., list[Any]]:
    """The region as a function of global arrays whose derivative is a region, too."""
    program, states = region.program, region.states
    n = program.num_params

    @jax.custom_vjp
    def run(*operands: Any) -> list[Any]:
        function, _ = region.partitioned(program.jaxpr, states)
        return function(*operands)

    def forward(*operands: Any) -> tuple[list[Any], tuple[Any, ...]]:
        values = [x.value for x in operands]
        gradient = program.gradient(tuple(x.perturbed and is_float(x.value) for x in operands))
        function, found = region.partitioned(gradient.forward, states)
        outs = function(*values)
        num_outs = len(gradient.is_float)
        return outs[:num_outs], (values[:n], outs[num_outs:], Static((gradient, tuple(found))))

    def backward(saved: tuple[Any, ...], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        params, kept, (gradient, found) = saved[0], saved[1], saved[2].value
        num_outs = len(gradient.is_float)
        live = tuple(not isinstance(ct, SymbolicZero) and is_float(ct) for ct in cotangents)
        of_operands = [*states[:n], *found[num_outs:], *picked(live, found[:num_outs])]
        wanted = picked(gradient.wrt, states)
        function, _ = region.partitioned(gradient.backward(live), of_operands, wanted, is_backward=True)
        grads = iter(function(*params, *kept, *picked(live, cotangents)))
        return tuple(next(grads) if is_wanted else None for is_wanted in gradient.wrt)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run
