"""Runs the program of a layer on one microbatch."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Mesh

from jshard.engine import rules
from jshard.engine.rules import Value
from jshard.engine.rules.building_blocks import materialize_all
from jshard.engine.rules.loops import Scan
from jshard.engine.rules.values import used_once_as_result, variables_of
from jshard.engine.schedule.prefetch import find_units
from jshard.engine.schedule.program_schedule import GatheredParams, ProgramSchedule
from jshard.engine.schedule.unit_equation import UnitEquation
from jshard.engine.schedule.unit_schedule import ShardedPartitioner
from jshard.engine.stages.guesses import has_dim_of_examples
from jshard.errors import CallError
from jshard.plans.mesh import PIPE, mesh_of_place

_HOW = {"whole": "gathered", "sum": "summed", "max": "reduced", "move": "exchanged"}
"""What each kind of `jshard.engine.mixing.Mixing` would do with the examples of other microbatches."""


@dataclasses.dataclass(frozen=True)
class ScannedGradient:
    """The gradient of a row of a scanned parameter, among the results of a layer's program.

    Attributes:
        argument: the position of the row among the arguments of the layer's program.
        dtype: the dtype of the stored gradient.
    """

    argument: int
    dtype: np.dtype


class TickPartitioner(ShardedPartitioner):
    """The partitioner of a tick: over the data axes without `pipe`, and over the microbatches.

    A value that is split along a dim is split over both, as if there were a data shard for each microbatch. All shards
    of one microbatch run at the same time, those of the others earlier or later: so nothing can be sent between them.

    Attributes:
        num_microbatches: of a data shard.
        num_data_shards: that run the same microbatch.
        gradients: for each result of the last layer's program that ran, which scanned parameter's gradient it is, or
            None.
    """

    def __init__(self, outer: ShardedPartitioner, num_microbatches: int) -> None:
        # On the mesh of a place: what it gathers and sums is over the data axes of that.
        super().__init__(cast(Mesh, mesh_of_place(outer.mesh)), list(outer.batch_sizes), {}, outer.name)
        self.num_microbatches = num_microbatches
        self.num_data_shards = self.degree
        self.degree = self.num_data_shards * num_microbatches
        self.is_quiet = False
        self.is_last = outer.is_last
        self.trips = outer.trips
        self._microbatch: jax.Array | int = 0
        self._refuses_mixing = False
        self.gradients: list[ScannedGradient | None] = []
        self._layer: Jaxpr | None = None
        self._only_stacked: frozenset[Var] = frozenset()
        self._scanned_rows: dict[Value, int] = {}
        self._gradients: dict[Value, ScannedGradient] = {}

    @property
    def shard(self) -> jax.Array:
        """Number of the shard: of this device's microbatch."""
        return jax.lax.axis_index(self.axes) * self.num_microbatches + self._microbatch

    @contextlib.contextmanager
    def on(self, microbatch: jax.Array, *, refuses_mixing: bool = True) -> Iterator[None]:
        """A context in which programs run on one microbatch.

        Args:
            microbatch: its number.
            refuses_mixing: whether what combines examples raises. The search for the states of a carry begins with
                states that may be wrong: there it is computed as if, and thrown away.
        """
        self._microbatch = microbatch
        self._refuses_mixing = refuses_mixing
        # These functions have the number of the microbatch among their constants. In a later trace it would be a tracer
        # that has outlived its own; or, worse, another microbatch's number, and with it another one's dropout masks.
        self.random_bits = {}
        self._unit_functions = {}
        try:
            yield
        finally:
            self._microbatch = 0
            self._refuses_mixing = False
            self.random_bits = {}
            self._unit_functions = {}

    def may_have_examples(self, value: Value) -> bool:
        """Returns whether a constant is taken for one with a dim for the examples: see `has_dim_of_examples`."""
        return has_dim_of_examples(value, self.batch_sizes)

    # ---- the layer's program

    def set_layer(self, jaxpr: Jaxpr, num_carry: int) -> None:
        """Sets the program of a layer: the body of the loop.

        Args:
            jaxpr: the program.
            num_carry: how many of its results are carried; the others are stacked.
        """
        self._layer = jaxpr
        self._only_stacked = _only_stacked(jaxpr, jaxpr.outvars[num_carry:])

    def run_body(
        self, jaxpr: Jaxpr, consts: Sequence[jax.Array | Value], args: list[Value], *, gradients: Collection[int] = ()
    ) -> list[Value]:
        """Runs a program that is traced on its own; that of a layer without parameters gathered beforehand."""
        if jaxpr is self._layer:
            return self.run_layer(consts, args, {})
        return super().run_body(jaxpr, consts, args, gradients=gradients)

    def run_layer(
        self, consts: Sequence[jax.Array | Value], args: list[Value], gathered: Mapping[int, GatheredParams]
    ) -> list[Value]:
        """Runs the program of a layer on one microbatch.

        Args:
            consts: its constants.
            args: its arguments; the last ones are rows of the scanned values.
            gathered: the parameters that were gathered beforehand, by the position of their unit.
        """
        assert self._layer is not None, "set before it is run"
        # By the values themselves: a unit returns the gradients of its operands, and these are the rows.
        self._scanned_rows = {arg: position for position, arg in enumerate(args)}
        self._gradients = {}
        schedule = ProgramSchedule(find_units(self._layer, args))
        schedule.gathered = dict(gathered)
        with self._on(schedule):
            results = self.run(self._layer, consts, args)
        self.gradients = [self._gradients.get(value) for value in results]
        return results

    def run_scan(self, scan: Scan) -> list[Value]:
        """Runs a loop inside a layer as it is: its units are gathered when they are due."""
        return scan.run()

    def equation(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        """Runs one equation; raises for those that say what happens between data shards."""
        if eqn.primitive.name == "shard_map":
            self._check_shard_map(eqn)
        return super().equation(eqn, values)

    def _check_shard_map(self, eqn: JaxprEqn) -> None:
        names = set(eqn.params["newly_manual_axes"])
        over_data = [axis for axis in (*self.axes, PIPE) if axis in names]
        if over_data and self._refuses_mixing:
            raise CallError(
                "A layer of a pipeline has a shard_map over data axes.",
                where=self.place(eqn) or "in a layer",
                why=f"it is over {', '.join(over_data)}: those of a microbatch are not all of them.",
                do="y = jax.shard_map(f, mesh=mesh, axis_names={'tensor'}, ...)(x)  # over other axes alone; or a mesh"
                " without pipe",
            )

    # ---- gradients

    def is_for_gradients(self, variable: Var) -> bool:
        """Returns True: what is partial stays so where it can, as no sum can be taken in a tick."""
        return True

    def _reduce_gradients(self, unit: UnitEquation, params: list[Value], results: list[Value]) -> list[Value]:
        """Leaves the gradients of a unit partial: the loop adds those of the microbatches, then reduces the sum."""
        results = materialize_all(self, results)
        gradients = [i for i, is_wanted in enumerate(unit.wants_gradient) if is_wanted]
        leaving = []
        for i, (value, dtype) in enumerate(zip(results, unit.out_dtypes, strict=True)):
            param = params[gradients[i]] if i < len(gradients) else None
            argument = None if param is None else self._scanned_rows.get(param)
            # In the dtype in which it was computed, often a smaller one: it is cast where it is added. Any other reader
            # expects the dtype of the program.
            if argument is not None and value.is_partial and unit.eqn.outvars[i] in self._only_stacked:
                self._gradients[value] = ScannedGradient(argument, dtype)
            elif value.x.dtype != dtype:
                value = value.with_array(value.x.astype(dtype))
            leaving.append(value)
        return leaving

    # ---- what would be sent between shards

    def gather(self, x: jax.Array, dim: int) -> jax.Array:
        """Raises; in the search for states, returns an array of the type of the result."""
        self._refuse("gathered")
        return jnp.concatenate([x] * self.degree, dim)

    def sum(self, x: jax.Array) -> jax.Array:
        """Raises; in the search for states, returns an array of the type of the result."""
        self._refuse("summed")
        return x

    def move(self, x: jax.Array, old: int, new: int) -> jax.Array:
        """Raises; in the search for states, returns an array of the type of the result."""
        self._refuse("exchanged")
        return self.local_slice(self.gather(x, old), new)

    @contextlib.contextmanager
    def sends(self, kind: str, eqn: JaxprEqn | None, size: int) -> Iterator[None]:
        """Raises: every collective of a rule is in this context."""
        self._refuse(_HOW[kind])
        yield

    def _part(self, value: Value, dim: int) -> jax.Array:
        is_combined = None in value.conversions
        if value.is_partial and not is_combined:
            return self.local_slice(self.sum(value.x), dim)
        return super()._part(value, dim)

    def _refuse(self, how: str) -> None:
        if not self._refuses_mixing:
            return
        eqn = self.eqn
        operation = "its result" if eqn is None else eqn.primitive.name
        raise CallError(
            "A layer of a pipeline combines the examples of its batch.",
            where=f"{self.place(eqn) or 'in a layer'}: {operation}, {how}",
            why=f"a stage has {self.num_microbatches} microbatches one after another, and this needs all examples at"
            " once.",
            do="x, sums = js.scan_layers(self.blocks, x, collect=True)  # return a layer's sums, and combine them"
            " after the loop\nor js.mesh() without 'pipe', where a layer can read the whole batch.",
        )


def _only_stacked(jaxpr: Jaxpr, stacked: Sequence[Var | Literal]) -> frozenset[Var]:
    """Returns the variables that become some of a program's results and are read by nothing else.

    Args:
        jaxpr: a program.
        stacked: these results.
    """
    variables = used_once_as_result(jaxpr).intersection(variables_of(stacked))
    num_calls = Counter(id(inner) for _, inner in _calls(jaxpr))
    for eqn, inner in _calls(jaxpr):
        if num_calls[id(inner)] > 1:
            continue  # another call of the same program may read the variables that this one stacks
        results = zip(inner.outvars, eqn.outvars, strict=True)
        variables |= _only_stacked(inner, [atom for atom, result in results if result in variables])
    return frozenset(variables)


def _calls(jaxpr: Jaxpr) -> list[tuple[JaxprEqn, Jaxpr]]:
    """Returns the equations of a program that hold a program, each with that."""
    return [(eqn, rules.program(eqn)[0]) for eqn in jaxpr.eqns if eqn.primitive.name in rules.CALLS]
