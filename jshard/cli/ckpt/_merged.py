"""The weights of a model with its adapters added: what a program without adapters computes with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jshard.checkpoint.formats import ArraySource, Box
from jshard.checkpoint.formats.source import bounds, whole
from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.packed.layout import slices_of

_ADAPTER = ("/lora_a", "/lora_b")


class Merged:
    """Arrays of a model, in which each kernel has the product of its adapter added; an `ArraySource`.

    Args:
        source: with `PATH/kernel`, and where there is an adapter also `PATH/lora_a` and `PATH/lora_b`.
        scale: the factor of the product.
    """

    def __init__(self, source: ArraySource, scale: float) -> None:
        self._source = source
        self._scale = scale
        leaves = {}
        for name, leaf in source.leaves.items():
            if not name.endswith(_ADAPTER):
                leaves[name] = leaf
        self.leaves: Mapping[str, StoredLeaf] = leaves

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads a box of an array, in the dtype of the array."""
        kernel = self._source.read(name, box)
        layer = name.removesuffix("/kernel")
        has_adapter = layer != name and f"{layer}/lora_a" in self._source.leaves
        if not has_adapter:
            return kernel
        a = self._matrix(f"{layer}/lora_a")
        b = self._matrix(f"{layer}/lora_b")
        shape = self.leaves[name].shape
        rows, *columns = slices_of(bounds(box, shape))
        # The output dims of the kernel are one dim in the adapter.
        product = (a[rows] @ b).reshape(-1, *shape[1:])
        # In float32 at least: the adapter is small beside the kernel, and would be rounded away.
        merged = kernel.astype(product.dtype) + self._scale * product[:, *columns]
        return merged.astype(kernel.dtype)

    def _matrix(self, name: str) -> np.ndarray:
        leaf = self._source.leaves[name]
        matrix = self._source.read(name, whole(leaf))
        if matrix.dtype == np.float64:
            return matrix
        return matrix.astype(np.float32)
