"""Save and restore, each one call that returns when the work is done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jshard._errors import RunError, ShardingError
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint.failures import quiet, reason

# Orbax writes beside the final path, adds the mark, and renames: a crash leaves the folder with the suffix.
COMMIT_MARK = "commit_success.txt"
UNCOMMITTED_SUFFIX = ".orbax-checkpoint-tmp"


class CheckpointError(ShardingError):
    """A checkpoint cannot be written there, or does not fit what it is to be restored into."""


def save(path: str | Path, state: Mapping[str, Any]) -> None:
    """Writes a state; every process calls it, and each device writes its own shards.

    Args:
        path: a folder that does not exist yet.
        state: names and what they stand for: nnx modules, nnx optimizers, pytrees of arrays, numbers.

    Raises:
        CheckpointError: there is something at `path` already.
        RunError: writing failed, for example on a full disk. What is there then is not a checkpoint.

    Example:
        >>> js.checkpoint.save("run/100", {"model": model, "optimizer": optimizer, "step": 100})
    """
    from orbax.checkpoint import v1 as ocp  # slow to import, and few programs need it

    path = Path(path).absolute()
    if path.exists():
        raise CheckpointError(
            "The checkpoint cannot be written.",
            where=str(path),
            why="there is something at that path already.",
            do="save under another name, for example with the step in it.",
        )
    tree = _leaves.nested(_leaves.flatten(state))
    try:
        with quiet():
            ocp.save(str(path), tree)
    except Exception as error:
        raise RunError(
            "The checkpoint could not be written.",
            where=str(path),
            why=reason(error),
            do="make room, or name a folder on another disk.",
        ) from error


def restore(path: str | Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a state back, every array with the sharding that its counterpart in `like` has.

    Args:
        path: what `save` was given.
        like: a state of the same structure: the live objects, or abstract ones (`js.abstract_init`). It is not
            changed, and its mesh may be another than the one that was saved from.

    Returns:
        A dict with the names of `like`, holding new objects.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or its leaves or their shapes differ from those of `like`.
        RunError: it is damaged, or cannot be read.

    Example:
        >>> model = js.checkpoint.restore("run/100", like={"model": model})["model"]
    """
    from orbax.checkpoint import v1 as ocp

    path = Path(path).absolute()
    stored = _stored_leaves(path)
    wanted = _leaves.abstract(_leaves.flatten(like))
    _check_fits(path, stored, wanted)
    context = ocp.Context()
    context.pytree.loading.partial_load = True  # `like` may name the model alone
    try:
        with quiet(), context:
            tree = ocp.load(str(path), _leaves.nested(wanted))
    except Exception as error:
        raise _unreadable(path, reason(error)) from error
    return _leaves.unflatten_like(like, _leaves.flat(tree))


def is_committed(path: Path) -> bool:
    """Whether a save was completed there: half-written folders and those of others have no mark."""
    return (path / COMMIT_MARK).is_file()


def _stored_leaves(path: Path) -> dict[_leaves.Path, Any]:
    """What a checkpoint says that it holds, by path; no array is read."""
    from orbax.checkpoint import v1 as ocp

    try:
        with quiet():
            stored = ocp.metadata(str(path)).metadata
            if stored is None:
                raise ValueError("a file that describes its arrays is missing or damaged")
    except (ocp.errors.InvalidLayoutError, FileNotFoundError) as error:
        if is_committed(path):
            raise _unreadable(path, "a file that describes it is missing.") from error
        raise CheckpointError(
            "There is no checkpoint to restore.",
            where=str(path),
            why="the folder is not one that save() completed." if path.exists() else "no such folder.",
            do="give the path that save() was given; a training run writes to runs/NAME/checkpoints/STEP.",
        ) from error
    except Exception as error:
        raise _unreadable(path, reason(error)) from error
    return _leaves.flat(stored)


def _unreadable(path: Path, why: str) -> RunError:
    return RunError("The checkpoint cannot be read.", where=str(path), why=why, do="restore another one.")


def _check_fits(path: Path, stored: Mapping, wanted: Mapping) -> None:
    """Compares paths and shapes before any array is read. Names that `like` leaves out are not asked for."""
    names = {leaf_path[0] for leaf_path in wanted}
    bad = []
    for leaf_path in sorted({p for p in stored if p[0] in names} | set(wanted)):
        shapes = [_shape(tree, leaf_path) for tree in (stored, wanted)]
        if shapes[0] != shapes[1]:
            bad.append(f"{'/'.join(leaf_path)}  stored {shapes[0]}  wanted {shapes[1]}")
    if bad:
        raise CheckpointError(
            f"The checkpoint does not fit: {len(bad)} leaves differ.",
            where=[str(path), *bad],
            why="it was saved from another model, or from another optimizer.",
            do="build `like` with the settings of the saved run; a training run keeps them in run.json.",
        )


def _shape(leaves: Mapping, path: _leaves.Path) -> str:
    if path not in leaves:
        return "nothing"
    leaf = leaves[path]
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)  # Orbax speaks of the numbers in a key
    return str(tuple(getattr(leaf, "shape", ())))
