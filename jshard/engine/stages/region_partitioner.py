"""Runs the program of a region on a mesh with `pipe`: its loops over units on stages, all else on the data axes."""

from collections.abc import Mapping, Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxprs_in_params
from jax.sharding import Mesh

from jshard import _compat
from jshard.engine import rules
from jshard.engine.mixing import ModelKey, key_of_unit
from jshard.engine.rules import Staged, State, Value
from jshard.engine.rules.values import variables_of
from jshard.engine.schedule.program_schedule import ParameterKey
from jshard.engine.schedule.unit_equation import is_unit
from jshard.engine.schedule.unit_schedule import ShardedPartitioner
from jshard.engine.stages import exchanges
from jshard.engine.stages.guesses import has_dim_of_examples
from jshard.engine.stages.records import StagesRecord, record_off_stages
from jshard.engine.stages.staged_loop import StagedLoop
from jshard.errors import CallError
from jshard.plans.mesh import PIPE, degree
from jshard.plans.stages import Stages
from jshard.plans.units import Unit

_warned: set[tuple[ModelKey, str]] = set()


class StagesPartitioner(ShardedPartitioner):
    """The partitioner of a region on a mesh with `pipe`.

    Attributes:
        stages: how loops run on stages.
        num_loops: how many loops did.
        num_units: how many units ran outside of them.
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
        self.num_loops = 0
        self.num_units = 0

    def equation(self, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
        """Runs one equation: a loop over units on the stages, any other on the data axes."""
        if self._is_on_stages(eqn, values):
            _check_has_no_effects(eqn)
            self.num_loops += 1
            return StagedLoop(self, eqn, values, self.stages).run()
        if is_unit(eqn):
            self.num_units += 1
        if eqn.primitive.name not in rules.CALLS:
            values = [self.off_stages(value) for value in values]
        return super().equation(eqn, values)

    def materialize(self, value: Value, skip: Sequence[int] = ()) -> Value:
        """Returns a value as an array that leaves this trace, as the data axes have it."""
        return super().materialize(self.off_stages(value), skip)

    def may_have_examples(self, value: Value) -> bool:
        """Returns whether a constant is taken for one with a dim for the examples: see `has_dim_of_examples`."""
        return has_dim_of_examples(value, self.batch_sizes)

    def in_state(self, value: Value, state: State) -> Value:
        """Returns a value in a state: as the data axes have it, or on stages, as the gradient of what is there."""
        if not isinstance(state, Staged):
            return super().in_state(self.off_stages(value), state)
        if value.state == state:
            return value
        dim = None if state.row_dim is None else state.row_dim + 1
        value = super().in_state(self.off_stages(value), dim)
        return Value(exchanges.to_stages(value.x, state.layout, state.row_dim), state)

    def off_stages(self, value: Value) -> Value:
        """Returns a value as the data axes have it: a stack that is on stages with all layers on each place."""
        if not value.is_staged:
            return value
        layout = value.staged.layout
        row_dim = value.staged.row_dim
        on_data_axes = None if row_dim is None else row_dim + 1
        if on_data_axes not in value.conversions:
            x = exchanges.from_stages(value.x, layout, row_dim)
            self.records.append(record_off_stages(value, self.trips))
            value.conversions[on_data_axes] = Value(x, on_data_axes)
        return value.conversions[on_data_axes]

    @property
    def on_stages(self) -> list[StagesRecord]:
        """What was recorded of loops on stages."""
        return [record for record in self.records if isinstance(record, StagesRecord)]

    def check_uses_stages(self, unit: Unit, call: str) -> None:
        """Warns, once for each call of a model, if no loop runs on the stages; raises with fallback="error".

        Args:
            unit: the root of the model.
            call: the model and its method, such as `GPT.__call__`.
        """
        # A method that runs one unit, such as the embedding alone, has no layers; nor has a unit called on its own.
        has_layers = self.num_units > 1 or unit.plan is None or len(unit.plan.units) == 1
        could_use_stages = has_layers and bool(self.batch_sizes) and not unit.nested
        if self.num_loops or not could_use_stages:
            return
        num_places = degree(self.mesh, PIPE)
        why = (
            f"it has no loop over {num_places} equal units or more: {PIPE!r}, of degree {num_places}, splits the batch"
            " and the parameters"
        )
        line = "x = js.scan_layers(self.blocks, x)"
        if unit.policy.fallback == "error":
            raise CallError(
                "No layers of the model run on the pipe axis.",
                where=call,
                why=f'{why} alone, and the annotation has fallback="error".',
                do=f"{line}  # in the model, whose Block is a unit\nor js.mesh() without 'pipe'.",
            )
        key = (key_of_unit(unit), call)
        if key not in _warned:
            _warned.add(key)
            _compat.warn_user(
                f"No layers of {call} run on the pipe axis: {why}, as 'fsdp' does. In the model: {line}, and"
                " js.fully_shard(model, units=Block, mesh=mesh); or js.mesh() without 'pipe'."
            )

    def _is_on_stages(self, eqn: JaxprEqn, values: list[Value]) -> bool:
        """Returns whether an equation is a loop that runs on stages: over units that read rows, or rows on stages."""
        if eqn.primitive.name != "scan":
            return False
        # On the data axes all devices compute. On stages some would have nothing to do, with fewer layers than places;
        # without a batch that divides, each would run its layers for every microbatch on the same examples.
        if eqn.params["length"] < degree(self.mesh, PIPE) or not self.batch_sizes:
            return False
        num_consts, num_carry = _compat.scan_arguments(eqn)
        first_scanned = num_consts + num_carry
        body, _ = rules.opened(eqn.params["jaxpr"])
        if any(value.is_staged for value in values[first_scanned:]):
            return _has_unit_of(body, set(body.invars))
        return _has_unit_of(body, set(body.invars[first_scanned:]))


def _check_has_no_effects(eqn: JaxprEqn) -> None:
    """Raises if a layer does something besides computing, such as printing."""
    source = _source_of_effect(eqn)
    if source is None:
        return
    raise CallError(
        "A layer on pipeline stages has an effect.",
        where=_compat.user_place(source) or "in a layer",
        why=f"{source.primitive.name}: a stage runs a layer once for each microbatch, and when it is idle as if it had"
        " one. The effect would happen as often.",
        do="x, outputs = js.scan_layers(self.blocks, x, collect=True)  # return what is needed, and print it there",
    )


def _source_of_effect(eqn: JaxprEqn) -> JaxprEqn | None:
    """Returns the innermost equation with an effect, in an equation or the programs that it holds."""
    if not _compat.has_effects(eqn):
        return None
    for inner in jaxprs_in_params(eqn.params):
        for inner_eqn in inner.eqns:
            source = _source_of_effect(inner_eqn)
            if source is not None:
                return source
    return eqn


def _has_unit_of(jaxpr: Jaxpr, variables: set[Var]) -> bool:
    """Returns whether a program has a unit that takes one of some variables, which are among its arguments."""
    for eqn in jaxpr.eqns:
        if is_unit(eqn) and not variables.isdisjoint(variables_of(eqn.invars)):
            return True
        if eqn.primitive.name in rules.CALLS:
            inner, _ = rules.program(eqn)
            pairs = zip(rules.operands(eqn, eqn.invars), inner.invars, strict=True)
            inside = {variable for atom, variable in pairs if isinstance(atom, Var) and atom in variables}
            if _has_unit_of(inner, inside):
                return True
    return False
