"""`jshard ckpt inspect PATH`: the leaves of a checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Group
from rich.text import Text

from jshard._text import counted, human_bytes
from jshard.checkpoint.lookup import checkpoint_at
from jshard.checkpoint.manifest import Manifest, StoredLeaf
from jshard.checkpoint.opened import Opened
from jshard.checkpoint.readers import ForeignCheckpoint, open_checkpoint
from jshard.cli._arguments import parse
from jshard.cli.ckpt import as_json
from jshard.cli.ckpt._leaf_tree import num_bytes_of, rows_of, tree_of
from jshard.cli.ckpt._values import mesh_text, moment
from jshard.errors import ShardingError, printable
from jshard.inspect.tables import add_row, made_table, show, whole_line
from jshard.recipes.hf_config import Reading, config_file, load, read
from jshard.recipes.hf_families import FAMILIES, HARMLESS

_MOST_ROWS = 3000  # a table takes some milliseconds for each


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


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard ckpt inspect`."""
    args = parse(InspectArgs, argv, command="jshard ckpt inspect")
    opened = open_checkpoint(checkpoint_at(args.path, args.step))
    reading = _config_of(opened)
    leaves = _requested_leaves(opened, args)
    if args.json:
        values = _to_dict(opened, leaves)
        if reading is not None:
            values["config"] = [dataclasses.asdict(row) for row in reading.rows]
        print(as_json(values))
        return 0
    show(_leaf_report(opened, leaves, args.depth))
    if reading is not None:
        show(_config_report(reading))
    return 0


def _requested_leaves(opened: Opened, args: InspectArgs) -> dict[str, StoredLeaf]:
    leaves = opened.described()
    prefix = args.below.rstrip("/")
    if prefix:
        # By whole keys: `blocks/1` is not above `blocks/10`.
        leaves = {path: leaf for path, leaf in leaves.items() if f"{path}/".startswith(f"{prefix}/")}
    if not leaves:
        first_keys = sorted({printable(path.split("/")[0]) for path in opened.leaves})
        raise ShardingError(
            "There are no such leaves.",
            where=f"--below {args.below}",
            why=f"paths in {opened.path} begin with {', '.join(first_keys)}.",
            do=f"jshard ckpt inspect {args.path} --depth 1",
        )
    return dict(leaves)


def _to_dict(opened: Opened, leaves: Mapping[str, StoredLeaf]) -> dict[str, object]:
    values: dict[str, object] = {"path": str(opened.path)}
    if opened.manifest is not None:
        # Without leaves and files, of which there may be thousands; the requested leaves follow.
        values |= dataclasses.asdict(dataclasses.replace(opened.manifest, leaves={}, files={}))
    values["is_sealed"] = opened.manifest is not None
    described = {}
    for path, leaf in leaves.items():
        described[path] = dataclasses.asdict(leaf) | {"bytes": leaf.nbytes}
    values["leaves"] = described
    return values


# The config.json of Hugging Face's weights.


def _config_of(opened: Opened) -> Reading | None:
    """Returns the config.json beside weights of another library; None if there is none."""
    if not isinstance(opened, ForeignCheckpoint):
        return None
    file = config_file(opened.path)
    if file is None:
        return None
    return read(load(file), tuple(FAMILIES))


def _config_report(reading: Reading) -> Group:
    """Returns a table of the keys that a recipe reads or refuses, and a line with the others."""
    table = made_table("", "config.json", "value", "recipe")
    harmless: list[str] = []
    # Without a family nothing is known of a key that no recipe reads.
    without_field = "" if reading.family is None else "supported"
    for row in reading.rows:
        is_harmless = not row.field and not row.problem and row.name in HARMLESS
        if is_harmless:
            harmless.append(row.name)
            continue
        outcome = row.problem or row.field or without_field
        add_row(table, printable(row.name), printable(row.short), printable(outcome))
    lines: list[str] = []
    if harmless:
        lines.append(printable(f"without effect on the logits: {', '.join(harmless)}"))
    if reading.problems:
        lines.append("no recipe computes this model.")
    return Group(table, *map(Text, lines))


# The table of leaves.


def _leaf_report(opened: Opened, leaves: Mapping[str, StoredLeaf], depth: int | None) -> Group:
    table = made_table("", "leaf", "shape", "dtype", "bytes>", "sharded over", "stored in pieces of")
    rows = rows_of(tree_of(leaves), depth)
    for row in itertools.islice(rows, _MOST_ROWS):  # `rows` is an iterator: what follows counts the rest
        add_row(table, *row.cells())
    lines = [printable(line) for line in _head(opened)]
    num_left_out = sum(1 for _ in rows)
    if num_left_out:
        lines.append(f"{counted(num_left_out, 'row')} more: --depth 1, --below PREFIX or --json")
    sums = f"{counted(len(leaves), 'leaf')}, {human_bytes(num_bytes_of(leaves.values()), 1)}"
    return Group(whole_line(printable(str(opened.path))), *map(Text, lines), table, Text(sums))


def _head(opened: Opened) -> Iterator[str]:
    """Yields lines on when and how a checkpoint was saved."""
    manifest: Manifest | None = opened.manifest
    if manifest is None:
        yield "jshard did not write it: there are no sums to verify it by."
        return
    step = "" if manifest.step is None else f"step {manifest.step}, "
    processes = counted(manifest.processes, "process")
    yield f"{step}saved {moment(manifest.saved_at)} by {processes} on {mesh_text(manifest.mesh) or '1 device'}"
    yield ", ".join(f"{package} {version}" for package, version in manifest.versions.items())
    if manifest.metrics:
        yield ", ".join(f"{name} {value:g}" for name, value in manifest.metrics.items())
