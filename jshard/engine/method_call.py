"""A method call on a module as a function of arrays: split, merged again, and its changes written back.

MethodCall    splits the module and its arguments into arrays and their structure
Live          is a fresh copy of both, which holds the arrays of a trace; the method runs on it
Snapshot      is what the copy held before the method ran, to know what the method changed
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence

import jax
from flax import nnx

from jshard import _compat
from jshard._types import PyTree
from jshard.engine import border
from jshard.engine.selections import at_positions
from jshard.engine.values import (
    AnyArray,
    Leaf,
    MethodResult,
    are_identical,
    is_array,
    is_nnx,
    raw,
    type_text,
    with_value,
)
from jshard.errors import CallError
from jshard.plans.units import Path, dotted, plain_class, walk

Variables = list[tuple[Path, nnx.Variable]]
"""Variables by path."""

FlatState = list[tuple[Path, nnx.Variable | AnyArray]]
"""Variables by path; an array that is a plain attribute of a module stands for itself."""


@dataclasses.dataclass(frozen=True)
class Live:
    """A module and arguments merged from arrays.

    Attributes:
        graph: the module, and the nnx objects among the arguments. They are one graph, because they may share
            variables.
        args: the positional arguments.
        kwargs: the keyword arguments.
    """

    graph: tuple[nnx.Module, tuple[Leaf, ...]]
    args: tuple
    kwargs: dict[str, object]

    @property
    def module(self) -> nnx.Module:
        """The module whose method runs."""
        return self.graph[0]

    def contents(self) -> tuple[Variables, dict[Path, object]]:
        """Returns the variables, and the values of plain attributes, by path."""
        variables: Variables = []
        attributes: dict[Path, object] = {}
        for path, x in walk(self.graph, settings=True):
            is_setting = type(x) in _compat.SETTINGS
            if isinstance(x, nnx.Variable) and not is_setting:
                variables.append((path, x))
            elif not _compat.is_node(x):
                attributes[path] = x
        return variables, attributes


class MethodCall:
    """One call, split into parameters, other variables (state), and arrays among the arguments.

    The paths of variables start with 0 in the module, with 1 in the arguments.

    Attributes:
        method: the method.
        where: its class and name, for messages.
        arguments: the arguments, taken apart.
        has_objects: whether there are nnx objects among them.
        arrays: the arrays among them.
        graph: the module, and these objects.
        params: the parameters of both.
        state: their other variables.
    """

    def __init__(
        self, module: nnx.Module, method: Callable[..., MethodResult], args: tuple, kwargs: dict[str, object]
    ) -> None:
        self.method = method
        self.where = f"{plain_class(module).__name__}.{method.__name__}"
        self.arguments = border.Arguments(args, kwargs, (args, kwargs), is_leaf=is_nnx)
        self._leaves = self.arguments.leaves
        self._array_positions: list[int] = []
        self._object_positions: list[int] = []
        for i, leaf in enumerate(self._leaves):
            if is_array(leaf):
                self._array_positions.append(i)
            elif is_nnx(leaf):
                self._object_positions.append(i)
        self.has_objects = bool(self._object_positions)
        self.arrays = at_positions(self._leaves, self._array_positions)
        # Split as one graph, so that a variable which the module and an argument share stays one.
        self.graph = (module, tuple(at_positions(self._leaves, self._object_positions)))
        # Parameters apart from other variables: they enter as stored shards, with a plan and a gradient.
        self._graphdef, params, state = nnx.split(self.graph, nnx.Param, ...)
        self.params: list[tuple[Path, nnx.Param]] = list(nnx.to_flat_state(params))
        self.state: FlatState = list(nnx.to_flat_state(state))

    def key(self) -> Hashable:
        """Returns a value that is equal for calls that run the same program on arrays of the same types."""
        # Of an array only its place, as its type is compared with those of all operands. Any other leaf is part of the
        # program: Python may branch on it.
        dynamic = {*self._array_positions, *self._object_positions}
        static = []
        for i, leaf in enumerate(self._leaves):
            if i not in dynamic:
                static.append((type(leaf), leaf))  # with its type: 1, 1.0 and True are equal
        return self.method, self._graphdef, self.arguments.form, tuple(self._array_positions), tuple(static)

    def difference(self, other_call: "MethodCall") -> str:
        """Describes where another call's module differs in structure; empty if it does not."""
        first = self._types()
        second = other_call._types()
        differences = []
        for path in dict.fromkeys([*first, *second]):  # in the order of the model
            if first.get(path) != second.get(path):
                differences.append(f"{dotted(path[1:])}: {first.get(path, 'none')} and {second.get(path, 'none')}")
        if differences:
            return "; ".join(differences[:4])
        if self._graphdef != other_call._graphdef:
            return "their attributes or annotations differ."
        return ""

    def _types(self) -> dict[Path, PyTree]:
        return {path: jax.tree.map(type_text, raw(variable)) for path, variable in self.params + self.state}

    def values(self) -> tuple[list, list, list]:
        """Returns the arrays of the call: parameters, state (each a pytree), arguments."""
        return _raw_values(self.params), _raw_values(self.state), self.arrays

    def put_together(self, params: Sequence, state: Sequence, arrays: Sequence) -> Live:
        """Returns a fresh copy of module and arguments that holds these values."""
        variables: FlatState = []
        for (path, variable), value in zip(self.params + self.state, [*params, *state], strict=True):
            variables.append((path, with_value(variable, value)))
        # Without a copy, the live graph would hold the caller's own variables, and the method would write to them.
        graph = nnx.merge(self._graphdef, nnx.from_flat_state(variables), copy=True)
        leaves = list(self._leaves)
        for i, x in zip(self._array_positions, arrays, strict=True):
            leaves[i] = x
        for i, x in zip(self._object_positions, graph[1], strict=True):
            leaves[i] = x
        args, kwargs = self.arguments.form.together(leaves, [])
        return Live(graph, args, kwargs)

    def write_back(self, changes: Variables) -> None:
        """Writes the changes of the call to the caller's objects; a variable that is new becomes an attribute."""
        if not changes:
            return  # the usual case: a walk over a large model takes time
        nodes = dict(walk(self.graph))
        for path, variable in changes:
            if path in nodes:
                nodes[path].set_raw_value(variable.get_raw_value())
            else:  # what holds it was there before the call: modules that the method builds are refused
                parent = nodes[path[:-1]]
                setattr(parent, str(path[-1]), variable)


# A read may return a new object of these types, equal to the one before.
_PLAIN_VALUES = (str, bytes, int, float, complex)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The contents of a live graph before its method ran: of variables, and of plain attributes."""

    values: dict[Path, PyTree]
    attributes: dict[Path, object]

    @classmethod
    def of(cls, live: Live) -> "Snapshot":
        """Returns its current contents."""
        variables, attributes = live.contents()
        return cls({path: variable.get_raw_value() for path, variable in variables}, attributes)

    def changed_variables(self, live: Live, where: str) -> Variables:
        """Returns the variables that the method changed or created, including parameters.

        Raises:
            CallError: it changed a plain attribute. That is lost: the method ran on a copy.
        """
        variables, attributes = live.contents()
        lost = [path for path, x in attributes.items() if not self._has_attribute(path, x)]
        if lost:
            built = self._built_modules(live)
            if built:
                raise _built_inside([f"{where}: {text}" for text in built])
            raise CallError(
                "A plain attribute was written inside the call.",
                where=places(where, lost),
                why="the call runs on a copy of the module; only nnx Variables are copied back.",
                do="self.count = nnx.Variable(jnp.zeros((), int))  # keep it in a variable",
            )
        changed: Variables = []
        for path, variable in variables:
            if not _has_same_leaves(variable.get_raw_value(), self.values.get(path)):
                changed.append((path, variable))
        return changed

    def _built_modules(self, live: Live) -> list[str]:
        """Describes the modules that the method built: for each attribute that holds some, its path and their class."""
        # What holds something was there before. An attribute that was None was no module.
        known: set[Path] = set()
        for path in (*self.values, *self.attributes):
            known.update(path[:length] for length in range(len(path)))
        classes: dict[Path, list[str]] = {}
        for path, x in walk(live.graph):
            is_container = isinstance(x, nnx.List | nnx.Dict)
            if isinstance(x, nnx.Module) and not is_container and path not in known:
                classes.setdefault(_outermost_unknown(path, known), []).append(plain_class(x).__name__)
        texts = []
        for path, names in classes.items():
            suffix = f" and {len(names) - 1} more" if len(names) > 1 else ""
            texts.append(f"{dotted(path[1:])}  {names[0]}{suffix}")
        return texts

    def changed_state(self, live: Live, where: str) -> Variables:
        """Returns the variables that the method changed or created; raises if a parameter is among them."""
        changed = self.changed_variables(live, where)
        written = [path for path, v in changed if isinstance(v, nnx.Param)]
        if written:
            raise parameter_written(
                places(where, written),
                why="the layers run in one loop, which has their parameters as its input.",
                do="for layer in layers: x = layer(x)  # in place of js.scan_layers",
            )
        return changed

    def _has_attribute(self, path: Path, x: object) -> bool:
        if path not in self.attributes:
            return False
        before = self.attributes[path]
        if before is x:
            return True
        # With its type: 1, 1.0 and True are equal. Only of plain values, as `==` of a user's class may do anything.
        return type(before) is type(x) and isinstance(x, _PLAIN_VALUES) and before == x


def _outermost_unknown(path: Path, known: set[Path]) -> Path:
    """Returns the shortest beginning of a path that was not there before."""
    for length in range(len(path)):
        if path[:length] not in known:
            return path[:length]
    return path


def _built_inside(places: Sequence[str]) -> CallError:
    return CallError(
        "Layers were built inside the call.",
        where=places,
        why="the call runs on a copy of the module, which is then dropped, and js.fully_shard has not seen them: their"
        " parameters would neither be sharded nor trained.",
        do="model(x)  # once, the plain model, before js.fully_shard; for js.shard_init, where the model is built",
    )


def places(where: str, paths: Iterable[Path]) -> list[str]:
    """Returns the places of variables for a message: the call, and the path of each in it."""
    # Without the first entry of the path, which says whether it is of the module or of an argument.
    return [f"{where}: {dotted(path[1:])}" for path in paths]


def _raw_values(variables: Sequence[tuple[Path, nnx.Variable | AnyArray]]) -> list[PyTree]:
    return [raw(variable) for _, variable in variables]


def parameter_written(places: Sequence[str], *, why: str, do: str) -> CallError:
    """Returns the error for parameters that a method wrote."""
    return CallError("A parameter was written inside the call.", where=places, why=why, do=do)


def _has_same_leaves(a: PyTree, b: PyTree) -> bool:
    """Returns whether two values consist of the same arrays; by identity, as traced ones have no values."""
    return are_identical(jax.tree.leaves(a), jax.tree.leaves(b))
