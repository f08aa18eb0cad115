"""`jshard ckpt verify` and `diff`: a checkpoint against its sums, and two against each other."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Group
from rich.text import Text

from jshard._text import human_bytes
from jshard.checkpoint.buckets import Place
from jshard.checkpoint.comparing import Finding, LeafDiff, ListedCheckpoint, Verdict, diff, listing, verify
from jshard.checkpoint.lookup import checkpoint_at
from jshard.checkpoint.manifest import StoredLeaf
from jshard.cli._arguments import parse
from jshard.cli.ckpt._shared import as_json, progress, shape_text
from jshard.inspect.tables import FittedTable, add_row, made_table, show, whole_line


@dataclasses.dataclass(frozen=True)
class VerifyArgs:
    """Reads checkpoints whole, and compares them with what was noted when they were saved.

    It finds every file that is missing or cut off and every change of a single word, and names the leaf and the file.
    Changes of several words that cancel each other in the sums of a leaf do not show. Exit codes: 0 nothing was found,
    1 something is damaged, 2 there is no checkpoint.
    """

    path: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them (its newest is read), or the folder of a run."""
    step: int | None = None
    """Of a folder, the checkpoint of this step."""
    all: bool = False
    """Of a folder, all checkpoints."""
    json: bool = False
    """Print JSON and nothing else."""


def run_verify(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt verify`."""
    args = parse(VerifyArgs, argv, command="jshard ckpt verify")
    entries = listing(args.path if args.all else checkpoint_at(args.path, args.step)).entries
    verdicts = []
    with progress("verify", sum(entry.num_bytes for entry in entries)) as note:
        for entry in entries:
            verdicts.append(verify(entry.path, on_read=note) if entry.is_complete else _incomplete(entry))
            if not args.json:
                show(_verdict_text(verdicts[-1]))
    if args.json:
        print(as_json([_verdict_json(verdict) for verdict in verdicts]))
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


def _incomplete(entry: ListedCheckpoint) -> Verdict:
    findings = tuple(Finding(leaf=None, file=None, why=why) for why in entry.damage)
    return Verdict(path=entry.path, findings=findings, num_leaves=0, num_bytes=0, num_files=0)


def _verdict_text(verdict: Verdict) -> str | FittedTable:
    read = f"{verdict.num_leaves} leaves, {human_bytes(verdict.num_bytes, 1)}, {verdict.num_files} files"
    if verdict.is_good and not verdict.num_files:
        return f"{verdict.path}: all can be read ({read}). jshard did not write it: it has no sums to compare with."
    if verdict.is_good:
        return f"{verdict.path}: good, all files are there and all sums are those of the save ({read})."
    table = made_table(f"{verdict.path}: DAMAGED", "leaf", "file", "what is wrong")
    for finding in verdict.findings:
        add_row(table, finding.leaf or "(no one leaf)", finding.file or "", finding.why)
    return table


def _verdict_json(verdict: Verdict) -> dict[str, object]:
    return dataclasses.asdict(verdict) | {"path": str(verdict.path), "is_good": verdict.is_good}


# `jshard ckpt diff A B`: where two checkpoints differ.


@dataclasses.dataclass(frozen=True)
class DiffArgs:
    """Compares two checkpoints leaf by leaf: meshes, processes and chunks they were saved with do not count.

    Exit codes, as those of `diff`: 0 they are equal, 1 they differ (or one is damaged), 2 there is no checkpoint.
    """

    a: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them (its newest is read), or the folder of a run."""
    b: tyro.conf.Positional[Path]
    """The other one."""
    no_values: bool = False
    """Read no values: compare paths, shapes, dtypes, and the sums that were noted when they were saved."""
    all: bool = False
    """List the leaves that are equal, too."""
    json: bool = False
    """Print JSON and nothing else."""


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
    lines.append(Text(f"{len(found)} leaves: {summary or 'none'}"))
    if args.no_values:
        lines[-1].append(" (no values were read: equal means that sums, or at least shapes, are)")
    shown = [leaf for leaf in found if args.all or leaf.kind != "equal"]
    if not shown:
        return Group(*lines)
    table = made_table("", "differs", "|a|>", "|b|>??", "|a-b|/|a|>", "largest>?", "shape, dtype", "leaf")
    for leaf in shown:
        norms = [f"{x:.4g}" for x in dataclasses.astuple(leaf.norms)] if leaf.norms is not None else [""] * 4
        add_row(table, leaf.kind, *norms, _kinds(leaf), leaf.path)
    return Group(*lines, table)


def _kinds(leaf: LeafDiff) -> str:
    """Shape and dtype; both, where they differ."""
    return " / ".join(dict.fromkeys(_kind(side) for side in (leaf.a, leaf.b) if side is not None))


def _kind(leaf: StoredLeaf) -> str:
    return f"{shape_text(leaf.shape)} {leaf.kind}" if leaf.is_array else leaf.kind
