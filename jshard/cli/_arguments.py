"""The arguments of the commands, parsed by tyro, and the devices of a mesh. Launching processes needs no jax."""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import tyro

from jshard import launch
from jshard._files import check_may_write
from jshard._live import fitted
from jshard._parsing import is_int, is_number, shown, whole_number
from jshard._paths import expanded
from jshard.cli._config import with_config
from jshard.errors import MeshError, RunError, ShardingError, printable

if TYPE_CHECKING:
    from jshard.plans.mesh import AnyMesh

T = TypeVar("T")
Count = Annotated[int, tyro.conf.arg(metavar="N")]
Seconds = Annotated[float, tyro.conf.arg(metavar="SECONDS")]
Options = Literal["fastest", "memory", "none"]
Extra = Literal["error", "ignore"]  # as in jshard.checkpoint, which imports jax
Dtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]  # as in jshard.data.files, which imports numpy
Settings = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")]]


def parse(cls: type[T], argv: Sequence[str], *, command: str) -> T:
    """The arguments as an object of a dataclass; for help, prints it and exits.

    A field without a default is the command's positional file; every other field is an option. An option given
    twice is an error, too; the parser alone would take the last.

    Raises:
        ShardingError: the arguments cannot be read.
    """
    hints = _shown(cls)
    if "config" in hints:
        # One file serves every command: an option that another command has is left out here.
        argv = with_config(argv, hints, known={*hints, *typing.get_type_hints(TrainArgs)})
    appends = {name for name, hint in hints.items() if tyro.conf.UseAppendAction in getattr(hint, "__metadata__", ())}
    words = [word.partition("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")]
    for name, count in collections.Counter(words).items():
        if count > 1 and name in hints.keys() - appends:
            option = f"--{name.replace('_', '-')}"
            raise ShardingError(
                "An option is given twice.",
                where=f"{command} {shlex.join(argv)}",
                why=f"{option} is given {count} times, and only the last would count.",
                do=f"give {option} once, with all its values.",
            )
    # tyro joins lines, except those that begin with a space, and wraps none.
    wrapped = textwrap.TextWrapper(shutil.get_terminal_size().columns, initial_indent=" ", subsequent_indent=" ").fill
    text = "\n".join(wrapped(" ".join(part.split())) for part in (cls.__doc__ or "").split("\n\n"))
    # `Path` would drop the "./" of a folder that is named `~`.
    argv = [re.sub(r"^(--[\w-]+=)?\./(?=~)", rf"\g<1>{Path.cwd()}/", word) for word in argv]
    printed = io.StringIO()
    try:
        with (
            _wide(not {"-h", "--help"} & set(argv)),
            contextlib.redirect_stdout(sys.stdout or printed),  # None if it is closed, which tyro does not expect
            contextlib.redirect_stderr(printed),
        ):
            parsed = tyro.cli(cls, prog=command, description=text, args=argv, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ShardingError(
            "The arguments cannot be read.",
            where=shlex.join([*command.split(), *argv]),
            why=_parsers_words(printed.getvalue()),
            do=f"{command} --help  # lists them all",
        ) from None
    _check_numbers(parsed, command)
    return _with_paths_expanded(parsed)


def _with_paths_expanded(args: T) -> T:
    """Arguments whose paths have the home folder in place of `~`, which a shell leaves in `--out=~/runs`."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(cast(Any, args)):
        value = getattr(args, field.name)
        if isinstance(value, Path):
            changed[field.name] = expanded(value)
        elif isinstance(value, tuple) and any(isinstance(each, Path) for each in value):
            changed[field.name] = tuple(expanded(each) if isinstance(each, Path) else each for each in value)
    return dataclasses.replace(cast(Any, args), **changed)


@contextlib.contextmanager
def _wide(is_wide: bool) -> Iterator[None]:
    """A context in which tyro does not break the lines of its messages."""
    before = os.environ.get("COLUMNS")
    if is_wide:
        os.environ["COLUMNS"] = "2000"
    try:
        yield
    finally:
        if before is not None:
            os.environ["COLUMNS"] = before
        elif is_wide:
            del os.environ["COLUMNS"]


_RULE = re.compile(r"[\W_]*")  # a line of the box, without letters
_NO_NUMBER = re.compile(r"Error parsing (\S+): .*(base 10|convert string to float): (.+)")
_NO_CHOICE = re.compile(r"invalid choice (.+) for argument '(.+)'. Expected one of \((.*)\)")


def _parsers_words(printed: str) -> str:
    """Why tyro refuses the arguments, in one line, without its box and its own types."""
    _title, *lines = printed.splitlines()
    words: list[str] = []
    for line in lines:
        content = line.strip("\u2502| ")
        if content.startswith(("For full helptext", "Argument helptext")):
            break
        if not _RULE.fullmatch(content):
            words += content.split()
    text = " ".join(words).rstrip(".").replace(" Perhaps you meant:", ". Perhaps you meant:")
    if number := _NO_NUMBER.match(text):
        kind = "a whole number" if number[2] == "base 10" else "a number"
        return f"{number[1]} takes {kind}, not {number[3]}."
    if choice := _NO_CHOICE.match(text):
        choices = sorted(set(re.findall(r"'(.+?)'", choice[3])) - {"None"})
        return f"{choice[2]} takes one of {', '.join(choices)}, not {choice[1]}."
    return f"{text}."


def _check_numbers(args: Any, command: str) -> None:
    """Raises for a number that no clock, array or process can have: comparisons with nan let it pass everywhere."""
    for name, value in vars(args).items():
        option = f"--{name.replace('_', '-')}"
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if (isinstance(value, float) and not is_number(value)) or (is_count and not is_int(value)):
            raise ShardingError(
                "An option has an unusable number.",
                where=f"{command} {option}",
                why=f"it is {shown(value)}; numbers are finite, and whole ones have at most 64 bits.",
                do=f"{command} --help  # shows what {option} means; or leave it out",
            )


@functools.cache
def _shown(cls: type[Any]) -> dict[str, Any]:
    """The types of a dataclass of arguments; from now on its help has whole lines, no `{None}|`, no empty default."""
    hints, texts = typing.get_type_hints(cls, include_extras=True), _option_texts(cls)
    shown: dict[str, Any] = {}
    for name, hint in hints.items():
        is_positional = tyro.conf.Positional in getattr(hint, "__metadata__", ())
        metavar = _metavar(hint) or (name.upper() if is_positional else _without_none(hint))
        how = {"metavar": metavar, "help": texts.get(name), "help_behavior_hint": _default}
        shown[name] = Annotated[hint, tyro.conf.arg(**how)]
    for base in cls.__mro__[:-1]:  # a name is that of the first class that has it
        base.__annotations__ = {name: shown.pop(name, hint) for name, hint in inspect.get_annotations(base).items()}
    return hints


def _option_texts(cls: type[Any]) -> dict[str, str]:
    """The docstrings of fields, each in one line: tyro leaves the line breaks of the source in the help."""
    found: dict[str, str] = {}
    for base in [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]:
        (node,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(node, ast.ClassDef)
        for field, text in itertools.pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _metavar(hint: Any) -> str | None:
    return next((found for one in getattr(hint, "__metadata__", ()) if (found := getattr(one, "metavar", None))), None)


def _without_none(hint: Any) -> str | None:
    """What to call the value of an option that may be None by default; None for any other."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    if typing.get_origin(hint) not in (typing.Union, types.UnionType) or len(kinds) != 1:
        return None
    choices = typing.get_args(kinds[0]) if typing.get_origin(kinds[0]) is Literal else ()
    return f"{{{','.join(choices)}}}" if choices else _metavar(kinds[0]) or kinds[0].__name__.upper()


def _default(label: str) -> str:
    return "" if label in ("", "''", "None", "False") else f"(default: {label})"


def check_writable(path: Path | None, *, option: str) -> None:
    """Refuses a file that could not be written, before the work for it: its folder is missing, or not the user's."""
    if path is None:
        return
    folder, do = path.absolute().parent, f"{option} FILE, in a folder that you may write."
    why = None
    if not os.path.lexists(folder):
        why, do = f"there is no folder {folder}.", f"mkdir -p {shlex.quote(str(path.parent))}"
    elif path.is_dir():
        why, do = "it is a folder.", f"{option} {shlex.quote(str(path / 'report'))}  # a file in it"
    else:
        try:
            check_may_write(path)
        except OSError as error:
            why = f"{error.strerror}: {error.filename}."
    if why is not None:
        raise ShardingError("The file cannot be written.", where=f"{option} {path}", why=why, do=do)


def write(path: Path, text: str) -> None:
    """Writes a file in addition to the answer, and reports it."""
    try:
        path.write_text(text)
    except OSError as error:
        raise RunError(
            "The file could not be written.",
            where=str(path),
            why=f"{error.strerror}.",
            do="make room, or name a file on another disk.",
        ) from error
    remark(f"written: {path}")


def answer(found: Any, *, json: bool) -> None:
    """Prints the result of a command, as readable text or as JSON only."""
    from jshard.inspect.tables import show

    print(found.to_json()) if json else show(found)


def remark(line: str) -> None:
    """Prints a line on stderr, separate from the answer."""
    print(fitted(printable(line, keep="\n\t"), sys.stderr), file=sys.stderr)


_SIMULATED = 8


def parse_mesh(text: str) -> dict[str, int]:
    """The degrees in `"replica=2,fsdp=4"`; none for an empty text."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, degree = part.partition("=")
        number = None
        with contextlib.suppress(ValueError):
            number = whole_number(degree)
        if number is None or axis in sizes:
            raise MeshError(
                "The mesh cannot be read.",
                where=f"--mesh {text}",
                why=f"{part!r} is not axis=degree, or repeats an axis.",
                do="--mesh fsdp=-1  # all devices; several axes: replica=2,fsdp=4",
            )
        sizes[axis] = number
    return sizes


def as_option(sizes: Mapping[str, int]) -> str:
    """Degrees in the form of `--mesh`."""
    return ",".join(f"{axis}={degree}" for axis, degree in sizes.items())


def num_devices(sizes: Mapping[str, int]) -> int:
    """Devices that a mesh of these degrees needs; at least 8 with an axis of -1 or an open `fsdp`."""
    fixed = math.prod(degree for degree in sizes.values() if degree > 0)
    is_open = -1 in sizes.values() or "fsdp" not in sizes
    return fixed * math.ceil(_SIMULATED / fixed) if is_open else fixed


def open_mesh(sizes: Mapping[str, int], *, devices: int | None = None) -> AnyMesh:
    """The mesh of these degrees: over all devices, or, given a number, an abstract one for a plan."""
    import jax

    import jshard as js
    from jshard.plans.make_mesh import nearest_degrees
    from jshard.plans.mesh import AXES

    try:
        return js.mesh(**{**sizes, "devices": cast(Any, devices)})
    except MeshError as error:  # in the words of the option
        raise MeshError(
            error.what,
            where=f"--mesh {as_option(sizes)}",
            why=error.why,
            do=f"--mesh {as_option(nearest_degrees(sizes, len(jax.devices()) if devices is None else devices))}"
            f"  # the axes are {', '.join(AXES)}; one may be -1 for the rest",
        ) from error


def simulate_devices(sizes: Mapping[str, int], *, processes: int = 1) -> None:
    """Makes JAX simulate as many CPU devices as the mesh needs, shared by so many processes.

    Call it before JAX initialises its devices; it has no effect where there is an accelerator. A number set by the
    user is kept.
    """
    import jax

    by_user = "JAX_NUM_CPU_DEVICES" in os.environ or "device_count" in os.environ.get("XLA_FLAGS", "")
    if not by_user and jax.config.values["jax_num_cpu_devices"] == -1:
        jax.config.update("jax_num_cpu_devices", math.ceil(num_devices(sizes) / processes))


def parse_steps(text: str, *, option: str) -> range:
    """The step numbers in `A:B`: those after step A, up to and including step B."""
    found = re.fullmatch(r"\s*([0-9]{1,18})\s*:\s*([0-9]{1,18})\s*", text)
    why, meant = (
        "the form is A:B, two whole numbers: the steps after step A, up to step B.",
        "10:15  # steps 11 to 15",
    )
    if found is not None:
        after, last = int(found[1]), int(found[2])
        if after < last:
            return range(after + 1, last + 1)
        one = max(1, last)
        meant = f"{last}:{after}" if last < after else f"{one - 1}:{one}  # step {one}"
        why = f"A:B means the steps after step A, up to step B, and {last} is not after {after}."
    raise ShardingError("The steps are not valid.", where=f"{option} {text}", why=why, do=f"{option} {meant}")


@dataclasses.dataclass(frozen=True)
class RecipeArgs:
    """A recipe of a model file, for a mesh."""

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

    def without_devices(self) -> TrainArgs:
        """The same recipe, for planning only."""
        shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(RecipeArgs)}
        return TrainArgs(**shared, dry_run=True)


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
    datasets; PATH=WEIGHT sets the share of samples of each. By default the sources of Python's standard library."""
    held_out: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH")] = ()
    """The same, for the validation loss; by default a twentieth of --data."""
    text_key: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Key or column of a document's text; by default text."""
    dtype: Dtype | None = None
    """Dtype of the token ids in .bin files."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A Hugging Face tokenizer.json; by default every byte is a token. Needs the extra `hf`."""
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
        """The command line that continues the run."""
        return shlex.join(["jshard", "train", *self.words(out), "--resume"])

    def words(self, out: Path | None = None) -> list[str]:
        """The arguments, without --resume."""
        words = [str(self.model)]
        given = dataclasses.replace(self, out=self.out or out, resume=False)
        base = type(self)(self.model)
        if self.config is not None:
            base = parse(type(self), [str(self.model), "--config", str(self.config)], command="jshard train")
            words += ["--config", str(self.config)]
        for field in dataclasses.fields(given)[1:]:
            value, option = getattr(given, field.name), f"--{field.name.replace('_', '-')}"
            if field.name in ("set", "unit"):
                words += [word for one in value for word in (option, one)]
            elif field.name != "config" and value != getattr(base, field.name):
                values = value if isinstance(value, tuple) else () if value is True else (value,)
                words += [option, *map(str, values)]
        return words
