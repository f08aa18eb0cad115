"""Units of an nnx module: a module's class is swapped for a subclass that carries the unit; choosing submodules."""

import dataclasses
import fnmatch
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import AxisType, Mesh

from jshard import _compat
from jshard._types import PyTree
from jshard.errors import AnnotationError
from jshard.plans.class_swap import swapped_class
from jshard.plans.mesh import AnyMesh
from jshard.plans.numeric import NUMBERS
from jshard.plans.placement import PlacementPolicy, Selection
from jshard.plans.policies import UnitPolicy

if TYPE_CHECKING:
    from jshard.plans.plan import LeafPlan, ShardPlan


Path = tuple[Any, ...]
"""Keys from a module to something in it: attribute names and indices."""

Node: TypeAlias = Any
"""An object in the graph of a model: a module, a variable, a container of these, or a value at its leaves."""

ORDINARY_STATE = (nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngState)
"""State that cannot be mistaken for parameters: statistics, caches, collected values, random numbers."""

Method = Callable[..., PyTree]
"""A method of a module's class, as a function."""

Route = Callable[[nnx.Module, Method, tuple[PyTree, ...], dict[str, PyTree]], PyTree]
"""Receives the calls of a unit: its module, the method, positional and keyword arguments; returns the result."""

OWN = "own"
NESTED = "nested"
OUTER = "outer"


def role(owner: Path | None) -> str:
    """Returns who gathers a parameter: this unit, a unit inside, or an enclosing unit.

    Args:
        owner: path of the unit that gathers it, from this one; None for an enclosing unit.
    """
    if owner is None:
        return OUTER
    return NESTED if owner else OWN


@dataclasses.dataclass(eq=False)
class LogicalOptimizer:
    """Whether a model has an optimizer that sees logical arrays; the units of the model and of its copies share it."""

    do: str  # the line that makes one
    exists: bool = False


@dataclasses.dataclass(frozen=True)
class Unit:
    """The record of a unit. It compares equal for identical layers, so it must not contain the layer's path."""

    mesh: AnyMesh
    policy: UnitPolicy
    placement: PlacementPolicy  # `ignored` as a filter
    kind: str = ""  # class of the module
    plan: "ShardPlan | None" = None  # of the parameters under the module; None before they are known
    nested: bool = False  # whether an enclosing unit is known
    name: str = ""  # of a unit that is never gathered, whose calls come from outside the region
    optimizer: LogicalOptimizer | None = None  # of a model with padded parameters, whose gradients need one

    @property
    def members(self) -> tuple["LeafPlan", ...]:
        """The parameters under the module."""
        return () if self.plan is None else self.plan.leaves

    @functools.cached_property
    def by_path(self) -> dict[Path, "LeafPlan"]:
        """The parameters under the module, by their first path as keys."""
        return {leaf.keys[0]: leaf for leaf in self.members}

    def __reduce__(self) -> tuple[Callable[..., "Unit"], tuple[object, ...]]:
        # Devices cannot be pickled. In another process those with the same ids take their places.
        fields = {}
        for field in dataclasses.fields(self):
            fields[field.name] = getattr(self, field.name)
        mesh = fields.pop("mesh")
        device_ids = None
        if isinstance(mesh, Mesh):
            # In the order of the mesh, which the axis sizes restore.
            device_ids = [device.id for device in mesh.devices.flat]
        # `by_path` is not among the fields: it is computed when it is needed.
        return _rebuild_unit, (fields, (mesh.axis_sizes, mesh.axis_names, mesh.axis_types), device_ids)


_Axes = tuple[tuple[int, ...], tuple[str, ...], tuple[AxisType, ...]]
"""The sizes, names and types of a mesh's axes."""


def _rebuild_unit(fields: dict[str, Any], axes: _Axes, device_ids: list[int] | None) -> Unit:
    sizes, names, types = axes
    if device_ids is None:
        return Unit(jax.sharding.AbstractMesh(sizes, names, axis_types=types), **fields)
    devices_by_id = {device.id: device for device in jax.devices()}
    devices = [devices_by_id[i] for i in device_ids]
    return Unit(Mesh(np.array(devices).reshape(sizes), names, axis_types=types), **fields)


def unit_of(module: object) -> Unit | None:
    """Returns the record of a unit's module; None for any other object."""
    return getattr(type(module), "_jshard_unit", None)


def plain_class(module: nnx.Module) -> type[nnx.Module]:
    """Returns the user's own class of a module."""
    return getattr(type(module), "_jshard_base", type(module))


def attach(module: nnx.Module, unit: Unit, route: Route) -> None:
    """Makes the module a unit, or renews its record. `route(self, method, args, kwargs)` receives its calls."""
    # From its own class, also where it is a unit already: a subclass of a unit's class would route each call twice.
    # Past Flax's `__setattr__`, which checks attributes that hold data.
    object.__setattr__(module, "__class__", _unit_class(plain_class(module), unit, route))


def store_plan(module: nnx.Module, plan: "ShardPlan", units: Mapping[Path, Unit]) -> None:
    """Sets new records of the units in a module, by path, each with its view of the module's plan."""
    views = with_views(plan, units)
    for path, unit_module in nested_units(module):
        attach(unit_module, views[path], type(unit_module)._jshard_route)  # type: ignore[attr-defined]


def with_views(plan: "ShardPlan", units: Mapping[Path, Unit]) -> dict[Path, Unit]:
    """Returns the records of the units of a model, each with its view of the model's plan."""
    views = {}
    for path, unit in units.items():
        views[path] = dataclasses.replace(unit, plan=plan.seen_from(path, units))
    return views


def detach(module: nnx.Module) -> None:
    """Restores a module's own class."""
    object.__setattr__(module, "__class__", plain_class(module))


@functools.cache  # equal layers have equal records, and so one class
def _unit_class(base: type[nnx.Module], unit: Unit, route: Route) -> type[nnx.Module]:
    attributes: dict[str, Any] = {
        "_jshard_unit": unit,
        "_jshard_base": base,
        "_jshard_route": staticmethod(route),
        "__annotations__": {},
    }
    for name, method in _methods(base):
        attributes[name] = _routed(method, route)
    rebuild = (_unit_class, (base, unit, route))
    return swapped_class(base, attributes, rebuild=rebuild, pytree=_compat.is_pytree_class(base))


def _methods(base: type[nnx.Module]) -> Iterator[tuple[str, Method]]:
    """Yields the methods that run the model: `__call__` and the public ones that Flax's base classes lack."""
    for name in dir(base):
        is_public = not name.startswith("_") and not hasattr(nnx.Module, name)
        # Static: by `getattr` a static method would look like a plain function, and be called with the module.
        method = inspect.getattr_static(base, name)
        if inspect.isfunction(method) and (is_public or name == "__call__"):
            yield name, method


def _routed(method: Method, route: Route) -> Method:
    """Returns a method whose calls go to the route."""

    @functools.wraps(method)
    def call(self: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return route(self, method, args, kwargs)

    return call


def is_key(x: object) -> bool:
    """Returns whether an array holds random keys: these have no bytes to split, and every device has them whole."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def occurrences(module: nnx.Module) -> Iterator[tuple[nnx.Param, Path, tuple[nnx.Module, ...]]]:
    """Yields every parameter along every path (a tied one several times), with the units around it, outermost first.

    Random keys are left out, also where a model has them as parameters.
    A parameter that holds a tuple or a dict of arrays, or nothing, is not one of them: it has no shape to plan by.
    """
    return _occurrences_in(module, (), (), frozenset())


def _occurrences_in(
    node: Node, path: Path, units: tuple[nnx.Module, ...], open_nodes: frozenset[int]
) -> Iterator[tuple[nnx.Param, Path, tuple[nnx.Module, ...]]]:
    """Yields the parameters in a node of a model.

    Args:
        node: a module, a variable, or a container of these.
        path: of the node.
        units: around the node.
        open_nodes: ids of the nodes around it. A model may contain itself, and is then not entered again.
    """
    if isinstance(node, nnx.Param):
        if holds_array(node) and not is_key(node.get_raw_value()):
            yield node, path, units
        return
    # Other variables are no parameters, whatever their values hold.
    if isinstance(node, nnx.Variable) or id(node) in open_nodes:
        return
    if unit_of(node) is not None:
        units = (*units, node)
    for key, child in _compat.children(node).items():
        # A shortcut for what cannot hold a parameter: most attributes of a layer are such.
        if type(child) not in _compat.SETTINGS:
            yield from _occurrences_in(child, (*path, key), units, open_nodes | {id(node)})


def holds_array(variable: nnx.Variable) -> bool:
    """Returns whether the value of a variable is one array, or a number; not a tree of arrays."""
    value = variable.get_raw_value()
    return hasattr(value, "shape") or isinstance(value, NUMBERS)


def walk(graph: object, *, settings: bool = False) -> Iterator[tuple[Path, Node]]:
    """Yields every node and variable in a graph of modules, once, with its first path, outer before inner.

    Like `nnx.iter_graph`, but several times faster: numbers, names and functions are skipped except for `settings`.
    """
    visited: set[int] = set()  # nodes and variables; other objects, such as equal numbers, are not identities
    stack: list[tuple[Path, Node]] = [((), graph)]
    while stack:
        path, node = stack.pop()
        if type(node) not in _compat.SETTINGS and (_compat.is_node(node) or isinstance(node, nnx.Variable)):
            if id(node) in visited:
                continue
            visited.add(id(node))
        yield path, node
        for key, child in reversed(_compat.children(node).items()):  # the last on the stack is visited first
            if settings or type(child) not in _compat.SETTINGS:
                stack.append(((*path, key), child))


def modules(module: nnx.Module) -> Iterator[tuple[Path, nnx.Module]]:
    """Yields the modules in a graph with their first path, each once."""
    for path, node in walk(module):
        if isinstance(node, nnx.Module):
            yield path, node


def nested_units(module: nnx.Module) -> Iterator[tuple[Path, nnx.Module]]:
    """Yields the unit modules in a graph with their first path, outer before inner, each once."""
    unit_modules = [(path, inner) for path, inner in modules(module) if unit_of(inner) is not None]
    # A path sorts before those that begin with it: outer before inner.
    yield from sorted(unit_modules, key=lambda item: _order_of(item[0]))


def _order_of(path: Path) -> list[tuple[bool, str | int]]:
    """Returns a key to sort paths by: an index of a list and an attribute's name cannot be compared themselves."""
    return [(isinstance(key, str), key) for key in path]


def units_in(module: nnx.Module) -> dict[Path, Unit]:
    """Returns the records of the units in a module by path, outer before inner."""
    units = {}
    for path, unit_module in nested_units(module):
        unit = unit_of(unit_module)
        assert unit is not None, "nested_units yields units"
        units[path] = unit
    return units


def dotted(path: Path) -> str:
    """Returns a path as text: `blocks/0/kernel`; `(root)` for the module itself."""
    return "/".join(map(str, path)) or "(root)"


def located(kind: str, paths: Iterable[Path]) -> list[str]:
    """Returns places in a model as lines of an error: `MLP: blocks/0/kernel`.

    Args:
        kind: class of the model.
        paths: the places.
    """
    return [f"{kind}: {dotted(path)}" for path in paths]


def inside(outer: Path, path: Path | None) -> Path | None:
    """Returns a path relative to the module at `outer`; None if it is not inside the module."""
    if path is None or path[: len(outer)] != outer:
        return None
    return path[len(outer) :]


def is_named(path: str, patterns: Iterable[str]) -> bool:
    """Returns whether one of the patterns matches a path."""
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def numberless(path: str) -> str:
    """Returns a path with `*` for layer indices: `blocks/*/kernel`."""
    # `blocks/0` and `block_0`, but not the digit of a name such as `conv2d`.
    return re.sub(r"(?<=[/_])\d+(?=/|$)", "*", path)


# Choices of units and of parameters by users: classes, patterns, functions.

UnitChoice = type | str | Callable[[str, nnx.Module], bool]
"""A class, a pattern of paths such as `"blocks/*"`, or a function of (path, module)."""


def chosen(choice: UnitChoice, path: str, module: object) -> bool:
    """Returns whether a submodule at a path is chosen."""
    if isinstance(choice, type):
        return isinstance(module, choice)
    if isinstance(choice, str):
        has_equal_depth = path.count("/") == choice.count("/")  # `*` of fnmatch also matches slashes
        return has_equal_depth and fnmatch.fnmatch(path, choice)
    return _answer_of(choice, path, module)


def _answer_of(choice: Callable[..., object], path: str, module: object) -> bool:
    """Returns what a function of (path, module) answers; raises for one that makes modules, and for other objects."""
    answer: object = None
    cause: Exception | None = None
    try:
        answer = choice(path, module)
    # What a function raises that was not written for these arguments; others are errors of the user's own code.
    except (TypeError, AttributeError, ValueError) as error:
        cause = error
    if cause is None and not isinstance(answer, type) and not callable(answer):
        return bool(answer)
    why = f"it answered {type(answer).__name__} for {path!r}" if cause is None else f"{type(cause).__name__}: {cause}"
    raise AnnotationError(
        "This cannot choose units.",
        where=f"units={getattr(choice, '__qualname__', repr(choice))}",
        why=f"a function is called with the path and the module of each submodule, and answers True or False; {why}.",
        do='units=Block  # the class of the modules; or a pattern, "blocks/*"; or lambda path, module: "block" in path',
    ) from cause


def as_filter(choice: Selection) -> Filter:
    """Returns an nnx filter from filters and path patterns of parameters; hashable, because it is part of records."""
    if choice is None:
        return False
    if isinstance(choice, str):
        return PathPattern(choice)
    if isinstance(choice, (list, tuple, set)):
        return tuple(map(as_filter, choice))
    return choice


@dataclasses.dataclass(frozen=True)
class PathPattern:
    """A pattern of parameter paths, as a filter."""

    pattern: str

    def __call__(self, path: Path, value: object) -> bool:
        """Returns whether a parameter is chosen."""
        return fnmatch.fnmatch(dotted(path), self.pattern)
