"""Parts of parallel lists, by a mark for each entry or by position.

What is known of a program's operands and results is in lists of one length: arrays, types, whether each has a gradient.
A part of one list must be taken like that of the others, or entries of different operands are paired.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


# ---- by a mark for each entry


def picked(marks: Sequence[bool], xs: Sequence[T]) -> list[T]:
    """The values that are marked."""
    # Strict, here and wherever lists are paired: a list of another length is of other operands, and cut to the shorter
    # one it would give wrong numbers instead of an error.
    return [x for x, is_marked in zip(xs, marks, strict=True) if is_marked]


def others(marks: Sequence[bool], xs: Sequence[T]) -> list[T]:
    """The values that are not marked."""
    return [x for x, is_marked in zip(xs, marks, strict=True) if not is_marked]


def merged(marks: Sequence[bool], marked: Sequence[T], rest: Sequence[T]) -> list[T]:
    """Marked and other values in one list again."""
    remaining_marked = iter(marked)
    remaining_rest = iter(rest)
    merged_values = []
    for is_marked in marks:
        merged_values.append(next(remaining_marked) if is_marked else next(remaining_rest))
    return merged_values


def positions_of(marks: Sequence[bool]) -> list[int]:
    """The positions that are marked."""
    return [position for position, is_marked in enumerate(marks) if is_marked]


def unmarked_at(positions: Collection[int], marks: Sequence[bool]) -> tuple[bool, ...]:
    """The marks without those at some positions."""
    return tuple(is_marked and position not in positions for position, is_marked in enumerate(marks))


# ---- by position


def at_positions(xs: Sequence[T] | Mapping[int, T], positions: Iterable[int]) -> list[T]:
    """The values at some positions, in the order of the positions."""
    return [xs[position] for position in positions]


def shifted(positions: Iterable[int], number: int) -> frozenset[int]:
    """Positions in a list that has so many more entries in front."""
    return frozenset(position + number for position in positions)


def counted_from(first: int, positions: Iterable[int]) -> frozenset[int]:
    """Positions in the rest of a list, which begins at `first`; those before it are left out."""
    return frozenset(position - first for position in positions if position >= first)
