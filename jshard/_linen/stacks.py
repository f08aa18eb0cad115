"""Layers that `nn.scan` stacks and no unit names: nothing of them is gathered ahead."""

import functools

from jshard import _compat
from jshard._shard_plan import ShardPlan

_LARGE_BYTES = 64 * 2**20  # of the gathered copy of all layers; below that nobody would miss the time


def warn_of_stacks(kind: str, plan: ShardPlan, units: tuple[str, ...]) -> None:
    """Warns of large ones, once per model and process.

    Args:
        kind: class of the model.
        plan: its plan.
        units: the choices of units, as text.
    """
    stacks = {key: size for key, size in plan.unscheduled_stacks.items() if size >= _LARGE_BYTES}
    if stacks:
        rows = tuple((path, f"{size} bytes, {plan.how_stacked(path, unit)}") for (path, unit), size in stacks.items())
        _warn(kind, rows, units)


@functools.cache
def _warn(kind: str, stacks: tuple[tuple[str, str], ...], units: tuple[str, ...]) -> None:
    listed = "".join(f"\n  {path}  {how}" for path, how in stacks)
    named = ", ".join([*units, *(repr(path) for path, _ in stacks)])
    _compat.warn_user(
        f"{len(stacks)} stack(s) of layers of {kind} are not gathered ahead of their use, as no unit is inside their"
        f" loop:{listed}\n  js.fully_shard(model, mesh=mesh, units=[{named}])",
    )
