"""Plays what a layer computes and sends, as the compiler schedules it, on a stream for each.

While a layer computes, the parameters of the next one are gathered, and the gradients of the one before are reduced.
The compiler starts a collective as late as suffices, and the layer ends when all of them have ended. On the links they
run one after another: what does not fit beside the computation is waited for. A collective that the layer itself waits
for queues behind those that have started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class LayerRound:
    """What a device does while one layer of a row computes, in seconds.

    Attributes:
        compute_s: the layer's computation.
        first_s: gathers that end before the others begin.
        sent_s: the other gathers for the next layer, and reductions of the layer before.
        alone_s: collectives of the layer itself, which it waits for.
        beside_alone_s: the computation that waits for none of these.
    """

    compute_s: float
    first_s: float = 0.0
    sent_s: tuple[float, ...] = ()
    alone_s: tuple[float, ...] = ()
    beside_alone_s: float = 0.0

    @property
    def communication_s(self) -> float:
        """Returns the time of all collectives, one after another."""
        return self.first_s + sum(self.sent_s) + sum(self.alone_s)


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
    events = []
    start_s = layer.compute_s
    for seconds in sorted(layer.sent_s):
        start_s = max(0.0, start_s - seconds)
        events.append(_Event(start_s, seconds))
    if layer.first_s:
        # The others begin when it has ended.
        start_s = max(start_s, min(layer.first_s, layer.compute_s))
        events = [dataclasses.replace(event, position_s=max(event.position_s, start_s)) for event in events]
        events += [_Event(start_s - min(start_s, layer.first_s), layer.first_s), _Event(start_s, is_wait=True)]
    beside_each_s = layer.beside_alone_s / max(len(layer.alone_s), 1)
    for number, seconds in enumerate(layer.alone_s, start=1):
        end_s = number * layer.compute_s / len(layer.alone_s)
        if beside_each_s:
            events += [_Event(max(0.0, end_s - beside_each_s), seconds), _Event(end_s, is_wait=True)]
        else:
            events.append(_Event(end_s, seconds, is_wait=True))
    # At the same place, what is waited for has started before.
    return sorted(events, key=lambda event: (event.position_s, event.seconds > 0))


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
