"""Where the parameters of a Linen model are stored, which unit gathers each, and boxes for those that are padded."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, serialization
from flax.core import meta
from numpy.lib.mixins import NDArrayOperatorsMixin

from jshard import _compat
from jshard.errors import AnnotationError
from jshard.plans.array_paths import Keys, key_texts, tail_in
from jshard.plans.checks import check_patterns_used
from jshard.plans.padding import OF_STORAGE, Padding
from jshard.plans.placement import Placement
from jshard.plans.plan import Leaf, LeafPlan, ShardPlan, as_stored, make_plan
from jshard.plans.policies import UnitPolicy
from jshard.plans.state_places import StatePlaces
from jshard.plans.units import Path, Unit, as_filter, dotted, inside, with_views

_LARGE_BYTES = 64 * 2**20  # of the gathered copy of all layers of a loop; below that the time is negligible


@dataclasses.dataclass
class SeenUnit:
    """A chosen submodule, as found by a trace."""

    record: Unit
    choice: int  # index into the annotation's choices
    shapes: dict[Path, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # one layer of its parameters
    borrowed: set[Path] = dataclasses.field(default_factory=set)  # modules from elsewhere that it received and may use


@dataclasses.dataclass(eq=False)
class Seen:
    """Findings of a trace of a model at a path: its units, loops and every module called."""

    annotation: Any
    prefix: Path
    units: dict[Path, SeenUnit] = dataclasses.field(default_factory=dict)
    loops: dict[Path, dict[Path, tuple[int, ...]]] = dataclasses.field(default_factory=dict)  # of one layer of them
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)  # a path of each class of module
    called: set[Path] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The units of a Linen model: their records by path, the root first, each with its view of the plan."""

    records: dict[Path, Unit]

    @classmethod
    def make(cls, root: Unit, seen: Seen, leaves: Mapping[Path, Leaf]) -> "Layout":
        """Makes the plan for parameters, with the units found by a trace."""
        units = _twins(seen, leaves) | seen.units
        records = {(): root}
        for path in sorted(units, key=_in_order):
            record = units[path].record
            placement = dataclasses.replace(record.placement, stacked=_layers(path, units[path], leaves))
            name = "" if placement.gathered else dotted(path)
            records[path] = dataclasses.replace(record, placement=placement, nested=True, name=name)
        used = {path: _used(path, leaves[path], units, seen) for path in sorted(leaves, key=_in_order)}
        made = cls(with_views(make_plan(used, records), records))
        _check_around(made)
        return made

    def with_policies(self, policies: Mapping[Path, UnitPolicy]) -> "Layout":
        """The layout with other settings of the units, by path."""
        records = {path: dataclasses.replace(unit, policy=policies[path]) for path, unit in self.records.items()}
        return Layout(with_views(self.plan, records))

    def with_dtypes(self, dtypes: Mapping[Path, str]) -> "Layout":
        """Returns the layout of the same parameters, stored in other dtypes."""
        leaves = tuple(as_stored(leaf, dtypes[leaf.keys[0]], lambda: self.records) for leaf in self.plan.leaves)
        return Layout(with_views(dataclasses.replace(self.plan, leaves=leaves), self.records))

    def placement_of(self, keys: Keys, dtype: Any) -> Placement | None:
        """Returns the placement of the parameter that a path in a tree ends in, stored in a dtype; None for others."""
        leaf = self.leaves.get(self.places.tail(keys) or ())
        return None if leaf is None else as_stored(leaf, dtype, lambda: self.records).placement

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
    def around(self) -> frozenset[Path]:
        """Paths of the modules that run as written, in global view, because a unit inside is never gathered."""
        never = [path for path, unit in self.records.items() if not unit.placement.gathered]
        return frozenset(path[:i] for path in never for i in range(len(path)))

    def plan_for(self, wrt: Any) -> ShardPlan:
        """The plan of a training in which not all parameters are trained; `wrt` as in `js.value_and_grad`."""
        trained = Trained(self, wrt).parameters
        leaves = tuple(dataclasses.replace(leaf, trained=trained[leaf.keys[0]]) for leaf in self.plan.leaves)
        return dataclasses.replace(self.plan, leaves=leaves)


def _check_around(layout: Layout) -> None:
    """Raises for units and parameters to be gathered in a module in global view: around a table, or inside one."""
    tables = [path for path, unit in layout.records.items() if not unit.placement.gathered]
    is_within = lambda path: any(path != table and inside(table, path) is not None for table in tables)
    wrong = [dotted(path) for path in layout.records if path and (path in layout.around or is_within(path))]
    sharded = (leaf for leaf in layout.plan.leaves if leaf.placement.dim is not None)
    wrong += [f"{x.path}  {list(x.placement.shape)}" for x in sharded if x.keys[0][:-1] in layout.around]
    if wrong:
        raise AnnotationError(
            "A unit, or a module's own parameters, are around or inside a unit that is never gathered.",
            where=[f"{layout.root.kind}: {one}" for one in wrong],
            why=f"the call of {', '.join(map(dotted, tables))} runs as written, in global view, and so do the calls"
            " around it: the compiler would decide when to gather these.",
            do='name units beside it, units={"tables": {"placement": js.PlacementPolicy(gathered=False)}, Block: {}};'
            " move the parameters into a submodule, or replicate them: placement=js.PlacementPolicy(ignored=...).",
        )


def _used(path: Path, leaf: Leaf, units: Mapping[Path, SeenUnit], seen: Seen) -> Leaf:
    """A parameter with the units around its uses: at its place, and in units that borrow its module."""
    within = lambda place: tuple(sorted((p for p in units if place[: len(p)] == p), key=len))
    borrowers = [p for p, unit in units.items() if any(path[: len(b)] == b for b in unit.borrowed)]
    stack, num_stacked = _stack(path, leaf, seen)
    around = tuple(map(within, (path, *borrowers)))
    return dataclasses.replace(leaf, around=around, stack=stack, num_stacked=num_stacked)


def _twins(seen: Seen, leaves: Mapping[Path, Leaf]) -> dict[Path, SeenUnit]:
    """Units whose calls a trace did not show, because `nn.jit` reuses the trace of an equal module."""
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


@functools.cache
def warn_of_stacks(kind: str, plan: ShardPlan, units: tuple[str, ...]) -> None:
    """Warns of large stacks, once per model and process; `units` are the choices of units, as text."""
    stacks = {key: size for key, size in plan.unscheduled_stacks.items() if size >= _LARGE_BYTES}
    if stacks:
        listed = (f"\n  {path}  {size} bytes, {plan.how_stacked(path, unit)}" for (path, unit), size in stacks.items())
        named = ", ".join([*units, *(repr(path) for path, _ in stacks)])
        _compat.warn_user(
            f"{len(stacks)} stack(s) of layers of {kind} are not gathered ahead of their use: no unit is inside"
            f" their loop:{''.join(listed)}\n  js.fully_shard(model, mesh=mesh, units=[{named}])",
        )


def _in_order(path: Path) -> list[list[Any]]:
    """A key to sort paths by, with `block_2` before `block_10`."""
    return [[int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)] for key in path]


def _stack(path: Path, leaf: Leaf, seen: Seen) -> tuple[Path, int]:
    """The path of the outermost loop that consumes leading dims of a parameter, and how many all loops consume."""
    loops = [loop for loop in sorted(seen.loops, key=len) if path in seen.loops[loop]]
    row = min((seen.loops[loop][path] for loop in loops), key=len, default=leaf.shape)
    num = len(leaf.shape) - len(row)
    stacked = [loop for loop in loops if len(seen.loops[loop][path]) < len(leaf.shape)]
    return (stacked[0], num) if stacked and leaf.shape[num:] == tuple(row) else ((), 0)


def _layers(path: Path, unit: SeenUnit, leaves: Mapping[Path, Leaf]) -> int:
    """The number of leading dims that scans inside the model remove before the unit's module runs."""
    found = {p: (leaves[p].shape, shape) for p, shape in unit.shapes.items() if p in leaves}
    counts = {len(whole) - len(seen) for whole, seen in found.values()}
    bad = [p for p, (whole, seen) in found.items() if whole[len(whole) - len(seen) :] != tuple(seen)]
    if len(counts) > 1 or bad:
        raise AnnotationError(
            "The layers of a unit are not stacked along the first dim.",
            where=[
                f"{unit.record.kind} {dotted(path)}: {dotted(p)}  {found[p][0]}, a layer {found[p][1]}" for p in found
            ][:4],
            why="a scan over them leaves one layer, and the sharded dim is counted from the end.",
            do='nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=depth)',
        )
    return counts.pop() if counts else 0


# Which parameters of a Linen model are trained, in any tree of them: parameters, gradients, updates.


class Frozen(optax.MaskedNode):
    """Stands for the gradient and update of a frozen parameter. Tree maps skip it; the parameter stays."""

    __slots__ = ()
    __array_ufunc__ = None  # so a numpy array also leaves the sum to it

    def __radd__(self, parameter: Any) -> Any:
        return parameter


class Trained:
    """The parameters of a layout that are trained; `wrt` as in `js.value_and_grad`."""

    def __init__(self, layout: Layout, wrt: Any) -> None:
        chosen = as_filter(wrt)
        self._predicate = nnx.filterlib.to_predicate(chosen)
        placed = {path: leaf.placement for path, leaf in layout.leaves.items()}
        self.parameters = {path: self._chosen(path, p.shape, p.dtype) for path, p in placed.items()}
        if wrt is nnx.Param:
            return
        names = set(map(dotted, placed))
        check_patterns_used(chosen, names, "wrt")
        if not any(self.parameters.values()):
            raise AnnotationError(
                "wrt selects no parameter of the Linen model.",
                where=f"{layout.root.kind}: wrt={wrt!r}",
                why=f"the parameters are {', '.join(sorted(names)[:4])}{', ...' if len(names) > 4 else ''}; they have"
                " no types to filter by.",
                do='wrt="*/lora_*"  # a pattern of paths; or a function: lambda path, x: "lora_a" in path',
            )

    def mask(self, tree: Any) -> Any:
        """Whether each array in a tree belongs to a trained parameter; other arrays are looked up by their own path."""
        is_masked = lambda x: isinstance(x, optax.MaskedNode)

        def one(path: tuple, x: Any) -> bool:
            if is_masked(x):
                return False
            keys = key_texts(path)
            tail = tail_in(self.parameters, keys)
            return self._chosen(keys, x.shape, x.dtype) if tail is None else self.parameters[tail]

        return jax.tree.map_with_path(one, tree, is_leaf=is_masked)

    def split(self, tree: Any) -> tuple[Any, Any]:
        """A tree as two: the trained parameters, and the frozen ones."""
        mask = self.mask(tree)
        part = lambda wanted: jax.tree.map(lambda trained, x: x if trained == wanted else Frozen(), mask, tree)
        return part(True), part(False)

    def _chosen(self, path: Path, shape: tuple[int, ...], dtype: Any) -> bool:
        return bool(self._predicate(path, nnx.Param(jax.ShapeDtypeStruct(shape, dtype))))


def joined(trained: Any, frozen: Any) -> Any:
    """The tree of which these are the parts."""
    is_frozen = lambda x: isinstance(x, Frozen)
    return jax.tree.map(lambda x, y: y if is_frozen(x) else x, trained, frozen, is_leaf=is_frozen)


# A Linen parameter is an array in the user's own tree. A parameter with no divisible dim is held in a Flax box, like
# `nn.Partitioned`: the model, plain Flax and all readers of the box see the logical array; trees are mapped over the
# stored one, whose padding is zero and has no gradient.


class Padded(NDArrayOperatorsMixin, meta.AxisMetadata[Any]):
    """A parameter that is stored padded: read, indexed and computed with as the logical array."""

    def __init__(self, value: Any, padding: Padding) -> None:
        self.value, self.padding = value, padding

    def unbox(self) -> Any:
        """The logical array."""
        return self.padding.cut(self.value)

    def replace_boxed(self, val: Any) -> "Padded":
        """A box with another array, logical or padded."""
        return Padded(self.padding.pad(val), self.padding)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Padded":
        """The box itself: the padded dim is counted from the end, and layers come first."""
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Padded":
        """The box itself."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self.padding.logical_shape(self.value.shape)

    def __jax_array__(self) -> jax.Array:
        return self.unbox()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.unbox(), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """The operand for operators."""
        if method != "__call__" or kwargs:
            return NotImplemented
        return getattr(jnp, ufunc.__name__)(*[x.unbox() if isinstance(x, Padded) else x for x in inputs])

    def __getitem__(self, index: Any) -> Any:
        return self.unbox()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbox())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("value", "padding"):  # requested before they exist, e.g. by copy
            raise AttributeError(name)
        return getattr(self.value if name in OF_STORAGE else self.unbox(), name)

    def __repr__(self) -> str:
        dtype, stored = (getattr(self.value, name, None) for name in ("dtype", "shape"))
        return f"Padded({dtype}{list(self.padding.logical_shape(stored or ()))}, stored {list(stored or ())})"


jax.tree_util.register_pytree_with_keys(
    Padded,
    lambda box: (((jax.tree_util.GetAttrKey("value"), box.value),), box.padding),
    lambda padding, children: Padded(next(iter(children)), padding),
    lambda box: ((box.value,), box.padding),
)
serialization.register_serialization_state(
    Padded,
    lambda box: serialization.to_state_dict(box.unbox()),
    lambda box, state: box.replace_boxed(serialization.from_state_dict(box.unbox(), state)),
)


def is_padded(x: Any) -> bool:
    """Whether an object is the box of an array that is stored padded."""
    return isinstance(x, Padded)


def padding_in(leaf: Any) -> Padding | None:
    """The padding of the array in a box, also in nested boxes; None if there is none."""
    while isinstance(leaf, meta.AxisMetadata) and not is_padded(leaf):
        leaf = getattr(leaf, "value", None)
    return leaf.padding if isinstance(leaf, Padded) else None


def boxed(tree: Any, places: StatePlaces) -> Any:
    """A tree whose arrays are stored padded, in boxes, where their parameters are."""

    def one(path: tuple, x: Any) -> Any:
        padding = None if is_padded(x) else places.padding(key_texts(path), getattr(x, "shape", ()))
        return x if padding is None else Padded(padding.pad(x), padding)

    return jax.tree.map_with_path(one, tree, is_leaf=is_padded)


def unboxed(tree: Any) -> Any:
    """A tree with logical arrays in place of the boxes."""
    return jax.tree.map(lambda x: x.unbox() if isinstance(x, Padded) else x, tree, is_leaf=is_padded)


def boxed_like(old: Any, tree: Any) -> Any:
    """A tree in the form of the tree that it replaces."""
    one = lambda before, x: before.replace_boxed(x) if isinstance(before, Padded) else x
    return jax.tree.map(one, old, tree, is_leaf=is_padded)
