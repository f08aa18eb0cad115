"""Plays what a layer computes and sends, as the compiler schedules it, on a stream for each.

While a layer computes, the parameters of the next one are gathered, and the gradients of the one before are reduced.
The compiler starts a collective as late as suffices, and the layer ends when all of them have ended. What suffices is
what it expects of computation and collectives. Where it lets only one run at a time, they end one after another. Where
several may run at once, it starts each as if it were alone. On the links they run one after another anyway: what does
not fit beside the computation is waited for. A collective that the layer itself waits for queues behind those that have
started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Awaited:
    """A collective that a layer waits for, and the places in its computation where it starts and where it must end."""

    seconds: float
    start_s: float
    end_s: float


def spread(seconds: Sequence[float], compute_s: float, beside_s: float = 0.0) -> tuple[Awaited, ...]:
    """Returns collectives that a layer waits for at equal distances, where nothing else is known.

    Args:
        seconds: of each.
        compute_s: the layer's computation.
        beside_s: the computation that waits for none of these.
    """
    awaited = []
    for number, each_s in enumerate(seconds, start=1):
        end_s = number * compute_s / len(seconds)
        awaited.append(Awaited(each_s, max(0.0, end_s - beside_s / len(seconds)), end_s))
    return tuple(awaited)


@dataclasses.dataclass(frozen=True)
class LayerRound:
    """What a device does while one layer of a row computes, in seconds.

    Attributes:
        compute_s: the layer's computation.
        first_s: gathers that end before the others begin.
        sent_s: the other gathers for the next layer, and reductions of the layer before.
        expected_s: what the compiler expects each of these to take; empty if it runs them one after another.
        expected_pace: how long it expects computation to take, relative to what it does.
        kernel_s: how much of a kernel is left at any time in the mean; no collective starts in the middle of one.
        awaited: collectives of the layer itself, in the order in which it waits for them.
    """

    compute_s: float
    first_s: float = 0.0
    sent_s: tuple[float, ...] = ()
    expected_s: tuple[float, ...] = ()
    expected_pace: float = 1.0
    kernel_s: float = 0.0
    awaited: tuple[Awaited, ...] = ()

    @property
    def communication_s(self) -> float:
        """Returns the time of all collectives, one after another."""
        return self.first_s + sum(self.sent_s) + sum(collective.seconds for collective in self.awaited)


@dataclasses.dataclass(frozen=True)
class PlayedRound:
    """How long a round takes: it computes, slower beside collectives, and waits for them."""

    exposed_s: float
    slowdown_s: float


def played(layer: LayerRound, contention: float) -> PlayedRound:
    """Returns how the collectives of a layer overlap with its computation.

    Args:
        layer: its work.
        contention: by how much computation is slower beside a collective.
    """
    streams = _Streams(contention)
    done_s = 0.0  # of the computation
    for event in _events(layer):
        streams.compute(event.position_s - done_s)
        done_s = event.position_s
        if event.seconds:
            streams.send(event.seconds)
        if event.is_wait:
            streams.wait()
    streams.compute(layer.compute_s - done_s)
    streams.wait()
    return PlayedRound(streams.exposed_s, streams.clock_s - streams.exposed_s - layer.compute_s)


@dataclasses.dataclass(frozen=True)
class _Event:
    """A place in a layer's computation where a collective starts, and then all are waited for that have started."""

    position_s: float
    seconds: float = 0.0  # of the collective; 0 if none starts
    is_wait: bool = False


def _events(layer: LayerRound) -> Sequence[_Event]:
    """Returns the events of a layer, in order."""
    events = _started_together(layer) if layer.expected_s else _started_in_turn(layer)
    start_s = min((event.position_s for event in events), default=layer.compute_s)
    if layer.first_s:
        # The others begin when it has ended.
        start_s = max(start_s, min(layer.first_s, layer.compute_s))
        events = [dataclasses.replace(event, position_s=max(event.position_s, start_s)) for event in events]
        events += [_Event(start_s - min(start_s, layer.first_s), layer.first_s), _Event(start_s, is_wait=True)]
    for collective in layer.awaited:
        if collective.start_s < collective.end_s:
            events += [_Event(collective.start_s, collective.seconds), _Event(collective.end_s, is_wait=True)]
        else:
            events.append(_Event(collective.end_s, collective.seconds, is_wait=True))
    # At the same place, what is waited for has started before.
    return sorted(events, key=lambda event: (event.position_s, not event.is_wait))


def _started_in_turn(layer: LayerRound) -> list[_Event]:
    """Returns the starts of collectives that end one after another, the last one with the layer."""
    events = []
    start_s = layer.compute_s
    for seconds in sorted(layer.sent_s):
        start_s = max(0.0, start_s - seconds)
        events.append(_Event(start_s, seconds))
    return events


def _started_together(layer: LayerRound) -> list[_Event]:
    """Returns the starts of collectives that all end with the layer, as the compiler expects."""
    events = []
    for seconds, expected_s in zip(layer.sent_s, layer.expected_s, strict=True):
        events.append(_Event(_expected_start_s(layer, expected_s), seconds))
    return events


def _expected_start_s(layer: LayerRound, before_end_s: float) -> float:
    """Returns the place in a layer's computation from which it takes so long, as the compiler expects.

    Collectives that it waits for take their part of that time.
    """
    left_s = before_end_s
    place_s = layer.compute_s
    kernel_begins_s = 0.0  # at the latest: what is awaited is awaited before a kernel
    for collective in reversed(layer.awaited):
        computed_s = (place_s - collective.end_s) * layer.expected_pace
        if left_s <= computed_s:
            kernel_begins_s = collective.end_s
            break
        left_s -= computed_s
        place_s = collective.end_s
        beside_s = (collective.end_s - collective.start_s) * layer.expected_pace
        left_s -= max(0.0, collective.seconds - beside_s)
    start_s = place_s - max(0.0, left_s) / layer.expected_pace
    return max(0.0, kernel_begins_s, start_s - layer.kernel_s)


class _Streams:
    """The computation and the links of a device. Collectives run one after another."""

    def __init__(self, contention: float) -> None:
        self._contention = contention
        self._links_free_s = 0.0
        self.clock_s = 0.0
        self.exposed_s = 0.0

    def compute(self, alone_s: float) -> None:
        """Computes for so long, and longer as far as something is sent meanwhile."""
        if alone_s <= 0:
            return
        sending_s = max(0.0, self._links_free_s - self.clock_s)
        beside_s = min(sending_s, alone_s * (1 + self._contention))
        self.clock_s += alone_s + beside_s * self._contention / (1 + self._contention)

    def send(self, seconds: float) -> None:
        """Starts a collective."""
        self._links_free_s = max(self.clock_s, self._links_free_s) + seconds

    def wait(self) -> None:
        """Waits for all collectives."""
        waited_s = max(0.0, self._links_free_s - self.clock_s)
        self.exposed_s += waited_s
        self.clock_s += waited_s
