"""The choice of `remat="auto"`: the fastest of none, dots and full that fits a device, from counted work.

What layers of a loop save for backward is stored for all of them, and read again, so that to keep less is often faster.
Layers that are called one after another are one program: there the compiler itself computes cheap values again.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from jshard._text import counted, duration, human_bytes
from jshard.facts.device_facts import DeviceFacts
from jshard.plans.remat import DOTS, FULL, NONE

CANDIDATES = (NONE, DOTS, FULL)

# Passes over the device's memory for a saved byte, as in programs that XLA compiled for H100: docs/planning.md. In a
# loop values are stacked, and read from the stack.
_PRODUCT_PASSES = 3.3  # for a result of a product, which is written in any case
_CHEAP_PASSES = 4.4  # for any other value, which without being saved would not leave its fused operation
# Outside of loops nothing is stacked, and the compiler computes cheap values again by itself. What a policy says to
# compute again it must keep apart, which takes so many passes more.
_READ_PASSES = 1.0
_AGAIN_PASSES = 0.6
_MEMORY_REACHED = 0.8  # of the peak rate of the memory
# Of what only `none` saves, the share that the compiler keeps of layers called one after another.
_KEPT_OUTSIDE_LOOPS = 0.3
_EQUAL = 0.02  # relative difference below which times are equal


@dataclasses.dataclass(frozen=True)
class RematWork:
    """What one device does for backward of some layers under a policy, beside forward and the gradients themselves."""

    remat: str
    saved_bytes: float
    recomputed_s: float  # products that backward computes again


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers that have one policy."""

    num_layers: int
    in_loop: bool
    works: tuple[RematWork, ...]  # by `CANDIDATES`


@dataclasses.dataclass(frozen=True)
class RematOption:
    """A policy for a group of layers, as estimated."""

    remat: str
    saved_bytes: float
    extra_s: float  # to save and read, and to compute again

    def __str__(self) -> str:
        return f"{self.remat} saves {human_bytes(self.saved_bytes)} and takes {duration(self.extra_s)}"


@dataclasses.dataclass(frozen=True)
class RematChoice:
    """The policy that was chosen for some layers, and why, as text; empty if there was nothing to choose."""

    remat: str
    because: str


def none_outside_loops(most_bytes: float, room_bytes: float) -> RematChoice:
    """Returns the choice for layers called one after another whose values fit, whatever the compiler keeps of them."""
    because = (
        "called one after another, where the compiler itself computes cheap values again;"
        f" they save at most {human_bytes(most_bytes)} of {human_bytes(room_bytes)} left for them"
    )
    return RematChoice(NONE, because)


def choose(groups: Sequence[LayerGroup], device: DeviceFacts, room_bytes: float) -> list[RematChoice]:
    """Returns the policy of each group: together the fastest that fit; of equally fast ones those that save least.

    If none fit, those that save least.

    Args:
        groups: the layers of a model.
        device: that they run on.
        room_bytes: of its memory, for all that layers save.
    """
    options_of_groups = [_options(group, device) for group in groups]
    best = _best(list(itertools.product(*options_of_groups)), room_bytes)
    choices = []
    for group, options, chosen in zip(groups, options_of_groups, best, strict=True):
        place = "in a loop" if group.in_loop else "called one after another"
        listed = ", ".join(map(str, options))
        because = (
            f"estimated for {device.title}, {counted(group.num_layers, 'layer')} {place}, one pass: {listed};"
            f" {human_bytes(max(room_bytes, 0))} left for them"
        )
        choices.append(RematChoice(chosen.remat, because))
    return choices


def _best(combinations: list[tuple[RematOption, ...]], room_bytes: float) -> tuple[RematOption, ...]:
    """Returns the best of some combinations of an option for each group."""
    fitting = [options for options in combinations if _saved_bytes(options) <= room_bytes]
    if not fitting:
        return min(combinations, key=_saved_bytes)
    limit_s = (1 + _EQUAL) * min(map(_extra_s, fitting))
    return min((options for options in fitting if _extra_s(options) <= limit_s), key=_saved_bytes)


def _saved_bytes(options: Sequence[RematOption]) -> float:
    return sum(option.saved_bytes for option in options)


def _extra_s(options: Sequence[RematOption]) -> float:
    return sum(option.extra_s for option in options)


def _options(group: LayerGroup, device: DeviceFacts) -> list[RematOption]:
    """Returns the policies of a group, as estimated."""
    none, dots, _ = group.works
    bytes_per_s = device.hbm_bytes_per_s * _MEMORY_REACHED
    options = []
    for work in group.works:
        # What `dots` saves are results of products; `none` saves cheap values beside them.
        products_bytes = min(work.saved_bytes, dots.saved_bytes)
        cheap_bytes = work.saved_bytes - products_bytes
        if group.in_loop:
            moved_bytes = _PRODUCT_PASSES * products_bytes + _CHEAP_PASSES * cheap_bytes
        else:
            moved_bytes = _READ_PASSES * products_bytes
            cheap_bytes *= _KEPT_OUTSIDE_LOOPS
            if work is not none:
                moved_bytes += _AGAIN_PASSES * (none.saved_bytes - dots.saved_bytes)
        extra_s = moved_bytes / bytes_per_s + work.recomputed_s
        options.append(RematOption(work.remat, products_bytes + cheap_bytes, extra_s))
    return options
