"""The rows of a dataset of Hugging Face, read as a stream: nothing is copied to the disk, and any place can be resumed.

The files of the dataset are distributed over lanes, each of which reads its own files, in their order.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jshard._types import Json
from jshard.data.documents import TableRow
from jshard.data.loader import DataError
from jshard.errors import MissingExtraError

PREFIX = "hf:"
"""What begins the address of a stream, on the command line."""

IterableDataset = Any
"""A dataset of the package `datasets`, which is optional."""

# Kinds of files that are streamed by themselves; a folder or a name says its kind by itself.
_BUILDERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
_SPLIT = re.compile(r"[\w.-]+")


@dataclasses.dataclass(frozen=True)
class StreamAddress:
    """Which dataset is streamed.

    Attributes:
        name: on the Hub, or a local file or folder.
        config: which of its configurations; None for its only one.
        split: which of its splits.
    """

    name: str
    config: str | None = None
    split: str = "train"

    @property
    def text(self) -> str:
        """The address, as on the command line."""
        config = "" if self.config is None else f",{self.config}"
        return f"{PREFIX}{self.name}{config}:{self.split}"

    @property
    def is_local(self) -> bool:
        """Whether it is a file or a folder of this machine."""
        return Path(self.name).exists()

    def absolute(self) -> StreamAddress:
        """Returns the same address from any folder."""
        if not self.is_local:
            return self
        return dataclasses.replace(self, name=str(Path(self.name).absolute()))


def stream_address(argument: str | Path) -> StreamAddress | None:
    """Returns the parts of `hf:NAME[,CONFIG][:SPLIT]`; None for a path."""
    text = str(argument)
    if not text.startswith(PREFIX):
        return None
    name, _, split = text.removeprefix(PREFIX).rpartition(":")
    # The only colon, or one within a path, separates no split.
    if not name or not _SPLIT.fullmatch(split):
        name, split = text.removeprefix(PREFIX), ""
    name, _, config = name.partition(",")
    if not name:
        raise DataError(
            "The address of a stream has no name.",
            where=text,
            why="its form is hf:NAME[,CONFIG][:SPLIT], with the name on the Hub, or a local folder.",
            do="--data hf:HuggingFaceFW/fineweb,sample-10BT:train",
        )
    return StreamAddress(name, config or None, split or "train")


@dataclasses.dataclass(frozen=True)
class RowPlace:
    """A place in the rows of a lane.

    Attributes:
        num_passes: how often the lane was read to its end before.
        state: that of the dataset within this pass; None at the beginning of the pass.
    """

    num_passes: int = 0
    state: Json = None


@dataclasses.dataclass(frozen=True)
class RowStream:
    """The rows of a stream, in lanes without an end: a lane that is exhausted starts over.

    Attributes:
        address: of the dataset.
        dataset: the opened one.
        num_lanes: how many parts its files are distributed over.
        starts: for some lanes, the state after rows that are left out of every pass.
    """

    address: StreamAddress
    dataset: IterableDataset
    num_lanes: int = 1
    starts: dict[int, Json] = dataclasses.field(default_factory=dict)

    @property
    def num_files(self) -> int:
        """How many parts can be read independently."""
        # Renamed in version 3.
        return getattr(self.dataset, "num_shards", None) or self.dataset.n_shards

    def groups(self, lane: int, size: int, place: RowPlace | None = None) -> Iterator[RowGroup]:
        """Yields the rows of a lane, some at a time, from a place on and without an end."""
        num_passes = 0 if place is None else place.num_passes
        state = None if place is None else place.state
        while True:
            num_rows = 0
            for group in self.pass_of(lane, size, num_passes, state):
                num_rows += len(group.rows)
                yield group
            # A pass that was resumed at its end has no rows left, and is no empty lane.
            if num_rows == 0 and state is None:
                raise self._failed("The stream has no rows.", f"lane {lane} of {self.num_lanes} has none.")
            num_passes += 1
            state = None

    def pass_of(self, lane: int, size: int, num_passes: int = 0, state: Json = None) -> Iterator[RowGroup]:
        """Yields the rows of a lane to its end, some at a time.

        Args:
            lane: its number.
            size: of a group.
            num_passes: how often it was read before.
            state: the place to continue from; None for the first row.
        """
        part = self.dataset.shard(num_shards=self.num_lanes, index=lane)
        first = self.starts.get(lane) if state is None else state
        if first is not None:
            part.load_state_dict(first)
        place = RowPlace(num_passes, state)
        rows: list[TableRow] = []
        for number, values in enumerate(self._read(part), 1):
            rows.append(TableRow(f"{self.address.text}, row {number} that was read of lane {lane}", values))
            if len(rows) == size:
                yield RowGroup(rows, place)
                place = RowPlace(num_passes, part.state_dict())
                rows = []
        if rows:
            yield RowGroup(rows, place)

    def _read(self, part: IterableDataset) -> Iterator[dict[str, Json]]:
        try:
            yield from part
        except Exception as error:
            raise self._failed("The stream cannot be read.", f"{type(error).__name__}: {error}") from error

    def _failed(self, what: str, why: str) -> DataError:
        do = f"load_dataset({self.address.name!r}, streaming=True)  # shows the same; or resume when it can be read"
        return DataError(what, where=self.address.text, why=why, do=do)


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """Some rows of a lane, and the place before them."""

    rows: list[TableRow]
    place: RowPlace


def open_rows(address: StreamAddress) -> RowStream:
    """Opens a dataset as a stream.

    Raises:
        MissingExtraError: the package `datasets` is not installed.
        DataError: it cannot be opened.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtraError(
            "Streaming a dataset needs a package that is not installed.",
            where=address.text,
            why=f"{error}.",
            do="pip install 'jshard[datasets]'",
        ) from error
    try:
        dataset = _loaded(datasets, address)
    # Any error of the network, of the Hub, or of a file.
    except Exception as error:
        first = next(iter(str(error).splitlines()), "no reason given")
        raise DataError(
            "The dataset cannot be streamed.",
            where=address.text,
            why=f"{type(error).__name__}: {first}",
            do="--data hf:NAME,CONFIG:SPLIT  # as in datasets.load_dataset(NAME, CONFIG, split=SPLIT, streaming=True)",
        ) from error
    return RowStream(address, dataset)


def _loaded(datasets: Any, address: StreamAddress) -> IterableDataset:
    path = Path(address.name)
    if not path.is_file():
        return datasets.load_dataset(address.name, address.config, split=address.split, streaming=True)
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if suffix not in _BUILDERS:
        raise ValueError(f"a file of another kind than {', '.join(_BUILDERS)}")
    # A file by itself has no splits.
    return datasets.load_dataset(_BUILDERS[suffix], data_files=str(path), split="train", streaming=True)
