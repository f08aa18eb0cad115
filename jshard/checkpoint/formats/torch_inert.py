"""What files of `torch.save` hold beside tensors of numbers, as inert values: nothing of it is run, or read.

A training script saves its arguments, its counters, NumPy's numbers, and tensors without plain numbers: of the meta
device, sparse. A file is readable all the same: each of these becomes a value that has no numbers.
"""

from __future__ import annotations

from typing import Any

from jshard.checkpoint.formats.torch_pickle import PATHS, Ordered, Record, Unpickled, records, sealed


class NoNumbers(Record):
    """A tensor that is not read, and why."""

    why = "it has no plain numbers"


class _OnMeta(NoNumbers):
    why = "it is on the meta device, and has no numbers"


class _Sparse(NoNumbers):
    why = "it is sparse"


class _Nested(NoNumbers):
    why = "it is nested"


class OtherDtype(NoNumbers):
    """A tensor of a dtype that JAX does not have."""

    why = "JAX does not have its dtype"


class _Filled(Ordered):
    """A dict whose class takes arguments, such as `collections.defaultdict`; its items are set afterwards."""

    def __new__(cls, *_: Unpickled) -> _Filled:
        return super().__new__(cls)

    def __init__(self, *_: Unpickled) -> None:
        super().__init__()


@sealed
def _counter(items: Unpickled = None) -> object:
    """`collections.Counter`: a dict of its counts."""
    return items if isinstance(items, dict) else {}


OTHER_DTYPES = ("complex32", "float4_e2m1fn_x2")
_TYPES = ("int", "long", "float", "str", "bool", "list", "dict", "tuple", "Ellipsis")
_ATTRIBUTE_DICTS = (
    "lightning.fabric.utilities.data",
    "lightning_fabric.utilities.data",
    "pytorch_lightning.utilities.parsing",
)


def _builtins(module: str) -> dict[tuple[str, str], Any]:
    # A pickle gets the name of a type, which it cannot call: as the argument of a `defaultdict`.
    types = {(module, name): name for name in _TYPES}
    values = records(module, "slice", "range", "frozenset", "bytearray")
    return types | values


_TORCH_NAMES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _OnMeta,
    ("torch._utils", "_rebuild_sparse_tensor"): _Sparse,
    ("torch._utils", "_rebuild_nested_tensor"): _Nested,
    **{("torch", name): name for name in OTHER_DTYPES},
    **records("torch.serialization", "_get_layout"),
}
_NUMPY_NAMES = {
    **records("numpy", "dtype", "ndarray"),
    **records("numpy.core.multiarray", "scalar", "_reconstruct"),
    **records("numpy._core.multiarray", "scalar", "_reconstruct"),  # NumPy 2
}
_PYTHON_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "defaultdict"): _Filled,
    ("collections", "Counter"): _counter,
    **{(module, "AttributeDict"): _Filled for module in _ATTRIBUTE_DICTS},
    **records("argparse", "Namespace"),
    **PATHS,
    **records("datetime", "datetime", "date", "time", "timedelta", "timezone"),
    **_builtins("builtins"),
    **_builtins("__builtin__"),  # Python 2's name of the module, which older protocols write
}
INERT: dict[tuple[str, str], Any] = {**_TORCH_NAMES, **_NUMPY_NAMES, **_PYTHON_NAMES}
"""The names of values that are not read."""
