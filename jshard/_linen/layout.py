"""Where the parameters of a Linen model lie, and which unit gathers each: from its shapes and from what a trace showed.

A Linen module is made before its parameters are. So it is annotated first, and its layout is made when `init` or
`apply` is traced: then the parameters are known, and which submodules are called.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jshard._errors import AnnotationError
from jshard._linen.trained import Trained
from jshard._linen.ungathered import check_alone, check_beside, modules_around
from jshard._nnx import Member, Path, Unit, dotted, inside
from jshard._policies import UnitPolicy
from jshard._shard_plan import Leaf, LeafPlan, ShardPlan, make_plan, role


@dataclasses.dataclass
class SeenUnit:
    """A chosen submodule, as a trace showed it.

    Args:
        kind: class of the module.
        choice: which of the annotation's choices it is.
        settings: the record of that choice.
        shapes: of its parameters, as its innermost call saw them: a scan has taken the dim of layers away.
        borrowed: paths of modules elsewhere that it was given and may use.
    """

    kind: str
    choice: int
    settings: Unit
    shapes: dict[Path, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    borrowed: set[Path] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class Seen:
    """What a trace of a model showed: its units by path, a path of each class of module, and every path called.

    And of the modules that `nn.scan` runs the shapes of their parameters as one layer sees them.
    """

    units: dict[Path, SeenUnit] = dataclasses.field(default_factory=dict)
    loops: dict[Path, dict[Path, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)
    called: set[Path] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The units and parameters of a Linen model.

    Args:
        root: the record of its root, with the plan.
        units: what was seen of the units inside, by path.
        layers: leading dims of layers in the parameters of each unit that a scan runs over.
    """

    root: Unit
    units: dict[Path, SeenUnit]
    layers: dict[Path, int]

    @classmethod
    def make(cls, kind: str, root: Unit, seen: Seen, leaves: Mapping[Path, Leaf]) -> "Layout":
        """Plans for parameters, with the units that a trace showed.

        Raises:
            AnnotationError: a parameter cannot be placed as asked; all bad ones in one message.
        """
        found = _twins(seen, leaves) | seen.units
        units = {path: found[path] for path in sorted(found, key=_in_order)}
        check_alone(kind, units)
        layers = {path: _layers(path, unit, leaves) for path, unit in units.items()}
        for path, unit in units.items():
            rule = dataclasses.replace(unit.settings.rule, stacked=layers[path])
            record = dataclasses.replace(unit.settings, kind=unit.kind, rule=rule)
            units[path] = dataclasses.replace(unit, settings=record)
        made = cls(dataclasses.replace(root, kind=kind), units, layers)
        used = {path: made._used(path, leaves[path], seen) for path in sorted(leaves, key=_in_order)}
        plan = make_plan(used, made.records)
        check_beside(kind, units, plan.leaves)
        return made._with(plan)

    def with_policies(self, policies: Mapping[Path, UnitPolicy]) -> "Layout":
        """The same with other settings of the units, by path."""
        changed = lambda path, unit: dataclasses.replace(unit, policy=policies[path])
        units = {p: dataclasses.replace(unit, settings=changed(p, unit.settings)) for p, unit in self.units.items()}
        made = dataclasses.replace(self, root=changed((), self.root), units=units)
        return made._with(self.plan.seen_from((), made.records))

    @property
    def kind(self) -> str:
        """Class of the model."""
        return self.root.kind

    @property
    def plan(self) -> ShardPlan:
        """Where its parameters lie."""
        assert self.root.plan is not None, "a layout is made with it"
        return self.root.plan

    @property
    def records(self) -> dict[Path, Unit]:
        """The records of the units by path, that of the root first."""
        return {(): self.root} | {path: unit.settings for path, unit in self.units.items()}

    @functools.cached_property
    def leaves(self) -> dict[str, LeafPlan]:
        """The parameters by path as text."""
        return {leaf.path: leaf for leaf in self.plan.leaves}

    def record(self, path: Path, names: Iterable[str]) -> Unit:
        """The record of the unit at a path, for a call that sees these parameters."""
        settings = self.records[path]
        found = (leaf for name in names if (leaf := self.leaves.get(name)) is not None)
        members = tuple(Member((leaf.path,), leaf.placement, role(inside(path, leaf.owner))) for leaf in found)
        name = "" if settings.policy.gathered else dotted(path)
        return dataclasses.replace(settings, plan=None, members=members, nested=bool(path), name=name)

    @functools.cached_property
    def around(self) -> frozenset[Path]:
        """Paths of the modules that run in global view, as a unit inside is never gathered."""
        return modules_around(self.units)

    def plan_for(self, wrt: Any) -> ShardPlan:
        """The plan of a training in which not all parameters are trained; `wrt` as in `js.value_and_grad`."""
        names = Trained(self, wrt).names
        leaves = tuple(dataclasses.replace(leaf, trained=leaf.path in names) for leaf in self.plan.leaves)
        return dataclasses.replace(self.plan, leaves=leaves)

    def _with(self, plan: ShardPlan) -> "Layout":
        return dataclasses.replace(self, root=self.root.with_plan(plan))

    def _used(self, path: Path, leaf: Leaf, seen: Seen) -> Leaf:
        """A parameter with the units around its uses: where it is, and in units that borrow its module."""
        within = lambda place: tuple(sorted((p for p in self.units if place[: len(p)] == p), key=len))
        borrowers = [p for p, unit in self.units.items() if any(path[: len(b)] == b for b in unit.borrowed)]
        around = tuple(map(within, (path, *borrowers)))
        stack, num_stacked = _stack(path, leaf, seen)
        return dataclasses.replace(leaf, around=around, stack=stack, num_stacked=num_stacked)


def _twins(seen: Seen, leaves: Mapping[Path, Leaf]) -> dict[Path, SeenUnit]:
    """Units whose calls a trace did not show, as `nn.jit` reuses that of an equal module beside them."""
    content: dict[Path, dict[Path, Leaf]] = {}
    for path, leaf in leaves.items():
        for i in range(1, len(path)):
            content.setdefault(path[:i], {})[path[i:]] = leaf
    found = {}
    for path, unit in seen.units.items():
        like = re.sub(r"\d+", "*", dotted(path))
        for other, its in content.items():
            if other not in seen.called and its == content.get(path) and re.sub(r"\d+", "*", dotted(other)) == like:
                shapes = {(*other, *p[len(path) :]): shape for p, shape in unit.shapes.items()}
                found[other] = dataclasses.replace(unit, shapes=shapes, borrowed=set())
    return found


def _in_order(path: Path) -> list[list[Any]]:
    """A key to sort paths by, with `block_2` before `block_10`."""
    return [[int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)] for key in path]


def _stack(path: Path, leaf: Leaf, seen: Seen) -> tuple[Path, int]:
    """The path of the outermost loop that takes leading dims of a parameter, and how many all loops take.

    Empty if none does, or if what a layer sees are not its last dims.
    """
    loops = [loop for loop in sorted(seen.loops, key=len) if path in seen.loops[loop]]
    row = min((seen.loops[loop][path] for loop in loops), key=len, default=leaf.shape)
    num = len(leaf.shape) - len(row)
    stacked = [loop for loop in loops if len(seen.loops[loop][path]) < len(leaf.shape)]
    return (stacked[0], num) if stacked and leaf.shape[num:] == tuple(row) else ((), 0)


def _layers(path: Path, unit: SeenUnit, leaves: Mapping[Path, Leaf]) -> int:
    """How many leading dims a scan inside the model takes away before the unit's module runs."""
    found = {p: (leaves[p].shape, shape) for p, shape in unit.shapes.items() if p in leaves}
    counts = {len(whole) - len(seen) for whole, seen in found.values()}
    bad = [p for p, (whole, seen) in found.items() if whole[len(whole) - len(seen) :] != tuple(seen)]
    if len(counts) > 1 or bad:
        raise AnnotationError(
            "The layers of a unit are not stacked along the first dim.",
            where=[f"{unit.kind} {dotted(path)}: {dotted(p)}  {found[p][0]}, a layer {found[p][1]}" for p in found][:4],
            why="a scan over them leaves one layer, and the sharded dim is counted from the end.",
            do='nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=depth)',
        )
    return counts.pop() if counts else 0
