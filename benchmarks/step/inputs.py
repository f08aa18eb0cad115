"""What all frameworks begin with and read: the same weights and the same tokens, from NumPy and a seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.step.sizes import Sizes

_SEED = 2026
_DISTINCT = 4  # batches that come again and again, so that the loss falls


def initial_weights(sizes: Sizes) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters by path, one after another: all of a large model need not be in memory at once."""
    for number, (path, initial) in enumerate(sizes.parameters().items()):
        if initial.std == 0:
            yield path, np.full(initial.shape, initial.mean, np.float32)
            continue
        drawn = np.random.default_rng((_SEED, number)).standard_normal(initial.shape, np.float32)
        yield path, drawn * np.float32(initial.std)


def tokens(sizes: Sizes, *, step: int, process: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a process in a step; the targets are the inputs, one position on."""
    rng = np.random.default_rng((_SEED, step % _DISTINCT, process))
    drawn = rng.integers(0, sizes.vocab_size, (sizes.batch, sizes.block_size + 1), np.int64).astype(np.int32)
    return drawn[:, :-1], drawn[:, 1:]
