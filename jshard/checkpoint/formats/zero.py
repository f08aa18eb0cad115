"""DeepSpeed's ZeRO-3 checkpoints: the weights, read box by box and without DeepSpeed or PyTorch.

Every rank has a file of flat float32 weights. For each parameter, row-major, it contains the rank's piece of
ceil(size / ranks) numbers, in the order in which the ranks' model files list the parameters; numbers beyond a
parameter's end are padding. DeepSpeed's own zero_to_fp32.py assembles them in the same way.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np

from jshard._files import is_inside, read_text
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import (
    Box,
    FileRegion,
    ReadableTensor,
    ReadableValue,
    bounds,
    damaged,
    existing,
    leaves_of,
    read_region,
    stored_array,
)
from jshard.checkpoint.formats.torch_archive import Archive
from jshard.checkpoint.formats.torch_pickle import Record, Unpickled, records, short
from jshard.checkpoint.manifest import StoredLeaf, is_shape
from jshard.checkpoint.packed.layout import shape_of, slices_of
from jshard.errors import printable

_FILE = re.compile(
    r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<tensor_rank>\d+)_(?P<kind>optim|model)_states\.pt"
)
_LATEST = "latest"  # names the folder of the newest step
_LATEST_BYTES = 4096  # a larger file is another program's
_STAGE = 3
_ALLOWED = {
    # What the files name beside tensors: the stage, and the scale of the losses.
    **records("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    **records("deepspeed.runtime.fp16.loss_scaler", "LossScaler", "DynamicLossScaler"),
}


def is_zero_folder(path: Path) -> bool:
    """Returns whether a path is the folder of a run or of a step by DeepSpeed's ZeRO."""
    return path.is_dir() and zero_folder(path) is not None


def zero_folder(path: Path) -> Path | None:
    """Returns the step folder with ZeRO's files: `path`, or the folder named by its file `latest`; None if neither.

    `latest` may only name a folder beside itself.
    """
    step = path
    if (path / _LATEST).is_file():
        name = _latest_step(path / _LATEST)
        if name is None:
            return None
        step = path / name
    if not step.is_dir():
        return None
    for file in step.iterdir():
        if _FILE.fullmatch(file.name):
            return step
    return None


def _latest_step(latest: Path) -> str | None:
    """Returns the folder that the file `latest` names; None if it is another program's, or damaged."""
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

    notes: Sequence[str] = ()

    def __init__(self, path: str | Path) -> None:
        self.path = existing(path, "DeepSpeed")
        self.values: Mapping[str, ReadableValue] = {}
        files = _RankFiles.in_folder(self.path)
        states = [_loaded(file) for file in files.model]
        # Of the first rank alone: `_check_alike` compares the lists of the others with it.
        shapes = _trained_shapes(files.model[0], states[0])
        _check_alike(files.model, states, shapes)
        weights = [_flat_weights(file) for file in files.optim]

        self._tensors: dict[str, ReadableTensor] = dict(_frozen(files.model, states))
        self._tensors.update(_trained(files.optim, weights, shapes))
        self._tensors.update(_buffers(files.model[0], states[0]))
        # Tied weights are stored under one of their names.
        for alias, name in _shared_names(states[0].get("shared_params")):
            if name in self._tensors:
                self._tensors[alias] = self._tensors[name]
        self.leaves: Mapping[str, StoredLeaf] = leaves_of(self._tensors)

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a box of a tensor, as a new array, by the rows that contain it. Thread-safe."""
        return self._tensors[name].read(box)


class _FlatTensor:
    """A row-major tensor in consecutive ranges of files; the last may be longer than needed."""

    def __init__(self, shape: tuple[int, ...], runs: Sequence[FileRegion]) -> None:
        self.leaf = stored_array(shape, runs[0].dtype)
        self._runs = runs
        self._ends = list(itertools.accumulate(math.prod(run.shape) for run in runs))

    def read(self, box: Box) -> np.ndarray:
        """Reads a box of the tensor."""
        limits = bounds(box, self.leaf.shape)
        shape = shape_of(limits)
        if not shape or 0 in shape:
            # A tensor of no dims has one number, and no rows; an empty box has none.
            return self._numbers(0, math.prod(shape)).reshape(shape)
        # The rows of the box follow each other in the files. They are read whole, which is one range of each file.
        row_shape = self.leaf.shape[1:]
        row_size = math.prod(row_shape)
        first, last = limits[0]
        rows = self._numbers(first * row_size, last * row_size).reshape(last - first, *row_shape)
        return np.ascontiguousarray(rows[(slice(None), *slices_of(limits[1:]))])

    def _numbers(self, first: int, last: int) -> np.ndarray:
        """Reads a range of the numbers of the row-major tensor."""
        # All of it is written below: `_trained` and `_frozen` have counted the numbers of the pieces.
        values = np.empty(last - first, self.leaf.dtype)
        for run, end in zip(self._runs, self._ends, strict=True):
            start = end - math.prod(run.shape)
            low = max(first, start)
            high = min(last, end)
            if low < high:
                read_region(run, (slice(low - start, high - start),), values[low - first : high - first])
        return values


class _PlainTensor:
    """A tensor in a single region, with any strides."""

    def __init__(self, region: FileRegion) -> None:
        self.leaf = stored_array(region.shape, region.dtype)
        self._region = region

    def read(self, box: Box) -> np.ndarray:
        """Reads a box of the tensor."""
        return read_region(self._region, box)


@dataclasses.dataclass(frozen=True)
class _RankFiles:
    """The files of a step, by rank."""

    optim: Sequence[Path]  # with optimizer state
    model: Sequence[Path]  # with model state

    @classmethod
    def in_folder(cls, path: Path) -> _RankFiles:
        """Returns the files in a step folder, or in the newest of a run; raises an error if some are missing."""
        folder = zero_folder(path) or path
        # By the number in the name, as rank 10 comes before rank 2 in the order of names.
        optim: dict[int, Path] = {}
        model: dict[int, Path] = {}
        for file in sorted(folder.iterdir()):
            match = _FILE.fullmatch(file.name)
            if match is None:
                continue
            if int(match["tensor_rank"]):
                raise _refused(file, "its matrices are cut by tensor parallelism, and their dims are not recorded.")
            by_rank = optim if match["kind"] == "optim" else model
            by_rank[int(match["rank"])] = file
        if not optim:
            raise _refused(folder, "its optimizer file, zero_pp_rank_N_mp_rank_00_optim_states.pt, is missing.")
        if not model:
            raise _refused(folder, "it is from another ZeRO stage: no rank has a file of model states.")
        ranks = list(range(len(optim)))
        if sorted(optim) != ranks or sorted(model) != ranks:
            present = f"optimizer states of the ranks {sorted(optim)}, model states of {sorted(model)}"
            raise damaged(folder, f"files are missing: there are {present}.")
        return cls([optim[rank] for rank in ranks], [model[rank] for rank in ranks])


def _loaded(file: Path) -> Mapping[str, Unpickled]:
    """Returns the content of a file, with locations for tensors."""
    # Of tens of GB of optimizer state only the pickle is read: tensors are locations.
    content = Archive(file, 0, file.stat().st_size).regions(_ALLOWED)
    if not isinstance(content, dict):
        raise damaged(file, "it has no DeepSpeed state.")
    return content


def _flat_weights(file: Path) -> list[FileRegion]:
    """Returns the flat weights of a rank: a contiguous run of numbers per parameter group."""
    state = _dict(_loaded(file).get("optimizer_state_dict"))
    stage = state.get("zero_stage")
    if isinstance(stage, Record) and stage.args:  # a member of an enum
        stage = stage.args[0]
    # The pieces are put together as stage 3 cuts them, see the top of this file.
    if stage != _STAGE:
        raise _refused(file, f"it is from ZeRO stage {short(stage)}.")
    groups = state.get("fp32_flat_groups")
    if not isinstance(groups, list) or not groups or not all(_is_flat(group) for group in groups):
        raise damaged(file, "it has no flat float32 weights.")
    # A `_FlatTensor` has one dtype, that of its first part.
    if len({group.dtype for group in groups}) > 1:
        raise damaged(file, "its flat weights have several dtypes.")
    return groups


def _is_flat(item: object) -> TypeGuard[FileRegion]:
    return isinstance(item, FileRegion) and len(item.shape) == 1


def _dict(item: object) -> Mapping[object, Unpickled]:
    """Returns an item of a pickle if it is a dict, or else an empty one."""
    return item if isinstance(item, dict) else {}


def _trained_shapes(file: Path, state: Mapping[str, Unpickled]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the trained parameters, in stored order."""
    groups = state.get("param_shapes")
    if isinstance(groups, dict):
        # A single group may be stored without a list around it.
        groups = [groups]
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise damaged(file, "it does not list the shapes of the parameters.")
    shapes: dict[str, tuple[int, ...]] = {}
    for group in groups:
        # The order counts: pieces follow each other in it in the flat weights.
        shapes.update(_checked_shapes(file, group))
    return shapes


def _checked_shapes(file: Path, shapes: Mapping[object, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in shapes.items():
        if not isinstance(name, str) or not is_shape(shape):
            raise damaged(file, f"a parameter {short(name)} has the shape {short(shape)}.")
        yield name, shape


def _check_alike(
    files: Sequence[Path], states: Sequence[Mapping[str, Unpickled]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises `RunError` if a rank lists other parameters, or pieces of frozen ones that the first rank does not list.

    Every rank holds a piece of every parameter, and only the first rank's list is read.
    """
    known = _dict(states[0].get("frozen_param_shapes"))
    for file, state in zip(files, states, strict=True):
        # The order counts: it is that of the pieces in the flat weights.
        if list(_trained_shapes(file, state).items()) != list(shapes.items()):
            raise damaged(file, f"it does not list the parameters that {files[0].name} lists.")
        for name in _dict(state.get("frozen_param_fragments")):
            if name not in known:
                raise damaged(file, f"it has a piece of {short(name)}, and {files[0].name} has no shape of it.")


def _trained(
    files: Sequence[Path], weights: Sequence[Sequence[FileRegion]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, _FlatTensor]]:
    """Yields every trained parameter, assembled from its pieces in the ranks' flat weights."""
    num_ranks = len(weights)
    piece_sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        piece_sizes[name] = -(-math.prod(shape) // num_ranks)
    num_needed = sum(piece_sizes.values())
    dtype = weights[0][0].dtype
    # A short rank would shift the numbers of the ranks after it.
    for file, runs in zip(files, weights, strict=True):
        # All are read into arrays of the first rank's dtype, which would round those of a wider one.
        if runs[0].dtype != dtype:
            why = f"its flat weights are {runs[0].dtype}, and those of {files[0].name} are {dtype}."
            raise damaged(file, why)
        num_stored = sum(run.shape[0] for run in runs)
        if num_stored < num_needed:
            why = f"it holds {num_stored} numbers; a piece of every parameter is {num_needed} in {num_ranks} ranks."
            raise damaged(file, why)
    start = 0
    for name, shape in shapes.items():
        end = start + piece_sizes[name]
        pieces: list[FileRegion] = []
        for runs in weights:  # in the order of the ranks, which is that of the numbers
            pieces += _cut(runs, start, end)
        yield name, _FlatTensor(shape, pieces)
        start = end


def _cut(runs: Sequence[FileRegion], first: int, last: int) -> list[FileRegion]:
    """Returns a range of a rank's numbers, as parts of the runs that contain it."""
    parts: list[FileRegion] = []
    start = 0
    for run in runs:
        low = max(first, start)
        high = min(last, start + run.shape[0])
        # A parameter without numbers still has one part, which knows its dtype.
        is_empty = first == last == low == high and not parts
        if low < high or is_empty:
            offset = run.offset + (low - start) * run.strides[0]
            parts.append(run._replace(offset=offset, shape=(high - low,)))
        start += run.shape[0]
    return parts


def _frozen(files: Sequence[Path], states: Sequence[Mapping[str, Unpickled]]) -> Iterator[tuple[str, _FlatTensor]]:
    """Yields frozen parameters, with a piece of each in every rank's model file."""
    shapes = _dict(states[0].get("frozen_param_shapes"))
    for name, shape in _checked_shapes(files[0], shapes):
        pieces = []
        for file, state in zip(files, states, strict=True):
            piece = _dict(state.get("frozen_param_fragments")).get(name)
            if not _is_flat(piece):
                raise damaged(file, f"it has no piece of the frozen parameter {printable(name)}.")
            if pieces and piece.dtype != pieces[0].dtype:
                first = f"that of {files[0].name} is {pieces[0].dtype}"
                raise damaged(file, f"its piece of {printable(name)} is {piece.dtype}, and {first}.")
            pieces.append(piece)
        # More are padding. With fewer, the end of the tensor would be memory without values.
        if sum(piece.shape[0] for piece in pieces) < math.prod(shape):
            raise damaged(files[0], f"the pieces of {printable(name)} have fewer numbers than its shape {shape}.")
        yield name, _FlatTensor(shape, pieces)


def _buffers(file: Path, state: Mapping[str, Unpickled]) -> Iterator[tuple[str, _PlainTensor]]:
    """Yields model arrays other than parameters, whole in every rank's model file."""
    # The first rank's: unlike parameters, buffers are not cut.
    names = state.get("buffer_names")
    module = state.get("module")
    if not isinstance(names, list) or not isinstance(module, dict):
        return
    for name in names:
        region = module.get(name) if isinstance(name, str) else None
        if not isinstance(region, FileRegion):
            raise damaged(file, f"it lists the buffer {short(name)} and does not hold it.")
        yield name, _PlainTensor(region)


def _shared_names(shared: object) -> list[tuple[str, str]]:
    """Returns the names of tensors that share others' storage, stored as a dict or a list: pairs of alias and name."""
    pairs: Iterable[object] = ()
    if isinstance(shared, dict):
        pairs = shared.items()
    elif isinstance(shared, list):
        pairs = shared
    names: list[tuple[str, str]] = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            continue
        alias, name = pair
        if isinstance(alias, str) and isinstance(name, str):
            names.append((alias, name))
    return names


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "The DeepSpeed checkpoint cannot be read.",
        where=str(path),
        why=f"{why} Only ZeRO stage 3 without tensor parallelism can be read.",
        do="python zero_to_fp32.py . weights --safe_serialization  # in its folder; writes safetensors, which is read",
    )
