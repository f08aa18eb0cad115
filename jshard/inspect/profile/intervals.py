"""Sets of time, as sorted intervals that do not touch: their union, and what two of them share.

Times are whole picoseconds, as profiles have them, so that parts add up to their whole without rounding.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[int, int]  # begin and end


def union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The time that at least one of some intervals covers; they may overlap, and come in any order.

    Example:
        >>> union([(5, 9), (0, 3), (2, 4), (4, 4)])
        ((0, 4), (5, 9))
    """
    joined: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return tuple(joined)


def length(intervals: Iterable[Interval]) -> int:
    """The time that intervals cover which do not overlap."""
    return sum(end - begin for begin, end in intervals)


def common(left: Sequence[Interval], right: Sequence[Interval]) -> tuple[Interval, ...]:
    """What two unions share."""
    found: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def without(left: Sequence[Interval], right: Sequence[Interval]) -> tuple[Interval, ...]:
    """What one union has and another has not."""
    if not left:
        return ()
    begin, end = left[0][0], left[-1][1]
    edges = [begin, *(edge for interval in common([(begin, end)], right) for edge in interval), end]
    return common(left, [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b])


def clipped(intervals: Iterable[Interval], begin: int, end: int) -> Iterator[Interval]:
    """The parts of intervals between two times."""
    for a, b in intervals:
        if a < end and b > begin:
            yield max(a, begin), min(b, end)


def shared_out(owned: Iterable[tuple[Interval, int]], within: Sequence[Interval]) -> dict[int, float]:
    """The time of a union, given to those whose intervals cover it; several at one time take equal parts.

    Args:
        owned: intervals with the number of their owner; an owner counts once however many of his overlap.
        within: the union that is given away.

    Returns:
        Picoseconds by owner; their sum is the part of `within` that is covered at all.
    """
    queue: list[tuple[int, int, int]] = []  # time, +1 or -1, owner
    for (begin, end), owner in owned:
        if end > begin:
            queue += [(begin, 1, owner), (end, -1, owner)]
    heapq.heapify(queue)
    shares: dict[int, float] = {}
    open_now: dict[int, int] = {}
    since, place = 0, 0
    while queue:
        time, change, owner = heapq.heappop(queue)
        if open_now and time > since:
            while place < len(within) and within[place][1] <= since:
                place += 1
            part = _covered(within, place, since, time) / len(open_now)
            for each in open_now:
                shares[each] = shares.get(each, 0.0) + part
        since = time
        open_now[owner] = open_now.get(owner, 0) + change
        if not open_now[owner]:
            del open_now[owner]
    return shares


def _covered(within: Sequence[Interval], place: int, begin: int, end: int) -> int:
    """How much of the time between two moments a union covers, looked for from a place on."""
    total = 0
    while place < len(within) and within[place][0] < end:
        total += max(0, min(within[place][1], end) - max(within[place][0], begin))
        place += 1
    return total
