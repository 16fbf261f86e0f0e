"""Retry a whole step: a snapshot of what it began with, without copies of what is large."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.compiled import dict_version
from lowtide._torch_private.generators import generator_key
from lowtide._torch_private.modules import buffers_of, parameters_of, submodules_of
from lowtide._torch_private.scaler import forget_unscaling
from lowtide._torch_private.subclasses import inner_tensor
from lowtide._torch_private.versions import version_of, versions_of
from lowtide.adaptive.attributes import AttributeSnapshot
from lowtide.errors import RescueError
from lowtide.runtime.module_state import named_modules_of
from lowtide.runtime.randomness import ProcessRandom, RandomState

__all__ = ["Contents", "RetryStep", "StepSnapshot"]


class RetryStep(Exception):  # noqa: N818  not an error: a request, raised through the step that it ends
    """The step has to be retried from its beginning."""


class Contents:
    """The modules, parameters, buffers and plain attributes of a model.

    They are listed in every step, which takes a millisecond and more, and are seldom others than in the step before: a
    dictionary's version counts what is put into it.
    """

    def __init__(self, model: nn.Module, last: Contents | None) -> None:
        modules = named_modules_of(model)
        self.parameters = [one for _, module in modules for one in parameters_of(module).values() if one is not None]
        self.buffers = [
            (prefix + name, buffers_of(module), name, buffer)
            for prefix, module in modules
            for name, buffer in buffers_of(module).items()
            if buffer is not None
        ]
        """Each with its whole name, and where its module has it."""
        self.attributes: AttributeSnapshot = AttributeSnapshot(
            [module for _, module in modules], last.attributes if last else None
        )
        kinds = (vars, submodules_of, parameters_of, buffers_of)
        self._dictionaries: list[dict[str, Any]] = [kind(module) for _, module in modules for kind in kinds]
        self._versions = list(map(dict_version, self._dictionaries))

    @property
    def current(self) -> bool:
        """Whether the model still has these."""
        return self._versions == list(map(dict_version, self._dictionaries)) and not self.attributes.has_tensors


class StepSnapshot:
    """What a step began with: generators, parameters, gradients, buffers, attributes, and the optimizers' states."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        changing: frozenset[str] | None,
        drawn: Iterable[torch.Generator] = (),
        known: Contents | None = None,
    ) -> None:
        """``changing`` names the buffers that earlier steps changed, which are copied; None: copy all of them.

        ``drawn`` are the generators, other than torch's default ones, that earlier steps drew from. ``known`` are the
        model's contents in the step before.
        """
        self.default_generators = ProcessRandom()
        self.generators = {generator_key(one): (one, one.get_state()) for one in drawn}
        """Generators that the step may draw from besides the default ones, and their states before it did."""
        self.drawn: set[int] = set()
        """The keys of those that the step did draw from."""
        self.contents = contents = known if known is not None and known.current else Contents(model, known)
        of_optimizers = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        self.parameters = list({id(one): one for one in [*contents.parameters, *of_optimizers]}.values())
        self.versions = versions_of(self.parameters)
        self.kept = [one for one in self.parameters if one.grad is not None]
        """Parameters with a gradient that the step has not been seen to drop."""
        gradients = [one.grad for one in self.kept if one.grad is not None]
        of_gradients = zip(map(weakref.ref, gradients), versions_of(gradients), strict=True)
        self.gradients = dict(zip(map(id, self.kept), of_gradients, strict=True))
        """The gradients that were there, weakly, and their versions, by the id of the parameter."""
        self.buffers = {whole: (buffer, version_of(buffer)) for whole, _, _, buffer in contents.buffers}
        self.copies = {
            name: inner_tensor(buffer).detach().cpu().clone()
            for name, (buffer, _) in self.buffers.items()
            if changing is None or name in changing
        }
        self.states = [(optimizer, set(map(id, optimizer.state))) for optimizer in optimizers]
        """The optimizers, and the ids of the parameters that they had states for."""
        self.begun: list[_Optimizer] = []
        """The optimizers that have begun to step."""

    # While the step runs.

    def drawn_from(self, generators: RandomState) -> None:
        """The step is about to draw from these generators."""
        for one, state in generators.states:
            key = generator_key(one)
            self.generators.setdefault(key, (one, state))
            self.drawn.add(key)

    def look_at_gradients(self) -> None:
        """Note which gradients the step has dropped, as ``zero_grad()`` does; call it where that is done by now."""
        self.kept = [parameter for parameter in self.kept if parameter.grad is not None]

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what an optimizer has apart from tensors that it writes into, such as a number of steps."""
        self.begun.append(_Optimizer(optimizer))

    def changed(self, *, compared: bool) -> frozenset[str]:
        """The names of the buffers that the step has changed.

        ``compared`` with their copies as well, which waits for the device: a batch norm writes into its buffers without
        a new version.
        """
        return frozenset(
            name
            for name, (buffer, version) in self.buffers.items()
            if version_of(buffer) != version
            or (compared and name in self.copies and not torch.equal(inner_tensor(buffer).cpu(), self.copies[name]))
        )

    # Afterwards.

    def restore(self, scalers: Iterable[torch.amp.GradScaler] = ()) -> None:
        """Restore everything; RescueError if something cannot be."""
        for parameter, version, now in zip(self.parameters, self.versions, versions_of(self.parameters), strict=True):
            if now != version:
                raise RescueError(
                    f"the step cannot be retried: it has changed a parameter of shape {tuple(parameter.shape)} before"
                    " it ran out of memory; start again from the last checkpoint"
                )
        if any(versions_of(one.tensors) != one.versions for one in self.begun):
            raise RescueError(
                "the step cannot be retried: its optimizer had begun to change its states when it ran out of memory;"
                " start again from the last checkpoint"
            )
        for one, state in self.generators.values():
            one.set_state(state)
        self.default_generators.restore()
        self.contents.attributes.restore()
        self._restore_buffers()
        self._restore_gradients()
        for optimizer, known in self.states:
            for new in [parameter for parameter in optimizer.state if id(parameter) not in known]:
                del optimizer.state[new]  # perhaps not finished; nothing was done with it yet
        for begun in reversed(self.begun):
            begun.restore()
        self.begun.clear()
        forget_unscaling(scalers, (optimizer for optimizer, _ in self.states))

    def _restore_buffers(self) -> None:
        for _, holder, name, buffer in self.contents.buffers:
            if holder.get(name) is not buffer:
                holder[name] = buffer  # the step had replaced it
        for name, (buffer, version) in self.buffers.items():
            if name in self.copies:
                with torch.inference_mode() if buffer.is_inference() else torch.no_grad():
                    inner_tensor(buffer).copy_(self.copies[name])
            elif version_of(buffer) != version:
                raise RescueError(
                    f"the step cannot be retried: it was the first to change the buffer {name!r}, of which there is no"
                    " copy; start again from the last checkpoint"
                )

    def _restore_gradients(self) -> None:
        self.look_at_gradients()
        kept = {id(parameter) for parameter in self.kept}
        for parameter in self.parameters:
            reference, version = self.gradients.get(id(parameter), (_nothing, 0))
            gradient = reference()
            if (gradient is None and id(parameter) in kept) or (
                gradient is not None and version_of(gradient) != version
            ):
                raise RescueError(
                    "the step cannot be retried: it has added to gradients that were there when it began; give the"
                    " whole step to run(), from zero_grad(set_to_none=True) to the optimizer's step"
                )
            parameter.grad = gradient
        self.kept = [one for one in self.parameters if one.grad is not None]


class _Optimizer:
    """What an optimizer had when it began to step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.states = [(key, state, state.copy()) for key, state in optimizer.state.items() if isinstance(state, dict)]
        """Each parameter's state, and what was in it."""
        self.groups = [
            {name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self.tensors = [one for _, _, values in self.states for one in values.values() if isinstance(one, Tensor)]
        self.versions = versions_of(self.tensors)

    def restore(self) -> None:
        """Restore all but the contents of the tensors."""
        for parameter, state, values in self.states:
            state.clear()
            state.update(values)
            self.optimizer.state[parameter] = state
        for group, options in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(options)


def _nothing() -> None:
    """No gradient."""
