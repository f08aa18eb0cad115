"""Which constants have a dim for the examples: a guess by their size, which must not be wrong on a mesh with `pipe`."""

from collections.abc import Collection

from jshard.engine.rules import Value

_SMALL_BYTES = 2**20


def has_dim_of_examples(value: Value, batch_sizes: Collection[int]) -> bool:
    """Returns whether a constant that nothing has split so far is taken for one with a dim for the examples.

    Elsewhere a wrong guess costs a gather. A layer on a stage cannot gather, and would be refused: for a table of
    positions, where the sequences are as long as the batch. What is small is as well kept whole, and any reader can
    split it. So can what has two such dims: a mask of (length, length).

    Args:
        value: a value known without data.
        batch_sizes: sizes of dims of the batch.
    """
    num_dims = sum(size in batch_sizes for size in value.shape)
    return num_dims == 1 and value.bytes > _SMALL_BYTES
