"""How a recipe is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jax.sharding import Mesh

from jshard._types import Json
from jshard.checkpoint.restore_operation import Extra
from jshard.data import Data
from jshard.launch import StallWatch
from jshard.train.expected import ExpectedStep
from jshard.train.records import Tracker


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How `run_recipe` runs a recipe: on which devices and data, into which folder, and what it records.

    Attributes:
        mesh: the devices.
        data: the training data.
        out: a folder that is empty or does not exist, or with `resume` that of the run to continue.
        name: of the recipe, for the record.
        resume: continue from the last checkpoint in `out`, bit for bit; from the first step if there is none.
        track: further trackers: names, "tensorboard", "wandb" or one of `register_tracker`, and objects with the
            methods of `Tracker`. One that fails is left out, and the run continues. The run closes them.
        command_options: the command-line options; a resumed run reads them from run.json.
        workers: processes that read the data; see `Loader`.
        sample_tokens: tokens to generate at the end, if the model is known to be a text decoder; 0 for none.
        profile: numbers of steps to profile, such as range(11, 16); see `StepProfile`.
        compiler_options: for the step, as from `js.compiler_options()`; none by default.
        expect: the expected properties of the compiled step; see `ExpectedStep`.
        init_from: a checkpoint, in a format that `jshard.checkpoint` reads, with the initial parameters of a new run.
            A run that has its own checkpoints continues from these, and does not read it again.
        extra: what to do with parameters in `init_from` that the model has no place for: "error", or "ignore" to skip
            them.
        adapters: a folder of PEFT with the initial adapters of a new run, beside `init_from`.
        keep_in_memory: steps between two copies of the state to the memory of the supervisors; None for no copies.
        programs: the folder for compiled programs; "beside" for one beside `out`, "none" to always compile. By
            default JAX's own setting.
        watch: ends this process, or has its supervisor end the run, if it makes no progress, or does not stop in
            time when requested; none by default.
        say: prints a line.

    Examples:
        >>> options = RunOptions(mesh=js.mesh(), data=data, out="runs/gpt", track=["tensorboard", Csv("losses.csv")])
        >>> js.train.run_recipe(model_file, recipe, options)
    """

    mesh: Mesh
    data: Data
    out: str | Path
    name: str = ""
    resume: bool = False
    track: Sequence[str | Tracker] = ()
    command_options: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    workers: int = 0
    sample_tokens: int = 256
    profile: range | None = None
    compiler_options: Mapping[str, object] | None = None
    expect: ExpectedStep | None = None
    init_from: Path | None = None
    extra: Extra = "error"
    adapters: Path | None = None
    keep_in_memory: int | None = None
    programs: str | None = None
    watch: StallWatch | None = None
    say: Callable[[str], object] = print
