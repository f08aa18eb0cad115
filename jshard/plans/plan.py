"""The plan: where every parameter is stored and which unit gathers it, from one pure function; `js.plan`."""

import collections
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.typing import DTypeLike

from jshard._parsing import FormError, checked, parse_json
from jshard._text import human_bytes
from jshard.errors import AnnotationError, ShardingError
from jshard.plans.mesh import FSDP, hosts_along, sums_on_arrival
from jshard.plans.model_axes import Entry
from jshard.plans.placement import Placement, PlacementPolicy, place, stored_as
from jshard.plans.policies import COMPILER, MixedPrecision
from jshard.plans.remat import AUTO, NONE
from jshard.plans.staged_loops import NO_STAGES, TracedStages
from jshard.plans.units import (
    ORDINARY_STATE,
    Path,
    Unit,
    dotted,
    inside,
    is_named,
    located,
    nested_units,
    occurrences,
    plain_class,
    role,
    unit_of,
    units_in,
    walk,
)

_LISTED_UNITS = 4


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
    remat_because: str = ""  # why the policy was chosen, if a traced call has chosen it for remat="auto"


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """Where every parameter is stored: pure data, derived from the model's shapes, for models of any size.

    Args:
        mesh: degree of every mesh axis, outermost first.
        units: the units in tree order, root first.
        leaves: the parameters in tree order.
        stages: what the last traced calls did on pipeline stages; nothing before them, or without such stages.
    """

    mesh: tuple[tuple[str, int], ...]
    units: tuple[UnitPlan, ...]
    leaves: tuple[LeafPlan, ...]
    stages: TracedStages = NO_STAGES

    def __repr__(self) -> str:
        counts = f"{len(self.units)} units, {len(self.leaves)} arrays, {self.num_parameters:,} parameters"
        return (
            f"<ShardPlan of {counts}, {human_bytes(self.bytes_per_device)} on each device; js.explain(...) prints it>"
        )

    @functools.cached_property
    def _by_path(self) -> dict[str, LeafPlan]:
        leaves = {}
        for leaf in self.leaves:
            for path in (leaf.path, *leaf.aliases):
                leaves[path] = leaf
        return leaves

    def leaf(self, path: str) -> LeafPlan:
        """Returns the parameter at a path, or at one of its aliases."""
        return self._by_path[path]

    def leaves_at(self, paths: Iterable[str]) -> list[LeafPlan]:
        """Returns the parameters at some paths; those at which there is none are left out."""
        return [self._by_path[path] for path in paths if path in self._by_path]

    def unit_leaves(self, name: str) -> tuple[LeafPlan, ...]:
        """Returns the parameters that a unit gathers."""
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
        if not leaves:
            return self
        return dataclasses.replace(self, leaves=leaves)

    @property
    def replaces_reduce_scatters(self) -> bool:
        """Whether there are gradients that are summed on arrival because the platform is faster so."""
        return any(leaf.placement.replaces_reduce_scatter for leaf in self.leaves)

    def with_reduce_scatters(self) -> "ShardPlan":
        """Returns the plan with the reduce-scatters that it has on other platforms."""
        return self._with_placements(Placement.with_reduce_scatter)

    def of_sums(self) -> "ShardPlan":
        """Returns the plan for gradients that are sums of several: no wire that the platform chose rounds them."""
        return self._with_placements(lambda placement: placement.sending_parts_of(placement.reduce_dtype))

    def _with_placements(self, change: Callable[[Placement], Placement]) -> "ShardPlan":
        leaves = [dataclasses.replace(leaf, placement=change(leaf.placement)) for leaf in self.leaves]
        return dataclasses.replace(self, leaves=tuple(leaves))

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the stored parameters on one device."""
        return sum(leaf.placement.bytes_per_device for leaf in self.leaves)

    @property
    def unscheduled_stacks(self) -> dict[tuple[str, str], int]:
        """Layers of a loop that no unit gathers ahead: path and unit, with the bytes of the gathered copy of all."""
        gathered_bytes: collections.Counter[tuple[str, str]] = collections.Counter()
        for leaf in self.leaves:
            # One with no sharded dim is whole on each device already: nothing is gathered.
            if leaf.stack and leaf.placement.gathered and leaf.placement.dim is not None:
                gathered_bytes[leaf.stack, leaf.unit] += leaf.placement.gathered_bytes
        return dict(gathered_bytes)

    def how_stacked(self, path: str, unit: str) -> str:
        """Returns how a unit gathers layers of a loop that has no unit inside, as text."""
        by_layer = all(leaf.by_layer for leaf in self.unit_leaves(unit) if leaf.stack == path)
        return f"by {unit}, " + ("each layer when it is needed" if by_layer else "all layers at once")

    @property
    def replicated(self) -> tuple[LeafPlan, ...]:
        """Parameters that are whole on every device of the `fsdp` axis."""
        return tuple(leaf for leaf in self.leaves if leaf.placement.dim is None)

    def seen_from(self, path: Path, units: Mapping[Path, Unit]) -> "ShardPlan":
        """Returns the part of the plan below `path`, with paths relative to it.

        Args:
            path: of a unit.
            units: the records of all units of the model.
        """
        units_below = _units_below(path, units)
        names = _names(units_below)
        leaves = []
        for leaf in self.leaves:
            keys = _inside(path, leaf.keys)
            owner = inside(path, leaf.owner)
            if not keys or (owner or ()) not in names:
                continue  # it is not below, or its unit was removed from the model
            # What an enclosing unit gathers has no owner in this view, and is listed under its root.
            sharers = () if owner is None else _inside(path, leaf.sharers)
            gathered_by = sharers[0] if sharers else owner or ()
            text, *aliases = map(dotted, keys)
            leaves.append(
                dataclasses.replace(
                    leaf,
                    path=text,
                    unit=names[gathered_by],
                    aliases=tuple(aliases),
                    keys=keys,
                    owner=owner,
                    sharers=sharers,
                )
            )
        return ShardPlan(self.mesh, _unit_plans(units_below), tuple(leaves))

    def to_json(self) -> str:
        """Returns the plan as JSON text; `ShardPlan.from_json` reads it back."""
        fields = dataclasses.asdict(self)
        if not self.stages:
            del fields["stages"]
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ShardPlan":
        """Reads what `to_json` wrote.

        Raises:
            ShardingError: it is something else.
        """
        data = _parsed(text)
        leaves = []
        # JSON has lists; with tuples the plan equals the one that was written, and has a hash.
        for fields in _tuples(data["leaves"]):
            placement = Placement(**fields["placement"])
            leaves.append(LeafPlan(**{**fields, "placement": placement}))
        units = [UnitPlan(**fields) for fields in data["units"]]
        stages = NO_STAGES
        if "stages" in data:
            stages = TracedStages.from_dict(_tuples(data["stages"]))
        return cls(mesh=_tuples(data["mesh"]), units=tuple(units), leaves=tuple(leaves), stages=stages)


def make_plan(leaves: Mapping[Path, Leaf], units: Mapping[Path, Unit]) -> ShardPlan:
    """Places every parameter, and finds the unit that gathers it: the innermost one around all of its uses.

    Modules that were given in one list are one unit, so a parameter that is tied between them has its settings. It is
    gathered once, by the module around them.

    The records of the units are by path, the root, `()`, first. One error lists all parameters that cannot be placed.
    """
    names = _names(units)
    planned = []
    first_error: AnnotationError | None = None
    places: list[str] = []
    for path, leaf in leaves.items():
        try:
            planned.append(_planned_leaf(path, leaf, units, names))
        except AnnotationError as error:
            if first_error is None:
                first_error = error
            places += error.where
    if first_error is not None:
        raise AnnotationError(first_error.what, where=places, why=first_error.why, do=first_error.do)
    _check_ungathered_are_not_shared(leaves, units)
    mesh = units[()].mesh
    degrees = tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return ShardPlan(degrees, _unit_plans(units), tuple(planned))


def with_units(plan: ShardPlan, units: Mapping[Path, Unit]) -> ShardPlan:
    """Returns a plan for other settings of its units; where parameters are does not depend on them.

    Args:
        plan: of a model.
        units: the records of its units by path, the root, `()`, first.
    """
    return dataclasses.replace(plan, units=_unit_plans(units))


def _planned_leaf(path: Path, leaf: Leaf, units: Mapping[Path, Unit], names: Mapping[Path, str]) -> LeafPlan:
    """Returns the plan of one parameter; raises if it cannot be placed."""
    owner = _owner(leaf.around)
    modules = _modules_of_unit(leaf.around, units)
    keys = (path, *leaf.aliases)
    is_stack_of_unit = units[owner].placement.stacked > 0  # a unit that is itself a stack of layers
    text, *aliases = map(dotted, keys)
    return LeafPlan(
        path=text,
        unit=names[modules[0]],
        placement=_placed(keys, modules, leaf, units),
        aliases=tuple(aliases),
        stack=dotted(leaf.stack) if leaf.stack and not is_stack_of_unit else "",
        keys=keys,
        owner=owner,
        # For the module around them, which gathers it once for all: each of them would send the whole table again.
        sharers=modules if len(modules) > 1 else (),
    )


def _check_ungathered_are_not_shared(leaves: Mapping[Path, Leaf], units: Mapping[Path, Unit]) -> None:
    """Raises if a unit that is never gathered has a parameter that another unit would gather."""
    shared = []
    for path, leaf in leaves.items():
        units_around = set(itertools.chain.from_iterable(leaf.around))
        outside_of_unit = units_around.difference(_modules_of_unit(leaf.around, units))
        if any(not units[unit_path].placement.gathered for unit_path in outside_of_unit):
            shared.append(path)
    if shared:
        raise AnnotationError(
            "A parameter of a unit that is never gathered is also used elsewhere.",
            where=located(units[()].kind, shared),
            why="it belongs to the unit around all of its uses, which would gather it.",
            do="model.table.attend(x)  # use it in a method of its own module, outside the call of any other unit",
        )


def resharded(unit: Unit, *, is_root: bool) -> bool | int:
    """Returns what `reshard_after_forward` means: None is True, but False for the root.

    Backward needs the copy of the root's parameters at once.
    """
    setting = unit.policy.reshard_after_forward
    return not is_root if setting is None else setting


def _owner(around: tuple[tuple[Path, ...], ...]) -> Path:
    """Returns the innermost module of a unit that encloses every use of a parameter; `()` is the root.

    Args:
        around: for each use the paths of the units around it, outermost first.
    """
    owner: Path = ()
    # Level by level from the root, to the end of the shortest chain.
    for paths_at_level in zip(*around, strict=False):
        if len(set(paths_at_level)) > 1:
            break
        owner = paths_at_level[0]
    return owner


def _modules_of_unit(around: tuple[tuple[Path, ...], ...], units: Mapping[Path, Unit]) -> tuple[Path, ...]:
    """Returns the modules of the innermost unit that encloses every use of a parameter; `()` is the root.

    They are several only if the unit is a list of modules, and the parameter is tied between them.
    """
    if not around:
        return ((),)
    modules_by_use = [_modules_by_unit(chain, units) for chain in around]
    # Innermost first; any chain will do, as the unit must be in all of them.
    for path in reversed(around[0]):
        # By identity and not by path: a table tied between two modules of a list would else go to the root, and lose
        # the dtypes and the placement of the list.
        identity = _identity(path, units[path])
        if all(identity in by_unit for by_unit in modules_by_use):
            modules = [by_unit[identity] for by_unit in modules_by_use]
            return tuple(dict.fromkeys(modules))  # each once, in the order of the uses
    return ((),)


def _modules_by_unit(chain: tuple[Path, ...], units: Mapping[Path, Unit]) -> dict[Path | int, Path]:
    """Returns the modules around one use of a parameter by the identity of their unit."""
    modules = {}
    for path in chain:
        modules[_identity(path, units[path])] = path
    return modules


def _identity(path: Path, unit: Unit) -> Path | int:
    """Returns what is equal for modules of one unit: the number of their list, or the path of a module of its own."""
    return path if unit.policy.group is None else unit.policy.group


def _inside(outer: Path, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Returns the paths that are inside a module, relative to it."""
    relative_paths = []
    for path in paths:
        relative_path = inside(outer, path)
        if relative_path is not None:
            relative_paths.append(relative_path)
    return tuple(relative_paths)


def _paths_from_unit(keys: tuple[Path, ...], modules: tuple[Path, ...]) -> list[Path]:
    """Returns the paths of a parameter relative to the modules of its unit.

    Args:
        keys: its path and its aliases, from the root.
        modules: those of the unit, from the root.
    """
    paths: list[Path] = []
    for module in modules:
        paths += _inside(module, keys)
    return paths


def _units_below(outer: Path, units: Mapping[Path, Unit]) -> dict[Path, Unit]:
    """Returns the units in a module, itself included, by their paths relative to it."""
    below = {}
    for path, unit in units.items():
        relative_path = inside(outer, path)
        if relative_path is not None:
            below[relative_path] = unit
    return below


def _placed(keys: tuple[Path, ...], modules: tuple[Path, ...], leaf: Leaf, units: Mapping[Path, Unit]) -> Placement:
    """Returns the placement given by a parameter's unit.

    Patterns are matched against its paths from the unit and from the root. Of a tied parameter, each path counts.

    Args:
        keys: its paths from the root.
        modules: those of the unit.
        leaf: the parameter.
        units: the records of all units.
    """
    unit = units[modules[0]]
    is_of_root = not modules[0]
    policy = unit.placement
    paths_from_unit = _paths_from_unit(keys, modules)
    allowed_by_unit = _is_any_named(paths_from_unit, policy.allow_replicated)
    allowed_by_root = _is_any_named(keys, units[()].placement.allow_replicated)

    is_ignored = nnx.filterlib.to_predicate(policy.ignored)
    variable = leaf.variable
    if variable is None:
        # Filters are written for variables of NNX; a parameter of Linen has none.
        variable = nnx.Param(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))

    # Then the sharded dim must be one of a layer's own.
    if leaf.stack and is_of_root and not policy.stacked and policy.shard_dim is None:  # gathered a layer at a time
        policy = dataclasses.replace(policy, stacked=leaf.num_stacked)
    return place(
        _name_for_dtypes(paths_from_unit, unit),
        leaf.shape,
        leaf.dtype,
        leaf.spec,
        dict(unit.mesh.shape),
        policy,
        unit.policy.mixed_precision,
        pads=not allowed_by_unit and not allowed_by_root,
        ignored=any(is_ignored(path, variable) for path in (*paths_from_unit, *keys)),
        hosts=_hosts_of(unit),
        on_arrival=sums_on_arrival(unit.mesh),
    )


def _is_any_named(paths: Iterable[Path], patterns: Sequence[str]) -> bool:
    return any(is_named(dotted(path), patterns) for path in paths)


def _name_for_dtypes(paths: Sequence[Path], unit: Unit) -> str:
    """Returns the path whose dtypes a parameter has: of a tied one the path that `keep` matches, if one is."""
    names = list(map(dotted, paths))
    kept_names = filter(unit.policy.mixed_precision.keeps, names)
    return next(kept_names, names[0])


def as_stored(leaf: LeafPlan, dtype: DTypeLike, units: Callable[[], Mapping[Path, Unit]]) -> LeafPlan:
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
    name = _name_for_dtypes(_paths_from_unit(leaf.keys, modules), unit)
    on_arrival = sums_on_arrival(unit.mesh)
    placement = stored_as(leaf.placement, dtype, name, precision, hosts=_hosts_of(unit), on_arrival=on_arrival)
    return dataclasses.replace(leaf, placement=placement)


def _hosts_of(unit: Unit) -> int:
    """Returns the number of hosts along `fsdp` that the sum of a gradient distinguishes."""
    if not unit.policy.mixed_precision.wire_dtype:
        return 1  # a plain reduce-scatter, whose stages XLA chooses
    return hosts_along(unit.mesh, FSDP)


def _names(units: Mapping[Path, Unit]) -> dict[Path, str]:
    """Returns the name of every unit: its path, or the paths of its list joined."""
    paths_of_unit: dict[Path | int, list[Path]] = {}
    for path, unit in units.items():
        paths_of_unit.setdefault(_identity(path, unit), []).append(path)
    names = {}
    for paths in paths_of_unit.values():
        name = "+".join(map(dotted, paths))
        names.update(dict.fromkeys(paths, name))
    return names


def _unit_plans(units: Mapping[Path, Unit]) -> tuple[UnitPlan, ...]:
    """Returns the units of a plan; units given in one list are represented by the first, at the place of the last."""
    first_paths: dict[str, Path] = {}
    for path, name in _names(units).items():
        first_path = first_paths.pop(name, path)  # a dict keeps the order of insertion: this moves it to the end
        first_paths[name] = first_path
    plans = []
    for name, path in first_paths.items():
        plans.append(_unit_plan(path, name, units[path]))
    return tuple(plans)


def _unit_plan(path: Path, name: str, unit: Unit) -> UnitPlan:
    policy = unit.policy
    precision = policy.mixed_precision
    keep = f", keep={' '.join(precision.keep)}" if precision.keep else ""
    remat = policy.remat
    is_root = not path
    if remat == AUTO and is_root:
        remat = NONE  # it would run every unit inside once more
    if not isinstance(remat, str):
        remat = getattr(remat, "__name__", repr(remat))
    return UnitPlan(
        name=name,
        kind=unit.kind,
        reshard_after_forward=resharded(unit, is_root=is_root),
        remat=remat,
        mixed_precision=f"param={precision.param_dtype}, reduce={precision.reduce_dtype},"
        f" output={precision.output_dtype}{keep}",
        prefetch=COMPILER if policy.prefetch is None else str(policy.prefetch),
        gathered=unit.placement.gathered,
    )


def _parsed(text: str) -> Any:
    """Returns the fields of a plan's JSON text; raises ShardingError for any other text."""
    try:
        data = parse_json(text)
        # The types of all fields, before they are passed as arguments.
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
    """Returns parsed JSON with tuples in place of lists, as the records of a plan have them."""
    if isinstance(data, dict):
        return {key: _tuples(value) for key, value in data.items()}
    if isinstance(data, list):
        return tuple(map(_tuples, data))
    return data


def plan(model: Any, *, wrt: Filter = nnx.Param) -> ShardPlan:
    """Returns where every parameter of an annotated model is; the model may be concrete or abstract.

    Args:
        model: the root module, after `fully_shard`; `nnx.eval_shape(...)` gives an abstract one of any size. For a
            Linen module, the plan is that of the parameters last seen by `init` or `apply`.
        wrt: the parameters that are trained, as `js.value_and_grad` takes them; the others are frozen. Trained
            variables of a class that is no `nnx.Param` are in the plan, too: replicated.

    Raises:
        AnnotationError: the root is not annotated, parameters were added after the annotation, or those of a Linen
            module are not known yet.

    Examples:
        >>> js.plan(model).num_parameters
        8704
    """
    of_its_own = getattr(type(model), "_jshard_plan", None)  # for a model whose parameters are stored outside it
    if of_its_own is not None:
        return of_its_own(wrt)
    root = record_of(model)
    assert root.plan is not None, "an annotated model has one"
    is_trained = nnx.filterlib.to_predicate(wrt)
    variables = _parameters_by_first_path(model)
    unplanned = [path for path in variables if path not in root.by_path]
    if unplanned:
        raise AnnotationError(
            "The model has parameters that were added after its annotation.",
            where=located(plain_class(model).__name__, unplanned),
            why="fully_shard places the parameters that exist when it is called.",
            do="change the model first, then annotate it: js.fully_shard(model, mesh=mesh).",
        )
    leaves = []
    for leaf in root.plan.leaves:
        path = leaf.keys[0]
        variable = variables.get(path)
        if variable is None:
            continue  # removed since
        stored = as_stored(leaf, variable.get_raw_value().dtype, lambda: units_in(model))
        leaves.append(dataclasses.replace(stored, trained=is_trained(path, variable)))
    # Each device holds them whole: a plan without them would show too little memory.
    leaves += _trained_others(model, is_trained, root)
    return dataclasses.replace(root.plan, leaves=tuple(leaves))


def _parameters_by_first_path(model: nnx.Module) -> dict[Path, nnx.Param]:
    """Returns the parameters of a model, each once: a tied one by the first of its paths."""
    # By identity: equal parameters of two layers are not one.
    seen: set[int] = set()
    parameters: dict[Path, nnx.Param] = {}
    for variable, path, _ in occurrences(model):
        if id(variable) not in seen:
            seen.add(id(variable))
            parameters[path] = variable
    return parameters


def _trained_others(
    model: nnx.Module, is_trained: Callable[[Path, nnx.Variable], bool], root: Unit
) -> Iterator[LeafPlan]:
    """Yields the trained float arrays of variables that are no `nnx.Param`: each device holds them whole."""
    degrees = dict(root.mesh.shape)
    root_name = _names({(): root})[()]
    for path, variable in walk(model):
        if not isinstance(variable, nnx.Variable) or isinstance(variable, (nnx.Param, *ORDINARY_STATE)):
            continue
        value = variable.get_raw_value()
        is_float = isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) and jnp.issubdtype(value.dtype, jnp.inexact)
        if is_float and is_trained(path, variable):
            # Placed as if the annotation ignored it.
            replicated = place(
                dotted(path), value.shape, value.dtype, (), degrees, PlacementPolicy(), MixedPrecision(), ignored=True
            )
            because = unsharded_class(type(variable).__name__)
            placement = dataclasses.replace(replicated, because=because)
            yield LeafPlan(dotted(path), root_name, placement, keys=(path,))


def unsharded_class(kind: str) -> str:
    """Returns why the variables of a class are replicated, with the line that would shard them."""
    return f"not an nnx.Param; to shard it: class {kind}(nnx.Param): ..."


def record_of(model: object) -> Unit:
    """Returns the record of an annotated nnx model; raises AnnotationError for any other object."""
    unit = unit_of(model)
    if unit is None:
        raise root_forgotten(model)
    return unit


def root_forgotten(model: object) -> AnnotationError:
    """Returns the error for a model whose root is not a unit, or that is not an nnx model."""
    if not isinstance(model, nnx.Module):
        return AnnotationError(
            "This is not an annotated nnx model.",
            where=type(model).__name__,
            why="fully_shard annotates an nnx module in place; for a Linen one it returns a copy, whose loss takes its"
            " parameters.",
            do="model = js.fully_shard(model, mesh=mesh); Linen: js.value_and_grad(loss_fn, model=model)(params, x)",
        )
    inner_units = [dotted(path) for path, _ in nested_units(model)]
    listed = "no unit inside"
    if inner_units:
        ellipsis = " ..." if len(inner_units) > _LISTED_UNITS else ""
        listed = f"{len(inner_units)} units inside ({', '.join(inner_units[:_LISTED_UNITS])}{ellipsis})"
    return AnnotationError(
        "The root of the model is not annotated.",
        where=f"{type(model).__name__}: {listed}",
        why="parameters outside the inner units belong to the root, and one call into the root is one sharded region.",
        do="js.fully_shard(model, mesh=mesh)  # after its submodules",
    )
