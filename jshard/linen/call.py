"""A call of a bound Linen module as a function of arrays: split, run on a copy, and its changes written back."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from flax.core import lift, meta
from flax.core.scope import Scope
from flax.linen.spmd import logical_to_mesh_axes
from flax.linen.transforms import get_module_scopes, set_module_scopes

from jshard import _compat
from jshard.engine import border
from jshard.engine.context import guard
from jshard.engine.program import merged, others, picked
from jshard.errors import AnnotationError, CallError
from jshard.linen.layout import Layout, Leaf, is_padded, padding_in
from jshard.plans.array_paths import key_texts
from jshard.plans.memories import fetched
from jshard.plans.padding import Padding
from jshard.plans.placement import Placement
from jshard.plans.units import OUTER, LogicalOptimizer, Path, Unit, dotted, inside, is_key, role

PARAMS = "params"
"""The collection of the parameters."""


def flat(tree: Mapping[str, Any]) -> Iterable[tuple[Path, Any]]:
    """The variables in a collection, by path."""
    return traverse_util.flatten_dict(tree).items()


def placeable(variables: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yields the parameters among variables, in their boxes, by path, without random keys, which no plan places.

    A parameter may be a tuple or another pytree, as of a weight and its scale: its arrays are stored one by one.
    """
    for path, leaf in flat_params(variables.get(PARAMS, {})):
        if not is_key(raw_of(leaf)):
            yield path, leaf


def flat_params(tree: Mapping[str, Any]) -> list[tuple[Path, Any]]:
    """Returns the arrays of the parameters in a collection, in their boxes, by path."""
    return [(key_texts(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_box)]


def is_box(x: Any) -> bool:
    """Returns whether a value is a box of Flax around an array."""
    return isinstance(x, meta.AxisMetadata)


def nested(leaves: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """The collection that has these variables."""
    return traverse_util.unflatten_dict(dict(leaves))


def described(leaf: Any, path: Path) -> Leaf:
    """The description of a parameter for a layout."""
    values = jax.tree.leaves(leaf)
    if len(values) != 1 or not hasattr(values[0], "shape"):
        raise AnnotationError(
            "A parameter of a Linen module is not an array.",
            where=f"{dotted(path)}: a {type(leaf).__name__}",
            why="arrays are sharded, also those in tuples, dicts and other pytrees; a box, such as nn.Partitioned,"
            " holds one.",
            do='self.param("scale", lambda key: jnp.ones(()))  # an array for a number',
        )
    (raw,), padding, spec = values, padding_in(leaf), ()
    shape = tuple(raw.shape) if padding is None else padding.logical_shape(raw.shape)
    if isinstance(leaf, nn.LogicallyPartitioned):
        rules = leaf.rules or nn.get_logical_axis_rules()  # without any, the placement's axis_rules apply
        spec = tuple(logical_to_mesh_axes(leaf.names, rules) or ()) if rules else leaf.names
    elif isinstance(leaf, nn.Partitioned):
        spec = tuple(leaf.get_partition_spec())
    return Leaf(shape, jnp.dtype(raw.dtype).name, spec)


def raw_of(leaf: Any) -> Any:
    """The array in a box; a leaf without one is its own value."""
    if not isinstance(leaf, meta.AxisMetadata):
        return leaf
    (raw,) = jax.tree.leaves(leaf)
    return raw


def as_arrays(raw: Any) -> Any:
    """The value of a variable, with arrays for numbers."""
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), raw)


# A call of a bound Linen module as a function of arrays: split, run on a copy, and its changes returned.

Lifted = tuple[tuple[Mapping[str, Any], ...], ...]
"""The variables of each scope by collection, as `flax.core.lift` passes them, in one group."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The results and changes of a call, without the arrays: equal calls share it."""

    results: border.Form  # the structure of the result
    changed: border.Form  # and of the changed variables
    arguments: border.Form | None  # and of the arguments, if the method changed something in them
    is_array: tuple[bool, ...]  # which of all leaves are arrays; the others are `static`
    static: tuple[Any, ...]
    num_leaves: tuple[int, int]  # of the result, and of the changed variables
    places: tuple[tuple[int, Path], ...]  # of each changed variable: the number of its scope, and its path from there
    counts: tuple[dict[Any, Any], ...]  # the number of keys each scope has made


@dataclasses.dataclass(frozen=True, eq=False)
class FreeFunction:
    """A function of a bound module that is no method of its class: Flax neither intercepts nor captures it."""

    run: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return getattr(self.run, "__name__", type(self.run).__name__)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        return self.run(module, *args, **kwargs)


@dataclasses.dataclass(eq=False)
class LinenCall:
    """One method call of a bound module: a `jshard.engine.trace.Call`."""

    module: nn.Module
    function: Callable[..., Any]  # the method as its class defines it
    args: tuple  # modules and variables among them are in `scopes`
    kwargs: Mapping[str, Any]
    scopes: Sequence[Scope]  # everything that the call reads
    scope_fn: Callable[..., Any]  # makes scopes of variables and keys
    repack: Callable[..., Any]  # extracts the variables from them
    groups: Lifted  # the variables of each outermost scope, by collection
    rngs: Lifted  # their keys
    prefix: Path  # of the annotated module
    interceptor: Callable[..., Any]  # for its calls, in which this call is split
    callers: tuple[tuple, Mapping[str, Any]]  # the arguments before Flax replaced modules and variables in them

    def __post_init__(self) -> None:
        self.path: Path = tuple(self.module.path)[len(self.prefix) :]
        self.where = f"{type(self.module).__name__}.{self.function.__name__}"
        self.location = f"{dotted(self.path)}: {self.where}" if self.path else self.where
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered while the method runs
        self.optimizer: LogicalOptimizer | None = None
        self.result: Result | None = None  # of the latest run
        self.written: Sequence[str] = ()  # a parameter that Flax lets a call write is an output
        self._outermost = _outermost(self.scopes)
        self._counts = [_copied(scope.rng_counters) for scope in self.scopes]
        self._fields = _array_fields(self.module)
        params = [group.get(PARAMS, {}) for group in self.groups[0]]
        found, self._params_tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)
        self._given = [x for _, x in found]
        self.params = [raw_of(x) for x in self._given]
        self._paths = [self._path_of(keys) for keys, _ in found]
        state = [{k: v for k, v in group.items() if k != PARAMS} for group in self.groups[0]]
        self._arguments = border.Arguments(self.args, self.kwargs, self.callers)
        around, self._tree = jax.tree.flatten((state, self.rngs, self._fields))
        self._leaves = [*around, *self._arguments.leaves]
        n_state = len(jax.tree.leaves((state, self.rngs)))
        given = jax.Array if self.path else (jax.Array, np.ndarray)  # inside a model arrays of numpy are constants
        kinds = [(jax.Array, np.ndarray)] * n_state + [given] * (len(self._leaves) - n_state)
        self._is_input = [isinstance(x, kind) for x, kind in zip(self._leaves, kinds, strict=True)]
        self.inputs = picked(self._is_input, self._leaves)
        self.num_state = sum(self._is_input[:n_state])
        self.names = [dotted(_from(path, self.path)) for path in self._paths]
        self.placements: list[Placement | None] = [None] * len(self.params)
        self.owners = [OUTER] * len(self.params)

    @property
    def leaves(self) -> dict[Path, Any]:
        """The parameters inside the annotated module, by path from it, described."""
        groups = zip(self._outermost, self.groups[0], strict=True)
        every = (((*scope.path, *path), leaf) for scope, group in groups for path, leaf in placeable(group))
        own = ((inside(self.prefix, path), leaf) for path, leaf in every)
        return {path: described(leaf, path) for path, leaf in own if path is not None}

    def logical(self, values: Sequence[Any]) -> list[Any]:
        """Values of the parameters in the form for `body`."""
        boxed = zip(self._given, values, strict=True)
        return [fetched(given.padding.cut(x) if is_padded(given) else x) for given, x in boxed]

    def guarded(self, values: Sequence[Any]) -> list[Any]:
        """The input parameters; gradients of padded ones are refused if an optimizer would see the padding."""
        kind, boxes = self.where.split(".")[0], ((i, x) for i, x in enumerate(self._given) if is_padded(x))
        form = lambda x: f"{x.value.dtype}{list(x.shape)}, stored {list(x.value.shape)}"
        optimizer = self.optimizer
        padded = {} if optimizer is None else {i: (f"{kind}: {self.names[i]}  {form(x)}", optimizer) for i, x in boxes}
        return guard(values, padded)

    def store(self) -> None:
        """Pads parameters where needed: they may be plain arrays, or padded for another mesh."""
        for i, (given, placement) in enumerate(zip(self._given, self.placements, strict=True)):
            padding = None if placement is None else Padding.of(placement)
            if padding_in(given) != padding:
                logical = fetched(given.unbox() if is_padded(given) else given)
                self.params[i] = logical if padding is None else padding.pad(logical)

    def place(self, layout: Layout) -> Unit:
        """Sets the storage and the gathering unit of the call's parameters; returns the unit's record."""
        around = self.path if self.path in layout.records else ()
        mine = [layout.leaves.get(path) for path in self._paths]
        self.placements = [leaf and leaf.placement for leaf in mine]
        self.owners = [OUTER if leaf is None else role(inside(around, leaf.owner)) for leaf in mine]
        return layout.records[around]

    @property
    def key(self) -> Hashable:
        """A key that is equal for calls of one module with the same program; its path is part of its random keys."""
        scopes = [(s.mutable, s.path, s.rng_counters) for s in self.scopes]
        around = _compat.exported_state(self.module), nn.get_logical_axis_rules()
        fields = [x for name, x in _fields(self.module) if name not in self._fields]
        static = tuple((type(x), x) for x in (*fields, *others(self._is_input, self._leaves)))
        try:
            hash(static)
        except (TypeError, ValueError):  # a list, a bound module: equal only to itself
            return object()
        trees = self._tree, self._arguments.form, self._params_tree
        return type(self.module), self.function, trees, repr((scopes, around)), static

    def body(self, params: Sequence[Any], inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Runs the method on a copy with these logical arrays; returns the arrays of its result and of its changes."""
        for scope, counts in zip(self.scopes, self._counts, strict=True):
            _restore(scope.rng_counters, counts)
        leaves = merged(self._is_input, inputs, others(self._is_input, self._leaves))
        num_around = self._tree.num_leaves
        state, rngs, fields = jax.tree.unflatten(self._tree, leaves[:num_around])
        args, kwargs = self._arguments.form.together(leaves[num_around:], [])
        held = jax.tree.unflatten(self._params_tree, list(params))
        groups = tuple({**group, PARAMS: tree} for group, tree in zip(state, held, strict=True))
        before = dict(_variables(groups))
        with self.context():
            scopes = self.scope_fn((groups,), rngs)
            module, args, kwargs = set_module_scopes(_with(self.module, fields), args, kwargs, scopes)
            copy = _compat.in_state_of(self.module, module)
            live = self._arguments.live(args, kwargs)
            if isinstance(self.function, FreeFunction):
                out = self.function(copy, *args, **kwargs)
            else:
                out = _compat.run_method(self.function, copy, args, kwargs, self.interceptor)
            changed = self.repack(scopes)[0]
        return self._taken(out, {k: v for k, v in _variables(changed) if not _is_same(v, before.get(k))}, live)

    def keep_written(self, numbers: Sequence[int]) -> None:
        """Does nothing: a parameter that Flax lets a call write is an output like other variables."""

    def without_passed(self, outs: Sequence[Any]) -> list[Any]:
        """All outputs."""
        return list(outs)

    def finish(self, outs: Sequence[Any], result: Result) -> tuple[Any, Lifted]:
        """The result of the method and the changed variables, in the form for Flax's lifting."""
        leaves = merged(result.is_array, outs, result.static)
        num_results, num_changed = result.num_leaves
        values = result.changed.together(leaves[num_results : num_results + num_changed], [])
        if result.arguments is not None:
            self._arguments.write(result.arguments, leaves[num_results + num_changed :])
        out = self._arguments.result(result.results, leaves[:num_results])
        for scope, counts in zip(self.scopes, result.counts, strict=True):
            _restore(scope.rng_counters, counts)
        changed = list(zip(result.places, values, strict=True))
        return out, (tuple(nested((p, v) for (k, p), v in changed if k == i) for i in range(len(self._outermost))),)

    def _taken(
        self, out: Any, changed: Mapping[tuple[int, Path], Any], live: border.LiveArguments
    ) -> tuple[list[Any], list[Any]]:
        """The arrays in a result, changed variables and changed arguments; the rest is stored in `result`."""
        results = border.results(out, live, self.location)
        variables = border.results(list(changed.values()), live, self.location)
        if any(isinstance(x, (nn.Module, nn.Variable)) for x in (*results.leaves, *variables.leaves)):
            raise CallError(
                "A method of a Linen model returned a module or a variable.",
                where=self.where,
                why="the call runs on a copy of the module, which is gone after the call.",
                do="return self.inner(x)  # its result, instead of self.inner",
            )
        arguments = self._arguments.changes(live, self.location)
        further = [*variables.leaves, *([] if arguments is None else arguments.leaves)]
        leaves = [*results.leaves, *further]
        is_array = [isinstance(x, jax.Array) for x in leaves]
        num_results = len(results.leaves)
        self.result = Result(
            results=results.form,
            changed=variables.form,
            arguments=None if arguments is None else arguments.form,
            is_array=tuple(is_array),
            static=tuple(others(is_array, leaves)),
            num_leaves=(num_results, len(variables.leaves)),
            places=tuple(changed),
            counts=tuple(_copied(scope.rng_counters) for scope in self.scopes),
        )
        return picked(is_array[:num_results], results.leaves), picked(is_array[num_results:], further)

    def _path_of(self, keys: tuple) -> Path:
        """Path of a parameter from the annotated module, without the keys that a box adds."""
        scope, *rest = keys
        return _from((*self._outermost[scope.idx].path, *key_texts(tuple(rest))), self.prefix)


def call_lifted(
    module: nn.Module,
    function: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    prefix: Path,
    interceptor: Callable[..., Any],
    run: Callable[[LinenCall], tuple[Any, Lifted]],
) -> Any:
    """Calls a method of a bound module outside its scopes; `run` returns the result of the call's `finish`."""
    callers = args, kwargs
    scopes, args, kwargs = get_module_scopes(module, args, dict(kwargs))

    def inner(scope_fn: Callable, repack: Callable, groups: Lifted, rngs: Lifted) -> tuple[Any, Lifted]:
        given = module, function, args, kwargs, scopes
        return run(LinenCall(*given, scope_fn, repack, groups, rngs, prefix, interceptor, callers))

    return lift.pack(inner, (True,), (True,), (True,))(scopes)


def _array_fields(module: nn.Module) -> dict[str, Any]:
    return {name: x for name, x in _fields(module) if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))}


def _fields(module: nn.Module) -> Iterator[tuple[str, Any]]:
    names = (f.name for f in dataclasses.fields(module) if f.init and f.name not in ("parent", "name"))
    return ((name, getattr(module, name)) for name in names)


def _with(module: nn.Module, fields: dict[str, Any]) -> nn.Module:
    """A module with other values in some fields, to be cloned; Flax would bind its own copy again."""
    if not fields:
        return module
    copy = object.__new__(type(module))
    vars(copy).update(vars(module), **fields)
    return copy


def _variables(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[int, Path], Any]]:
    """The variables of scopes with their places; the first key of a path is the collection."""
    for i, group in enumerate(groups):
        for path, leaf in flat(group):
            yield (i, path), leaf


def _is_same(leaf: Any, before: Any) -> bool:
    (new, tree), (old, old_tree) = jax.tree.flatten(leaf), jax.tree.flatten(before)
    return tree == old_tree and all(a is b for a, b in zip(new, old, strict=True))


def _outermost(scopes: Sequence[Scope]) -> list[Scope]:
    """The outermost of these scopes, as `lift.pack` takes them."""
    unique = dict.fromkeys(scopes)
    return [scope for scope in unique if not any(parent in unique for parent in _parents(scope))]


def _parents(scope: Scope) -> Iterator[Scope]:
    while scope.parent is not None:
        scope = scope.parent
        yield scope


def _from(path: Path, start: Path) -> Path:
    """A path relative to its prefix."""
    found = inside(start, path)
    return ("..", *path) if found is None else found


def _copied(counts: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy of counters that keeps their keys, which are counting objects, uncopied."""
    return {k: _copied(v) if isinstance(v, dict) else v for k, v in counts.items()}


def _restore(counts: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Sets counters in place: other scopes hold the same dicts."""
    for key in [key for key in counts if key not in saved]:
        del counts[key]
    for key, value in saved.items():
        if isinstance(value, dict):
            _restore(counts.setdefault(key, {}), value)
        else:
            counts[key] = value
