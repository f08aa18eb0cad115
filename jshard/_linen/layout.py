"""Where the parameters of a Linen model lie, and which unit gathers each: from its shapes and from what a trace showed.

A Linen module is made before its parameters are. So it is annotated first, and its layout is made when `init` or
`apply` is traced: then the parameters are known, and which submodules are called.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from jshard._errors import AnnotationError
from jshard._linen.trained import Trained
from jshard._linen.ungathered import check_ungathered, modules_around
from jshard._nnx import NESTED, OUTER, OWN, Member, Path, Unit, dotted
from jshard._placement import Placement, place
from jshard._plan import LeafPlan, ShardPlan, made_unit_plan
from jshard._replicated import is_named


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter before it is placed; `spec` holds the mesh axes that its `nn.Partitioned` names."""

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[Any, ...] = ()


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


@dataclasses.dataclass(frozen=True)
class PlacedLeaf:
    """A parameter and its place; `owner` is the path of the unit that gathers it.

    `stack` is the path of the layers that it is one of, where that unit is around their loop; else it is empty.
    """

    path: Path
    owner: Path
    placement: Placement
    stack: Path = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The units and parameters of a Linen model.

    Args:
        kind: class of the model.
        root: the record of its root, with all parameters.
        units: what was seen of the units inside, by path.
        leaves: the parameters by path as text.
        layers: leading dims of layers in the parameters of each unit that a scan runs over.
    """

    kind: str
    root: Unit
    units: dict[Path, SeenUnit]
    leaves: dict[str, PlacedLeaf]
    layers: dict[Path, int]

    @classmethod
    def make(cls, kind: str, root: Unit, seen: Seen, leaves: Mapping[Path, Leaf]) -> "Layout":
        """Places every parameter.

        Raises:
            AnnotationError: a parameter cannot be placed as asked; all bad ones in one message.
        """
        found = _twins(seen, leaves) | seen.units
        units = {path: found[path] for path in sorted(found, key=_in_order)}
        layers = {path: _layers(path, unit, leaves) for path, unit in units.items()}
        placed, errors = {}, []
        for path, leaf in sorted(leaves.items(), key=lambda item: _in_order(item[0])):
            owner = _owner(path, units)
            settings = units[owner].settings if owner else root
            stacked = layers.get(owner, 0)
            stack = () if stacked else _stack(path, leaf, seen)
            try:
                placed[dotted(path)] = PlacedLeaf(path, owner, _placed(path, owner, leaf, settings, stacked), stack)
            except AnnotationError as error:
                errors.append(error)
        if errors:
            first = errors[0]
            raise AnnotationError(first.what, where=[w for e in errors for w in e.where], why=first.why, do=first.do)
        check_ungathered(kind, units, placed.values())
        made = cls(kind, root, units, placed, layers)
        return dataclasses.replace(made, root=made.record((), placed))

    def record(self, path: Path, names: Iterable[str]) -> Unit:
        """The record of the unit at a path, for a call that sees these parameters."""
        settings = self.units[path].settings if path else self.root
        members = []
        for name in names:
            leaf = self.leaves.get(name)
            if leaf is not None:
                inside = leaf.owner[: len(path)] == path
                owner = OWN if leaf.owner == path else NESTED if inside else OUTER
                members.append(Member((name,), leaf.placement, owner))
        name = "" if settings.policy.gathered else dotted(path)
        return dataclasses.replace(settings, members=tuple(members), nested=bool(path), name=name)

    @functools.cached_property
    def around(self) -> frozenset[Path]:
        """Paths of the modules that run in global view, as a unit inside is never gathered."""
        return modules_around(self.units)

    def plan_for(self, wrt: Any) -> ShardPlan:
        """The same for a training in which not all parameters are trained; `wrt` as in `js.value_and_grad`."""
        names = Trained(self, wrt).names
        leaves = tuple(dataclasses.replace(leaf, trained=leaf.path in names) for leaf in self.plan.leaves)
        return dataclasses.replace(self.plan, leaves=leaves)

    @functools.cached_property
    def plan(self) -> ShardPlan:
        """The layout as everything else reads it."""
        units = [((), self.kind, self.root), *((p, u.kind, u.settings) for p, u in self.units.items())]
        return ShardPlan(
            mesh=tuple(zip(self.root.mesh.axis_names, self.root.mesh.axis_sizes, strict=True)),
            units=tuple(made_unit_plan(dotted(p), kind, unit, is_root=not p) for p, kind, unit in units),
            leaves=tuple(
                LeafPlan(name, dotted(leaf.owner), leaf.placement, stack=dotted(leaf.stack) if leaf.stack else "")
                for name, leaf in self.leaves.items()
            ),
        )


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


def _placed(path: Path, owner: Path, leaf: Leaf, settings: Unit, layers: int) -> Placement:
    """The placement of a parameter; patterns are held against its path from the model and from its unit."""
    from_unit = path[len(owner) :]
    leave_out = nnx.filterlib.to_predicate(settings.ignored)
    variable = nnx.Param(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    ignored = any(leave_out(p, variable) for p in (path, from_unit))
    whole = any(is_named(p, settings.allow_replicated) for p in (path, from_unit))
    rule = dataclasses.replace(settings.rule, stacked=layers, pads=not whole)
    return place(dotted(from_unit), leaf.shape, leaf.dtype, leaf.spec, rule, ignored=ignored)


def _owner(path: Path, units: Mapping[Path, SeenUnit]) -> Path:
    """The innermost unit that encloses every use of a parameter; `()` is the root."""
    around = lambda place: sorted((p for p in units if place[: len(p)] == p), key=len)
    chains = [around(path)]
    chains += [around(p) for p, unit in units.items() if any(path[: len(b)] == b for b in unit.borrowed)]
    owner: Path = ()
    for level in zip(*chains, strict=False):
        if any(p != level[0] for p in level):
            break
        owner = level[0]
    return owner


def _stack(path: Path, leaf: Leaf, seen: Seen) -> Path:
    """The path of the outermost loop that takes leading dims of a parameter; empty if none does."""
    loops = sorted((loop for loop, shapes in seen.loops.items() if path in shapes), key=len)
    return next((loop for loop in loops if len(seen.loops[loop][path]) < len(leaf.shape)), ())


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
