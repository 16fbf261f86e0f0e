"""Replace the ``forward`` of modules, and put back what was there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

__all__ = ["Function", "Wrappers"]

Function = Callable[..., Any]


class Wrappers:
    """The ``forward`` of modules, replaced; ``remove`` puts back what was there."""

    def __init__(self) -> None:
        self.before: dict[nn.Module, Function | None] = {}

    def wrap(self, module: nn.Module, make: Callable[[Function], Function]) -> None:
        """Replace the module's ``forward`` by what ``make`` makes of it."""
        forward = vars(module).get("forward")
        self.before.setdefault(module, forward)
        wrapped = _Forward(make(module.forward))
        wrapped.module, wrapped.before = module, forward
        module.forward = wrapped

    def remove(self) -> None:
        """Leave the modules as they were."""
        for module, forward in self.before.items():
            if forward is not None:
                module.forward = forward
            elif "forward" in vars(module):
                del module.forward
        self.before.clear()


class _Forward(partial):  # type: ignore[type-arg]
    """A replaced ``forward``. A copied or pickled module gets the one that was there before.

    A function would be taken over as it is: the copy would run on the parameters of the original.
    """

    module: nn.Module
    before: Function | None

    def __reduce__(self) -> Any:
        # The module itself is being copied, and its copy has no `forward` of its own yet: this finds its class's.
        return (getattr, (self.module, "forward")) if self.before is None else (_same, (self.before,))


def _same(forward: Function) -> Function:
    return forward
