"""`jshard ckpt verify PATH`: whether every file and every value is as it was saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro

from jshard._text import human_bytes
from jshard.checkpoint.listing import Entry, checkpoint_at, listing
from jshard.checkpoint.verifying import Finding, Verdict, verify
from jshard.cli._arguments import parse
from jshard.cli.ckpt._shared import as_json, progress
from jshard.inspect.tables import FittedTable, add_row, made_table, show


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


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt verify`."""
    args = parse(VerifyArgs, argv, command="jshard ckpt verify", example="runs/gpt-tiny")
    entries = listing(args.path if args.all else checkpoint_at(args.path, args.step)).entries
    verdicts = []
    with progress("verify", sum(entry.num_bytes for entry in entries)) as note:
        for entry in entries:
            verdicts.append(verify(entry.path, on_read=note) if entry.is_complete else _incomplete(entry))
            if not args.json:
                show(_described(verdicts[-1]))
    if args.json:
        print(as_json([_to_json(verdict) for verdict in verdicts]))
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


def _incomplete(entry: Entry) -> Verdict:
    findings = tuple(Finding(leaf=None, file=None, why=why) for why in entry.damage)
    return Verdict(path=entry.path, findings=findings, num_leaves=0, num_bytes=0, num_files=0)


def _described(verdict: Verdict) -> str | FittedTable:
    read = f"{verdict.num_leaves} leaves, {human_bytes(verdict.num_bytes, 1)}, {verdict.num_files} files"
    if verdict.is_good and not verdict.num_files:
        return f"{verdict.path}: all can be read ({read}). jshard did not write it: it has no sums to compare with."
    if verdict.is_good:
        return f"{verdict.path}: good, all files are there and all sums are those of the save ({read})."
    table = made_table(f"{verdict.path}: DAMAGED", "leaf", "file", "what is wrong")
    for finding in verdict.findings:
        add_row(table, finding.leaf or "(no one leaf)", finding.file or "", finding.why)
    return table


def _to_json(verdict: Verdict) -> dict[str, object]:
    return dataclasses.asdict(verdict) | {"path": str(verdict.path), "is_good": verdict.is_good}
