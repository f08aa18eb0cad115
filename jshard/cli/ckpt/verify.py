"""`jshard ckpt verify PATH`: verifies the checksums of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro

from jshard._text import counted, human_bytes
from jshard.checkpoint.listing import ListedCheckpoint, listing
from jshard.checkpoint.lookup import checkpoint_at
from jshard.checkpoint.verifying import Finding, Verdict, verify
from jshard.cli._arguments import parse
from jshard.cli.ckpt import as_json, progress
from jshard.inspect.tables import FittedTable, add_row, made_table, show


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


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard ckpt verify`."""
    args = parse(VerifyArgs, argv, command="jshard ckpt verify")
    # A listing of one checkpoint has one entry.
    path = args.path if args.all else checkpoint_at(args.path, args.step)
    verdicts: list[Verdict] = []
    for entry in listing(path).entries:
        verdict = _verdict_on(entry)
        verdicts.append(verdict)
        if not args.json:  # after the bar: a line printed beside it stays glued to it
            show(_report(verdict))
    if args.json:
        print(as_json([_to_dict(verdict) for verdict in verdicts]))
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


def _verdict_on(entry: ListedCheckpoint) -> Verdict:
    """Reads a whole checkpoint, unless files of it are missing."""
    if not entry.is_complete:
        findings = tuple(Finding(leaf=None, file=None, why=why) for why in entry.damage)
        return Verdict(path=entry.path, findings=findings, num_leaves=0, num_bytes=0, num_files=0)
    with progress(f"verify {entry.path.name}", entry.num_bytes) as note_read:
        return verify(entry.path, on_read=note_read)


def _report(verdict: Verdict) -> str | FittedTable:
    if not verdict.is_good:
        table = made_table(f"{verdict.path}: DAMAGED", "leaf", "file", "what is wrong")
        for finding in verdict.findings:
            add_row(table, finding.leaf or "(no one leaf)", finding.file or "", finding.why)
        return table
    amount = f"{counted(verdict.num_leaves, 'leaf')}, {human_bytes(verdict.num_bytes, 1)}"
    if not verdict.has_sums:
        return f"{verdict.path}: all can be read ({amount}). jshard did not write it: it has no sums to compare with."
    if not verdict.num_files:  # of format="orbax", whose files are Orbax's
        return f"{verdict.path}: good, all sums are those of the save ({amount})."
    files = counted(verdict.num_files, "file")
    return f"{verdict.path}: good, all files are there and all sums are those of the save ({amount}, {files})."


def _to_dict(verdict: Verdict) -> dict[str, object]:
    return dataclasses.asdict(verdict) | {"path": str(verdict.path), "is_good": verdict.is_good}
