"""What the processes of a run tell one another, in words."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_primary() -> bool:
    """Whether this is the process that writes what only one may write."""
    return jax.process_index() == 0


def gather_texts(text: str) -> list[str]:
    """Every process gives a text and receives those of all, by process; it waits until all have called.

    The texts travel as arrays, in the order of the programs of the devices: for the main thread.
    """
    if jax.process_count() == 1:
        return [text]
    raw = np.frombuffer(text.encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.array([raw.size], np.int32)))
    rows = multihost_utils.process_allgather(np.pad(raw, (0, int(sizes.max()) - raw.size + 1)))
    return [bytes(row[:size]).decode() for row, size in zip(np.asarray(rows), sizes, strict=True)]
