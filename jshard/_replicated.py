"""Parameters that could not be sharded: an error for a large one, one warning with what the rest cost."""

import dataclasses
import fnmatch
import functools
import warnings

from jshard._errors import AnnotationError
from jshard._mesh import FSDP, degree
from jshard._nnx import Member, Path, Unit, dotted, numberless
from jshard._placement import INDIVISIBLE, PADDED_FROM_BYTES

_LARGE_SHARE = 0.01
_LISTED = 10


def check_replicated(root: Unit, name: str) -> None:
    """Looks at the parameters of a model that no dim divides, and for patterns; once per model and process.

    Called when the root is known: by `shard_init`, and by the first call into a model.

    Raises:
        AnnotationError: one of them has 64 KiB or more, is over one percent of the model, and not in
            `allow_replicated`; or a pattern of the root's `MixedPrecision(keep=...)` matches nothing.
    """
    _check_once(dataclasses.replace(root, optimizer=None), name)


@functools.cache
def _check_once(root: Unit, name: str) -> None:
    _check_kept(root, name)
    odd = [m for m in root.members if m.placement.because.startswith(INDIVISIBLE)]
    odd = [m for m in odd if not is_named(m.path, root.allow_replicated)]
    held, total = (sum(m.placement.logical_bytes for m in members) for members in (odd, root.members))
    large = [m for m in odd if m.placement.logical_bytes >= max(PADDED_FROM_BYTES, _LARGE_SHARE * total)]
    axis = f"{FSDP}={degree(root.mesh, FSDP)}"
    if large:
        raise AnnotationError(
            f"{len(large)} large parameter(s) of {name} would be replicated.",
            where=[_describe(m) for m in large],
            why=f"no dim divides by {axis}, every dim is smaller, and each parameter is over {_LARGE_SHARE:.0%} of the"
            f" model's {total} bytes.",
            do=f"accept it: js.fully_shard(model, mesh=mesh, allow_replicated={_patterns(large)!r}),\n"
            "or have it padded: shard_dim=0.",
        )
    if odd:
        listed = [f"\n  {_describe(m)}" for m in odd[:_LISTED]]
        listed += [f"\n  ... and {len(odd) - _LISTED} more"] * (len(odd) > _LISTED)
        warnings.warn(
            f"{len(odd)} parameter(s) of {name} are replicated, as no dim divides by {axis}. Each device holds all"
            f" {held} bytes of them, {held / total:.1%} of the model:{''.join(listed)}\n  To accept it:"
            f" js.fully_shard(model, mesh=mesh, allow_replicated={_patterns(odd)!r}). To pad them: shard_dim=0.",
            stacklevel=4,
        )


def _patterns(members: list[Member]) -> list[str]:
    """What names them in `allow_replicated`: their paths; of many with `*` for the numbers of layers."""
    paths = [dotted(m.path) for m in members]
    return paths if len(paths) <= _LISTED else list(dict.fromkeys(numberless(path) for path in paths))


def _check_kept(root: Unit, name: str) -> None:
    precision = root.policy.mixed_precision
    paths = [dotted(m.path) for m in root.members]
    unused = [p for p in precision.keep if not any(map(dataclasses.replace(precision, keep=(p,)).keeps, paths))]
    if unused:
        raise AnnotationError(
            "No parameter matches what should keep its dtype.",
            where=f"{name}: MixedPrecision(keep={precision.keep!r})",
            why=f"{', '.join(map(repr, unused))}; paths are {', '.join(paths[:4])}{' ...' if paths[4:] else ''}.",
            do='js.MixedPrecision(param="bfloat16", keep=("norm/*",))',
        )


def warn_of_unplanned(paths: list[str], where: str) -> None:
    """Warns of parameters that the annotation never saw: they are right, but whole on every device."""
    if paths:
        listed = "".join(f"\n  {path}" for path in paths)
        warnings.warn(
            f"{where}: {len(paths)} parameter(s) came after the annotation and stay replicated:{listed}\n"
            "  Change the model first, then js.fully_shard it.",
            stacklevel=3,
        )


def is_named(path: Path, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns matches a path."""
    return any(fnmatch.fnmatch(dotted(path), pattern) for pattern in patterns)


def _describe(member: Member) -> str:
    placement = member.placement
    return f"{dotted(member.path)}  {placement.dtype}{list(placement.shape)}  {placement.logical_bytes} bytes"
