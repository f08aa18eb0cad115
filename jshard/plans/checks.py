"""What an annotation may say: each check raises an error that names what is wrong."""

import dataclasses
import fnmatch
import inspect
from collections.abc import Mapping
from typing import Any

from flax import nnx

from jshard.errors import AnnotationError
from jshard.plans.memories import check_offload
from jshard.plans.placement import PARAMS
from jshard.plans.policies import UnitPolicy
from jshard.plans.remat import OFFLOADED
from jshard.plans.replicated import ARRAY, Other, others_of
from jshard.plans.units import PathPattern, Unit, dotted, nested_units, occurrences, plain_class, unit_of
from jshard.plans.units import modules as modules_of


def check_modules(modules: list[Any]) -> None:
    """Raises if what is to be a unit is not made of nnx modules."""
    wrong = dict.fromkeys(type(m).__name__ for m in modules if not isinstance(m, nnx.Module))
    if wrong or not modules:
        raise AnnotationError(
            "fully_shard needs an nnx module, a list of them, or one Linen module.",
            where=f"fully_shard({', '.join(wrong) or '[]'})",
            why="only an nnx.Module holds parameters and is called.",
            do="js.fully_shard(model.blocks[0], mesh=mesh)",
        )


def check_has_parameters(modules: list[nnx.Module]) -> None:
    """Raises if nothing would be sharded, though there are float arrays: they are not in an `nnx.Param`."""
    if any(True for module in modules for _ in occurrences(module)):
        return
    found = [(module, other) for module in modules for other in others_of(module)]
    if not found:
        return
    found.sort(key=lambda item: -item[1].bytes)
    raise nothing_to_shard(
        [f"{plain_class(module).__name__}: {other}" for module, other in found],
        sum(other.bytes for _, other in found),
        needed="an nnx.Param",
        do=_as_parameter(*found[0]),
    )


def _as_parameter(module: nnx.Module, other: Other) -> str:
    """The line that makes a parameter of an array, and the class that it belongs into."""
    around = [m for p, m in modules_of(module) if p == other.path[: len(p)] and not isinstance(m, (nnx.List, nnx.Dict))]
    name = "self." + next((key for key in reversed(other.path) if isinstance(key, str)), "array")
    value = lambda held: held if other.kind == ARRAY else f"{held}[...]"
    one = f"nnx.Param({value(name)})"
    made = f"nnx.List([nnx.Param({value('x')}) for x in {name}])" if isinstance(other.path[-1], int) else one
    return f"{name} = {made}  # in {plain_class(around[-1]).__name__}.__init__"


def nothing_to_shard(where: list[str], held: int, *, needed: str, do: str) -> AnnotationError:
    """The error for a model whose arrays are no parameters."""
    return AnnotationError(
        "The model has no parameters to shard.",
        where=where,
        why=f"none of its {len(where)} float array(s), {held} bytes, is in {needed}: each would be whole on every"
        " device, and no optimizer would train it.",
        do=do,
    )


def check_unit(unit: Unit) -> None:
    """Raises for settings that do not go together, or that the devices of the mesh have no memory for."""
    placement, plain = unit.placement, UnitPolicy(group=unit.policy.group)
    check_offload(placement.offload, unit.mesh, activations=unit.policy.remat == OFFLOADED)
    names = [f.name for f in dataclasses.fields(plain) if getattr(unit.policy, f.name) != getattr(plain, f.name)]
    given = [f"{name}=..." for name in names] + [f"offload={PARAMS!r}"] * (placement.offload == PARAMS)
    if given and not placement.gathered:
        raise AnnotationError(
            "A unit that is never gathered takes no such settings.",
            where=f"gathered=False with {', '.join(given)}",
            why="its call runs as written, in global view: no copy is gathered, kept, cast or reduced, and nothing is"
            " split by jshard. It takes shard_dim, stacked, ignored, allow_replicated, min_size and"
            " offload='optimizer'.",
            do="js.fully_shard(model.tables, mesh=mesh, placement=js.ShardPlacement(gathered=False, shard_dim=0))",
        )


def check_new_unit(module: nnx.Module, unit: Unit) -> None:
    """Raises for a module that cannot become this unit: for what it is, or for the units inside."""
    name, inner = plain_class(module).__name__, list(nested_units(module))
    if unit_of(module) is not None:
        raise AnnotationError(
            "A module is annotated twice.",
            where=name,
            why="it is a unit already, by an earlier fully_shard, or because it is used in two places.",
            do="call js.fully_shard once per module; to change the settings, annotate a fresh model.",
        )
    if others := [path for path, one in inner if unit_of(one).mesh != unit.mesh]:  # type: ignore[union-attr]
        raise AnnotationError(
            "Units of one model are on different meshes.",
            where=[f"{name}: {dotted(path)}" for path in others],
            why=f"the module around them is on {dict(unit.mesh.shape)}, or on other devices.",
            do="make one mesh = js.mesh(fsdp=-1) and pass it to every js.fully_shard.",
        )
    call = inspect.getattr_static(plain_class(module), "__call__", None)
    if call is not None and not inspect.isfunction(call):
        raise AnnotationError(
            "The call of a module is wrapped, so that it cannot become a sharded region.",
            where=f"{name}.__call__",
            why=f"it is a {type(call).__name__}, not a plain method.",
            do="take the decorator off, and put @nnx.jit on the training step.",
        )
    if inner and not unit.placement.gathered:  # no region is opened that they could gather in
        raise AnnotationError(
            "A unit that is never gathered has units inside.",
            where=[f"{name}: {dotted(path)}" for path, _ in inner],
            why="its whole call runs as written, and so would they.",
            do="annotate only what is not to be gathered: js.fully_shard(model.tables, mesh=mesh,"
            " placement=js.ShardPlacement(gathered=False));"
            "\nthen the root: js.fully_shard(model, mesh=mesh)",
        )


def no_unit_chosen(kind: str, units: str, kinds: Mapping[str, str], pattern: str) -> AnnotationError:
    """The error for a choice of units that no submodule matches.

    Args:
        kind: class of the model.
        units: the choice, as text.
        kinds: the classes of its submodules, each with the path of one.
        pattern: one that would match.
    """
    return AnnotationError(
        "No submodule is chosen as a unit.",
        where=f"fully_shard({kind}, units={units})",
        why="none of its submodules matches; there are "
        + (", ".join(f"{k} ({p})" for k, p in kinds.items()) or "none")
        + ".",
        do=f'name a class, js.fully_shard(model, units=Block, mesh=mesh), or a path, units="{pattern}".',
    )


def check_patterns(ignored: Any, modules: list[nnx.Module]) -> None:
    """Raises for a pattern in `ignored` that no parameter of the modules matches."""
    if ignored is not False:
        names = {dotted(p) for m in modules for _, unit in nested_units(m) for _, p, _ in occurrences(unit)}
        check_patterns_used(ignored, names)


def check_patterns_used(choice: Any, paths: set[str], setting: str = "ignored") -> None:
    """Raises for a pattern in `ignored`, or another setting, that none of the paths matches."""
    patterns = [c.pattern for c in (choice if isinstance(choice, tuple) else (choice,)) if isinstance(c, PathPattern)]
    if unused := [p for p in patterns if not any(fnmatch.fnmatch(path, p) for path in paths)]:
        from_unit = " or from a unit in it" if setting == "ignored" else ""
        raise AnnotationError(
            f"A pattern in {setting} matches no parameter.",
            where=[f"{setting}={pattern!r}" for pattern in unused],
            why=f"the parameters are {', '.join(sorted(paths)[:6])}{', ...' if len(paths) > 6 else ''}.",
            do=f'give a path from the module{from_unit}, e.g. {setting}="*/bias".',
        )
