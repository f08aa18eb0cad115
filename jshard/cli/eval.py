"""`jshard eval RUN`: the loss of a run's model over held-out samples, of its own or other data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro

from jshard._text import counted, loss_text
from jshard.cli._arguments import parse
from jshard.cli._data import data_of, loss_unit
from jshard.cli._stored import RunArgs, StoredRun
from jshard.cli.ckpt import as_json
from jshard.data import Data
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


_MOST_LOSS = 700.0  # its exponential is still a number


def run(argv: Sequence[str]) -> int:
    """Runs the command; `argv` are the arguments after `jshard eval`."""
    args = parse(EvalArgs, argv, command="jshard eval")
    exit_code = args.started("eval", argv)
    if exit_code is not None:
        return exit_code
    command = ["jshard", "eval", *argv]
    stored = StoredRun.read(args.path, model=args.model, is_trusted=args.trust, command=command)
    data = _data(args, stored)
    check_vocabulary(stored.recipe, data.tokenizer)
    mesh = args.open_mesh()  # after all that can be refused without devices
    check_batch(stored.recipe, mesh)
    model, step = stored.restored_model(mesh, extra=args.extra, weights=args.weights)
    scalars = evaluated(stored.model_file, stored.recipe, model, data)
    if jax.process_index() != 0:  # all processes have the same result
        return 0
    unit = loss_unit(stored.model_file, data)
    derived = _derived(scalars["loss"], unit)
    if args.json:
        prefix = "val_ema_" if args.weights == "ema" else "val_"  # as in the record of a run
        losses = {f"{prefix}{name}": value for name, value in scalars.items()}
        print(as_json({"step": step, "data": data.description, **losses, **derived}))
    else:
        of_average = ", of the average of the weights" if args.weights == "ema" else ""
        line = f"{_loss_line(scalars, unit, derived)} after {counted(step, 'step')}{of_average}"
        show(f"{data.description}\n{line}")
    return 0


def _data(args: EvalArgs, stored: StoredRun) -> Data:
    """Returns the data on the command line, or those of the run, which must not have changed."""
    options = stored.options
    paths = args.data
    held_out: list[Path] = []
    if not args.data:
        # Without paths in the record it was trained on the default data, or on those of the model file.
        paths = tuple(map(Path, options.get("data", ())))
        held_out = list(map(Path, options.get("held_out", ())))
    data = data_of(
        stored.model_file,
        stored.recipe,
        paths,
        stored.tokenizer_file(args.tokenizer),
        held_out=held_out,
        text_key=options.get("text_key"),
        dtype=options.get("dtype"),
        pack=options.get("pack"),
    )
    # A loss over other samples looks the same, and could not be compared with the run's.
    if not args.data and data.fingerprint != stored.data["fingerprint"]:
        raise ShardingError(
            "The data are not those of the run.",
            where=[
                f"the run's  {stored.data['description']} ({stored.data['fingerprint']})",
                f"here  {data.description} ({data.fingerprint})",
            ],
            why="the files have changed, or the run did not read them from its command line.",
            do="restore the files as the run had them; or name the intended ones with --data.",
        )
    return data


def _derived(loss: float, unit: str) -> dict[str, float]:
    """Returns what is usually reported in place of a loss of this unit, by its name in the JSON."""
    # Of nats per byte: a bit is log(2) nats.
    if unit.endswith("byte"):
        return {"bits_per_byte": loss / math.log(2)}
    if unit:
        return {"perplexity": math.exp(min(loss, _MOST_LOSS))}
    return {}


def _loss_line(scalars: Mapping[str, float], unit: str, derived: Mapping[str, float]) -> str:
    parts = [f"validation loss {loss_text(scalars['loss'])}{unit}"]
    if "bits_per_byte" in derived:
        parts.append(f"{loss_text(derived['bits_per_byte'])} bits per byte")
    if "perplexity" in derived:
        parts.append(f"perplexity {derived['perplexity']:.2f}")
    for name, value in scalars.items():
        if name != "loss":
            parts.append(f"{name} {loss_text(value)}")
    return ", ".join(parts)
