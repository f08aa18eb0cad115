"""`jshard train` in the process that trains, or that prints the plan or configuration."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

import jshard as js
from jshard import launch
from jshard._live import at_work
from jshard._processes import exchange
from jshard._text import counted, loss_text
from jshard.checkpoint.lookup import OF_A_RUN
from jshard.cli._arguments import TrainArgs
from jshard.cli._data import data_of, loss_unit, tokenizer_of
from jshard.cli._devices import num_devices, open_mesh, simulate_devices
from jshard.cli._recipe_request import explained
from jshard.cli._request import Request, request_of
from jshard.cli._summary import devices_text, summary
from jshard.cluster.layouts import free_axes
from jshard.data import Data
from jshard.inspect.explain import Explanation
from jshard.inspect.tables import show, whole_line
from jshard.recipes.recipe import check_batch
from jshard.train.auto import chosen_variant
from jshard.train.expected import ExpectedStep
from jshard.train.run import Finished, check_initial_parameters, check_trackers, check_vocabulary, run_recipe
from jshard.train.run_options import RunOptions

Say = Callable[[object], object]
"""Prints a line, or a table."""

_QUIET_S = 10.0  # planning takes longer only for large models


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
    request = _on_devices(request)
    mesh = _open_mesh(request)
    args = request.args
    say = show if jax.process_index() == 0 else _say_nothing
    expect = _checked_inputs(request, mesh)
    explanation = None
    if request.model_file.data is None:
        # The shapes of text are known without reading it, so that a model that cannot be built is refused first.
        explanation = _explained(request, mesh, None, say)
    data = _read_data(request)
    check_vocabulary(request.recipe, data.tokenizer)
    compiler_options = js.compiler_options(None if args.options == "none" else args.options, mesh=mesh)
    if args.auto:
        say(devices_text())
        request = _with_best_variant(request, mesh, data, compiler_options, say)
        mesh = _open_mesh(request)
        explanation = None
    if explanation is None:
        explanation = _explained(request, mesh, data, say)
    out = _agreed_folder(request)
    for line in summary(request, explanation, mesh, data, out):
        say(line)
    again = request.given.again(out)
    # From now on the supervisor can say how to continue, whatever happens to this process.
    launch.note(again=again, folder=str(out))
    options = RunOptions(
        mesh=mesh,
        data=data,
        out=out,
        name=request.name,
        resume=args.resume,
        track=request.track,
        command_options=request.options,
        workers=args.workers,
        profile=request.profile,
        sample_tokens=args.sample_tokens,
        compiler_options=compiler_options,
        expect=expect,
        init_from=args.init_from,
        adapters=args.adapters,
        extra=args.extra or "error",
        keep_in_memory=args.keep_in_memory,
        programs=args.compile_cache or "beside",
        watch=launch.StallWatch(timeout_s=args.stall_timeout, stop_s=args.stop_deadline, again=again),
        say=say,
    )
    finished = run_recipe(request.model_file, request.recipe, options)
    if finished.stopped_by is not None:
        say(f"\nstopped by {finished.stopped_by.name} after step {finished.step}: {finished.checkpoint} is saved.")
        say(whole_line(f"continue it with: {again}"))
        return launch.stopped_code(finished.stopped_by)
    if finished.stopped_early is not None:
        say(f"\nstopped early after step {finished.step}: {finished.stopped_early}.")
    _say_result(request, data, finished, say)
    return 0


def _on_devices(request: Request) -> Request:
    """Makes the devices of all processes available, and returns the request for them."""
    cluster = launch.detect()
    # Before JAX initialises its devices: it cannot simulate more of them later.
    simulate_devices(request.sizes, processes=1 if cluster is None else cluster.num_processes)
    if launch.is_worker():
        launch.start_worker()
    if request.args.auto and request.args.resume:
        return request.as_begun(len(jax.devices()))
    return request


def _checked_inputs(request: Request, mesh: Mesh) -> ExpectedStep | None:
    """Refuses what cannot be used, before data are read; returns the step that is expected, if any.

    The run checks the same again, for those who call it without this command, and as `--auto` may change the recipe.
    """
    args = request.args
    check_batch(request.recipe, mesh)
    expect = None
    if args.expect is not None:
        expect = ExpectedStep.read(args.expect, within=args.expect_within)
        if not args.auto:  # which chooses the mesh and the microbatches
            expect.check_request(request.recipe, mesh)
    check_trackers(request.track)  # a login may ask the user, who does not wait until the data are read
    if args.tokenizer is not None and request.model_file.data is None:
        # To make tokens of the text takes long, to look at the number of ids does not.
        check_vocabulary(request.recipe, tokenizer_of(args.tokenizer))
    check_initial_parameters(
        request.model_file,
        request.recipe,
        mesh,
        args.init_from,
        extra=args.extra or "error",
        resume=args.resume,
        series=args.checkpoints or (request.out and request.out / OF_A_RUN),
        adapters=args.adapters,
    )
    return expect


def _explained(request: Request, mesh: Mesh, data: Data | None, say: Say) -> Explanation:
    stream = sys.stdout if jax.process_index() == 0 else None
    with at_work("planning the run", say=say, stream=stream, quiet_s=_QUIET_S):
        return explained(request, mesh, data)


def _open_mesh(request: Request) -> Mesh:
    mesh = open_mesh(request.sizes)
    assert isinstance(mesh, Mesh)  # devices were not given as a number
    return mesh


def _read_data(request: Request) -> Data:
    args = request.args
    return data_of(
        request.model_file,
        request.recipe,
        args.data,
        args.tokenizer,
        held_out=args.held_out,
        text_key=args.text_key,
        dtype=args.dtype,
        pack=args.pack,
    )


def _with_best_variant(
    request: Request, mesh: Mesh, data: Data, compiler_options: Mapping[str, object] | None, say: Say
) -> Request:
    """Returns the request with the configuration that `--auto` has chosen."""
    if request.args.resume:
        say("--auto: a resumed run keeps its configuration")
        return request
    variant = chosen_variant(
        request.model_file,
        request.recipe,
        mesh,
        data,
        free=free_axes(request.sizes),
        compiler_options=compiler_options,
        say=say,
    )
    return request.with_variant(variant)


def _agreed_folder(request: Request) -> Path:
    """Returns the folder that the first process names: the others may already see it there, and name the next one."""
    return Path(exchange("folder of the run", str(request.folder()))[0])


def _say_nothing(*text: object) -> None:
    pass


def printable_text(text: str) -> str:
    """Returns generated text without terminal control characters."""
    # A model may generate anything, also what moves the cursor of a terminal.
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _say_result(request: Request, data: Data, finished: Finished, say: Say) -> None:
    if finished.sample is not None:
        sample = textwrap.indent(printable_text(finished.sample), "    ")
        say(f"\na sample, after a prompt of held-out text:\n{sample}")
    names = []
    for path in finished.out.iterdir():
        if not path.name.startswith("."):
            names.append(f"{path.name}/" if path.is_dir() else path.name)
    if finished.val_loss is not None:
        unit = loss_unit(request.model_file, data)
        say(f"\nvalidation loss {loss_text(finished.val_loss)}{unit} after {counted(finished.step, 'step')}")
    say(f"{finished.out}/: {'  '.join(sorted(names))}")
