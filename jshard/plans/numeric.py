"""Which objects are arrays of numbers, or numbers: what a variable, an argument or a batch may hold."""

from typing import Any, TypeAlias

import numpy as np

Value: TypeAlias = Any
"""What a variable holds: an array, traced or abstract, a number, or a tree of these."""

NUMBERS = (bool, int, float, complex)
"""Python's numbers, which Flax takes as arrays without dims."""

_NOT_NUMERIC_KINDS = "OUSMm"  # NumPy's objects, texts, bytes, dates and spans of time


def is_numeric(x: object) -> bool:
    """Returns whether an object is an array that JAX takes, traced or abstract, or a number."""
    if isinstance(x, (np.ndarray, np.generic)):
        is_record = x.dtype.type is np.void  # its kind is also that of JAX's dtypes, such as bfloat16
        return x.dtype.kind not in _NOT_NUMERIC_KINDS and not is_record
    return isinstance(x, NUMBERS) or hasattr(x, "dtype")
