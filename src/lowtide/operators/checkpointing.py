"""Gradient checkpointing that a model brings along: found, and turned off while lowtide decides.

A checkpoint around a layer recomputes all of it, whatever lowtide decides, and hides what the layer saves. Known are
the flags of transformers, diffusers and timm, and torch's two ways of checkpointing a module for good. A model whose
own code calls ``torch.utils.checkpoint`` is found only when it runs: see [Note: other code's hooks].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from lowtide._torch_private.checkpointing import CHECKPOINT_FUNCTION, composable_state, is_checkpoint_wrapper
from lowtide.operators.layers import Layers

__all__ = ["Checkpointing", "checkpointing_off"]

FLAGS = ("gradient_checkpointing", "grad_checkpointing")
"""Attributes of modules that checkpoint themselves or what they hold if they are True."""


class _Switch(NamedTuple):
    """By which one module's checkpointing is turned on and off."""

    module: nn.Module
    holder: Any
    attribute: str
    on: Any
    off: Any


class Checkpointing:
    """The gradient checkpointing of some layers, of what is in them and of what holds them; not of other layers."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        path = layers.path.split(".") if layers.path else []
        holders = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]
        self._holders, self._layers = holders, layers.modules
        self._off: list[_Switch] = []
        """Those that were on and are off now."""

    def find(self) -> str:
        """The modules that are checkpointed now, for a message: ``4 LlamaDecoderLayer``; empty if there are none."""
        return _described(self._switches())

    def turn_off(self) -> str:
        """Turn it off; the modules that were checkpointed, as :meth:`find` says it."""
        switches = self._switches()
        for switch in switches:
            setattr(switch.holder, switch.attribute, switch.off)
        self._off += switches
        return _described(switches)

    def restore(self) -> None:
        """Turn it on again where :meth:`turn_off` turned it off, unless other code has changed it since."""
        for switch in self._off:
            if getattr(switch.holder, switch.attribute) is switch.off:
                setattr(switch.holder, switch.attribute, switch.on)
        self._off.clear()

    def _switches(self) -> list[_Switch]:
        modules = [*self._holders, *(module for layer in self._layers for module in layer.modules())]
        unique = {id(module): module for module in modules}.values()
        return [switch for module in unique if (switch := _switch(module)) is not None]


@contextmanager
def checkpointing_off(model: nn.Module, layers: Layers) -> Iterator[str]:
    """Turn the gradient checkpointing of layers off inside; given is which modules had it."""
    checkpointing = Checkpointing(model, layers)
    try:
        yield checkpointing.turn_off()
    finally:
        checkpointing.restore()


def _described(switches: list[_Switch]) -> str:
    counts = Counter(type(switch.module).__name__ for switch in switches)
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _switch(module: nn.Module) -> _Switch | None:
    for flag in FLAGS:
        if getattr(module, flag, None) is True:
            return _Switch(module, module, flag, True, False)
    if is_checkpoint_wrapper(module):
        function = getattr(module, CHECKPOINT_FUNCTION)
        return None if function is _plainly else _Switch(module, module, CHECKPOINT_FUNCTION, function, _plainly)
    state = composable_state(module)
    if state is not None and state.enable_hook:
        return _Switch(module, state, "enable_hook", True, False)
    return None


def _plainly(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of a checkpoint function."""
    return module(*args, **kwargs)
