"""`restore` and `forecast`: a checkpoint of any format, read onto the mesh of a state."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jshard._processes import exchange
from jshard._types import PyTree
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.formats import Names
from jshard.checkpoint.groups import group_of_state
from jshard.checkpoint.lookup import checkpoint_at, place_of
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.readers import ForeignCheckpoint, open_checkpoint
from jshard.checkpoint.restore_operation import Extra, Forecast, Missing, RestoreOperation
from jshard.checkpoint.saving import TIMEOUT_S
from jshard.checkpoint.state import leaves as _leaves

T = TypeVar("T")


def restore(
    path: str | os.PathLike[str],
    like: T,
    *,
    only: str | None = None,
    rename: Mapping[str, str] | None = None,
    missing: Missing = "error",
    extra: Extra = "error",
    names: Names | None = None,
    read_once: bool = False,
    mmap: bool = False,
    verify: bool = True,
    processes: Sequence[int] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> T:
    """Restores a state, every array with the sharding of its counterpart in `like`.

    A checkpoint does not depend on the mesh, the strategy or the number of processes it was saved from, nor on
    whether layers were stacked for a scan: `like` may differ in all of them. All leaves are compared before any
    is read. Dtypes may change among floating ones, and to wider integers, and random keys between their two forms; one
    warning lists them.

    Args:
        path: the path given to `save`; the folder of a run, or of checkpoints, of which the newest is read; or a
            checkpoint of plain Orbax, PyTorch (DCP, `torch.save`), DeepSpeed's ZeRO-3, safetensors or a registered
            format (`register_format`).
        like: a state of the same structure: the live objects, or abstract ones (`js.abstract_init`). It is not
            changed, except that objects with `set_state()` are set. Names that it leaves out are not read.
        only: "params" reads only the parameters (the `nnx.Param`s of modules, and everything below a name `params`);
            a path prefix reads only what is below it. Everything else is as in `like`. A stored parameter of the same
            model, or leaf below that prefix, that `like` has no place for is an error, as it is without `only`.
        rename: from path prefixes in `like`, with the names at its top, to the corresponding stored prefixes. From
            another library's checkpoint, the one name in `like` is left out by itself.
        missing: what to do if nothing is stored for a leaf: "error", or "init" to keep its value in `like`.
        extra: what to do with stored leaves that `like` has no place for: "error", or "ignore" to skip them, with a
            warning that counts them.
        names: another library's names for the leaves below the one name in `like`, as from `hf_names(config)` in a
            model file; see `jshard.checkpoint.formats.Stored`.
        read_once: whether values held by several processes (HSDP) are read once, a part by each, and exchanged between
            their devices: for storage that is slower than the network. On one machine it is slower. Only for packed
            checkpoints; others are read by every process.
        mmap: whether arrays on CPU devices are memory-mapped files, where the checkpoint's pieces match the shards of
            `like`: nothing is copied, and processes of one machine share the memory. The files must not change while
            the arrays exist. Deleting them is safe, and frees the disk when the arrays are gone. But a truncated file
            ends the program with SIGBUS, and an overwritten one changes the arrays; a program cannot be protected from
            that. Files on a network, and other formats, are read instead, with a warning.
        verify: whether checksums of all values are compared with those computed when they were saved.
        processes: the indices of the processes that call it, if it is one alone. If arrays of `like` are over several
            processes, these call it; otherwise all do.
        timeout_s: how long to wait for other processes.

    Returns:
        New objects of the kinds in `like`.

    Raises:
        CheckpointError: there is no checkpoint at `path`, its leaves do not match those of `like`, or it is damaged or
            cannot be read; in the last two cases the error is a `RunError`, too.

    Examples:
        >>> model = js.checkpoint.restore("run/100", like={"model": model})["model"]
    """
    group = group_of_state(like, processes)
    options = {"only": only, "rename": rename, "missing": missing, "extra": extra, "read_once": read_once, "mmap": mmap}
    place = checkpoint_at(path)
    if place != place_of(path):  # all processes read the same step of a series, whichever each of them sees
        step = exchange(f"newest of {place.parent.name}", place.name, timeout_s=timeout_s, group=group)[0]
        place = place.with_name(step)
    operation = _operation(place, like, names=names, verify=verify, group=group, **options)
    return operation.run(verify=verify, timeout_s=timeout_s)


def forecast(path: str | os.PathLike[str], like: PyTree, *, names: Names | None = None, **options: Any) -> Forecast:
    """Forecasts what `restore` would read in this process, from the checkpoint's metadata alone.

    Args:
        path: see `restore`.
        like: a state of the same structure.
        names: another library's names for the leaves.
        **options: `only`, `rename`, `missing`, `extra`, `read_once` and `verify` of `restore`.

    Returns:
        The needed bytes, the bytes read for them, and host memory, printed as one line.

    Raises:
        CheckpointError: there is no checkpoint at `path`, its leaves do not match those of `like`, or its metadata are
            damaged, when the error is a `RunError`, too.

    Examples:
        >>> print(js.checkpoint.forecast("run/100", like={"model": model}))
    """
    # No exchange as in `restore`: a single process may ask.
    return _operation(checkpoint_at(path), like, names=names, **options).forecast


def _operation(
    path: Place, like: PyTree, *, names: Names | None, verify: bool = True, **options: Any
) -> RestoreOperation:
    """Opens a checkpoint, and plans the restore."""
    opened = open_checkpoint(path, names=names, verify=verify)
    # The entries of the caller come last, and win.
    options["rename"] = _without_the_one_name(opened, like) | dict(options.get("rename") or {})
    return RestoreOperation(opened, like, **options)


def _without_the_one_name(opened: Opened, like: PyTree) -> dict[str, str]:
    """Returns a `rename` that removes the one name in `like`: other libraries have no name for the whole model."""
    if not isinstance(opened, ForeignCheckpoint) or not isinstance(like, Mapping) or len(like) != 1:
        return {}
    name = _leaves.escape(str(next(iter(like))))
    has_name = any(f"{path}/".startswith(f"{name}/") for path in opened.leaves)
    if has_name:
        return {}
    return {name: ""}
