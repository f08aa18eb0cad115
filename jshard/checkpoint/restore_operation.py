"""A restore in steps: match, check, read, verify, and convert every leaf to the requested form."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jshard._compat.source_lines import warn_user
from jshard._processes import all_or_none, is_primary
from jshard._text import counted, human_bytes
from jshard._types import Json, PyTree
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint import surplus
from jshard.checkpoint.buckets import BucketError, BucketPath, Place, bucket_error
from jshard.checkpoint.converting import Leaf, Target, finish, num_overflows, own_mesh, to_read
from jshard.checkpoint.data_position.position import check_position, is_data_position
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning, damaged, reasons_of, unreadable
from jshard.checkpoint.fitting import check_fits
from jshard.checkpoint.matching import first_keys, match, renamed
from jshard.checkpoint.opened import Opened, boxes_of
from jshard.checkpoint.packed.layout import size_of
from jshard.checkpoint.packed.shared_reads import OtherFailedError, SharedReads, read_group
from jshard.checkpoint.packed_reader import BATCH_BYTES, PackedCheckpoint, is_on_cpu
from jshard.checkpoint.phases import Phases, mesh_layout
from jshard.checkpoint.readers import ForeignCheckpoint, OrbaxCheckpoint
from jshard.checkpoint.saving import give_memory_back
from jshard.checkpoint.state import leaf_values
from jshard.checkpoint.state import leaves as _leaves
from jshard.checkpoint.state.leaf_sums import Sums, add, held_parts, sums_of
from jshard.checkpoint.state.parameter_paths import parameter_paths, parameter_roots
from jshard.errors import RunError, printable

Missing = Literal["error", "init"]
Extra = Literal["error", "ignore"]

_MAX_AMPLIFICATION = 4.0  # bytes read per needed byte; more are worth a warning
_UNNEEDED_BYTES = 1 << 30  # that are read; fewer are not
_SUMMING_THREADS = 2  # for whole leaves, as Orbax stores them
_SHOWN = 10  # lines of a note


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What this process will read from a checkpoint."""

    wanted_bytes: int  # size of the boxes that its devices will hold, each counted once
    touched_bytes: int  # read for them: rows of packed pieces, or whole chunks in other formats
    host_bytes: int  # at most, beside the state: data in flight, and leaves that stay on the host

    @property
    def amplification(self) -> float:
        """Bytes read per needed byte."""
        if not self.wanted_bytes:
            return 1.0
        return self.touched_bytes / self.wanted_bytes

    def __str__(self) -> str:
        touched = human_bytes(self.touched_bytes, 1)
        needed = human_bytes(self.wanted_bytes, 1)
        host = human_bytes(self.host_bytes, 1)
        return (
            f"{touched} to read for {needed} (x{self.amplification:.2f}); up to {host} of host memory beside the state"
        )


@dataclasses.dataclass(frozen=True)
class _LikeLeaf:
    """A leaf of `like`."""

    path: _leaves.Path  # in the tree
    value: Any  # of any type that can be stored; an array may be abstract

    @property
    def is_abstract(self) -> bool:
        """Whether it is an array without values."""
        return isinstance(self.value, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class _ReadResult:
    """What this process has read, or why it could not."""

    leaves: dict[str, Leaf] = dataclasses.field(default_factory=dict)  # by stored path; emptied while they are used
    sums: Mapping[str, Sums] = dataclasses.field(default_factory=dict)  # over this process's part of the leaves
    num_bytes: int = 0
    error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class _FinishedLeaves:
    """The leaves in the form of `like`."""

    leaves: Mapping[str, Leaf]
    overflows: Sequence[str]  # leaves with values that are too large for their dtype, a line each


class RestoreOperation:
    """A matched restore that has not started; its arguments are those of `restore`.

    With `casts_are_shown` a warning lists the leaves whose dtype changes.
    """

    def __init__(
        self,
        opened: Opened,
        like: PyTree,
        *,
        only: str | None = None,
        rename: Mapping[str, str] | None = None,
        missing: Missing = "error",
        extra: Extra = "error",
        read_once: bool = False,
        mmap: bool = False,
        casts_are_shown: bool = True,
    ) -> None:
        self.opened = opened
        self._casts_are_shown = casts_are_shown
        self._like = like
        self._read_once = read_once
        self._mmap = mmap
        self.phases = Phases()
        with self.phases("plan"):
            _check_policies(missing, extra)
            renames = dict(rename or {})
            by_path = _leaves.flatten(like)
            self._like_leaves: dict[str, _LikeLeaf] = {}
            for path, value in by_path.items():
                self._like_leaves[_leaves.text(path)] = _LikeLeaf(path, value)
            self._targets = self._abstract_leaves(_requested_paths(like, list(self._like_leaves), only))
            described = self._described_leaves()
            roots = _roots(like, only)
            numbered = _leaves.by_number(like)
            # Before matching: reading the types of values may take time, so only of those that may be needed.
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
                opened,
                self.match,
                self._stored,
                self._targets,
                abstract=self._abstract_keys(),
                rename=renames,
                missing=missing,
                extra=extra,
            )
        mesh = mesh_layout(self._targets)
        self.record: dict[str, Json] = {"began_at": self.phases.began_at, "error": None, "mesh": mesh}

    def _abstract_leaves(self, keys: Sequence[str]) -> dict[str, Target]:
        """Returns some leaves of `like`, arrays by shape, dtype and sharding."""
        # All leaves are passed, not only these: arrays on no mesh get that of the others.
        by_path = leaf_values.abstract(self._like_values())
        return {key: by_path[self._like_leaves[key].path] for key in keys}

    def _like_values(self) -> dict[_leaves.Path, object]:
        """Returns the leaves of `like` by path."""
        return {leaf.path: leaf.value for leaf in self._like_leaves.values()}

    def _described_leaves(self) -> dict[str, _manifest.StoredLeaf]:
        """Returns the leaves to read as a checkpoint would describe them: without the padding of this mesh."""
        by_path = {self._like_leaves[key].path: target for key, target in self._targets.items()}
        storable = leaf_values.storable(by_path, abstract=True)
        logical_shapes = _leaves.by_text(_leaves.logical_shapes(self._like))
        return _manifest.describe_all(storable, logical_shapes)

    def _abstract_keys(self) -> set[str]:
        """Returns the leaves of `like` that have no value."""
        return {key for key, leaf in self._like_leaves.items() if leaf.is_abstract}

    def _possible_paths(self, numbered: Mapping[str, str], rename: Mapping[str, str]) -> list[str]:
        """Returns the paths at which the leaves to read may be stored: by key or, by earlier versions, by number."""
        paths = []
        for key in self._targets:
            paths.append(renamed(key, rename))
            paths.append(renamed(numbered.get(key, key), rename))
        return paths

    def _stored_by_number(self, numbered: Mapping[str, str], rename: Mapping[str, str]) -> dict[str, str]:
        """Returns the leaves that are stored by number and not by key, with their stored paths."""
        by_number = {}
        for key, number in numbered.items():
            stored_path = renamed(number, rename)
            is_stored_by_key = renamed(key, rename) in self._stored
            if key in self._targets and not is_stored_by_key and stored_path in self._stored:
                by_number[key] = stored_path
        return by_number

    def _not_parameters(self, roots: Sequence[str], numbered: Mapping[str, str], rename: Mapping[str, str]) -> set[str]:
        """Returns the stored leaves that `only="params"` skips and does not report: all of them but parameters."""
        ignored: set[str] = set()
        for root in roots:
            ignored |= surplus.not_parameters(self._stored, renamed(root, rename))
        # The others of `like`, such as statistics, are not read either, but the model has a place for them.
        for key in self._like_leaves.keys() - self._targets.keys():
            for path in (key, numbered.get(key, key)):
                ignored.update(surplus.places(renamed(path, rename), self._stored))
        return ignored

    def _without_copies(self) -> dict[str, str]:
        """Takes surplus arrays that are copies of restored ones out of the match, and returns them."""
        # The restore fails in any case: no values are read for a better message.
        if self.match.problems or self.match.missing:
            return {}
        copies = surplus.copies(self.opened, self.match.extra, self.match.used)
        # A list and no set: errors and notes show them in the stored order.
        rest = [path for path in self.match.extra if path not in copies]
        self.match = dataclasses.replace(self.match, extra=tuple(rest))
        return copies

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """The dtypes of the arrays to restore, by stored path; without those restored in several dtypes."""
        dtypes: dict[str, set[np.dtype]] = collections.defaultdict(set)
        for key, pick in self.match.picks.items():
            target = self._targets[key]
            if isinstance(target, jax.ShapeDtypeStruct):
                for path in pick.stored:
                    dtypes[path].add(target.dtype)
        return {path: of_path.pop() for path, of_path in dtypes.items() if len(of_path) == 1}

    @functools.cached_property
    def reads(self) -> dict[str, Target]:
        """The arrays to read, by stored path, with shardings."""
        targets: dict[str, Target] = {}
        # A stored leaf may be read for several leaves, as layers of a stack: once, in the sharding of the first.
        for key, pick in self.match.picks.items():
            for path in pick.stored:
                if path not in targets:
                    targets[path] = to_read(self._stored[path], pick, self._targets[key])
        return targets

    @functools.cached_property
    def forecast(self) -> Forecast:
        """What this process will read."""
        sizes = []
        touched_bytes = 0
        host_bytes = 0
        for path, target in self.reads.items():
            if isinstance(target, np.ndarray):
                host_bytes += target.nbytes
            leaf = self._stored[path]
            if not hasattr(target, "shape") or not leaf.is_array:
                continue
            boxes = boxes_of(leaf, target)
            itemsize = np.dtype(leaf.dtype).itemsize
            sizes.append(sum(map(size_of, boxes)) * itemsize)
            touched_bytes += self.opened.touched(path, leaf, boxes) * itemsize
        # One batch is read while another is copied to the devices; a leaf may be larger than a batch.
        in_flight_bytes = min(2 * (BATCH_BYTES + max(sizes, default=0)), touched_bytes)
        num_readers = max(1, len(self._read_group))
        if num_readers > 1:
            in_flight_bytes *= 2  # as much again for the exchange
        return Forecast(
            wanted_bytes=sum(sizes),
            touched_bytes=touched_bytes // num_readers,
            host_bytes=host_bytes + in_flight_bytes,
        )

    @functools.cached_property
    def _read_group(self) -> tuple[int, ...]:
        """The processes that each read a part of the values that all of them need; empty if nothing is shared."""
        if not self._read_once or self._mmap:
            return ()
        if jax.process_count() == 1 or not isinstance(self.opened, PackedCheckpoint):
            return ()
        return read_group(self.reads.values())

    def run(self, *, verify: bool, timeout_s: float) -> PyTree:
        """Reads, and returns new objects of the types in `like`; a `RunError` names the damage."""
        path = self.opened.path
        result = self._read_or_error(verify, timeout_s)
        message = {"sums": result.sums, "report": self.phases.report(num_bytes=result.num_bytes)}
        # All or none: a process that failed alone would leave the others waiting for it in their next collective.
        replies = all_or_none(f"read {path}", message, result.error, failed=self._failed, timeout_s=timeout_s)
        if result.sums and self.opened.manifest is not None:
            _check_sums(path, self.opened.manifest, [reply["sums"] for reply in replies])
        with self.phases("finish"):
            finished = self._finished(result.leaves)
            restored = self._filled(finished.leaves)
        if finished.overflows and is_primary():
            note = _list(
                "leaf has values too large for its dtype in `like`",
                "leaves have values too large for their dtypes in `like`",
                finished.overflows,
            )
            warn_user(f"{path} is restored; {note}", CheckpointWarning)
        if not isinstance(self.opened, PackedCheckpoint):  # packed checkpoints keep only the data they still need
            give_memory_back()
        self.record["processes"] = [reply["report"] for reply in replies]
        return restored

    def _read_or_error(self, verify: bool, timeout_s: float) -> _ReadResult:
        """Reads; an error becomes a part of the result, because the other processes wait for this one's report."""
        shared_reads = SharedReads(self._read_group, timeout_s=timeout_s) if self._read_group else None
        try:
            return self._read(verify, shared_reads)
        except OtherFailedError:  # that process reports the reason
            return _ReadResult()
        except Exception as error:
            if shared_reads is not None:
                shared_reads.fail()
            return _ReadResult(error=error)

    def _failed(self, failures: Mapping[int, Mapping[str, Json]]) -> RunError:
        """Makes this process's error for those of others."""
        path = self.opened.path
        why = reasons_of(failures)
        kinds = {parts["kind"] for parts in failures.values()}
        # By name, as the errors of other processes come as text.
        if BucketError.__name__ in kinds and isinstance(path, BucketPath):
            return bucket_error(path, why)
        return unreadable(path, why)

    def _read(self, verify: bool, shared_reads: SharedReads | None) -> _ReadResult:
        """Reads the stored leaves, and sums this process's part of them."""
        manifest = self.opened.manifest
        if verify and manifest is not None:
            with self.phases("plan"):
                changed = _manifest.damage(self.opened.path, manifest)
                if changed:
                    why = f"{len(changed)} of {counted(len(manifest.files), 'file')} changed since it was saved."
                    raise damaged(self.opened.path, changed, why)
        self._warn(verify)
        with self.phases("read"):
            if isinstance(self.opened, PackedCheckpoint):
                leaves = self.opened.load(self.reads, shared_reads, mmap=self._mmap)
            else:
                leaves = self.opened.load(self.reads)
            # Copies to the devices run on after `load`: their time is part of the phase, and errors belong to it.
            jax.block_until_ready(leaves)
        sums: Mapping[str, Sums] = {}
        if verify and manifest is not None:
            with self.phases("verify"):
                sums = _sums_of(leaves, manifest)
        return _ReadResult(leaves, sums, self.forecast.wanted_bytes)

    def _filled(self, finished: Mapping[str, Leaf]) -> PyTree:
        """Returns new objects of the kinds in `like`, with the values read."""
        positions: list[str] = []
        values: list[str] = []
        for key, leaf in finished.items():
            target = self._like_leaves[key].value
            if is_data_position(target):
                # All are checked before the first one moves: a restore that fails leaves the user's iterators alone.
                check_position(target, leaf)
                positions.append(key)
            else:
                values.append(key)
        filled = self._like_values()
        for key in [*values, *positions]:  # positions last: other leaves may not fit
            leaf = self._like_leaves[key]
            filled[leaf.path] = leaf_values.restored(key, finished[key], leaf.value)
        return _leaves.unflatten_like(self._like, filled)

    def _finished(self, stored_leaves: dict[str, Leaf]) -> _FinishedLeaves:
        """Converts the leaves that were read; each is removed after its last use, and so freed."""
        picks = self.match.picks
        uses_left: collections.Counter[str] = collections.Counter()
        for pick in picks.values():
            uses_left.update(pick.stored)
        finished: dict[str, Leaf] = {}
        overflows: list[str] = []
        # One stored leaf at a time, so that at most one stack is in memory twice.
        for key in sorted(picks, key=lambda key: picks[key].stored[0]):
            pick = picks[key]
            target = self._targets[key]
            with own_mesh(target):
                parts = [stored_leaves[path] for path in pick.stored]
                leaf = finish(pick, parts, target)
                count = num_overflows(pick, parts, leaf)
                if count:
                    stored_dtype = getattr(parts[0], "dtype", type(parts[0]).__name__)
                    values = counted(count, "value")
                    overflows.append(f"{key}  {stored_dtype} -> {leaf.dtype}: {values} became inf or nan")
                del parts  # a reference would keep them
            for path in pick.stored:
                is_needed_again = uses_left[path] > 1
                if is_needed_again and leaf is stored_leaves[path]:
                    leaf = leaf.copy()  # a separate array, so that it can be donated alone
            finished[key] = leaf
            for path in pick.stored:
                uses_left[path] -= 1
                if not uses_left[path]:
                    del stored_leaves[path]
        return _FinishedLeaves(finished, overflows)

    def _warn(self, verify: bool) -> None:
        """Warns once, with everything that may be unexpected."""
        notes = [*self._notes_on_leaves(), *self._notes_on_reading(verify)]
        if notes and is_primary():  # the others have the same
            warn_user(f"{self.opened.path} is restored; " + "\n".join(notes), CheckpointWarning)

    def _notes_on_leaves(self) -> list[str]:
        """Returns notes on leaves that are not restored as they are stored, or not at all."""
        match = self.match
        still_abstract = sorted(self._abstract_keys() - match.picks.keys())
        copies = [f"{name}  equal to {original}" for name, original in self._copies.items()]
        by_number = [f"{key}  stored as {stored}" for key, stored in self._by_number.items()]
        # Saved by a version, or a library, that numbers them: their order then is not known.
        in_order = "stored by number, and read in the order of `like`"
        notes = [
            _list("leaf changes dtype", "leaves change dtype", match.casts if self._casts_are_shown else ()),
            _list("leaf keeps its value in `like`", "leaves keep their values in `like`", match.missing),
            _list("leaf stays abstract, as in `like`", "leaves stay abstract, as in `like`", still_abstract),
            _list("stored leaf is skipped", "stored leaves are skipped", match.extra),
            _list("stored stack is cut", "stored stacks are cut", match.cut),
            *self.opened.notes,
            _list("stored leaf is a copy of another", "stored leaves are copies of others", copies),
            _list(f"leaf of a dict-like node is {in_order}", f"leaves of dict-like nodes are {in_order}", by_number),
        ]
        return [note for note in notes if note]

    def _notes_on_reading(self, verify: bool) -> list[str]:
        """Returns notes on what could not be done as requested, and on needless reads."""
        notes = []
        is_packed = isinstance(self.opened, PackedCheckpoint)
        if verify and self.opened.manifest is None and isinstance(self.opened, OrbaxCheckpoint):
            notes.append("it has no checksums to check: jshard did not write it.")
        if self._mmap:
            why = self._why_not_mapped()
            if why:
                notes.append(f"it was read, not mapped: {why}.")
        if self._read_once and jax.process_count() > 1 and not is_packed:
            notes.append("read_once is for packed checkpoints: here every process read all that it needs.")
        unneeded_bytes = self.forecast.touched_bytes - self.forecast.wanted_bytes
        if self.forecast.amplification > _MAX_AMPLIFICATION and unneeded_bytes > _UNNEEDED_BYTES:
            notes.append(
                f"{self.forecast}.\n"
                "It is stored in pieces for another layout. If you restore it often, rewrite it:\n"
                f"jshard ckpt reshard {self.opened.path} {self.opened.path}-resharded --mesh ..."
            )
        return notes

    def _why_not_mapped(self) -> str:
        """Returns the reason that files cannot be mapped, if any."""
        if not isinstance(self.opened, PackedCheckpoint):
            return "it is not packed"
        if not any(_is_array_on_cpu(target) for target in self.reads.values()):
            return "the arrays are not on CPU devices"
        if not self.opened.can_be_mapped:
            return "it is not on a local disk"
        return ""


def _is_array_on_cpu(target: Target) -> bool:
    return isinstance(target, jax.ShapeDtypeStruct) and is_on_cpu(target)


def _sums_of(leaves: Mapping[str, Leaf], manifest: _manifest.Manifest) -> Mapping[str, Sums]:
    """Returns the checksums over this process's part of those leaves that have some in the manifest."""
    keys = []
    for key in leaves:
        stored = manifest.leaves.get(key)
        if stored is not None and stored.sums:
            keys.append(key)

    def sums(key: str) -> Sums:
        return sums_of(held_parts(leaves[key]), manifest.leaves[key].shape)

    with concurrent.futures.ThreadPoolExecutor(_SUMMING_THREADS) as pool:
        return dict(zip(keys, pool.map(sums, keys), strict=True))


def _requested_paths(like: PyTree, paths: Sequence[str], only: str | None) -> list[str]:
    """Returns those of the paths of `like` that are read; raises `CheckpointError` if there are none."""
    if not paths or isinstance(like, str | os.PathLike):
        raise CheckpointError(
            "There is nothing to restore into.",
            where=f"like={like!r}",
            why="`like` has no leaves to restore into; it must be a state, live or abstract.",
            do='restore(path, like={"model": model, "optimizer": optimizer, "step": 0})',
        )
    if only is None:
        return list(paths)
    if only == "params":
        requested = parameter_paths(like, dict.fromkeys(paths))
        why = "`like` has no nnx parameters in a module, and nothing under a name `params`."
    else:
        requested = {path for path in paths if path == only or path.startswith(f"{only}/")}
        names = sorted(first_keys(paths))
        why = f"nothing starts so; paths of `like` start with {', '.join(names)}."
    if not requested:
        raise CheckpointError(
            "There is nothing to restore.",
            where=f"only={only!r}",
            why=why,
            do='only="params", or a path prefix, such as only="model/blocks".',
        )
    return [path for path in paths if path in requested]


def _roots(like: PyTree, only: str | None) -> list[str]:
    """Returns the paths below which stored leaves without a place in `like` are extra; without any, all of them are."""
    if only == "params":
        return sorted(parameter_roots(like))
    if only is not None:  # leaves outside it are not requested
        return [only]
    if isinstance(like, Mapping):
        return [str(name) for name in like]
    return []


def _check_policies(missing: str, extra: str) -> None:
    _check_choice("missing", missing, ("error", "init"))
    _check_choice("extra", extra, ("error", "ignore"))


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise CheckpointError(
            "The restore has an invalid argument.",
            where=f"{name}={value!r}",
            why=f"it must be one of {', '.join(known)}.",
            do=f'{name}="{known[0]}"',
        )


def _check_sums(path: Place, manifest: _manifest.Manifest, parts: Sequence[Mapping[str, Sums]]) -> None:
    """Compares the checksums of the values read by all processes with those in the manifest."""
    differing = []
    for key in parts[0]:
        leaf = manifest.leaves[key]
        if add(part[key] for part in parts) != leaf.sums:
            differing.append(f"{key}  {leaf.shape} {leaf.dtype}")
    if differing:
        raise damaged(path, differing, "the values read differ from the saved ones: their checksums do not match.")


def _list(singular: str, plural: str, lines: Sequence[str]) -> str:
    """Returns a note that counts these lines, and shows the first of them; none without lines."""
    if not lines:
        return ""
    shown = [printable(line) for line in lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        shown.append(f"... and {len(lines) - _SHOWN} more")
    return "\n  ".join([f"{counted(len(lines), singular, plural)}:", *shown])
