"""Checks of annotations, and of arrays that would be replicated: errors and warnings that name the cause."""

import dataclasses
import fnmatch
import functools
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard import _compat
from jshard.errors import AnnotationError, CallError
from jshard.plans.memories import check_offload
from jshard.plans.mesh import EXPERT, FSDP, INNER_AXES, TENSOR, AnyMesh, degree, is_numeric
from jshard.plans.padding import padding_of
from jshard.plans.placement import INDIVISIBLE, PADDED_FROM_BYTES, PARAMS, Placement, PlacementPolicy, axes_of
from jshard.plans.policies import OFFLOADED, MixedPrecision, UnitPolicy, check_setting
from jshard.plans.units import (
    ORDINARY_STATE,
    Path,
    PathPattern,
    Unit,
    dotted,
    holds_array,
    is_named,
    nested_units,
    numberless,
    occurrences,
    plain_class,
    unit_of,
    walk,
)

_LARGE_SHARE = 0.01
_LISTED = 10

_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
ARRAY = "array"
"""The kind of an array that is a plain attribute."""


def check_modules(modules: list[Any]) -> None:
    """Raises if the objects that should form a unit are not nnx modules."""
    wrong = dict.fromkeys(type(m).__name__ for m in modules if not isinstance(m, nnx.Module))
    if wrong or not modules:
        raise AnnotationError(
            "fully_shard needs an nnx module, a list of them, or one Linen module.",
            where=f"fully_shard({', '.join(wrong) or '[]'})",
            why="only an nnx.Module holds parameters and is called.",
            do="js.fully_shard(model.blocks[0], mesh=mesh)",
        )


def check_placement(placement: Any) -> PlacementPolicy:
    """The placement; the default one for None. Raises for any other type."""
    good = placement is None or isinstance(placement, PlacementPolicy)
    line = "js.fully_shard(block, mesh=mesh, placement=js.PlacementPolicy(shard_dim=0))"
    check_setting(good, f"fully_shard(placement={placement!r})", "a js.PlacementPolicy", line)
    return placement or PlacementPolicy()


def check_not_placed(module: nnx.Module, where: str) -> None:
    """Raises if the parameters of a module are placed, so that axes named now would have no effect.

    Units inside do not matter while the module around them is not annotated: its annotation plans them again.
    """
    units = dict(nested_units(module))
    outermost = [path for path in units if not any(path[: len(p)] == p and p != path for p in units)]
    is_enclosed = any(record.nested for path in outermost if (record := unit_of(units[path])) is not None)
    has_placed = any(
        isinstance(x, nnx.Param) and _compat.home_of(x) is not None and not any(path[: len(p)] == p for p in outermost)
        for path, x in walk(module)
    )
    if unit_of(module) is not None or is_enclosed or has_placed:
        raise _named_too_late([where])


def check_axes_are_placed(
    module: nnx.Module, params: Iterable[tuple[Path, nnx.Param, Placement]], mesh: AnyMesh
) -> None:
    """Raises if a parameter names an axis of the mesh that its placement lacks: it was named after the annotation."""
    inner = {axis for axis in (TENSOR, EXPERT) if degree(mesh, axis) > 1}
    late: dict[Path, nnx.Param] = {}
    for path, variable, placement in params if inner else ():
        named = {axis for entry in variable.get_metadata("out_sharding", None) or () for axis in axes_of(entry)}
        placed = {axis for entry in placement.spec for axis in axes_of(entry)}
        if named & inner - placed:
            late[path] = variable
    if not late:
        return
    units = [record for _, one in nested_units(module) if (record := unit_of(one)) is not None]
    ruled = {name for record in units for name, _ in record.placement.axis_rules}
    if inner - ruled:
        kind = plain_class(module).__name__
        raise _named_too_late([f"{kind}: {dotted(p)}  out_sharding={v.out_sharding}" for p, v in late.items()])


def _named_too_late(where: list[str]) -> AnnotationError:
    """The error for axes that are named when the parameters are placed already."""
    return AnnotationError(
        "Axes of parameters were named after the annotation.",
        where=where,
        why="js.fully_shard places the parameters by the axes named before it; later names have no effect.",
        do='js.parallel.split(model, {"*/up/kernel": (None, "tensor")})  # on a fresh model\n'
        "js.fully_shard(model, mesh=mesh)  # then",
    )


def check_variables(module: Any) -> None:
    """Raises for variables of a model that hold other objects than arrays and numbers."""
    wrong = [
        f"{plain_class(module).__name__}: {dotted(path)}  {type(leaf).__name__}"
        for path, variable in walk(module)
        if isinstance(variable, nnx.Variable)
        for leaf in jax.tree.leaves(variable.get_raw_value())
        if not is_numeric(leaf)
    ]
    if wrong:
        raise AnnotationError(
            "A variable of the model holds an object that is not an array.",
            where=wrong,
            why="the calls of an annotated model are traced, and take arrays, numbers and trees of these.",
            do='self.name = "abc"  # a plain attribute, in place of nnx.Variable("abc")',
        )


def check_has_parameters(modules: list[nnx.Module]) -> None:
    """Raises if nothing would be sharded, though there are float arrays: they are not in an `nnx.Param`."""
    if any(True for module in modules for _ in occurrences(module)):
        return
    if found := [f"{plain_class(module).__name__}: {other}" for module in modules for other in others_of(module)]:
        do = "self.kernel = nnx.Param(kernel)  # instead of a plain array or nnx.Variable(kernel)"
        raise nothing_to_shard(found, needed="an nnx.Param", do=do)


def nothing_to_shard(where: list[str], *, needed: str, do: str) -> AnnotationError:
    """The error for a model with no float array in the needed type."""
    return AnnotationError(
        "The model has no parameters to shard.",
        where=where,
        why=f"none of its {len(where)} float array(s) is in {needed}: every device would hold each one whole, and no"
        " optimizer would train it.",
        do=do,
    )


def check_unit(unit: Unit) -> None:
    """Raises for incompatible settings, or settings that need a memory that the mesh's devices lack."""
    placement, plain = unit.placement, UnitPolicy(group=unit.policy.group)
    check_offload(placement.offload, unit.mesh, activations=unit.policy.remat == OFFLOADED)
    names = [f.name for f in dataclasses.fields(plain) if getattr(unit.policy, f.name) != getattr(plain, f.name)]
    given = [f"{name}=..." for name in names] + [f"offload={PARAMS!r}"] * (placement.offload == PARAMS)
    if given and not placement.gathered:
        raise AnnotationError(
            "These settings do not apply to a unit that is never gathered.",
            where=f"gathered=False with {', '.join(given)}",
            why="its call runs as written, in global view: jshard gathers, keeps, casts, reduces and splits"
            " nothing. It accepts shard_dim, stacked, ignored, allow_replicated, min_size and"
            " offload='optimizer'.",
            do="js.fully_shard(model.tables, mesh=mesh, placement=js.PlacementPolicy(gathered=False, shard_dim=0))",
        )


def check_new_unit(module: nnx.Module, unit: Unit) -> None:
    """Raises for a module that cannot become this unit, because of the module or of the units inside."""
    name, inner = plain_class(module).__name__, list(nested_units(module))
    if unit_of(module) is not None:
        raise AnnotationError(
            "A module is annotated twice.",
            where=name,
            why="it is already a unit: by an earlier fully_shard, or because it is used in two places.",
            do="call js.fully_shard once per module; to change the settings, annotate a fresh model.",
        )
    if others := [path for path, one in inner if unit_of(one).mesh != unit.mesh]:  # type: ignore[union-attr]
        raise AnnotationError(
            "Units of one model are on different meshes.",
            where=[f"{name}: {dotted(path)}" for path in others],
            why=f"the enclosing module is on {dict(unit.mesh.shape)}, or on other devices.",
            do="mesh = js.mesh(fsdp=-1)  # one mesh for every js.fully_shard",
        )
    call = inspect.getattr_static(plain_class(module), "__call__", None)
    if call is not None and not inspect.isfunction(call):
        raise AnnotationError(
            "The call of a module is wrapped, so it cannot become a sharded region.",
            where=f"{name}.__call__",
            why=f"it is a {type(call).__name__}, not a plain method.",
            do="remove the decorator, and put @nnx.jit on the training step.",
        )
    if inner and not unit.placement.gathered:  # they could not gather: no region is opened
        raise AnnotationError(
            "A unit that is never gathered has units inside.",
            where=[f"{name}: {dotted(path)}" for path, _ in inner],
            why="its whole call runs as written, including theirs.",
            do="annotate only the part that must not be gathered: js.fully_shard(model.tables, mesh=mesh,"
            " placement=js.PlacementPolicy(gathered=False));"
            "\nthen the root: js.fully_shard(model, mesh=mesh)",
        )


def no_unit_chosen(kind: str, units: str, kinds: Mapping[str, str], pattern: str) -> AnnotationError:
    """The error for a choice of units that matches no submodule; `kinds` are their classes."""
    return AnnotationError(
        "No submodule matches the choice of units.",
        where=f"fully_shard({kind}, units={units})",
        why="the submodules are " + (", ".join(f"{k} ({p})" for k, p in kinds.items()) or "none") + ".",
        do=f'name a class, js.fully_shard(model, units=Block, mesh=mesh), or a path, units="{pattern}".',
    )


def check_patterns_used(choice: Any, paths: set[str], setting: str = "ignored") -> None:
    """Raises for a pattern in `ignored`, or another setting, that matches none of the paths."""
    patterns = [c.pattern for c in (choice if isinstance(choice, tuple) else (choice,)) if isinstance(c, PathPattern)]
    if unused := [p for p in patterns if not any(fnmatch.fnmatch(path, p) for path in paths)]:
        from_unit = " or from a unit in it" if setting == "ignored" else ""
        raise AnnotationError(
            f"A pattern in {setting} matches no parameter.",
            where=[f"{setting}={pattern!r}" for pattern in unused],
            why=f"the parameters are {', '.join(sorted(paths)[:6])}{', ...' if len(paths) > 6 else ''}.",
            do=f'use a path from the module{from_unit}, e.g. {setting}="*/bias".',
        )


# Arrays that every device holds whole: parameters that could not be sharded, and arrays that are not parameters.


@dataclasses.dataclass(frozen=True)
class Other:
    """A float array of a model that is not a parameter, and so is not sharded."""

    path: Path
    kind: str  # class of its variable, or `ARRAY`
    form: str  # dtype and dims
    bytes: int

    def __str__(self) -> str:
        return f"{dotted(self.path)}  {self.kind} {self.form}"


def others_of(module: nnx.Module) -> Iterator[Other]:
    """The float arrays of a model that are not parameters, except the state of Flax's own classes.

    Those of a parameter that holds a tree are among them: they are trained, but not sharded.
    """
    for path, x in walk(module):
        if not isinstance(x, (nnx.Variable, *_ARRAYS)) or isinstance(x, ORDINARY_STATE):
            continue
        if isinstance(x, nnx.Param) and holds_array(x):
            continue
        kind = type(x).__name__ if isinstance(x, nnx.Variable) else ARRAY
        yield from others_in(path, x.get_raw_value() if isinstance(x, nnx.Variable) else x, kind)


def others_in(path: Path, x: Any, kind: str) -> Iterator[Other]:
    """The float arrays of a variable that is not a parameter."""
    for leaf in jax.tree.leaves(x):
        if isinstance(leaf, _ARRAYS) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            yield Other(path, kind, f"{leaf.dtype}{list(leaf.shape)}", math.prod(leaf.shape) * leaf.dtype.itemsize)


def check_replicated(root: Unit, name: str, others: Iterable[Other] = ()) -> None:
    """Raises for large parameters with no divisible dim, and warns of small ones; once per model and process.

    Also warns of other arrays that are large compared with the parameters, except those in `allow_replicated`: they
    may be constants. Called when the root is known: by `shard_init`, and by the first call into a model.
    """
    placed = tuple((leaf.path, leaf.placement) for leaf in root.members)
    allowed, precision = root.placement.allow_replicated, root.policy.mixed_precision
    degrees = {axis: degree(root.mesh, axis) for axis in (FSDP, *INNER_AXES)}
    axes = " x ".join(f"{axis}={n}" for axis, n in degrees.items() if axis == FSDP or n > 1)
    _check_once(name, placed, tuple(allowed), precision, axes)
    others = tuple(other for other in others if not is_named(dotted(other.path), allowed))
    held, total = sum(other.bytes for other in others), sum(p.logical_bytes for _, p in placed)
    if held > max(PADDED_FROM_BYTES, _LARGE_SHARE * total):
        _warn_of_others(name, others, held, total)


@functools.cache
def _warn_of_others(name: str, others: tuple[Other, ...], held: int, total: int) -> None:
    listed = "".join(f"\n  {other}" for other in sorted(others, key=lambda other: -other.bytes)[:_LISTED])
    listed += f"\n  ... and {len(others) - _LISTED} more" * (len(others) > _LISTED)
    _compat.warn_user(
        f"{len(others)} float array(s) of {name} are not parameters, and each device holds them whole: {held} bytes,"
        f" with {total} bytes of parameters:{listed}\n  If they are trained, make them parameters: nnx.Param(...). If"
        f" not, accept it: {_accepted(dotted(other.path) for other in others)}",
    )


@functools.cache
def _check_once(
    name: str, placed: tuple[tuple[str, Placement], ...], allowed: tuple, precision: MixedPrecision, axes: str
) -> None:
    _check_kept(name, [path for path, _ in placed], precision)
    odd = {path: p for path, p in placed if p.because.startswith(INDIVISIBLE) and not is_named(path, allowed)}
    held, total = (sum(p.logical_bytes for p in some) for some in (odd.values(), dict(placed).values()))
    large = {path: p for path, p in odd.items() if p.logical_bytes >= max(PADDED_FROM_BYTES, _LARGE_SHARE * total)}
    if large:
        raise AnnotationError(
            f"{len(large)} large parameter(s) of {name} would be replicated.",
            where=[_describe(*one) for one in large.items()],
            why=f"no dim divides by {axes}, every dim is smaller, and each parameter is over {_LARGE_SHARE:.0%} of the"
            f" model's {total} bytes.",
            do=f"accept it: {_accepted(large)},\nor pad it: placement=js.PlacementPolicy(shard_dim=0).",
        )
    if odd:
        listed = [f"\n  {_describe(*one)}" for one in list(odd.items())[:_LISTED]]
        listed += [f"\n  ... and {len(odd) - _LISTED} more"] * (len(odd) > _LISTED)
        _compat.warn_user(
            f"{len(odd)} parameter(s) of {name} are replicated, because no dim divides by {axes}. Each device holds all"
            f" {held} bytes of them, {held / total:.1%} of the model:{''.join(listed)}\n  To accept it:"
            f" {_accepted(odd)}. To pad them: placement=js.PlacementPolicy(shard_dim=0).",
        )


def _accepted(named: Iterable[str]) -> str:
    """The line that accepts replicated arrays: by their paths, or with `*` for the indices of many layers."""
    paths = list(named)
    paths = paths if len(paths) <= _LISTED else list(dict.fromkeys(numberless(path) for path in paths))
    return f"js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy(allow_replicated={paths!r}))"


def _check_kept(name: str, paths: list[str], precision: MixedPrecision) -> None:
    unused = [p for p in precision.keep if not any(map(dataclasses.replace(precision, keep=(p,)).keeps, paths))]
    if unused:
        raise AnnotationError(
            "A pattern in keep matches no parameter.",
            where=f"{name}: MixedPrecision(keep={precision.keep!r})",
            why=f"{', '.join(map(repr, unused))}; paths are {', '.join(paths[:4])}{' ...' if paths[4:] else ''}.",
            do='js.MixedPrecision(param_dtype="bfloat16", keep=("norm/*",))',
        )


def check_has_arrays(name: str, values: Iterable[Any]) -> None:
    """Raises for a call of a model without arrays."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in values):
        raise CallError(
            "The model has no arrays.",
            where=name,
            why="js.abstract_init makes shapes for plans and restores; a call computes with arrays.",
            do="model = js.shard_init(build, annotate)  # or nnx.eval_shape(lambda model: model(x), model)",
        )


def check_stored(name: str, params: Iterable[tuple[Path, nnx.Variable, Placement]]) -> None:
    """Raises for parameters of a replaced layer that have the size of a padded array, and no padding.

    They would be taken for that array, and lose their last rows. One of the planned size is padded where it is used.
    """
    wrong = []
    for path, variable, placement in params:
        shape = variable.get_raw_value().shape
        dim = placement.dim_from_end
        if not placement.padding or padding_of(variable) is not None or dim is None or len(shape) < -dim:
            continue
        if shape[dim] == placement.stored_shape[dim]:
            planned = f"planned {list(placement.shape)} and stored {list(placement.stored_shape)}"
            wrong.append(f"{name}: {dotted(path)}  {list(shape)}, {planned}")
    if wrong:
        raise CallError(
            "A parameter was replaced after the annotation, by one of the size of its padded array.",
            where=wrong,
            why="its plan pads it until its dim divides; the new array would be taken for the padded one.",
            do="model.head = head  # first, and then js.fully_shard(model, mesh=mesh)",
        )


def warn_of_unplanned(paths: list[str], where: str) -> None:
    """Warns of parameters added after the annotation: they are correct, but whole on every device."""
    if paths:
        listed = "".join(f"\n  {path}" for path in paths)
        _compat.warn_user(
            f"{where}: {len(paths)} parameter(s) were added after the annotation and stay replicated:{listed}\n"
            "  Change the model first, then js.fully_shard it.",
        )


def _describe(path: str, placement: Placement) -> str:
    return f"{path}  {placement.dtype}{list(placement.shape)}  {placement.logical_bytes} bytes"
