"""The plan: where every parameter is stored and which unit gathers it, from one pure function; `js.plan`."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jshard._parsing import FormError, checked, parse_json
from jshard._text import human_bytes
from jshard.errors import AnnotationError, ShardingError
from jshard.plans.mesh import FSDP, hosts_along
from jshard.plans.placement import Entry, Placement, PlacementPolicy, place, stored_as
from jshard.plans.policies import MixedPrecision
from jshard.plans.units import (
    ORDINARY_STATE,
    Path,
    Unit,
    dotted,
    inside,
    is_named,
    nested_units,
    occurrences,
    plain_class,
    role,
    unit_of,
    units_in,
    walk,
)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter before it is placed."""

    shape: tuple[int, ...]  # logical
    dtype: str
    spec: tuple[Entry, ...] = ()  # the mesh axes named by the model itself, one entry per dim
    aliases: tuple[Path, ...] = ()  # of a tied one
    around: tuple[tuple[Path, ...], ...] = ()  # the units around each of its uses, outermost first
    stack: Path = ()  # path of the layers of a loop that it is stacked with
    num_stacked: int = 0  # the number of leading dims of that stack
    variable: Any = dataclasses.field(default=None, compare=False)  # for filters, which may use its class


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One parameter of the model."""

    path: str  # from the root, `blocks/0/attn/kernel`
    unit: str  # name of the unit that gathers it
    placement: Placement
    aliases: tuple[str, ...] = ()  # other paths of it, if it is tied
    trained: bool = True  # whether it has a gradient; a frozen one is only gathered
    stack: str = ""  # path of the layers of a loop that it is stacked with, where no unit is inside the loop
    keys: tuple[Path, ...] = ()  # the path and the aliases as keys
    owner: Path | None = ()  # path of the module that gathers it; None in the plan of a unit inside it
    sharers: tuple[Path, ...] = ()  # modules of its unit, given in one list, between which it is tied

    @property
    def role(self) -> str:
        """Which unit gathers it, relative to the unit of this plan: `own`, `nested` or `outer`."""
        return role(self.owner)

    @property
    def by_layer(self) -> bool:
        """Whether the root gathers it in a loop, each layer when it is used: in forward, and again in backward."""
        return bool(self.stack) and self.owner == () and self.placement.layers > 1


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """Parameters that are gathered together."""

    name: str  # path of the unit's module; several joined by `+` if they were given in a list
    kind: str  # class of the module
    reshard_after_forward: bool | int  # gathered again before backward; or kept, in that many pieces
    remat: str
    mixed_precision: str  # the requested dtypes
    prefetch: str = "1"  # a number of units ahead, a budget in bytes, or chosen by the compiler
    gathered: bool = True  # False: its parameters are sharded, and never gathered


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """Where every parameter is stored: pure data, derived from the model's shapes, for models of any size.

    Args:
        mesh: degree of every mesh axis, outermost first.
        units: the units in tree order, root first.
        leaves: the parameters in tree order.
    """

    mesh: tuple[tuple[str, int], ...]
    units: tuple[UnitPlan, ...]
    leaves: tuple[LeafPlan, ...]

    def __repr__(self) -> str:
        counts = f"{len(self.units)} units, {len(self.leaves)} arrays, {self.num_parameters:,} parameters"
        held = f"{human_bytes(self.bytes_per_device)} on each device"
        return f"<ShardPlan of {counts}, {held}; js.explain(...) prints it>"

    @functools.cached_property
    def _by_path(self) -> dict[str, LeafPlan]:
        return {p: leaf for leaf in self.leaves for p in (leaf.path, *leaf.aliases)}

    def leaf(self, path: str) -> LeafPlan:
        """The parameter at a path, or at one of its aliases."""
        return self._by_path[path]

    def unit_leaves(self, name: str) -> tuple[LeafPlan, ...]:
        """The parameters that a unit gathers."""
        return tuple(leaf for leaf in self.leaves if leaf.unit == name)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(leaf.placement.size for leaf in self.leaves)

    @property
    def num_frozen(self) -> int:
        """Elements of parameters that are not trained."""
        return sum(leaf.placement.size for leaf in self.leaves if not leaf.trained)

    @property
    def logical_bytes(self) -> int:
        """Bytes of all parameters in their stored dtypes, each counted once."""
        return sum(leaf.placement.logical_bytes for leaf in self.leaves)

    @functools.cached_property
    def gathered_part(self) -> "ShardPlan":
        """The plan without parameters that are never gathered; the plan itself if none is ever gathered."""
        leaves = tuple(leaf for leaf in self.leaves if leaf.placement.gathered)
        return dataclasses.replace(self, leaves=leaves) if leaves else self

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the stored parameters on one device."""
        return sum(leaf.placement.bytes_per_device for leaf in self.leaves)

    @property
    def unscheduled_stacks(self) -> dict[tuple[str, str], int]:
        """Layers of a loop that no unit gathers ahead: path and unit, with the bytes of the gathered copy of all."""
        found: dict[tuple[str, str], int] = {}
        for leaf in self.leaves:
            if leaf.stack and leaf.placement.gathered and leaf.placement.dim is not None:
                key = leaf.stack, leaf.unit
                found[key] = found.get(key, 0) + leaf.placement.gathered_bytes
        return found

    def how_stacked(self, path: str, unit: str) -> str:
        """How a unit gathers layers of a loop that has no unit inside, as text."""
        by_layer = all(leaf.by_layer for leaf in self.leaves if (leaf.stack, leaf.unit) == (path, unit))
        return f"by {unit}, " + ("each layer when it is needed" if by_layer else "all layers at once")

    @property
    def replicated(self) -> tuple[LeafPlan, ...]:
        """Parameters that are whole on every device of the `fsdp` axis."""
        return tuple(leaf for leaf in self.leaves if leaf.placement.dim is None)

    def seen_from(self, path: Path, units: Mapping[Path, Unit]) -> "ShardPlan":
        """The plan of the unit at a path, with parameter paths relative to it; `units` are the records of all."""
        within = {own: unit for key, unit in units.items() if (own := inside(path, key)) is not None}
        names, leaves = _names(within), []
        for leaf in self.leaves:
            keys, owner = _inside(path, leaf.keys), inside(path, leaf.owner)
            sharers = () if owner is None else _inside(path, leaf.sharers)
            if keys and (owner or ()) in names:  # else its unit was removed from the model
                unit, (text, *aliases) = names[sharers[0] if sharers else owner or ()], map(dotted, keys)
                seen = {"path": text, "unit": unit, "aliases": tuple(aliases), "keys": keys, "owner": owner}
                leaves.append(dataclasses.replace(leaf, **seen, sharers=sharers))
        return ShardPlan(self.mesh, _rows(within), tuple(leaves))

    def to_json(self) -> str:
        """The plan as JSON text; `ShardPlan.from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ShardPlan":
        """Reads what `to_json` wrote.

        Raises:
            ShardingError: it is something else.
        """
        data = _parsed(text)
        return cls(
            mesh=tuple((name, size) for name, size in data["mesh"]),
            units=tuple(UnitPlan(**unit) for unit in data["units"]),
            leaves=tuple(
                LeafPlan(**leaf | {"placement": Placement(**leaf["placement"])}) for leaf in _tuples(data["leaves"])
            ),
        )


def make_plan(leaves: Mapping[Path, Leaf], units: Mapping[Path, Unit]) -> ShardPlan:
    """Places every parameter, and finds the unit that gathers it: the innermost one around all of its uses.

    Modules that were given in one list are one unit, so a parameter that is tied between them has its settings. It is
    gathered once, by the module around them.

    The records of the units are by path, the root, `()`, first. One error lists all parameters that cannot be placed.
    """
    names = _names(units)
    found, errors, shared = [], [], []
    for path, leaf in leaves.items():
        keys = (path, *leaf.aliases)
        owner, modules = _owner(leaf.around), _modules(leaf.around, units)
        try:
            placement = _placed(keys, modules, leaf, units)
        except AnnotationError as error:
            errors.append(error)
            continue
        stack = dotted(leaf.stack) if leaf.stack and not units[owner].placement.stacked else ""
        text, *aliases = map(dotted, keys)
        planned = LeafPlan(text, names[modules[0]], placement, tuple(aliases), stack=stack, keys=keys, owner=owner)
        found.append(dataclasses.replace(planned, sharers=modules if len(modules) > 1 else ()))
        never = {unit for chain in leaf.around for unit in chain if not units[unit].placement.gathered}
        shared += [dotted(path)] if never - {*modules} else []
    if errors:
        first = errors[0]
        raise AnnotationError(first.what, where=[w for e in errors for w in e.where], why=first.why, do=first.do)
    if shared:
        raise AnnotationError(
            "A parameter of a unit that is never gathered is also used elsewhere.",
            where=[f"{units[()].kind}: {text}" for text in shared],
            why="it belongs to the unit around all of its uses, which would gather it.",
            do="model.table.attend(x)  # use it in a method of its own module, outside the call of any other unit",
        )
    mesh = units[()].mesh
    return ShardPlan(tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True)), _rows(units), tuple(found))


def resharded(unit: Unit, *, is_root: bool) -> bool | int:
    """The meaning of `reshard_after_forward=None`: True, but False for the root, whose copy backward needs at once."""
    asked = unit.policy.reshard_after_forward
    return (not is_root) if asked is None else asked


def _owner(around: tuple[tuple[Path, ...], ...]) -> Path:
    """The innermost module of a unit that encloses every use of a parameter; `()` is the root."""
    alike = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*around, strict=False))
    return next((level[0] for level in reversed([*alike])), ())


def _modules(around: tuple[tuple[Path, ...], ...], units: Mapping[Path, Unit]) -> tuple[Path, ...]:
    """The modules of the innermost unit that encloses every use of a parameter; `()` is the root.

    They are several only if the unit is a list of modules, and the parameter is tied between them.
    """
    by_use = [{_identity(path, units[path]): path for path in chain} for chain in around]
    for path in reversed(around[0] if around else ()):
        identity = _identity(path, units[path])
        if all(identity in modules for modules in by_use):
            return tuple(dict.fromkeys(modules[identity] for modules in by_use))
    return ((),)


def _identity(path: Path, unit: Unit) -> Path | int:
    """What is equal for modules of one unit: the number of their list, or the path of a module of its own."""
    return path if unit.policy.group is None else unit.policy.group


def _inside(outer: Path, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple(own for path in paths if (own := inside(outer, path)) is not None)


def _placed(keys: tuple[Path, ...], modules: tuple[Path, ...], leaf: Leaf, units: Mapping[Path, Unit]) -> Placement:
    """The placement given by a parameter's unit; patterns are matched against its paths from there and from the root.

    `modules` are those of the unit. Of a tied parameter, each path counts.
    """
    owner, unit = modules[0], units[modules[0]]
    from_unit = [path for module in modules for path in _inside(module, keys)]
    names, names_from_root = list(map(dotted, from_unit)), map(dotted, keys)
    kept_names = filter(unit.policy.mixed_precision.keeps, names)
    asked, from_root = unit.placement, units[()].placement.allow_replicated
    leave_out = nnx.filterlib.to_predicate(asked.ignored)
    variable = nnx.Param(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)) if leaf.variable is None else leaf.variable
    if leaf.stack and not owner and not asked.stacked and asked.shard_dim is None:  # gathered a layer at a time
        asked = dataclasses.replace(asked, stacked=leaf.num_stacked)
    return place(
        next(kept_names, names[0]),
        leaf.shape,
        leaf.dtype,
        leaf.spec,
        dict(unit.mesh.shape),
        asked,
        unit.policy.mixed_precision,
        pads=not any(is_named(name, asked.allow_replicated) for name in names)
        and not any(is_named(name, from_root) for name in names_from_root),
        ignored=any(leave_out(path, variable) for path in (*from_unit, *keys)),
        hosts=_hosts_of(unit),
    )


def as_stored(leaf: LeafPlan, dtype: Any, units: Callable[[], Mapping[Path, Unit]]) -> LeafPlan:
    """Returns a parameter with the dtypes that follow from the one that is stored now.

    A model may be cast as a whole or in part after it was annotated. As in plain Flax, it then computes in its new
    dtype, except where a policy sets another. A parameter that an enclosing unit gathers is left as it is: inside,
    it has the dtype that it was gathered in.

    Args:
        leaf: the parameter as it was planned.
        dtype: of the stored array.
        units: returns the records of the units by path, from where the plan of the parameter is seen.
    """
    if leaf.owner is None or jnp.dtype(dtype).name == leaf.placement.dtype:
        return leaf
    unit = units().get(leaf.owner)
    if unit is None:
        return leaf  # its unit was removed from the model
    precision = unit.policy.mixed_precision
    modules = leaf.sharers or (leaf.owner,)
    names = [dotted(path) for module in modules for path in _inside(module, leaf.keys)]
    name = next(filter(precision.keeps, names), names[0])
    placement = stored_as(leaf.placement, dtype, name, precision, hosts=_hosts_of(unit))
    return dataclasses.replace(leaf, placement=placement)


def _hosts_of(unit: Unit) -> int:
    """Returns the number of hosts along `fsdp` that the sum of a gradient distinguishes."""
    return hosts_along(unit.mesh, FSDP) if unit.policy.mixed_precision.wire else 1


def _names(units: Mapping[Path, Unit]) -> dict[Path, str]:
    """Name of every unit: its path, or the paths of its list joined."""
    groups: dict[Any, list[Path]] = {}
    for path, unit in units.items():
        groups.setdefault(_identity(path, unit), []).append(path)
    return {path: "+".join(map(dotted, paths)) for paths in groups.values() for path in paths}


def _rows(units: Mapping[Path, Unit]) -> tuple[UnitPlan, ...]:
    """The units of a plan; units given in one list are represented by the first."""
    first = {name: path for path, name in reversed(_names(units).items())}
    return tuple(_row(path, name, units[path]) for name, path in reversed(first.items()))


def _row(path: Path, name: str, unit: Unit) -> UnitPlan:
    policy, precision = unit.policy, unit.policy.mixed_precision
    keep = f", keep={' '.join(precision.keep)}" if precision.keep else ""
    return UnitPlan(
        name=name,
        kind=unit.kind,
        reshard_after_forward=resharded(unit, is_root=not path),
        remat=policy.remat if isinstance(policy.remat, str) else getattr(policy.remat, "__name__", repr(policy.remat)),
        mixed_precision=f"param={precision.param}, reduce={precision.reduce}, output={precision.output}{keep}",
        prefetch="compiler" if policy.prefetch is None else str(policy.prefetch),
        gathered=unit.placement.gathered,
    )


def _parsed(text: str) -> Any:
    try:
        data = parse_json(text)
        checked(data, ShardPlan)
    except FormError as error:
        raise ShardingError(
            "The text is not a plan.",
            where="ShardPlan.from_json",
            why=f"{error}.",
            do="ShardPlan.from_json(plan.to_json())",
        ) from error
    return data


def _tuples(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _tuples(value) for key, value in data.items()}
    return tuple(map(_tuples, data)) if isinstance(data, list) else data


def plan(model: Any, *, wrt: Any = nnx.Param) -> ShardPlan:
    """Where every parameter of an annotated model is; the model may be concrete or abstract.

    Args:
        model: the root module, after `fully_shard`; `nnx.eval_shape(...)` gives an abstract one of any size. For a
            Linen module, the plan is that of the parameters last seen by `init` or `apply`.
        wrt: the parameters that are trained, as `js.value_and_grad` takes them; the others are frozen. Trained
            variables of a class that is no `nnx.Param` are in the plan, too: replicated.

    Raises:
        AnnotationError: the root is not annotated, parameters were added after the annotation, or those of a Linen
            module are not known yet.

    Example:
        >>> js.plan(model).num_parameters
        8704
    """
    of_its_own = getattr(type(model), "_jshard_plan", None)  # for a model whose parameters are stored outside it
    if of_its_own is not None:
        return of_its_own(wrt)
    root = record_of(model)
    assert root.plan is not None, "an annotated model has one"
    is_trained = nnx.filterlib.to_predicate(wrt)
    first_paths: dict[int, Path] = {}
    there: dict[Path, nnx.Param] = {}
    for variable, path, _ in occurrences(model):
        if id(variable) not in first_paths:
            first_paths[id(variable)] = path
            there[path] = variable
    if unplanned := [path for path in there if path not in root.by_path]:
        raise AnnotationError(
            "The model has parameters that were added after its annotation.",
            where=[f"{plain_class(model).__name__}: {dotted(path)}" for path in unplanned],
            why="fully_shard places the parameters that exist when it is called.",
            do="change the model first, then annotate it: js.fully_shard(model, mesh=mesh).",
        )
    leaves = []
    for leaf in root.plan.leaves:
        path = leaf.keys[0]
        variable = there.get(path)
        if variable is None:
            continue  # removed since
        stored = as_stored(leaf, variable.get_raw_value().dtype, lambda: units_in(model))
        leaves.append(dataclasses.replace(stored, trained=is_trained(path, variable)))
    leaves += _trained_others(model, is_trained, root)
    return dataclasses.replace(root.plan, leaves=tuple(leaves))


def _trained_others(model: nnx.Module, is_trained: Callable[[Path, Any], bool], root: Unit) -> Iterator[LeafPlan]:
    """The trained float arrays of variables that are no `nnx.Param`: each device holds them whole."""
    for path, variable in walk(model):
        if not isinstance(variable, nnx.Variable) or isinstance(variable, (nnx.Param, *ORDINARY_STATE)):
            continue
        value = variable.get_raw_value()
        is_float = isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) and jnp.issubdtype(value.dtype, jnp.inexact)
        if is_float and is_trained(path, variable):
            kept = PlacementPolicy()
            whole = place(
                dotted(path), value.shape, value.dtype, (), dict(root.mesh.shape), kept, MixedPrecision(), ignored=True
            )
            because = unsharded_class(type(variable).__name__)
            yield LeafPlan(
                dotted(path), _names({(): root})[()], dataclasses.replace(whole, because=because), keys=(path,)
            )


def unsharded_class(kind: str) -> str:
    """Why the variables of a class are replicated, with the line that would shard them."""
    return f"not an nnx.Param; to shard it: class {kind}(nnx.Param): ..."


def record_of(model: Any) -> Unit:
    """The record of an annotated nnx model; an error for any other object."""
    if (unit := unit_of(model)) is None:
        raise root_forgotten(model)
    return unit


def root_forgotten(model: Any) -> AnnotationError:
    """The error for a model whose root is not a unit, or that is not an nnx model."""
    if not isinstance(model, nnx.Module):
        return AnnotationError(
            "This is not an annotated nnx model.",
            where=type(model).__name__,
            why="fully_shard annotates an nnx module in place; for a Linen one it returns a copy, whose loss takes its"
            " parameters.",
            do="model = js.fully_shard(model, mesh=mesh); Linen: js.value_and_grad(loss_fn, model=model)(params, x)",
        )
    inner = [dotted(p) for p, _ in nested_units(model)]
    listed = f"{len(inner)} units inside ({', '.join(inner[:4])}{' ...' if inner[4:] else ''})"
    return AnnotationError(
        "The root of the model is not annotated.",
        where=f"{type(model).__name__}: {listed if inner else 'no unit inside'}",
        why="parameters outside the inner units belong to the root, and one call into the root is one sharded region.",
        do="js.fully_shard(model, mesh=mesh)  # after its submodules",
    )
