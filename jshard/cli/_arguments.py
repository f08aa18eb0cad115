"""The arguments of the commands: dataclasses, parsed by tyro. Launching processes needs no jax."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import re
import shlex
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import tyro

from jshard import launch
from jshard._parsing import is_int, is_number, shown
from jshard._paths import expanded
from jshard.cli._config import option_of, with_config
from jshard.cli._help import description_of, prepare_help, refusal, wide_messages
from jshard.errors import ShardingError

T = TypeVar("T")
Count = Annotated[int, tyro.conf.arg(metavar="N")]
Seconds = Annotated[float, tyro.conf.arg(metavar="SECONDS")]
Options = Literal["fastest", "memory", "none"]
Extra = Literal["error", "ignore"]  # as in jshard.checkpoint, which imports jax
Weights = Literal["model", "ema"]
Pack = Literal["yes", "no"]
Dtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]  # as in jshard.data.token_files, which imports numpy
# Repeatable; each use adds one.
Settings = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")]]


def parse(cls: type[T], argv: Sequence[str], *, command: str) -> T:
    """Returns the arguments as an object of a dataclass; for help, prints it and exits.

    A field without a default is the command's positional file; every other field is an option. An option given
    twice is an error, too; the parser alone would take the last.

    Raises:
        ShardingError: the arguments cannot be read.
    """
    hints = prepare_help(cls)
    if "config" in hints:
        # One file serves every command: an option that another command has is left out here.
        argv = with_config(argv, hints, known={*hints, *typing.get_type_hints(TrainArgs)})
    _check_given_once(hints, argv, command)
    args = _parsed(cls, [_with_folder(word) for word in argv], command)
    _check_numbers(args, command)
    return _with_paths_expanded(args)


def _check_given_once(hints: Mapping[str, object], argv: Sequence[str], command: str) -> None:
    counts = collections.Counter[str]()
    for word in argv:
        if word.startswith("--"):
            # tyro takes --held_out for --held-out: they are one option.
            option = word.removeprefix("--").partition("=")[0]
            counts[option.replace("-", "_")] += 1
    for name, count in counts.items():
        if count == 1 or name not in hints or _is_repeatable(hints[name]):
            continue
        raise ShardingError(
            "An option is given twice.",
            where=f"{command} {shlex.join(argv)}",
            why=f"{option_of(name)} is given {count} times, and only the last would count.",
            do=f"give {option_of(name)} once, with all its values.",
        )


def _is_repeatable(hint: object) -> bool:
    return tyro.conf.UseAppendAction in getattr(hint, "__metadata__", ())


def _with_folder(word: str) -> str:
    """Returns an argument with the working folder in place of `./` before a `~`.

    `Path` would drop the `./` of a file that is named `~`, and then the name would be taken for the home folder.
    """
    return re.sub(r"^(--[\w-]+=)?\./(?=~)", rf"\g<1>{Path.cwd()}/", word)


def _parsed(cls: type[T], argv: Sequence[str], command: str) -> T:
    asks_for_help = "-h" in argv or "--help" in argv
    printed = io.StringIO()
    try:
        with (
            wide_messages(not asks_for_help),
            contextlib.redirect_stdout(sys.stdout or printed),  # None if it is closed, which tyro does not expect
            contextlib.redirect_stderr(printed),  # what is wrong, in a box; `refusal` takes it out
        ):
            return tyro.cli(
                cls,
                prog=command,
                description=description_of(cls),
                args=argv,
                config=(tyro.conf.FlagCreatePairsOff,),  # no --no-json beside --json
            )
    except SystemExit as stop:
        if not stop.code:  # after the help
            raise
        raise ShardingError(
            "The arguments cannot be read.",
            where=shlex.join([*command.split(), *argv]),
            why=refusal(printed.getvalue()),
            do=f"{command} --help  # lists them all",
        ) from None


def _check_numbers(args: object, command: str) -> None:
    """Raises for a number that no clock, array or process can have: comparisons with nan let it pass everywhere."""
    for name, value in vars(args).items():
        if _is_usable(value):
            continue
        option = option_of(name)
        raise ShardingError(
            "An option has an unusable number.",
            where=f"{command} {option}",
            why=f"it is {shown(value)}; numbers are finite, and whole ones have at most 64 bits.",
            do=f"{command} --help  # shows what {option} means; or leave it out",
        )


def _is_usable(value: object) -> bool:
    if isinstance(value, bool):
        return True
    if isinstance(value, float):
        return is_number(value)
    if isinstance(value, int):
        return is_int(value)
    return True


def _with_paths_expanded(args: T) -> T:
    """Returns arguments whose paths have the home folder for `~`, which a shell leaves in `--out=~/runs`."""
    values: dict[str, Any] = {name: _expanded(value) for name, value in vars(args).items()}
    return dataclasses.replace(cast(Any, args), **values)


def _expanded(value: object) -> object:
    if isinstance(value, Path):
        return expanded(value)
    if isinstance(value, tuple):
        return tuple(map(_expanded, value))
    return value


def parse_steps(text: str, *, option: str) -> range:
    """Returns the step numbers in `A:B`: those after step A, up to and including step B."""
    # 18 digits fit into 64 bits.
    match = re.fullmatch(r"\s*([0-9]{1,18})\s*:\s*([0-9]{1,18})\s*", text)
    if match is None:
        raise _invalid_steps(
            text,
            option,
            why="the form is A:B, two whole numbers: the steps after step A, up to step B.",
            example="10:15  # steps 11 to 15",
        )
    after, last = int(match[1]), int(match[2])
    if after < last:
        return range(after + 1, last + 1)
    if after > last:
        example = f"{last}:{after}"
    else:  # the single step B was meant
        step = max(1, last)
        example = f"{step - 1}:{step}  # step {step}"
    why = f"A:B means the steps after step A, up to step B, and {last} is not after {after}."
    raise _invalid_steps(text, option, why=why, example=example)


def _invalid_steps(text: str, option: str, *, why: str, example: str) -> ShardingError:
    return ShardingError("The steps are not valid.", where=f"{option} {text}", why=why, do=f"{option} {example}")


@dataclasses.dataclass(frozen=True)
class RecipeArgs:
    """A recipe of a model file, for a mesh: the options that the commands on a recipe share."""

    model: tyro.conf.Positional[Path]
    """Python file with the model, its annotation and its recipes; or the name of a model included in jshard: gpt."""
    recipe: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the recipe; the file's first by default."""
    set: Settings = ()
    """Override a value of the recipe; repeatable: --set learning_rate=1e-3 --set model.n_layer=4. --print-config
    of `jshard train` shows the keys."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A run as JSON or TOML, as printed by --print-config of `jshard train`, or a part of it; options given here take
    precedence."""
    steps: Count | None = None
    """Optimizer steps, instead of the recipe's."""
    seed: Count | None = None
    """Seed of parameters, dropout and sample order, instead of the recipe's."""
    unit: Settings = ()
    """Override a setting of the annotation's units: --unit remat=full --unit prefetch=2
    --unit reshard_after_forward=false."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=DEGREE,...")] = ""
    """Degrees of the mesh axes, e.g. replica=2,fsdp=4. By default fsdp takes all devices; without accelerators 8 are
    simulated."""


@dataclasses.dataclass(frozen=True)
class TrainArgs(RecipeArgs):
    """Trains a recipe of a model file fully sharded.

    Writes run.json, metrics.jsonl, loss.png, sample.txt and checkpoints/ into a folder of its own. SIGTERM and Ctrl-C
    save and stop; --resume continues. Exit codes: 0 done, 2 invalid request, 75 stopped by SIGTERM, or a process
    was lost (the same command with --resume continues), 1 the run failed, 130 stopped by Ctrl-C.
    """

    auto: bool = False
    """Choose how to split the devices, what to keep and what to recompute, and the number of microbatches. Measured
    steps of a few configurations correct the estimates, and the choice is stored."""
    options: Options = "fastest"
    """Compiler options, as in js.compiler_options; on a CPU every profile is empty."""
    data: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH")] = ()
    """Files to train on: text, .jsonl, .parquet, .bin and .npy of token ids, and folders of them or of Hugging Face
    datasets; PATH=WEIGHT sets the share of samples of each. hf:NAME[,CONFIG][:SPLIT] streams a dataset of Hugging Face,
    by its name or a local folder (extra `datasets`). By default the sources of Python's standard library."""
    held_out: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH")] = ()
    """The same, for the validation loss; by default a twentieth of --data, and of a stream its first rows."""
    text_key: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Key or column of a document's text; by default text. Of conversations, of their messages; by default messages or
    conversations."""
    pack: Pack | None = None
    """Whether several conversations share a sequence, in which none sees another (yes, the default). With no, each has
    a sequence of its own, for a model that takes no segments."""
    dtype: Dtype | None = None
    """Dtype of the token ids in .bin files."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A Hugging Face tokenizer.json, or the folder of a model that has it; by default every byte is a token. Needs the
    extra `hf`. For conversations the folder has the chat template, too."""
    workers: Count = 0
    """Processes that read the data, for data that is expensive to produce; 0 reads in a thread."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder to write, empty or new; by default runs/MODEL-RECIPE, with a number if that is taken."""
    resume: bool = False
    """Continue the run in --out (by default the newest of this recipe) from its last checkpoint, with its options."""
    checkpoints: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Where to store checkpoints: a bucket address for this run alone, gs://BUCKET/NAME or s3://BUCKET/NAME; by
    default OUT/checkpoints. Everything else of the run stays in --out."""
    init_from: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Start from the parameters of a checkpoint: of jshard (a checkpoint, or a run), Orbax, PyTorch's distributed
    checkpoints, DeepSpeed's ZeRO-3, or safetensors; the model file's `hf_names` maps their names. A resumed run
    continues with its own, and reads these again only if it has saved none."""
    adapters: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Start with the adapters in a folder of PEFT, beside the weights of --init-from; its adapter_config.json sets
    model.lora."""
    extra: Extra | None = None
    """What to do with parameters of --init-from that the model has no place for, such as more layers: refuse (error,
    the default), or skip them (ignore)."""
    stop_deadline: Seconds | None = None
    """How long a run has after SIGTERM to finish its step and save; by default as long as it takes."""
    stall_timeout: Seconds | None = None
    """How long a step, a batch or a batch of an evaluation may take before the run ends as stalled (exit code 75); by
    default 20 times the median step, from 60 to 1800 seconds. A save and the first step have 1800, or this if it is
    longer. There is no limit while the run starts and compiles, and after its last save."""
    keep_in_memory: Annotated[int | None, tyro.conf.arg(metavar="STEPS")] = None
    """Every so many steps, keep a copy of the state in the memory of another machine; a run restarted after a loss
    continues from it. By default there are only checkpoints."""
    expect: Annotated[Path | None, tyro.conf.arg(metavar="PLAN.json")] = None
    """A plan, saved by `jshard plan --topology ... --json`: stop before the first step if the compiled step differs
    in its collectives, their bytes or its peak memory."""
    expect_within: Annotated[float, tyro.conf.arg(metavar="PART")] = 0.05
    """The fraction by which each of these may differ."""
    track: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="NAME")] = None
    """Further records: tensorboard, wandb. By default tensorboard where that extra is installed."""
    sample_tokens: Count = 256
    """Tokens that the model writes at the end; 0 for none."""
    profile: Annotated[str, tyro.conf.arg(metavar="A:B")] = ""
    """Profile the steps after step A, up to step B, into the run's folder: 10:15 for steps 11 to 15. Read it with
    `jshard trace`."""
    processes: Count = 1
    """Run as N processes on this machine, which share its devices, as a cluster would. Not for clusters."""
    init_timeout: Seconds = launch.Deadlines.init_s
    """How long the processes of a run wait for each other at the start."""
    peer_timeout: Seconds = launch.Deadlines.peer_s
    """How long a process may be silent before the run ends."""
    max_restarts: Count = 0
    """How often to restart from the last checkpoint after the loss of a process, or a stall."""
    min_processes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """On a cluster: the fewest processes that may continue without the others, more than half; the mesh shrinks, its
    data axes first. By default a restart needs all."""
    compile_cache: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of compiled programs, for restarts; "none" compiles each time. By default JAX_COMPILATION_CACHE_DIR, or
    .compiled beside --out."""
    dry_run: bool = False
    """Print the plan and exit; needs no devices and no memory for parameters."""
    print_config: bool = False
    """Print the full configuration of the run as JSON and exit."""

    def again(self, out: Path | None = None) -> str:
        """Returns the command line that continues the run."""
        return shlex.join(["jshard", "train", *self.words(out), "--resume"])

    def words(self, out: Path | None = None) -> list[str]:
        """Returns the arguments as words of a command line, without --resume."""
        args = dataclasses.replace(self, out=self.out or out, resume=False)
        words = [str(self.model)]
        defaults = type(self)(self.model)
        if self.config is not None:
            # What the file sets is not repeated as an option.
            defaults = parse(type(self), [str(self.model), "--config", str(self.config)], command="jshard train")
            words += ["--config", str(self.config)]
        for field in dataclasses.fields(args)[1:]:  # the first is the model
            value = getattr(args, field.name)
            if field.name in ("set", "unit"):
                # All of them, also those of a file: a single --unit on the command line replaces the file's.
                for setting in value:
                    words += [option_of(field.name), setting]
            elif field.name != "config" and value != getattr(defaults, field.name):
                words += [option_of(field.name), *_value_words(value)]
        return words


def _value_words(value: object) -> list[str]:
    """Returns the words after an option that give it a value; none after a flag."""
    if value is True:
        return []
    if isinstance(value, tuple):
        return list(map(str, value))
    return [str(value)]
