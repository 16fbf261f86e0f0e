"""Wrap the ``forward`` of modules, and unwrap it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from typing import Any

from torch import nn

__all__ = ["Function", "Hook", "Wrappers", "around", "take_back"]

Function = Callable[..., Any]


class Wrappers:
    """Wraps the ``forward`` of modules; ``remove`` unwraps it, and keeps wrappers that other code has added."""

    def __init__(self) -> None:
        self.made: list[_Forward] = []

    def wrap(self, module: nn.Module, make: Callable[[Function], Function], attribute: str = "forward") -> None:
        """Replace the module's ``forward``, or another function of it, by what ``make`` makes of it.

        It keeps its name and signature: other code inspects the names of its arguments.
        """
        inner = getattr(module, attribute)
        wrapped = _Forward(make(inner))
        update_wrapper(wrapped, inner, updated=())
        wrapped.module, wrapped.attribute, wrapped.inner, wrapped.make = module, attribute, inner, make
        wrapped.before = vars(module).get(attribute)
        self.made.append(wrapped)  # first: an interrupt must not leave a wrapper that remove() does not know
        if _STATE not in vars(module):
            vars(module)[_STATE] = _State(module)
        setattr(module, attribute, wrapped)

    def around(self, module: nn.Module, forward: Function) -> Function:
        """What these wrappers make of a module's ``forward``, for a call that has passed by them already."""
        for wrapped in self.made:
            if wrapped.module is module and wrapped.attribute == "forward":
                forward = wrapped.make(forward)
        return forward

    def remove(self) -> None:
        """Restore the modules."""
        while self.made:
            self.made[-1].remove()
            self.made.pop()


_STATE = "__getstate__"


class _State:
    """The state of a module for a copy or a pickle: without our wrappers.

    A shallow copy shares the module's attributes, and with our ``forward`` would run on the original's parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> Any:
        module = self.module
        state = type(module).__getstate__(module)
        if not isinstance(state, dict):
            return state
        found = {}
        for name, value in state.items():
            while isinstance(value, _Forward):
                value = value.before
            if value is not None or state[name] is None:
                found[name] = value
        found.pop(_STATE, None)
        return found


class _Forward(partial):  # type: ignore[type-arg]
    """A wrapped ``forward``. A copied or pickled module gets the one that was there before.

    A plain function would be shared by the copy, which would then run on the parameters of the original.
    """

    module: nn.Module
    attribute: str
    inner: Function
    """What it wraps."""
    make: Callable[[Function], Function]
    before: Function | None
    """The module's own attribute before; None if it used its class's."""
    removed = False

    def remove(self) -> None:
        """Unwrap the module, or, where other code has wrapped this wrapper, only forward its arguments."""
        self.removed = True
        own = vars(self.module)
        if own.get(self.attribute) is self:
            before = self.before
            while isinstance(before, _Forward) and before.removed:
                before = before.before
            if before is not None:
                setattr(self.module, self.attribute, before)
            else:
                delattr(self.module, self.attribute)
        else:
            self.__setstate__((self.inner, (), {}, vars(self)))  # type: ignore[attr-defined]
        if not any(isinstance(value, _Forward) for value in own.values()) and isinstance(own.get(_STATE), _State):
            del own[_STATE]

    def __reduce__(self) -> Any:
        # The module itself is being copied, and its copy has no `forward` of its own yet: this returns its class's.
        return (getattr, (self.module, "forward")) if self.before is None else (_same, (self.before,))


def take_back(steps: Iterable[Callable[[], object]]) -> None:
    """Call all of these, the last one first, even if an interrupt arrives: then one of them is called twice.

    >>> done = []
    >>> take_back([lambda: done.append(1), lambda: done.append(2)])
    >>> done
    [2, 1]
    """
    waiting = list(steps)
    try:
        _call_all(waiting)
    except BaseException:
        _call_all(waiting)
        raise


def _call_all(waiting: list[Callable[[], object]]) -> None:
    while waiting:
        waiting[-1]()
        waiting.pop()


def around(module: nn.Module, before: Function, after: Function) -> list[Any]:
    """Call ``before`` when a call of the module begins and ``after`` when it ends, outside all of its other hooks.

    Returns the hooks' handles.
    """
    return [
        module.register_forward_pre_hook(Hook(before), prepend=True),
        module.register_forward_hook(Hook(after), always_call=True),
    ]


class Hook(partial):  # type: ignore[type-arg]
    """A module's hook. A copied or pickled module gets one that does nothing."""

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def _same(forward: Function) -> Function:
    return forward
