"""`jshard ckpt ls PATH`: the checkpoints of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Group
from rich.text import Text

from jshard._text import human_bytes
from jshard.checkpoint.listing import ListedCheckpoint, Listing, listing
from jshard.cli._arguments import parse
from jshard.cli.ckpt import as_json
from jshard.cli.ckpt._values import mesh_text, moment
from jshard.errors import printable
from jshard.inspect.tables import add_row, made_table, show, whole_line

# The marks `>` and `?` align numbers, and choose what a narrow terminal leaves out: see `FittedTable`.
_COLUMNS = ("step>", "size>", "leaves>?", "saved>", "mesh", "processes>?", "jshard??", "metrics", "state")
_MOST_LINES = 10  # on the damage of one checkpoint; `jshard ckpt verify` lists all


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


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard ckpt ls`."""
    args = parse(LsArgs, argv, command="jshard ckpt ls")
    checkpoints = listing(args.path)
    if args.json:
        # `asdict` makes a dict of an address in a bucket, which is a dataclass, too.
        entries = [dataclasses.asdict(entry) | {"path": str(entry.path)} for entry in checkpoints.entries]
        values = {"path": str(checkpoints.path), "checkpoints": entries, "unfinished": checkpoints.unfinished}
        print(as_json(values))
    else:
        show(_report(checkpoints))
    return 0


def _report(checkpoints: Listing) -> Group:
    table = made_table("", *_COLUMNS)
    lines: list[str] = []
    for entry in checkpoints.entries:
        add_row(table, *_cells(entry))
        # Below the table: a reason is a sentence with a path, too long for a cell.
        lines += [printable(f"{entry.path.name}: {line}") for line in entry.damage[:_MOST_LINES]]
    for name in checkpoints.unfinished:
        why = "of a save that was interrupted, or is writing now; the next save of the run removes what is left over."
        lines.append(f"{name}: {why}")
    return Group(whole_line(str(checkpoints.path)), table, *map(Text, lines))


def _cells(entry: ListedCheckpoint) -> list[str]:
    """Returns the row of one checkpoint, a cell for each of `_COLUMNS`."""
    return [
        "?" if entry.step is None else str(entry.step),
        human_bytes(entry.num_bytes, 1),
        str(entry.num_leaves),
        moment(entry.saved_at),
        mesh_text(entry.mesh),
        str(entry.processes or ""),
        _version(entry),
        ", ".join(f"{name}={value:g}" for name, value in entry.metrics.items()),
        _state(entry),
    ]


def _version(entry: ListedCheckpoint) -> str:
    """Returns the version of jshard that saved a checkpoint; nothing if damage hides it."""
    if entry.version:
        return entry.version
    return "" if entry.damage else "(plain Orbax)"


def _state(entry: ListedCheckpoint) -> str:
    if not entry.is_complete:
        return "INCOMPLETE"
    if entry.damage:
        return "DAMAGED"
    return "latest" if entry.is_latest else "complete"
