"""Leaves under other names: what a model's parameters are called elsewhere, and how they are there."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats.source import ArraySource, Box, StoredArray, bounds


@dataclass(frozen=True)
class Stored:
    """How a leaf of ours is stored elsewhere.

    Args:
        names: of the arrays it is made of; several are joined along `dim`, in this order.
        transpose: they are stored with the dims reversed, as the kernels of `torch.nn.Linear` are.
        dim: of our leaf, along which they are joined.
        sizes: of ours along `dim` that each gets when it is exported; equal parts by default.
        parts: the last dim of the one array there is so many parts, which ours has in a dim of their own before it.

    Example:
        >>> Stored("lm_head.weight", transpose=True)
        >>> Stored("h.0.attn.c_attn.weight", parts=3)  # (768, 2304) there, (768, 3, 768) here
        >>> Stored("layers.0.wq.weight", "layers.0.wk.weight", "layers.0.wv.weight", transpose=True, sizes=(64, 16, 16))
    """

    names: tuple[str, ...]
    transpose: bool
    dim: int
    sizes: tuple[int, ...]
    parts: int

    def __init__(
        self, *names: str, transpose: bool = False, dim: int = -1, sizes: tuple[int, ...] = (), parts: int = 1
    ) -> None:
        if parts > 1 and (transpose or len(names) > 1):
            raise ValueError(f"parts={parts} are those of one array with its dims in our order")
        fields = {"names": names, "transpose": transpose, "dim": dim, "sizes": sizes, "parts": parts}
        for field, value in fields.items():
            object.__setattr__(self, field, value)


Names = Mapping[str, str | Stored]
"""Our paths, layer by layer and without the name of the model, and what is stored there: a name alone is `Stored`."""


class NamedSource:
    """A checkpoint of another library, under our paths.

    Where no stored name begins with the word that names begin with, they are looked for without it: Hugging Face's
    `GPT2LMHeadModel` saves `transformer.wte.weight`, and its `GPT2Model` `wte.weight`.

    Args:
        source: what is stored.
        names: what is called how.

    Attributes:
        leaves: those of ours that are there, with our shapes.
        absent: the others, each with the stored names that are not there.
        unused: stored names that `names` does not speak of, without buffers that older files hold.

    Raises:
        CheckpointError: parts that make up one leaf do not fit one another.

    Example:
        >>> source = NamedSource(SafetensorsSource("gpt2/"), gpt.hf_names(config))
        >>> source.leaves["blocks/0/attention/qkv/kernel"].shape
        (768, 3, 768)
    """

    def __init__(self, source: ArraySource, names: Names) -> None:
        self._source = source
        dropped = _dropped(names, source)
        found = {
            path: [_find(name, source, dropped) for name in _stored(stored).names] for path, stored in names.items()
        }
        self._parts: dict[str, tuple[Stored, list[tuple[str, int, int]]]] = {}
        self.leaves: dict[str, StoredArray] = {}
        self.absent: dict[str, list[str]] = {}
        for path, stored in names.items():
            stored = _stored(stored)
            present = [name for name in found[path] if name is not None]
            if len(present) == len(stored.names):
                self.leaves[path], self._parts[path] = _joined(path, stored, present, source)
            else:
                self.absent[path] = [name for name, at in zip(stored.names, found[path], strict=True) if at is None]
        used = {name for parts in found.values() for name in parts}
        self.unused = [name for name in source.leaves if name not in used and not _is_buffer(name, source.leaves[name])]

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of one of our leaves: reads what is in it of each stored part."""
        stored, parts = self._parts[name]
        limits = bounds(box, self.leaves[name].shape)
        if stored.parts > 1:
            return _parts_of(self._source, parts[0][0], limits, self.leaves[name].shape[-1])
        if len(parts) == 1:
            return _turned(self._source.read(parts[0][0], _turned_box(limits, stored)), stored)
        dim = stored.dim % len(limits)
        first, last = limits[dim]
        pieces = []
        for part, begin, end in parts:
            cut = (max(first, begin) - begin, max(min(last, end), max(first, begin)) - begin)
            inner = (*limits[:dim], cut, *limits[dim + 1 :])
            pieces.append(_turned(self._source.read(part, _turned_box(inner, stored)), stored))
        return np.concatenate(pieces, axis=dim)


class ForeignSource:
    """The inverse of `NamedSource`: our leaves under the names that another library gives them, to be exported.

    Args:
        source: ours, layer by layer and without the name of the model.
        names: what is called how; each leaf of `source` must be in it.

    Raises:
        CheckpointError: a leaf has no name there, or cannot be cut as `names` says.

    Example:
        >>> write_safetensors("out", whole_leaves(ForeignSource(source, gpt.hf_names(config))))
    """

    def __init__(self, source: ArraySource, names: Names) -> None:
        self._source = source
        nameless = [path for path in source.leaves if path not in names]
        if nameless:
            raise CheckpointError(
                f"{len(nameless)} leaves have no name in the other format.",
                where=nameless,
                why=f"the table of names speaks of {len(names)} leaves, and not of these.",
                do="export the parameters alone, or add the names to the table, hf_names(config) of the model file.",
            )
        self.leaves: dict[str, StoredArray] = {}
        self._origin: dict[str, tuple[str, Stored, int, int]] = {}
        for path, leaf in source.leaves.items():
            stored = _stored(names[path])
            for name, begin, end in _cuts(path, stored, leaf):
                shape = _resized(leaf.shape, stored, end - begin)
                if stored.parts > 1:
                    shape = (*leaf.shape[:-2], leaf.shape[-2] * leaf.shape[-1])
                self.leaves[name] = StoredArray(shape[::-1] if stored.transpose else shape, leaf.dtype)
                self._origin[name] = path, stored, begin, end

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box of a leaf as the other library has it."""
        path, stored, begin, _ = self._origin[name]
        limits = list(bounds(box, self.leaves[name].shape))
        if stored.parts > 1:
            *lead, last = limits
            values = self._source.read(path, (*(slice(*limit) for limit in lead), slice(None), slice(None)))
            return np.ascontiguousarray(values.reshape(*values.shape[:-2], -1)[..., slice(*last)])
        if stored.transpose:
            limits.reverse()
        if len(stored.names) > 1:
            start, stop = limits[stored.dim]
            limits[stored.dim] = start + begin, stop + begin
        return _turned(self._source.read(path, tuple(slice(*limit) for limit in limits)), stored)


def _stored(value: str | Stored) -> Stored:
    return Stored(value) if isinstance(value, str) else value


def _dropped(names: Names, source: ArraySource) -> str | None:
    """The word that most names begin with, if no stored name does: the file was written without it."""
    words = collections.Counter(
        name.partition(".")[0] for stored in names.values() for name in _stored(stored).names if "." in name
    )
    word, count = words.most_common(1)[0] if words else ("", 0)
    begins = any(name.partition(".")[0] == word for name in source.leaves)
    return None if begins or count * 2 <= words.total() else word


def _find(name: str, source: ArraySource, dropped: str | None) -> str | None:
    word, _, rest = name.partition(".")
    return next((n for n in (name, rest if word == dropped else name) if n in source.leaves), None)


def _joined(
    path: str, stored: Stored, names: list[str], source: ArraySource
) -> tuple[StoredArray, tuple[Stored, list[tuple[str, int, int]]]]:
    """Our leaf, and where each stored array begins and ends in it along the dim they are joined along."""
    leaves = [source.leaves[name] for name in names]
    shapes = [leaf.shape[::-1] if stored.transpose else leaf.shape for leaf in leaves]
    if len(names) == 1:
        return StoredArray(_in_parts(path, shapes[0], stored), leaves[0].dtype), (stored, [(names[0], 0, 0)])
    alike = len({(leaf.dtype, len(leaf.shape)) for leaf in leaves}) == 1 and leaves[0].shape != ()
    if not alike or len({_resized(shape, stored, 0) for shape in shapes}) != 1:
        raise CheckpointError(
            f"What is stored of {path} does not fit together.",
            where=[f"{name}  {leaf.shape} {leaf.dtype}" for name, leaf in zip(names, leaves, strict=True)],
            why=f"they are joined along dim {stored.dim}; the other dims, and dtypes, must be equal.",
            do="mend the table of names.",
        )
    parts, end = [], 0
    for name, shape in zip(names, shapes, strict=True):
        begin, end = end, end + shape[stored.dim]
        parts.append((name, begin, end))
    return StoredArray(_resized(shapes[0], stored, end), leaves[0].dtype), (stored, parts)


def _in_parts(path: str, shape: tuple[int, ...], stored: Stored) -> tuple[int, ...]:
    """Our shape for one that is stored, whose last dim may be several parts."""
    if stored.parts == 1:
        return shape
    if not shape or shape[-1] % stored.parts:
        raise CheckpointError(
            f"What is stored of {path} is not {stored.parts} parts.",
            where=f"{stored.names[0]}  {shape}",
            why=f"its last dim does not divide by {stored.parts}.",
            do="mend the table of names.",
        )
    return (*shape[:-1], stored.parts, shape[-1] // stored.parts)


def _parts_of(source: ArraySource, name: str, limits: tuple[tuple[int, int], ...], width: int) -> np.ndarray:
    """A box of our leaf whose last two dims are one there."""
    *lead, (first, last), (begin, end) = limits
    values = source.read(name, (*(slice(*limit) for limit in lead), slice(first * width, last * width)))
    return np.ascontiguousarray(values.reshape(*values.shape[:-1], last - first, width)[..., begin:end])


def _cuts(path: str, stored: Stored, leaf: StoredArray) -> list[tuple[str, int, int]]:
    """Where each stored array begins and ends in our leaf."""
    if len(stored.names) == 1:
        return [(stored.names[0], 0, leaf.shape[stored.dim] if leaf.shape else 0)]
    count = len(stored.names)
    whole = leaf.shape[stored.dim] if leaf.shape else 0
    sizes = stored.sizes or (whole // count,) * count
    if len(sizes) != count or sum(sizes) != whole:
        raise CheckpointError(
            f"{path} cannot be cut into {count} arrays.",
            where=list(stored.names),
            why=f"their sizes {sizes} do not add up to the {whole} of {leaf.shape}, dim {stored.dim}.",
            do="mend the table of names.",
        )
    ends = np.cumsum(sizes).tolist()
    return [(name, end - size, end) for name, size, end in zip(stored.names, sizes, ends, strict=True)]


def _resized(shape: tuple[int, ...], stored: Stored, size: int) -> tuple[int, ...]:
    """A shape with another size along the dim that is joined along."""
    if not shape:
        return shape
    dim = stored.dim % len(shape)
    return (*shape[:dim], size, *shape[dim + 1 :])


def _turned_box(limits: tuple[tuple[int, int], ...], stored: Stored) -> Box:
    box = tuple(slice(*limit) for limit in limits)
    return box[::-1] if stored.transpose else box


def _turned(values: np.ndarray, stored: Stored) -> np.ndarray:
    return values.T.copy(order="C") if stored.transpose else values


def _is_buffer(name: str, leaf: StoredArray) -> bool:
    """The causal mask and its fill value, which older files of GPT-2 hold beside the parameters."""
    mask = name.endswith("attn.bias") and len(leaf.shape) == 4
    return mask or (name.endswith("attn.masked_bias") and leaf.shape == ())
