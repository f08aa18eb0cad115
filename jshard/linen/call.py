"""A call of a bound Linen module as a function of arrays: split, run on a copy, and its changes written back.

InterceptedCall   a method call as Flax passes it
LinenCall         the same, split into parameters, state, and arrays among the arguments: a call for the engine
Result            what the call returned and changed, without the arrays
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.core import lift
from flax.core.scope import Scope
from flax.linen.transforms import get_module_scopes, set_module_scopes

from jshard import _compat
from jshard._types import PyTree, TreeDef
from jshard.engine import border
from jshard.engine.context import PaddedParameter, guard
from jshard.engine.selections import merged, others, picked
from jshard.errors import CallError
from jshard.linen.boxes import Padded, is_padded, padding_in
from jshard.linen.layout import Layout
from jshard.linen.parameters import PARAMS, described, flat, nested, placeable, raw_of
from jshard.plans.array_paths import key_texts
from jshard.plans.memories import fetched
from jshard.plans.padding import Padding
from jshard.plans.placement import Placement
from jshard.plans.plan import Leaf
from jshard.plans.units import OUTER, LogicalOptimizer, Method, Path, Unit, dotted, inside, role

Kwargs = Mapping[str, object]
Arrays = list[jax.Array]
KeyCounts = dict[Any, Any]
"""How many keys a scope has made, by stream; and the same of its inner scopes, by an object of Flax with their name."""

Collections = Mapping[str, PyTree]
"""The variables of a scope, by collection; or its keys, by stream."""

Lifted = tuple[tuple[Collections, ...], ...]
"""The variables of each outermost scope, as `flax.core.lift` passes them, in one group."""

VariablePlace = tuple[int, Path]
"""Of a variable: the number of its outermost scope, and its path from there, which begins with a collection."""


@dataclasses.dataclass(frozen=True, eq=False)
class FreeFunction:
    """A function of a bound module that is no method of its class: Flax neither intercepts nor captures it."""

    run: Method

    @property
    def __name__(self) -> str:
        return getattr(self.run, "__name__", type(self.run).__name__)

    def __call__(self, module: nn.Module, *args: object, **kwargs: object) -> object:
        """Runs it."""
        return self.run(module, *args, **kwargs)


@dataclasses.dataclass(frozen=True, eq=False)
class InterceptedCall:
    """A method call of a bound module, as Flax passes it.

    Attributes:
        module: the module.
        function: the method as its class defines it, or a free function.
        args: the positional arguments after the module.
        kwargs: the keyword arguments.
        run_plain: runs it as Flax would without an interceptor.
    """

    module: nn.Module
    function: Method
    args: tuple
    kwargs: Kwargs
    run_plain: Callable[[], object]


@dataclasses.dataclass(frozen=True, eq=False)
class LiftedScopes:
    """All that a call reads, as `flax.core.lift.pack` splits it.

    Attributes:
        scopes: those of the module, and of modules in its fields and arguments.
        make: makes scopes of variables and keys.
        repack: extracts the variables from such scopes.
        variables: those of each outermost scope.
        keys: the same of random keys.
    """

    scopes: Sequence[Scope]
    make: Callable[..., Sequence[Scope]]
    repack: Callable[[Sequence[Scope]], Lifted]
    variables: Lifted
    keys: Lifted


@dataclasses.dataclass(frozen=True)
class Result:
    """The results and changes of a call, without the arrays: equal calls share it.

    Attributes:
        results: the structure of the result.
        changed: that of the changed variables.
        arguments: that of the arguments, if the method changed something in them.
        is_array: which of all leaves are arrays.
        static: the other leaves.
        num_results: how many leaves the result has.
        num_changed: how many leaves the changed variables have.
        places: of each changed variable.
        counts: the number of keys that each scope has made.
    """

    results: border.Form
    changed: border.Form
    arguments: border.Form | None
    is_array: tuple[bool, ...]
    static: tuple[object, ...]
    num_results: int
    num_changed: int
    places: tuple[VariablePlace, ...]
    counts: tuple[KeyCounts, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Leaves:
    """The leaves of a call besides its parameters, in this order: of state, keys, fields of the module, arguments.

    Attributes:
        leaves: the leaves.
        is_input: which of them are inputs of the call's program; the others are constants of it.
        tree: the structure of those before the arguments.
        num_state: how many inputs are state or keys.
    """

    leaves: list[object]
    is_input: list[bool]
    tree: TreeDef
    num_state: int

    @classmethod
    def of(
        cls, state: list[Collections], keys: Lifted, fields: Kwargs, arguments: Sequence[object], is_unit: bool
    ) -> "_Leaves":
        around, tree = jax.tree.flatten((state, keys, fields))
        num_variables = len(jax.tree.leaves((state, keys)))
        leaves = [*around, *arguments]
        is_input = []
        for i, leaf in enumerate(leaves):
            # Inside a model arrays of numpy are constants, as in plain Flax: the method may read their numbers.
            may_be_numpy = i < num_variables or not is_unit
            is_input.append(isinstance(leaf, (jax.Array, np.ndarray) if may_be_numpy else jax.Array))
        return cls(leaves, is_input, tree, sum(is_input[:num_variables]))

    @property
    def inputs(self) -> Arrays:
        """The inputs of the call's program."""
        inputs: list[Any] = picked(self.is_input, self.leaves)
        return inputs

    @property
    def constants(self) -> list[object]:
        """The other leaves."""
        return others(self.is_input, self.leaves)

    def with_inputs(self, inputs: Sequence[jax.Array]) -> tuple[PyTree, list[object]]:
        """Returns (state, keys, fields) with other inputs, and the leaves of the arguments."""
        leaves = merged(self.is_input, inputs, self.constants)
        num_around = self.tree.num_leaves
        return jax.tree.unflatten(self.tree, leaves[:num_around]), leaves[num_around:]


class LinenCall:
    """One method call of a bound module: a `jshard.engine.trace.Call`.

    Attributes:
        module: the module.
        function: the method, or a free function.
        path: of the module, from the annotated one.
        prefix: of the annotated module.
        context: entered while the method runs.
        optimizer: of the model, if it sees logical arrays.
        result: of the latest run.
        written: empty: a parameter that Flax lets a call write is an output.
    """

    def __init__(
        self,
        call: InterceptedCall,
        args: tuple,
        kwargs: Kwargs,
        lifted: LiftedScopes,
        prefix: Path,
        interceptor: Method,
    ) -> None:
        """Splits a call.

        Args:
            call: the call.
            args: its arguments, in which Flax has replaced modules and variables by places in the scopes.
            kwargs: the same of keyword arguments.
            lifted: all variables and keys that it reads.
            prefix: the path of the annotated module.
            interceptor: the one that splits the call; it does not see it again.
        """
        self.module = call.module
        self.function = call.function
        self.prefix = prefix
        self.path: Path = tuple(call.module.path)[len(prefix) :]
        self.where = f"{type(call.module).__name__}.{call.function.__name__}"
        self.location = f"{dotted(self.path)}: {self.where}" if self.path else self.where
        self.context: Callable[[], AbstractContextManager[object]] = nullcontext
        self.optimizer: LogicalOptimizer | None = None
        self.result: Result | None = None
        self.written: Sequence[str] = ()
        self._lifted = lifted
        self._interceptor = interceptor
        self._outermost = _outermost(lifted.scopes)
        # A method may run several times. Each run begins with the numbers of keys that the scopes have made until now.
        self._counts = _copied_counters(lifted.scopes)

        # The one group, see `call_lifted`; a tree for each outermost scope.
        params = [variables.get(PARAMS, {}) for variables in lifted.variables[0]]
        boxes, self._params_tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)
        # In the order of the tree, as all lists of parameters here.
        self._boxes = []  # the array itself where a parameter has no box
        self._paths: list[Path] = []
        self.params: list[jax.Array] = []
        self.names: list[str] = []
        for keys, box in boxes:
            path = self._path_of(keys)
            self._boxes.append(box)
            self._paths.append(path)
            self.params.append(raw_of(box))
            self.names.append(dotted(_relative(path, self.path)))
        # Known when `place` has been called: a survey runs the call before there is a layout.
        self.placements: list[Placement | None] = [None] * len(self.params)
        # Until `place`, all count as gathered outside, as those are that the layout does not have.
        self.owners = [OUTER] * len(self.params)

        self._fields = _array_fields(call.module)
        self._arguments = border.Arguments(args, kwargs, (call.args, call.kwargs))
        state = [_without_params(variables) for variables in lifted.variables[0]]
        self._leaves = _Leaves.of(state, lifted.keys, self._fields, self._arguments.leaves, is_unit=bool(self.path))
        self.inputs = self._leaves.inputs
        self.num_state = self._leaves.num_state

    @property
    def leaves(self) -> dict[Path, Leaf]:
        """The parameters inside the annotated module, by path from it, described."""
        leaves = {}
        for scope, variables in zip(self._outermost, self._lifted.variables[0], strict=True):
            for scope_path, leaf in placeable(variables):
                path = inside(self.prefix, (*scope.path, *scope_path))
                if path is not None:
                    leaves[path] = described(leaf, path)
        return leaves

    def logical(self, values: Sequence[jax.Array]) -> Arrays:
        """Returns values of the parameters in the form for `body`: without padding, on the device."""
        logical = []
        for box, value in zip(self._boxes, values, strict=True):
            if isinstance(box, Padded):
                value = box.padding.cut(value)
            logical.append(fetched(value))
        return logical

    def guarded(self, values: Sequence[jax.Array]) -> Arrays:
        """Returns the input parameters; gradients of padded ones are refused if an optimizer would see the padding."""
        padded = {}
        if self.optimizer is not None:
            kind = self.where.split(".")[0]
            for i, box in enumerate(self._boxes):
                if isinstance(box, Padded):
                    form = f"{box.value.dtype}{list(box.shape)}, stored {list(box.value.shape)}"
                    padded[i] = PaddedParameter(f"{kind}: {self.names[i]}  {form}", self.optimizer)
        return guard(values, padded)

    def store(self) -> None:
        """Pads parameters where needed: they may be plain arrays, or padded for another mesh."""
        for i, (box, placement) in enumerate(zip(self._boxes, self.placements, strict=True)):
            padding = None if placement is None else Padding.of(placement)
            # By way of the logical array, whatever the padding was.
            if padding_in(box) != padding:
                logical = fetched(box.unbox() if isinstance(box, Padded) else box)
                self.params[i] = logical if padding is None else padding.pad(logical)

    def place(self, layout: Layout) -> Unit:
        """Sets the storage and the gathering unit of the call's parameters; returns the unit's record."""
        # The region of a module that is no unit has the settings of the root.
        unit_path = self.path if self.path in layout.records else ()
        self.placements = []
        self.owners = []
        for path in self._paths:
            leaf = layout.leaves.get(path)
            self.placements.append(None if leaf is None else leaf.placement)
            self.owners.append(OUTER if leaf is None else role(inside(unit_path, leaf.owner)))
        return layout.records[unit_path]

    @property
    def key(self) -> Hashable:
        """A key that is equal for calls of one module with the same program; its path is part of its random keys."""
        fields = [x for name, x in _fields(self.module) if name not in self._fields]
        # With its type: 1, 1.0 and True are equal.
        # Constants are part of the program: another value needs another trace.
        static = tuple((type(x), x) for x in (*fields, *self._leaves.constants))
        # What the call may write, and what its random keys are derived from.
        scopes = [(scope.mutable, scope.path, scope.rng_counters) for scope in self._lifted.scopes]
        module_state = _compat.exported_state(self.module), nn.get_logical_axis_rules()
        try:
            hash(static)
        except (TypeError, ValueError):  # a list, a bound module: equal only to itself
            return object()
        trees = self._leaves.tree, self._arguments.form, self._params_tree
        # As text: counters are dicts, and filters may be lists, which have no hash.
        return type(self.module), self.function, trees, repr((scopes, module_state)), static

    def body(self, params: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> tuple[Arrays, Arrays]:
        """Runs the method on a copy with these logical arrays; returns the arrays of its result and of its changes."""
        for scope, counts in zip(self._lifted.scopes, self._counts, strict=True):
            _restore(scope.rng_counters, counts)  # the run before this one has advanced them
        (state, keys, fields), argument_leaves = self._leaves.with_inputs(inputs)
        args, kwargs = self._arguments.form.together(argument_leaves, [])
        param_trees = jax.tree.unflatten(self._params_tree, list(params))
        groups = []
        for group, tree in zip(state, param_trees, strict=True):
            groups.append({**group, PARAMS: tree})
        # Of this run's arrays: a variable that holds another object afterwards was written.
        before = dict(_variables(groups))
        with self.context():
            scopes = self._lifted.make((tuple(groups),), keys)
            module, args, kwargs = set_module_scopes(_with_fields(self.module, fields), args, kwargs, scopes)
            # The copy continues the state of the module: `setup` may have run, and submodules may have been numbered.
            copy = _compat.in_state_of(self.module, module)
            # Taken before the method runs, which may change what it received.
            live = self._arguments.live(args, kwargs)
            # Flax has no wrapper around it that would have to be taken over.
            if isinstance(self.function, FreeFunction):
                result = self.function(copy, *args, **kwargs)
            else:
                result = _compat.run_method(self.function, copy, args, kwargs, self._interceptor)
            after = self._lifted.repack(scopes)[0]
        changed = {}
        for place, leaf in _variables(after):
            if not _is_same(leaf, before.get(place)):
                changed[place] = leaf
        return self._take_apart(result, changed, live)

    def keep_written(self, numbers: Sequence[int]) -> None:
        """Does nothing: a parameter that Flax lets a call write is an output like other variables."""

    def without_passed(self, outs: Sequence[jax.Array]) -> Arrays:
        """Returns all outputs."""
        return list(outs)

    def finish(self, outs: Sequence[jax.Array], result: Result) -> tuple[object, Lifted]:
        """Returns the result of the method and the changed variables, in the form for Flax's lifting."""
        # In the order of `_take_apart`: of the result, of changed variables, of changed arguments.
        leaves = merged(result.is_array, outs, result.static)
        end_of_changed = result.num_results + result.num_changed
        values = result.changed.together(leaves[result.num_results : end_of_changed], [])
        # What the method changed in lists, dicts or objects among its arguments.
        if result.arguments is not None:
            self._arguments.write(result.arguments, leaves[end_of_changed:])
        returned = self._arguments.result(result.results, leaves[: result.num_results])
        # The program may have been traced for an equal call: then the method has not run here, and made no keys.
        for scope, counts in zip(self._lifted.scopes, result.counts, strict=True):
            _restore(scope.rng_counters, counts)
        changed: list[list[tuple[Path, object]]] = [[] for _ in self._outermost]
        for (number, path), value in zip(result.places, values, strict=True):
            changed[number].append((path, value))
        return returned, (tuple(map(nested, changed)),)

    def _take_apart(
        self, returned: object, changed: Mapping[VariablePlace, object], live: border.LiveArguments
    ) -> tuple[Arrays, Arrays]:
        """Returns the arrays in a result, and in changed variables and arguments; the rest is stored in `result`."""
        # First the result, then variables: `finish` reads the leaves in this order.
        results = border.results(returned, live, self.location)
        variables = border.results(list(changed.values()), live, self.location)
        returned_leaves = [*results.leaves, *variables.leaves]
        if any(isinstance(leaf, (nn.Module, nn.Variable)) for leaf in returned_leaves):
            raise CallError(
                "A method of a Linen model returned a module or a variable.",
                where=self.where,
                why="the call runs on a copy of the module, which is gone after the call.",
                do="return self.inner(x)  # its result, instead of self.inner",
            )
        arguments = self._arguments.changes(live, self.location)
        changed_leaves = list(variables.leaves)
        if arguments is not None:
            changed_leaves += arguments.leaves
        leaves = [*results.leaves, *changed_leaves]
        is_array = [isinstance(x, jax.Array) for x in leaves]
        num_results = len(results.leaves)
        self.result = Result(
            results=results.form,
            changed=variables.form,
            arguments=None if arguments is None else arguments.form,
            is_array=tuple(is_array),
            static=tuple(others(is_array, leaves)),
            num_results=num_results,
            num_changed=len(variables.leaves),
            places=tuple(changed),
            # As after this run: an equal call, which does not run, sets its scopes to them.
            counts=_copied_counters(self._lifted.scopes),
        )
        return picked(is_array[:num_results], results.leaves), picked(is_array[num_results:], changed_leaves)

    def _path_of(self, keys: tuple) -> Path:
        """Returns the path of a parameter from the annotated module, without the keys that a box adds."""
        scope, *rest = keys
        # The first key is the position in the list of outermost scopes.
        return _relative((*self._outermost[scope.idx].path, *key_texts(tuple(rest))), self.prefix)


def call_lifted(
    call: InterceptedCall,
    *,
    prefix: Path,
    interceptor: Method,
    run: Callable[[LinenCall], tuple[object, Lifted]],
) -> object:
    """Calls a method of a bound module outside its scopes.

    Args:
        call: the call.
        prefix: the path of the annotated module.
        interceptor: the one that splits the call.
        run: returns the result of the split call's `finish`, whose variables Flax writes into the module.
    """
    scopes, args, kwargs = get_module_scopes(call.module, call.args, dict(call.kwargs))

    def run_split(make: Callable, repack: Callable, variables: Lifted, keys: Lifted) -> tuple[object, Lifted]:
        lifted = LiftedScopes(scopes, make, repack, variables, keys)
        return run(LinenCall(call, args, kwargs, lifted, prefix, interceptor))

    # `True` is the filter that takes all: one group of all variables in, one out, one of all keys.
    return lift.pack(run_split, (True,), (True,), (True,))(scopes)


# Fields of modules.


def _fields(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yields the fields that the user has set."""
    for field in dataclasses.fields(module):
        if field.init and field.name not in ("parent", "name"):
            yield field.name, getattr(module, field.name)


def _array_fields(module: nn.Module) -> dict[str, object]:
    """Returns the fields with arrays in them: they are inputs of the program, which would keep them as constants."""
    fields = {}
    for name, value in _fields(module):
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
            fields[name] = value
    return fields


def _with_fields(module: nn.Module, fields: Kwargs) -> nn.Module:
    """Returns a module with other values in fields, to be cloned; Flax would bind its own copy again."""
    if not fields:
        return module
    copy = object.__new__(type(module))
    vars(copy).update(vars(module), **fields)
    return copy


# Variables and scopes.


def _without_params(variables: Collections) -> Collections:
    return {name: tree for name, tree in variables.items() if name != PARAMS}


def _variables(groups: Sequence[Collections]) -> Iterator[tuple[VariablePlace, object]]:
    """Yields the variables of the outermost scopes with their places."""
    for number, group in enumerate(groups):
        for path, leaf in flat(group):
            yield (number, path), leaf


def _is_same(leaf: object, before: object) -> bool:
    """Returns whether two variables consist of the same arrays; by identity, as traced ones have no values."""
    new_leaves, new_tree = jax.tree.flatten(leaf)
    old_leaves, old_tree = jax.tree.flatten(before)
    return new_tree == old_tree and all(new is old for new, old in zip(new_leaves, old_leaves, strict=True))


def _outermost(scopes: Sequence[Scope]) -> list[Scope]:
    """Returns the outermost of these scopes, as `lift.pack` takes them."""
    unique = dict.fromkeys(scopes)
    return [scope for scope in unique if unique.keys().isdisjoint(_parents(scope))]


def _parents(scope: Scope) -> Iterator[Scope]:
    while scope.parent is not None:
        scope = scope.parent
        yield scope


def _relative(path: Path, start: Path) -> Path:
    """Returns a path relative to its prefix; of another module's parameter, which the call borrows, behind `..`."""
    relative = inside(start, path)
    return ("..", *path) if relative is None else relative


def _copied(counts: KeyCounts) -> KeyCounts:
    """Returns a copy of counters that keeps their keys, which are counting objects, uncopied."""
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in counts.items()}


def _copied_counters(scopes: Sequence[Scope]) -> tuple[KeyCounts, ...]:
    """Returns copies of how many keys each scope has made."""
    return tuple(_copied(scope.rng_counters) for scope in scopes)


def _restore(counts: KeyCounts, saved: KeyCounts) -> None:
    """Sets counters in place: other scopes hold the same dicts."""
    for key in [key for key in counts if key not in saved]:
        del counts[key]
    for key, value in saved.items():
        if isinstance(value, dict):
            _restore(counts.setdefault(key, {}), value)
        else:
            counts[key] = value
