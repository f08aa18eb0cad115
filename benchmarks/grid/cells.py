"""What the grid compiles: each model on each cluster, by jshard and as plain Flax, in several forms."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jshard.cluster.compile import CompileRequest
from jshard.cluster.topology import parse_topology

_ROOT = Path(__file__).parents[2]
_PLAIN = "benchmarks/grid/plain"  # model files whose layers keep gradients of weights in float32

JSHARD, GSPMD = "jshard", "gspmd"
FLOAT32, BFLOAT16 = "float32", "bfloat16"
NONE, FASTEST, DESCRIBED = "none", "fastest", "described"
"""XLA's own options; jshard's profile; that with the flag that describes the cluster to the compiler's scheduler, as
`--xla-flags auto` makes it: only between hosts there is something to describe."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the grid."""

    name: str
    file: str  # of `models`, without its ending
    recipe: str
    sequences: int  # for each device
    settings: tuple[str, ...] = ()  # further changes of the recipe
    sums_in_float32: bool = True  # whether plain Flax can, with other layers: see `benchmarks.grid.plain`
    plain_attention: bool = False  # of jshard's program, where plain Flax has no other
    reshard: bool = True  # whether jshard gathers again in backward; without a loop, plain Flax does not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A program of the grid."""

    model: str
    cluster: str
    system: str  # JSHARD or GSPMD
    reduce_dtype: str  # of gradients
    request: CompileRequest

    @property
    def options(self) -> str:
        """The options of the compiler: NONE, FASTEST or DESCRIBED."""
        if self.request.xla_flags:
            return DESCRIBED
        return self.request.profile or NONE

    @property
    def label(self) -> str:
        """Its name, which `--only` matches."""
        return f"{self.model} {self.cluster} {self.system} {self.reduce_dtype} {self.options}"


_WIDE_350M = ("model.n_layer=24", "model.n_head=16", "model.d_model=1024", "model.d_ff=4096", "model.scan=true")
# What is recomputed is stated: "auto", the default, is jshard's own choice.
_NO_REMAT, _DOTS = "model.remat=none", "model.remat=dots"
_124M = Model(name="GPT 124M", file="gpt", recipe="gpt2_small", sequences=16, settings=(_NO_REMAT,), reshard=False)
_350M = Model(name="GPT 350M", file="gpt", recipe="gpt2_small", sequences=8, settings=(*_WIDE_350M, _NO_REMAT))
_XL = Model(name="GPT XL", file="gpt", recipe="gpt2_xl", sequences=16)
_8B = Model(name="Llama 3 8B", file="llama", recipe="llama3_8b", sequences=1)
_MIXTRAL = Model(name="Mixtral 8x7B", file="moe", recipe="mixtral_8x7b", sequences=1, sums_in_float32=False)


def _with_plain_attention(model: Model) -> Model:
    return dataclasses.replace(model, name=f"{model.name} plain attention", plain_attention=True)


ON_GPUS: tuple[Model, ...] = (
    _124M,
    _350M,
    dataclasses.replace(_350M, name="GPT 350M dots", settings=(*_WIDE_350M, _DOTS)),
    _XL,
    _8B,
    Model(name="T5 2B", file="t5", recipe="t5_2b", sequences=32),
    Model(name="vDiT 4B", file="vdit", recipe="vdit_4b", sequences=8),
    _MIXTRAL,
)
# On TPUs the compiler's partitioner cannot split a kernel, so plain Flax computes attention in plain form there. Beside
# jshard's program with its kernel there is one with plain attention, too: what differs then is the communication.
ON_TPUS: tuple[Model, ...] = (_XL, _8B, _MIXTRAL, *map(_with_plain_attention, (_XL, _8B, _MIXTRAL)))
GPUS = "h100:1x8", "h100:8x8", "a100-80:8x8"
TPUS = "v5e:8x8", "v5p:4x4x4", "v6e:8x8"

_QUICK = (
    dataclasses.replace(_124M, sequences=2, settings=("model.n_layer=2", _NO_REMAT)),
    dataclasses.replace(_350M, sequences=2, settings=("model.n_layer=2", *_WIDE_350M[1:], _NO_REMAT)),
)


def cells_of(*, quick: bool, clusters: Sequence[str], only: Sequence[str] = ()) -> list[Cell]:
    """Returns the cells in the order in which they are compiled.

    Those of plain Flax are first: what jshard becomes does not change them.

    Args:
        quick: two small models on one cluster, in one form each.
        clusters: topologies, as in `GPUS` and `TPUS`.
        only: patterns of labels, where * stands for anything; all by default.
    """
    cells = list(_quick_cells()) if quick else [cell for cluster in clusters for cell in _cells_on(cluster)]
    # A stable sort: within a system the order remains.
    cells.sort(key=lambda cell: cell.system != GSPMD)
    if not only:
        return cells
    return [cell for cell in cells if any(fnmatch.fnmatch(cell.label, pattern) for pattern in only)]


def _quick_cells() -> Iterator[Cell]:
    for model in _QUICK:
        yield _gspmd(model, GPUS[0], BFLOAT16, FASTEST)
        yield _jshard(model, GPUS[0], BFLOAT16)


def _cells_on(cluster: str) -> Iterator[Cell]:
    models = ON_TPUS if cluster in TPUS else ON_GPUS
    topology = parse_topology(cluster)
    profiles = [FASTEST]
    if topology.device.platform == "gpu" and topology.num_devices > topology.fast_group:
        profiles.append(DESCRIBED)
    for model in models:
        for options in (NONE, *profiles):
            yield _gspmd(model, cluster, BFLOAT16, options)
            if model.sums_in_float32:
                yield _gspmd(model, cluster, FLOAT32, options)
        for options in profiles:
            yield _jshard(model, cluster, FLOAT32, options)
            yield _jshard(model, cluster, BFLOAT16, options)


def _jshard(model: Model, cluster: str, reduce_dtype: str, options: str = FASTEST) -> Cell:
    """Returns the model as jshard shards it; gradients are reduced in float32 unless the model says otherwise."""
    changed: tuple[str, ...] = ()
    if reduce_dtype != FLOAT32:
        changed = (f"model.reduce_dtype={reduce_dtype}",)
    if model.plain_attention:
        changed = (*changed, "model.attention=xla")
    request = _request(model, cluster, file=f"models/{model.file}.py", options=options, settings=changed)
    request = dataclasses.replace(request, units={"reshard_after_forward": model.reshard})
    return Cell(model=model.name, cluster=cluster, system=JSHARD, reduce_dtype=reduce_dtype, request=request)


def _gspmd(model: Model, cluster: str, reduce_dtype: str, options: str) -> Cell:
    """Returns the model as plain Flax, its parameters sharded as for zero3.

    Its request does not depend on `plain_attention`, so a stored row serves the models of both forms.
    """
    file, changed = f"models/{model.file}.py", ()
    if reduce_dtype == FLOAT32:
        # These layers compute in bfloat16 by themselves, and take parameters as they are stored.
        file, changed = f"{_PLAIN}/{model.file}.py", ("model.compute_dtype=float32",)
    request = _request(model, cluster, file=file, options=options, settings=changed)
    request = dataclasses.replace(request, plain_flax=True)
    return Cell(model=model.name, cluster=cluster, system=GSPMD, reduce_dtype=reduce_dtype, request=request)


def _request(model: Model, cluster: str, *, file: str, options: str, settings: tuple[str, ...]) -> CompileRequest:
    num_devices = parse_topology(cluster).num_devices
    batch = (f"batch_size={model.sequences * num_devices}", "accumulate=1")
    return CompileRequest(
        model=str(_ROOT / file),
        recipe=model.recipe,
        settings=(*batch, *model.settings, *settings),
        mesh={"replica": 1, "fsdp": num_devices, "tensor": 1},
        topology=cluster,
        profile=None if options == NONE else FASTEST,
        xla_flags="auto" if options == DESCRIBED else "",
    )


def as_key(request: CompileRequest, versions: Mapping[str, str | None]) -> dict[str, object]:
    """Returns what a compiled program depends on, apart from the code of jshard and of the model file.

    The path of the model file is relative, so that rows of another checkout can be compared.
    """
    fields = dataclasses.asdict(request)
    fields["model"] = os.path.relpath(request.model, _ROOT)
    fields["settings"] = list(request.settings)
    compilers = {name: version for name, version in versions.items() if name not in _NOT_COMPILERS}
    return {"request": fields, "versions": compilers}


_NOT_COMPILERS = ("jshard", "orbax-checkpoint", "grain")  # they change no program
