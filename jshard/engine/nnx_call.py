"""A call of an annotated nnx module as the engine takes it: `jshard.engine.trace.Call`."""

import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from jshard._types import PyTree, TreeDef
from jshard.engine import border
from jshard.engine.context import during, parameters_are_fixed, region_mesh
from jshard.engine.method_call import Live, MethodCall, Snapshot, Variables, parameter_written, places
from jshard.engine.padded import PaddedCandidate, guarded
from jshard.engine.selections import at_positions
from jshard.engine.values import Leaf, MethodResult, is_array, raw
from jshard.plans.call_checks import check_has_arrays, check_stored, warn_of_unplanned
from jshard.plans.checks import check_axes_are_placed
from jshard.plans.memories import place_variable, stored_array
from jshard.plans.numeric import NUMBERS
from jshard.plans.padding import Padding, is_as_placed, padding_of, store
from jshard.plans.placement import Placement
from jshard.plans.plan import LeafPlan, as_stored
from jshard.plans.replication import check_replicated, others_of
from jshard.plans.units import (
    NESTED,
    Path,
    Unit,
    detach,
    dotted,
    holds_array,
    is_key,
    nested_units,
    numberless,
    plain_class,
    unit_of,
    units_in,
    walk,
)

_unit_names: contextvars.ContextVar[Mapping[int | type, str]] = contextvars.ContextVar("unit_names")
"""Paths of units from the root; of one of equal layers, with `*` for its number."""


@dataclasses.dataclass(frozen=True, eq=False)
class _PlannedParam:
    """A parameter of the call that the annotation has placed.

    Attributes:
        path: from the call.
        variable: the caller's variable.
        module: the annotated module that has it: the called one, or one among the arguments.
        path_in_module: its path from there.
        leaf: its plan, with the dtypes that follow from the value that it has now.
    """

    path: Path
    variable: nnx.Param
    module: nnx.Module
    path_in_module: Path
    leaf: LeafPlan

    @property
    def placement(self) -> Placement:
        return self.leaf.placement

    @property
    def unit(self) -> Unit:
        return cast(Unit, unit_of(self.module))

    @property
    def owner(self) -> str:
        # One that is never gathered counts as of a unit inside: the region gathers none of these by itself.
        return self.leaf.role if self.placement.gathered else NESTED

    @classmethod
    def of(cls, parts: MethodCall, path: Path, variable: nnx.Param) -> "_PlannedParam | None":
        """Returns a parameter; None if it was added after the annotation, or has another size than was planned."""
        module, path_in_module = _module_around(parts, path)
        unit = unit_of(module)
        leaf = None if unit is None else unit.by_path.get(path_in_module)
        if leaf is None or not is_as_placed(variable, leaf.placement):
            return None
        # Dtypes follow from the value that is there: a model may be cast after it was annotated.
        leaf = as_stored(leaf, raw(variable).dtype, lambda: units_in(module))
        return cls(path, variable, module, path_in_module, leaf)


class NnxCall:
    """A call of a method of an annotated module: `jshard.engine.trace.Call`."""

    def __init__(
        self, module: nnx.Module, method: Callable[..., MethodResult], args: tuple, kwargs: dict[str, object]
    ) -> None:
        parts = MethodCall(module, method, args, kwargs)
        # By the module; by its class where a loop has made a copy of it, which has another id.
        names = _unit_names.get({})
        self._parts = parts
        self._path = names.get(id(module)) or names.get(type(module), "")
        self.where = parts.where
        self.name = self._path or plain_class(module).__name__
        self.location = f"{self._path}: {self.where}" if self._path else self.where

        self._planned, unplanned = _divided_params(parts)
        planned = list(self._planned.values())
        self.placements: list[Placement | None] = []
        self.owners: list[str] = []
        self.names: list[str] = []
        for param in planned:
            self.placements.append(param.placement)
            self.owners.append(param.owner)
            self.names.append(dotted(param.path[1:]))
        # Inside another call they are arrays of its trace, and logical.
        is_outermost = region_mesh() is None
        self.params = _stored_params(planned) if is_outermost else [raw(param.variable) for param in planned]

        # Parameters without a plan are inputs: whole on every device, as state is.
        _, state, arrays = parts.values()
        state_leaves, self._state_tree = jax.tree.flatten((unplanned, state))
        # A Python number in a variable enters as an array, as by `jax.jit`: what the program is given has a type.
        state_arrays = [jnp.asarray(x) if isinstance(x, NUMBERS) else x for x in state_leaves]
        self.inputs = [*state_arrays, *arrays]
        self.num_state = len(state_arrays)
        # The structure of state is part of the key, as it says how the program takes its inputs apart.
        self.key: Hashable = (parts.key(), self._state_tree)
        self.result: Outcome | None = None  # from `body` on
        self.written: Sequence[str] = ()
        self._written_paths: list[Path] = []

    def guarded(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the input parameters; gradients of padded ones are refused if an optimizer would see the padding."""
        # `values` may be copies that were gathered beforehand, which are padded no more; what counts is the variable.
        candidates = []
        for param, value in zip(self._planned.values(), values, strict=True):
            candidates.append(PaddedCandidate(param.variable, param.unit, param.path_in_module, value))
        return guarded(self.where.split(".")[0], candidates)

    def warn(self, unit: Unit) -> None:
        """Reports parameters that the annotation could not shard, or that were added after it."""
        name = self.where.split(".")[0]
        module = self._parts.graph[0]
        check_has_arrays(self.where, self.params)
        placed = [(param.path[1:], param.variable, param.placement) for param in self._planned.values()]
        check_stored(name, placed)
        if not unit.nested:
            check_replicated(unit, name, others_of(module))
        check_axes_are_placed(module, placed, unit.mesh)
        unplanned = []
        for i, (path, variable) in enumerate(self._parts.params):
            is_argument = path[0] != 0
            if i in self._planned or is_argument:
                continue
            if holds_array(variable) and not is_key(raw(variable)):
                unplanned.append(dotted(path[1:]))
        warn_of_unplanned(unplanned, self.where)

    # ---- inside the trace

    def body(self, params: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs the method on a copy of the module.

        Args:
            params: the planned parameters, logical.
            inputs: the other arrays.

        Returns:
            The arrays of the result; and the arrays of changed state, of changed arguments, and of parameters that the
            method wrote: all their values before, then all after.
        """
        # On a copy: the caller's module must not hold arrays of the trace, which is over when the call returns.
        live = self._live(params, inputs)
        before = Snapshot.of(live)
        arguments = self._parts.arguments.live(live.args, live.kwargs)
        with during(_unit_names, _names_inside(live.module, self._path)):
            out = self._parts.method(live.module, *live.args, **live.kwargs)
        changed = before.changed_variables(live, self.where)
        changed_state: Variables = []
        written: list[tuple[Path, nnx.Param]] = []
        for path, variable in changed:
            if isinstance(variable, nnx.Param):
                written.append((path, variable))
            else:
                changed_state.append((path, variable))

        results = border.results(out, arguments, self.location)
        result_arrays, result_leaves = _divided(results.leaves)
        changed_arguments = self._parts.arguments.changes(arguments, self.location)
        argument_form = None
        leaves_of_arguments: Sequence[Leaf] = ()
        if changed_arguments is not None:
            argument_form = changed_arguments.form
            leaves_of_arguments = changed_arguments.leaves
        argument_arrays, argument_leaves = _divided(leaves_of_arguments)
        state_arrays, state_tree = jax.tree.flatten([raw(v) for _, v in changed_state])
        # Equal calls share the outcome: it must hold no array of this trace, which ends here.
        empty_state = [(path, v.replace(None)) for path, v in changed_state]
        self.result = Outcome(
            results.form, result_leaves, empty_state, state_tree, argument_form, argument_leaves, written=()
        )
        values_before, values_after = self._written_values(before, written)
        # `finish` reads them in this order. Written parameters are last, where `trace_call` looks for those that were
        # only passed through.
        return result_arrays, [*state_arrays, *argument_arrays, *values_before, *values_after]

    def _live(self, params: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> Live:
        unplanned, state = jax.tree.unflatten(self._state_tree, inputs[: self.num_state])
        planned = dict(zip(self._planned, params, strict=True))
        remaining = iter(unplanned)
        values = [planned[i] if i in planned else next(remaining) for i in range(len(self._parts.params))]
        live = self._parts.put_together(values, state, inputs[self.num_state :])
        detach(live.module)  # of its annotated class, each method that it calls on itself would open a call
        for _, node in walk(live.graph):
            if isinstance(node, nnx.Param) and padding_of(node) is not None:
                store(node, None, node.get_raw_value())  # inside, arrays are logical
        return live

    def _written_values(
        self, before: Snapshot, written: Sequence[tuple[Path, nnx.Param]]
    ) -> tuple[list[PyTree], list[PyTree]]:
        """Returns the values of written parameters before and after; raises if a value has no place in the model."""
        self._written_paths = []
        values_before = []
        values_after = []
        unlike = []
        for path, variable in written:
            value_before = before.values.get(path)
            value_after = raw(variable)
            if not _have_one_form(value_before, value_after):
                unlike.append(path)
            self._written_paths.append(path)
            values_before.append(value_before)
            values_after.append(value_after)
        self.written = places(self.location, self._written_paths)
        if unlike:
            raise parameter_written(
                places(self.location, unlike),
                why="it is new, or has another shape than before the call.",
                do="make every parameter in the model's __init__, in the form that the call gives it; or, if the first"
                " call makes it:\nmodel(x)  # once, the plain model, before js.fully_shard",
            )
        return values_before, values_after

    def keep_written(self, numbers: Sequence[int]) -> None:
        """Makes some of the `written` parameters results: the call has changed them, not only passed them on."""
        assert self.result is not None, "body has run"
        paths = at_positions(self._written_paths, numbers)
        self.result = dataclasses.replace(self.result, written=tuple(paths))

    def without_passed(self, outs: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the outputs of a run of `body` without a trace of its own.

        Of the written parameters it has only the values of those that the call has changed.
        """
        num_written = len(self.written)
        if not num_written:
            return list(outs)
        # `nnx.remat` and the like write back each variable that they were given. By identity, as these arrays have no
        # values in a trace: the same array was only passed through. One in another dtype is rounded: written back, it
        # would take digits from the stored parameter.
        first_before = len(outs) - 2 * num_written
        first_after = len(outs) - num_written
        numbers = []
        for i, path in enumerate(self._written_paths):
            old = outs[first_before + i]
            new = outs[first_after + i]
            is_rounded = new.dtype != self._stored(path).dtype
            if new is not old and not is_rounded and not parameters_are_fixed():
                numbers.append(i)
        self.keep_written(numbers)
        return [*outs[:first_before], *at_positions(outs[first_after:], numbers)]

    # ---- after the trace

    def finish(self, outs: Sequence[jax.Array], result: "Outcome") -> MethodResult:
        """Writes state back to the caller's objects, and returns the method's result."""
        # In the order in which `body` has returned them; each reader takes its part.
        arrays = iter(outs)
        leaves = _joined(result.result_leaves, arrays)
        state = list(itertools.islice(arrays, result.state_tree.num_leaves))
        values = jax.tree.unflatten(result.state_tree, state)
        self._parts.write_back([(path, v.replace(x)) for (path, v), x in zip(result.state, values, strict=True)])
        if result.arguments is not None:
            self._parts.arguments.write(result.arguments, _joined(result.argument_leaves, arrays))
        self._write_parameters(dict(zip(result.written, arrays, strict=True)))
        return self._parts.arguments.result(result.results, leaves)

    def _write_parameters(self, values: Mapping[Path, jax.Array]) -> None:
        """Writes parameters that the call has changed, as Flax's WeightNorm does; outside the model in their places."""
        if not values:
            return
        # Inside another call the variable is one of the copy that it runs on: that call finds it changed, and writes it
        # back in turn.
        is_outermost = region_mesh() is None
        if is_outermost:
            self._check_written(values)
        planned = self._planned_by_path()
        variables = dict(self._parts.params)
        for path, x in values.items():
            param = planned.get(path)
            if is_outermost and param is not None:
                x = stored_array(x, param.placement, param.unit.mesh)
            variables[path].set_raw_value(x)

    def _check_written(self, values: Mapping[Path, jax.Array]) -> None:
        """Raises for parameters that would lose digits, or that further microbatches would not see."""
        rounded = []
        for place, (path, x) in zip(places(self.where, values), values.items(), strict=True):
            rounding = self._rounding(path, x)
            if rounding:
                rounded.append(f"{place}  {rounding}")
        if rounded:
            raise parameter_written(
                rounded,
                why="the call has a rounded copy of the parameter: written back, it would lose the other digits of the"
                " stored one at each step.",
                do="js.fully_shard(model.layer, mesh=mesh)  # first, the layer that writes, with no mixed_precision",
            )
        if parameters_are_fixed():
            raise parameter_written(
                places(self.where, values),
                why="the microbatches of a step share their parameters, and this one would be that of the next.",
                do="js.value_and_grad(loss_fn, accumulate=1)",
            )

    def _rounding(self, path: Path, written: jax.Array) -> str:
        """Says in which dtype a written parameter was read or computed; empty if in the one that it is stored in."""
        stored = str(self._stored(path).dtype)
        dtypes = [str(written.dtype)]
        param = self._planned_by_path().get(path)
        if param is not None:
            dtypes += [param.placement.gathered_dtype, param.placement.gather_wire or stored]
        for dtype in dtypes:
            if dtype != stored:
                return f"stored as {stored}, used as {dtype}"
        return ""

    def _planned_by_path(self) -> dict[Path, _PlannedParam]:
        return {param.path: param for param in self._planned.values()}

    def _stored(self, path: Path) -> jax.Array:
        return raw(dict(self._parts.params)[path])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results and changes of a call without the arrays: equal calls share it.

    Leaves are listed as one-tuples; None stands for an array.

    Attributes:
        results: the form of the method's result.
        result_leaves: its leaves.
        state: the variables that the method changed or made, without values.
        state_tree: how their values form pytrees.
        arguments: the form of the arguments after the method, if it changed something in them.
        argument_leaves: their leaves.
        written: parameters, whose new values are the last outputs.
    """

    results: border.Form
    result_leaves: Sequence[tuple | None]
    state: Variables
    state_tree: TreeDef
    arguments: border.Form | None
    argument_leaves: Sequence[tuple | None]
    written: tuple[Path, ...]


def _divided_params(parts: MethodCall) -> tuple[dict[int, _PlannedParam], list[PyTree]]:
    """Returns the planned parameters of a call, by position among all, and the values of the others."""
    planned = {}
    unplanned = []
    for i, (path, variable) in enumerate(parts.params):
        param = _PlannedParam.of(parts, path, variable)
        if param is None:
            unplanned.append(raw(variable))
        else:
            planned[i] = param
    return planned, unplanned


def _stored_params(planned: Sequence[_PlannedParam]) -> list[jax.Array]:
    """Returns the parameters of an outermost call as they are stored, and places those that are elsewhere."""
    for param in planned:
        place_variable(param.variable, param.placement, param.unit.mesh)
    # Traced arrays of a model that was merged from a plain state are not padded yet.
    return [_as_stored(raw(param.variable), param.placement) for param in planned]


def _divided(leaves: Sequence[Leaf]) -> tuple[list[jax.Array], list[tuple | None]]:
    """Returns the arrays among leaves, and the other leaves in their places."""
    arrays: list[jax.Array] = []
    static: list[tuple | None] = []
    for leaf in leaves:
        if is_array(leaf):
            arrays.append(leaf)
            static.append(None)
        else:
            static.append((leaf,))
    return arrays, static


def _joined(static: Sequence[tuple | None], arrays: Iterator[jax.Array]) -> list[Leaf]:
    """Returns leaves that `_divided` has divided."""
    return [next(arrays) if leaf is None else leaf[0] for leaf in static]


def _have_one_form(x: PyTree, y: PyTree) -> bool:
    """Returns whether two values of a parameter are arrays of one shape."""
    return is_array(x) and is_array(y) and x.shape == y.shape


def _as_stored(x: jax.Array, placement: Placement) -> jax.Array:
    padding = Padding.of(placement)
    # An array of another shape has its padding already.
    if padding is None or x.shape != placement.shape:
        return x
    return padding.pad(x)


def _names_inside(module: nnx.Module, name: str) -> dict[int | type, str]:
    """Returns the paths of the inner units from the root, by id of their modules.

    By class, too: a loop makes copies of its layers, which have other ids. Where several units have one class, the
    path has no number.
    """
    prefix = f"{name}/" if name else ""
    names: dict[int | type, str] = {}
    for path, unit in nested_units(module):
        if not path:
            continue
        kind = type(unit)
        unit_name = prefix + dotted(path)
        names[id(unit)] = unit_name
        names[kind] = numberless(unit_name) if kind in names else unit_name
    return names


def _module_around(parts: MethodCall, path: Path) -> tuple[Leaf, Path]:
    """Returns the module of a parameter, the called one or one among the arguments, and the path from there."""
    module, objects = parts.graph
    if path[0] == 0:
        return module, path[1:]
    return objects[path[1]], path[2:]
