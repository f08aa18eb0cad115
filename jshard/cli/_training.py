"""`jshard train` in the process that trains, or that prints the plan or configuration."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import jshard as js
from jshard import launch
from jshard._processes import exchange
from jshard._text import counted, loss_text
from jshard.cli._arguments import TrainArgs
from jshard.cli._data import data_of, loss_unit
from jshard.cli._devices import num_devices, open_mesh, simulate_devices
from jshard.cli._recipe_request import explained
from jshard.cli._request import Request, request_of
from jshard.data import Data
from jshard.inspect.tables import show, whole_line
from jshard.recipes.recipe import check_batch
from jshard.train.auto import chosen_variant
from jshard.train.expected import ExpectedStep
from jshard.train.run import Finished, check_trackers, run_recipe


def train(args: TrainArgs) -> int:
    """Trains, or prints the plan or configuration; returns the exit code."""
    request = request_of(args)
    if args.print_config:
        open_mesh(request.sizes, devices=num_devices(request.sizes))  # raises for devices that are not there
        print(json.dumps(request.config(), indent=2, allow_nan=False))  # and nothing else: for a file, or jq
        return 0
    if args.dry_run:
        show(explained(request, open_mesh(request.sizes, devices=num_devices(request.sizes))))
        return 0
    return _train(request)


def _train(request: Request) -> int:
    args = request.args
    cluster = launch.detect()
    simulate_devices(request.sizes, processes=1 if cluster is None else cluster.num_processes)
    if launch.is_worker():
        launch.start_worker()
    if args.auto and args.resume:
        request = request.as_begun(len(jax.devices()))
    mesh = open_mesh(request.sizes)
    assert isinstance(mesh, Mesh)  # devices were not given as a number
    check_batch(request.recipe, mesh)
    expect = None if args.expect is None else ExpectedStep.read(args.expect, within=args.expect_within)
    check_trackers(request.track)
    # Before the plan: unreadable data should fail first.
    how = {name: getattr(args, name) for name in ("held_out", "text_key", "dtype")}
    data = data_of(request.model_file, request.recipe, args.data, args.tokenizer, **how)
    say = show if jax.process_index() == 0 else (lambda *text: None)
    say(_devices())
    compiler_options = js.compiler_options(None if args.options == "none" else args.options)
    if args.auto and args.resume:
        say("--auto: a resumed run keeps its configuration")
    elif args.auto:
        asked = request.model_file, request.recipe, mesh, data
        request = request.with_variant(chosen_variant(*asked, compiler_options=compiler_options, say=say))
        mesh = open_mesh(request.sizes)
        assert isinstance(mesh, Mesh)
    say(explained(request, mesh, data))
    say(data.description)
    out = Path(exchange("folder of the run", str(request.folder()))[0])
    again = request.given.again(out)
    launch.note(again=again, folder=str(out))
    watch = launch.StallWatch(timeout_s=args.stall_timeout, stop_s=args.stop_deadline, again=again)
    finished = run_recipe(
        request.model_file,
        request.recipe,
        mesh=mesh,
        data=data,
        out=out,
        name=request.name,
        resume=args.resume,
        track=request.track,
        options=request.options,
        workers=args.workers,
        profile=request.profile,
        sample_tokens=args.sample_tokens,
        compiler_options=compiler_options,
        expect=expect,
        init_from=args.init_from,
        extra=args.extra or "error",
        keep_in_memory=args.keep_in_memory,
        programs=args.compile_cache or "beside",
        watch=watch,
        say=say,
    )
    if finished.stopped_by is not None:
        say(f"\nstopped by {finished.stopped_by.name} after step {finished.step}: {finished.checkpoint} is saved.")
        say(whole_line(f"continue it with: {again}"))
        return launch.stopped_code(finished.stopped_by)
    _say_result(request, data, finished, say)
    return 0


def _devices() -> str:
    """One line: how many devices of which kind, and whether they are simulated."""
    devices = jax.devices()
    line = f"{len(devices)} x {devices[0].device_kind}"
    if devices[0].platform == "cpu" and len(devices) > jax.process_count():
        line += f" (simulated on {os.cpu_count()} cores: for learning and tests, not for speed)"
    return line if jax.process_count() == 1 else f"{line}, {jax.process_count()} processes"


def printable_text(text: str) -> str:
    """Generated text without terminal control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _say_result(request: Request, data: Data, finished: Finished, say: Any) -> None:
    if finished.sample is not None:
        shown = textwrap.indent(printable_text(finished.sample), "    ")
        say(f"\na sample; it begins with held-out text:\n{shown}")
    names = sorted(path.name + "/" * path.is_dir() for path in finished.out.iterdir() if path.name[0] != ".")
    if finished.val_loss is not None:
        unit = loss_unit(request.model_file, data)
        say(f"\nvalidation loss {loss_text(finished.val_loss)}{unit} after {counted(finished.step, 'step')}")
    say(f"{finished.out}/: {'  '.join(names)}")
