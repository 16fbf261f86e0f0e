"""Begin a step anew: what it was given, noted without copying what is large."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide._torch_private.generators import generator_key
from lowtide._torch_private.scaler import forget_unscaling
from lowtide._torch_private.subclasses import inner_tensor
from lowtide._torch_private.versions import version_of
from lowtide.adaptive.attributes import Attributes
from lowtide.errors import RescueError
from lowtide.runtime.randomness import ProcessRandom, RandomState

__all__ = ["Beginning", "Repeat"]


class Repeat(Exception):  # noqa: N818  nothing is wrong: a request, raised through the step that it ends
    """The step has to be begun anew."""


class _Gradient(NamedTuple):
    """A gradient that was there before the step."""

    reference: weakref.ReferenceType[Tensor]
    version: int


class _Optimizer(NamedTuple):
    """An optimizer as it was when its step began."""

    optimizer: torch.optim.Optimizer
    states: dict[Any, dict[Any, Any]]
    groups: list[dict[str, Any]]


class Beginning:
    """What a step began with: generators, parameters, gradients, buffers, attributes, and the optimizers' states."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        changing: frozenset[str] | None,
        drawn: Iterable[torch.Generator] = (),
    ) -> None:
        """``changing`` names the buffers that steps were seen to change; None: nothing was seen yet.

        ``drawn`` are generators of their own that steps were seen to draw from.
        """
        self.generators = ProcessRandom()
        self.own = {generator_key(one): (one, one.get_state()) for one in drawn}
        """Generators that the step may draw from beside those, and their states before it did."""
        self.drawn: set[int] = set()
        """Those that it was seen to draw from."""
        of_optimizers = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        parameters = {id(one): one for one in [*model.parameters(), *of_optimizers]}.values()
        self.parameters = [(parameter, version_of(parameter)) for parameter in parameters]
        self.gradients = [(parameter, _noted(parameter.grad)) for parameter in parameters]
        self.kept = [parameter for parameter, noted in self.gradients if noted is not None]
        """Parameters whose gradients the step was not yet seen to drop."""
        self.attributes = Attributes(model)
        self.places = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.buffers = {name: (buffer, version_of(buffer)) for name, buffer in model.named_buffers()}
        self.copies = {
            name: inner_tensor(buffer).detach().cpu().clone()
            for name, (buffer, _) in self.buffers.items()
            if changing is None or name in changing
        }
        self.states = [(optimizer, set(optimizer.state)) for optimizer in optimizers]
        self.begun: list[_Optimizer] = []

    # While the step runs.

    def drawn_from(self, generators: RandomState) -> None:
        """The step draws from generators, whose states are still those from before."""
        for one, state in generators.states:
            key = generator_key(one)
            self.own.setdefault(key, (one, state))
            self.drawn.add(key)

    def look_at_gradients(self) -> None:
        """See which gradients the step has dropped, as ``zero_grad()`` does; called where that is done by now."""
        self.kept = [parameter for parameter in self.kept if parameter.grad is not None]

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what an optimizer has apart from tensors that it writes into, such as a number of steps."""
        states = {parameter: dict(state) for parameter, state in optimizer.state.items() if isinstance(state, dict)}
        groups = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
        self.begun.append(_Optimizer(optimizer, states, groups))

    def changed(self, *, compared: bool) -> frozenset[str]:
        """The buffers that the step has changed.

        ``compared`` with their copies as well, which waits for the device: a batch norm changes its buffers and tells
        no one.
        """
        return frozenset(
            name
            for name, (buffer, version) in self.buffers.items()
            if version_of(buffer) != version
            or (compared and name in self.copies and not torch.equal(inner_tensor(buffer).cpu(), self.copies[name]))
        )

    # Afterwards.

    def restore(self, scalers: Iterable[torch.amp.GradScaler] = ()) -> None:
        """Set everything back; RescueError if something cannot be."""
        for parameter, version in self.parameters:
            if version_of(parameter) != version:
                raise RescueError(
                    f"the step cannot be repeated: it has changed a parameter of shape {tuple(parameter.shape)} before"
                    " it ran out of memory; begin again from the last checkpoint"
                )
        for one, state in self.own.values():
            one.set_state(state)
        self.generators.restore()
        self.attributes.restore()
        for module, name, buffer in self.places:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer  # the step had put another there
        for name, (buffer, version) in self.buffers.items():
            if name in self.copies:
                with torch.inference_mode() if buffer.is_inference() else torch.no_grad():
                    inner_tensor(buffer).copy_(self.copies[name])
            elif version_of(buffer) != version:
                raise RescueError(
                    f"the step cannot be repeated: it was the first to change the buffer {name!r}, of which there is no"
                    " copy; begin again from the last checkpoint"
                )
        self._restore_gradients()
        for optimizer, known in self.states:
            for begun in set(optimizer.state) - known:
                del optimizer.state[begun]  # begun, perhaps not finished; nothing was done with it yet
        for optimizer, states, groups in reversed(self.begun):
            for parameter, noted_state in states.items():
                optimizer.state[parameter].clear()
                optimizer.state[parameter].update(noted_state)
            for group, noted_group in zip(optimizer.param_groups, groups, strict=True):
                group.update(noted_group)
        self.begun.clear()
        forget_unscaling(scalers, (optimizer for optimizer, _ in self.states))

    def _restore_gradients(self) -> None:
        self.look_at_gradients()
        kept = {id(parameter) for parameter in self.kept}
        for parameter, noted in self.gradients:
            gradient = None if noted is None else noted.reference()
            added_to = noted is not None and gradient is not None and version_of(gradient) != noted.version
            if added_to or (noted is not None and gradient is None and id(parameter) in kept):
                raise RescueError(
                    "the step cannot be repeated: it has added to gradients that were there when it began; give the"
                    " whole step to run(), from zero_grad(set_to_none=True) to the optimizer's step"
                )
            parameter.grad = gradient
        self.kept = [
            parameter for parameter, noted in self.gradients if noted is not None and parameter.grad is not None
        ]


def _noted(gradient: Tensor | None) -> _Gradient | None:
    return None if gradient is None else _Gradient(weakref.ref(gradient), version_of(gradient))
