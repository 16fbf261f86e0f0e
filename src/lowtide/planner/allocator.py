"""A caching allocator with CUDA's rules, for memory that is only imagined.

Requests are rounded up to 512 bytes. Up to 1 MiB they are cut from segments of 2 MiB, below 10 MiB from segments of
20 MiB, and above that they get a segment of their own in steps of 2 MiB. The smallest free block that is large enough
is taken, and of two alike the one that lies first. What is left of it stays free: of a small block if it is at least
512 bytes, of a large one if it is more than 1 MiB; otherwise it counts as in use. Free neighbours become one block.

Segments are returned to the device in one case only: where the device has no more memory for a new one, all that are
wholly free are given back, and the request is tried again. Addresses of such segments are used again, the lowest
first. :mod:`lowtide.planner.expandable` has the rules of
segments that grow.

Everything is on one stream. So memory is free as soon as the program releases it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple, TypeAlias

__all__ = ["ROUND", "SMALL_REQUEST", "Allocator", "Block", "Limit", "LimitError"]

ROUND = 512
SMALL_REQUEST = 1 << 20
SMALL_SEGMENT = 2 << 20
MIDDLE_REQUEST = 10 << 20
MIDDLE_SEGMENT = 20 << 20
LARGE_ROUND = 2 << 20


class LimitError(Exception):
    """More memory was asked for than the device was said to have."""


class Limit(NamedTuple):
    """What a device has."""

    bytes: int
    gives_back: bool = True
    """Whether cached memory is given back to the device before it is out of memory, as torch does."""


class Block:
    """A piece of a segment, in use or free."""

    __slots__ = ("following", "free", "mapped", "preceding", "size", "small", "start")

    def __init__(self, start: int, size: int, small: bool) -> None:
        self.start, self.size, self.small = start, size, small
        self.free = False
        self.mapped = True
        """Whether it is memory, and not only addresses: see :mod:`lowtide.planner.expandable`."""
        self.preceding: Block | None = None
        self.following: Block | None = None


_Pool: TypeAlias = list[tuple[int, int, Block]]
"""Free blocks by size and place."""


class Allocator:
    """The memory of one device.

    >>> allocator = Allocator()
    >>> block = allocator.allocate(1000)
    >>> allocator.allocated, allocator.reserved
    (1024, 2097152)
    >>> allocator.release(block)
    >>> allocator.allocated, allocator.peak
    (0, 1024)
    """

    __slots__ = (
        "_end",
        "_gaps",
        "_large",
        "_small",
        "allocated",
        "limit",
        "most_reserved",
        "peak",
        "reserved",
        "retries",
    )

    def __init__(self, limit: Limit | None = None) -> None:
        self.limit = limit
        """What the device has; None if that does not matter."""
        self.allocated = 0
        """Bytes in use, rounding and what could not be split off included."""
        self.peak = 0
        """The most that was in use."""
        self.reserved = self.most_reserved = 0
        """Bytes of all segments, and the most that there were."""
        self.retries = 0
        """How often segments were given back to make room."""
        self._end = 0
        self._gaps: list[tuple[int, int]] = []
        """Start and size of addresses below the end that no segment has."""
        self._small: _Pool = []
        self._large: _Pool = []

    def allocate(self, size: int) -> Block:
        """A block of at least ``size`` bytes; LimitError if the device has no memory for it."""
        size = (size + ROUND - 1) // ROUND * ROUND or ROUND
        small = size <= SMALL_REQUEST
        pool = self._small if small else self._large
        place = bisect_left(pool, (size,))
        block = pool.pop(place)[2] if place < len(pool) else self._new_segment(size, small)
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL_REQUEST:
            remaining = Block(block.start + size, rest, small)
            following = block.following
            remaining.preceding, remaining.following, remaining.free = block, following, True
            if following is not None:
                following.preceding = remaining
            block.following, block.size = remaining, size
            insort(pool, (rest, remaining.start, remaining))
        block.free = False
        self.allocated += block.size
        if self.allocated > self.peak:
            self.peak = self.allocated
        return block

    def release(self, block: Block) -> None:
        """The block is no longer used."""
        self.allocated -= block.size
        pool = self._small if block.small else self._large
        preceding, following = block.preceding, block.following
        if preceding is not None and preceding.free:
            del pool[bisect_left(pool, (preceding.size, preceding.start))]
            block.start = preceding.start
            block.size += preceding.size
            block.preceding = preceding.preceding
            if block.preceding is not None:
                block.preceding.following = block
        if following is not None and following.free:
            del pool[bisect_left(pool, (following.size, following.start))]
            block.size += following.size
            block.following = following.following
            if block.following is not None:
                block.following.preceding = block
        block.free = True
        insort(pool, (block.size, block.start, block))

    def _new_segment(self, size: int, small: bool) -> Block:
        if small:
            segment = SMALL_SEGMENT
        elif size < MIDDLE_REQUEST:
            segment = MIDDLE_SEGMENT
        else:
            segment = (size + LARGE_ROUND - 1) // LARGE_ROUND * LARGE_ROUND
        limit = self.limit
        if limit is not None and self.reserved + segment > limit.bytes:
            if limit.gives_back:
                self._give_back()
            if self.reserved + segment > limit.bytes:
                raise LimitError
        # Segments do not know their neighbours: a block never grows beyond its own.
        block = Block(self._take_addresses(segment), segment, small)
        self.reserved += segment
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def _give_back(self) -> None:
        """Return the segments that are wholly free to the device."""
        self.retries += 1
        for pool in (self._small, self._large):
            whole = [one for one in pool if one[2].preceding is None and one[2].following is None]
            self.reserved -= sum(size for size, _, _ in whole)
            pool[:] = [one for one in pool if one not in whole]
            self._gaps += [(start, size) for size, start, _ in whole]
        joined: list[tuple[int, int]] = []
        for start, size in sorted(self._gaps):
            if joined and sum(joined[-1]) == start:
                start, size = joined[-1][0], joined.pop()[1] + size
            joined.append((start, size))
        self._gaps = joined

    def _take_addresses(self, size: int) -> int:
        for place, (start, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[place : place + 1] = [(start + size, room - size)] if room > size else []
                return start
        if self._gaps and sum(self._gaps[-1]) == self._end:
            self._end = self._gaps.pop()[0]
        start, self._end = self._end, self._end + size
        return start
