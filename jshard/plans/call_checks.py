"""Checks when an annotated model is called: it has arrays, and its parameters are those that were planned."""

from collections.abc import Iterable

import jax
from flax import nnx

from jshard import _compat
from jshard.errors import CallError
from jshard.plans.padding import padding_of
from jshard.plans.placement import Placement
from jshard.plans.units import Path, dotted


def check_has_arrays(name: str, values: Iterable[object]) -> None:
    """Raises for a call of a model without arrays."""
    # One is enough: an abstract model has no array at all.
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in values):
        raise CallError(
            "The model has no arrays.",
            where=name,
            why="js.abstract_init makes shapes for plans and restores; a call computes with arrays.",
            do="model = js.shard_init(build, annotate)  # or nnx.eval_shape(lambda model: model(x), model)",
        )


def check_stored(name: str, params: Iterable[tuple[Path, nnx.Variable, Placement]]) -> None:
    """Raises for parameters of a replaced layer that have the size of a padded array, and no padding.

    They would be taken for that array, and lose their last rows. One of the planned size is padded where it is used.
    """
    wrong = []
    for path, variable, placement in params:
        if _has_size_of_padded_array(variable, placement):
            shape = variable.get_raw_value().shape
            planned = f"planned {list(placement.shape)} and stored {list(placement.stored_shape)}"
            wrong.append(f"{name}: {dotted(path)}  {list(shape)}, {planned}")
    if wrong:
        raise CallError(
            "A parameter was replaced after the annotation, by one of the size of its padded array.",
            where=wrong,
            why="its plan pads it until its dim divides; the new array would be taken for the padded one.",
            do="model.head = head  # first, and then js.fully_shard(model, mesh=mesh)",
        )


def _has_size_of_padded_array(variable: nnx.Variable, placement: Placement) -> bool:
    """Returns whether a variable without padding is as large as the array that is stored in its place."""
    dim = placement.dim_from_end
    if not placement.padding or dim is None or padding_of(variable) is not None:
        return False
    shape = variable.get_raw_value().shape
    # Counted from the end, as leading dims may be missing in a loop.
    has_dim = len(shape) >= -dim
    return has_dim and shape[dim] == placement.stored_shape[dim]


def warn_of_unplanned(paths: list[str], where: str) -> None:
    """Warns of parameters added after the annotation: they are correct, but whole on every device."""
    if paths:
        listed = "".join(f"\n  {path}" for path in paths)
        _compat.warn_user(
            f"{where}: {len(paths)} parameter(s) were added after the annotation and stay replicated:{listed}\n"
            "  Change the model first, then js.fully_shard it.",
        )
