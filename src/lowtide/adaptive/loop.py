"""Where the steps of a training loop begin and end that somebody else runs.

[Note: steps of somebody's own loop]
A step begins when a part of the model is called with gradients, and ends when every optimizer has stepped, or one of
them twice, which the loop does not let all of them step. What is around a step is on from its beginning to its end, and
not while the loop loads data, evaluates or saves.

The hooks stay on the optimizers until the run is removed. To replace an optimizer's ``step`` instead would hide it from
learning-rate schedulers, and frameworks put the old one back. A step ends inside a hook, while the optimizer goes
through all of them, so whoever is around a step must not have hooks of its own there: it is told from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.optim import Optimizer

from lowtide.operators.wrappers import Hook, take_back

__all__ = ["Listener", "Loop", "unwrapped"]


class Listener(Protocol):
    """Who is told."""

    def model_begins(self) -> None:
        """A part of the model is called, with gradients."""

    def optimizer_begins(self) -> None:
        """An optimizer's step begins."""

    def optimizer_ends(self) -> None:
        """An optimizer's step has ended."""

    def optimizers_ended(self) -> None:
        """Every optimizer has stepped, or one of them twice."""


class Loop:
    """Tells of a model's calls and its optimizers' steps. See [Note: steps of somebody's own loop]."""

    def __init__(self, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer], listener: Listener) -> None:
        self.listener, self.optimizers = listener, optimizers
        self.stepped: set[int] = set()
        """The optimizers that have, since all had."""
        self.hooks: list[Any] = []
        for part in parts:
            self.hooks.append(part.register_forward_pre_hook(Hook(self._model_begins), prepend=True))
        for optimizer in optimizers:
            self.hooks.append(optimizer.register_step_pre_hook(self._optimizer_begins))
            self.hooks.append(optimizer.register_step_post_hook(self._optimizer_ends))

    def remove(self) -> None:
        """Tell no more."""
        take_back(hook.remove for hook in self.hooks)

    def _model_begins(self, part: nn.Module, args: Any) -> None:
        # Gradients that are carried forward are computed otherwise under a mode, and the loop does not train with them.
        if torch.is_grad_enabled() and forward_ad._current_level < 0:
            self.listener.model_begins()

    def _optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.listener.optimizer_begins()

    def _optimizer_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.listener.optimizer_ends()
        again = id(optimizer) in self.stepped
        self.stepped.add(id(optimizer))
        if again or len(self.stepped) == len(self.optimizers):
            self.stepped = set()
            self.listener.optimizers_ended()


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer itself, where a framework has put another one around it, as accelerate and Lightning do."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    found: Optimizer = optimizer
    return found
