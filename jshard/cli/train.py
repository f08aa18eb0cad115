"""`jshard train MODEL.py`: trains a recipe, or with --dry-run prints its plan."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import Mesh

import jshard as js
from jshard._errors import ShardingError
from jshard._mesh import AnyMesh
from jshard._processes import gather_texts
from jshard.cli._config import config_json, print_config
from jshard.cli._mesh_option import abstract_mesh, describe_devices, num_devices, parse_mesh, simulate_devices
from jshard.train import launch
from jshard.train.data import Data
from jshard.train.model_file import ModelFile, load_model_file
from jshard.train.overrides import override
from jshard.train.recipe import Recipe
from jshard.train.recipe_check import check_recipe
from jshard.train.run import Finished, run_recipe
from jshard.train.run_folder import RunFolder
from jshard.train.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from jshard.train.trackers import available

_RUNS = Path("runs")
_WHAT = ("recipe", "set", "steps", "seed", "data", "tokenizer")  # options that a resumed run takes over


@dataclasses.dataclass(frozen=True)
class TrainArgs:
    """Trains a recipe of a model file fully sharded.

    Writes run.json, metrics.jsonl, loss.png, sample.txt and checkpoints/ into a folder of its own. SIGTERM and Ctrl-C
    save and stop; --resume goes on. Exit codes: 0 done, 1 the run failed, 2 the request was wrong, 130 and 143 stopped
    by Ctrl-C and SIGTERM.
    """

    model: tyro.conf.Positional[Path]
    """Python file with the model, its annotation and its recipes, e.g. models/gpt.py."""
    recipe: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the recipe; the file's first by default."""
    set: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")]] = ()
    """Another value for the recipe, as often as needed: --set learning_rate=1e-3 --set model.n_layer=4. --print-config
    shows the keys."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Optimizer steps, instead of the recipe's."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Seed of parameters, dropout and sample order, instead of the recipe's."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=DEGREE,...")] = ""
    """Degrees of the mesh axes, e.g. replica=2,fsdp=4 (default: fsdp takes all devices; on a CPU 8 are simulated)."""
    data: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH")] = ()
    """Text files, or folders of them; by default the sources of Python's standard library."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A Hugging Face tokenizer.json; by default every byte is a token. Needs the extra `hf`."""
    workers: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Processes that read the data, for data that is expensive to make; 0 reads in a thread."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder to write, empty or new; by default runs/MODEL-RECIPE, with a number if that is taken."""
    resume: bool = False
    """Continue the run in --out (by default the newest of this recipe) from its last checkpoint, with its options."""
    track: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="NAME")] = None
    """Further records: tensorboard, wandb. By default tensorboard where that extra is installed."""
    sample_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 256
    """Tokens that the model writes in the end; 0 for none."""
    processes: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Run as N processes on the CPU of this machine, as a cluster would. On a cluster leave it away."""
    init_timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = launch.Deadlines.init_s
    """How long the processes of a run wait for each other at the start."""
    peer_timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = launch.Deadlines.peer_s
    """How long a process may give no sign of life before the run ends."""
    dry_run: bool = False
    """Print the plan and stop: needs no device and no memory for parameters."""
    print_config: bool = False
    """Print everything the run is made from as JSON and stop."""


def run(argv: Sequence[str]) -> int:
    """The command: `argv` are the arguments after `jshard train`."""
    _refuse_repeats(argv)
    args = tyro.cli(TrainArgs, prog="jshard train", args=argv, config=(tyro.conf.FlagCreatePairsOff,))
    if not (args.dry_run or args.print_config or launch.is_worker()):
        cluster = launch.detect()
        if cluster is not None or args.processes != 1:
            return _supervise(args, argv, cluster)
    request = _request(args)
    if args.print_config:
        print_config(request.config())
        return 0
    if args.dry_run:
        print(_plan(request, abstract_mesh(dict(request.sizes))))
        return 0
    return _train(request)


@dataclasses.dataclass(frozen=True)
class _Request:
    """What is to be trained, as far as it is known without devices."""

    args: TrainArgs  # with what a resumed run takes over
    model_file: ModelFile
    name: str
    recipe: Recipe
    sizes: Mapping[str, int]
    out: Path | None  # None for a new folder of the usual name

    @property
    def options(self) -> dict[str, Any]:
        """The options that say what is trained."""
        absolute = {  # a run may be resumed from another folder
            "data": [path.absolute() for path in self.args.data],
            "tokenizer": self.args.tokenizer and self.args.tokenizer.absolute(),
        }
        return {key: getattr(self.args, key) for key in _WHAT} | absolute | {"recipe": self.name}

    def config(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return config_json(
            model_file=self.args.model,
            recipe_name=self.name,
            recipe=self.recipe,
            mesh=dict(abstract_mesh(dict(self.sizes)).shape),
            data=self.args.data,
            tokenizer=self.args.tokenizer,
            out=self.out,
            options={"track": _track(self.args), "workers": self.args.workers, "processes": self.args.processes},
        )


def _request(args: TrainArgs) -> _Request:
    model_file = load_model_file(args.model)
    out = args.out
    if args.resume:
        out = out or RunFolder.newest(_RUNS, _stem(args, model_file.recipe(args.recipe)[0]))
        # A job script may always say --resume: the first time there is nothing to take up.
        stored = RunFolder.options(out) if out is not None and RunFolder.holds_run(out) else None
        args = _with_stored(dataclasses.replace(args, resume=stored is not None), stored or {})
    name, recipe = model_file.recipe(args.recipe)
    given = {"num_steps": args.steps, "seed": args.seed}
    recipe = override(recipe, [*args.set, *(f"{key}={value}" for key, value in given.items() if value is not None)])
    check_recipe(recipe)
    return _Request(args, model_file, name, recipe, parse_mesh(args.mesh), out)


def _refuse_repeats(argv: Sequence[str]) -> None:
    """Of an option that is given twice the parser would take the last one, with no word about the first."""
    names = [argument.partition("=")[0] for argument in argv if argument.startswith("--") and argument != "--set"]
    repeated = sorted({name for name in names if names.count(name) > 1 and name != "--set"})
    if repeated:
        raise ShardingError(
            "An option is given more than once.",
            where=repeated,
            why="only --set may be.",
            do="give it once; several values follow one another, as in --data FILE FOLDER.",
        )


def _with_stored(args: TrainArgs, stored: Mapping[str, Any]) -> TrainArgs:
    """The arguments, and where they say nothing what the run was begun with."""
    taken = {key: value for key, value in stored.items() if key in _WHAT and not getattr(args, key) and value}
    paths = {"data": lambda value: tuple(map(Path, value)), "tokenizer": Path, "set": tuple}
    return dataclasses.replace(args, **{key: paths.get(key, lambda value: value)(taken[key]) for key in taken})


def _train(request: _Request) -> int:
    args = request.args
    cluster = launch.detect()
    simulate_devices(dict(request.sizes), processes=1 if cluster is None else cluster.num_processes)
    if launch.is_worker():
        launch.start_worker()
    mesh = js.mesh(**request.sizes)
    assert isinstance(mesh, Mesh)  # devices were not given as a number
    say = print if jax.process_index() == 0 else (lambda *text: None)
    say(describe_devices())
    say(_plan(request, mesh))
    data = _data(request)
    say(data.description)
    finished = run_recipe(
        request.model_file,
        request.recipe,
        mesh=mesh,
        data=data,
        out=gather_texts(str(request.out or RunFolder.free_name(_RUNS, _stem(args, request.name))))[0],
        name=request.name,
        resume=args.resume,
        track=_track(args),
        options=request.options,
        workers=args.workers,
        sample_tokens=args.sample_tokens,
        say=say,
    )
    if finished.stopped_by is not None:
        say(f"\nstopped by {finished.stopped_by.name} after step {finished.step}: {finished.checkpoint} is saved.")
        say(f"jshard train {shlex.quote(str(args.model))} --out {shlex.quote(str(finished.out))} --resume goes on.")
        return 128 + finished.stopped_by
    _say_result(request, finished, say)
    return 0


def _say_result(request: _Request, finished: Finished, say: Any) -> None:
    if finished.sample is not None:
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in finished.sample)
        say(f"\na sample; its first words are of held-out text:\n{textwrap.indent(shown, '    ')}")
    names = sorted(path.name + "/" * path.is_dir() for path in finished.out.iterdir() if path.name[0] != ".")
    if finished.val_loss is not None:
        unit = "byte" if request.args.tokenizer is None and request.model_file.data is None else "token"
        say(f"\nvalidation loss {finished.val_loss:.4f} nats per {unit} after {finished.step} steps")
    say(f"{finished.out}/: {'  '.join(names)}")


def _data(request: _Request) -> Data:
    args, recipe = request.args, request.recipe
    if request.model_file.data is not None:
        if args.data or args.tokenizer:
            raise ShardingError(
                "The model file brings its own data.",
                where=f"--data and --tokenizer, {args.model}: data(recipe)",
                why="they are read as text only where the file has no `data`.",
                do="leave the options away, or take `data` out of the file.",
            )
        return request.model_file.data(recipe)
    from jshard.train.text import load_text  # a dry run does without grain

    tokenizer = ByteTokenizer() if args.tokenizer is None else HuggingFaceTokenizer(args.tokenizer)
    return load_text(args.data, sequence_length=recipe.sequence_length, tokenizer=tokenizer)


def _supervise(args: TrainArgs, argv: Sequence[str], cluster: launch.Cluster | None) -> int:
    if args.processes != 1 and cluster is not None:
        raise ShardingError(
            "There are processes already.",
            where=f"--processes {args.processes}",
            why=f"this is process {cluster.process_id} of {cluster.num_processes} ({cluster.kind}).",
            do="leave --processes away on a cluster.",
        )
    devices = num_devices(parse_mesh(args.mesh))
    if cluster is None and (args.processes < 1 or devices % args.processes):
        raise ShardingError(
            f"{args.processes} processes cannot share the devices.",
            where=f"--processes {args.processes} --mesh {args.mesh or f'fsdp={devices}'}",
            why=f"the mesh has {devices} devices, and each process simulates as many as the others.",
            do=f"--processes {next(n for n in range(min(devices, max(args.processes, 1)), 0, -1) if devices % n == 0)}",
        )
    return launch.supervise(
        [sys.executable, "-m", "jshard", "train", *argv],
        processes=args.processes if cluster is None else None,
        cluster=cluster,
        deadlines=launch.Deadlines(init_s=args.init_timeout, peer_s=args.peer_timeout),
        again=shlex.join(["jshard", "train", *(a for a in argv if a != "--resume"), "--resume"]),
    )


def _track(args: TrainArgs) -> tuple[str, ...]:
    return args.track if args.track is not None else tuple(n for n in available() if n == "tensorboard")


def _stem(args: TrainArgs, name: str) -> str:
    return f"{args.model.stem}-{name}"


def _plan(request: _Request, mesh: AnyMesh) -> js.Explanation:
    model_file, recipe = request.model_file, request.recipe
    model = js.abstract_init(
        lambda: model_file.build(recipe.model, nnx.Rngs(recipe.seed)),
        lambda model: model_file.annotate(model, mesh),
    )
    batch = None
    if model_file.data is None:
        tokens = jax.ShapeDtypeStruct((recipe.batch_size // recipe.accumulate, recipe.sequence_length), jnp.int32)
        batch = {"inputs": tokens, "targets": tokens}
    loss = None if batch is None else model_file.loss_fn
    return js.explain(model, optimizer=recipe.optimizer(), loss=loss, batch=batch)
