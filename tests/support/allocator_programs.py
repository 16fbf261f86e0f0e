"""Requests and releases, as simulated allocators are given them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

if TYPE_CHECKING:
    from lowtide.planner.allocator import Allocator, Block
    from lowtide.planner.expandable import ExpandableAllocator

__all__ = ["MIB", "programs", "run"]

MIB = 1 << 20

_sizes = st.one_of(st.integers(0, 4096), st.integers(1, 3 * MIB), st.integers(8 * MIB, 40 * MIB))
programs = st.lists(st.one_of(_sizes, st.integers(-40, -1)), max_size=80)
"""What is allocated, and, below zero, how far back the one is that is released."""


def run(program: list[int], allocator: Allocator | ExpandableAllocator) -> list[Block]:
    """Carry out a program; what is allocated at its end."""
    live: list[Block] = []
    for step in program:
        if step >= 0:
            live.append(allocator.allocate(step))
        elif live:
            allocator.release(live.pop(step % len(live)))
    return live
