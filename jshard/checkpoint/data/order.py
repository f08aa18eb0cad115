"""What decides which sample has which number: the lengths, the slices and the seeds of a dataset."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from jshard._errors import ShardingError

ENDLESS = sys.maxsize  # the length of `dataset.repeat()`


def numbered(dataset: Any) -> Any:
    """The dataset as a `grain.MapDataset`: samples by number, in any order, any number of times.

    Args:
        dataset: a `grain.MapDataset`, or anything with a length and items.

    Raises:
        ShardingError: its samples have no numbers, as those of an `IterDataset`.
    """
    import grain  # here: programs that save no data position do without it

    if isinstance(dataset, grain.MapDataset):
        return dataset
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ShardingError(
            "The samples of the data have no numbers.",
            where=f"a {type(dataset).__name__}",
            why="a position that any mesh can go on from counts samples; this can only be read from the front.",
            do="give the grain.MapDataset before .to_iter_dataset(), or a list of samples.",
        )
    return grain.MapDataset.source(dataset)


def order_of(dataset: Any) -> list[str]:
    """The steps of a dataset that decide the order of its samples, from its sources on.

    Steps that only change what a sample looks like are left out: they may differ between two runs.

    Example:
        >>> order_of(grain.MapDataset.source(photos).shuffle(seed=3).map(crop).repeat())
        ['source of 1281167', 'shuffle of 1281167, seed 3', 'repeat without end']
    """
    return list(_steps(dataset))


def _steps(dataset: Any) -> Iterator[str]:
    parents = dataset.parents
    for parent in parents:
        yield from _steps(parent)
    name, size = type(dataset).__name__.removesuffix("MapDataset"), len(dataset)
    same_samples = len(parents) == 1 and len(parents[0]) == size and "Shuffle" not in name
    if name == "Slice":
        yield str(dataset).replace("SliceMapDataset", "slice").replace(str(ENDLESS), "")
    elif not same_samples:
        # Grain tells the seed of a shuffle to nobody; without the attribute the seed is not compared.
        seed = getattr(dataset, "_seed", None)
        told = "without end" if size >= ENDLESS else f"of {size}"
        yield f"{name.lower()} {told}" + ("" if seed is None else f", seed {seed}")
