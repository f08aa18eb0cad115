"""Conversations as sequences of one length: several in each, or one with padding behind it."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from jshard.data.loader import Sample


@dataclasses.dataclass(frozen=True)
class Chat:
    """The tokens of a conversation.

    Attributes:
        ids: all of them, int32.
        is_learned: for each, whether the assistant writes it.
        number: by which it is held out or not: a hash of its messages.
    """

    ids: np.ndarray
    is_learned: np.ndarray
    number: int


class PackedChats:
    """Conversations as sequences of one length: a `Source`.

    Args:
        chats: of at most one token more than a sequence.
        sequence_length: of the inputs.
        pack: whether several share a sequence.
    """

    def __init__(self, chats: Sequence[Chat], sequence_length: int, *, pack: bool) -> None:
        self._chats = chats
        self._length = sequence_length
        self._pack = pack
        sizes = [chat.ids.size - 1 for chat in chats]
        self._rows = _packed(sizes, sequence_length) if pack else [[number] for number in range(len(sizes))]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Sample:
        chats = [self._chats[number] for number in self._rows[index]]
        return sequence_of(chats, self._length, pack=self._pack)


def sequence_of(chats: Sequence[Chat], length: int, *, pack: bool) -> Sample:
    """Returns conversations, which must fit, as a sequence of a length, with padding at its end."""
    inputs, targets, segment_ids, positions = (np.zeros(length, np.int32) for _ in range(4))
    weights = np.zeros(length, np.float32)
    start = 0
    for segment, chat in enumerate(chats, 1):
        size = chat.ids.size - 1
        place = slice(start, start + size)
        inputs[place] = chat.ids[:-1]
        targets[place] = chat.ids[1:]
        weights[place] = chat.is_learned[1:]
        segment_ids[place] = segment
        positions[place] = np.arange(size)
        start += size
    sample = {"inputs": inputs, "targets": targets, "weights": weights}
    if pack:
        sample |= {"segment_ids": segment_ids, "positions": positions}
    return sample


def _packed(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Returns the numbers of the conversations in each row: the largest first, each where it leaves the least room.

    The order among equal sizes is that of the data, so the rows are a function of the sizes alone.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # the room in each row and its number, sorted
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = sizes[number]
        place = bisect.bisect_left(rooms, (size, 0))
        if place == len(rooms):
            row = len(rows)
            rows.append([])
            room = length
        else:
            room, row = rooms.pop(place)
        rows[row].append(number)
        bisect.insort(rooms, (room - size, row))
    return rows
