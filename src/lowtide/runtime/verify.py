"""Prove a Policy on a model: run it with and without lowtide, and compare bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.errors import VerificationError
from lowtide.operators.calls import tensors_of
from lowtide.operators.kinds import LayerKind
from lowtide.policy import Policy
from lowtide.runtime.apply import apply
from lowtide.runtime.checked import bits
from lowtide.runtime.follower import Structure
from lowtide.runtime.limits import Limits
from lowtide.runtime.randomness import ProcessRandom
from lowtide.runtime.receipt import Receipt

__all__ = ["Verification", "verify"]

STEPS = 3
"""The first step profiles; the others do what the Policy says."""


class Verification(NamedTuple):
    """A run that was bitwise the same with and without lowtide."""

    compared: int
    """How many tensors were compared: the loss and every gradient, in every step, with checks and as in training."""
    receipt: Receipt
    """What lowtide did in the last step."""


def verify(
    model: nn.Module,
    policy: Policy,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    layers: str | None = None,
    limits: Limits | None = None,
) -> Verification:
    """Run ``model`` on ``batch`` with and without ``policy`` and compare loss and gradients bit by bit.

    ``batch`` is what the model is called with: a mapping of keywords, a tuple of arguments, or one argument. ``loss``
    makes a scalar of the output; by default its ``.loss``, or the sum of its first tensor. The model is restored,
    its gradients, buffers and random state included. Raises :class:`~lowtide.errors.VerificationError` with the names
    that differ.
    """
    before = _State(model)
    try:
        expected = [_step(model, batch, loss, before) for _ in range(STEPS)]
        different: list[str] = []
        known: Mapping[Structure, LayerKind] = {}
        for checked in (True, False):  # with every tensor checked, and then as in training
            handle = apply(model, policy, layers=layers, limits=limits, verify=checked, profiles=known)
            try:
                for step, values in enumerate(expected):
                    handle.receipt()
                    found = _step(model, batch, loss, before)
                    different += [
                        f"{name} in step {step}" for name in values if not _same(values[name], found.get(name))
                    ]
                known, receipt = handle.profiles, handle.receipt()
            finally:
                handle.remove()
    finally:
        before.restore()
    if different:
        shown = ", ".join(different[:8]) + (f" and {len(different) - 8} more" if len(different) > 8 else "")
        raise VerificationError(f"with the policy these differ from the same run without it: {shown}")
    return Verification(2 * sum(map(len, expected)), receipt)


class _State:
    """What a step changes: gradients, buffers, random numbers."""

    def __init__(self, model: nn.Module) -> None:
        self.gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self.random = ProcessRandom()

    def begin(self) -> None:
        """Restore it, without gradients."""
        self.restore()
        for parameter, _ in self.gradients:
            parameter.grad = None

    def restore(self) -> None:
        """Restore it."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)
        self.random.restore()


def _step(
    model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None, state: _State
) -> dict[str, Tensor | None]:
    state.begin()
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    value = loss(output) if loss is not None else _loss_of(output)
    value.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"the loss": value.detach().clone()} | {
        name: gradient.detach().clone() if gradient is not None else None for name, gradient in gradients.items()
    }


def _loss_of(output: Any) -> Tensor:
    value = getattr(output, "loss", None)
    if isinstance(value, Tensor):
        return value
    tensors = tensors_of(output)
    if not tensors:
        raise VerificationError(f"the model returned {type(output).__name__}; pass loss=, which makes a scalar of it")
    return tensors[0].float().sum()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(bits(one), bits(other))  # equal bits: NaN equals itself here
