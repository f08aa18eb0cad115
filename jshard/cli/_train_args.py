"""The arguments of `jshard train`. A process that only starts those of a run imports no more, and not jax."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jshard import launch
from jshard.errors import MeshError, ShardingError

_SIMULATED = 8


def parse_mesh(text: str) -> dict[str, int]:
    """The degrees in `"replica=2,fsdp=4"`; none for an empty text.

    Raises:
        MeshError: the text is not a list of axis=degree.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, degree = part.partition("=")
        if not degree.removeprefix("-").isdecimal() or axis in sizes:
            raise MeshError(
                "The mesh cannot be read.",
                where=f"--mesh {text}",
                why=f"{part!r} is not axis=degree, or its axis was named before.",
                do="--mesh fsdp=-1  # all devices; of several axes as in replica=2,fsdp=4",
            )
        sizes[axis] = int(degree)
    return sizes


def as_option(sizes: Mapping[str, int]) -> str:
    """Degrees as `--mesh` takes them."""
    return ",".join(f"{axis}={degree}" for axis, degree in sizes.items())


def num_devices(sizes: Mapping[str, int]) -> int:
    """Devices that a mesh of these degrees asks for; an axis of -1, or an open `fsdp`, makes it at least 8."""
    fixed = math.prod(degree for degree in sizes.values() if degree > 0)
    is_open = -1 in sizes.values() or "fsdp" not in sizes
    return fixed * math.ceil(_SIMULATED / fixed) if is_open else fixed


# Steps on the command line: `10:15` is what is done from the end of step 10 to the end of step 15.


def parse_steps(text: str, *, option: str) -> range:
    """The numbers of the steps in `A:B`: those after step A, up to step B.

    Args:
        text: as given.
        option: which takes it, such as `--profile`.

    Raises:
        ShardingError: it is not of that form, or there is no step between.
    """
    found = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if found is None:
        raise ShardingError(
            "The steps cannot be read.",
            where=f"{option} {text}",
            why="they are given as A:B, two whole numbers: the steps after step A, up to step B.",
            do=f"{option} 10:15  # steps 11 to 15",
        )
    after, last = int(found[1]), int(found[2])
    if last <= after:
        one = max(1, last)
        meant = f"{last}:{after}" if last < after else f"{one - 1}:{one}  # step {one}"
        raise ShardingError(
            "There is no step between the two.",
            where=f"{option} {text}",
            why=f"A:B is the steps after step A, up to step B, and {last} is not after {after}.",
            do=f"{option} {meant}",
        )
    return range(after + 1, last + 1)


# The arguments of `jshard train`. Whoever only starts the processes of a run reads no more, and not jax.


@dataclasses.dataclass(frozen=True)
class TrainArgs:
    """Trains a recipe of a model file fully sharded.

    Writes run.json, metrics.jsonl, loss.png, sample.txt and checkpoints/ into a folder of its own. SIGTERM and Ctrl-C
    save and stop; --resume goes on. Exit codes: 0 done, 1 the run failed, 2 the request was wrong, 130 and 143 stopped
    by Ctrl-C and SIGTERM.
    """

    model: tyro.conf.Positional[Path]
    """Python file with the model, its annotation and its recipes; or a model that comes with jshard, by name: gpt."""
    recipe: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the recipe; the file's first by default."""
    set: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")]] = ()
    """Another value for the recipe, as often as needed: --set learning_rate=1e-3 --set model.n_layer=4. --print-config
    shows the keys."""
    unit: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")]] = ()
    """Another setting for the units than the annotation's: --unit remat=full --unit prefetch=2
    --unit reshard_after_forward=false."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Optimizer steps, instead of the recipe's."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Seed of parameters, dropout and sample order, instead of the recipe's."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=DEGREE,...")] = ""
    """Degrees of the mesh axes, e.g. replica=2,fsdp=4 (default: fsdp takes all devices; on a CPU 8 are simulated)."""
    auto: bool = False
    """Choose: how the devices are split, what is kept and computed again, in how many microbatches. Estimates are
    corrected by the measured steps of a few ways, and the choice is remembered."""
    options: Annotated[str, tyro.conf.arg(metavar="PROFILE")] = "fastest"
    """Options of the compiler, as of js.compiler_options: fastest, memory, or none. On a CPU all are none."""
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
    init_from: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Begin with the parameters of a checkpoint: of jshard (a checkpoint, or a run), of Orbax, of PyTorch's distributed
    checkpoints, or safetensors; the model file's `hf_names` says what others call them. A run that is resumed goes on
    with its own, and reads them again only if it has saved none."""
    stop_deadline: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """How long after the signal a run that is asked to stop (SIGTERM) waits for its saves; by default as long as they
    take."""
    track: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="NAME")] = None
    """Further records: tensorboard, wandb. By default tensorboard where that extra is installed."""
    sample_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 256
    """Tokens that the model writes at the end; 0 for none."""
    profile: Annotated[str, tyro.conf.arg(metavar="A:B")] = ""
    """Profile the steps after step A, up to step B, into the run's folder: 10:15 for steps 11 to 15. Read it with
    `jshard trace`."""
    processes: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Run as N processes on this machine, which share its devices, as a cluster would. Not for clusters."""
    init_timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = launch.Deadlines.init_s
    """How long the processes of a run wait for each other at the start."""
    peer_timeout: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = launch.Deadlines.peer_s
    """How long a process may give no sign of life before the run ends."""
    dry_run: bool = False
    """Print the plan and stop: needs no device and no memory for parameters."""
    print_config: bool = False
    """Print everything the run is made from as JSON and stop."""


def again(argv: Sequence[str], out: Path | None = None) -> str:
    """The command line that goes on with a run."""
    given = [argument for argument in argv if argument != "--resume"]
    is_named = any(argument.partition("=")[0] == "--out" for argument in given)
    named = [] if out is None or is_named else ["--out", str(out)]
    return shlex.join(["jshard", "train", *given, *named, "--resume"])
