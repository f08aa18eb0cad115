"""Samples of a stream, by number: a `Source` that is read forward, from any position that was stored.

    sample       0 1 2 3 4 5 6 7 ...        of the run, in batches of 4
    lane 0       0 1 . . 2 3 . .            makes its own samples from its own files
    lane 1       . . 0 1 . . 2 3

A lane has consecutive rows of each batch, so that each process reads the lanes of its rows, and not those of others.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic

from jshard._processes import gather_texts
from jshard._types import Json
from jshard.checkpoint.data_position.state_text import from_text, to_text
from jshard.data.loader import DataError, Sample
from jshard.data.stream_packers import Packer, Units
from jshard.data.stream_rows import RowGroup, RowPlace, RowStream

ENDLESS = sys.maxsize
"""The length of a source without an end."""

_ROWS_AT_ONCE = 16  # they are tokenized together
_BATCHES_KEPT = 64  # positions of so many batches are known: of those that are read ahead, and before


@dataclasses.dataclass(frozen=True)
class LanePlace:
    """The place of the next sample of a lane.

    Attributes:
        rows: the place of a group of rows.
        num_used: how many of the units of these rows are in earlier samples.
    """

    rows: RowPlace
    num_used: int = 0

    def as_json(self) -> Json:
        """Returns the place as a position stores it."""
        return [self.rows.num_passes, self.rows.state, self.num_used]

    @classmethod
    def of(cls, stored: Json) -> LanePlace:
        """Returns the place that was stored."""
        num_passes, state, num_used = stored
        return cls(RowPlace(num_passes, state), num_used)


class _Reading(Generic[Units]):
    """A lane that is being read: its samples, one after another."""

    def __init__(self, rows: RowStream, packer: Packer[Units], lane: int, number: int, place: LanePlace) -> None:
        self.next_number = number
        self._packer = packer
        self._groups: Iterator[RowGroup] = rows.groups(lane, _ROWS_AT_ONCE, place.rows)
        self._units: Units | None = None  # not used yet
        self._first_rows = place.rows  # the place of the rows that the first unit is from
        self._num_used = 0  # of the units of these rows
        # The number of units of each group, and the place of the rows after it.
        self._sizes: collections.deque[_GroupSize] = collections.deque()
        self._pass_with_units = place.rows.num_passes  # the last pass that had any
        self._skip(place.num_used)

    @property
    def place(self) -> LanePlace:
        """The place of the next sample."""
        return LanePlace(self._first_rows, self._num_used)

    def read(self) -> Sample:
        """Returns the next sample."""
        while True:
            taken = None if self._units is None else self._packer.take(self._units)
            if taken is not None:
                self._use(taken.num_units)
                self.next_number += 1
                return taken.sample
            self._read_group()

    def _skip(self, num_units: int) -> None:
        """Passes over units that are in earlier samples."""
        while sum(size.num_units for size in self._sizes) < num_units:
            self._read_group()
        self._use(num_units)

    def _read_group(self) -> None:
        group = next(self._groups)
        units = self._packer.units_of(group.rows)
        if len(units):
            self._pass_with_units = group.place.num_passes
        elif group.place.num_passes > self._pass_with_units + 1:
            raise DataError(
                "The stream has nothing to train on.",
                where=group.rows[0].where,
                why="no row of a whole pass has a text, or a token that the assistant writes.",
                do="--text-key NAME  # the column with the texts; or a larger sequence_length, for conversations",
            )
        if not self._sizes:
            self._first_rows = group.place
            self._num_used = 0
        self._sizes.append(_GroupSize(len(units), group.place))
        self._units = units if self._units is None else self._packer.joined(self._units, units)

    def _use(self, num_units: int) -> None:
        if not num_units:
            return
        assert self._units is not None, "only what was read is used"
        self._units = self._packer.rest(self._units, num_units)
        self._num_used += num_units
        # Rows that are used up are not read again. The last ones stay: the place after them is not known yet.
        while len(self._sizes) > 1 and self._num_used >= self._sizes[0].num_units:
            self._num_used -= self._sizes.popleft().num_units
            self._first_rows = self._sizes[0].place


@dataclasses.dataclass(frozen=True)
class _GroupSize:
    """How many units a group of rows has, and the place before it."""

    num_units: int
    place: RowPlace


class StreamedSamples(Generic[Units]):
    """The samples of a stream: a `Source` without an end, for one reader that goes forward.

    Sample `number` is of lane `number % num_lanes`. It is the same whatever was read before; to go back, a lane is read
    again from the nearest place that is known.
    """

    def __init__(self, rows: RowStream, packer: Packer[Units]) -> None:
        self._rows = rows
        self._packer = packer
        self._readings: dict[int, _Reading[Units]] = {}
        # Of each lane that this process has read: numbers of samples, ascending, and their places.
        self._places: dict[int, collections.deque[tuple[int, LanePlace]]] = {}
        self._restored: dict[int, tuple[int, LanePlace]] = {}
        self._num_kept = _BATCHES_KEPT
        # Positions are asked for while a thread reads ahead.
        self._lock = threading.Lock()

    @property
    def num_lanes(self) -> int:
        """The number of lanes."""
        return self._rows.num_lanes

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int, /) -> Sample:
        if number == 0:
            # It is read several times, for its form, before a run begins.
            return self._first
        index, lane = divmod(number, self.num_lanes)
        with self._lock:
            return self._sample(lane, index)

    @functools.cached_property
    def _first(self) -> Sample:
        return _Reading(self._rows, self._packer, 0, 0, LanePlace(RowPlace())).read()

    def batch_order(self, batch_size: int, start: int) -> StreamOrder:
        """Returns the numbers of the samples by their place in the run, for batches from sample `start` on."""
        self._num_kept = _BATCHES_KEPT * (batch_size // self.num_lanes)
        return StreamOrder(self.num_lanes, batch_size, start)

    def _sample(self, lane: int, index: int) -> Sample:
        """Returns a sample of a lane, by its number there."""
        reading = self._readings.get(lane)
        if reading is None or reading.next_number > index:
            reading = self._reading_before(lane, index)
            self._readings[lane] = reading
        places = self._places.setdefault(lane, collections.deque())
        while True:
            places.append((reading.next_number, reading.place))
            while len(places) > self._num_kept:
                places.popleft()
            sample = reading.read()
            if reading.next_number > index:
                return sample

    def _reading_before(self, lane: int, index: int) -> _Reading[Units]:
        """Begins to read a lane at the nearest known place that is not after a sample."""
        number, place = self._place_before(lane, index)
        # Places stay in ascending order.
        self._places[lane] = collections.deque()
        return _Reading(self._rows, self._packer, lane, number, place)

    def _place_before(self, lane: int, index: int) -> tuple[int, LanePlace]:
        known = [(0, LanePlace(RowPlace()))]
        if lane in self._restored:
            known.append(self._restored[lane])
        known += self._places.get(lane, ())
        if lane in self._readings:
            reading = self._readings[lane]
            known.append((reading.next_number, reading.place))
        return max((place for place in known if place[0] <= index), key=lambda place: place[0])

    # ---- the position

    def places_at(self, num_samples: int) -> dict[int, tuple[int, LanePlace]]:
        """Returns for each lane that this process knows a place after so many samples of the run, or before."""
        index = num_samples // self.num_lanes
        with self._lock:
            lanes = {*self._places, *self._restored}
            return {lane: self._place_before(lane, index) for lane in sorted(lanes)}

    def restore(self, places: Mapping[int, tuple[int, LanePlace]]) -> None:
        """Makes known where samples begin."""
        with self._lock:
            self._restored = dict(places)


@dataclasses.dataclass(frozen=True)
class StreamOrder:
    """The numbers of the samples of a stream, by their place in the run.

    Attributes:
        num_lanes: of the stream; they divide the batch size.
        batch_size: of the batches from `start` on.
        start: the samples of the run before them.
    """

    num_lanes: int
    batch_size: int
    start: int

    def __getitem__(self, place: int) -> int:
        step, row = divmod(place - self.start, self.batch_size)
        rows_per_lane = self.batch_size // self.num_lanes
        lane, row_of_lane = divmod(row, rows_per_lane)
        index = (self.start + step * self.batch_size) // self.num_lanes + row_of_lane
        return index * self.num_lanes + lane


class StreamPosition:
    """The position of a run in its stream, as a checkpoint stores it: a place in each lane.

    Attributes:
        source: the stream, which `set_state` makes known the places to.
        num_samples: how many samples the run has trained on.
    """

    # The state is that of the run, and not of a process.
    global_position: ClassVar[bool] = True

    def __init__(self, source: StreamedSamples[Any], num_samples: int) -> None:
        self.source = source
        self.num_samples = num_samples

    def get_state(self) -> dict[str, Json]:
        """Returns a place of each lane; every process calls it."""
        places: dict[int, tuple[int, LanePlace]] = {}
        for text in gather_texts(to_text(_as_json(self.source.places_at(self.num_samples)))):
            for lane, (number, place) in from_text(text).items():
                # Processes that share a lane may know different places.
                if int(lane) not in places or number > places[int(lane)][0]:
                    places[int(lane)] = (number, LanePlace.of(place))
        return {"num_lanes": self.source.num_lanes, "places": _as_json(places)}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Makes the places known, if they are of as many lanes."""
        if state["num_lanes"] != self.source.num_lanes:
            return
        places = {}
        for lane, (number, place) in state["places"].items():
            places[int(lane)] = (number, LanePlace.of(place))
        self.source.restore(places)


def _as_json(places: Mapping[int, tuple[int, LanePlace]]) -> dict[str, Json]:
    return {str(lane): [number, place.as_json()] for lane, (number, place) in sorted(places.items())}
