"""DeepSpeed's ZeRO-3 checkpoints: the weights, read box by box and without DeepSpeed or PyTorch.

Every rank has a file of flat float32 weights. For each parameter, row-major, it contains the rank's piece of
ceil(size / ranks) numbers, in the order in which the ranks' model files list the parameters; numbers beyond a
parameter's end are padding. DeepSpeed's own zero_to_fp32.py assembles them in the same way.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jshard._files import is_inside, read_text
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import Box, FileRegion, bounds, damaged, existing, read_region, stored_array
from jshard.checkpoint.formats.torch_pickle import Archive, Record, records, short
from jshard.checkpoint.manifest import StoredLeaf, is_shape
from jshard.errors import printable

_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt")
_LATEST = "latest"  # names the folder of the newest step
_LATEST_BYTES = 4096
_STAGE = 3
_ALLOWED = {
    **records("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    **records("deepspeed.runtime.fp16.loss_scaler", "LossScaler", "DynamicLossScaler"),
}


def zero_folder(path: Path) -> Path | None:
    """The step folder with ZeRO's files: `path`, or the folder named by its file `latest`; None if neither.

    `latest` may only name a folder beside itself.
    """
    step = path
    if (path / _LATEST).is_file():
        named = _named_step(path / _LATEST)
        if named is None:
            return None
        step = path / named
    return step if step.is_dir() and any(_FILE.fullmatch(file.name) for file in step.iterdir()) else None


def _named_step(latest: Path) -> str | None:
    """The folder that the file `latest` names; None if it is another program's file of that name, or damaged."""
    try:
        name = Path(read_text(latest, _LATEST_BYTES).strip()).name
    except (OSError, ValueError):
        return None
    is_name = is_inside(name) and name.isprintable()
    return name if is_name else None


class ZeroSource:
    """The weights of a DeepSpeed ZeRO-3 checkpoint, under the names of the PyTorch model.

    Parameters are the float32 weights of the optimizer; frozen parameters and buffers are as stored. The
    optimizer's moments and DeepSpeed's own values are not read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = existing(path, "DeepSpeed")
        optim, model = _files(self.path)
        held = [_loaded(file) for file in model]
        shapes = _shapes(model[0], held[0])
        _check_alike(model, held, shapes)
        flat = [_flat(file) for file in optim]
        self.values: Mapping[str, Archive] = {}
        self._tensors = dict(_frozen(model, held)) | dict(_trained(optim, flat, shapes))
        self._tensors |= dict(_buffers(model[0], held[0]))
        for alias, name in _pairs(held[0].get("shared_params")):
            if name in self._tensors:
                self._tensors[alias] = self._tensors[name]
        self.leaves: Mapping[str, StoredLeaf] = {name: tensor.leaf for name, tensor in self._tensors.items()}

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of a tensor, as a new array; reads the rows that contain it. Thread-safe."""
        return self._tensors[name].read(box)


class _FlatTensor:
    """A row-major tensor in consecutive ranges of files; the last may be longer than needed."""

    def __init__(self, shape: tuple[int, ...], runs: Sequence[FileRegion]) -> None:
        self.leaf = stored_array(shape, runs[0].dtype)
        self._runs = runs
        self._ends = list(itertools.accumulate(math.prod(run.shape) for run in runs))

    def read(self, box: Box) -> np.ndarray:
        limits = bounds(box, self.leaf.shape)
        shape = tuple(max(stop - start, 0) for start, stop in limits)
        if not shape or 0 in shape:
            return self._span(0, math.prod(shape)).reshape(shape)
        row, (first, last) = math.prod(self.leaf.shape[1:]), limits[0]
        rows = self._span(first * row, last * row).reshape(last - first, *self.leaf.shape[1:])
        return np.ascontiguousarray(rows[(slice(None), *(slice(*limit) for limit in limits[1:]))])

    def _span(self, first: int, last: int) -> np.ndarray:
        """Numbers of the row-major tensor."""
        values = np.empty(last - first, self.leaf.dtype)
        for run, end in zip(self._runs, self._ends, strict=True):
            begin = end - math.prod(run.shape)
            low, high = max(first, begin), min(last, end)
            if low < high:
                read_region(run, (slice(low - begin, high - begin),), values[low - first : high - first])
        return values


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files with optimizer state and those with model state, by rank."""
    folder = zero_folder(path)
    found: dict[str, dict[int, Path]] = {"optim": {}, "model": {}}
    for file in sorted((folder or path).iterdir()):
        if match := _FILE.fullmatch(file.name):
            rank, tensor_rank, kind = int(match[1]), int(match[2]), match[3]
            if tensor_rank:
                raise _refused(file, "its matrices are cut by tensor parallelism, and their dims are not recorded.")
            found[kind][rank] = file
    optim, model = found["optim"], found["model"]
    if not optim:
        raise _refused(folder or path, "its optimizer file, zero_pp_rank_N_mp_rank_00_optim_states.pt, is missing.")
    if not model:
        raise _refused(folder or path, "it is from another ZeRO stage: no rank has a file of model states.")
    ranks = list(range(len(optim)))
    if sorted(optim) != ranks or sorted(model) != ranks:
        there = f"optimizer states of the ranks {sorted(optim)}, model states of {sorted(model)}"
        raise damaged(folder or path, f"files are missing: there are {there}.")
    return [optim[rank] for rank in ranks], [model[rank] for rank in ranks]


def _loaded(file: Path) -> Mapping[str, Any]:
    """The content of a file, with locations for tensors."""
    found = Archive(file, 0, file.stat().st_size).regions(_ALLOWED)
    if not isinstance(found, dict):
        raise damaged(file, "it has no DeepSpeed state.")
    return found


def _flat(file: Path) -> list[FileRegion]:
    """The flat weights of a rank: a contiguous run of numbers per parameter group."""
    state = _loaded(file).get("optimizer_state_dict")
    state = state if isinstance(state, dict) else {}
    stage = state.get("zero_stage")
    stage = stage.args[0] if isinstance(stage, Record) and stage.args else stage
    if stage != _STAGE:
        raise _refused(file, f"it is from ZeRO stage {short(stage)}.")
    groups = state.get("fp32_flat_groups")
    groups = groups if isinstance(groups, list) else []
    runs = [run for run in groups if isinstance(run, FileRegion)]
    if not runs or len(runs) < len(groups) or any(len(run.shape) != 1 for run in runs):
        raise damaged(file, "it has no flat float32 weights.")
    if len({run.dtype for run in runs}) > 1:
        raise damaged(file, "its flat weights have several dtypes.")
    return runs


def _shapes(file: Path, held: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The trained parameters in stored order."""
    groups = held.get("param_shapes")
    groups = [groups] if isinstance(groups, dict) else groups
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise damaged(file, "it does not list the shapes of the parameters.")
    return {name: shape for group in groups for name, shape in _named_shapes(file, group)}


def _check_alike(
    files: Sequence[Path], held: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises `RunError` if a rank lists other parameters, or pieces of frozen ones that the first rank does not list.

    Every rank holds a piece of every parameter, and only the first rank's list is read.
    """
    frozen = held[0].get("frozen_param_shapes")
    known = frozen if isinstance(frozen, dict) else {}
    for file, state in zip(files, held, strict=True):
        # The order counts: it is that of the pieces in the flat weights.
        if list(_shapes(file, state).items()) != list(shapes.items()):
            raise damaged(file, f"it does not list the parameters that {files[0].name} lists.")
        pieces = state.get("frozen_param_fragments")
        if surplus := [name for name in pieces if name not in known] if isinstance(pieces, dict) else []:
            raise damaged(file, f"it has a piece of {short(surplus[0])}, and {files[0].name} has no shape of it.")


def _named_shapes(file: Path, shapes: Mapping[Any, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in shapes.items():
        if not isinstance(name, str) or not is_shape(shape):
            raise damaged(file, f"a parameter {short(name)} has the shape {short(shape)}.")
        yield name, shape


def _trained(
    files: Sequence[Path], flat: Sequence[Sequence[FileRegion]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, _FlatTensor]]:
    """Every trained parameter, assembled from its pieces in the ranks' flat weights."""
    wanted = sum(-(-math.prod(shape) // len(flat)) for shape in shapes.values())
    for file, runs in zip(files, flat, strict=True):
        if (there := sum(run.shape[0] for run in runs)) < wanted:
            raise damaged(
                file, f"it holds {there} numbers; a piece of every parameter is {wanted} in {len(flat)} ranks."
            )
    begin = 0
    for name, shape in shapes.items():
        count = -(-math.prod(shape) // len(flat))
        yield name, _FlatTensor(shape, [part for runs in flat for part in _cut(runs, begin, begin + count)])
        begin += count


def _cut(runs: Sequence[FileRegion], first: int, last: int) -> list[FileRegion]:
    """A range of a rank's numbers, as parts of the runs that contain it."""
    found, begin = [], 0
    for run in runs:
        low, high = max(first, begin), min(last, begin + run.shape[0])
        if low < high or (first == last == low == high and not found):
            offset = run.offset + (low - begin) * run.strides[0]
            found.append(run._replace(offset=offset, shape=(high - low,)))
        begin += run.shape[0]
    return found


def _frozen(files: Sequence[Path], held: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, _FlatTensor]]:
    """Frozen parameters, with a piece of each in every rank's model file."""
    shapes = held[0].get("frozen_param_shapes")
    if not isinstance(shapes, dict):
        return
    for name, shape in _named_shapes(files[0], shapes):
        runs = []
        for file, state in zip(files, held, strict=True):
            pieces = state.get("frozen_param_fragments")
            piece = pieces.get(name) if isinstance(pieces, dict) else None
            if not isinstance(piece, FileRegion) or len(piece.shape) != 1:
                raise damaged(file, f"it has no piece of the frozen parameter {printable(name)}.")
            runs.append(piece)
        if sum(run.shape[0] for run in runs) < math.prod(shape):
            raise damaged(files[0], f"the pieces of {printable(name)} have fewer numbers than its shape {shape}.")
        yield name, _FlatTensor(shape, runs)


def _buffers(file: Path, held: Mapping[str, Any]) -> Iterator[tuple[str, _FlatTensor]]:
    """Model arrays other than parameters, whole in every rank's model file."""
    names, module = held.get("buffer_names"), held.get("module")
    if isinstance(names, list) and isinstance(module, dict):
        for name in names:
            region = module.get(name) if isinstance(name, str) else None
            if not isinstance(region, FileRegion):
                raise damaged(file, f"it lists the buffer {short(name)} and does not hold it.")
            yield name, _Whole(region)


class _Whole(_FlatTensor):
    """A tensor in a single region, with any strides."""

    def __init__(self, region: FileRegion) -> None:
        self.leaf, self._region = stored_array(region.shape, region.dtype), region

    def read(self, box: Box) -> np.ndarray:
        return read_region(self._region, box)


def _pairs(shared: Any) -> list[tuple[str, str]]:
    """Names of tensors that share others' storage: alias and name."""
    if isinstance(shared, dict):
        pairs = list(shared.items())
    elif isinstance(shared, list):
        pairs = [pair for pair in shared if isinstance(pair, tuple | list) and len(pair) == 2]
    else:
        pairs = []
    return [(alias, name) for alias, name in pairs if isinstance(alias, str) and isinstance(name, str)]


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "The DeepSpeed checkpoint cannot be read.",
        where=str(path),
        why=f"{why} Only ZeRO stage 3 without tensor parallelism can be read.",
        do="python zero_to_fp32.py . weights --safe_serialization  # in its folder; writes safetensors, which is read",
    )
