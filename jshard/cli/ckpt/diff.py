"""`jshard ckpt diff A B`: where two checkpoints differ."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Group
from rich.text import Text

from jshard._text import counted, folded_names, name_pattern
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.comparing import LeafDiff, Norms, diff
from jshard.checkpoint.listing import listing
from jshard.checkpoint.lookup import checkpoint_at
from jshard.checkpoint.manifest import StoredLeaf
from jshard.cli._arguments import parse
from jshard.cli.ckpt import as_json, progress
from jshard.inspect.tables import FittedTable, add_row, made_table, show, whole_line

# The marks `>` and `?` align numbers, and choose what a narrow terminal leaves out: see `FittedTable`.
_COLUMNS = ("leaf", "differs", "|a|>", "|b|>??", "|a-b|/|a|>", "largest>?", "array?")
_OF_LAYERS = "Of layers in one row, the figures are those of the one that differs most."


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


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard ckpt diff`."""
    args = parse(DiffArgs, argv, command="jshard ckpt diff")
    a = checkpoint_at(args.a)
    b = checkpoint_at(args.b)
    with progress("compare", _num_bytes(a) + _num_bytes(b)) as note_read:
        leaves = diff(a, b, values=not args.no_values, on_read=note_read)
    if args.json:
        print(as_json({"a": str(a), "b": str(b), "leaves": [dataclasses.asdict(leaf) for leaf in leaves]}))
    else:
        show(_report(a, b, leaves, args))
    return 1 if _differing(leaves) else 0


def _differing(leaves: Sequence[LeafDiff]) -> Sequence[LeafDiff]:
    return [leaf for leaf in leaves if leaf.kind != "equal"]


def _num_bytes(checkpoint: Place) -> int:
    return listing(checkpoint).entries[0].num_bytes  # the only one: a checkpoint, and not a folder of them


def _report(a: Place, b: Place, leaves: Sequence[LeafDiff], args: DiffArgs) -> Group:
    lines = [whole_line(f"a: {a}"), whole_line(f"b: {b}"), Text(_summary(leaves, args))]
    listed = leaves if args.all else _differing(leaves)
    if not listed:
        return Group(*lines)
    return Group(*lines, _table(listed))


def _summary(leaves: Sequence[LeafDiff], args: DiffArgs) -> str:
    """Returns one line: how many leaves differ in which way."""
    counts = collections.Counter(leaf.kind for leaf in leaves)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    summary = f"{counted(len(leaves), 'leaf')}: {kinds or 'none'}"
    if args.no_values:
        summary += " (no values were read: equal means that sums, or at least shapes, are)"
    return summary


@dataclasses.dataclass(frozen=True)
class _DiffRow:
    """A leaf, or the leaves of several layers that differ in the same manner."""

    leaves: Sequence[LeafDiff]

    @property
    def largest(self) -> Norms | None:
        """The norms of the leaf that differs most; None if no values were compared."""
        norms = [leaf.norms for leaf in self.leaves if leaf.norms is not None]
        return max(norms, key=lambda leaf_norms: leaf_norms.relative, default=None)

    @property
    def distance(self) -> float:
        """By what the rows are sorted. What has no distance comes first: another shape, or NaN."""
        if self.largest is None or math.isnan(self.largest.relative):
            return math.inf
        return self.largest.relative

    def cells(self) -> list[str]:
        """Returns a cell for each of `_COLUMNS`."""
        # One name: the leaves of a row differ in one number alone, see `_rows`.
        (name,) = folded_names(leaf.path for leaf in self.leaves)
        norms = [""] * len(dataclasses.fields(Norms))  # a column of `_COLUMNS` for each
        if self.largest is not None:
            norms = [f"{norm:.3g}" for norm in dataclasses.astuple(self.largest)]
        first = self.leaves[0]
        return [name, first.kind, *norms, _types_text(first)]


def _table(leaves: Sequence[LeafDiff]) -> FittedTable:
    rows = _rows(leaves)
    has_layers = len(rows) < len(leaves)
    table = made_table("", *_COLUMNS, caption=_OF_LAYERS if has_layers else "")
    for row in sorted(rows, key=lambda row: row.distance, reverse=True):
        add_row(table, *row.cells())
    return table


def _rows(leaves: Sequence[LeafDiff]) -> list[_DiffRow]:
    """Returns leaves in rows: those that differ in the number of their layer only are in one."""
    alike: dict[tuple[str, ...], list[LeafDiff]] = {}
    for leaf in leaves:
        pattern, _ = name_pattern(leaf.path)
        alike.setdefault((leaf.kind, _types_text(leaf), pattern), []).append(leaf)
    # In a group all have the same kind and types, so the first one stands for them.
    return [_DiffRow(group) for group in alike.values()]


def _types_text(leaf: LeafDiff) -> str:
    """Returns dtype and shape as JAX writes them, float32[3,192]; both, where they differ."""
    # A leaf that only one checkpoint has, has one side.
    types = [_type_text(side) for side in (leaf.a, leaf.b) if side is not None]
    return " / ".join(dict.fromkeys(types))


def _type_text(leaf: StoredLeaf) -> str:
    if not leaf.is_array:
        return leaf.kind
    return f"{leaf.kind}[{','.join(map(str, leaf.shape))}]"
