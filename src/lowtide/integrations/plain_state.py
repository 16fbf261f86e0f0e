"""What a framework's object counts while it trains: numbers, and containers of numbers, among its attributes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

__all__ = ["PlainState"]


class PlainState:
    """The plain attributes of some objects, to restore them where a micro-batch is retried.

    A trainer adds to such numbers while it computes a loss, as TRL's does to the number of tokens: a retry must not add
    to them twice.
    """

    def __init__(self, *owners: Any) -> None:
        self._values = [
            (owner, {name: deepcopy(value) for name, value in vars(owner).items() if _is_plain(value)})
            for owner in owners
        ]

    def restore(self) -> None:
        """Restore them; may be called several times."""
        for owner, values in self._values:
            vars(owner).update(deepcopy(values))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and _is_plain(one) for key, one in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float)
