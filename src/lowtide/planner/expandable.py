"""The caching allocator with ``expandable_segments:True``, for memory that is only imagined.

There is one segment for small requests and one for large ones, each a range of addresses without an end. Memory is put
behind the addresses in pages, of 2 MiB and of 20 MiB, where a request needs it: a free block at the end of what has
memory grows by what is missing. So what is reserved is what is in use at most, the holes between blocks, and less than
a page. What is left of a block is split off if it is at least 512 bytes, also of a large one. The block at the end is
taken only if no other is large enough, since it can grow.

Before the device is out of memory, every page that lies in free blocks is given back, and the addresses stay: they are
a block without memory, which a later request may fill again.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from lowtide.planner.allocator import MIDDLE_SEGMENT, ROUND, SMALL_REQUEST, SMALL_SEGMENT, Block, Limit, LimitError

__all__ = ["ExpandableAllocator"]

ENDLESS = 1 << 60
"""Bytes of addresses: more than any device has."""


class ExpandableAllocator:
    """The memory of one device; as :class:`~lowtide.planner.allocator.Allocator`, with segments that grow.

    >>> allocator = ExpandableAllocator()
    >>> blocks = [allocator.allocate(15 << 20), allocator.allocate(15 << 20)]
    >>> allocator.allocated >> 20, allocator.reserved >> 20
    (30, 40)
    """

    __slots__ = ("_large", "_small", "allocated", "limit", "most_reserved", "peak", "reserved", "retries")

    def __init__(self, limit: Limit | None = None) -> None:
        self.limit = limit
        """What the device has; None if that does not matter."""
        self.allocated = self.peak = 0
        """Bytes in use, rounding included, and the most that were."""
        self.reserved = self.most_reserved = 0
        """Bytes of all pages, and the most that there were."""
        self.retries = 0
        """How often pages were given back to make room."""
        self._small = _Segment(SMALL_SEGMENT, small=True)
        self._large = _Segment(MIDDLE_SEGMENT, small=False)

    def allocate(self, size: int) -> Block:
        """A block of at least ``size`` bytes; LimitError if the device has no memory for it."""
        size = (size + ROUND - 1) // ROUND * ROUND or ROUND
        segment = self._small if size <= SMALL_REQUEST else self._large
        block = segment.best(size)
        if block is None:
            block = self._grow(segment, size)
        segment.take(block, size)
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """The block is no longer used."""
        self.allocated -= block.size
        block.free = True
        (self._small if block.small else self._large).add(block)

    def _grow(self, segment: _Segment, size: int) -> Block:
        """A free block of at least ``size`` bytes, by memory behind more addresses."""
        block = self._mapped(segment, size)
        if block is None and self.limit is not None and self.limit.gives_back:
            self.retries += 1
            self.reserved -= self._small.give_back() + self._large.give_back()
            block = segment.best(size) or self._mapped(segment, size)
        if block is None:
            raise LimitError
        return block

    def _mapped(self, segment: _Segment, size: int) -> Block | None:
        """The same, unless the device has too little."""
        block = segment.room(size)
        while block.size < size or not block.mapped:
            empty = block
            if block.mapped:
                assert block.following is not None
                empty = block.following
            missing = size if empty is block else size - block.size
            pages = min(empty.size, -(-missing // segment.page) * segment.page)
            if self.limit is not None and self.reserved + pages > self.limit.bytes:
                return None
            self.reserved += pages
            self.most_reserved = max(self.most_reserved, self.reserved)
            block = segment.fill(empty, pages)
        return block


class _Segment:
    """A range of addresses, cut into blocks that are in use, free, or without memory."""

    def __init__(self, page: int, *, small: bool) -> None:
        self.page, self.small = page, small
        self.free: list[tuple[int, int, Block]] = []
        """Free blocks that have memory, by size and place."""
        empty = Block(0, ENDLESS, small)
        empty.free, empty.mapped = True, False
        self.empty: list[tuple[int, Block]] = [(0, empty)]
        """Blocks without memory, by place."""

    def best(self, size: int) -> Block | None:
        """The smallest free block that is large enough, where one that can grow counts as what it can grow to."""
        place = bisect_left(self.free, (size,))
        if place == len(self.free):
            return None
        while place + 1 < len(self.free) and _room(self.free[place + 1][2]) < _room(self.free[place][2]):
            place += 1
        return self.free[place][2]

    def room(self, size: int) -> Block:
        """Where the first blocks without memory lie that make up ``size`` with the free ones next to them."""
        for _, empty in self.empty:
            before = empty.preceding
            first = before if before is not None and before.free else empty
            here, found = first, 0
            while found < size and here.free:
                found += here.size
                if here.following is None:
                    break
                here = here.following
            if found >= size:
                return first
        raise LimitError  # there are more addresses than any device has memory

    def take(self, block: Block, size: int) -> None:
        """A free block is in use now; what it has more than ``size`` stays free, if it is enough for a block."""
        self._forget(block)
        block.free = False
        if block.size - size >= ROUND:
            rest = self._cut(block, size)
            rest.free = True
            insort(self.free, (rest.size, rest.start, rest))

    def add(self, block: Block) -> None:
        """A block is free, or has memory or none from now on: join it with neighbours that are the same."""
        for neighbour in (block.preceding, block.following):
            if neighbour is None or not neighbour.free or neighbour.mapped != block.mapped:
                continue
            self._forget(neighbour)
            block.start = min(block.start, neighbour.start)
            block.size += neighbour.size
            if neighbour is block.preceding:
                block.preceding = neighbour.preceding
                if block.preceding is not None:
                    block.preceding.following = block
            else:
                block.following = neighbour.following
                if block.following is not None:
                    block.following.preceding = block
        if block.mapped:
            insort(self.free, (block.size, block.start, block))
        else:
            insort(self.empty, (block.start, block), key=_start)

    def fill(self, empty: Block, size: int) -> Block:
        """Put memory behind the first ``size`` bytes of a block; the free block that they are in then."""
        self._forget(empty)
        if empty.size > size:
            rest = self._cut(empty, size)
            rest.free, rest.mapped = True, False
            insort(self.empty, (rest.start, rest), key=_start)
        empty.mapped = True
        self.add(empty)
        return empty

    def give_back(self) -> int:
        """Take the memory from all pages that lie in free blocks; how many bytes that are."""
        total = 0
        for _, _, block in list(self.free):
            begin = -(-block.start // self.page) * self.page
            end = (block.start + block.size) // self.page * self.page
            if end <= begin:
                continue
            total += end - begin
            self._forget(block)
            if block.start < begin:
                block, before = self._cut(block, begin - block.start), block
                insort(self.free, (before.size, before.start, before))
            if block.start + block.size > end:
                after = self._cut(block, end - block.start)
                after.free = True
                insort(self.free, (after.size, after.start, after))
            block.free, block.mapped = True, False
            self.add(block)
        return total

    def _cut(self, block: Block, size: int) -> Block:
        """Cut a block behind ``size`` bytes; what follows."""
        rest = Block(block.start + size, block.size - size, self.small)
        rest.preceding, rest.following = block, block.following
        if block.following is not None:
            block.following.preceding = rest
        block.following, block.size = rest, size
        return rest

    def _forget(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.start))]
        else:
            del self.empty[bisect_left(self.empty, block.start, key=_start)]


def _start(entry: tuple[int, Block]) -> int:
    return entry[0]


def _room(block: Block) -> int:
    """What a free block can grow to."""
    following = block.following
    return block.size + (following.size if following is not None and not following.mapped else 0)
