"""Stand around the ``forward`` of modules, and put back what was there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

__all__ = ["Function", "Wrappers", "around"]

Function = Callable[..., Any]


class Wrappers:
    """The ``forward`` of modules, replaced; ``remove`` puts back what was there."""

    def __init__(self) -> None:
        self.before: dict[tuple[nn.Module, str], Function | None] = {}

    def wrap(self, module: nn.Module, make: Callable[[Function], Function], attribute: str = "forward") -> None:
        """Replace the module's ``forward``, or another function of it, by what ``make`` makes of it."""
        forward = vars(module).get(attribute)
        self.before.setdefault((module, attribute), forward)
        wrapped = _Forward(make(getattr(module, attribute)))
        wrapped.module, wrapped.before = module, forward
        setattr(module, attribute, wrapped)

    def remove(self) -> None:
        """Leave the modules as they were."""
        for (module, attribute), forward in self.before.items():
            if forward is not None:
                setattr(module, attribute, forward)
            elif attribute in vars(module):
                delattr(module, attribute)
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


def around(module: nn.Module, before: Function, after: Function) -> list[Any]:
    """Call ``before`` when a call of the module begins and ``after`` when it ends, outside all of its other hooks.

    What is returned is to be removed in the end.
    """
    return [
        module.register_forward_pre_hook(_Hook(before), prepend=True),
        module.register_forward_hook(_Hook(after), always_call=True),
    ]


class _Hook(partial):  # type: ignore[type-arg]
    """A module's hook. A copied or pickled module gets one that does nothing."""

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def _same(forward: Function) -> Function:
    return forward
