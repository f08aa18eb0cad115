"""Checkpoints under other names: `NamedSource` shows another library's arrays as leaves of jshard.

`ForeignSource` is its inverse.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from jshard._text import counted
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import ArraySource, Box, Limits, bounds, stored_array
from jshard.checkpoint.formats.stored import Names, Stored, check_order
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.packed.layout import shape_of, slices_of

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class _ArrayRange:
    """A stored array, and the range that it takes in a leaf along the dim in which several are joined or stacked."""

    name: str
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class _Assembly:
    """How a leaf is made of stored arrays."""

    stored: Stored
    leaf: StoredLeaf  # the result
    arrays: tuple[_ArrayRange, ...]


class NamedSource:
    """A checkpoint of another library, under jshard's paths.

    If no stored name has the common prefix of `names`, they are looked up without it: Hugging Face's
    `GPT2LMHeadModel` saves `transformer.wte.weight`, and its `GPT2Model` `wte.weight`.

    Attributes:
        leaves: the leaves whose arrays are all stored, by path.
        absent: the names of the arrays that the other leaves lack, by path.
        unused: the stored arrays that no leaf is made of.
    """

    def __init__(self, source: ArraySource, names: Names) -> None:
        self._source = source
        self._assemblies: dict[str, _Assembly] = {}
        self.absent: dict[str, list[str]] = {}
        table = {path: _stored(value) for path, value in names.items()}
        prefix = _dropped_prefix(table, source)
        used: set[str] = set()
        for path, stored in table.items():
            present: list[str] = []
            absent: list[str] = []
            for name in dict.fromkeys(stored.names):  # each once
                stored_name = _stored_name(name, source, prefix)
                if stored_name is None:
                    absent.append(name)
                else:
                    present.append(stored_name)
            # Arrays of an incomplete leaf count as used: the error is about the absent ones alone.
            used.update(present)
            if absent:
                self.absent[path] = absent
            else:
                self._assemblies[path] = _assembly(path, stored, present, source)
        self.leaves: dict[str, StoredLeaf] = {path: assembly.leaf for path, assembly in self._assemblies.items()}
        self.unused = _unused(source, used)

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a box of a jshard leaf: the part of each stored array in it."""
        assembly = self._assemblies[name]
        limits = bounds(box, assembly.leaf.shape)
        if assembly.stored.parts > 1:
            return self._read_parts(assembly, limits)
        if assembly.stored.stack is not None:
            return self._read_stacked(assembly, limits)
        if len(assembly.arrays) == 1:
            return self._read_array(assembly.arrays[0].name, limits, assembly.stored)
        return self._read_joined(assembly, limits)

    def _read_joined(self, assembly: _Assembly, limits: Limits) -> np.ndarray:
        """Reads a box of a leaf that several arrays make up along a dim."""
        dim = assembly.stored.dim % len(limits)
        box_start, box_stop = limits[dim]
        before = limits[:dim]
        after = limits[dim + 1 :]
        pieces = []
        for array in assembly.arrays:
            start = max(box_start, array.start)
            stop = max(min(box_stop, array.stop), start)  # an array outside of the box gives an empty piece
            in_array = (start - array.start, stop - array.start)
            piece = self._read_array(array.name, (*before, in_array, *after), assembly.stored)
            pieces.append(piece)
        return np.concatenate(pieces, axis=dim)

    def _read_stacked(self, assembly: _Assembly, limits: Limits) -> np.ndarray:
        """Reads a box of a leaf that has an entry for each stored array along a dim: only the arrays in it."""
        stored = assembly.stored
        assert stored.stack is not None
        stack_dim = stored.stack % len(limits)
        first, last = limits[stack_dim]
        result = np.empty(shape_of(limits), np.dtype(assembly.leaf.dtype))
        # A view: what is assigned to an entry is in the result.
        entries = np.moveaxis(result, stack_dim, 0)
        limits_in_each = stored.in_each(limits)
        # Of thousands of experts, a process opens only its own.
        for entry, array in enumerate(assembly.arrays[first:last]):
            entries[entry] = self._read_array(array.name, limits_in_each, stored)
        return result

    def _read_array(self, name: str, limits: Limits, stored: Stored) -> np.ndarray:
        """Reads a box of one stored array, given and returned in the order of the leaf's dims."""
        order = stored.order(len(limits))
        stored_limits = _in_stored_order(limits, order)
        values = self._source.read(name, slices_of(stored_limits))
        return _permuted(values, order)

    def _read_parts(self, assembly: _Assembly, limits: Limits) -> np.ndarray:
        """Reads a box of a leaf whose last two dims are one dim in the stored array."""
        *lead, (first, last), (start, stop) = limits
        width = assembly.leaf.shape[-1]  # of a part
        box = (*slices_of(lead), slice(first * width, last * width))
        values = self._source.read(assembly.arrays[0].name, box)
        # Whole parts, as a box in two dims is no box in the one: what is not needed of them is dropped here.
        by_part = values.reshape(*values.shape[:-1], last - first, width)
        needed = by_part[..., start:stop]
        return np.ascontiguousarray(needed)


@dataclass(frozen=True)
class _Origin:
    """Where an array to be written comes from."""

    path: str  # of the leaf
    stored: Stored
    start: int  # of the array, along the dim in which the leaf is cut


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
        self._origins: dict[str, _Origin] = {}
        for path, leaf in source.leaves.items():
            stored = _stored(names[path])
            # By the leaf, as the stored arrays do not exist yet.
            check_order(path, stored, {path: stored.in_each(leaf.shape)})
            dtype = np.dtype(leaf.dtype)
            for array in _cuts(path, stored, leaf):
                shape = _cut_shape(leaf.shape, stored, array)
                order = stored.order(len(shape))
                self.leaves[array.name] = stored_array(_in_stored_order(shape, order), dtype)
                self._origins[array.name] = _Origin(path, stored, array.start)

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a box of a leaf in the other library's layout."""
        origin = self._origins[name]
        stored = origin.stored
        stored_limits = bounds(box, self.leaves[name].shape)
        if stored.parts > 1:
            return self._read_parts(origin.path, stored_limits)
        order = stored.order(len(stored_limits))
        # In the order of the leaf's dims.
        limits = [stored_limits[dim] for dim in order]
        values = self._read_from_leaf(origin, limits)
        # `order` leads from the stored array to the leaf, and this the other way.
        inverse = _in_stored_order(range(len(order)), order)
        return _permuted(values, inverse)

    def _read_from_leaf(self, origin: _Origin, limits: Limits) -> np.ndarray:
        """Reads a box of an array, given and returned in the order of the leaf's dims."""
        stored = origin.stored
        if stored.stack is not None:
            # A box of the leaf has the dim of the stack, with this array's entry alone.
            entry = (origin.start, origin.start + 1)
            box = slices_of(stored.in_all(limits, entry))
            values = self._source.read(origin.path, box)
            return values.squeeze(stored.stack)
        in_leaf = list(limits)
        if len(stored.names) > 1:
            start, stop = limits[stored.dim]
            in_leaf[stored.dim] = (start + origin.start, stop + origin.start)
        return self._source.read(origin.path, slices_of(in_leaf))

    def _read_parts(self, path: str, stored_limits: Limits) -> np.ndarray:
        """Reads a box of an array whose last dim is two dims in the leaf."""
        *lead, last = stored_limits
        # The whole of both dims, as a range of the one dim is no box in two.
        values = self._source.read(path, (*slices_of(lead), slice(None), slice(None)))
        num_parts, width = values.shape[-2:]
        flat = values.reshape(*values.shape[:-2], num_parts * width)
        needed = flat[..., slice(*last)]
        return np.ascontiguousarray(needed)


def _stored(value: str | Stored) -> Stored:
    return Stored(value) if isinstance(value, str) else value


def _dropped_prefix(table: Mapping[str, Stored], source: ArraySource) -> str | None:
    """Returns the prefix of most names, if no stored name has it, because the file was written without it."""
    prefixes: collections.Counter[str] = collections.Counter()
    for stored in table.values():
        for name in stored.names:
            prefix, dot, _ = name.partition(".")
            if dot:
                prefixes[prefix] += 1
    if not prefixes:
        return None
    (prefix, count), *_ = prefixes.most_common(1)
    is_of_most = count * 2 > prefixes.total()  # not of all: `lm_head.weight` is beside `model.layers...`
    if not is_of_most:
        return None
    is_stored = any(name.partition(".")[0] == prefix for name in source.leaves)
    return None if is_stored else prefix


def _stored_name(name: str, source: ArraySource, dropped_prefix: str | None) -> str | None:
    """Returns the name of an array in a checkpoint, which may lack a prefix; None if it is not stored."""
    if name in source.leaves:
        return name
    prefix, _, rest = name.partition(".")
    if prefix == dropped_prefix and rest in source.leaves:
        return rest
    return None


@dataclass(frozen=True)
class _OrderedArray:
    """A stored array, in the order of the leaf's dims."""

    name: str
    shape: tuple[int, ...]
    stored: StoredLeaf

    @classmethod
    def of(cls, name: str, leaf: StoredLeaf, order: Sequence[int]) -> _OrderedArray:
        """Returns an array whose dims are put in this order."""
        return cls(name, tuple(leaf.shape[dim] for dim in order), leaf)

    @property
    def dtype(self) -> str:
        return self.stored.dtype


def _assembly(path: str, stored: Stored, names: Sequence[str], source: ArraySource) -> _Assembly:
    """Returns how a leaf is made of these stored arrays; raises `CheckpointError` if they do not fit together."""
    check_order(path, stored, {name: source.leaves[name].shape for name in names})
    arrays = []
    for name in names:
        leaf = source.leaves[name]
        order = stored.order(len(leaf.shape))
        arrays.append(_OrderedArray.of(name, leaf, order))
    if stored.stack is not None:
        ranges = _stacked(path, stored, arrays)
        shape = stored.in_all(arrays[0].shape, len(arrays))
    elif len(arrays) == 1:
        ranges = (_ArrayRange(names[0]),)
        shape = _shape_with_parts(path, arrays[0].shape, stored)
    else:
        ranges = _joined(path, stored, arrays)
        shape = _resized(arrays[0].shape, stored, ranges[-1].stop)
    return _Assembly(stored, stored_array(shape, np.dtype(arrays[0].dtype)), ranges)


def _stacked(path: str, stored: Stored, arrays: Sequence[_OrderedArray]) -> tuple[_ArrayRange, ...]:
    """Returns the ranges of arrays that are entries of the leaf along a new dim."""
    assert stored.stack is not None
    ndim = len(arrays[0].shape)
    is_dim = -ndim - 1 <= stored.stack <= ndim
    kinds = {(array.shape, array.dtype) for array in arrays}
    if not is_dim or len(kinds) != 1:
        why = f"they are stacked along a new dim {stored.stack}; all dims, and dtypes, must be equal."
        raise _misfit(path, arrays, why)
    return _consecutive([(array.name, 1) for array in arrays])


def _joined(path: str, stored: Stored, arrays: Sequence[_OrderedArray]) -> tuple[_ArrayRange, ...]:
    """Returns the ranges of arrays that follow each other along a dim of the leaf."""
    # Only the joined dim may differ: its size is set to 0 in all, and the rest compared.
    rests = {(_resized(array.shape, stored, 0), array.dtype) for array in arrays}
    # Arrays of no dims have none to be joined along.
    if len(rests) != 1 or arrays[0].shape == ():
        why = f"they are joined along dim {stored.dim}; the other dims, and dtypes, must be equal."
        raise _misfit(path, arrays, why)
    return _consecutive([(array.name, array.shape[stored.dim]) for array in arrays])


def _consecutive(sizes_by_name: Iterable[tuple[str, int]]) -> tuple[_ArrayRange, ...]:
    """Returns the ranges of arrays of these sizes, one after the other."""
    ranges = []
    start = 0
    for name, size in sizes_by_name:
        ranges.append(_ArrayRange(name, start, start + size))
        start += size
    return tuple(ranges)


def _misfit(path: str, arrays: Sequence[_OrderedArray], why: str) -> CheckpointError:
    return CheckpointError(
        f"The stored arrays of {path} do not fit together.",
        where=[f"{array.name}  {array.stored.shape} {array.dtype}" for array in arrays],
        why=why,
        do="correct the table of names.",
    )


def _shape_with_parts(path: str, shape: tuple[int, ...], stored: Stored) -> tuple[int, ...]:
    """Returns the jshard shape for a stored shape, whose last dim may contain several parts."""
    if stored.parts == 1:
        return shape
    # A remainder would shift the begin of every part after the first.
    if not shape or shape[-1] % stored.parts:
        raise CheckpointError(
            f"The stored array of {path} does not have {stored.parts} parts.",
            where=f"{stored.names[0]}  {shape}",
            why=f"its last dim does not divide by {stored.parts}.",
            do="correct the table of names.",
        )
    return (*shape[:-1], stored.parts, shape[-1] // stored.parts)


def _cuts(path: str, stored: Stored, leaf: StoredLeaf) -> tuple[_ArrayRange, ...]:
    """Returns the arrays that a jshard leaf is written as; raises `CheckpointError` if it does not divide into them."""
    count = len(stored.names)
    dim = stored.dim if stored.stack is None else stored.stack
    ndim = len(leaf.shape)
    is_dim = -ndim <= dim < ndim
    size = leaf.shape[dim] if is_dim else 0
    sizes = (size // count,) * count  # with a remainder, they do not add up below
    if stored.stack is not None:
        sizes = (1,) * count
    elif count > 1 and stored.sizes:
        sizes = stored.sizes
    # A leaf of no dims is one array of size 0 here, of which nothing is cut.
    if len(sizes) != count or sum(sizes) != size or (leaf.shape and not is_dim):
        raise CheckpointError(
            f"{path} cannot be cut into {count} arrays.",
            where=list(stored.names),
            why=f"their sizes {sizes} do not add up to the {size} of {leaf.shape}, dim {dim}.",
            do="correct the table of names.",
        )
    return _consecutive(zip(stored.names, sizes, strict=True))


def _cut_shape(shape: tuple[int, ...], stored: Stored, array: _ArrayRange) -> tuple[int, ...]:
    """Returns the shape of an array that is cut from a leaf of this shape, in the order of the leaf's dims."""
    if stored.parts > 1:
        return (*shape[:-2], shape[-2] * shape[-1])
    if stored.stack is not None:
        return stored.in_each(shape)
    return _resized(shape, stored, array.stop - array.start)


def _resized(shape: tuple[int, ...], stored: Stored, size: int) -> tuple[int, ...]:
    """Returns a shape with another size along the joined dim."""
    if not shape:
        return shape
    dim = stored.dim % len(shape)
    return (*shape[:dim], size, *shape[dim + 1 :])


def _in_stored_order(items: Sequence[_Item], order: tuple[int, ...]) -> tuple[_Item, ...]:
    """Returns items of the dims of a jshard leaf, such as sizes, as those of the dims of the stored array."""
    by_stored_dim = dict(zip(order, items, strict=True))
    return tuple(by_stored_dim[dim] for dim in range(len(order)))


def _permuted(values: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    if order == tuple(range(len(order))):
        return values
    return values.transpose(order).copy(order="C")  # a new array, as sources promise, and contiguous for a writer


def _unused(source: ArraySource, used: set[str]) -> list[str]:
    """Returns the arrays that no leaf is made of, without those that follow from the model's sizes."""
    unused = []
    for name, leaf in source.leaves.items():
        if name not in used and not _is_derived_buffer(name, leaf):
            unused.append(name)
    return unused


def _is_derived_buffer(name: str, leaf: StoredLeaf) -> bool:
    """Returns whether PyTorch stores an array beside the parameters though it follows from the sizes.

    The causal mask of older GPT-2 files, and its fill value; the frequencies of rotary positions of older Llama files.
    """
    is_mask = name.endswith("attn.bias") and len(leaf.shape) == 4
    is_fill = name.endswith("attn.masked_bias") and leaf.shape == ()
    is_frequencies = name.endswith("rotary_emb.inv_freq") and len(leaf.shape) == 1
    return is_mask or is_fill or is_frequencies
