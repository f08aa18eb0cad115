"""`jshard ckpt ls`, `inspect`, `verify` and `diff`: list checkpoints, show, verify and compare their contents."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Group
from rich.text import Text

from jshard._text import counted, folded_names, human_bytes, is_layer, name_pattern
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.comparing import LeafDiff, Norms, diff
from jshard.checkpoint.listing import ListedCheckpoint, Listing, listing
from jshard.checkpoint.lookup import checkpoint_at
from jshard.checkpoint.manifest import Manifest, StoredLeaf
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.readers import ForeignCheckpoint, open_checkpoint
from jshard.checkpoint.verifying import Finding, Verdict, verify
from jshard.cli._arguments import parse
from jshard.cli.ckpt import as_json, progress
from jshard.errors import ShardingError, printable
from jshard.inspect.tables import FittedTable, add_row, made_table, show, whole_line
from jshard.recipes.hf_config import Reading, config_file, load, read
from jshard.recipes.hf_families import FAMILIES, HARMLESS


@dataclasses.dataclass(frozen=True)
class LsArgs:
    """Lists checkpoints: whether all their files exist, and which is the latest, from which a run would resume.

    Only the sizes of large files are checked; `jshard ckpt verify` checks their values. Exit codes: 0 done, 2 there is
    no checkpoint.
    """

    path: tyro.conf.Positional[Path]
    """Folder of a run, folder of checkpoints by step, or one checkpoint."""
    json: bool = False
    """Print JSON only."""


def run_ls(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt ls`."""
    args = parse(LsArgs, argv, command="jshard ckpt ls")
    found = listing(args.path)
    if args.json:
        entries = [dataclasses.asdict(entry) | {"path": str(entry.path)} for entry in found.entries]
        print(as_json({"path": str(found.path), "checkpoints": entries, "unfinished": found.unfinished}))
    else:
        show(_listing_table(found))
    return 0


def _listing_table(found: Listing) -> Group:
    names = "step>", "size>", "leaves>?", "saved>", "mesh", "processes>?", "jshard??", "metrics", "state"
    table = made_table("", *names)
    lines = []
    for entry in found.entries:
        metrics = ", ".join(f"{name}={value:g}" for name, value in entry.metrics.items())
        version = entry.version or ("" if entry.damage else "(plain Orbax)")
        state = "DAMAGED" if entry.damage else "latest" if entry.is_latest else "complete"
        cells = ("?" if entry.step is None else str(entry.step), human_bytes(entry.num_bytes, 1), str(entry.num_leaves))
        cells += (_moment(entry.saved_at), _mesh_text(entry.mesh), str(entry.processes or ""), version, metrics)
        add_row(table, *cells, state if entry.is_complete else "INCOMPLETE")
    for entry in found.entries:
        lines += [printable(f"{entry.path.name}: {line}") for line in entry.damage[:10]]
    why = "of a save that was interrupted, or is writing now; the next save of the run removes what is left over."
    lines += [f"{name}: {why}" for name in found.unfinished]
    return Group(whole_line(str(found.path)), table, *map(Text, lines))


# `jshard ckpt inspect PATH`: the leaves of a checkpoint.


@dataclasses.dataclass(frozen=True)
class InspectArgs:
    """Shows the tree of a checkpoint: shapes, dtypes, bytes, how leaves were sharded, and their stored pieces.

    For weights of Hugging Face it also shows their config.json: for each key the field of a recipe, or why there is
    none. Equal layers are shown once: 0..11. No values are read. Exit codes: 0 done, 1 its metadata are damaged, 2
    there is no checkpoint.
    """

    path: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them (its newest is shown), or the folder of a run."""
    step: int | None = None
    """Of a folder, the checkpoint of this step."""
    below: Annotated[str, tyro.conf.arg(metavar="PREFIX")] = ""
    """Only leaves whose paths start with this, such as model/blocks."""
    depth: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Show only N levels; deeper ones are summed up."""
    json: bool = False
    """Print JSON only."""


def run_inspect(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt inspect`."""
    args = parse(InspectArgs, argv, command="jshard ckpt inspect")
    opened = open_checkpoint(checkpoint_at(args.path, args.step))
    reading = _config_of(opened)
    begin = args.below.rstrip("/")
    leaves = opened.described()
    shown = {p: leaf for p, leaf in leaves.items() if not begin or p == begin or p.startswith(f"{begin}/")}
    if not shown:
        begins = sorted({printable(path.split("/")[0]) for path in opened.leaves})
        raise ShardingError(
            "There are no such leaves.",
            where=f"--below {args.below}",
            why=f"paths in {opened.path} begin with {', '.join(begins)}.",
            do=f"jshard ckpt inspect {args.path} --depth 1",
        )
    if args.json:
        config = {} if reading is None else {"config": [dataclasses.asdict(row) for row in reading.rows]}
        print(as_json(_leaves_json(opened, shown) | config))
        return 0
    show(_leaf_table(opened, shown, args.depth))
    if reading is not None:
        show(_config_table(reading))
    return 0


def _config_of(opened: Opened) -> Reading | None:
    """The config.json beside weights of another library; None if there is none."""
    if not isinstance(opened, ForeignCheckpoint):
        return None
    file = config_file(opened.path)
    return None if file is None else read(load(file), tuple(FAMILIES))


def _config_table(reading: Reading) -> Group:
    """The keys that a recipe reads or refuses, and a line with the others."""
    table = made_table("", "config.json", "value", "recipe")
    harmless = []
    without_field = "" if reading.family is None else "supported"
    for row in reading.rows:
        if not row.field and not row.problem and row.name in HARMLESS:
            harmless.append(row.name)
            continue
        add_row(table, *map(printable, (row.name, row.short, row.problem or row.field or without_field)))
    lines = []
    if harmless:
        lines.append(f"without effect on the logits: {', '.join(harmless)}")
    if reading.problems:
        lines.append("no recipe computes this model.")
    return Group(table, *map(Text, map(printable, lines)))


def _leaf_table(opened: Opened, shown: Mapping[str, StoredLeaf], depth: int | None) -> Group:
    table = made_table("", "leaf", "shape", "dtype", "bytes>", "sharded over", "stored in pieces of")
    rows = _rows(_tree(shown), depth)
    for name, node, level, count in itertools.islice(rows, _MOST_ROWS):
        indented = "  " * level + name
        if isinstance(node, StoredLeaf):
            cells = (_shape_text(node.shape), node.kind, human_bytes(count * node.nbytes, 1), node.spec or "")
            chunk = "" if node.chunk in (None, node.shape) else _shape_text(node.chunk)
            add_row(table, indented, *(cells if node.is_array else ("", node.kind, "", "")), chunk)
        else:
            below = _leaves.flat(node).values()
            cells = counted(count * len(below), "leaf"), "", human_bytes(count * _bytes(below), 1)
            add_row(table, indented + "/", *cells, "", "")
    path, *lines = map(printable, _head(opened))
    rest = sum(1 for _ in rows)
    if rest:
        lines.append(f"{counted(rest, 'row')} more: --depth 1, --below PREFIX or --json")
    sums = Text(f"{counted(len(shown), 'leaf')}, {human_bytes(_bytes(shown.values()), 1)}")
    return Group(whole_line(path), *map(Text, lines), table, sums)


_MOST_ROWS = 3000  # a table takes some milliseconds for each


def _tree(leaves: Mapping[str, StoredLeaf]) -> dict[str, Any]:
    """Leaves by path as nested dicts; unlike `leaves.nested` for any paths, as another program may have stored."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, last = path.split("/", _MOST_LEVELS)
        node = tree
        for key in folders:
            node = _below(node, key)
        if last in node:
            _below(node, last)[""] = leaf
        else:
            node[last] = leaf
    return tree


def _below(node: dict[str, Any], key: str) -> dict[str, Any]:
    """The folder of this name; a leaf of the same name is moved into it, without a name."""
    inner = node.get(key)
    if not isinstance(inner, dict):
        inner = {} if inner is None else {"": inner}
        node[key] = inner
    return inner


# Functions that walk the tree take a few frames per level. A deeper leaf has the rest of its path as its name.
_MOST_LEVELS = 100


def _head(opened: Opened) -> Iterator[str]:
    manifest: Manifest | None = opened.manifest
    yield str(opened.path)
    if manifest is None:
        yield "jshard did not write it: there are no sums to verify it by."
        return
    step = "" if manifest.step is None else f"step {manifest.step}, "
    processes = counted(manifest.processes, "process")
    yield f"{step}saved {_moment(manifest.saved_at)} by {processes} on {_mesh_text(manifest.mesh) or '1 device'}"
    yield ", ".join(f"{package} {version}" for package, version in manifest.versions.items())
    if manifest.metrics:
        yield ", ".join(f"{name} {value:g}" for name, value in manifest.metrics.items())


def _rows(tree: Mapping[str, Any], depth: int | None, level: int = 0) -> Iterator[tuple[str, Any, int, int]]:
    """Name, leaf or folder, level, and count: equal layers are one row."""
    for name, node, count in _folded(tree):
        yield name, node, level, count
        if isinstance(node, Mapping) and (depth is None or level + 1 < depth):
            for inner, child, below, times in _rows(node, depth, level + 1):
                yield inner, child, below, times * count


def _folded(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
    keys = sorted(tree, key=lambda key: (is_layer(key), int(key) if is_layer(key) else 0, key))
    runs: list[list[str]] = []
    for key in keys:
        before = runs[-1][-1] if runs else ""
        follows = is_layer(key) and is_layer(before) and int(key) == int(before) + 1
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


def _bytes(leaves: Iterable[StoredLeaf]) -> int:
    return sum(leaf.nbytes for leaf in leaves)


def _leaves_json(opened: Opened, shown: Mapping[str, StoredLeaf]) -> dict[str, Any]:
    found = opened.manifest
    manifest = {} if found is None else dataclasses.asdict(dataclasses.replace(found, leaves={}, files={}))
    leaves = {path: dataclasses.asdict(leaf) | {"bytes": leaf.nbytes} for path, leaf in shown.items()}
    return {"path": str(opened.path), **manifest, "is_sealed": found is not None, "leaves": leaves}


# `jshard ckpt verify PATH`: verifies the checksums of a checkpoint.


@dataclasses.dataclass(frozen=True)
class VerifyArgs:
    """Reads whole checkpoints, and compares them with the checksums recorded when they were saved.

    It finds every missing or truncated file and every change of a single word, and names the leaf and the file.
    Changes of several words that cancel out in the checksums of a leaf are not detected. Exit codes: 0 no damage found,
    1 something is damaged, 2 there is no checkpoint.
    """

    path: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them (its newest is read), or the folder of a run."""
    step: int | None = None
    """Of a folder, the checkpoint of this step."""
    all: bool = False
    """Of a folder, all checkpoints."""
    json: bool = False
    """Print JSON only."""


def run_verify(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt verify`."""
    args = parse(VerifyArgs, argv, command="jshard ckpt verify")
    entries = listing(args.path if args.all else checkpoint_at(args.path, args.step)).entries
    verdicts = []
    for entry in entries:
        if entry.is_complete:
            with progress(f"verify {entry.path.name}", entry.num_bytes) as note:
                verdict = verify(entry.path, on_read=note)
        else:
            verdict = _incomplete(entry)
        verdicts.append(verdict)
        if not args.json:  # after the bar: a line printed beside it stays glued to it
            show(_verdict_text(verdict))
    if args.json:
        asdict = dataclasses.asdict
        print(as_json([asdict(one) | {"path": str(one.path), "is_good": one.is_good} for one in verdicts]))
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


def _incomplete(entry: ListedCheckpoint) -> Verdict:
    findings = tuple(Finding(leaf=None, file=None, why=why) for why in entry.damage)
    return Verdict(path=entry.path, findings=findings, num_leaves=0, num_bytes=0, num_files=0)


def _verdict_text(verdict: Verdict) -> str | FittedTable:
    leaves, files = counted(verdict.num_leaves, "leaf"), counted(verdict.num_files, "file")
    size = human_bytes(verdict.num_bytes, 1)
    if verdict.is_good and not verdict.num_files:
        read = f"{leaves}, {size}"
        return f"{verdict.path}: all can be read ({read}). jshard did not write it: it has no sums to compare with."
    if verdict.is_good:
        read = f"{leaves}, {size}, {files}"
        return f"{verdict.path}: good, all files are there and all sums are those of the save ({read})."
    table = made_table(f"{verdict.path}: DAMAGED", "leaf", "file", "what is wrong")
    for finding in verdict.findings:
        add_row(table, finding.leaf or "(no one leaf)", finding.file or "", finding.why)
    return table


# `jshard ckpt diff A B`: where two checkpoints differ.


@dataclasses.dataclass(frozen=True)
class DiffArgs:
    """Compares two checkpoints leaf by leaf, ignoring the meshes, processes and chunks that they were saved with.

    Layers that differ in the same manner are one row; --json has each leaf.

    Exit codes, as for `diff`: 0 they are equal, 1 they differ (or one is damaged), 2 there is no checkpoint.
    """

    a: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them (its newest is read), or the folder of a run."""
    b: tyro.conf.Positional[Path]
    """The other one."""
    no_values: bool = False
    """Read no values: compare paths, shapes, dtypes, and the recorded checksums."""
    all: bool = False
    """Also list equal leaves."""
    json: bool = False
    """Print JSON only."""


def run_diff(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt diff`."""
    args = parse(DiffArgs, argv, command="jshard ckpt diff")
    paths = [checkpoint_at(path) for path in (args.a, args.b)]
    with progress("compare", sum(listing(path).entries[0].num_bytes for path in paths)) as note:
        found = diff(*paths, values=not args.no_values, on_read=note)
    if args.json:
        leaves = [dataclasses.asdict(leaf) for leaf in found]
        print(as_json({"a": str(paths[0]), "b": str(paths[1]), "leaves": leaves}))
    else:
        show(_differences_table(paths, found, args))
    return 1 if any(leaf.kind != "equal" for leaf in found) else 0


def _differences_table(paths: Sequence[Place], found: Sequence[LeafDiff], args: DiffArgs) -> Group:
    counts = collections.Counter(leaf.kind for leaf in found)
    summary = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    lines = [whole_line(f"a: {paths[0]}"), whole_line(f"b: {paths[1]}")]
    lines.append(Text(f"{counted(len(found), 'leaf')}: {summary or 'none'}"))
    if args.no_values:
        lines[-1].append(" (no values were read: equal means that sums, or at least shapes, are)")
    shown = [leaf for leaf in found if args.all or leaf.kind != "equal"]
    if not shown:
        return Group(*lines)
    alike: dict[tuple[str, ...], list[LeafDiff]] = {}
    for leaf in shown:
        alike.setdefault((leaf.kind, _kinds(leaf), name_pattern(leaf.path)[0]), []).append(leaf)
    caption = "Of layers in one row, the figures are those of the one that differs most." * (len(alike) < len(shown))
    table = made_table("", "leaf", "differs", "|a|>", "|b|>??", "|a-b|/|a|>", "largest>?", "array?", caption=caption)
    rows: list[tuple[Norms | None, tuple[str, ...]]] = []
    for (kind, kinds, _), leaves in alike.items():
        most = max((leaf.norms for leaf in leaves if leaf.norms is not None), key=lambda x: x.relative, default=None)
        norms = [""] * 4 if most is None else [f"{x:.3g}" for x in dataclasses.astuple(most)]
        rows.append((most, (folded_names(leaf.path for leaf in leaves)[0], kind, *norms, kinds)))
    apart = lambda row: math.inf if row[0] is None or math.isnan(row[0].relative) else row[0].relative
    for _, cells in sorted(rows, key=apart, reverse=True):
        add_row(table, *cells)
    return Group(*lines, table)


def _kinds(leaf: LeafDiff) -> str:
    """Dtype and shape as JAX writes them, float32[3,192]; both, where they differ."""
    sides = [side for side in (leaf.a, leaf.b) if side is not None]
    return " / ".join(
        dict.fromkeys(f"{x.kind}[{','.join(map(str, x.shape))}]" if x.is_array else x.kind for x in sides)
    )


# Values as text.


def _moment(seconds: float | None) -> str:
    """Seconds since 1970 in local time."""
    return "" if seconds is None else datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _mesh_text(mesh: Mapping[str, int]) -> str:
    """The axes of a mesh that split something."""
    return ", ".join(f"{axis}={degree}" for axis, degree in mesh.items() if degree > 1) or "1 device" * bool(mesh)


def _shape_text(shape: tuple[int, ...]) -> str:
    """A shape without the comma of Python's short tuples."""
    return f"({', '.join(map(str, shape))})"
