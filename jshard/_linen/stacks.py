"""Layers that `nn.scan` stacks and no unit names: the unit around their loop gathers all of them at once."""

import functools
import warnings

from jshard._shard_plan import ShardPlan

_LARGE_BYTES = 64 * 2**20  # of the gathered copy; below that nobody would miss the memory


def warn_of_stacks(kind: str, plan: ShardPlan, units: tuple[str, ...]) -> None:
    """Warns of large ones, once per model and process.

    Args:
        kind: class of the model.
        plan: its plan.
        units: the choices of units, as text.
    """
    stacks = {key: size for key, size in plan.whole_stacks.items() if size >= _LARGE_BYTES}
    if stacks:
        _warn(kind, tuple((path, unit, size) for (path, unit), size in stacks.items()), units)


@functools.cache
def _warn(kind: str, stacks: tuple[tuple[str, str, int], ...], units: tuple[str, ...]) -> None:
    listed = "".join(f"\n  {path}  {size} bytes, by {unit}" for path, unit, size in stacks)
    named = ", ".join([*units, *(repr(path) for path, _, _ in stacks)])
    warnings.warn(
        f"{len(stacks)} stack(s) of layers of {kind} are gathered all at once, not a layer at a time, as no unit is"
        f" inside their loop:{listed}\n  js.fully_shard(model, mesh=mesh, units=[{named}])",
        stacklevel=3,
    )
