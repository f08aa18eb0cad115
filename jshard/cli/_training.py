"""`jshard train` in the process that trains, or that prints what would be trained."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import jshard as js
from jshard import launch
from jshard._processes import gather_texts
from jshard.cli._devices import describe_devices, open_mesh, simulate_devices
from jshard.cli._train_args import TrainArgs, num_devices
from jshard.cli._train_request import Request, request_of
from jshard.data import Data
from jshard.data.text import ByteTokenizer, HuggingFaceTokenizer, load_text
from jshard.errors import FourPartError, ShardingError
from jshard.inspect.explain import Explanation
from jshard.inspect.tables import show, whole_line
from jshard.plans.mesh import AnyMesh
from jshard.recipes.building import abstract_model, batch_of
from jshard.recipes.model_file import refuses_batches
from jshard.recipes.recipe import check_batch
from jshard.train.auto import chosen_variant
from jshard.train.run import Finished, run_recipe


def train(args: TrainArgs, argv: Sequence[str]) -> int:
    """Trains, or prints what would be trained; the exit code."""
    request = request_of(args, argv)
    if args.print_config:
        print(json.dumps(request.config(), indent=2, allow_nan=False))  # and nothing else: for a file, or jq
        return 0
    if args.dry_run:
        mesh = open_mesh(request.sizes, devices=num_devices(request.sizes))
        check_batch(request.recipe, mesh)
        # The shapes of text are known without reading it.
        show(explained(request, mesh, None if request.model_file.data is None else own_data(request)))
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
    data = _data(request)  # before the plan: what cannot be read should not wait for it
    say = show if jax.process_index() == 0 else (lambda *text: None)
    say(describe_devices())
    compiler_options = js.compiler_options(None if args.options == "none" else args.options)
    if args.auto and args.resume:
        say("--auto: the run goes on as it was begun")
    elif args.auto:
        asked = request.model_file, request.recipe, mesh, data
        request = request.with_variant(chosen_variant(*asked, compiler_options=compiler_options, say=say))
        mesh = open_mesh(request.sizes)
        assert isinstance(mesh, Mesh)
    say(explained(request, mesh, data))
    say(data.description)
    out = Path(gather_texts(str(request.folder()))[0])
    launch.note(again=request.again(out))
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
        init_from=args.init_from,
        stop_deadline_s=args.stop_deadline,
        say=say,
    )
    if finished.stopped_by is not None:
        say(f"\nstopped by {finished.stopped_by.name} after step {finished.step}: {finished.checkpoint} is saved.")
        say(whole_line(f"it goes on with: {request.again(out)}"))
        return 128 + finished.stopped_by
    _say_result(request, finished, say)
    return 0


def _say_result(request: Request, finished: Finished, say: Any) -> None:
    if finished.sample is not None:
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in finished.sample)
        say(f"\na sample; its first words are of held-out text:\n{textwrap.indent(shown, '    ')}")
    names = sorted(path.name + "/" * path.is_dir() for path in finished.out.iterdir() if path.name[0] != ".")
    if finished.val_loss is not None:
        unit = " nats per byte" if request.args.tokenizer is None else " nats per token"
        unit = "" if request.model_file.data is not None else unit  # only its file knows what the loss is
        say(f"\nvalidation loss {finished.val_loss:.4f}{unit} after {finished.step} steps")
    say(f"{finished.out}/: {'  '.join(names)}")


def _data(request: Request) -> Data:
    args, recipe = request.args, request.recipe
    if request.model_file.data is not None:
        if args.data or args.tokenizer:
            raise ShardingError(
                "The model file brings its own data.",
                where=f"--data and --tokenizer, {request.model_file.path}: data(recipe)",
                why="they are read as text only where the file has no `data`.",
                do="leave the options away, or take `data` out of the file.",
            )
        return own_data(request)
    tokenizer = ByteTokenizer() if args.tokenizer is None else HuggingFaceTokenizer(args.tokenizer)
    return load_text(args.data, sequence_length=recipe.sequence_length, tokenizer=tokenizer)


def own_data(request: Request) -> Data:
    """What the model file calls its data."""
    assert request.model_file.data is not None
    data = request.model_file.data(request.recipe)
    if not isinstance(data, Data):
        raise ShardingError(
            "The model file's `data` gives no data.",
            where=f"{request.model_file.path}: data(recipe)",
            why=f"it returns {'None' if data is None else f'a {type(data).__name__}'}.",
            do="return jshard.data.Data(train=..., held_out=..., description=..., fingerprint=...).",
        )
    return data


def explained(request: Request, mesh: AnyMesh, data: Data | None) -> Explanation:
    """The plan of a recipe on a mesh, which need not have devices, and its memory."""
    model_file, recipe = request.model_file, request.recipe
    if data is not None:
        model_file = dataclasses.replace(model_file, data=lambda recipe: data)
    batch = batch_of(model_file, recipe, recipe.batch_size // recipe.accumulate)
    try:
        model = abstract_model(model_file, recipe, mesh)
        return js.explain(model, optimizer=recipe.optimizer(), loss=model_file.loss_fn, batch=batch, wrt=model_file.wrt)
    except FourPartError:
        raise
    except ValueError as error:  # as a model raises that is asked for more than it can do
        raise refuses_batches(model_file.path, error) from error
