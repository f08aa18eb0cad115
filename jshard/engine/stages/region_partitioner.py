"""Runs the program of a region on a mesh with `pipe`: its loops over units on stages, all else on the data axes."""

from collections.abc import Mapping, Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh

from jshard import _compat
from jshard.engine import rules
from jshard.engine.rules import Value
from jshard.engine.rules.values import variables_of
from jshard.engine.schedule.program_schedule import ParameterKey
from jshard.engine.schedule.unit_equation import is_unit
from jshard.engine.schedule.unit_schedule import ShardedPartitioner
from jshard.engine.stages import exchanges
from jshard.engine.stages.guesses import has_dim_of_examples
from jshard.engine.stages.staged_loop import StagedLoop
from jshard.plans.stages import Stages


class StagesPartitioner(ShardedPartitioner):
    """The partitioner of a region on a mesh with `pipe`.

    Attributes:
        stages: how loops run on stages.
    """

    gathers_before_loops = False  # a loop on stages gathers its first round by itself

    def __init__(
        self,
        mesh: Mesh,
        batch_sizes: Sequence[int],
        kept_whole: Mapping[ParameterKey, Value],
        name: str,
        stages: Stages,
    ) -> None:
        super().__init__(mesh, batch_sizes, kept_whole, name)
        self.stages = stages

    def equation(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        """Runs one equation: a loop over units on the stages, any other on the data axes."""
        if self._is_on_stages(eqn, values):
            return StagedLoop(self, eqn, values, self.stages).run()
        if eqn.primitive.name not in rules.CALLS:
            values = [self.off_stages(value) for value in values]
        return super().equation(eqn, values)

    def may_have_examples(self, value: Value) -> bool:
        """Returns whether a constant is taken for one with a dim for the examples: see `has_dim_of_examples`."""
        return has_dim_of_examples(value, self.batch_sizes)

    def off_stages(self, value: Value) -> Value:
        """Returns a value as the data axes have it: a stack that is on stages with all layers on each place."""
        if not value.is_staged:
            return value
        layout = value.staged.layout
        row_dim = value.staged.row_dim
        on_data_axes = None if row_dim is None else row_dim + 1
        if on_data_axes not in value.conversions:
            x = exchanges.from_stages(value.x, layout, row_dim)
            value.conversions[on_data_axes] = Value(x, on_data_axes)
        return value.conversions[on_data_axes]

    def _is_on_stages(self, eqn: JaxprEqn, values: list[Value]) -> bool:
        """Returns whether an equation is a loop that runs on stages: one over units with rows, or one that goes on."""
        if eqn.primitive.name != "scan":
            return False
        num_consts, num_carry = _compat.scan_arguments(eqn)
        if any(value.is_staged for value in values[num_consts + num_carry :]):
            return True
        body, _ = rules.opened(eqn.params["jaxpr"])
        rows = set(body.invars[num_consts + num_carry :])
        return _units_read(body, rows)


def _units_read(jaxpr: Jaxpr, rows: set[Var]) -> bool:
    """Returns whether a unit of a program takes one of some variables."""
    for eqn in jaxpr.eqns:
        if is_unit(eqn) and not rows.isdisjoint(variables_of(eqn.invars)):
            return True
        if eqn.primitive.name in rules.CALLS:
            inner, _ = rules.program(eqn)
            pairs = zip(rules.operands(eqn, eqn.invars), inner.invars, strict=True)
            rows_inside = {variable for atom, variable in pairs if isinstance(atom, Var) and atom in rows}
            if _units_read(inner, rows_inside):
                return True
    return False
