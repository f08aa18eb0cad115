"""A restore: match, check, read, verify, and convert every leaf to the requested form."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from jshard._processes import all_or_none, exchange, is_primary
from jshard._text import counted, human_bytes
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint import surplus
from jshard.checkpoint.buckets import BucketError, BucketPath, Place, bucket_error
from jshard.checkpoint.dealing import OtherFailedError, Together, sharers
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning, damaged, unreadable
from jshard.checkpoint.formats.source import Names
from jshard.checkpoint.layout import size_of
from jshard.checkpoint.lookup import checkpoint_at, place_of
from jshard.checkpoint.manifest import Sums, add, held_parts, sums_of
from jshard.checkpoint.matching import check_fits, finish, match, num_overflows, own_mesh, renamed, to_read
from jshard.checkpoint.opened import BATCH_BYTES, Opened, PackedCheckpoint, boxes_of, is_on_cpu
from jshard.checkpoint.position import check_position, is_data_position
from jshard.checkpoint.readers import ForeignCheckpoint, OrbaxCheckpoint, open_checkpoint
from jshard.checkpoint.saving import TIMEOUT_S, give_memory_back
from jshard.checkpoint.timeline import Phases, mesh_layout
from jshard.errors import RunError, printable

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
    timeout_s: float = TIMEOUT_S,
) -> T:
    """Restores a state, every array with the sharding of its counterpart in `like`.

    A checkpoint does not depend on the mesh, the strategy or the number of processes it was saved from, nor on
    whether layers were stacked for a scan: `like` may differ in all of them. All leaves are compared before any
    is read. Dtypes may change among floating ones, and to wider integers, and random keys between their two forms; one
    warning lists them.

    Args:
        path: the path given to `save`; the folder of a run, or of checkpoints, of which the newest is read; or a
            checkpoint of plain Orbax, PyTorch's distributed checkpoints (DCP), DeepSpeed's ZeRO-3 or safetensors.
        like: a state of the same structure: the live objects, or abstract ones (`js.abstract_init`). It is not
            changed, except that objects with `set_state()` are set. Names that it leaves out are not read.
        only: "params" reads only the parameters (the `nnx.Param`s of modules, and everything below a name `params`);
            a path prefix reads only what is below it. Everything else is as in `like`. A stored parameter of the same
            model, or leaf below that prefix, that `like` has no place for is an error, as it is without `only`.
        rename: from path prefixes in `like` to the corresponding stored prefixes.
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
        timeout_s: how long to wait for other processes.

    Returns:
        New objects of the kinds in `like`.

    Raises:
        CheckpointError: there is no checkpoint at `path`, its leaves do not match those of `like`, or it is damaged or
            cannot be read; in the last two cases the error is a `RunError`, too.

    Example:
        >>> model = js.checkpoint.restore("run/100", like={"model": model})["model"]
    """
    options = {"only": only, "rename": rename, "missing": missing, "extra": extra, "read_once": read_once, "mmap": mmap}
    found = checkpoint_at(path)
    if found != place_of(path):  # all processes read the same step of a series, whichever each of them sees
        step = exchange(f"newest of {found.parent.name}", found.name, timeout_s=timeout_s)[0]
        found = found.with_name(step)
    return _restoring(found, like, names=names, verify=verify, **options).run(verify=verify, timeout_s=timeout_s)


def forecast(path: str | os.PathLike[str], like: Any, *, names: Names | None = None, **options: Any) -> Forecast:
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

    Example:
        >>> print(js.checkpoint.forecast("run/100", like={"model": model}))
    """
    return _restoring(checkpoint_at(path), like, names=names, **options).forecast


def _restoring(path: Place, like: Any, *, names: Names | None, verify: bool = True, **options: Any) -> Restoring:
    opened = open_checkpoint(path, names=names, verify=verify)
    if options.get("rename") is None:
        options["rename"] = _without_the_one_name(opened, like)
    return Restoring(opened, like, **options)


def _without_the_one_name(opened: Opened, like: Any) -> dict[str, str] | None:
    """A `rename` that removes the one name in `like`: other libraries have no name for the whole model."""
    if not isinstance(opened, ForeignCheckpoint) or not isinstance(like, Mapping) or len(like) != 1:
        return None
    name = _leaves.escape(str(next(iter(like))))
    return None if any(f"{path}/".startswith(f"{name}/") for path in opened.leaves) else {name: ""}


_AMPLIFICATION = 4.0  # bytes read per needed byte that trigger a warning
_WORTH_BYTES = 1 << 30  # of unneeded reads
_SUMMING_THREADS = 2  # for whole leaves, as Orbax stores them


Missing = Literal["error", "init"]
Extra = Literal["error", "ignore"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What this process will read from a checkpoint."""

    wanted_bytes: int  # size of the boxes that its devices will hold, each counted once
    touched_bytes: int  # read for them: rows of packed pieces, or whole chunks in other formats
    host_bytes: int  # at most, beside the state: data in flight, and leaves that stay on the host

    @property
    def amplification(self) -> float:
        """Bytes read per needed byte."""
        return self.touched_bytes / self.wanted_bytes if self.wanted_bytes else 1.0

    def __str__(self) -> str:
        wanted, touched, host = (human_bytes(size, 1) for size in dataclasses.astuple(self))
        return (
            f"{touched} to read for {wanted} (x{self.amplification:.2f}); up to {host} of host memory beside the state"
        )


class Restoring:
    """A matched restore that has not started; its arguments are those of `restore`."""

    def __init__(
        self,
        opened: Opened,
        like: Any,
        *,
        only: str | None = None,
        rename: Mapping[str, str] | None = None,
        missing: Missing = "error",
        extra: Extra = "error",
        read_once: bool = False,
        mmap: bool = False,
    ) -> None:
        self.opened = opened
        self._like = like
        self._read_once = read_once
        self._mmap = mmap
        self.phases = Phases()
        with self.phases("plan"):
            _check_policies(missing, extra)
            renames = dict(rename or {})
            self._live = {_leaves.text(path): (path, leaf) for path, leaf in _leaves.flatten(like).items()}
            self._wanted = self._abstract_leaves(_asked(like, self._live, only))
            described = self._described_leaves()
            roots = _roots(like, only)
            numbered = _leaves.by_number(like)
            self._stored = opened.leaves_for(self._possible_paths(numbered, renames))
            self._by_number = self._stored_by_number(numbered, renames)
            renames |= self._by_number
            part = only
            ignored: set[str] = set()
            if only == "params":  # not a path, but a kind of leaves
                part = None
                ignored = self._not_parameters(roots, numbered, renames)
            self.match = match(
                self._stored,
                described,
                names=roots,
                rename=renames,
                part=part,
                ignored=ignored,
                skip_layers=extra == "ignore",
            )
            self._copies: dict[str, str] = {}
            if extra == "error" and isinstance(opened, ForeignCheckpoint):
                self._copies = self._without_copies()
            check_fits(
                opened.path,
                self.match,
                self._stored,
                self._wanted,
                abstract=[key for key, (_, leaf) in self._live.items() if isinstance(leaf, jax.ShapeDtypeStruct)],
                rename=renames,
                missing=missing,
                extra=extra,
                absent=opened.absent,
            )
        mesh = mesh_layout(self._wanted)
        self.record: dict[str, Any] = {"began_at": self.phases.began_at, "error": None, "mesh": mesh}

    def _abstract_leaves(self, keys: Sequence[str]) -> dict[str, Any]:
        """Some leaves of `like`, arrays by shape, dtype and sharding."""
        # All leaves are passed, not only these: arrays on no mesh get that of the others.
        by_path = _leaves.abstract(dict(self._live.values()))
        wanted = {}
        for key in keys:
            path, _ = self._live[key]
            wanted[key] = by_path[path]
        return wanted

    def _described_leaves(self) -> dict[str, _manifest.StoredLeaf]:
        """The leaves to read, as a checkpoint would describe them: without the padding of this mesh."""
        by_path = {}
        for key, leaf in self._wanted.items():
            path, _ = self._live[key]
            by_path[path] = leaf
        storable = _leaves.storable(by_path, abstract=True)
        logical_shapes = {_leaves.text(path): shape for path, shape in _leaves.logical_shapes(self._like).items()}
        return {key: _manifest.describe(leaf, logical_shapes.get(key)) for key, leaf in storable.items()}

    def _possible_paths(self, numbered: Mapping[str, str], rename: Mapping[str, str]) -> list[str]:
        """The paths at which the leaves to read may be stored: by key or, by earlier versions, by number."""
        paths = []
        for key in self._wanted:
            paths.append(renamed(key, rename))
            paths.append(renamed(numbered.get(key, key), rename))
        return paths

    def _stored_by_number(self, numbered: Mapping[str, str], rename: Mapping[str, str]) -> dict[str, str]:
        """The leaves that are stored by number and not by key, with their stored paths."""
        by_number = {}
        for key, number in numbered.items():
            stored_path = renamed(number, rename)
            is_stored_by_key = renamed(key, rename) in self._stored
            if key in self._wanted and not is_stored_by_key and stored_path in self._stored:
                by_number[key] = stored_path
        return by_number

    def _not_parameters(self, roots: Sequence[str], numbered: Mapping[str, str], rename: Mapping[str, str]) -> set[str]:
        """The stored leaves that `only="params"` skips and does not report: all of them but parameters."""
        ignored: set[str] = set()
        for root in roots:
            ignored |= surplus.not_parameters(self._stored, renamed(root, rename))
        for key in self._live.keys() - self._wanted.keys():  # such as statistics: the model has a place for them
            for path in (key, numbered.get(key, key)):
                ignored.update(surplus.places(renamed(path, rename), self._stored))
        return ignored

    def _without_copies(self) -> dict[str, str]:
        """Takes surplus arrays that are copies of restored ones out of the match, and returns them."""
        if self.match.problems or self.match.missing:
            return {}
        used = {path for pick in self.match.picks.values() for path in pick.stored}
        copies = surplus.copies(self.opened, self.match.extra, used)
        rest = tuple(path for path in self.match.extra if path not in copies)
        self.match = dataclasses.replace(self.match, extra=rest)
        return copies

    @functools.cached_property
    def reads(self) -> dict[str, Any]:
        """The arrays to read, by stored path, with shardings."""
        found: dict[str, Any] = {}
        for key, pick in self.match.picks.items():
            for path in pick.stored:
                found.setdefault(path, to_read(self._stored[path], pick, self._wanted[key]))
        return found

    @functools.cached_property
    def forecast(self) -> Forecast:
        """What this process will read."""
        sizes, touched = [], 0
        for path, like in self.reads.items():
            if hasattr(like, "shape") and (leaf := self._stored[path]).is_array:
                boxes = boxes_of(leaf, like)
                sizes.append(sum(map(size_of, boxes)) * np.dtype(leaf.dtype).itemsize)
                touched += self.opened.touched(path, leaf, boxes) * np.dtype(leaf.dtype).itemsize
        on_host = sum(like.nbytes for like in self.reads.values() if isinstance(like, np.ndarray))
        in_flight = min(2 * (BATCH_BYTES + max(sizes, default=0)), touched)
        share = max(1, len(self._members))
        host_bytes = on_host + (2 if share > 1 else 1) * in_flight
        return Forecast(wanted_bytes=sum(sizes), touched_bytes=touched // share, host_bytes=host_bytes)

    @functools.cached_property
    def _members(self) -> tuple[int, ...]:
        """The processes that each read a part of the values that all of them need; empty if nothing is shared."""
        can_share = jax.process_count() > 1 and isinstance(self.opened, PackedCheckpoint)
        return sharers(self.reads.values()) if self._read_once and not self._mmap and can_share else ()

    def run(self, *, verify: bool, timeout_s: float) -> Any:
        """Reads, and returns new objects of the types in `like`; a `RunError` names the damage."""
        path, found, sums, num_bytes, error = self.opened.path, {}, {}, 0, None
        together = Together(self._members, timeout_s=timeout_s) if self._members else None
        try:
            found, sums = self._read(verify, together)
            num_bytes = self.forecast.wanted_bytes
        except OtherFailedError:
            pass
        except Exception as caught:  # the others wait for this report
            error = caught
            if together is not None:
                together.fail()
        own = {"sums": sums, "report": self.phases.report(num_bytes=num_bytes)}

        def failed(failures: Mapping[int, Mapping[str, Any]]) -> RunError:
            why = "\n".join(f"process {number}: {parts['why']}" for number, parts in failures.items())
            is_bucket = BucketError.__name__ in {parts["kind"] for parts in failures.values()}
            return bucket_error(path, why) if is_bucket and isinstance(path, BucketPath) else unreadable(path, why)

        heard = all_or_none(f"read {path}", own, error, failed=failed, timeout_s=timeout_s)
        if sums and self.opened.manifest is not None:
            _check_sums(path, self.opened.manifest, [other["sums"] for other in heard])
        with self.phases("finish"):
            restored = self._filled(found)
        if self._overflows and is_primary():
            too_large = "too large for its dtype in `like`", "too large for their dtypes in `like`"
            (note,) = _list(f"leaf has values {too_large[0]}", f"leaves have values {too_large[1]}", self._overflows)
            message = f"{path} is restored; {note}"
            warnings.warn(message, CheckpointWarning, stacklevel=3)
        if not isinstance(self.opened, PackedCheckpoint):  # packed checkpoints keep only the data they still need
            give_memory_back()
        self.record["processes"] = [other["report"] for other in heard]
        return restored

    def _read(self, verify: bool, together: Together | None) -> tuple[dict[str, Any], dict[str, Sums]]:
        """The stored leaves, and the checksums over this process's part of them."""
        manifest = self.opened.manifest
        if verify and manifest is not None:
            with self.phases("plan"):
                if lost := _manifest.damage(self.opened.path, manifest):
                    why = f"{len(lost)} of {counted(len(manifest.files), 'file')} changed since it was saved."
                    raise damaged(self.opened.path, lost, why)
        self._warn(verify)
        with self.phases("read"):
            if isinstance(self.opened, PackedCheckpoint):
                found = self.opened.load(self.reads, together, mmap=self._mmap)
            else:
                found = self.opened.load(self.reads)
            jax.block_until_ready(found)
        if not verify or manifest is None:
            return found, {}
        with self.phases("verify"):
            summed = [key for key in found if key in manifest.leaves and manifest.leaves[key].sums]
            total = lambda key: sums_of(held_parts(found[key]), manifest.leaves[key].shape)
            with concurrent.futures.ThreadPoolExecutor(_SUMMING_THREADS) as pool:
                return found, dict(zip(summed, pool.map(total, summed), strict=True))

    def _unmapped(self) -> str:
        """The reason that files cannot be mapped, if any."""
        if not isinstance(self.opened, PackedCheckpoint):
            return "it is not packed"
        if not any(isinstance(like, jax.ShapeDtypeStruct) and is_on_cpu(like) for like in self.reads.values()):
            return "the arrays are not on CPU devices"
        return "" if self.opened.can_be_mapped else "it is not on a local disk"

    def _filled(self, found: dict[str, Any]) -> Any:
        """New objects of the kinds in `like`, with the values read."""
        filled = dict(self._live.values())
        finished = self._finished(found)
        positions = {key: leaf for key, leaf in finished.items() if is_data_position(self._live[key][1])}
        for key, leaf in positions.items():  # all are checked before the first one moves
            check_position(self._live[key][1], leaf)
        for key in sorted(finished, key=positions.__contains__):  # positions last: other leaves may not fit
            path, like = self._live[key]
            filled[path] = _leaves.restored(key, finished[key], like)
        return _leaves.unflatten_like(self._like, filled)

    def _finished(self, found: dict[str, Any]) -> dict[str, Any]:
        """Every needed leaf, from the values read; each stored leaf is freed after its last use."""
        left = collections.Counter(path for pick in self.match.picks.values() for path in pick.stored)
        finished = {}
        self._overflows: list[str] = []
        # One stored leaf at a time, so that at most one stack is in memory twice.
        for key, pick in sorted(self.match.picks.items(), key=lambda item: item[1].stored[0]):
            with own_mesh(self._wanted[key]):
                parts = [found[path] for path in pick.stored]
                leaf = finish(pick, parts, self._wanted[key])
                if count := num_overflows(pick, parts, leaf):
                    dtypes = f"{getattr(parts[0], 'dtype', type(parts[0]).__name__)} -> {leaf.dtype}"
                    self._overflows.append(f"{key}  {dtypes}: {counted(count, 'value')} became inf or nan")
                del parts
            shared = any(leaf is found[path] and left[path] > 1 for path in pick.stored)
            finished[key] = leaf.copy() if shared else leaf  # a separate array, so that it can be donated alone
            for path in pick.stored:
                left[path] -= 1
                if not left[path]:
                    del found[path]
        return finished

    def _warn(self, verify: bool) -> None:
        """One warning with everything that may be unexpected."""
        rest = {key: leaf for key, (_, leaf) in self._live.items() if key not in self.match.picks}
        abstract = tuple(sorted(key for key, leaf in rest.items() if isinstance(leaf, jax.ShapeDtypeStruct)))
        match = self.match
        notes = [
            *_list("leaf changes dtype", "leaves change dtype", match.casts),
            *_list("leaf keeps its value in `like`", "leaves keep their values in `like`", match.missing),
            *_list("leaf stays abstract, as in `like`", "leaves stay abstract, as in `like`", abstract),
            *_list("stored leaf is skipped", "stored leaves are skipped", match.extra),
            *_list("stored stack is cut", "stored stacks are cut", match.cut),
        ]
        notes += self.opened.notes
        copies = [f"{name}  equal to {other}" for name, other in self._copies.items()]
        notes += _list("stored leaf is a copy of another", "stored leaves are copies of others", copies)
        # Saved by a version, or a library, that numbers them: their order then is not known.
        in_order = "stored by number, and read in the order of `like`"
        lines = [f"{key}  stored as {stored}" for key, stored in self._by_number.items()]
        notes += _list(f"leaf of a dict-like node is {in_order}", f"leaves of dict-like nodes are {in_order}", lines)
        if verify and self.opened.manifest is None and isinstance(self.opened, OrbaxCheckpoint):
            notes.append("it has no checksums to check: jshard did not write it.")
        if self._mmap and (why := self._unmapped()):
            notes.append(f"it was read, not mapped: {why}.")
        if self._read_once and jax.process_count() > 1 and not isinstance(self.opened, PackedCheckpoint):
            notes.append("read_once is for packed checkpoints: here every process read all that it needs.")
        in_vain = self.forecast.touched_bytes - self.forecast.wanted_bytes
        if self.forecast.amplification > _AMPLIFICATION and in_vain > _WORTH_BYTES:
            notes.append(
                f"{self.forecast}.\n"
                "It is stored in pieces for another layout. If you restore it often, rewrite it:\n"
                f"jshard ckpt reshard {self.opened.path} {self.opened.path}-resharded --mesh ..."
            )
        if notes and is_primary():  # the others have the same
            message = f"{self.opened.path} is restored; " + "\n".join(notes)
            warnings.warn(message, CheckpointWarning, stacklevel=5)


def _asked(like: Any, live: Mapping[str, tuple[_leaves.Path, Any]], only: str | None) -> list[str]:
    """The paths of `like` to read."""
    if not live or isinstance(like, str | os.PathLike):
        raise CheckpointError(
            "There is nothing to restore into.",
            where=f"like={like!r}",
            why="`like` has no leaves to restore into; it must be a state, live or abstract.",
            do='restore(path, like={"model": model, "optimizer": optimizer, "step": 0})',
        )
    if only is None:
        return list(live)
    below = {key for key in live if key == only or key.startswith(f"{only}/")}
    found = _leaves.parameter_paths(like, live) if only == "params" else below
    if not found:
        raise CheckpointError(
            "There is nothing to restore.",
            where=f"only={only!r}",
            why="`like` has no nnx parameters in a module, and nothing under a name `params`."
            if only == "params"
            else f"nothing starts so; paths of `like` start with {', '.join(sorted({k.split('/')[0] for k in live}))}.",
            do='only="params", or a path prefix, such as only="model/blocks".',
        )
    return [key for key in live if key in found]


def _roots(like: Any, only: str | None) -> list[str]:
    """The paths below which stored leaves that `like` has no place for are extra; without any, all of them are."""
    if only == "params":
        return sorted(_leaves.parameter_roots(like))
    if only is not None:  # leaves outside it are not requested
        return [only]
    if isinstance(like, Mapping):
        return [str(name) for name in like]
    return []


def _check_policies(missing: str, extra: str) -> None:
    for name, value, known in (("missing", missing, ("error", "init")), ("extra", extra, ("error", "ignore"))):
        if value not in known:
            raise CheckpointError(
                "The restore has an invalid argument.",
                where=f"{name}={value!r}",
                why=f"it must be one of {', '.join(known)}.",
                do=f'{name}="{known[0]}"',
            )


def _check_sums(path: Place, manifest: _manifest.Manifest, heard: list[dict[str, Any]]) -> None:
    """Compares the checksums of the values read by all processes with those in the manifest."""
    bad = []
    for key in heard[0]:
        leaf = manifest.leaves[key]
        total = add(other[key] for other in heard)
        if total != leaf.sums:
            bad.append(f"{key}  {leaf.shape} {leaf.dtype}")
    if bad:
        raise damaged(path, bad, "the values read differ from the saved ones: their checksums do not match.")


def _list(one: str, many: str, lines: Sequence[str], shown: int = 10) -> list[str]:
    """A note that counts these lines, and shows the first of them; none without lines."""
    if not lines:
        return []
    more = [f"... and {len(lines) - shown} more"] if len(lines) > shown else []
    return ["\n  ".join([f"{counted(len(lines), one, many)}:", *map(printable, lines[:shown]), *more])]
