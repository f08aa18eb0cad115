"""Where the parameters of a Linen model are stored, which unit gathers each, and which of them are trained."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import optax
from flax import nnx

from jshard.errors import AnnotationError
from jshard.plans.checks import check_patterns_used
from jshard.plans.memories import StatePlaces, key_texts, tail_in
from jshard.plans.plan import Leaf, LeafPlan, ShardPlan, make_plan
from jshard.plans.policies import UnitPolicy
from jshard.plans.units import Member, Path, Unit, as_filter, dotted


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
            placement = dataclasses.replace(unit.settings.placement, stacked=layers[path])
            record = dataclasses.replace(unit.settings, kind=unit.kind, placement=placement)
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
        """Where its parameters are."""
        assert self.root.plan is not None, "a layout is made with it"
        return self.root.plan

    @property
    def records(self) -> dict[Path, Unit]:
        """The records of the units by path, that of the root first."""
        return {(): self.root} | {path: unit.settings for path, unit in self.units.items()}

    @functools.cached_property
    def places(self) -> StatePlaces:
        """Where the parameter at a path is, so that its state is there, too."""
        return StatePlaces(self.plan)

    @functools.cached_property
    def leaves(self) -> dict[str, LeafPlan]:
        """The parameters by path as text."""
        return {leaf.path: leaf for leaf in self.plan.leaves}

    def record(self, path: Path, members: Iterable[Member]) -> Unit:
        """The record of the unit at a path, for a call that sees these parameters."""
        settings = self.records[path]
        name = "" if settings.placement.gathered else dotted(path)
        return dataclasses.replace(settings, plan=None, members=tuple(members), nested=bool(path), name=name)

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


# Units of a Linen model that are never gathered: what is around them runs as written, in global view.


def modules_around(units: Mapping[Path, SeenUnit]) -> frozenset[Path]:
    """Paths of the modules around units that are never gathered; the model's own is `()`."""
    return frozenset(path[:i] for path in _ungathered(units) for i in range(len(path)))


def check_alone(kind: str, units: Mapping[Path, SeenUnit]) -> None:
    """Raises for a unit around one that is never gathered, or inside.

    Args:
        kind: class of the model.
        units: what was seen of the units.
    """
    never = _ungathered(units)
    wrong = [path for path in units if any(path != outer and path[: len(outer)] == outer for outer in never)]
    wrong = sorted(wrong) + sorted(modules_around(units) & units.keys())
    if wrong:
        raise AnnotationError(
            "A unit is around one that is never gathered, or inside.",
            where=[f"{kind}: {dotted(path)}" for path in wrong],
            why=f"the call of {', '.join(map(dotted, sorted(never)))} runs as written, in global view, and so does what"
            " is around it.",
            do='units beside it: js.fully_shard(model, mesh=mesh, units={"tables": {"placement":'
            " js.ShardPlacement(gathered=False)}, Block: {}})",
        )


def check_beside(kind: str, units: Mapping[Path, SeenUnit], leaves: Iterable[LeafPlan]) -> None:
    """Raises for sharded parameters of a module around a unit that is never gathered."""
    around = modules_around(units)
    beside = [leaf for leaf in leaves if leaf.placement.dim is not None and leaf.keys[0][:-1] in around]
    if beside:
        raise AnnotationError(
            "A module around a unit that is never gathered has parameters of its own.",
            where=[f"{kind}: {leaf.path}  {list(leaf.placement.shape)}" for leaf in beside],
            why="its call runs as written, in global view, and the compiler would gather them as it likes.",
            do="put them into a submodule, or leave them whole on every device: js.fully_shard(..., placement="
            f"js.ShardPlacement(ignored={beside[0].path!r})).",
        )


def _ungathered(units: Mapping[Path, SeenUnit]) -> set[Path]:
    return {path for path, unit in units.items() if not unit.settings.placement.gathered}


# Which parameters of a Linen model are trained, in any tree that has them: parameters, gradients, updates.


class Frozen(optax.MaskedNode):
    """The gradient and the update of a parameter that is frozen: none. The parameter stays as it is.

    Maps over trees pass it by, as they do what Optax has masked.
    """

    __slots__ = ()
    __array_ufunc__ = None  # an array of numpy leaves the sum to it, too

    def __radd__(self, parameter: Any) -> Any:
        return parameter


def is_masked(x: Any) -> bool:
    """Whether something stands for an array that is left out, of jshard's or of Optax."""
    return isinstance(x, optax.MaskedNode)


class Trained:
    """The parameters that are trained.

    Args:
        layout: of the model.
        wrt: which, as in `js.value_and_grad`.

    Raises:
        AnnotationError: none is, or a pattern matches none.
    """

    def __init__(self, layout: Layout, wrt: Any) -> None:
        trained = as_filter(wrt)
        self._predicate = nnx.filterlib.to_predicate(trained)
        placed = {leaf.keys[0]: leaf.placement for leaf in layout.plan.leaves}
        self._parameters = {path: self._chosen(path, p.shape, p.dtype) for path, p in placed.items()}
        if wrt is not nnx.Param:
            _check(layout, wrt, trained, self.names)

    @property
    def names(self) -> set[str]:
        """Their paths from the model, as text."""
        return {dotted(path) for path, is_trained in self._parameters.items() if is_trained}

    def mask(self, tree: Any) -> Any:
        """Whether each array in a tree is that of a trained parameter; what is none of the model's has its own path."""

        def one(path: tuple, x: Any) -> bool:
            if is_masked(x):
                return False
            keys = key_texts(path)
            tail = tail_in(self._parameters, keys)
            return self._chosen(keys, x.shape, x.dtype) if tail is None else self._parameters[tail]

        return jax.tree.map_with_path(one, tree, is_leaf=is_masked)

    def part(self, tree: Any) -> Any:
        """A tree with nothing in the places of frozen parameters."""
        return jax.tree.map(lambda keep, x: x if keep else Frozen(), self.mask(tree), tree)

    def split(self, tree: Any) -> tuple[Any, Any]:
        """A tree as two: the trained parameters, and the frozen ones."""
        rest = jax.tree.map(lambda keep, x: Frozen() if keep else x, self.mask(tree), tree)
        return self.part(tree), rest

    def _chosen(self, path: Path, shape: tuple[int, ...], dtype: Any) -> bool:
        return bool(self._predicate(path, nnx.Param(jax.ShapeDtypeStruct(shape, dtype))))


def joined(trained: Any, frozen: Any) -> Any:
    """The tree of which these are the parts."""
    is_frozen = lambda x: isinstance(x, Frozen)
    return jax.tree.map(lambda x, y: y if is_frozen(x) else x, trained, frozen, is_leaf=is_frozen)


def _check(layout: Layout, wrt: Any, trained: Any, names: set[str]) -> None:
    paths = set(layout.leaves)
    check_patterns_used(trained, paths, "wrt")
    if not names:
        raise AnnotationError(
            "No parameter of the Linen model is trained.",
            where=f"{layout.kind}: wrt={wrt!r}",
            why=f"it chooses none of {', '.join(sorted(paths)[:4])}{', ...' if len(paths) > 4 else ''}; they have no"
            " types of their own.",
            do='wrt="*/lora_*", a pattern of paths, or a function: lambda path, x: "lora_a" in path.',
        )
