"""Which operator of a layer is running: tracks the calls of leaf modules and of torch functions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowtide._torch_private.collectives import is_collective
from lowtide._torch_private.modes import remove_function_mode
from lowtide._torch_private.operators import tree_leaves, tree_map
from lowtide.operators.wrappers import Function, Wrappers

__all__ = ["CallListener", "CallTracker", "Site", "collapse", "function_name", "mapped", "numbered", "tensors_of"]


class Site(NamedTuple):
    """Where in a layer an operator is called, so that the same call is found in the next run."""

    module: str
    """The path of the leaf module, or of the innermost module that calls the function."""
    function: Any = None
    """The torch function; None for a call of a leaf module."""
    turn: int = 0
    """Which call of the function it is while that module runs, calls inside its children included."""


class CallListener(Protocol):
    """Notified of every call of an operator while a layer runs."""

    def layer_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The layer is about to run."""

    def call_begins(self, name: str, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator is about to run."""

    def call_ends(self, output: Any) -> None:
        """The operator has run."""

    def collective_begins(self, name: str) -> None:
        """A functional collective is about to be issued, as the operator of that name or inside of it."""

    def layer_ends(self, *, completed: bool) -> None:
        """The layer has run, or raised."""


class CallTracker:
    """Tracks a layer's modules, with a function mode while it runs, and notifies a listener of every operator.

    It wraps each module's ``forward``, as the runtime does later: inside the module's own hooks, such as those that
    gather sharded parameters or redistribute inputs.

    A leaf module's call is one operator, whatever it calls inside. A torch function called directly in the forward of
    another module is one too, named after the innermost module. The second call of a name is ``name_1``.
    """

    def __init__(
        self, layer: nn.Module, listener: CallListener, before_function: Callable[[], None] = lambda: None
    ) -> None:
        """``before_function`` is called before every torch function, also those inside of operators; it may raise."""
        self.layer, self.listener, self.before_function = layer, listener, before_function
        self.names = {module: name for name, module in layer.named_modules()}
        self.paths = {module: collapse(name) for module, name in self.names.items()}
        self.leaves = {module for module in self.paths if next(module.children(), None) is None}
        self.stack: list[nn.Module] = []
        self.turns: list[dict[Any, int]] = []
        self.counts: dict[str, int] = {}
        self.running: object = None
        self.name = ""
        """The operator that runs, while ``running`` is not None."""
        self.paused = False
        """Whether another tracker's module runs, whose calls are neither reported nor counted."""
        self.mode: _Functions | None = None
        self.thread = 0
        """The thread whose run is tracked."""
        self.begun = False
        """Whether the listener was notified that the layer begins, and not yet that it ends."""
        self.wrappers = Wrappers()

    def attach(self) -> None:
        """Wrap the layer's modules."""
        for module in self.paths:
            self.wrappers.wrap(module, partial(self.tracked, module))

    def detach(self) -> None:
        """Unwrap the layer's modules, also if the last run was interrupted."""
        self.wrappers.remove()
        if self.begun and not self.stack:
            self.end()

    def tracked(self, module: nn.Module, forward: Function) -> Function:
        """The forward of a module, tracked."""

        def tracked(*args: Any, **kwargs: Any) -> Any:
            # Called from outside the layer, or on another thread than the tracked run.
            if self.paused or (self.thread != get_ident() if self.stack else module is not self.layer):
                return forward(*args, **kwargs)
            if not self.stack and not torch.is_grad_enabled():  # nothing is saved, and some layers do not allow modes
                return forward(*args, **kwargs)
            depth, output, completed = len(self.stack), None, False
            try:
                self._enter(module, args, kwargs)
                output = forward(*args, **kwargs)
                completed = True
                return output
            finally:
                try:
                    self._leave(depth, output, completed)
                except BaseException:  # interrupted: finish what is left
                    self._leave(depth, output, False)
                    raise

        return tracked

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.stack:
            self.counts.clear()
            self.begun = True
            self.listener.layer_begins(args, kwargs)  # it may raise
            self.thread = get_ident()
            self.mode = _Functions(self)
            self.mode.__enter__()
        self.stack.append(module)
        self.turns.append({})
        if module in self.leaves and self.running is None:
            self.running = module
            self.name = numbered(self.paths[module], self.counts)
            self.listener.call_begins(self.name, Site(self.names[module]), args, kwargs)

    def _leave(self, depth: int, output: Any, completed: bool) -> None:
        """The module that was entered at ``depth`` has run, or raised, maybe before it was fully entered."""
        running = self.running
        if running is not None and (depth == 0 or running in self.stack[depth:]):
            self.running = None
            self.listener.call_ends(output)
        del self.stack[depth:]
        del self.turns[depth:]
        if depth == 0:
            self.end(completed=completed)

    def end(self, *, completed: bool = False) -> None:
        """Take off the mode of a run; no-op if none is on."""
        if self.mode is not None:
            remove_function_mode(self.mode)
            self.mode = None
        self.running = None
        self.stack.clear()
        self.turns.clear()
        if self.begun:
            self.listener.layer_ends(completed=completed)  # called again, if this is interrupted
            self.begun = False

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function, as an operator if it is one."""
        if self.paused:
            return func(*args, **kwargs)
        self.before_function()
        for turns in self.turns:
            turns[func] = turns.get(func, -1) + 1
        name = function_name(func)
        if self.running is not None or name is None or not self.stack:
            if self.running is not None and is_collective(func):
                self.listener.collective_begins(self.name)
            return func(*args, **kwargs)
        path = self.paths[self.stack[-1]]
        self.running = func
        site = Site(self.names[self.stack[-1]], func, self.turns[-1][func])
        self.name = numbered(f"{path}.{name}" if path else name, self.counts)
        self.listener.call_begins(self.name, site, args, kwargs)
        if is_collective(func):
            self.listener.collective_begins(self.name)
        output = None
        try:
            output = func(*args, **kwargs)
            return output
        finally:
            self.running = None
            self.listener.call_ends(output)


class _Functions(TorchFunctionMode):
    """Hands every torch function to the tracker."""

    def __init__(self, tracker: CallTracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracker.function(func, args, kwargs or {})


_SKIPPED = {"__get__", "__set__", "__len__", "__bool__", "size", "dim", "stride", "numel", "is_floating_point", "item"}
_REFLECTED = {"add", "sub", "mul", "truediv", "floordiv", "pow", "matmul", "mod"}


def function_name(func: Any) -> str | None:
    """The name users know a function by: ``mul`` for ``Tensor.__mul__``; None for what computes nothing."""
    name = getattr(func, "__name__", "")
    if name in _SKIPPED or not name:
        return None
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        name = name[1:] if name.startswith("r") and name[1:] in _REFLECTED else name
    return name.rstrip("_") or name


def numbered(name: str, counts: dict[str, int]) -> str:
    """The name of the next call of an operator; ``counts`` has how many there were. Experts in a loop are one.

    >>> counts: dict[str, int] = {}
    >>> [numbered("mul", counts), numbered("mul", counts)]
    ['mul', 'mul_1']
    """
    count = counts.get(name, 0)
    counts[name] = count + 1
    return f"{name}_{count}" if count and "[*]" not in name else name


def collapse(name: str) -> str:
    """Write a module's path as operators have it: a loop over experts is one operator.

    >>> collapse("experts.3.up")
    'experts[*].up'
    """
    parts: list[str] = []
    for part in name.split("."):
        if part.isdigit() and parts:
            parts[-1] += "[*]"
        else:
            parts.append(part)
    return ".".join(parts)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and mappings, in order."""
    found: list[Tensor] = []
    _gather(value, found)
    return found


_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})


def _gather(value: Any, found: list[Tensor]) -> None:
    # torch's own tree walk takes several microseconds, and this runs at every call of an operator
    kind = type(value)
    if kind in _ATOMS:
        return
    if isinstance(value, Tensor):
        found.append(value)
    elif kind is tuple or kind is list:
        for item in value:
            _gather(item, found)
    elif kind is dict:
        for item in value.values():
            _gather(item, found)
    else:
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def mapped(value: Any, leaf: Callable[[Any], Any], leaves: Collection[type]) -> Any:
    """The same nesting of tuples, lists and mappings, with ``leaf(value)`` for each value of a class in ``leaves``."""
    kind = type(value)
    if kind in leaves:
        return leaf(value)
    if kind in _ATOMS:
        return value
    if kind is tuple:
        return tuple([mapped(item, leaf, leaves) for item in value])
    if kind is list:
        return [mapped(item, leaf, leaves) for item in value]
    if kind is dict:
        return {key: mapped(item, leaf, leaves) for key, item in value.items()} if value else value
    return tree_map(leaf, value)
