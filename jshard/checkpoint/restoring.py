"""A restore: match, check, read, verify, and bring every leaf into the form in which it is wanted."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import logging
import math
import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jshard._processes import all_or_none
from jshard._text import human_bytes
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.balance import OtherFailedError, Together, sharers
from jshard.checkpoint.buckets import BucketError, BucketPath, Place, bucket_error
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning
from jshard.checkpoint.files.layout import Limits
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.matching import finish, match, num_overflows, own_mesh, renamed, to_read
from jshard.checkpoint.mismatch import check_fits
from jshard.checkpoint.opened import Opened, held_boxes, unreadable
from jshard.checkpoint.packed import PackedCheckpoint, is_on_cpu
from jshard.checkpoint.position import check_position, is_data_position
from jshard.checkpoint.readers import OrbaxCheckpoint
from jshard.checkpoint.saving import give_memory_back
from jshard.checkpoint.sums import LeafSums, Sums, add
from jshard.checkpoint.timeline import Phases, mesh_layout
from jshard.errors import RunError, printable

_SUMMING_THREADS = 2
_AMPLIFICATION = 4.0  # bytes read for each that is wanted: from here on it is worth a word
_WORTH_BYTES = 1 << 30  # of reads in vain

_log = logging.getLogger("jshard.checkpoint")

Missing = Literal["error", "init"]
Extra = Literal["error", "ignore"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What this process will read of a checkpoint.

    Attributes:
        wanted_bytes: of the boxes that its devices will hold, each counted once.
        touched_bytes: that are read for them: of packed files those of the rows that some box is in; of others each box
            reads the stored chunks whole that it is in.
        host_bytes: memory of the host that the read takes beside the state: what is on its way at a time, and leaves
            that stay on the host.
        worst: the leaf that reads the most bytes in vain; None where none does.
    """

    wanted_bytes: int
    touched_bytes: int
    host_bytes: int
    worst: str | None = None

    @property
    def amplification(self) -> float:
        """Bytes read for each byte that is wanted."""
        return self.touched_bytes / self.wanted_bytes if self.wanted_bytes else 1.0

    def __str__(self) -> str:
        touched, wanted = human_bytes(self.touched_bytes, 1), human_bytes(self.wanted_bytes, 1)
        text = f"{touched} to read for {wanted} (x{self.amplification:.2f})"
        worst = f", most in vain for {self.worst}" if self.worst is not None else ""
        return f"{text}{worst}; up to {human_bytes(self.host_bytes, 1)} of host memory beside the state"


def _forecast(opened: Opened, stored: Mapping[str, StoredLeaf], reads: Mapping[str, Any]) -> Forecast:
    """What it comes to in this process to read some leaves."""
    wanted = touched = on_host = 0
    in_vain: dict[str, int] = {}
    for path, like in reads.items():
        leaf = stored[path]
        if not leaf.is_array or not hasattr(like, "shape"):
            continue
        boxes = _boxes(leaf, like)
        itemsize = jnp.dtype(leaf.dtype).itemsize
        here = sum(math.prod(stop - start for start, stop in box) for box in boxes) * itemsize
        there = opened.touched(path, leaf, boxes) * itemsize
        wanted, touched = wanted + here, touched + there
        in_vain[path] = there - here
        if not isinstance(like, jax.ShapeDtypeStruct):
            on_host += here
    worst = max(in_vain, key=lambda path: in_vain[path], default=None)
    return Forecast(
        wanted_bytes=wanted,
        touched_bytes=touched,
        host_bytes=on_host + min(opened.in_flight_bytes(reads), touched),
        worst=worst if worst is not None and in_vain[worst] else None,
    )


def _boxes(leaf: StoredLeaf, like: Any) -> tuple[Limits, ...]:
    """The boxes of a leaf that this process holds; a random key is read whole."""
    if not isinstance(like, jax.ShapeDtypeStruct) or like.sharding is None or len(like.shape) != len(leaf.shape):
        return (tuple((0, size) for size in leaf.shape),)
    return held_boxes(like.sharding, tuple(like.shape))


class Restoring:
    """A restore that was matched and not begun; its arguments are those of `restore`.

    Raises:
        CheckpointError: it does not fit; every leaf that is wrong is named.
    """

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
        map: bool = False,
    ) -> None:
        self.opened, self._like, self._read_once, self._map = opened, like, read_once, map
        self.phases = Phases()
        with self.phases("plan"):
            _check_policies(missing, extra)
            rename = dict(rename or {})
            self._live = {_leaves.text(path): (path, leaf) for path, leaf in _leaves.flatten(like).items()}
            asked = _asked(like, self._live, only)
            by_path = _leaves.abstract(dict(self._live.values()))
            self._wanted = {key: by_path[self._live[key][0]] for key in asked}
            stored_kinds = _leaves.storable(
                {self._live[key][0]: leaf for key, leaf in self._wanted.items()}, abstract=True
            )
            logical = {_leaves.text(path): shape for path, shape in _leaves.logical_shapes(like).items()}
            described = {key: _manifest.describe(leaf, logical.get(key)) for key, leaf in stored_kinds.items()}
            names = [str(name) for name in like] if isinstance(like, Mapping) else []
            part = only if only != "params" else None
            if only is not None:  # of parameters, what is beside them is not asked for
                names = asked if part is None else [part]
            self._stored = opened.leaves_for([renamed(key, rename) for key in asked])
            self.match = match(self._stored, described, names=names, rename=rename, part=part)
            check_fits(
                opened.path,
                self.match,
                self._stored,
                self._wanted,
                abstract=[key for key, (_, leaf) in self._live.items() if isinstance(leaf, jax.ShapeDtypeStruct)],
                rename=rename,
                missing=missing,
                extra=extra,
                items=opened.items,
            )
        self.record: dict[str, Any] = {
            "began_at": self.phases.began_at,
            "error": None,
            "mesh": mesh_layout(self._wanted),
        }

    @functools.cached_property
    def reads(self) -> dict[str, Any]:
        """What is read, by stored path, with shardings."""
        found: dict[str, Any] = {}
        for key, pick in self.match.picks.items():
            for path in pick.stored:
                found.setdefault(path, to_read(self._stored[path], pick, self._wanted[key]))
        return found

    @functools.cached_property
    def forecast(self) -> Forecast:
        """What this process will read."""
        found = _forecast(self.opened, self._stored, self.reads)
        if len(self._members) < 2:
            return found
        touched_bytes, host_bytes = found.touched_bytes // len(self._members), 2 * found.host_bytes
        return dataclasses.replace(found, touched_bytes=touched_bytes, host_bytes=host_bytes)

    @functools.cached_property
    def _members(self) -> tuple[int, ...]:
        """The processes that read a part each of what all of them want; empty where nothing is shared."""
        is_shared = (
            self._read_once and not self._map and jax.process_count() > 1 and isinstance(self.opened, PackedCheckpoint)
        )
        return sharers(self.reads.values()) if is_shared else ()

    def run(self, *, verify: bool, timeout_s: float) -> Any:
        """Reads, and returns new objects of the kinds in `like`; a `RunError` names what is damaged."""
        path, found, sums, num_bytes, error = self.opened.path, {}, {}, 0, None
        together = Together(self._members, timeout_s=timeout_s) if self._members else None
        try:
            found, sums = self._read(verify, together)
            num_bytes = self.forecast.wanted_bytes
        except OtherFailedError:
            pass
        except Exception as caught:  # the others wait to hear of it
            error = caught
            if together is not None:
                together.fail()
        own = {"sums": sums, "report": self.phases.report(num_bytes=num_bytes)}
        why = lambda failures: "\n".join(f"process {number}: {parts['why']}" for number, parts in failures.items())
        kinds = lambda failures: {parts["kind"] for parts in failures.values()}
        failed = lambda failures: (
            bucket_error(path, why(failures))
            if isinstance(path, BucketPath) and BucketError.__name__ in kinds(failures)
            else unreadable(path, why(failures))
        )
        heard = all_or_none(f"read {path}", own, error, failed=failed, timeout_s=timeout_s)
        if sums and self.opened.manifest is not None:
            _check_sums(path, self.opened.manifest, [other["sums"] for other in heard])
        with self.phases("finish"):
            restored = self._filled(found)
        if self._overflows:
            what = "leaves hold values that are too large for the dtypes of `like`"
            message = f"{path} is restored; {_list(what, tuple(self._overflows))}"
            warnings.warn(message, CheckpointWarning, stacklevel=3)
        if not isinstance(self.opened, PackedCheckpoint):  # which keeps what it will need again, and no more
            give_memory_back()
        self.record["processes"] = [other["report"] for other in heard]
        return restored

    def _read(self, verify: bool, together: Together | None) -> tuple[dict[str, Any], dict[str, Sums]]:
        """The stored leaves, and the sums over what this process holds of them."""
        manifest = self.opened.manifest
        if verify and manifest is not None:
            with self.phases("plan"):
                _check_files(self.opened.path, manifest)
        self._warn(verify)
        with self.phases("read"):
            if isinstance(self.opened, PackedCheckpoint):
                found = self.opened.load(self.reads, together, map=self._map)
            else:
                found = self.opened.load(self.reads)
            jax.block_until_ready(found)
        if not verify or manifest is None:
            return found, {}
        with self.phases("verify"):
            summed = [key for key in found if key in manifest.leaves and manifest.leaves[key].sums]
            shape = lambda stored: None if stored.key else stored.shape
            total = lambda key: LeafSums(found[key], shape(manifest.leaves[key])).total()
            with concurrent.futures.ThreadPoolExecutor(_SUMMING_THREADS) as pool:
                return found, dict(zip(summed, pool.map(total, summed), strict=True))

    def _unmapped(self) -> str:
        """Why nothing of it can be mapped, if that is so."""
        if not isinstance(self.opened, PackedCheckpoint):
            return "it is not packed"
        if not any(isinstance(like, jax.ShapeDtypeStruct) and is_on_cpu(like) for like in self.reads.values()):
            return "the arrays are not on CPU devices"
        return "" if self.opened.can_be_mapped else "it is not on a disk of this machine"

    def _filled(self, found: dict[str, Any]) -> Any:
        """New objects of the kinds in `like`, made of what was read."""
        filled = dict(self._live.values())
        finished = self._finished(found)
        for key, leaf in finished.items():  # all of them, before the first one moves
            if is_data_position(self._live[key][1]):
                check_position(self._live[key][1], leaf)
        for key, leaf in finished.items():
            path, like = self._live[key]
            filled[path] = _leaves.restored(leaf, like)
        return _leaves.unflatten_like(self._like, filled)

    def _finished(self, found: dict[str, Any]) -> dict[str, Any]:
        """Every wanted leaf, made of what was read; each stored leaf is let go after its last use."""
        left = collections.Counter(path for pick in self.match.picks.values() for path in pick.stored)
        finished = {}
        self._overflows: list[str] = []
        # Leaf by leaf of what is stored, so that no more than one stack is there twice.
        for key, pick in sorted(self.match.picks.items(), key=lambda item: item[1].stored[0]):
            with own_mesh(self._wanted[key]):
                parts = [found[path] for path in pick.stored]
                leaf = finish(pick, parts, self._wanted[key])
                if count := num_overflows(pick, parts, leaf):
                    dtypes = f"{getattr(parts[0], 'dtype', type(parts[0]).__name__)} -> {leaf.dtype}"
                    self._overflows.append(f"{key}  {dtypes}: {count} values became inf or nan")
                del parts
            shared = any(leaf is found[path] and left[path] > 1 for path in pick.stored)
            finished[key] = leaf.copy() if shared else leaf  # each is an array of its own, to be donated alone
            for path in pick.stored:
                left[path] -= 1
                if not left[path]:
                    del found[path]
        return finished

    def _warn(self, verify: bool) -> None:
        """One warning with all that was done and may not be expected."""
        rest = {key: leaf for key, (_, leaf) in self._live.items() if key not in self.match.picks}
        abstract = tuple(sorted(key for key, leaf in rest.items() if isinstance(leaf, jax.ShapeDtypeStruct)))
        done = {
            "leaves change their dtype": self.match.casts,
            "leaves stay as `like` has them": self.match.missing,
            "leaves stay without values, as `like` has them": abstract,
            "stored leaves are left out": self.match.extra,
        }
        notes = [_list(what, lines) for what, lines in done.items() if lines]
        if verify and self.opened.manifest is None and isinstance(self.opened, OrbaxCheckpoint):
            notes.append("it has no sums to be checked by: jshard did not write it.")
        if self._map and (why := self._unmapped()):
            notes.append(f"it was read, and not mapped: {why}.")
        if self._read_once and jax.process_count() > 1 and not isinstance(self.opened, PackedCheckpoint):
            notes.append("read_once is for packed checkpoints: of this one every process read what it wanted.")
        in_vain = self.forecast.touched_bytes - self.forecast.wanted_bytes
        if self.forecast.amplification > _AMPLIFICATION and in_vain > _WORTH_BYTES:
            notes.append(
                f"{self.forecast}.\n"
                "It is stored in pieces for another layout; where it is restored often, rewrite it:\n"
                f"jshard ckpt reshard {self.opened.path} {self.opened.path}-resharded --mesh ..."
            )
        _log.info("%s: %s", self.opened.path, self.forecast)
        if notes:
            message = f"{self.opened.path} is restored; " + "\n".join(notes)
            warnings.warn(message, CheckpointWarning, stacklevel=5)


def _asked(like: Any, live: Mapping[str, tuple[_leaves.Path, Any]], only: str | None) -> list[str]:
    """The paths of `like` that are to be read."""
    if not live or isinstance(like, str | os.PathLike):
        raise CheckpointError(
            "There is nothing to restore into.",
            where=f"like={like!r}",
            why="`like` is a state without values, or not a state: it says what is read, and where it is to be.",
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
            why="`like` has no parameters of nnx in a module, and nothing under a name `params`."
            if only == "params"
            else f"no path begins so; paths of `like` begin with {', '.join(sorted({k.split('/')[0] for k in live}))}.",
            do='only="params", or the beginning of a path, such as only="model/blocks".',
        )
    return [key for key in live if key in found]


def _check_policies(missing: str, extra: str) -> None:
    for name, value, known in (("missing", missing, ("error", "init")), ("extra", extra, ("error", "ignore"))):
        if value not in known:
            raise CheckpointError(
                "The restore cannot be understood.",
                where=f"{name}={value!r}",
                why=f"it is none of {', '.join(known)}.",
                do=f'{name}="{known[0]}"',
            )


def _check_files(path: Place, manifest: _manifest.Manifest) -> None:
    if found := _manifest.damage(path, manifest):
        raise _damaged(
            path, found, f"of {len(manifest.files)} files {len(found)} are not as they were when it was saved."
        )


def _check_sums(path: Place, manifest: _manifest.Manifest, heard: list[dict[str, Any]]) -> None:
    """Compares the sums of what all processes have read with those of the manifest."""
    bad = []
    for key in heard[0]:
        leaf = manifest.leaves[key]
        total = add(other[key] for other in heard)
        if total != leaf.sums:
            bad.append(f"{key}  {leaf.shape} {leaf.dtype}")
    if bad:
        raise _damaged(path, bad, "the values that were read are not those that were saved: their sums differ.")


def _damaged(path: Place, where: list[str], why: str) -> RunError:
    """The error for a checkpoint of which some files or leaves have changed since it was saved."""
    do = "copy it again from where it is whole, or restore another one."
    return RunError(unreadable(path, why).what, where=[str(path), *where], why=why, do=do)


def _list(what: str, lines: tuple[str, ...], shown: int = 10) -> str:
    more = [f"... and {len(lines) - shown} more"] if len(lines) > shown else []
    return "\n  ".join([f"{len(lines)} {what}:", *map(printable, lines[:shown]), *more])
