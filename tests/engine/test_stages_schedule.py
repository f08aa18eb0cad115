"""The schedule of pipeline stages, by enumeration: each layer once for each microbatch, in order, none early."""

import itertools

import pytest

from jshard.errors import AnnotationError, CallError
from jshard.plans.stages import StageLayout, Stages, StageSchedule

SCHEDULES = [
    (layers, places, rounds, late, more)
    for layers, places, rounds in itertools.product((1, 2, 5, 8), (2, 3, 4), (None, 1, 2))
    for late, more in ((False, 0), (True, 0), (False, 3))
]


def schedule_of(layers, places, rounds, late, more):
    fewest = places * (2 if late else 1)
    return StageSchedule.of(layers, places, Stages(microbatches=fewest + more, late=late, rounds=rounds))


def layers_of_chunk(layout: StageLayout, number: int, place: int) -> range:
    first = (number * layout.num_places + place) * layout.layers_per_chunk
    return range(first, min(first + layout.layers_per_chunk, layout.num_layers))


@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_each_microbatch_goes_through_all_layers_in_order(case):
    schedule = schedule_of(*case)
    layout = schedule.layout
    trips = {}  # of each microbatch: its ticks, each with the place and the round
    for tick, place in itertools.product(range(schedule.num_ticks), range(layout.num_places)):
        number = schedule.run_number(tick, place)
        if 0 <= number < schedule.num_runs:
            round_number, microbatch = divmod(number, schedule.num_microbatches)
            trips.setdefault(microbatch, []).append((tick, round_number, place))
    assert sorted(trips) == list(range(schedule.num_microbatches))
    for trip in trips.values():
        layers = [layer for _, round_number, place in trip for layer in layers_of_chunk(layout, round_number, place)]
        assert layers == list(range(layout.num_layers))
        for (tick, _, place), (next_tick, _, next_place) in itertools.pairwise(trip):
            assert next_place == (place + 1) % layout.num_places
            # What is sent takes `ticks_per_hop` ticks; before the first place it may also wait.
            waited = next_tick - tick - schedule.ticks_per_hop
            assert waited == (schedule.num_waiting if next_place == 0 else 0)


@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_two_rounds_are_in_flight_at_most(case):
    schedule = schedule_of(*case)
    for tick in range(schedule.num_ticks):
        numbers = [schedule.run_number(tick, place) for place in range(schedule.layout.num_places)]
        rounds = {number // schedule.num_microbatches for number in numbers if 0 <= number < schedule.num_runs}
        begun = tick // schedule.num_microbatches
        assert rounds <= {begun - 1, begun}


@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_the_bubble_is_the_share_of_ticks_without_a_layer(case):
    schedule = schedule_of(*case)
    layout = schedule.layout
    busy = 0
    for tick, place in itertools.product(range(schedule.num_ticks), range(layout.num_places)):
        number = schedule.run_number(tick, place)
        if 0 <= number < schedule.num_runs:
            busy += len(layers_of_chunk(layout, number // schedule.num_microbatches, place))
    slots = schedule.num_ticks * layout.num_places * layout.layers_per_chunk
    assert schedule.bubble == pytest.approx(1 - busy / slots)


def test_the_schedule_of_the_docs():
    schedule = StageSchedule.of(8, 4, Stages())
    assert schedule.layout == StageLayout(8, num_places=4, num_rounds=2, layers_per_chunk=1)
    assert (schedule.num_microbatches, schedule.num_ticks, schedule.num_waiting) == (4, 11, 0)
    assert schedule.bubble == pytest.approx(3 / 11)
    late = StageSchedule.of(8, 4, Stages(late=True))
    assert (late.num_microbatches, late.num_ticks) == (8, 22)


def test_layers_that_do_not_divide_are_the_last_numbers():
    layout = StageLayout.of(126, 16)
    assert (layout.num_rounds, layout.layers_per_chunk, layout.is_full) == (8, 1, False)
    assert StageLayout.of(5, 4, 1) == StageLayout(5, 4, num_rounds=1, layers_per_chunk=2)
    assert StageLayout.of(128, 16).is_full


def test_too_few_microbatches_are_refused():
    with pytest.raises(CallError, match="too few microbatches") as error:
        StageSchedule.of(8, 4, Stages(microbatches=6, late=True))
    assert "js.parallel.stages(model, microbatches=8, late=True)" in str(error.value)


@pytest.mark.parametrize(
    "setting", [{"microbatches": 0}, {"microbatches": True}, {"rounds": 1.5}, {"late": "yes"}, {"sum_dtype": "int8"}]
)
def test_settings_that_are_not_valid_are_refused(setting):
    with pytest.raises(AnnotationError, match="setting is not valid"):
        Stages(**setting)
