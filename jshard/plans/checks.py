"""Checks of what an annotation is given: the module, its variables, its settings, the choice of its units."""

import dataclasses
import fnmatch
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
from flax import nnx
from flax.nnx.filterlib import Filter

from jshard import _compat
from jshard.errors import AnnotationError
from jshard.plans.memories import check_offload
from jshard.plans.mesh import EXPERT, TENSOR, AnyMesh, splitting_axes
from jshard.plans.model_axes import axes_in
from jshard.plans.numeric import is_numeric
from jshard.plans.placement import PARAMS, Placement, PlacementPolicy
from jshard.plans.policies import UnitPolicy, check_setting
from jshard.plans.remat import OFFLOADED
from jshard.plans.replication import others_of
from jshard.plans.units import (
    Node,
    Path,
    PathPattern,
    Unit,
    dotted,
    inside,
    located,
    occurrences,
    plain_class,
    unit_of,
    units_in,
    walk,
)

_LISTED_PATHS = 6


def check_modules(modules: Sequence[object]) -> None:
    """Raises if the objects that should form a unit are not nnx modules."""
    wrong = dict.fromkeys(type(m).__name__ for m in modules if not isinstance(m, nnx.Module))
    if wrong or not modules:
        raise AnnotationError(
            "fully_shard needs an nnx module, a list of them, or one Linen module.",
            where=f"fully_shard({', '.join(wrong) or '[]'})",
            why="only an nnx.Module holds parameters and is called.",
            do="js.fully_shard(model.blocks[0], mesh=mesh)",
        )


def check_placement(placement: PlacementPolicy | None) -> PlacementPolicy:
    """Returns the placement; the default one for None. Raises for any other type."""
    is_valid = placement is None or isinstance(placement, PlacementPolicy)
    line = "js.fully_shard(block, mesh=mesh, placement=js.PlacementPolicy(shard_dim=0))"
    check_setting(is_valid, f"fully_shard(placement={placement!r})", "a js.PlacementPolicy", line)
    return placement or PlacementPolicy()


# Axes that the model names: they must be named before the annotation.


def check_not_placed(module: nnx.Module, where: str) -> None:
    """Raises if the parameters of a module are placed, so that axes named now would have no effect.

    Units inside do not matter while the module around them is not annotated: its annotation plans them again.
    """
    units = _outermost_units(module)
    # The empty path is the module itself.
    is_unit = () in units
    # `nested` is set by the annotation of the module around them, whose plan places their parameters.
    has_planned_unit = any(unit.nested for unit in units.values())
    if is_unit or has_planned_unit or _has_placed_parameter(module, outside=units):
        raise _named_too_late([where])


def _outermost_units(module: nnx.Module) -> dict[Path, Unit]:
    """Returns the records of the units in a module that are in no other unit of it."""
    outermost: dict[Path, Unit] = {}
    for path, unit in units_in(module).items():  # outer ones come before those inside
        if not _is_inside_any(path, outermost):
            outermost[path] = unit
    return outermost


def _has_placed_parameter(module: nnx.Module, *, outside: Iterable[Path]) -> bool:
    """Returns whether a parameter that is not in one of the units has a place on a mesh."""
    for path, node in walk(module):
        is_placed = isinstance(node, nnx.Param) and _compat.home_of(node) is not None
        if is_placed and not _is_inside_any(path, outside):
            return True
    return False


def _is_inside_any(path: Path, outer_paths: Iterable[Path]) -> bool:
    return any(inside(outer, path) is not None for outer in outer_paths)


def check_axes_are_placed(
    module: nnx.Module, params: Iterable[tuple[Path, nnx.Param, Placement]], mesh: AnyMesh
) -> None:
    """Raises if a parameter names an axis of the mesh that its placement lacks: it was named after the annotation."""
    model_axes = set(splitting_axes((TENSOR, EXPERT), dict(mesh.shape)))
    if not model_axes:
        return
    late: dict[Path, nnx.Param] = {}
    for path, variable, placement in params:
        named_axes = axes_in(variable.get_metadata("out_sharding", None) or ())
        missing_axes = model_axes.difference(axes_in(placement.spec))
        if not missing_axes.isdisjoint(named_axes):
            late[path] = variable
    if not late:
        return
    # A rule for a name that is also an axis's sends it elsewhere, or nowhere: then the axis is missing by request.
    ruled_names: set[str] = set()
    for unit in units_in(module).values():  # each has its own rules
        ruled_names.update(dict(unit.placement.axis_rules))
    if model_axes <= ruled_names:
        return
    kind = plain_class(module).__name__
    places = []
    for path, variable in late.items():
        places.append(f"{kind}: {dotted(path)}  out_sharding={variable.out_sharding}")
    raise _named_too_late(places)


def _named_too_late(where: list[str]) -> AnnotationError:
    """Returns the error for axes that are named when the parameters are placed already."""
    return AnnotationError(
        "Axes of parameters were named after the annotation.",
        where=where,
        why="js.fully_shard places the parameters by the axes named before it; later names have no effect.",
        do='js.parallel.split(model, {"*/up/kernel": (None, "tensor")})  # on a fresh model\n'
        "js.fully_shard(model, mesh=mesh)  # then",
    )


# The variables of a model.


def check_variables(module: Node) -> None:
    """Raises for variables of a model that hold other objects than arrays and numbers."""
    kind = plain_class(module).__name__
    wrong = []
    for path, leaf in _variable_leaves(module):
        if not is_numeric(leaf):
            wrong.append(f"{kind}: {dotted(path)}  {type(leaf).__name__}")
    if wrong:
        raise AnnotationError(
            "A variable of the model holds an object that is not an array.",
            where=wrong,
            why="the calls of an annotated model are traced, and take arrays, numbers and trees of these.",
            do='self.name = "abc"  # a plain attribute, in place of nnx.Variable("abc")',
        )


def _variable_leaves(module: object) -> Iterator[tuple[Path, object]]:
    """Yields each object in the variables of a model, with the path of its variable."""
    for path, node in walk(module):
        if isinstance(node, nnx.Variable):
            for leaf in jax.tree.leaves(node.get_raw_value()):
                yield path, leaf


def check_has_parameters(modules: list[nnx.Module]) -> None:
    """Raises if nothing would be sharded, though there are float arrays: they are not in an `nnx.Param`."""
    other_arrays = []
    for module in modules:
        has_parameter = next(occurrences(module), None) is not None
        if has_parameter:
            return
        kind = plain_class(module).__name__
        for array in others_of(module):
            other_arrays.append(f"{kind}: {array}")
    if other_arrays:  # a module without any float array, such as a dropout, may be a unit
        do = "self.kernel = nnx.Param(kernel)  # instead of a plain array or nnx.Variable(kernel)"
        raise nothing_to_shard(other_arrays, needed="an nnx.Param", do=do)


def nothing_to_shard(where: list[str], *, needed: str, do: str) -> AnnotationError:
    """Returns the error for a model with no float array in the needed type."""
    return AnnotationError(
        "The model has no parameters to shard.",
        where=where,
        why=f"none of its {len(where)} float array(s) is in {needed}: every device would hold each one whole, and no"
        " optimizer would train it.",
        do=do,
    )


# The settings of a unit, and the module that becomes one.


def check_unit(unit: Unit) -> None:
    """Raises for incompatible settings, or settings that need a memory that the mesh's devices lack."""
    placement = unit.placement
    check_offload(placement.offload, unit.mesh, activations=unit.policy.remat == OFFLOADED)
    if placement.gathered:
        return
    settings = [f"{name}=..." for name in _changed_settings(unit.policy)]
    if placement.offload == PARAMS:
        settings.append(f"offload={PARAMS!r}")
    if settings:
        raise AnnotationError(
            "These settings do not apply to a unit that is never gathered.",
            where=f"gathered=False with {', '.join(settings)}",
            why="its call runs as written, in global view: jshard gathers, keeps, casts, reduces and splits"
            " nothing. It accepts shard_dim, stacked, ignored, allow_replicated, min_size and"
            " offload='optimizer'.",
            do="js.fully_shard(model.tables, mesh=mesh, placement=js.PlacementPolicy(gathered=False, shard_dim=0))",
        )


def _changed_settings(policy: UnitPolicy) -> list[str]:
    """Returns the names of the settings that differ from the defaults; `group` is not a setting of the user."""
    default = UnitPolicy(group=policy.group)
    changed = []
    for field in dataclasses.fields(policy):
        if getattr(policy, field.name) != getattr(default, field.name):
            changed.append(field.name)
    return changed


def check_new_unit(module: nnx.Module, unit: Unit) -> None:
    """Raises for a module that cannot become this unit, because of the module or of the units inside."""
    name = plain_class(module).__name__
    if unit_of(module) is not None:
        raise AnnotationError(
            "A module is annotated twice.",
            where=name,
            why="it is already a unit: by an earlier fully_shard, or because it is used in two places.",
            do="call js.fully_shard once per module; to change the settings, annotate a fresh model.",
        )
    inner_units = units_in(module)
    other_meshes = [path for path, inner in inner_units.items() if inner.mesh != unit.mesh]
    if other_meshes:
        raise AnnotationError(
            "Units of one model are on different meshes.",
            where=located(name, other_meshes),
            why=f"the enclosing module is on {dict(unit.mesh.shape)}, or on other devices.",
            do="mesh = js.mesh(fsdp=-1)  # one mesh for every js.fully_shard",
        )
    # Static: what the class has, and not what a descriptor answers.
    call = inspect.getattr_static(plain_class(module), "__call__", None)
    if call is not None and not inspect.isfunction(call):
        raise AnnotationError(
            "The call of a module is wrapped, so it cannot become a sharded region.",
            where=f"{name}.__call__",
            why=f"it is a {type(call).__name__}, not a plain method.",
            do="remove the decorator, and put @nnx.jit on the training step.",
        )
    if inner_units and not unit.placement.gathered:  # they could not gather: no region is opened
        raise AnnotationError(
            "A unit that is never gathered has units inside.",
            where=located(name, inner_units),
            why="its whole call runs as written, including theirs.",
            do="annotate only the part that must not be gathered: js.fully_shard(model.tables, mesh=mesh,"
            " placement=js.PlacementPolicy(gathered=False));"
            "\nthen the root: js.fully_shard(model, mesh=mesh)",
        )


# Choices of units and of parameters.


def no_unit_chosen(kind: str, units: str, kinds: Mapping[str, str], pattern: str) -> AnnotationError:
    """Returns the error for a choice of units that matches no submodule.

    Args:
        kind: class of the module.
        units: the choice, as text.
        kinds: classes of the submodules, each with the path of one.
        pattern: an example of a choice by path.
    """
    submodules = [f"{name} ({path})" for name, path in kinds.items()]
    return AnnotationError(
        "No submodule matches the choice of units.",
        where=f"fully_shard({kind}, units={units})",
        why=f"the submodules are {', '.join(submodules) or 'none'}.",
        do=f'name a class, js.fully_shard(model, units=Block, mesh=mesh), or a path, units="{pattern}".',
    )


def check_patterns_used(choice: Filter, paths: set[str], setting: str = "ignored") -> None:
    """Raises for a pattern in `ignored`, or another setting, that matches none of the paths."""
    # `as_filter` makes a tuple of a list of choices.
    filters = choice if isinstance(choice, tuple) else (choice,)
    unused = []
    for part in filters:
        if isinstance(part, PathPattern) and not fnmatch.filter(paths, part.pattern):
            unused.append(part.pattern)
    if unused:
        from_unit = " or from a unit in it" if setting == "ignored" else ""
        ellipsis = ", ..." if len(paths) > _LISTED_PATHS else ""
        raise AnnotationError(
            f"A pattern in {setting} matches no parameter.",
            where=[f"{setting}={pattern!r}" for pattern in unused],
            why=f"the parameters are {', '.join(sorted(paths)[:_LISTED_PATHS])}{ellipsis}.",
            do=f'use a path from the module{from_unit}, e.g. {setting}="*/bias".',
        )
