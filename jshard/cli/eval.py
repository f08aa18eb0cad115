"""`jshard eval RUN`: the loss of a run's model over held-out samples, of its own or other data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from jshard._text import counted, loss_text
from jshard.cli._arguments import parse
from jshard.cli._request import data_of, loss_unit
from jshard.cli._stored import RunArgs, StoredRun
from jshard.cli.ckpt import as_json
from jshard.errors import ShardingError
from jshard.inspect.tables import show
from jshard.recipes.recipe import check_batch
from jshard.train.run import check_vocabulary, evaluated


@dataclasses.dataclass(frozen=True)
class EvalArgs(RunArgs):
    """Prints the loss of a run's model over held-out samples, as a run computes it between its steps.

    On its own data this equals the value printed at the end of the run. Exit codes: 0 done, 1 the checkpoint is
    damaged, 2 invalid request.
    """

    data: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH")] = ()
    """Other text files, or folders of them; only the part that a run would hold out is used."""
    json: bool = False
    """Print JSON only."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard eval`."""
    args = parse(EvalArgs, argv, command="jshard eval")
    if (code := args.started("eval", argv)) is not None:
        return code
    command = ["jshard", "eval", *argv]
    stored = StoredRun.read(args.path, model=args.model, is_trusted=args.trust, command=command)
    model_file, recipe, tokenizer = stored.model_file, stored.recipe, stored.tokenizer_file(args.tokenizer)
    how: dict[str, Any] = {name: stored.options.get(name) for name in ("text_key", "dtype")}
    own, apart = ([Path(path) for path in stored.options.get(name, ())] for name in ("data", "held_out"))
    data = data_of(model_file, recipe, args.data or own, tokenizer, held_out=() if args.data else apart, **how)
    if not args.data and data.fingerprint != stored.data["fingerprint"]:
        raise ShardingError(
            "The data are not those of the run.",
            where=[f"the run's  {stored.data['description']} ({stored.data['fingerprint']})"]
            + [f"here  {data.description} ({data.fingerprint})"],
            why="the files have changed, or the run did not read them from its command line.",
            do="restore the files as the run had them; or name the intended ones with --data.",
        )
    check_vocabulary(recipe, data.tokenizer)
    mesh = args.open_mesh()
    check_batch(recipe, mesh)
    held, step = stored.held(mesh, extra=args.extra)
    scalars, unit, more = evaluated(model_file, recipe, held, data), loss_unit(model_file, data), ""
    loss = scalars["loss"]
    found = {"step": step, "data": data.description} | {f"val_{name}": value for name, value in scalars.items()}
    if unit.endswith("byte"):
        found["bits_per_byte"] = loss / math.log(2)
        more = f", {loss_text(found['bits_per_byte'])} bits per byte"
    elif unit:
        found["perplexity"] = math.exp(min(loss, 700.0))
        more = f", perplexity {found['perplexity']:.2f}"
    more += "".join(f", {name} {loss_text(value)}" for name, value in scalars.items() if name != "loss")
    if jax.process_index() == 0:
        line = f"{data.description}\nvalidation loss {loss_text(loss)}{unit}{more} after {counted(step, 'step')}"
        if args.json:
            print(as_json(found))
        else:
            show(line)
    return 0
