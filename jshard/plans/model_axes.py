"""The model's own annotation of a parameter: names for its dims, and the mesh axes that they stand for."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from jshard.errors import AnnotationError
from jshard.plans.mesh import AXES, EXPERT, FSDP, TENSOR, splitting_axes

Entry = str | tuple[str, ...] | None
"""The mesh axes of one dim, or a model's names for them, as in a `PartitionSpec`."""


def axes_of(entry: Entry) -> tuple[str, ...]:
    """Returns the mesh axes in an entry of a spec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def axes_in(spec: Iterable[Entry]) -> tuple[str, ...]:
    """Returns the mesh axes in all entries of a spec, or the model's names in its annotation, in their order."""
    return tuple(axis for entry in spec for axis in axes_of(entry))


def num_pieces(axes: Iterable[str], degrees: Mapping[str, int]) -> int:
    """Returns into how many pieces some axes split a dim together."""
    return math.prod(degrees[axis] for axis in axes)


def degree_of(entry: Entry, degrees: Mapping[str, int]) -> int:
    """Returns over how many devices an entry of a spec splits its dim."""
    return num_pieces(axes_of(entry), degrees)


def spec_over(axes: Sequence[str], entries: Sequence[Entry]) -> PartitionSpec:
    """Returns a spec restricted to some axes, for a region that is manual over them."""
    restricted = []
    for entry in entries:
        manual_axes = tuple(axis for axis in axes_of(entry) if axis in axes)
        restricted.append(manual_axes or None)
    return PartitionSpec(*restricted)


def entries_of_model(
    path: str,
    shape: tuple[int, ...],
    model_axes: tuple[Entry, ...],
    degrees: Mapping[str, int],
    axis_rules: Mapping[str, Entry],
) -> list[Entry]:
    """Returns for each dim the mesh axes that the model splits it over; raises AnnotationError if it cannot.

    Args:
        path: of the parameter, from its unit.
        shape: its logical shape.
        model_axes: the names in the model's annotation, one entry for each dim, or for the first ones.
        degrees: of the mesh axes.
        axis_rules: the axes that names stand for.
    """
    resolved: list[Entry] = []
    for names in model_axes:
        entry = _by_rules(names, axis_rules)
        resolved.append(_without_idle_axes(entry, degrees))
    annotation = _ModelAnnotation(path, tuple(shape), model_axes, tuple(resolved))
    annotation.check_names_are_known({*axis_rules, *AXES}, degrees)
    annotation.check_axes_split_one_dim(degrees)
    annotation.check_dims_divide(degrees)
    # A `PartitionSpec` may be shorter than the shape: further dims are not split.
    unnamed_dims = len(shape) - len(resolved)
    return [*resolved, *[None] * unnamed_dims]


def _by_rules(entry: Entry, rules: Mapping[str, Entry]) -> Entry:
    """Returns a model's own annotation of a dim as axes of the mesh."""
    names = axes_of(entry)
    if rules.keys().isdisjoint(names):
        return entry
    axes: list[str] = []
    for name in names:
        # A name without a rule may itself be an axis.
        axes += axes_of(rules.get(name, name))
    if len(axes) == 1:
        return axes[0]
    return tuple(axes) or None


def _without_idle_axes(entry: Entry, degrees: Mapping[str, int]) -> Entry:
    """Returns a model's own annotation for a dim, without axes that split nothing here.

    `fsdp`, which public models name, is also removed: the dim that it shards is decided here.
    """
    axes = axes_of(entry)
    remaining = tuple(axis for axis in splitting_axes(axes, degrees) if axis != FSDP)
    # In the form of the model, text or tuple, where nothing was left out.
    if remaining == axes:
        return entry
    return remaining or None


@dataclasses.dataclass(frozen=True)
class _ModelAnnotation:
    """A model's own annotation of a parameter. Its checks raise where the split would be lost, or does not divide.

    Attributes:
        path: of the parameter, from its unit.
        shape: its logical shape.
        names: as the model wrote them, for each dim or for the first ones.
        entries: the axes of the mesh that they stand for, without those that split nothing.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[Entry, ...]
    entries: tuple[Entry, ...]

    def check_names_are_known(self, known_names: set[str], degrees: Mapping[str, int]) -> None:
        """Raises for names that are neither axes nor in `axis_rules`, if the mesh has an axis that they could mean."""
        model_axes = splitting_axes((TENSOR, EXPERT), degrees)
        known_names = known_names | degrees.keys()
        unknown = [name for name in axes_in(self.names) if name not in known_names]
        if not unknown or not model_axes:  # without other axes than for data nothing could be split
            return
        suggested_rules: dict[str, str | None] = dict.fromkeys(unknown[:-1])
        suggested_rules[unknown[-1]] = model_axes[0]
        raise AnnotationError(
            "The model's own sharding of a parameter cannot be kept.",
            where=f"{self.path}  out_sharding={self.names}",
            why=f"{', '.join(map(repr, unknown))}: the mesh has {', '.join(degrees)}.",
            do="map each name to an axis, or None: js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy("
            f"axis_rules={suggested_rules}))",
        )

    def check_axes_split_one_dim(self, degrees: Mapping[str, int]) -> None:
        """Raises if an axis of the mesh stands for the names of two dims."""
        axes = axes_in(self.entries)
        repeated = [axis for axis in axes if axes.count(axis) > 1]
        if not repeated:
            return
        axis = repeated[0]
        suggested_rules: dict[str, Entry] = {}
        names_on_axis: Entry = None  # at the end: of the last dim on the axis, which the suggestion leaves whole
        for names, entry in zip(self.names, self.entries, strict=True):
            for name in axes_of(names):
                if name not in degrees:  # an axis of the mesh needs no rule
                    suggested_rules[name] = entry
            if axis in axes_of(entry):
                names_on_axis = names
        suggested_rules |= dict.fromkeys(axes_of(names_on_axis))
        raise AnnotationError(
            "Two dims of a parameter cannot be split over one axis.",
            where=f"{self.path}  shape {self.shape}  out_sharding={self.names}",
            why=f"{axis!r} would be on {axes.count(axis)} dims.",
            do="keep it for one of the names: js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy("
            f"axis_rules={suggested_rules}))",
        )

    def check_dims_divide(self, degrees: Mapping[str, int]) -> None:
        """Raises for dims that do not divide by the degrees of their axes."""
        uneven = []
        # Not strict: an annotation may name the first dims only.
        for dim, (size, entry) in enumerate(zip(self.shape, self.entries, strict=False)):
            # `degrees` has each of them: axes that the mesh lacks were left out with those of degree 1.
            axes = axes_of(entry)
            pieces = num_pieces(axes, degrees)
            if size % pieces:
                uneven.append(f"dim {dim} over {', '.join(axes)} ({pieces})")
        if uneven:
            raise AnnotationError(
                "A dim does not divide by the axis that the model's own sharding assigns to it.",
                where=f"{self.path}  shape {self.shape}  out_sharding={self.entries}",
                why=f"{'; '.join(uneven)}: every device must hold an equal part.",
                do="choose a degree that divides it, or omit the axis for this parameter.",
            )
