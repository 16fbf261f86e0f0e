"""What simulations keep for the ones that follow: many Policies of one Trace are simulated.

A process that trains has no use for it once its plan is made, and gives it back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

__all__ = ["Kept", "forget_simulations"]

Value = TypeVar("Value")

_all: list[Kept[Any]] = []


class Kept(Generic[Value]):
    """Values by key, of which the oldest give way to new ones."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.values: dict[Hashable, Value] = {}
        _all.append(self)

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made if it is not there."""
        found = self.values.get(key, _NOTHING)
        if found is not _NOTHING:
            return found  # type: ignore[return-value]
        if len(self.values) >= self.most:
            del self.values[next(iter(self.values))]
        made = self.values[key] = make()
        return made


_NOTHING = object()


def forget_simulations() -> None:
    """Give back what simulations in this process have kept."""
    for one in _all:
        one.values.clear()
