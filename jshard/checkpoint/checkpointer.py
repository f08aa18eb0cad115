"""Save and restore, each in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint.formats.source import Names
from jshard.checkpoint.lookup import place_of
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.readers import ForeignCheckpoint, open_checkpoint
from jshard.checkpoint.restoring import Extra, Forecast, Missing, Restoring
from jshard.checkpoint.saving import Format, Pending, Saving

TIMEOUT_S = 1200.0


def save(path: str | os.PathLike[str], state: Any, *, format: Format = "packed", timeout_s: float = TIMEOUT_S) -> None:
    """Writes a state; every process calls it, and each writes what its devices hold.

    It returns when the checkpoint is complete, on the disk, and under its name.

    Args:
        path: a folder that does not exist yet.
        state: names and what they stand for, or one such thing alone: nnx modules, nnx optimizers, pytrees of
            arrays (random keys among them), numbers and texts, and objects with `get_state()` and `set_state()`.
        format: "packed", a few large files; or "orbax", which lets Orbax write in its own way, for others to read.
        timeout_s: how long to wait for other processes.

    Raises:
        CheckpointError: there is something at `path` already, or some leaves are no data.
        RunError: writing failed, for example on a full disk, or a process did not come. What is there then is not a
            checkpoint.

    Example:
        >>> js.checkpoint.save("run/100", {"model": model, "optimizer": optimizer, "step": 100})
    """
    Saving(place_of(path), state, format=format, timeout_s=timeout_s).finish()


def save_async(
    path: str | os.PathLike[str], state: Any, *, format: Format = "packed", timeout_s: float = TIMEOUT_S
) -> Pending:
    """`save` that returns when the devices' values are copied: the next step may overwrite them.

    Args:
        path: a folder that does not exist yet.
        state: what `save` takes.
        format: see `save`.
        timeout_s: how long to wait for other processes.

    Returns:
        The save at work. Its `wait()` raises what went wrong; a program that ends waits for it where Python can.

    Raises:
        CheckpointError: there is something at `path` already, or some leaves are no data.
        RunError: the values could not be copied, or a process did not come.

    Example:
        >>> pending = js.checkpoint.save_async("run/200", {"model": model, "step": 200})
        >>> pending.wait()
    """
    path = place_of(path)
    return Pending(str(path), Saving(path, state, format=format, timeout_s=timeout_s).finish, timeout_s=2 * timeout_s)


def restore(
    path: str | os.PathLike[str],
    like: Any,
    *,
    only: str | None = None,
    rename: Mapping[str, str] | None = None,
    missing: Missing = "error",
    extra: Extra = "error",
    names: Names | None = None,
    read_once: bool = False,
    map: bool = False,
    verify: bool = True,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Reads a state back, every array with the sharding that its counterpart in `like` has.

    What is on disk knows nothing of the mesh, the strategy or the number of processes it was saved from, nor of
    whether layers were stacked for a scan: `like` may differ in all of them. All leaves are compared before any
    is read. Dtypes may change among floating ones, and to wider integers, and random keys between their two forms; one
    warning lists them.

    Args:
        path: what `save` was given; or what plain Orbax, PyTorch's distributed checkpoints (DCP) or safetensors wrote.
        like: a state of the same structure: the live objects, or abstract ones (`js.abstract_init`). It is not
            changed, but for objects with `set_state()`, which are set. Names that it leaves out are not read.
        only: "params" reads the parameters (the `nnx.Param`s of modules, and what is below a name `params`), and the
            beginning of a path what is below it; all else is as `like` has it.
        rename: beginnings of paths in `like`, and of the stored paths that they stand for.
        missing: what to do where nothing is stored for a leaf: "error", or "init" to leave it as `like` has it.
        extra: what to do with stored leaves that `like` lacks: "error" or "ignore".
        names: what another library calls the leaves below the one name in `like`, as `hf_names(config)` in a
            model file says; see `jshard.checkpoint.formats.Stored`.
        read_once: whether what several processes hold (HSDP) is read once, each of them a part, and exchanged between
            their devices: for storage that is slower than the network. On one machine it is slower. Of packed
            checkpoints; others are read by every process.
        map: whether arrays on CPU devices are to be the files themselves, mapped into memory, where the checkpoint has
            them cut as `like` does: nothing is copied, and processes of one machine share the memory. The files must
            stay as they are while the arrays live. Deleting them is safe, and frees the disk when the arrays are gone.
            But a file that is cut short ends the program by SIGBUS, and one that is written over changes the arrays:
            a program cannot be protected from that. What is on a network is read, and so are other formats, with a
            warning.
        verify: whether sums of all values are compared with those that were computed when they were saved.
        timeout_s: how long to wait for other processes.

    Returns:
        New objects of the kinds in `like`.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or its leaves do not fit those of `like`.
        RunError: it is damaged, or cannot be read.

    Example:
        >>> model = js.checkpoint.restore("run/100", like={"model": model})["model"]
    """
    opened = open_checkpoint(place_of(path), names=names, verify=verify)
    rename = _without_the_one_name(opened, like) if rename is None else rename
    restoring = Restoring(
        opened, like, only=only, rename=rename, missing=missing, extra=extra, read_once=read_once, map=map
    )
    return restoring.run(verify=verify, timeout_s=timeout_s)


def forecast(
    path: str | os.PathLike[str],
    like: Any,
    *,
    only: str | None = None,
    rename: Mapping[str, str] | None = None,
    missing: Missing = "error",
    extra: Extra = "error",
    names: Names | None = None,
    read_once: bool = False,
    verify: bool = True,
) -> Forecast:
    """What `restore` would read in this process, from what describes the checkpoint alone.

    Args:
        path: see `restore`, as for those below.
        like: a state of the same structure.
        only: "params", or the beginning of a path.
        rename: beginnings of paths, and what they stand for.
        missing: "error" or "init".
        extra: "error" or "ignore".
        names: what another library calls the leaves.
        read_once: whether shards that several processes hold are read once.
        verify: False does without the manifest if it is lost.

    Returns:
        Bytes, what is read in vain, and the memory it takes; as a text, one line.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or its leaves do not fit those of `like`.
        RunError: what describes it is damaged.

    Example:
        >>> print(js.checkpoint.forecast("run/100", like={"model": model}))
    """
    opened = open_checkpoint(place_of(path), names=names, verify=verify)
    rename = _without_the_one_name(opened, like) if rename is None else rename
    restoring = Restoring(opened, like, only=only, rename=rename, missing=missing, extra=extra, read_once=read_once)
    return restoring.forecast


def _without_the_one_name(opened: Opened, like: Any) -> dict[str, str] | None:
    """A `rename` that leaves out the one name in `like`: other libraries have no name for the whole model."""
    if not isinstance(opened, ForeignCheckpoint) or not isinstance(like, Mapping) or len(like) != 1:
        return None
    name = _leaves.escape(str(next(iter(like))))
    return None if any(f"{path}/".startswith(f"{name}/") for path in opened.leaves) else {name: ""}
