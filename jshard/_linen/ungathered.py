"""Units of a Linen model that are never gathered: what lies around them runs as written, in global view.

A Linen model is called as a whole, and a region that it runs in cannot be left on the way. So the modules around such a
unit open none: what they call beside it does, each call its own.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from jshard._errors import AnnotationError
from jshard._nnx import Path, dotted

if TYPE_CHECKING:
    from jshard._linen.layout import SeenUnit
    from jshard._shard_plan import LeafPlan


def modules_around(units: Mapping[Path, "SeenUnit"]) -> frozenset[Path]:
    """Paths of the modules around units that are never gathered; the model's own is `()`."""
    return frozenset(path[:i] for path in _ungathered(units) for i in range(len(path)))


def check_alone(kind: str, units: Mapping[Path, "SeenUnit"]) -> None:
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
            "A unit lies around one that is never gathered, or inside.",
            where=[f"{kind}: {dotted(path)}" for path in wrong],
            why=f"the call of {', '.join(map(dotted, sorted(never)))} runs as written, in global view, and so does what"
            " is around it.",
            do='units beside it: js.fully_shard(model, mesh=mesh, units={"tables": {"placement":'
            " js.ShardPlacement(gathered=False)}, Block: {}})",
        )


def check_beside(kind: str, units: Mapping[Path, "SeenUnit"], leaves: Iterable["LeafPlan"]) -> None:
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


def _ungathered(units: Mapping[Path, "SeenUnit"]) -> set[Path]:
    return {path for path, unit in units.items() if not unit.settings.policy.gathered}
