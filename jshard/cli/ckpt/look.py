"""`jshard ckpt ls` and `inspect`: which checkpoints a run has, and the leaves of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Group
from rich.text import Text

from jshard._text import human_bytes
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint.comparing import ListedCheckpoint, Listing, listing
from jshard.checkpoint.lookup import checkpoint_at
from jshard.checkpoint.manifest import Manifest, StoredLeaf
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.readers import open_checkpoint
from jshard.cli._arguments import parse
from jshard.cli.ckpt._shared import as_json, mesh_text, moment, shape_text
from jshard.errors import ShardingError, printable
from jshard.inspect.tables import add_row, made_table, show, whole_line


@dataclasses.dataclass(frozen=True)
class LsArgs:
    """Lists checkpoints: whether their files are all there, and which is the latest, from which a run would go on.

    Of large files the sizes are looked at, and no values: for these see `jshard ckpt verify`. Exit codes: 0 done, 2
    there is no checkpoint.
    """

    path: tyro.conf.Positional[Path]
    """Folder of a run, folder of checkpoints by step, or one checkpoint."""
    json: bool = False
    """Print JSON and nothing else."""


def run_ls(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt ls`."""
    args = parse(LsArgs, argv, command="jshard ckpt ls")
    found = listing(args.path)
    if args.json:
        print(as_json(_listing_json(found)))
    else:
        show(_listing_table(found))
    return 0


def _listing_table(found: Listing) -> Group:
    table = made_table(
        "", "step>", "size>", "leaves>?", "saved>", "mesh", "processes>?", "jshard??", "metrics", "state"
    )
    for entry in found.entries:
        metrics = ", ".join(f"{name}={value:g}" for name, value in entry.metrics.items())
        cells = ("?" if entry.step is None else str(entry.step), human_bytes(entry.num_bytes, 1), str(entry.num_leaves))
        cells += (moment(entry.saved_at), mesh_text(entry.mesh), str(entry.processes or ""), _version(entry))
        add_row(table, *cells, metrics, _state(entry))
    lines = []
    for entry in found.entries:
        lines += [printable(f"{entry.path.name}: {line}") for line in entry.damage[:10]]
    why = "of a save that was interrupted, or is writing now; the next save of the run removes what is left over."
    lines += [f"{name}: {why}" for name in found.unfinished]
    return Group(whole_line(str(found.path)), table, *map(Text, lines))


def _version(entry: ListedCheckpoint) -> str:
    return entry.version or ("" if entry.damage else "(plain Orbax)")


def _state(entry: ListedCheckpoint) -> str:
    if not entry.is_complete:
        return "INCOMPLETE"
    return "DAMAGED" if entry.damage else "latest" if entry.is_latest else "complete"


def _listing_json(found: Listing) -> dict[str, object]:
    entries = [dataclasses.asdict(entry) | {"path": str(entry.path)} for entry in found.entries]
    return {"path": str(found.path), "checkpoints": entries, "unfinished": found.unfinished}


# `jshard ckpt inspect PATH`: the leaves of a checkpoint.


@dataclasses.dataclass(frozen=True)
class InspectArgs:
    """Shows the tree of a checkpoint: shapes, dtypes, bytes, how leaves were sharded, in which pieces they are stored.

    Layers that are alike are shown once: 0..11. No values are read. Exit codes: 0 done, 1 what describes it is damaged,
    2 there is no checkpoint.
    """

    path: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them (its newest is shown), or the folder of a run."""
    step: int | None = None
    """Of a folder, the checkpoint of this step."""
    below: Annotated[str, tyro.conf.arg(metavar="PREFIX")] = ""
    """Only leaves whose paths begin so, such as model/blocks."""
    depth: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Only so many levels; what is below is summed up."""
    json: bool = False
    """Print JSON and nothing else."""


def run_inspect(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt inspect`."""
    args = parse(InspectArgs, argv, command="jshard ckpt inspect")
    opened = open_checkpoint(checkpoint_at(args.path, args.step))
    begin = args.below.rstrip("/")
    shown = {p: leaf for p, leaf in opened.leaves.items() if not begin or p == begin or p.startswith(f"{begin}/")}
    if not shown:
        begins = sorted({printable(path.split("/")[0]) for path in opened.leaves})
        raise ShardingError(
            "There are no such leaves.",
            where=f"--below {args.below}",
            why=f"paths in {opened.path} begin with {', '.join(begins)}.",
            do=f"jshard ckpt inspect {args.path} --depth 1",
        )
    if args.json:
        print(as_json(_leaves_json(opened, shown)))
    else:
        show(_leaf_table(opened, shown, args.depth))
    return 0


def _leaf_table(opened: Opened, shown: Mapping[str, StoredLeaf], depth: int | None) -> Group:
    table = made_table("", "leaf", "shape", "dtype", "bytes>", "sharded over", "stored in pieces of")
    for name, node, level, count in _rows(_leaves.nested(shown), depth):
        indented = "  " * level + name
        if isinstance(node, StoredLeaf):
            cells = (shape_text(node.shape), node.kind, human_bytes(count * node.nbytes, 1), node.spec or "")
            chunk = "" if node.chunk in (None, node.shape) else shape_text(node.chunk)
            add_row(table, indented, *(cells if node.is_array else ("", node.kind, "", "")), chunk)
        else:
            below = _leaves.flat(node).values()
            add_row(
                table, indented + "/", _count(count * len(below)), "", human_bytes(count * _bytes(below), 1), "", ""
            )
    path, *lines = map(printable, _head(opened))
    sums = Text(f"{_count(len(shown))}, {human_bytes(_bytes(shown.values()), 1)}")
    return Group(whole_line(path), *map(Text, lines), table, sums)


def _head(opened: Opened) -> Iterator[str]:
    manifest: Manifest | None = opened.manifest
    yield str(opened.path)
    if manifest is None:
        yield "jshard did not write it: there are no sums to verify it by."
        return
    step = "" if manifest.step is None else f"step {manifest.step}, "
    mesh = mesh_text(manifest.mesh) or "1 device"
    yield f"{step}saved {moment(manifest.saved_at)} by {_processes(manifest)} on {mesh}"
    yield ", ".join(f"{package} {version}" for package, version in manifest.versions.items())
    if manifest.metrics:
        yield ", ".join(f"{name} {value:g}" for name, value in manifest.metrics.items())


def _processes(manifest: Manifest) -> str:
    return "1 process" if manifest.processes == 1 else f"{manifest.processes} processes"


def _rows(tree: Mapping[str, Any], depth: int | None, level: int = 0) -> Iterator[tuple[str, Any, int, int]]:
    """Name, leaf or folder, level, and how often it is there: layers that are alike are one row."""
    for name, node, count in _folded(tree):
        yield name, node, level, count
        if isinstance(node, Mapping) and (depth is None or level + 1 < depth):
            for inner, child, below, times in _rows(node, depth, level + 1):
                yield inner, child, below, times * count


def _folded(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
    keys = sorted(tree, key=lambda key: (key.isdecimal(), int(key) if key.isdecimal() else 0, key))
    runs: list[list[str]] = []
    for key in keys:
        before = runs[-1][-1] if runs else ""
        follows = key.isdecimal() and before.isdecimal() and int(key) == int(before) + 1
        if follows and _form(tree[before]) == _form(tree[key]):
            runs[-1].append(key)
        else:
            runs.append([key])
    for run in runs:
        yield run[0] if len(run) == 1 else f"{run[0]}..{run[-1]}", tree[run[0]], len(run)


def _form(node: Any) -> Any:
    if isinstance(node, StoredLeaf):
        return dataclasses.replace(node, sums=None)
    return {key: _form(child) for key, child in node.items()}


def _count(number: int) -> str:
    return f"{number} leaf" if number == 1 else f"{number} leaves"


def _bytes(leaves: Iterable[StoredLeaf]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def _leaves_json(opened: Opened, shown: Mapping[str, StoredLeaf]) -> dict[str, Any]:
    found = opened.manifest
    manifest = {} if found is None else dataclasses.asdict(dataclasses.replace(found, leaves={}, files={}))
    leaves = {path: dataclasses.asdict(leaf) | {"bytes": leaf.nbytes} for path, leaf in shown.items()}
    return {"path": str(opened.path), **manifest, "is_sealed": found is not None, "leaves": leaves}
