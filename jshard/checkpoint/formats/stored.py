"""The form of a model's leaves in another library: their names there, and the order of their dims."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jshard.checkpoint.errors import CheckpointError

_Item = TypeVar("_Item")


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

    Examples:
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
        # By hand, because the names are positional arguments, and around the frozen dataclass.
        fields = {"names": names, "transpose": transpose, "dims": tuple(dims), "dim": dim, "sizes": sizes}
        fields |= {"parts": parts, "stack": stack}
        for field, value in fields.items():
            object.__setattr__(self, field, value)
        self._check_combination()
        self._check_dims()

    def _check_combination(self) -> None:
        """Raises `ValueError` for arguments that exclude each other."""
        has_order = bool(self.transpose or self.dims)
        # A part is a range of the last stored dim; in another order, or over several arrays, it would not be one.
        if self.parts > 1 and (has_order or len(self.names) > 1):
            raise ValueError(f"parts={self.parts} needs a single array that is not transposed")
        is_joined = self.dim != -1 or bool(self.sizes)
        if self.stack is not None and (self.parts > 1 or is_joined):
            raise ValueError(
                f"stack={self.stack} is the new dim, of an entry for each array: it takes no dim, sizes or parts"
            )

    def _check_dims(self) -> None:
        """Raises `CheckpointError` unless the dims are in one order, which `dims` or `transpose` says."""
        has_integers = all(isinstance(dim, int) for dim in self.dims)
        # Integers first: the elements of a set must be of types that can be hashed.
        is_order = has_integers and set(self.dims) == set(range(len(self.dims)))
        if not is_order or (self.dims and self.transpose):
            raise _no_order(self)

    def order(self, ndim: int) -> tuple[int, ...]:
        """Returns, for each dim of the jshard leaf, the dim of a stored array with `ndim` dims."""
        if self.dims:
            return self.dims
        order = tuple(range(ndim))
        # Of two dims at most, see `check_order`.
        return order[::-1] if self.transpose else order

    def in_each(self, items: Sequence[_Item]) -> tuple[_Item, ...]:
        """Returns the items, such as sizes, of those dims of the jshard leaf that each stored array has."""
        if self.stack is None or not items:
            return tuple(items)
        stack_dim = self.stack % len(items)
        return (*items[:stack_dim], *items[stack_dim + 1 :])

    def in_all(self, items: Sequence[_Item], item: _Item) -> tuple[_Item, ...]:
        """Returns the inverse of `in_each`, with an item for the dim that a stored array does not have."""
        if self.stack is None:
            return tuple(items)
        stack_dim = self.stack % (len(items) + 1)
        return (*items[:stack_dim], item, *items[stack_dim:])

    def with_dims(self, dims: tuple[int, ...]) -> str:
        """Returns the source text of this `Stored` with another order of dims, as a line to paste."""
        arguments = [json.dumps(name) for name in self.names]
        arguments.append(f"dims={dims}")
        if self.dim != -1:
            arguments.append(f"dim={self.dim}")
        if self.sizes:
            arguments.append(f"sizes={self.sizes}")
        if self.stack is not None:
            arguments.append(f"stack={self.stack}")
        return f"Stored({', '.join(arguments)})"


def _no_order(stored: Stored) -> CheckpointError:
    dims = stored.dims
    suffix = f"dims={dims}"
    if stored.transpose:
        suffix += ", transpose=True"
    right = stored.with_dims(_convolution(len(dims)))
    return CheckpointError(
        "The order of the dims cannot be read.",
        where=[f"{name}  {suffix}" for name in stored.names],
        why=f"dims names each of the dims 0 to {max(len(dims) - 1, 0)} once, and transpose is an order itself.",
        do=f"{right}  # the order of a convolution of PyTorch",
    )


def _convolution(ndim: int) -> tuple[int, ...]:
    """Returns the dims in a PyTorch convolution, (out, in, ...), of the kernel of Flax, (..., in, out)."""
    if not ndim:
        return ()
    spatial = range(2, ndim)
    features = (1, 0)[-ndim:]  # of a vector only the last
    return (*spatial, *features)


def check_order(path: str, stored: Stored, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `CheckpointError` unless an order of dims fits these shapes, by the names of their arrays."""
    where = [f"{name}  {shape}" for name, shape in shapes.items()]
    ndim = max(map(len, shapes.values()), default=0)
    right = stored.with_dims(_convolution(ndim))
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
