"""The common interface to other libraries' checkpoints: named leaves, any box of which can be read by itself.

Also maps names: the names and layouts of a model's parameters in other libraries.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from jshard._files import open_regular
from jshard._text import counted
from jshard.checkpoint.errors import CheckpointError, DamagedError, mend, reason
from jshard.checkpoint.file_io import flush
from jshard.checkpoint.lookup import local_path
from jshard.checkpoint.manifest import StoredLeaf
from jshard.errors import RunError, printable

_Item = TypeVar("_Item")
Limits = Sequence[tuple[int, int]]
Box = tuple[slice, ...]
"""A part of an array, a slice per dim, as `jax.make_array_from_callback` passes it."""


class ArraySource(Protocol):
    """A readable checkpoint. Only `read` reads data, and only what is requested."""

    @property
    def leaves(self) -> Mapping[str, StoredLeaf]:
        """Every array by its name."""
        ...

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of a leaf, a slice without step for each dim, as a new array. Thread-safe."""
        ...


def stored_array(shape: Sequence[int], dtype: np.dtype) -> StoredLeaf:
    """An array of which any box can be read by itself."""
    return StoredLeaf(shape=tuple(shape), dtype=dtype.name, chunk=(1,) * len(shape))


def whole(leaf: StoredLeaf) -> Box:
    """The box that covers a whole leaf."""
    return tuple(slice(0, size) for size in leaf.shape)


def bounds(box: Box, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The start and stop of a box in each dim of a leaf of this shape."""
    if len(box) != len(shape) or any(part.step not in (None, 1) for part in box):
        raise ValueError(f"{box} is not a box of an array of shape {tuple(shape)}")
    return tuple(part.indices(size)[:2] for part, size in zip(box, shape, strict=True))


class FileRegion(NamedTuple):
    """An array inside a file, little-endian, without negative strides. A tuple, so it cannot change once checked."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...]

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        return sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)) + self.dtype.itemsize


def row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides, in bytes, of an array whose last dim is contiguous."""
    return tuple(itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def read_region(region: FileRegion, box: Box, out: np.ndarray | None = None) -> np.ndarray:
    """A box of an array inside a file, as a new array or into `out`.

    The file is mapped only during the copy, so that its pages do not stay in this process's memory.
    """
    limits = bounds(box, region.shape)
    shape = tuple(max(stop - start, 0) for start, stop in limits)
    if out is None:
        out = np.empty(shape, region.dtype)
    if 0 in shape:
        return out
    first = sum(start * step for (start, _), step in zip(limits, region.strides, strict=True))
    part = region._replace(offset=region.offset + first, shape=shape)
    try:
        with open_regular(part.path) as file:
            mapped = np.memmap(file, np.uint8, mode="r", offset=part.offset, shape=(part.span_bytes,))
    except (OSError, ValueError) as error:  # numpy's errors for a file that has become too short
        raise damaged(part.path, str(error)) from error
    np.copyto(out, np.ndarray(part.shape, part.dtype, buffer=mapped, strides=part.strides))
    return out


def existing(path: str | Path, kind: str) -> Path:
    """The local path of another library's checkpoint; raises `CheckpointError` if it does not exist."""
    path = local_path(path)
    if not path.exists():
        what, do = f"There is no {kind} checkpoint to read.", "give the path of a checkpoint."
        raise CheckpointError(what, where=str(path), why="no such file or folder.", do=do)
    return path


def damaged(path: Path, why: str) -> DamagedError:
    """The error for a file that violates its format."""
    return DamagedError(
        "A file of the checkpoint is damaged.", where=str(path), why=printable(why), do="download or copy it again."
    )


def check_export(
    kind: str, files: Iterable[Path], source: ArraySource, names: Sequence[str], known: Collection[np.dtype]
) -> None:
    """Raises `CheckpointError` if files already exist, or these names or dtypes cannot be written."""
    if there := [str(file) for file in files if file.exists()]:
        what, do = f"The {kind} checkpoint cannot be written.", "choose a new folder."
        raise CheckpointError(what, where=there, why="such files already exist.", do=do)
    unknown = [f"{name}  {leaf.dtype}" for name, leaf in source.leaves.items() if np.dtype(leaf.dtype) not in known]
    if unknown:
        raise CheckpointError(
            f"{kind} does not support the dtypes of {counted(len(unknown), 'array')}.",
            where=unknown,
            why=f"it supports {', '.join(map(str, known))}.",
            do="leave them out, or cast them to one of these.",
        )
    if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
        why, do = "names must be unique.", "rename one of them."
        raise CheckpointError("Several arrays or values would have the same name.", where=twice, why=why, do=do)


@contextlib.contextmanager
def finished_together(kind: str, folder: Path, names: Sequence[str]) -> Iterator[list[Path]]:
    """Files under temporary names; once all are written and on disk, they get their own names, in this order.

    Raises `RunError` if that fails; no file is then left.
    """
    token = secrets.token_hex(4)  # nothing that is in the folder already has these names
    drafts = [folder / f".{name}.{token}.unfinished" for name in names]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield drafts
        for draft in drafts:
            flush(draft)
        for draft, name in zip(drafts, names, strict=True):
            draft.rename(folder / name)
        flush(folder)
    except OSError as error:
        what, why = f"The {kind} checkpoint could not be written.", reason(error)
        raise RunError(what, where=str(folder), why=why, do=mend(why)) from error
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)


# Leaves under other names.


@dataclass(frozen=True)
class Stored:
    """The form of a jshard leaf in another library.

    Args:
        names: the stored arrays that it is made of; several are joined along `dim`, in this order.
        transpose: whether they are stored transposed, like the kernels of `torch.nn.Linear`; for at most two dims.
        dims: for each dim of the jshard leaf, its dim in the stored arrays, as `np.transpose(stored, dims)` takes it.
            A convolution of PyTorch, (out, in, height, width), is (2, 3, 1, 0) as a kernel of Flax.
        dim: the dim of the jshard leaf along which they are joined.
        sizes: the size along `dim` of each array on export; equal parts by default.
        parts: the number of parts in the last dim of the single stored array; here they are in a dim before it.
        stack: a dim of the jshard leaf that the stored arrays do not have: they are stacked along it, not joined.

    Raises:
        CheckpointError: `dims` is not an order of dims.
        ValueError: arguments that exclude each other.

    Example:
        >>> Stored("lm_head.weight", transpose=True)
        >>> Stored("conv1.weight", dims=(2, 3, 1, 0))  # (64, 3, 7, 7) there, (7, 7, 3, 64) here
        >>> Stored("h.0.attn.c_attn.weight", parts=3)  # (768, 2304) there, (768, 3, 768) here
        >>> Stored("layers.0.wq.weight", "layers.0.wk.weight", "layers.0.wv.weight", transpose=True, sizes=(64, 16, 16))
        >>> Stored("experts.0.w1.weight", "experts.1.w1.weight", transpose=True, stack=0)  # (2, in, out) here
    """

    names: tuple[str, ...]
    transpose: bool
    dims: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]
    parts: int
    stack: int | None

    def __init__(
        self,
        *names: str,
        transpose: bool = False,
        dims: Sequence[int] = (),
        dim: int = -1,
        sizes: tuple[int, ...] = (),
        parts: int = 1,
        stack: int | None = None,
    ) -> None:
        dims = tuple(dims)
        if parts > 1 and (transpose or dims or len(names) > 1):
            raise ValueError(f"parts={parts} needs a single array that is not transposed")
        if stack is not None and (parts > 1 or sizes or dim != -1):
            raise ValueError(
                f"stack={stack} is the new dim, of an entry for each array: it takes no dim, sizes or parts"
            )
        is_order = all(isinstance(each, int) for each in dims) and sorted(dims) == list(range(len(dims)))
        if not is_order or (dims and transpose):
            right = _line(names, _convolution(len(dims)), dim, sizes, stack)
            raise CheckpointError(
                "The order of the dims cannot be read.",
                where=[f"{name}  dims={dims}" + ", transpose=True" * transpose for name in names],
                why=f"dims names each of the dims 0 to {max(len(dims) - 1, 0)} once, and transpose is an order itself.",
                do=f"{right}  # the order of a convolution of PyTorch",
            )
        fields = {"names": names, "transpose": transpose, "dims": dims, "dim": dim, "sizes": sizes}
        fields |= {"parts": parts, "stack": stack}
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    def order(self, ndim: int) -> tuple[int, ...]:
        """For each dim of the jshard leaf, the dim of a stored array with `ndim` dims."""
        if self.dims:
            return self.dims
        return tuple(reversed(range(ndim))) if self.transpose else tuple(range(ndim))

    def in_each(self, items: Sequence[_Item]) -> tuple[_Item, ...]:
        """Items of the dims of the jshard leaf, such as sizes, of those that each stored array has."""
        if self.stack is None or not items:
            return tuple(items)
        new = self.stack % len(items)
        return (*items[:new], *items[new + 1 :])

    def in_all(self, items: Sequence[_Item], item: _Item) -> tuple[_Item, ...]:
        """The inverse of `in_each`, with an item for the dim that a stored array does not have."""
        if self.stack is None:
            return tuple(items)
        new = self.stack % (len(items) + 1)
        return (*items[:new], item, *items[new:])


def _line(
    names: Sequence[str], dims: tuple[int, ...], dim: int, sizes: tuple[int, ...], stack: int | None = None
) -> str:
    """The source text of a `Stored` with this order of dims."""
    parts = [*map(json.dumps, names), f"dims={dims}"]
    if dim != -1:
        parts.append(f"dim={dim}")
    if sizes:
        parts.append(f"sizes={sizes}")
    if stack is not None:
        parts.append(f"stack={stack}")
    return f"Stored({', '.join(parts)})"


def _convolution(ndim: int) -> tuple[int, ...]:
    """The dims in a PyTorch convolution, (out, in, ...), of the kernel of Flax, (..., in, out)."""
    return (*range(2, ndim), *(1, 0)[-ndim:]) if ndim else ()


def _check_order(path: str, stored: Stored, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `CheckpointError` unless an order of dims fits these shapes, by the names of their arrays."""
    where = [f"{name}  {shape}" for name, shape in shapes.items()]
    ndim = max(map(len, shapes.values()), default=0)
    right = _line(stored.names, _convolution(ndim), stored.dim, stored.sizes, stored.stack)
    if stored.transpose and ndim > 2:
        # Reversed, square kernels would fit and have height and width swapped.
        raise CheckpointError(
            f"transpose=True does not say how the {ndim} dims of {path} are stored.",
            where=where,
            why="it is for matrices: a kernel of torch.nn.Conv2d is (out, in, height, width), that of a Flax layer\n"
            "(height, width, in, out), which is not the reverse.",
            do=f"{right}  # a convolution of PyTorch; dims[i] is the stored dim of dim i",
        )
    if stored.dims and any(len(shape) != len(stored.dims) for shape in shapes.values()):
        raise CheckpointError(
            f"The order of the dims of {path} does not fit its arrays.",
            where=where,
            why=f"dims={stored.dims} is for arrays of {len(stored.dims)} dims.",
            do=f"{right}  # if it is a convolution of PyTorch",
        )


Names = Mapping[str, str | Stored]
"""From jshard paths, per layer and without the model's name, to what is stored; a string is a `Stored` name."""


class CheckedNames(dict[str, str | Stored]):
    """The names of one model's parameters, and a check of what is stored beside them.

    Several models have parameters of the same names and shapes. Only their settings, in a file beside the weights, say
    which of them the weights are of.

    Args:
        names: see `Names`.
        check: raises if the weights at a path are of another model.
    """

    def __init__(self, names: Names, check: Callable[[Path], None]) -> None:
        super().__init__(names)
        self.check = check


def check_settings(path: Path, names: Names | None) -> None:
    """Raises if the names are of one model, and the settings beside the weights of another."""
    if isinstance(names, CheckedNames):
        names.check(path)


class NamedSource:
    """A checkpoint of another library, under jshard's paths.

    If no stored name has the common prefix of `names`, they are looked up without it: Hugging Face's
    `GPT2LMHeadModel` saves `transformer.wte.weight`, and its `GPT2Model` `wte.weight`.
    """

    def __init__(self, source: ArraySource, names: Names) -> None:
        self._source = source
        self._parts: dict[str, tuple[Stored, list[tuple[str, int, int]]]] = {}
        self.leaves: dict[str, StoredLeaf] = {}
        self.absent: dict[str, list[str]] = {}
        table = {path: _stored(value) for path, value in names.items()}
        dropped, used = _dropped(table, source), set()
        for path, stored in table.items():
            found = {name: _find(name, source, dropped) for name in stored.names}
            there = [name for name in found.values() if name is not None]
            used.update(there)
            if len(there) == len(found):
                self.leaves[path], parts = _joined(path, stored, there, source)
                self._parts[path] = stored, parts
            else:
                self.absent[path] = [name for name, at in found.items() if at is None]
        self.unused = [name for name in source.leaves if name not in used and not _is_buffer(name, source.leaves[name])]

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of a jshard leaf; reads the part of each stored array in it."""
        stored, parts = self._parts[name]
        limits = bounds(box, self.leaves[name].shape)
        if stored.parts > 1:
            return self._in_parts(parts[0][0], limits, self.leaves[name].shape[-1])
        if stored.stack is not None:
            return self._stacked(name, stored.stack % len(limits), limits)
        if len(parts) == 1:
            return self._turned(parts[0][0], limits, stored)
        dim = stored.dim % len(limits)
        first, last = limits[dim]
        pieces = []
        for part, begin, end in parts:
            cut = (max(first, begin) - begin, max(min(last, end), max(first, begin)) - begin)
            pieces.append(self._turned(part, (*limits[:dim], cut, *limits[dim + 1 :]), stored))
        return np.concatenate(pieces, axis=dim)

    def _stacked(self, name: str, new: int, limits: Limits) -> np.ndarray:
        """A box of a leaf whose dim `new` has an entry for each stored array; reads only the arrays in it."""
        stored, parts = self._parts[name]
        first, last = limits[new]
        shape = [max(stop - start, 0) for start, stop in limits]
        result = np.empty(shape, np.dtype(self.leaves[name].dtype))
        entries = np.moveaxis(result, new, 0)
        for entry, (part, _, _) in enumerate(parts[first:last]):
            entries[entry] = self._turned(part, stored.in_each(limits), stored)
        return result

    def _turned(self, name: str, limits: Limits, stored: Stored) -> np.ndarray:
        order = stored.order(len(limits))
        box = tuple(slice(*limit) for limit in _put_back(limits, order))
        return _permuted(self._source.read(name, box), order)

    def _in_parts(self, name: str, limits: Limits, width: int) -> np.ndarray:
        """A box of a leaf whose last two dims are one dim in the stored array."""
        *lead, (first, last), (begin, end) = limits
        box = (*(slice(*limit) for limit in lead), slice(first * width, last * width))
        values = self._source.read(name, box)
        return np.ascontiguousarray(values.reshape(*values.shape[:-1], last - first, width)[..., begin:end])


class ForeignSource:
    """The inverse of `NamedSource`: jshard leaves under another library's names, for export."""

    def __init__(self, source: ArraySource, names: Names) -> None:
        self._source = source
        nameless = [path for path in source.leaves if path not in names]
        if nameless:
            raise CheckpointError(
                f"{counted(len(nameless), 'leaf has', 'leaves have')} no name in the other format.",
                where=nameless,
                why=f"the table of names has {counted(len(names), 'leaf')}, but not these.",
                do="export only the parameters, or add the names to the table, hf_names(config) of the model file.",
            )
        self.leaves: dict[str, StoredLeaf] = {}
        self._origin: dict[str, tuple[str, Stored, int]] = {}
        for path, leaf in source.leaves.items():
            stored = _stored(names[path])
            _check_order(path, stored, {path: stored.in_each(leaf.shape)})
            for name, begin, end in _cuts(path, stored, leaf):
                shape = stored.in_each(leaf.shape)
                if stored.stack is None:
                    shape = _resized(leaf.shape, stored, end - begin)
                if stored.parts > 1:
                    shape = (*leaf.shape[:-2], leaf.shape[-2] * leaf.shape[-1])
                shape = _put_back(shape, stored.order(len(shape)))
                self.leaves[name] = stored_array(shape, np.dtype(leaf.dtype))
                self._origin[name] = path, stored, begin

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of a leaf in the other library's layout."""
        path, stored, begin = self._origin[name]
        limits = list(bounds(box, self.leaves[name].shape))
        if stored.parts > 1:
            *lead, last = limits
            values = self._source.read(path, (*(slice(*limit) for limit in lead), slice(None), slice(None)))
            return np.ascontiguousarray(
                values.reshape(*values.shape[:-2], math.prod(values.shape[-2:]))[..., slice(*last)]
            )
        order = stored.order(len(limits))
        limits = [limits[dim] for dim in order]
        if stored.stack is not None:
            limits = stored.in_all(limits, (begin, begin + 1))
        elif len(stored.names) > 1:
            start, stop = limits[stored.dim]
            limits[stored.dim] = start + begin, stop + begin
        values = self._source.read(path, tuple(slice(*limit) for limit in limits))
        if stored.stack is not None:
            values = values.squeeze(stored.stack)
        return _permuted(values, _put_back(range(len(order)), order))


def _stored(value: str | Stored) -> Stored:
    return Stored(value) if isinstance(value, str) else value


def _dropped(table: Mapping[str, Stored], source: ArraySource) -> str | None:
    """The prefix of most names, if no stored name has it, because the file was written without it."""
    names = [name for stored in table.values() for name in stored.names]
    words = collections.Counter(name.partition(".")[0] for name in names if "." in name)
    word, count = words.most_common(1)[0] if words else ("", 0)
    begins = any(name.partition(".")[0] == word for name in source.leaves)
    return None if begins or count * 2 <= words.total() else word


def _find(name: str, source: ArraySource, dropped: str | None) -> str | None:
    word, _, rest = name.partition(".")
    return next((n for n in (name, rest if word == dropped else name) if n in source.leaves), None)


def _joined(
    path: str, stored: Stored, names: list[str], source: ArraySource
) -> tuple[StoredLeaf, list[tuple[str, int, int]]]:
    """The joined leaf, and the start and stop of each stored array in it along the joined dim."""
    leaves = [source.leaves[name] for name in names]
    _check_order(path, stored, {name: leaf.shape for name, leaf in zip(names, leaves, strict=True)})
    orders = [stored.order(len(leaf.shape)) for leaf in leaves]
    shapes = [tuple(leaf.shape[dim] for dim in order) for leaf, order in zip(leaves, orders, strict=True)]
    ours = lambda shape: stored_array(shape, np.dtype(leaves[0].dtype))
    where = [f"{name}  {leaf.shape} {leaf.dtype}" for name, leaf in zip(names, leaves, strict=True)]
    if stored.stack is not None:
        is_dim = -len(shapes[0]) - 1 <= stored.stack <= len(shapes[0])
        if not is_dim or len(set(shapes)) != 1 or len({leaf.dtype for leaf in leaves}) != 1:
            why = f"they are stacked along a new dim {stored.stack}; all dims, and dtypes, must be equal."
            raise _misfit(path, where, why)
        shape = stored.in_all(shapes[0], len(names))
        return ours(shape), [(name, entry, entry + 1) for entry, name in enumerate(names)]
    if len(names) == 1:
        return ours(_in_parts(path, shapes[0], stored)), [(names[0], 0, 0)]
    alike = len({(leaf.dtype, len(leaf.shape)) for leaf in leaves}) == 1 and leaves[0].shape != ()
    if not alike or len({_resized(shape, stored, 0) for shape in shapes}) != 1:
        why = f"they are joined along dim {stored.dim}; the other dims, and dtypes, must be equal."
        raise _misfit(path, where, why)
    ends = list(itertools.accumulate(shape[stored.dim] for shape in shapes))
    return ours(_resized(shapes[0], stored, ends[-1])), list(zip(names, [0, *ends], ends, strict=False))


def _misfit(path: str, where: list[str], why: str) -> CheckpointError:
    return CheckpointError(
        f"The stored arrays of {path} do not fit together.", where=where, why=why, do="correct the table of names."
    )


def _in_parts(path: str, shape: tuple[int, ...], stored: Stored) -> tuple[int, ...]:
    """The jshard shape for a stored shape, whose last dim may contain several parts."""
    if stored.parts == 1:
        return shape
    if not shape or shape[-1] % stored.parts:
        raise CheckpointError(
            f"The stored array of {path} does not have {stored.parts} parts.",
            where=f"{stored.names[0]}  {shape}",
            why=f"its last dim does not divide by {stored.parts}.",
            do="correct the table of names.",
        )
    return (*shape[:-1], stored.parts, shape[-1] // stored.parts)


def _cuts(path: str, stored: Stored, leaf: StoredLeaf) -> list[tuple[str, int, int]]:
    """The start and stop of each stored array in the jshard leaf."""
    count, dim = len(stored.names), stored.dim
    if stored.stack is not None:
        dim = stored.stack
    size = 0
    is_dim = -len(leaf.shape) <= dim < len(leaf.shape)
    if is_dim:
        size = leaf.shape[dim]
    sizes = (size // count,) * count
    if stored.stack is not None:
        sizes = (1,) * count
    elif count > 1 and stored.sizes:
        sizes = stored.sizes
    if len(sizes) != count or sum(sizes) != size or (leaf.shape and not is_dim):
        raise CheckpointError(
            f"{path} cannot be cut into {count} arrays.",
            where=list(stored.names),
            why=f"their sizes {sizes} do not add up to the {size} of {leaf.shape}, dim {dim}.",
            do="correct the table of names.",
        )
    ends = list(itertools.accumulate(sizes))
    return list(zip(stored.names, [0, *ends], ends, strict=False))


def _resized(shape: tuple[int, ...], stored: Stored, size: int) -> tuple[int, ...]:
    """A shape with another size along the joined dim."""
    dim = stored.dim % len(shape) if shape else 0
    return (*shape[:dim], size, *shape[dim + 1 :]) if shape else shape


def _put_back(items: Sequence[_Item], order: tuple[int, ...]) -> tuple[_Item, ...]:
    """Items of the dims of a jshard leaf, such as sizes, as those of the dims of the stored array."""
    by_dim = dict(zip(order, items, strict=True))
    return tuple(by_dim[dim] for dim in range(len(order)))


def _permuted(values: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    if order == tuple(range(len(order))):
        return values
    return values.transpose(order).copy(order="C")


def _is_buffer(name: str, leaf: StoredLeaf) -> bool:
    """What PyTorch stores beside the parameters though it follows from the sizes.

    The causal mask of older GPT-2 files, and its fill value; the frequencies of rotary positions of older Llama files.
    """
    is_mask = name.endswith("attn.bias") and len(leaf.shape) == 4
    is_fill = name.endswith("attn.masked_bias") and leaf.shape == ()
    is_frequencies = name.endswith("rotary_emb.inv_freq") and len(leaf.shape) == 1
    return is_mask or is_fill or is_frequencies
