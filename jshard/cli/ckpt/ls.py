"""`jshard ckpt ls DIR`: the checkpoints of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Group
from rich.text import Text

from jshard._errors import printable
from jshard._text import human_bytes
from jshard.checkpoint.listing import Entry, Listing, listing
from jshard.cli._arguments import parse
from jshard.cli.ckpt._shared import as_json, mesh_text, moment
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


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard ckpt ls`."""
    args = parse(LsArgs, argv, command="jshard ckpt ls", example="runs/gpt-tiny")
    found = listing(args.path)
    if args.json:
        print(as_json(_to_json(found)))
    else:
        show(_table(found))
    return 0


def _table(found: Listing) -> Group:
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


def _version(entry: Entry) -> str:
    return entry.version or ("" if entry.damage else "(plain Orbax)")


def _state(entry: Entry) -> str:
    if not entry.is_complete:
        return "INCOMPLETE"
    return "DAMAGED" if entry.damage else "latest" if entry.is_latest else "complete"


def _to_json(found: Listing) -> dict[str, object]:
    entries = [dataclasses.asdict(entry) | {"path": str(entry.path)} for entry in found.entries]
    return {"path": str(found.path), "checkpoints": entries, "unfinished": found.unfinished}
