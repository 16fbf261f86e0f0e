"""What simulations keep for the next ones: a planner simulates many Policies of one Trace.

A process that trains has no use for it once its plan is made, and clears it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

__all__ = ["Cache", "caches", "clear_caches"]

Value = TypeVar("Value")

_caches: list[Cache[Any]] = []


class Cache(Generic[Value]):
    """Values by key, of which the oldest give way to new ones."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.values: dict[Hashable, Value] = {}
        _caches.append(self)

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made if it is not there."""
        if key not in self.values:
            if len(self.values) >= self.most:
                del self.values[next(iter(self.values))]
            self.values[key] = make()
        return self.values[key]


def caches() -> tuple[Cache[Any], ...]:
    """All of this process."""
    return tuple(_caches)


def clear_caches() -> None:
    """Clear all of this process."""
    for cache in caches():
        cache.values.clear()
