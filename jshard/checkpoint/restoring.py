"""A restore: match, check, read, verify, and bring every leaf into the form in which it is wanted."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _seal
from jshard.checkpoint.balance import cut_further, spreads
from jshard.checkpoint.barrier import exchange
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning
from jshard.checkpoint.forecasting import Forecast, forecast_reads
from jshard.checkpoint.matching import bytes_here, finish, match, num_overflows, own_mesh, renamed, to_read
from jshard.checkpoint.mismatch import check_fits
from jshard.checkpoint.opened import Opened, OrbaxCheckpoint, unreadable
from jshard.checkpoint.position import check_position, is_data_position
from jshard.checkpoint.saving import give_memory_back
from jshard.checkpoint.sums import LeafSums, Sums, add
from jshard.checkpoint.timeline import Phases, mesh_layout
from jshard.errors import RunError, printable

_NAME = "params"


def parameter_paths(like: Any, paths: Mapping[str, Any]) -> set[str]:
    """Those of the paths of a state that are parameters.

    Args:
        like: the state.
        paths: every leaf of it, by path.
    """
    is_named = isinstance(like, Mapping) and not isinstance(like, nnx.State)
    parts = [((str(name),), value) for name, value in like.items()] if is_named else [((), like)]
    begins = {_leaves.text(begin) for path, value in parts for begin in _begins(value, path)}
    if "" in begins:
        return set(paths)
    return {path for path in paths if any(above in begins for above in _and_above(path))}


def _begins(value: Any, path: _leaves.Path, *, within: bool = False) -> Iterator[_leaves.Path]:
    """The beginnings of the paths of parameters in a part of a state; `within` a named tuple those of modules alone."""
    if isinstance(value, nnx.Optimizer):
        return
    if path[-1:] == (_NAME,) and not within:
        yield path
    elif isinstance(value, nnx.Module if within else nnx.Pytree | nnx.State):
        # Variables of a part itself lie under their own names, and those of a module in a pytree one key deeper.
        for inner, variable in nnx.to_flat_state(value if isinstance(value, nnx.State) else nnx.state(value)):
            if isinstance(variable, nnx.Param):
                yield *path, *map(str, inner)
    else:
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        for key, child in _children(value):
            yield from _begins(child, (*path, key), within=within or (is_named and key != _NAME))


def _children(node: Any) -> list[tuple[str, Any]]:
    """What lies directly below a node of a pytree, by key."""
    found = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return [(jax.tree_util.keystr(path, simple=True), child) for path, child in found if path]


def _and_above(path: str) -> list[str]:
    keys = path.split("/")
    return ["/".join(keys[:count]) for count in range(1, len(keys) + 1)]


# A restore: match, check, read, verify, and bring every leaf into the form in which it is wanted.

_SUMMING_THREADS = 2
_AMPLIFICATION = 4.0  # bytes read for each that is wanted: from here on it is worth a word
_WORTH_BYTES = 1 << 30  # of reads in vain

_log = logging.getLogger("jshard.checkpoint")

Missing = Literal["error", "init"]
Extra = Literal["error", "ignore"]


class Restoring:
    """A restore that was matched and not begun.

    Args:
        opened: the checkpoint.
        like: what `restore` takes.
        only: "params", or the beginning of the paths to be read.
        rename: see `restore`.
        missing: see `restore`.
        extra: see `restore`.
        read_once: see `restore`.

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
    ) -> None:
        self.opened, self._like, self._read_once = opened, like, read_once
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
            described = {key: _seal.describe(leaf, logical.get(key)) for key, leaf in stored_kinds.items()}
            names = [str(name) for name in like] if isinstance(like, Mapping) else []
            part = only if only != "params" else None
            if only is not None:  # of parameters, what lies beside them is not asked for
                names = asked if part is None else [part]
            self._stored = opened.leaves_for([renamed(key, rename) for key in asked])
            self.match = match(self._stored, described, names=names, rename=rename, part=part)
            check_fits(
                opened.path,
                self.match,
                self._stored,
                self._wanted,
                abstract=[key for key in self._live if isinstance(self._live[key][1], jax.ShapeDtypeStruct)],
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

    @property
    def reads(self) -> dict[str, Any]:
        """What is read, by stored path, with shardings."""
        found: dict[str, Any] = {}
        for key, pick in self.match.picks.items():
            for path in pick.stored:
                found.setdefault(path, self._spread(to_read(self._stored[path], pick, self._wanted[key])))
        return found

    @functools.cached_property
    def forecast(self) -> Forecast:
        """What this process will read."""
        reads = self.reads
        return forecast_reads(self._stored, reads, in_flight_bytes=self.opened.in_flight_bytes(reads))

    def _spread(self, like: Any) -> Any:
        """An array to be read, cut further where several processes would read the same."""
        if not isinstance(like, jax.ShapeDtypeStruct) or jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            return like
        if not self._read_once or not (axes := spreads(like.sharding)):
            return like
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=cut_further(like.sharding, like.shape, axes))

    def run(self, *, verify: bool, timeout_s: float) -> Any:
        """Reads, and returns new objects of the kinds in `like`.

        Args:
            verify: whether the sums of what was read are compared with those of the seal.
            timeout_s: how long to wait for other processes.

        Raises:
            RunError: some of it is damaged; the leaves are named.
        """
        self._warn(verify)
        found, sums, error = {}, {}, None
        try:
            found, sums = self._read(verify)
        except (RunError, CheckpointError) as caught:  # the others wait to hear of it
            error = caught
        told = json.dumps({"error": error and error.why, "sums": sums, "report": self._report()})
        heard = [json.loads(text) for text in exchange(f"read {self.opened.path}", told, timeout_s=timeout_s)]
        if error is not None:
            raise error
        if failed := [f"process {number}: {other['error']}" for number, other in enumerate(heard) if other["error"]]:
            raise unreadable(self.opened.path, "\n".join(failed))
        if sums and self.opened.seal is not None:
            _check_sums(self.opened.path, self.opened.seal, [other["sums"] for other in heard])
        with self.phases("finish"):
            restored = self._filled(found)
        if self._overflows:
            what = f"{len(self._overflows)} leaves hold values that are too large for the dtypes of `like`"
            message = f"{self.opened.path} is restored; {_list(what, tuple(self._overflows))}"
            warnings.warn(message, CheckpointWarning, stacklevel=3)
        give_memory_back()
        self.record["processes"] = [other["report"] for other in heard]
        return restored

    def _read(self, verify: bool) -> tuple[dict[str, Any], dict[str, Sums]]:
        """The stored leaves, and the sums over what this process holds of them."""
        seal = self.opened.seal
        if verify and seal is not None:
            with self.phases("plan"):
                _check_files(self.opened.path, seal)
        with self.phases("read"):
            found = self.opened.read(self.reads)
            jax.block_until_ready(found)
        if not verify or seal is None:
            return found, {}
        with self.phases("verify"):
            summed = [key for key in found if key in seal.leaves and seal.leaves[key].sums]
            total = lambda key: LeafSums(found[key], None if seal.leaves[key].key else seal.leaves[key].shape).total()
            with concurrent.futures.ThreadPoolExecutor(_SUMMING_THREADS) as pool:
                return found, dict(zip(summed, pool.map(total, summed), strict=True))

    def _report(self) -> dict[str, Any]:
        return self.phases.report(num_bytes=sum(map(bytes_here, self.reads.values())))

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
                    dtypes = f"{parts[0].dtype} -> {leaf.dtype}"
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
        told = []
        if self.match.casts:
            told.append(_list(f"{len(self.match.casts)} leaves change their dtype", self.match.casts))
        if self.match.missing:
            told.append(_list(f"{len(self.match.missing)} leaves stay as `like` has them", self.match.missing))
        if abstract := tuple(sorted(key for key, live in self._live.items() if self._stays_abstract(key, live[1]))):
            told.append(_list(f"{len(abstract)} leaves stay without values, as `like` has them", abstract))
        if self.match.extra:
            told.append(_list(f"{len(self.match.extra)} stored leaves are left out", self.match.extra))
        if verify and self.opened.seal is None and isinstance(self.opened, OrbaxCheckpoint):
            told.append("it has no sums to be checked by: jshard did not write it.")
        in_vain = self.forecast.touched_bytes - self.forecast.wanted_bytes
        if self.forecast.amplification > _AMPLIFICATION and in_vain > _WORTH_BYTES:
            told.append(
                f"{self.forecast}.\n"
                "It is stored in pieces for another layout; where it is restored often, rewrite it:\n"
                f"jshard ckpt reshard {self.opened.path} {self.opened.path}-resharded --mesh ..."
            )
        _log.info("%s: %s", self.opened.path, self.forecast)
        if told:
            message = f"{self.opened.path} is restored; " + "\n".join(told)
            warnings.warn(message, CheckpointWarning, stacklevel=4)

    def _stays_abstract(self, key: str, live: Any) -> bool:
        return isinstance(live, jax.ShapeDtypeStruct) and key not in self.match.picks


def _asked(like: Any, live: Mapping[str, tuple[_leaves.Path, Any]], only: str | None) -> list[str]:
    """The paths of `like` that are to be read."""
    if not live or isinstance(like, str | os.PathLike):
        raise CheckpointError(
            "There is nothing to restore into.",
            where=f"like={like!r}",
            why="`like` is a state without values, or not a state: it says what is read, and where it is to lie.",
            do='restore(path, like={"model": model, "optimizer": optimizer, "step": 0})',
        )
    if only is None:
        return list(live)
    below = {key for key in live if key == only or key.startswith(f"{only}/")}
    found = parameter_paths(like, live) if only == "params" else below
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


def _check_files(path: Path, seal: _seal.Seal) -> None:
    if found := _seal.damage(path, seal):
        raise damaged(path, found, f"of {len(seal.files)} files {len(found)} are not as they were when it was saved.")


def _check_sums(path: Path, seal: _seal.Seal, heard: list[dict[str, Any]]) -> None:
    """Compares the sums of what all processes have read with those of the seal."""
    bad = []
    for key in heard[0]:
        leaf = seal.leaves[key]
        total = add(other[key] for other in heard)
        if total != leaf.sums:
            bad.append(f"{key}  {leaf.shape} {leaf.dtype}")
    if bad:
        raise damaged(path, bad, "the values that were read are not those that were saved: their sums differ.")


def damaged(path: Path, where: list[str], why: str) -> RunError:
    """The error for a checkpoint of which some files or leaves have changed since it was saved."""
    do = "copy it again from where it is whole, or restore another one."
    return RunError(unreadable(path, why).what, where=[str(path), *where], why=why, do=do)


def _list(head: str, lines: tuple[str, ...], shown: int = 10) -> str:
    more = [f"... and {len(lines) - shown} more"] if len(lines) > shown else []
    return "\n  ".join([f"{head}:", *map(printable, lines[:shown]), *more])
