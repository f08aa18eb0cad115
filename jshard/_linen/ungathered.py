"""Units of a Linen model that are never gathered: what lies around them runs as written, in global view.

A Linen model is called as a whole, and a region that it runs in cannot be left on the way. So the modules around such a
unit open none: what they call beside it does, each call its own.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from jshard._errors import AnnotationError
from jshard._nnx import Path, dotted

if TYPE_CHECKING:
    from jshard._linen.layout import PlacedLeaf, SeenUnit


def modules_around(units: Mapping[Path, "SeenUnit"]) -> frozenset[Path]:
    """Paths of the modules around units that are never gathered; the model's own is `()`."""
    return frozenset(path[:i] for path in _ungathered(units) for i in range(len(path)))


def check_ungathered(kind: str, units: Mapping[Path, "SeenUnit"], leaves: Iterable["PlacedLeaf"]) -> None:
    """Raises for units and parameters that a unit which is never gathered does not go with.

    Args:
        kind: class of the model.
        units: what was seen of the units.
        leaves: the parameters.
    """
    never, around = _ungathered(units), modules_around(units)
    if not never:
        return
    _check_alone(kind, units, never, around)
    shared = [leaf for leaf in leaves if leaf.owner not in never and any(_in(leaf.path, path) for path in never)]
    if shared:
        raise AnnotationError(
            "A parameter of a unit that is never gathered is used elsewhere, too.",
            where=[f"{kind}: {dotted(leaf.path)}" for leaf in shared],
            why="it belongs to the unit around all of its uses, which would gather it.",
            do="use it by a method of its own module, outside of other units: self.table.attend(x).",
        )
    beside = [leaf for leaf in leaves if leaf.placement.dim is not None and leaf.path[:-1] in around]
    if beside:
        raise AnnotationError(
            "A module around a unit that is never gathered has parameters of its own.",
            where=[f"{kind}: {dotted(leaf.path)}  {list(leaf.placement.shape)}" for leaf in beside],
            why="its call runs as written, in global view, and the compiler would gather them as it likes.",
            do="put them into a submodule, or leave them whole on every device: js.fully_shard(..., ignored="
            f"{dotted(beside[0].path)!r}).",
        )


def _check_alone(kind: str, units: Iterable[Path], never: set[Path], around: frozenset[Path]) -> None:
    """Raises for a unit around one that is never gathered, or inside."""
    inside = [path for path in units if any(path != outer and _in(path, outer) for outer in never)]
    wrong = sorted(inside) + sorted(path for path in around if path in set(units))
    if wrong:
        raise AnnotationError(
            "A unit lies around one that is never gathered, or inside.",
            where=[f"{kind}: {dotted(path)}" for path in wrong],
            why=f"the call of {', '.join(map(dotted, sorted(never)))} runs as written, in global view, and so does what"
            " is around it.",
            do='units beside it: js.fully_shard(model, mesh=mesh, units={"tables": {"gathered": False}, Block: {}})',
        )


def _ungathered(units: Mapping[Path, "SeenUnit"]) -> set[Path]:
    return {path for path, unit in units.items() if not unit.settings.policy.gathered}


def _in(path: Path, outer: Path) -> bool:
    return path[: len(outer)] == outer
