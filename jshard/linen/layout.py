"""Where the parameters of a Linen model are stored, and which unit gathers each."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping

from jax.typing import DTypeLike

from jshard import _compat
from jshard.errors import AnnotationError
from jshard.linen.survey import SeenUnit, Survey
from jshard.plans.array_paths import Keys
from jshard.plans.placement import Placement
from jshard.plans.plan import Leaf, LeafPlan, ShardPlan, as_stored, make_plan
from jshard.plans.policies import UnitPolicy
from jshard.plans.state_places import StatePlaces
from jshard.plans.units import Path, Unit, dotted, inside, with_views

_LARGE_BYTES = 64 * 2**20  # of the gathered copy of all layers of a loop; below that the time is negligible


# By identity: a layout is part of jit's cache key, see `_traced_for` in `jshard.linen.dispatch`.
@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The units of a Linen model: their records by path, the root first, each with its view of the plan."""

    records: dict[Path, Unit]

    @classmethod
    def make(cls, root: Unit, survey: Survey, leaves: Mapping[Path, Leaf]) -> "Layout":
        """Makes the plan for parameters, with the units found by a trace."""
        units = {**_unseen_twins(survey, leaves), **survey.units}
        records = {(): root}
        for path in sorted(units, key=_natural_order):
            record = units[path].record
            placement = dataclasses.replace(record.placement, stacked=_num_stacked(path, units[path], leaves))
            # A unit that is never gathered is called from outside a region: its scope is named by its own record.
            name = "" if placement.gathered else dotted(path)
            records[path] = dataclasses.replace(record, placement=placement, nested=True, name=name)
        # In natural order, which plans show: JAX sorts the keys of a dict as text.
        used_leaves = {}
        for path in sorted(leaves, key=_natural_order):
            used_leaves[path] = _with_uses(path, leaves[path], units, survey)
        layout = cls(with_views(make_plan(used_leaves, records), records))
        _check_global_view(layout)
        return layout

    def with_policies(self, policies: Mapping[Path, UnitPolicy]) -> "Layout":
        """Returns the layout with other settings of the units, by path."""
        records = {path: dataclasses.replace(unit, policy=policies[path]) for path, unit in self.records.items()}
        return Layout(with_views(self.plan, records))

    def with_dtypes(self, dtypes: Mapping[Path, str]) -> "Layout":
        """Returns the layout of the same parameters, stored in other dtypes."""
        leaves = tuple(as_stored(leaf, dtypes[leaf.keys[0]], lambda: self.records) for leaf in self.plan.leaves)
        # Each record has a view of the plan: a new plan needs new views.
        return Layout(with_views(dataclasses.replace(self.plan, leaves=leaves), self.records))

    def placement_of(self, keys: Keys, dtype: DTypeLike) -> Placement | None:
        """Returns the placement of the parameter that a path in a tree ends in, stored in a dtype; None for others."""
        leaf = self.leaves.get(self.places.tail(keys) or ())
        if leaf is None:
            return None
        return as_stored(leaf, dtype, lambda: self.records).placement

    @property
    def root(self) -> Unit:
        """The record of the root."""
        return self.records[()]

    @property
    def plan(self) -> ShardPlan:
        """Where the parameters are."""
        assert self.root.plan is not None, "a layout is made with it"
        return self.root.plan

    @functools.cached_property
    def places(self) -> StatePlaces:
        """The placements of parameters by path, for placing their state."""
        return StatePlaces(self.plan)

    @functools.cached_property
    def leaves(self) -> dict[Path, LeafPlan]:
        """The parameters by path."""
        return {leaf.keys[0]: leaf for leaf in self.plan.leaves}

    @functools.cached_property
    def global_view_paths(self) -> frozenset[Path]:
        """Paths of the modules that run as written, in global view, because a unit inside is never gathered.

        Such a unit computes with its shards where the compiler splits it, so no region can be around it.
        """
        paths: set[Path] = set()
        for path in self.never_gathered:
            paths.update(path[:length] for length in range(len(path)))
        return frozenset(paths)

    @property
    def never_gathered(self) -> list[Path]:
        """Paths of the units that are never gathered, such as embedding tables."""
        return [path for path, unit in self.records.items() if not unit.placement.gathered]


def _check_global_view(layout: Layout) -> None:
    """Raises for units and parameters to be gathered in a module in global view: around a table, or inside one."""
    tables = layout.never_gathered
    wrong = []
    for path in layout.records:
        if path and (path in layout.global_view_paths or _is_within(path, tables)):
            wrong.append(dotted(path))
    for leaf in layout.plan.leaves:
        module_path = leaf.keys[0][:-1]
        if leaf.placement.dim is not None and module_path in layout.global_view_paths:
            wrong.append(f"{leaf.path}  {list(leaf.placement.shape)}")
    if wrong:
        raise AnnotationError(
            "A unit, or a module's own parameters, are around or inside a unit that is never gathered.",
            where=[f"{layout.root.kind}: {text}" for text in wrong],
            why=f"the call of {', '.join(map(dotted, tables))} runs as written, in global view, and so do the calls"
            " around it: the compiler would decide when to gather these.",
            do='name units beside it, units={"tables": {"placement": js.PlacementPolicy(gathered=False)}, Block: {}};'
            " move the parameters into a submodule, or replicate them: placement=js.PlacementPolicy(ignored=...).",
        )


def _is_within(path: Path, outer_paths: Iterable[Path]) -> bool:
    return any(path != outer and inside(outer, path) is not None for outer in outer_paths)


# The uses of a parameter.


def _with_uses(path: Path, leaf: Leaf, units: Mapping[Path, SeenUnit], survey: Survey) -> Leaf:
    """Returns a parameter with the units around its uses: at its place, and in units that borrow its module."""
    # A module in a field or an argument, such as a tied embedding, is used where it was created and in the units that
    # received it. Its parameters must be gathered around all uses.
    # The owner is the innermost unit that is in all of these chains, see `make_plan`.
    chains = [_units_around(path, units)]
    for unit_path, unit in units.items():
        borrows_it = any(inside(module_path, path) is not None for module_path in unit.borrowed)
        if borrows_it:
            chains.append(_units_around(unit_path, units))
    stack, num_stacked = _stack(path, leaf, survey)
    return dataclasses.replace(leaf, around=tuple(chains), stack=stack, num_stacked=num_stacked)


def _units_around(place: Path, units: Iterable[Path]) -> tuple[Path, ...]:
    """Returns the units that contain a path, or have it, outermost first."""
    enclosing = [path for path in units if inside(path, place) is not None]
    return tuple(sorted(enclosing, key=len))


def _stack(path: Path, leaf: Leaf, survey: Survey) -> tuple[Path, int]:
    """Returns the path of the outermost loop that consumes leading dims of a parameter, and how many all loops consume.

    An empty path and 0 if none does, or if the layers are not stacked along the first dims.
    """
    outermost: Path | None = None
    layer_shape = leaf.shape  # inside the innermost loop
    # An outer path is shorter: the first loop that consumes a dim is the outermost.
    for loop in sorted(survey.loops, key=len):
        shape = survey.loops[loop].get(path, leaf.shape)
        if len(shape) < len(layer_shape):
            layer_shape = shape
            outermost = loop if outermost is None else outermost
    num_stacked = len(leaf.shape) - len(layer_shape)
    if outermost is None or leaf.shape[num_stacked:] != tuple(layer_shape):
        return (), 0
    return outermost, num_stacked


def _num_stacked(path: Path, unit: SeenUnit, leaves: Mapping[Path, Leaf]) -> int:
    """Returns how many leading dims the scans inside the model remove before the unit's module runs.

    Raises:
        AnnotationError: it is not the same number for all, or they are not the first dims.
    """
    counts = set()
    are_first = True
    texts = []
    for leaf_path, layer_shape in unit.shapes.items():
        if leaf_path not in leaves:
            continue
        shape = leaves[leaf_path].shape
        count = len(shape) - len(layer_shape)
        counts.add(count)
        are_first = are_first and shape[count:] == tuple(layer_shape)
        texts.append(f"{unit.record.kind} {dotted(path)}: {dotted(leaf_path)}  {shape}, a layer {layer_shape}")
    if len(counts) > 1 or not are_first:
        raise AnnotationError(
            "The layers of a unit are not stacked along the first dim.",
            where=texts[:4],
            why="a scan over them leaves one layer, and the sharded dim is counted from the end.",
            do='nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=depth)',
        )
    return counts.pop() if counts else 0


# Units that a trace did not show.


def _unseen_twins(survey: Survey, leaves: Mapping[Path, Leaf]) -> dict[Path, SeenUnit]:
    """Returns units whose calls a trace did not show, because `nn.jit` reuses the trace of an equal module.

    Such a module was not called, has the same parameters as a unit, and its path differs in numbers only.
    """
    contents = _contents(leaves)
    twins = {}
    for path, unit in survey.units.items():
        for twin_path, content in contents.items():
            is_unseen = twin_path not in survey.called and content == contents.get(path)
            if is_unseen and _without_numbers(twin_path) == _without_numbers(path):
                shapes = {}
                for leaf_path, shape in unit.shapes.items():
                    shapes[*twin_path, *leaf_path[len(path) :]] = shape
                # What a twin borrows is unknown: its own call was not seen.
                twins[twin_path] = dataclasses.replace(unit, shapes=shapes, borrowed=set())
    return twins


def _contents(leaves: Mapping[Path, Leaf]) -> dict[Path, dict[Path, Leaf]]:
    """Returns the parameters in each module, by the path of the module and the path from there."""
    contents: dict[Path, dict[Path, Leaf]] = {}
    for path, leaf in leaves.items():
        for length in range(1, len(path)):
            contents.setdefault(path[:length], {})[path[length:]] = leaf
    return contents


def _without_numbers(path: Path) -> str:
    return re.sub(r"\d+", "*", dotted(path))


def _natural_order(path: Path) -> list[list[str | int]]:
    """Returns a key to sort paths by, with `block_2` before `block_10`."""
    keys = []
    for key in path:
        # Text and digits alternate, and text comes first, if only as "": a number is never compared with a text.
        parts = re.split(r"(\d+)", key)
        keys.append([int(part) if part.isdigit() else part for part in parts])
    return keys


@functools.cache
def warn_of_stacks(kind: str, plan: ShardPlan, units: tuple[str, ...]) -> None:
    """Warns of large stacks, once per model and process; `units` are the choices of units, as text."""
    lines = []
    names = list(units)
    for (path, unit), size in plan.unscheduled_stacks.items():
        if size >= _LARGE_BYTES:
            lines.append(f"\n  {path}  {size} bytes, {plan.how_stacked(path, unit)}")
            names.append(repr(path))
    if lines:
        _compat.warn_user(
            f"{len(lines)} stack(s) of layers of {kind} are not gathered ahead of their use: no unit is inside"
            f" their loop:{''.join(lines)}\n  js.fully_shard(model, mesh=mesh, units=[{', '.join(names)}])",
        )
