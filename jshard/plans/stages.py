"""Pipeline stages: which place along `pipe` runs which layer on which microbatch, and when. Numbers alone.

Layers are dealt to the places in chunks, round by round. A microbatch goes around the ring of places in each round:

    8 layers on 4 places, in chunks of one layer

                 place 0    place 1    place 2    place 3
    round 0      layer 0    layer 1    layer 2    layer 3   ─▶ to place 0
    round 1      layer 4    layer 5    layer 6    layer 7   ─▶ results

A tick is the time of one chunk on one microbatch. All microbatches go through a round before the first one begins the
next round ("breadth-first"), so that a place has the time of all microbatches to gather the parameters of its next
round, and to reduce the gradients of its last one:

    tick         0    1    2    3    4    5    6    7    8    9    10
    place 0      a0   b0   c0   d0   a1   b1   c1   d1
    place 1           a0   b0   c0   d0   a1   b1   c1   d1
    place 2                a0   b0   c0   d0   a1   b1   c1   d1
    place 3                     a0   b0   c0   d0   a1   b1   c1   d1

(a0: microbatch a in round 0.) The blank corners are the *bubble*: places that wait for their first microbatch, or have
none left. It is 3 of 11 ticks here; the more rounds, the smaller its share.

Source: breadth-first pipeline parallelism, Lamy-Poirier 2022, arXiv:2211.05953.
"""

import dataclasses
from typing import Any, TypeAlias

from jshard.errors import AnnotationError, CallError

Number: TypeAlias = Any
"""An int, or an array of one: numbers of ticks and places are traced in a program."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """How loops over units run on a mesh with an axis `pipe`. Rarely needed: the defaults keep all places busy.

    Args:
        microbatches: into how many parts the examples of a data shard go through the stages. None: as few as keep all
            places busy, which is the degree of `pipe`, or twice that with `late`.
        late: whether a place sends a result while it computes the next microbatch, and not before that. What is sent
            between the places is then hidden, at the cost of twice as many microbatches in the bubble.
        rounds: how often a microbatch goes around the places. None: once for each layer of a place, which makes the
            smallest bubble. 1: each place has neighbouring layers ("GPipe").
        sum_dtype: the dtype in which a place adds the gradients of its microbatches; None: that of the parameters.

    Raises:
        AnnotationError: a value is not valid.
    """

    microbatches: int | None = None
    late: bool = False
    rounds: int | None = None
    sum_dtype: str | None = None

    def __post_init__(self) -> None:
        is_count = "None or a number, 1 or more"
        _check("microbatches", self.microbatches, is_count, is_valid=_is_count(self.microbatches), example=16)
        _check("late", self.late, "True or False", is_valid=self.late in (True, False), example=True)
        _check("rounds", self.rounds, is_count, is_valid=_is_count(self.rounds), example=1)
        is_dtype = self.sum_dtype is None or self.sum_dtype in _SUM_DTYPES
        kinds = f"None or one of {', '.join(_SUM_DTYPES)}"
        _check("sum_dtype", self.sum_dtype, kinds, is_valid=is_dtype, example="bfloat16")


_SUM_DTYPES = ("float32", "bfloat16", "float16")


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and value >= 1)  # True is no number


def _check(name: str, value: object, valid_values: str, *, is_valid: bool, example: object) -> None:
    if not is_valid:
        raise AnnotationError(
            "The value of a setting is not valid.",
            where=f"js.parallel.Stages({name}={value!r})",
            why=f"it must be {valid_values}.",
            do=f"js.parallel.stages(model, {name}={example!r})",
        )


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """Which layers are on which place.

    Layers are numbered as `(round * num_places + place) * layers_per_chunk + layer of the chunk`. The last numbers may
    have no layer: whatever runs them passes its input on.

    Attributes:
        num_layers: of the loop.
        num_places: along `pipe`.
        num_rounds: how often a microbatch goes around.
        layers_per_chunk: the layers that a place runs in a round.
    """

    num_layers: int
    num_places: int
    num_rounds: int
    layers_per_chunk: int

    @classmethod
    def of(cls, num_layers: int, num_places: int, rounds: int | None = None) -> "StageLayout":
        """Deals layers to places, in so many rounds at most."""
        layers_per_place = _divided(num_layers, num_places)
        most_rounds = min(rounds or layers_per_place, layers_per_place)
        layers_per_chunk = _divided(layers_per_place, most_rounds)
        # With chunks of several layers, fewer rounds may be enough.
        num_rounds = _divided(num_layers, num_places * layers_per_chunk)
        return cls(num_layers, num_places, num_rounds, layers_per_chunk)

    @property
    def layers_per_place(self) -> int:
        """How many layers a place has room for."""
        return self.num_rounds * self.layers_per_chunk

    @property
    def is_full(self) -> bool:
        """Whether each place has as many layers as it has room for."""
        return self.num_layers == self.num_places * self.layers_per_place


@dataclasses.dataclass(frozen=True)
class StageSchedule:
    """When each place runs its layers.

    Attributes:
        layout: which layers are where.
        num_microbatches: that go around.
        ticks_per_hop: how many ticks after a place the next one runs the same microbatch: 2 if results are sent late.
    """

    layout: StageLayout
    num_microbatches: int
    ticks_per_hop: int = 1

    @classmethod
    def of(cls, num_layers: int, num_places: int, settings: Stages) -> "StageSchedule":
        """Returns the schedule of a loop over layers; raises if the microbatches do not keep the places busy."""
        ticks_per_hop = 2 if settings.late else 1
        fewest = ticks_per_hop * num_places
        number = settings.microbatches or fewest
        # With fewer microbatches than the ring takes ticks, the first place would begin a round before the first
        # microbatch is back.
        if number < fewest:
            raise CallError(
                "The pipeline has too few microbatches.",
                where=f"microbatches={number}, late={settings.late}, pipe={num_places}",
                why=f"a microbatch is back at the first place after {fewest} ticks: {fewest} or more are needed.",
                do=f"js.parallel.stages(model, microbatches={fewest}, late={settings.late})",
            )
        return cls(StageLayout.of(num_layers, num_places, settings.rounds), number, ticks_per_hop)

    def run_number(self, tick: Number, position: Number) -> Number:
        """Returns how many chunks a place has run before a tick, where it has begun and is not through.

        Microbatches follow each other without a gap, round by round: `divmod(run_number, num_microbatches)` is the
        round and the microbatch. The number is negative before the first one, and `num_runs` or more after the last.

        Args:
            tick: counted from the first one of the loop.
            position: of the place in the ring: microbatches enter at 0.
        """
        return tick - self.ticks_per_hop * position

    @property
    def num_runs(self) -> int:
        """How many chunks a place runs."""
        return self.layout.num_rounds * self.num_microbatches

    @property
    def num_draining_ticks(self) -> int:
        """The ticks after the last microbatch has entered, until it leaves the last place."""
        return self.ticks_per_hop * (self.layout.num_places - 1)

    @property
    def num_ticks(self) -> int:
        """All ticks of the loop."""
        return self.num_runs + self.num_draining_ticks

    @property
    def num_sends(self) -> int:
        """How often a place passes on what it has computed."""
        # A compiler runs a loop of one tick without the loop, and leaves out what its last tick sends: it is not read.
        is_last_left_out = self.num_draining_ticks == 1
        return self.num_ticks - is_last_left_out

    @property
    def num_waiting(self) -> int:
        """How many microbatches wait before the first place, until all have gone around."""
        return self.num_microbatches - self.ticks_per_hop * self.layout.num_places

    @property
    def bubble(self) -> float:
        """The share of the loop's time in which a place has no layer to run; those without a layer count as idle."""
        busy = self.layout.num_layers / self.layout.num_places / self.layout.layers_per_chunk * self.num_microbatches
        return 1 - busy / self.num_ticks


DEFAULT_STAGES = Stages()


def _divided(number: int, parts: int) -> int:
    """Returns the quotient, rounded up."""
    return -(-number // parts)
