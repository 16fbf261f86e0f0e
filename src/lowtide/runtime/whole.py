"""A layer that is recomputed as a whole: torch's checkpoint runs it again in backward, and here it runs as it did.

[Note: what a replay finds]
Torch's checkpoint repeats a layer with its tensors, torch's random numbers and autocast. All else is up to it here:

- arguments that can change, such as lists or a cache of keys and values, are copied (:mod:`lowtide.runtime.arguments`);
- the layer's buffers are copied, and a replay writes into copies, so that running statistics are updated once;
- its modules' attributes and parameters are as they were, or the replay is refused;
- random numbers of Python, numpy, other devices and of generators that the layer holds are drawn again;
- torch's settings are as they were (:mod:`lowtide.runtime.ambient`).

What a layer reads elsewhere than :mod:`lowtide.runtime.outside` looks cannot be known.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from lowtide._torch_private.compiled import is_dynamo_compiling
from lowtide.operators.calls import tensors_of
from lowtide.operators.wrappers import Function, take_back
from lowtide.runtime.ambient import ambient, precision, restored
from lowtide.runtime.arguments import Copied, is_shared
from lowtide.runtime.module_state import Attributes, BufferCopies, ModuleStates, modules_of
from lowtide.runtime.outside import Outside
from lowtide.runtime.randomness import HostRandom, RandomState, is_accelerator_used
from lowtide.runtime.refuse import is_left_alone

__all__ = ["WholeLayer"]

_CALL = "lowtide_call"
"""The keyword by which a call is taken along to where it is replayed."""


class WholeLayer:
    """What has to be known of a layer so that its calls can be replayed."""

    def __init__(self, layer: nn.Module, whose: str) -> None:
        self.layer, self.whose = layer, whose
        self.buffers, self.outside = BufferCopies(), Outside()
        self.attributes: Attributes | None = None
        """Of its modules, when it was last called; hardly ever have they changed since."""

    def around(self, whole: Function, plain: Function) -> Function:
        """The layer, recomputed as a whole; ``whole`` runs, first and again, what :meth:`repeated` gave.

        ``plain`` is the layer as it is.
        """

        def captured(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not torch.is_grad_enabled():
                return whole(*args, **kwargs)
            if is_left_alone():
                return plain(*args, **kwargs)
            call = _Call(self, args, kwargs)
            return whole(*call.args, **call.kwargs, **{_CALL: call})

        return captured

    def repeated(self, again: Function) -> Function:
        """The layer's forward, as it runs first and again in backward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            call: _Call | None = kwargs.pop(_CALL, None)
            if call is None:
                return again(*args, **kwargs)
            if not call.ran:
                args, kwargs = call.begin(args, kwargs)
                return again(*args, **kwargs)
            # Hardly ever by contexts: torch's checkpoint ends this by an exception, and contexts that are functions
            # take ten times as long then.
            undo = call.put_back()
            try:
                args, kwargs = call.given_again(args, kwargs)
                return again(*args, **kwargs)
            finally:
                take_back(undo)

        return run


class _Argument:
    """Takes the place of an argument that can change."""

    __slots__ = ("copied", "original")

    def __init__(self, original: Any, copied: Copied) -> None:
        self.original, self.copied = original, copied


class _Call:
    """One call of a layer. See [Note: what a replay finds]."""

    __slots__ = ("ambient", "args", "buffers", "host", "kwargs", "modules", "ran", "random", "whose")

    def __init__(self, whole: WholeLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.whose, self.ran = whole.whose, False
        attributes = whole.attributes
        if attributes is None or not attributes.unchanged():
            attributes = whole.attributes = Attributes(modules_of(whole.layer), whole.outside)
        self.args = tuple([_held(value) for value in args])
        self.kwargs = {name: _held(value) for name, value in kwargs.items()}
        self.modules = ModuleStates(attributes)
        self.buffers = whole.buffers.take(attributes.modules)
        # The checkpoint sees to the host's, and to those of the devices that positional arguments are on.
        on_device = any(isinstance(value, torch.Tensor) and not value.is_cpu for value in args)
        more = attributes.generators or (is_accelerator_used() and not on_device)
        self.random = RandomState(tensors_of((args, kwargs)), attributes.generators) if more else None
        self.host = HostRandom()
        self.ambient = ambient(precision())

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the first run. From then on only their copies are held."""
        self.ran = True
        given = tuple([_original(value) for value in args]), {name: _original(value) for name, value in kwargs.items()}
        self.args, self.kwargs = (), {}  # the checkpoint has the same, for the replay
        return given

    def given_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a replay."""
        whose = self.whose
        return (
            tuple([value.copied.again(whose) if type(value) is _Argument else value for value in args]),
            {name: value.copied.again(whose) if type(value) is _Argument else value for name, value in kwargs.items()},
        )

    def put_back(self) -> list[Callable[[], object]]:
        """Let everything be as it was; what undoes that."""
        undo: list[Callable[[], object]] = []
        try:
            undo.append(self.modules.put_back(self.whose))
            now = HostRandom()
            undo.append(now.set)
            self.host.set()
            if self.random is not None:
                undo.append(self.random.put_back())
            if contexts := restored(self.ambient):
                undo.append(_entered(contexts))
            if self.buffers:
                undo.append(_entered([BufferCopies.restored(self.buffers)]))
        except BaseException:
            take_back(undo)
            raise
        return undo


def _entered(contexts: list[AbstractContextManager[None]]) -> Callable[[], object]:
    """Enter them; what leaves them."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return stack.pop_all().close


def _held(value: Any) -> Any:
    """What the checkpoint holds in place of an argument: itself, unless it can change."""
    if value is None or isinstance(value, torch.Tensor) or is_shared(value):
        return value
    copied = Copied(value)
    return value if copied.fixed and not copied.tensors else _Argument(value, copied)


def _original(value: Any) -> Any:
    if type(value) is not _Argument:
        return value
    original, value.original = value.original, None
    return original
